//! Transactions of others that are left open, and deadlocks.

use std::sync::Arc;
use std::time::Duration;

use hapax_core::store::{Swap, Swapped, Transactional};
use hapax_core::{Store, StoreError};
use hapax_postgres::{PostgresStore, PostgresStoreError};
use hapax_testkit::servers::PostgresServer;
use tokio::task::JoinSet;
use tokio::time::{Instant, timeout};
use tokio_postgres::{Client, NoTls};

use super::scramble::scramble;
use super::support::{at, claim, complete, connect, expect_stored, load};

pub(crate) async fn client(server: &PostgresServer) -> Client {
    let (client, connection) =
        tokio_postgres::connect(&server.url("postgres"), NoTls).await.unwrap();
    tokio::spawn(connection);
    client
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn an_open_transaction_delays_swaps_of_its_row_only() {
    let server = PostgresServer::start().await;
    let store = PostgresStore::connect(at(&server).timeout(TIMEOUT)).await.unwrap();
    let store = Arc::new(store);
    let mut client = client(&server).await;
    let held = claim(0);
    expect_stored(&*store, &held).await;
    let mut transaction = client.transaction().await.unwrap();
    let done = complete(&held, 1_000, b"not yet");
    let swapped = store.swap_in(&mut transaction, done.clone()).await.unwrap();
    assert!(matches!(swapped, Swapped::Stored(_)), "{swapped:?}");

    // Copies of it see what was there before, at once.
    let copy = Swap { write_id: super::support::write_id(7), ..claim(0) };
    let swapped = timeout(LIMIT, store.swap(copy)).await.expect("it does not wait").unwrap();
    let Swapped::Conflict(seen) = swapped else { panic!("{swapped:?}") };
    assert_eq!(seen.stored.map(|stored| stored.write_id), Some(held.write_id));

    // Whoever wants to write it waits for a while, and others do not wait with it.
    let taken =
        Swap { write_id: super::support::write_id(8), ..complete(&held, 2_000, b"taken over") };
    let mut waiting = JoinSet::new();
    for _ in 0..8 {
        let (store, taken) = (Arc::clone(&store), taken.clone());
        waiting.spawn(async move { store.swap(taken).await });
    }
    let before = Instant::now();
    let mut others = JoinSet::new();
    for of in 1..200 {
        let store = Arc::clone(&store);
        others.spawn(async move {
            let claimed = claim(of);
            expect_stored(&*store, &claimed).await;
            expect_stored(&*store, &complete(&claimed, of + 10_000, b"yes")).await;
        });
    }
    others.join_all().await;
    assert!(before.elapsed() < LIMIT, "others waited for {:?}", before.elapsed());
    for answer in waiting.join_all().await {
        let Err(StoreError::Unavailable(source)) = answer else { panic!("{answer:?}") };
        let source = source.downcast_ref::<PostgresStoreError>().expect("one of ours");
        assert!(
            matches!(source, PostgresStoreError::Locked | PostgresStoreError::NotSent),
            "{source}"
        );
    }
    transaction.commit().await.unwrap();
    assert_eq!(load(&*store, 0).await.map(|stored| stored.write_id), Some(done.write_id));
}

/// Bounds what a store waits for a lock, with room for a busy machine.
const TIMEOUT: Duration = Duration::from_secs(20);

/// Less than half of it: others do not wait with the one that waits for a lock.
const LIMIT: Duration = Duration::from_secs(9);

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn a_swap_that_waits_for_a_lock_gets_it_when_it_is_released() {
    let server = PostgresServer::start().await;
    let store = connect(&server).await;
    for (of, commit) in [(1, true), (2, false)] {
        let held = claim(of);
        expect_stored(&*store, &held).await;
        let mut client = client(&server).await;
        let mut transaction = client.transaction().await.unwrap();
        let done = complete(&held, of + 10, b"yes");
        store.swap_in(&mut transaction, done.clone()).await.unwrap();
        let renewed =
            Swap { write_id: super::support::write_id(of + 20), draft: held.draft, ..done };
        let waiting = tokio::spawn({
            let (store, renewed) = (Arc::clone(&store), renewed.clone());
            async move { store.swap(renewed).await.unwrap() }
        });
        while store.stats().alone < of {
            tokio::task::yield_now().await;
        }
        // It says what became of the transaction: that is how a lost COMMIT is resolved.
        if commit {
            transaction.commit().await.unwrap();
            let Swapped::Conflict(seen) = waiting.await.unwrap() else { panic!("overwritten") };
            assert_eq!(seen.stored.map(|stored| stored.write_id), Some(done.write_id));
        } else {
            transaction.rollback().await.unwrap();
            assert!(matches!(waiting.await.unwrap(), Swapped::Stored(_)));
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn a_row_that_another_client_inserts_delays_one_batch_only() {
    let server = PostgresServer::start().await;
    let store = connect(&server).await;
    let other = client(&server).await;
    let [stuck, free] = [claim(1), claim(2)];
    let insert = format!(
        "BEGIN; INSERT INTO hapax_cells (key, tag, state, sealed, fence, lease_until)
        VALUES ('\\x{}', '\\x{}', 'done', '', 1, 1)",
        stuck.id,
        "00".repeat(16)
    );
    other.batch_execute(&insert).await.unwrap();
    // In one batch, most likely: while this one is in progress the others queue.
    let mut together = JoinSet::new();
    for swap in [claim(3), stuck.clone(), free] {
        let store = Arc::clone(&store);
        together.spawn(async move { (swap.id, store.swap(swap).await) });
    }
    for (key, answer) in together.join_all().await {
        if key == stuck.id {
            assert!(matches!(answer, Err(StoreError::Unavailable(_))), "{answer:?}");
        } else {
            assert!(matches!(answer, Ok(Swapped::Stored(_))), "{answer:?}");
        }
    }
    other.batch_execute("ROLLBACK").await.unwrap();
    expect_stored(&*store, &stuck).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn no_two_processes_deadlock() {
    let server = PostgresServer::start().await;
    let mut stores = Vec::new();
    for lanes in [1, 2, 1, 3] {
        // Small batches, so that many are in progress with the same keys.
        let options = at(&server).lanes(lanes).batch(8).timeout(Duration::from_secs(10));
        stores.push(Arc::new(PostgresStore::connect(options).await.unwrap()));
    }
    let mut written = 0;
    // On a slow machine it takes more rounds until they have met.
    for round in 1.. {
        let until = Instant::now() + Duration::from_secs(3);
        // Not rejected as a deadlock, nor for any other reason.
        written += scramble(&stores, 24, round, until).await.unwrap();
        let stats: Vec<_> = stores.iter().map(|store| store.stats()).collect();
        let alone: u64 = stats.iter().map(|stats| stats.alone).sum();
        let removed: u64 = stats.iter().map(|stats| stats.removed).sum();
        if written > 500 && alone > 5 && removed > 5 {
            break;
        }
        assert!(round < 100, "{written} written: {stats:?}");
    }
    let count = "SELECT deadlocks FROM pg_stat_database WHERE datname = 'postgres'";
    assert_eq!(server.sql("postgres", count).await, "0");
}
