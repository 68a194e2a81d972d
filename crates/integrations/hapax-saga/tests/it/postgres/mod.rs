//! Sagas on PostgreSQL.

mod within;

use std::sync::Arc;

use hapax_core::Store;
use hapax_postgres::{PostgresOptions, PostgresStore};
use hapax_testkit::servers::PostgresServer;

use crate::kills::{KillFixture, another_process_continues, on_server};

fn options(server: &PostgresServer) -> PostgresOptions {
    server.url("postgres").parse().unwrap()
}

struct Postgres(PostgresServer);

impl KillFixture for Postgres {
    async fn open(&self) -> Arc<dyn Store> {
        Arc::new(PostgresStore::connect(options(&self.0)).await.unwrap())
    }
}

#[test]
fn a_process_killed_at_any_point_is_continued() {
    let (_runtime, server) = on_server(PostgresServer::start());
    let postgres = Postgres(server);
    another_process_continues(&postgres, None, 2);
    another_process_continues(&postgres, Some(4), 3);
}
