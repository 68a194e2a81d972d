//! Operations that another process resumes: `park`, `amend` and `resume`, by operation id.

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;

use super::claim::{Claim, ClaimCall, ClaimError, ClaimProgress};
use super::idempotency::Idempotency;
use super::lease::{FinishError, Lease};
use super::request::{KeyedRequest, OperationRequest};
use crate::codec::MAX_CHECKPOINT;
use crate::exchange::{self, Resolved, WriteExchange};
use crate::fingerprint::{Fingerprint, FingerprintScheme};
use crate::machine::{Amendment, OwnerAction};
use crate::policy::Policy;
use crate::record::Record;
use crate::scope::OperationId;
use crate::store::Snapshot;

impl Lease {
    /// Parks the operation: saves `checkpoint` and ends the execution. The record stays in flight
    /// without an owner for `pause`; the first claim after that takes over. An
    /// [amendment](crate::Idempotency::amend) can end the pause early.
    ///
    /// # Errors
    /// [`FinishError`]. After [`FinishError::TooLarge`] nothing was saved, and the lease lapses.
    pub async fn park(self, checkpoint: Bytes, lease: Duration) -> Result<(), FinishError> {
        if checkpoint.len() > MAX_CHECKPOINT {
            return Err(FinishError::TooLarge);
        }
        self.shared.finish(OwnerAction::Checkpoint { checkpoint, lease }).await.map(drop)
    }
}

impl Idempotency {
    /// Returns whether a record is of this request; `None` if its fingerprint has a scheme that is not
    /// supported here: a newer version wrote it.
    #[must_use]
    pub fn is_of_request(&self, record: &Record, request: &dyn OperationRequest) -> Option<bool> {
        let request = KeyedRequest { request, key: self.inner.fingerprint_key.as_ref() };
        Some(request.fingerprint(&record.scheme)? == record.fingerprint)
    }

    /// Claims the operation of the record `seen`, which was [loaded](Self::load), to resume it without
    /// its request. The claim uses the scheme and the fingerprint of the record. It never creates a
    /// record, and does not wait. Dropping the future has the effect that it has for
    /// [`claim`](Self::claim).
    ///
    /// # Errors
    /// [`ClaimError`]; nothing was executed. [`ClaimError::NotFound`] without a record.
    pub async fn adopt(
        &self,
        id: OperationId,
        seen: Snapshot,
        policy: &Policy,
    ) -> Result<Claim, ClaimError> {
        if !self.inner.timer.is_running() {
            return Err(ClaimError::Shutdown);
        }
        let Some(stored) = &seen.stored else { return Err(ClaimError::NotFound) };
        let Record { scheme, fingerprint, .. } = &stored.record;
        let request = AdoptedRequest { scheme: scheme.clone(), fingerprint: *fingerprint };
        let Policy { terms, settle, keep_released, .. } = *policy;
        let claim = exchange::ClaimRequest {
            scheme: request.scheme(),
            fingerprint: request.fingerprint,
            terms,
            settle,
            hook: None,
            may_reconcile: false,
            executions: self.inner.executions.clone(),
            description: None,
            keep_released,
            adopts: true,
            quarantine: None,
        };
        let inner = Arc::clone(&self.inner);
        let call = ClaimCall { inner, key: id, made_at: None, claim, deadline: None };
        Ok(match call.once(call.claim.clone(), Some(seen), &request).await? {
            ClaimProgress::Decided(claim) => claim,
            ClaimProgress::Pending(pending) => pending.into(),
        })
    }

    /// Changes the checkpoint or the lease of a record in flight that its owner has parked, and wakes the
    /// waiters of its key. The write continues if the future is dropped. The result also has the record
    /// that was replaced, or the one because of which nothing was written.
    ///
    /// # Errors
    /// [`ClaimError`]; after [`StoreError::Ambiguous`](crate::StoreError::Ambiguous) it may have been
    /// written: load the record again.
    pub async fn amend(
        &self,
        key: OperationId,
        seen: Snapshot,
        amendment: Amendment,
    ) -> Result<Resolved, ClaimError> {
        let started = WriteExchange::amend(key, seen, amendment, &*self.inner.entropy)?;
        self.write(key, started).await
    }
}

/// The request of an existing record: only its own scheme and fingerprint are known.
struct AdoptedRequest {
    scheme: FingerprintScheme,
    fingerprint: Fingerprint,
}

impl OperationRequest for AdoptedRequest {
    fn scheme(&self) -> FingerprintScheme {
        self.scheme.clone()
    }

    fn fingerprint(&self, scheme: &FingerprintScheme) -> Option<Fingerprint> {
        (*scheme == self.scheme).then_some(self.fingerprint)
    }
}
