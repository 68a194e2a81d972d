//! Operators' access to dead letters: list, redrive and drop. Each decision is stored with
//! its author and reason.

use bytes::Bytes;
use hapax_messages::{DeadLetterReason, MessageId};
use hapax_postgres_data::{SqlParameter, SqlRow, SqlValue};

use crate::connections::ConnectCause;
use crate::dead_letters::PgDeadLetterStore;

/// Consumer name of the dead letters of an outbox.
pub const OUTBOX_CONSUMER: &str = "hapax-outbox";

/// Columns of a [`DeadLetterSummary`].
const COLUMNS: &str =
    "id, consumer, message_id, origin, reason, attempts::bigint, error, order_key,
    to_char(first_at AT TIME ZONE 'UTC', 'YYYY-MM-DD\"T\"HH24:MI:SS.MS\"Z\"'),
    to_char(last_at AT TIME ZONE 'UTC', 'YYYY-MM-DD\"T\"HH24:MI:SS.MS\"Z\"'),
    redrives::bigint, octet_length(payload)::bigint,
    to_char(parked_at AT TIME ZONE 'UTC', 'YYYY-MM-DD\"T\"HH24:MI:SS.MS\"Z\"'), number";

const LIST: &str = "FROM hapax_dead_letters
    WHERE ($1::text IS NULL OR consumer = $1) AND ($2::text IS NULL OR reason = $2)
        AND ($3::bigint IS NULL OR number > $3)
    ORDER BY number LIMIT $4";
const LAST: &str = "SELECT coalesce(max(number), 0) FROM hapax_dead_letters";

const REDRIVE: &str = "SELECT hapax_dead_letter_redrive($1, $2, $3)";
const SET_MESSAGE_ID: &str =
    "UPDATE hapax_dead_letters SET message_id = $2 WHERE id = $1 AND message_id IS NULL";
const NOT_IN_INBOX: &str = "SELECT d.id FROM hapax_dead_letters d
    WHERE d.id = ANY($1) AND d.message_id IS NOT NULL AND d.reason <> 'mismatch'
        AND d.consumer <> 'hapax-outbox'
        AND (d.redrives = 0 OR NOT EXISTS (
            SELECT FROM hapax_dead_letter_decisions c
            WHERE c.dead_letter_id = d.id AND c.at >= d.parked_at))
        AND NOT EXISTS (
            SELECT FROM hapax_inbox i
            WHERE i.id = hapax_scoped_hash(d.consumer, d.message_id))
        AND NOT EXISTS (SELECT FROM hapax_positions p WHERE p.consumer = d.consumer)
    ORDER BY d.number LIMIT 1";
const DROP: &str = "SELECT hapax_dead_letter_drop($1, $2, $3)::text";
const REDRIVE_TO_OUTBOX: &str = "SELECT hapax_outbox_redrive($1)::text";

/// Selection of the dead letters to list.
#[derive(Clone, Debug, Default)]
pub struct DeadLetterQuery {
    /// Only those of this consumer.
    pub consumer: Option<String>,
    /// Only those with this reason.
    pub reason: Option<DeadLetterReason>,
    /// Only those after this one: the last of an earlier list, even if it was removed since.
    pub after: Option<DeadLetterPosition>,
    /// Largest number.
    pub limit: u32,
}

/// Position of a dead letter in the order in which all of them were first stored.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub struct DeadLetterPosition(i64);

/// A dead letter without its headers and payload. Times are RFC 3339 texts.
#[derive(Clone, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub struct DeadLetterSummary {
    /// Id.
    pub id: [u8; 32],
    /// Consumer that parked the message.
    pub consumer: String,
    /// Id of the message, if it has one.
    pub message_id: Option<String>,
    /// Origin of the message; of an outbox, its destination.
    pub origin: String,
    /// Reason, as [`DeadLetterReason::as_str`] returns it.
    pub reason: String,
    /// Number of executions that began.
    pub attempts: u64,
    /// Last error.
    pub error: String,
    /// Order key, which is blocked.
    pub order_key: Option<String>,
    /// Time of the first delivery that is known.
    pub first_at: String,
    /// Time of the last delivery.
    pub last_at: String,
    /// Number of redrives so far.
    pub redrives: u64,
    /// Size of the payload in bytes.
    pub payload_bytes: u64,
    /// Time at which it was last parked, by the clock of the database.
    pub parked_at: String,
    position: DeadLetterPosition,
}

impl DeadLetterSummary {
    /// Returns the position after which a further list begins.
    #[must_use]
    pub const fn position(&self) -> DeadLetterPosition {
        self.position
    }
}

