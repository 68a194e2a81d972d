//! Records that commit with a caller's own writes.

#[cfg(feature = "sqlx")]
pub(crate) mod sqlx;

use hapax_core::store::{BoxFuture, Stamped, Swap, Swapped, Transactional};
use hapax_core::{FencingToken, Store, StoreError, Timestamp};
use tokio_postgres::error::SqlState;
use tokio_postgres::{Client, Transaction};

use crate::error::{PostgresStoreError, refused};
use crate::record::Write;
use crate::sql::SWAP_IN_TYPES;
use crate::store::PostgresStore;
use crate::swaps::Columns;

/// Errors that `hapax_swap_in_1` raises: the record is not as expected; there is a savepoint; the
/// transaction is not the one that was begun.
const CONFLICT: &str = "HX001";
pub(crate) const SAVEPOINT: &str = "HX002";
const ENDED_EARLY: &str = "HX003";

impl Transactional<Transaction<'_>> for PostgresStore {
    fn swap_in<'a>(
        &'a self,
        tx: &'a mut Transaction<'_>,
        swap: Swap,
    ) -> BoxFuture<'a, Result<Swapped, StoreError>> {
        // A shared borrow suffices for a statement, and has no lifetime of `tx`.
        let client: &'a Client = tx.client();
        Box::pin(self.swap_on(client, &self.shared.setup.statements.swap_in, swap))
    }
}

/// Fails, and with it the transaction. If even this is not received, COMMIT will not be either.
pub(crate) const SPOIL: &str = "DO $$ BEGIN RAISE EXCEPTION 'the record was not written'; END $$";

impl PostgresStore {
    /// Swaps in the current transaction of `client`, by the statement `text`.
    pub(crate) async fn swap_on(
        &self,
        client: &Client,
        text: &str,
        swap: Swap,
    ) -> Result<Swapped, StoreError> {
        let write = match self.seal_for_transaction(&swap) {
            Ok(write) => write,
            Err(error) => {
                client.batch_execute(SPOIL).await.ok();
                return Err(error);
            }
        };
        let columns = Columns::of(&[&write]);
        let parameters: Vec<_> =
            columns.parameters().into_iter().zip(SWAP_IN_TYPES.iter().cloned()).collect();
        match client.query_typed(text, &parameters).await {
            Ok(rows) => {
                let number = |at| rows.first().and_then(|row| row.try_get::<_, i64>(at).ok());
                let answer = stored([number(0), number(1), number(2)]);
                if answer.is_err() {
                    client.batch_execute(SPOIL).await.ok();
                }
                answer
            }
            Err(error) => match error.as_db_error() {
                Some(db) if *db.code() == SqlState::from_code(CONFLICT) => {
                    self.conflict(&swap).await
                }
                Some(db) if *db.code() == SqlState::from_code(SAVEPOINT) => {
                    Err(StoreError::unavailable(PostgresStoreError::Savepoint))
                }
                Some(db) if *db.code() == SqlState::from_code(ENDED_EARLY) => {
                    Err(StoreError::unavailable(PostgresStoreError::EndedEarly))
                }
                // The transaction has failed: no part of it can be committed.
                Some(db) => Err(refused(Box::new(db.clone()))),
                // The connection is lost before COMMIT was sent: no part of it is committed.
                None => Err(StoreError::unavailable(PostgresStoreError::Broken(error.into()))),
            },
        }
    }

    fn seal_for_transaction(&self, swap: &Swap) -> Result<Write, StoreError> {
        // An uncommitted claim would block every other claim of its key for as long as the caller's
        // transaction lasts.
        if swap.expected.is_none() {
            return Err(StoreError::unavailable(PostgresStoreError::ClaimInTransaction));
        }
        self.seal(swap)
    }

    /// Returns the present record, loaded on another connection because the transaction has failed.
    async fn conflict(&self, swap: &Swap) -> Result<Swapped, StoreError> {
        let seen = self.load(&swap.id).await?;
        if seen.stored.as_ref().map(|stored| stored.write_id) == swap.expected {
            return Err(StoreError::unavailable(PostgresStoreError::OldTransaction));
        }
        Ok(Swapped::Conflict(seen))
    }
}

/// Parses the result of the function: now, fence, end of the lease.
fn stored(numbers: [Option<i64>; 3]) -> Result<Swapped, StoreError> {
    let number = |at: usize| numbers[at].and_then(|number| u64::try_from(number).ok());
    match [number(0), number(1), number(2)] {
        [Some(now), Some(fence), Some(lease_until)] => Ok(Swapped::Stored(Stamped {
            now: Timestamp::from_micros(now),
            fence: FencingToken::new(fence),
            lease_until: Timestamp::from_micros(lease_until),
        })),
        _ => Err(nonsense()),
    }
}

/// The result is unreadable, so the caller's transaction must not be committed.
fn nonsense() -> StoreError {
    StoreError::unavailable(PostgresStoreError::UnexpectedAnswer)
}
