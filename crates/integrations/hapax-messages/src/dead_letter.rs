//! Dead letters: messages that are not handled until an operator decides.

mod caught;

use std::fmt;
use std::sync::Arc;

use bytes::Bytes;
use hapax_core::store::BoxFuture;
use hapax_core::{Fingerprint, Timestamp};

pub(crate) use self::caught::CaughtPanics;
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
    Mismatch,
    /// The message is older than the retention of ids, so it may have been handled before.
    TooOld,
    /// The handler rejected the message.
    Rejected,
    /// The attempts are exhausted: each failed, or ended because its process ended.
    Attempts,
    /// The message may have been handled, and must not be handled again before an operator decides.
    Unknown,
    /// An earlier message with the same order key is a dead letter.
    Blocked,
    /// A number before it in its sequence is missing.
    Gap,
    /// The sink of a relay permanently rejected the message.
    Unpublishable,
    /// The source cannot read the message as its producer wrote it.
    Unreadable,
}

impl DeadLetterReason {
    /// Returns all reasons.
    pub const ALL: &[Self] = &[
        Self::NoId,
        Self::Mismatch,
        Self::TooOld,
        Self::Rejected,
        Self::Attempts,
        Self::Unknown,
        Self::Blocked,
        Self::Gap,
        Self::Unpublishable,
        Self::Unreadable,
    ];

    /// Returns the name in tables, metrics and commands.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::NoId => "no-id",
            Self::Mismatch => "mismatch",
            Self::TooOld => "too-old",
            Self::Rejected => "rejected",
            Self::Attempts => "attempts",
            Self::Unknown => "unknown",
            Self::Blocked => "blocked",
            Self::Gap => "gap",
            Self::Unpublishable => "unpublishable",
            Self::Unreadable => "unreadable",
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

/// Error of a message whose id belongs to another one.
pub(crate) const MISMATCH: &str = "expected the payload that was first handled under this id, found \
                                   another one: the producer must give each message its own id";

/// Error of a message without an attempt that ended.
pub(crate) const CRASHED: &str = "expected an attempt to end, found that its process ended each time: \
                                  the message may crash the handler";

/// Error of a message whose attempts failed in other processes.
pub(crate) const EXHAUSTED: &str = "expected an attempt to succeed, found that each failed: the errors are in \
                                    the logs of the processes that made them";

/// Error of a message that is older than the retention.
pub(crate) const TOO_OLD: &str = "expected a message younger than the retention of ids, found an older \
                                  one, which may have been handled: look for its effect, then redrive \
                                  or drop it";

/// Error of a message behind a dead letter.
pub(crate) const BLOCKED: &str = "an earlier message with the same order key is a dead letter: redrive or \
                                  drop that one first";

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
    /// Native form of the message, in an encoding of its source: what its broker's form has and `message` has not,
    /// such as a binary key. A sink of that broker restores it in the redriven message.
    pub native: Option<Bytes>,
    /// Reason.
    pub reason: DeadLetterReason,
    /// Number of executions that began, as far as the consumer that parked it knows.
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
            id: dead_letter_id(consumer, message_id, &message),
            consumer: consumer.to_owned(),
            message_id: message_id.cloned(),
            message,
            native: None,
            reason,
            attempts: 0,
            error: error[..cut].to_owned(),
            first_at: now,
            last_at: now,
        }
    }

    /// Returns the id that the dead letter of a message has.
    #[must_use]
    pub fn id_of(consumer: &str, message_id: Option<&MessageId>, message: &Message) -> [u8; 32] {
        dead_letter_id(consumer, message_id, message)
    }

    /// Returns the id under which the message of a dead letter without one is redriven. It is the same in each redrive, and
    /// its dead letter is the one with the id `dead_letter`. Only the consumer of the dead letter finds it.
    #[must_use]
    pub fn redriven_id(consumer: &str, dead_letter: &[u8; 32], payload: &[u8]) -> MessageId {
        let digest = redriven_digest(consumer, dead_letter, payload);
        MessageId::from_digits(&format!("{REDRIVEN_ID}{}{}", hex(dead_letter), hex(&digest)))
    }

    /// Sets the number of attempts.
    #[must_use]
    pub const fn attempts(mut self, attempts: u32) -> Self {
        self.attempts = attempts;
        self
    }

    /// Sets the native form of the message.
    #[must_use]
    pub fn native(mut self, native: Option<Bytes>) -> Self {
        self.native = native;
        self
    }

    /// Sets the time of the first delivery.
    #[must_use]
    pub const fn first_at(mut self, time: Timestamp) -> Self {
        self.first_at = time;
        self
    }

    /// Header of a redriven message: the id of its dead letter, which is removed once the message
    /// is handled. While an order key has dead letters, only the message of the oldest one is handled,
    /// and only with this header. A redrive counts only for the consumer of the dead letter, and with the
    /// id and payload of its message: for other consumers, which receive the message too, it is a
    /// duplicate.
    pub const REDRIVE_HEADER: &str = "hapax-redrive";

    /// Returns the id in hexadecimal digits.
    #[must_use]
    pub fn id_hex(&self) -> String {
        hex(&self.id)
    }
}

