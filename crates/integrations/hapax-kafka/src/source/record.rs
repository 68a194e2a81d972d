//! Records as messages.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

use bytes::Bytes;
use hapax_core::Timestamp;
use hapax_messages::{LogPosition, Message};
use rdkafka::message::{BorrowedMessage, Headers as _, Message as _, Timestamp as KafkaTimestamp};

use super::identity::RecordIdentity;
use super::partition::Record;
use super::state::PartitionKey;

/// Partition of a record, with the texts that all of its records share.
#[derive(Clone, Debug)]
pub(super) struct Origin {
    pub(super) key: PartitionKey,
    /// [`Message::origin`].
    text: Arc<str>,
}

impl Origin {
    pub(super) fn of(borrowed: &BorrowedMessage<'_>) -> Self {
        let topic = borrowed.topic();
        Self { key: (topic.into(), borrowed.partition()), text: format!("kafka://{topic}").into() }
    }

    pub(super) fn is_of(&self, borrowed: &BorrowedMessage<'_>) -> bool {
        self.key.1 == borrowed.partition() && *self.key.0 == *borrowed.topic()
    }
}

/// Copies a record out of the client's memory.
pub(super) fn record(borrowed: &BorrowedMessage<'_>, origin: &Origin) -> Record {
    let timestamp_ms = match borrowed.timestamp() {
        KafkaTimestamp::NotAvailable => -1,
        KafkaTimestamp::CreateTime(timestamp) | KafkaTimestamp::LogAppendTime(timestamp) => {
            timestamp
        }
    };
    let micros = u64::try_from(timestamp_ms).unwrap_or(0).saturating_mul(1000);
    let stored_at = Timestamp::from_micros(micros);
    let payload = Bytes::copy_from_slice(borrowed.payload().unwrap_or_default());
    let mut message = Message::new(Arc::clone(&origin.text), payload).with_position(LogPosition {
        topic: Arc::clone(&origin.key.0),
        partition: u64::try_from(borrowed.partition()).unwrap_or(0),
        offset: u64::try_from(borrowed.offset()).unwrap_or(0),
        stored_at,
    });
    if timestamp_ms >= 0 {
        message = message.published_at(stored_at);
    }
    if let Some(key) = borrowed.key() {
        message = message.with_key(order_key(key));
    }
    message.headers = headers(borrowed);
    let (bytes, identity) = (message.bytes(), RecordIdentity::of(&message, timestamp_ms));
    Record { message, bytes, identity, from: borrowed.offset(), ..Record::default() }
}

/// Prefix of an order key in base 16.
const BASE16: &str = "base16:";

/// Returns the order key of a record's key. Different keys have different order keys.
fn order_key(key: &[u8]) -> String {
    match std::str::from_utf8(key) {
        // A database would not store a zero byte.
        Ok(text) if !text.contains('\0') && !text.starts_with(BASE16) => text.to_owned(),
        _ => {
            let hex: String = key.iter().map(|byte| format!("{byte:02x}")).collect();
            format!("{BASE16}{hex}")
        }
    }
}

/// Returns the headers whose names are UTF-8. The client panics at another name, and has no function
/// that reads its bytes.
fn headers(borrowed: &BorrowedMessage<'_>) -> Vec<(String, Bytes)> {
    let Some(headers) = borrowed.headers() else { return Vec::new() };
    let mut found = Vec::with_capacity(headers.count());
    for index in 0..headers.count() {
        // Nothing is changed before the panic.
        match catch_unwind(AssertUnwindSafe(|| headers.try_get(index))) {
            Ok(Some(header)) => {
                let value = Bytes::copy_from_slice(header.value.unwrap_or_default());
                found.push((header.key.to_owned(), value));
            }
            Ok(None) => {}
            Err(_) => tracing::warn!(
                topic = borrowed.topic(),
                partition = borrowed.partition(),
                offset = borrowed.offset(),
                "a header is left out: expected a name in UTF-8, found other bytes"
            ),
        }
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_that_are_not_utf8_stay_different() {
        assert_eq!(order_key("ä 1".as_bytes()), "ä 1");
        assert_eq!(order_key(&[0xff, 0]), "base16:ff00");
        assert_ne!(order_key(b"a\0"), order_key(b"a"));
        assert_ne!(order_key(b"base16:ff"), order_key(b"\xff"));
    }
}
