//! Records that commit with a caller's own writes, by sqlx.
//!
//! sqlx's `begin()` must not be dropped before its end: the connection would return to its pool
//! with a transaction open. Call it in a separate task, where nothing drops it.

use hapax_core::StoreError;
use hapax_core::store::{BoxFuture, Swap, Swapped, Transactional};
use sqlx::postgres::{PgConnection, PgDatabaseError, PgSeverity};
use sqlx::{Connection, Postgres, Row, Transaction};

use super::{CONFLICT, ENDED_EARLY, SAVEPOINT, SPOIL, stored};
use crate::error::PostgresStoreError;
use crate::record::Write;
use crate::store::PostgresStore;

impl Transactional<Transaction<'_, Postgres>> for PostgresStore {
    fn swap_in<'a>(
        &'a self,
        tx: &'a mut Transaction<'_, Postgres>,
        swap: Swap,
    ) -> BoxFuture<'a, Result<Swapped, StoreError>> {
        let connection: &'a mut PgConnection = tx;
        Transactional::<PgConnection>::swap_in(self, connection, swap)
    }
}

/// The transaction must have been begun by sqlx, which then tracks it.
impl Transactional<PgConnection> for PostgresStore {
    fn swap_in<'a>(
        &'a self,
        tx: &'a mut PgConnection,
        swap: Swap,
    ) -> BoxFuture<'a, Result<Swapped, StoreError>> {
        Box::pin(swap_by(self, tx, &self.shared.setup.statements.swap_in, swap))
    }
}

/// Swaps in the current transaction of the connection, by the statement `text`.
pub(crate) async fn swap_by(
    store: &PostgresStore,
    tx: &mut PgConnection,
    text: &str,
    swap: Swap,
) -> Result<Swapped, StoreError> {
    if !tx.is_in_transaction() {
        return Err(StoreError::unavailable(PostgresStoreError::NoTransaction));
    }
    let write = match store.seal_for_transaction(&swap) {
        Ok(write) => write,
        Err(error) => {
            sqlx::query(SPOIL).persistent(false).fetch_optional(&mut *tx).await.ok();
            return Err(error);
        }
    };
    match bound(text, &write).fetch_one(&mut *tx).await {
        Ok(row) => {
            let answer = stored([0, 1, 2].map(|at| row.try_get(at).ok()));
            if answer.is_err() {
                sqlx::query(SPOIL).persistent(false).fetch_optional(&mut *tx).await.ok();
            }
            answer
        }
        Err(error) => match refusal(&error) {
            Some(CONFLICT) => store.conflict(&swap).await,
            Some(SAVEPOINT) => Err(StoreError::unavailable(PostgresStoreError::Savepoint)),
            Some(ENDED_EARLY) => Err(StoreError::unavailable(PostgresStoreError::EndedEarly)),
            // The transaction has failed, or the connection was lost before COMMIT was sent: no
            // part of it can be committed.
            _ => Err(StoreError::unavailable(error)),
        },
    }
}

type Query<'a> = sqlx::query::Query<'a, Postgres, sqlx::postgres::PgArguments>;

/// Binds the parameters, in the order of [`crate::sql::SWAP_IN_TYPES`].
fn bound<'a>(text: &'a str, write: &'a Write) -> Query<'a> {
    sqlx::query(text)
        // Unnamed: a pooler in between may not know the name.
        .persistent(false)
        .bind([&write.key.as_bytes()[..]])
        .bind([&write.write_id.as_bytes()[..]])
        .bind([write.state])
        .bind([&write.sealed[..]])
        .bind([write.lease])
        .bind(vec![write.keep])
        .bind([write.grace])
        .bind([write.hint])
        .bind(vec![write.expected.as_ref().map(|write_id| &write_id.as_bytes()[..])])
        .bind([write.next_fence])
}

/// Returns the code with which the server rejected the statement, if it did and the connection is
/// intact.
pub(crate) fn refusal(error: &sqlx::Error) -> Option<&str> {
    let refused = error.as_database_error()?.try_downcast_ref::<PgDatabaseError>()?;
    matches!(refused.severity(), PgSeverity::Error).then(|| refused.code())
}
