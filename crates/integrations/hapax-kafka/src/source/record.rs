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
use crate::native::{NativeRecord, order_key};

/// Parts of the [native form](NativeRecord) that the message of a record has not.
#[derive(Clone, PartialEq, Eq, Default, Debug)]
pub(super) struct NativeParts {
    /// The key, if the order key of the message is another text.
    key: Option<Bytes>,
    has_null_value: bool,
    null_headers: Vec<usize>,
}

impl NativeParts {
    /// Returns the native form of the record of a message in a partition.
    pub(super) fn of(&self, message: &Message, partition: i32) -> NativeRecord {
        let text = || message.key.as_ref().map(|key| Bytes::copy_from_slice(key.as_bytes()));
        NativeRecord {
            partition,
            key: self.key.clone().or_else(text),
            has_null_value: self.has_null_value,
            null_headers: self.null_headers.clone(),
        }
    }
}

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
    let null_headers;
    (message.headers, null_headers) = headers(borrowed);
    let text = message.key.as_deref().map(str::as_bytes);
    // Few keys are not what the message has.
    let key = borrowed.key().filter(|key| text != Some(*key)).map(Bytes::copy_from_slice);
    let bytes = message.bytes() + key.as_ref().map_or(0, Bytes::len);
    let identity = RecordIdentity::of(&message, timestamp_ms);
    let has_null_value = borrowed.payload().is_none();
    let native = NativeParts { key, has_null_value, null_headers };
    Record { message, native, bytes, identity, from: borrowed.offset(), ..Record::default() }
}

/// Returns the headers whose names are UTF-8, and the indices of those without a value. The client panics at another
/// name, and has no function that reads its bytes.
fn headers(borrowed: &BorrowedMessage<'_>) -> (Vec<(String, Bytes)>, Vec<usize>) {
    let Some(headers) = borrowed.headers() else { return (Vec::new(), Vec::new()) };
    let (mut found, mut nulls) = (Vec::with_capacity(headers.count()), Vec::new());
    for index in 0..headers.count() {
        // Nothing is changed before the panic.
        match catch_unwind(AssertUnwindSafe(|| headers.try_get(index))) {
            Ok(Some(header)) => {
                if header.value.is_none() {
                    nulls.push(found.len());
                }
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
    (found, nulls)
}
