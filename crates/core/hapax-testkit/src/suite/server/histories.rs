//! Histories of many callers while server and network fail; a checker finds whether they are
//! linearizable.

use std::future::Future;
use std::num::NonZeroU32;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering::Relaxed};
use std::time::Duration;

use hapax_core::store::{BoxFuture, Capabilities, Reaped, Snapshot, Swap, Swapped};
use hapax_core::{OperationId, Store, StoreError};
use tokio::time::sleep;

use super::{ServerFixture, StoreConnection, open_by};
use crate::faults::{FaultProxy, FaultProxyRates};
use crate::storm::{Storm, StormCounts};

/// Operations of each history, unless `HAPAX_OPERATIONS` is set.
pub const OPERATIONS: usize = 4_000;

/// The timeout of the stores: short, so that many swaps are ambiguous.
const SHORT: Duration = Duration::from_millis(300);

/// Runs a history of three processes through a proxy and one that reaches the server directly,
/// until `enough`, while `harm` disturbs them without end.
pub async fn run_history<F: ServerFixture>(
    storm: Storm,
    server: &F,
    proxy: &FaultProxy,
    harm: impl Future<Output = ()>,
    enough: impl Fn(&StormCounts) -> bool,
) -> StormCounts {
    let (proxied, direct) = (proxy.address().port(), server.address().port());
    let stores = connect(server, &[proxied, proxied, proxied, direct]).await;
    tokio::select! {
        counts = storm.run_until(&stores, enough) => counts,
        () = harm => unreachable!("harm has no end"),
    }
}

async fn connect<F: ServerFixture>(server: &F, ports: &[u16]) -> Vec<Arc<F::Store>> {
    let mut stores = Vec::new();
    for port in ports {
        stores
            .push(Arc::new(open_by(server, StoreConnection::through(*port).timeout(SHORT)).await));
    }
    stores
}

/// The network loses, tears and delays messages, and closes connections.
pub async fn histories_over_a_network_that_loses_and_delays<F: ServerFixture>() {
    let server = F::start().await;
    let proxy = FaultProxy::before(server.address(), 11).await.unwrap();
    let harm = async {
        proxy.set(FaultProxyRates {
            lose_request: F::LOSS,
            lose_reply: F::LOSS,
            late_request: F::LOSS,
            tear_reply: F::LOSS,
            delay_at_most: Duration::from_millis(50),
            ..FaultProxyRates::default()
        });
        loop {
            sleep(Duration::from_millis(70)).await;
            proxy.cut();
        }
    };
    let enough = |sum: &StormCounts| {
        let counts = proxy.counts();
        let happened =
            [counts.lost_requests, counts.lost_replies, counts.late_requests, counts.torn_replies];
        happened.iter().all(|times| *times > 3) && counts.cuts > 3 && sum.ambiguous > 20
    };
    let sum = run_history(Storm::of(OPERATIONS, 11), &server, &proxy, harm, enough).await;
    assert!(sum.stored > F::STORED && sum.loads > 200, "{sum:?}");
}

/// The server freezes for longer and for less long than the timeout of its callers.
pub async fn histories_on_a_server_that_freezes<F: ServerFixture>() {
    let server = F::start().await;
    let proxy = FaultProxy::before(server.address(), 12).await.unwrap();
    let freezes = AtomicU32::new(0);
    let harm = async {
        loop {
            sleep(Duration::from_millis(100)).await;
            server.pause();
            let even = freezes.fetch_add(1, Relaxed).is_multiple_of(2);
            sleep(Duration::from_millis(if even { 450 } else { 100 })).await;
            server.resume();
        }
    };
    let enough = |sum: &StormCounts| freezes.load(Relaxed) > 3 && sum.ambiguous > 5;
    let sum = run_history(Storm::of(OPERATIONS, 12), &server, &proxy, harm, enough).await;
    assert!(sum.stored > F::STORED, "{sum:?}");
}

/// The server is killed and started again.
pub async fn histories_on_a_server_that_is_killed<F: ServerFixture>() {
    let mut server = F::start().await;
    let proxy = FaultProxy::before(server.address(), 13).await.unwrap();
    let ports = [proxy.address().port(), server.address().port()];
    let stores = connect(&server, &ports).await;
    let kills = AtomicU32::new(0);
    let enough = |sum: &StormCounts| kills.load(Relaxed) > 2 && sum.ambiguous > 5;
    let storm = Storm::of(OPERATIONS, 13);
    let sum = tokio::select! {
        sum = storm.run_until(&stores, enough) => sum,
        () = async {
            loop {
                sleep(Duration::from_millis(150)).await;
                server.kill().await;
                kills.fetch_add(1, Relaxed);
                server.restart().await;
            }
        } => unreachable!("harm has no end"),
    };
    assert!(sum.stored > F::STORED, "{sum:?}");
}

/// A planted bug: reports swaps that may have happened as swaps that did not.
#[derive(Debug)]
struct ReportsUnavailable<S>(S);

impl<S: Store> Store for ReportsUnavailable<S> {
    fn swap(&self, swap: Swap) -> BoxFuture<'_, Result<Swapped, StoreError>> {
        Box::pin(async move {
            match self.0.swap(swap).await {
                Err(StoreError::Ambiguous(source)) => Err(StoreError::Unavailable(source)),
                answer => answer,
            }
        })
    }

    fn load<'a>(&'a self, key: &'a OperationId) -> BoxFuture<'a, Result<Snapshot, StoreError>> {
        self.0.load(key)
    }

    fn reap(&self, limit: NonZeroU32) -> BoxFuture<'_, Result<Reaped, StoreError>> {
        self.0.reap(limit)
    }

    fn capabilities(&self) -> Capabilities<'_> {
        self.0.capabilities()
    }
}

/// The checker finds the planted bug.
pub async fn histories_detect_a_store_that_reports_ambiguous_swaps_as_unavailable<
    F: ServerFixture,
>() {
    let server = F::start().await;
    let proxy = FaultProxy::before(server.address(), 14).await.unwrap();
    let store = open_by(&server, StoreConnection::through(proxy.address().port())).await;
    proxy.set(FaultProxyRates { lose_reply: 30, ..FaultProxyRates::default() });
    let stores = [Arc::new(ReportsUnavailable(store))];
    let storm = Storm { operations: OPERATIONS, ..Storm::of(OPERATIONS, 14) };
    let run = tokio::spawn(async move { storm.run(&stores).await }).await;
    let panic = run.expect_err("a violation").into_panic();
    let panic = panic.downcast::<String>().expect("a text");
    assert!(panic.contains("no order of these makes every answer right"), "{panic}");
}
