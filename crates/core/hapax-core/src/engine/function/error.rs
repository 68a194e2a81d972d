//! Errors of calls.

use std::fmt;
use std::time::Duration;

use super::super::claim::ClaimError;
use crate::record::OutcomeClass;
use crate::value::ValueError;

/// Errors of a call of a function. The table of [`functions`](crate::manual::functions) states what
/// each means for the caller.
///
/// Its `Debug` form shows errors, and no values. [`source`](std::error::Error::source) of `Failed`
/// is `None`, since its error may have any type, such as `String`: match on it for its own chain.
#[derive(thiserror::Error)]
#[non_exhaustive]
pub enum RunError<T, E> {
    /// The operation returned an error.
    ///
    /// Final: every later call gets it too. Retryable: call again, now or later. Unknown: call
    /// again, and the policy decides whether it executes.
    #[error("{error}")]
    Failed {
        /// The error of the operation.
        error: E,
        /// Its class.
        class: OutcomeClass,
        /// True if an earlier call executed; only for a final error.
        replayed: bool,
    },
    /// The key belongs to another request. Nothing was executed.
    ///
    /// The caller has used one key for two operations, which is a defect of the caller: do not
    /// retry.
    #[error("the key belongs to another request")]
    KeyReused,
    /// Another call is executing. Nothing was executed by this one.
    ///
    /// Call again after `retry_after`, or let calls wait:
    /// [`InFlight::Wait`](crate::InFlight::Wait).
    #[error("another call with this key is executing")]
    InFlight {
        /// The time for which the other has been executing, but no longer than its lease lasts; at
        /// least 1 s.
        retry_after: Duration,
    },
    /// An earlier execution may have taken effect, and the policy does not execute again before an
    /// operator or the hook decides. Nothing was executed.
    #[error(
        "an earlier call may have taken effect: nothing executes before an operator or a hook decides"
    )]
    OutcomeUnknown,
    /// The operation was executed, but its lease had lapsed, and another execution took over or the
    /// record is gone. This result is not recorded.
    ///
    /// Call again for the recorded one. The effects of this execution may have to be compensated.
    #[error("another execution took over: this result is not recorded")]
    Superseded {
        /// The result of the operation.
        result: Result<T, E>,
    },
    /// The operation was executed, by this call or an earlier one, and the store has not accepted
    /// its outcome yet. The write is deferred in this process until the store returns; if the
    /// process ends before, the outcome is unknown.
    ///
    /// Call again if a result that may be lost must not be used.
    #[error("the operation was executed, and the store has not accepted its outcome yet")]
    Pending {
        /// The result of the operation.
        result: Result<T, E>,
    },
    /// The operation panicked: it may have taken effect. Counts as [`OutcomeClass::Unknown`].
    #[error("the operation panicked: it may have taken effect")]
    Panicked,
    /// The runtime shut down during the execution, which may have taken effect. The key is in
    /// flight until its lease lapses, then counts as [`OutcomeClass::Unknown`].
    #[error("the runtime shut down during the execution: it may have taken effect")]
    Interrupted,
    /// An earlier call executed, and its value could not be stored: too large, too deep, or its
    /// `Serialize` failed. That call got its value; the operation does not execute again.
    #[error("the operation was executed before, and its value could not be stored: {why}")]
    NotRetained {
        /// The cause.
        why: String,
    },
    /// An earlier call executed, and its stored value cannot be decoded here: it has another type,
    /// a later version, or is no function's. The operation does not execute again.
    ///
    /// Deploy a type that can decode it; until the end of its retention nothing is lost.
    #[error(
        "the operation was executed before, and its stored value ({format}) cannot be decoded: {why}"
    )]
    Undecodable {
        /// The name of its format.
        format: String,
        /// The cause.
        why: String,
    },
    /// The claim failed, so nothing was executed.
    ///
    /// Call again, with the same key, when the store is back. [`ClaimError::UnknownScheme`] is
    /// different: the record has a later version, or is no function's.
    #[error(transparent)]
    NotClaimed(#[from] ClaimError),
    /// The request cannot be serialized, so it has no fingerprint: nothing was executed, and never
    /// will be.
    #[error("the request cannot be serialized")]
    Request(#[source] ValueError),
}

impl<T, E: fmt::Debug> fmt::Debug for RunError<T, E> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Failed { error, class, replayed } => f
                .debug_struct("Failed")
                .field("error", error)
                .field("class", class)
                .field("replayed", replayed)
                .finish(),
            Self::KeyReused => f.write_str("KeyReused"),
            Self::InFlight { retry_after } => {
                f.debug_struct("InFlight").field("retry_after", retry_after).finish()
            }
            Self::OutcomeUnknown => f.write_str("OutcomeUnknown"),
            Self::Superseded { result } => {
                f.debug_tuple("Superseded").field(&result.as_ref().map(|_| Hidden)).finish()
            }
            Self::Pending { result } => {
                f.debug_tuple("Pending").field(&result.as_ref().map(|_| Hidden)).finish()
            }
            Self::Panicked => f.write_str("Panicked"),
            Self::Interrupted => f.write_str("Interrupted"),
            Self::NotRetained { why } => f.debug_struct("NotRetained").field("why", why).finish(),
            Self::Undecodable { format, why } => {
                f.debug_struct("Undecodable").field("format", format).field("why", why).finish()
            }
            Self::NotClaimed(error) => f.debug_tuple("NotClaimed").field(error).finish(),
            Self::Request(error) => f.debug_tuple("Request").field(error).finish(),
        }
    }
}

/// A placeholder for a value.
struct Hidden;

impl fmt::Debug for Hidden {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("..")
    }
}
