//! The handle to a saga under a key.

use std::fmt;
use std::marker::PhantomData;
use std::sync::Arc;
use std::time::Duration;

use hapax_core::{OperationId, Outcome, RecordState, StoreError, value};
use serde::Serialize;
use serde::de::DeserializeOwned;
use tokio::time::timeout;

use crate::error::{SagaError, SignalError};
use crate::log::{Blob, Failure};
use crate::node::Node;
use crate::note::{CANCEL, FinalEnd, FinalOutcome};

/// First and longest interval at which a waiting caller looks for the outcome of a saga that runs
/// elsewhere.
const OUTCOME_POLL: [Duration; 2] = [Duration::from_millis(250), Duration::from_secs(2)];

/// A state in which a start finds the saga of its key.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Found {
    /// Nothing had been executed. The start has claimed it.
    Nothing,
    /// An execution had ended without an outcome. The start has claimed it.
    Continued,
    /// The saga was in progress, parked or stuck, or is continued by another process.
    Unfinished,
    /// The saga had an outcome.
    Ended,
}

/// A handle to a saga under a key: waits for its outcome, sends signals, cancels. Dropping it does not
/// stop the saga.
pub struct SagaHandle<O, E> {
    pub(crate) node: Arc<Node>,
    pub(crate) id: OperationId,
    pub(crate) found: Found,
    pub(crate) types: PhantomData<fn() -> Result<O, E>>,
}

impl<O, E> fmt::Debug for SagaHandle<O, E> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("SagaHandle").field(&self.id).finish()
    }
}

impl<O: DeserializeOwned, E: DeserializeOwned> SagaHandle<O, E> {
    /// Returns the operation id of the saga.
    #[must_use]
    pub const fn id(&self) -> OperationId {
        self.id
    }

    /// Returns whether nothing had been executed under this key before.
    #[must_use]
    pub const fn is_first(&self) -> bool {
        matches!(self.found, Found::Nothing)
    }

    /// Returns whether the start has begun an execution: the first one, or one after a crash or a pause.
    #[must_use]
    pub const fn has_begun(&self) -> bool {
        matches!(self.found, Found::Nothing | Found::Continued)
    }

    /// Returns whether the start has found an outcome.
    #[must_use]
    pub const fn had_ended(&self) -> bool {
        matches!(self.found, Found::Ended)
    }

    /// Waits for the outcome. Dropping the future stops the wait, not the saga.
    ///
    /// # Errors
    /// [`SagaError`].
    pub async fn outcome(&self) -> Result<O, SagaError<E>> {
        let [mut pause, longest] = OUTCOME_POLL;
        // While it runs here there is no outcome yet.
        let mut here = self.node.outcome_here(&self.id);
        loop {
            let ended = self.node.ended(&self.id).notified();
            match &mut here {
                Some(run) => {
                    // Its end, which also frees its permit for the caller's next saga.
                    let end = async { while run.changed().await.is_ok() {} };
                    if timeout(pause, end).await.is_ok()
                        && let Some(outcome) = &*run.borrow()
                    {
                        return read(outcome);
                    }
                    // It was parked, or another process continues, or it takes long.
                    here = None;
                }
                None => {
                    if let Some(outcome) = self.poll_outcome().await? {
                        return outcome;
                    }
                    let _ = timeout(pause, ended).await;
                    pause = (pause * 2).min(longest);
                }
            }
        }
    }

    /// Returns the outcome if the saga has ended.
    ///
    /// # Errors
    /// [`StoreError`].
    pub async fn poll_outcome(&self) -> Result<Option<Result<O, SagaError<E>>>, StoreError> {
        let stored = self.node.engine.load(&self.id).await?.stored;
        Ok(match stored.map(|stored| stored.record.state) {
            None | Some(RecordState::Released) => Some(Err(SagaError::Gone)),
            Some(RecordState::InFlight | RecordState::Unknown { .. }) => None,
            Some(RecordState::Done(outcome)) => Some(read(&outcome)),
        })
    }

    /// Sends a signal, for [`FlowContext::signal`](crate::FlowContext::signal). Returns false if one
    /// of this name was sent before: the first counts. Once this returns, the saga receives the
    /// signal, also after a crash, if it waits for it before it ends.
    ///
    /// A signal belongs to the saga that is unfinished when it is sent. It may arrive before the saga
    /// waits for it, and before its first step. One under the same key that is started after the
    /// outcome has expired does not receive it.
    ///
    /// # Errors
    /// [`SignalError::Ended`] and [`SignalError::NotFound`] if no saga is unfinished: nothing was
    /// sent. After any other one, the signal may have been sent: send it again.
    pub async fn signal<T: Serialize>(&self, name: &str, signal: &T) -> Result<bool, SignalError> {
        if name.is_empty() {
            return Err(SignalError::Name);
        }
        self.node.send(&self.id, name, Blob(value::write(signal, 64 << 10)?)).await
    }

    /// Cancels the saga: once this returns, no further try of a step begins that runs forward, and what
    /// happened is undone. A try that is just being saved, for which the saga has looked for a
    /// cancellation before, is still called, and undone like the others. A saga that has ended
    /// meanwhile, or whose outcome is just being recorded, stays as it is. A stuck saga needs a decision
    /// of an operator, and is undone then, unless the decision ends it. A cancellation
    /// belongs to one saga, as a [signal](Self::signal) does.
    ///
    /// # Errors
    /// [`SignalError::Ended`] and [`SignalError::NotFound`] if no saga is unfinished. After any other
    /// one, the saga may have been cancelled.
    pub async fn cancel(&self, reason: &str) -> Result<bool, SignalError> {
        self.node.send(&self.id, CANCEL, Blob(value::write(reason, 4 << 10)?)).await
    }
}

/// Decodes an outcome.
fn read<O: DeserializeOwned, E: DeserializeOwned>(outcome: &Outcome) -> Result<O, SagaError<E>> {
    match FinalOutcome::decode(outcome).map(|outcome| outcome.end) {
        Some(FinalEnd::Done(value)) => value::read(&value.0).map_err(|_| SagaError::Unreadable),
        Some(FinalEnd::Undone(Failure::Error(error))) => {
            Err(value::read(&error.0).map_or(SagaError::Unreadable, SagaError::Undone))
        }
        Some(FinalEnd::Undone(Failure::Cancelled { reason })) => {
            Err(SagaError::Cancelled { reason })
        }
        None => Err(SagaError::Unreadable),
    }
}
