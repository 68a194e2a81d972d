//! Execution of a call, from its claim to its result.
//!
//! The caller's future may be dropped at any await. While it claims or reconciles, the engine
//! releases a claim that has no receiver. Once there is a lease, the operation continues on a task.

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use serde::Serialize;
use serde::de::DeserializeOwned;

use super::super::backlog::ActiveExchange;
use super::super::claim::{Claim, ClaimError};
use super::super::execution::{Execution, ExecutionEnd, ExecutionResult, OperationPanicked};
use super::super::lease::{FinishError, Lease, LeaseHandle};
use super::super::reconciliation::Reconciliation;
use super::super::request::OperationRequest;
use super::Receipt;
use super::declared::{Declared, Function, ReconcileCall};
use super::error::RunError;
use super::key::OperationKey;
use super::outcome::{classify, replayed};
use super::request::{DescribedRequest, FunctionRequest};
use crate::exchange::Replay;
use crate::key::Key;
use crate::machine::Verdict;
use crate::record::OutcomeClass;
use crate::scope::Scope;

impl<T, E> Function<T, E>
where
    T: Serialize + DeserializeOwned + Send + 'static,
    E: Send + 'static,
{
    /// Executes `operation` once for `key` of `scope`, and returns its value to every call with the
    /// same request. Same as [`Idempotency::at_most_once`](crate::Idempotency::at_most_once), under
    /// this function's name and policy.
    ///
    /// # Errors
    /// [`RunError`]; [the manual](crate::manual::functions) has a table of their meanings.
    pub async fn run<R, W, F>(
        &self,
        scope: &Scope,
        key: &Key,
        request: &R,
        operation: W,
    ) -> Result<Receipt<T>, RunError<T, E>>
    where
        R: Serialize + ?Sized,
        W: FnOnce(LeaseHandle) -> F + Send + 'static,
        F: Future<Output = Result<T, E>> + Send + 'static,
    {
        let request = FunctionRequest::of(request).map_err(RunError::Request)?;
        self.call(scope, key, &request, request.bytes.clone(), operation).await
    }

    /// Executes like [`run`](Self::run), for a request that computes its fingerprint itself.
    ///
    /// # Errors
    /// [`RunError`].
    pub async fn run_request<W, F>(
        &self,
        scope: &Scope,
        key: &Key,
        request: &dyn OperationRequest,
        operation: W,
    ) -> Result<Receipt<T>, RunError<T, E>>
    where
        W: FnOnce(LeaseHandle) -> F + Send + 'static,
        F: Future<Output = Result<T, E>> + Send + 'static,
    {
        self.call(scope, key, request, Bytes::new(), operation).await
    }

    /// Executes like [`run`](Self::run), with the parts of `key`, for an operation that does not
    /// use its lease.
    pub(super) async fn run_named<K, W, F>(
        &self,
        key: &K,
        operation: W,
    ) -> Result<Receipt<T>, RunError<T, E>>
    where
        K: OperationKey + ?Sized,
        W: FnOnce() -> F + Send + 'static,
        F: Future<Output = Result<T, E>> + Send + 'static,
    {
        let (scope, key, bytes) = key.named().map_err(RunError::Request)?;
        let request = FunctionRequest::written(bytes.clone()).map_err(RunError::Request)?;
        self.call(&scope, &key, &request, bytes, |_| operation()).await
    }

    async fn call<W, F>(
        &self,
        scope: &Scope,
        key: &Key,
        request: &dyn OperationRequest,
        bytes: Bytes,
        operation: W,
    ) -> Result<Receipt<T>, RunError<T, E>>
    where
        W: FnOnce(LeaseHandle) -> F + Send + 'static,
        F: Future<Output = Result<T, E>> + Send + 'static,
    {
        let Declared { engine, policy, name, .. } = &*self.declared;
        let scope = self.scope(scope);
        let named = DescribedRequest { request, function: name.as_deref(), key };
        // Counted from here to its end, without a gap: a drain waits for it.
        let running = engine.inner.backlog.begin_exchange();
        // Boxed, so that the caller's future does not contain several kilobytes of them.
        let mut claim = Box::pin(engine.claim(&scope, key, &named, policy)).await;
        while let Ok(Claim::Reconcile(reconciliation)) = claim {
            claim = Box::pin(self.reconcile(key, &bytes, reconciliation, request)).await;
        }
        match claim? {
            // No await since the claim succeeded: the lease cannot be dropped in between.
            Claim::Execute(lease) => {
                let execution = Box::pin(self.execute(lease, running, operation));
                let executed = engine.inner.detach_on_drop(policy.terms.lease, execution);
                // An error: the encoding of the result panicked outside of the operation.
                executed.await.unwrap_or(Err(RunError::Panicked))
            }
            Claim::Replay(replay) => self.replay(&replay),
            Claim::InFlight { elapsed, remaining } => {
                let retry_after = elapsed.min(remaining).max(Duration::from_secs(1));
                Err(RunError::InFlight { retry_after })
            }
            Claim::Mismatch => Err(RunError::KeyReused),
            Claim::Unknown { .. } | Claim::Reconcile(_) => Err(RunError::OutcomeUnknown),
        }
    }

    /// Calls the hook. If this is dropped, the claim to reconcile lapses, and a later call
    /// reconciles.
    async fn reconcile(
        &self,
        key: &Key,
        bytes: &Bytes,
        reconciliation: Reconciliation,
        request: &dyn OperationRequest,
    ) -> Result<Claim, ClaimError> {
        let Some((timing, hook)) = &self.declared.hook else {
            return reconciliation.conclude(Verdict::CannotSay, request).await;
        };
        let call = ReconcileCall {
            fence: reconciliation.fence(),
            key: key.clone(),
            downstream: reconciliation.downstream(),
            request: bytes.clone(),
        };
        reconciliation.reconcile(async { hook(call).await }, timing.timeout, request).await
    }

    fn replay(&self, replay: &Replay) -> Result<Receipt<T>, RunError<T, E>> {
        let result = replayed(&replay.outcome, self.declared.errors.as_ref())?;
        match result {
            result if replay.deferred => Err(RunError::Pending { result }),
            Ok(value) => Ok(Receipt { value, replayed: true, fence: replay.fence }),
            Err(error) => {
                Err(RunError::Failed { error, class: OutcomeClass::Final, replayed: true })
            }
        }
    }

    /// Executes the operation and records its result.
    fn execute<W, F>(
        &self,
        lease: Lease,
        running: ActiveExchange,
        operation: W,
    ) -> impl Future<Output = Result<Receipt<T>, RunError<T, E>>> + Send + use<T, E, W, F>
    where
        W: FnOnce(LeaseHandle) -> F + Send + 'static,
        F: Future<Output = Result<T, E>> + Send + 'static,
    {
        let declared = Arc::clone(&self.declared);
        async move {
            let _running = running;
            let execution = Execution::new(lease);
            let handle = execution.lease().handle();
            // The result is classified and encoded under the lease, which is renewed meanwhile.
            let attempt = execution.attempt(async {
                let result = operation(handle).await;
                let (class, end) = classify(&result, declared.errors.as_ref());
                (result, class, end)
            });
            let done = attempt.await;
            record(execution, done).await
        }
    }
}

