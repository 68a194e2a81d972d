//! The same by sqlx.

use std::sync::Arc;

use hapax_postgres_data::{
    AppendResult, DataError, IdScope, IdentifiedUpdate, Inserted, Retried, Retry, TableName,
    UpdateLog, UpdateResult,
};
use hapax_testkit::servers::PostgresServer;
use serde_json::{Value, json};
use sqlx::postgres::PgPoolOptions;
use sqlx::{Connection as _, Executor as _, PgConnection};
use tokio::task::JoinSet;

use super::events::{EVENTS, event, log};
use super::insert::{ORDERS, order, orders};
use super::support::are_waiting;
use super::versioned::{COUNTERS, counter, counters, increment, key};

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn sqlx_connections_transactions_and_pools_are_supported() {
    let server = PostgresServer::start().await;
    for tables in [ORDERS, EVENTS, COUNTERS] {
        server.sql("postgres", tables).await;
    }
    let mut connection = PgConnection::connect(&server.url("postgres")).await.unwrap();
    let (orders, log, counters) = (orders(), log(IdScope::UniqueInTable), counters());
    for commit in [false, true] {
        let mut transaction = connection.begin().await.unwrap();
        let items = [order(1, "1"), order(1, "2")];
        let told: Vec<Inserted<Value>> =
            orders.insert_all(&mut *transaction, &items).await.unwrap();
        let [Inserted::Created(_), Inserted::ExistsWithDifferent { field, .. }] = &told[..] else {
            panic!("{told:?}")
        };
        assert_eq!(field, "amount");
        let told = log.append(&mut *transaction, "s", 0, &[event("a")]).await.unwrap();
        assert_eq!(told, AppendResult::Appended { positions: 1..2 });
        let told: UpdateResult<Value> =
            counters.update(&mut *transaction, 0, &counter("a", 1)).await.unwrap();
        assert_eq!(told, UpdateResult::Updated { version: 1 });
        if commit {
            transaction.commit().await.unwrap();
        } else {
            transaction.rollback().await.unwrap();
        }
    }
    // On a task, too.
    let (told, mut connection, log) = tokio::spawn(async move {
        let mut transaction = connection.begin().await.unwrap();
        let item = order(1, "1.0");
        let told: Inserted<Value> = orders.insert(&mut *transaction, &item).await.unwrap();
        let again = log.append(&mut *transaction, "s", 9, &[event("a")]).await.unwrap();
        assert_eq!(again, AppendResult::AlreadyAppended { positions: 1..2 });
        transaction.commit().await.unwrap();
        (told, connection, log)
    })
    .await
    .unwrap();
    assert!(matches!(told, Inserted::Exists(_)), "{told:?}");
    let told = log.append(&mut connection, "s", 9, &[event("a")]).await.unwrap();
    assert_eq!(told, AppendResult::AlreadyAppended { positions: 1..2 });
    assert_eq!(log.read::<Value>(&mut connection, "s", 0, 9).await.unwrap().len(), 1);

    let operations = UpdateLog::in_table(TableName::new("done")).of(counters).unwrap();
    let url = server.url("postgres");
    let pool = PgPoolOptions::new().max_connections(2).connect(&url).await.unwrap();
    let operations = Arc::new(operations);
    let mut writers = JoinSet::new();
    for writer in 0..8 {
        let (operations, pool) = (operations.clone(), pool.clone());
        writers.spawn(async move {
            let (id, retry) = (format!("o-{writer}"), Retry::default());
            let key = key();
            loop {
                let one = operations.retrying(|| pool.acquire(), &retry, &id, &key, increment);
                if let Ok(told) = one.await {
                    break told;
                }
            }
        });
    }
    for told in writers.join_all().await {
        assert!(matches!(told, Retried::Applied { .. }), "{told:?}");
    }
    let told: IdentifiedUpdate<Value> =
        operations.update(&mut connection, "o-1", 0, &counter("a", 9)).await.unwrap();
    assert!(matches!(told, IdentifiedUpdate::AlreadyApplied { .. }), "{told:?}");
    let counted = "SELECT value, version FROM counters WHERE name = 'a'";
    assert_eq!(server.sql("postgres", counted).await, "9|9");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn errors_of_sqlx_are_classified() {
    let server = PostgresServer::start().await;
    server.sql("postgres", ORDERS).await;
    let orders = orders();
    let url = server.url("postgres");
    let mut connection = PgConnection::connect(&url).await.unwrap();
    let mut other = PgConnection::connect(&url).await.unwrap();
    // A transaction that sees less than there is.
    let mut transaction = other.begin().await.unwrap();
    let begin = "SET TRANSACTION ISOLATION LEVEL REPEATABLE READ";
    transaction.execute(begin).await.unwrap();
    transaction.execute("SELECT count(*) FROM shop.orders").await.unwrap();
    let _: Inserted<Value> = orders.insert(&mut connection, &order(1, "1")).await.unwrap();
    let told = orders.insert::<_, Value>(&mut *transaction, &order(1, "1")).await;
    assert!(matches!(told, Err(DataError::Again(_))), "{told:?}");
    transaction.rollback().await.unwrap();
    // Another constraint.
    connection.execute("ALTER TABLE shop.orders ADD CONSTRAINT one UNIQUE (amount)").await.unwrap();
    let told = orders.insert::<_, Value>(&mut connection, &order(2, "1")).await;
    let Err(DataError::UniqueViolation { constraint, .. }) = told else { panic!("{told:?}") };
    assert_eq!(constraint, "one");
    // No such column.
    let refused = orders.insert::<_, Value>(&mut connection, &json!({"customer": 1})).await;
    assert!(matches!(refused, Err(DataError::Item { index: 0, .. })), "{refused:?}");
    // The server ends the connection.
    let mut transaction = connection.begin().await.unwrap();
    let _: Inserted<Value> = orders.insert(&mut *transaction, &order(3, "3")).await.unwrap();
    let end = async {
        are_waiting(&server, 1).await;
        let end = "SELECT count(pg_terminate_backend(pid)) FROM pg_stat_activity
            WHERE wait_event_type = 'Lock'";
        server.sql("postgres", end).await
    };
    let item = order(3, "3");
    let (told, _) = tokio::join!(orders.insert::<_, Value>(&mut other, &item), end);
    assert!(matches!(told, Err(DataError::Lost(_))), "{told:?}");
}
