//! The memory of unacknowledged messages.

use std::num::NonZeroUsize;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use tokio::sync::watch;

/// Part of the budget that a message is expected to take before one was received.
const FIRST_PART: usize = 16;

/// A budget in bytes for unacknowledged messages. Their sizes are known only once they are received:
/// nothing is received while it is used up, and otherwise as many messages as fit, if each is as large
/// as the largest of those received last. So a message that is larger than the budget is received
/// alone, and what exceeds the budget is part of one receive.
#[derive(Debug)]
pub(crate) struct MemoryBudget {
    limit: NonZeroUsize,
    used: watch::Sender<usize>,
    expected: AtomicUsize,
}

/// The part of the budget that one message takes, until it is dropped.
#[derive(Debug)]
pub(crate) struct MemoryPermit {
    budget: Arc<MemoryBudget>,
    bytes: usize,
}

impl MemoryBudget {
    pub(crate) fn new(limit: NonZeroUsize) -> Arc<Self> {
        let expected = AtomicUsize::new(limit.get() / FIRST_PART);
        Arc::new(Self { limit, used: watch::Sender::new(0), expected })
    }

    /// Returns the limit in bytes.
    pub(crate) fn limit(&self) -> usize {
        self.limit.get()
    }

    /// Returns the bytes of the messages in memory.
    pub(crate) fn used(&self) -> usize {
        *self.used.borrow()
    }

    /// Returns whether nothing is received because of the bytes in memory.
    pub(crate) fn is_used_up(&self) -> bool {
        self.used() >= self.limit.get()
    }

    /// Waits until the budget is not used up. Returns the number of messages to receive, at most `max`.
    pub(crate) async fn free(&self, max: NonZeroUsize) -> NonZeroUsize {
        let mut used = self.used.subscribe();
        // The sender is in `self`.
        let used = used.wait_for(|used| *used < self.limit.get()).await.map_or(0, |used| *used);
        let expected = self.expected.load(Ordering::Relaxed).max(1);
        let fitting = self.limit.get().saturating_sub(used) / expected;
        NonZeroUsize::new(fitting).unwrap_or(NonZeroUsize::MIN).min(max)
    }

    /// Takes the bytes of the messages of one receive.
    pub(crate) fn take(self: &Arc<Self>, sizes: &[usize]) -> Vec<MemoryPermit> {
        if let Some(largest) = sizes.iter().max() {
            self.expected.store(*largest, Ordering::Relaxed);
        }
        let taken = sizes.iter().fold(0_usize, |sum, bytes| sum.saturating_add(*bytes));
        // No change for waiters: they wait until fewer bytes are used.
        self.used.send_if_modified(|used| {
            *used = used.saturating_add(taken);
            false
        });
        sizes.iter().map(|bytes| MemoryPermit { budget: Arc::clone(self), bytes: *bytes }).collect()
    }
}

impl Drop for MemoryPermit {
    fn drop(&mut self) {
        self.budget.used.send_if_modified(|used| {
            let was_used_up = *used >= self.budget.limit.get();
            *used = used.saturating_sub(self.bytes);
            was_used_up && *used < self.budget.limit.get()
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn count(count: usize) -> NonZeroUsize {
        NonZeroUsize::new(count).unwrap()
    }

    #[tokio::test(start_paused = true)]
    async fn as_many_messages_are_received_as_fit_by_the_largest_of_the_last_ones() {
        let budget = MemoryBudget::new(count(1600));
        assert_eq!(budget.free(count(100)).await, count(16), "none was received");
        let first = budget.take(&[100, 10]);
        assert_eq!(budget.free(count(100)).await, count(14));
        assert_eq!(budget.free(count(3)).await, count(3));
        let second = budget.take(&[1000]);
        assert_eq!((budget.used(), budget.free(count(100)).await), (1110, count(1)));
        let third = budget.take(&[5000]);
        let waiting = budget.free(count(100));
        let waited = tokio::time::timeout(std::time::Duration::from_secs(60), waiting).await;
        assert!(waited.is_err(), "the budget is used up");
        drop((first, second, third));
        assert_eq!((budget.used(), budget.free(count(100)).await), (0, count(1)));
    }
}
