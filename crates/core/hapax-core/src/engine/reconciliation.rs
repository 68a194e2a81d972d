//! Claims that have to be reconciled.

use std::sync::Arc;
use std::time::Duration;

use super::claim::{Claim, ClaimCall, ClaimError, ClaimProgress};
use super::execution::catch;
use super::request::{KeyedRequest, OperationRequest};
use crate::exchange::ClaimExchange;
use crate::key::Key;
use crate::machine::Verdict;
use crate::record::FencingToken;
use crate::scope::OperationId;

/// A claim that has to be reconciled: whether the execution with this fence happened is unknown.
///
/// Dropping it changes nothing: after the hook's timeout the next claim reconciles.
#[derive(Debug)]
#[must_use]
pub struct Reconciliation {
    pub(super) call: ClaimCall,
    pub(super) claiming: Box<ClaimExchange>,
    pub(super) fence: FencingToken,
}

impl Reconciliation {
    /// Returns the fence of the execution whose outcome is unknown.
    #[must_use]
    pub const fn fence(&self) -> FencingToken {
        self.fence
    }

    /// Returns the operation id: the name of scope and key, and of the record in the store.
    #[must_use]
    pub const fn id(&self) -> OperationId {
        self.call.key
    }

    /// Returns the number of that execution, from 1.
    #[must_use]
    pub fn attempt(&self) -> u32 {
        // A claim that reconciles has read the record.
        self.claiming.seen().stored.as_ref().map_or(1, |stored| stored.record.attempt)
    }

    /// Returns the key that this execution had for downstream systems, as
    /// [`LeaseHandle::downstream`](super::LeaseHandle::downstream) returned it.
    #[must_use]
    pub fn downstream(&self) -> Key {
        self.call.key.downstream()
    }

    /// Calls the hook and [concludes](Self::conclude) with its verdict. A hook that panics, or takes
    /// longer than `timeout`, cannot say. Dropping the future drops the hook's; a later claim calls
    /// it again.
    ///
    /// # Errors
    /// [`ClaimError`]; nothing was executed.
    pub async fn reconcile(
        self,
        hook: impl Future<Output = Verdict>,
        timeout: Duration,
        request: &dyn OperationRequest,
    ) -> Result<Claim, ClaimError> {
        let verdict = match tokio::time::timeout(timeout, catch(hook)).await {
            Ok(Ok(verdict)) => verdict,
            Ok(Err(_)) | Err(_) => {
                tracing::warn!(fence = %self.fence, "the reconcile hook panicked or timed out: the outcome stays unknown");
                Verdict::CannotSay
            }
        };
        self.conclude(verdict, request).await
    }

    /// Concludes with the hook's verdict, which counts only if the record has not changed since the
    /// hook was called; otherwise the claim follows the present record, and waits if its policy
    /// allows it and there is time left. As safe to drop as [`Idempotency::claim`](crate::Idempotency::claim).
    ///
    /// # Errors
    /// [`ClaimError`]; nothing was executed.
    pub async fn conclude(
        self,
        verdict: Verdict,
        request: &dyn OperationRequest,
    ) -> Result<Claim, ClaimError> {
        let Self { call, mut claiming, .. } = self;
        let inner = Arc::clone(&call.inner);
        let request = &KeyedRequest { request, key: inner.fingerprint_key.as_ref() };
        // The record may be gone by now, and a quarantine may have begun or ended.
        let quarantine = inner.quarantines().of(request.route());
        claiming.set_quarantine(quarantine.map(|quarantine| quarantine.of_key(call.made_at)));
        let next = claiming.reconciled(verdict, &*call.inner.entropy)?;
        let progress = call.run_exchange(claiming, next, request).await;
        let progress =
            progress.map_err(|error| inner.quarantines().error_of(request.route(), error))?;
        // Waiters for the verdict read the record again.
        if matches!(progress, ClaimProgress::Decided(Claim::Replay(_) | Claim::Unknown { .. })) {
            call.inner.waiters.wake(&call.key, None);
        }
        // Boxed, since it is rare and large.
        Box::pin(call.wait(progress, request)).await
    }
}
