//! The sink: messages are published to the subjects of a stream.

use std::error::Error as _;
use std::fmt;

use async_nats::HeaderMap;
use async_nats::jetstream::context::PublishErrorKind;
use async_nats::jetstream::message::PublishMessage;
use async_nats::jetstream::publish::PublishAck;
use async_nats::jetstream::{Context, Error as JetStreamError, ErrorCode};
use hapax_core::store::BoxFuture;
use hapax_messages::{MessageSink, OutgoingMessage, PublishError};

use crate::headers::NATIVE;
use crate::stored;

/// Publishes messages to the subject that is their destination, with the headers `message-id`,
/// `Nats-Msg-Id` and, if they have an order key, `message-order-key`. A redriven message has the headers that it had instead
/// of that one.
///
/// - `Nats-Msg-Id` is the id and the subject, since a stream deduplicates over all of its subjects.
///   Other headers that begin with `Nats-` are commands to the server, which may reject, expire or
///   purge messages: they are not published.
/// - A subject that belongs to no stream is a temporary error, because the stream may be created,
///   or be without a leader for a time: the message is published again later.
/// - A message that the server drops as a duplicate is compared with the one that is stored.
///   Another subject or payload, a payload larger than a limit of server or stream, and headers or
///   subjects that NATS cannot carry are permanently rejected. So are subjects over 1,024 bytes, and those
///   that NATS reserves: the first token begins with `$` (`$JS.API.…`, `$SYS.…`, `$KV.…`), or is `_INBOX`,
///   `_GR_`, `_R_` or `_nats`. A header has no white space at its
///   ends, because the client removes it: two ids would become one.
#[derive(Clone)]
pub struct NatsSink {
    context: Context,
}

impl fmt::Debug for NatsSink {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("NatsSink")
    }
}

impl NatsSink {
    /// Creates a sink.
    #[must_use]
    pub const fn new(context: Context) -> Self {
        Self { context }
    }

    /// Connects to a server. The client reconnects after the connection was lost.
    ///
    /// # Errors
    /// The error of the client, which does not repeat the URL.
    pub async fn connect(url: &str) -> Result<Self, async_nats::Error> {
        Ok(Self::new(crate::jetstream(url).await?))
    }

    async fn send(&self, message: &OutgoingMessage) -> Result<(), PublishError> {
        check_subject(&message.destination)?;
        let id = message.broker_id.as_deref().unwrap_or(message.id.as_str());
        // Unambiguous: a subject has no space.
        let headers = headers(message, &format!("{id} {}", message.destination))?;
        let publish = PublishMessage::build().payload(message.payload.clone()).headers(headers);
        let sent = self.context.send_publish(message.destination.clone(), publish).await;
        let acknowledged = sent.map_err(failed)?.await.map_err(failed)?;
        if acknowledged.duplicate {
            self.compare(message, &acknowledged).await?;
        }
        Ok(())
    }

    /// Compares a message that was dropped as a duplicate with the one that is stored.
    async fn compare(
        &self,
        message: &OutgoingMessage,
        stored: &PublishAck,
    ) -> Result<(), PublishError> {
        let read = stored::read(&self.context, &stored.stream, stored.sequence).await;
        // The stored message may have been removed, for instance from a work queue: nothing to compare.
        let Some(found) = read.map_err(PublishError::not_acknowledged)? else { return Ok(()) };
        let payload = stored::decode(&found.payload).map_err(PublishError::not_acknowledged)?;
        if found.subject == message.destination && payload == message.payload {
            return Ok(());
        }
        Err(PublishError::rejected(format!(
            "expected one payload and subject for each Nats-Msg-Id, found another one in the stream \
             {}: give each message its own id",
            stored.stream
        )))
    }
}

fn failed(error: async_nats::jetstream::context::PublishError) -> PublishError {
    match error.kind() {
        PublishErrorKind::MaxPayloadExceeded => PublishError::rejected(error),
        _ if exceeds_stream(&error) => PublishError::rejected(error),
        _ => PublishError::not_acknowledged(error),
    }
}

