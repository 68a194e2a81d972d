//! Exchanges with a store, without I/O: which [`Swap`] to send, and what a reply means.
//!
//! An exchange returns a swap to send and takes the definite reply to it, until it is
//! [`Next::Ready`]. The engine and the simulator run the same code. A swap that is given up while
//! its result is ambiguous may still be applied.

mod completion;
mod executions;
mod ownership;
mod unretried;

use std::sync::Arc;
use std::time::Duration;

pub use completion::{CommitStatus, Completion};
pub use executions::Executions;
pub use ownership::Ownership;

use self::executions::ExecutionEntry;
use crate::clock::Timestamp;
use crate::entropy::{Entropy, EntropyError};
use crate::fingerprint::{Fingerprint, FingerprintScheme};
use crate::machine::{
    Amendment, ClaimEvent, ClaimQuarantine, Event, HookTiming, Owner, Resolve, Step, Verdict, step,
};
use crate::record::{FencingToken, LeaseId, Outcome, Record, RecordState, Terms, WriteId};
use crate::scope::OperationId;
use crate::store::{Draft, Snapshot, Stamped, StoredRecord, Swap, Swapped};

/// Conflicts in a row after which an exchange gives up. Each means that another write came first.
pub const MAX_CONFLICTS: u32 = 16;

/// Next step of an exchange.
#[derive(Debug)]
#[must_use]
pub enum Next<T> {
    /// Send this swap until its reply is definite.
    Send(Swap),
    /// The exchange is over.
    Ready(T),
}

/// Request for a claim.
#[derive(Clone, Debug)]
pub struct ClaimRequest {
    /// Scheme of the fingerprint.
    pub scheme: FingerprintScheme,
    /// Fingerprint of the request.
    pub fingerprint: Fingerprint,
    /// Lease, retention and policy of the execution.
    pub terms: Terms,
    /// Settle time, as in [`Policy`](crate::Policy).
    pub settle: Option<Duration>,
    /// Timing of the reconcile hook, if there is one.
    pub hook: Option<HookTiming>,
    /// True if the hook may be called now.
    pub may_reconcile: bool,
    /// Executions in progress in this process.
    pub executions: Executions,
    /// The operation as operators see it.
    pub description: Option<bytes::Bytes>,
    /// Time for which a release keeps the number of attempts; at least the lease.
    pub keep_released: Duration,
    /// True if the claim continues an existing record, and creates none.
    pub adopts: bool,
    /// The quarantine of the key. With one, the claim must begin at a record that was loaded
    /// ([`ClaimExchange::start_at`]).
    pub quarantine: Option<ClaimQuarantine>,
}

/// Result of a claim.
#[derive(Debug)]
pub enum ClaimResult {
    /// The claim owns the key.
    Execute(Ownership),
    /// The operation is done, with this outcome.
    Replay(Replay),
    /// Another execution is in flight.
    InFlight {
        /// Time since it began.
        elapsed: Duration,
        /// Time until its lease lapses.
        remaining: Duration,
    },
    /// The key belongs to another request.
    Mismatch,
    /// The record has this scheme: call [`ClaimExchange::rehashed`] with its fingerprint.
    Rehash(FingerprintScheme),
    /// The operation may have happened, and must not execute again.
    Unknown {
        /// Time until the hook may be called; `None` without a hook.
        reconcile_in: Option<Duration>,
    },
    /// Call the hook about this fence, then [`ClaimExchange::reconciled`] with its verdict.
    Reconcile(FencingToken),
    /// The store may have lost the record of the key.
    Quarantined {
        /// Time after which another claim may succeed.
        remaining: Duration,
    },
    /// The record that was to be adopted is gone.
    NotFound,
    /// [`MAX_CONFLICTS`] in a row: nothing was claimed.
    Contended,
}

/// Stored outcome for a retry.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Replay {
    /// The outcome.
    pub outcome: Outcome,
    /// Fence of the execution that produced it.
    pub fence: FencingToken,
    /// Time until it expires; `None` if never, or if that is unknown.
    pub expires_in: Option<Duration>,
    /// The same as a time of the store's clock.
    pub expires_at: Option<Timestamp>,
    /// True if the store has not accepted it yet, so that a crash of this process loses it.
    pub deferred: bool,
}

/// Purpose of the swap in progress.
#[derive(Clone, Copy, Debug)]
enum Intent {
    Execute,
    Announce,
    Conclude,
}

