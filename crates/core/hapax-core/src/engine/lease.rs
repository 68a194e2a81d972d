//! Leases: the right of one execution to its key.

use std::fmt;
use std::future::Future;
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Poll, ready};
use std::time::Duration;

use bytes::Bytes;
use pin_project_lite::pin_project;
use tokio::sync::{Mutex, Notify};

use super::backlog::{DeferredOutcome, DeferredWrite, deferred_write};
use super::idempotency::EngineState;
use super::lease_clock::LeaseTime;
use super::renewal::Renewal;
use super::retry;
use crate::clock::Timestamp;
use crate::codec::{MAX_CHECKPOINT, MAX_OUTCOME};
use crate::exchange::{Ownership, WriteResult};
use crate::key::Key;
use crate::machine::OwnerAction;
use crate::record::{FencingToken, LeaseId, Outcome, Terms};
use crate::scope::OperationId;
use crate::store::BoxFuture;

/// Errors of recording the end of an execution.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum FinishError {
    /// Another execution took over. The result of this one is not recorded and never will be.
    #[error("the lease was lost: another execution took over")]
    Lost,
    /// The record of this execution is gone, so it is unknown whether the end was recorded.
    #[error(
        "the record of this execution was removed or replaced: it is unknown whether its end was recorded"
    )]
    Gone,
    /// The store did not accept the end yet. It is a deferred write of this process, written as
    /// soon as the store returns, or given up with an error in the log if its record is damaged.
    /// Duplicates that reach this process get it replayed. This is returned once the backlog has
    /// memory for it, see [`EngineLimits::deferred_bytes`](crate::EngineLimits).
    #[error("the store did not accept the outcome yet: its write is deferred")]
    Pending,
    /// The outcome or checkpoint exceeds its size limit ([`crate::codec::MAX_OUTCOME`],
    /// [`crate::codec::MAX_CHECKPOINT`]).
    #[error("the outcome or checkpoint exceeds its size limit")]
    TooLarge,
    /// No checkpoint is saved while the operation is in a transaction, with which the write would
    /// conflict: see [`crate::transaction`].
    #[error("the operation is in a transaction: save the checkpoint before or after it")]
    InTransaction,
}

/// Ownership of a key while its operation executes.
///
/// Dropping it does nothing: the lease lapses, as in a crash, and the key follows its policy for
/// unknown outcomes. Call [`complete`](Self::complete), [`abandon`](Self::abandon) or
/// [`release`](Self::release) to end it; each continues if its caller is dropped.
#[derive(Debug)]
#[must_use = "an execution that is not finished blocks its key until the lease lapses"]
pub struct Lease {
    pub(super) shared: Arc<LeaseState>,
}

/// The view of a lease that its operation has. Cheap to clone.
#[derive(Clone, Debug)]
pub struct LeaseHandle {
    pub(super) shared: Arc<LeaseState>,
}

pub(super) struct LeaseState {
    pub(super) inner: Arc<EngineState>,
    pub(super) key: OperationId,
    fence: FencingToken,
    generation: LeaseId,
    attempt: u32,
    is_takeover: bool,
    terms: Terms,
    keep_released: Duration,
    checkpoint: Option<Bytes>,
    time: LeaseTime,
    /// One write at a time: each expects the write id of the last one. The end takes it, so that a
    /// renewal that gets the lock later writes nothing.
    pub(super) ownership: Mutex<Option<Ownership>>,
    /// True while a transaction expects the write id: nothing is renewed until it has ended.
    /// Changes under the lock.
    renewal_paused: AtomicBool,
    lost: AtomicBool,
    /// Notified after `lost` is set.
    lost_changed: Notify,
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
        // Without an end, as in a crash: from here on claims of this process decide by the lease.
        if self.ownership.get_mut().take().is_some() {
            self.inner.waiters.wake(&self.key, None);
        }
    }
}

