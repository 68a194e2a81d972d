//! The rules of every store, and of stores on a server.

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use hapax_core::Secret;
use hapax_postgres::{PostgresOptions, PostgresStore};
use hapax_testkit::servers::{PgBouncer, PostgresServer};
use hapax_testkit::suite::server::{ServerFixture, StoreConnection};
use hapax_testkit::suite::{self, StoreFixture};

use super::support::{at, by};

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

    const REAPS_AUTOMATICALLY: bool = false;

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
async fn a_store_follows_the_rules() {
    let server = PostgresServer::start().await;
    let fixture = OnOneServer::new(at(&server));
    suite::store_rules(&fixture).await;
    suite::inspect_rules(&fixture).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn a_store_follows_the_rules_under_every_option() {
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

pub(super) struct Postgres(pub(super) PostgresServer);

impl ServerFixture for Postgres {
    type Store = PostgresStore;
    type Stores = OnOneServer;

    /// A statement is several messages.
    const LOSS: u32 = 10;
    const STORED: u64 = 500;

    async fn start() -> Self {
        Self(PostgresServer::start().await)
    }

    fn address(&self) -> SocketAddr {
        self.0.address()
    }

    fn stores(&self, port: u16) -> OnOneServer {
        OnOneServer::new(by(port))
    }

    async fn connect(&self, connection: StoreConnection) -> Result<PostgresStore, String> {
        let StoreConnection { port, timeout, secrets } = connection;
        let options = timeout.into_iter().fold(by(port), PostgresOptions::timeout);
        let options = secrets.into_iter().fold(options, PostgresOptions::key_ring);
        match PostgresStore::connect(options).await {
            Err(error) if !error.is_unreachable() => panic!("{error}"),
            connected => connected.map_err(|error| error.to_string()),
        }
    }

    fn pause(&self) {
        self.0.pause();
    }

    fn resume(&self) {
        self.0.resume();
    }

    async fn kill(&mut self) {
        self.0.kill().await;
    }

    async fn restart(&mut self) {
        self.0.restart().await;
    }
}

mod server {
    hapax_testkit::server_suite!(super::Postgres);
}
