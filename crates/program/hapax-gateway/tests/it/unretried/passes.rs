//! Passes of the background reconciliation: what they read, how much they request, and how they end.

use std::num::NonZeroU32;
use std::sync::atomic::{AtomicUsize, Ordering};

use hapax_core::machine::{DefiniteVerdict, Resolve};
use hapax_core::store::{
    BoxFuture, Capabilities, Cursor, Page, Reaped, ScanStep, Snapshot, Swap, Swapped, Visitor,
};
use hapax_core::{OperationId, Outcome, RecordState, StoreError};

use super::*;

#[tokio::test(flavor = "multi_thread")]
async fn of_several_gateways_one_at_a_time_requests_the_reconcile_url_about_an_operation() {
    let (upstream, permits) = held(paid).await;
    let (clock, store) = store();
    leave(&clock, &store, "left", Some(described(&store, &upstream))).await;
    clock.advance(HOUR);
    let mut gateways = Vec::new();
    for _ in 0..3 {
        gateways.push(start_on(reconciling(&upstream, OFTEN), &store).await);
    }
    until("a reconcile request", || asked(&upstream).len() == 1).await;
    let id = id(&gateways[0]).await;
    for gateway in &gateways {
        assert_eq!(reconcile(gateway, &id).await, "not-yet");
    }
    permits.add_permits(10);
    reaches(&gateways[1], &id, "done").await;
    assert_eq!(upstream.seen().len(), 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_pass_has_four_requests_in_progress_and_every_operation_gets_its_verdict() {
    let [now, most] = [(); 2].map(|()| Arc::new(AtomicUsize::new(0)));
    let permits = Arc::new(Semaphore::new(0));
    let upstream = {
        let (permits, now, most) = (Arc::clone(&permits), Arc::clone(&now), Arc::clone(&most));
        Upstream::start(move |_| {
            let (permits, now, most) = (Arc::clone(&permits), Arc::clone(&now), Arc::clone(&most));
            async move {
                most.fetch_max(now.fetch_add(1, Ordering::SeqCst) + 1, Ordering::SeqCst);
                permits.acquire().await.unwrap().forget();
                now.fetch_sub(1, Ordering::SeqCst);
                paid()
            }
        })
        .await
    };
    let (clock, store) = store();
    for number in 0..20 {
        leave(&clock, &store, &number.to_string(), Some(described(&store, &upstream))).await;
    }
    clock.advance(HOUR);
    let mut config = reconciling(&upstream, OFTEN);
    config.reconcile_limit = 7;
    let gateway = start_on(config, &store).await;
    until("four reconcile requests", || now.load(Ordering::SeqCst) == 4).await;
    permits.add_permits(20);
    measures(&gateway, "hapax_unretried_total{result=\"happened\"} 20").await;
    assert_eq!((most.load(Ordering::SeqCst), upstream.seen().len()), (4, 20));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_shutdown_concludes_the_requests_in_progress_and_begins_no_others() {
    let (upstream, permits) = held(paid).await;
    let (clock, store) = store();
    for number in 0..10 {
        leave(&clock, &store, &number.to_string(), Some(described(&store, &upstream))).await;
    }
    clock.advance(HOUR);
    let gateway = start_on(reconciling(&upstream, OFTEN), &store).await;
    until("reconcile requests", || asked(&upstream).len() == 4).await;
    let admin = gateway.admin_addr().unwrap();
    let ending = tokio::spawn(gateway.shutdown());
    let drains = async { while get(admin, "/readyz").await.status != 503 {} };
    tokio::time::timeout(TIMEOUT, drains).await.unwrap();
    permits.add_permits(10);
    assert_eq!(ending.await.unwrap(), hapax_gateway::ShutdownReport::default());
    assert_eq!(asked(&upstream).len(), 4);
    let engine = engine(&store);
    let mut done = 0;
    for number in 0..10 {
        let id = engine.operation_id(&Scope::shared(), &number.to_string().parse().unwrap());
        let stored = engine.load(&id).await.unwrap().stored.unwrap();
        done += usize::from(matches!(stored.record.state, RecordState::Done(_)));
    }
    assert_eq!(done, 4);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_request_of_a_gateway_that_ended_at_once_is_repeated_after_its_timeout() {
    let (upstream, permits) = held(paid).await;
    let (clock, store) = store();
    leave(&clock, &store, "left", Some(described(&store, &upstream))).await;
    clock.advance(HOUR);
    let gateway = start_on(reconciling(&upstream, OFTEN), &store).await;
    let id = id(&gateway).await;
    until("a reconcile request", || asked(&upstream).len() == 1).await;
    drop(gateway);
    permits.add_permits(10);
    let gateway = start_on(reconciling(&upstream, NEVER), &store).await;
    assert_eq!(reconcile(&gateway, &id).await, "not-yet");
    clock.advance(Duration::from_secs(5));
    assert_eq!(reconcile(&gateway, &id).await, "happened");
    assert_eq!(asked(&upstream).len(), 2);
}

/// A store with faults, which counts the steps of walks.
#[derive(Debug)]
struct Faulty {
    store: Arc<MemoryStore>,
    steps: AtomicUsize,
    /// True if the first step of a walk panics.
    panics: bool,
    /// The record whose swaps fail.
    fails: Option<OperationId>,
    /// The record that an operator at another gateway decides just before it is loaded.
    decided: Option<OperationId>,
}

impl Faulty {
    fn new(store: Arc<MemoryStore>) -> Self {
        Self { store, steps: AtomicUsize::new(0), panics: false, fails: None, decided: None }
    }

    async fn decide(&self, id: &OperationId) {
        let Some(stored) = self.store.load(id).await.unwrap().stored else { return };
        let resolve = Resolve {
            expected: stored.fence,
            force: true,
            forget: false,
            resolution: DefiniteVerdict::Happened(Outcome::new("http/1", "")),
            note: None,
            restart: false,
        };
        engine(&self.store).resolve(*id, resolve).await.unwrap();
    }
}

impl Store for Faulty {
    fn swap(&self, swap: Swap) -> BoxFuture<'_, Result<Swapped, StoreError>> {
        if self.fails == Some(swap.id) {
            return Box::pin(async { Err(StoreError::unavailable("a fault")) });
        }
        self.store.swap(swap)
    }

    fn load<'a>(&'a self, id: &'a OperationId) -> BoxFuture<'a, Result<Snapshot, StoreError>> {
        Box::pin(async move {
            if self.decided == Some(*id) {
                self.decide(id).await;
            }
            self.store.load(id).await
        })
    }

    fn reap(&self, limit: NonZeroU32) -> BoxFuture<'_, Result<Reaped, StoreError>> {
        self.store.reap(limit)
    }

    fn capabilities(&self) -> Capabilities<'_> {
        self.store.capabilities()
    }
}

impl Inspect for Faulty {
    fn page(
        &self,
        after: Option<OperationId>,
        limit: NonZeroU32,
    ) -> BoxFuture<'_, Result<Page, StoreError>> {
        self.store.page(after, limit)
    }

    fn scan<'a>(
        &'a self,
        from: Cursor,
        limit: NonZeroU32,
        visit: Visitor<'a>,
    ) -> BoxFuture<'a, Result<ScanStep, StoreError>> {
        let is_first = self.steps.fetch_add(1, Ordering::SeqCst) == 0;
        assert!(!(self.panics && is_first), "a planted bug");
        self.store.scan(from, limit, visit)
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn the_store_is_not_walked_while_no_route_reconciles() {
    let upstream = upstream(|_| paid()).await;
    let (clock, store) = store();
    leave(&clock, &store, "left", Some(described(&store, &upstream))).await;
    clock.advance(HOUR);
    let walked = Arc::new(Faulty::new(store));
    let mut reconciles = reconciling(&upstream, OFTEN);
    // With an operators' listener the census walks anyway.
    reconciles.admin = None;
    let mut blocks = reconciles.clone();
    (blocks.policy.on_unknown, blocks.policy.reconcile_url) = (OnUnknown::Block, None);
    blocks.policy.reconcile_authorization = None;
    let gateway = start_on(blocks, &walked).await;
    tokio::time::sleep(OFTEN * 5).await;
    assert_eq!(walked.steps.load(Ordering::SeqCst), 0);
    gateway.reload(reconciles).unwrap();
    until("a reconcile request", || asked(&upstream).len() == 1).await;
    assert!(walked.steps.load(Ordering::SeqCst) > 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn after_a_panic_the_passes_begin_anew() {
    let upstream = upstream(|_| paid()).await;
    let (clock, store) = store();
    leave(&clock, &store, "left", Some(described(&store, &upstream))).await;
    clock.advance(HOUR);
    let faulty = Arc::new(Faulty { panics: true, ..Faulty::new(store) });
    let mut config = reconciling(&upstream, OFTEN);
    config.admin = None;
    let _gateway = start_on(config, &faulty).await;
    until("a reconcile request", || asked(&upstream).len() == 1).await;
    assert!(faulty.steps.load(Ordering::SeqCst) > 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_record_that_was_decided_elsewhere_leaves_its_place_to_others() {
    let upstream = upstream(|_| paid()).await;
    let (clock, store) = store();
    for key in ["first", "second"] {
        leave(&clock, &store, key, Some(described(&store, &upstream))).await;
    }
    clock.advance(HOUR);
    let id = |key: &str| engine(&store).operation_id(&Scope::shared(), &key.parse().unwrap());
    let decided = Some(id("first"));
    let faulty = Arc::new(Faulty { decided, ..Faulty::new(Arc::clone(&store)) });
    let mut config = reconciling(&upstream, OFTEN);
    config.reconcile_limit = 1;
    let gateway = start_on(config, &faulty).await;
    reaches(&gateway, &id("second").to_string(), "done").await;
    let seen = asked(&upstream);
    assert_eq!(seen.len(), 1);
    assert_eq!(seen[0].header("idempotency-operation-id"), id("second").to_string());
}

#[tokio::test(flavor = "multi_thread")]
async fn records_of_a_pass_are_counted_under_their_own_reasons() {
    let upstream = upstream(|_| paid()).await;
    let (clock, store) = store();
    let id = |key: &str| engine(&store).operation_id(&Scope::shared(), &key.parse().unwrap());
    leave(&clock, &store, "fails", Some(described(&store, &upstream))).await;
    // A retry continues from its checkpoint.
    let left = Left(Some(described(&store, &upstream)));
    let terms = Terms { on_unknown: OnUnknown::Reconcile, ..Policy::default().terms };
    let policy = Policy { terms, ..Policy::default() };
    let key = "blocked".parse().unwrap();
    let claimed = engine(&store).claim(&Scope::shared(), &key, &left, &policy).await.unwrap();
    let Claim::Execute(lease) = claimed else { panic!() };
    lease.handle().save("half way".into()).await.unwrap();
    drop(lease);
    clock.advance(HOUR);
    let fails = Some(id("fails"));
    let faulty = Arc::new(Faulty { fails, ..Faulty::new(Arc::clone(&store)) });
    let gateway = start_on(reconciling(&upstream, OFTEN), &faulty).await;
    let wait = async {
        let counts = ["blocked", "failed"]
            .map(|reason| format!("hapax_unretried_not_requested{{reason=\"{reason}\"}} 1"));
        let admin = gateway.admin_addr().unwrap();
        while {
            let metrics = get(admin, "/metrics").await.text();
            !counts.iter().all(|count| metrics.lines().any(|line| line == count))
        } {}
    };
    tokio::time::timeout(TIMEOUT, wait).await.unwrap();
    assert!(upstream.seen().is_empty());
}
