//! Dead letters in a table.

use std::borrow::Cow;
use std::collections::HashSet;

use hapax_core::Timestamp;
use hapax_core::store::BoxFuture;
use hapax_messages::{DeadLetter, DeadLetterError, DeadLetters, MessageId};
use hapax_postgres_data::{Executor, SqlParameter, SqlRow, SqlValue, StatementError};

use crate::connections::StatementConnections;

const PUT: &str =
    "SELECT hapax_dead_letter_put($1, $2, $3, $4, $5, $6::integer, $7, $8, $9, $10, $11,
    to_timestamp($12 / 1e6), to_timestamp($13 / 1e6))::text";

pub(crate) const REMOVE: &str = "DELETE FROM hapax_dead_letters WHERE id = $1";

const BLOCKED: &str = "SELECT DISTINCT order_key FROM hapax_dead_letters
    WHERE consumer = $1 AND order_key IS NOT NULL";

/// Dead letters in the table `hapax_dead_letters`.
#[derive(Clone, Debug)]
pub struct PgDeadLetters {
    pub(crate) connections: StatementConnections,
}

impl PgDeadLetters {
    /// Creates a store of dead letters in the database of `connections`.
    #[must_use]
    pub fn new(connections: impl Into<StatementConnections>) -> Self {
        Self { connections: connections.into() }
    }
}

/// Stores a letter on a connection, which may be within a transaction.
pub(crate) async fn put(
    connection: &mut dyn Executor,
    letter: &DeadLetter,
) -> Result<(), StatementError> {
    let message = &letter.message;
    // Columns of texts store no zero byte.
    let (origin, key) = (storable(&message.origin), message.key.as_deref().map(storable));
    let names: Vec<_> = message.headers.iter().map(|(name, _)| storable(name)).collect();
    let names: Vec<_> = names.iter().map(|name| Some(&**name)).collect();
    let values: Vec<_> = message.headers.iter().map(|(_, value)| Some(&value[..])).collect();
    let micros = |time: Timestamp| Some(i64::try_from(time.as_micros()).unwrap_or(i64::MAX));
    let parameters = [
        SqlParameter::Bytes(Some(&letter.id)),
        SqlParameter::Text(Some(&letter.consumer)),
        SqlParameter::Text(letter.message_id.as_ref().map(MessageId::as_str)),
        SqlParameter::Text(Some(&origin)),
        SqlParameter::Text(Some(letter.reason.as_str())),
        SqlParameter::Integer(Some(letter.attempts.into())),
        SqlParameter::Text(Some(&storable(&letter.error))),
        SqlParameter::Text(key.as_deref()),
        SqlParameter::Texts(&names),
        SqlParameter::ByteStrings(&values),
        SqlParameter::Bytes(Some(&message.payload)),
        SqlParameter::Integer(micros(letter.first_at)),
        SqlParameter::Integer(micros(letter.last_at)),
    ];
    connection.run(PUT, &parameters).await.map(drop)
}

fn storable(text: &str) -> Cow<'_, str> {
    match text.contains('\0') {
        true => text.replace('\0', "\u{fffd}").into(),
        false => text.into(),
    }
}

impl DeadLetters for PgDeadLetters {
    fn park<'a>(&'a self, letter: &'a DeadLetter) -> BoxFuture<'a, Result<(), DeadLetterError>> {
        Box::pin(async move {
            let mut connection = self.connections.connect().await.map_err(DeadLetterError::new)?;
            put(&mut connection, letter).await.map_err(DeadLetterError::new)
        })
    }

    fn remove<'a>(&'a self, id: &'a [u8; 32]) -> BoxFuture<'a, Result<(), DeadLetterError>> {
        Box::pin(async move {
            let parameters = [SqlParameter::Bytes(Some(id))];
            self.connections.run(REMOVE, &parameters).await.map(drop).map_err(DeadLetterError::new)
        })
    }

    fn lists_order_keys(&self) -> bool {
        true
    }

    fn blocked_keys<'a>(
        &'a self,
        consumer: &'a str,
    ) -> BoxFuture<'a, Result<HashSet<String>, DeadLetterError>> {
        Box::pin(async move {
            let parameters = [SqlParameter::Text(Some(consumer))];
            let rows = self.connections.run(BLOCKED, &parameters).await;
            let rows = rows.map_err(DeadLetterError::new)?;
            let key = |row: SqlRow| row.into_iter().next().and_then(SqlValue::text);
            Ok(rows.into_iter().filter_map(key).collect())
        })
    }
}
