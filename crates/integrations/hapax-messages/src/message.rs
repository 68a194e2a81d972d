//! Messages, as brokers and outboxes carry them.

use std::fmt;
use std::time::Duration;

use bytes::Bytes;
use hapax_core::Timestamp;

/// A message that was received. Its `Debug` form shows no contents.
#[derive(Clone, PartialEq, Eq, Default)]
#[non_exhaustive]
pub struct Message {
    /// Place from which it was received, for operators: `nats://orders/orders.created`.
    pub origin: String,
    /// Order key: messages with the same one are in order. `None`: the message has no order.
    pub key: Option<String>,
    /// Headers, in their order. A name may occur repeatedly.
    pub headers: Vec<(String, Bytes)>,
    /// Payload.
    pub payload: Bytes,
    /// Place in the broker's log, if it has one: for [`IdRule::Position`](crate::IdRule::Position).
    pub position: Option<Position>,
    /// Time at which the broker accepted it, if known.
    pub published_at: Option<Timestamp>,
}

impl Message {
    /// Creates a message without headers.
    #[must_use]
    pub fn new(origin: impl Into<String>, payload: impl Into<Bytes>) -> Self {
        Self { origin: origin.into(), payload: payload.into(), ..Self::default() }
    }

    /// Adds a header.
    #[must_use]
    pub fn with_header(mut self, name: impl Into<String>, value: impl Into<Bytes>) -> Self {
        self.headers.push((name.into(), value.into()));
        self
    }

    /// Sets the order key.
    #[must_use]
    pub fn with_key(mut self, key: impl Into<String>) -> Self {
        self.key = Some(key.into());
        self
    }

    /// Sets the position.
    #[must_use]
    pub fn with_position(mut self, position: Position) -> Self {
        self.position = Some(position);
        self
    }

    /// Sets the time at which the broker accepted the message.
    #[must_use]
    pub const fn published_at(mut self, time: Timestamp) -> Self {
        self.published_at = Some(time);
        self
    }

    /// Returns the first header of this name, in any case of letters.
    #[must_use]
    pub fn header(&self, name: &str) -> Option<&Bytes> {
        self.headers
            .iter()
            .find(|(header, _)| header.eq_ignore_ascii_case(name))
            .map(|(_, value)| value)
    }

    /// Returns the age of the message at the time `now`; zero if it is unknown.
    #[must_use]
    pub fn age(&self, now: Timestamp) -> Duration {
        self.published_at.map_or(Duration::ZERO, |published_at| now.since(published_at))
    }
}

impl fmt::Debug for Message {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Message")
            .field("origin", &self.origin)
            .field("headers", &self.headers.len())
            .field("payload_bytes", &self.payload.len())
            .field("position", &self.position)
            .finish_non_exhaustive()
    }
}

/// A place in a broker's log. The time distinguishes a topic from another one of the same name
/// that was created after it was deleted.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Position {
    /// Topic, stream or queue.
    pub topic: String,
    /// Partition; 0 without partitions.
    pub partition: u64,
    /// Offset or sequence number within the partition.
    pub offset: u64,
    /// Time at which the broker stored the message.
    pub stored_at: Timestamp,
}

impl fmt::Display for Position {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { topic, partition, offset, stored_at } = self;
        write!(f, "{topic}:{partition}:{offset}:{}", stored_at.as_micros())
    }
}
