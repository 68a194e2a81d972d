//! Rows that no synchronous standby has: their COMMIT waited for one when the server crashed. A failover would
//! lose them, so no call reports them as written before a standby has them.

use std::future::Future;

use hapax_postgres_data::{
    AppendResult, IdScope, IdentifiedUpdate, InsertOrFetch, Inserted, TableName,
};
use hapax_testkit::servers::PostgresServer;
use serde_json::{Value, json};

use super::events::{EVENTS, event, log};
use super::operations::{DONE, of};
use super::support::{client as connected, until};

const WAITING: &str = "SELECT count(*) > 0 FROM pg_stat_activity WHERE wait_event = 'SyncRep'";
const TABLES: &str = "CREATE TABLE orders (cart bigint PRIMARY KEY, amount int);
    CREATE TABLE counters (id int PRIMARY KEY, n int, version bigint NOT NULL);
    INSERT INTO counters VALUES (1, 0, 0)";

async fn standbys(server: &PostgresServer, names: &str) {
    let set = format!("ALTER SYSTEM SET synchronous_standby_names = '{names}'");
    server.sql("postgres", &set).await;
    server.sql("postgres", "SELECT pg_reload_conf()").await;
    let current = format!("SELECT current_setting('synchronous_standby_names') = '{names}'");
    until(server, &current).await;
}

fn orders() -> InsertOrFetch {
    InsertOrFetch::into_table(TableName::new("orders")).key("cart").field("amount").build().unwrap()
}

/// Runs a call, which waits for a standby; returns its result once none is needed any more.
async fn waits<T>(server: &PostgresServer, call: impl Future<Output = T>) -> T {
    let mut call = std::pin::pin!(call);
    tokio::select! {
        _ = &mut call => panic!("a result that a failover loses"),
        () = until(server, WAITING) => {}
    }
    standbys(server, "").await;
    call.await
}

#[tokio::test(flavor = "multi_thread")]
async fn a_write_that_no_standby_has_is_not_reported_as_made_before() {
    let mut server = PostgresServer::start().await;
    server.sql("postgres", &format!("{TABLES}; {EVENTS}; {DONE}")).await;
    let (orders, log) = (orders(), log(IdScope::UniqueInTable));
    let updates = of(TableName::new("counters"), "id", &["n"]);
    let (order, counter) = (json!({"cart": 7, "amount": 9}), json!({"id": 1, "n": 1}));
    for layout in 0..3 {
        standbys(&server, "gone").await;
        let client = connected(&server).await;
        let write = async {
            match layout {
                0 => orders.insert::<_, Value>(&client, &order).await.map(drop),
                1 => log.append(&client, "s", 0, &[event("e-1")]).await.map(drop),
                _ => updates.update::<_, Value>(&client, "u-1", 0, &counter).await.map(drop),
            }
        };
        tokio::select! {
            written = write => panic!("{layout}: no standby has it: {written:?}"),
            () = until(&server, WAITING) => {}
        }
        // A commit that waits becomes visible.
        server.kill().await;
        server.restart().await;
        let client = connected(&server).await;
        match layout {
            0 => {
                let again = waits(&server, orders.insert::<_, Value>(&client, &order)).await;
                assert!(matches!(again, Ok(Inserted::Exists(_))), "{again:?}");
            }
            1 => {
                let again = waits(&server, log.append(&client, "s", 0, &[event("e-1")])).await;
                assert!(matches!(again, Ok(AppendResult::AlreadyAppended { .. })), "{again:?}");
            }
            _ => {
                let again =
                    waits(&server, updates.update::<_, Value>(&client, "u-1", 0, &counter)).await;
                assert!(
                    matches!(again, Ok(IdentifiedUpdate::AlreadyApplied { version: 1 })),
                    "{again:?}"
                );
            }
        }
    }
    // In a transaction of the caller's, its COMMIT waits.
    standbys(&server, "gone").await;
    let mut client = connected(&server).await;
    let transaction = client.transaction().await.unwrap();
    let again = orders.insert::<_, Value>(&transaction, &order).await;
    assert!(matches!(again, Ok(Inserted::Exists(_))), "{again:?}");
    waits(&server, transaction.commit()).await.unwrap();
}