/// A claim in progress.
#[derive(Debug)]
pub struct ClaimExchange {
    key: OperationId,
    claim: ClaimRequest,
    /// Fingerprints by the schemes of earlier requests to rehash. Their number is bounded by that of the
    /// schemes in the records that were seen.
    rehashed: Vec<(FingerprintScheme, Fingerprint)>,
    own_lease_ids: Vec<LeaseId>,
    /// Entries of the own leases that may be in the store.
    entered: Vec<Arc<ExecutionEntry>>,
    intent: Intent,
    sent: Option<(WriteId, Draft)>,
    seen: Snapshot,
    conflicts: u32,
}

impl ClaimExchange {
    /// Begins a claim that expects no record, so that a first request needs one round trip.
    ///
    /// # Errors
    /// [`EntropyError`]; nothing was sent.
    pub fn start(
        key: OperationId,
        claim: ClaimRequest,
        entropy: &dyn Entropy,
    ) -> Result<(Self, Next<ClaimResult>), EntropyError> {
        Self::start_at(key, claim, Snapshot { now: Timestamp::default(), stored: None }, entropy)
    }

    /// Begins a claim that expects the record that was just loaded.
    ///
    /// # Errors
    /// [`EntropyError`]; nothing was sent.
    pub fn start_at(
        key: OperationId,
        claim: ClaimRequest,
        seen: Snapshot,
        entropy: &dyn Entropy,
    ) -> Result<(Self, Next<ClaimResult>), EntropyError> {
        let mut this = Self {
            key,
            claim,
            rehashed: Vec::new(),
            own_lease_ids: Vec::new(),
            entered: Vec::new(),
            intent: Intent::Execute,
            sent: None,
            seen,
            conflicts: 0,
        };
        let next = this.decide(entropy)?;
        Ok((this, next))
    }

    /// Takes the definite reply to the swap that was sent.
    ///
    /// # Errors
    /// [`EntropyError`]; the claim is over, and owns only what earlier replies contain.
    pub fn receive(
        &mut self,
        swapped: Swapped,
        entropy: &dyn Entropy,
    ) -> Result<Next<ClaimResult>, EntropyError> {
        match swapped {
            Swapped::Stored(stamped) => {
                let Some(stored) = self.landed(stamped) else { return self.decide(entropy) };
                Ok(Next::Ready(match (self.intent, &stored.record.state) {
                    (Intent::Execute, _) => {
                        let ownership = self.ownership(stamped.now, stored);
                        self.unregister();
                        ClaimResult::Execute(ownership.executes())
                    }
                    (Intent::Announce, _) => {
                        let fence = stored.fence;
                        self.seen = Snapshot { now: stamped.now, stored: Some(stored) };
                        ClaimResult::Reconcile(fence)
                    }
                    (Intent::Conclude, RecordState::Done(outcome)) => {
                        // The claim executes nothing: a late copy of an earlier swap of it, which
                        // lands once the record is gone, is not an execution of this process.
                        self.unregister();
                        ClaimResult::Replay(replay(outcome.clone(), stamped.now, &stored))
                    }
                    (Intent::Conclude, _) => {
                        self.unregister();
                        self.seen = Snapshot { now: stamped.now, stored: Some(stored) };
                        // The verdict was `CannotSay`: the hook may be called again at once.
                        ClaimResult::Unknown { reconcile_in: Some(Duration::ZERO) }
                    }
                }))
            }
            Swapped::Conflict(seen) => {
                self.seen = seen;
                self.sent = None;
                self.conflicts += 1;
                if self.conflicts > MAX_CONFLICTS {
                    return Ok(match self.owned() {
                        Some(ownership) => Next::Ready(ClaimResult::Execute(ownership.executes())),
                        None => Next::Ready(ClaimResult::Contended),
                    });
                }
                self.decide(entropy)
            }
        }
    }

    /// Takes the fingerprint by the scheme of [`ClaimResult::Rehash`].
    ///
    /// # Errors
    /// [`EntropyError`]; nothing was sent.
    pub fn rehashed(
        &mut self,
        scheme: FingerprintScheme,
        fingerprint: Fingerprint,
        entropy: &dyn Entropy,
    ) -> Result<Next<ClaimResult>, EntropyError> {
        let scheme = std::mem::replace(&mut self.claim.scheme, scheme);
        let fingerprint = std::mem::replace(&mut self.claim.fingerprint, fingerprint);
        self.rehashed.push((scheme, fingerprint));
        self.decide(entropy)
    }

