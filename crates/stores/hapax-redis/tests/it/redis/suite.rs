//! The rules of every store, and of stores on a server.

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use hapax_core::Secret;
use hapax_redis::{RedisConnectError, RedisOptions, RedisStore};
use hapax_testkit::servers::{RedisServer, RedisServerOptions};
use hapax_testkit::suite::server::{ServerFixture, StoreConnection};
use hapax_testkit::suite::{self, StoreFixture};

use super::support::{at, permit};

/// One server; each store has a prefix of its own, and so sees nothing of the others.
pub(crate) struct OnOneServer {
    options: RedisOptions,
    opened: AtomicU32,
}

impl OnOneServer {
    pub(crate) fn new(options: RedisOptions) -> Self {
        Self { options, opened: AtomicU32::new(0) }
    }
}

impl StoreFixture for OnOneServer {
    type Store = RedisStore;

    const REAPS_AUTOMATICALLY: bool = true;

    async fn open(&self) -> Arc<RedisStore> {
        let number = self.opened.fetch_add(1, Ordering::Relaxed);
        let options = self.options.clone().prefix(format!("suite-{number}:"));
        loop {
            match RedisStore::connect(options.clone()).await {
                Ok(store) => return Arc::new(store),
                // The network that some of the tests have in between.
                Err(RedisConnectError::Unreachable(_)) => {}
                Err(other) => panic!("{other}"),
            }
        }
    }

    async fn pass(&self, store: &RedisStore, by: Duration) {
        suite::wait(store, by).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn a_store_follows_the_rules_as_a_user_with_the_rights_of_the_manual() {
    let server = RedisServer::start().await;
    permit(&server, "suite-").await;
    let url = server.url().replace("//", "//hapax:word@");
    let fixture = OnOneServer::new(RedisOptions::new(url));
    suite::store_rules(&fixture).await;
    suite::inspect_rules(&fixture).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn a_store_with_a_secret_follows_the_rules() {
    let server = RedisServer::start().await;
    let options = RedisOptions::new(server.url()).secret(Secret::new([7; 32]));
    suite::store_rules(&OnOneServer::new(options)).await;
}

/// A server that syncs each write.
pub(super) struct Redis(RedisServer);

impl ServerFixture for Redis {
    type Store = RedisStore;
    type Stores = OnOneServer;

    const LOSS: u32 = 30;
    const STORED: u64 = 200;

    async fn start() -> Self {
        Self(RedisServer::start_with(RedisServerOptions::new().set("appendfsync", "always")).await)
    }

    fn address(&self) -> SocketAddr {
        self.0.address()
    }

    fn stores(&self, port: u16) -> OnOneServer {
        OnOneServer::new(at(port))
    }

    async fn connect(&self, connection: StoreConnection) -> Result<RedisStore, String> {
        let StoreConnection { port, timeout, secrets } = connection;
        let options = timeout.into_iter().fold(at(port), RedisOptions::timeout);
        let options = secrets.into_iter().fold(options, RedisOptions::key_ring);
        match RedisStore::connect(options).await {
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
    hapax_testkit::server_suite!(super::Redis);
}
