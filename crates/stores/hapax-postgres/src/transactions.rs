//! Work that is in one transaction with its record, by tokio-postgres.

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

/// Transactions on connections of a pool of the caller's, which commit with their record: for
/// [`Lease::transact`](hapax_core::Lease), and for routes over HTTP.
///
/// ```
/// # fn example(
/// #     store: std::sync::Arc<hapax_postgres::PostgresStore>,
/// #     pool: deadpool_postgres::Pool,
/// # ) -> hapax_postgres::PgTransactions {
/// use hapax_postgres::PgTransactions;
/// // Any pool will do: how to get a connection, and the client in it.
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
/// Have the pool wait for a connection no longer than a few seconds (in deadpool,
/// `wait_timeout`): work that has given up on one still waits in its line.
///
/// As a function, with the feature `function` of `hapax`:
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

/// How transactions begin.
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
    /// Isolates and marks. Reads nothing, and so takes no snapshot.
    fn begin(&self) -> String {
        let level = match self.isolation {
            None => "",
            Some(IsolationLevel::Serializable) => " ISOLATION LEVEL SERIALIZABLE",
            Some(IsolationLevel::RepeatableRead) => " ISOLATION LEVEL REPEATABLE READ",
            // The server has no other: what is read uncommitted is not.
            Some(_) => " ISOLATION LEVEL READ COMMITTED",
        };
        // The server keeps it as a positive number of 32 bits, and zero is for ever.
        let idle = self.idle.as_millis().clamp(1, i32::MAX as u128);
        format!("BEGIN{level}; SET LOCAL idle_in_transaction_session_timeout = {idle}; {MARK}")
    }
}

type Connect = dyn Fn() -> BoxFuture<'static, Result<Box<dyn Connection>, Source>> + Send + Sync;

/// A connection of some pool.
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
    /// Transactions on connections that `get` gives, and that `client` finds in them. They lead to
    /// the database of `store`, as a role that may write its tables, and are in no transaction;
    /// `get` bounds how long it waits for one.
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

    /// The isolation of the transactions; by default as the connections have it.
    ///
    /// Under SERIALIZABLE the server vouches for what was read only in a transaction that commits.
    /// A refusal is rolled back, and so may rest on what no order of the transactions gives: where
    /// that matters, commit it (`Execution::commit`, or a value that says no), having written nothing.
    #[must_use]
    pub const fn isolation(mut self, level: IsolationLevel) -> Self {
        self.begin.isolation = Some(level);
        self
    }

    /// After which the server ends a transaction that nothing is heard of, so that what it has
    /// locked is free again when the network between is gone, or a machine; by default 30 s. For
    /// the same reason give the pool's connections `keepalives_idle` and `tcp_user_timeout`: one on
    /// which a COMMIT was sent is not given up before it breaks.
    #[must_use]
    pub const fn idle(mut self, idle: Duration) -> Self {
        self.begin.idle = idle;
        self
    }
}

/// A transaction of [`PgTransactions`]: a [`Client`] that is in one. It is committed or rolled back
/// by whoever gave it, never by a statement: after a COMMIT or ROLLBACK in the work the outcome counts
/// as unknown. A savepoint that is there at the end commits with the rest.
///
/// Its COMMIT waits until a crash of the server can not undo it, whatever `synchronous_commit` and
/// `statement_timeout` are set to for the role, unless the store is one that may forget
/// ([`Options::allow_forgetting`](crate::PostgresOptions)).
pub struct PgTx {
    connection: Box<dyn Connection>,
    /// A transaction may be open.
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
        // Polled once it is sent, before anything that the next owner of the connection sends.
        // Nobody reads the answer.
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
            // From here on there is nothing to roll back but what the server has rolled back.
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
                    // Before anybody settles it by reading.
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
            // A transaction that has failed can not be asked: it is ours, as far as we know.
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

/// What a refusal within a transaction means for it. COMMIT was not sent.
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

/// Looks for one of the server's errors in what caused `error`.
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
            // A new one sees the record.
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
