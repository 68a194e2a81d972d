//! Work in one transaction with its record.

#[cfg(feature = "sqlx")]
mod by_sqlx;
mod doubt;
mod misuse;

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use bytes::Bytes;
use deadpool_postgres::{Manager, ManagerConfig, Pool, RecyclingMethod};
use hapax_core::transaction::{
    ExecutionEnd, ExecutionResult, TransactResult, TransactionBackend, Tx, TxOptions,
};
use hapax_core::{
    Claim, FinishError, Idempotency, InFlight, Lease, OnUnknown, Outcome, Policy, Store,
};
use hapax_postgres::{PgTransactions, PgTx, PostgresStore};
use hapax_testkit::servers::PostgresServer;
use tokio::sync::Barrier;
use tokio::task::JoinSet;
use tokio::time::{sleep, timeout};
use tokio_postgres::{Config, IsolationLevel, NoTls};

use super::support::{claim_key, own, policy};

const LIMIT: Duration = Duration::from_secs(60);

/// A purse with 100 in it, and a line for each piece of work.
const TABLES: &str = "CREATE TABLE purse (id int PRIMARY KEY, amount bigint NOT NULL);
    INSERT INTO purse VALUES (1, 100), (2, 100);
    CREATE TABLE work (of bigint)";

/// An engine on the records of a server, and transactions by a pool of two.
struct World {
    store: Arc<PostgresStore>,
    engine: Idempotency,
    pool: Pool,
    database: Arc<PgTransactions>,
}

impl World {
    async fn new(server: &PostgresServer) -> Self {
        server.sql("postgres", TABLES).await;
        Self::by(server, server.port()).await
    }

    /// Transactions by way of `port`.
    async fn by(server: &PostgresServer, port: u16) -> Self {
        let store = Arc::new(PostgresStore::connect(super::support::at(server)).await.unwrap());
        let engine = Idempotency::builder(Arc::clone(&store) as Arc<dyn Store>)
            .namespace("")
            .build()
            .unwrap();
        let pool = pool(port);
        let database = Arc::new(transactions(&store, &pool));
        Self { store, engine, pool, database }
    }

    fn within(&self) -> TransactionBackend<PgTransactions> {
        TransactionBackend::new(Arc::clone(&self.database))
    }

    async fn own(&self, of: u64, policy: &Policy) -> Lease {
        own(&self.engine, of, policy).await
    }

    /// Adds a line for each run, and ends as `ending` says of it.
    async fn work(&self, lease: Lease, terms: TxOptions, ending: ExecutionEnd) -> ExecutionResult {
        let work = move |tx: Tx<PgTx>, _| {
            let ending = ending.clone();
            async move {
                tx.batch_execute("INSERT INTO work VALUES (1)").await.unwrap();
                (ending, ())
            }
        };
        match lease
            .transact(&TransactionBackend { database: Arc::clone(&self.database), terms }, work)
            .await
        {
            TransactResult::Ended(ended, ()) => ended,
            other => panic!("{other:?}"),
        }
    }
}

fn pool(port: u16) -> Pool {
    let mut config = Config::new();
    config.host("127.0.0.1").port(port).user("postgres").dbname("postgres");
    let recycling = ManagerConfig { recycling_method: RecyclingMethod::Fast };
    let manager = Manager::from_config(config, NoTls, recycling);
    Pool::builder(manager).max_size(2).build().unwrap()
}

fn transactions(store: &Arc<PostgresStore>, pool: &Pool) -> PgTransactions {
    let pool = pool.clone();
    let get = move || {
        let pool = pool.clone();
        async move { pool.get().await }
    };
    PgTransactions::new(Arc::clone(store), get, |connection| connection)
}

/// Transactions on `server`, by a pool of their own.
pub(crate) fn at(store: &Arc<PostgresStore>, server: &PostgresServer) -> PgTransactions {
    transactions(store, &pool(server.port()))
}

fn outcome(text: &'static str) -> Outcome {
    Outcome::new("text", text)
}

fn done(text: &'static str) -> ExecutionEnd {
    ExecutionEnd::Complete { outcome: outcome(text), retention: None }
}

async fn lines(server: &PostgresServer) -> String {
    server.sql("postgres", "SELECT count(*) FROM work").await
}

