//! Errors of calls.

use std::fmt;
use std::time::Duration;

use super::super::claim::ClaimError;
use crate::record::OutcomeClass;
use crate::value::ValueError;

/// Errors of a call of a function. The table of [`functions`](crate::manual::functions) has their
/// meanings for the caller.
///
/// The `Debug` form shows errors, and no values. [`source`](std::error::Error::source) of `Failed`
/// returns `None`, since its error may have any type, such as `String`: match on it for its own
/// chain.
#[derive(thiserror::Error)]
#[non_exhaustive]
pub enum RunError<T, E> {
    /// The operation returned an error.
    ///
    /// Final: an outcome like any other, and the result of every later call. Retryable: call again,
    /// now or later. Unknown: call again, and the policy decides whether it executes.
    #[error("{error}")]
    Failed {
        /// The error of the operation.
        error: E,
        /// Class of the error.
        class: OutcomeClass,
        /// True if an earlier call executed it; only for a final error.
        replayed: bool,
    },
    /// The key belongs to another request. Nothing was executed.
    ///
    /// The caller has used one key for two operations: fix this defect, do not retry.
    #[error("the key belongs to another request")]
    KeyReused,
    /// Another call with this key is executing. This one executed nothing.
    ///
    /// Call again after `retry_after`, or make calls wait:
    /// [`InFlight::Wait`](crate::InFlight::Wait).
    #[error("another call with this key is executing: retry later")]
    InFlight {
        /// Time for which the other call has been executing, but no longer than the rest of its
        /// lease; at least 1 s.
        retry_after: Duration,
    },
    /// An earlier execution may have taken effect, and the policy blocks another one until an
    /// operator or the hook decides. Nothing was executed.
    #[error("an earlier call may have taken effect: nothing is executed until that is known")]
    OutcomeUnknown,
    /// The operation executed, but its lease had lapsed, and another execution took over or the
    /// record is gone. The result is not stored.
    ///
    /// Call again for the result that counts. The effects of this execution may have to be undone.
    #[error("another execution took over: the result of this one is not stored; retry")]
    Superseded {
        /// Result of the operation.
        result: Result<T, E>,
    },
    /// The operation executed, in this call or an earlier one, and the store has not accepted its
    /// outcome yet. The outcome is a deferred write of this process, written when the store
    /// returns. If the process ends before, the outcome is unknown.
    ///
    /// If the caller must not act on an outcome that may be lost, it calls again; otherwise it uses
    /// the result.
    #[error("the operation executed, but the store has not accepted its outcome yet")]
    Pending {
        /// Result of the operation.
        result: Result<T, E>,
    },
    /// The operation panicked: it may have taken effect. Same as [`OutcomeClass::Unknown`].
    #[error("the operation panicked: it may have taken effect")]
    Panicked,
    /// An earlier call executed the operation and returned its result, but the result could not be
    /// stored: it was too large or too deep, or its `Serialize` failed. The operation is not
    /// executed again.
    #[error("an earlier call executed the operation, but its result could not be stored: {why}")]
    NotRetained {
        /// Reason.
        why: String,
    },
    /// An earlier call executed the operation, but its outcome cannot be read: it has another type,
    /// is of a later version, or was not written by a function. The operation is not executed
    /// again.
    ///
    /// Deploy a type that can read the outcome; it is stored until its retention ends.
    #[error(
        "an earlier call executed the operation, but its outcome ({format}) cannot be read: {why}"
    )]
    Undecodable {
        /// Name of the outcome's format.
        format: String,
        /// Reason.
        why: String,
    },
    /// The claim failed, so nothing was executed.
    ///
    /// Call again with the same key when the store is available. This does not help against
    /// [`ClaimError::UnknownScheme`]: the record is of a later version, or not of a function.
    #[error(transparent)]
    NotClaimed(#[from] ClaimError),
    /// The request cannot be serialized, so it has no fingerprint. Nothing was executed, and a
    /// retry does not help.
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
            Self::NotRetained { why } => f.debug_struct("NotRetained").field("why", why).finish(),
            Self::Undecodable { format, why } => {
                f.debug_struct("Undecodable").field("format", format).field("why", why).finish()
            }
            Self::NotClaimed(error) => f.debug_tuple("NotClaimed").field(error).finish(),
            Self::Request(error) => f.debug_tuple("Request").field(error).finish(),
        }
    }
}

/// Replacement of a value in `Debug` forms.
struct Hidden;

impl fmt::Debug for Hidden {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("..")
    }
}
