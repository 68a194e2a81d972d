//! The state machine: one pure function that makes every decision about a record.
//!
//! | | claim, same fingerprint | other fingerprint | renew, checkpoint | complete | release, withdraw | abandon | operator |
//! | --- | --- | --- | --- | --- | --- | --- | --- |
//! | absent, expired | execute | execute | gone | gone | gone | gone | not found |
//! | released | execute | execute | gone | gone | recorded (own), gone | gone | not found |
//! | in flight, live | in flight | mismatch | write | done | released | unknown | rejected unless forced |
//! | in flight, lapsed | by policy | mismatch | write | done | released | unknown | happened: write; else: write once settled |
//! | unknown | by policy | mismatch | lost | done | lost | recorded | happened: write; else: write once settled |
//! | done | replay | mismatch | lost | recorded (same), lost | lost | lost | rejected unless `forget` |
//!
//! The owner's columns apply under its own lease id. Another lease id in the same generation means
//! that it was taken over: *lost*. With another generation, or no record, the result is unknown:
//! *gone*.
//!
//! A record whose owner executes in the claimer's own process is *in flight* for that claim, also
//! if the lease has lapsed, the record expired or the outcome is unknown: the owner is known to be
//! alive.
//!
//! An *amendment* changes an in-flight record without owning it: it writes a checkpoint, or ends a
//! lease, if the record has the write id that its author read. Its author must know from the
//! checkpoint that the owner has ended: what the owner writes afterwards is *lost*.
//!
//! *Withdraw* gives the attempt back. The record is released; if the withdrawn claim was a takeover,
//! the record has its former lease lapsed again, so that the next claim is a takeover too.
//!
//! A *redirect* releases the record and is stored in it as a field of the key. A claim with the fingerprint of the
//! redirected request replays the redirect in every state. A claim with another fingerprint follows the table, so the
//! request that was sent elsewhere executes under the same key. A released record with redirects is kept for its
//! retention.
//!
//! In a *quarantine* a claim that finds no record, or one that was released before its start, does not execute, unless
//! the key was made after its start: the store may have lost a record. Under [`OnUnknown::Reconcile`] the hook is called.
//!
//! *Once settled*: without `force` an operator's *did not happen* is rejected while the request
//! [may still execute](may_execute_until).
//!
//! *Without a retry* a hook is [announced](Announcement) for the undecided record of one execution, named by its fence,
//! and its verdict concludes it. This claims nothing, so nothing executes: after *did not happen* the key is released.
//!
//! *By policy*: the stricter of the record's [`OnUnknown`] and the claimer's decides, so a process with a laxer
//! configuration does not weaken the guarantee of another process.

mod draft;
mod operator;
mod quarantine;
mod release;
mod settle;
mod unretried;

use std::fmt;
use std::time::Duration;

use bytes::Bytes;

use self::draft::{Claimer, again, done, first, keep_unfinished, renewed, takeover, unknown};
pub use self::operator::{Amendment, DefiniteVerdict, Resolve};
use self::operator::{amend, by_operator};
pub use self::quarantine::ClaimQuarantine;
use self::quarantine::{after_lost_requests, quarantined};
use self::release::{fingerprint_by, redirect_of, redirected, released, withdrawn};
pub use self::settle::{SETTLE_MARGIN, may_execute_until};
pub use self::unretried::Announcement;
use self::unretried::{announce, called, denied_by_hook};
use crate::clock::Timestamp;
use crate::fingerprint::{Fingerprint, FingerprintScheme};
use crate::record::{LeaseId, OnUnknown, Outcome, Record, RecordState, Terms, WriteId};
use crate::store::{Draft, Snapshot, StoredRecord};

/// Event that may change a record.
#[derive(Clone, Debug)]
pub enum Event<'a> {
    /// A claim: to execute, or to get the outcome.
    Claim(ClaimEvent<'a>),
    /// An action of the owner of a lease.
    Owner(Owner, OwnerAction),
    /// The verdict of a hook that was called after the write `announced`.
    Reconciled {
        /// Write id of that write: the verdict counts only while the record has it.
        announced: WriteId,
        /// Lease id under which the claimer executes if the operation did not happen.
        lease_id: LeaseId,
        /// The claimer's terms, used if the operation did not happen.
        terms: Terms,
        /// The claimer's settle time, as in [`ClaimEvent`].
        settle: Option<Duration>,
        /// The claimer's description, as in [`ClaimEvent`].
        description: Option<&'a Bytes>,
        /// The verdict.
        verdict: Verdict,
    },
    /// A call of a hook without a retry: [`Step::Write`] announces it in the record.
    Announce(Announcement),
    /// The verdict of a hook that was called after the write `announced`, without a retry that could execute.
    Conclude {
        /// Write id of that write: the verdict counts only while the record has it.
        announced: WriteId,
        /// The verdict.
        verdict: Verdict,
        /// Decision that the record keeps if the operation did not happen.
        note: Option<Bytes>,
    },
    /// The decision of an operator.
    Resolve(Resolve),
    /// A change of an in-flight record whose owner has parked it.
    Amend(Amendment),
}

