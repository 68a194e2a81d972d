//! The processes of the test: their store, their database and their steps have the points at which they
//! are killed.

use std::sync::Arc;
use std::time::Duration;

use deadpool_postgres::{Manager, Pool};
use hapax_core::schedule::Schedule;
use hapax_core::store::{BoxFuture, Swap, Swapped};
use hapax_core::transaction::{TransactionBackend, Transactions, TxError};
use hapax_core::{Idempotency, OperationId};
use hapax_postgres::{PgTransactions, PgTx, PostgresStore};
use hapax_saga::{
    Saga, SagaHandle, SagaOperator, Sagas, StepContext, StepEffect, StepError, StepRetry, UndoError,
};
use hapax_testkit::faults::FaultProxy;
use hapax_testkit::servers::PostgresServer;
use tokio::time::sleep;

use super::{Bug, Round, STEPS};
use crate::kills::{Kill, KilledStore};
use crate::postgres::options;
use crate::world::{key, scope};

const LEASE: Duration = Duration::from_millis(500);

/// A database whose transactions are killed with their process.
#[derive(Debug)]
struct KilledTransactions {
    database: PgTransactions,
    kill: Arc<Kill>,
}

impl Transactions for KilledTransactions {
    type Tx = PgTx;

    fn connect(&self) -> BoxFuture<'_, Result<PgTx, TxError>> {
        let call = self.database.connect();
        Box::pin(self.kill.around(["before a connection", "after a connection"], call))
    }

    fn begin<'a>(&'a self, tx: &'a mut PgTx) -> BoxFuture<'a, Result<(), TxError>> {
        let call = self.database.begin(tx);
        Box::pin(self.kill.around(["before BEGIN", "after BEGIN"], call))
    }

    fn swap_in<'a>(
        &'a self,
        tx: &'a mut PgTx,
        swap: Swap,
    ) -> BoxFuture<'a, Result<Swapped, TxError>> {
        let call = self.database.swap_in(tx, swap);
        Box::pin(self.kill.around(["before the log", "after the log"], call))
    }

    fn commit(&self, tx: PgTx) -> BoxFuture<'_, Result<(), TxError>> {
        let call = self.database.commit(tx);
        Box::pin(self.kill.around(["before COMMIT", "after COMMIT"], call))
    }

    fn rollback(&self, tx: PgTx) -> BoxFuture<'_, Result<(), TxError>> {
        let call = self.database.rollback(tx);
        Box::pin(self.kill.around(["before ROLLBACK", "after ROLLBACK"], call))
    }

    fn is_conflict(&self, error: &(dyn std::error::Error + 'static)) -> bool {
        self.database.is_conflict(error)
    }

    fn committed(&self, key: &OperationId) {
        self.database.committed(key);
    }
}

/// The state of steps: the point at which their process is killed, and its own connection.
struct Steps {
    kill: Arc<Kill>,
    own: Pool,
    bug: Option<Bug>,
}

impl Steps {
    /// Writes an entry in the ledger.
    async fn write(
        at: &StepContext<Self>,
        (saga, cents): &(String, i64),
        entry: &str,
    ) -> Result<(), StepError<String>> {
        let insert = "INSERT INTO ledger VALUES ($1, $2, $3)";
        let tx = at.tx::<PgTx, String>().await?;
        at.kill.point("before a statement").await;
        if at.bug == Some(Bug::Outside) {
            let own = at.own.get().await.map_err(StepError::not_sent)?;
            own.execute(insert, &[saga, &entry, cents]).await.map_err(StepError::not_sent)?;
        } else {
            tx.execute(insert, &[saga, &entry, cents]).await.map_err(StepError::not_sent)?;
        }
        at.kill.point("after a statement").await;
        Ok(())
    }
}

type Transfer = Saga<(String, i64, bool), i64, String>;

/// Returns a saga that writes three entries in the ledger. The third is rejected if the input says so.
fn transfer(name: &'static str, steps: Steps) -> Transfer {
    let mut saga = Saga::define(name, 1, steps);
    let quick = StepRetry::default()
        .tries(1_000)
        .pauses(Duration::from_millis(5), Duration::from_millis(20));
    let [debit, fee, credit] = STEPS.map(|name| {
        saga.within(
            name,
            move |at: StepContext<Steps>, (saga, cents, is_rejected): (String, i64, bool)| async move {
                Steps::write(&at, &(saga, cents), name).await?;
                match is_rejected {
                    // Rolled back, with what it wrote.
                    true => Err(StepError::Rejected("the account is closed".to_owned())),
                    false => Ok(cents),
                }
            },
        )
        .retry(quick)
        .undo_retry(quick)
        .undo(move |at: StepContext<Steps>, (saga, cents, _), _: StepEffect<i64>| async move {
            let undone = Steps::write(&at, &(saga, -cents), &format!("undo {name}")).await;
            undone.map_err(|error| UndoError::from(format!("{error:?}")))
        })
    });
    saga.flow(move |op, (saga, cents, is_rejected): (String, i64, bool)| async move {
        op.run(debit, (saga.clone(), -cents, false)).await?;
        op.run(fee, (saga.clone(), 1, false)).await?;
        op.run(credit, (saga, cents - 1, is_rejected)).await
    })
    .unwrap()
}

