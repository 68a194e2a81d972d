//! Executions: one operation under its lease, from the claim to the record.
//!
//! Every integration executes by an [`Execution`]. They differ in how they call the operation and in
//! how they answer; everything between is here:
//!
//! 1. [`Execution::attempt`] awaits the operation, renews the lease meanwhile, and catches a panic.
//! 2. [`Execution::end`] records how it ended. With a transaction, its writes commit together with the
//!    record or are rolled back, and an operation whose transaction lost a race runs again.
//!
//! An integration runs both within [`Idempotency::detach_on_drop`](super::Idempotency::detach_on_drop):
//! a caller that goes away leaves no execution without a record.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use pin_project_lite::pin_project;
use tokio::time::sleep;

use super::backlog::ActiveExchange;
use super::lease::{FinishError, Lease};
use super::transact::commit::{CommitResult, commit, roll_back};
use super::transact::slot::ClosedSlot;
use super::transact::{TransactionBackend, TxHandle};
use crate::clock::Timestamp;
use crate::codec::MAX_OUTCOME;
use crate::machine::OwnerAction;
use crate::record::Outcome;
use crate::transaction::Source;

/// The end of an attempt, as its integration classifies it.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum ExecutionEnd {
    /// The operation happened: its writes and `outcome` commit together.
    Complete {
        /// The outcome to replay.
        outcome: Outcome,
        /// The retention, if it is not that of the policy. Zero counts as none given.
        retention: Option<Duration>,
    },
    /// The operation was rejected for good: its writes are rolled back, and then `outcome` is recorded.
    Reject {
        /// The outcome to replay.
        outcome: Outcome,
        /// The retention, if it is not that of the policy. Zero counts as none given.
        retention: Option<Duration>,
    },
    /// The operation did not happen: its writes are rolled back, and the next claim executes.
    Release,
    /// The request is to be repeated elsewhere: the writes are rolled back, the key is released, and a
    /// duplicate of this request gets the outcome.
    Redirect {
        /// The outcome to replay.
        outcome: Outcome,
    },
    /// The operation did not run: the attempt does not count.
    Withdraw,
    /// The operation may have had effects outside of its transaction, which is rolled back: a retry
    /// follows the policy for unknown outcomes.
    Abandon {
        /// The outcome that was seen, for operators.
        seen: Option<Outcome>,
    },
    /// The transaction lost a race: it is rolled back, and the operation is to run again.
    Rerun,
}

/// Result of [`Execution::end`].
#[derive(Debug)]
#[must_use = "an execution that is to run again blocks its key until it does, or its lease lapses"]
pub enum ExecutionResult {
    /// The end is recorded; with the time until which the record is stored, `None` for ever.
    Recorded(Option<Timestamp>),
    /// The transaction was rolled back, whatever the end was: run the operation again.
    Rerun(Execution),
    /// The transaction lost a race too often. It was rolled back and the key released: the next claim
    /// executes.
    Exhausted,
    /// The database rejected the transaction. It was rolled back and the key released.
    RolledBack(Source),
    /// The operation still has its transaction, or panicked with it. Only the operation itself could
    /// commit it now; the record says that the outcome is unknown.
    Kept,
    /// The operation ended its transaction itself: it is unknown what of it was committed. The record
    /// says that the outcome is unknown.
    EndedEarly(Source),
    /// COMMIT was sent, and its result is unknown. The operation does not run again before it is known.
    Unknown,
    /// The end is not recorded, or not yet; the writes were rolled back. After
    /// [`FinishError::Pending`] there were none to commit.
    Failed(FinishError),
}

/// One execution of an operation: a lease, and the transactions that the operation may use.
#[derive(Debug)]
#[must_use = "an execution that is not ended blocks its key until the lease lapses"]
pub struct Execution {
    lease: Lease,
    backend: Option<TransactionBackend>,
    reruns: u32,
}

/// The operation panicked: it may have taken effect.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
#[error("the operation panicked: it may have taken effect")]
pub struct OperationPanicked;

impl Execution {
    /// Creates the execution of an operation without transactions.
    pub const fn new(lease: Lease) -> Self {
        Self { lease, backend: None, reruns: 0 }
    }

