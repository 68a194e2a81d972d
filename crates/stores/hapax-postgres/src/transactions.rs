//! Operations that share one transaction with their record, by tokio-postgres.

#[cfg(feature = "sqlx")]
pub(crate) mod sqlx;

use std::error::Error as StdError;
use std::fmt;
use std::future::Future;
use std::ops::Deref;
use std::pin::pin;
use std::sync::Arc;
use std::task::{Context, Waker};
use std::time::Duration;

use hapax_core::store::{BoxFuture, Swap, Swapped};
use hapax_core::transaction::{Source, Transactions, TxError};
use hapax_core::{OperationId, StoreError};
use tokio_postgres::error::{DbError, SqlState};
use tokio_postgres::{Client, Error, IsolationLevel};

use crate::error::{PostgresStoreError, TransactionFailure};
use crate::sql::{MARK, NOT_MARKED, check_mark};
use crate::store::PostgresStore;

/// Transactions on connections of the caller's pool, which commit with their record: for
/// [`Lease::transact`](hapax_core::Lease), and for routes over HTTP.
///
/// ```
/// # fn example(
/// #     store: std::sync::Arc<hapax_postgres::PostgresStore>,
/// #     pool: deadpool_postgres::Pool,
/// # ) -> hapax_postgres::PgTransactions {
/// use hapax_postgres::PgTransactions;
/// // Any pool: the first closure gets a connection, the second returns its client.
/// PgTransactions::new(
///     store,
///     move || {
///         let pool = pool.clone();
///         async move { pool.get().await }
///     },
///     |connection| connection,
/// )
/// # }
/// ```
///
/// Let the pool wait for a connection for at most a few seconds (in deadpool, `wait_timeout`): an
/// operation that timed out on it still waits in the pool's queue.
///
/// For a function, with the feature `function` of `hapax`:
///
/// ```no_run
/// # use std::sync::Arc;
/// # async fn example(
/// #     engine: hapax_core::Idempotency,
/// #     transactions: hapax_postgres::PgTransactions,
/// # ) -> Result<(), Box<dyn std::error::Error>> {
/// use hapax_core::transaction::{OperationError, TransactionBackend};
/// use hapax_core::{Key, Policy, Scope};
///
/// let within = TransactionBackend::new(Arc::new(transactions));
/// let (customer, key) = (Scope::of([("customer", "c-1")]), Key::new("close-17")?);
/// let policy = Policy::default();
/// let closed = engine.transact(&within, (&customer, &key), &17_i64, &policy, |tx, _| async move {
///     let close = "UPDATE accounts SET open = false WHERE id = $1 AND balance = 0";
///     match tx.execute(close, &[&17_i64]).await? {
///         0 => Err(OperationError::Rejected("there is money in it".to_owned())),
///         _ => Ok("closed".to_owned()),
///     }
/// });
/// println!("{}", closed.await?.value);
/// # Ok(()) }
/// ```
pub struct PgTransactions {
    store: Arc<PostgresStore>,
    connect: Box<Connect>,
    begin: BeginOptions,
}

/// Options with which transactions begin.
#[derive(Clone, Copy, Debug)]
struct BeginOptions {
    isolation: Option<IsolationLevel>,
    idle: Duration,
}

impl Default for BeginOptions {
    fn default() -> Self {
        Self { isolation: None, idle: Duration::from_secs(30) }
    }
}

impl BeginOptions {
    /// Returns a BEGIN that sets the isolation and marks the transaction. It reads nothing, and so
    /// takes no snapshot.
    fn begin(&self) -> String {
        let level = match self.isolation {
            None => "",
            Some(IsolationLevel::Serializable) => " ISOLATION LEVEL SERIALIZABLE",
            Some(IsolationLevel::RepeatableRead) => " ISOLATION LEVEL REPEATABLE READ",
            // The server treats READ UNCOMMITTED as READ COMMITTED.
            Some(_) => " ISOLATION LEVEL READ COMMITTED",
        };
        // The server stores it as a positive number of 32 bits; zero means no limit.
        let idle = self.idle.as_millis().clamp(1, i32::MAX as u128);
        format!("BEGIN{level}; SET LOCAL idle_in_transaction_session_timeout = {idle}; {MARK}")
    }
}

type Connect = dyn Fn() -> BoxFuture<'static, Result<Box<dyn Connection>, Source>> + Send + Sync;

/// A connection of any pool.
trait Connection: Send + Sync {
    fn client(&self) -> &Client;
}

struct Pooled<C> {
    connection: C,
    client: fn(&C) -> &Client,
}

