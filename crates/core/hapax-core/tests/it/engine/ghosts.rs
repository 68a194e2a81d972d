//! A copy of a claim's swap that is applied after the claim ended.

use std::num::NonZeroU32;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use hapax_core::store::{BoxFuture, Capabilities, Reaped, Snapshot, Swap, Swapped};
use hapax_core::{
    ClaimError, Idempotency, MemoryCapacity, MemoryStore, OnUnknown, OperationId, Scope, Store,
    StoreError,
};
use tokio::time::Instant;

use super::{TestClock, Text, key, own, policy};

const HOUR: Duration = Duration::from_secs(3600);

/// A store that applies the first swap a second time: while the second swap is in progress, after the
/// record of the first one was reaped. It is then unavailable for one swap.
#[derive(Debug)]
struct AppliesTwice {
    memory: Arc<MemoryStore>,
    copy: Mutex<Option<Swap>>,
    swaps: AtomicUsize,
}

impl Store for AppliesTwice {
    fn swap(&self, swap: Swap) -> BoxFuture<'_, Result<Swapped, StoreError>> {
        Box::pin(async move {
            match self.swaps.fetch_add(1, Ordering::SeqCst) {
                0 => *self.copy.lock().unwrap() = Some(swap.clone()),
                1 => {
                    tokio::time::sleep(HOUR).await;
                    self.memory.reap(NonZeroU32::MAX).await.unwrap();
                    let copy = self.copy.lock().unwrap().take().unwrap();
                    assert!(matches!(self.memory.swap(copy).await, Ok(Swapped::Stored(_))));
                }
                2 => return Err(StoreError::unavailable("the store is unavailable")),
                _ => {}
            }
            self.memory.swap(swap).await
        })
    }

    fn load<'a>(&'a self, key: &'a OperationId) -> BoxFuture<'a, Result<Snapshot, StoreError>> {
        self.memory.load(key)
    }

    fn reap(&self, limit: NonZeroU32) -> BoxFuture<'_, Result<Reaped, StoreError>> {
        self.memory.reap(limit)
    }

    fn capabilities(&self) -> Capabilities<'_> {
        self.memory.capabilities()
    }
}

#[tokio::test(start_paused = true)]
async fn the_record_of_a_late_copy_of_a_claim_is_released() {
    let clock = Arc::new(TestClock(Instant::now()));
    let memory = Arc::new(MemoryStore::new(clock, MemoryCapacity::default()));
    let other = Idempotency::builder(Arc::clone(&memory)).build().unwrap();
    let block = policy(OnUnknown::Block);
    own(&other, &block).await.release().await.unwrap();

    let swaps = AtomicUsize::new(0);
    let store = Arc::new(AppliesTwice { memory, copy: Mutex::default(), swaps });
    let process = Idempotency::builder(Arc::clone(&store)).store_timeout(2 * HOUR).build().unwrap();
    let claimed = process.claim(&Scope::shared(), &key(), &Text("a"), &block).await;
    assert!(matches!(claimed, Err(ClaimError::Interrupted(_))), "{claimed:?}");
    process.drain().await;
    assert!(store.swaps.load(Ordering::SeqCst) > 3);
    // A record left in flight would block the key for ever.
    drop(own(&other, &block).await);
}