impl Lease {
    /// Creates the lease of a claim whose last swap was sent at `sent_at`, by the lease clock.
    pub(super) fn new(inner: &Arc<EngineState>, ownership: Ownership, sent_at: Duration) -> Self {
        inner.in_flight.fetch_add(1, Ordering::Relaxed);
        let shared = LeaseState {
            inner: Arc::clone(inner),
            key: *ownership.id(),
            fence: ownership.fence(),
            generation: ownership.generation(),
            attempt: ownership.attempt(),
            is_takeover: ownership.is_takeover(),
            terms: ownership.terms(),
            keep_released: ownership.keep_released(),
            checkpoint: ownership.checkpoint().cloned(),
            time: LeaseTime::new(sent_at, ownership.remaining()),
            ownership: Mutex::new(Some(ownership)),
            renewal_paused: AtomicBool::new(false),
            lost: AtomicBool::new(false),
            lost_changed: Notify::new(),
        };
        Self { shared: Arc::new(shared) }
    }

    /// Returns the fence of this execution, for downstream systems.
    #[must_use]
    pub fn fence(&self) -> FencingToken {
        self.shared.fence
    }

    /// Returns the operation id, which names the record in the store.
    #[must_use]
    pub fn id(&self) -> OperationId {
        self.shared.key
    }

    /// Returns the number of this execution of the record, from 1.
    #[must_use]
    pub fn attempt(&self) -> u32 {
        self.shared.attempt
    }

    /// Returns whether this claim took over from an owner whose lease lapsed: that execution crashed,
    /// or is cut off from the store. A withdrawn takeover leaves the key to be taken over again.
    #[must_use]
    pub fn is_takeover(&self) -> bool {
        self.shared.is_takeover
    }

    /// Returns the checkpoint that an earlier execution saved.
    #[must_use]
    pub fn checkpoint(&self) -> Option<&Bytes> {
        self.shared.checkpoint.as_ref()
    }

    /// Takes the checkpoint that an earlier execution saved, so that the operation does not find it: for
    /// an integration that saves its own. Returns `None` if there is none, or if the lease has a handle.
    /// The record keeps it.
    pub fn take_checkpoint(&mut self) -> Option<Bytes> {
        Arc::get_mut(&mut self.shared)?.checkpoint.take()
    }

    /// Returns the handle for the operation.
    #[must_use]
    pub fn handle(&self) -> LeaseHandle {
        LeaseHandle { shared: Arc::clone(&self.shared) }
    }

    /// Awaits `operation`, and renews the lease every third of its time meanwhile. The operation
    /// continues if the lease is lost; [`LeaseHandle::lost`] notifies it.
    ///
    /// Renewals run on tasks, so an operation that blocks its thread mostly keeps its
    /// lease if the runtime has another thread. Do not rely on that: the blocked thread may be the
    /// one that drives timers, and a runtime of one thread runs nothing meanwhile. Use
    /// `tokio::task::spawn_blocking` for such operations.
    ///
    /// Dropping the future drops the operation and stops renewals; a renewal in progress continues on
    /// its task.
    pub fn keep_alive<F: Future>(
        &self,
        operation: F,
    ) -> impl Future<Output = F::Output> + use<'_, F> {
        KeptAlive { lease: &self.shared, renewal: None, operation }
    }

    /// Completes the execution: stores `outcome` for `retention`, or for that of the policy. A
    /// retention of zero, with which the outcome would expire at once, counts as none. Returns the
    /// time until which it is stored, by the store's clock; `None` for ever.
    ///
    /// # Errors
    /// [`FinishError`]; only after `Ok` is the outcome replayed. An outcome that is too large is
    /// abandoned instead: the operation happened, and there is nothing to replay.
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

    /// Abandons the execution: the operation may have happened, and a retry follows the policy for
    /// unknown outcomes. `seen` is for operators; it is left out if it is too large.
    ///
    /// # Errors
    /// [`FinishError`]; in any case other executions are as safe as after a crash.
    pub async fn abandon(self, seen: Option<Outcome>) -> Result<(), FinishError> {
        let seen = seen.filter(|seen| seen.bytes().len() <= MAX_OUTCOME);
        self.shared.finish(OwnerAction::Abandon { seen }).await.map(drop)
    }

    /// Releases the key: the operation did not happen, and the next claim executes. The number of
    /// attempts is kept for [`Policy::keep_released`](crate::Policy::keep_released).
    ///
    /// # Errors
    /// [`FinishError`].
    pub async fn release(self) -> Result<(), FinishError> {
        let keep = self.shared.keep_released;
        self.shared.finish(OwnerAction::Release { keep }).await.map(drop)
    }

    /// Releases the key: the request is to be repeated elsewhere, and executes there under the same key.
    /// A duplicate of this request, by its fingerprint, gets `outcome`, within the limits of
    /// [`Extensions::add_redirect`](crate::Extensions::add_redirect).
    ///
    /// # Errors
    /// [`FinishError`].
    pub async fn redirect(self, outcome: Outcome) -> Result<(), FinishError> {
        let keep = self.shared.keep_released;
        self.shared.finish(OwnerAction::Redirect { outcome, keep }).await.map(drop)
    }

    /// Withdraws the claim: nothing was executed, and it does not count as an attempt.
    ///
    /// # Errors
    /// [`FinishError`].
    pub async fn withdraw(self) -> Result<(), FinishError> {
        let keep = self.shared.keep_released;
        self.shared.finish(OwnerAction::Withdraw { keep }).await.map(drop)
    }

    /// Withdraws in the background a claim whose lease did not reach its caller.
    pub(super) fn withdraw_undelivered(self) {
        let Self { shared } = self;
        // No other task has it yet, so the lock is free.
        let ownership = shared.ownership.try_lock().ok().and_then(|mut ownership| ownership.take());
        if let Some(ownership) = ownership {
            shared.inner.withdraw(ownership);
        }
    }
}

