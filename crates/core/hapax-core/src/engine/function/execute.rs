//! Calls, from the claim to the result.
//!
//! The caller's future may be dropped at any await. While it claims or reconciles, the engine
//! releases what it acquired. With the lease, the operation continues on its own task.

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use serde::Serialize;
use serde::de::DeserializeOwned;
use tokio::sync::oneshot;
use tracing::Instrument;

use super::super::backlog::ActiveExchange;
use super::super::claim::{Claim, ClaimError, OperationRequest, Reconciliation};
use super::super::execution::{Execution, ExecutionEnd, ExecutionResult, OperationPanicked};
use super::super::lease::{FinishError, Lease, LeaseHandle};
use super::Receipt;
use super::declared::{Declared, Function, ReconcileCall};
use super::error::RunError;
use super::key::OperationKey;
use super::outcome::{judge, replayed};
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
    /// same request. It is [`Idempotency::at_most_once`](crate::Idempotency::at_most_once) under
    /// this function's name and policy.
    ///
    /// # Errors
    /// [`RunError`]; [the manual](crate::manual::functions) has a table of what each means.
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
        let asked = FunctionRequest::of(request).map_err(RunError::Request)?;
        self.call(scope, key, &asked, asked.bytes.clone(), operation).await
    }

    /// Does the same as [`run`](Self::run) for a request that has its own fingerprint.
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

    /// Does the same as [`run`](Self::run) by the parts of `key`, for an operation that does not
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
        // Counted from here to its end, so that a drain waits for it.
        let running = engine.inner.backlog.begin_exchange();
        // Boxed: these futures have several kilobytes.
        let mut claim = Box::pin(engine.claim(&scope, key, &named, policy)).await;
        while let Ok(Claim::Reconcile(question)) = claim {
            claim = Box::pin(self.ask(key, &bytes, question, request)).await;
        }
        match claim? {
            // No await since the claim, so it cannot be dropped in between.
            Claim::Execute(lease) => {
                let answered = self.detach(lease, running, operation);
                // The task ends without a result only when the runtime shuts down.
                answered.await.unwrap_or(Err(RunError::Interrupted))
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

    /// Calls the hook. If the future is dropped, a later call reconciles after the timeout.
    async fn ask(
        &self,
        key: &Key,
        bytes: &Bytes,
        question: Reconciliation,
        request: &dyn OperationRequest,
    ) -> Result<Claim, ClaimError> {
        let Some((hook, ask)) = &self.declared.hook else {
            return question.conclude(Verdict::CannotSay, request).await;
        };
        let doubt = ReconcileCall {
            fence: question.fence(),
            key: key.clone(),
            downstream: question.downstream(),
            request: bytes.clone(),
        };
        question.reconcile(async { ask(doubt).await }, hook.timeout, request).await
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

    /// Executes on a task that is not cancelled.
    fn detach<W, F>(
        &self,
        lease: Lease,
        running: ActiveExchange,
        operation: W,
    ) -> oneshot::Receiver<Result<Receipt<T>, RunError<T, E>>>
    where
        W: FnOnce(LeaseHandle) -> F + Send + 'static,
        F: Future<Output = Result<T, E>> + Send + 'static,
    {
        let (answer, answered) = oneshot::channel();
        let declared = Arc::clone(&self.declared);
        let task = async move {
            let _running = running;
            let execution = Execution::new(lease);
            let handle = execution.lease().handle();
            // The result is classified and encoded under the lease, which is renewed meanwhile.
            let attempt = execution.attempt(async {
                let result = operation(handle).await;
                let (class, end) = judge(&result, declared.errors.as_ref());
                (result, class, end)
            });
            let done = attempt.await;
            // The outcome is recorded even if the caller has gone.
            drop(answer.send(record(execution, done).await));
        };
        self.declared.engine.inner.runtime.spawn(task.in_current_span());
        answered
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
