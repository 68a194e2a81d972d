//! The ids of messages: which part of a message names it.

use std::fmt;
use std::sync::Arc;

use hapax_core::{Fingerprint, JsonPointers, Key, NaturalKey};
use serde_json::Value;

use crate::message::Message;

/// The id of a message: the same in each delivery, and in each publication by its producer. From 1
/// byte to 1 KiB of UTF-8 without zero bytes, which a database would not store. Cheap to clone.
#[derive(Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct MessageId(Arc<str>);

impl MessageId {
    /// The longest id, in bytes.
    pub const MAX_LEN: usize = 1024;

    /// Parses an id.
    ///
    /// # Errors
    /// [`MessageIdError::Empty`], [`MessageIdError::TooLong`], [`MessageIdError::ZeroByte`].
    pub fn new(text: impl AsRef<str>) -> Result<Self, MessageIdError> {
        let text = text.as_ref();
        if text.is_empty() {
            return Err(MessageIdError::Empty);
        }
        if text.len() > Self::MAX_LEN {
            return Err(MessageIdError::TooLong { length: text.len() });
        }
        if text.contains('\0') {
            return Err(MessageIdError::ZeroByte);
        }
        Ok(Self(text.into()))
    }

    /// Creates an id of a prefix and hexadecimal digits, which is valid.
    pub(crate) fn from_digits(text: &str) -> Self {
        Self(text.into())
    }

    /// Returns the id as text.
    #[must_use]
    pub fn as_str(&self) -> &str {
        &self.0
    }

    /// Returns the idempotency key of the message: the id itself if it is a valid [`Key`], else a
    /// hash of it. An id that looks like such a hash is hashed too, so that no two ids share a key.
    #[must_use]
    pub fn to_key(&self) -> Key {
        let is_hash = self.0.len() == 64 && self.0.bytes().all(|byte| byte.is_ascii_hexdigit());
        match Key::new(self.as_str()) {
            Ok(key) if !is_hash => key,
            _ => NaturalKey::new("message").part("id", self.as_str()).key(),
        }
    }
}

impl fmt::Debug for MessageId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "MessageId({} bytes)", self.0.len())
    }
}

impl fmt::Display for MessageId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// Reasons for which a message has no id. It becomes a dead letter: messages without an id must not
/// share one.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum MessageIdError {
    /// No rule found an id.
    #[error("expected an id by {rules}, found none")]
    Missing {
        /// The rules, in their order.
        rules: String,
    },
    /// The id is empty.
    #[error("expected an id of 1 to 1024 bytes, found an empty one")]
    Empty,
    /// The id is longer than [`MessageId::MAX_LEN`].
    #[error("expected an id of 1 to 1024 bytes, found {length}")]
    TooLong {
        /// Length of the id, in bytes.
        length: usize,
    },
    /// The id has a zero byte.
    #[error("expected an id without zero bytes, found one")]
    ZeroByte,
    /// The id is not UTF-8.
    #[error("expected an id in UTF-8, found other bytes")]
    NotUtf8,
    /// A CloudEvent has no source, within which its id is unique.
    #[error(
        "expected a CloudEvent with a source, found only an id: two producers may use the same"
    )]
    NoSource,
}

/// Rule that finds the id of a message.
#[derive(Clone, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub enum IdRule {
    /// The value of a header, such as `message-id`. Do not use the header of a broker's own
    /// deduplication (`Nats-Msg-Id`): a message that is sent again on purpose needs another one.
    Header(String),
    /// `source` and `id` of a CloudEvent, both required: headers `ce-id` and `ce-source` (also
    /// `ce_…` and `cloudEvents:…`), or members of a payload of the type
    /// `application/cloudevents+json`.
    CloudEvents,
    /// Members of a JSON payload: strings or integers, all of which must be present.
    JsonPointers(JsonPointers),
    /// The position in the broker's log. A producer that publishes a message twice gives it two ids.
    Position,
    /// A digest of the payload. Two messages with equal payloads have one id.
    PayloadHash,
}

impl IdRule {
    /// Returns the id by this rule; `None` if the rule does not apply to the message.
    fn apply(&self, message: &Message) -> Result<Option<MessageId>, MessageIdError> {
        let text = match self {
            Self::Header(name) => match message.header(name) {
                None => return Ok(None),
                Some(value) => text(value)?.to_owned(),
            },
            Self::CloudEvents => match cloud_event(message)? {
                None => return Ok(None),
                Some(text) => text,
            },
            Self::JsonPointers(pointers) => match members(message, pointers) {
                None => return Ok(None),
                Some(text) => text,
            },
            Self::Position => match &message.position {
                None => return Ok(None),
                Some(position) => position.to_string(),
            },
            Self::PayloadHash => {
                let digest =
                    Fingerprint::builder("hapax 1 message id").field(&message.payload).finish();
                digest.as_bytes().iter().map(|byte| format!("{byte:02x}")).collect()
            }
        };
        MessageId::new(text).map(Some)
    }
}

