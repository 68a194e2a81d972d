//! A broker of your own: a queue in a table of PostgreSQL, as source and sink.
//!
//! 1. A message that was received is hidden for a time (`ack_wait`), after which it is received again,
//!    unless it was acknowledged, which deletes it, or held, which hides it for longer.
//! 2. Of each order key the first message alone is received. Those behind it follow once it is
//!    acknowledged, in the order of their transactions' inserts: writers of one key must not run at the
//!    same time.
//! 3. A message is confirmed when its row is committed.
//!
//! The test calls the published suite, which every adapter passes: `tests/it/postgres/queue.rs`.

use std::num::NonZeroUsize;
use std::sync::Arc;
use std::time::Duration;

use hapax::Timestamp;
use hapax::messages::{
    Delivery, Message, MessageSink, MessageSource, OutgoingMessage, PublishError, SourceError,
    SourceLimits,
};
use hapax::store::BoxFuture;
use sqlx::PgPool;
use tokio::time::{sleep, timeout};

/// The table. A message with a larger payload than 1 MiB is rejected.
pub const TABLE: &str = "
    CREATE TABLE IF NOT EXISTS table_queue (
        id bigserial PRIMARY KEY,
        queue text NOT NULL,
        message_id text NOT NULL,
        order_key text,
        header_names text[] NOT NULL,
        header_values bytea[] NOT NULL,
        payload bytea NOT NULL CHECK (octet_length(payload) <= 1048576),
        published_at timestamptz NOT NULL DEFAULT now(),
        hidden_until timestamptz NOT NULL DEFAULT '-infinity',
        deliveries bigint NOT NULL DEFAULT 0
    );
    CREATE INDEX IF NOT EXISTS table_queue_next ON table_queue (queue, id);
    CREATE INDEX IF NOT EXISTS table_queue_keys ON table_queue (queue, order_key, id);";

const PUBLISH: &str = "INSERT INTO table_queue
        (queue, message_id, order_key, header_names, header_values, payload)
    VALUES ($1, $2, $3, $4, $5, $6)";

/// Two sources never receive a message at the same time: each skips rows that the other has locked.
const RECEIVE: &str = "UPDATE table_queue SET deliveries = deliveries + 1,
        hidden_until = clock_timestamp() + $3 * interval '1 ms'
    WHERE id IN (
        SELECT id FROM table_queue q
        WHERE queue = $1 AND hidden_until < clock_timestamp() AND (order_key IS NULL OR NOT EXISTS (
            SELECT FROM table_queue WHERE queue = $1 AND order_key = q.order_key AND id < q.id))
        ORDER BY id LIMIT $2 FOR UPDATE SKIP LOCKED)
    RETURNING id, message_id, order_key, header_names, header_values, payload,
        (extract(epoch FROM published_at) * 1e6)::bigint AS published_at, deliveries";

/// Hides the message for longer, unless it was delivered again: then a later delivery holds it.
const HOLD: &str = "UPDATE table_queue SET hidden_until = clock_timestamp() + $3 * interval '1 ms'
    WHERE id = $1 AND deliveries = $2";

const ACKNOWLEDGE: &str = "DELETE FROM table_queue WHERE id = $1";

/// Time for the database to answer.
const ANSWER: Duration = Duration::from_secs(5);

/// Pause before an empty queue is read again.
const POLL: Duration = Duration::from_millis(100);

/// A queue of a table.
#[derive(Clone, Debug)]
pub struct TableQueue {
    pool: PgPool,
    queue: String,
    ack_wait: Duration,
}

/// The columns of [`RECEIVE`].
type Row = (i64, String, Option<String>, Vec<String>, Vec<Vec<u8>>, Vec<u8>, i64, i64);

impl TableQueue {
    /// Creates an adapter to the messages of `queue`. A message that nothing holds for `ack_wait` is
    /// received again.
    #[must_use]
    pub fn new(pool: PgPool, queue: impl Into<String>, ack_wait: Duration) -> Self {
        Self { pool, queue: queue.into(), ack_wait }
    }

    fn hidden_ms(&self) -> f64 {
        self.ack_wait.as_secs_f64() * 1000.0
    }

