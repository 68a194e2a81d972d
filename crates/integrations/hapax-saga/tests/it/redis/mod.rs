//! Sagas on Redis.

use std::sync::Arc;

use hapax_core::Store;
use hapax_redis::{RedisOptions, RedisStore};
use hapax_testkit::servers::{RedisServer, RedisServerOptions};

use crate::kills::{KillFixture, another_process_continues, on_server};
use crate::outages::{
    OutageFixture, a_shutdown_under_load_hands_its_sagas_over, sagas_survive_outages,
};
use crate::processes::another_process_continues_in_time;

struct Redis(RedisServer);

impl KillFixture for Redis {
    async fn open(&self) -> Arc<dyn Store> {
        Arc::new(RedisStore::connect(RedisOptions::new(self.0.url())).await.unwrap())
    }
}

impl OutageFixture for Redis {
    async fn start() -> Self {
        Self(RedisServer::start_with(RedisServerOptions::new().set("appendfsync", "always")).await)
    }

    fn open(&self) -> impl Future<Output = Arc<dyn Store>> + Send + use<> {
        let options = RedisOptions::new(self.0.url());
        async move {
            loop {
                if let Ok(store) = RedisStore::connect(options.clone()).await {
                    return Arc::new(store) as Arc<dyn Store>;
                }
            }
        }
    }

    fn pause(&self) {
        self.0.pause();
    }

    fn resume(&self) {
        self.0.resume();
    }

    async fn stop(&mut self) {
        self.0.stop().await;
    }

    async fn kill(&mut self) {
        self.0.kill().await;
    }

    async fn restart(&mut self) {
        self.0.restart().await;
    }
}

#[test]
fn a_saga_is_continued_wherever_its_process_is_killed() {
    let (_runtime, server) = on_server(RedisServer::start());
    let redis = Redis(server);
    another_process_continues(&redis, None, 2);
    another_process_continues(&redis, Some(4), 3);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn sagas_survive_outages_of_their_store() {
    sagas_survive_outages::<Redis>().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_node_that_shuts_down_hands_its_sagas_over() {
    a_shutdown_under_load_hands_its_sagas_over::<Redis>().await;
}

#[tokio::test]
async fn a_killed_process_is_continued_in_time() {
    let server = RedisServer::start().await;
    another_process_continues_in_time(&server.url(), true).await;
}
