//! A cache in front of a server that is emptied.

use std::sync::Arc;

use hapax_core::Secret;
use hapax_redis::{RedisOptions, RedisStore};
use hapax_testkit::servers::RedisServer;
use hapax_testkit::suite::{EmptiedFixture, emptied_rules};
use hapax_tiered::{MemoryCache, Tiered};

/// A store and the one within.
#[derive(Debug)]
struct Both {
    tiered: Tiered<RedisStore>,
    within: Arc<RedisStore>,
}

impl hapax_core::Store for Both {
    fn swap(
        &self,
        swap: hapax_core::store::Swap,
    ) -> hapax_core::store::BoxFuture<'_, Result<hapax_core::store::Swapped, hapax_core::StoreError>>
    {
        self.tiered.swap(swap)
    }

    fn load<'a>(
        &'a self,
        key: &'a hapax_core::OperationId,
    ) -> hapax_core::store::BoxFuture<'a, Result<hapax_core::store::Snapshot, hapax_core::StoreError>>
    {
        self.tiered.load(key)
    }

    fn reap(
        &self,
        limit: std::num::NonZeroU32,
    ) -> hapax_core::store::BoxFuture<'_, Result<hapax_core::store::Reaped, hapax_core::StoreError>>
    {
        self.tiered.reap(limit)
    }

    fn capabilities(&self) -> hapax_core::store::Capabilities<'_> {
        self.tiered.capabilities()
    }
}

struct Emptied(RedisServer);

impl EmptiedFixture for Emptied {
    type Store = Both;

    async fn open(&self, known: Option<String>) -> Arc<Both> {
        let options = RedisOptions::new(format!("redis://127.0.0.1:{}", self.0.port()));
        let options = known.into_iter().fold(options, RedisOptions::identity);
        let within = Arc::new(RedisStore::connect(options).await.unwrap());
        let options = hapax_tiered::TieredOptions::default().secret(&Secret::new([3; 32]));
        let cache = Arc::new(MemoryCache::default());
        Arc::new(Both { tiered: Tiered::with(Arc::clone(&within), cache, options), within })
    }

    fn known(&self, store: &Both) -> Option<String> {
        store.within.known_identity()
    }

    fn is_replaced(&self, store: &Both) -> bool {
        store.within.is_replaced()
    }

    async fn empty(&self, _: u32) {
        self.0.command("FLUSHALL").await;
    }

    async fn confirm(&self, store: &Both) {
        store.within.confirm().await.unwrap();
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn emptied_stores_behind_a_cache_execute_nothing_again_before_an_operator_confirms() {
    emptied_rules(&Emptied(RedisServer::start().await)).await;
}
