//! The rules of every store, on a server.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use hapax_core::Secret;
use hapax_postgres::{PostgresOptions, PostgresStore};
use hapax_testkit::servers::{PgBouncer, PostgresServer};
use hapax_testkit::suite::{self, StoreFixture};

use super::support::at;

/// One server; each store has tables of its own, and so sees nothing of the others.
pub(crate) struct OnOneServer {
    options: PostgresOptions,
    opened: AtomicU32,
}

impl OnOneServer {
    pub(crate) fn new(options: PostgresOptions) -> Self {
        Self { options, opened: AtomicU32::new(0) }
    }
}

impl StoreFixture for OnOneServer {
    type Store = PostgresStore;

    const EXPIRES_BY_ITSELF: bool = false;

    async fn open(&self) -> Arc<PostgresStore> {
        let number = self.opened.fetch_add(1, Ordering::Relaxed);
        let options = self.options.clone().schema(format!("Suite \"{number}\""));
        let mut last = None;
        // It may fail over the network that some of the tests have in between.
        for _ in 0..200 {
            match PostgresStore::connect(options.clone()).await {
                Ok(store) => return Arc::new(store),
                Err(error) => last = Some(error),
            }
        }
        panic!("no connection: {last:?}")
    }

    async fn pass(&self, store: &PostgresStore, by: Duration) {
        suite::wait(store, by).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn a_server_keeps_the_rules() {
    let server = PostgresServer::start().await;
    let fixture = OnOneServer::new(at(&server));
    suite::store_rules(&fixture).await;
    suite::inspect_rules(&fixture).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn a_server_keeps_the_rules_in_every_other_way_to_use_it() {
    let server = PostgresServer::start().await;
    let options = at(&server).secret(Secret::new([7; 32])).prepare(true).lanes(3).batch(5);
    let fixture = OnOneServer::new(options);
    suite::store_rules(&fixture).await;
    suite::inspect_rules(&fixture).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn a_pooler_by_transaction_in_between_changes_nothing() {
    let server = PostgresServer::start().await;
    let pooler = PgBouncer::start(&server, 3).await;
    let fixture = OnOneServer::new(pooler.url("postgres").parse().unwrap());
    suite::store_rules(&fixture).await;
    suite::inspect_rules(&fixture).await;
}
