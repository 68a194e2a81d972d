//! Deliveries: messages that the client has parsed, and those that it cannot parse.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use async_nats::Subject;
use async_nats::datetime::DateTime;
use async_nats::jetstream::stream::RawMessage;
use async_nats::jetstream::{AckKind, Message as NatsMessage};
use bytes::Bytes;
use hapax_core::Timestamp;
use hapax_core::store::BoxFuture;
use hapax_messages::{Delivery, LogPosition, Message, SourceError};

use crate::headers::{self, StoredHeaders};
use crate::source::{DELAYS_FROM, NatsOrderKey, Shared};
use crate::stored;

/// Header of a message with a time after which its stream deletes it.
const TTL: &str = "Nats-TTL";

/// A message, until it is acknowledged or dropped.
pub(crate) struct NatsDelivery {
    shared: Arc<Shared>,
    /// Subject of its acknowledgements.
    reply: Subject,
    received: Message,
    is_redelivery: bool,
    /// Whether the server has the message back. A hold would replace the pause.
    is_delayed: AtomicBool,
    unreadable: Option<Unreadable>,
}

/// A message that the client cannot parse.
struct Unreadable {
    id: StoredId,
    reason: String,
    /// Whether its delivery is in progress, for the search.
    _in_progress: Arc<()>,
}

/// Place and time of a message in its stream, which no other message has, not even one of a stream that was created
/// again.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct StoredId {
    pub(crate) sequence: u64,
    pub(crate) stored_at: DateTime,
}

/// A message of the stream that the client cannot parse, before its delivery.
#[derive(Debug)]
pub(crate) struct Found {
    pub(crate) id: StoredId,
    pub(crate) reply: Subject,
    /// The part that the client cannot parse.
    pub(crate) part: &'static str,
    pub(crate) in_progress: Arc<()>,
    message: Message,
}

impl Found {
    /// Returns a message of the stream if the client cannot parse it.
    ///
    /// The client does not know the subject of its acknowledgements. Of that subject the server reads the
    /// sequence in the stream, by which it finds the delivery. The other numbers have no effect on a message
    /// that is not acknowledged, and 0 is the number of no delivery.
    pub(crate) fn of(
        raw: &RawMessage,
        (stream, consumer): (&str, &str),
        order_key: &NatsOrderKey,
    ) -> Result<Option<Self>, async_nats::Error> {
        let block = raw.headers.as_deref().filter(|block| !block.is_empty());
        let block = block.map(stored::decode).transpose()?;
        let subject = headers::unreadable_subject(&raw.subject, block.is_some());
        let StoredHeaders { headers, unreadable } =
            block.map(|block| headers::read(&block)).unwrap_or_default();
        let Some(part) = subject.or(unreadable) else { return Ok(None) };
        let sequence = raw.sequence;
        let at = Place { stream, sequence, stored_at: raw.time };
        let payload = stored::decode(&raw.payload)?;
        Ok(Some(Self {
            id: StoredId { sequence, stored_at: raw.time },
            reply: Subject::from(format!("$JS.ACK.{stream}.{consumer}.1.{sequence}.0.0.0")),
            part,
            in_progress: Arc::default(),
            message: at.message(&raw.subject, headers, payload, order_key),
        }))
    }
}

impl std::fmt::Debug for NatsDelivery {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("NatsDelivery").field("message", &self.received).finish_non_exhaustive()
    }
}

impl NatsDelivery {
    /// Creates the delivery of a message that the client has received.
    pub(crate) fn received(
        shared: &Arc<Shared>,
        message: NatsMessage,
    ) -> Result<Self, SourceError> {
        let info = message.info().map_err(SourceError::new)?;
        let (is_redelivery, sequence) = (info.delivered > 1, info.stream_sequence);
        let id = StoredId { sequence, stored_at: info.published };
        let subject = headers::unreadable_subject(&message.subject, message.headers.is_some());
        shared.inspection.received(id, subject.is_some());
        let mut headers = Vec::new();
        for (name, values) in message.headers.iter().flat_map(|headers| headers.iter()) {
            for value in values {
                let value = Bytes::copy_from_slice(value.as_str().as_bytes());
                headers.push((name.to_string(), value));
            }
        }
        let at = Place { stream: info.stream, sequence, stored_at: info.published };
        let (subject, payload) = (&message.subject, message.payload.clone());
        let received = at.message(subject, headers, payload, &shared.order_key);
        let reply = message.reply.clone();
        let reply = reply.ok_or_else(|| SourceError::new("a message without a reply subject"))?;
        Ok(Self {
            shared: Arc::clone(shared),
            reply,
            received,
            is_redelivery,
            is_delayed: AtomicBool::new(false),
            unreadable: None,
        })
    }

