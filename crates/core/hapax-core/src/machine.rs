//! The state machine: one pure function that decides what becomes of a record.
//!
//! | | claim, same fingerprint | other fingerprint | renew, checkpoint | complete | release | abandon | operator |
//! | --- | --- | --- | --- | --- | --- | --- | --- |
//! | absent, expired | execute | execute | gone | gone | gone | gone | not found |
//! | released | execute | execute | gone | gone | recorded (own), gone | gone | not found |
//! | in flight, live | in flight | mismatch | write | done | released | unknown | refused unless forced |
//! | in flight, lapsed | by policy | mismatch | write | done | released | unknown | write |
//! | unknown | by policy | mismatch | lost | done | lost | recorded | write |
//! | done | replay | mismatch | lost | recorded (same), lost | lost | lost | refused to forget unless told |
//!
//! The holder's columns are for its own grant. Another grant of the same life: it was taken over,
//! *lost*. Another life, or nothing: nobody can tell any more, *gone*.
//!
//! A record whose owner is an execution of the claimer's own process is *in flight* for that claim,
//! lapsed, expired or unknown as it may be: its owner is known to be alive.
//!
//! *By policy*: the stricter of the record's [`OnUnknown`] and the claimer's own decides, so that
//! processes with different configurations never loosen each other's promise.

use std::fmt;
use std::time::Duration;

use bytes::Bytes;

use crate::clock::Timestamp;
use crate::fingerprint::{Fingerprint, FingerprintScheme};
use crate::record::{
    FencingToken, LeaseId, Notes, OnUnknown, Outcome, Record, RecordState, Terms, WriteId,
};
use crate::store::{Draft, Snapshot, Stamp, StoredRecord};

/// What somebody wants of a record.
#[derive(Clone, Debug)]
pub enum Event<'a> {
    /// To execute, or to hear what came of it.
    Claim(ClaimEvent<'a>),
    /// The holder of a grant acts.
    Owner(Owner, OwnerAction),
    /// A hook answered the question that the write `asked` announced.
    Reconciled {
        /// The tag of that write: an answer counts only while the cell bears it.
        announced: WriteId,
        /// The grant under which to execute, should it not have happened.
        lease_id: LeaseId,
        /// The claimer's terms, should it not have happened.
        terms: Terms,
        /// What the hook said.
        verdict: Verdict,
    },
    /// An operator decides.
    Resolve(Resolve),
}

/// A claim.
#[derive(Clone, Debug)]
pub struct ClaimEvent<'a> {
    /// The grant to take it with.
    pub lease_id: LeaseId,
    /// Grants this very claim used before: finding one means that it owns the key.
    pub own_lease_ids: &'a [LeaseId],
    /// How the fingerprint was made.
    pub scheme: &'a FingerprintScheme,
    /// What is asked.
    pub fingerprint: &'a Fingerprint,
    /// Under which terms.
    pub terms: Terms,
    /// The operation as operators see it.
    pub description: Option<&'a Bytes>,
    /// Whether the claimer has a hook to ask, and when.
    pub hook: Option<HookTiming>,
    /// Whether it may ask now. A claim that waited for another one's question does not ask again.
    pub may_reconcile: bool,
    /// Executions and claims of this key that are under way in the claimer's own process.
    pub local: &'a [LocalExecution],
}

/// An execution, or a claim that may become one, under way in the claimer's own process. Its lease
/// may have lapsed by the store's clock: its owner is alive nevertheless.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct LocalExecution {
    /// Its grant.
    pub lease_id: LeaseId,
    /// Whether its claim was answered, so that it executes.
    pub executes: bool,
}

/// When a hook may be asked about an operation whose outcome is unknown.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct HookTiming {
    /// How long after a lapse: as long as a request that the dead owner sent may still run.
    pub after: Duration,
    /// How long an answer may take, before another claim may ask as well.
    pub timeout: Duration,
}

/// Who holds a record.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Owner {
    /// Its grant.
    pub lease_id: LeaseId,
    /// The life it was granted in.
    pub generation: LeaseId,
}