/// Records the result, and returns it as the call's.
async fn record<T, E>(
    execution: Execution,
    done: Result<(Result<T, E>, OutcomeClass, ExecutionEnd), OperationPanicked>,
) -> Result<Receipt<T>, RunError<T, E>> {
    let fence = execution.lease().fence();
    let Ok((result, class, end)) = done else {
        // If the store does not accept that, the lease lapses, which means the same.
        let _ = execution.end(None, ExecutionEnd::Abandon { seen: None }).await;
        return Err(RunError::Panicked);
    };
    match (execution.end(None, end).await, result) {
        (ExecutionResult::Recorded(_), Ok(value)) => Ok(Receipt { value, replayed: false, fence }),
        (ExecutionResult::Recorded(_), Err(error)) => {
            Err(RunError::Failed { error, class, replayed: false })
        }
        // A release or an unknown outcome that is lost is replaced by the lapse of the lease.
        (ExecutionResult::Failed(FinishError::Pending), Err(error))
            if class != OutcomeClass::Final =>
        {
            Err(RunError::Failed { error, class, replayed: false })
        }
        (ExecutionResult::Failed(FinishError::Pending), result) => {
            Err(RunError::Pending { result })
        }
        // The outcome is not too large, because it was encoded within the limit.
        (_, result) => Err(RunError::Superseded { result }),
    }
}
