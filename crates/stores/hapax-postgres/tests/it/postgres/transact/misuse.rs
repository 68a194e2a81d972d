//! What work can do wrong with its transaction.

use std::sync::Mutex;

use super::*;

/// Runs `with` on a transaction of its own, ends it as done, and expects that nothing was written.
async fn misused<F>(
    world: &World,
    of: u64,
    with: impl Fn(Tx<PgTx>) -> F + Send + 'static,
) -> ExecutionResult
where
    F: Future<Output = ()> + Send + 'static,
{
    let lease = world.own(of, &policy(OnUnknown::Reexecute)).await;
    let work = move |tx: Tx<PgTx>, _| {
        let used = with(tx);
        async move {
            used.await;
            (done("yes"), ())
        }
    };
    match lease.transact(&world.within(), work).await {
        TransactResult::Ended(ended, ()) => ended,
        other => panic!("{other:?}"),
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn an_operation_that_cannot_commit_is_rolled_back() {
    let server = PostgresServer::start().await;
    let world = World::new(&server).await;
    server
        .sql("postgres", "CREATE TABLE single (of int UNIQUE DEFERRABLE INITIALLY DEFERRED)")
        .await;
    let statements = [
        // An error that is not heeded: the transaction has failed.
        "INSERT INTO work VALUES (1); SELECT 1/0",
        // COMMIT fails.
        "INSERT INTO work VALUES (1); INSERT INTO single VALUES (1), (1)",
    ];
    for (of, text) in (1..).zip(statements) {
        let ended = misused(&world, of, move |tx| async move {
            tx.batch_execute(text).await.ok();
        });
        let ended = ended.await;
        assert!(matches!(ended, ExecutionResult::RolledBack(_)), "{text}: {ended:?}");
        // The key is free.
        assert_eq!(world.own(of, &policy(OnUnknown::Reexecute)).await.attempt(), 2, "{text}");
        assert_eq!(lines(&server).await, "0", "{text}");
    }
}

/// What of it was committed nobody knows: it is neither free to run again nor recorded as done.
#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn an_operation_that_ends_its_transaction_is_unknown() {
    let server = PostgresServer::start().await;
    let world = World::new(&server).await;
    let statements = ["COMMIT", "COMMIT; BEGIN", "COMMIT AND CHAIN", "ROLLBACK", "ROLLBACK; BEGIN"];
    let endings = [
        done("yes"),
        ExecutionEnd::Reject { outcome: outcome("no"), retention: None },
        ExecutionEnd::Release,
        ExecutionEnd::Rerun,
    ];
    let mut of = 0;
    for text in statements {
        for ending in &endings {
            of += 1;
            let lease = world.own(of, &policy(OnUnknown::Block)).await;
            let ending = ending.clone();
            let work = move |tx: Tx<PgTx>, _| {
                let ending = ending.clone();
                async move {
                    tx.batch_execute("INSERT INTO work VALUES (1)").await.unwrap();
                    tx.batch_execute(text).await.unwrap();
                    (ending, ())
                }
            };
            let ran = lease.transact(&world.within(), work).await;
            assert!(
                matches!(ran, TransactResult::Ended(ExecutionResult::EndedEarly(_), ())),
                "{text}: {ran:?}"
            );
            let again = claim_key(&world.engine, of, &policy(OnUnknown::Block)).await;
            assert!(matches!(again, Claim::Unknown { .. }), "{text}: {again:?}");
        }
    }
    // Each ran once.
    assert_eq!(lines(&server).await, "12");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn a_savepoint_at_the_end_commits_with_the_rest() {
    let server = PostgresServer::start().await;
    let world = World::new(&server).await;
    let line = "INSERT INTO work VALUES (1)";
    // With how many lines each leaves.
    let statements = [
        (format!("{line}; SAVEPOINT here; {line}; ROLLBACK TO SAVEPOINT here"), 1),
        (format!("{line}; SAVEPOINT here; {line}; RELEASE SAVEPOINT here"), 2),
        (format!("{line}; SAVEPOINT here; {line}"), 2),
    ];
    let mut expected = 0;
    for (of, (text, written)) in (1..).zip(statements) {
        let given = text.clone();
        let ended = misused(&world, of, move |tx| {
            let text = given.clone();
            async move { tx.batch_execute(&text).await.unwrap() }
        });
        let ended = ended.await;
        assert!(matches!(ended, ExecutionResult::Recorded(_)), "{text}: {ended:?}");
        assert_eq!(replayed(&world.engine, of).await, "yes", "{text}");
        expected += written;
        assert_eq!(lines(&server).await, expected.to_string(), "{text}");
    }
}

/// Whoever catches the panic of a task that had the transaction does not commit the half of it.
#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn a_transaction_in_a_task_that_panics_is_not_committed() {
    let server = PostgresServer::start().await;
    let world = World::new(&server).await;
    let ended = misused(&world, 1, |tx| async move {
        let half = tokio::spawn(async move {
            tx.batch_execute("INSERT INTO work VALUES (1)").await.unwrap();
            panic!("half-way");
        });
        half.await.unwrap_err();
    });
    let ended = ended.await;
    assert!(matches!(ended, ExecutionResult::Kept), "{ended:?}");
    assert_eq!(lines(&server).await, "0");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn a_transaction_that_outlives_its_operation_is_not_committed() {
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
    assert!(matches!(ended, ExecutionResult::Kept), "{ended:?}");
    assert!(matches!(
        claim_key(&world.engine, 1, &policy(OnUnknown::Block)).await,
        Claim::Unknown { .. }
    ));
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
async fn a_panic_rolls_back_and_leaves_the_outcome_unknown() {
    let server = PostgresServer::start().await;
    let world = World::new(&server).await;
    for of in 1..=2 {
        let lease = world.own(of, &policy(OnUnknown::Reexecute)).await;
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
        assert!(matches!(ran, TransactResult::Panicked), "{ran:?}");
        assert_eq!(lines(&server).await, "0");
        assert!(matches!(
            claim_key(&world.engine, of, &policy(OnUnknown::Block)).await,
            Claim::Unknown { .. }
        ));
    }
    assert_eq!(world.pool.status().available, world.pool.status().size);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn without_a_connection_nothing_runs_and_the_key_is_free() {
    let mut server = PostgresServer::start().await;
    let world = World::new(&server).await;
    let lease = world.own(1, &policy(OnUnknown::Reexecute)).await;
    let nowhere = transactions(&world.store, &pool(hapax_testkit::servers::free_port()));
    let ran = lease
        .transact(&TransactionBackend::new(Arc::new(nowhere)), |_: Tx<PgTx>, _| async {
            (done("yes"), ())
        })
        .await;
    assert!(matches!(ran, TransactResult::NotBegun(_)), "{ran:?}");
    assert_eq!(world.own(1, &policy(OnUnknown::Reexecute)).await.attempt(), 1);
    server.stop().await;
}