/// A process that is killed at a point.
pub(super) struct Process {
    pub(super) kill: Arc<Kill>,
    pub(super) sagas: Sagas,
    pub(super) operator: SagaOperator,
    engine: Idempotency,
    store: Arc<PostgresStore>,
    /// Connections through the proxy.
    pool: Pool,
    /// A connection without faults.
    own: Pool,
    saga: Transfer,
    bug: Option<Bug>,
}

impl Process {
    /// Starts a process, whose transactions lead through the proxy.
    pub(super) async fn new(
        (server, proxy): (&PostgresServer, &FaultProxy),
        name: &'static str,
        at: usize,
        bug: Option<Bug>,
    ) -> Self {
        let kill = Kill::at(at);
        let store = Arc::new(PostgresStore::connect(options(server)).await.unwrap());
        let config = format!("postgres://postgres@{}/postgres", proxy.address());
        let manager = Manager::new(config.parse().unwrap(), tokio_postgres::NoTls);
        let pool = Pool::builder(manager).max_size(3).build().unwrap();
        let from = pool.clone();
        let get = move || {
            let pool = from.clone();
            async move { pool.get().await }
        };
        let own = Manager::new(server.url("postgres").parse().unwrap(), tokio_postgres::NoTls);
        let own = Pool::builder(own).max_size(1).build().unwrap();
        let database = PgTransactions::new(Arc::clone(&store), get, |connection| connection);
        let killed = KilledTransactions { database, kill: Arc::clone(&kill) };
        let backend = TransactionBackend::new(Arc::new(killed));
        let saga = transfer(name, Steps { kill: Arc::clone(&kill), own: own.clone(), bug });
        let killed = KilledStore { store: store.clone(), kill: Arc::clone(&kill) };
        let engine = Idempotency::builder(killed).namespace("").build().unwrap();
        let sagas = Sagas::builder(engine).register(&saga).transactions(&backend).lease(LEASE);
        let sagas = sagas.build().unwrap();
        let engine = Idempotency::builder(Arc::clone(&store)).namespace("").build().unwrap();
        let operator = SagaOperator::new(engine.clone());
        Self { kill, sagas, operator, engine, store, pool, own, saga, bug }
    }

    /// Starts a saga, as a client that retries.
    pub(super) async fn start(&self, round: &Round) -> SagaHandle<i64, String> {
        let (scope, key, input) = (scope(), key(&round.key), round.input());
        loop {
            match self.sagas.start(&self.saga, &scope, &key, &input).await {
                Ok(started) => return started,
                Err(_) => sleep(Duration::from_millis(50)).await,
            }
        }
    }

    /// Starts a saga in a transaction with an order, once. Its COMMIT may have no reply.
    pub(super) async fn order(&self, round: &Round) {
        let Ok(mut connection) = self.pool.get().await else { return };
        let mut tx = connection.transaction().await.unwrap();
        self.kill.point("before the order").await;
        let insert = "INSERT INTO orders VALUES ($1, 'the caller')";
        tx.execute(insert, &[&round.key]).await.unwrap();
        self.kill.point("after the order").await;
        let (scope, key, input) = (scope(), key(&round.key), round.input());
        if self.bug == Some(Bug::EarlyEntry) {
            let entry = self.sagas.entry(&self.saga, &scope, &key, &input).unwrap();
            self.store.insert(entry).await.unwrap();
        } else {
            let key = (&scope, &key);
            self.sagas.start_in(&*self.store, &mut *tx, &self.saga, key, &input).await.unwrap();
        }
        self.kill.point("before the caller's COMMIT").await;
        // Without a reply the transaction may be committed or not.
        let _ = tx.commit().await;
        self.kill.point("after the caller's COMMIT").await;
    }

    /// Returns whether the transaction of an order was committed. It never is after that.
    pub(super) async fn is_ordered(&self, round: &Round) -> bool {
        let client = self.own.get().await.unwrap();
        // This waits for a transaction in progress, since both insert one key.
        let insert = "INSERT INTO orders VALUES ($1, 'nobody') ON CONFLICT DO NOTHING";
        client.execute(insert, &[&round.key]).await.unwrap();
        let made_by = "SELECT made_by FROM orders WHERE saga = $1";
        let made_by: String = client.query_one(made_by, &[&round.key]).await.unwrap().get(0);
        made_by == "the caller"
    }

    /// Waits for the record of a saga whose entry was committed.
    pub(super) async fn find(&self, round: &Round) -> SagaHandle<i64, String> {
        loop {
            match self.sagas.find(&self.saga, &scope(), &key(&round.key)).await {
                Ok(Some(started)) => return started,
                Ok(None) | Err(_) => sleep(Duration::from_millis(20)).await,
            }
        }
    }

    /// Returns the operation id of a saga.
    pub(super) fn id(&self, round: &Round) -> OperationId {
        self.engine.operation_id(&scope().within("saga", round.name), &key(&round.key))
    }

    /// Returns the sagas and entries of the ledger, sorted.
    pub(super) async fn ledger(&self) -> Vec<(String, String)> {
        let select = "SELECT saga, entry FROM ledger ORDER BY saga, entry";
        let rows = self.own.get().await.unwrap().query(select, &[]).await.unwrap();
        rows.iter().map(|row| (row.get(0), row.get(1))).collect()
    }
}
