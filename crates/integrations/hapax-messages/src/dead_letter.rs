//! Dead letters: messages that are not handled until an operator decides.

use std::collections::HashSet;
use std::fmt;
use std::sync::Arc;

use bytes::Bytes;
use hapax_core::store::BoxFuture;
use hapax_core::{Fingerprint, Timestamp};

use crate::id::MessageId;
use crate::message::Message;
use crate::sink::{MessageSink, OutgoingMessage, PublishError};

/// Reason for which a message is a dead letter.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
#[non_exhaustive]
pub enum DeadLetterReason {
    /// The message has no valid id.
    NoId,
    /// Its id belongs to a message with another payload.
    Conflict,
    /// The message is older than the retention of ids, so it may have been handled before.
    TooOld,
    /// The handler rejected it for good.
    Rejected,
    /// Its attempts are used up: each failed, or ended with its process.
    Attempts,
    /// The message may have been handled, and must not be handled again before an operator decides.
    Unknown,
    /// An earlier message with the same order key is a dead letter.
    Behind,
    /// A number before it in its sequence is missing.
    Gap,
    /// The sink of a relay rejected it for good.
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

    /// Returns the name, as tables, metrics and commands have it.
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

/// A dead letter.
#[derive(Clone, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub struct DeadLetter {
    /// Digest of consumer, message id and payload: the letter of one message is stored once.
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

    /// Creates the letter of a message that was delivered at the time `now`.
    #[must_use]
    pub fn new(
        consumer: &str,
        message_id: Option<&MessageId>,
        message: Message,
        reason: DeadLetterReason,
        error: &str,
        now: Timestamp,
    ) -> Self {
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
        let cut = error.floor_char_boundary(Self::MAX_ERROR);
        Self {
            id: *digest.finish().as_bytes(),
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
    /// handled.
    pub const REDRIVE_HEADER: &str = "hapax-redrive";

    /// Returns the id in hexadecimal digits.
    #[must_use]
    pub fn id_hex(&self) -> String {
        self.id.iter().map(|byte| format!("{byte:02x}")).collect()
    }
}

/// Returns the id of the letter that a redriven message has in its header.
pub(crate) fn redriven(message: &Message) -> Option<[u8; 32]> {
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

/// A place for dead letters.
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

    /// Returns the order keys of a consumer with a letter that is neither redriven nor dropped;
    /// `None` if this place cannot list them, so that an ordered consumer cannot use it.
    ///
    /// # Errors
    /// [`DeadLetterError`].
    fn blocked_keys<'a>(
        &'a self,
        consumer: &'a str,
    ) -> BoxFuture<'a, Result<Option<HashSet<String>>, DeadLetterError>>;
}

/// Dead letters that are published to a broker, each with its data as headers `dead-letter-…`: single
/// lines, as brokers carry them.
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

impl DeadLetters for PublishedDeadLetters {
    fn park<'a>(&'a self, letter: &'a DeadLetter) -> BoxFuture<'a, Result<(), DeadLetterError>> {
        Box::pin(async move {
            let id = MessageId::new(letter.id_hex()).map_err(DeadLetterError::new)?;
            let payload = letter.message.payload.clone();
            let mut message = OutgoingMessage::new(&self.destination, id, payload);
            message.headers.clone_from(&letter.message.headers);
            // The letter is a message of its own, and carries the id of the other one.
            message.headers.retain(|(name, _)| !name.eq_ignore_ascii_case("message-id"));
            let micros = |time: Timestamp| time.as_micros().to_string();
            for (name, value) in [
                ("consumer", letter.consumer.clone()),
                (
                    "message-id",
                    letter.message_id.as_ref().map_or_else(String::new, ToString::to_string),
                ),
                ("origin", letter.message.origin.clone()),
                ("reason", letter.reason.as_str().to_owned()),
                ("attempts", letter.attempts.to_string()),
                ("error", letter.error.clone()),
                ("first-at-micros", micros(letter.first_at)),
                ("last-at-micros", micros(letter.last_at)),
            ] {
                let value = Bytes::from(single_line(&value));
                message.headers.push((format!("dead-letter-{name}"), value));
            }
            self.sink.publish(&message).await.map_err(|error| match error {
                PublishError::Rejected(cause)
                | PublishError::NotAcknowledged { source: cause, .. } => DeadLetterError(cause),
            })
        })
    }

    fn remove<'a>(&'a self, _: &'a [u8; 32]) -> BoxFuture<'a, Result<(), DeadLetterError>> {
        Box::pin(async { Ok(()) })
    }

    fn blocked_keys<'a>(
        &'a self,
        _: &'a str,
    ) -> BoxFuture<'a, Result<Option<HashSet<String>>, DeadLetterError>> {
        Box::pin(async { Ok(None) })
    }
}

fn single_line(text: &str) -> String {
    text.replace(|character: char| character.is_control(), " ").trim().to_owned()
}
