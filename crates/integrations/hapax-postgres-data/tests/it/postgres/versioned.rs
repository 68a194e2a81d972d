//! Optimistic locking, and operations that are applied once.

use std::cell::Cell;
use std::num::NonZeroU32;
use std::sync::Arc;
use std::time::Duration;

use hapax_postgres_data::{
    DataError, IdentifiedUpdate, ItemError, Retried, Retry, RetryError, TableName, UpdateLog,
    UpdateResult, VersionedRow, VersionedRows,
};
use hapax_testkit::SeededEntropy;
use hapax_testkit::faults::{FaultProxy, FaultProxyRates};
use hapax_testkit::servers::PostgresServer;
use serde_json::{Value, json};
use tokio::sync::Barrier;
use tokio::task::JoinSet;
use tokio::time::timeout;
use tokio_postgres::Client;

use super::support::{ALONE, are_waiting, client, connect, on_one_server, until};

pub(crate) const COUNTERS: &str =
    "CREATE TABLE counters (name text, part int, value bigint NOT NULL,
    version bigint NOT NULL, more int DEFAULT 7, PRIMARY KEY (name, part), CHECK (value < 1000));
    INSERT INTO counters VALUES ('a', 1, 0, 0), ('b', 1, 5, 3);
    CREATE TABLE done (operation text PRIMARY KEY, target text NOT NULL, version bigint NOT NULL)";

pub(crate) fn counters() -> VersionedRows {
    VersionedRows::in_table(TableName::in_schema("public", "counters"))
        .key("name")
        .key("part")
        .field("value")
        .build()
        .unwrap()
}

pub(crate) fn operations() -> UpdateLog {
    UpdateLog::in_table(TableName::new("done")).of(counters()).unwrap()
}

pub(crate) fn counter(name: &str, value: u64) -> Value {
    json!({"name": name, "part": 1, "value": value})
}

pub(crate) fn key() -> Value {
    json!({"name": "a", "part": 1})
}

pub(crate) fn increment(mut row: Value) -> Result<Value, String> {
    row["value"] = Value::from(row["value"].as_u64().unwrap() + 1);
    Ok(row)
}

pub(crate) fn times(attempts: u32) -> Retry {
    let dice = Arc::new(SeededEntropy::new(u64::from(attempts)));
    Retry::default().attempts(NonZeroU32::new(attempts).unwrap()).entropy(dice)
}

async fn counted(server: &PostgresServer) -> String {
    let sql = "SELECT value, version, more, (SELECT count(*) FROM done) FROM counters
        WHERE name = 'a'";
    server.sql("postgres", sql).await
}

on_one_server! {
    every_outcome_of_an_update:
    a_conflict_is_not_a_row_that_is_missing,
    an_operation_is_applied_once_and_to_one_row,
    an_unknown_outcome_is_resolved_when_the_row_has_a_later_version,
    retrying_stops_at_its_limits_and_when_the_change_declines,
    a_dropped_caller_leaves_a_complete_update,
    a_lost_reply_to_a_commit_is_resolved_by_the_operation_id,
}

