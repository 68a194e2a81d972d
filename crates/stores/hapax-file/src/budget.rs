//! Room for large records on their way to those who asked.

use std::sync::atomic::{AtomicUsize, Ordering};

use tokio::sync::{Semaphore, SemaphorePermit};

/// Bytes of one permit: a place has no more than 2^32 of them.
const UNIT: usize = 1024;

/// A record is there sealed and opened.
const COPIES: usize = 2;

/// Who may wait. Further ones are told at once: if they waited, their callers would give up before
/// their turn, and not know what became of a swap that did nothing.
const WAITING: usize = 64;

#[derive(Debug)]
pub(crate) struct MemoryBudget {
    free: Semaphore,
    units: u32,
    waiting: AtomicUsize,
}

/// Room for one record; given back when dropped.
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

    /// A place for a record of so many sealed bytes; `None` when too many wait for one. What is larger
    /// than all of the room takes all of it. Those who wait are served in order; dropped, a wait
    /// leaves no trace.
    pub(crate) async fn reserve(&self, bytes: usize) -> Option<Reservation<'_>> {
        let waits = WaiterCount(&self.waiting);
        if waits.0.fetch_add(1, Ordering::Relaxed) >= WAITING {
            return None;
        }
        let needed = units(bytes.saturating_mul(COPIES));
        let (permits, bytes) =
            if needed < self.units { (needed, bytes) } else { (self.units, usize::MAX) };
        // It is never closed.
        Some(Reservation { bytes, _permit: self.free.acquire_many(permits).await.ok() })
    }
}

/// Counted until it is dropped.
struct WaiterCount<'a>(&'a AtomicUsize);

impl Drop for WaiterCount<'_> {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}

impl Reservation<'_> {
    /// How large a record fits.
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
    async fn few_wait_and_the_others_hear_it_at_once() {
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
        // A wait that is given up makes room for another one.
        waiting.pop();
        let mut another = Box::pin(room.reserve(1024));
        assert!(poll_once(another.as_mut()).is_none());
        drop(held);
        for place in waiting {
            assert_eq!(place.await.unwrap().bytes(), 1024);
        }
        assert!(another.await.is_some());
    }

    /// What the future has come to, polled once.
    fn poll_once<F: Future>(future: std::pin::Pin<&mut F>) -> Option<F::Output> {
        let mut context = std::task::Context::from_waker(std::task::Waker::noop());
        match future.poll(&mut context) {
            std::task::Poll::Ready(output) => Some(output),
            std::task::Poll::Pending => None,
        }
    }
}
