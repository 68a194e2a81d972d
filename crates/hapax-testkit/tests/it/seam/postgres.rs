use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use hapax_testkit::faults::Proxy;
use hapax_testkit::servers::{PostgresServer, skipped};
use hapax_testkit::suite::{Fixture, inspect_rules, store_rules, wait};

use super::postgres_store::PostgresStore;

struct Postgres {
    address: std::net::SocketAddr,
    opened: AtomicU64,
}

impl Fixture for Postgres {
    type Store = PostgresStore;

    const EXPIRES_BY_ITSELF: bool = false;

    async fn open(&self) -> Arc<PostgresStore> {
        let number = self.opened.fetch_add(1, Ordering::Relaxed);
        let store = PostgresStore::at(self.address, format!("cells_{number}"));
        // On a bad network, again until it is known to be there.
        while store.create().await.is_err() {}
        Arc::new(store)
    }

    async fn pass(&self, store: &PostgresStore, by: Duration) {
        wait(store, by).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn postgres_statements_pass_the_suite() {
    if skipped("postgres") {
        return;
    }
    let server = PostgresServer::start().await;
    let postgres = Postgres { address: server.address(), opened: AtomicU64::new(0) };
    store_rules(&postgres).await;
    inspect_rules(&postgres).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn postgres_statements_pass_the_suite_through_a_bad_network() {
    if skipped("postgres") {
        return;
    }
    let server = PostgresServer::start().await;
    let proxy = Proxy::before(server.address(), 1).await.unwrap();
    proxy.set(super::bad_network());
    let postgres = Postgres { address: proxy.address(), opened: AtomicU64::new(0) };
    store_rules(&postgres).await;
    inspect_rules(&postgres).await;
    super::assert_faults_happened(&proxy);
}
