//! Conversations with a store, without the store: what to send, and what an answer means.
//!
//! An exchange says which [`Swap`] to send and is told what became of it, until it is
//! [`Next::Ready`]. It does no I/O, so that the engine and the simulator run the same code.
//!
//! The rule for whoever carries the swaps: after [`StoreError::Ambiguous`] send *the same swap*
//! again, however often; tell the exchange only a definite answer. A swap that was given up while
//! ambiguous may still land, so it is sent on until it is known.
//!
//! [`StoreError::Ambiguous`]: crate::store::StoreError::Ambiguous

mod completion;
mod executions;

use std::sync::Arc;
use std::time::Duration;

pub use completion::{CommitStatus, Completion};
pub use executions::Executions;

use self::executions::ExecutionEntry;
use crate::clock::Timestamp;
use crate::entropy::{Entropy, EntropyError};
use crate::fingerprint::{Fingerprint, FingerprintScheme};
use crate::machine::{
    ClaimEvent, Event, HookTiming, Owner, OwnerAction, Resolve, Step, Verdict, step,
};
use crate::record::{FencingToken, LeaseId, Outcome, Record, RecordState, Terms, WriteId};
use crate::scope::OperationId;
use crate::store::{Draft, Snapshot, Stamped, StoredRecord, Swap, Swapped};

/// Conflicts in a row after which an exchange gives up. Each means that somebody else got ahead,
/// so a key on which this happens is hammered by many.
pub const MAX_CONFLICTS: u32 = 16;

/// What an exchange wants.
#[derive(Debug)]
#[must_use]
pub enum Next<T> {
    /// Send this, again and again until the answer is definite.
    Send(Swap),
    /// It is over.
    Ready(T),
}

/// What is claimed.
#[derive(Clone, Debug)]
pub struct ClaimRequest {
    /// How the fingerprint was made.
    pub scheme: FingerprintScheme,
    /// What is asked.
    pub fingerprint: Fingerprint,
    /// Under which terms.
    pub terms: Terms,
    /// Whether there is a hook to ask, and when.
    pub hook: Option<HookTiming>,
    /// Whether it may be asked now.
    pub may_reconcile: bool,
    /// The executions under way in the claimer's process.
    pub executions: Executions,
    /// The operation as operators see it.
    pub description: Option<bytes::Bytes>,
}

/// What came of a claim.
#[derive(Debug)]
pub enum ClaimResult {
    /// The claimer owns the key.
    Execute(Ownership),
    /// It is done, with this answer.
    Replay(Replay),
    /// Somebody else is executing.
    InFlight {
        /// For how long it has been.
        elapsed: Duration,
        /// For how long its lease lasts.
        remaining: Duration,
    },
    /// The key belongs to another request.
    Mismatch,
    /// Make the fingerprint by this scheme, and tell [`ClaimExchange::rehashed`].
    Rehash(FingerprintScheme),
    /// It may have happened, and must not run again.
    Unknown {
        /// When the hook may be asked, from now; `None` where no hook will be.
        reconcile_in: Option<Duration>,
    },
    /// Ask the hook about this fence, and tell [`ClaimExchange::reconciled`].
    Reconcile(FencingToken),
    /// [`MAX_CONFLICTS`] in a row: nothing is known, nothing was claimed.
    Contended,
}

/// A kept answer.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Replay {
    /// The answer.
    pub outcome: Outcome,
    /// The fence of the execution that gave it.
    pub fence: FencingToken,
    /// For how long it is still kept; `None` where that is for ever, or not known.
    pub expires_in: Option<Duration>,
    /// The same as a moment on the store's clock.
    pub expires_at: Option<Timestamp>,
    /// Whether it is still on its way to the store: it would be forgotten if this process died.
    pub deferred: bool,
}

/// What is being written, and why.
#[derive(Clone, Copy, Debug)]
enum Intent {
    Execute,
    Announce,
    Conclude,
}

/// A claim under way.
#[derive(Debug)]
pub struct ClaimExchange {
    key: OperationId,
    claim: ClaimRequest,
    own_lease_ids: Vec<LeaseId>,
    /// Those of `mine` that may be in the store and execute, or be released.
    entered: Vec<Arc<ExecutionEntry>>,
    intent: Intent,
    sent: Option<(WriteId, Draft)>,
    seen: Snapshot,
    conflicts: u32,
}

