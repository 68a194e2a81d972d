//! What an operator may count.
//!
//! A trait of one method, not a metrics facade: a facade's recorder is global, so that two layers
//! of a process, or two tests, could not be told apart, and every user would carry it. Each
//! exporter is a few lines on top.

use std::fmt;
use std::time::Duration;

use crate::classify::OutcomeClass;
use crate::problem::Code;

/// Something that happened to a request with a key, or without one that needs it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub enum RequestEvent {
    /// A handler ran and its outcome was decided.
    Executed {
        /// What its response means.
        class: OutcomeClass,
        /// Whether the store has it.
        recorded: RecordStatus,
        /// Which execution of the record it was, from 1.
        attempt: u32,
        /// How long the handler took, its response included.
        took: Duration,
    },
    /// A kept answer was given again.
    Replayed {
        /// For how long it is still kept, where that is known. Retries that come close to its end
        /// say that the retention is too short.
        expires_in: Option<Duration>,
    },
    /// An answer that is not a handler's.
    Rejected(Code),
    /// The store is away and the route is *open*: a handler runs unprotected.
    Unprotected,
    /// A response was too large, or streamed, and only its status is kept.
    NotRetained,
    /// A handler's override header had an invalid value and was ignored.
    InvalidOverride,
    /// A hook was asked about an unknown outcome.
    ReconcileStarted,
}

/// Whether the store has an outcome.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum RecordStatus {
    /// It has.
    Stored,
    /// It will, when it returns.
    Pending,
    /// It has not: another execution took over, so that it never will; or the record is gone, and
    /// nobody can tell whether it once had it. Either way nothing will be replayed from this
    /// execution, and the client is told `superseded`.
    Lost,
}

/// Hears of everything. Called on the path of requests: it counts, and returns. Its panics go to
/// the log, and change no answer.
pub trait Observer: fmt::Debug + Send + Sync + 'static {
    /// `route` is the name in the route's options.
    fn observe(&self, route: &str, event: RequestEvent);
}

/// Hears nothing.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct NoObserver;

impl Observer for NoObserver {
    fn observe(&self, _: &str, _: RequestEvent) {}
}
