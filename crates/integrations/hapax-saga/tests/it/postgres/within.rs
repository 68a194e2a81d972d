//! Steps that commit with the log, and starts that commit with the caller's writes.

use std::future::pending;
use std::net::SocketAddr;
use std::num::NonZeroU32;
use std::sync::Arc;
use std::time::Duration;

use deadpool_postgres::{Manager, Pool};
use hapax_core::transaction::TransactionBackend;
use hapax_core::{Idempotency, Store};
use hapax_postgres::{PgTransactions, PgTx, PostgresStore};
use hapax_saga::log::{Direction, Log, StuckReason};
use hapax_saga::{
    Saga, SagaDecision, SagaError, SagaLookup, SagaOperator, Sagas, StepContext, StepEffect,
    StepError, StepRetry, UndoError,
};
use hapax_testkit::faults::{FaultProxy, FaultProxyRates};
use hapax_testkit::servers::PostgresServer;

use super::options;
use crate::world::{key, scope};

fn pool(address: SocketAddr) -> Pool {
    let config = format!("postgres://postgres@{address}/postgres").parse().unwrap();
    let manager = Manager::new(config, tokio_postgres::NoTls);
    Pool::builder(manager).max_size(8).build().unwrap()
}

async fn setup(
    server: &PostgresServer,
) -> (Arc<PostgresStore>, Pool, TransactionBackend<PgTransactions>) {
    setup_by(server, server.address()).await
}

/// Does the same, with transactions by another address.
async fn setup_by(
    server: &PostgresServer,
    address: SocketAddr,
) -> (Arc<PostgresStore>, Pool, TransactionBackend<PgTransactions>) {
    let store = Arc::new(PostgresStore::connect(options(server)).await.unwrap());
    let pool = pool(address);
    let tables = "CREATE TABLE ledger (entry text PRIMARY KEY, cents bigint NOT NULL)";
    pool.get().await.unwrap().batch_execute(tables).await.unwrap();
    let from = pool.clone();
    let transactions = PgTransactions::new(
        Arc::clone(&store),
        move || {
            let pool = from.clone();
            async move { pool.get().await }
        },
        |connection| connection,
    );
    (store, pool, TransactionBackend::new(Arc::new(transactions)))
}

/// Returns a saga that writes two entries in the ledger, of which `fails` lets the second one fail.
fn transfer(fails: bool) -> Saga<i64, i64, String> {
    let mut saga = Saga::define("transfer", 1, ());
    let entry = |saga: &mut hapax_saga::SagaBuilder<()>, name: &'static str, fails: bool| {
        saga.within(name, move |at: StepContext<()>, cents: i64| async move {
            let tx = at.tx::<PgTx, String>().await?;
            let insert = "INSERT INTO ledger VALUES ($1, $2)";
            tx.execute(insert, &[&name, &cents]).await.map_err(StepError::not_sent)?;
            match fails {
                // Rolled back, with what it wrote.
                true => Err(StepError::Rejected("the account is closed".to_owned())),
                false => Ok(cents),
            }
        })
        .undo(move |at: StepContext<()>, _: i64, _: StepEffect<i64>| async move {
            let tx = at.tx::<PgTx, String>().await.map_err(|_| "no transaction")?;
            tx.execute("DELETE FROM ledger WHERE entry = $1", &[&name]).await?;
            Ok::<_, UndoError>(())
        })
    };
    let debit = entry(&mut saga, "debit", false);
    let credit = entry(&mut saga, "credit", fails);
    saga.flow(move |op, cents: i64| async move {
        op.run(debit, -cents).await?;
        op.run(credit, cents).await
    })
    .unwrap()
}

async fn entries(pool: &Pool) -> Vec<(String, i64)> {
    let rows = pool.get().await.unwrap();
    let rows = rows.query("SELECT entry, cents FROM ledger ORDER BY entry", &[]).await.unwrap();
    rows.iter().map(|row| (row.get(0), row.get(1))).collect()
}