impl LeaseHandle {
    /// Returns the fence of this execution, for downstream systems.
    #[must_use]
    pub fn fence(&self) -> FencingToken {
        self.shared.fence
    }

    /// Returns the generation of the record: a new record under the same key has another.
    #[must_use]
    pub fn generation(&self) -> LeaseId {
        self.shared.generation
    }

    /// Returns the number of this execution of the record, from 1.
    #[must_use]
    pub fn attempt(&self) -> u32 {
        self.shared.attempt
    }

    /// Returns an idempotency key for downstream systems: the same in every execution of this
    /// record, and a different one for every other caller, function and key. [`Key::as_str`] has it
    /// as text.
    ///
    /// The operation's own key does not serve: it names the operation within its caller's scope,
    /// and two customers may use the same one.
    #[must_use]
    pub fn downstream(&self) -> Key {
        self.shared.key.downstream()
    }

    /// Resolves when the lease is found to be lost: an operation that can stop should. In a
    /// transaction, the loss is found at its end.
    pub async fn lost(&self) {
        let mut changed = pin!(self.shared.lost_changed.notified());
        // Registered before the flag is read: a loss after that notifies.
        changed.as_mut().enable();
        if !self.is_lost() {
            changed.await;
        }
    }

    /// Returns the time for which the lease is still held: what the store's reply to the last write left
    /// of it, less the time since that write was sent, by the monotonic clock or by the
    /// [wall clock](crate::IdempotencyBuilder::clock) of this process, whichever shows more. Zero if it may
    /// have lapsed or is lost, also after a pause of the process or a suspension of the machine, for which
    /// Linux's monotonic clock stands still. A wall clock that steps forward makes it zero until the
    /// next renewal. Another owner can exist earlier only if the store's clock stepped forward, or if the
    /// wall clock was not set after a suspension, as in a virtual machine without a time service.
    #[must_use]
    pub fn remaining(&self) -> Duration {
        if self.is_lost() { Duration::ZERO } else { self.shared.remaining() }
    }

    /// Returns the time since the claim was sent, by the clocks of [`remaining`](Self::remaining). It never
    /// shrinks.
    #[must_use]
    pub fn elapsed(&self) -> Duration {
        self.shared.time.elapsed(&self.shared.inner.lease_clock)
    }

    /// Returns whether the lease was found to be lost.
    #[must_use]
    pub fn is_lost(&self) -> bool {
        self.shared.lost.load(Ordering::Acquire)
    }

    /// Returns the checkpoint that an earlier execution saved.
    #[must_use]
    pub fn checkpoint(&self) -> Option<&Bytes> {
        self.shared.checkpoint.as_ref()
    }

    /// Saves a checkpoint, which a later execution of this record finds.
    ///
    /// # Errors
    /// [`FinishError::Pending`]: the store did not answer, and the checkpoint may have been saved.
    /// [`FinishError::TooLarge`]: it was not.
    pub async fn save(&self, checkpoint: Bytes) -> Result<(), FinishError> {
        if checkpoint.len() > MAX_CHECKPOINT {
            return Err(FinishError::TooLarge);
        }
        self.shared.save(checkpoint).await
    }
}

