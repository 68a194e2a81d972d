//! Changes of a record by another process than its owner's: decisions of operators, and amendments.

use std::fmt;
use std::time::Duration;

use bytes::Bytes;

use super::{Standing, Step, done, may_execute_until, released, renewed};
use crate::clock::Timestamp;
use crate::record::{FencingToken, LeaseId, Outcome, WriteId};

/// Decision of an operator.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Resolve {
    /// Fence that the operator saw: a record that changed since is not changed.
    pub expected: FencingToken,
    /// Also decides a record in flight with a live lease, and one whose request
    /// [may still execute](may_execute_until).
    pub force: bool,
    /// Also releases a record that is done, so that the operation executes again. It differs from
    /// `force`: a record that was in flight when the operator read it may be done now, under the
    /// same fence.
    pub forget: bool,
    /// The verdict.
    pub resolution: DefiniteVerdict,
    /// The decision: its operator, time, channel and reason; stored in the record.
    pub note: Option<Bytes>,
    /// With [`DefiniteVerdict::DidNotHappen`], counts attempts anew: the next execution is attempt 1. Otherwise
    /// the record keeps their number for as long as it is kept.
    pub restart: bool,
}

/// Verdict that an operator can give.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum DefiniteVerdict {
    /// The operation happened, with this outcome.
    Happened(Outcome),
    /// The operation did not happen: the next claim may execute.
    DidNotHappen,
}

/// Change of an in-flight record by another process than its owner. Its `Debug` form shows no
/// contents.
#[derive(Clone, PartialEq, Eq)]
pub struct Amendment {
    /// Write id of the record that was read: a record that changed since is not changed.
    pub expected: WriteId,
    /// The new checkpoint, if it changes.
    pub checkpoint: Option<Bytes>,
    /// The duration of the lease from now; with zero the next claim takes over.
    pub lease: Duration,
}

impl fmt::Debug for Amendment {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Amendment")
            .field("expected", &self.expected)
            .field("checkpoint_bytes", &self.checkpoint.as_ref().map(Bytes::len))
            .field("lease", &self.lease)
            .finish()
    }
}

pub(super) fn by_operator(now: Timestamp, standing: &Standing<'_>, resolve: &Resolve) -> Step {
    let stored = match standing {
        Standing::Absent | Standing::Released(_) => return Step::NotFound,
        Standing::Live(stored)
        | Standing::Lapsed(stored)
        | Standing::Unknown(stored, _)
        | Standing::Done(stored, _) => *stored,
    };
    if stored.fence != resolve.expected {
        return Step::Changed;
    }
    // An unfinished saga is decided by its log. One that has ended can be forgotten like any operation.
    let forgets = resolve.forget && resolve.resolution == DefiniteVerdict::DidNotHappen;
    if stored.record.scheme.is_saga() && !(forgets && matches!(standing, Standing::Done(..))) {
        return Step::Saga;
    }
    let may_execute = may_execute_until(stored).filter(|until| now < *until);
    let mut record = stored.record.clone();
    if resolve.note.is_some() {
        record.notes.decision.clone_from(&resolve.note);
    }
    match (standing, &resolve.resolution) {
        (Standing::Live(_), _) if !resolve.force => Step::Rejected,
        (Standing::Done(..), DefiniteVerdict::DidNotHappen) if !resolve.forget => Step::Rejected,
        (_, DefiniteVerdict::DidNotHappen) => match may_execute {
            Some(until) if !resolve.force => Step::MayExecute { until },
            _ => {
                if resolve.restart {
                    record.attempt = 0;
                }
                Step::Write(released(&record, Duration::ZERO))
            }
        },
        (Standing::Done(_, kept), DefiniteVerdict::Happened(outcome)) if *kept == outcome => {
            Step::Recorded
        }
        (Standing::Done(..), DefiniteVerdict::Happened(_)) => Step::Changed,
        (_, DefiniteVerdict::Happened(outcome)) => Step::Write(done(&record, outcome, None)),
    }
}

pub(super) fn amend(standing: &Standing<'_>, amendment: &Amendment) -> Step {
    let Amendment { expected, checkpoint, lease } = amendment;
    match standing {
        Standing::Absent | Standing::Released(_) => Step::NotFound,
        Standing::Live(stored) | Standing::Lapsed(stored) if stored.write_id == *expected => {
            let mut record = stored.record.clone();
            // The owner may repeat its write that parked the record, because it got no reply. That must not
            // replace the amendment: the record gets a lease id that no claim has, the expected write id.
            record.lease_id = LeaseId::from_bytes(*expected.as_bytes());
            if checkpoint.is_some() {
                record.checkpoint.clone_from(checkpoint);
            }
            Step::Write(renewed(&record, *lease))
        }
        Standing::Live(_) | Standing::Lapsed(_) | Standing::Unknown(..) | Standing::Done(..) => {
            Step::Changed
        }
    }
}