impl ClaimExchange {
    /// Begins a claim with a bet that the key is absent: a first request costs one trip.
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

    /// Begins a claim with a bet that the key is still as it was just seen.
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

    /// The definite answer to the swap that was sent.
    ///
    /// # Errors
    /// [`EntropyError`]; the claim is over and owns nothing that it was not told of.
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
                        let ownership =
                            Ownership::new(self.key, stamped.now, stored, &self.entered);
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
                        // The hook could not say: it may be asked again at once.
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

    /// The fingerprint, made by the scheme that [`ClaimResult::Rehash`] named.
    ///
    /// # Errors
    /// [`EntropyError`]; nothing was sent.
    pub fn rehashed(
        &mut self,
        scheme: FingerprintScheme,
        fingerprint: Fingerprint,
        entropy: &dyn Entropy,
    ) -> Result<Next<ClaimResult>, EntropyError> {
        self.claim.scheme = scheme;
        self.claim.fingerprint = fingerprint;
        self.decide(entropy)
    }

    /// What the hook said to [`ClaimResult::Reconcile`]. If the record changed meanwhile, the answer does
    /// not count, and the claim goes on with what is there now.
    ///
    /// # Errors
    /// [`EntropyError`]; nothing was sent, and whoever claims next asks again.
    pub fn reconciled(
        &mut self,
        verdict: Verdict,
        entropy: &dyn Entropy,
    ) -> Result<Next<ClaimResult>, EntropyError> {
        let Some(announced) = self.seen.stored.as_ref().map(|stored| stored.write_id) else {
            return self.decide(entropy);
        };
        let lease_id = LeaseId::fresh(entropy)?;
        let terms = self.claim.terms;
        match step(&self.seen, &Event::Reconciled { announced, lease_id, terms, verdict }) {
            Step::Write(draft) => self.send(Intent::Conclude, draft, entropy),
            Step::Execute(draft) => self.send(Intent::Execute, draft, entropy),
            _ => self.decide(entropy),
        }
    }

    /// For a claim that was given up after its last swap was sent: the definite answer to that
    /// swap, and with it what the claim owns after all and must release.
    #[must_use = "what is not released blocks its key for a lease, or for ever"]
    pub fn receive_late(&mut self, swapped: Swapped) -> Option<Ownership> {
        let owned = match swapped {
            Swapped::Stored(stamped) => {
                let stored = self.landed(stamped)?;
                matches!(self.intent, Intent::Execute)
                    .then(|| Ownership::new(self.key, stamped.now, stored, &self.entered))
            }
            Swapped::Conflict(seen) => {
                self.seen = seen;
                self.owned()
            }
        };
        self.unregister();
        owned
    }

    /// What an earlier copy of this claim's own swaps put there, as far as the claim has heard.
    ///
    /// A claim that ends without its last swap having been sent owns this nevertheless, and must
    /// release it.
    #[must_use = "what is not released blocks its key for a lease, or for ever"]
    pub fn owned(&self) -> Option<Ownership> {
        let stored = self.seen.stored.as_ref()?;
        let is_own = self.own_lease_ids.contains(&stored.record.lease_id);
        (is_own && stored.record.state == RecordState::InFlight)
            .then(|| Ownership::new(self.key, self.seen.now, stored.clone(), &self.entered))
    }

    /// Whether the store told of a record under this key: then the request was made before.
    #[must_use]
    pub const fn has_seen_record(&self) -> bool {
        self.seen.stored.is_some()
    }

    /// Which key is claimed.
    #[must_use]
    pub const fn id(&self) -> &OperationId {
        &self.key
    }

    /// What was last heard of it; nothing is there, at no time, before anything was heard.
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
            terms: self.claim.terms,
            hook: self.claim.hook,
            may_reconcile: self.claim.may_reconcile,
            local: &local,
            description: self.claim.description.as_ref(),
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
            // No claim leads to one of these.
            Step::Write(_)
            | Step::Recorded
            | Step::Lost
            | Step::Gone
            | Step::NotFound
            | Step::Rejected
            | Step::Changed => ClaimResult::Contended,
        };
        // Every swap of it was answered, and the record bears none of its grants. To be hashed
        // again, it may yet find one.
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
            // Entered before it is sent, so that whoever meets it in the store finds it here.
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

