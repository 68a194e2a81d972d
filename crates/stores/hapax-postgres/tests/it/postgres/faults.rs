//! Servers that freeze, die and come back, and networks that lose what passes them.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use hapax_core::store::Swapped;
use hapax_core::{Store, StoreError};
use hapax_postgres::{PostgresStore, PostgresStoreError};
use hapax_testkit::servers::PostgresServer;
use tokio::task::JoinSet;
use tokio::time::timeout;

use super::support::{at, claim, complete, connect, connect_within, expect_stored, key};

/// More than any test's server needs to come back to its callers.
const SOON: Duration = Duration::from_secs(60);

/// Ends every connection of everybody else.
pub(crate) const TERMINATE: &str = "SELECT count(pg_terminate_backend(pid)) FROM pg_stat_activity
    WHERE backend_type = 'client backend' AND pid <> pg_backend_pid()";

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn every_caller_gets_an_answer_when_connections_are_terminated() {
    let server = PostgresServer::start().await;
    let store = connect(&server).await;
    let mut callers = JoinSet::new();
    let enough = Arc::new(AtomicBool::default());
    for caller in 0..16 {
        let (store, enough) = (Arc::clone(&store), Arc::clone(&enough));
        callers.spawn(async move {
            let (mut ambiguous, mut number) = (0, 0);
            while number < 60 || !enough.load(Ordering::Relaxed) {
                number += 1;
                let claimed = claim(caller * 1_000_000 + number);
                let completed = complete(&claimed, caller * 1_000_000 + number + 500_000, b"yes");
                for swap in [claimed, completed] {
                    // The very same swap again, until the answer is definite.
                    loop {
                        match store.swap(swap.clone()).await {
                            Ok(Swapped::Stored(_)) => break,
                            Ok(conflict) => panic!("somebody else wrote: {conflict:?}"),
                            Err(StoreError::Ambiguous(_)) => ambiguous += 1,
                            Err(StoreError::Unavailable(_)) => {}
                            Err(error) => panic!("{error}"),
                        }
                    }
                }
            }
            (ambiguous, number)
        });
    }
    let (mut ended, mut ambiguous, mut written) = (0, 0, 0);
    loop {
        tokio::select! {
            done = callers.join_next() => match done {
                Some(done) => {
                    let (more, numbers) = done.unwrap();
                    ambiguous += more;
                    written += numbers;
                }
                None => break,
            },
            count = server.sql("postgres", TERMINATE) => {
                ended += count.parse::<u32>().unwrap();
                enough.fetch_or(ended > 4, Ordering::Relaxed);
            }
        }
    }
    assert!(ended > 1 && ambiguous > 3, "{ended} ended, {ambiguous} ambiguous");
    let done = "SELECT count(*) FROM hapax_cells WHERE state = 'done'";
    assert_eq!(server.sql("postgres", done).await, written.to_string());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn the_queue_is_bounded_and_rejects_claims_before_completions() {
    let server = PostgresServer::start().await;
    let options = at(&server).queue(16, 64 << 20).timeout(Duration::from_secs(3));
    let store = Arc::new(connect_within(options).await);
    expect_stored(&*store, &claim(0)).await;
    server.pause();
    let mut claims = JoinSet::new();
    let mut send = |of| {
        let store = Arc::clone(&store);
        claims.spawn(async move { store.swap(claim(of)).await });
    };
    send(1);
    // Alone, so that it is known how many are in progress.
    while store.stats().batches < 2 {
        tokio::task::yield_now().await;
    }
    (2..100).for_each(send);
    let full = |answer: &Result<Swapped, StoreError>| match answer {
        Err(StoreError::Unavailable(source)) => {
            matches!(
                source.downcast_ref::<PostgresStoreError>(),
                Some(PostgresStoreError::QueueFull)
            )
        }
        _ => false,
    };
    // One is in progress, fourteen wait, the others are refused.
    let mut refused = 0;
    while refused < 84 {
        let answer = claims.join_next().await.expect("more than that are refused").unwrap();
        assert!(full(&answer), "{answer:?}");
        refused += 1;
    }
    let completed = store.swap(complete(&claim(0), 1_000, b"yes"));
    let completed = completed.await;
    assert!(!full(&completed) && completed.is_err(), "{completed:?}");
    server.resume();
    for answer in claims.join_all().await {
        assert!(answer.is_err(), "answered by a frozen server: {answer:?}");
    }
    comes_back(&store).await;
}

/// Waits until the store is answered again.
async fn comes_back(store: &PostgresStore) {
    let answered = async { while store.load(&key(0)).await.is_err() {} };
    timeout(SOON, answered).await.expect("the server is back");
}