pin_project! {
    /// An operation whose lease is renewed.
    struct KeptAlive<'a, F> {
        lease: &'a Arc<LeaseState>,
        // `None` before the first poll.
        renewal: Option<Renewal>,
        #[pin]
        operation: F,
    }
}

impl<F: Future> Future for KeptAlive<'_, F> {
    type Output = F::Output;

    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<F::Output> {
        let this = self.project();
        if this.renewal.is_none() {
            let (renewal, is_first) = Renewal::begin(this.lease);
            *this.renewal = Some(renewal);
            if is_first {
                // The task may be queued for this thread only. The pause lets it start before the
                // operation can block the thread.
                cx.waker().wake_by_ref();
                return Poll::Pending;
            }
        }
        let output = ready!(this.operation.poll(cx));
        *this.renewal = None;
        Poll::Ready(output)
    }
}

/// Interaction of a write with transactions, which expect that the write id does not change.
#[derive(Debug)]
enum WriteMode {
    /// The write is left out while renewals are paused.
    Plain,
    /// The write pauses renewals. It is left out if its run has ended.
    Pausing(Arc<AtomicBool>),
}

impl LeaseState {
    /// Renews for the policy's lease, and then no more until [`LeaseState::resume_renewal`]; does
    /// nothing if the run has `ended`.
    pub(super) async fn pause_renewal(
        self: &Arc<Self>,
        ended: &Arc<AtomicBool>,
    ) -> Result<(), FinishError> {
        self.write(self.renewal(), WriteMode::Pausing(Arc::clone(ended))).await
    }

    pub(super) const fn terms(&self) -> &Terms {
        &self.terms
    }

    /// Returns the part of the lease that has passed.
    pub(super) fn age(&self) -> Duration {
        self.terms.lease.saturating_sub(self.remaining())
    }

    fn remaining(&self) -> Duration {
        self.time.remaining(&self.inner.lease_clock)
    }

    /// Counts what is left of the lease from `sent_at`, the time at which its last write was sent.
    pub(super) fn hold_from(&self, sent_at: Duration, ownership: &Ownership) {
        self.time.hold_from(sent_at, ownership.remaining());
    }

    /// Returns the time between renewals.
    pub(super) fn renewal_interval(&self) -> Duration {
        self.terms.lease / 3
    }

    /// Renews for the policy's lease, on its own task.
    pub(super) fn renew(self: &Arc<Self>) -> impl Future<Output = Result<(), FinishError>> + use<> {
        self.write(self.renewal(), WriteMode::Plain)
    }

    /// Saves a checkpoint and renews for the policy's lease, on its own task.
    pub(super) fn save(
        self: &Arc<Self>,
        checkpoint: Bytes,
    ) -> impl Future<Output = Result<(), FinishError>> + use<> {
        let lease = self.terms.lease;
        self.write(OwnerAction::Checkpoint { checkpoint, lease }, WriteMode::Plain)
    }

    /// Returns a renewal for the policy's lease.
    pub(super) const fn renewal(&self) -> OwnerAction {
        OwnerAction::Renew { lease: self.terms.lease }
    }

    /// Resumes renewals after a transaction. A later pause by its run has no effect if the run was
    /// marked as ended before.
    pub(super) async fn resume_renewal(&self) {
        let _guard = self.ownership.lock().await;
        self.renewal_paused.store(false, Ordering::Relaxed);
    }

    /// Resumes renewals unless the run has `ended`. This may be called late, when another run is
    /// in progress, whose pause must stay.
    pub(super) async fn resume_renewal_unless(&self, ended: &AtomicBool) {
        let _guard = self.ownership.lock().await;
        if !ended.load(Ordering::Relaxed) {
            self.renewal_paused.store(false, Ordering::Relaxed);
        }
    }

