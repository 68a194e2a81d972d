//! The outbox: messages that are written with a caller's own writes.

use bytes::Bytes;
use hapax_core::Fingerprint;
use hapax_messages::{
    MessageId, Outbox, OutboxError, OutboxFuture, OutboxLag, OutboxMessage, OutboxPage,
    OutboxPosition, OutboxQuery, OutboxWriters, OutgoingMessage,
};
use hapax_postgres::{CONFIRM_READS, SchemaName};
use hapax_postgres_data::{Executor, SqlParameter, SqlRow, SqlValue, StatementError};
use serde_json::Value;

use crate::connections::StatementConnections;
use crate::schema::{in_schema, only_schema};

const PUT: &str = "SELECT message_id FROM hapax_outbox_put_all($1, $2, $3, $4, $5::text[]::jsonb[])
    ORDER BY item";
const POLL: &str = "hapax_outbox_poll($1, $2, $3, $4, $5, $6, $7)";
const REMOVE: &str = "SELECT hapax_outbox_remove($1, $2)::text";
const PARK: &str = "SELECT hapax_outbox_park($1, $2, $3, $4, $5::integer)::text";
const WRITERS: &str = "SELECT last_id, array_to_string(writers, ' ') FROM hapax_outbox_writers()";
const FIRST_ABOVE: &str = "SELECT shard, id FROM hapax_outbox_first_above($1, $2)";
const IDENTITY: &str = "SELECT identity::text FROM hapax_outbox_epoch";
/// Returns no row for tables that do not exist.
const MISSING_PRIVILEGES: &str = "SELECT n.privilege || ' on ' || n.name FROM (VALUES
        ('SELECT', 'hapax_outbox'), ('DELETE', 'hapax_outbox'), ('SELECT', 'hapax_outbox_ids'),
        ('SELECT', 'hapax_outbox_epoch'), ('SELECT', 'hapax_dead_letters'),
        ('INSERT', 'hapax_dead_letters')
    ) AS n (privilege, name) WHERE NOT has_table_privilege(to_regclass(n.name), n.privilege)";
const LAG: &str = "SELECT oldest_ms, messages, blocked_keys FROM hapax_outbox_lag()";

/// A statement that fails, which aborts the transaction.
const ABORT: &str = "SELECT CAST('the messages have no outbox' AS integer)";

/// Writes messages to the outbox in the transaction of `connection`, by one call of
/// `hapax_outbox_put_all` in `schema`. They are published after it commits.
///
/// `schema` is that of the relay, and of [`Connections::schema`](crate::Connections::schema). With `None` each call
/// searches for the tables before it writes, first in the search path, then in the database, and returns an error if
/// it finds several: messages in another outbox are not published.
///
/// Call it shortly before COMMIT: writers of the same order keys wait until then.
///
/// # Errors
/// [`StatementError`]; 22023 for an order key that is empty or over 1024 bytes, 40P01 after a
/// deadlock. The transaction has failed: roll it back.
pub async fn put_messages(
    connection: &mut dyn Executor,
    schema: Option<&SchemaName>,
    messages: &[OutgoingMessage],
) -> Result<(), StatementError> {
    let found = match schema {
        Some(_) => None,
        None => match only_schema(connection).await {
            Ok(found) => found,
            Err(error) => {
                // As each other error here does, so that a caller who commits nevertheless has no effect without its
                // message.
                let _ = connection.run(ABORT, &[]).await;
                return Err(error);
            }
        },
    };
    let schema = schema.or(found.as_ref());
    let destinations: Vec<_> = messages.iter().map(|it| Some(it.destination.as_str())).collect();
    let payloads: Vec<_> = messages.iter().map(|it| Some(&it.payload[..])).collect();
    let keys: Vec<_> = messages.iter().map(|it| it.key.as_deref()).collect();
    let ids: Vec<_> = messages.iter().map(|it| Some(it.id.as_str())).collect();
    let headers: Vec<_> = messages.iter().map(|it| headers(&it.headers)).collect();
    let headers: Vec<_> = headers.iter().map(|it| Some(it.as_str())).collect();
    let parameters = [
        SqlParameter::Texts(&destinations),
        SqlParameter::ByteStrings(&payloads),
        SqlParameter::Texts(&keys),
        SqlParameter::Texts(&ids),
        SqlParameter::Texts(&headers),
    ];
    connection.run(&in_schema(schema, PUT), &parameters).await.map(drop)
}

/// Returns headers as a JSON object, in which a name with several values has an array. In a value
/// that is not UTF-8, U+FFFD replaces the other bytes.
fn headers(headers: &[(String, Bytes)]) -> String {
    let mut object = serde_json::Map::new();
    for (name, value) in headers {
        let value = Value::from(String::from_utf8_lossy(value).into_owned());
        match object.get_mut(name) {
            None => drop(object.insert(name.clone(), value)),
            Some(Value::Array(values)) => values.push(value),
            Some(first) => *first = Value::from(vec![first.take(), value]),
        }
    }
    Value::from(object).to_string()
}

