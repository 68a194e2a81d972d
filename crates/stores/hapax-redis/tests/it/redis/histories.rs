//! What many callers are told while harm is done to server and network, put in order.

use std::future::Future;
use std::num::NonZeroU32;
use std::sync::Arc;
use std::sync::atomic::AtomicU32;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;

use hapax_core::store::{BoxFuture, Capabilities, Reaped, Snapshot, Swap, Swapped};
use hapax_core::{OperationId, Store, StoreError};
use hapax_redis::RedisStore;
use hapax_testkit::faults::{FaultProxy, FaultProxyRates};
use hapax_testkit::servers::{RedisServer, RedisServerOptions};
use hapax_testkit::storm::{Storm, StormCounts};
use tokio::time::sleep;

use super::support::at;

/// Of each history, where `HAPAX_OPERATIONS` says nothing else.
const OPERATIONS: usize = 4_000;

/// Three processes over one proxy, and one that reaches the server directly; `harm` goes on until
/// they are done, and they go on until it was `enough`.
async fn ride(
    storm: Storm,
    server: &RedisServer,
    proxy: &FaultProxy,
    harm: impl Future<Output = ()>,
    enough: impl Fn(&StormCounts) -> bool,
) -> StormCounts {
    let mut stores = Vec::new();
    for port in
        [proxy.address().port(), proxy.address().port(), proxy.address().port(), server.port()]
    {
        let options = at(port).timeout(Duration::from_millis(300));
        stores.push(Arc::new(RedisStore::connect(options).await.unwrap()));
    }
    tokio::select! {
        told = storm.run_until(&stores, enough) => told,
        () = harm => unreachable!("harm has no end"),
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn over_a_network_that_loses_and_delays() {
    let server = RedisServer::start().await;
    let proxy = FaultProxy::before(server.address(), 11).await.unwrap();
    let harm = async {
        proxy.set(FaultProxyRates {
            lose_request: 30,
            lose_reply: 30,
            late_request: 30,
            tear_reply: 30,
            delay_at_most: Duration::from_millis(50),
            ..FaultProxyRates::default()
        });
        loop {
            sleep(Duration::from_millis(70)).await;
            proxy.cut();
        }
    };
    let enough = |told: &StormCounts| {
        let counts = proxy.counts();
        let happened =
            [counts.lost_requests, counts.lost_replies, counts.late_requests, counts.torn_replies];
        happened.iter().all(|times| *times > 3) && counts.cuts > 3 && told.ambiguous > 20
    };
    let told = ride(Storm::of(OPERATIONS, 11), &server, &proxy, harm, enough).await;
    assert!(told.stored > 200 && told.loads > 200, "{told:?}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn on_a_server_that_freezes() {
    let server = RedisServer::start().await;
    let proxy = FaultProxy::before(server.address(), 12).await.unwrap();
    let freezes = AtomicU32::new(0);
    let harm = async {
        loop {
            sleep(Duration::from_millis(100)).await;
            server.pause();
            // Now shorter than what callers wait, now longer.
            let even = freezes.fetch_add(1, Relaxed).is_multiple_of(2);
            sleep(Duration::from_millis(if even { 450 } else { 100 })).await;
            server.resume();
        }
    };
    let enough = |told: &StormCounts| freezes.load(Relaxed) > 3 && told.ambiguous > 5;
    let told = ride(Storm::of(OPERATIONS, 12), &server, &proxy, harm, enough).await;
    assert!(told.stored > 200, "{told:?}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn on_a_server_that_is_killed() {
    let always = RedisServerOptions::new().set("appendfsync", "always");
    let mut server = RedisServer::start_with(always).await;
    let proxy = FaultProxy::before(server.address(), 13).await.unwrap();
    let port = server.port();
    let mut stores = Vec::new();
    for port in [proxy.address().port(), port] {
        let options = at(port).timeout(Duration::from_millis(300));
        stores.push(Arc::new(RedisStore::connect(options).await.unwrap()));
    }
    let kills = AtomicU32::new(0);
    let enough = |told: &StormCounts| kills.load(Relaxed) > 2 && told.ambiguous > 5;
    let storm = Storm::of(OPERATIONS, 13);
    let told = tokio::select! {
        told = storm.run_until(&stores, enough) => told,
        () = async {
            loop {
                sleep(Duration::from_millis(150)).await;
                server.kill().await;
                kills.fetch_add(1, Relaxed);
                server.restart().await;
            }
        } => unreachable!("harm has no end"),
    };
    assert!(told.stored > 200, "{told:?}");
}

/// Says of writes that may have happened that they did not.
#[derive(Debug)]
struct Optimist(RedisStore);

impl Store for Optimist {
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

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn a_store_that_hopes_for_the_best_is_found_out() {
    let server = RedisServer::start().await;
    let proxy = FaultProxy::before(server.address(), 14).await.unwrap();
    let store = RedisStore::connect(at(proxy.address().port())).await.unwrap();
    proxy.set(FaultProxyRates { lose_reply: 30, ..FaultProxyRates::default() });
    let storm = Storm { operations: OPERATIONS, ..Storm::of(OPERATIONS, 14) };
    let stores = [Arc::new(Optimist(store))];
    let ridden = tokio::spawn(async move { storm.run(&stores).await }).await;
    let panic = ridden.expect_err("a violation").into_panic();
    let panic = panic.downcast::<String>().expect("it says what is wrong");
    assert!(panic.contains("no order of these makes every answer right"), "{panic}");
}