/// What a holder does. Its `Debug` form shows no contents.
#[derive(Clone, PartialEq, Eq)]
pub enum OwnerAction {
    /// Extends the lease to `lease` from now.
    Renew {
        /// How long.
        lease: Duration,
    },
    /// Saves a recovery point, and renews.
    Checkpoint(Bytes),
    /// It happened: keeps the outcome.
    Complete {
        /// The answer to replay.
        outcome: Outcome,
        /// For how long, if not as the terms say.
        retention: Option<Duration>,
    },
    /// It may have happened.
    Abandon {
        /// What was seen, if anything.
        seen: Option<Outcome>,
    },
    /// It did not happen: the next claim may execute.
    Release,
}

impl fmt::Debug for OwnerAction {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Renew { lease } => write!(f, "Renew({lease:?})"),
            Self::Checkpoint(bytes) => write!(f, "Checkpoint({} bytes)", bytes.len()),
            Self::Complete { outcome, retention } => {
                write!(f, "Complete({outcome:?}, {retention:?})")
            }
            Self::Abandon { seen } => write!(f, "Abandon({seen:?})"),
            Self::Release => f.write_str("Release"),
        }
    }
}

/// Verdict about an earlier execution: the answer of a hook. `T` is the outcome in the form that
/// the integration has it.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Verdict<T = Outcome> {
    /// The operation happened, with this outcome.
    Happened(T),
    /// The operation did not happen, and never will under the fence of the question: the retry
    /// executes.
    DidNotHappen,
    /// The hook cannot find out yet: the retry is answered that the outcome is unknown.
    CannotSay,
}

/// What an operator does.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Resolve {
    /// The fence the operator saw: what changed since is not touched.
    pub expected: FencingToken,
    /// Even if it is in flight and its lease is live.
    pub force: bool,
    /// Even if it is done, and this has it happen again. It is not `force`: what was in flight when
    /// the operator looked may be done now, under the same fence.
    pub forget: bool,
    /// What it is to be.
    pub resolution: Resolution,
    /// Who decided, when, from where and why: for the record.
    pub note: Option<Bytes>,
}

/// What an operator says of an operation.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Resolution {
    /// It happened, and this is the answer.
    Happened(Outcome),
    /// It did not happen: the next claim may execute.
    DidNotHappen,
}

/// What is to be done. Which event may lead to which step is said at each.
#[derive(Clone, PartialEq, Eq, Debug)]
#[must_use = "a step that is not taken changes nothing"]
pub enum Step {
    /// Claim, answer: write this; once stored, the claimer owns the key and executes.
    Execute(Draft),
    /// Claim: an earlier copy of this claim was stored; write this, and execute.
    Own(Draft),
    /// Claim: write this; once stored, ask the hook.
    Reconcile(Draft),
    /// Claim: answer with this.
    Replay(Outcome),
    /// Claim: somebody else is executing.
    InFlight {
        /// For how long it has been.
        elapsed: Duration,
        /// For how long its lease lasts.
        remaining: Duration,
    },
    /// Claim: the key belongs to another request.
    Mismatch,
    /// Claim: the fingerprint must be made by this scheme to be compared.
    Rehash(FingerprintScheme),
    /// Claim: it may have happened, and it must not run again.
    Unknown {
        /// When the claimer's hook may be asked, from now; `None` where no hook will be.
        reconcile_in: Option<Duration>,
    },
    /// Holder, answer, operator: write this.
    Write(Draft),
    /// Holder, operator: it is written already.
    Recorded,
    /// Holder: taken over by another grant; what it did was not recorded and never will be.
    Lost,
    /// Holder: the record of its life is gone; nobody can tell whether it was recorded.
    Gone,
    /// Operator: there is nothing.
    NotFound,
    /// Operator: in flight and live, and not forced; or done, and not to be forgotten.
    Rejected,
    /// Answer, operator: it is no longer what was asked about.
    Changed,
}

