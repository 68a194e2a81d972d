//! Calls of a hook without a retry. They claim nothing: no execution follows from them.
//!
//! A record with a checkpoint, and that of a saga, is reconciled by a retry only: *did not happen* releases a record,
//! and a released one has no checkpoint from which an execution could continue.

use std::time::Duration;

use bytes::Bytes;

use super::draft::keep_unfinished;
use super::quarantine::after_lost_requests;
use super::release::released;
use super::settle::{sent_until, with_end};
use super::{ClaimQuarantine, HookTiming, Standing, Step};
use crate::clock::Timestamp;
use crate::record::{FencingToken, OnUnknown, Outcome, Record, RecordState, Terms};
use crate::store::{Draft, Stamp, StoredRecord};

/// A call of a hook about an operation whose outcome is unknown, by a process that has no request for it.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Announcement {
    /// Fence of the execution that the hook is called about. If the record has another one, the operation was executed
    /// anew since it was listed, and what is known of the earlier execution is not about this one.
    pub expected: FencingToken,
    /// The terms of the caller's route. A hook is called only if they and those of the record are
    /// [`OnUnknown::Reconcile`].
    pub terms: Terms,
    /// Timing of the hook.
    pub hook: HookTiming,
    /// Time from the last write of an unknown record until the hook may be called: each call writes the record, so
    /// it is the shortest time between two calls, of any process.
    pub pause: Duration,
    /// The quarantine of the operation, if there is one.
    pub quarantine: Option<ClaimQuarantine>,
}

pub(super) fn announce(now: Timestamp, standing: &Standing<'_>, event: &Announcement) -> Step {
    let stored = match standing {
        Standing::Absent | Standing::Released(_) => return Step::NotFound,
        Standing::Live(stored)
        | Standing::Lapsed(stored)
        | Standing::Unknown(stored, _)
        | Standing::Done(stored, _) => *stored,
    };
    let Announcement { expected, terms, hook, pause, quarantine } = event;
    if stored.fence != *expected {
        return Step::Changed;
    }
    let (seen, from) = match standing {
        Standing::Lapsed(_) => (&None, stored.lease_until.after(hook.after)),
        // The lease is that of a call, or has ended with the last write.
        Standing::Unknown(_, state) => (state.seen, stored.lease_until.after(*pause)),
        Standing::Live(_) => return Step::Rejected,
        Standing::Absent | Standing::Released(_) | Standing::Done(..) => return Step::Changed,
    };
    let record = &stored.record;
    if [record.terms.on_unknown, terms.on_unknown] != [OnUnknown::Reconcile; 2] {
        return Step::Rejected;
    }
    // A release would drop the progress, and the next claim would begin anew. A retry continues from it.
    if record.checkpoint.is_some() || record.scheme.is_saga() {
        return Step::Rejected;
    }
    let from = from.max(sent_until(stored).unwrap_or(from)).max(after_lost_requests(
        now,
        stored,
        *quarantine,
        terms.lease,
        *hook,
    ));
    match now < from {
        true => Step::MayExecute { until: from },
        false => Step::Write(called(stored, seen, *hook)),
    }
}

/// Returns the record that announces a call of the hook.
pub(super) fn called(stored: &StoredRecord, seen: &Option<Outcome>, hook: HookTiming) -> Draft {
    Draft {
        record: Record {
            state: RecordState::Unknown { seen: seen.clone(), reconciling: true },
            extensions: with_end(stored),
            ..stored.record.clone()
        },
        // The lease id stays: the owner's own late outcome still counts.
        stamp: Stamp::Keep,
        lease: hook.timeout,
        keep: keep_unfinished(&stored.record.terms).map(|keep| keep.saturating_add(hook.timeout)),
    }
}

/// Returns the released record of an operation that a hook denied. It stays as long as an outcome: no client waits, and it
/// shows operators by which decision the key executes again.
pub(super) fn denied_by_hook(record: &Record, note: Option<&Bytes>) -> Draft {
    let mut record = record.clone();
    if note.is_some() {
        record.notes.decision = note.cloned();
    }
    released(&record, record.terms.retention)
}
