//! Levels above READ COMMITTED.

use std::sync::Arc;

use hapax_postgres_data::{
    AppendResult, DataError, IdScope, IdentifiedUpdate, Inserted, TableName, UpdateLog,
    UpdateResult,
};
use hapax_testkit::servers::PostgresServer;
use serde_json::Value;
use tokio::sync::Barrier;
use tokio::task::JoinSet;

use super::events::{EVENTS, event, log};
use super::insert::{ORDERS, order, orders};
use super::support::{are_waiting, client, on_one_server};
use super::versioned::{COUNTERS, counter, counters};

const LEVELS: [&str; 2] = ["REPEATABLE READ", "SERIALIZABLE"];

async fn prepared(server: &PostgresServer) {
    for tables in [ORDERS, EVENTS, COUNTERS] {
        server.sql("postgres", tables).await;
    }
}

on_one_server! {
    levels_above_read_committed:
    a_transaction_with_an_older_view_has_to_run_again,
    plain_connections_retry_races_automatically,
    plain_connections_retry_after_waiting_for_an_invisible_row,
    results_in_an_older_snapshot_describe_that_snapshot,
}

async fn a_transaction_with_an_older_view_has_to_run_again(server: &PostgresServer) {
    prepared(server).await;
    let (orders, log, counters) = (orders(), log(IdScope::UniqueInTable), counters());
    let operations = UpdateLog::in_table(TableName::new("done")).of(super::versioned::counters());
    let operations = operations.unwrap();
    let (client, mut other) = (client(server).await, client(server).await);
    for (round, level) in (0..).zip(LEVELS) {
        // What they meet, each in a transaction of its own, for it is over then.
        for call in 0..4 {
            let transaction = other.transaction().await.unwrap();
            let begin = format!("SET TRANSACTION ISOLATION LEVEL {level}; SELECT 1 FROM done");
            transaction.batch_execute(&begin).await.unwrap();
            let id = format!("{round}-{call}");
            let told = match call {
                0 => {
                    let item = order(round, "1");
                    let _: Inserted<Value> = orders.insert(&client, &item).await.unwrap();
                    orders.insert::<_, Value>(&transaction, &item).await.map(drop)
                }
                1 => {
                    log.append(&client, "s", round, &[event(&id)]).await.unwrap();
                    log.append(&transaction, "s", round, &[event(&id)]).await.map(drop)
                }
                _ => {
                    let version = round * 2 + call - 2;
                    let item = counter("a", version);
                    let _: UpdateResult<Value> =
                        counters.update(&client, version, &item).await.unwrap();
                    if call == 2 {
                        counters.update::<_, Value>(&transaction, version, &item).await.map(drop)
                    } else {
                        let told: Result<IdentifiedUpdate<Value>, _> =
                            operations.update(&transaction, &id, version, &item).await;
                        told.map(drop)
                    }
                }
            };
            let Err(DataError::Again(source)) = told else { panic!("{level}, {call}: {told:?}") };
            assert_eq!(source.code, "40001");
            // The next call of the same is told that there is nothing to run it in.
            let told = log.append(&transaction, "s", 0, &[event("x")]).await;
            assert!(matches!(told, Err(DataError::Rejected(_))), "{told:?}");
            transaction.rollback().await.unwrap();
        }
    }
}

async fn plain_connections_retry_races_automatically(server: &PostgresServer) {
    const WRITERS: usize = 16;
    prepared(server).await;
    for (round, level) in (0..).zip(LEVELS) {
        let (orders, log) = (Arc::new(orders()), Arc::new(log(IdScope::UniqueInTable)));
        let (counters, barrier) = (Arc::new(counters()), Arc::new(Barrier::new(WRITERS)));
        let mut writers = JoinSet::new();
        for writer in 0..WRITERS {
            let client = client(server).await;
            let set = format!("SET default_transaction_isolation = '{level}'");
            client.batch_execute(&set).await.unwrap();
            let (orders, log) = (orders.clone(), log.clone());
            let (counters, barrier) = (counters.clone(), barrier.clone());
            writers.spawn(async move {
                barrier.wait().await;
                let inserted: Inserted<Value> =
                    orders.insert(&client, &order(round, "1")).await.unwrap();
                barrier.wait().await;
                let events = [event(&format!("{round}-{writer}"))];
                let appended = log.append(&client, "s", round, &events).await.unwrap();
                barrier.wait().await;
                let item = counter("a", writer as u64);
                let updated: UpdateResult<Value> =
                    counters.update(&client, round, &item).await.unwrap();
                [
                    matches!(inserted, Inserted::Created(_)),
                    matches!(appended, AppendResult::Appended { .. }),
                    matches!(updated, UpdateResult::Updated { .. }),
                ]
            });
        }
        let told = writers.join_all().await;
        for call in 0..3 {
            assert_eq!(told.iter().filter(|told| told[call]).count(), 1, "{level}, {call}");
        }
    }
}

