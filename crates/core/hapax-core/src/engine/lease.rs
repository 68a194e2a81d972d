//! Leases: what the owner of a key holds.

use std::fmt;
use std::future::Future;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Weak};
use std::time::Duration;

use bytes::Bytes;
use tokio::sync::{Mutex, watch};
use tokio::task::{JoinSet, yield_now};
use tokio::time::sleep;

use super::backlog::{DeferredOutcome, DeferredWrite, deferred_write};
use super::idempotency::EngineState;
use super::retry;
use crate::clock::Timestamp;
use crate::codec::{MAX_CHECKPOINT, MAX_OUTCOME};
use crate::exchange::{Ownership, Replay, WriteResult};
use crate::key::Key;
use crate::machine::OwnerAction;
use crate::record::{FencingToken, Outcome, Record, Terms};
use crate::scope::OperationId;

/// Why an ending was not recorded, or not yet.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum FinishError {
    /// Another execution took over. What this one did is not recorded and never will be.
    #[error("the lease was lost: another execution took over")]
    Lost,
    /// The record of this execution is gone. Nobody can tell whether it was recorded.
    #[error("the record of this execution is gone")]
    Gone,
    /// The store did not take it yet. It is held back in this process (this is said once there is
    /// room for it, see [`Limits::deferred_bytes`](crate::EngineLimits)) and written as soon as the
    /// store returns (or given up with an error in the log, should its record be damaged); copies
    /// that reach this process are answered from it.
    #[error("the store did not take the outcome yet: it is held back")]
    Pending,
    /// It is larger than a record may be ([`crate::codec::MAX_OUTCOME`],
    /// [`crate::codec::MAX_CHECKPOINT`]).
    #[error("it is larger than a record may be")]
    TooLarge,
    /// A recovery point is not saved while the work is in a transaction, which it would conflict
    /// with: see [`crate::transaction`].
    #[error("the work is in a transaction")]
    InTransaction,
}

/// Ownership of a key while its operation runs.
///
/// Dropping it does nothing: the lease lapses, as in a crash, and the key goes by its policy for
/// what is unknown. To end well, call [`complete`](Self::complete), [`abandon`](Self::abandon) or
/// [`release`](Self::release); each goes on when its caller is dropped.
#[derive(Debug)]
#[must_use = "an execution that is not finished blocks its key until the lease lapses"]
pub struct Lease {
    pub(super) shared: Arc<LeaseState>,
}

/// What the work under a lease may know and do. Cheap to clone.
#[derive(Clone, Debug)]
pub struct LeaseHandle {
    shared: Arc<LeaseState>,
}

pub(super) struct LeaseState {
    pub(super) inner: Arc<EngineState>,
    pub(super) key: OperationId,
    fence: FencingToken,
    attempt: u32,
    terms: Terms,
    checkpoint: Option<Bytes>,
    /// One write at a time: each bets on the tag that the last one left. The ending takes it, so
    /// that a renewal that comes to its turn late writes nothing.
    pub(super) ownership: Mutex<Option<Ownership>>,
    /// A transaction bets on the tag: nothing is renewed until it has ended. Changes under the lock.
    renewal_paused: AtomicBool,
    lost: watch::Sender<bool>,
}

impl fmt::Debug for LeaseState {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Lease")
            .field("key", &self.key)
            .field("fence", &self.fence)
            .field("attempt", &self.attempt)
            .finish_non_exhaustive()
    }
}

impl Drop for LeaseState {
    fn drop(&mut self) {
        self.inner.in_flight.fetch_sub(1, Ordering::Relaxed);
        // Without an ending, as in a crash: from here on claims of this process go by the lease.
        if self.ownership.get_mut().take().is_some() {
            self.inner.waiters.wake(&self.key, None);
        }
    }
}

impl Lease {
    pub(super) fn new(inner: &Arc<EngineState>, ownership: Ownership) -> Self {
        inner.in_flight.fetch_add(1, Ordering::Relaxed);
        let shared = LeaseState {
            inner: Arc::clone(inner),
            key: *ownership.id(),
            fence: ownership.fence(),
            attempt: ownership.attempt(),
            terms: ownership.terms(),
            checkpoint: ownership.checkpoint().cloned(),
            ownership: Mutex::new(Some(ownership)),
            renewal_paused: AtomicBool::new(false),
            lost: watch::Sender::new(false),
        };
        Self { shared: Arc::new(shared) }
    }

