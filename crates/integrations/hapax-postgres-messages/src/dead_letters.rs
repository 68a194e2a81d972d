//! Dead letters in a table.

use std::borrow::Cow;
use std::time::Duration;

use hapax_core::Timestamp;
use hapax_core::store::BoxFuture;
use hapax_messages::{
    DeadLetter, DeadLetterError, DeadLetterReason, DeadLetterStore, MessageId, OrderKeyQuery,
    OrderKeyState,
};
use hapax_postgres::CONFIRM_READS;
use hapax_postgres_data::{Executor, SqlParameter, SqlRow, SqlValue, StatementError};

use crate::connections::{ConnectCause, StatementConnections, TIMEOUTS};

const PUT: &str =
    "SELECT hapax_dead_letter_put($1, $2, $3, $4, $5, $6::integer, $7, $8, $9, $10, $11,
    to_timestamp($12 / 1e6), to_timestamp($13 / 1e6))::text";

const REMOVE: &str = "DELETE FROM hapax_dead_letters WHERE id = $1";

/// Fails for a table that does not exist.
const MISSING_PRIVILEGES: &str = "SELECT privilege || ' on hapax_dead_letters'
    FROM unnest(ARRAY['SELECT', 'INSERT', 'UPDATE', 'DELETE']) AS privilege
    WHERE NOT has_table_privilege('hapax_dead_letters', privilege)";

/// Reads the rows of one key, by index: the reason of the message's own dead letter, and whether
/// another one is in front of it. If the message has a dead letter it is acknowledged, so that its row has
/// to be on the synchronous standbys.
const ORDER_KEY: &str = "own.reason, EXISTS (
        SELECT FROM hapax_dead_letters d
        WHERE d.consumer = $1 AND d.order_key = $2 AND (own.id IS NULL OR d.number < own.number)
    )::text
    FROM (VALUES (1)) AS one
    LEFT JOIN hapax_dead_letters own
        ON own.id = $3 AND own.consumer = $1 AND own.order_key = $2";

/// Dead letters in the table `hapax_dead_letters`.
///
/// If the database does not answer within a timeout, the call fails, and the consumer holds the message
/// and parks it again later. The connection is [discarded](crate::Connections::discard_with). No
/// statement is cancelled: the dead letter may still be stored, and then has the same id.
#[derive(Clone, Debug)]
pub struct PgDeadLetterStore {
    connections: StatementConnections,
    timeout: Duration,
}

impl PgDeadLetterStore {
    /// Creates a store of dead letters in the database of `connections`.
    #[must_use]
    pub fn new(connections: impl Into<StatementConnections>) -> Self {
        Self { connections: connections.into(), timeout: Duration::from_secs(10) }
    }

    /// Sets the time for the database to answer each statement, and for a connection. Default 10 s;
    /// 20 ms to 24 h.
    #[must_use]
    pub fn statement_timeout(mut self, timeout: Duration) -> Self {
        self.timeout = timeout.clamp(TIMEOUTS.0, TIMEOUTS.1);
        self
    }

    /// Returns the privileges of a consumer that the role of the connection lacks. Call it at start:
    /// later a message whose dead letter cannot be stored is held.
    ///
    /// # Errors
    /// [`ConnectCause`]: the database is unavailable, or has no table of dead letters, or the search path has
    /// two and [`Connections::schema`](crate::Connections::schema) names none.
    pub async fn missing_privileges(&self) -> Result<Vec<String>, ConnectCause> {
        self.connections.check_one_set(Some(self.timeout)).await?;
        let rows = self.run(MISSING_PRIVILEGES, &[]).await?;
        let privilege = |row: SqlRow| row.into_iter().next().and_then(SqlValue::text);
        Ok(rows.into_iter().filter_map(privilege).collect())
    }

