//! Memory budget for large records that are being read.

use std::sync::atomic::{AtomicUsize, Ordering};

use tokio::sync::{Semaphore, SemaphorePermit};

/// Bytes of one permit: a semaphore has at most 2^32 of them.
const UNIT: usize = 1024;

/// Copies of a record in memory: one sealed, one opened.
const COPIES: usize = 2;

/// Limit of waiters. Further requests are rejected at once: if they waited, their callers would
/// time out first, without knowing that their swap did nothing.
const WAITING: usize = 64;

#[derive(Debug)]
pub(crate) struct MemoryBudget {
    free: Semaphore,
    units: u32,
    waiting: AtomicUsize,
}

/// Memory reserved for one record, until dropped.
#[derive(Debug)]
pub(crate) struct Reservation<'a> {
    bytes: usize,
    _permit: Option<SemaphorePermit<'a>>,
}

impl MemoryBudget {
    pub(crate) fn new(bytes: usize) -> Self {
        let units = units(bytes).max(1);
        Self { free: Semaphore::new(units as usize), units, waiting: AtomicUsize::new(0) }
    }

    /// Reserves memory for a record of `bytes` sealed bytes; `None` if too many wait already. A
    /// record larger than the whole budget takes all of it. Waiters are served in order; a dropped
    /// wait has no effect.
    pub(crate) async fn reserve(&self, bytes: usize) -> Option<Reservation<'_>> {
        let waits = WaiterCount(&self.waiting);
        if waits.0.fetch_add(1, Ordering::Relaxed) >= WAITING {
            return None;
        }
        let needed = units(bytes.saturating_mul(COPIES));
        let (permits, bytes) =
            if needed < self.units { (needed, bytes) } else { (self.units, usize::MAX) };
        // The semaphore is never closed.
        Some(Reservation { bytes, _permit: self.free.acquire_many(permits).await.ok() })
    }
}

/// Counts a waiter until dropped.
struct WaiterCount<'a>(&'a AtomicUsize);

impl Drop for WaiterCount<'_> {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}

impl Reservation<'_> {
    /// Returns the size of the largest record that fits.
    pub(crate) const fn bytes(&self) -> usize {
        self.bytes
    }
}

fn units(bytes: usize) -> u32 {
    u32::try_from(bytes.div_ceil(UNIT)).unwrap_or(u32::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn waiters_beyond_the_limit_are_rejected_at_once() {
        let room = MemoryBudget::new(64 * 1024);
        let held = room.reserve(32 * 1024).await.unwrap();
        assert_eq!(held.bytes(), usize::MAX, "it is alone");
        let mut waiting = Vec::new();
        for _ in 0..WAITING {
            let mut place = Box::pin(room.reserve(1024));
            assert!(poll_once(place.as_mut()).is_none());
            waiting.push(place);
        }
        assert!(room.reserve(1024).await.is_none());
        // A wait that is dropped permits another one.
        waiting.pop();
        let mut another = Box::pin(room.reserve(1024));
        assert!(poll_once(another.as_mut()).is_none());
        drop(held);
        for place in waiting {
            assert_eq!(place.await.unwrap().bytes(), 1024);
        }
        assert!(another.await.is_some());
    }

    /// Polls the future once, and returns its output if it is ready.
    fn poll_once<F: Future>(future: std::pin::Pin<&mut F>) -> Option<F::Output> {
        let mut context = std::task::Context::from_waker(std::task::Waker::noop());
        match future.poll(&mut context) {
            std::task::Poll::Ready(output) => Some(output),
            std::task::Poll::Pending => None,
        }
    }
}
