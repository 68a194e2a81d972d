//! Operations that share one transaction with their record, by sqlx.

use std::error::Error as StdError;

use hapax_core::OperationId;
use hapax_core::store::{BoxFuture, Swap, Swapped};
use hapax_core::transaction::{Transactions, TxError};
use sqlx::error::DatabaseError;
use sqlx::postgres::{PgConnection, PgDatabaseError, PgPool, PgSeverity, Postgres};
use sqlx::{Executor, Transaction};
use tokio_postgres::IsolationLevel;

use super::{Arc, BeginOptions, Duration, is_conflict, lost_race, sort};
use crate::error::PostgresStoreError;
use crate::sql::{NOT_MARKED, check_mark};
use crate::store::PostgresStore;
use crate::transactional::sqlx::swap_by;

/// Transactions on connections of sqlx's pool: see [`PgTransactions`](crate::PgTransactions). The
/// operation receives a `sqlx::Transaction<'static, Postgres>`.
///
/// The pool leads to the database of the store, as a role that may write its tables.
#[derive(Debug)]
pub struct SqlxTransactions {
    store: Arc<PostgresStore>,
    pool: PgPool,
    begin: BeginOptions,
}

impl SqlxTransactions {
    /// Creates transactions on connections of `pool`.
    #[must_use]
    pub fn new(store: Arc<PostgresStore>, pool: PgPool) -> Self {
        Self { store, pool, begin: BeginOptions::default() }
    }

    /// Sets the isolation of the transactions. By default the one of the connections.
    #[must_use]
    pub const fn isolation(mut self, level: IsolationLevel) -> Self {
        self.begin.isolation = Some(level);
        self
    }

    /// Sets the timeout of an idle transaction, like
    /// [`PgTransactions::idle`](crate::PgTransactions::idle).
    #[must_use]
    pub const fn idle(mut self, idle: Duration) -> Self {
        self.begin.idle = idle;
        self
    }
}

impl Transactions for SqlxTransactions {
    type Tx = Transaction<'static, Postgres>;

    fn connect(&self) -> BoxFuture<'_, Result<Self::Tx, TxError>> {
        Box::pin(async move {
            // The BEGIN is included. It takes no snapshot: the first statement does.
            self.pool.begin_with(self.begin.begin()).await.map_err(TxError::failed)
        })
    }

    fn begin<'a>(&'a self, _: &'a mut Self::Tx) -> BoxFuture<'a, Result<(), TxError>> {
        Box::pin(std::future::ready(Ok(())))
    }

    fn swap_in<'a>(
        &'a self,
        tx: &'a mut Self::Tx,
        swap: Swap,
    ) -> BoxFuture<'a, Result<Swapped, TxError>> {
        Box::pin(async move {
            let text = &self.store.shared.setup.statements.swap_marked;
            let connection: &mut PgConnection = tx;
            swap_by(&self.store, connection, text, swap).await.map_err(sort)
        })
    }

    fn commit(&self, tx: Self::Tx) -> BoxFuture<'_, Result<(), TxError>> {
        Box::pin(async move {
            tx.commit().await.map_err(|error| match refused(&error) {
                Some(code) if lost_race(code) => TxError::conflict(error),
                Some(_) => TxError::failed(error),
                None => {
                    // Before a read resolves the outcome.
                    self.store.shared.setup.distrust_connections();
                    TxError::unknown(error)
                }
            })
        })
    }

    fn rollback(&self, mut tx: Self::Tx) -> BoxFuture<'_, Result<(), TxError>> {
        Box::pin(async move {
            // A failed transaction cannot be checked: it is assumed to be ours.
            let checked = tx.execute(&*check_mark()).await;
            let rolled_back = tx.rollback().await;
            match checked {
                Err(error) if refused(&error) == Some(NOT_MARKED) => {
                    Err(TxError::ended_early(PostgresStoreError::EndedEarly))
                }
                _ => rolled_back.map_err(TxError::failed),
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

/// Returns the code with which the server rolled a COMMIT back, if it did: see
/// `TransactionFailure::of`.
fn refused(error: &sqlx::Error) -> Option<&str> {
    let db = error.as_database_error()?.try_downcast_ref::<PgDatabaseError>()?;
    let code = db.code();
    let known = matches!(db.severity(), PgSeverity::Error)
        && !code.starts_with("08")
        && !code.starts_with("57P")
        && code != super::NOT_KNOWN;
    known.then_some(code)
}

/// Returns the code of an error of sqlx, or of the database error that a transparent one exposes.
pub(super) fn code<'a>(error: &'a (dyn StdError + 'static)) -> Option<&'a str> {
    let db: &dyn DatabaseError = match error.downcast_ref::<sqlx::Error>() {
        Some(error) => error.as_database_error()?,
        None => &**error.downcast_ref::<Box<dyn DatabaseError>>()?,
    };
    Some(db.try_downcast_ref::<PgDatabaseError>()?.code())
}
