//! The schedule: the rules of every schedule, and what is special on this server.

mod transactions;

use std::num::NonZeroU32;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use hapax_core::diagnose::Severity;
use hapax_core::schedule::{EntryKey, NewEntry, QueueName, Schedule};
use hapax_core::{EntryId, Secret, Store, StoreError, SystemClock};
use hapax_postgres::{
    PostgresOptions, PostgresStore, PostgresStoreError, SchemaName, diagnose, migrations,
};
use hapax_testkit::schedule;
use hapax_testkit::servers::{PgBouncer, PostgresServer, PostgresServerOptions};
use hapax_testkit::suite::server;
use tokio::task::JoinSet;
use tokio::time::{Instant, timeout};

use super::connecting::severity;
use super::locks::client;
use super::suite::{OnOneServer, Postgres};
use super::support::{at, claim, expect_stored, key, scans};

/// A store with time for a busy machine.
async fn connect(server: &PostgresServer) -> Arc<PostgresStore> {
    let options = at(server).timeout(Duration::from_secs(20));
    Arc::new(PostgresStore::connect(options).await.unwrap())
}

const LONG: Duration = Duration::from_secs(86_400);

fn queue() -> QueueName {
    QueueName::new("payments/1").unwrap()
}

/// Returns an entry that is named by a number.
fn entry(of: u64, due_in: Duration) -> NewEntry {
    let id = EntryId::from_bytes(u128::from(of).to_be_bytes());
    let key = EntryKey { operation: key(of), id };
    NewEntry { key, queue: queue(), due_in, note: Bytes::from(format!("note {of}")) }
}

async fn due(store: &PostgresStore) -> Vec<EntryKey> {
    let most = NonZeroU32::new(1_000).unwrap();
    let found = store.due(&[queue()], most).await.unwrap();
    found.entries.into_iter().map(|(key, entry)| entry.map(|_| key).unwrap()).collect()
}

async fn all(store: &PostgresStore) -> Vec<EntryKey> {
    let page = store.entries(None, NonZeroU32::new(1_000).unwrap()).await.unwrap();
    assert!(!page.more);
    page.entries.into_iter().map(|(key, entry)| entry.map(|_| key).unwrap()).collect()
}

