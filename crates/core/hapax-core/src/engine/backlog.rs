//! The backlog: writes and releases that the store did not accept, sent again until it does.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};

use tokio::sync::{Semaphore, watch};

use super::idempotency::EngineState;
use super::retry::{self, Exchange, ExchangeError};
use crate::exchange::{ClaimExchange, Next, Ownership, Replay, WriteExchange, WriteResult};
use crate::fingerprint::{Fingerprint, FingerprintScheme};
use crate::machine::OwnerAction;
use crate::record::{Record, Redirect};
use crate::scope::OperationId;
use crate::store::Swap;

/// Number of deferred writes that are sent at one time.
const AT_ONCE: usize = 16;

/// All deferred writes, counted. Their outcomes are replayed from here.
#[derive(Debug)]
pub(super) struct Backlog {
    outcomes: Mutex<HashMap<OperationId, Arc<DeferredOutcome>>>,
    size: watch::Sender<Size>,
    permits: Semaphore,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Size {
    pub(super) entries: usize,
    pub(super) bytes: usize,
    /// Exchanges with the store in progress, whether or not their callers are still there.
    active_exchanges: usize,
}

/// An outcome that is not in the store yet.
#[derive(Clone, Debug)]
pub(super) struct DeferredOutcome {
    pub(super) scheme: FingerprintScheme,
    pub(super) fingerprint: Fingerprint,
    pub(super) replay: Replay,
    /// Redirects of the key.
    pub(super) redirects: Vec<Redirect>,
    /// Whether the write releases the key, so that another request may claim it afterwards.
    pub(super) releases: bool,
}

impl Backlog {
    pub(super) fn new() -> Self {
        Self {
            outcomes: Mutex::default(),
            size: watch::Sender::new(Size::default()),
            permits: Semaphore::new(AT_ONCE),
        }
    }

    pub(super) fn size(&self) -> Size {
        *self.size.borrow()
    }

    pub(super) fn outcome(&self, key: &OperationId) -> Option<Arc<DeferredOutcome>> {
        self.lock().get(key).cloned()
    }

    /// Resolves when nothing is deferred and no exchange is in progress.
    pub(super) async fn empty(&self) {
        // The sender is part of `self`, so it outlives the wait and this cannot fail.
        let quiet = |size: &Size| size.entries == 0 && size.active_exchanges == 0;
        let _ = self.size.subscribe().wait_for(quiet).await;
    }

    /// Resolves when nothing is deferred.
    pub(super) async fn written(&self) {
        // The sender is part of `self`, so it outlives the wait and this cannot fail.
        let _ = self.size.subscribe().wait_for(|size| size.entries == 0).await;
    }

    /// Resolves when at most `bytes` are deferred.
    pub(super) async fn shrinks_to(&self, bytes: usize) {
        // The sender is part of `self`, so it outlives the wait and this cannot fail.
        let _ = self.size.subscribe().wait_for(|size| size.bytes <= bytes).await;
    }