async fn replayed(engine: &Idempotency, of: u64) -> Bytes {
    match claim_key(engine, of, &policy(OnUnknown::Reexecute)).await {
        Claim::Replay(replay) => replay.outcome.bytes().clone(),
        other => panic!("{other:?}"),
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn each_end_of_an_operation_leaves_its_rows_and_record() {
    let server = PostgresServer::start().await;
    let world = World::new(&server).await;
    let any = policy(OnUnknown::Reexecute);
    let terms = TxOptions::default();
    let end = async |of, ending| {
        let lease = world.own(of, &any).await;
        world.work(lease, terms, ending).await
    };

    let ExecutionResult::Recorded(Some(_)) = end(1, done("yes")).await else { panic!() };
    assert_eq!(lines(&server).await, "1");
    assert_eq!(replayed(&world.engine, 1).await, "yes");

    let no = ExecutionEnd::Reject { outcome: outcome("no"), retention: None };
    let ExecutionResult::Recorded(Some(_)) = end(2, no).await else { panic!() };
    assert_eq!(replayed(&world.engine, 2).await, "no");

    let ExecutionResult::Recorded(None) = end(3, ExecutionEnd::Release).await else { panic!() };
    let lease = world.own(3, &any).await;
    assert_eq!(lease.attempt(), 2);

    let ExecutionResult::Recorded(None) = end(4, ExecutionEnd::Abandon { seen: None }).await else {
        panic!()
    };
    assert!(matches!(
        claim_key(&world.engine, 4, &policy(OnUnknown::Block)).await,
        Claim::Unknown { .. }
    ));

    let huge = ExecutionEnd::Complete {
        outcome: Outcome::new("text", vec![0; hapax_core::codec::MAX_OUTCOME + 1]),
        retention: None,
    };
    let ExecutionResult::Failed(FinishError::TooLarge) = end(5, huge).await else { panic!() };
    assert_eq!(world.own(5, &any).await.attempt(), 2);
    // Of all these, one wrote. And every connection is in the pool, in no transaction.
    assert_eq!(lines(&server).await, "1");
    for _ in 0..2 {
        let client = world.pool.get().await.unwrap();
        let at_rest = "SELECT pg_current_xact_id_if_assigned() IS NULL";
        assert!(client.query_one(at_rest, &[]).await.unwrap().get::<_, bool>(0));
    }
}

/// The second run finds nobody in its way.
#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn an_operation_that_loses_a_race_runs_again_up_to_the_limit() {
    let server = PostgresServer::start().await;
    let mut world = World::new(&server).await;
    let repeatable = transactions(&world.store, &world.pool);
    world.database = Arc::new(repeatable.isolation(IsolationLevel::RepeatableRead));
    for (of, often, runs) in [(1, 1, 2), (2, 3, 4), (3, u32::MAX, 4)] {
        let ran = Arc::new(AtomicU32::new(0));
        let other = super::locks::client(&server).await;
        let (count, other) = (Arc::clone(&ran), Arc::new(other));
        let database = Arc::clone(&world.database);
        let work = move |tx: Tx<PgTx>, _| {
            let run = count.fetch_add(1, Ordering::SeqCst);
            let (other, database) = (Arc::clone(&other), Arc::clone(&database));
            async move {
                let seen = tx.query_one("SELECT amount FROM purse WHERE id = 1", &[]).await;
                let seen: i64 = seen.unwrap().get(0);
                if run < often {
                    other
                        .batch_execute("UPDATE purse SET amount = amount + 1 WHERE id = 1")
                        .await
                        .unwrap();
                }
                let add = "UPDATE purse SET amount = $1 WHERE id = 1";
                match tx.execute(add, &[&(seen + 1000)]).await {
                    Ok(_) => (done("yes"), None),
                    Err(error) => {
                        assert!(hapax_core::transaction::Transactions::is_conflict(
                            &*database, &error
                        ));
                        (ExecutionEnd::Rerun, Some(error))
                    }
                }
            }
        };
        let lease = world.own(of, &policy(OnUnknown::Reexecute)).await;
        let fence = lease.fence();
        let ran_so = lease.transact(&world.within(), work).await;
        assert_eq!(ran.load(Ordering::SeqCst), runs);
        match ran_so {
            TransactResult::Ended(ExecutionResult::Recorded(_), None) if often < 4 => {
                assert_eq!(replayed(&world.engine, of).await, "yes");
            }
            TransactResult::Ended(ExecutionResult::Exhausted, Some(_)) if often > 4 => {
                let lease = world.own(of, &policy(OnUnknown::Reexecute)).await;
                assert!((lease.attempt(), lease.fence()) > (1, fence));
            }
            other => panic!("{of}: {other:?}"),
        }
    }
    // Two that got through, and eight of somebody else's.
    assert_eq!(server.sql("postgres", "SELECT amount FROM purse WHERE id = 1").await, "2108");
}

/// One of the two is the victim of a deadlock, and both are done in the end.
#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn deadlocks_and_write_skew_are_resolved_by_reruns() {
    let server = PostgresServer::start().await;
    let mut world = World::new(&server).await;
    let serializable = transactions(&world.store, &world.pool);
    let serializable = Arc::new(serializable.isolation(IsolationLevel::Serializable));
    let take = "UPDATE purse SET amount = amount - 60 WHERE id = $1";
    // Each sees both purses, and takes from its own: by one after the other, the second finds too
    // little. With locks in either order, a deadlock; else the loser is told by its COMMIT.
    for (round, locks) in [(1, true), (2, false)] {
        server.sql("postgres", "UPDATE purse SET amount = 60").await;
        if !locks {
            world.database = Arc::clone(&serializable);
        }
        let (barrier, runs) = (Arc::new(Barrier::new(2)), Arc::new(AtomicU32::new(0)));
        let mut both = JoinSet::new();
        for mine in [1, 2] {
            let lease =
                world.own(round * 10 + u64::from(mine as u32), &policy(OnUnknown::Reexecute)).await;
            let database = Arc::clone(&world.database);
            let (barrier, runs) = (Arc::clone(&barrier), Arc::clone(&runs));
            both.spawn(async move {
                let judge = Arc::clone(&database);
                let work = move |tx: Tx<PgTx>, _| {
                    let first = runs.fetch_add(1, Ordering::SeqCst) < 2;
                    let (barrier, judge) = (Arc::clone(&barrier), Arc::clone(&judge));
                    async move {
                        let all = async {
                            if locks {
                                let lock = "SELECT amount FROM purse WHERE id = $1 FOR UPDATE";
                                tx.query(lock, &[&mine]).await?;
                                if first {
                                    barrier.wait().await;
                                }
                                tx.query(lock, &[&(3 - mine)]).await?;
                            }
                            let sum = "SELECT sum(amount)::bigint FROM purse";
                            let sum: i64 = tx.query_one(sum, &[]).await?.get(0);
                            if first && !locks {
                                barrier.wait().await;
                            }
                            if sum >= 120 {
                                tx.execute(take, &[&mine]).await?;
                                return Ok(done("taken"));
                            }
                            let outcome = outcome("too little");
                            Ok(ExecutionEnd::Reject { outcome, retention: None })
                        };
                        match all.await {
                            Ok(ending) => (ending, ()),
                            Err::<_, tokio_postgres::Error>(error) => {
                                assert!(judge.as_ref().conflicts(&error), "{error:?}");
                                (ExecutionEnd::Rerun, ())
                            }
                        }
                    }
                };
                lease.transact(&TransactionBackend::new(database), work).await
            });
        }
        let ended = timeout(LIMIT, both.join_all()).await.unwrap();
        for ran in &ended {
            assert!(
                matches!(ran, TransactResult::Ended(ExecutionResult::Recorded(_), ())),
                "{ran:?}"
            );
        }
        let sum = server.sql("postgres", "SELECT sum(amount) FROM purse").await;
        let mut told = Vec::new();
        for mine in [1, 2] {
            told.push(replayed(&world.engine, round * 10 + mine).await);
        }
        told.sort();
        assert_eq!((&*sum, told), ("60", vec!["taken".into(), "too little".into()]), "{round}");
    }
}

