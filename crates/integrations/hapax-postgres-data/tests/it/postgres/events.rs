//! Event append.

use std::sync::Arc;

use hapax_postgres_data::{
    AppendResult, Column, DataError, EventLog, IdScope, ItemError, StoredEvent, TableName,
};
use hapax_testkit::SeededEntropy;
use hapax_testkit::servers::PostgresServer;
use serde_json::{Value, json};
use tokio::sync::Barrier;
use tokio::task::JoinSet;

use super::support::{are_waiting, client, deadlocks, on_one_server, quick_at_deadlocks};

pub(crate) const EVENTS: &str =
    "CREATE TABLE events (stream text, sequence bigint, id text PRIMARY KEY,
    body jsonb, at timestamptz NOT NULL DEFAULT now(), UNIQUE (stream, sequence));
    CREATE TABLE own_ids (stream text, sequence bigint, id text, body jsonb,
    UNIQUE (stream, id), PRIMARY KEY (stream, sequence))";

pub(crate) fn log(ids: IdScope) -> EventLog {
    let table = match ids {
        IdScope::UniqueInTable => "events",
        IdScope::UniqueInStream => "own_ids",
    };
    EventLog::on_table(TableName::new(table)).id("id", ids).field("body").build().unwrap()
}

pub(crate) fn event(id: &str) -> Value {
    json!({"id": id, "body": {"of": id}})
}

fn events<const N: usize>(ids: [&str; N]) -> Vec<Value> {
    ids.map(event).to_vec()
}

async fn all(server: &PostgresServer, table: &str) -> String {
    let all = format!(
        "SELECT coalesce(string_agg(stream || sequence || id, ' ' ORDER BY stream, sequence), '') FROM {table}"
    );
    server.sql("postgres", &all).await
}

on_one_server! {
    every_outcome_of_an_append:
    every_result_of_an_append_is_reported,
    a_conflict_on_the_id_constraint_alone_is_no_database_error,
    a_duplicate_append_waits_for_the_first_transaction_and_gets_its_result,
    another_constraint_of_the_table_is_named,
    a_table_without_its_constraints_is_rejected,
}

