//! The pair for money that many processes move: Redis before PostgreSQL.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use hapax_core::Secret;
use hapax_postgres::PostgresStore;
use hapax_redis::RedisCache;
use hapax_testkit::servers::{PostgresServer, RedisServer, RedisServerOptions};
use hapax_testkit::suite::{self, StoreFixture};
use hapax_tiered::{Tiered, TieredOptions};

struct Pair {
    redis: RedisServer,
    postgres: PostgresServer,
    opened: AtomicU32,
}

impl StoreFixture for Pair {
    type Store = Tiered<PostgresStore>;

    const REAPS_AUTOMATICALLY: bool = false;

    async fn open(&self) -> Arc<Self::Store> {
        let number = self.opened.fetch_add(1, Ordering::Relaxed);
        let secret = Secret::new([4; 32]);
        let options: hapax_postgres::PostgresOptions =
            self.postgres.url("postgres").parse().unwrap();
        let options = options.schema(format!("suite_{number}")).secret(secret.clone());
        let authority = Arc::new(PostgresStore::connect(options).await.unwrap());
        let options = hapax_redis::RedisOptions::new(self.redis.url());
        let options = options.prefix(format!("suite-{number}:"));
        let cache = Arc::new(RedisCache::connect(options).await.unwrap());
        Arc::new(Tiered::with(authority, cache, TieredOptions::default().secret(&secret)))
    }

    async fn pass(&self, store: &Self::Store, by: Duration) {
        suite::wait(store, by).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn a_store_with_redis_as_cache_follows_the_rules() {
    // One that evicts will do.
    let evicts = RedisServerOptions::new().set("maxmemory-policy", "allkeys-lru");
    let redis = RedisServer::start_with(evicts).await;
    let pair = Pair { redis, postgres: PostgresServer::start().await, opened: AtomicU32::new(0) };
    suite::store_rules(&pair).await;
    suite::inspect_rules(&pair).await;
}