/// Headers and payload of a dead letter.
#[derive(Clone, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub struct DeadLetterContents {
    /// Headers, in their order.
    pub headers: Vec<(String, Bytes)>,
    /// Payload.
    pub payload: Bytes,
    /// [Native form](field@hapax_messages::DeadLetter::native) of the message.
    pub native: Option<Bytes>,
}

fn other_rows() -> ConnectCause {
    "expected the rows of hapax_dead_letters, found others: run the SQL of `hapax sql`".into()
}

fn unsigned(value: &SqlValue) -> Result<u64, ConnectCause> {
    value.integer().and_then(|number| u64::try_from(number).ok()).ok_or_else(other_rows)
}

fn summary(row: SqlRow) -> Result<DeadLetterSummary, ConnectCause> {
    let [
        id,
        consumer,
        message_id,
        origin,
        reason,
        attempts,
        error,
        order_key,
        first_at,
        last_at,
        redrives,
        bytes,
        parked_at,
        number,
    ] = <[SqlValue; 14]>::try_from(row).map_err(|_| other_rows())?;
    let text = |value: SqlValue| value.text().ok_or_else(other_rows);
    let id = id.bytes().and_then(|id| id.try_into().ok()).ok_or_else(other_rows)?;
    Ok(DeadLetterSummary {
        id,
        consumer: text(consumer)?,
        message_id: message_id.text(),
        origin: text(origin)?,
        reason: text(reason)?,
        attempts: unsigned(&attempts)?,
        error: text(error)?,
        order_key: order_key.text(),
        first_at: text(first_at)?,
        last_at: text(last_at)?,
        redrives: unsigned(&redrives)?,
        payload_bytes: unsigned(&bytes)?,
        parked_at: text(parked_at)?,
        position: DeadLetterPosition(number.integer().ok_or_else(other_rows)?),
    })
}

impl PgDeadLetterStore {
    /// Returns dead letters, oldest first.
    ///
    /// # Errors
    /// The error of the connection or the server.
    pub async fn list(
        &self,
        query: &DeadLetterQuery,
    ) -> Result<Vec<DeadLetterSummary>, ConnectCause> {
        let text = format!("SELECT {COLUMNS} {LIST}");
        let parameters = [
            SqlParameter::Text(query.consumer.as_deref()),
            SqlParameter::Text(query.reason.map(DeadLetterReason::as_str)),
            SqlParameter::Integer(query.after.map(|after| after.0)),
            SqlParameter::Integer(Some(query.limit.into())),
        ];
        self.run(&text, &parameters).await?.into_iter().map(summary).collect()
    }

    /// Returns the position of the newest dead letter: a list after it has those that are stored later.
    ///
    /// # Errors
    /// The error of the connection or the server.
    pub async fn last_position(&self) -> Result<DeadLetterPosition, ConnectCause> {
        let rows = self.run(LAST, &[]).await?;
        let number = rows.first().and_then(|row| row.first()).and_then(SqlValue::integer);
        number.map(DeadLetterPosition).ok_or_else(other_rows)
    }

    /// Returns at most two dead letters whose ids begin with the hexadecimal digits `prefix`.
    ///
    /// # Errors
    /// The error of the connection or the server.
    pub async fn find(&self, prefix: &str) -> Result<Vec<DeadLetterSummary>, ConnectCause> {
        let text = format!(
            "SELECT {COLUMNS} FROM hapax_dead_letters
            WHERE left(encode(id, 'hex'), length($1)) = lower($1) LIMIT 2"
        );
        let parameters = [SqlParameter::Text(Some(prefix))];
        self.run(&text, &parameters).await?.into_iter().map(summary).collect()
    }

    /// Returns a dead letter; `None` if it does not exist.
    ///
    /// # Errors
    /// The error of the connection or the server.
    pub async fn get(&self, id: &[u8; 32]) -> Result<Option<DeadLetterSummary>, ConnectCause> {
        let text = format!("SELECT {COLUMNS} FROM hapax_dead_letters WHERE id = $1");
        let rows = self.run(&text, &[SqlParameter::Bytes(Some(id))]).await?;
        rows.into_iter().next().map(summary).transpose()
    }

