//! Sagas on PostgreSQL.

mod ledger;
mod within;

use std::sync::Arc;

use hapax_core::Store;
use hapax_postgres::{PostgresOptions, PostgresStore};
use hapax_testkit::servers::PostgresServer;

use crate::kills::{KillFixture, another_process_continues, on_server};
use crate::outages::{
    OutageFixture, a_shutdown_under_load_hands_its_sagas_over, sagas_survive_outages,
};
use crate::processes::another_process_continues_in_time;

fn options(server: &PostgresServer) -> PostgresOptions {
    server.url("postgres").parse().unwrap()
}

struct Postgres(PostgresServer);

impl KillFixture for Postgres {
    async fn open(&self) -> Arc<dyn Store> {
        Arc::new(PostgresStore::connect(options(&self.0)).await.unwrap())
    }
}

impl OutageFixture for Postgres {
    async fn start() -> Self {
        Self(PostgresServer::start().await)
    }

    fn open(&self) -> impl Future<Output = Arc<dyn Store>> + Send + use<> {
        let options = options(&self.0);
        async move {
            loop {
                if let Ok(store) = PostgresStore::connect(options.clone()).await {
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
    let (_runtime, server) = on_server(PostgresServer::start());
    let postgres = Postgres(server);
    another_process_continues(&postgres, None, 2);
    another_process_continues(&postgres, Some(4), 3);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn sagas_survive_outages_of_their_store() {
    sagas_survive_outages::<Postgres>().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_node_that_shuts_down_hands_its_sagas_over() {
    a_shutdown_under_load_hands_its_sagas_over::<Postgres>().await;
}

#[tokio::test]
async fn a_killed_process_is_continued_in_time() {
    let server = PostgresServer::start().await;
    another_process_continues_in_time(&server.url("postgres"), true).await;
}
