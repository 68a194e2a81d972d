//! The interface to a broker or service to which messages are published.

use std::fmt;
use std::time::Duration;

use bytes::Bytes;
use hapax_core::store::BoxFuture;

use crate::id::MessageId;

/// Error of a sink.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum PublishError {
    /// The sink will never accept this message: it is too large, or has a header or a destination of
    /// an invalid form. A destination that may be created later is
    /// [`PublishError::NotAcknowledged`].
    #[error("the sink permanently rejects the message: {0}")]
    Rejected(#[source] Box<dyn std::error::Error + Send + Sync>),
    /// The sink did not acknowledge the message, which may have been published: publish it again,
    /// under the same id.
    #[error("the sink did not acknowledge the message: {source}")]
    NotAcknowledged {
        /// The cause.
        #[source]
        source: Box<dyn std::error::Error + Send + Sync>,
        /// Least time before the next attempt, if the sink sets one.
        retry_after: Option<Duration>,
    },
}

impl PublishError {
    /// Creates [`PublishError::Rejected`] with its cause.
    pub fn rejected(cause: impl Into<Box<dyn std::error::Error + Send + Sync>>) -> Self {
        Self::Rejected(cause.into())
    }

    /// Creates [`PublishError::NotAcknowledged`] with its cause.
    pub fn not_acknowledged(cause: impl Into<Box<dyn std::error::Error + Send + Sync>>) -> Self {
        Self::NotAcknowledged { source: cause.into(), retry_after: None }
    }
}

/// A message to publish. Its `Debug` form shows no contents.
#[derive(Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct OutgoingMessage {
    /// Subject, topic, queue or path.
    pub destination: String,
    /// Id, the same each time that it is published. The sink sends it as the header `message-id`.
    pub id: MessageId,
    /// Order key.
    pub key: Option<String>,
    /// Further headers.
    pub headers: Vec<(String, Bytes)>,
    /// Payload.
    pub payload: Bytes,
    /// Id for the broker's own deduplication, if it is not [`OutgoingMessage::id`]: a redriven
    /// message has another one, so that the broker does not drop it.
    pub broker_id: Option<String>,
    /// [Native form](field@crate::DeadLetter::native) of a redriven message, which a sink of the broker that it came from
    /// restores. A sink ignores one of another broker.
    pub native: Option<Bytes>,
}

impl OutgoingMessage {
    /// Creates a message without key and headers.
    #[must_use]
    pub fn new(destination: impl Into<String>, id: MessageId, payload: impl Into<Bytes>) -> Self {
        Self {
            destination: destination.into(),
            id,
            key: None,
            headers: Vec::new(),
            payload: payload.into(),
            broker_id: None,
            native: None,
        }
    }
}

impl fmt::Debug for OutgoingMessage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("OutgoingMessage")
            .field("destination", &self.destination)
            .field("id", &self.id)
            .field("payload_bytes", &self.payload.len())
            .finish_non_exhaustive()
    }
}

/// A broker or service that accepts messages.
pub trait MessageSink: fmt::Debug + Send + Sync + 'static {
    /// Publishes a message, and returns once the sink has confirmed it: a relay deletes it then, so that
    /// it is as durable as the sink makes it. Dropping the future leaves a message that may have been
    /// published.
    ///
    /// # Errors
    /// [`PublishError`].
    fn publish<'a>(
        &'a self,
        message: &'a OutgoingMessage,
    ) -> BoxFuture<'a, Result<(), PublishError>>;

    /// Returns whether messages that are published concurrently in an order arrive in that order,
    /// even if one of them has to be published again.
    fn keeps_order(&self) -> bool {
        false
    }
}
