//! The bounded queues in front of the connections.

use std::collections::{HashSet, VecDeque};
use std::sync::atomic::{AtomicU8, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use hapax_core::OperationId;
use hapax_core::store::parts::{Admission, QueueLimits};
use tokio::sync::Notify;

use crate::error::PostgresStoreError;

/// An item of a queue.
pub(crate) trait Item {
    fn key(&self) -> &OperationId;
    fn size(&self) -> usize;
    fn ticket(&self) -> &Ticket;
}

/// State of a request, from which task and caller agree on whether it was ever sent.
#[derive(Clone, Debug, Default)]
pub(crate) struct Ticket(Arc<AtomicU8>);

const WAITS: u8 = 0;
const SENT: u8 = 1;
const WITHDRAWN: u8 = 2;

impl Ticket {
    /// Marks the request as sent. Returns `false` if its caller has withdrawn it and was answered
    /// that it was never sent.
    fn send(&self) -> bool {
        self.0.compare_exchange(WAITS, SENT, Ordering::AcqRel, Ordering::Acquire).is_ok()
    }

    /// Marks a sent request as waiting again. It must be known that it did nothing.
    pub(crate) fn wait_again(&self) {
        // Only the side that sent it calls this, and a sent request is not withdrawn.
        self.0.store(WAITS, Ordering::Release);
    }

    fn is_withdrawn(&self) -> bool {
        self.0.load(Ordering::Acquire) == WITHDRAWN
    }

    /// Withdraws the request for its caller. Returns `true` if it was not sent and never will be.
    pub(crate) fn withdraw(&self) -> bool {
        let was = self.0.compare_exchange(WAITS, WITHDRAWN, Ordering::AcqRel, Ordering::Acquire);
        was.is_ok()
    }
}

/// A queue with many producers, from which connections take. Items that were put in before it is
/// closed can still be taken out.
#[derive(Debug)]
pub(crate) struct Queue<T> {
    limit: QueueLimits,
    inner: Mutex<Inner<T>>,
    ready: Notify,
}

#[derive(Debug)]
struct Inner<T> {
    items: VecDeque<T>,
    bytes: usize,
    /// Keys whose items were taken and are not done.
    busy: HashSet<OperationId>,
    closed: bool,
}

impl<T: Item> Queue<T> {
    pub(crate) fn new(limit: QueueLimits) -> Self {
        let items = VecDeque::new();
        let inner = Inner { items, bytes: 0, busy: HashSet::new(), closed: false };
        Self { limit, inner: Mutex::new(inner), ready: Notify::new() }
    }

    pub(crate) fn push(&self, item: T, admission: Admission) -> Result<(), PostgresStoreError> {
        let mut inner = self.lock();
        if inner.closed {
            return Err(PostgresStoreError::Closed);
        }
        if !self.limit.admits(inner.items.len(), inner.bytes, item.size(), admission) {
            return Err(PostgresStoreError::QueueFull);
        }
        inner.bytes += item.size();
        inner.items.push_back(item);
        drop(inner);
        self.ready.notify_one();
        Ok(())
    }

    /// Adds an item of another queue at the end; or returns it if there is no space for it even
    /// without the withdrawn ones.
    pub(crate) fn pass_on(&self, item: T) -> Result<(), T> {
        let mut inner = self.lock();
        let is_full = |inner: &Inner<T>| {
            !self.limit.admits(inner.items.len(), inner.bytes, item.size(), Admission::Any)
        };
        if is_full(&inner) {
            inner.items.retain(|item| !item.ticket().is_withdrawn());
            inner.bytes = inner.items.iter().map(Item::size).sum();
            if is_full(&inner) {
                return Err(item);
            }
        }
        inner.bytes += item.size();
        inner.items.push_back(item);
        drop(inner);
        self.ready.notify_one();
        Ok(())
    }

    /// Returns an item that was taken and must be sent again to the front. It was within the limit
    /// when it first arrived.
    pub(crate) fn put_back(&self, item: T) {
        let mut inner = self.lock();
        inner.bytes += item.size();
        inner.items.push_front(item);
        drop(inner);
        self.ready.notify_one();
    }

    /// Takes items of distinct keys, up to `most` and about `bytes`, in order. Withdrawn ones are
    /// dropped. The keys are busy, which means that no other task is given their items, until they
    /// are [`done`](Self::done).
    pub(crate) fn take(&self, most: usize, bytes: usize) -> Vec<T> {
        let mut inner = self.lock();
        let (mut taken, mut passed) = (Vec::new(), VecDeque::new());
        let mut size = 0;
        while taken.len() < most
            && let Some(item) = inner.items.pop_front()
        {
            if inner.busy.contains(item.key()) {
                passed.push_back(item);
                continue;
            }
            if !taken.is_empty() && size + item.size() > bytes {
                passed.push_back(item);
                break;
            }
            inner.bytes -= item.size();
            if item.ticket().send() {
                size += item.size();
                inner.busy.insert(*item.key());
                taken.push(item);
            }
        }
        while let Some(item) = passed.pop_back() {
            inner.items.push_front(item);
        }
        let more = !inner.items.is_empty();
        drop(inner);
        if more {
            // For another task: two wake-ups before any task waits are one.
            self.ready.notify_one();
        }
        taken
    }

    /// Ends the busy state of the keys.
    pub(crate) fn done<'a>(&self, keys: impl IntoIterator<Item = &'a OperationId>) {
        let mut inner = self.lock();
        for key in keys {
            inner.busy.remove(key);
        }
        let waiting = !inner.items.is_empty();
        drop(inner);
        if waiting {
            self.ready.notify_one();
        }
    }

    /// Takes all items of one key: none of them is sent.
    pub(crate) fn drain_key(&self, key: &OperationId) -> Vec<T> {
        let mut inner = self.lock();
        let (of_key, others) = std::mem::take(&mut inner.items)
            .into_iter()
            .partition::<VecDeque<T>, _>(|item| item.key() == key);
        inner.items = others;
        inner.bytes -= of_key.iter().map(Item::size).sum::<usize>();
        of_key.into()
    }

    /// Takes all items: none of them is sent.
    pub(crate) fn drain(&self) -> VecDeque<T> {
        let mut inner = self.lock();
        inner.bytes = 0;
        std::mem::take(&mut inner.items)
    }

    /// Waits until there may be an item to take; `false` once the queue is closed and empty.
    ///
    /// Dropping the future is safe: an unused wake-up is passed on.
    pub(crate) async fn wait(&self) -> bool {
        loop {
            let ready = self.ready.notified();
            {
                let inner = self.lock();
                if inner.items.iter().any(|item| !inner.busy.contains(item.key())) {
                    return true;
                }
                if inner.closed && inner.items.is_empty() {
                    // Other tasks may wait for the same event.
                    self.ready.notify_one();
                    return false;
                }
            }
            ready.await;
        }
    }

    pub(crate) fn close(&self) {
        self.lock().closed = true;
        self.ready.notify_one();
    }

    pub(crate) fn len(&self) -> usize {
        self.lock().items.len()
    }

    /// No code that can panic runs under the lock, so a poisoned queue is consistent.
    fn lock(&self) -> MutexGuard<'_, Inner<T>> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