/// Where a cell stands at the moment it was seen.
enum Standing<'a> {
    Absent,
    Released(&'a StoredRecord),
    Live(&'a StoredRecord),
    Lapsed(&'a StoredRecord),
    Unknown(&'a StoredRecord, UnknownState<'a>),
    Done(&'a StoredRecord, &'a Outcome),
}

#[derive(Clone, Copy)]
struct UnknownState<'a> {
    seen: &'a Option<Outcome>,
    reconciling: bool,
}

/// Decides what becomes of a record. Pure: no clock, no randomness, no I/O.
pub fn step(seen: &Snapshot, event: &Event<'_>) -> Step {
    let standing = standing(seen);
    match event {
        Event::Claim(event) => claim(seen, &standing, event),
        Event::Owner(owner, action) => by_owner(&standing, *owner, action),
        Event::Reconciled { announced, lease_id, terms, verdict } => {
            by_hook(&standing, *announced, *lease_id, *terms, verdict)
        }
        Event::Resolve(resolve) => by_operator(&standing, resolve),
    }
}

fn standing(seen: &Snapshot) -> Standing<'_> {
    let Some(stored) = &seen.stored else { return Standing::Absent };
    if stored.keep_until.is_some_and(|until| until <= seen.now) {
        return Standing::Absent;
    }
    match &stored.record.state {
        RecordState::Released => Standing::Released(stored),
        RecordState::InFlight if seen.now < stored.lease_until => Standing::Live(stored),
        RecordState::InFlight => Standing::Lapsed(stored),
        RecordState::Unknown { seen, reconciling } => {
            Standing::Unknown(stored, UnknownState { seen, reconciling: *reconciling })
        }
        RecordState::Done(outcome) => Standing::Done(stored, outcome),
    }
}

/// Returns whether the execution of the record that was seen, or of one that is missing, is under
/// way in the process of `local`, other than by the claims `mine`.
pub(crate) fn runs_here(
    seen: &Snapshot,
    local: &[LocalExecution],
    own_lease_ids: &[LeaseId],
) -> bool {
    match &seen.stored {
        Some(StoredRecord { record: Record { lease_id, state, .. }, .. }) => {
            matches!(state, RecordState::InFlight | RecordState::Unknown { .. })
                && local.iter().any(|local| local.lease_id == *lease_id)
                && !own_lease_ids.contains(lease_id)
        }
        // Expired, and removed. A claim that is not answered yet may find the same.
        None => local.iter().any(|local| local.executes),
    }
}

fn claim(seen: &Snapshot, standing: &Standing<'_>, event: &ClaimEvent<'_>) -> Step {
    let now = seen.now;
    let runs_here = runs_here(seen, event.local, event.own_lease_ids);
    let stored = match standing {
        Standing::Absent if runs_here => match &seen.stored {
            Some(stored) => stored,
            None => {
                let remaining = event.terms.lease;
                return Step::InFlight { elapsed: Duration::ZERO, remaining };
            }
        },
        Standing::Absent => return Step::Execute(first(event, 1)),
        Standing::Released(stored) => {
            let mut draft = first(event, stored.record.attempt.saturating_add(1));
            // It stays to be seen by whose decision the key is executed again.
            draft.record.notes.decision.clone_from(&stored.record.notes.decision);
            return Step::Execute(draft);
        }
        Standing::Live(stored)
        | Standing::Lapsed(stored)
        | Standing::Unknown(stored, _)
        | Standing::Done(stored, _) => *stored,
    };
    if stored.record.scheme != *event.scheme {
        return Step::Rehash(stored.record.scheme.clone());
    }
    if stored.record.fingerprint != *event.fingerprint {
        return Step::Mismatch;
    }
    let in_flight = matches!(stored.record.state, RecordState::InFlight);
    if in_flight && event.own_lease_ids.contains(&stored.record.lease_id) {
        return Step::Own(renewed(&stored.record, event.terms.lease));
    }
    let busy = Step::InFlight {
        elapsed: now.since(stored.fence.issued_at()),
        remaining: stored.lease_until.since(now),
    };
    match standing {
        Standing::Done(_, outcome) => Step::Replay((*outcome).clone()),
        _ if runs_here => busy,
        Standing::Live(_) => busy,
        Standing::Lapsed(_) => {
            let from = event.hook.map(|hook| stored.lease_until.after(hook.after));
            by_policy(now, stored, &None, from, event)
        }
        Standing::Unknown(_, state) => {
            // Whoever asks holds the lease; when nobody does, there is nothing to wait for.
            let from = if state.reconciling { stored.lease_until } else { now };
            by_policy(now, stored, state.seen, Some(from), event)
        }
        Standing::Absent | Standing::Released(_) => Step::Execute(first(event, 1)),
    }
}