    /// Creates the execution of an operation that may take a transaction in each of its runs.
    pub const fn in_transactions(lease: Lease, backend: TransactionBackend) -> Self {
        Self { lease, backend: Some(backend), reruns: 0 }
    }

    /// Returns the lease.
    pub const fn lease(&self) -> &Lease {
        &self.lease
    }

    /// Begins a run, and returns the handle by which the operation takes the run's transaction;
    /// `None` without transactions.
    #[must_use]
    pub fn begin_run(&self) -> Option<TxHandle> {
        let TransactionBackend { database, terms } = self.backend.as_ref()?;
        Some(TxHandle::new(Arc::clone(&self.lease.shared), Arc::clone(database), *terms))
    }

    /// Awaits `operation` and renews the lease meanwhile. Creating the operation's future belongs
    /// into `operation` too, so that a panic in it is caught.
    ///
    /// Dropping this future drops the operation.
    ///
    /// # Errors
    /// [`OperationPanicked`].
    pub fn attempt<F: Future>(
        &self,
        operation: F,
    ) -> impl Future<Output = Result<F::Output, OperationPanicked>> + use<'_, F> {
        self.lease.keep_alive(catch(operation))
    }

    /// Ends a run and records its end. From here on the operation cannot take the transaction of
    /// `run`.
    ///
    /// Dropping this future stops the wait, not the record. An operation that was to run again then
    /// is released.
    pub async fn end(self, run: Option<TxHandle>, end: ExecutionEnd) -> ExecutionResult {
        let (Some(run), Some(backend)) = (run, self.backend.clone()) else {
            return self.record(end).await;
        };
        // Before the first await: a transaction that the operation still has is not committed.
        let closed = run.close();
        let inner = Arc::clone(&self.lease.shared.inner);
        let exchange = inner.backlog.begin_exchange();
        let lease = self.lease.shared.terms().lease;
        let ending = Box::pin(async move {
            // If the caller is gone, an operation that was to run again is released.
            UndeliveredResult(Some(self.end_transaction(&backend, closed, end).await), exchange)
        });
        // A panic of the store or the database, perhaps after COMMIT.
        inner
            .detach_on_drop(lease, ending)
            .await
            .ok()
            .and_then(|mut it| it.0.take())
            .unwrap_or(ExecutionResult::Unknown)
    }

    async fn end_transaction(
        self,
        backend: &TransactionBackend,
        closed: ClosedSlot,
        end: ExecutionEnd,
    ) -> ExecutionResult {
        let shared = &self.lease.shared;
        let tx = match (closed, &end) {
            // The operation's own judgement does not count: it may have done anything with it.
            (
                ClosedSlot::Kept,
                ExecutionEnd::Complete { .. }
                | ExecutionEnd::Reject { .. }
                | ExecutionEnd::Release
                | ExecutionEnd::Redirect { .. }
                | ExecutionEnd::Withdraw
                | ExecutionEnd::Rerun,
            ) => {
                shared.resume_renewal().await;
                let _ = self.lease.abandon(None).await;
                return ExecutionResult::Kept;
            }
            (ClosedSlot::Returned(tx), ExecutionEnd::Complete { outcome, retention })
                if outcome.bytes().len() <= MAX_OUTCOME =>
            {
                let retention = retention.filter(|retention| !retention.is_zero());
                let completing = OwnerAction::Complete { outcome: outcome.clone(), retention };
                let committed = commit(shared, backend, tx, completing).await;
                shared.resume_renewal().await;
                return match committed {
                    CommitResult::Committed(until) => {
                        backend.database.any_committed(&shared.key);
                        ExecutionResult::Recorded(until)
                    }
                    CommitResult::RolledBack => self.rerun().await,
                    CommitResult::Rejected(source) => {
                        let _ = self.lease.release().await;
                        ExecutionResult::RolledBack(source)
                    }
                    CommitResult::EndedEarly(source) => self.ended_early(source, None).await,
                    CommitResult::Lost(error) => ExecutionResult::Failed(error),
                    CommitResult::Unknown => ExecutionResult::Unknown,
                };
            }
            (ClosedSlot::Returned(tx), _) => Some(tx),
            (ClosedSlot::Unused | ClosedSlot::Kept, _) => None,
        };
        let has_written = tx.is_some();
        let rolled_back = match tx {
            Some(tx) => roll_back(shared, backend, tx).await,
            None => Ok(()),
        };
        shared.resume_renewal().await;
        if let Err(source) = rolled_back {
            let seen = match end {
                ExecutionEnd::Abandon { seen } => seen,
                _ => None,
            };
            return self.ended_early(source, seen).await;
        }
        if has_written && matches!(end, ExecutionEnd::Complete { .. }) {
            // The outcome is too large to be recorded, so its writes were rolled back.
            let _ = self.lease.release().await;
            return ExecutionResult::Failed(FinishError::TooLarge);
        }
        self.record(end).await
    }

    /// Records an end that no transaction commits.
    async fn record(self, end: ExecutionEnd) -> ExecutionResult {
        let recorded = match end {
            ExecutionEnd::Complete { outcome, retention }
            | ExecutionEnd::Reject { outcome, retention } => {
                self.lease.complete(outcome, retention).await
            }
            ExecutionEnd::Release => self.lease.release().await.map(|()| None),
            ExecutionEnd::Redirect { outcome } => self.lease.redirect(outcome).await.map(|()| None),
            ExecutionEnd::Withdraw => self.lease.withdraw().await.map(|()| None),
            ExecutionEnd::Abandon { seen } => self.lease.abandon(seen).await.map(|()| None),
            ExecutionEnd::Rerun => return self.rerun().await,
        };
        recorded.map_or_else(ExecutionResult::Failed, ExecutionResult::Recorded)
    }

    async fn ended_early(self, source: Source, seen: Option<Outcome>) -> ExecutionResult {
        // If the store does not accept that, the lease lapses, which means the same.
        let _ = self.lease.abandon(seen).await;
        ExecutionResult::EndedEarly(source)
    }

    async fn rerun(mut self) -> ExecutionResult {
        if self.reruns >= self.backend.as_ref().map_or(0, |backend| backend.terms.reruns) {
            let _ = self.lease.release().await;
            return ExecutionResult::Exhausted;
        }
        sleep(self.pause()).await;
        self.reruns += 1;
        ExecutionResult::Rerun(self)
    }

    /// Returns a random pause, so that two operations that raced do not race again: up to 10 ms, then
    /// 20, 40, at most 160.
    fn pause(&self) -> Duration {
        let mut random = [0];
        // Without randomness there is no pause, which is correct too.
        let _ = self.lease.shared.inner.entropy.fill(&mut random);
        Duration::from_micros(u64::from(random[0]) * (40 << self.reruns.min(4)))
    }
}