async fn plain_connections_retry_after_waiting_for_an_invisible_row(server: &PostgresServer) {
    prepared(server).await;
    let mut holder = client(server).await;
    for (round, level) in (0..).zip(LEVELS) {
        let plain = client(server).await;
        let set = format!("SET default_transaction_isolation = '{level}'");
        plain.batch_execute(&set).await.unwrap();
        let (orders, log, counters) = (orders(), log(IdScope::UniqueInTable), counters());
        let (item, row) = (order(round, "1"), counter("a", round));
        let (mine, other) = ([event(&format!("{round}"))], [event(&format!("{round}+"))]);

        let holding = holder.transaction().await.unwrap();
        let _: Inserted<Value> = orders.insert(&holding, &item).await.unwrap();
        let (told, ()) = tokio::join!(orders.insert::<_, Value>(&plain, &item), async {
            are_waiting(server, 1).await;
            holding.commit().await.unwrap();
        });
        assert!(matches!(told, Ok(Inserted::Exists(_))), "{told:?}");

        let holding = holder.transaction().await.unwrap();
        log.append(&holding, "s", round, &mine).await.unwrap();
        let (told, ()) = tokio::join!(log.append(&plain, "s", round, &other), async {
            are_waiting(server, 1).await;
            holding.commit().await.unwrap();
        });
        assert_eq!(told.unwrap(), AppendResult::Conflict { current: round + 1 });

        let holding = holder.transaction().await.unwrap();
        let _: UpdateResult<Value> = counters.update(&holding, round, &row).await.unwrap();
        let (told, ()) = tokio::join!(counters.update::<_, Value>(&plain, round, &row), async {
            are_waiting(server, 1).await;
            holding.commit().await.unwrap();
        });
        assert!(matches!(told, Ok(UpdateResult::Conflict { .. })), "{told:?}");
    }
}

async fn results_in_an_older_snapshot_describe_that_snapshot(server: &PostgresServer) {
    prepared(server).await;
    let (orders, log, counters) = (orders(), log(IdScope::UniqueInTable), counters());
    let operations = UpdateLog::in_table(TableName::new("done")).of(super::versioned::counters());
    let operations = operations.unwrap();
    let (plain, mut other) = (client(server).await, client(server).await);
    for level in LEVELS {
        let anew = "TRUNCATE events, shop.orders, done; DELETE FROM counters WHERE name = 'new';
            UPDATE counters SET value = 0, version = 0";
        server.sql("postgres", anew).await;
        let _: Inserted<Value> = orders.insert(&plain, &order(1, "1")).await.unwrap();
        log.append(&plain, "s", 0, &[event("a")]).await.unwrap();
        let view = other.transaction().await.unwrap();
        let begin = format!("SET TRANSACTION ISOLATION LEVEL {level}; SELECT 1 FROM done");
        view.batch_execute(&begin).await.unwrap();
        log.append(&plain, "s", 1, &[event("b")]).await.unwrap();
        let _: IdentifiedUpdate<Value> =
            operations.update(&plain, "o", 0, &counter("a", 1)).await.unwrap();
        let since = "DELETE FROM shop.orders; INSERT INTO counters VALUES ('new', 1, 0, 0)";
        plain.batch_execute(since).await.unwrap();

        let gap = AppendResult::Gap { current: 1 };
        assert_eq!(log.append(&view, "s", 2, &[event("c")]).await.unwrap(), gap);
        let told: UpdateResult<Value> = counters.update(&view, 1, &counter("a", 5)).await.unwrap();
        assert!(matches!(told, UpdateResult::Conflict { current } if current.version == 0));
        let told: IdentifiedUpdate<Value> =
            operations.update(&view, "o", 1, &counter("a", 5)).await.unwrap();
        assert!(matches!(told, IdentifiedUpdate::Conflict { current } if current.version == 0));
        let told: UpdateResult<Value> =
            counters.update(&view, 0, &counter("new", 5)).await.unwrap();
        assert_eq!(told, UpdateResult::NotFound);
        let twice = [order(1, "1"), order(1, "1")];
        let told: Vec<Inserted<Value>> = orders.insert_all(&view, &twice).await.unwrap();
        assert!(told.iter().all(|told| matches!(told, Inserted::Exists(_))), "{told:?}");
        view.rollback().await.unwrap();
    }
}
