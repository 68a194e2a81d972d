//! A call of a step or an undo: its context, its errors, and the effect that an undo has to undo.

use std::ops::Deref;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use bytes::Bytes;
use hapax_core::transaction::{Source, Tx, TxHandle};
use hapax_core::{FencingToken, Key, OperationId, value};
use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::log::{Blob, LogTime, StuckReason, Tries};

/// The context of one call of a step or an undo. It dereferences to the state that was passed to
/// [`Saga::define`](crate::Saga::define).
#[derive(Debug)]
pub struct StepContext<S> {
    pub(crate) state: Arc<S>,
    pub(crate) context: CallContext,
}

/// Key, fence, saga and tries of a call.
#[derive(Clone, Debug)]
pub(crate) struct CallContext {
    pub(crate) key: Key,
    pub(crate) fence: FencingToken,
    /// The saga.
    pub(crate) id: OperationId,
    /// Its input.
    pub(crate) input: Bytes,
    pub(crate) tries: CallTries,
    /// The transaction of a step that writes in the database of the records.
    pub(crate) tx: Option<TxHandle>,
    pub(crate) replacement: Replacement,
}

/// The value that takes the place of the one that was prepared for a try.
#[derive(Clone, Debug, Default)]
pub(crate) struct Replacement(Arc<Mutex<Option<Blob>>>);

impl Replacement {
    fn set(&self, value: Blob) {
        // Locked for single changes.
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = Some(value);
    }

    /// Removes the value, if the step has set one.
    pub(crate) fn take(&self) -> Option<Blob> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).take()
    }
}

/// The number of a try, and the tries before it.
#[derive(Clone, Debug)]
pub(crate) struct CallTries {
    number: u32,
    /// Time since the first try that may have arrived.
    age: Option<Duration>,
    /// Time since the first try.
    spent: Duration,
    /// The value that was prepared last.
    prepared: Option<Bytes>,
}

impl CallTries {
    pub(crate) fn new(tries: &Tries, number: u32, now: LogTime) -> Self {
        Self {
            number,
            age: tries.first.filter(|_| tries.arrived).map(|first| now.since(first)),
            spent: tries.since.map(|since| now.since(since)).unwrap_or_default(),
            prepared: tries.prepared.as_ref().map(|prepared| prepared.0.clone()),
        }
    }
}

impl<S> StepContext<S> {
    /// Returns the idempotency key of this step, or of its undo: the same in every try, in every process
    /// and in every version of the definition.
    #[must_use]
    pub const fn key(&self) -> &Key {
        &self.context.key
    }

    /// Returns the fence of this execution, which grows with each takeover.
    #[must_use]
    pub const fn fence(&self) -> FencingToken {
        self.context.fence
    }

    /// Returns the number of this try, from 1.
    #[must_use]
    pub const fn number(&self) -> u32 {
        self.context.tries.number
    }

    /// Returns the operation id of the saga.
    #[must_use]
    pub const fn id(&self) -> OperationId {
        self.context.id
    }

    /// Returns the time since the first try that may have arrived, by the store's clock; `None` if no
    /// earlier one may have.
    #[must_use]
    pub const fn age(&self) -> Option<Duration> {
        self.context.tries.age
    }

    /// Returns the time since the first try, by the store's clock, or since the first one that an
    /// operator has granted.
    #[must_use]
    pub const fn spent(&self) -> Duration {
        self.context.tries.spent
    }

    /// Returns the input of the saga, of which nothing needs to be in the argument.
    ///
    /// # Errors
    /// [`value::ValueError`] if the input has another type.
    pub fn input<I: DeserializeOwned>(&self) -> Result<I, value::ValueError> {
        value::read(&self.context.input)
    }

    /// Returns the value that was [prepared](crate::StepBuilder::prepare) for this try; in a function
    /// that prepares, the one of the try before. `None` without one, or with one of another type.
    #[must_use]
    pub fn prepared<P: DeserializeOwned>(&self) -> Option<P> {
        value::read(self.context.tries.prepared.as_ref()?).ok()
    }