async fn a_conflict_is_not_a_row_that_is_missing(server: &PostgresServer) {
    server.sql("postgres", COUNTERS).await;
    let (rows, client) = (counters(), client(server).await);
    let update = async |expected, item: Value| -> UpdateResult<Value> {
        rows.update(&client, expected, &item).await.unwrap()
    };
    assert_eq!(update(0, counter("a", 10)).await, UpdateResult::Updated { version: 1 });
    let current = VersionedRow { version: 1, row: counter("a", 10) };
    for expected in [0, 2] {
        let told = update(expected, counter("a", 20)).await;
        assert_eq!(told, UpdateResult::Conflict { current: current.clone() });
    }
    assert_eq!(update(1, counter("c", 20)).await, UpdateResult::NotFound);
    assert_eq!(rows.load(&client, &key()).await.unwrap(), Some(current));
    let nobody = json!({"part": 2, "name": "a"});
    assert_eq!(rows.load::<_, Value>(&client, &nobody).await.unwrap(), None);
    // What the row does not allow, and what does not fit.
    let refused = rows.update::<_, Value>(&client, 1, &counter("a", 1_000)).await;
    let Err(DataError::Rejected(refused)) = refused else { panic!("{refused:?}") };
    assert_eq!(
        (&refused.code[..], refused.constraint.as_deref()),
        ("23514", Some("counters_value_check"))
    );
    let past = rows.update::<_, Value>(&client, u64::MAX, &counter("a", 1)).await;
    assert!(matches!(past, Err(DataError::Item { problem: ItemError::Position, .. })));
    assert_eq!(counted(server).await, "10|1|7|0");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn of_sixty_four_updates_at_one_version_exactly_one_is_made() {
    let server = PostgresServer::start().await;
    server.sql("postgres", COUNTERS).await;
    let (rows, barrier) = (Arc::new(counters()), Arc::new(Barrier::new(64)));
    let mut writers = JoinSet::new();
    for writer in 0..64_u64 {
        let (rows, barrier, mut client) = (rows.clone(), barrier.clone(), client(&server).await);
        writers.spawn(async move {
            barrier.wait().await;
            let transaction = client.transaction().await.unwrap();
            let told = rows.update(&transaction, 0, &counter("a", writer)).await.unwrap();
            transaction.commit().await.unwrap();
            (writer, told)
        });
    }
    let told: Vec<(u64, UpdateResult<Value>)> = writers.join_all().await;
    let made =
        |(_, told): &&(u64, UpdateResult<Value>)| *told == UpdateResult::Updated { version: 1 };
    let winners: Vec<_> = told.iter().filter(made).collect();
    let [(winner, _)] = winners[..] else { panic!("{winners:?}") };
    let current = VersionedRow { version: 1, row: counter("a", *winner) };
    let lost = told
        .iter()
        .filter(|(_, told)| *told == UpdateResult::Conflict { current: current.clone() });
    assert_eq!(lost.count(), 63);
}

async fn an_operation_is_applied_once_and_to_one_row(server: &PostgresServer) {
    server.sql("postgres", COUNTERS).await;
    let (operations, mut client) = (operations(), client(server).await);
    // Rolled back: it was not applied.
    let transaction = client.transaction().await.unwrap();
    let told: IdentifiedUpdate<Value> =
        operations.update(&transaction, "o-1", 0, &counter("a", 1)).await.unwrap();
    assert_eq!(told, IdentifiedUpdate::Applied { version: 1 });
    transaction.rollback().await.unwrap();
    assert_eq!(counted(server).await, "0|0|7|0");
    let update = async |operation: &str, expected, item: Value| {
        operations.update::<_, Value>(&client, operation, expected, &item).await
    };
    let told = update("o-1", 0, counter("a", 1)).await.unwrap();
    assert_eq!(told, IdentifiedUpdate::Applied { version: 1 });
    let told = update("o-2", 1, counter("a", 2)).await.unwrap();
    assert_eq!(told, IdentifiedUpdate::Applied { version: 2 });
    // At whatever version it is asked for again.
    for expected in [0, 1, 2, 3] {
        let again = update("o-1", expected, counter("a", 9)).await.unwrap();
        assert_eq!(again, IdentifiedUpdate::AlreadyApplied { version: 1 });
    }
    let current = VersionedRow { version: 2, row: counter("a", 2) };
    let told = update("o-3", 1, counter("a", 9)).await.unwrap();
    assert_eq!(told, IdentifiedUpdate::Conflict { current });
    assert_eq!(update("o-3", 1, counter("c", 9)).await.unwrap(), IdentifiedUpdate::NotFound);
    // Another row.
    for expected in [3, 4] {
        let reused = update("o-1", expected, counter("b", 9)).await;
        assert!(matches!(reused, Err(DataError::OperationReused(_))), "{reused:?}");
    }
    // In a transaction as well, which goes on.
    let transaction = client.transaction().await.unwrap();
    for (id, expected, told) in [
        ("o-1", 2, IdentifiedUpdate::AlreadyApplied { version: 1 }),
        ("o-3", 2, IdentifiedUpdate::Applied { version: 3 }),
        ("o-3", 3, IdentifiedUpdate::AlreadyApplied { version: 3 }),
    ] {
        let item = counter("a", 3);
        let applied = operations.update::<_, Value>(&transaction, id, expected, &item).await;
        assert_eq!(applied.unwrap(), told);
    }
    let reused = operations.update::<_, Value>(&transaction, "o-1", 3, &counter("b", 9)).await;
    assert!(matches!(reused, Err(DataError::OperationReused(_))), "{reused:?}");
    transaction.commit().await.unwrap();
    assert_eq!(counted(server).await, "3|3|7|3");
}

/// Updates the row, while somebody is about to.
fn move_on(client: &Arc<Client>) {
    let client = Arc::clone(client);
    // On another thread: the closure that calls this is not asynchronous.
    let moving = std::thread::spawn(move || {
        let update = "UPDATE counters SET version = version + 1 WHERE name = 'a'";
        let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
        runtime.block_on(client.batch_execute(update)).unwrap();
    });
    moving.join().unwrap();
}

async fn an_unknown_outcome_is_resolved_when_the_row_has_a_later_version(server: &PostgresServer) {
    server.sql("postgres", COUNTERS).await;
    let proxy = FaultProxy::before(server.address(), 1).await.unwrap();
    let url = format!("postgres://postgres@{}/postgres", proxy.address());
    let (operations, other) = (operations(), Arc::new(client(server).await));
    operations.verify(&*other).await.unwrap();
    for (attempts, doubtful) in [(1, true), (2, true), (3, false)] {
        let calls = Cell::new(0);
        // The first request is lost, and nobody knows; then somebody is always quicker.
        let change = |row: Value| {
            calls.set(calls.get() + 1);
            if calls.get() == 1 {
                proxy.set(FaultProxyRates { lose_request: 1_000, ..FaultProxyRates::default() });
            } else {
                move_on(&other);
            }
            increment(row)
        };
        let connecting = || {
            proxy.set(FaultProxyRates::default());
            connect(&url)
        };
        let told = operations.retrying(connecting, &times(attempts), "o", &key(), change).await;
        let Err(RetryError::GaveUp { attempts: made, outcome_unknown, .. }) = told else {
            panic!("{told:?}")
        };
        assert_eq!((made, outcome_unknown), (attempts, doubtful));
    }
}

async fn retrying_stops_at_its_limits_and_when_the_change_declines(server: &PostgresServer) {
    server.sql("postgres", COUNTERS).await;
    let (operations, other) = (operations(), Arc::new(client(server).await));
    let url = server.url("postgres");
    let no = operations
        .retrying(|| connect(&url), &times(5), "o", &key(), |_: Value| Err("no".to_owned()))
        .await;
    let Err(RetryError::Declined { outcome_unknown: false, source }) = no else { panic!("{no:?}") };
    assert_eq!(source, "no");
    let other_key = |mut row: Value| {
        row["part"] = 2.into();
        Ok::<_, String>(row)
    };
    let refused = operations.retrying(|| connect(&url), &times(5), "o", &key(), other_key).await;
    let Err(RetryError::Data { outcome_unknown: false, source }) = refused else {
        panic!("{refused:?}")
    };
    assert!(matches!(source, DataError::Item { problem: ItemError::KeyChanged, .. }));
    let nobody = json!({"name": "c", "part": 1});
    let told = operations.retrying(|| connect(&url), &times(5), "o", &nobody, increment).await;
    assert_eq!(told.unwrap(), Retried::NotFound);
    // The key in another form than the row has it.
    let loose = json!({"name": "b", "part": "1"});
    let told = operations.retrying(|| connect(&url), &times(5), "b", &loose, increment).await;
    assert_eq!(told.unwrap(), Retried::Applied { version: 4, row: counter("b", 6) });

    // Somebody is always quicker: five attempts, and nothing is in doubt.
    let calls = Cell::new(0);
    let late = |row: Value| {
        calls.set(calls.get() + 1);
        move_on(&other);
        increment(row)
    };
    let told = operations.retrying(|| connect(&url), &times(5), "o", &key(), late).await;
    let Err(RetryError::GaveUp { attempts: 5, outcome_unknown: false, source: None }) = told else {
        panic!("{told:?}")
    };
    assert_eq!(calls.get(), 5);
    assert_eq!(counted(server).await, "0|5|7|1");

    // Nobody to connect to.
    let told = operations
        .retrying(|| connect("postgres://127.0.0.1:1/x"), &times(3), "o", &key(), increment)
        .await;
    let Err(RetryError::GaveUp { attempts: 3, outcome_unknown: false, source: Some(_) }) = told
    else {
        panic!("{told:?}")
    };
}

async fn a_dropped_caller_leaves_a_complete_update(server: &PostgresServer) {
    server.sql("postgres", COUNTERS).await;
    let operations = Arc::new(operations());
    let mut holder = client(server).await;
    let holding = holder.transaction().await.unwrap();
    holding.batch_execute("SELECT * FROM counters FOR UPDATE").await.unwrap();
    let url = server.url("postgres");
    let caller = tokio::spawn({
        let operations = operations.clone();
        async move { operations.retrying(|| connect(&url), &times(5), "o", &key(), increment).await }
    });
    are_waiting(server, 1).await;
    caller.abort();
    assert!(caller.await.unwrap_err().is_cancelled());
    holding.commit().await.unwrap();
    until(server, "SELECT value = 1 FROM counters WHERE name = 'a'").await;
    assert_eq!(counted(server).await, "1|1|7|1");
}

async fn a_lost_reply_to_a_commit_is_resolved_by_the_operation_id(server: &PostgresServer) {
    server.sql("postgres", COUNTERS).await;
    let proxy = FaultProxy::before(server.address(), 1).await.unwrap();
    let url = format!("postgres://postgres@{}/postgres", proxy.address());
    let operations = operations();
    // What is known of the layout is known before: only the update's own reply gets lost.
    operations.verify(&client(server).await).await.unwrap();
    for (round, fault) in [
        FaultProxyRates { lose_reply: 1_000, ..FaultProxyRates::default() },
        FaultProxyRates { tear_reply: 1_000, ..FaultProxyRates::default() },
        FaultProxyRates { lose_request: 1_000, ..FaultProxyRates::default() },
    ]
    .into_iter()
    .enumerate()
    {
        let calls = Cell::new(0);
        let change = |row: Value| {
            calls.set(calls.get() + 1);
            if calls.get() == 1 {
                proxy.set(fault);
            }
            increment(row)
        };
        let connecting = || {
            proxy.set(FaultProxyRates::default());
            connect(&url)
        };
        let id = format!("o-{round}");
        let told = operations.retrying(connecting, &times(5), &id, &key(), change).await.unwrap();
        let version = round as u64 + 1;
        if fault.lose_request > 0 {
            let row = counter("a", version);
            assert_eq!((told, calls.get()), (Retried::Applied { version, row }, 2));
        } else {
            assert_eq!((told, calls.get()), (Retried::AlreadyApplied { version }, 1));
        }
        assert_eq!(counted(server).await, format!("{version}|{version}|7|{version}"));
    }
}

/// How a writer makes its one increment; whether it found that it had been made before.
trait Increment: Send + Sync + 'static {
    fn make(&self, url: String, writer: u64) -> impl Future<Output = bool> + Send;
}

