//! Dead letters: messages that are not handled until an operator decides.

use std::collections::HashSet;
use std::fmt;
use std::sync::Arc;

use bytes::Bytes;
use hapax_core::store::BoxFuture;
use hapax_core::{Fingerprint, Timestamp};

use crate::id::{IdRules, MessageId, MessageIdError};
use crate::message::Message;
use crate::sink::{MessageSink, OutgoingMessage, PublishError};

/// Reason for which a message is a dead letter.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
#[non_exhaustive]
pub enum DeadLetterReason {
    /// The message has no valid id.
    NoId,
    /// Another payload was handled under the id of the message.
    Conflict,
    /// The message is older than the retention of ids, so it may have been handled before.
    TooOld,
    /// The handler rejected the message.
    Rejected,
    /// The attempts are exhausted: each failed, or ended because its process ended.
    Attempts,
    /// The message may have been handled, and must not be handled again before an operator decides.
    Unknown,
    /// An earlier message with the same order key is a dead letter.
    Behind,
    /// A number before it in its sequence is missing.
    Gap,
    /// The sink of a relay permanently rejected the message.
    Unpublishable,
}

impl DeadLetterReason {
    /// Returns all reasons.
    pub const ALL: &[Self] = &[
        Self::NoId,
        Self::Conflict,
        Self::TooOld,
        Self::Rejected,
        Self::Attempts,
        Self::Unknown,
        Self::Behind,
        Self::Gap,
        Self::Unpublishable,
    ];

    /// Returns the name in tables, metrics and commands.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::NoId => "no-id",
            Self::Conflict => "conflict",
            Self::TooOld => "too-old",
            Self::Rejected => "rejected",
            Self::Attempts => "attempts",
            Self::Unknown => "unknown",
            Self::Behind => "behind",
            Self::Gap => "gap",
            Self::Unpublishable => "unpublishable",
        }
    }

    /// Parses a name; `None` for another one.
    #[must_use]
    pub fn parse(name: &str) -> Option<Self> {
        Self::ALL.iter().copied().find(|reason| reason.as_str() == name)
    }
}

impl fmt::Display for DeadLetterReason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

/// A message that is not handled until an operator decides, and the reason.
#[derive(Clone, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub struct DeadLetter {
    /// Digest of consumer, message id and payload, so that a message has one dead letter.
    pub id: [u8; 32],
    /// Consumer that parked the message.
    pub consumer: String,
    /// Id of the message, if it has one.
    pub message_id: Option<MessageId>,
    /// The message.
    pub message: Message,
    /// Reason.
    pub reason: DeadLetterReason,
    /// Number of executions that began.
    pub attempts: u32,
    /// Last error, at most [`DeadLetter::MAX_ERROR`] bytes.
    pub error: String,
    /// Time of the first delivery that is known, by the consumer's clock.
    pub first_at: Timestamp,
    /// Time of the last delivery, by the consumer's clock.
    pub last_at: Timestamp,
}

impl DeadLetter {
    /// The longest error text, in bytes; a longer one is cut.
    pub const MAX_ERROR: usize = 4096;

    /// Creates the dead letter of a message that was delivered at the time `now`.
    #[must_use]
    pub fn new(
        consumer: &str,
        message_id: Option<&MessageId>,
        message: Message,
        reason: DeadLetterReason,
        error: &str,
        now: Timestamp,
    ) -> Self {
        let cut = error.floor_char_boundary(Self::MAX_ERROR);
        Self {
            id: letter_id(consumer, message_id, &message),
            consumer: consumer.to_owned(),
            message_id: message_id.cloned(),
            message,
            reason,
            attempts: 0,
            error: error[..cut].to_owned(),
            first_at: now,
            last_at: now,
        }
    }

    /// Sets the number of attempts.
    #[must_use]
    pub const fn attempts(mut self, attempts: u32) -> Self {
        self.attempts = attempts;
        self
    }

    /// Sets the time of the first delivery.
    #[must_use]
    pub const fn first_at(mut self, time: Timestamp) -> Self {
        self.first_at = time;
        self
    }

    /// Header of a message that is redriven: the id of its letter, which is removed once the message
    /// is handled. Of the messages of an order key with dead letters, only one with this header is
    /// handled. It counts only for the consumer of the letter, and with the id and payload of its
    /// message: others that receive the copy find a duplicate of their own.
    pub const REDRIVE_HEADER: &str = "hapax-redrive";