/// A claim.
#[derive(Clone, Debug)]
pub struct ClaimEvent<'a> {
    /// Lease id of the claim.
    pub lease_id: LeaseId,
    /// Lease ids that this claim used before: finding one means that it owns the key.
    pub own_lease_ids: &'a [LeaseId],
    /// Scheme of the fingerprint.
    pub scheme: &'a FingerprintScheme,
    /// Fingerprint of the request.
    pub fingerprint: &'a Fingerprint,
    /// Its fingerprints before each [`Step::Rehash`]. The first one has the claimer's own scheme.
    pub rehashed: &'a [(FingerprintScheme, Fingerprint)],
    /// Lease, retention and policy.
    pub terms: Terms,
    /// Time after a lapse in which a request that the claimer sends to another system may still
    /// execute there; `None` if it sends none.
    pub settle: Option<Duration>,
    /// Description of the operation for operators.
    pub description: Option<&'a Bytes>,
    /// Timing of the claimer's hook, if it has one.
    pub hook: Option<HookTiming>,
    /// True if the hook may be called now. A claim that waited for another call does not call
    /// again.
    pub may_reconcile: bool,
    /// Executions and claims of this key that are in progress in the claimer's process.
    pub local: &'a [LocalExecution],
    /// True if the claim continues an existing record, and creates none.
    pub adopts: bool,
    /// The quarantine of the key, if there is one.
    pub quarantine: Option<ClaimQuarantine>,
}

/// An execution, or a claim that may become one, in progress in the claimer's process. Its owner is
/// alive even if its lease has lapsed by the store's clock.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct LocalExecution {
    /// Its lease id.
    pub lease_id: LeaseId,
    /// True if its claim is decided, so that it executes.
    pub executes: bool,
}

/// Times at which a hook may be called about an operation whose outcome is unknown.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct HookTiming {
    /// Time after a lapse in which a request that the crashed owner sent may still execute.
    pub after: Duration,
    /// Time that a call may take, before another claim may call too.
    pub timeout: Duration,
}

/// The owner of a record.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Owner {
    /// Its lease id.
    pub lease_id: LeaseId,
    /// The generation of its claim.
    pub generation: LeaseId,
}

/// Action of an owner. Its `Debug` form shows no contents.
#[derive(Clone, PartialEq, Eq)]
pub enum OwnerAction {
    /// Extends the lease to `lease` from now.
    Renew {
        /// The new duration.
        lease: Duration,
    },
    /// Saves a checkpoint, and sets the lease.
    Checkpoint {
        /// The checkpoint.
        checkpoint: Bytes,
        /// The duration of the lease from now.
        lease: Duration,
    },
    /// Stores the outcome: the operation happened.
    Complete {
        /// The outcome to replay.
        outcome: Outcome,
        /// Its retention, if it differs from the terms.
        retention: Option<Duration>,
    },
    /// Marks the outcome as unknown: the operation may have happened.
    Abandon {
        /// The response that was seen, if any.
        seen: Option<Outcome>,
    },
    /// Releases the key: the operation did not happen, and the next claim may execute.
    Release {
        /// Time for which the record keeps the number of attempts; at least its lease.
        keep: Duration,
    },
    /// Releases the key: the request is to be repeated elsewhere. The record keeps the outcome for requests
    /// with this fingerprint, within the limits of [`Extensions::add_redirect`](crate::Extensions::add_redirect).
    Redirect {
        /// The outcome to replay.
        outcome: Outcome,
        /// As for [`OwnerAction::Release`].
        keep: Duration,
    },
    /// Withdraws the claim, which has executed nothing: it does not count as an attempt.
    Withdraw {
        /// As for [`OwnerAction::Release`].
        keep: Duration,
    },
}