trait Conflicts {
    fn conflicts(&self, error: &tokio_postgres::Error) -> bool;
}

impl Conflicts for PgTransactions {
    fn conflicts(&self, error: &tokio_postgres::Error) -> bool {
        hapax_core::transaction::Transactions::is_conflict(self, error)
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn a_transaction_longer_than_its_lease_writes_nothing_after_a_takeover() {
    let server = PostgresServer::start().await;
    let world = World::new(&server).await;
    let mut short = policy(OnUnknown::Reexecute);
    short.terms.lease = Duration::from_millis(200);
    for (of, taken_over) in [(1, true), (2, false)] {
        let lease = world.own(of, &short).await;
        let fence = lease.fence();
        // Another process: the one that executes does not take over from itself.
        let engine = Idempotency::builder(Arc::clone(&world.store) as Arc<dyn Store>)
            .namespace("")
            .build()
            .unwrap();
        let work = move |tx: Tx<PgTx>, _| {
            let engine = engine.clone();
            async move {
                tx.batch_execute("INSERT INTO work VALUES (1)").await.unwrap();
                if !taken_over {
                    sleep(Duration::from_millis(400)).await;
                    return (done("late"), None);
                }
                loop {
                    match claim_key(&engine, of, &policy(OnUnknown::Reexecute)).await {
                        Claim::Execute(lease) => return (done("late"), Some(lease)),
                        _ => sleep(Duration::from_millis(10)).await,
                    }
                }
            }
        };
        let ran = lease.transact(&world.within(), work).await;
        match ran {
            TransactResult::Ended(ExecutionResult::Failed(FinishError::Lost), Some(other))
                if taken_over =>
            {
                assert!(other.fence() > fence);
                assert_eq!(lines(&server).await, "0");
                other.complete(outcome("theirs"), None).await.unwrap();
                assert_eq!(replayed(&world.engine, of).await, "theirs");
            }
            // Nobody took over: late is not too late.
            TransactResult::Ended(ExecutionResult::Recorded(_), None) if !taken_over => {
                assert_eq!(lines(&server).await, "1");
            }
            other => panic!("{of}: {other:?}"),
        }
    }
}

/// A hundred copies of each of four requests, while those run, on a pool of two.
#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn duplicates_wait_for_no_transaction_and_use_no_connection() {
    let server = PostgresServer::start().await;
    let world = World::new(&server).await;
    let (go, begun) = (Arc::new(Barrier::new(3)), Arc::new(Barrier::new(3)));
    let mut owners = JoinSet::new();
    for of in 1..=2 {
        let lease = world.own(of, &policy(OnUnknown::Reexecute)).await;
        let (go, begun) = (Arc::clone(&go), Arc::clone(&begun));
        let work = move |tx: Tx<PgTx>, _| {
            let (go, begun) = (Arc::clone(&go), Arc::clone(&begun));
            async move {
                tx.batch_execute("INSERT INTO work VALUES (1)").await.unwrap();
                begun.wait().await;
                go.wait().await;
                (done("yes"), ())
            }
        };
        let backend = world.within();
        owners.spawn(async move { lease.transact(&backend, work).await });
    }
    begun.wait().await;
    assert_eq!(world.pool.status().available, 0);
    let mut at_once = JoinSet::new();
    let mut patient = JoinSet::new();
    for copy in 0..200 {
        let engine = world.engine.clone();
        let of = copy % 2 + 1;
        if copy < 100 {
            at_once
                .spawn(async move { claim_key(&engine, of, &policy(OnUnknown::Reexecute)).await });
        } else {
            let policy =
                Policy { in_flight: InFlight::Wait(LIMIT), ..policy(OnUnknown::Reexecute) };
            patient.spawn(async move { claim_key(&engine, of, &policy).await });
        }
    }
    // While both connections are taken.
    for claim in timeout(LIMIT, at_once.join_all()).await.unwrap() {
        assert!(matches!(claim, Claim::InFlight { .. }), "{claim:?}");
    }
    assert_eq!(world.pool.status().waiting, 0);
    go.wait().await;
    for claim in timeout(LIMIT, patient.join_all()).await.unwrap() {
        assert!(matches!(claim, Claim::Replay(_)), "{claim:?}");
    }
    for ran in owners.join_all().await {
        assert!(matches!(ran, TransactResult::Ended(ExecutionResult::Recorded(_), ())), "{ran:?}");
    }
    assert_eq!(lines(&server).await, "2");
}

/// An owner that waits for a connection is renewed as ever.
#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn waiting_for_a_connection_costs_no_lease() {
    let server = PostgresServer::start().await;
    let world = World::new(&server).await;
    let taken = [world.pool.get().await.unwrap(), world.pool.get().await.unwrap()];
    let mut short = policy(OnUnknown::Reexecute);
    short.terms.lease = Duration::from_millis(300);
    let lease = world.own(1, &short).await;
    let work = |tx: Tx<PgTx>, _| async move {
        tx.batch_execute("INSERT INTO work VALUES (1)").await.unwrap();
        (done("yes"), ())
    };
    let ran = tokio::spawn({
        let backend = world.within();
        async move { lease.transact(&backend, work).await }
    });
    sleep(Duration::from_millis(900)).await;
    assert!(matches!(claim_key(&world.engine, 1, &short).await, Claim::InFlight { .. }));
    drop(taken);
    let ran = timeout(LIMIT, ran).await.unwrap().unwrap();
    assert!(matches!(ran, TransactResult::Ended(ExecutionResult::Recorded(_), ())), "{ran:?}");
}
