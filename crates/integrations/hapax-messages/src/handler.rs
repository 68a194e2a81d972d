//! The interface to the code that handles messages.

use std::error::Error as StdError;
use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use hapax_core::store::BoxFuture;
use hapax_core::transaction::{TakeTxError, Tx, TxHandle};
use hapax_core::{FencingToken, LeaseHandle};

use crate::dead_letter::DeadLetter;
use crate::id::MessageId;
use crate::message::Message;
use crate::source::Delivery;

/// Cause of a failure.
pub type FailureCause = Box<dyn StdError + Send + Sync>;

/// Failure of a handler. Any error becomes [`MessageFailure::Retry`].
///
/// ```
/// use hapax_messages::MessageFailure;
/// fn parse(text: &str) -> Result<u64, MessageFailure> {
///     // No retry can help.
///     text.parse().map_err(MessageFailure::reject)
/// }
/// # assert!(parse("x").is_err());
/// ```
#[derive(Debug)]
#[non_exhaustive]
pub enum MessageFailure {
    /// The message was not handled, and is to be handled again.
    Retry {
        /// Pause before the next attempt, at most [`Attempts::longest_pause`]; `None`: the pause by
        /// the number of the attempt.
        ///
        /// [`Attempts::longest_pause`]: crate::Attempts::longest_pause
        after: Option<Duration>,
        /// Cause, for operators.
        cause: FailureCause,
    },
    /// The message can never be handled: it becomes a dead letter.
    Reject {
        /// Cause, for operators.
        cause: FailureCause,
    },
    /// The message was not handled because of a fault that concerns every message, such as a wrong setting. It is
    /// handled again. In claim mode the attempt does not count, so the message never becomes a dead letter by such
    /// failures alone; in batch mode it counts.
    Withdraw {
        /// Pause before the next attempt, at most [`Attempts::longest_pause`](crate::Attempts::longest_pause).
        after: Duration,
        /// Cause, for operators.
        cause: FailureCause,
    },
    /// The message may have been handled. It follows the policy for unknown outcomes.
    Unknown {
        /// Cause, for operators.
        cause: FailureCause,
    },
}

impl MessageFailure {
    /// Creates [`MessageFailure::Retry`] with a pause by the number of the attempt.
    pub fn retry(cause: impl Into<FailureCause>) -> Self {
        Self::Retry { after: None, cause: cause.into() }
    }

    /// Creates [`MessageFailure::Retry`] with a pause.
    pub fn retry_after(after: Duration, cause: impl Into<FailureCause>) -> Self {
        Self::Retry { after: Some(after), cause: cause.into() }
    }

    /// Creates [`MessageFailure::Reject`].
    pub fn reject(cause: impl Into<FailureCause>) -> Self {
        Self::Reject { cause: cause.into() }
    }

    /// Creates [`MessageFailure::Withdraw`].
    pub fn withdraw_after(after: Duration, cause: impl Into<FailureCause>) -> Self {
        Self::Withdraw { after, cause: cause.into() }
    }

    /// Creates [`MessageFailure::Unknown`].
    pub fn unknown(cause: impl Into<FailureCause>) -> Self {
        Self::Unknown { cause: cause.into() }
    }

    /// Returns the cause.
    #[must_use]
    pub fn cause(&self) -> &(dyn StdError + 'static) {
        match self {
            Self::Retry { cause, .. }
            | Self::Reject { cause }
            | Self::Withdraw { cause, .. }
            | Self::Unknown { cause } => &**cause,
        }
    }

    /// Returns the cause and its sources as one text.
    #[must_use]
    pub fn text(&self) -> String {
        describe(self.cause())
    }
}

/// Returns an error and its sources as one text of at most [`DeadLetter::MAX_ERROR`] bytes, without
/// zero bytes, which a database would not store.
pub(crate) fn describe(error: &(dyn StdError + 'static)) -> String {
    let mut text = error.to_string();
    let mut source = error.source();
    while let Some(error) = source {
        let next = error.to_string();
        // Some errors repeat their source.
        if !text.contains(&next) {
            text.push_str(": ");
            text.push_str(&next);
        }
        source = error.source();
    }
    text.truncate(text.floor_char_boundary(DeadLetter::MAX_ERROR));
    text.replace('\0', "\u{fffd}")
}

impl<E: StdError + Send + Sync + 'static> From<E> for MessageFailure {
    fn from(error: E) -> Self {
        Self::retry(error)
    }
}

/// One execution of a handler: its message, lease and transaction. Cheap to clone.
#[derive(Clone)]
pub struct MessageExecution {
    pub(crate) delivery: Arc<dyn Delivery>,
    pub(crate) id: MessageId,
    pub(crate) lease: LeaseHandle,
    pub(crate) transaction: Option<TxHandle>,
}

impl MessageExecution {
    /// Returns the message.
    #[must_use]
    pub fn message(&self) -> &Message {
        self.delivery.message()
    }

    /// Returns the id of the message.
    #[must_use]
    pub const fn id(&self) -> &MessageId {
        &self.id
    }

    /// Returns the number of this attempt, from 1.
    #[must_use]
    pub fn attempt(&self) -> u32 {
        self.lease.attempt()
    }

    /// Returns the fencing token of this attempt, for downstream systems.
    #[must_use]
    pub fn fence(&self) -> FencingToken {
        self.lease.fence()
    }

    /// Returns the handle of the lease: its checkpoint, its downstream key, and whether it is held.
    #[must_use]
    pub const fn lease(&self) -> &LeaseHandle {
        &self.lease
    }

    /// Takes the transaction that commits with the record of the message, for the handler of an
    /// inbox with a [`TransactionBackend`](hapax_core::transaction::TransactionBackend). `T` is the
    /// transaction type of that database. Drop it after the last write: the inbox commits it then.
    /// One that the handler keeps is not committed.
    ///
    /// # Errors
    /// [`TakeTxError`]; [`TakeTxError::NoTransactions`] for an inbox without transactions.
    pub async fn transaction<T: Send + 'static>(&self) -> Result<Tx<T>, TakeTxError> {
        match &self.transaction {
            Some(transaction) => transaction.take().await,
            None => Err(TakeTxError::NoTransactions),
        }
    }
}

impl fmt::Debug for MessageExecution {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("MessageExecution")
            .field("id", &self.id)
            .field("attempt", &self.attempt())
            .finish_non_exhaustive()
    }
}

/// Code that handles messages, such as an async function of a [`MessageExecution`].
pub trait MessageHandler: Send + Sync + 'static {
    /// Handles a message. The future is polled until it ends: only a crash, or a drain over its
    /// limit, drops it.
    ///
    /// # Errors
    /// [`MessageFailure`].
    fn handle(&self, execution: MessageExecution)
    -> BoxFuture<'static, Result<(), MessageFailure>>;
}

impl<W, F> MessageHandler for W
where
    W: Fn(MessageExecution) -> F + Send + Sync + 'static,
    F: Future<Output = Result<(), MessageFailure>> + Send + 'static,
{
    fn handle(
        &self,
        execution: MessageExecution,
    ) -> BoxFuture<'static, Result<(), MessageFailure>> {
        Box::pin(self(execution))
    }
}
