//! Operations in transactions, as functions.

use std::future::Future;
use std::sync::Arc;

use super::{TakeTxError, TransactionBackend, Tx};
use crate::engine::backlog::ActiveExchange;
use crate::engine::execution::{Execution, ExecutionEnd, ExecutionResult};
use crate::engine::lease::{Lease, LeaseHandle};
use crate::transaction::Transactions;

/// Result of an operation in a transaction.
#[derive(Debug)]
pub enum TransactResult<X> {
    /// The operation ran, perhaps more than once: the end of its last run, and its value. Never
    /// [`ExecutionResult::Rerun`].
    Ended(ExecutionResult, X),
    /// The operation did not run, and its key is released: no transaction began.
    NotBegun(TakeTxError),
    /// The operation panicked, or its runtime is shutting down. Its transaction is rolled back; the
    /// record states that the outcome is unknown.
    Panicked,
}

impl Lease {
    /// Runs `operation` in a transaction that commits with its outcome: see [`crate::transaction`].
    /// An operation whose transaction lost against another runs again.
    ///
    /// All of it continues on a task if its caller is dropped.
    pub async fn transact<D, W, F, X>(
        self,
        backend: &TransactionBackend<D>,
        operation: W,
    ) -> TransactResult<X>
    where
        D: Transactions,
        W: FnMut(Tx<D::Tx>, LeaseHandle) -> F + Send + 'static,
        F: Future<Output = (ExecutionEnd, X)> + Send + 'static,
        X: Send + 'static,
    {
        // Counted from here on: a drain waits for it.
        let running = self.shared.inner.backlog.begin_exchange();
        self.transact_counted(running, backend, operation).await
    }

    /// Does the same, as part of an exchange that was begun.
    pub(in crate::engine) async fn transact_counted<D, W, F, X>(
        self,
        running: ActiveExchange,
        backend: &TransactionBackend<D>,
        operation: W,
    ) -> TransactResult<X>
    where
        D: Transactions,
        W: FnMut(Tx<D::Tx>, LeaseHandle) -> F + Send + 'static,
        F: Future<Output = (ExecutionEnd, X)> + Send + 'static,
        X: Send + 'static,
    {
        let inner = Arc::clone(&self.shared.inner);
        let lease = self.shared.terms().lease;
        let execution = Execution::in_transactions(self, backend.any());
        let running = Box::pin(async move {
            let _running = running;
            run(execution, operation).await
        });
        inner.detach_on_drop(lease, running).await.unwrap_or(TransactResult::Panicked)
    }
}

async fn run<T, W, F, X>(mut execution: Execution, mut operation: W) -> TransactResult<X>
where
    T: Send + 'static,
    W: FnMut(Tx<T>, LeaseHandle) -> F + Send + 'static,
    F: Future<Output = (ExecutionEnd, X)> + Send + 'static,
    X: Send + 'static,
{
    loop {
        let run = execution.begin_run();
        let taken = match &run {
            Some(run) => execution.lease().keep_alive(run.take()).await,
            None => Err(TakeTxError::Ended),
        };
        let tx = match taken {
            Ok(tx) => tx,
            Err(error) => {
                // If the store does not accept the release, it is deferred; a lost lease needs none.
                let _ = execution.end(run, ExecutionEnd::Withdraw).await;
                return TransactResult::NotBegun(error);
            }
        };
        let handle = execution.lease().handle();
        let attempt = execution.attempt(async { operation(tx, handle).await }).await;
        let Ok((end, value)) = attempt else {
            let _ = execution.end(run, ExecutionEnd::Abandon { seen: None }).await;
            return TransactResult::Panicked;
        };
        match execution.end(run, end).await {
            ExecutionResult::Rerun(again) => execution = again,
            ended => return TransactResult::Ended(ended, value),
        }
    }
}