    /// Returns the id in hexadecimal digits.
    #[must_use]
    pub fn id_hex(&self) -> String {
        self.id.iter().map(|byte| format!("{byte:02x}")).collect()
    }
}

fn letter_id(consumer: &str, message_id: Option<&MessageId>, message: &Message) -> [u8; 32] {
    let mut digest = Fingerprint::builder("hapax 1 dead letter");
    digest.field(consumer.as_bytes());
    match message_id {
        Some(id) => digest.field(id.as_str().as_bytes()),
        // Without an id the place distinguishes messages with equal payloads.
        None => digest.field(
            message.position.as_ref().map(ToString::to_string).unwrap_or_default().as_bytes(),
        ),
    };
    digest.field(&message.payload);
    *digest.finish().as_bytes()
}

/// Returns the id of a message, and the id of the letter from which it was redriven for `consumer`.
///
/// A redriven message keeps its id, which is its header `message-id`: by
/// [`IdRule::Position`](crate::IdRule::Position) each copy would be another message.
pub(crate) fn identify(
    consumer: &str,
    rules: &IdRules,
    message: &Message,
) -> Result<(MessageId, Option<[u8; 32]>), MessageIdError> {
    match redriven(consumer, message) {
        Some((id, letter)) => Ok((id, Some(letter))),
        None => Ok((rules.id(message)?, None)),
    }
}

/// Returns the id of a message and that of its letter, if the letter in its header is the one that
/// `consumer` stores of this message. All consumers of a subject receive the copy, and anyone can
/// write the header.
fn redriven(consumer: &str, message: &Message) -> Option<(MessageId, [u8; 32])> {
    let letter = letter_in_header(message)?;
    let id = std::str::from_utf8(message.header("message-id")?).ok()?;
    let id = MessageId::new(id).ok()?;
    (letter == letter_id(consumer, Some(&id), message)).then_some((id, letter))
}

fn letter_in_header(message: &Message) -> Option<[u8; 32]> {
    let hex = message.header(DeadLetter::REDRIVE_HEADER)?;
    let mut id = [0; 32];
    if hex.len() != 64 {
        return None;
    }
    for (byte, digits) in id.iter_mut().zip(hex.chunks(2)) {
        let digits = std::str::from_utf8(digits).ok()?;
        *byte = u8::from_str_radix(digits, 16).ok()?;
    }
    Some(id)
}

/// Error of storing a dead letter: its message is not acknowledged.
#[derive(Debug, thiserror::Error)]
#[error("the dead letter was not stored: {0}")]
pub struct DeadLetterError(#[source] Box<dyn std::error::Error + Send + Sync>);

impl DeadLetterError {
    /// Creates an error with its cause.
    pub fn new(cause: impl Into<Box<dyn std::error::Error + Send + Sync>>) -> Self {
        Self(cause.into())
    }
}

/// A store of dead letters.
pub trait DeadLetters: fmt::Debug + Send + Sync + 'static {
    /// Stores a letter durably. A letter with the same [`DeadLetter::id`] is stored once.
    ///
    /// # Errors
    /// [`DeadLetterError`]; it may have been stored.
    fn park<'a>(&'a self, letter: &'a DeadLetter) -> BoxFuture<'a, Result<(), DeadLetterError>>;

    /// Removes a letter whose message was redriven and handled. A letter that is not there counts as
    /// removed.
    ///
    /// # Errors
    /// [`DeadLetterError`]; it may have been removed.
    fn remove<'a>(&'a self, id: &'a [u8; 32]) -> BoxFuture<'a, Result<(), DeadLetterError>>;

    /// Returns whether this place can list order keys. An ordered inbox does not use another one.
    fn lists_order_keys(&self) -> bool;

    /// Returns the order keys of a consumer with a letter that is neither redriven nor dropped.
    ///
    /// # Errors
    /// [`DeadLetterError`]; always, from a place that cannot list them.
    fn blocked_keys<'a>(
        &'a self,
        consumer: &'a str,
    ) -> BoxFuture<'a, Result<HashSet<String>, DeadLetterError>>;
}

