//! Networks that lose requests and replies: whoever hears nothing asks again.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use hapax_postgres_data::{
    AppendResult, DataError, IdScope, Inserted, Pooled, Retried, Retry, RetryError, TableName,
    UpdateLog,
};
use hapax_testkit::faults::{FaultProxy, FaultProxyRates, ProxyCounts};
use hapax_testkit::servers::{PgBouncer, PostgresServer};
use serde_json::{Value, json};
use tokio::task::JoinSet;

use super::events::{EVENTS, event, log};
use super::insert::{ORDERS, order, orders};
use super::support::{connect, until};
use super::versioned::{COUNTERS, counters, increment, key};

/// Asks until there is an answer; how often that was more than once is added to `$again`.
macro_rules! until_answered {
    ($url:expr, $again:expr, $client:ident => $ask:expr) => {
        loop {
            let Ok(client) = connect($url).await else { continue };
            let $client = &client;
            match $ask.await {
                Ok(told) => break told,
                Err(DataError::Lost(_)) => $again += 1,
                Err(error) => panic!("{error}"),
            }
        }
    };
}

async fn lossy(server: &PostgresServer) -> (FaultProxy, String) {
    let proxy = FaultProxy::before(server.address(), 5).await.unwrap();
    proxy.set(FaultProxyRates::all(100, Duration::from_millis(10)));
    let url = format!("postgres://postgres@{}/postgres", proxy.address());
    (proxy, url)
}

