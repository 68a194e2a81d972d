//! Passes of the background reconciliation: what they read, how much they request, and how they end.

use std::num::NonZeroU32;
use std::sync::atomic::{AtomicUsize, Ordering};

use hapax_core::store::{
    BoxFuture, Capabilities, Cursor, Page, Reaped, ScanStep, Snapshot, Swap, Swapped, Visitor,
};
use hapax_core::{OperationId, RecordState, StoreError};

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

/// Counts the steps of walks.
#[derive(Debug)]
struct Walked {
    store: Arc<MemoryStore>,
    steps: AtomicUsize,
}

impl Store for Walked {
    fn swap(&self, swap: Swap) -> BoxFuture<'_, Result<Swapped, StoreError>> {
        self.store.swap(swap)
    }

    fn load<'a>(&'a self, id: &'a OperationId) -> BoxFuture<'a, Result<Snapshot, StoreError>> {
        self.store.load(id)
    }

    fn reap(&self, limit: NonZeroU32) -> BoxFuture<'_, Result<Reaped, StoreError>> {
        self.store.reap(limit)
    }

    fn capabilities(&self) -> Capabilities<'_> {
        self.store.capabilities()
    }
}

impl Inspect for Walked {
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
        self.steps.fetch_add(1, Ordering::SeqCst);
        self.store.scan(from, limit, visit)
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn the_store_is_not_walked_while_no_route_reconciles() {
    let upstream = upstream(|_| paid()).await;
    let (clock, store) = store();
    leave(&clock, &store, "left", Some(described(&store, &upstream))).await;
    clock.advance(HOUR);
    let walked = Arc::new(Walked { store, steps: AtomicUsize::new(0) });
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