fn by_policy(
    now: Timestamp,
    stored: &StoredRecord,
    seen: &Option<Outcome>,
    reconcile_from: Option<Timestamp>,
    event: &ClaimEvent<'_>,
) -> Step {
    match stored.record.terms.on_unknown.max(event.terms.on_unknown) {
        OnUnknown::Block => Step::Unknown { reconcile_in: None },
        OnUnknown::Reexecute => Step::Execute(takeover(stored, event.lease_id, event.terms)),
        OnUnknown::Reconcile => match (event.hook, reconcile_from) {
            (Some(hook), Some(from)) if from <= now && event.may_reconcile => {
                Step::Reconcile(Draft {
                    record: Record {
                        state: RecordState::Unknown { seen: seen.clone(), reconciling: true },
                        ..stored.record.clone()
                    },
                    // The grant stays: the owner's own late outcome still counts.
                    stamp: Stamp::Keep,
                    lease: hook.timeout,
                    keep: keep_unfinished(&stored.record.terms)
                        .map(|keep| keep.saturating_add(hook.timeout)),
                })
            }
            (_, from) => {
                Step::Unknown { reconcile_in: event.hook.and(from).map(|from| from.since(now)) }
            }
        },
    }
}

fn by_owner(standing: &Standing<'_>, owner: Owner, action: &OwnerAction) -> Step {
    let stored = match standing {
        Standing::Absent => return Step::Gone,
        Standing::Released(stored)
            if stored.record.lease_id == owner.lease_id && *action == OwnerAction::Release =>
        {
            return Step::Recorded;
        }
        Standing::Released(_) => return Step::Gone,
        Standing::Live(stored)
        | Standing::Lapsed(stored)
        | Standing::Unknown(stored, _)
        | Standing::Done(stored, _) => *stored,
    };
    let record = &stored.record;
    if record.lease_id != owner.lease_id {
        return if record.generation == owner.generation { Step::Lost } else { Step::Gone };
    }
    match (standing, action) {
        (Standing::Live(_) | Standing::Lapsed(_), OwnerAction::Renew { lease }) => {
            Step::Write(renewed(record, *lease))
        }
        (Standing::Live(_) | Standing::Lapsed(_), OwnerAction::Checkpoint(bytes)) => {
            let record = Record { checkpoint: Some(bytes.clone()), ..record.clone() };
            Step::Write(renewed(&record, record.terms.lease))
        }
        (Standing::Live(_) | Standing::Lapsed(_), OwnerAction::Release) => {
            Step::Write(released(record))
        }
        (Standing::Live(_) | Standing::Lapsed(_), OwnerAction::Abandon { seen }) => {
            Step::Write(unknown(record, seen.clone()))
        }
        (
            Standing::Live(_) | Standing::Lapsed(_) | Standing::Unknown(..),
            OwnerAction::Complete { outcome, retention },
        ) => Step::Write(done(record, outcome, *retention)),
        // It says already that nobody knows; whoever asks must find the tag it left.
        (Standing::Unknown(..), OwnerAction::Abandon { .. }) => Step::Recorded,
        (
            Standing::Unknown(..),
            OwnerAction::Renew { .. } | OwnerAction::Checkpoint(_) | OwnerAction::Release,
        ) => Step::Lost,
        (Standing::Done(_, kept), OwnerAction::Complete { outcome, .. }) if *kept == outcome => {
            Step::Recorded
        }
        (Standing::Done(..), _) => Step::Lost,
        (Standing::Absent | Standing::Released(_), _) => Step::Gone,
    }
}

