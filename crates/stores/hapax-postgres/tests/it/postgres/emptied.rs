//! Tables that are truncated, dropped or replaced.

use std::sync::Arc;

use hapax_postgres::{PostgresStore, SchemaName, migrations};
use hapax_testkit::servers::PostgresServer;
use hapax_testkit::suite::{EmptiedFixture, emptied_rules};

use super::support::at;

struct Emptied(PostgresServer);

impl EmptiedFixture for Emptied {
    type Store = PostgresStore;

    async fn open(&self, known: Option<String>) -> Arc<PostgresStore> {
        let options =
            known.into_iter().fold(at(&self.0), hapax_postgres::PostgresOptions::identity);
        Arc::new(PostgresStore::connect(options).await.unwrap())
    }

    fn known(&self, store: &PostgresStore) -> Option<String> {
        store.known_identity()
    }

    fn is_replaced(&self, store: &PostgresStore) -> bool {
        store.is_replaced()
    }

    async fn empty(&self, round: u32) {
        let how = match round % 3 {
            0 => "TRUNCATE hapax_cells",
            1 => {
                "DROP TABLE hapax_cells, hapax_secrets, hapax_migrations;
                DROP FUNCTION hapax_emptied"
            }
            _ => "TRUNCATE hapax_cells, hapax_secrets",
        };
        self.0.sql("postgres", how).await;
        // Dropped tables are made again, by whoever starts next.
        self.0.sql("postgres", &migrations(&SchemaName::default())).await;
    }

    async fn confirm(&self, store: &PostgresStore) {
        store.confirm().await.unwrap();
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn emptied_tables_execute_nothing_again_before_an_operator_confirms() {
    emptied_rules(&Emptied(PostgresServer::start().await)).await;
}
