//! A response extension for access logs.

use hapax_core::{FencingToken, OperationId};

/// A response extension: the source of the response to a request of a protected route. A response
/// to a request that has no key and needs none has no such extension.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct ResponseInfo {
    /// The operation id; `None` if the request was rejected before it had one.
    pub operation: Option<OperationId>,
    /// The source of the response.
    pub by: ResponseSource,
}

/// The sources of responses.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub enum ResponseSource {
    /// The request was executed.
    Execution {
        /// The fence of the execution.
        fence: FencingToken,
        /// Number of the execution within its record, from 1.
        attempt: u32,
    },
    /// An outcome was replayed.
    Replay,
    /// The request was rejected with a problem.
    Rejection,
}
