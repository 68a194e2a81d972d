//! The register of a store that several processes write.

use std::num::NonZeroU32;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use hapax_core::store::{BoxFuture, Capabilities, Reaped, Snapshot, Swap, Swapped};
use hapax_core::{Idempotency, MemoryStore, Namespace, OperationId, Store, StoreError};
use hapax_operators::{QuarantineStart, RegisteredUser, StoreRegister, StoreUser};

use crate::world::{TestClock, memory};

/// A store with a limited number of loads. A rival, once set, writes its entry before the first swap, and after each swap
/// that conflicts.
#[derive(Debug)]
struct Contended {
    store: Arc<MemoryStore>,
    is_shared: bool,
    loads: AtomicU32,
    rival: OnceLock<RegisteredUser>,
    /// Swaps since the rival was set.
    swaps: AtomicU32,
}

impl Contended {
    fn new(store: &Arc<MemoryStore>) -> Arc<Self> {
        Self::with(store, true)
    }

    fn with(store: &Arc<MemoryStore>, is_shared: bool) -> Arc<Self> {
        let (store, loads) = (Arc::clone(store), AtomicU32::new(u32::MAX));
        Arc::new(Self { store, is_shared, loads, rival: OnceLock::new(), swaps: AtomicU32::new(0) })
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
        let left =
            self.loads.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |it| it.checked_sub(1));
        match left {
            Ok(_) => self.store.load(id),
            Err(_) => Box::pin(async { Err(StoreError::unavailable("a fault of the test")) }),
        }
    }

    fn reap(&self, limit: NonZeroU32) -> BoxFuture<'_, Result<Reaped, StoreError>> {
        self.store.reap(limit)
    }

    fn capabilities(&self) -> Capabilities<'_> {
        Capabilities { shared: self.is_shared, ..self.store.capabilities() }
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

/// The content that the conflict returns is outdated after the pause.
#[tokio::test(start_paused = true)]
async fn a_write_after_a_conflict_begins_with_what_the_register_has_then() {
    let memory = memory();
    let store = Contended::new(&memory);
    let entered = enter(&store).await;
    store.rival.set(enter(&Contended::new(&memory)).await).unwrap();
    entered.apply().await.unwrap();
    assert_eq!(store.swaps.load(Ordering::Relaxed), 2);
}

/// On a shared store the process is listed as one that has not confirmed the quarantine; on a file there is no such list.
#[tokio::test(start_paused = true)]
async fn a_quarantine_that_is_not_applied_is_an_error_on_a_store_of_one_process() {
    // The loads of the check of a shared store, and of the change.
    for (is_shared, loads) in [(true, 2), (false, 1)] {
        let store = Contended::with(&memory(), is_shared);
        let entered = enter(&store).await;
        let start = QuarantineStart {
            namespace: Namespace::new("shop").unwrap(),
            route: None,
            duration: Duration::from_secs(3600),
            any_namespace: false,
            reason: "restored".to_owned(),
            who: "ann".to_owned(),
        };
        store.loads.store(loads, Ordering::Relaxed);
        let begun = entered.begin_quarantine(&start).await;
        assert_eq!(begun.is_ok(), is_shared, "{begun:?}");
        store.loads.store(u32::MAX, Ordering::Relaxed);
        let views = entered.quarantines().await.unwrap();
        assert_eq!((views.len(), views[0].confirmed), (1, 0));
        assert_eq!(views[0].unconfirmed.len(), usize::from(is_shared));
    }
}
