//! What a handler may know and say of its execution.

use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use bytes::Bytes;
use hapax_core::{FencingToken, FinishError, LeaseHandle, OperationId};

use crate::classify::OutcomeClass;

/// A request extension: the execution that a handler is.
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

/// What the handler said of its outcome.
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

    /// Returns the operation id: the name of scope and key, the same for every attempt and another
    /// one for another caller's same key. Handlers look operations up by it, never by the key alone.
    /// It names the record in the store, and in logs, where a key must not be.
    #[must_use]
    pub const fn id(&self) -> OperationId {
        self.id
    }

    /// The fencing token: downstream systems refuse what bears a smaller one than they have seen.
    #[must_use]
    pub fn fence(&self) -> FencingToken {
        self.lease.fence()
    }

    /// Which execution of the record it is, from 1.
    #[must_use]
    pub fn attempt(&self) -> u32 {
        self.lease.attempt()
    }

    /// Resolves when another execution may have taken over: work that can stop should.
    pub async fn lost(&self) {
        self.lease.lost().await;
    }

    /// Whether another execution may have taken over.
    #[must_use]
    pub fn is_lost(&self) -> bool {
        self.lease.is_lost()
    }

    /// The recovery point that an earlier execution of the record left.
    #[must_use]
    pub const fn checkpoint(&self) -> Option<&Bytes> {
        self.checkpoint.as_ref()
    }

    /// Saves a recovery point for later executions of the record.
    ///
    /// # Errors
    /// [`FinishError`]; after `Pending` it may have been saved.
    pub async fn save(&self, checkpoint: Bytes) -> Result<(), FinishError> {
        self.lease.save(checkpoint).await
    }

    /// Says what the response will mean, whatever its status.
    pub fn outcome(&self, class: OutcomeClass) {
        self.lock().class = Some(class);
    }

    /// Says for how long the response is kept, if it is final. Zero, which would forget at once
    /// what just happened, counts as not said.
    pub fn retention(&self, retention: Duration) {
        if !retention.is_zero() {
            self.lock().retention = Some(retention);
        }
    }

    /// Says that what was written in the [transaction](super::transaction) commits with the
    /// response, if that is final, whatever its status: with a refusal it is rolled back else.
    pub fn commit(&self) {
        self.lock().commits = Some(true);
    }

    /// Says that what was written in the [transaction](super::transaction) is rolled back, whatever
    /// the response's status: for answers that refuse with 200, such as GraphQL's.
    pub fn roll_back(&self) {
        self.lock().commits = Some(false);
    }

    pub(super) fn handler_override(&self) -> HandlerOverride {
        *self.lock()
    }

    fn lock(&self) -> MutexGuard<'_, HandlerOverride> {
        // Held for an assignment only.
        self.overrides.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Without what the recovery point holds.
impl fmt::Debug for ExecutionHandle {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Execution")
            .field("id", &self.id)
            .field("lease", &self.lease)
            .field("checkpoint_bytes", &self.checkpoint.as_ref().map(Bytes::len))
            .field("said", &self.handler_override())
            .finish()
    }
}
