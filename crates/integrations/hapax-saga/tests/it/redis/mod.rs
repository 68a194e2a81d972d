//! Sagas on Redis.

use std::sync::Arc;

use hapax_core::Store;
use hapax_redis::{RedisOptions, RedisStore};
use hapax_testkit::servers::RedisServer;

use crate::kills::{KillFixture, another_process_continues, on_server};

struct Redis(RedisServer);

impl KillFixture for Redis {
    async fn open(&self) -> Arc<dyn Store> {
        Arc::new(RedisStore::connect(RedisOptions::new(self.0.url())).await.unwrap())
    }
}

#[test]
fn a_process_killed_at_any_point_is_continued() {
    let (_runtime, server) = on_server(RedisServer::start());
    let redis = Redis(server);
    another_process_continues(&redis, None, 2);
    another_process_continues(&redis, Some(4), 3);
}