impl fmt::Debug for OwnerAction {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Renew { lease } => write!(f, "Renew({lease:?})"),
            Self::Checkpoint { checkpoint, lease } => {
                write!(f, "Checkpoint({} bytes, {lease:?})", checkpoint.len())
            }
            Self::Complete { outcome, retention } => {
                write!(f, "Complete({outcome:?}, {retention:?})")
            }
            Self::Abandon { seen } => write!(f, "Abandon({seen:?})"),
            Self::Release { keep } => write!(f, "Release({keep:?})"),
            Self::Redirect { outcome, keep } => write!(f, "Redirect({outcome:?}, {keep:?})"),
            Self::Withdraw { keep } => write!(f, "Withdraw({keep:?})"),
        }
    }
}

/// The verdict of a hook about an earlier execution. `T` is the outcome in the form of the
/// integration.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Verdict<T = Outcome> {
    /// The operation happened, with this outcome.
    Happened(T),
    /// The operation did not happen, and never will under this fence: the retry executes.
    DidNotHappen,
    /// The hook cannot find out yet: the retry is answered that the outcome is unknown.
    CannotSay,
}

/// Step to take. Each variant names the events that lead to it.
#[derive(Clone, PartialEq, Eq, Debug)]
#[must_use = "a step that is not taken changes nothing"]
pub enum Step {
    /// Claim, verdict: write this; once stored, the claimer owns the key and executes.
    Execute(Draft),
    /// Claim: an earlier swap of this claim was stored; write this, and execute.
    Own(Draft),
    /// Claim: write this; once stored, call the hook.
    Reconcile(Draft),
    /// Claim: replay this outcome.
    Replay(Outcome),
    /// Claim: another execution is in flight.
    InFlight {
        /// Time since it began.
        elapsed: Duration,
        /// Time until its lease lapses.
        remaining: Duration,
    },
    /// Claim: the key belongs to another request.
    Mismatch,
    /// Claim: the fingerprint has to be computed by this scheme to be compared.
    Rehash(FingerprintScheme),
    /// Claim: the operation may have happened, and must not execute again.
    Unknown {
        /// Time until the claimer's hook may be called; `None` without a hook.
        reconcile_in: Option<Duration>,
    },
    /// Claim: the store may have lost the record of the key.
    Quarantined {
        /// Time after which another claim may succeed.
        remaining: Duration,
    },
    /// Owner, announcement, verdict, operator, amendment: write this.
    Write(Draft),
    /// Owner, operator: the record has this state already.
    Recorded,
    /// Owner: taken over under another lease id; its result was not stored and never will be.
    Lost,
    /// Owner: the record of its generation is gone; its result may have been stored before.
    Gone,
    /// Operator, announcement, amendment, claim that adopts: there is no record.
    NotFound,
    /// Operator: rejected, as the record is in flight or done and the decision does not force that. Announcement: the
    /// record is in flight, or its policy does not call a hook.
    Rejected,
    /// Operator: rejected, as the request may still execute until this time of the store's clock. Announcement: the hook
    /// may be called from this time.
    MayExecute {
        /// The time.
        until: Timestamp,
    },
    /// Operator: rejected, as the record is that of a saga, whose checkpoint would be lost.
    Saga,
    /// Announcement, verdict, operator, amendment: the record has changed since it was read.
    Changed,
}

/// Status of a record at the time of the snapshot.
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