/// Dead letters that are published to a broker, each with its data as headers `dead-letter-…`, in
/// which control characters, white space at the ends, and `%` are percent-encoded.
///
/// A letter that the sink rejects, because it is larger than its message, is published without the
/// message's own headers and with the beginning of its error. If the sink rejects that too, the
/// message is held. An ordered inbox cannot use this place.
#[derive(Clone, Debug)]
pub struct PublishedDeadLetters {
    sink: Arc<dyn MessageSink>,
    destination: String,
}

impl PublishedDeadLetters {
    /// Publishes letters to `destination` of `sink`.
    #[must_use]
    pub fn new(sink: Arc<dyn MessageSink>, destination: impl Into<String>) -> Self {
        Self { sink, destination: destination.into() }
    }
}

impl PublishedDeadLetters {
    /// Bytes of an error that are left of one in a letter that was too large.
    const SHORT_ERROR: usize = 64;

    fn letter(&self, letter: &DeadLetter, is_short: bool) -> Result<OutgoingMessage, PublishError> {
        let id = MessageId::new(letter.id_hex()).map_err(PublishError::rejected)?;
        let payload = letter.message.payload.clone();
        let mut message = OutgoingMessage::new(&self.destination, id, payload);
        // A message that is parked again, after its letter was consumed, is another letter for the
        // broker's own deduplication.
        let at = letter.last_at.as_micros();
        message.broker_id = Some(format!("{} {at}", message.id));
        let mut error = &*letter.error;
        if is_short {
            error = &error[..error.floor_char_boundary(Self::SHORT_ERROR)];
        } else {
            message.headers.clone_from(&letter.message.headers);
            // The letter is a message of its own, and carries the id of the other one.
            message.headers.retain(|(name, _)| !name.eq_ignore_ascii_case("message-id"));
        }
        let micros = |time: Timestamp| time.as_micros().to_string();
        let message_id = letter.message_id.as_ref().map_or("", MessageId::as_str);
        for (name, value) in [
            ("consumer", single_line(&letter.consumer)),
            ("message-id", single_line(message_id)),
            ("origin", single_line(&letter.message.origin)),
            ("reason", letter.reason.as_str().to_owned()),
            ("attempts", letter.attempts.to_string()),
            ("error", single_line(error)),
            ("first-at-micros", micros(letter.first_at)),
            ("last-at-micros", micros(letter.last_at)),
        ] {
            message.headers.push((format!("dead-letter-{name}"), Bytes::from(value)));
        }
        Ok(message)
    }

    async fn publish(&self, letter: &DeadLetter) -> Result<(), PublishError> {
        match self.sink.publish(&self.letter(letter, false)?).await {
            Err(PublishError::Rejected(_)) => self.sink.publish(&self.letter(letter, true)?).await,
            published => published,
        }
    }
}

impl DeadLetters for PublishedDeadLetters {
    fn park<'a>(&'a self, letter: &'a DeadLetter) -> BoxFuture<'a, Result<(), DeadLetterError>> {
        Box::pin(async move {
            self.publish(letter).await.map_err(|error| match error {
                PublishError::Rejected(cause)
                | PublishError::NotAcknowledged { source: cause, .. } => DeadLetterError(cause),
            })
        })
    }

    fn remove<'a>(&'a self, _: &'a [u8; 32]) -> BoxFuture<'a, Result<(), DeadLetterError>> {
        Box::pin(async { Ok(()) })
    }

    fn lists_order_keys(&self) -> bool {
        false
    }

    fn blocked_keys<'a>(
        &'a self,
        _: &'a str,
    ) -> BoxFuture<'a, Result<HashSet<String>, DeadLetterError>> {
        Box::pin(async { Err(DeadLetterError::new("published dead letters have no list")) })
    }
}

/// Percent-encodes the control characters of a text, which is a header then, white space at its ends,
/// and `%`.
fn single_line(text: &str) -> String {
    let start = text.len() - text.trim_start().len();
    let inner = start..text.trim_end().len();
    let mut line = String::with_capacity(text.len());
    for (at, character) in text.char_indices() {
        if character.is_control() || character == '%' || !inner.contains(&at) {
            for byte in character.encode_utf8(&mut [0; 4]).bytes() {
                line.push_str(&format!("%{byte:02X}"));
            }
        } else {
            line.push(character);
        }
    }
    line
}
