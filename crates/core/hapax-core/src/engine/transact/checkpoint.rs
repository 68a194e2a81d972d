//! Transactions within an execution: each commits with a checkpoint, and the execution goes on.

use std::sync::Arc;

use bytes::Bytes;

use super::commit::{CommitResult, commit, roll_back};
use super::slot::ClosedSlot;
use super::{TransactionBackend, TxHandle};
use crate::codec::MAX_CHECKPOINT;
use crate::engine::lease::{FinishError, LeaseHandle, LeaseState};
use crate::machine::OwnerAction;
use crate::transaction::Source;

/// Result of [`LeaseHandle::commit`].
#[derive(Debug)]
#[must_use]
pub enum CheckpointCommit {
    /// The writes and the checkpoint are committed.
    Committed,
    /// The transaction was rolled back because it lost against another, or its operation kept it.
    RolledBack,
    /// The transaction was rolled back, because the database rejected it.
    Rejected(Source),
    /// The lease was lost: the transaction was rolled back, or this execution has ended.
    Lost(FinishError),
    /// The operation ended its transaction itself: which of its writes were committed is unknown, and
    /// the checkpoint was not. This execution still owns the record.
    EndedEarly(Source),
    /// The writes and the checkpoint may have been committed: COMMIT has no reply yet. This execution
    /// must end; the next one finds the checkpoint or not.
    Unknown,
}

impl LeaseHandle {
    /// Returns the handle by which an operation takes a transaction, which ends by
    /// [`commit`](Self::commit) or [`roll_back`](Self::roll_back). The lease is not renewed while the
    /// transaction is in progress: see [`crate::transaction`].
    #[must_use]
    pub fn begin(&self, backend: &TransactionBackend) -> TxHandle {
        let TransactionBackend { database, terms } = backend;
        TxHandle::new(Arc::clone(&self.shared), Arc::clone(database), *terms)
    }

    /// Commits a transaction together with a checkpoint. If none was taken, it saves the checkpoint
    /// only. This continues on a task if its caller is dropped.
    pub async fn commit(
        &self,
        backend: &TransactionBackend,
        tx: TxHandle,
        checkpoint: Bytes,
    ) -> CheckpointCommit {
        // Before the first await: a transaction that the operation still has is not committed.
        let closed = tx.close();
        let (shared, backend) = (Arc::clone(&self.shared), backend.clone());
        self.detached(async move {
            let committed = commit_closed(&shared, &backend, closed, checkpoint).await;
            shared.resume_renewal().await;
            committed
        })
        .await
        .unwrap_or(CheckpointCommit::Unknown)
    }

    /// Rolls a transaction back. If the operation ended it itself, which writes were committed is
    /// unknown: an error.
    ///
    /// # Errors
    /// The error of the database.
    pub async fn roll_back(
        &self,
        backend: &TransactionBackend,
        tx: TxHandle,
    ) -> Result<(), Source> {
        let closed = tx.close();
        let (shared, backend) = (Arc::clone(&self.shared), backend.clone());
        let rolled_back = self.detached(async move {
            let rolled_back = match closed {
                ClosedSlot::Returned(tx) => roll_back(&shared, &backend, tx).await,
                // One that the operation kept is rolled back when it is dropped.
                ClosedSlot::Unused | ClosedSlot::Kept => Ok(()),
            };
            shared.resume_renewal().await;
            rolled_back
        });
        rolled_back.await.unwrap_or_else(|| Err("the runtime is shutting down".into()))
    }

    /// Runs a part of the execution, on a task if the caller is dropped. `None`: it panicked.
    async fn detached<T: Send + 'static>(
        &self,
        part: impl Future<Output = T> + Send + 'static,
    ) -> Option<T> {
        let inner = &self.shared.inner;
        let exchange = inner.backlog.begin_exchange();
        let part = Box::pin(async move {
            let _exchange = exchange;
            part.await
        });
        inner.detach_on_drop(self.shared.terms().lease, part).await.ok()
    }
}

async fn commit_closed(
    shared: &Arc<LeaseState>,
    backend: &TransactionBackend,
    closed: ClosedSlot,
    checkpoint: Bytes,
) -> CheckpointCommit {
    let lease = shared.terms().lease;
    let tx = match closed {
        ClosedSlot::Returned(tx) if checkpoint.len() <= MAX_CHECKPOINT => tx,
        ClosedSlot::Returned(tx) => {
            return match roll_back(shared, backend, tx).await {
                Ok(()) => CheckpointCommit::Rejected("the checkpoint is too large".into()),
                Err(source) => CheckpointCommit::EndedEarly(source),
            };
        }
        ClosedSlot::Kept => return CheckpointCommit::RolledBack,
        ClosedSlot::Unused => {
            shared.resume_renewal().await;
            return match shared.save(checkpoint).await {
                Ok(()) => CheckpointCommit::Committed,
                Err(FinishError::Pending) => CheckpointCommit::Unknown,
                Err(error) => CheckpointCommit::Lost(error),
            };
        }
    };
    match commit(shared, backend, tx, OwnerAction::Checkpoint { checkpoint, lease }).await {
        CommitResult::Committed(_) => {
            backend.database.any_committed(&shared.key);
            CheckpointCommit::Committed
        }
        CommitResult::RolledBack => CheckpointCommit::RolledBack,
        CommitResult::Rejected(source) => CheckpointCommit::Rejected(source),
        CommitResult::Lost(error) => CheckpointCommit::Lost(error),
        CommitResult::EndedEarly(source) => CheckpointCommit::EndedEarly(source),
        CommitResult::Unknown => CheckpointCommit::Unknown,
    }
}
