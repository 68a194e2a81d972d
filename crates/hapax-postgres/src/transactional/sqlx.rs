//! The same for sqlx.
//!
//! sqlx's `begin()` must not be dropped half-way: the connection goes back to its pool with a
//! transaction open. Run it where nothing drops it, on a task of its own.

use hapax::store::{BoxFuture, Swap, Swapped, Transactional};
use hapax::{FencingToken, StoreError, Timestamp};
use sqlx::postgres::{PgConnection, PgDatabaseError, PgRow, PgSeverity};
use sqlx::{Connection, Postgres, Row, Transaction};

use super::{NOT_ONE_ROW, SAVEPOINT, nonsense};
use crate::cell::Write;
use crate::error::PostgresError;
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

/// The transaction must have been begun by sqlx, which then knows of it.
impl Transactional<PgConnection> for PostgresStore {
    fn swap_in<'a>(
        &'a self,
        tx: &'a mut PgConnection,
        swap: Swap,
    ) -> BoxFuture<'a, Result<Swapped, StoreError>> {
        Box::pin(async move {
            let write = self.seal_for_transaction(&swap)?;
            if !tx.is_in_transaction() {
                return Err(StoreError::unavailable(PostgresError::NoTransaction));
            }
            let text = &self.shared.setup.statements.update_in;
            match bound(text, &write).fetch_one(tx).await {
                Ok(row) => stamped(&row).map(Swapped::Stored).map_err(|_| nonsense()),
                Err(error) => match refusal(&error) {
                    Some(NOT_ONE_ROW) => self.conflict(&swap).await,
                    Some(SAVEPOINT) => Err(StoreError::unavailable(PostgresError::Savepoint)),
                    // The transaction has failed, or its connection is gone before COMMIT was sent:
                    // nothing of it can be committed.
                    _ => Err(StoreError::unavailable(error)),
                },
            }
        })
    }
}

type Query<'a> = sqlx::query::Query<'a, Postgres, sqlx::postgres::PgArguments>;

/// In the order of [`crate::sql::UPDATE_TYPES`].
fn bound<'a>(text: &'a str, write: &'a Write) -> Query<'a> {
    sqlx::query(text)
        // Unnamed: a pooler in between may not know the name.
        .persistent(false)
        .bind([&write.key.as_bytes()[..]])
        .bind([&write.tag.as_bytes()[..]])
        .bind([write.state])
        .bind([&write.sealed[..]])
        .bind([write.lease])
        .bind(vec![write.keep])
        .bind([write.grace])
        .bind(vec![write.expected.as_ref().map(|tag| &tag.as_bytes()[..])])
        .bind([write.next_fence])
}

fn stamped(row: &PgRow) -> Result<hapax::store::Stamped, Unreadable> {
    let number = |at: usize| {
        let number: i64 = row.try_get(at).map_err(|_| Unreadable)?;
        u64::try_from(number).map_err(|_| Unreadable)
    };
    Ok(hapax::store::Stamped {
        now: Timestamp::from_micros(number(0)?),
        fence: FencingToken::new(number(4)?),
        lease_until: Timestamp::from_micros(number(5)?),
    })
}

struct Unreadable;

/// Why the server refused the statement, if it did and the connection is good.
fn refusal(error: &sqlx::Error) -> Option<&str> {
    let refused = error.as_database_error()?.try_downcast_ref::<PgDatabaseError>()?;
    matches!(refused.severity(), PgSeverity::Error).then(|| refused.code())
}
