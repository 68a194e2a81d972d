//! A server that is emptied.

use std::sync::Arc;

use hapax_redis::{RedisOptions, RedisStore};
use hapax_testkit::servers::RedisServer;
use hapax_testkit::suite::{EmptiedFixture, emptied_rules};

use super::support::at;

struct Emptied(RedisServer);

impl EmptiedFixture for Emptied {
    type Store = RedisStore;

    async fn open(&self, known: Option<String>) -> Arc<RedisStore> {
        let options = known.into_iter().fold(at(self.0.port()), RedisOptions::identity);
        Arc::new(RedisStore::connect(options).await.unwrap())
    }

    fn known(&self, store: &RedisStore) -> Option<String> {
        store.known_identity()
    }

    fn is_replaced(&self, store: &RedisStore) -> bool {
        store.is_replaced()
    }

    async fn empty(&self, _: u32) {
        self.0.command("FLUSHALL").await;
    }

    async fn confirm(&self, store: &RedisStore) {
        store.confirm().await.unwrap();
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn an_emptied_server_executes_nothing_again_before_an_operator_confirms() {
    emptied_rules(&Emptied(RedisServer::start().await)).await;
}