impl fmt::Display for IdRule {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Header(name) => write!(f, "the header {name}"),
            Self::CloudEvents => f.write_str("the CloudEvents attributes"),
            Self::JsonPointers(pointers) => {
                let pointers: Vec<_> = pointers.iter().collect();
                write!(f, "the JSON members {}", pointers.join(", "))
            }
            Self::Position => f.write_str("the position"),
            Self::PayloadHash => f.write_str("the hash of the payload"),
        }
    }
}

/// Rules in their order: the first one that applies to a message gives its id.
///
/// ```
/// use hapax_messages::{IdRules, Message};
/// let message = Message::new("orders", "{}").with_header("message-id", "order-17");
/// assert_eq!(IdRules::default().id(&message)?.as_str(), "order-17");
/// # Ok::<(), hapax_messages::MessageIdError>(())
/// ```
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct IdRules(Vec<IdRule>);

impl IdRules {
    /// Creates a list of rules.
    #[must_use]
    pub fn new(rules: impl IntoIterator<Item = IdRule>) -> Self {
        Self(rules.into_iter().collect())
    }

    /// Returns the id of a message.
    ///
    /// # Errors
    /// [`MessageIdError`]; a rule that applies and finds no valid id ends the search.
    pub fn id(&self, message: &Message) -> Result<MessageId, MessageIdError> {
        for rule in &self.0 {
            if let Some(id) = rule.apply(message)? {
                return Ok(id);
            }
        }
        let rules: Vec<String> = self.0.iter().map(ToString::to_string).collect();
        Err(MessageIdError::Missing { rules: rules.join(", ") })
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }
}

impl Default for IdRules {
    /// The header `message-id`, then the CloudEvents attributes.
    fn default() -> Self {
        Self::new([IdRule::Header("message-id".to_owned()), IdRule::CloudEvents])
    }
}

fn text(value: &[u8]) -> Result<&str, MessageIdError> {
    std::str::from_utf8(value).map_err(|_| MessageIdError::NotUtf8)
}

/// Returns `source` and `id` of a CloudEvent as one text: a JSON array, so that no two pairs give
/// the same.
fn cloud_event(message: &Message) -> Result<Option<String>, MessageIdError> {
    for prefix in ["ce-", "ce_", "cloudEvents:", "cloudEvents_"] {
        if let Some(id) = message.header(&format!("{prefix}id")) {
            let source = message.header(&format!("{prefix}source"));
            let source = source.map(|value| text(value)).transpose()?;
            return pair(source, text(id)?).map(Some);
        }
    }
    let is_event = message.header("content-type").is_some_and(|value| {
        value.to_ascii_lowercase().starts_with(b"application/cloudevents+json")
    });
    if !is_event {
        return Ok(None);
    }
    let Ok(Value::Object(event)) = serde_json::from_slice(&message.payload) else {
        return Ok(None);
    };
    let member = |name: &str| event.get(name).and_then(Value::as_str);
    member("id").map(|id| pair(member("source"), id)).transpose()
}

fn pair(source: Option<&str>, id: &str) -> Result<String, MessageIdError> {
    if id.is_empty() {
        return Err(MessageIdError::Empty);
    }
    let source = source.filter(|source| !source.is_empty()).ok_or(MessageIdError::NoSource)?;
    Ok(Value::from(vec![source, id]).to_string())
}

/// Returns the members as one text: a single one as it is, several as a JSON array.
fn members(message: &Message, pointers: &JsonPointers) -> Option<String> {
    let payload: Value = serde_json::from_slice(&message.payload).ok()?;
    let mut found = Vec::with_capacity(pointers.iter().len());
    for pointer in pointers.iter() {
        match payload.pointer(pointer)? {
            Value::String(text) => found.push(text.clone()),
            Value::Number(number) if !number.is_f64() => found.push(number.to_string()),
            _ => return None,
        }
    }
    match found.as_slice() {
        [] => None,
        [one] => Some(one.clone()),
        several => Some(Value::from(several.to_vec()).to_string()),
    }
}