/// Returns hexadecimal digits.
fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// Prefix of the id of a message that was redriven under a new one.
const REDRIVEN_ID: &str = "hapax-redriven-";

fn redriven_digest(consumer: &str, dead_letter: &[u8; 32], payload: &[u8]) -> [u8; 32] {
    let mut digest = Fingerprint::builder("hapax 1 redriven id");
    digest.field(consumer.as_bytes()).field(dead_letter).field(payload);
    *digest.finish().as_bytes()
}

/// Returns the dead letter from which a message without an id was redriven under this one, for `consumer`.
fn dead_letter_of_new_id(consumer: &str, id: &MessageId, payload: &[u8]) -> Option<[u8; 32]> {
    let digits = id.as_str().strip_prefix(REDRIVEN_ID)?;
    let dead_letter = parse_hex(digits.as_bytes().get(..64)?)?;
    (*id == DeadLetter::redriven_id(consumer, &dead_letter, payload)).then_some(dead_letter)
}

pub(crate) fn dead_letter_id(
    consumer: &str,
    message_id: Option<&MessageId>,
    message: &Message,
) -> [u8; 32] {
    if let Some(id) = message_id
        && let Some(dead_letter) = dead_letter_of_new_id(consumer, id, &message.payload)
    {
        return dead_letter;
    }
    let mut digest = Fingerprint::builder("hapax 1 dead letter");
    digest.field(consumer.as_bytes());
    match message_id {
        Some(id) => digest.field(id.as_str().as_bytes()),
        // Without an id the position distinguishes messages with equal payloads.
        None => digest.field(
            message.position.as_ref().map(ToString::to_string).unwrap_or_default().as_bytes(),
        ),
    };
    digest.field(&message.payload);
    *digest.finish().as_bytes()
}

/// Returns the id of a message, and the id of the dead letter from which it was redriven for
/// `consumer`.
///
/// A redriven message keeps its id, which is its header `message-id`: by
/// [`IdRule::Position`](crate::IdRule::Position) each copy would be another message.
pub(crate) fn identify(
    consumer: &str,
    rules: &IdRules,
    message: &Message,
) -> Result<(MessageId, Option<[u8; 32]>), MessageIdError> {
    match redriven(consumer, message) {
        Some((id, dead_letter)) => Ok((id, Some(dead_letter))),
        None => Ok((rules.id(message)?, None)),
    }
}