    /// The fencing token of this execution, for systems downstream.
    #[must_use]
    pub fn fence(&self) -> FencingToken {
        self.shared.fence
    }

    /// Which execution of the record it is, from 1.
    #[must_use]
    pub fn attempt(&self) -> u32 {
        self.shared.attempt
    }

    /// The recovery point that an earlier execution left, if it left one.
    #[must_use]
    pub fn checkpoint(&self) -> Option<&Bytes> {
        self.shared.checkpoint.as_ref()
    }

    /// For the work itself.
    #[must_use]
    pub fn handle(&self) -> LeaseHandle {
        LeaseHandle { shared: Arc::clone(&self.shared) }
    }

    /// Runs `work` and renews the lease every third of it until `work` is done. Work goes on when
    /// the lease is lost: it can hear of that by [`LeaseHandle::lost`].
    ///
    /// It is renewed on a task of its own, so that work which blocks its thread mostly keeps its
    /// lease, where the runtime has another thread. Do not rely on that: the thread that is
    /// blocked may be the one that looks after timers, and on a runtime of one thread nothing runs
    /// meanwhile. `tokio::task::spawn_blocking` is for such work.
    ///
    /// Dropping it drops the work and stops renewing; a renewal under way goes on, on its task.
    pub async fn keep_alive<T>(&self, operation: impl Future<Output = T>) -> T {
        // Aborted when it is dropped. A renewal under way is on a further task and holds the lock
        // that the ending needs: stopping here is waiting for it there.
        let mut renewing = JoinSet::new();
        renewing.spawn_on(renew(Arc::downgrade(&self.shared)), &self.shared.inner.runtime);
        // What was just spawned may be next on this thread, and on no other: it is let begin before
        // the work can block that.
        yield_now().await;
        operation.await
    }

    /// It happened: keeps `outcome` for `retention`, or as the policy says. A retention of zero,
    /// which would forget at once what just happened, counts as not said. Answers until when it is
    /// kept, by the store's clock; `None` for ever.
    ///
    /// # Errors
    /// [`FinishError`]; only `Ok` means that it will be replayed. What is too large to be kept is
    /// abandoned instead: it happened, but there is no answer to replay.
    pub async fn complete(
        self,
        outcome: Outcome,
        retention: Option<Duration>,
    ) -> Result<Option<Timestamp>, FinishError> {
        if outcome.bytes().len() > MAX_OUTCOME {
            self.shared.finish(OwnerAction::Abandon { seen: None }).await?;
            return Err(FinishError::TooLarge);
        }
        let retention = retention.filter(|retention| !retention.is_zero());
        self.shared.finish(OwnerAction::Complete { outcome, retention }).await
    }

    /// It may have happened: a retry goes by the policy for what is unknown. `seen` is for
    /// operators; it is left out if it is too large to be kept.
    ///
    /// # Errors
    /// [`FinishError`]; in any case no other execution is less safe than after a crash.
    pub async fn abandon(self, seen: Option<Outcome>) -> Result<(), FinishError> {
        let seen = seen.filter(|seen| seen.bytes().len() <= MAX_OUTCOME);
        self.shared.finish(OwnerAction::Abandon { seen }).await.map(drop)
    }

    /// It did not happen: the next claim executes.
    ///
    /// # Errors
    /// [`FinishError`].
    pub async fn release(self) -> Result<(), FinishError> {
        self.shared.finish(OwnerAction::Release).await.map(drop)
    }

    /// Releases in the background what nobody will execute.
    pub(super) fn release_undelivered(self) {
        let Self { shared } = self;
        // Nobody else has it yet, so that the lock is free.
        let ownership = shared.ownership.try_lock().ok().and_then(|mut ownership| ownership.take());
        if let Some(ownership) = ownership {
            shared
                .inner
                .defer(DeferredWrite { ownership, action: OwnerAction::Release, sent: None }, None);
        }
    }
}

impl LeaseHandle {
    /// The fencing token of this execution, for systems downstream.
    #[must_use]
    pub fn fence(&self) -> FencingToken {
        self.shared.fence
    }

    /// Which execution of the record it is, from 1.
    #[must_use]
    pub fn attempt(&self) -> u32 {
        self.shared.attempt
    }

    /// A key for systems downstream that take one: the same in every execution of this record, and
    /// another for every other caller, function and key. [`Key::as_str`] has it as text.
    ///
    /// The operation's own key is not that: it names it within its caller's scope, and two customers
    /// may have the same.
    #[must_use]
    pub fn downstream(&self) -> Key {
        self.shared.key.downstream()
    }