async fn every_result_of_an_append_is_reported(server: &PostgresServer) {
    server.sql("postgres", EVENTS).await;
    let mut client = client(server).await;
    for ids in [IdScope::UniqueInTable, IdScope::UniqueInStream] {
        let log = log(ids);
        // All in one transaction: no outcome is the end of it.
        let client = client.transaction().await.unwrap();
        let append = async |stream: &str, expected, events: Vec<Value>| {
            log.append(&client, stream, expected, &events).await.unwrap()
        };
        assert_eq!(append("s", 1, events(["a"])).await, AppendResult::Gap { current: 0 });
        let appended = append("s", 0, events(["a", "b", "c"])).await;
        assert_eq!(appended, AppendResult::Appended { positions: 1..4 });
        assert_eq!(append("s", 3, events(["d"])).await, AppendResult::Appended { positions: 4..5 });
        // Again, whatever is expected, and parts that came one after the other.
        for expected in [0, 3, 4, 99] {
            let again = append("s", expected, events(["a", "b", "c"])).await;
            assert_eq!(again, AppendResult::AlreadyAppended { positions: 1..4 });
        }
        let part = append("s", 2, events(["c", "d"])).await;
        assert_eq!(part, AppendResult::AlreadyAppended { positions: 3..5 });
        // Others.
        assert_eq!(append("s", 2, events(["x"])).await, AppendResult::Conflict { current: 4 });
        assert_eq!(append("s", 5, events(["x"])).await, AppendResult::Gap { current: 4 });
        // A prefix, something in the middle, another order, a hole.
        for (ids, positions) in [
            (["c", "d", "x"], [Some(3), Some(4), None]),
            (["x", "b", "y"], [None, Some(2), None]),
            (["b", "a", "c"], [Some(2), Some(1), Some(3)]),
            (["a", "b", "d"], [Some(1), Some(2), Some(4)]),
        ] {
            let overlap = append("s", 4, events(ids)).await;
            let positions = positions.to_vec();
            assert_eq!(overlap, AppendResult::PartialOverlap { positions, current: 4 });
        }
        // Another body; and the same in another form.
        let other = vec![event("c"), json!({"id": "d", "body": {"of": "d", "more": 1}})];
        let field = "body".into();
        let told = AppendResult::SameIdDifferentBody { index: 1, position: 4, field };
        assert_eq!(append("s", 4, other).await, told);
        let other = append("t", 0, events(["x", "b"])).await;
        assert_eq!(
            other,
            match ids {
                IdScope::UniqueInTable => {
                    let stream = "s".into();
                    AppendResult::SameIdInOtherStream { index: 1, stream, position: 2 }
                }
                IdScope::UniqueInStream => AppendResult::Appended { positions: 1..3 },
            }
        );
        // Nothing.
        assert_eq!(append("s", 4, vec![]).await, AppendResult::Appended { positions: 5..5 });
        assert_eq!(append("s", 3, vec![]).await, AppendResult::Conflict { current: 4 });
        assert_eq!(append("s", 9, vec![]).await, AppendResult::Gap { current: 4 });
        // Twice in a call.
        let twice = log.append(&client, "s", 4, &events(["x", "y", "x"])).await;
        let Err(DataError::Item { index: 2, problem: ItemError::DuplicateId }) = twice else {
            panic!("{twice:?}")
        };
        let past = log.append(&client, "s", u64::MAX, &events(["x"])).await;
        assert!(matches!(past, Err(DataError::Item { problem: ItemError::Position, .. })));

        assert_eq!(log.version(&client, "s").await.unwrap(), 4);
        assert_eq!(log.version(&client, "nobody's").await.unwrap(), 0);
        let read: Vec<StoredEvent<Value>> = log.read(&client, "s", 1, 2).await.unwrap();
        let recorded = |position, id| StoredEvent { position, event: event(id) };
        assert_eq!(read, [recorded(2, "b"), recorded(3, "c")]);
        client.commit().await.unwrap();
    }
    assert_eq!(all(server, "events").await, "s1a s2b s3c s4d");
    assert_eq!(all(server, "own_ids").await, "s1a s2b s3c s4d t1x t2b");
}

