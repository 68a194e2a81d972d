//! Events that an operator may count.
//!
//! [`Observer`] is a trait with one method. A metrics facade has a global recorder: two layers of a
//! process, or two tests, would share it, and every user would depend on it. An exporter for the
//! trait needs a few lines.

use std::fmt;
use std::time::Duration;

use crate::classify::OutcomeClass;
use crate::problem::Code;

/// Event of a request with a key, or of one that lacks a required key.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub enum RequestEvent {
    /// A handler returned, and its outcome was decided.
    Executed {
        /// Class of its response.
        class: OutcomeClass,
        /// State of the outcome in the store.
        recorded: RecordStatus,
        /// Number of the execution within its record, from 1.
        attempt: u32,
        /// Time that the handler took, its response included.
        took: Duration,
    },
    /// A stored response was replayed.
    Replayed {
        /// Time until it expires, if known. Retries shortly before that show that the retention is
        /// too short.
        expires_in: Option<Duration>,
    },
    /// A problem was returned instead of a handler's response.
    Rejected(Code),
    /// The store is unavailable and the route is *open*: a handler executes unprotected.
    Unprotected,
    /// The method of a request with a key is not protected, and not safe: a handler executes unprotected.
    KeyIgnored,
    /// A response was too large, or streamed, and only its status is stored.
    NotRetained,
    /// A handler's override header had an invalid value and was ignored.
    InvalidOverride,
    /// A hook was called about an unknown outcome.
    ReconcileStarted,
    /// A request executes whose key and content a recent execution of another caller had, as this process
    /// remembers it: a token that was renewed between two tries, or two callers with equal keys.
    OtherCaller,
}

/// State of an outcome in the store.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum RecordStatus {
    /// The store has it.
    Stored,
    /// The write is deferred until the store is available.
    Pending,
    /// The store never gets it, since another execution took over; or the record is gone, and the
    /// outcome may have been stored before. This execution is not replayed, and the client gets
    /// `superseded`.
    Lost,
}

/// Observer of all events. It is called on the path of requests: it counts, and returns. A panic is
/// logged, and changes no response.
pub trait Observer: fmt::Debug + Send + Sync + 'static {
    /// Receives an event. `route` is the name in the route's options.
    fn observe(&self, route: &str, event: RequestEvent);
}

/// Observer that ignores every event.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct NoObserver;

impl Observer for NoObserver {
    fn observe(&self, _: &str, _: RequestEvent) {}
}