fn by_hook(
    standing: &Standing<'_>,
    announced: WriteId,
    lease_id: LeaseId,
    terms: Terms,
    verdict: &Verdict,
) -> Step {
    let Standing::Unknown(stored, state) = standing else { return Step::Changed };
    if stored.write_id != announced {
        return Step::Changed;
    }
    match verdict {
        Verdict::Happened(outcome) => Step::Write(done(&stored.record, outcome, None)),
        Verdict::DidNotHappen => Step::Execute(takeover(stored, lease_id, terms)),
        Verdict::CannotSay => Step::Write(unknown(&stored.record, state.seen.clone())),
    }
}

fn by_operator(standing: &Standing<'_>, resolve: &Resolve) -> Step {
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
    let mut record = stored.record.clone();
    if resolve.note.is_some() {
        record.notes.decision.clone_from(&resolve.note);
    }
    match (standing, &resolve.resolution) {
        (Standing::Live(_), _) if !resolve.force => Step::Rejected,
        (Standing::Done(..), Resolution::DidNotHappen) if !resolve.forget => Step::Rejected,
        (_, Resolution::DidNotHappen) => Step::Write(released(&record)),
        (Standing::Done(_, kept), Resolution::Happened(outcome)) if *kept == outcome => {
            Step::Recorded
        }
        (Standing::Done(..), Resolution::Happened(_)) => Step::Changed,
        (_, Resolution::Happened(outcome)) => Step::Write(done(&record, outcome, None)),
    }
}

/// The first execution of a life.
fn first(event: &ClaimEvent<'_>, attempt: u32) -> Draft {
    Draft {
        record: Record {
            scheme: event.scheme.clone(),
            fingerprint: *event.fingerprint,
            lease_id: event.lease_id,
            generation: event.lease_id,
            attempt,
            terms: event.terms,
            checkpoint: None,
            notes: Notes { description: event.description.cloned(), decision: None },
            state: RecordState::InFlight,
        },
        stamp: Stamp::NextFence,
        lease: event.terms.lease,
        keep: keep_unfinished(&event.terms),
    }
}

/// A further execution in the same life, under the stricter of both terms.
fn takeover(stored: &StoredRecord, lease_id: LeaseId, terms: Terms) -> Draft {
    let terms = Terms { on_unknown: terms.on_unknown.max(stored.record.terms.on_unknown), ..terms };
    Draft {
        record: Record {
            lease_id,
            attempt: stored.record.attempt.saturating_add(1),
            terms,
            state: RecordState::InFlight,
            ..stored.record.clone()
        },
        stamp: Stamp::NextFence,
        lease: terms.lease,
        keep: keep_unfinished(&terms),
    }
}

fn renewed(record: &Record, lease: Duration) -> Draft {
    Draft {
        record: Record { state: RecordState::InFlight, ..record.clone() },
        stamp: Stamp::Keep,
        lease,
        keep: keep_unfinished(&record.terms).map(|keep| keep.max(lease)),
    }
}

fn done(record: &Record, outcome: &Outcome, retention: Option<Duration>) -> Draft {
    let terms = Terms { retention: retention.unwrap_or(record.terms.retention), ..record.terms };
    Draft {
        record: Record {
            terms,
            checkpoint: None,
            state: RecordState::Done(outcome.clone()),
            ..record.clone()
        },
        stamp: Stamp::Keep,
        lease: Duration::ZERO,
        keep: Some(terms.retention),
    }
}

fn unknown(record: &Record, seen: Option<Outcome>) -> Draft {
    Draft {
        record: Record {
            state: RecordState::Unknown { seen, reconciling: false },
            ..record.clone()
        },
        stamp: Stamp::Keep,
        lease: Duration::ZERO,
        keep: keep_unfinished(&record.terms),
    }
}

fn released(record: &Record) -> Draft {
    Draft {
        record: Record { checkpoint: None, state: RecordState::Released, ..record.clone() },
        stamp: Stamp::Keep,
        lease: Duration::ZERO,
        keep: Some(record.terms.lease),
    }
}

/// Returns how long a record without an outcome is kept. Under `Block` and `Reconcile` it is kept
/// until an operator or a hook decides: once it expired, the next claim would execute unasked.
fn keep_unfinished(terms: &Terms) -> Option<Duration> {
    (terms.on_unknown == OnUnknown::Reexecute).then_some(terms.retention)
}
