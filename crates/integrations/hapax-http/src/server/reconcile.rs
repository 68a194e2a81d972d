//! Reconciliation without a retry.

use std::fmt;
use std::time::Duration;

use bytes::Bytes;
use hapax_core::store::StoredRecord;
use hapax_core::{ClaimError, FencingToken, Key, OperationId, Reconciled, UndecidedOperation};
use http::request::Parts;

use super::layer::IdempotencyLayer;
use super::policy::{ReconcileRequest, RoutePolicy};
use super::protect::verdict;

/// An operation to reconcile without a retry. Its `Debug` form shows no contents.
#[derive(Clone)]
pub struct UnretriedRequest {
    /// Its operation id.
    pub id: OperationId,
    /// Fence of the record whose description has the other fields.
    pub fence: FencingToken,
    /// Shortest time since the last write of the record, as in [`UndecidedOperation`].
    pub pause: Duration,
    /// Its key.
    pub key: Key,
    /// Head of a request that stands for the retry: it has the headers that the hook is to get.
    pub request: Parts,
    /// Decision that the record keeps if the operation did not happen, for operators.
    pub note: Option<Bytes>,
}

impl fmt::Debug for UnretriedRequest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { id, fence, pause, .. } = self;
        f.debug_struct("UnretriedRequest")
            .field("id", id)
            .field("fence", fence)
            .field("pause", pause)
            .finish_non_exhaustive()
    }
}

impl IdempotencyLayer {
    /// Calls the hook of a route about an operation whose outcome is unknown, as
    /// [`Idempotency::reconcile_without_retry`](hapax_core::Idempotency::reconcile_without_retry) does. The caller has to
    /// know that it is the hook of the operation, by [`RoutePolicy::hook_hashes`] and the namespace in its description.
    ///
    /// # Errors
    /// [`ClaimError`]; the outcome stays unknown, or the verdict was stored after all.
    pub async fn reconcile(
        &self,
        policy: &RoutePolicy,
        unretried: UnretriedRequest,
    ) -> Result<Reconciled, ClaimError> {
        let UnretriedRequest { id, fence, pause, key, request, note } = unretried;
        let options = &policy.options;
        let seen = self.engine.load(&id).await?;
        let is_request =
            |stored: &StoredRecord| stored.record.scheme.of_request().starts_with("http/");
        let Some(hook) =
            options.reconcile.as_ref().filter(|_| seen.stored.as_ref().is_none_or(is_request))
        else {
            return Ok(Reconciled::Blocked);
        };
        let route = Some(&*options.name);
        let undecided = UndecidedOperation { id, seen, fence, route, pause, note };
        let call = |fence, attempt| {
            verdict(policy, &**hook, ReconcileRequest { fence, id, attempt, key, request })
        };
        self.engine.reconcile_without_retry(undecided, &options.policy, call).await
    }
}
