//! The batch mode: batches of messages in transactions of the database that has their effects.
//!
//! 1. The ids of a batch are inserted, the handler writes, and one COMMIT makes both durable. The
//!    unique index of ids decides which messages are duplicates: there is no claim.
//! 2. A batch that fails is rolled back and halved, until the message that fails is alone. Only
//!    then an attempt is counted, in a transaction of its own.
//! 3. A message that was delivered before, a *suspect*, may have ended its process. It is handled
//!    while no other one is, and its attempt is counted before. An attempt in which the database
//!    was unavailable, or which it aborted, is not counted again by the same process. A failure is
//!    noted before the next attempt, so that the attempts since the last noted one are crashes.
//! 4. If the reply to COMMIT is lost, nothing is acknowledged, and the batch is applied again:
//!    then the index decides.
//! 5. The consumer removes ids whose retention has ended, a bounded number at a time.

mod consumer;
mod options;
mod slots;

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
use crate::partition::PositionStep;
use crate::source::Delivery;
use hapax_core::store::BoxFuture;

/// A message of a batch. Cheap to clone.
#[derive(Clone)]
pub struct BatchItem {
    pub(crate) id: MessageId,
    pub(crate) delivery: Arc<dyn Delivery>,
    dead_letter: Option<[u8; 32]>,
    /// Permit of the limit of unacknowledged messages, released when the last clone is dropped.
    _slot: Option<Arc<Slot>>,
}

impl BatchItem {
    /// Creates the item of a delivery.
    #[must_use]
    pub fn new(id: MessageId, delivery: Arc<dyn Delivery>) -> Self {
        Self { id, delivery, dead_letter: None, _slot: None }
    }

    pub(crate) fn redriven_from(mut self, dead_letter: Option<[u8; 32]>) -> Self {
        self.dead_letter = dead_letter;
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

    /// Returns the step of the partition's position over the message, in positions mode.
    #[must_use]
    pub fn step(&self) -> Option<&PositionStep> {
        self.delivery.step()
    }

    /// Returns the id of the dead letter from which the message was redriven.
    #[must_use]
    pub const fn dead_letter(&self) -> Option<&[u8; 32]> {
        self.dead_letter.as_ref()
    }
}

impl fmt::Debug for BatchItem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("BatchItem").field("id", &self.id).finish_non_exhaustive()
    }
}

/// State of a message of a batch, by the ids, the position and the dead letters.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum EntryState {
    /// The transaction of the batch is the first that handles or parks it.
    New,
    /// Handled or parked before; or the dead letter from which it was redriven does not exist any more; or
    /// an earlier message of the batch has its id, or was redriven from the same dead letter.
    Duplicate,
    /// Another payload was handled or parked under its id.
    Mismatch,
    /// An earlier message with its order key is a dead letter.
    Blocked,
}

/// Errors of a batch. Nothing of the batch was committed; only after [`BatchError::Unavailable`] it
/// may have been.
#[derive(Debug)]
#[non_exhaustive]
pub enum BatchError {
    /// The handler failed. The failure concerns every message of the batch.
    Handler(MessageFailure),
    /// A transaction that is still open has inserted one of the ids, or advances the position; or the dead
    /// letter from which a message was redriven was removed meanwhile, or is locked by another transaction.
    InProgress,
    /// Some messages have to be parked, each in a transaction of its own with the step over it: those
    /// whose state is [`EntryState::Mismatch`] or [`EntryState::Blocked`]. The handler was not called.
    /// Only in positions mode.
    MustPark(Vec<EntryState>),
    /// The position is another one, or has another owner: the messages are dropped. Only in positions
    /// mode.
    Fenced,
    /// The database aborted the transaction (serialization failure or deadlock): run it again.
    Aborted(Box<dyn std::error::Error + Send + Sync>),
    /// The database is unavailable, or did not reply. The batch may have been committed, or may be
    /// yet.
    Unavailable(Box<dyn std::error::Error + Send + Sync>),
}

/// An attempt of a message that was counted.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct BatchAttempt {
    /// Number of the attempt, from 2; 0 if the message was handled or parked.
    pub number: u32,
    /// Number of consecutive attempts before this one, the first included, whose failure was not
    /// [noted](BatchInbox::note_failure): the process may have ended in each of them.
    pub crashes: u32,
}

/// A database that has the ids of messages beside the rows of their handler.
pub trait BatchInbox: fmt::Debug + Send + Sync + 'static {
    /// Returns the name of the consumer.
    fn consumer(&self) -> &str;

    /// Returns the time for which the id of a handled message is known.
    fn retention(&self) -> Duration;

    /// Returns the bytes that an id takes in the database, for the log; 0 without ids.
    fn bytes_per_id(&self) -> u64;

    /// Returns whether the inbox works in positions mode: the position of the partition advances in each
    /// transaction by the [steps](Delivery::step) of its messages, which are those of one partition, in
    /// order.
    fn advances_positions(&self) -> bool;

    /// Inserts the ids of a batch, calls the handler with the new messages, removes their
    /// [dead letters](BatchItem::dead_letter), and commits. `clear_attempts` is true for one
    /// message whose attempts were counted: they are deleted. Returns a state for each message.
    ///
    /// The dead letter of a duplicate is removed if the message was handled. Otherwise it stays: it may
    /// be the one by which the message was parked. Without ids, dead letters are removed before the handler
    /// is called, and those of duplicates stay.
    ///
    /// Once polled, the call runs to its end, even if the future is dropped.
    ///
    /// # Errors
    /// [`BatchError`].
    fn apply(
        &self,
        batch: Vec<BatchItem>,
        clear_attempts: bool,
    ) -> BoxFuture<'_, Result<Vec<EntryState>, BatchError>>;

    /// Counts an attempt of a message that was delivered before.
    ///
    /// # Errors
    /// [`BatchError`]; with [`BatchError::InProgress`] nothing was counted.
    fn count_attempt<'a>(
        &'a self,
        id: &'a MessageId,
    ) -> BoxFuture<'a, Result<BatchAttempt, BatchError>>;

    /// Notes that the last attempt has failed, with its error. Returns the number of attempts.
    ///
    /// # Errors
    /// [`BatchError`].
    fn note_failure<'a>(
        &'a self,
        id: &'a MessageId,
        error: &'a str,
    ) -> BoxFuture<'a, Result<u32, BatchError>>;

    /// Stores a dead letter and, if `inserts_id`, inserts the id of its message as parked, in one
    /// transaction, in which the position advances by `step` in positions mode. If its message is not new,
    /// no dead letter is stored: another process has handled or parked it. Returns the state of the message.
    /// Without `inserts_id` it is new, or a duplicate if the step was taken before. A mismatch is not
    /// committed.
    ///
    /// # Errors
    /// [`BatchError`].
    fn park<'a>(
        &'a self,
        dead_letter: &'a DeadLetter,
        inserts_id: bool,
        step: Option<&'a PositionStep>,
    ) -> BoxFuture<'a, Result<EntryState, BatchError>>;

    /// Checks whether the database answers.
    ///
    /// # Errors
    /// [`BatchError`].
    fn check(&self) -> BoxFuture<'_, Result<(), BatchError>>;

    /// Removes ids whose retention has ended, and what was counted for them, at most `limit` of each.
    /// Returns the number removed; 0 if the operators of the database remove them.
    ///
    /// # Errors
    /// [`BatchError`].
    fn purge(&self, limit: u32) -> BoxFuture<'_, Result<u64, BatchError>>;
}
