//! The register of a store that other processes write all the time.

use std::num::NonZeroU32;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use hapax_core::store::{BoxFuture, Capabilities, Reaped, Snapshot, Swap, Swapped};
use hapax_core::{Idempotency, MemoryStore, Namespace, OperationId, Store, StoreError};
use hapax_operators::{QuarantineStart, RegisteredUser, StoreRegister, StoreUser};

use crate::world::{TestClock, memory};

/// A shared store. A rival, once set, writes its entry before each swap, which then conflicts.
#[derive(Debug)]
struct Contended {
    store: Arc<MemoryStore>,
    rival: Mutex<Option<RegisteredUser>>,
    is_read_only: AtomicBool,
}

impl Contended {
    fn new(store: &Arc<MemoryStore>) -> Arc<Self> {
        let store = Arc::clone(store);
        Arc::new(Self { store, rival: Mutex::new(None), is_read_only: AtomicBool::new(false) })
    }
}

impl Store for Contended {
    fn swap(&self, swap: Swap) -> BoxFuture<'_, Result<Swapped, StoreError>> {
        Box::pin(async move {
            if self.is_read_only.load(Ordering::Relaxed) {
                return Err(StoreError::unavailable("a fault of the test"));
            }
            let rival = self.rival.lock().unwrap().clone();
            if let Some(rival) = rival {
                rival.apply().await?;
            }
            self.store.swap(swap).await
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

/// Enters a process, later if the store is read only.
async fn enter(store: &Arc<Contended>) -> (Idempotency, RegisteredUser) {
    let store = Arc::clone(store) as Arc<dyn Store>;
    let clock = Arc::new(TestClock::new());
    let engine = Idempotency::builder(Arc::clone(&store)).namespace("shop").clock(clock);
    let engine = engine.build().unwrap();
    let user = StoreUser::new(engine.namespace(), "a service".to_owned()).unwrap();
    let register = StoreRegister::new(store, Duration::from_secs(2));
    let entered = register.enter_when_available(user, &engine).await.unwrap();
    (engine, entered)
}

#[tokio::test(start_paused = true)]
async fn a_process_that_others_keep_from_writing_applies_quarantines_and_goes_on() {
    let memory = memory();
    let store = Contended::new(&memory);
    let (engine, entered) = enter(&store).await;
    let (_other, rival) = enter(&Contended::new(&memory)).await;
    *store.rival.lock().unwrap() = Some(rival);
    let refreshed = entered.clone();
    let refreshing = tokio::spawn(async move { refreshed.refresh().await });
    for _ in 0..15 {
        tokio::time::sleep(Duration::from_secs(1)).await;
        assert!(!engine.quarantines().pauses());
    }
    let shop = Namespace::new("shop").unwrap();
    let start = QuarantineStart {
        namespace: shop.clone(),
        route: None,
        duration: Duration::from_secs(3600),
        any_namespace: false,
        reason: "restored".to_owned(),
        who: "ann".to_owned(),
    };
    let operator = StoreRegister::new(Contended::new(&memory), Duration::from_secs(2));
    operator.begin_quarantine(&start).await.unwrap();
    tokio::time::sleep(Duration::from_secs(5)).await;
    assert_eq!(engine.quarantines().in_force().len(), 1);
    operator.end_quarantine(&shop, None).await.unwrap();
    tokio::time::sleep(Duration::from_secs(5)).await;
    assert!(!engine.quarantines().pauses());
    // A process with other settings may enter 30 s after its last write.
    tokio::time::sleep(Duration::from_secs(6)).await;
    assert!(engine.quarantines().pauses());
    *store.rival.lock().unwrap() = None;
    tokio::time::sleep(Duration::from_secs(5)).await;
    assert!(!engine.quarantines().pauses());
    // What it reads counts as read at the last write of all processes.
    store.is_read_only.store(true, Ordering::Relaxed);
    tokio::time::sleep(Duration::from_secs(10)).await;
    assert!(engine.quarantines().pauses());
    refreshing.abort();
}

#[tokio::test(start_paused = true)]
async fn a_process_that_is_not_in_the_register_executes_nothing_because_others_write_it() {
    let memory = memory();
    let store = Contended::new(&memory);
    store.is_read_only.store(true, Ordering::Relaxed);
    let (engine, entered) = enter(&store).await;
    let (_other, rival) = enter(&Contended::new(&memory)).await;
    for _ in 0..10 {
        rival.apply().await.unwrap();
        entered.apply().await.unwrap_err();
        assert!(engine.quarantines().pauses());
        tokio::time::sleep(Duration::from_secs(1)).await;
    }
    store.is_read_only.store(false, Ordering::Relaxed);
    entered.apply().await.unwrap();
    assert!(!engine.quarantines().pauses());
}
