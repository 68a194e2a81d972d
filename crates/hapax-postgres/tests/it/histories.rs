//! What many callers are told while harm is done to server and network, put in order.
//!
//! `HAPAX_OPERATIONS` says how many operations each history has; a hundred thousand for a long
//! run, a few thousand where nobody says.

use std::future::Future;
use std::num::NonZeroU32;
use std::sync::Arc;
use std::time::Duration;

use hapax::store::{BoxFuture, Reaped, Snapshot, Swap, Swapped};
use hapax::{Store, StoreError, StoreKey};
use hapax_postgres::PostgresStore;
use hapax_testkit::faults::{Proxy, ProxyRates};
use hapax_testkit::servers::{PostgresServer, skipped};
use hapax_testkit::storm::{Storm, Told};
use tokio::time::sleep;

use crate::faults::TERMINATE;
use crate::support::by;

fn storm(seed: u64) -> Storm {
    let operations = std::env::var("HAPAX_OPERATIONS").ok();
    let operations = operations.map_or(4_000, |number| number.parse().expect("a number"));
    Storm { operations, keys_at_once: 8, seed, pause: Duration::from_millis(10) }
}

/// Three processes over one proxy, and one that reaches the server directly; `harm` goes on until
/// they are done.
async fn ride(
    storm: Storm,
    server: &PostgresServer,
    proxy: &Proxy,
    harm: impl Future<Output = ()>,
) -> Told {
    let mut stores = Vec::new();
    for port in
        [proxy.address().port(), proxy.address().port(), proxy.address().port(), server.port()]
    {
        let options = by(port).timeout(Duration::from_millis(300));
        stores.push(Arc::new(PostgresStore::connect(options).await.unwrap()));
    }
    tokio::select! {
        told = storm.run(&stores) => told,
        () = harm => unreachable!("harm has no end"),
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn over_a_network_that_loses_and_delays() {
    if skipped("postgres") {
        return;
    }
    let server = PostgresServer::start().await;
    let proxy = Proxy::before(server.address(), 11).await.unwrap();
    let told = ride(storm(11), &server, &proxy, async {
        proxy.set(ProxyRates {
            lose_request: 10,
            lose_reply: 10,
            late_request: 10,
            tear_reply: 10,
            delay_at_most: Duration::from_millis(50),
            ..ProxyRates::default()
        });
        loop {
            sleep(Duration::from_millis(70)).await;
            proxy.cut();
        }
    })
    .await;
    let counts = proxy.counts();
    assert!(told.ambiguous > 20 && told.stored > 500 && told.loads > 200, "{told:?} {counts:?}");
    let happened =
        [counts.lost_requests, counts.lost_replies, counts.late_requests, counts.torn_replies];
    assert!(happened.iter().all(|times| *times > 3) && counts.cuts > 3, "{counts:?}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn on_a_server_that_freezes() {
    if skipped("postgres") {
        return;
    }
    let server = PostgresServer::start().await;
    let proxy = Proxy::before(server.address(), 12).await.unwrap();
    let mut freezes = 0;
    let told = ride(storm(12), &server, &proxy, async {
        loop {
            sleep(Duration::from_millis(100)).await;
            server.pause();
            freezes += 1;
            // Now shorter than what callers wait, now longer.
            sleep(Duration::from_millis(if freezes % 2 == 0 { 100 } else { 450 })).await;
            server.resume();
        }
    })
    .await;
    assert!(freezes > 1 && told.ambiguous > 5 && told.stored > 500, "{freezes}: {told:?}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn on_a_server_that_is_killed() {
    if skipped("postgres") {
        return;
    }
    let mut server = PostgresServer::start().await;
    let proxy = Proxy::before(server.address(), 13).await.unwrap();
    let port = server.port();
    let mut stores = Vec::new();
    for port in [proxy.address().port(), port] {
        let options = by(port).timeout(Duration::from_millis(300));
        stores.push(Arc::new(PostgresStore::connect(options).await.unwrap()));
    }
    let mut kills = 0;
    let storm = storm(13);
    let told = tokio::select! {
        told = storm.run(&stores) => told,
        () = async {
            loop {
                sleep(Duration::from_millis(150)).await;
                server.kill().await;
                kills += 1;
                server.restart().await;
            }
        } => unreachable!("harm has no end"),
    };
    assert!(kills > 1 && told.ambiguous > 5 && told.stored > 500, "{kills}: {told:?}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn on_a_server_that_ends_connections_and_crashes() {
    if skipped("postgres") {
        return;
    }
    let server = PostgresServer::start().await;
    let proxy = Proxy::before(server.address(), 15).await.unwrap();
    let mut ended = 0;
    let told = ride(storm(15), &server, &proxy, async {
        loop {
            sleep(Duration::from_millis(120)).await;
            server.crash();
            ended += 1;
            sleep(Duration::from_millis(400)).await;
            // A server that recovers from a crash does not let anybody in.
            ended += u32::from(server.try_sql("postgres", TERMINATE).await.is_ok());
        }
    })
    .await;
    assert!(ended > 2 && told.ambiguous > 5 && told.stored > 500, "{ended}: {told:?}");
}

/// Says of writes that may have happened that they did not.
#[derive(Debug)]
struct Optimist(PostgresStore);

impl Store for Optimist {
    fn swap(&self, swap: Swap) -> BoxFuture<'_, Result<Swapped, StoreError>> {
        Box::pin(async move {
            match self.0.swap(swap).await {
                Err(StoreError::Ambiguous(source)) => Err(StoreError::Unavailable(source)),
                answer => answer,
            }
        })
    }

    fn load<'a>(&'a self, key: &'a StoreKey) -> BoxFuture<'a, Result<Snapshot, StoreError>> {
        self.0.load(key)
    }

    fn reap(&self, limit: NonZeroU32) -> BoxFuture<'_, Result<Reaped, StoreError>> {
        self.0.reap(limit)
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn a_store_that_hopes_for_the_best_is_found_out() {
    if skipped("postgres") {
        return;
    }
    let server = PostgresServer::start().await;
    let proxy = Proxy::before(server.address(), 14).await.unwrap();
    let store = PostgresStore::connect(by(proxy.address().port())).await.unwrap();
    proxy.set(ProxyRates { lose_reply: 30, ..ProxyRates::default() });
    let storm = Storm { operations: 4_000, ..storm(14) };
    let stores = [Arc::new(Optimist(store))];
    let ridden = tokio::spawn(async move { storm.run(&stores).await }).await;
    let panic = ridden.expect_err("a violation").into_panic();
    let panic = panic.downcast::<String>().expect("it says what is wrong");
    assert!(panic.contains("no order of these makes every answer right"), "{panic}");
}