/// Returns whether a message or its headers are larger than the stream takes.
fn exceeds_stream(error: &async_nats::jetstream::context::PublishError) -> bool {
    let source = error.source().and_then(|source| source.downcast_ref::<JetStreamError>());
    source.is_some_and(|error| {
        [ErrorCode::STREAM_MESSAGE_EXCEEDS_MAXIMUM, ErrorCode::STREAM_HEADER_EXCEEDS_MAXIMUM]
            .contains(&error.error_code())
    })
}

/// Longest subject in bytes: a server closes the connection at a longer line (`max_control_line`, 4,096 by
/// default), which also has other fields.
const MAX_SUBJECT: usize = 1024;

/// First tokens of the server's own subjects, beside those that begin with `$` (`$JS`, `$SYS`, `$KV`, `$O`):
/// replies, and subjects of gateways and clusters.
const RESERVED: [&str; 4] = ["_INBOX", "_GR_", "_R_", "_nats"];

/// Rejects a subject to which nothing can be published, and one at which the server takes a message for a
/// request or a reply: who writes a message must not command the server by the sink's permissions.
fn check_subject(subject: &str) -> Result<(), PublishError> {
    if subject.len() > MAX_SUBJECT {
        return Err(PublishError::rejected(format!(
            "expected a subject of at most {MAX_SUBJECT} bytes, found {}: change the destination",
            subject.len()
        )));
    }
    let first = subject.split('.').next().unwrap_or_default();
    if first.starts_with('$') || RESERVED.contains(&first) {
        return Err(PublishError::rejected(format!(
            "expected a subject of a stream, found {subject:?}, which NATS reserves for itself: change the \
             destination"
        )));
    }
    let is_token = |token: &str| {
        !token.is_empty()
            && token != "*"
            && token != ">"
            && !token.contains(|it: char| it.is_whitespace() || it.is_control())
    };
    if subject.split('.').all(is_token) {
        return Ok(());
    }
    Err(PublishError::rejected(format!(
        "expected a subject of tokens separated by dots, without spaces and wildcards, found \
         {subject:?}: change the destination"
    )))
}

fn headers(message: &OutgoingMessage, id: &str) -> Result<HeaderMap, PublishError> {
    let mut headers = HeaderMap::new();
    let mut own = vec![("message-id", message.id.as_str()), ("Nats-Msg-Id", id)];
    // A redriven message has the headers that the client has read, of which it can send each.
    let is_redriven = message.native.as_deref() == Some(NATIVE);
    let order_key = message.key.as_deref().filter(|_| !is_redriven);
    own.extend(order_key.map(|key| ("message-order-key", key)));
    let is_own = |name: &str| {
        own.iter().any(|(own, _)| name.eq_ignore_ascii_case(own))
            || name.get(..5).is_some_and(|start| start.eq_ignore_ascii_case("Nats-"))
    };
    let further = message.headers.iter().filter(|(name, _)| !is_own(name));
    let further = further.map(|(name, value)| (name.as_str(), &value[..]));
    for (name, value) in own.iter().map(|(name, value)| (*name, value.as_bytes())).chain(further) {
        let cannot = |what: &str| {
            PublishError::rejected(format!(
                "the header {name:?}: expected {what}, found another one: change it where the \
                 message is written"
            ))
        };
        if (name.is_empty() && !is_redriven)
            || !name.bytes().all(|byte| byte.is_ascii_graphic() && byte != b':')
        {
            return Err(cannot("a name of ASCII characters without colons and spaces"));
        }
        let value = std::str::from_utf8(value).map_err(|_| cannot("a value in UTF-8"))?;
        let has_zero = value.contains('\0') && !is_redriven;
        if has_zero || value.contains(['\r', '\n']) || value.trim() != value {
            return Err(cannot(
                "a value of one line, without zero bytes and white space at its ends",
            ));
        }
        headers.append(name, value);
    }
    Ok(headers)
}

impl MessageSink for NatsSink {
    fn publish<'a>(
        &'a self,
        message: &'a OutgoingMessage,
    ) -> BoxFuture<'a, Result<(), PublishError>> {
        Box::pin(self.send(message))
    }
}