    /// Runs one statement.
    pub(crate) async fn run(
        &self,
        text: &str,
        parameters: &[SqlParameter<'_>],
    ) -> Result<Vec<SqlRow>, ConnectCause> {
        self.connections.run(Some(self.timeout), text, parameters).await
    }
}

/// Stores a dead letter on a connection, which may be within a transaction.
pub(crate) async fn put(
    connection: &mut dyn Executor,
    dead_letter: &DeadLetter,
) -> Result<(), StatementError> {
    let message = &dead_letter.message;
    // A column of type text cannot store a zero byte.
    let (origin, key) = (storable(&message.origin), message.key.as_deref().map(storable));
    let names: Vec<_> = message.headers.iter().map(|(name, _)| storable(name)).collect();
    let mut names: Vec<_> = names.iter().map(|name| Some(&**name)).collect();
    let mut values: Vec<_> = message.headers.iter().map(|(_, value)| Some(&value[..])).collect();
    if let Some(native) = &dead_letter.native {
        // Its name is null, which no header has.
        names.push(None);
        values.push(Some(native));
    }
    let micros = |time: Timestamp| Some(i64::try_from(time.as_micros()).unwrap_or(i64::MAX));
    let parameters = [
        SqlParameter::Bytes(Some(&dead_letter.id)),
        SqlParameter::Text(Some(&dead_letter.consumer)),
        SqlParameter::Text(dead_letter.message_id.as_ref().map(MessageId::as_str)),
        SqlParameter::Text(Some(&origin)),
        SqlParameter::Text(Some(dead_letter.reason.as_str())),
        SqlParameter::Integer(Some(dead_letter.attempts.into())),
        SqlParameter::Text(Some(&storable(&dead_letter.error))),
        SqlParameter::Text(key.as_deref()),
        SqlParameter::Texts(&names),
        SqlParameter::ByteStrings(&values),
        SqlParameter::Bytes(Some(&message.payload)),
        SqlParameter::Integer(micros(dead_letter.first_at)),
        SqlParameter::Integer(micros(dead_letter.last_at)),
    ];
    connection.run(PUT, &parameters).await.map(drop)
}

fn storable(text: &str) -> Cow<'_, str> {
    match text.contains('\0') {
        true => text.replace('\0', "\u{fffd}").into(),
        false => text.into(),
    }
}

impl DeadLetterStore for PgDeadLetterStore {
    fn park<'a>(
        &'a self,
        dead_letter: &'a DeadLetter,
    ) -> BoxFuture<'a, Result<(), DeadLetterError>> {
        Box::pin(async move {
            let connection = self.connections.connect(Some(self.timeout)).await;
            let mut connection = connection.map_err(DeadLetterError::new)?;
            put(&mut connection, dead_letter).await.map_err(DeadLetterError::new)
        })
    }

    fn remove<'a>(&'a self, id: &'a [u8; 32]) -> BoxFuture<'a, Result<(), DeadLetterError>> {
        Box::pin(async move {
            let parameters = [SqlParameter::Bytes(Some(id))];
            self.run(REMOVE, &parameters).await.map(drop).map_err(DeadLetterError::new)
        })
    }

    fn finds_order_keys(&self) -> bool {
        true
    }

    fn order_key<'a>(
        &'a self,
        query: OrderKeyQuery<'a>,
    ) -> BoxFuture<'a, Result<OrderKeyState, DeadLetterError>> {
        Box::pin(async move {
            let parameters = [
                SqlParameter::Text(Some(query.consumer)),
                SqlParameter::Text(Some(&storable(query.key))),
                SqlParameter::Bytes(Some(query.dead_letter)),
            ];
            let text = format!(
                "SELECT CASE WHEN own.id IS NOT NULL THEN {CONFIRM_READS} END, {ORDER_KEY}"
            );
            let rows = self.run(&text, &parameters).await;
            let rows = rows.map_err(DeadLetterError::new)?;
            let row = rows.into_iter().next().and_then(|row| <[SqlValue; 3]>::try_from(row).ok());
            let found = row.map(|row| row.map(SqlValue::text));
            let state = found.and_then(|[_, own, is_blocked]| match (own, is_blocked.as_deref()) {
                (Some(reason), _) if !query.is_redriven => {
                    DeadLetterReason::parse(&reason).map(OrderKeyState::Parked)
                }
                (_, Some("true")) => Some(OrderKeyState::Blocked),
                (_, Some("false")) => Some(OrderKeyState::Free),
                _ => None,
            });
            let other = "expected the reason of a dead letter, and true or false, found other rows: run \
                         the migrations";
            state.ok_or_else(|| DeadLetterError::new(other))
        })
    }
}