/// 64 at once of one counter, each until it is known to be made. How many had been made before.
async fn increments(url: &str, way: impl Increment) -> usize {
    let (way, barrier) = (Arc::new(way), Arc::new(Barrier::new(64)));
    let mut writers = JoinSet::new();
    for writer in 0..64 {
        let (way, barrier, url) = (way.clone(), barrier.clone(), url.to_owned());
        writers.spawn(async move {
            barrier.wait().await;
            way.make(url, writer).await
        });
    }
    writers.join_all().await.into_iter().filter(|already| *already).count()
}

impl Increment for UpdateLog {
    async fn make(&self, url: String, writer: u64) -> bool {
        let (id, key) = (format!("increment-{writer}"), key());
        let retry = Retry::default().entropy(Arc::new(SeededEntropy::new(writer)));
        loop {
            let one = self.retrying(|| connect(&url), &retry, &id, &key, increment);
            match timeout(Duration::from_secs(60), one).await.expect("its deadline is 10 s") {
                Ok(told) => return matches!(told, Retried::AlreadyApplied { .. }),
                Err(RetryError::GaveUp { .. }) => {}
                Err(other) => panic!("{other:?}"),
            }
        }
    }
}

/// As one would without ids: what is lost is sent again.
impl Increment for VersionedRows {
    async fn make(&self, url: String, _: u64) -> bool {
        loop {
            let Ok(client) = connect(&url).await else { continue };
            let Ok(Some(VersionedRow { version, row })) = self.load(&client, &key()).await else {
                continue;
            };
            let row: Value = increment(row).unwrap();
            if let Ok(UpdateResult::Updated { .. }) =
                self.update::<_, Value>(&client, version, &row).await
            {
                return false;
            }
        }
    }
}