    /// Takes the hook's verdict for [`ClaimResult::Reconcile`]. If the record changed meanwhile,
    /// the verdict does not count, and the claim continues with the new record.
    ///
    /// # Errors
    /// [`EntropyError`]; nothing was sent, and the next claim calls the hook again.
    pub fn reconciled(
        &mut self,
        verdict: Verdict,
        entropy: &dyn Entropy,
    ) -> Result<Next<ClaimResult>, EntropyError> {
        let Some(announced) = self.seen.stored.as_ref().map(|stored| stored.write_id) else {
            return self.decide(entropy);
        };
        let lease_id = LeaseId::fresh(entropy)?;
        let ClaimRequest { terms, settle, .. } = self.claim;
        let description = self.claim.description.as_ref();
        let event = Event::Reconciled { announced, lease_id, terms, settle, description, verdict };
        match step(&self.seen, &event) {
            Step::Write(draft) => self.send(Intent::Conclude, draft, entropy),
            Step::Execute(draft) => self.send(Intent::Execute, draft, entropy),
            _ => self.decide(entropy),
        }
    }

    /// Takes a definite reply that arrives after the claim was given up. Returns the ownership that
    /// the claim has nevertheless, and that must be released.
    #[must_use = "what is not released blocks its key for a lease, or for ever"]
    pub fn receive_late(&mut self, swapped: Swapped) -> Option<Ownership> {
        let owned = match swapped {
            Swapped::Stored(stamped) => {
                let stored = self.landed(stamped)?;
                matches!(self.intent, Intent::Execute).then(|| self.ownership(stamped.now, stored))
            }
            Swapped::Conflict(seen) => {
                self.seen = seen;
                self.owned()
            }
        };
        self.unregister();
        owned
    }

    /// Returns the ownership that an earlier swap of this claim stored. A claim that ends before
    /// its last swap was sent owns it nevertheless, and must release it.
    #[must_use = "what is not released blocks its key for a lease, or for ever"]
    pub fn owned(&self) -> Option<Ownership> {
        let stored = self.seen.stored.as_ref()?;
        let is_own = self.own_lease_ids.contains(&stored.record.lease_id);
        (is_own && stored.record.state == RecordState::InFlight)
            .then(|| self.ownership(self.seen.now, stored.clone()))
    }

    fn ownership(&self, now: Timestamp, stored: StoredRecord) -> Ownership {
        let Record { lease_id, generation, attempt, terms, .. } = stored.record;
        Ownership {
            key: self.key,
            owner: Owner { lease_id, generation },
            fence: stored.fence,
            attempt,
            terms,
            keep_released: self.claim.keep_released,
            entered: self.entered.iter().find(|entry| entry.lease_id() == lease_id).cloned(),
            seen: Snapshot { now, stored: Some(stored) },
        }
    }

    /// Returns whether the store has a record, so that the key was requested before.
    #[must_use]
    pub const fn has_seen_record(&self) -> bool {
        self.seen.stored.is_some()
    }

    /// Returns the operation id that is claimed.
    #[must_use]
    pub const fn id(&self) -> &OperationId {
        &self.key
    }

    /// Returns the quarantine by which the claim is decided.
    #[must_use]
    pub const fn quarantine(&self) -> Option<ClaimQuarantine> {
        self.claim.quarantine
    }

    /// Sets the quarantine by which the claim is decided from now on; `None` if there is none.
    pub const fn set_quarantine(&mut self, quarantine: Option<ClaimQuarantine>) {
        self.claim.quarantine = quarantine;
    }

    /// Returns the latest snapshot; before the first reply, an absent record at time 0.
    #[must_use]
    pub const fn seen(&self) -> &Snapshot {
        &self.seen
    }

