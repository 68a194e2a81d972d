//! A call of a step: its context, its errors, and the knowledge of an undo.

use std::ops::Deref;
use std::sync::Arc;

use hapax_core::transaction::{Source, Tx, TxHandle};
use hapax_core::{FencingToken, Key};

/// The context of a step's call. It dereferences to the state of the definition.
#[derive(Debug)]
pub struct At<S> {
    pub(crate) state: Arc<S>,
    pub(crate) context: CallContext,
}

/// Key, fence and number of a call.
#[derive(Clone, Debug)]
pub(crate) struct CallContext {
    pub(crate) key: Key,
    pub(crate) fence: FencingToken,
    pub(crate) number: u32,
    /// The transaction of a step that writes in the database of the records.
    pub(crate) tx: Option<TxHandle>,
}

impl<S> At<S> {
    /// Returns the idempotency key of this step, or of its undo: the same in every try, on every node
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
        self.context.number
    }

    /// Takes the transaction of a step that was defined by [`SagaBuilder::within`](crate::SagaBuilder::within). It commits with
    /// the step's result, once the step returns `Ok`, and is rolled back otherwise.
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

impl<S> Deref for At<S> {
    type Target = S;

    fn deref(&self) -> &S {
        &self.state
    }
}

/// Errors of a step.
#[derive(Debug)]
pub enum StepError<E> {
    /// The step was rejected: it has no effect, and the flow gets this error.
    No(E),
    /// Nothing was sent. The step is tried again.
    NotSent(Source),
    /// The outcome is unknown: the step may have happened. It is tried again if its kind allows that.
    Unknown(Source),
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
}

/// The knowledge about a step that is undone.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Undo<R> {
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