fn sagas(
    store: &Arc<PostgresStore>,
    backend: &TransactionBackend<PgTransactions>,
    saga: &Saga<i64, i64, String>,
) -> Sagas {
    let engine = Idempotency::builder(Arc::clone(store)).namespace("").build().unwrap();
    Sagas::builder(engine).register(saga).transactions(backend).build().unwrap()
}

#[tokio::test(flavor = "multi_thread")]
async fn the_writes_of_a_step_commit_with_its_result() {
    let server = PostgresServer::start().await;
    let (store, pool, backend) = setup(&server).await;
    let saga = transfer(false);
    let sagas = sagas(&store, &backend, &saga);
    let started = sagas.start(&saga, &scope(), &key("k"), &100).await.unwrap();
    assert_eq!(started.outcome().await.unwrap(), 100);
    assert_eq!(entries(&pool).await, [("credit".to_owned(), 100), ("debit".to_owned(), -100)]);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_step_whose_commit_has_no_reply_is_not_repeated() {
    let server = PostgresServer::start().await;
    let proxy = FaultProxy::before(server.address(), 7).await.unwrap();
    let (store, pool, backend) = setup_by(&server, proxy.address()).await;
    proxy.only(b"COMMIT\0");
    proxy.set(FaultProxyRates { lose_reply: 1_000, ..FaultProxyRates::default() });
    let saga = transfer(false);
    let sagas = sagas(&store, &backend, &saga);
    let started = sagas.start(&saga, &scope(), &key("k"), &100).await.unwrap();
    assert_eq!(started.outcome().await.unwrap(), 100);
    assert_eq!(entries(&pool).await, [("credit".to_owned(), 100), ("debit".to_owned(), -100)]);
    assert_eq!(proxy.counts().lost_replies, 2);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_rejected_step_leaves_no_writes_and_the_earlier_ones_are_undone() {
    let server = PostgresServer::start().await;
    let (store, pool, backend) = setup(&server).await;
    let saga = transfer(true);
    let sagas = sagas(&store, &backend, &saga);
    let started = sagas.start(&saga, &scope(), &key("k"), &100).await.unwrap();
    let outcome = started.outcome().await;
    assert!(matches!(&outcome, Err(SagaError::Undone(error)) if error == "the account is closed"));
    assert_eq!(entries(&pool).await, []);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_saga_starts_if_and_only_if_the_callers_transaction_commits() {
    let server = PostgresServer::start().await;
    let (store, pool, backend) = setup(&server).await;
    let saga = transfer(false);
    let sagas = sagas(&store, &backend, &saga);
    let running = sagas.clone();
    tokio::spawn(async move { running.run(pending(), Duration::ZERO).await });
    for (name, commits) in [("rolled back", false), ("committed", true)] {
        let mut connection = pool.get().await.unwrap();
        let mut tx = connection.transaction().await.unwrap();
        let (scope, key) = (scope(), key(name));
        sagas.start_in(&*store, &mut *tx, &saga, (&scope, &key), &100).await.unwrap();
        match commits {
            true => tx.commit().await.unwrap(),
            false => tx.rollback().await.unwrap(),
        }
    }
    let started = loop {
        match sagas.find(&saga, &scope(), &key("committed")).await.unwrap() {
            Some(started) => break started,
            None => tokio::time::sleep(Duration::from_millis(50)).await,
        }
    };
    assert_eq!(started.outcome().await.unwrap(), 100);
    assert!(sagas.find(&saga, &scope(), &key("rolled back")).await.unwrap().is_none());
    assert_eq!(entries(&pool).await.len(), 2);
    let _: &dyn Store = &*store;
}

/// Waits until the only saga is stuck.
async fn stuck(store: &Arc<PostgresStore>) -> Log {
    let operator =
        SagaOperator::new(Idempotency::builder(Arc::clone(store)).namespace("").build().unwrap());
    loop {
        let (sagas, _) = operator.list(None, NonZeroU32::MAX).await.unwrap();
        let log = sagas.into_iter().find_map(|saga| saga.log).filter(|log| log.stuck.is_some());
        match log {
            Some(log) => return log,
            None => tokio::time::sleep(Duration::from_millis(50)).await,
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_result_that_is_too_large_leaves_no_writes_and_did_not_happen() {
    let server = PostgresServer::start().await;
    let (store, pool, backend) = setup(&server).await;
    let mut saga = Saga::define("large", 1, ());
    let step = async |at: StepContext<()>, cents: i64| {
        let tx = at.tx::<PgTx, String>().await?;
        let insert = "INSERT INTO ledger VALUES ('large', $1)";
        tx.execute(insert, &[&cents]).await.map_err(StepError::not_sent)?;
        Ok::<_, StepError<String>>("x".repeat(70 << 10))
    };
    let step = saga.within("large", step).no_undo();
    let flow = saga.flow(move |op, cents: i64| async move {
        op.run(step, cents).await?;
        Ok::<_, String>(cents)
    });
    let saga = flow.unwrap();
    let sagas = sagas(&store, &backend, &saga);
    sagas.start(&saga, &scope(), &key("k"), &100).await.unwrap();
    let log = stuck(&store).await;
    let stuck = log.stuck.unwrap();
    assert_eq!(stuck.reason, StuckReason::TooLarge);
    assert!(stuck.detail.contains("rolled back"), "{}", stuck.detail);
    assert!(!log.steps[0].forward.arrived);
    assert_eq!(entries(&pool).await, []);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_step_or_an_undo_that_ends_its_transaction_itself_is_not_repeated() {
    let server = PostgresServer::start().await;
    let (store, pool, backend) = setup(&server).await;
    for by in [Direction::Forward, Direction::Undo] {
        let name = by.as_str();
        let write = move |at: StepContext<()>, now: Direction| async move {
            let tx = at.tx::<PgTx, String>().await.map_err(|_| "no transaction")?;
            if now == by {
                let insert = format!("INSERT INTO ledger VALUES ('{name}', 1); COMMIT");
                tx.batch_execute(&insert).await?;
            }
            Ok::<_, UndoError>(())
        };
        let mut saga = Saga::define("early", 1, ());
        let step = saga
            .within("early", move |at: StepContext<()>, cents: i64| async move {
                let written = write(at, Direction::Forward).await;
                written.map_err(|_| StepError::<String>::not_sent("not written"))?;
                Ok(cents)
            })
            .retry(StepRetry::default().timeout(Duration::from_secs(5)))
            .settle(Duration::ZERO)
            .undo(move |at: StepContext<()>, _: i64, _: StepEffect<i64>| {
                write(at, Direction::Undo)
            });
        let flow = saga.flow(move |op, cents: i64| async move {
            op.run(step, cents).await?;
            Err::<i64, _>("it failed".to_owned())
        });
        let saga = flow.unwrap();
        let sagas = sagas(&store, &backend, &saga);
        let started = sagas.start(&saga, &scope(), &key(name), &100).await.unwrap();
        let log = stuck(&store).await;
        let stuck = log.stuck.as_ref().unwrap();
        assert_eq!((stuck.reason.clone(), stuck.direction), (StuckReason::Unknown, by));
        assert_eq!(log.steps[0].tries(by).begun, 1);
        assert!(entries(&pool).await.contains(&(name.to_owned(), 1)));
        // An operator has looked at the rows.
        let operator = SagaOperator::new(
            Idempotency::builder(Arc::clone(&store)).namespace("").build().unwrap(),
        );
        let SagaLookup::Unfinished(view) = operator.show(&started.id()).await.unwrap() else {
            panic!("it is stuck")
        };
        let decision = match by {
            Direction::Forward => SagaDecision::Abort,
            Direction::Undo => SagaDecision::happened(&()).unwrap(),
        };
        operator.decide(&view, &decision, "ann", "in the ledger").await.unwrap();
        let running = sagas.clone();
        let run = tokio::spawn(async move { running.run(pending(), Duration::ZERO).await });
        assert!(started.outcome().await.is_err());
        run.abort();
    }
}