    fn decide(&mut self, entropy: &dyn Entropy) -> Result<Next<ClaimResult>, EntropyError> {
        let lease_id = LeaseId::fresh(entropy)?;
        let local = self.claim.executions.of(&self.key);
        let asked = ClaimEvent {
            lease_id,
            own_lease_ids: &self.own_lease_ids,
            scheme: &self.claim.scheme,
            fingerprint: &self.claim.fingerprint,
            rehashed: &self.rehashed,
            terms: self.claim.terms,
            settle: self.claim.settle,
            hook: self.claim.hook,
            may_reconcile: self.claim.may_reconcile,
            local: &local,
            description: self.claim.description.as_ref(),
            adopts: self.claim.adopts,
            quarantine: self.claim.quarantine,
        };
        let claimed = match step(&self.seen, &Event::Claim(asked)) {
            Step::Execute(draft) | Step::Own(draft) => {
                return self.send(Intent::Execute, draft, entropy);
            }
            Step::Reconcile(draft) => return self.send(Intent::Announce, draft, entropy),
            Step::Replay(outcome) => match &self.seen.stored {
                Some(stored) => ClaimResult::Replay(replay(outcome, self.seen.now, stored)),
                None => ClaimResult::Contended,
            },
            Step::InFlight { elapsed, remaining } => ClaimResult::InFlight { elapsed, remaining },
            Step::Mismatch => ClaimResult::Mismatch,
            Step::Rehash(scheme) => ClaimResult::Rehash(scheme),
            Step::Unknown { reconcile_in } => ClaimResult::Unknown { reconcile_in },
            Step::Quarantined { remaining } => ClaimResult::Quarantined { remaining },
            Step::NotFound => ClaimResult::NotFound,
            // A claim never leads to these steps.
            Step::Write(_)
            | Step::Recorded
            | Step::Lost
            | Step::Gone
            | Step::Rejected
            | Step::MayExecute { .. }
            | Step::Saga
            | Step::Changed => ClaimResult::Contended,
        };
        // Every swap has a reply, and the record has none of its lease ids. After a rehash it may
        // yet find one.
        if !matches!(claimed, ClaimResult::Rehash(_)) {
            self.unregister();
        }
        Ok(Next::Ready(claimed))
    }

    fn send(
        &mut self,
        intent: Intent,
        draft: Draft,
        entropy: &dyn Entropy,
    ) -> Result<Next<ClaimResult>, EntropyError> {
        let write_id = WriteId::fresh(entropy)?;
        if matches!(intent, Intent::Execute) && !self.own_lease_ids.contains(&draft.record.lease_id)
        {
            // Entered before it is sent: a claim that finds it in the store finds it here too.
            self.entered.push(self.claim.executions.enter(self.key, draft.record.lease_id));
            self.own_lease_ids.push(draft.record.lease_id);
        }
        self.intent = intent;
        self.sent = Some((write_id, draft.clone()));
        Ok(Next::Send(Swap { id: self.key, expected: write_id_of(&self.seen), write_id, draft }))
    }

    fn landed(&mut self, stamped: Stamped) -> Option<StoredRecord> {
        self.sent.take().map(|(write_id, draft)| stored_record(write_id, draft, stamped))
    }
}

/// Result of an owner's or an operator's write.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum WriteResult {
    /// The write is stored; this is the record where known.
    Recorded(Snapshot),
    /// Owner: taken over. The write is not stored, and never will be.
    Lost,
    /// Owner: the record of its generation is gone. The write may have been stored before.
    Gone,
    /// Operator, call of a hook, amendment: there is no record.
    NotFound,
    /// Operator, call of a hook: as [`Step::Rejected`].
    Rejected,
    /// Operator, call of a hook: as [`Step::MayExecute`].
    MayExecute {
        /// The time.
        until: Timestamp,
    },
    /// Operator: the record is that of a saga.
    Saga,
    /// Operator, call of a hook, amendment: the record has changed since it was read.
    Changed,
    /// [`MAX_CONFLICTS`] in a row: nothing was written.
    Contended,
}

/// Result of an operator's write, and the record that it was about.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Resolved {
    /// Result of the write.
    pub result: WriteResult,
    /// The record that [`WriteResult::Recorded`] replaced, or that prevented the write.
    pub was: Snapshot,
}

/// A write in progress: an owner's, an operator's, or about the call of a hook.
#[derive(Debug)]
pub struct WriteExchange {
    key: OperationId,
    event: Event<'static>,
    sent: Option<(WriteId, Draft)>,
    seen: Snapshot,
    conflicts: u32,
}

impl WriteExchange {
    /// Begins an operator's write on a snapshot that was loaded.
    ///
    /// # Errors
    /// [`EntropyError`]; nothing was sent.
    pub fn resolve(
        key: OperationId,
        seen: Snapshot,
        resolve: Resolve,
        entropy: &dyn Entropy,
    ) -> Result<(Self, Next<WriteResult>), EntropyError> {
        Self::start(key, seen, Event::Resolve(resolve), entropy)
    }