    /// Writes on its own task, keeping the lease. A copy of the swap that was given up is harmless:
    /// it expects a write id, and the next write reads the present one.
    fn write(
        self: &Arc<Self>,
        action: OwnerAction,
        mode: WriteMode,
    ) -> impl Future<Output = Result<(), FinishError>> + use<> {
        let shared = Arc::clone(self);
        let exchange = self.inner.backlog.begin_exchange();
        let task = self.inner.runtime.spawn(async move {
            let _exchange = exchange;
            let mut guard = shared.ownership.lock().await;
            let Some(ownership) = guard.as_mut() else { return Err(FinishError::Gone) };
            match &mode {
                WriteMode::Plain if !shared.renewal_paused.load(Ordering::Relaxed) => {}
                WriteMode::Pausing(ended) if !ended.load(Ordering::Relaxed) => {}
                _ => return Err(FinishError::InTransaction),
            }
            let inner = &shared.inner;
            let mut sent_at = inner.lease_clock.now();
            let Ok((mut writing, next)) = ownership.write(action, &*inner.entropy) else {
                return Err(FinishError::Pending);
            };
            let (store, entropy, deadline) = (&*inner.store, &*inner.entropy, inner.deadline());
            let on_send = &mut || sent_at = inner.lease_clock.now();
            let run = retry::run_timed(store, entropy, deadline, &mut writing, next, on_send);
            match run.await {
                Ok(WriteResult::Recorded(seen)) => {
                    ownership.update(seen);
                    shared.hold_from(sent_at, ownership);
                    if matches!(mode, WriteMode::Pausing(_)) {
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
        // The task ends without a result only when the runtime shuts down.
        async { task.await.unwrap_or(Err(FinishError::Pending)) }
    }

    /// Writes the end, whether or not the caller is dropped; if the store does not accept it, it is
    /// deferred. Returns the time until which the record is stored.
    pub(super) async fn finish(
        self: Arc<Self>,
        action: OwnerAction,
    ) -> Result<Option<Timestamp>, FinishError> {
        let inner = Arc::clone(&self.inner);
        let exchange = inner.backlog.begin_exchange();
        // The lock is held for one assignment: nothing of this task waits for it meanwhile.
        let lease = self.terms.lease;
        let writing = Box::pin(async move {
            let _exchange = exchange;
            let Some(ownership) = self.ownership.lock().await.take() else {
                return Err(FinishError::Gone);
            };
            let inner = &self.inner;
            let Ok((writing, next)) = ownership.write(action.clone(), &*inner.entropy) else {
                return self.defer_end(DeferredWrite { ownership, action, sent: None }).await;
            };
            // Boxed, so that the future is small.
            let mut end = Box::new((ownership, writing));
            let (store, entropy) = (&*inner.store, &*inner.entropy);
            let written = retry::run(store, entropy, inner.deadline(), &mut end.1, next).await;
            let (ownership, writing) = *end;
            let stuck = match written {
                Ok(WriteResult::Recorded(seen)) => {
                    let until = seen.stored.as_ref().and_then(|stored| stored.keep_until);
                    // The execution leaves the executions in progress before waiters are woken.
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
                // Contended (other results are for operators only): the write begins anew.
                Ok(_) => DeferredWrite { ownership, action, sent: None },
                Err(stuck) => deferred_write(ownership, action, writing, stuck),
            };
            self.defer_end(stuck).await
        });
        // The store panicked. The lease lapses, as in a crash.
        inner.detach_on_drop(lease, writing).await.unwrap_or(Err(FinishError::Pending))
    }

    /// Defers an end. The execution keeps its memory until the backlog has memory for one more
    /// outcome: that bounds deferred outcomes, however many executions were in progress.
    fn defer_end(
        &self,
        stuck: DeferredWrite,
    ) -> BoxFuture<'_, Result<Option<Timestamp>, FinishError>> {
        let inner = &self.inner;
        let outcome = DeferredOutcome::of(&stuck);
        let counted = stuck.bytes() > 0;
        inner.defer(stuck, outcome);
        Box::pin(async move {
            if counted {
                inner.backlog.shrinks_to(inner.limits.deferred_bytes).await;
            }
            Err(FinishError::Pending)
        })
    }

    pub(super) fn lose(&self, how: FinishError) -> FinishError {
        self.lost.store(true, Ordering::Release);
        self.lost_changed.notify_waiters();
        self.inner.waiters.wake(&self.key, None);
        how
    }
}