/// Ownership of a key, as of its holder's last write. While it or a clone of it is there, claims of
/// the same process do not take the key over.
#[derive(Clone, Debug)]
pub struct Ownership {
    key: OperationId,
    seen: Snapshot,
    owner: Owner,
    fence: FencingToken,
    attempt: u32,
    terms: Terms,
    entered: Option<Arc<ExecutionEntry>>,
}

impl Ownership {
    fn new(
        key: OperationId,
        now: Timestamp,
        stored: StoredRecord,
        entered: &[Arc<ExecutionEntry>],
    ) -> Self {
        let Record { lease_id, generation, attempt, terms, .. } = stored.record;
        let fence = stored.fence;
        let owner = Owner { lease_id, generation };
        let entered = entered.iter().find(|entered| entered.lease_id() == lease_id).cloned();
        let seen = Snapshot { now, stored: Some(stored) };
        Self { key, seen, owner, fence, attempt, terms, entered }
    }

    /// Which key.
    #[must_use]
    pub const fn id(&self) -> &OperationId {
        &self.key
    }

    /// The fence of this execution.
    #[must_use]
    pub const fn fence(&self) -> FencingToken {
        self.fence
    }

    /// Which execution of the record it is, from 1.
    #[must_use]
    pub const fn attempt(&self) -> u32 {
        self.attempt
    }

    /// What was agreed at the claim.
    #[must_use]
    pub const fn terms(&self) -> Terms {
        self.terms
    }

    /// The recovery point that this or an earlier holder left.
    #[must_use]
    pub fn checkpoint(&self) -> Option<&bytes::Bytes> {
        self.record()?.checkpoint.as_ref()
    }

    /// The record as the holder last knew it.
    #[must_use]
    pub fn record(&self) -> Option<&Record> {
        self.seen.stored.as_ref().map(|stored| &stored.record)
    }

    /// What the holder last wrote, after a [`WriteResult::Recorded`].
    pub fn update(&mut self, seen: Snapshot) {
        self.seen = seen;
    }

    /// Begins a write with a bet that the cell is as the holder left it.
    ///
    /// # Errors
    /// [`EntropyError`]; nothing was sent.
    pub fn write(
        &self,
        action: OwnerAction,
        entropy: &dyn Entropy,
    ) -> Result<(WriteExchange, Next<WriteResult>), EntropyError> {
        let event = Event::Owner(self.owner, action);
        WriteExchange::start(self.key, self.seen.clone(), event, entropy)
    }
}

/// What came of a holder's or an operator's write.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum WriteResult {
    /// It is written; this is the cell as far as it is known.
    Recorded(Snapshot),
    /// Holder: taken over. Not recorded, and never will be.
    Lost,
    /// Holder: the record of its life is gone. Nobody knows whether it was recorded.
    Gone,
    /// Operator: there is nothing.
    NotFound,
    /// Operator: it is in flight, and was not forced; or done, and was not to be forgotten.
    Rejected,
    /// Operator: it is no longer what was seen.
    Changed,
    /// [`MAX_CONFLICTS`] in a row: nobody knows, nothing was written.
    Contended,
}

/// What came of an operator's write, and of what.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Resolved {
    /// What came of it.
    pub result: WriteResult,
    /// What was decided about: what [`WriteResult::Recorded`] replaced, unless it was so already; or else
    /// what stood against it.
    pub was: Snapshot,
}

/// A write under way: a holder's or an operator's.
#[derive(Debug)]
pub struct WriteExchange {
    key: OperationId,
    event: Event<'static>,
    sent: Option<(WriteId, Draft)>,
    seen: Snapshot,
    conflicts: u32,
}

impl WriteExchange {
    /// Begins an operator's write on what the operator's side has loaded.
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

    /// What the last decision was about: what the last swap replaces, however often it was sent.
    #[must_use]
    pub fn into_seen(self) -> Snapshot {
        self.seen
    }

    /// The definite answer to the swap that was sent.
    ///
    /// # Errors
    /// [`EntropyError`]; nothing was written that was not told of.
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
            Step::Changed => WriteResult::Changed,
            // No holder's or operator's event leads to one of these.
            Step::Execute(_)
            | Step::Own(_)
            | Step::Reconcile(_)
            | Step::Replay(_)
            | Step::InFlight { .. }
            | Step::Mismatch
            | Step::Rehash(_)
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
