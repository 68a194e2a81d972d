//! The bounded queues of the threads that use the disk.

use std::collections::VecDeque;
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use hapax_core::store::parts::{Admission, QueueLimits};

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum PushError {
    Full,
    Closed,
}

/// The result of waiting.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Woken {
    Item,
    Closed,
    TimedOut,
}

/// A queue with many producers and few consumers, in order. Items that were put in before it is
/// closed can still be taken out.
#[derive(Debug)]
pub(crate) struct Queue<T> {
    limit: QueueLimits,
    inner: Mutex<Inner<T>>,
    ready: Condvar,
}

#[derive(Debug)]
struct Inner<T> {
    items: VecDeque<(T, usize)>,
    bytes: usize,
    closed: bool,
}

impl<T> Queue<T> {
    pub(crate) fn new(limit: QueueLimits) -> Self {
        let inner = Inner { items: VecDeque::new(), bytes: 0, closed: false };
        Self { limit, inner: Mutex::new(inner), ready: Condvar::new() }
    }

    pub(crate) fn push(
        &self,
        item: T,
        bytes: usize,
        admission: Admission,
    ) -> Result<(), PushError> {
        let mut inner = self.lock();
        if inner.closed {
            return Err(PushError::Closed);
        }
        if !self.limit.admits(inner.items.len(), inner.bytes, bytes, admission) {
            return Err(PushError::Full);
        }
        inner.items.push_back((item, bytes));
        inner.bytes += bytes;
        drop(inner);
        self.ready.notify_one();
        Ok(())
    }

    /// Returns the next item, if there is one now.
    pub(crate) fn pop(&self) -> Option<T> {
        let mut inner = self.lock();
        let (item, bytes) = inner.items.pop_front()?;
        inner.bytes -= bytes;
        Some(item)
    }

    /// Waits for the next item; `None` once the queue is closed and empty.
    pub(crate) fn take(&self) -> Option<T> {
        loop {
            if let Some(item) = self.pop() {
                return Some(item);
            }
            if self.wait(None) == Woken::Closed {
                return None;
            }
        }
    }

    /// Waits for an item, for at most `at_most`.
    pub(crate) fn wait(&self, at_most: Option<Duration>) -> Woken {
        let mut inner = self.lock();
        loop {
            if !inner.items.is_empty() {
                return Woken::Item;
            }
            if inner.closed {
                return Woken::Closed;
            }
            inner = match at_most {
                None => self.ready.wait(inner).unwrap_or_else(PoisonError::into_inner),
                Some(time) => {
                    let waited = self.ready.wait_timeout(inner, time);
                    let (inner, result) = waited.unwrap_or_else(PoisonError::into_inner);
                    if result.timed_out() && inner.items.is_empty() && !inner.closed {
                        return Woken::TimedOut;
                    }
                    inner
                }
            };
        }
    }

    pub(crate) fn close(&self) {
        self.lock().closed = true;
        self.ready.notify_all();
    }

    pub(crate) fn len(&self) -> usize {
        self.lock().items.len()
    }

    /// No code that can panic runs under the lock, so a poisoned queue is consistent.
    fn lock(&self) -> MutexGuard<'_, Inner<T>> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