fn enough(counts: &ProxyCounts, again: u32) {
    assert!(again > 10 && counts.lost_replies > 10 && counts.late_requests > 10, "{counts:?}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn an_insert_repeated_after_a_lost_reply_creates_one_row() {
    let server = PostgresServer::start().await;
    server.sql("postgres", ORDERS).await;
    let (proxy, url) = lossy(&server).await;
    let orders = Arc::new(orders());
    let mut callers = JoinSet::new();
    for caller in 0..40_u64 {
        let (orders, url) = (orders.clone(), url.clone());
        callers.spawn(async move {
            let (mut again, mut created) = (0_u32, 0_u32);
            for round in 0..4 {
                // Each key is another caller's as well.
                let items = [caller, (caller + 1) % 40].map(|cart| order(round * 40 + cart, "1"));
                let told = until_answered!(
                    &url, again, client => orders.insert_all::<_, Value>(client, &items)
                );
                for told in told {
                    match told {
                        Inserted::Created(_) => created += 1,
                        Inserted::Exists(_) => {}
                        other => panic!("{other:?}"),
                    }
                }
            }
            (again, created)
        });
    }
    let told = callers.join_all().await;
    let again = told.iter().map(|(again, _)| again).sum();
    let created: u32 = told.iter().map(|(_, created)| created).sum();
    enough(&proxy.counts(), again);
    assert_eq!(server.sql("postgres", "SELECT count(*) FROM shop.orders").await, "160");
    // Who created a row and did not hear of it finds it.
    assert!(created < 160 && created > 40, "{created}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn an_append_repeated_after_a_lost_reply_stores_each_event_once() {
    const WRITERS: usize = 24;
    let server = PostgresServer::start().await;
    server.sql("postgres", EVENTS).await;
    let (proxy, url) = lossy(&server).await;
    let log = Arc::new(log(IdScope::UniqueInTable));
    let mut writers = JoinSet::new();
    for writer in 0..WRITERS {
        let (log, url) = (log.clone(), url.clone());
        writers.spawn(async move {
            let (mut again, mut already, mut positions) = (0_u32, 0_u32, Vec::new());
            for round in 0..3 {
                let events: Vec<Value> =
                    (0..1 + writer % 3).map(|n| event(&format!("{writer}-{round}-{n}"))).collect();
                loop {
                    let told = until_answered!(&url, again, client => async {
                        let version = log.version(client, "s").await?;
                        log.append(client, "s", version, &events).await
                    });
                    match told {
                        AppendResult::Appended { positions: at } => positions.push(at),
                        AppendResult::AlreadyAppended { positions: at } => {
                            already += 1;
                            positions.push(at);
                        }
                        AppendResult::Conflict { .. } => continue,
                        other => panic!("{other:?}"),
                    }
                    break;
                }
            }
            (again, already, positions)
        });
    }
    let told = writers.join_all().await;
    enough(&proxy.counts(), told.iter().map(|(again, ..)| again).sum());
    assert!(told.iter().map(|(_, already, _)| already).sum::<u32>() > 0, "no append was lost");
    let mut positions: Vec<u64> =
        told.into_iter().flat_map(|(.., positions)| positions.into_iter().flatten()).collect();
    positions.sort_unstable();
    let all = (1..=3 * (0..WRITERS).map(|writer| 1 + writer % 3).sum::<usize>() as u64).collect();
    assert_eq!(positions, Vec::from_iter::<Vec<u64>>(all));
    let count = "SELECT count(*) = max(sequence) FROM events";
    assert_eq!(server.sql("postgres", count).await, "t");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn a_terminated_connection_is_lost_and_not_rejected() {
    let server = PostgresServer::start().await;
    server.sql("postgres", ORDERS).await;
    let client = connect(&server.url("postgres")).await.unwrap();
    let mut holder = connect(&server.url("postgres")).await.unwrap();
    let (orders, holding) = (orders(), holder.transaction().await.unwrap());
    let _: Inserted<Value> = orders.insert(&holding, &order(1, "1")).await.unwrap();
    let end = async {
        super::support::are_waiting(&server, 1).await;
        let end = "SELECT count(pg_terminate_backend(pid)) FROM pg_stat_activity
            WHERE wait_event_type = 'Lock'";
        assert_eq!(server.sql("postgres", end).await, "1");
    };
    let item = order(1, "1");
    let (told, ()) = tokio::join!(orders.insert::<_, Value>(&client, &item), end);
    assert!(matches!(told, Err(DataError::Lost(_))), "{told:?}");
    // A time limit of the server's is an error of the statement: it was not carried out.
    let client = connect(&server.url("postgres")).await.unwrap();
    client.batch_execute("SET lock_timeout = 50").await.unwrap();
    let told = orders.insert::<_, Value>(&client, &json!(item)).await;
    let Err(DataError::Rejected(refused)) = told else { panic!("{told:?}") };
    assert_eq!(refused.code, "55P03");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn a_pooler_in_transaction_mode_works() {
    let server = PostgresServer::start().await;
    for tables in [ORDERS, EVENTS, COUNTERS] {
        server.sql("postgres", tables).await;
    }
    let pooler = PgBouncer::start(&server, 2).await;
    let (orders, log) = (Arc::new(orders()), Arc::new(log(IdScope::UniqueInStream)));
    let operations = UpdateLog::in_table(TableName::new("done")).of(counters()).unwrap();
    let operations = Arc::new(operations);
    let mut callers = JoinSet::new();
    for caller in 0..20 {
        let (orders, log, operations) = (orders.clone(), log.clone(), operations.clone());
        let url = pooler.url("postgres");
        callers.spawn(async move {
            let mut client = connect(&url).await.unwrap();
            let transaction = client.transaction().await.unwrap();
            let _: Inserted<Value> = orders.insert(&transaction, &order(1, "1")).await.unwrap();
            transaction.commit().await.unwrap();
            let told: Inserted<Value> = orders.insert(&client, &order(1, "2")).await.unwrap();
            assert!(matches!(told, Inserted::ExistsWithDifferent { .. }), "{told:?}");
            let mut append = AppendResult::Conflict { current: 0 };
            while let AppendResult::Conflict { current } = append {
                let events = [event(&format!("{caller}"))];
                append = log.append(&client, "s", current, &events).await.unwrap();
            }
            let (id, retry, key) = (format!("{caller}"), Retry::default(), key());
            // As a pool hands them out.
            let connecting = || async {
                connect(&url).await.map(|client| Pooled::new(Box::new(client), |of| of))
            };
            loop {
                let one = operations.retrying(connecting, &retry, &id, &key, increment);
                match one.await {
                    Ok(told) => break assert!(matches!(told, Retried::Applied { .. })),
                    Err(RetryError::GaveUp { .. }) => {}
                    Err(error) => panic!("{error}"),
                }
            }
        });
    }
    callers.join_all().await;
    let counts = "SELECT (SELECT count(*) FROM shop.orders), (SELECT max(sequence) FROM own_ids),
        (SELECT value FROM counters WHERE name = 'a')";
    assert_eq!(server.sql("postgres", counts).await, "1|20|20");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn a_killed_server_neither_loses_nor_repeats_an_operation() {
    const WORKERS: usize = 12;
    let mut server = PostgresServer::start().await;
    server.sql("postgres", COUNTERS).await;
    let operations = UpdateLog::in_table(TableName::new("done")).of(counters()).unwrap();
    let (operations, url) = (Arc::new(operations), server.url("postgres"));
    let enough = Arc::new(AtomicBool::default());
    let mut workers = JoinSet::new();
    for worker in 0..WORKERS {
        let (operations, url, enough) = (operations.clone(), url.clone(), enough.clone());
        workers.spawn(async move {
            let (retry, key, mut made, mut gave_up) = (Retry::default(), key(), 0_u64, 0_u32);
            while !enough.load(Ordering::Relaxed) {
                let id = format!("{worker}-{made}");
                loop {
                    let connecting = || connect(&url);
                    match operations.retrying(connecting, &retry, &id, &key, increment).await {
                        Ok(_) => break,
                        Err(RetryError::GaveUp { .. }) => gave_up += 1,
                        Err(other) => panic!("{other:?}"),
                    }
                }
                made += 1;
            }
            (made, gave_up)
        });
    }
    let counter = "SELECT value FROM counters WHERE name = 'a'";
    for kill in 1..=3 {
        let further = format!("SELECT value >= {} FROM counters WHERE name = 'a'", kill * 25);
        until(&server, &further).await;
        server.kill().await;
        server.restart().await;
    }
    enough.store(true, Ordering::Relaxed);
    let told = workers.join_all().await;
    let made: u64 = told.iter().map(|(made, _)| made).sum();
    assert!(told.iter().any(|(_, gave_up)| *gave_up > 0), "nobody noticed");
    assert_eq!(server.sql("postgres", counter).await, made.to_string());
}
