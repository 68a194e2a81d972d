use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use hapax_testkit::faults::Proxy;
use hapax_testkit::servers::{RedisServer, skipped};
use hapax_testkit::suite::{Fixture, store_rules, wait};

use super::redis_store::RedisStore;

struct Redis {
    address: std::net::SocketAddr,
    opened: AtomicU64,
}

impl Fixture for Redis {
    type Store = RedisStore;

    const EXPIRES_BY_ITSELF: bool = true;

    async fn open(&self) -> Arc<RedisStore> {
        let number = self.opened.fetch_add(1, Ordering::Relaxed);
        Arc::new(RedisStore::at(self.address, format!("test:{number}:")))
    }

    async fn pass(&self, store: &RedisStore, by: Duration) {
        wait(store, by).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn a_redis_script_passes_the_suite() {
    if skipped("redis") {
        return;
    }
    let server = RedisServer::start().await;
    store_rules(&Redis { address: server.address(), opened: AtomicU64::new(0) }).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn a_redis_script_passes_the_suite_through_a_bad_network() {
    if skipped("redis") {
        return;
    }
    let server = RedisServer::start().await;
    let proxy = Proxy::before(server.address(), 1).await.unwrap();
    proxy.set(super::bad_network());
    store_rules(&Redis { address: proxy.address(), opened: AtomicU64::new(0) }).await;
    super::assert_faults_happened(&proxy);
}
