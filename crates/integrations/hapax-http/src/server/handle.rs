//! The view of its execution that a handler has.

use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use bytes::Bytes;
use hapax_core::{FencingToken, FinishError, LeaseHandle, OperationId};

use crate::classify::OutcomeClass;

/// A request extension: the execution of the handler.
///
/// ```
/// use hapax_http::classify::OutcomeClass;
/// use hapax_http::server::ExecutionHandle;
/// fn handler(request: &http::Request<hapax_http::Body>) {
///     if let Some(execution) = request.extensions().get::<ExecutionHandle>() {
///         println!("run {} under fence {}", execution.attempt(), execution.fence());
///         execution.outcome(OutcomeClass::Final);
///     }
/// }
/// ```
#[derive(Clone)]
pub struct ExecutionHandle {
    id: OperationId,
    lease: LeaseHandle,
    checkpoint: Option<Bytes>,
    overrides: Arc<Mutex<HandlerOverride>>,
}

/// The handler's own classification of its outcome.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct HandlerOverride {
    pub(super) class: Option<OutcomeClass>,
    pub(super) retention: Option<Duration>,
    pub(super) commits: Option<bool>,
}

impl ExecutionHandle {
    pub(super) fn new(id: OperationId, lease: LeaseHandle, checkpoint: Option<Bytes>) -> Self {
        Self { id, lease, checkpoint, overrides: Arc::default() }
    }

    /// Returns the operation id: a hash of scope and key, the same for every attempt, and a
    /// different one for the same key of another caller. Handlers look operations up by it, never
    /// by the key alone. It names the record in the store, and in logs, which must not contain
    /// keys.
    #[must_use]
    pub const fn id(&self) -> OperationId {
        self.id
    }

    /// Returns the fence: downstream systems reject a smaller one than they have seen.
    #[must_use]
    pub fn fence(&self) -> FencingToken {
        self.lease.fence()
    }

    /// Returns the number of this execution of the record, from 1.
    #[must_use]
    pub fn attempt(&self) -> u32 {
        self.lease.attempt()
    }

    /// Resolves when another execution may have taken over: a handler that can stop should.
    pub async fn lost(&self) {
        self.lease.lost().await;
    }

    /// Returns whether another execution may have taken over.
    #[must_use]
    pub fn is_lost(&self) -> bool {
        self.lease.is_lost()
    }

    /// Returns the checkpoint that an earlier execution of the record saved.
    #[must_use]
    pub const fn checkpoint(&self) -> Option<&Bytes> {
        self.checkpoint.as_ref()
    }

    /// Saves a checkpoint for later executions of the record.
    ///
    /// # Errors
    /// [`FinishError`]; after `Pending` it may have been saved.
    pub async fn save(&self, checkpoint: Bytes) -> Result<(), FinishError> {
        self.lease.save(checkpoint).await
    }

    /// Sets the class of the response, whatever its status.
    pub fn outcome(&self, class: OutcomeClass) {
        self.lock().class = Some(class);
    }

    /// Sets the retention of the response, if it is final. Zero, which would lose it at once, is
    /// ignored.
    pub fn retention(&self, retention: Duration) {
        if !retention.is_zero() {
            self.lock().retention = Some(retention);
        }
    }

    /// Commits the writes in the [transaction](super::transaction) with the response, if that is
    /// final, whatever its status: otherwise a rejection rolls them back. A 307 or 308 is then no
    /// [redirect](crate::classify::is_redirect), but final under most profiles.
    pub fn commit(&self) {
        self.lock().commits = Some(true);
    }

    /// Rolls back the writes in the [transaction](super::transaction), whatever the response's
    /// status: for responses that reject with 200, such as GraphQL's.
    pub fn roll_back(&self) {
        self.lock().commits = Some(false);
    }

    pub(super) fn handler_override(&self) -> HandlerOverride {
        *self.lock()
    }

    fn lock(&self) -> MutexGuard<'_, HandlerOverride> {
        // The lock is held for one assignment only.
        self.overrides.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Leaves out the content of the checkpoint.
impl fmt::Debug for ExecutionHandle {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ExecutionHandle")
            .field("id", &self.id)
            .field("lease", &self.lease)
            .field("checkpoint_bytes", &self.checkpoint.as_ref().map(Bytes::len))
            .field("overrides", &self.handler_override())
            .finish()
    }
}