    /// Creates the delivery of a message that the client cannot parse.
    pub(crate) fn found(shared: &Arc<Shared>, found: Found) -> Self {
        let reason = format!(
            "expected a message that the NATS client can read, found {}: each header unreadable-header has such \
             a line, percent-encoded; redrive the message with the other headers, or publish it again and drop it",
            found.part
        );
        Self {
            shared: Arc::clone(shared),
            reply: found.reply,
            received: found.message,
            is_redelivery: true,
            is_delayed: AtomicBool::new(false),
            unreadable: Some(Unreadable { id: found.id, reason, _in_progress: found.in_progress }),
        }
    }
}

/// Converts a time of the server; one before 1970 becomes that year's begin.
pub(crate) fn timestamp(at: DateTime) -> Timestamp {
    Timestamp::from_micros(u64::try_from(at.unix_timestamp_nanos() / 1000).unwrap_or(0))
}

/// Place of a message in its stream.
struct Place<'a> {
    stream: &'a str,
    sequence: u64,
    stored_at: DateTime,
}

impl Place<'_> {
    fn message(
        &self,
        subject: &str,
        headers: Vec<(String, Bytes)>,
        payload: Bytes,
        order_key: &NatsOrderKey,
    ) -> Message {
        let stream = self.stream;
        let stored_at = timestamp(self.stored_at);
        let position =
            LogPosition { topic: stream.into(), partition: 0, offset: self.sequence, stored_at };
        let mut message = Message::new(format!("nats://{stream}/{subject}"), payload)
            .with_position(position)
            .published_at(stored_at);
        message.headers = headers;
        let key = match order_key {
            NatsOrderKey::None => None,
            NatsOrderKey::Subject => Some(subject.to_owned()),
            NatsOrderKey::Header(name) => message
                .header(name)
                .and_then(|value| std::str::from_utf8(value).ok())
                // A database would not store a zero byte.
                .map(|key| key.replace('\0', "\u{fffd}")),
        };
        match key {
            Some(key) => message.with_key(key),
            None => message,
        }
    }
}

impl Delivery for NatsDelivery {
    fn message(&self) -> &Message {
        &self.received
    }

    fn native(&self) -> Option<Bytes> {
        Some(Bytes::from_static(headers::NATIVE))
    }

    fn is_redelivery(&self) -> bool {
        self.is_redelivery
    }

    fn was_delayed(&self) -> bool {
        // The server has none that the client cannot parse back.
        self.is_redelivery && self.unreadable.is_none()
    }

    fn unreadable(&self) -> Option<&str> {
        self.unreadable.as_ref().map(|unreadable| &*unreadable.reason)
    }

    fn acknowledge(&self) -> BoxFuture<'_, Result<(), SourceError>> {
        Box::pin(async move {
            let Some(unreadable) = &self.unreadable else {
                return self.shared.link.confirm(&self.reply, AckKind::Ack).await;
            };
            self.shared.link.confirm(&self.reply, AckKind::Term).await?;
            self.shared.inspection.terminated(unreadable.id);
            Ok(())
        })
    }

    fn hold(&self) -> BoxFuture<'_, Result<(), SourceError>> {
        Box::pin(async move {
            match self.is_delayed.load(Ordering::Relaxed) {
                true => Ok(()),
                false => self.shared.link.hold(&self.reply).await,
            }
        })
    }

    /// Returns the message to the server, by a negative acknowledgement with a delay. It stays unacknowledged at the server
    /// meanwhile: if the negative acknowledgement is lost, the message is delivered again after `ack_wait`. The server counts
    /// it as a delivery, of which the consumer had no limit when that was last read. A message that the stream may delete
    /// before its next attempt stays, and so does one that the client cannot parse: the server would deliver it to the
    /// client, and the connection would end.
    fn delay(&self, pause: Duration) -> BoxFuture<'_, Result<bool, SourceError>> {
        Box::pin(async move {
            let Shared { link, pending, .. } = &*self.shared;
            let ack_wait = link.current().consumer.cached_info().config.ack_wait;
            let time = pause.saturating_add(ack_wait);
            let stored_at = self.received.published_at.unwrap_or_default();
            let stays = pause < DELAYS_FROM
                || self.unreadable.is_some()
                || self.received.header(TTL).is_some()
                || !pending.may_delay(stored_at, time);
            if stays {
                return Ok(false);
            }
            pending.note_delay(pause);
            link.send(&self.reply, AckKind::Nak(Some(pause))).await?;
            self.is_delayed.store(true, Ordering::Relaxed);
            Ok(true)
        })
    }
}
