//! A mark on responses, for those who log them.

use hapax_core::{FencingToken, OperationId};

/// A response extension: the way in which the layer answered a request of a protected route. A
/// request that has no key and needs none gets a response without it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct ResponseInfo {
    /// The name of scope and key; `None` where the request was rejected before it had one.
    pub operation: Option<OperationId>,
    /// The way.
    pub by: ResponseSource,
}

/// A way to answer a request.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub enum ResponseSource {
    /// It was executed.
    Execution {
        /// The fencing token of the execution.
        fence: FencingToken,
        /// Its number among those of the record, from 1.
        attempt: u32,
    },
    /// An outcome was replayed.
    Replay,
    /// It was rejected by a problem.
    Rejection,
}
