//! The rules of every store, on a server.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use hapax_core::Secret;
use hapax_redis::{RedisConnectError, RedisOptions, RedisStore};
use hapax_testkit::servers::RedisServer;
use hapax_testkit::suite::{self, StoreFixture};

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

    const EXPIRES_BY_ITSELF: bool = true;

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
async fn a_server_keeps_the_rules() {
    let server = RedisServer::start().await;
    let fixture = OnOneServer::new(RedisOptions::new(server.url()));
    suite::store_rules(&fixture).await;
    suite::inspect_rules(&fixture).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn a_server_keeps_the_rules_with_a_secret() {
    let server = RedisServer::start().await;
    let options = RedisOptions::new(server.url()).secret(Secret::new([7; 32]));
    suite::store_rules(&OnOneServer::new(options)).await;
}