    /// Resolves when the lease is found to be lost: work that can stop should. In a transaction that
    /// is found at its end.
    pub async fn lost(&self) {
        // The sender is part of what this handle holds: it outlives the wait.
        let _ = self.shared.lost.subscribe().wait_for(|lost| *lost).await;
    }

    /// Whether the lease has been found to be lost.
    #[must_use]
    pub fn is_lost(&self) -> bool {
        *self.shared.lost.borrow()
    }

    /// The recovery point that an earlier execution left, if it left one.
    #[must_use]
    pub fn checkpoint(&self) -> Option<&Bytes> {
        self.shared.checkpoint.as_ref()
    }

    /// Saves a recovery point, which a later execution of this record finds.
    ///
    /// # Errors
    /// [`FinishError::Pending`] here means that the store did not answer: it may have been saved.
    /// [`FinishError::TooLarge`]: it was not.
    pub async fn save(&self, checkpoint: Bytes) -> Result<(), FinishError> {
        if checkpoint.len() > MAX_CHECKPOINT {
            return Err(FinishError::TooLarge);
        }
        self.shared.write(OwnerAction::Checkpoint(checkpoint), RenewalMode::Moving).await
    }
}

/// Whether a write is of use while a transaction bets on the tag, and whether one does afterwards.
#[derive(Debug)]
enum RenewalMode {
    /// Not while it does.
    Moving,
    /// Before it does, unless the run that it is of has ended.
    Stilling(Arc<AtomicBool>),
}

/// Renews a lease every third of it, for as long as somebody has it.
async fn renew(lease: Weak<LeaseState>) {
    let Some(every) = lease.upgrade().map(|shared| shared.terms.lease / 3) else { return };
    let mut pause = every;
    loop {
        sleep(pause).await;
        // Not held while it waits: a lease that was given back counts no more.
        let Some(renewal) = lease.upgrade().map(|shared| {
            shared.write(OwnerAction::Renew { lease: shared.terms.lease }, RenewalMode::Moving)
        }) else {
            return;
        };
        match renewal.await {
            // In a transaction: it was renewed for as long as that may take.
            Ok(()) | Err(FinishError::InTransaction) => pause = every,
            Err(FinishError::Lost | FinishError::Gone) => return,
            // Sooner again: two of three renewals may fail before the lease lapses.
            Err(_) => pause = every / 4,
        }
    }
}

impl LeaseState {
    /// Renews for `lease`, and then no more until [`LeaseState::resume_renewal`]; for a run that has not
    /// `ended`. Not for less than the policy's: whoever keeps it alive afterwards goes by that.
    pub(super) async fn pause_renewal(
        self: &Arc<Self>,
        lease: Duration,
        ended: &Arc<AtomicBool>,
    ) -> Result<(), FinishError> {
        self.write(self.longer(lease), RenewalMode::Stilling(Arc::clone(ended))).await
    }

    /// Renews for `lease`, or the policy's if that is longer.
    pub(super) fn longer(&self, lease: Duration) -> OwnerAction {
        OwnerAction::Renew { lease: lease.max(self.terms.lease) }
    }

    /// The transaction has ended. What stills on behalf of its run and is not done by now does not
    /// do it any more, if the run was marked as ended before.
    pub(super) async fn resume_renewal(&self) {
        let _held = self.ownership.lock().await;
        self.renewal_paused.store(false, Ordering::Relaxed);
    }

    /// Likewise, for whoever may come after the run has `ended`, and another is under way.
    pub(super) async fn resume_renewal_unless(&self, ended: &AtomicBool) {
        let _held = self.ownership.lock().await;
        if !ended.load(Ordering::Relaxed) {
            self.renewal_paused.store(false, Ordering::Relaxed);
        }
    }