    /// Begins an amendment of the record that was loaded.
    ///
    /// # Errors
    /// [`EntropyError`]; nothing was sent.
    pub fn amend(
        key: OperationId,
        seen: Snapshot,
        amendment: Amendment,
        entropy: &dyn Entropy,
    ) -> Result<(Self, Next<WriteResult>), EntropyError> {
        Self::start(key, seen, Event::Amend(amendment), entropy)
    }

    fn start(
        key: OperationId,
        seen: Snapshot,
        event: Event<'static>,
        entropy: &dyn Entropy,
    ) -> Result<(Self, Next<WriteResult>), EntropyError> {
        let mut this = Self { key, event, sent: None, seen, conflicts: 0 };
        let next = this.decide(entropy)?;
        Ok((this, next))
    }

    /// Returns the snapshot that the last decision was about, as [`into_seen`](Self::into_seen).
    #[must_use]
    pub const fn seen(&self) -> &Snapshot {
        &self.seen
    }

    /// Returns the snapshot that the last swap replaces.
    #[must_use]
    pub fn into_seen(self) -> Snapshot {
        self.seen
    }

    /// Takes the definite reply to the swap that was sent.
    ///
    /// # Errors
    /// [`EntropyError`]; only what earlier replies contain was written.
    pub fn receive(
        &mut self,
        swapped: Swapped,
        entropy: &dyn Entropy,
    ) -> Result<Next<WriteResult>, EntropyError> {
        match swapped {
            Swapped::Stored(stamped) => match self.sent.take() {
                Some((write_id, draft)) => {
                    let stored = Some(stored_record(write_id, draft, stamped));
                    Ok(Next::Ready(WriteResult::Recorded(Snapshot { now: stamped.now, stored })))
                }
                None => self.decide(entropy),
            },
            Swapped::Conflict(seen) => {
                self.seen = seen;
                self.sent = None;
                self.conflicts += 1;
                if self.conflicts > MAX_CONFLICTS {
                    return Ok(Next::Ready(WriteResult::Contended));
                }
                self.decide(entropy)
            }
        }
    }

    fn decide(&mut self, entropy: &dyn Entropy) -> Result<Next<WriteResult>, EntropyError> {
        let wrote = match step(&self.seen, &self.event) {
            Step::Write(draft) => {
                let write_id = WriteId::fresh(entropy)?;
                self.sent = Some((write_id, draft.clone()));
                let expected = write_id_of(&self.seen);
                return Ok(Next::Send(Swap { id: self.key, expected, write_id, draft }));
            }
            Step::Recorded => WriteResult::Recorded(self.seen.clone()),
            Step::Lost => WriteResult::Lost,
            Step::Gone => WriteResult::Gone,
            Step::NotFound => WriteResult::NotFound,
            Step::Rejected => WriteResult::Rejected,
            Step::MayExecute { until } => WriteResult::MayExecute { until },
            Step::Saga => WriteResult::Saga,
            Step::Changed => WriteResult::Changed,
            // An owner's or operator's event never leads to these steps.
            Step::Execute(_)
            | Step::Own(_)
            | Step::Reconcile(_)
            | Step::Replay(_)
            | Step::InFlight { .. }
            | Step::Mismatch
            | Step::Rehash(_)
            | Step::Quarantined { .. }
            | Step::Unknown { .. } => WriteResult::Contended,
        };
        Ok(Next::Ready(wrote))
    }
}

fn write_id_of(seen: &Snapshot) -> Option<WriteId> {
    seen.stored.as_ref().map(|stored| stored.write_id)
}

fn stored_record(write_id: WriteId, draft: Draft, stamped: Stamped) -> StoredRecord {
    StoredRecord {
        write_id,
        fence: stamped.fence,
        lease_until: stamped.lease_until,
        keep_until: draft.keep.map(|keep| stamped.now.after(keep)),
        record: draft.record,
    }
}

fn replay(outcome: Outcome, now: Timestamp, stored: &StoredRecord) -> Replay {
    let expires_at = stored.keep_until;
    let expires_in = expires_at.map(|until| until.since(now));
    Replay { outcome, fence: stored.fence, expires_in, expires_at, deferred: false }
}
