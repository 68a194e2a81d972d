//! The interface to an outbox: messages that a caller writes in its own transactions, for a relay.

use std::fmt;
use std::time::Duration;

use hapax_core::store::BoxFuture;

use crate::sink::OutgoingMessage;

/// Number of shards of an outbox. An order key belongs to one shard.
pub const OUTBOX_SHARDS: u16 = 32;

/// Position of a message in an outbox. Within a shard, the ids of messages with one order key
/// ascend in the order in which they were committed.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct OutboxPosition {
    /// Shard, below [`OUTBOX_SHARDS`].
    pub shard: u16,
    /// Id, from 1.
    pub id: u64,
}

/// A message that waits to be published.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct OutboxMessage {
    /// The position.
    pub position: OutboxPosition,
    /// The message.
    pub message: OutgoingMessage,
    /// Time since it was written, by the outbox's clock.
    pub age: Duration,
    /// Reason for which it cannot be published, such as headers that cannot be read: it becomes a dead
    /// letter, and the sink does not get it.
    pub unpublishable: Option<String>,
}

impl OutboxMessage {
    /// Returns the bytes of its contents, which a relay has in memory.
    #[must_use]
    pub fn bytes(&self) -> usize {
        let message = &self.message;
        let texts = message.destination.len()
            + message.id.as_str().len()
            + message.key.as_ref().map_or(0, String::len);
        let headers: usize =
            message.headers.iter().map(|(name, value)| name.len() + value.len()).sum();
        texts + headers + message.payload.len()
    }
}

/// Messages that a poll looks for.
#[derive(Clone, Copy, Debug)]
pub struct OutboxQuery<'a> {
    /// Shards in the order in which they are read, each with the id above which messages are read.
    pub shards: &'a [OutboxPosition],
    /// Messages that are left out, because the relay has them.
    pub known: &'a [OutboxPosition],
    /// Order keys whose messages are left out.
    pub skipped: &'a [String],
    /// Largest number of messages.
    pub max: u32,
    /// Bytes of payloads and headers after which no further message is read. The first message is
    /// read in any case.
    pub bytes: u64,
}

/// Messages of a poll.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct OutboxPage {
    /// The messages, in the order of ids within each shard.
    pub messages: Vec<OutboxMessage>,
    /// Changes if messages may have appeared below the floors: they are read again from 0.
    pub epoch: u64,
}

/// Open transactions that may have allocated an id.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct OutboxWriters {
    /// Last id that was allocated.
    pub last_id: u64,
    /// Names of the open transactions that may have allocated an id up to the last one. The name of
    /// one does not change, except to [`OutboxWriters::PREPARED`].
    pub open: Vec<String>,
}

impl OutboxWriters {
    /// Name of all transactions that are prepared, in a two-phase commit.
    pub const PREPARED: &str = "prepared";
}

/// State of an outbox.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
#[non_exhaustive]
pub struct OutboxLag {
    /// Age of the oldest message that is not published.
    pub oldest: Duration,
    /// Number of messages, counted up to a limit.
    pub messages: u64,
    /// Number of blocked order keys: those with a dead letter.
    pub blocked_keys: u64,
}

impl OutboxLag {
    /// Creates a state.
    #[must_use]
    pub const fn new(oldest: Duration, messages: u64, blocked_keys: u64) -> Self {
        Self { oldest, messages, blocked_keys }
    }
}

/// Error of an outbox.
#[derive(Debug, thiserror::Error)]
#[error("the outbox failed: {0}")]
pub struct OutboxError(#[source] Box<dyn std::error::Error + Send + Sync>);

impl OutboxError {
    /// Creates an error with its cause.
    pub fn new(cause: impl Into<Box<dyn std::error::Error + Send + Sync>>) -> Self {
        Self(cause.into())
    }
}

/// Future of a call of an [`Outbox`].
pub type OutboxFuture<'a, T> = BoxFuture<'a, Result<T, OutboxError>>;

/// Rows that wait to be published. No call leaves a transaction open. Dropping a future leaves a
/// call that may have been executed; each may be repeated.
pub trait Outbox: fmt::Debug + Send + Sync + 'static {
    /// Returns the messages of a query: of each shard those with the least ids, and none of an
    /// order key with a dead letter.
    fn poll<'a>(&'a self, query: OutboxQuery<'a>) -> OutboxFuture<'a, OutboxPage>;

    /// Deletes messages that were published.
    fn remove<'a>(&'a self, positions: &'a [OutboxPosition]) -> OutboxFuture<'a, ()>;

    /// Moves a message that the sink permanently rejects to the dead letters. Later messages with
    /// its order key wait until an operator redrives or drops it.
    fn park<'a>(
        &'a self,
        message: &'a OutboxMessage,
        error: &'a str,
        attempts: u32,
    ) -> OutboxFuture<'a, ()>;

    /// Returns the open transactions that may have allocated an id, and the last id.
    fn writers(&self) -> OutboxFuture<'_, OutboxWriters>;

    /// Returns for each of `shards` the position of the first message above its floor, if there is
    /// one.
    fn first_above<'a>(
        &'a self,
        shards: &'a [OutboxPosition],
    ) -> OutboxFuture<'a, Vec<OutboxPosition>>;

    /// Returns the state of the outbox.
    fn lag(&self) -> OutboxFuture<'_, OutboxLag>;
}