/// Returns the id of a message and that of its dead letter, if the dead letter in its header is the
/// one that `consumer` stores of this message. All consumers of a subject receive the copy, and
/// anyone can write the header.
fn redriven(consumer: &str, message: &Message) -> Option<(MessageId, [u8; 32])> {
    let dead_letter = dead_letter_in_header(message)?;
    let id = std::str::from_utf8(message.header("message-id")?).ok()?;
    let id = MessageId::new(id).ok()?;
    (dead_letter == dead_letter_id(consumer, Some(&id), message)).then_some((id, dead_letter))
}

fn dead_letter_in_header(message: &Message) -> Option<[u8; 32]> {
    parse_hex(message.header(DeadLetter::REDRIVE_HEADER)?)
}

/// Parses 64 hexadecimal digits.
fn parse_hex(hex: &[u8]) -> Option<[u8; 32]> {
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

/// Error of a store of dead letters. After a failed `park` the message is not acknowledged.
#[derive(Debug, thiserror::Error)]
#[error("the store of dead letters failed: {0}")]
pub struct DeadLetterError(#[source] Box<dyn std::error::Error + Send + Sync>);

impl DeadLetterError {
    /// Creates an error with its cause.
    pub fn new(cause: impl Into<Box<dyn std::error::Error + Send + Sync>>) -> Self {
        Self(cause.into())
    }
}

/// Query of the dead letters that a message with an order key waits for.
#[derive(Clone, Copy, Debug)]
pub struct OrderKeyQuery<'a> {
    /// Consumer of the message.
    pub consumer: &'a str,
    /// Order key of the message.
    pub key: &'a str,
    /// Id that the dead letter of the message itself has, or would have.
    pub dead_letter: &'a [u8; 32],
    /// Whether the message was redriven from that dead letter.
    pub is_redriven: bool,
}

/// State of an order key for a message that has it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum OrderKeyState {
    /// The message is the next one of its key: no dead letter is in front of it.
    Free,
    /// A dead letter of another message is in front of it.
    Blocked,
    /// The message itself has a dead letter, for this reason, and was not redriven from it.
    Parked(DeadLetterReason),
}

/// A store of dead letters.
pub trait DeadLetterStore: fmt::Debug + Send + Sync + 'static {
    /// Stores a dead letter durably. A dead letter with the same [`DeadLetter::id`] is stored once: it
    /// keeps its place in the order, and gets the reason, attempts, error and last delivery of the new
    /// one.
    ///
    /// # Errors
    /// [`DeadLetterError`]; it may have been stored.
    fn park<'a>(
        &'a self,
        dead_letter: &'a DeadLetter,
    ) -> BoxFuture<'a, Result<(), DeadLetterError>>;

    /// Removes a dead letter whose message was redriven and handled. A dead letter that is not
    /// there counts as removed.
    ///
    /// # Errors
    /// [`DeadLetterError`]; it may have been removed.
    fn remove<'a>(&'a self, id: &'a [u8; 32]) -> BoxFuture<'a, Result<(), DeadLetterError>>;

    /// Returns whether this store finds dead letters by order key. An ordered inbox does not use
    /// another one.
    fn finds_order_keys(&self) -> bool;

    /// Returns the state of an order key for a message, at the time of the call. An answer from a cache
    /// breaks the order by key: another process may have parked a message meanwhile.
    ///
    /// A dead letter of the query's consumer and key blocks the message if it was first stored before the
    /// message's own dead letter, or if the message has none. The order is that of a counter, not of a clock.
    ///
    /// # Errors
    /// [`DeadLetterError`]; always, from a store that does not find them.
    fn order_key<'a>(
        &'a self,
        query: OrderKeyQuery<'a>,
    ) -> BoxFuture<'a, Result<OrderKeyState, DeadLetterError>>;
}

/// A store that publishes each dead letter to a broker, with its data as headers `dead-letter-…`,
/// in which control characters, white space at the ends, and `%` are percent-encoded. It removes
/// none, and does not find them by order key, so that an ordered inbox cannot use it.
///
/// A dead letter that the sink rejects, because it is larger than its message, is published without
/// the message's own headers and with the beginning of its error. If the sink rejects that too, the
/// message is held.
#[derive(Clone, Debug)]
pub struct PublishedDeadLetters {
    sink: Arc<dyn MessageSink>,
    destination: String,
}

