//! What a call gets instead of an answer.

use std::fmt;
use std::time::Duration;

use super::super::claim::ClaimError;
use crate::record::OutcomeClass;
use crate::value::ValueError;

/// Why a call of a function has no value to answer with. What each means for the caller is in the
/// table of [`functions`](crate::manual::functions).
///
/// Its `Debug` form shows errors, and no values. [`source`](std::error::Error::source) of `Failed` has
/// none, since its error may be of any type, `String` among them: match on it for its own chain.
#[derive(thiserror::Error)]
#[non_exhaustive]
pub enum RunError<T, E> {
    /// The work answered with an error.
    ///
    /// Final: an answer like any other, and what every later call gets. Retryable: call again, now
    /// or later. Unknown: call again, and the policy decides whether it executes.
    #[error("{error}")]
    Failed {
        /// Its error.
        error: E,
        /// What it means for the key.
        class: OutcomeClass,
        /// Whether an earlier call executed it; only of what is final.
        replayed: bool,
    },
    /// The key belongs to another request. Nothing was executed.
    ///
    /// The caller has used one key for two operations: a defect to be mended, never to be retried.
    #[error("the key was used for another request")]
    KeyReused,
    /// Another call is executing it. Nothing was executed by this one.
    ///
    /// Call again after `retry_after`, or let calls wait: [`InFlight::Wait`](crate::InFlight::Wait).
    #[error("another call with this key is executing")]
    InFlight {
        /// As long as the other has been at it, but no longer than its lease lasts; at least 1 s.
        retry_after: Duration,
    },
    /// An earlier execution may have taken effect, and the policy keeps it from running again until
    /// an operator or the hook says what happened. Nothing was executed.
    #[error("an earlier call may have taken effect: it is not executed again until that is known")]
    OutcomeUnknown,
    /// The work was done, but its lease had lapsed, and another execution took over or the record is
    /// gone. What it answered is not kept.
    ///
    /// Call again for the answer that counts. What this execution did beside it may have to be
    /// undone.
    #[error("another execution took over: what this one answered is not kept")]
    Superseded {
        /// What the work answered.
        result: Result<T, E>,
    },
    /// The work was done, by this call or an earlier one, and the store has not taken its answer
    /// yet. It is held back in this process and written when the store returns; if the process ends
    /// before, nobody knows.
    ///
    /// Whoever must not act on an answer that may be forgotten calls again; others take it.
    #[error("it was executed, but the store has not taken its answer yet")]
    Pending {
        /// What the work answered.
        result: Result<T, E>,
    },
    /// The work panicked: it may have taken effect. As [`OutcomeClass::Unknown`].
    #[error("the work panicked: it may have taken effect")]
    Panicked,
    /// The runtime shut down in the middle: it may have taken effect. The key is in flight until its
    /// lease lapses, then as [`OutcomeClass::Unknown`].
    #[error("the runtime shut down in the middle: it may have taken effect")]
    Interrupted,
    /// An earlier call executed it, and its answer could not be kept: too large, too deep, or its
    /// own `Serialize` failed. That call was answered; it is not executed again.
    #[error("it was executed before, and what it answered could not be kept: {why}")]
    NotRetained {
        /// What was in the way.
        why: String,
    },
    /// An earlier call executed it, and what was kept cannot be read here: of another type, of a
    /// later version, or written by something that is no function. It is not executed again.
    ///
    /// Deploy a type that can read it; nothing is lost meanwhile, until its retention ends.
    #[error("it was executed before, and what was kept of it ({format}) cannot be read: {why}")]
    Undecodable {
        /// The name of the format that it is in.
        format: String,
        /// What was in the way.
        why: String,
    },
    /// There is no claim, so nothing was executed.
    ///
    /// Call again, with the same key, when the store is back. [`ClaimError::UnknownScheme`] is not
    /// of that kind: the record is of a later version, or not of a function.
    #[error(transparent)]
    NotClaimed(#[from] ClaimError),
    /// The request cannot be written, so that it has no fingerprint: nothing was executed, and never
    /// will be.
    #[error("the request cannot be written")]
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

/// In the place of a value.
struct Hidden;

impl fmt::Debug for Hidden {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("..")
    }
}