    fn delivery(&self, row: Row) -> Arc<dyn Delivery> {
        let (id, message_id, key, names, values, payload, published_at, deliveries) = row;
        let published_at = Timestamp::from_micros(u64::try_from(published_at).unwrap_or(0));
        let mut message = Message::new(format!("table://table_queue/{}", self.queue), payload)
            .with_header("message-id", message_id)
            .published_at(published_at);
        for (name, value) in names.into_iter().zip(values) {
            message = message.with_header(name, value);
        }
        if let Some(key) = key {
            message = message.with_key(key);
        }
        Arc::new(TableDelivery { queue: self.clone(), id, deliveries, message })
    }

    async fn insert(&self, message: &OutgoingMessage) -> Result<(), sqlx::Error> {
        // The id of the message is the one that counts.
        let own =
            message.headers.iter().filter(|(name, _)| !name.eq_ignore_ascii_case("message-id"));
        let (names, values): (Vec<_>, Vec<_>) =
            own.map(|(name, value)| (name.clone(), value.to_vec())).unzip();
        let insert = sqlx::query(PUBLISH)
            .bind(&message.destination)
            .bind(message.id.as_str())
            .bind(&message.key)
            .bind(names)
            .bind(values)
            .bind(&message.payload[..]);
        insert.execute(&self.pool).await.map(drop)
    }
}

/// Awaits a statement for a limited time.
async fn answered<T>(
    statement: impl Future<Output = Result<T, sqlx::Error>>,
) -> Result<T, SourceError> {
    match timeout(ANSWER, statement).await {
        Ok(result) => result.map_err(SourceError::new),
        Err(_) => Err(SourceError::new(format!(
            "expected an answer of the database within {ANSWER:?}, found none: check that it runs"
        ))),
    }
}

impl MessageSource for TableQueue {
    /// A future that is dropped after the statement leaves its messages hidden: they are received again
    /// after `ack_wait`.
    fn receive(
        &self,
        max: NonZeroUsize,
    ) -> BoxFuture<'_, Result<Vec<Arc<dyn Delivery>>, SourceError>> {
        Box::pin(async move {
            let most = i64::try_from(max.get()).unwrap_or(i64::MAX);
            loop {
                let receive = sqlx::query_as::<_, Row>(RECEIVE).bind(&self.queue).bind(most);
                let receive = receive.bind(self.hidden_ms()).fetch_all(&self.pool);
                let mut rows = answered(receive).await?;
                if rows.is_empty() {
                    sleep(POLL).await;
                    continue;
                }
                // UPDATE returns rows in any order.
                rows.sort_by_key(|row| row.0);
                return Ok(rows.into_iter().map(|row| self.delivery(row)).collect());
            }
        })
    }

    fn limits(&self) -> SourceLimits {
        SourceLimits::default().hold_every(self.ack_wait / 3).with_order_keys()
    }
}

impl MessageSink for TableQueue {
    fn publish<'a>(
        &'a self,
        message: &'a OutgoingMessage,
    ) -> BoxFuture<'a, Result<(), PublishError>> {
        Box::pin(async move {
            match timeout(ANSWER, self.insert(message)).await {
                Ok(Ok(())) => Ok(()),
                // The table will never take it: too large, or a text with a zero byte.
                Ok(Err(sqlx::Error::Database(error)))
                    if ["23514", "22021"]
                        .iter()
                        .any(|code| error.code().as_deref() == Some(code)) =>
                {
                    Err(PublishError::rejected(error))
                }
                Ok(Err(error)) => Err(PublishError::not_acknowledged(error)),
                Err(_) => Err(PublishError::not_acknowledged("the database does not answer")),
            }
        })
    }
}

/// A message that is hidden from other sources.
#[derive(Debug)]
struct TableDelivery {
    queue: TableQueue,
    id: i64,
    /// The number of this delivery. A later delivery of the message has a greater one.
    deliveries: i64,
    message: Message,
}

impl Delivery for TableDelivery {
    fn message(&self) -> &Message {
        &self.message
    }

    fn is_redelivery(&self) -> bool {
        self.deliveries > 1
    }

    fn acknowledge(&self) -> BoxFuture<'_, Result<(), SourceError>> {
        Box::pin(async move {
            let delete = sqlx::query(ACKNOWLEDGE).bind(self.id).execute(&self.queue.pool);
            answered(delete).await.map(drop)
        })
    }

    fn hold(&self) -> BoxFuture<'_, Result<(), SourceError>> {
        Box::pin(async move {
            let hold = sqlx::query(HOLD).bind(self.id).bind(self.deliveries);
            let hold = hold.bind(self.queue.hidden_ms()).execute(&self.queue.pool);
            answered(hold).await.map(drop)
        })
    }
}
