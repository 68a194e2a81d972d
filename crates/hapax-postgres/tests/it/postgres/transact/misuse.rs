//! What work can do wrong with its transaction.

use std::sync::Mutex;

use super::*;

/// Runs `with` on a transaction of its own, ends it as done, and expects that nothing was written.
async fn misused<F>(world: &World, of: u64, with: impl Fn(Tx<PgTx>) -> F + Send + 'static) -> Ended
where
    F: Future<Output = ()> + Send + 'static,
{
    let lease = world.own(of, &Policy::default()).await;
    let work = move |tx: Tx<PgTx>, _| {
        let used = with(tx);
        async move {
            used.await;
            (done("yes"), ())
        }
    };
    match lease.transact(&world.within(), work).await {
        Ran::Ended(ended, ()) => ended,
        other => panic!("{other:?}"),
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn what_cannot_commit_does_not() {
    let server = PostgresServer::start().await;
    let world = World::new(&server).await;
    server
        .sql("postgres", "CREATE TABLE single (of int UNIQUE DEFERRABLE INITIALLY DEFERRED)")
        .await;
    let statements = [
        // An error that is not heeded: the transaction has failed.
        "INSERT INTO work VALUES (1); SELECT 1/0",
        // A savepoint that is left open.
        "INSERT INTO work VALUES (1); SAVEPOINT here",
        // It ended early, by a statement: there is nothing to commit, or another transaction.
        "INSERT INTO work VALUES (1); ROLLBACK",
        "INSERT INTO work VALUES (1); ROLLBACK; BEGIN; INSERT INTO work VALUES (1)",
        // COMMIT fails.
        "INSERT INTO work VALUES (1); INSERT INTO single VALUES (1), (1)",
    ];
    for (of, text) in (1..).zip(statements) {
        let ended = misused(&world, of, move |tx| async move {
            tx.batch_execute(text).await.ok();
        });
        let ended = ended.await;
        assert!(matches!(ended, Ended::RolledBack(_) | Ended::Exhausted), "{text}: {ended:?}");
        // The key is free.
        assert_eq!(world.own(of, &Policy::default()).await.attempt(), 2, "{text}");
        assert_eq!(lines(&server).await, "0", "{text}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn a_transaction_that_is_kept_is_not_committed() {
    let server = PostgresServer::start().await;
    let world = World::new(&server).await;
    let kept = Arc::new(Mutex::new(None));
    let keep = Arc::clone(&kept);
    let ended = misused(&world, 1, move |tx| {
        let keep = Arc::clone(&keep);
        async move {
            tx.batch_execute("INSERT INTO work VALUES (1)").await.unwrap();
            *keep.lock().unwrap() = Some(tx);
        }
    });
    let ended = ended.await;
    assert!(matches!(ended, Ended::Kept), "{ended:?}");
    assert!(matches!(ask(&world.engine, 1, &policy(OnUnknown::Block)).await, Claim::Unknown));
    let tx = kept.lock().unwrap().take().unwrap();
    tx.batch_execute("INSERT INTO work VALUES (2)").await.unwrap();
    drop(tx);
    for _ in 0..2 {
        // After the rollback that the drop sent.
        let client = world.pool.get().await.unwrap();
        assert_eq!(client.query("SELECT * FROM work", &[]).await.unwrap().len(), 0);
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn a_panic_rolls_back_and_leaves_it_unknown() {
    let server = PostgresServer::start().await;
    let world = World::new(&server).await;
    for of in 1..=2 {
        let lease = world.own(of, &Policy::default()).await;
        let work = move |tx: Tx<PgTx>, _| {
            assert_ne!(of, 2, "before there is a future");
            async move {
                tx.batch_execute("INSERT INTO work VALUES (1)").await.unwrap();
                panic!("in the middle of it");
                #[expect(unreachable_code, reason = "its type")]
                (done("yes"), ())
            }
        };
        let ran = lease.transact(&world.within(), work).await;
        assert!(matches!(ran, Ran::Panicked), "{ran:?}");
        assert_eq!(lines(&server).await, "0");
        assert!(matches!(ask(&world.engine, of, &policy(OnUnknown::Block)).await, Claim::Unknown));
    }
    assert_eq!(world.pool.status().available, world.pool.status().size);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn without_a_connection_nothing_runs_and_the_key_is_free() {
    let mut server = PostgresServer::start().await;
    let world = World::new(&server).await;
    let lease = world.own(1, &Policy::default()).await;
    let nowhere = transactions(&world.store, &pool(hapax_testkit::servers::free_port()));
    let ran = lease
        .transact(&InDatabase::new(Arc::new(nowhere)), |_: Tx<PgTx>, _| async { (done("yes"), ()) })
        .await;
    assert!(matches!(ran, Ran::NotBegun(_)), "{ran:?}");
    assert_eq!(world.own(1, &Policy::default()).await.attempt(), 2);
    server.stop().await;
}
