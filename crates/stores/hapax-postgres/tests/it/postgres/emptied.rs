//! Tables that are truncated, dropped or replaced.

use std::sync::Arc;

use hapax_postgres::{PostgresConnectError, PostgresStore, SchemaName, migrations};
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

#[tokio::test(flavor = "multi_thread")]
async fn tables_that_must_exist_are_rejected_until_they_were_used() {
    let server = PostgresServer::start().await;
    let required = || PostgresStore::connect(at(&server).must_exist(true));
    let missing = |opened: Result<PostgresStore, PostgresConnectError>| match opened {
        Err(PostgresConnectError::Missing { tables }) => tables,
        other => panic!("{:?}", other.map(drop)),
    };
    assert!(!missing(required().await));
    let tables = "SELECT count(*) FROM pg_class WHERE relname LIKE 'hapax%'";
    assert_eq!(server.sql("postgres", tables).await.trim(), "0");
    // Migrated by a release, and used by no process.
    server.sql("postgres", &migrations(&SchemaName::default())).await;
    assert!(missing(required().await));
    assert_eq!(server.sql("postgres", "SELECT count(*) FROM hapax_secrets").await.trim(), "0");
    let made = PostgresStore::connect(at(&server)).await.unwrap();
    let created = made.created().unwrap();
    let found = required().await.unwrap();
    assert_eq!((found.created(), found.is_replaced()), (Some(created), false));
    for store in [made, found] {
        store.close().await;
    }

    server.sql("postgres", "TRUNCATE hapax_cells").await;
    assert!(missing(required().await));
    let anew = PostgresStore::connect(at(&server)).await.unwrap();
    assert!(anew.created().unwrap() > created);
    anew.close().await;
}