/// Returns the headers of such an object; else the error for operators. `hapax_outbox_put_all` writes
/// no other object.
fn parse_headers(text: &str) -> Result<Vec<(String, Bytes)>, String> {
    let other = |found: &dyn std::fmt::Display| {
        format!(
            "headers: expected an object of texts and arrays of texts, found {found}: redrive the dead \
             letter to publish the text of each value, or drop it"
        )
    };
    let object: serde_json::Map<_, _> = serde_json::from_str(text).map_err(|it| other(&it))?;
    let mut headers = Vec::with_capacity(object.len());
    for (name, value) in object {
        let values = match value {
            Value::Array(values) => values,
            one => vec![one],
        };
        for value in values {
            let Value::String(text) = value else {
                return Err(other(&format_args!("another value of {name:?}")));
            };
            headers.push((name.clone(), Bytes::from(text)));
        }
    }
    Ok(headers)
}

/// The outbox of a database, for a [`Relay`](hapax_messages::Relay).
#[derive(Clone, Debug)]
pub struct PgOutbox {
    connections: StatementConnections,
}

impl PgOutbox {
    /// Creates the outbox of the database of `connections`.
    #[must_use]
    pub fn new(connections: impl Into<StatementConnections>) -> Self {
        Self { connections: connections.into() }
    }

    /// Returns the privileges that a relay needs and the role of the connections lacks, each as
    /// `SELECT on hapax_outbox`.
    ///
    /// # Errors
    /// [`OutboxError`].
    pub async fn missing_privileges(&self) -> Result<Vec<String>, OutboxError> {
        let rows = self.run(MISSING_PRIVILEGES, &[]).await?;
        let privilege = |row: SqlRow| row.into_iter().next().and_then(SqlValue::text);
        rows.into_iter().map(|row| privilege(row).ok_or_else(other_row)).collect()
    }

    /// Returns the identity of the outbox, which its tables got when they were created: a name by which
    /// all its [relays](hapax_messages::Relay::new) share its shards, and no relay of another outbox
    /// does.
    ///
    /// # Errors
    /// [`OutboxError`], also if the search path has tables in two schemas, unless
    /// [`Connections::schema`](crate::Connections::schema) names one.
    pub async fn identity(&self) -> Result<String, OutboxError> {
        self.connections.check_one_set(None).await.map_err(OutboxError::new)?;
        let row = self.run(IDENTITY, &[]).await?.into_iter().next();
        row.and_then(|row| row.into_iter().next()?.text()).ok_or_else(other_row)
    }

    async fn run(
        &self,
        text: &str,
        parameters: &[SqlParameter<'_>],
    ) -> Result<Vec<SqlRow>, OutboxError> {
        // The relay has a timeout for each call.
        self.connections.run(None, text, parameters).await.map_err(OutboxError::new)
    }
}

fn integers(positions: &[OutboxPosition]) -> (Vec<i64>, Vec<i64>) {
    positions
        .iter()
        .map(|position| (i64::from(position.shard), i64::try_from(position.id).unwrap_or(i64::MAX)))
        .unzip()
}

/// Error of a row that the functions of this version do not return.
fn other_row() -> OutboxError {
    OutboxError::new(
        "expected the rows of the outbox's functions, found others: run the SQL of `hapax sql`",
    )
}

fn unsigned(value: &SqlValue) -> Result<u64, OutboxError> {
    value.integer().and_then(|number| u64::try_from(number).ok()).ok_or_else(other_row)
}

fn message(row: SqlRow) -> Result<OutboxMessage, OutboxError> {
    let Ok([_, shard, id, message_id, destination, key, headers, payload, age, _]) =
        <[SqlValue; 10]>::try_from(row)
    else {
        return Err(other_row());
    };
    let position = OutboxPosition {
        shard: u16::try_from(unsigned(&shard)?).map_err(OutboxError::new)?,
        id: unsigned(&id)?,
    };
    let text = |value: SqlValue| value.text().ok_or_else(other_row);
    let message_id = MessageId::new(text(message_id)?).map_err(OutboxError::new)?;
    let payload = payload.bytes().ok_or_else(other_row)?;
    let mut message = OutgoingMessage::new(text(destination)?, message_id, payload);
    message.key = key.text();
    // An error of the page would keep all other messages from being published.
    let unpublishable = match parse_headers(&text(headers)?) {
        Ok(headers) => {
            message.headers = headers;
            None
        }
        Err(error) => Some(error),
    };
    let age = std::time::Duration::from_millis(age.integer().unwrap_or(0).unsigned_abs());
    Ok(OutboxMessage { position, message, age, unpublishable })
}

impl Outbox for PgOutbox {
    fn poll<'a>(&'a self, query: OutboxQuery<'a>) -> OutboxFuture<'a, OutboxPage> {
        Box::pin(async move {
            let (shards, floors) = integers(query.shards);
            let (known_shards, known_ids) = integers(query.known);
            let skipped: Vec<_> = query.skipped.iter().map(|key| Some(key.as_str())).collect();
            let parameters = [
                SqlParameter::Integers(&shards),
                SqlParameter::Integers(&floors),
                SqlParameter::Integers(&known_shards),
                SqlParameter::Integers(&known_ids),
                SqlParameter::Texts(&skipped),
                SqlParameter::Integer(Some(query.max.into())),
                SqlParameter::Integer(Some(i64::try_from(query.bytes).unwrap_or(i64::MAX))),
            ];
            // A message that a failover loses must not be published. Its row may be visible and on no
            // synchronous standby: an operator has ended the wait of the COMMIT that wrote it. So a page with
            // messages writes once to the log, and its own COMMIT waits. The first row has no message.
            let poll = format!(
                "SELECT p.*, CASE WHEN p.epoch IS NULL AND pg_current_xact_id_if_assigned() IS NULL \
                 THEN {CONFIRM_READS} END FROM {POLL} p"
            );
            let mut page = OutboxPage::default();
            for row in self.run(&poll, &parameters).await? {
                match row.first() {
                    Some(SqlValue::Null) => page.messages.push(message(row)?),
                    Some(epoch) => page.epoch = unsigned(epoch)?,
                    None => return Err(other_row()),
                }
            }
            Ok(page)
        })
    }

