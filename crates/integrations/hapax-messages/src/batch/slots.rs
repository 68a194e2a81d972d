//! The slots of unacknowledged messages, which are taken for a whole batch at a time.

use std::num::NonZeroUsize;
use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::time::sleep;

use super::options::BatchConsumerLimits;

/// Time to wait for the slots of a whole batch while a transaction is free.
const GATHER: Duration = Duration::from_millis(20);

/// One permit for each message that may be unacknowledged.
#[derive(Debug)]
pub(super) struct Slots {
    free: Arc<Semaphore>,
    batch: usize,
    /// Slots that a batch waits for: all that it may have, or its part of those that there are.
    wanted: usize,
}

impl Slots {
    pub(super) fn new(limits: &BatchConsumerLimits, max_unacknowledged: NonZeroUsize) -> Self {
        // More permits than a semaphore has cannot be used.
        let max_unacknowledged = max_unacknowledged.get().min(Semaphore::MAX_PERMITS);
        let batch = limits.batch.get();
        let wanted = max_unacknowledged.div_ceil(limits.transactions.get()).min(batch);
        Self { free: Arc::new(Semaphore::new(max_unacknowledged)), batch, wanted }
    }

    /// Returns slots for the messages of a batch, one for each. They become free as the messages of
    /// another batch are acknowledged: without a wait for the others the first would be for a batch
    /// of one, with a transaction of its own.
    pub(super) async fn take(&self, transactions: &Semaphore) -> Option<Vec<OwnedSemaphorePermit>> {
        let mut slots = vec![Arc::clone(&self.free).acquire_owned().await.ok()?];
        if let Some(mut others) = self.others(transactions).await {
            slots.extend(std::iter::from_fn(|| others.split(1)));
        }
        while slots.len() < self.batch
            && let Ok(slot) = Arc::clone(&self.free).try_acquire_owned()
        {
            slots.push(slot);
        }
        Some(slots)
    }

    async fn others(&self, transactions: &Semaphore) -> Option<OwnedSemaphorePermit> {
        let others = u32::try_from(self.wanted - 1).unwrap_or(u32::MAX);
        let mut others = pin!(Arc::clone(&self.free).acquire_many_owned(others));
        loop {
            tokio::select! {
                biased;
                others = &mut others => return others.ok(),
                () = sleep(GATHER) => {}
            }
            // Messages that wait for a retry have slots for longer. While all transactions are
            // in progress, a smaller batch would only wait for one.
            if transactions.available_permits() > 0 {
                return None;
            }
        }
    }
}
