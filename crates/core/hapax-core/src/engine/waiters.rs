//! Copies that wait for the first of them, and how they are woken.
//!
//! Register, then look, then sleep: a waiter that registered before it looked cannot miss the
//! wake-up for what it did not see. One waiter of a key polls for all of them, because the owner
//! may be in another process; when it leaves, the next one polls. Where the store tells of writes,
//! that one looks at once when it does.

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

/// How often a process looks at a key for which copies wait.
const POLL_EVERY: Duration = Duration::from_millis(250);

/// What waiters of a key are told: what was seen, if the one who tells saw it.
type WakeUp = Option<Arc<Snapshot>>;

#[derive(Debug)]
pub(super) struct Waiters {
    keys: Mutex<WaiterTable>,
    per_key: usize,
    in_all: usize,
}

#[derive(Debug, Default)]
struct WaiterTable {
    by_key: HashMap<OperationId, KeyWaiters>,
    waiting: usize,
}

#[derive(Debug)]
struct KeyWaiters {
    waiting: usize,
    news: watch::Sender<WakeUp>,
    poller: Arc<tokio::sync::Mutex<()>>,
}

impl Waiters {
    pub(super) fn new(per_key: usize, in_all: usize) -> Self {
        Self { keys: Mutex::default(), per_key, in_all }
    }

    /// Copies waiting now.
    pub(super) fn waiting(&self) -> usize {
        self.lock().waiting
    }

    /// Joins those who wait for `key`; `None` when there are too many.
    pub(super) fn register(self: &Arc<Self>, key: OperationId) -> Option<Waiter> {
        let mut keys = self.lock();
        if keys.waiting >= self.in_all {
            return None;
        }
        let crowd = match keys.by_key.entry(key) {
            MapEntry::Occupied(crowd) if crowd.get().waiting >= self.per_key => return None,
            MapEntry::Occupied(crowd) => crowd.into_mut(),
            MapEntry::Vacant(place) => place.insert(KeyWaiters {
                waiting: 0,
                news: watch::Sender::new(None),
                poller: Arc::default(),
            }),
        };
        crowd.waiting += 1;
        let waiter = Waiter {
            waiters: Arc::clone(self),
            key,
            news: crowd.news.subscribe(),
            poller: Arc::clone(&crowd.poller),
        };
        keys.waiting += 1;
        Some(waiter)
    }

    /// Wakes those who wait for `key`, with what was seen of it.
    pub(super) fn wake(&self, key: &OperationId, seen: Option<Snapshot>) {
        if let Some(crowd) = self.lock().by_key.get(key) {
            crowd.news.send_replace(seen.map(Arc::new));
        }
    }

    fn lock(&self) -> MutexGuard<'_, WaiterTable> {
        // Nothing panics while it is held; and counts stay whole if something did.
        self.keys.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A place among those who wait for a key; given up when dropped.
#[derive(Debug)]
pub(super) struct Waiter {
    waiters: Arc<Waiters>,
    key: OperationId,
    news: watch::Receiver<WakeUp>,
    poller: Arc<tokio::sync::Mutex<()>>,
}

impl Waiter {
    /// Sleeps until there is news since it registered or was last woken; `Err` at the deadline. A
    /// record that still has the tag `known`, and that no claim works on, is no news.
    ///
    /// Dropping it is safe: it holds nothing but its place and perhaps the poller's lock.
    pub(super) async fn changed(
        &mut self,
        inner: &EngineState,
        deadline: Instant,
        known: Option<WriteId>,
    ) -> Result<WakeUp, DeadlinePassed> {
        let Self { waiters, key, news, poller } = self;
        let polled = async {
            let _turn = poller.lock().await;
            let notify = inner.store.capabilities().notify;
            let mut written = watch_cell(notify, key);
            loop {
                tokio::select! {
                    () = &mut written => {
                        // Watched anew before the look: a write after the look is not missed.
                        written = watch_cell(notify, key);
                    }
                    () = sleep(POLL_EVERY) => {}
                }
                // No answer, or an error, is no news.
                let look = async {
                    // Closed, it would bound nothing, and looking does no harm.
                    let _turn = inner.permits.acquire().await;
                    inner.store.load(key).await
                };
                let Ok(Ok(seen)) = timeout(inner.store_timeout, look).await else { continue };
                let write_id = seen.stored.as_ref().map(|stored| stored.write_id);
                let changed = known.is_none() || write_id != known;
                if !is_live(&seen) && changed && !inner.executions.runs(key, &seen) {
                    return seen;
                }
            }
        };
        tokio::select! {
            biased;
            told = news.changed() => match told {
                Ok(()) => Ok(news.borrow_and_update().clone()),
                // The sender lives as long as the crowd, and this waiter is one of it.
                Err(_) => Ok(None),
            },
            seen = polled => {
                waiters.wake(key, Some(seen));
                Ok(news.borrow_and_update().clone())
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
        if let MapEntry::Occupied(mut crowd) = keys.by_key.entry(self.key) {
            crowd.get_mut().waiting -= 1;
            if crowd.get().waiting == 0 {
                crowd.remove();
            }
        }
    }
}

/// Never resolves where the store does not tell.
fn watch_cell<'a>(notify: Option<&'a dyn Notify>, key: &'a OperationId) -> BoxFuture<'a, ()> {
    notify.map_or_else(|| Box::pin(pending()) as BoxFuture<'a, ()>, |notify| notify.written(key))
}

/// Whether somebody executes, or asks what became of an execution.
pub(super) fn is_live(seen: &Snapshot) -> bool {
    seen.stored.as_ref().is_some_and(|stored| {
        let busy = matches!(
            stored.record.state,
            RecordState::InFlight | RecordState::Unknown { reconciling: true, .. }
        );
        busy && seen.now < stored.lease_until
    })
}
