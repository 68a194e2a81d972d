//! The same by sqlx.

use hapax_core::transaction::AnyTransactions;
use hapax_postgres::SqlxTransactions;
use hapax_testkit::faults::{FaultProxy, FaultProxyRates};
use sqlx::postgres::{PgPool, PgPoolOptions, Postgres};
use sqlx::{Acquire, Executor, Row, Transaction};

use super::*;

type SqlxTx = Tx<Transaction<'static, Postgres>>;

const LINE: &str = "INSERT INTO work VALUES (1)";

/// As services have them: what is shown of an error is the database's.
#[derive(Debug, thiserror::Error)]
enum WorkError {
    #[error(transparent)]
    Database(#[from] sqlx::Error),
}

struct Sqlx {
    server: PostgresServer,
    engine: Idempotency,
    pool: PgPool,
    within: TransactionBackend<SqlxTransactions>,
}

impl Sqlx {
    async fn by(server: PostgresServer, port: u16, level: IsolationLevel) -> Self {
        server.sql("postgres", TABLES).await;
        let store =
            Arc::new(PostgresStore::connect(super::super::support::at(&server)).await.unwrap());
        let engine = Idempotency::builder(Arc::clone(&store) as Arc<dyn Store>)
            .namespace("")
            .build()
            .unwrap();
        let url = format!("postgres://postgres@127.0.0.1:{port}/postgres");
        let pool = PgPoolOptions::new().max_connections(2).connect_lazy(&url).unwrap();
        let database = SqlxTransactions::new(store, pool.clone()).isolation(level);
        Self { server, engine, pool, within: TransactionBackend::new(Arc::new(database)) }
    }

    async fn new() -> Self {
        let server = PostgresServer::start().await;
        let port = server.port();
        Self::by(server, port, IsolationLevel::ReadCommitted).await
    }

    async fn run<F>(
        &self,
        of: u64,
        mut work: impl FnMut(SqlxTx) -> F + Send + 'static,
    ) -> TransactResult<()>
    where
        F: Future<Output = ExecutionEnd> + Send + 'static,
    {
        let lease = own(&self.engine, of, &policy(OnUnknown::Block)).await;
        let work = move |tx: SqlxTx, _| {
            let work = work(tx);
            async move { (work.await, ()) }
        };
        lease.transact(&self.within, work).await
    }