/// Counts after all operations have ended.
async fn counted_at_last(server: &PostgresServer) -> String {
    until(server, ALONE).await;
    counted(server).await
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn sixty_four_increments_add_sixty_four() {
    let server = PostgresServer::start().await;
    server.sql("postgres", COUNTERS).await;
    assert_eq!(increments(&server.url("postgres"), operations()).await, 0);
    assert_eq!(counted_at_last(&server).await, "64|64|7|64");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn sixty_four_increments_add_sixty_four_over_a_network_that_loses_replies() {
    let server = PostgresServer::start().await;
    server.sql("postgres", COUNTERS).await;
    let proxy = FaultProxy::before(server.address(), 3).await.unwrap();
    proxy.set(FaultProxyRates::all(60, Duration::from_millis(20)));
    let url = format!("postgres://postgres@{}/postgres", proxy.address());
    let already = increments(&url, operations()).await;
    let counts = proxy.counts();
    assert!(already > 0, "no reply to a commit was lost: {counts:?}");
    assert!(counts.lost_replies > 10 && counts.late_requests > 10, "{counts:?}");
    assert_eq!(counted_at_last(&server).await, "64|64|7|64");
    // Without ids the same network makes more of them: the above is not for nothing.
    increments(&url, counters()).await;
    let value = counted_at_last(&server).await;
    let value: u64 = value.split('|').next().unwrap().parse().unwrap();
    assert!(value > 128, "{value}");
}
