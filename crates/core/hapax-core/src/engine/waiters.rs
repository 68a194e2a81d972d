//! Duplicates that wait for the first one, and how they are woken.
//!
//! Register, then read, then sleep: a waiter that registered before it read cannot miss the wake-up
//! for a later change. One waiter of a key polls for all of them, because the owner may be in
//! another process; when it leaves, the next one polls. If the store notifies of writes, the poller
//! reads at once after a notification.

use std::collections::HashMap;
use std::collections::hash_map::Entry as MapEntry;
use std::future::pending;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::sync::watch;
use tokio::time::{Instant, sleep, sleep_until, timeout};

use super::idempotency::EngineState;
use crate::record::{RecordState, WriteId};
use crate::scope::OperationId;
use crate::store::{BoxFuture, Notify, Snapshot};

/// Interval at which a process polls a key with waiters.
const POLL_EVERY: Duration = Duration::from_millis(250);

/// A wake-up of the waiters of a key, with the snapshot that its sender saw, if any.
type WakeUp = Option<Arc<Snapshot>>;

#[derive(Debug)]
pub(super) struct Waiters {
    keys: Mutex<WaiterTable>,
    per_key: usize,
    total: usize,
}

#[derive(Debug, Default)]
struct WaiterTable {
    by_key: HashMap<OperationId, KeyWaiters>,
    waiting: usize,
}

#[derive(Debug)]
struct KeyWaiters {
    waiting: usize,
    wake_ups: watch::Sender<WakeUp>,
    poller: Arc<tokio::sync::Mutex<()>>,
}

impl Waiters {
    pub(super) fn new(per_key: usize, total: usize) -> Self {
        Self { keys: Mutex::default(), per_key, total }
    }

    /// Returns the number of waiters.
    pub(super) fn waiting(&self) -> usize {
        self.lock().waiting
    }

    /// Adds a waiter for `key`; `None` if there are too many.
    pub(super) fn register(self: &Arc<Self>, key: OperationId) -> Option<Waiter> {
        let mut keys = self.lock();
        if keys.waiting >= self.total {
            return None;
        }
        let entry = match keys.by_key.entry(key) {
            MapEntry::Occupied(entry) if entry.get().waiting >= self.per_key => return None,
            MapEntry::Occupied(entry) => entry.into_mut(),
            MapEntry::Vacant(entry) => entry.insert(KeyWaiters {
                waiting: 0,
                wake_ups: watch::Sender::new(None),
                poller: Arc::default(),
            }),
        };
        entry.waiting += 1;
        let waiter = Waiter {
            waiters: Arc::clone(self),
            key,
            wake_ups: entry.wake_ups.subscribe(),
            poller: Arc::clone(&entry.poller),
        };
        keys.waiting += 1;
        Some(waiter)
    }

    /// Wakes the waiters for `key`, with the snapshot if there is one.
    pub(super) fn wake(&self, key: &OperationId, seen: Option<Snapshot>) {
        if let Some(entry) = self.lock().by_key.get(key) {
            entry.wake_ups.send_replace(seen.map(Arc::new));
        }
    }

    fn lock(&self) -> MutexGuard<'_, WaiterTable> {
        // No code under the lock panics; if it did, the counts would be consistent.
        self.keys.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A permit to wait for a key, given back when it is dropped.
#[derive(Debug)]
pub(super) struct Waiter {
    waiters: Arc<Waiters>,
    key: OperationId,
    wake_ups: watch::Receiver<WakeUp>,
    poller: Arc<tokio::sync::Mutex<()>>,
}

impl Waiter {
    /// Waits for a notification after it registered or was last woken; `Err` at the deadline. A
    /// record that still has the write id `known`, and that no claim executes or reconciles, is
    /// none.
    ///
    /// Dropping it is safe: it holds nothing but its permit and perhaps the poller's lock.
    pub(super) async fn changed(
        &mut self,
        inner: &EngineState,
        deadline: Instant,
        known: Option<WriteId>,
    ) -> Result<WakeUp, DeadlinePassed> {
        let Self { waiters, key, wake_ups, poller } = self;
        let polled = async {
            let _polling = poller.lock().await;
            let notify = inner.store.capabilities().notify;
            let mut written = watch_record(notify, key);
            loop {
                tokio::select! {
                    () = &mut written => {
                        // Watched again before the read: a write after the read is not missed.
                        written = watch_record(notify, key);
                    }
                    () = sleep(POLL_EVERY) => {}
                }
                // No answer, or an error, is no notification.
                let load = async {
                    // If the semaphore were closed, it would bound nothing; the read does no harm.
                    let _permit = inner.permits.acquire().await;
                    inner.store.load(key).await
                };
                let Ok(Ok(seen)) = timeout(inner.store_timeout, load).await else { continue };
                let write_id = seen.stored.as_ref().map(|stored| stored.write_id);
                let changed = known.is_none() || write_id != known;
                if !is_live(&seen) && changed && !inner.executions.runs(key, &seen) {
                    return seen;
                }
            }
        };
        tokio::select! {
            biased;
            woken = wake_ups.changed() => match woken {
                Ok(()) => Ok(wake_ups.borrow_and_update().clone()),
                // The sender lives as long as the key has waiters, and this is one of them.
                Err(_) => Ok(None),
            },
            seen = polled => {
                waiters.wake(key, Some(seen));
                Ok(wake_ups.borrow_and_update().clone())
            }
            () = sleep_until(deadline) => Err(DeadlinePassed),
        }
    }
}

/// The deadline passed.
#[derive(Debug)]
pub(super) struct DeadlinePassed;

impl Drop for Waiter {
    fn drop(&mut self) {
        let mut keys = self.waiters.lock();
        keys.waiting -= 1;
        if let MapEntry::Occupied(mut entry) = keys.by_key.entry(self.key) {
            entry.get_mut().waiting -= 1;
            if entry.get().waiting == 0 {
                entry.remove();
            }
        }
    }
}

/// Resolves when the record is written; never if the store has no notifications.
fn watch_record<'a>(notify: Option<&'a dyn Notify>, key: &'a OperationId) -> BoxFuture<'a, ()> {
    notify.map_or_else(|| Box::pin(pending()) as BoxFuture<'a, ()>, |notify| notify.written(key))
}

/// Returns whether an execution or a reconciliation is in progress.
pub(super) fn is_live(seen: &Snapshot) -> bool {
    seen.stored.as_ref().is_some_and(|stored| {
        let busy = matches!(
            stored.record.state,
            RecordState::InFlight | RecordState::Unknown { reconciling: true, .. }
        );
        busy && seen.now < stored.lease_until
    })
}
