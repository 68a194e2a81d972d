//! The register of a store that several processes write.

use std::num::NonZeroU32;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use hapax_core::store::{BoxFuture, Capabilities, Reaped, Snapshot, Swap, Swapped};
use hapax_core::{Idempotency, MemoryStore, OperationId, Store, StoreError};
use hapax_operators::{RegisteredUser, StoreRegister, StoreUser};

use crate::world::{TestClock, memory};

/// A shared store. A rival, once set, writes its entry before the first swap, and after each swap that conflicts.
#[derive(Debug)]
struct Contended {
    store: Arc<MemoryStore>,
    rival: OnceLock<RegisteredUser>,
    /// Swaps since the rival was set.
    swaps: AtomicU32,
}

impl Contended {
    fn new(store: &Arc<MemoryStore>) -> Arc<Self> {
        let store = Arc::clone(store);
        Arc::new(Self { store, rival: OnceLock::new(), swaps: AtomicU32::new(0) })
    }
}

impl Store for Contended {
    fn swap(&self, swap: Swap) -> BoxFuture<'_, Result<Swapped, StoreError>> {
        Box::pin(async move {
            let Some(rival) = self.rival.get() else { return self.store.swap(swap).await };
            if self.swaps.fetch_add(1, Ordering::Relaxed) == 0 {
                rival.apply().await?;
            }
            let swapped = self.store.swap(swap).await?;
            if matches!(swapped, Swapped::Conflict(_)) {
                rival.apply().await?;
            }
            Ok(swapped)
        })
    }

    fn load<'a>(&'a self, id: &'a OperationId) -> BoxFuture<'a, Result<Snapshot, StoreError>> {
        self.store.load(id)
    }

    fn reap(&self, limit: NonZeroU32) -> BoxFuture<'_, Result<Reaped, StoreError>> {
        self.store.reap(limit)
    }

    fn capabilities(&self) -> Capabilities<'_> {
        Capabilities { shared: true, ..self.store.capabilities() }
    }
}

async fn enter(store: &Arc<Contended>) -> RegisteredUser {
    let store = Arc::clone(store) as Arc<dyn Store>;
    let clock = Arc::new(TestClock::new());
    let engine = Idempotency::builder(Arc::clone(&store)).namespace("shop").clock(clock);
    let engine = engine.build().unwrap();
    let user = StoreUser::new(engine.namespace(), "a service".to_owned()).unwrap();
    let register = StoreRegister::new(store, Duration::from_secs(2));
    register.enter(user, &engine).await.unwrap()
}

/// What came with the conflict is old after the pause.
#[tokio::test(start_paused = true)]
async fn a_write_after_a_conflict_begins_with_what_the_register_has_then() {
    let memory = memory();
    let store = Contended::new(&memory);
    let entered = enter(&store).await;
    store.rival.set(enter(&Contended::new(&memory)).await).unwrap();
    entered.apply().await.unwrap();
    assert_eq!(store.swaps.load(Ordering::Relaxed), 2);
}
