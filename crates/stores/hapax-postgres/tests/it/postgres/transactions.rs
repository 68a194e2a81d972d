//! Records that commit with a caller's own writes.

use std::sync::Arc;
use std::time::Duration;

use hapax_core::store::{Swap, Swapped, Transactional};
use hapax_core::{Store, StoreError};
use hapax_postgres::{PostgresStore, PostgresStoreError};
use hapax_testkit::SeededEntropy;
use hapax_testkit::servers::PostgresServer;
use tokio::task::JoinSet;
use tokio::time::{sleep, timeout};

use super::locks::client;
use super::support::{at, claim, complete, connect, expect_stored, load, write_id};

/// A table of the caller's, one row for each piece of work that was done.
const WORK: &str = "CREATE TABLE work (of bigint)";

async fn count(server: &PostgresServer) -> String {
    server.sql("postgres", "SELECT count(*) FROM work").await
}

fn reason(answer: Result<Swapped, StoreError>) -> PostgresStoreError {
    let Err(StoreError::Unavailable(source)) = answer else { panic!("{answer:?}") };
    source.downcast_ref::<PostgresStoreError>().expect("one of ours").clone()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn record_and_writes_commit_together_or_not_at_all() {
    let server = PostgresServer::start().await;
    let store = connect(&server).await;
    server.sql("postgres", WORK).await;
    let mut client = client(&server).await;
    for (of, commit) in [(1, false), (2, true)] {
        let claimed = claim(of);
        let first = expect_stored(&*store, &claimed).await;
        let mut transaction = client.transaction().await.unwrap();
        transaction.batch_execute("INSERT INTO work VALUES (1)").await.unwrap();
        let done = complete(&claimed, of + 10, b"yes");
        let swapped = store.swap_in(&mut transaction, done.clone()).await.unwrap();
        let Swapped::Stored(stamped) = swapped else { panic!("{swapped:?}") };
        assert_eq!(stamped.fence, first.fence);
        assert_eq!(load(&*store, of).await.map(|stored| stored.write_id), Some(claimed.write_id));
        if commit {
            transaction.commit().await.unwrap();
            let stored = load(&*store, of).await.unwrap();
            assert_eq!((stored.write_id, stored.record), (done.write_id, done.draft.record));
        } else {
            transaction.rollback().await.unwrap();
            assert_eq!(
                load(&*store, of).await.map(|stored| stored.write_id),
                Some(claimed.write_id)
            );
        }
    }
    assert_eq!(count(&server).await, "1");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn a_transaction_that_finds_another_record_cannot_commit() {
    let server = PostgresServer::start().await;
    let store = connect(&server).await;
    server.sql("postgres", WORK).await;
    let mut client = client(&server).await;
    let claimed = claim(1);
    let done = complete(&claimed, 11, b"yes");
    // Nothing there; taken over; the very same swap, committed by an earlier transaction.
    for there in [None, Some(write_id(99)), Some(done.write_id)] {
        if let Some(write_id) = there {
            let next = server.sql("postgres", "SELECT count(*) FROM hapax_cells").await;
            if next == "0" {
                expect_stored(&*store, &claimed).await;
            }
            let expected = load(&*store, 1).await.map(|stored| stored.write_id);
            expect_stored(&*store, &Swap { expected, write_id, ..claim(1) }).await;
        }
        let mut transaction = client.transaction().await.unwrap();
        transaction.batch_execute("INSERT INTO work VALUES (1)").await.unwrap();
        let swapped = store.swap_in(&mut transaction, done.clone()).await.unwrap();
        let Swapped::Conflict(seen) = swapped else { panic!("{swapped:?}") };
        assert_eq!(seen.stored.map(|stored| stored.write_id), there);
        // The server rolls back, whatever it is told.
        transaction.commit().await.ok();
        assert_eq!(count(&server).await, "0");
        assert_eq!(load(&*store, 1).await.map(|stored| stored.write_id), there);
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn savepoints_and_claims_are_rejected_in_a_transaction() {
    let server = PostgresServer::start().await;
    let store = connect(&server).await;
    let mut client = client(&server).await;
    let claimed = claim(1);
    expect_stored(&*store, &claimed).await;
    let done = complete(&claimed, 11, b"yes");

    let mut transaction = client.transaction().await.unwrap();
    let mut savepoint = transaction.transaction().await.unwrap();
    let answer = store.swap_in(&mut savepoint, done.clone()).await;
    assert!(matches!(reason(answer), PostgresStoreError::Savepoint));
    drop(savepoint);
    transaction.commit().await.unwrap();
    assert_eq!(load(&*store, 1).await.map(|stored| stored.write_id), Some(claimed.write_id));

    let mut transaction = client.transaction().await.unwrap();
    let answer = store.swap_in(&mut transaction, claim(2)).await;
    assert!(matches!(reason(answer), PostgresStoreError::ClaimInTransaction));
    // It can only be rolled back, as after whatever is not stored.
    assert!(transaction.batch_execute("SELECT 1").await.is_err());
    transaction.rollback().await.unwrap();

    // A savepoint that was released is no matter.
    let mut transaction = client.transaction().await.unwrap();
    transaction.batch_execute("SAVEPOINT a; RELEASE a").await.unwrap();
    let swapped = store.swap_in(&mut transaction, done.clone()).await.unwrap();
    assert!(matches!(swapped, Swapped::Stored(_)), "{swapped:?}");
    transaction.commit().await.unwrap();
    assert_eq!(load(&*store, 1).await.map(|stored| stored.write_id), Some(done.write_id));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn after_a_kill_record_and_writes_are_both_present_or_absent() {
    let mut server = PostgresServer::start().await;
    let options = at(&server).timeout(Duration::from_secs(5));
    let store = Arc::new(PostgresStore::connect(options).await.unwrap());
    server.sql("postgres", WORK).await;
    let dice = SeededEntropy::new(1);
    let mut claimed_in_all = 0;
    for round in 0..4 {
        let mut workers = JoinSet::new();
        for worker in 0..6 {
            let (store, url) = (Arc::clone(&store), server.url("postgres"));
            workers
                .spawn(async move { work(&store, &url, round * 100_000 + worker * 10_000).await });
        }
        sleep(Duration::from_millis(300 + dice.below(300))).await;
        server.kill().await;
        claimed_in_all += workers.join_all().await.into_iter().sum::<u64>();
        server.restart().await;
    }
    let together = "SELECT (SELECT count(*) FROM work), (SELECT count(DISTINCT of) FROM work),
        (SELECT count(*) FROM hapax_cells WHERE state = 'done')";
    let counts = server.sql("postgres", together).await;
    let counts: Vec<u64> = counts.split('|').map(|count| count.parse().unwrap()).collect();
    assert!(counts[0] > 50 && claimed_in_all > counts[0], "{counts:?} of {claimed_in_all}");
    assert_eq!(counts[0], counts[1], "work was done twice");
    assert_eq!(counts[0], counts[2], "work without record, or record without work");
}

/// Claims and works until the server dies. Returns the claims that were acknowledged.
async fn work(store: &PostgresStore, url: &str, from: u64) -> u64 {
    let Ok((mut client, connection)) = tokio_postgres::connect(url, tokio_postgres::NoTls).await
    else {
        return 0;
    };
    let _driver = tokio::spawn(connection);
    for of in from.. {
        let claimed = claim(of);
        if store.swap(claimed.clone()).await.is_err() {
            return of - from;
        }
        let done = complete(&claimed, of + 5_000, b"yes");
        let one = async {
            let mut transaction = client.transaction().await.ok()?;
            let insert = format!("INSERT INTO work VALUES ({of})");
            transaction.batch_execute(&insert).await.ok()?;
            let swapped = store.swap_in(&mut transaction, done).await.ok()?;
            assert!(matches!(swapped, Swapped::Stored(_)), "{swapped:?}");
            transaction.commit().await.ok()
        };
        if one.await.is_none() {
            return of - from + 1;
        }
    }
    unreachable!("the server is killed")
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn a_commit_without_a_reply_is_resolved_by_a_renewal() {
    let server = PostgresServer::start().await;
    let store = connect(&server).await;
    let claimed = claim(1);
    expect_stored(&*store, &claimed).await;
    let mut client = client(&server).await;
    let done = complete(&claimed, 11, b"yes");
    let mut transaction = client.transaction().await.unwrap();
    store.swap_in(&mut transaction, done.clone()).await.unwrap();
    // The caller hears nothing of its COMMIT; another connection asks meanwhile.
    let renewal = Swap { write_id: write_id(12), expected: Some(claimed.write_id), ..claim(1) };
    let asking = tokio::spawn({
        let store = Arc::clone(&store);
        async move { store.swap(renewal).await.unwrap() }
    });
    while store.stats().alone == 0 {
        tokio::task::yield_now().await;
    }
    transaction.commit().await.unwrap();
    let told = timeout(Duration::from_secs(60), asking).await.expect("an answer").unwrap();
    let Swapped::Conflict(seen) = told else { panic!("renewed what was done: {told:?}") };
    assert_eq!(seen.stored.map(|stored| stored.write_id), Some(done.write_id));
}

#[cfg(feature = "sqlx")]
mod by_sqlx {
    use sqlx::{Connection as _, Executor as _, PgConnection};

    use super::*;

    #[tokio::test(flavor = "multi_thread", worker_threads = 4)]
    async fn sqlx_transactions_are_supported() {
        let server = PostgresServer::start().await;
        let store = connect(&server).await;
        server.sql("postgres", WORK).await;
        let mut connection = PgConnection::connect(&server.url("postgres")).await.unwrap();
        let claimed = claim(1);
        let first = expect_stored(&*store, &claimed).await;
        let done = complete(&claimed, 11, b"yes");

        let answer = store.swap_in(&mut connection, done.clone()).await;
        assert!(matches!(reason(answer), PostgresStoreError::NoTransaction));
        for commit in [false, true] {
            let mut transaction = connection.begin().await.unwrap();
            transaction.execute("INSERT INTO work VALUES (1)").await.unwrap();
            let swapped = store.swap_in(&mut transaction, done.clone()).await.unwrap();
            let Swapped::Stored(stamped) = swapped else { panic!("{swapped:?}") };
            assert_eq!(stamped.fence, first.fence);
            if commit {
                transaction.commit().await.unwrap();
            } else {
                transaction.rollback().await.unwrap();
                assert_eq!(
                    load(&*store, 1).await.map(|stored| stored.write_id),
                    Some(claimed.write_id)
                );
            }
        }
        assert_eq!(count(&server).await, "1");
        assert_eq!(load(&*store, 1).await.map(|stored| stored.write_id), Some(done.write_id));

        // The very same again: what it would commit with was committed already.
        let mut transaction = connection.begin().await.unwrap();
        transaction.execute("INSERT INTO work VALUES (1)").await.unwrap();
        let swapped = store.swap_in(&mut *transaction, done.clone()).await.unwrap();
        assert!(matches!(swapped, Swapped::Conflict(_)), "{swapped:?}");
        transaction.commit().await.ok();
        assert_eq!(count(&server).await, "1");
    }

    #[tokio::test(flavor = "multi_thread", worker_threads = 4)]
    async fn a_savepoint_of_sqlx_is_an_error() {
        let server = PostgresServer::start().await;
        let store = connect(&server).await;
        let mut connection = PgConnection::connect(&server.url("postgres")).await.unwrap();
        let claimed = claim(1);
        expect_stored(&*store, &claimed).await;
        let mut transaction = connection.begin().await.unwrap();
        let mut savepoint = transaction.begin().await.unwrap();
        let answer = store.swap_in(&mut savepoint, complete(&claimed, 11, b"yes")).await;
        assert!(matches!(reason(answer), PostgresStoreError::Savepoint));
        drop(savepoint);
        transaction.commit().await.unwrap();
        assert_eq!(load(&*store, 1).await.map(|stored| stored.write_id), Some(claimed.write_id));
    }
}