fn reason<T: std::fmt::Debug>(answer: Result<T, StoreError>) -> PostgresStoreError {
    let Err(StoreError::Unavailable(source)) = answer else { panic!("{answer:?}") };
    source.downcast_ref::<PostgresStoreError>().expect("one of ours").clone()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn a_schedule_follows_the_rules() {
    let server = PostgresServer::start().await;
    schedule::schedule_rules(&OnOneServer::new(at(&server))).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn a_schedule_follows_the_rules_under_every_option() {
    let server = PostgresServer::start().await;
    let options = at(&server).secret(Secret::new([7; 32])).prepare(true).lanes(3).batch(5);
    schedule::schedule_rules(&OnOneServer::new(options)).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn a_schedule_follows_the_rules_behind_a_pooler_by_transaction() {
    let server = PostgresServer::start().await;
    let pooler = PgBouncer::start(&server, 3).await;
    let options = pooler.url("postgres").parse().unwrap();
    schedule::schedule_rules(&OnOneServer::new(options)).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn a_schedule_follows_the_rules_over_a_network_that_loses_replies() {
    server::schedule_rules_hold_over_a_network_that_loses_replies::<Postgres>().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn acknowledged_changes_survive_kills() {
    server::acknowledged_changes_of_a_schedule_survive_kills::<Postgres>().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn changes_that_wait_share_a_transaction() {
    let server = PostgresServer::start().await;
    let store = connect(&server).await;
    store.insert(entry(0, LONG)).await.unwrap();
    server.pause();
    let mut callers = JoinSet::new();
    for of in 1..=60 {
        let store = Arc::clone(&store);
        callers.spawn(async move { store.insert(entry(of, Duration::ZERO)).await });
    }
    // One is in progress, or all of them; none is answered.
    while store.stats().schedule_batches < 2 {
        tokio::task::yield_now().await;
    }
    server.resume();
    for answer in callers.join_all().await {
        answer.unwrap();
    }
    let stats = store.stats();
    assert_eq!(stats.schedule_writes, 61);
    assert!(stats.schedule_batches < 20, "{stats:?}");
    assert_eq!(due(&store).await.len(), 60);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn polls_and_changes_read_by_the_indexes() {
    // The statistics stay those of an empty table.
    let options = PostgresServerOptions::new().set("autovacuum", "off");
    let server = PostgresServer::start_with(options).await;
    connect(&server).await.close().await;
    let before = scans(&server, "hapax_schedule").await;
    let store = connect(&server).await;
    for (round, due_in) in [LONG, Duration::ZERO, LONG].into_iter().enumerate() {
        for of in 0..10 {
            let entry = entry(of, LONG);
            store.insert(entry.clone()).await.unwrap();
            assert!(store.postpone(entry.key, None, LONG).await.unwrap());
            store.due(&[queue()], NonZeroU32::MIN).await.unwrap();
            store.remove(entry.key).await.unwrap();
        }
        let fill = format!(
            "INSERT INTO hapax_schedule (due_at, operation, id, queue, note)
            SELECT (extract(epoch FROM now()) * 1000000)::int8 + {},
                sha256((n || '{round}')::bytea), substr(sha256('id'), 1, 16), 'payments/1', ''
            FROM generate_series(1, 20000) n",
            due_in.as_micros()
        );
        server.sql("postgres", &fill).await;
    }
    store.close().await;
    let after = scans(&server, "hapax_schedule").await;
    assert_eq!(after.0, before.0);
    assert!(after.1 > before.1 + 80, "{before:?}, {after:?}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn an_open_transaction_delays_changes_of_its_entry_only() {
    let server = PostgresServer::start().await;
    let store = PostgresStore::connect(at(&server).timeout(Duration::from_secs(20))).await.unwrap();
    let store = Arc::new(store);
    let [held, inserted] = [entry(0, LONG), entry(1, LONG)];
    store.insert(held.clone()).await.unwrap();
    let mut client = client(&server).await;
    let transaction = client.transaction().await.unwrap();
    let lock = "SELECT FROM hapax_schedule FOR UPDATE";
    transaction.batch_execute(lock).await.unwrap();
    let text = format!(
        "INSERT INTO hapax_schedule (due_at, operation, id, queue, note)
        VALUES (0, '\\x{}', '\\x{:032x}', 'other', '')",
        inserted.key.operation, 1
    );
    transaction.batch_execute(&text).await.unwrap();

    let waiting = {
        let (store, inserted) = (Arc::clone(&store), inserted.clone());
        tokio::spawn(async move {
            let removed = store.remove(held.key).await;
            (removed, store.insert(inserted).await)
        })
    };
    let before = Instant::now();
    let mut others = JoinSet::new();
    for of in 2..100 {
        let store = Arc::clone(&store);
        others.spawn(async move {
            let entry = entry(of, LONG);
            store.insert(entry.clone()).await.unwrap();
            assert!(store.postpone(entry.key, None, Duration::ZERO).await.unwrap());
        });
    }
    others.join_all().await;
    assert!(before.elapsed() < Duration::from_secs(9), "{:?}", before.elapsed());
    let (removed, inserted_too) = waiting.await.unwrap();
    assert!(matches!(reason(removed), PostgresStoreError::Locked));
    assert!(matches!(reason(inserted_too), PostgresStoreError::Locked));
    transaction.rollback().await.unwrap();
    store.remove(held.key).await.unwrap();
    store.insert(inserted.clone()).await.unwrap();
    assert!(all(&store).await.contains(&inserted.key));
    assert!(!all(&store).await.contains(&held.key));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn emptied_tables_take_no_entry_before_an_operator_confirms() {
    let server = PostgresServer::start().await;
    let store = connect(&server).await;
    store.insert(entry(1, Duration::ZERO)).await.unwrap();
    expect_stored(&*store, &claim(1)).await;
    server.sql("postgres", "TRUNCATE hapax_cells").await;
    let rejected = store.insert(entry(2, Duration::ZERO)).await;
    assert!(matches!(reason(rejected), PostgresStoreError::Replaced));
    assert!(store.is_replaced());
    // What is there can be worked on.
    assert_eq!(due(&store).await, [entry(1, LONG).key]);
    assert!(store.postpone(entry(1, LONG).key, None, LONG).await.unwrap());
    connect(&server).await.confirm().await.unwrap();
    store.insert(entry(2, Duration::ZERO)).await.unwrap();
    assert_eq!(due(&store).await, [entry(2, LONG).key]);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn tables_without_a_schedule_serve_records_and_name_the_migration() {
    let server = PostgresServer::start().await;
    server.sql("postgres", &migrations(&SchemaName::default())).await;
    // Tables as version 2 has them.
    let older = "DROP TABLE hapax_schedule; DROP FUNCTION hapax_schedule_write_1,
        hapax_schedule_due_1, hapax_schedule_insert_in_1;
        DELETE FROM hapax_migrations WHERE version = 3";
    server.sql("postgres", older).await;
    for prepare in [false, true] {
        let options = at(&server).migrate(false).prepare(prepare);
        let store = PostgresStore::connect(options).await.unwrap();
        assert!(store.capabilities().schedule.is_none());
        expect_stored(&store, &claim(u64::from(prepare))).await;
        let most = NonZeroU32::MIN;
        for answer in [
            store.insert(entry(1, LONG)).await,
            store.remove(entry(1, LONG).key).await,
            store.postpone(entry(1, LONG).key, None, LONG).await.map(drop),
            store.due(&[queue()], most).await.map(drop),
            store.entries(None, most).await.map(drop),
            store.queues().await.map(drop),
        ] {
            let reason = reason(answer);
            assert!(matches!(reason, PostgresStoreError::NoSchedule), "{reason}");
        }
        // From when the tables are migrated they are there.
        if prepare {
            server.sql("postgres", &migrations(&SchemaName::default())).await;
            store.insert(entry(1, Duration::ZERO)).await.unwrap();
            assert_eq!(due(&store).await, [entry(1, LONG).key]);
        }
    }
    let store = connect(&server).await;
    assert!(store.capabilities().schedule.is_some());
}

#[tokio::test]
async fn diagnose_finds_a_schedule_that_is_missing_or_unlogged() {
    let server = PostgresServer::start().await;
    let subject = async || {
        let findings = diagnose(&at(&server), &SystemClock).await.unwrap();
        severity(&findings, "schedule")
    };
    assert_eq!(subject().await, Severity::Fine);
    drop(connect(&server).await);
    assert_eq!(subject().await, Severity::Fine);
    server.sql("postgres", "ALTER TABLE hapax_schedule SET UNLOGGED").await;
    assert_eq!(subject().await, Severity::Broken);
    assert!(PostgresStore::connect(at(&server)).await.is_err());
    server.sql("postgres", "DROP TABLE hapax_schedule").await;
    assert_eq!(subject().await, Severity::Broken);
    server.sql("postgres", &migrations(&SchemaName::default())).await;
    assert_eq!(subject().await, Severity::Fine);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn long_notes_end_a_poll_and_a_page_early() {
    let server = PostgresServer::start().await;
    let store = connect(&server).await;
    let note = Bytes::from(vec![b'n'; 2 << 20]);
    for of in 0..7 {
        store.insert(NewEntry { note: note.clone(), ..entry(of, Duration::ZERO) }).await.unwrap();
    }
    let most = NonZeroU32::new(100).unwrap();
    let found = store.due(&[queue()], most).await.unwrap();
    assert_eq!((found.entries.len(), found.next_in), (4, Some(Duration::ZERO)));
    let page = store.entries(None, most).await.unwrap();
    assert!(page.more && page.entries.len() == 4, "{}", page.entries.len());
    let rest = store.entries(page.entries.last().map(|(key, _)| *key), most).await.unwrap();
    assert_eq!((rest.entries.len(), rest.more), (3, false));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn a_damaged_note_is_an_error_of_its_entry_only() {
    let server = PostgresServer::start().await;
    let store = connect(&server).await;
    for of in 0..3 {
        store.insert(entry(of, Duration::ZERO)).await.unwrap();
    }
    let damage = format!(
        "UPDATE hapax_schedule SET note = note || '\\x00' WHERE operation = '\\x{}'",
        key(1)
    );
    server.sql("postgres", &damage).await;
    let most = NonZeroU32::new(10).unwrap();
    let found = store.due(&[queue()], most).await.unwrap();
    for (entry_key, entry) in found.entries {
        let is_damaged = entry_key.operation == key(1);
        assert_eq!(matches!(entry, Err(StoreError::Corrupt(_))), is_damaged, "{entry:?}");
    }
    // It can be removed.
    store.remove(entry(1, LONG).key).await.unwrap();
    assert_eq!(due(&store).await.len(), 2);
}

/// No change of another process is waited for without end, and none is lost.
#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn processes_that_change_the_same_entries_do_not_deadlock() {
    let server = PostgresServer::start().await;
    let mut stores = Vec::new();
    for _ in 0..4 {
        let options: PostgresOptions = at(&server).batch(8).timeout(Duration::from_secs(10));
        stores.push(Arc::new(PostgresStore::connect(options).await.unwrap()));
    }
    let mut callers = JoinSet::new();
    for (number, store) in (0..).zip(stores.iter().cycle().take(16)) {
        let store = Arc::clone(store);
        callers.spawn(async move {
            for round in 0..60_u64 {
                let entry = entry((round * 7 + number * 5) % 24, LONG);
                match (round + number) % 3 {
                    0 => store.insert(entry).await.unwrap(),
                    1 => drop(store.postpone(entry.key, None, LONG).await.unwrap()),
                    _ => store.remove(entry.key).await.unwrap(),
                }
            }
        });
    }
    timeout(Duration::from_secs(120), callers.join_all()).await.expect("all are answered");
    let count = "SELECT deadlocks FROM pg_stat_database WHERE datname = 'postgres'";
    assert_eq!(server.sql("postgres", count).await, "0");
}