    /// Counts an exchange until the guard is dropped.
    pub(super) fn begin_exchange(self: &Arc<Self>) -> ActiveExchange {
        self.size.send_if_modified(|size| {
            size.active_exchanges += 1;
            false
        });
        ActiveExchange(Arc::clone(self))
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, HashMap<OperationId, Arc<DeferredOutcome>>> {
        // No code under the lock panics; if it did, the map would be consistent.
        self.outcomes.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn enter(
        self: &Arc<Self>,
        key: OperationId,
        bytes: usize,
        outcome: Option<DeferredOutcome>,
    ) -> BacklogEntry {
        let outcome = outcome.map(Arc::new);
        if let Some(outcome) = &outcome {
            self.lock().insert(key, Arc::clone(outcome));
        }
        self.size.send_modify(|size| {
            size.entries += 1;
            size.bytes += bytes;
        });
        BacklogEntry { backlog: Arc::clone(self), key, bytes, outcome }
    }
}

/// An exchange in progress.
#[derive(Debug)]
pub(super) struct ActiveExchange(Arc<Backlog>);

impl Drop for ActiveExchange {
    fn drop(&mut self) {
        self.0.size.send_if_modified(|size| {
            size.active_exchanges -= 1;
            // A waiter that subscribes after this reads the size after this, too.
            size.active_exchanges == 0 && self.0.size.receiver_count() > 0
        });
    }
}

/// A deferred write, counted until it is dropped.
#[derive(Debug)]
struct BacklogEntry {
    backlog: Arc<Backlog>,
    key: OperationId,
    bytes: usize,
    outcome: Option<Arc<DeferredOutcome>>,
}

impl Drop for BacklogEntry {
    fn drop(&mut self) {
        if let Some(outcome) = &self.outcome {
            let mut outcomes = self.backlog.lock();
            // A later execution of the same key may have replaced this outcome.
            if outcomes.get(&self.key).is_some_and(|deferred| Arc::ptr_eq(deferred, outcome)) {
                outcomes.remove(&self.key);
            }
        }
        self.backlog.size.send_modify(|size| {
            size.entries -= 1;
            size.bytes -= self.bytes;
        });
    }
}

/// An owner's write that is still to be made.
#[derive(Debug)]
pub(super) struct DeferredWrite {
    pub(super) ownership: Ownership,
    pub(super) action: OwnerAction,
    /// The exchange in progress and its unanswered swap, if one was sent.
    pub(super) sent: Option<(WriteExchange, Box<Swap>)>,
}

impl DeferredOutcome {
    /// Returns the outcome that is replayed until the store has it; `None` if the write has none.
    pub(super) fn of(write: &DeferredWrite) -> Option<Self> {
        let (outcome, releases) = match &write.action {
            OwnerAction::Complete { outcome, .. } => (outcome, false),
            OwnerAction::Redirect { outcome, .. } => (outcome, true),
            _ => return None,
        };
        let Record { scheme, fingerprint, extensions, .. } = write.ownership.record()?;
        let replay = Replay {
            outcome: outcome.clone(),
            fence: write.ownership.fence(),
            expires_in: None,
            expires_at: None,
            deferred: true,
        };
        Some(Self {
            scheme: scheme.clone(),
            fingerprint: *fingerprint,
            replay,
            redirects: extensions.redirects(),
            releases,
        })
    }
}

impl DeferredWrite {
    /// Returns the memory that it needs beyond its own size, in bytes.
    pub(super) fn bytes(&self) -> usize {
        match &self.action {
            OwnerAction::Complete { outcome, .. } | OwnerAction::Redirect { outcome, .. } => {
                outcome.bytes().len()
            }
            OwnerAction::Abandon { seen } => seen.as_ref().map_or(0, |seen| seen.bytes().len()),
            OwnerAction::Checkpoint { checkpoint, .. } => checkpoint.len(),
            OwnerAction::Renew { .. }
            | OwnerAction::Release { .. }
            | OwnerAction::Withdraw { .. } => 0,
        }
    }
}

impl EngineState {
    /// Sends an owner's write until the store has accepted or rejected it. `outcome` is replayed to
    /// duplicates meanwhile.
    pub(super) fn defer(self: &Arc<Self>, write: DeferredWrite, outcome: Option<DeferredOutcome>) {
        // Entered before the task runs, so that the backlog never lacks it.
        let entry = self.backlog.enter(*write.ownership.id(), write.bytes(), outcome);
        let inner = Arc::clone(self);
        self.runtime.spawn(async move {
            let key = entry.key;
            // This call drops the ownership: the execution leaves the executions in progress before
            // waiters are woken.
            let written = inner.write_until_known(write).await;
            // The outcome is in the store before it leaves the backlog: a duplicate finds it in one
            // of the two.
            drop(entry);
            let seen = match written {
                Some(WriteResult::Recorded(seen)) => Some(seen),
                // The error is logged already: the record is damaged.
                None => None,
                Some(written) => {
                    tracing::warn!(?key, ?written, "a deferred write was not recorded");
                    None
                }
            };
            inner.waiters.wake(&key, seen);
        });
    }

    /// Continues a claim that was given up while its last swap was unanswered. The swap may land
    /// later, so it is sent until its result is known, and a lease that it acquires is released.
    pub(super) fn release_when_landed(
        self: &Arc<Self>,
        mut claiming: ClaimExchange,
        swap: Box<Swap>,
    ) {
        let entry = self.backlog.enter(swap.id, 0, None);
        let inner = Arc::clone(self);
        self.runtime.spawn(async move {
            let landed = retry::send_until_definite(
                &*inner.store,
                &inner.backlog.permits,
                inner.store_timeout,
                &swap,
            )
            .await;
            if let Some(ownership) = landed.and_then(|swapped| claiming.receive_late(swapped)) {
                inner.withdraw(ownership);
            }
            drop(entry);
        });
    }

    /// Releases a record that a claim which ends here found to be its own: a copy of its first swap
    /// landed late, on a key that was purged meanwhile.
    pub(super) fn release_owned(self: &Arc<Self>, claiming: &ClaimExchange) {
        if let Some(ownership) = claiming.owned() {
            self.withdraw(ownership);
        }
    }

    /// Withdraws in the background a claim that does not execute.
    pub(super) fn withdraw(self: &Arc<Self>, ownership: Ownership) {
        let action = ownership.withdraw();
        self.defer(DeferredWrite { ownership, action, sent: None }, None);
    }

    async fn write_until_known(&self, write: DeferredWrite) -> Option<WriteResult> {
        let DeferredWrite { ownership, action, mut sent } = write;
        loop {
            let (mut writing, mut next) = match sent.take() {
                Some((writing, swap)) => (writing, Next::Send(*swap)),
                None => match ownership.write(action.clone(), &*self.entropy) {
                    Ok(started) => started,
                    Err(_) => {
                        tokio::time::sleep(self.store_timeout).await;
                        continue;
                    }
                },
            };
            let written = loop {
                let swap = match next {
                    Next::Ready(written) => break written,
                    Next::Send(swap) => swap,
                };
                let permits = &self.backlog.permits;
                let swapped =
                    retry::send_until_definite(&*self.store, permits, self.store_timeout, &swap)
                        .await?;
                match Exchange::receive(&mut writing, swapped, &*self.entropy) {
                    Ok(then) => next = then,
                    // Every swap that was sent has a result: the write begins anew.
                    Err(_) => break WriteResult::Contended,
                }
            };
            if written != WriteResult::Contended {
                return Some(written);
            }
            tokio::time::sleep(self.store_timeout).await;
        }
    }
}

/// Returns the deferred write that an owner's interrupted write leaves.
pub(super) fn deferred_write(
    ownership: Ownership,
    action: OwnerAction,
    writing: WriteExchange,
    error: ExchangeError,
) -> DeferredWrite {
    let sent = match error {
        ExchangeError::Store { swap, .. } => Some((writing, swap)),
        ExchangeError::Entropy(_) => None,
    };
    DeferredWrite { ownership, action, sent }
}