impl<C: Send + Sync> Connection for Pooled<C> {
    fn client(&self) -> &Client {
        (self.client)(&self.connection)
    }
}

impl PgTransactions {
    /// Creates transactions on the connections that `get` returns, whose clients `client` returns.
    /// The connections lead to the database of `store`, as a role that may write its tables, and
    /// are in no transaction. `get` must limit its wait for a connection.
    pub fn new<C, E, G, F>(store: Arc<PostgresStore>, get: G, client: fn(&C) -> &Client) -> Self
    where
        C: Send + Sync + 'static,
        E: Into<Source>,
        G: Fn() -> F + Send + Sync + 'static,
        F: Future<Output = Result<C, E>> + Send + 'static,
    {
        let connect = move || {
            let got = get();
            let connected = async move {
                let connection = got.await.map_err(Into::into)?;
                Ok(Box::new(Pooled { connection, client }) as Box<dyn Connection>)
            };
            Box::pin(connected) as BoxFuture<'static, _>
        };
        Self { store, connect: Box::new(connect), begin: BeginOptions::default() }
    }

    /// Sets the isolation of the transactions. By default the one of the connections.
    ///
    /// Under SERIALIZABLE the server guarantees the consistency of reads only in a transaction that
    /// commits. A rejection is rolled back, so it may be based on reads that are possible in no
    /// order of the transactions. If that matters, write nothing and commit the rejection
    /// (`ExecutionHandle::commit` in an HTTP handler, or a value that represents the rejection in a
    /// function).
    #[must_use]
    pub const fn isolation(mut self, level: IsolationLevel) -> Self {
        self.begin.isolation = Some(level);
        self
    }

    /// Sets the time after which the server ends an idle transaction, so that its locks are
    /// released when the network between or a machine fails; by default 30 s. For the same reason
    /// set `keepalives_idle` and `tcp_user_timeout` for the pool's connections: a connection on
    /// which a COMMIT was sent is not given up before it breaks.
    #[must_use]
    pub const fn idle(mut self, idle: Duration) -> Self {
        self.begin.idle = idle;
        self
    }
}

/// A transaction of [`PgTransactions`]: a [`Client`] that is in one. The library commits it or
/// rolls it back. Statements of the operation must not: after a COMMIT or ROLLBACK in the operation
/// the outcome counts as unknown. A savepoint that exists at the end commits with the rest.
///
/// Its COMMIT waits until a crash of the server cannot undo it, whatever `synchronous_commit` and
/// `statement_timeout` are set to for the role, unless the store accepts such a loss
/// ([`PostgresOptions::allow_lost_writes`](crate::PostgresOptions)).
pub struct PgTx {
    connection: Box<dyn Connection>,
    /// Whether a transaction may be open.
    open: bool,
}

impl PgTx {
    const fn ended(&mut self) {
        self.open = false;
    }
}

impl Deref for PgTx {
    type Target = Client;

    fn deref(&self) -> &Client {
        self.connection.client()
    }
}

impl Drop for PgTx {
    fn drop(&mut self) {
        if !self.open {
            return;
        }
        let client = self.connection.client();
        // One poll sends it, before anything that the next user of the connection sends. The answer
        // is not read.
        let rollback = pin!(client.batch_execute("ROLLBACK"));
        let _ = rollback.poll(&mut Context::from_waker(Waker::noop()));
    }
}

impl Transactions for PgTransactions {
    type Tx = PgTx;