    /// A write that the lease outlives, on a task of its own. A copy of it that was given up is
    /// harmless: it expects a tag, and the next write learns which tag is there.
    fn write(
        self: &Arc<Self>,
        action: OwnerAction,
        motion: RenewalMode,
    ) -> impl Future<Output = Result<(), FinishError>> + use<> {
        let shared = Arc::clone(self);
        let exchange = self.inner.backlog.begin_exchange();
        let task = self.inner.runtime.spawn(async move {
            let _talking = exchange;
            let mut held = shared.ownership.lock().await;
            let Some(ownership) = held.as_mut() else { return Err(FinishError::Gone) };
            match &motion {
                RenewalMode::Moving if !shared.renewal_paused.load(Ordering::Relaxed) => {}
                RenewalMode::Stilling(ended) if !ended.load(Ordering::Relaxed) => {}
                _ => return Err(FinishError::InTransaction),
            }
            let inner = &shared.inner;
            let Ok((mut writing, next)) = ownership.write(action, &*inner.entropy) else {
                return Err(FinishError::Pending);
            };
            let run =
                retry::run(&*inner.store, &*inner.entropy, inner.deadline(), &mut writing, next);
            match run.await {
                Ok(WriteResult::Recorded(seen)) => {
                    ownership.update(seen);
                    if matches!(motion, RenewalMode::Stilling(_)) {
                        shared.renewal_paused.store(true, Ordering::Relaxed);
                    }
                    Ok(())
                }
                Ok(written @ (WriteResult::Lost | WriteResult::Gone)) => {
                    ownership.note_conflict(writing.seen());
                    Err(shared.lose(match written {
                        WriteResult::Lost => FinishError::Lost,
                        _ => FinishError::Gone,
                    }))
                }
                Ok(_) | Err(_) => Err(FinishError::Pending),
            }
        });
        // The task ends without an answer only when the runtime shuts down.
        async { task.await.unwrap_or(Err(FinishError::Pending)) }
    }

    /// The last write, on a task of its own; if the store does not take it, it is held back.
    /// Answers until when the record is kept.
    async fn finish(
        self: Arc<Self>,
        action: OwnerAction,
    ) -> Result<Option<Timestamp>, FinishError> {
        let runtime = self.inner.runtime.clone();
        let exchange = self.inner.backlog.begin_exchange();
        let task = runtime.spawn(async move {
            let _talking = exchange;
            let Some(ownership) = self.ownership.lock().await.take() else {
                return Err(FinishError::Gone);
            };
            let inner = &self.inner;
            let stuck = match ownership.write(action.clone(), &*inner.entropy) {
                Ok((mut writing, next)) => {
                    let run = retry::run(
                        &*inner.store,
                        &*inner.entropy,
                        inner.deadline(),
                        &mut writing,
                        next,
                    );
                    match run.await {
                        Ok(WriteResult::Recorded(seen)) => {
                            let until = seen.stored.as_ref().and_then(|stored| stored.keep_until);
                            // It leaves the executions under way before others hear of the end.
                            drop(ownership);
                            inner.waiters.wake(&self.key, Some(seen));
                            return Ok(until);
                        }
                        Ok(written @ (WriteResult::Lost | WriteResult::Gone)) => {
                            drop(ownership);
                            return Err(self.lose(match written {
                                WriteResult::Lost => FinishError::Lost,
                                _ => FinishError::Gone,
                            }));
                        }
                        // Contended, the rest being for operators: begin anew.
                        Ok(_) => DeferredWrite { ownership, action, sent: None },
                        Err(stuck) => deferred_write(ownership, action, writing, stuck),
                    }
                }
                Err(_) => DeferredWrite { ownership, action, sent: None },
            };
            let outcome = match &stuck.action {
                OwnerAction::Complete { outcome, .. } => {
                    self.deferred_outcome(&stuck.ownership, outcome)
                }
                _ => None,
            };
            let counted = stuck.bytes() > 0;
            inner.defer(stuck, outcome);
            // Whoever ends an execution keeps what it holds until there is room for one more: this
            // is what bounds outcomes held back, however many executions were under way.
            if counted {
                inner.backlog.has_room_for(inner.limits.deferred_bytes).await;
            }
            Err(FinishError::Pending)
        });
        task.await.unwrap_or(Err(FinishError::Pending))
    }

    fn deferred_outcome(
        &self,
        ownership: &Ownership,
        outcome: &Outcome,
    ) -> Option<DeferredOutcome> {
        let Record { scheme, fingerprint, .. } = ownership.record()?;
        let replay = Replay {
            outcome: outcome.clone(),
            fence: self.fence,
            expires_in: None,
            expires_at: None,
            deferred: true,
        };
        Some(DeferredOutcome { scheme: scheme.clone(), fingerprint: *fingerprint, replay })
    }

    pub(super) fn lose(&self, how: FinishError) -> FinishError {
        self.lost.send_replace(true);
        self.inner.waiters.wake(&self.key, None);
        how
    }
}
