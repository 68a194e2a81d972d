//! An extension of responses, for access logs.

use hapax_core::{FencingToken, OperationId};

/// A response extension: the source of a response on a protected route. The response to a request
/// that has no key and needs none is without it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct ResponseInfo {
    /// The operation id; `None` if the request was rejected before it had one.
    pub operation: Option<OperationId>,
    /// The source.
    pub by: ResponseSource,
}

/// A source of responses.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub enum ResponseSource {
    /// An execution.
    Execution {
        /// The fence of the execution.
        fence: FencingToken,
        /// The number of the execution of the record, from 1.
        attempt: u32,
    },
    /// An outcome was replayed.
    Replay,
    /// A rejection.
    Rejection,
}