    /// Returns headers and payload of a dead letter; `None` if it does not exist.
    ///
    /// # Errors
    /// The error of the connection or the server.
    pub async fn contents(
        &self,
        id: &[u8; 32],
    ) -> Result<Option<DeadLetterContents>, ConnectCause> {
        let text = "SELECT payload, h.name, h.value FROM hapax_dead_letters
            LEFT JOIN LATERAL unnest(header_names, header_values) WITH ORDINALITY
                AS h (name, value, at) ON true
            WHERE id = $1 ORDER BY h.at";
        let rows = self.run(text, &[SqlParameter::Bytes(Some(id))]).await?;
        let mut contents = None;
        for row in rows {
            let [payload, name, value] =
                <[SqlValue; 3]>::try_from(row).map_err(|_| other_rows())?;
            let payload = Bytes::from(payload.bytes().ok_or_else(other_rows)?);
            let contents = contents.get_or_insert_with(|| DeadLetterContents {
                headers: Vec::new(),
                payload,
                native: None,
            });
            // Without headers, both are null.
            match (name.text(), value.bytes()) {
                (Some(name), Some(value)) => contents.headers.push((name, value.into())),
                (None, Some(value)) => contents.native = Some(value.into()),
                (_, None) => {}
            }
        }
        Ok(contents)
    }

    /// Returns the oldest of these dead letters whose message has an id that the inbox of this database has not, and was
    /// not redriven since it was last parked: its consumer is in claim mode, whose records are in a store, or the retention of the id has
    /// ended. Those of an outbox, of a consumer in positions mode, and mismatches are left out.
    ///
    /// # Errors
    /// The error of the connection or the server.
    pub async fn first_not_in_inbox(
        &self,
        ids: &[[u8; 32]],
    ) -> Result<Option<[u8; 32]>, ConnectCause> {
        let ids: Vec<_> = ids.iter().map(|id| Some(&id[..])).collect();
        let rows = self.run(NOT_IN_INBOX, &[SqlParameter::ByteStrings(&ids)]).await?;
        let id = rows.into_iter().next().and_then(|row| row.into_iter().next());
        let id = id.map(|id| id.bytes().and_then(|id| id.try_into().ok()).ok_or_else(other_rows));
        id.transpose()
    }

    /// Begins to redrive a dead letter: removes the id of its message from the inbox in this
    /// database, if the message was parked and not handled. Returns the number of the redrive;
    /// `None` if the dead letter does not exist. It stays until its message was handled.
    ///
    /// # Errors
    /// The error of the connection or the server; it may have begun. A dead letter whose reason is
    /// a mismatch is rejected.
    pub async fn begin_redrive(
        &self,
        id: &[u8; 32],
        operator: &str,
        reason: &str,
    ) -> Result<Option<u64>, ConnectCause> {
        let parameters = [
            SqlParameter::Bytes(Some(id)),
            SqlParameter::Text(Some(operator)),
            SqlParameter::Text(Some(reason)),
        ];
        let rows = self.run(REDRIVE, &parameters).await?;
        let number = rows.first().and_then(|row| row.first()).and_then(SqlValue::integer);
        Ok(number.and_then(|number| u64::try_from(number).ok()))
    }

    /// Gives the message of a dead letter without an id the one under which it is redriven
    /// ([`DeadLetter::redriven_id`](hapax_messages::DeadLetter::redriven_id)). An id that it has stays.
    ///
    /// # Errors
    /// The error of the connection or the server; it may have been given.
    pub async fn set_message_id(
        &self,
        dead_letter: &[u8; 32],
        id: &MessageId,
    ) -> Result<(), ConnectCause> {
        let parameters =
            [SqlParameter::Bytes(Some(dead_letter)), SqlParameter::Text(Some(id.as_str()))];
        self.run(SET_MESSAGE_ID, &parameters).await.map(drop)
    }

    /// Moves a dead letter of the outbox back to its position in the outbox. Returns whether it
    /// existed.
    ///
    /// # Errors
    /// The error of the connection or the server; it may have been moved.
    pub async fn redrive_to_outbox(&self, id: &[u8; 32]) -> Result<bool, ConnectCause> {
        let rows = self.run(REDRIVE_TO_OUTBOX, &[SqlParameter::Bytes(Some(id))]).await?;
        Ok(is_true(rows))
    }

    /// Deletes a dead letter without handling its message. Returns whether it existed.
    ///
    /// # Errors
    /// The error of the connection or the server; it may have been dropped.
    pub async fn drop_dead_letter(
        &self,
        id: &[u8; 32],
        operator: &str,
        reason: &str,
    ) -> Result<bool, ConnectCause> {
        let parameters = [
            SqlParameter::Bytes(Some(id)),
            SqlParameter::Text(Some(operator)),
            SqlParameter::Text(Some(reason)),
        ];
        Ok(is_true(self.run(DROP, &parameters).await?))
    }
}

fn is_true(rows: Vec<SqlRow>) -> bool {
    let value = rows.into_iter().next().and_then(|row| row.into_iter().next());
    value.and_then(SqlValue::text).is_some_and(|text| text == "true")
}