/// Decides the next step of a record. Pure: no clock, no randomness, no I/O.
pub fn step(seen: &Snapshot, event: &Event<'_>) -> Step {
    let standing = standing(seen);
    match event {
        Event::Claim(event) => claim(seen, &standing, event),
        Event::Owner(owner, action) => by_owner(&standing, *owner, action),
        Event::Reconciled { announced, lease_id, terms, settle, description, verdict } => {
            let claimer = (*lease_id, *terms, *settle, *description);
            by_hook(&standing, *announced, verdict, Denied::Execute(claimer))
        }
        Event::Announce(announcement) => announce(seen.now, &standing, announcement),
        Event::Conclude { announced, verdict, note } => {
            by_hook(&standing, *announced, verdict, Denied::Release(note.as_ref()))
        }
        Event::Resolve(resolve) => by_operator(seen.now, &standing, resolve),
        Event::Amend(amendment) => amend(&standing, amendment),
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
        // Expired and removed. A claim without a decision yet may read the same.
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
        Standing::Absent | Standing::Released(_) if event.adopts => return Step::NotFound,
        Standing::Absent => {
            let quarantined = quarantined(now, None, event);
            return quarantined.unwrap_or_else(|| Step::Execute(first(event, 1)));
        }
        Standing::Released(stored) => {
            if let Some(step) = redirect_of(&stored.record, event) {
                return step;
            }
            let quarantined = quarantined(now, Some(stored), event);
            return quarantined.unwrap_or_else(|| Step::Execute(again(stored, event)));
        }
        Standing::Live(stored)
        | Standing::Lapsed(stored)
        | Standing::Unknown(stored, _)
        | Standing::Done(stored, _) => *stored,
    };
    if let Some(step) = redirect_of(&stored.record, event) {
        return step;
    }
    match fingerprint_by(&stored.record.scheme, event) {
        None => return Step::Rehash(stored.record.scheme.clone()),
        Some(fingerprint) if *fingerprint != stored.record.fingerprint => return Step::Mismatch,
        Some(_) => {}
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
            // The claim that calls the hook owns the lease; without one there is nothing to wait
            // for.
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
    let lost_until = |hook: HookTiming| {
        after_lost_requests(now, stored, event.quarantine, event.terms.lease, hook)
    };
    let reconcile_from = reconcile_from.map(|from| from.max(event.hook.map_or(now, lost_until)));
    match stored.record.terms.on_unknown.max(event.terms.on_unknown) {
        OnUnknown::Block => Step::Unknown { reconcile_in: None },
        OnUnknown::Reexecute => {
            let claimer = (event.lease_id, event.terms, event.settle, event.description);
            Step::Execute(takeover(stored, claimer))
        }
        OnUnknown::Reconcile => match (event.hook, reconcile_from) {
            (Some(hook), Some(from)) if from <= now && event.may_reconcile => {
                Step::Reconcile(called(stored, seen, hook))
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
            if stored.record.lease_id == owner.lease_id
                && matches!(
                    action,
                    OwnerAction::Release { .. }
                        | OwnerAction::Redirect { .. }
                        | OwnerAction::Withdraw { .. }
                ) =>
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
        (
            Standing::Live(_) | Standing::Lapsed(_),
            OwnerAction::Checkpoint { checkpoint, lease },
        ) => {
            let record = Record { checkpoint: Some(checkpoint.clone()), ..record.clone() };
            Step::Write(renewed(&record, *lease))
        }
        (Standing::Live(_) | Standing::Lapsed(_), OwnerAction::Release { keep }) => {
            Step::Write(released(record, *keep))
        }
        (Standing::Live(_) | Standing::Lapsed(_), OwnerAction::Redirect { outcome, keep }) => {
            Step::Write(redirected(record, outcome, *keep))
        }
        (Standing::Live(_) | Standing::Lapsed(_), OwnerAction::Withdraw { keep }) => {
            Step::Write(withdrawn(record, *keep))
        }
        (Standing::Live(_) | Standing::Lapsed(_), OwnerAction::Abandon { seen }) => {
            Step::Write(unknown(record, seen.clone()))
        }
        (
            Standing::Live(_) | Standing::Lapsed(_) | Standing::Unknown(..),
            OwnerAction::Complete { outcome, retention },
        ) => Step::Write(done(record, outcome, *retention)),
        // The state is unknown already; the claim that calls the hook has to find its write id.
        (Standing::Unknown(..), OwnerAction::Abandon { .. }) => Step::Recorded,
        (
            Standing::Unknown(..),
            OwnerAction::Renew { .. }
            | OwnerAction::Checkpoint { .. }
            | OwnerAction::Release { .. }
            | OwnerAction::Redirect { .. }
            | OwnerAction::Withdraw { .. },
        ) => Step::Lost,
        (Standing::Done(_, kept), OwnerAction::Complete { outcome, .. }) if *kept == outcome => {
            Step::Recorded
        }
        (Standing::Done(..), _) => Step::Lost,
        (Standing::Absent | Standing::Released(_), _) => Step::Gone,
    }
}

/// The step that follows from the verdict that an operation did not happen.
enum Denied<'a> {
    /// The claimer executes.
    Execute(Claimer<'a>),
    /// The key is released, with this decision.
    Release(Option<&'a Bytes>),
}

fn by_hook(
    standing: &Standing<'_>,
    announced: WriteId,
    verdict: &Verdict,
    denied: Denied<'_>,
) -> Step {
    let Standing::Unknown(stored, state) = standing else { return Step::Changed };
    if stored.write_id != announced {
        return Step::Changed;
    }
    match verdict {
        Verdict::Happened(outcome) => Step::Write(done(&stored.record, outcome, None)),
        Verdict::DidNotHappen => match denied {
            Denied::Execute(claimer) => Step::Execute(takeover(stored, claimer)),
            // The hook's promise is about this fence, and the next claim has a larger one.
            Denied::Release(note) => Step::Write(denied_by_hook(&stored.record, note)),
        },
        Verdict::CannotSay => Step::Write(unknown(&stored.record, state.seen.clone())),
    }
}
