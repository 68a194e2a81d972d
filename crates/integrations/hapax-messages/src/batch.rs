//! The batch mode: batches of messages in transactions of the database that has their effects.
//!
//! 1. The ids of a batch are inserted, the handler writes, and one COMMIT makes both durable. The
//!    unique index of ids decides which messages are duplicates: there is no claim.
//! 2. A batch that fails is rolled back and halved, until the message that fails is alone. Only then
//!    an attempt is counted, in a transaction of its own.
//! 3. A message that was delivered before, a *suspect*, may have ended its process. It is handled
//!    while no other one is, and its attempt is counted before. An attempt in which the database was
//!    unavailable, or another transaction prevailed, is not counted again by the same process.
//! 4. If the reply to COMMIT is lost, nothing is acknowledged, and the batch is applied again:
//!    then the index decides.

mod consumer;
mod options;

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

pub use self::consumer::{BatchConsumer, BatchMonitor};
pub use self::options::{BatchConsumerError, BatchConsumerLimits, BatchOptions};
use crate::consumer::Slot;
use crate::dead_letter::DeadLetter;
use crate::handler::MessageFailure;
use crate::id::MessageId;
use crate::message::Message;
use crate::source::Delivery;
use hapax_core::store::BoxFuture;

/// A message of a batch. Cheap to clone.
#[derive(Clone)]
pub struct BatchItem {
    pub(crate) id: MessageId,
    pub(crate) delivery: Arc<dyn Delivery>,
    letter: Option<[u8; 32]>,
    /// Its place among those in hand, which is free once no copy of the item is left.
    _slot: Option<Arc<Slot>>,
}

impl BatchItem {
    /// Creates the item of a delivery.
    #[must_use]
    pub fn new(id: MessageId, delivery: Arc<dyn Delivery>) -> Self {
        Self { id, delivery, letter: None, _slot: None }
    }

    pub(crate) fn with_letter(mut self, letter: Option<[u8; 32]>) -> Self {
        self.letter = letter;
        self
    }

    pub(crate) fn with_slot(mut self, slot: Slot) -> Self {
        self._slot = Some(Arc::new(slot));
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

    /// Returns the id of the letter from which the message was redriven.
    #[must_use]
    pub const fn letter(&self) -> Option<&[u8; 32]> {
        self.letter.as_ref()
    }
}

impl fmt::Debug for BatchItem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("BatchItem").field("id", &self.id).finish_non_exhaustive()
    }
}

/// State of a message when its transaction was committed.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum EntryState {
    /// Handled or parked in this transaction.
    New,
    /// Handled or parked before.
    Duplicate,
    /// Another payload was handled under its id.
    Conflict,
}

/// Errors of a batch. Nothing of it was committed, except after [`BatchError::Unavailable`].
#[derive(Debug)]
#[non_exhaustive]
pub enum BatchError {
    /// The handler failed, about the whole batch.
    Handler(MessageFailure),
    /// A transaction that is still open has inserted one of the ids.
    InProgress,
    /// The database aborted the transaction (serialization failure or deadlock): run it again.
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

    /// Enters a batch, has the handler handle the new messages, removes their
    /// [letters](BatchItem::letter), and commits. `is_counted` is true for a single message whose
    /// attempts were counted. Returns a state for each message.
    ///
    /// The letter of a duplicate stays: it may be the letter by which the message was parked.
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
    /// the message was handled or parked.
    ///
    /// # Errors
    /// [`BatchError`]; with [`BatchError::InProgress`] nothing was counted.
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

    /// Stores a dead letter and, if `enters`, enters its message as parked, in one transaction. If its
    /// message is not new, nothing is stored: another process has handled or parked it. Returns the
    /// state of the message; new without `enters`.
    ///
    /// # Errors
    /// [`BatchError`].
    fn park<'a>(
        &'a self,
        letter: &'a DeadLetter,
        enters: bool,
    ) -> BoxFuture<'a, Result<EntryState, BatchError>>;
}