    fn connect(&self) -> BoxFuture<'_, Result<PgTx, TxError>> {
        Box::pin(async move {
            let connection = (self.connect)().await.map_err(TxError::Failed)?;
            Ok(PgTx { connection, open: false })
        })
    }

    fn begin<'a>(&'a self, tx: &'a mut PgTx) -> BoxFuture<'a, Result<(), TxError>> {
        Box::pin(async move {
            tx.open = true;
            tx.batch_execute(&self.begin.begin()).await.map_err(TxError::failed)
        })
    }

    fn swap_in<'a>(
        &'a self,
        tx: &'a mut PgTx,
        swap: Swap,
    ) -> BoxFuture<'a, Result<Swapped, TxError>> {
        let client: &'a Client = tx.connection.client();
        Box::pin(async move {
            let text = &self.store.shared.setup.statements.swap_marked;
            self.store.swap_on(client, text, swap).await.map_err(sort)
        })
    }

    fn commit(&self, mut tx: PgTx) -> BoxFuture<'_, Result<(), TxError>> {
        Box::pin(async move {
            // From here on no ROLLBACK is needed: a COMMIT that fails rolls back.
            tx.ended();
            let committed = tx.batch_execute("COMMIT").await;
            let failure = match committed {
                Ok(()) => return Ok(()),
                Err(error) => TransactionFailure::of(error),
            };
            Err(match failure {
                TransactionFailure::Rejected(db)
                    if *db.code() == SqlState::from_code(NOT_KNOWN) =>
                {
                    self.store.shared.setup.distrust_connections();
                    TxError::unknown(PostgresStoreError::Rejected(db))
                }
                TransactionFailure::Rejected(db) if lost_race(db.code().code()) => {
                    TxError::conflict(PostgresStoreError::Rejected(db))
                }
                TransactionFailure::Rejected(db) => {
                    TxError::failed(PostgresStoreError::Rejected(db))
                }
                TransactionFailure::Lost(error) => {
                    // Before a read resolves the outcome.
                    self.store.shared.setup.distrust_connections();
                    TxError::unknown(error)
                }
            })
        })
    }

    fn rollback(&self, mut tx: PgTx) -> BoxFuture<'_, Result<(), TxError>> {
        Box::pin(async move {
            if !tx.open {
                return Ok(());
            }
            let checked = tx.batch_execute(&format!("{}; ROLLBACK", check_mark())).await;
            let Err(error) = checked else {
                tx.ended();
                return Ok(());
            };
            // A failed transaction cannot be checked: it is assumed to be ours.
            let not_marked = error.code().is_some_and(|code| code.code() == NOT_MARKED);
            let rolled_back = tx.batch_execute("ROLLBACK").await;
            if rolled_back.is_ok() {
                tx.ended();
            }
            match not_marked {
                true => Err(TxError::ended_early(PostgresStoreError::EndedEarly)),
                false => rolled_back.map_err(TxError::failed),
            }
        })
    }

    fn is_conflict(&self, error: &(dyn StdError + 'static)) -> bool {
        is_conflict(error)
    }

    fn committed(&self, key: &OperationId) {
        self.store.tell(key);
    }
}

impl fmt::Debug for PgTransactions {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("PgTransactions")
            .field("store", &self.store)
            .field("manner", &self.begin)
            .finish_non_exhaustive()
    }
}

impl fmt::Debug for PgTx {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("PgTx").field("open", &self.open).finish_non_exhaustive()
    }
}

/// `statement_completion_unknown`.
const NOT_KNOWN: &str = "40003";

/// `serialization_failure`, `deadlock_detected`: rolled back in favour of another.
fn lost_race(code: &str) -> bool {
    matches!(code, "40001" | "40P01")
}

/// Converts an error of a swap within the transaction. COMMIT was not sent.
fn sort(error: StoreError) -> TxError {
    let again = is_conflict(&error);
    let early = is_early(&error);
    let (StoreError::Unavailable(source)
    | StoreError::Ambiguous(source)
    | StoreError::Corrupt(source)) = error;
    match (early, again) {
        (true, _) => TxError::EndedEarly(source),
        (_, true) => TxError::Conflict(source),
        _ => TxError::Failed(source),
    }
}

fn is_early(error: &StoreError) -> bool {
    let StoreError::Unavailable(source) = error else { return false };
    matches!(source.downcast_ref(), Some(PostgresStoreError::EndedEarly))
}

/// Returns whether the cause of `error` is a conflict, which a new transaction may avoid.
fn is_conflict(error: &(dyn StdError + 'static)) -> bool {
    let mut next = Some(error);
    while let Some(error) = next {
        let code = if let Some(error) = error.downcast_ref::<Error>() {
            error.code().map(SqlState::code)
        } else if let Some(db) = error.downcast_ref::<DbError>() {
            Some(db.code().code())
        } else if let Some(PostgresStoreError::Rejected(db)) = error.downcast_ref() {
            Some(db.code().code())
        } else if let Some(PostgresStoreError::OldTransaction) = error.downcast_ref() {
            // A new transaction sees the record.
            return true;
        } else {
            by_sqlx(error)
        };
        if code.is_some_and(lost_race) {
            return true;
        }
        next = error.source();
    }
    false
}

#[cfg(feature = "sqlx")]
fn by_sqlx<'a>(error: &'a (dyn StdError + 'static)) -> Option<&'a str> {
    sqlx::code(error)
}

#[cfg(not(feature = "sqlx"))]
const fn by_sqlx<'a>(_: &'a (dyn StdError + 'static)) -> Option<&'a str> {
    None
}
