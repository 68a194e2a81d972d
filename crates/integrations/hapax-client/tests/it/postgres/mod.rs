//! A journal on PostgreSQL.

use hapax_postgres::{PostgresOptions, PostgresStore};
use hapax_testkit::servers::PostgresServer;
use tokio::runtime::Runtime;

use crate::secrets;
use crate::shared::{SharedJournal, processes_have_one_effect_and_one_response};
use crate::world::secret;

struct Postgres(PostgresServer);

impl SharedJournal for Postgres {
    type Store = PostgresStore;

    async fn connect(&self) -> PostgresStore {
        let options: PostgresOptions = self.0.url("postgres").parse().unwrap();
        PostgresStore::connect(options.secret(secret())).await.unwrap()
    }
}

#[test]
fn processes_that_share_a_journal_have_one_effect_and_one_response() {
    let runtime = Runtime::new().unwrap();
    let postgres = Postgres(runtime.block_on(PostgresServer::start()));
    processes_have_one_effect_and_one_response(&runtime, &postgres);
}

#[tokio::test]
async fn the_journal_has_no_credentials() {
    let server = Postgres(PostgresServer::start().await);
    let store = std::sync::Arc::new(server.connect().await);
    secrets::send_all(std::sync::Arc::clone(&store)).await;
    secrets::opened(&store).await;
    server.0.sql("postgres", "CREATE TABLE planted AS SELECT 'hush'::bytea AS secret").await;
    let tables = "SELECT quote_ident(schemaname) || '.' || quote_ident(tablename) FROM pg_tables
        WHERE schemaname NOT IN ('pg_catalog', 'information_schema')";
    let mut found = Vec::new();
    for table in server.0.sql("postgres", tables).await.lines() {
        let rows = format!("SET bytea_output = 'escape'; SELECT t::text FROM {table} AS t");
        let rows = server.0.sql("postgres", &rows).await;
        if rows.contains("hush") || rows.contains("a-body") {
            found.push(table.to_owned());
        }
    }
    assert_eq!(found, ["public.planted"]);
}