/// A result on its way to the task that drives the execution. If that is gone, an operation that was
/// to run again is released.
///
/// A drain waits for both: the exchange ends after that.
struct UndeliveredResult(Option<ExecutionResult>, #[expect(dead_code)] ActiveExchange);

impl Drop for UndeliveredResult {
    fn drop(&mut self) {
        let Some(ExecutionResult::Rerun(Execution { lease, .. })) = self.0.take() else { return };
        let inner = Arc::clone(&lease.shared.inner);
        // A drain waits for it.
        let exchange = inner.backlog.begin_exchange();
        inner.runtime.spawn(async move {
            let _exchange = exchange;
            // It may be lost already, or deferred: both are as good.
            let _ = lease.release().await;
        });
    }
}

pin_project! {
    /// Awaits a future that may panic. After a panic the future is not polled again, only dropped. It
    /// is an `async` block, whose values the panic itself drops; a panic of their destructors is
    /// caught too.
    struct Caught<F> {
        #[pin]
        future: F,
    }
}

/// Returns a future that ends with an error if `future` panics.
pub(super) fn catch<F: Future>(
    future: F,
) -> impl Future<Output = Result<F::Output, OperationPanicked>> {
    Caught { future }
}

impl<F: Future> Future for Caught<F> {
    type Output = Result<F::Output, OperationPanicked>;

    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        let future = self.project().future;
        match catch_unwind(AssertUnwindSafe(|| future.poll(cx))) {
            Ok(poll) => poll.map(Ok),
            Err(_) => Poll::Ready(Err(OperationPanicked)),
        }
    }
}