/// 64 writers at one version, some of them with the same events, in transactions or not.
async fn race(server: &PostgresServer, ids: IdScope) {
    const WRITERS: u64 = 64;
    let log = Arc::new(log(ids));
    let mut clients = Vec::new();
    for _ in 0..WRITERS {
        clients.push(client(server).await);
    }
    let mut already = 0;
    // Until one of those with the same events was the first, which is chance.
    for round in 0.. {
        assert!(round < 100, "none of those with the same events was ever the first");
        // All at one version, or each at the version that it finds.
        let version = log.version(&clients[0], "s").await.unwrap();
        let at = (round % 4 < 2).then_some(version);
        let barrier = Arc::new(Barrier::new(clients.len()));
        let mut writers = JoinSet::new();
        for (writer, mut client) in clients.drain(..).enumerate() {
            let (log, barrier) = (log.clone(), barrier.clone());
            writers.spawn(async move {
                // Every fourth with the same, in every second round.
                let whose = if round % 2 == 1 && writer % 4 == 0 { 0 } else { writer };
                let id = |n: usize| event(&format!("{round}-{whose}-{n}"));
                let events: Vec<_> = (0..1 + whose % 5).map(id).collect();
                barrier.wait().await;
                let version = match at {
                    Some(version) => version,
                    None => log.version(&client, "s").await.unwrap(),
                };
                let told = if writer % 2 == 0 {
                    log.append(&client, "s", version, &events).await.unwrap()
                } else {
                    let transaction = client.transaction().await.unwrap();
                    let told = log.append(&transaction, "s", version, &events).await.unwrap();
                    transaction.commit().await.unwrap();
                    told
                };
                (client, version, told)
            });
        }
        let mut appended = Vec::new();
        for (client, version, told) in writers.join_all().await {
            clients.push(client);
            match told {
                AppendResult::Appended { positions } => {
                    assert_eq!(positions.start, version + 1);
                    appended.push(version);
                }
                AppendResult::AlreadyAppended { .. } if round % 2 == 1 => already += 1,
                AppendResult::Conflict { current } => assert!(current > version),
                other => panic!("{other:?}"),
            }
        }
        if at.is_some() {
            assert_eq!(appended, [version], "exactly one");
        }
        // At most one at each version.
        appended.sort_unstable();
        let many = appended.len();
        appended.dedup();
        assert!(many > 0 && appended.len() == many, "{appended:?}");
        if round >= 3 && already > 0 {
            break;
        }
    }
    let table = if ids == IdScope::UniqueInTable { "events" } else { "own_ids" };
    let whole = format!("SELECT count(*) = max(sequence) AND min(sequence) = 1 FROM {table}");
    assert_eq!(server.sql("postgres", &whole).await, "t");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn one_of_many_writers_at_a_version_appends() {
    let server = quick_at_deadlocks().await;
    server.sql("postgres", EVENTS).await;
    race(&server, IdScope::UniqueInTable).await;
    race(&server, IdScope::UniqueInStream).await;
    assert_eq!(deadlocks(&server), 0);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn of_sixty_four_at_one_version_exactly_one_appends() {
    let server = PostgresServer::start().await;
    server.sql("postgres", EVENTS).await;
    let log = Arc::new(log(IdScope::UniqueInTable));
    let barrier = Arc::new(Barrier::new(64));
    let mut writers = JoinSet::new();
    for writer in 0..64 {
        let (log, barrier, client) = (log.clone(), barrier.clone(), client(&server).await);
        writers.spawn(async move {
            let events = events([&format!("{writer}"), &format!("{writer}+")]);
            barrier.wait().await;
            log.append(&client, "s", 0, &events).await.unwrap()
        });
    }
    let told = writers.join_all().await;
    let count = |outcome: &AppendResult| told.iter().filter(|told| *told == outcome).count();
    assert_eq!(count(&AppendResult::Appended { positions: 1..3 }), 1);
    assert_eq!(count(&AppendResult::Conflict { current: 2 }), 63);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn duplicate_appends_in_transactions_get_the_positions_of_the_events() {
    let server = PostgresServer::start().await;
    server.sql("postgres", EVENTS).await;
    let mut clients = Vec::new();
    for _ in 0..16 {
        clients.push(client(&server).await);
    }
    for round in 0..20 {
        let ids = if round % 2 == 0 { IdScope::UniqueInTable } else { IdScope::UniqueInStream };
        let (log, barrier) = (Arc::new(log(ids)), Arc::new(Barrier::new(clients.len())));
        log.verify(&clients[0]).await.unwrap();
        let mut copies = JoinSet::new();
        for mut client in clients.drain(..) {
            let (log, barrier) = (log.clone(), barrier.clone());
            copies.spawn(async move {
                let events = events([&format!("{round}"), &format!("{round}+")]);
                let transaction = client.transaction().await.unwrap();
                barrier.wait().await;
                // Whichever constraint sees it first.
                let stream = format!("s{round}");
                let told = log.append(&transaction, &stream, 0, &events).await.unwrap();
                transaction.commit().await.unwrap();
                (client, told)
            });
        }
        let mut appended = 0;
        for (client, told) in copies.join_all().await {
            clients.push(client);
            match told {
                AppendResult::Appended { .. } => appended += 1,
                other => assert_eq!(other, AppendResult::AlreadyAppended { positions: 1..3 }),
            }
        }
        assert_eq!(appended, 1);
    }
}

async fn a_conflict_on_the_id_constraint_alone_is_no_database_error(server: &PostgresServer) {
    server.sql("postgres", EVENTS).await;
    let (mut client, mut holder) = (client(server).await, client(server).await);
    for (ids, table) in [(IdScope::UniqueInTable, "events"), (IdScope::UniqueInStream, "own_ids")] {
        // Where an id alone is in the way: its constraint was looked at before that of the place.
        let holding = holder.transaction().await.unwrap();
        let insert = format!("INSERT INTO {table} VALUES ('s', 9, 'a', '{{\"of\": \"a\"}}')");
        holding.batch_execute(&insert).await.unwrap();
        let (log, transaction) = (log(ids), client.transaction().await.unwrap());
        let mine = events(["a"]);
        let (told, ()) = tokio::join!(log.append(&transaction, "s", 0, &mine), async {
            are_waiting(server, 1).await;
            holding.commit().await.unwrap();
        });
        assert_eq!(told.unwrap(), AppendResult::AlreadyAppended { positions: 9..10 });
        transaction.commit().await.unwrap();
    }
}

async fn a_duplicate_append_waits_for_the_first_transaction_and_gets_its_result(
    server: &PostgresServer,
) {
    server.sql("postgres", EVENTS).await;
    let log = Arc::new(log(IdScope::UniqueInTable));
    let mut first = client(server).await;
    for commit in [false, true] {
        let transaction = first.transaction().await.unwrap();
        let mine = events(["a", "b"]);
        log.append(&transaction, "s", 0, &mine).await.unwrap();
        let waiting = tokio::spawn({
            let (log, client) = (log.clone(), client(server).await);
            async move {
                let mut client = client;
                let transaction = client.transaction().await.unwrap();
                let told = log.append(&transaction, "s", 0, &mine).await.unwrap();
                transaction.rollback().await.unwrap();
                told
            }
        });
        are_waiting(server, 1).await;
        if commit {
            transaction.commit().await.unwrap();
            assert_eq!(waiting.await.unwrap(), AppendResult::AlreadyAppended { positions: 1..3 });
        } else {
            transaction.rollback().await.unwrap();
            assert_eq!(waiting.await.unwrap(), AppendResult::Appended { positions: 1..3 });
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn ids_shared_across_streams_are_reported_without_a_database_error() {
    let server = quick_at_deadlocks().await;
    server.sql("postgres", EVENTS).await;
    let log = Arc::new(log(IdScope::UniqueInTable));
    let dice = SeededEntropy::new(7);
    for round in 0..8 {
        let mut writers = JoinSet::new();
        for writer in 0..8 {
            let (log, client) = (log.clone(), client(&server).await);
            // Two ids, in one order or the other: deadlocks, if they meet.
            let ids = [format!("{round}-p"), format!("{round}-q")];
            let ids = if dice.below(2) == 0 { [&ids[0], &ids[1]] } else { [&ids[1], &ids[0]] };
            let events = events(ids.map(String::as_str));
            writers.spawn(async move {
                log.append(&client, &format!("{round}-{writer}"), 0, &events).await.unwrap()
            });
        }
        let told = writers.join_all().await;
        let appended =
            told.iter().filter(|told| matches!(told, AppendResult::Appended { .. })).count();
        let refused = told
            .iter()
            .filter(|told| matches!(told, AppendResult::SameIdInOtherStream { .. }))
            .count();
        assert_eq!((appended, refused), (1, 7), "{told:?}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn an_id_used_concurrently_in_another_stream_is_reported() {
    let server = PostgresServer::start().await;
    server.sql("postgres", EVENTS).await;
    let (log, plain, mut holder) =
        (log(IdScope::UniqueInTable), client(&server).await, client(&server).await);
    // Only the server ends the deadlock, and chooses the plain connection.
    plain.batch_execute("SET deadlock_timeout = '1s'").await.unwrap();
    holder.batch_execute("SET deadlock_timeout = '1min'").await.unwrap();
    for (round, in_circles) in [(0, false), (1, true)] {
        let [mine, taken] = ["p", "q"].map(|id| format!("{id}{round}"));
        let other = format!("z{round}");
        let holding = holder.transaction().await.unwrap();
        log.append(&holding, &other, 0, &events([&taken])).await.unwrap();
        // The first of its events is in, and the second waits.
        let both = events([&mine, &taken]);
        let (told, ()) = tokio::join!(log.append(&plain, "s", 0, &both), async {
            are_waiting(&server, 1).await;
            if in_circles {
                let appended = log.append(&holding, &other, 1, &events([&mine])).await.unwrap();
                assert_eq!(appended, AppendResult::Appended { positions: 2..3 });
            }
            holding.commit().await.unwrap();
        });
        let (index, position) = if in_circles { (0, 2) } else { (1, 1) };
        let told_as = AppendResult::SameIdInOtherStream { index, stream: other, position };
        assert_eq!(told.unwrap(), told_as);
    }
    assert_eq!(all(&server, "events").await, "z01q0 z11q1 z12p1");
    assert!(deadlocks(&server) >= 1);
}

async fn another_constraint_of_the_table_is_named(server: &PostgresServer) {
    server.sql("postgres", EVENTS).await;
    server.sql("postgres", "ALTER TABLE events ADD CONSTRAINT one UNIQUE (body)").await;
    let (log, client) = (log(IdScope::UniqueInTable), client(server).await);
    let same = |id: &str| json!({"id": id, "body": 1});
    log.append(&client, "s", 0, &[same("a")]).await.unwrap();
    for events in [vec![same("b")], vec![event("c"), same("d")]] {
        let refused = log.append(&client, "s", 1, &events).await;
        let Err(DataError::UniqueViolation { constraint, .. }) = refused else {
            panic!("{refused:?}")
        };
        assert_eq!(constraint, "one");
    }
    assert_eq!(all(server, "events").await, "s1a");
}

async fn a_table_without_its_constraints_is_rejected(server: &PostgresServer) {
    let tables = "CREATE TABLE a (stream text, sequence bigint, id text PRIMARY KEY);
        CREATE TABLE b (stream text, sequence bigint, id text, UNIQUE (stream, sequence));
        CREATE TABLE c (stream text, sequence bigint, id uuid PRIMARY KEY, body bytea,
            UNIQUE (stream, sequence))";
    server.sql("postgres", tables).await;
    let mut client = client(server).await;
    for (table, missing) in [("a", "\"stream\", \"sequence\""), ("b", "\"id\"")] {
        let log = EventLog::on_table(TableName::new(table)).build().unwrap();
        let refused = log.append(&client, "s", 0, &[json!({"id": "a"})]).await;
        let Err(DataError::NoUniqueConstraint { columns, .. }) = refused else {
            panic!("{refused:?}")
        };
        assert_eq!(columns, missing);
    }
    // Ids are the same by their type, bytes byte by byte.
    let log = EventLog::on_table(TableName::new("c")).field(Column::new("body")).build().unwrap();
    let low = "a0eebc99-9c0b-4ef8-bb6d-6bb9bd380a11";
    let of = |id: &str, body: &str| json!({"id": id, "body": body});
    let transaction = client.transaction().await.unwrap();
    let twice = [of(low, "\\x01"), of(&low.to_uppercase(), "\\x01")];
    let refused = log.append(&transaction, "s", 0, &twice).await;
    assert!(matches!(refused, Err(DataError::Item { index: 1, problem: ItemError::DuplicateId })));
    // The transaction goes on.
    let appended = log.append(&transaction, "s", 0, &twice[..1]).await.unwrap();
    assert_eq!(appended, AppendResult::Appended { positions: 1..2 });
    let again = log.append(&transaction, "s", 0, &twice[1..]).await.unwrap();
    assert_eq!(again, AppendResult::AlreadyAppended { positions: 1..2 });
    let told = log.append(&transaction, "s", 0, &[of(low, "\\x0100")]).await.unwrap();
    assert!(
        matches!(told, AppendResult::SameIdDifferentBody { index: 0, position: 1, .. }),
        "{told:?}"
    );
    transaction.commit().await.unwrap();
}
