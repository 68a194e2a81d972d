//! The direct mode: batches of messages in transactions of the database that has their effects.
//!
//! 1. The ids of a batch are entered, the handler writes, and one COMMIT makes both durable. The
//!    unique index of ids decides which messages are duplicates: there is no claim.
//! 2. A batch that fails is rolled back and halved, until the message that fails is alone. Only then
//!    an attempt is counted, in a transaction of its own.
//! 3. A message that was delivered before, a *suspect*, may have ended its process. It is handled
//!    while no other one is, and its attempt is counted before.
//! 4. If the reply to COMMIT is lost, nothing is acknowledged, and the messages are entered again:
//!    then the index decides.

mod consumer;
mod options;

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use hapax_core::store::BoxFuture;
use tokio::sync::OwnedSemaphorePermit;

pub use self::consumer::{BatchConsumer, BatchMonitor};
pub use self::options::{BatchConsumerError, BatchConsumerLimits, BatchOptions};
use crate::dead_letter::DeadLetter;
use crate::handler::MessageFailure;
use crate::id::MessageId;
use crate::message::Message;
use crate::source::Delivery;

/// A message of a batch. Cheap to clone.
#[derive(Clone)]
pub struct BatchItem {
    pub(crate) id: MessageId,
    pub(crate) delivery: Arc<dyn Delivery>,
    /// Its place among those in hand, which is free once no copy of the item is left.
    _slot: Option<Arc<OwnedSemaphorePermit>>,
}

impl BatchItem {
    /// Creates the item of a delivery.
    #[must_use]
    pub fn new(id: MessageId, delivery: Arc<dyn Delivery>) -> Self {
        Self { id, delivery, _slot: None }
    }

    pub(crate) fn with_slot(mut self, slot: Option<OwnedSemaphorePermit>) -> Self {
        self._slot = slot.map(Arc::new);
        self
    }

    /// Returns the id of the message.
    #[must_use]
    pub const fn id(&self) -> &MessageId {
        &self.id
    }

    /// Returns the message.
    #[must_use]
    pub fn message(&self) -> &Message {
        self.delivery.message()
    }
}

impl fmt::Debug for BatchItem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("BatchItem").field("id", &self.id).finish_non_exhaustive()
    }
}

/// State of a message when its batch was committed.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum EntryState {
    /// Handled in this transaction.
    New,
    /// Handled before.
    Duplicate,
    /// Its id belongs to a message with another payload.
    Conflict,
}

/// Errors of a batch. Nothing of it was committed, except after [`BatchError::Unavailable`].
#[derive(Debug)]
#[non_exhaustive]
pub enum BatchError {
    /// The handler failed, about the whole batch.
    Handler(MessageFailure),
    /// A transaction that is still open has entered one of the ids.
    InProgress,
    /// The transaction lost against another: run it again.
    Conflict(Box<dyn std::error::Error + Send + Sync>),
    /// The database is unavailable, or did not reply. The batch may have been committed, or may be
    /// yet.
    Unavailable(Box<dyn std::error::Error + Send + Sync>),
}

/// A database that has the ids of messages beside the rows of their handler.
pub trait BatchInbox: fmt::Debug + Send + Sync + 'static {
    /// Returns the name of the consumer.
    fn consumer(&self) -> &str;

    /// Returns the time for which the id of a handled message is known.
    fn retention(&self) -> Duration;

    /// Returns the bytes that an id takes in the database, for the log.
    fn bytes_per_id(&self) -> u64;

    /// Enters a batch, has the handler handle the new messages, and commits. `is_counted` is true for
    /// a single message whose attempts were counted. Returns a state for each message.
    ///
    /// Once called it runs to its end, also if the future is dropped.
    ///
    /// # Errors
    /// [`BatchError`].
    fn apply(
        &self,
        batch: Vec<BatchItem>,
        is_counted: bool,
    ) -> BoxFuture<'_, Result<Vec<EntryState>, BatchError>>;

    /// Counts an attempt of a message that was delivered before. Returns its number, from 2, or 0 if
    /// the message was handled.
    ///
    /// # Errors
    /// [`BatchError`].
    fn attempt<'a>(&'a self, id: &'a MessageId) -> BoxFuture<'a, Result<u32, BatchError>>;

    /// Notes the error of an attempt. Returns the number of attempts.
    ///
    /// # Errors
    /// [`BatchError`].
    fn note_failure<'a>(
        &'a self,
        id: &'a MessageId,
        error: &'a str,
    ) -> BoxFuture<'a, Result<u32, BatchError>>;

    /// Stores a dead letter and, if `enters`, enters its message as handled, in one transaction.
    ///
    /// # Errors
    /// [`BatchError`].
    fn park<'a>(
        &'a self,
        letter: &'a DeadLetter,
        enters: bool,
    ) -> BoxFuture<'a, Result<(), BatchError>>;

    /// Removes the letter of a message that was redriven and handled.
    ///
    /// # Errors
    /// [`BatchError`].
    fn remove_letter<'a>(&'a self, id: &'a [u8; 32]) -> BoxFuture<'a, Result<(), BatchError>>;
}
