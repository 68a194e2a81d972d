//! Work as a function.

use std::future::Future;
use std::sync::Arc;

use tracing::Instrument;

use super::{
    TakeTxError, TransactionBackend, TransactionEnd, TransactionResult, TransactionalLease, Tx,
};
use crate::engine::lease::{Lease, LeaseHandle};
use crate::transaction::Transactions;

/// What became of work in a transaction.
#[derive(Debug)]
pub enum TransactResult<X> {
    /// It ran, perhaps more than once; what the last run gave, and what became of that. Never
    /// [`TransactionResult::Rerun`].
    Ended(TransactionResult, X),
    /// It did not run, and its key is released: there was no transaction to be had.
    NotBegun(TakeTxError),
    /// It panicked, or its runtime is shutting down. Its transaction is rolled back; the record
    /// says that the outcome is unknown.
    Panicked,
}

impl Lease {
    /// Runs `work` in a transaction that commits with its outcome: see [`crate::transaction`]. Work
    /// whose transaction lost against another runs again.
    ///
    /// All of it is on a task of its own: it goes on when its caller is dropped.
    pub async fn transact<D, W, F, X>(
        self,
        backend: &TransactionBackend<D>,
        operation: W,
    ) -> TransactResult<X>
    where
        D: Transactions,
        W: FnMut(Tx<D::Tx>, LeaseHandle) -> F + Send + 'static,
        F: Future<Output = (TransactionEnd, X)> + Send + 'static,
        X: Send + 'static,
    {
        let inner = Arc::clone(&self.shared.inner);
        // Counted from here on: a drain does not miss it.
        let running = inner.backlog.begin_exchange();
        let transacting = TransactionalLease::new(self, backend.any());
        let task = async move {
            let _running = running;
            run(transacting, operation).await
        };
        inner.runtime.spawn(task.in_current_span()).await.unwrap_or(TransactResult::Panicked)
    }
}

async fn run<T, W, F, X>(mut transacting: TransactionalLease, mut operation: W) -> TransactResult<X>
where
    T: Send + 'static,
    W: FnMut(Tx<T>, LeaseHandle) -> F + Send + 'static,
    F: Future<Output = (TransactionEnd, X)> + Send + 'static,
    X: Send + 'static,
{
    loop {
        let run = transacting.run();
        let lease = transacting.lease();
        let tx = match lease.keep_alive(run.take()).await {
            Ok(tx) => tx,
            Err(error) => {
                // If the store does not take the release, it is held back; if it is not ours, it
                // need not be released.
                let _ = transacting.end(run, TransactionEnd::Release).await;
                return TransactResult::NotBegun(error);
            }
        };
        let handle = lease.handle();
        let runtime = lease.shared.inner.runtime.clone();
        // On a task, so that a panic ends that and not this one.
        let working = async move {
            let given = operation(tx, handle).await;
            (operation, given)
        };
        let working = runtime.spawn(working.in_current_span());
        let Ok((back, (ending, given))) = working.await else {
            let _ = transacting.end(run, TransactionEnd::Abandon { seen: None }).await;
            return TransactResult::Panicked;
        };
        operation = back;
        match transacting.end(run, ending).await {
            TransactionResult::Rerun(again) => transacting = again,
            ended => return TransactResult::Ended(ended, given),
        }
    }
}
