//! The register of a store that several processes write.

use std::collections::BTreeMap;
use std::error::Error;
use std::num::NonZeroU32;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use hapax_core::store::{BoxFuture, Capabilities, Reaped, Snapshot, Swap, Swapped};
use hapax_core::{
    ClaimError, Idempotency, Key, MemoryStore, Namespace, OperationId, Policy, Scope, Store,
    StoreError,
};
use hapax_operators::{QuarantineStart, RegisteredUser, RouteNaming, StoreRegister, StoreUser};

use crate::keys::Paid;
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
    let Process { register, user, engine } = Process::new(Arc::clone(store) as _, "x-user");
    register.enter(user, &engine).await.unwrap()
}

/// A process that has not entered.
struct Process {
    register: StoreRegister,
    user: StoreUser,
    engine: Idempotency,
}

impl Process {
    fn new(store: Arc<dyn Store>, scope: &str) -> Self {
        let clock = Arc::new(TestClock::new());
        let engine = Idempotency::builder(Arc::clone(&store)).namespace("shop").clock(clock);
        let engine = engine.build().unwrap();
        let mut user = StoreUser::new(engine.namespace(), format!("a service of {scope}")).unwrap();
        user.routes = routes(scope);
        Self { register: StoreRegister::new(store, Duration::from_secs(2)), user, engine }
    }

    fn pending(&self) -> RegisteredUser {
        self.register.pending(self.user.clone(), &self.engine)
    }

    async fn enter(&self) -> RegisteredUser {
        self.register.enter(self.user.clone(), &self.engine).await.unwrap()
    }

    fn executes(&self) -> bool {
        !self.engine.quarantines().pauses()
    }
}

fn routes(scope: &str) -> BTreeMap<String, RouteNaming> {
    let naming = RouteNaming {
        name: String::new(),
        scope: scope.to_owned(),
        key_header: "idempotency-key".to_owned(),
        fingerprint: "http/1".to_owned(),
        later: BTreeMap::new(),
    };
    BTreeMap::from([("*".to_owned(), naming)])
}

#[tokio::test(start_paused = true)]
async fn a_paused_process_does_not_resume_beside_one_with_other_settings() {
    let store = Contended::new(&memory());
    let [old, new] = ["x-user", "x-tenant"]
        .map(|scope| Process::new(Arc::clone(&store) as Arc<dyn Store>, scope));
    let paused = old.enter().await;
    assert!(old.executes());
    // Waits until the entry of the paused process has lapsed.
    let entered = new.enter().await;
    assert!(new.executes() && !old.executes());
    let resume = async {
        tokio::time::sleep(Duration::from_secs(2)).await;
        entered.apply().await.unwrap();
    };
    let (applied, ()) = tokio::join!(paused.apply(), resume);
    let error = applied.unwrap_err();
    let text = error.source().unwrap().to_string();
    assert!(
        text.contains("expected scope x-tenant for path *, as a service of x-tenant"),
        "{text}"
    );
    assert!(!old.executes());
    entered.apply().await.unwrap();
    assert!(new.executes());
    entered.remove().await;
    paused.apply().await.unwrap();
    assert!(old.executes());
}

/// As after a start during an outage of the store.
#[tokio::test(start_paused = true)]
async fn a_pending_process_does_not_enter_beside_one_with_other_settings() {
    let store = Contended::new(&memory());
    let [old, new] = ["x-user", "x-tenant"]
        .map(|scope| Process::new(Arc::clone(&store) as Arc<dyn Store>, scope));
    let entered = old.enter().await;
    // The entry is old after an outage, and is written again.
    tokio::time::sleep(Duration::from_secs(60)).await;
    let pending = new.pending();
    let resume = async {
        tokio::time::sleep(Duration::from_secs(2)).await;
        entered.apply().await.unwrap();
    };
    let (applied, ()) = tokio::join!(pending.apply(), resume);
    applied.unwrap_err();
    assert!(old.executes() && !new.executes());
    entered.remove().await;
    pending.apply().await.unwrap();
    assert!(new.executes());
}

