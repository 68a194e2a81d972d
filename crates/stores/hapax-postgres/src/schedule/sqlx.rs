//! Entries that commit with a caller's own writes, by sqlx.

use hapax_core::StoreError;
use hapax_core::schedule::{NewEntry, TransactionalSchedule};
use hapax_core::store::BoxFuture;
use sqlx::postgres::PgConnection;
use sqlx::{Connection, Postgres, Transaction};

use super::transactional::Insertion;
use crate::error::PostgresStoreError;
use crate::store::PostgresStore;
use crate::transactional::SPOIL;
use crate::transactional::sqlx::refusal;

impl TransactionalSchedule<Transaction<'_, Postgres>> for PostgresStore {
    fn insert_in<'a>(
        &'a self,
        tx: &'a mut Transaction<'_, Postgres>,
        entry: NewEntry,
    ) -> BoxFuture<'a, Result<(), StoreError>> {
        let connection: &'a mut PgConnection = tx;
        Box::pin(self.insert_by(connection, entry))
    }
}

/// The transaction must have been begun by sqlx, which then tracks it.
impl TransactionalSchedule<PgConnection> for PostgresStore {
    fn insert_in<'a>(
        &'a self,
        tx: &'a mut PgConnection,
        entry: NewEntry,
    ) -> BoxFuture<'a, Result<(), StoreError>> {
        Box::pin(self.insert_by(tx, entry))
    }
}

impl PostgresStore {
    async fn insert_by(&self, tx: &mut PgConnection, entry: NewEntry) -> Result<(), StoreError> {
        if !tx.is_in_transaction() {
            return Err(StoreError::unavailable(PostgresStoreError::NoTransaction));
        }
        let insertion = match self.insertion(&entry) {
            Ok(insertion) => insertion,
            Err(error) => {
                sqlx::query(SPOIL).persistent(false).fetch_optional(&mut *tx).await.ok();
                return Err(error);
            }
        };
        let Insertion { operation, id, queue, note, delay, known } = insertion;
        let query = sqlx::query(&self.shared.setup.statements.schedule_in)
            // Unnamed: a pooler in between may not know the name.
            .persistent(false)
            .bind(operation)
            .bind(id)
            .bind(queue)
            .bind(note)
            .bind(delay)
            .bind(known);
        let Err(error) = query.fetch_one(&mut *tx).await else { return Ok(()) };
        // The transaction has failed, or the connection was lost before COMMIT was sent: no part of
        // it can be committed.
        let rejected = match refusal(&error) {
            Some(code) => self.rejected(code).await,
            None => None,
        };
        Err(rejected.unwrap_or_else(|| StoreError::unavailable(error)))
    }
}