    /// Every connection is in the pool, and in no transaction.
    async fn at_rest(&self) {
        for _ in 0..2 {
            let mut client = timeout(LIMIT, self.pool.acquire()).await.unwrap().unwrap();
            let at_rest = "SELECT pg_current_xact_id_if_assigned() IS NULL";
            assert!(client.fetch_one(at_rest).await.unwrap().get::<bool, _>(0));
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn record_and_writes_commit_together_by_sqlx() {
    let world = Sqlx::new().await;
    let no = || ExecutionEnd::Reject { outcome: outcome("no"), retention: None };
    for (of, ending, told) in [(1, done("yes"), "yes"), (2, no(), "no")] {
        let work = move |mut tx: SqlxTx| {
            let ending = ending.clone();
            async move {
                tx.execute(LINE).await.unwrap();
                ending
            }
        };
        let ran = world.run(of, work).await;
        assert!(matches!(ran, TransactResult::Ended(ExecutionResult::Recorded(_), ())), "{ran:?}");
        assert_eq!(replayed(&world.engine, of).await, told);
        assert_eq!(lines(&world.server).await, "1");
    }
    world.at_rest().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn an_operation_that_loses_a_race_runs_again_by_sqlx() {
    let server = PostgresServer::start().await;
    let port = server.port();
    let world = Sqlx::by(server, port, IsolationLevel::Serializable).await;
    let other = Arc::new(super::super::locks::client(&world.server).await);
    for (of, often, ended_well) in [(1, 2, true), (2, u32::MAX, false)] {
        let runs = Arc::new(AtomicU32::new(0));
        let (count, other) = (Arc::clone(&runs), Arc::clone(&other));
        let judge = Arc::clone(&world.within.database);
        let work = move |mut tx: SqlxTx| {
            let (run, other) = (count.fetch_add(1, Ordering::SeqCst), Arc::clone(&other));
            let judge = Arc::clone(&judge);
            async move {
                let all = async {
                    tx.execute("SELECT amount FROM purse WHERE id = 1").await?;
                    if run < often {
                        let add = "UPDATE purse SET amount = amount + 1 WHERE id = 1";
                        other.batch_execute(add).await.unwrap();
                    }
                    tx.execute("UPDATE purse SET amount = amount + 1000 WHERE id = 1").await?;
                    Ok::<_, WorkError>(())
                };
                match all.await {
                    Ok(()) => done("yes"),
                    Err(error) => {
                        assert!(judge.any_is_conflict(&error), "{error:?}");
                        ExecutionEnd::Rerun
                    }
                }
            }
        };
        let ran = world.run(of, work).await;
        assert_eq!(runs.load(Ordering::SeqCst), if ended_well { 3 } else { 4 });
        match ran {
            TransactResult::Ended(ExecutionResult::Recorded(_), ()) if ended_well => {}
            TransactResult::Ended(ExecutionResult::Exhausted, ()) if !ended_well => {}
            other => panic!("{other:?}"),
        }
    }
    world.at_rest().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn a_commit_without_a_reply_is_resolved_by_sqlx() {
    let server = PostgresServer::start().await;
    let proxy = Arc::new(FaultProxy::before(server.address(), 5).await.unwrap());
    let port = proxy.address().port();
    let world = Sqlx::by(server, port, IsolationLevel::ReadCommitted).await;
    proxy.only(b"COMMIT\0");
    let lost_reply = FaultProxyRates { lose_reply: 1_000, ..FaultProxyRates::default() };
    let lost_request = FaultProxyRates { lose_request: 1_000, ..FaultProxyRates::default() };
    let late = FaultProxyRates {
        late_request: 1_000,
        delay_at_most: Duration::from_millis(200),
        ..FaultProxyRates::default()
    };
    for (of, rates) in (1..).zip([lost_reply, lost_request, late]) {
        let (mut first, harm) = (true, Arc::clone(&proxy));
        let work = move |mut tx: SqlxTx| {
            let rates = if first { rates } else { FaultProxyRates::default() };
            first = false;
            let harm = Arc::clone(&harm);
            async move {
                tx.execute(LINE).await.unwrap();
                harm.set(rates);
                done("yes")
            }
        };
        let ran = world.run(of, work).await;
        proxy.set(FaultProxyRates::default());
        assert!(
            matches!(ran, TransactResult::Ended(ExecutionResult::Recorded(_), ())),
            "{of}: {ran:?}"
        );
        assert_eq!(lines(&world.server).await, of.to_string());
        assert_eq!(replayed(&world.engine, of).await, "yes");
    }
    world.at_rest().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn an_operation_that_cannot_commit_is_rolled_back_by_sqlx() {
    let world = Sqlx::new().await;
    let deferred = "CREATE TABLE single (of int UNIQUE DEFERRABLE INITIALLY DEFERRED)";
    world.server.sql("postgres", deferred).await;
    let statements = ["SELECT 1/0", "INSERT INTO single VALUES (1), (1)"];
    for (of, text) in (1..).zip(statements) {
        let ran = world.run(of, move |mut tx: SqlxTx| async move {
            tx.execute(LINE).await.unwrap();
            tx.execute(text).await.ok();
            done("yes")
        });
        let ran = ran.await;
        assert!(
            matches!(ran, TransactResult::Ended(ExecutionResult::RolledBack(_), ())),
            "{text}: {ran:?}"
        );
        assert_eq!(
            own(&world.engine, of, &policy(OnUnknown::Reexecute)).await.attempt(),
            2,
            "{text}"
        );
        assert_eq!(lines(&world.server).await, "0", "{text}");
    }
    // A panic, too.
    let ran = world.run(100, |mut tx: SqlxTx| async move {
        tx.execute(LINE).await.unwrap();
        panic!("in the middle of it");
    });
    assert!(matches!(ran.await, TransactResult::Panicked));
    assert_eq!(lines(&world.server).await, "0");
    world.at_rest().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn nested_transactions_may_be_rolled_back_by_sqlx() {
    let world = Sqlx::new().await;
    for of in 1..=3 {
        let ran = world.run(of, move |mut tx: SqlxTx| async move {
            tx.execute(LINE).await.unwrap();
            let mut nested = tx.begin().await.unwrap();
            nested.execute(LINE).await.unwrap();
            match of {
                1 => nested.rollback().await.unwrap(),
                2 => drop(nested),
                _ => nested.commit().await.unwrap(),
            }
            done("yes")
        });
        let ran = ran.await;
        assert!(
            matches!(ran, TransactResult::Ended(ExecutionResult::Recorded(_), ())),
            "{of}: {ran:?}"
        );
        assert_eq!(replayed(&world.engine, of).await, "yes");
    }
    assert_eq!(lines(&world.server).await, "4");
    world.at_rest().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn an_operation_that_ends_its_transaction_is_unknown_by_sqlx() {
    let world = Sqlx::new().await;
    let refused = ExecutionEnd::Reject { outcome: outcome("no"), retention: None };
    let endings = [done("yes"), refused, ExecutionEnd::Release, ExecutionEnd::Rerun];
    let statements = ["COMMIT", "COMMIT AND CHAIN", "ROLLBACK"];
    let cases = statements.iter().flat_map(|text| endings.iter().map(move |end| (*text, end)));
    for (of, (text, ending)) in (1..).zip(cases) {
        let ending = ending.clone();
        let ran = world.run(of, move |mut tx: SqlxTx| {
            let ending = ending.clone();
            async move {
                tx.execute(LINE).await.unwrap();
                tx.execute(text).await.unwrap();
                ending
            }
        });
        let ran = ran.await;
        assert!(
            matches!(ran, TransactResult::Ended(ExecutionResult::EndedEarly(_), ())),
            "{text}: {ran:?}"
        );
        let again = claim_key(&world.engine, of, &policy(OnUnknown::Block)).await;
        assert!(matches!(again, Claim::Unknown { .. }), "{text}: {again:?}");
    }
    assert_eq!(lines(&world.server).await, "8");
    world.at_rest().await;
}