/// Of two processes that have lapsed, the one that wrote later stays.
#[tokio::test(start_paused = true)]
async fn a_process_that_was_followed_does_not_resume_after_an_outage() {
    let store = Contended::new(&memory());
    let [old, new] = ["x-user", "x-tenant"]
        .map(|scope| Process::new(Arc::clone(&store) as Arc<dyn Store>, scope));
    let paused = old.enter().await;
    let entered = new.enter().await;
    tokio::time::sleep(Duration::from_secs(60)).await;
    let resume = async {
        tokio::time::sleep(Duration::from_secs(2)).await;
        assert!(!old.executes());
        entered.apply().await.unwrap();
    };
    let (applied, ()) = tokio::join!(paused.apply(), resume);
    applied.unwrap_err();
    assert!(new.executes() && !old.executes());
    assert!(paused.difference().is_some(), "a reload compares with the process that runs");
}

/// Routes with `store_outage = "open"` execute without a record in an outage only.
#[tokio::test(start_paused = true)]
async fn the_difference_from_another_process_is_no_outage() {
    let memory = memory();
    let store = Contended::new(&memory);
    store.loads.store(0, Ordering::Relaxed);
    let [old, new] = [Contended::new(&memory) as Arc<dyn Store>, Arc::clone(&store) as _];
    let [old, new] = [Process::new(old, "x-user"), Process::new(new, "x-tenant")];
    let pending = new.register.enter_when_available(new.user.clone(), &new.engine).await.unwrap();
    let is_outage = async || {
        let (scope, key): (_, Key) = (Scope::shared(), "k".parse().unwrap());
        let claimed = new.engine.claim(&scope, &key, &Paid, &Policy::default()).await;
        match claimed.unwrap_err() {
            ClaimError::Store(_) => true,
            ClaimError::Quarantined { .. } => false,
            other => panic!("{other}"),
        }
    };
    assert!(is_outage().await);
    let entered = old.enter().await;
    store.loads.store(u32::MAX, Ordering::Relaxed);
    let keep = async {
        for _ in 0..5 {
            tokio::time::sleep(Duration::from_secs(1)).await;
            entered.apply().await.unwrap();
        }
    };
    let refused = async {
        pending.apply().await.unwrap_err();
        assert!(!is_outage().await);
    };
    tokio::join!(refused, keep);
}

/// The other process entered after the last read of the register.
#[tokio::test(start_paused = true)]
async fn a_process_with_changed_routes_stops_beside_one_with_other_settings() {
    let store = Contended::new(&memory());
    let [old, new] =
        ["x-user", "x-user"].map(|scope| Process::new(Arc::clone(&store) as Arc<dyn Store>, scope));
    let reloaded = old.enter().await;
    let entered = new.enter().await;
    reloaded.replace("http://a".to_owned(), routes("x-tenant")).unwrap();
    assert!(!old.executes(), "before the next write");
    let keep = async {
        tokio::time::sleep(Duration::from_secs(2)).await;
        entered.apply().await.unwrap();
    };
    let (applied, ()) = tokio::join!(reloaded.apply(), keep);
    applied.unwrap_err();
    assert!(new.executes() && !old.executes());
    reloaded.replace("http://a".to_owned(), routes("x-tenant")).unwrap_err();
    reloaded.replace("http://a".to_owned(), routes("x-user")).unwrap();
    reloaded.apply().await.unwrap();
    entered.apply().await.unwrap();
    assert!(new.executes() && old.executes());
}

/// A swap after a conflict begins with the content that the conflict returned, which is outdated after a pause.
#[tokio::test(start_paused = true)]
async fn a_write_after_conflicts_and_a_pause_begins_with_what_the_register_has_then() {
    let memory = memory();
    let store = Contended::new(&memory);
    let entered = enter(&store).await;
    store.rival.set(enter(&Contended::new(&memory)).await).unwrap();
    let loads = store.loads.load(Ordering::Relaxed);
    entered.apply().await.unwrap();
    assert_eq!(store.swaps.load(Ordering::Relaxed), 5);
    assert_eq!(loads - store.loads.load(Ordering::Relaxed), 2);
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