    fn remove<'a>(&'a self, positions: &'a [OutboxPosition]) -> OutboxFuture<'a, ()> {
        Box::pin(async move {
            let (shards, ids) = integers(positions);
            let parameters = [SqlParameter::Integers(&shards), SqlParameter::Integers(&ids)];
            self.run(REMOVE, &parameters).await.map(drop)
        })
    }

    fn park<'a>(
        &'a self,
        message: &'a OutboxMessage,
        error: &'a str,
        attempts: u32,
    ) -> OutboxFuture<'a, ()> {
        Box::pin(async move {
            let mut digest = Fingerprint::builder("hapax 1 outbox dead letter");
            digest
                .field(&message.position.shard.to_be_bytes())
                .field(&message.position.id.to_be_bytes());
            // A position may be allocated again, after the sequence was reset.
            digest.field(message.message.id.as_str().as_bytes());
            let dead_letter = *digest.finish().as_bytes();
            let parameters = [
                SqlParameter::Bytes(Some(&dead_letter)),
                SqlParameter::Integer(Some(message.position.shard.into())),
                SqlParameter::Integer(Some(i64::try_from(message.position.id).unwrap_or(i64::MAX))),
                SqlParameter::Text(Some(error)),
                SqlParameter::Integer(Some(attempts.into())),
            ];
            self.run(PARK, &parameters).await.map(drop)
        })
    }

    fn writers(&self) -> OutboxFuture<'_, OutboxWriters> {
        Box::pin(async move {
            let row = self.run(WRITERS, &[]).await?.into_iter().next().ok_or_else(other_row)?;
            let Ok([last_id, open]) = <[SqlValue; 2]>::try_from(row) else {
                return Err(other_row());
            };
            let open = open.text().unwrap_or_default();
            let open = open.split_whitespace().map(str::to_owned).collect();
            Ok(OutboxWriters { last_id: unsigned(&last_id)?, open })
        })
    }

    fn first_above<'a>(
        &'a self,
        shards: &'a [OutboxPosition],
    ) -> OutboxFuture<'a, Vec<OutboxPosition>> {
        Box::pin(async move {
            let (shards, floors) = integers(shards);
            let parameters = [SqlParameter::Integers(&shards), SqlParameter::Integers(&floors)];
            let rows = self.run(FIRST_ABOVE, &parameters).await?;
            let position = |row: SqlRow| {
                let [shard, id] = <[SqlValue; 2]>::try_from(row).map_err(|_| other_row())?;
                let shard = u16::try_from(unsigned(&shard)?).map_err(OutboxError::new)?;
                Ok(OutboxPosition { shard, id: unsigned(&id)? })
            };
            rows.into_iter().map(position).collect()
        })
    }

    fn lag(&self) -> OutboxFuture<'_, OutboxLag> {
        Box::pin(async move {
            let row = self.run(LAG, &[]).await?.into_iter().next().ok_or_else(other_row)?;
            let Ok([oldest, rows, keys]) = <[SqlValue; 3]>::try_from(row) else {
                return Err(other_row());
            };
            let oldest = std::time::Duration::from_millis(unsigned(&oldest).unwrap_or(0));
            Ok(OutboxLag::new(oldest, unsigned(&rows)?, unsigned(&keys)?))
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn headers_with_several_values_are_kept() {
        let pair = |name: &str, value: &'static str| (name.to_owned(), Bytes::from(value));
        let all = [pair("a", "1"), pair("b", "2"), pair("a", "3"), pair("a", "4")];
        let text = headers(&all);
        assert_eq!(text, r#"{"a":["1","3","4"],"b":"2"}"#);
        let parsed = parse_headers(&text).unwrap();
        assert_eq!(parsed, [pair("a", "1"), pair("a", "3"), pair("a", "4"), pair("b", "2")]);
    }
}