impl PublishedDeadLetters {
    /// Creates a store that publishes to `destination` of `sink`.
    #[must_use]
    pub fn new(sink: Arc<dyn MessageSink>, destination: impl Into<String>) -> Self {
        Self { sink, destination: destination.into() }
    }
}

impl PublishedDeadLetters {
    /// Bytes of an error that are left of one in a dead letter that was too large.
    const SHORT_ERROR: usize = 64;

    fn dead_letter(
        &self,
        dead_letter: &DeadLetter,
        is_short: bool,
    ) -> Result<OutgoingMessage, PublishError> {
        let id = MessageId::new(dead_letter.id_hex()).map_err(PublishError::rejected)?;
        let payload = dead_letter.message.payload.clone();
        let mut message = OutgoingMessage::new(&self.destination, id, payload);
        // A message that is parked again, after its dead letter was consumed, is another dead
        // letter for the broker's own deduplication.
        let at = dead_letter.last_at.as_micros();
        message.broker_id = Some(format!("{} {at}", message.id));
        let mut error = &*dead_letter.error;
        if is_short {
            error = &error[..error.floor_char_boundary(Self::SHORT_ERROR)];
        } else {
            message.headers.clone_from(&dead_letter.message.headers);
            // The dead letter is a message of its own, and carries the id of the other one.
            message.headers.retain(|(name, _)| !name.eq_ignore_ascii_case("message-id"));
        }
        let micros = |time: Timestamp| time.as_micros().to_string();
        let message_id = dead_letter.message_id.as_ref().map_or("", MessageId::as_str);
        for (name, value) in [
            ("consumer", single_line(&dead_letter.consumer)),
            ("message-id", single_line(message_id)),
            ("origin", single_line(&dead_letter.message.origin)),
            ("reason", dead_letter.reason.as_str().to_owned()),
            ("attempts", dead_letter.attempts.to_string()),
            ("error", single_line(error)),
            ("first-at-micros", micros(dead_letter.first_at)),
            ("last-at-micros", micros(dead_letter.last_at)),
        ] {
            message.headers.push((format!("dead-letter-{name}"), Bytes::from(value)));
        }
        Ok(message)
    }

    async fn publish(&self, dead_letter: &DeadLetter) -> Result<(), PublishError> {
        match self.sink.publish(&self.dead_letter(dead_letter, false)?).await {
            Err(PublishError::Rejected(_)) => {
                self.sink.publish(&self.dead_letter(dead_letter, true)?).await
            }
            published => published,
        }
    }
}

impl DeadLetterStore for PublishedDeadLetters {
    fn park<'a>(
        &'a self,
        dead_letter: &'a DeadLetter,
    ) -> BoxFuture<'a, Result<(), DeadLetterError>> {
        Box::pin(async move {
            self.publish(dead_letter).await.map_err(|error| match error {
                PublishError::Rejected(cause)
                | PublishError::NotAcknowledged { source: cause, .. } => DeadLetterError(cause),
            })
        })
    }

    fn remove<'a>(&'a self, _: &'a [u8; 32]) -> BoxFuture<'a, Result<(), DeadLetterError>> {
        Box::pin(async { Ok(()) })
    }

    fn finds_order_keys(&self) -> bool {
        false
    }

    fn order_key<'a>(
        &'a self,
        _: OrderKeyQuery<'a>,
    ) -> BoxFuture<'a, Result<OrderKeyState, DeadLetterError>> {
        Box::pin(async {
            Err(DeadLetterError::new(
                "expected dead letters in a database, found published ones, which cannot be found",
            ))
        })
    }
}

/// Percent-encodes the control characters of a text, which is a header then, white space at its
/// ends, and `%`.
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
