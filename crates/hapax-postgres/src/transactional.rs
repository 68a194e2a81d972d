//! Records that commit with a caller's own writes.

#[cfg(feature = "sqlx")]
mod sqlx;

use hapax::store::{BoxFuture, Snapshot, Swap, Swapped, Transactional};
use hapax::{Store, StoreError};
use tokio_postgres::Transaction;
use tokio_postgres::error::SqlState;

use crate::cell::{Answer, Said, Write};
use crate::error::{PostgresError, refused};
use crate::sql::UPDATE_TYPES;
use crate::store::PostgresStore;
use crate::writer::Columns;

/// No row was written.
const NOT_ONE_ROW: &str = "22012";
/// The writer is a subtransaction.
const SAVEPOINT: &str = "2201E";

impl Transactional<Transaction<'_>> for PostgresStore {
    fn swap_in<'a>(
        &'a self,
        tx: &'a mut Transaction<'_>,
        swap: Swap,
    ) -> BoxFuture<'a, Result<Swapped, StoreError>> {
        let write = self.seal_for_transaction(&swap);
        // Borrowed as shared: that is what a statement needs, and it names no lifetime of `tx`.
        let tx: &'a Transaction<'_> = tx;
        Box::pin(async move {
            let write = write?;
            let columns = Columns::of(&[&write]);
            let parameters: Vec<_> =
                columns.update_parameters().into_iter().zip(UPDATE_TYPES).collect();
            let text = &self.shared.setup.statements.update_in;
            match tx.query_typed(text, &parameters).await {
                Ok(rows) => rows
                    .first()
                    .and_then(|row| Said::read(row).ok())
                    .map_or_else(|| Err(nonsense()), |said| stored(said, &write)),
                Err(error) => match error.as_db_error() {
                    Some(db) if *db.code() == SqlState::from_code(NOT_ONE_ROW) => {
                        self.conflict(&swap).await
                    }
                    Some(db) if *db.code() == SqlState::from_code(SAVEPOINT) => {
                        Err(StoreError::unavailable(PostgresError::Savepoint))
                    }
                    // The transaction has failed: nothing of it can be committed.
                    Some(db) => Err(refused(Box::new(db.clone()))),
                    // Nor is it without its connection, for COMMIT was not sent.
                    None => Err(StoreError::unavailable(PostgresError::Broken(error.into()))),
                },
            }
        })
    }
}

impl PostgresStore {
    fn seal_for_transaction(&self, swap: &Swap) -> Result<Write, StoreError> {
        // The key of a claim that is not committed would keep every other claim of it waiting, for
        // as long as the caller's transaction lasts.
        if swap.expected.is_none() {
            return Err(StoreError::unavailable(PostgresError::ClaimInTransaction));
        }
        self.seal(swap)
    }

    /// What is there instead, by another connection: the transaction has failed.
    async fn conflict(&self, swap: &Swap) -> Result<Swapped, StoreError> {
        let Snapshot { now, cell } = self.load(&swap.key).await?;
        Ok(Swapped::Conflict(Snapshot { now, cell }))
    }
}

fn stored(said: Said, write: &Write) -> Result<Swapped, StoreError> {
    match said.answer(write) {
        Some(Ok(Answer::Stored(stamped))) => Ok(Swapped::Stored(stamped)),
        _ => Err(nonsense()),
    }
}

/// Nothing can be said; the caller's transaction must not be committed.
fn nonsense() -> StoreError {
    StoreError::unavailable(PostgresError::Nonsense)
}