    /// Replaces the value that was [prepared](crate::StepBuilder::prepare) for this try. It is saved with the
    /// end of the try, before any pause, and the function that prepares the next one gets it.
    ///
    /// # Errors
    /// [`value::ValueError`] if the value cannot be serialized, or is larger than 16 MiB.
    pub fn replace_prepared<P: Serialize>(&self, value: &P) -> Result<(), value::ValueError> {
        let value = value::write(value, hapax_core::codec::MAX_CHECKPOINT)?;
        self.context.replacement.set(Blob(value));
        Ok(())
    }

    /// Takes the transaction of a step that was defined by
    /// [`SagaBuilder::within`](crate::SagaBuilder::within). It commits with the step's result, once
    /// the step returns `Ok`, and is rolled back otherwise.
    ///
    /// # Errors
    /// [`StepError::NotSent`]: no transaction began, or the step was defined otherwise.
    pub async fn tx<T: Send + 'static, E>(&self) -> Result<Tx<T>, StepError<E>> {
        let Some(tx) = &self.context.tx else {
            return Err(StepError::not_sent(
                "expected a step of the kind `within`, found another: it has no transaction",
            ));
        };
        tx.take().await.map_err(StepError::not_sent)
    }
}

impl<S> Deref for StepContext<S> {
    type Target = S;

    fn deref(&self) -> &S {
        &self.state
    }
}

/// Errors of a step.
#[derive(Debug)]
#[non_exhaustive]
pub enum StepError<E> {
    /// The step was rejected: it has no effect, and the flow gets this error.
    Rejected(E),
    /// Nothing was sent. The step is tried again.
    NotSent(Source),
    /// The outcome is unknown: the step may have happened. It is tried again if its kind allows that.
    Unknown(Source),
    /// The outcome is unknown, and the called system says when to call it again: the step is tried no
    /// earlier, plus the pause that [`StepError::Unknown`] would have had.
    RetryAfter {
        /// The time that the system says.
        after: Duration,
        /// The reason.
        source: Source,
    },
    /// Nothing was called yet, for a reason in this process. This does not count as a try, and the
    /// next one comes after this time.
    Postponed {
        /// The time.
        after: Duration,
        /// The reason.
        source: Source,
    },
    /// No further try can help now: the saga is stuck with this reason until an operator decides.
    Stuck {
        /// The reason.
        reason: StuckReason,
        /// The text.
        source: Source,
        /// True if this try may have arrived.
        sent: bool,
    },
}

impl<E> StepError<E> {
    /// Returns [`StepError::NotSent`] because of `source`.
    pub fn not_sent(source: impl Into<Source>) -> Self {
        Self::NotSent(source.into())
    }

    /// Returns [`StepError::Unknown`] because of `source`.
    pub fn unknown(source: impl Into<Source>) -> Self {
        Self::Unknown(source.into())
    }

    /// Returns this error with another reason of a rejection.
    pub fn map_rejected<F>(self, map: impl FnOnce(E) -> F) -> StepError<F> {
        match self {
            Self::Rejected(reason) => StepError::Rejected(map(reason)),
            Self::NotSent(source) => StepError::NotSent(source),
            Self::Unknown(source) => StepError::Unknown(source),
            Self::RetryAfter { after, source } => StepError::RetryAfter { after, source },
            Self::Postponed { after, source } => StepError::Postponed { after, source },
            Self::Stuck { reason, source, sent } => StepError::Stuck { reason, source, sent },
        }
    }

    /// Returns [`StepError::Stuck`] of a try that called nothing, or was rejected without an effect.
    pub fn stuck(reason: StuckReason, source: impl Into<Source>) -> Self {
        Self::Stuck { reason, source: source.into(), sent: false }
    }
}

/// The effect of the step that is to be undone, as far as it is known.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum StepEffect<R> {
    /// The step happened, with this result.
    Happened(R),
    /// The step may have happened. The undo must be right if nothing happened, and must ensure
    /// that nothing will: a call under the step's key may still be on its way.
    Unknown,
}

/// Error of an undo, which is then tried again. Created from any error.
#[derive(Debug)]
pub struct UndoError(pub(crate) Source);

impl<E: Into<Source>> From<E> for UndoError {
    fn from(source: E) -> Self {
        Self(source.into())
    }
}
