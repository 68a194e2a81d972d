//! Operations that another process continues: parked, amended and adopted by their ids.

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
    /// Parks the operation: saves `checkpoint`, and gives the key up for the time `lease`. Until then
    /// it is in flight without an owner, and the claim that follows takes over. An
    /// [amendment](crate::Idempotency::amend) ends the time early.
    ///
    /// # Errors
    /// [`FinishError`]. [`FinishError::TooLarge`] leaves the lease to lapse.
    pub async fn park(self, checkpoint: Bytes, lease: Duration) -> Result<(), FinishError> {
        if checkpoint.len() > MAX_CHECKPOINT {
            return Err(FinishError::TooLarge);
        }
        self.shared.finish(OwnerAction::Checkpoint { checkpoint, lease }).await.map(drop)
    }
}

impl Idempotency {
    /// Returns whether a record is of this request.
    #[must_use]
    pub fn is_of_request(&self, record: &Record, request: &dyn OperationRequest) -> bool {
        let request = KeyedRequest { request, key: self.inner.fingerprint_key.as_ref() };
        request.fingerprint(&record.scheme) == Some(record.fingerprint)
    }

    /// Claims the operation of the record `seen`, which was [loaded](Self::load), to continue it without
    /// its request. The claim has the scheme and fingerprint of the record, and never
    /// creates one. It does not wait. As safe to drop as [`claim`](Self::claim).
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
        let Policy { terms, keep_released, .. } = *policy;
        let claim = exchange::ClaimRequest {
            scheme: request.scheme(),
            fingerprint: request.fingerprint,
            terms,
            hook: None,
            may_reconcile: false,
            executions: self.inner.executions.clone(),
            description: None,
            keep_released,
            adopts: true,
        };
        let inner = Arc::clone(&self.inner);
        let call = ClaimCall { inner, key: id, claim, deadline: None };
        Ok(match call.once(call.claim.clone(), Some(seen), &request).await? {
            ClaimProgress::Decided(claim) => claim,
            ClaimProgress::Pending(pending) => pending.into(),
        })
    }

    /// Amends an in-flight record that its owner has parked. This continues if the caller is dropped,
    /// and waiters for the key are woken. Also returns the record that it replaced, or that prevented
    /// it.
    ///
    /// # Errors
    /// [`ClaimError`]; after [`StoreError::Ambiguous`](crate::StoreError::Ambiguous) it may have been written: load the record
    /// again.
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
