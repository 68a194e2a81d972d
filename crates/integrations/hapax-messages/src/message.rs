//! Messages, as brokers and outboxes carry them.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use hapax_core::{Fingerprint, Timestamp};

/// A message that was received. Its `Debug` form shows no contents.
#[derive(Clone, PartialEq, Eq, Default)]
#[non_exhaustive]
pub struct Message {
    /// Origin, for operators: `nats://orders/orders.created`.
    pub origin: Arc<str>,
    /// Order key, of at most [`Message::MAX_KEY_LEN`] bytes: messages with the same one are in order.
    /// `None`: the message has no order. A source sets it by [`Message::with_key`].
    pub key: Option<String>,
    /// Headers, in their order. A name may occur repeatedly.
    pub headers: Vec<(String, Bytes)>,
    /// Payload.
    pub payload: Bytes,
    /// Position in the broker's log, if it has one: for
    /// [`IdRule::Position`](crate::IdRule::Position).
    pub position: Option<LogPosition>,
    /// Time at which the broker accepted it, or that of the producer if the broker has none; `None` if
    /// unknown.
    pub published_at: Option<Timestamp>,
}

impl Message {
    /// Longest order key, in bytes, as in an outbox. A dead letter is found by its order key, and an
    /// index has no longer ones.
    pub const MAX_KEY_LEN: usize = 1024;

    /// Creates a message without headers.
    #[must_use]
    pub fn new(origin: impl Into<Arc<str>>, payload: impl Into<Bytes>) -> Self {
        Self { origin: origin.into(), payload: payload.into(), ..Self::default() }
    }

    /// Adds a header.
    #[must_use]
    pub fn with_header(mut self, name: impl Into<String>, value: impl Into<Bytes>) -> Self {
        self.headers.push((name.into(), value.into()));
        self
    }

    /// Sets the order key. A hash replaces a key that is longer than [`Message::MAX_KEY_LEN`], and keeps
    /// the same messages in order.
    #[must_use]
    pub fn with_key(mut self, key: impl Into<String>) -> Self {
        let key = key.into();
        self.key = Some(match key.len() > Self::MAX_KEY_LEN {
            true => {
                let hash = Fingerprint::builder("hapax 1 order key").field(key.as_bytes()).finish();
                hash.as_bytes().iter().map(|byte| format!("{byte:02x}")).collect()
            }
            false => key,
        });
        self
    }

    /// Sets the position.
    #[must_use]
    pub fn with_position(mut self, position: LogPosition) -> Self {
        self.position = Some(position);
        self
    }

    /// Sets the time at which the broker accepted the message.
    #[must_use]
    pub const fn published_at(mut self, time: Timestamp) -> Self {
        self.published_at = Some(time);
        self
    }

    /// Returns the bytes of its contents, which a consumer has in memory.
    #[must_use]
    pub fn bytes(&self) -> usize {
        let headers: usize =
            self.headers.iter().map(|(name, value)| name.len() + value.len()).sum();
        let texts = self.origin.len() + self.key.as_ref().map_or(0, String::len);
        texts + headers + self.payload.len()
    }

    /// Returns the first header of this name; the case of letters is ignored.
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

/// Position of a message in a broker's log. `stored_at` distinguishes a topic from a later one of the same
/// name.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct LogPosition {
    /// Topic, stream or queue.
    pub topic: Arc<str>,
    /// Partition; 0 without partitions.
    pub partition: u64,
    /// Offset or sequence number within the partition.
    pub offset: u64,
    /// Time at which the broker stored the message, or that of the producer if the broker has none.
    pub stored_at: Timestamp,
}

impl fmt::Display for LogPosition {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { topic, partition, offset, stored_at } = self;
        write!(f, "{topic}:{partition}:{offset}:{}", stored_at.as_micros())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_hash_replaces_a_long_order_key() {
        let key = |text: String| Message::new("memory://orders", "").with_key(text).key.unwrap();
        let longest = "k".repeat(1024);
        assert_eq!(key(longest.clone()), longest);
        let (one, other) = (format!("{longest}1"), format!("{longest}2"));
        assert_eq!(key(one.clone()), key(one.clone()));
        assert_ne!(key(one.clone()), key(other));
        assert_eq!(key(one).len(), 64);
    }
}
