//! Leases whose work is in a transaction.

mod commit;
#[cfg(feature = "function")]
mod function;
mod run;
mod slot;

use std::sync::Arc;
use std::time::Duration;

use tokio::sync::oneshot;
use tokio::time::sleep;

use super::lease::{FinishError, Lease};
use crate::clock::Timestamp;
use crate::codec::MAX_OUTCOME;
use crate::record::Outcome;
use crate::transaction::{AnyTransactions, Source, Transactions};

use self::commit::{CommitResult, commit, roll_back};
#[cfg(feature = "function")]
pub use self::function::{OperationError, TransactError};
pub use self::run::TransactResult;
use self::slot::ClosedSlot;
pub use self::slot::{TakeTxError, Tx, TxHandle};

/// How long transactions may take, and how often they are tried.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct TxOptions {
    /// For how long the lease is renewed before a transaction begins; it is not renewed within. A
    /// transaction that takes longer is not stopped for it, and commits only if nobody took over. (The
    /// database may end one that idles: `hapax_postgres::PgTransactions::idle`.) If the
    /// process dies, the key is in flight for so long. From 100 ms to an hour; not less than the
    /// policy's lease counts. Default 30 s.
    pub lease: Duration,
    /// How long the work waits for its transaction to begin, with a connection from the pool: not
    /// longer than until then. At least 1 ms. Default 10 s.
    pub begin: Duration,
    /// How often the work runs again whose transaction lost against another. Default 3.
    pub reruns: u32,
    /// For how long it is asked what became of a COMMIT without a reply. At most an hour. Default
    /// 10 s.
    pub commit_check: Duration,
}

/// Why terms are refused.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum TxOptionsError {
    /// A lease that lapses before anything is done, or for which a dead process blocks its keys.
    #[error("`lease` of transactions has to be 100 ms to an hour")]
    Lease,
    /// There is no time for it.
    #[error("`begin` of transactions has to be 1 ms to an hour")]
    Begin,
    /// Nobody waits that long.
    #[error("`doubt` of transactions has to be at most an hour")]
    CommitCheck,
}

impl TxOptions {
    /// # Errors
    /// [`TxOptionsError`]. Whoever takes a transaction under such terms gets that.
    pub fn check(&self) -> Result<(), TxOptionsError> {
        const HOUR: Duration = Duration::from_secs(60 * 60);
        if self.lease < Duration::from_millis(100) || self.lease > HOUR {
            return Err(TxOptionsError::Lease);
        }
        if self.begin < Duration::from_millis(1) || self.begin > HOUR {
            return Err(TxOptionsError::Begin);
        }
        if self.commit_check > HOUR {
            return Err(TxOptionsError::CommitCheck);
        }
        Ok(())
    }
}

impl Default for TxOptions {
    fn default() -> Self {
        let (lease, timeout) = (Duration::from_secs(30), Duration::from_secs(10));
        Self { lease, begin: timeout, reruns: 3, commit_check: timeout }
    }
}

/// The database that transactions are in, which must be the one with the engine's records, and how
/// long they may take. Cheap to clone.
#[derive(Debug)]
pub struct TransactionBackend<D: ?Sized = dyn AnyTransactions> {
    /// Where they come from, such as `hapax_postgres::PgTransactions`.
    pub database: Arc<D>,
    /// How long they may take.
    pub terms: TxOptions,
}

impl<D: ?Sized> TransactionBackend<D> {
    /// Transactions of `database`, under the usual terms.
    pub fn new(database: Arc<D>) -> Self {
        Self { database, terms: TxOptions::default() }
    }
}

impl<D: ?Sized> Clone for TransactionBackend<D> {
    fn clone(&self) -> Self {
        Self { database: Arc::clone(&self.database), terms: self.terms }
    }
}

impl<D: Transactions> TransactionBackend<D> {
    /// The same, for doors that do not know which database it is.
    #[must_use]
    pub fn any(&self) -> TransactionBackend {
        TransactionBackend { database: Arc::clone(&self.database) as Arc<_>, terms: self.terms }
    }
}

/// What a run of the work came to.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum TransactionEnd {
    /// It happened: its writes and `outcome` commit together.
    Complete {
        /// The answer to replay.
        outcome: Outcome,
        /// For how long, if not as the terms say; zero counts as not said.
        retention: Option<Duration>,
    },
    /// It was refused for good: its writes are rolled back, and then `outcome` is kept, by itself.
    Reject {
        /// The answer to replay.
        outcome: Outcome,
        /// For how long, if not as the terms say; zero counts as not said.
        retention: Option<Duration>,
    },
    /// It did not happen: it is rolled back, and the next claim executes.
    Release,
    /// It may have had effects outside of its transaction, which is rolled back: a retry goes by
    /// the policy for what is unknown.
    Abandon {
        /// What was seen, for operators.
        seen: Option<Outcome>,
    },
    /// The transaction lost against another: it is rolled back, and the work is to run again.
    Rerun,
}

/// What became of it.
#[derive(Debug)]
#[must_use = "what is to run again blocks its key until it does, or its lease lapses"]
pub enum TransactionResult {
    /// It is recorded as the [`TransactionEnd`] said; until when it is kept, `None` for ever.
    Recorded(Option<Timestamp>),
    /// Rolled back, whatever the ending was: run the work again, under the same lease.
    Rerun(TransactionalLease),
    /// Rolled back in favour of others once too often, and released: the next claim executes.
    Exhausted,
    /// The database refused it. Rolled back and released.
    RolledBack(Source),
    /// The work still has its transaction, or panicked with it, which can not be committed any more,
    /// unless by the work itself; the record says that the outcome is unknown.
    Kept,
    /// The work has ended its transaction by itself: nobody knows what of it was committed. The
    /// record says that the outcome is unknown.
    EndedEarly(Source),
    /// COMMIT was sent and nobody knows what became of it. It is not run again here, and nowhere
    /// else before that is known.
    Unknown,
    /// Not recorded, or not yet; whatever it was, its writes were rolled back. After
    /// [`FinishError::Pending`] there were none to commit.
    Failed(FinishError),
}

/// A lease whose work may be in a transaction, in one run after the other.
///
/// 1. [`run`](Self::run) gives the [`TxHandle`] for one run of the work.
/// 2. The work takes its [`Tx`] from that, and drops it when it has written.
/// 3. [`end`](Self::end) commits or rolls back what came back, and records the outcome. It goes on
///    when its caller is dropped.
///
/// Work that never takes a transaction is recorded as by [`Lease`] alone.
#[derive(Debug)]
#[must_use = "an execution that is not finished blocks its key until the lease lapses"]
pub struct TransactionalLease {
    lease: Lease,
    backend: TransactionBackend,
    reruns: u32,
}

impl TransactionalLease {
    /// For work under `lease`.
    pub const fn new(lease: Lease, backend: TransactionBackend) -> Self {
        Self { lease, backend, reruns: 0 }
    }

    /// The lease, to keep alive what is not in the transaction.
    pub const fn lease(&self) -> &Lease {
        &self.lease
    }

    /// The lease again, without transactions; every run has [ended](Self::end).
    #[must_use = "an execution that is not finished blocks its key until the lease lapses"]
    pub fn into_lease(self) -> Lease {
        self.lease
    }

    /// For one run of the work. Every run has its own.
    #[must_use]
    pub fn run(&self) -> TxHandle {
        let shared = Arc::clone(&self.lease.shared);
        TxHandle::new(shared, Arc::clone(&self.backend.database), self.backend.terms)
    }

    /// Ends a run. From here on the work can not get at the transaction of `run`.
    ///
    /// Dropping this future stops waiting, not what it does. What was to run again then is released.
    pub async fn end(self, run: TxHandle, ending: TransactionEnd) -> TransactionResult {
        // Before anything is awaited: what the work still has is not committed.
        let closed = run.close();
        let inner = Arc::clone(&self.lease.shared.inner);
        let exchange = inner.backlog.begin_exchange();
        let (tell, told) = oneshot::channel();
        inner.runtime.spawn(async move {
            let _talking = exchange;
            // Dropped here, or on its way, if nobody hears it.
            drop(tell.send(UndeliveredResult(Some(self.end_here(closed, ending).await))));
        });
        // The task ends without an answer only when the runtime shuts down, perhaps after COMMIT.
        told.await.ok().and_then(|mut told| told.0.take()).unwrap_or(TransactionResult::Unknown)
    }

    async fn end_here(self, closed: ClosedSlot, ending: TransactionEnd) -> TransactionResult {
        let shared = &self.lease.shared;
        let tx = match (closed, &ending) {
            // Whatever it says of itself: it may have done anything with it.
            (
                ClosedSlot::Kept,
                TransactionEnd::Complete { .. }
                | TransactionEnd::Reject { .. }
                | TransactionEnd::Release
                | TransactionEnd::Rerun,
            ) => {
                shared.resume_renewal().await;
                let _ = self.lease.abandon(None).await;
                return TransactionResult::Kept;
            }
            (ClosedSlot::Back(tx), TransactionEnd::Complete { outcome, retention })
                if outcome.bytes().len() <= MAX_OUTCOME =>
            {
                let retention = retention.filter(|retention| !retention.is_zero());
                let completing = (outcome.clone(), retention);
                let committed = commit(shared, &self.backend, tx, completing).await;
                shared.resume_renewal().await;
                return match committed {
                    CommitResult::Yes(until) => {
                        self.backend.database.any_committed(&shared.key);
                        TransactionResult::Recorded(until)
                    }
                    CommitResult::Again => self.again().await,
                    CommitResult::Rejected(source) => {
                        let _ = self.lease.release().await;
                        TransactionResult::RolledBack(source)
                    }
                    CommitResult::EndedEarly(source) => self.ended_early(source, None).await,
                    CommitResult::Not(how) => TransactionResult::Failed(how),
                    CommitResult::Unknown => TransactionResult::Unknown,
                };
            }
            (ClosedSlot::Back(tx), _) => Some(tx),
            (ClosedSlot::Unused | ClosedSlot::Kept, _) => None,
        };
        let written = tx.is_some();
        let rolled_back = match tx {
            Some(tx) => roll_back(shared, &self.backend, tx).await,
            None => Ok(()),
        };
        shared.resume_renewal().await;
        if let Err(source) = rolled_back {
            let seen = match ending {
                TransactionEnd::Abandon { seen } => seen,
                _ => None,
            };
            return self.ended_early(source, seen).await;
        }
        let done = match ending {
            TransactionEnd::Rerun => return self.again().await,
            // Too large to be kept, with writes that nobody could be told of: they are gone.
            TransactionEnd::Complete { .. } if written => {
                let _ = self.lease.release().await;
                Err(FinishError::TooLarge)
            }
            TransactionEnd::Complete { outcome, retention }
            | TransactionEnd::Reject { outcome, retention } => {
                self.lease.complete(outcome, retention).await
            }
            TransactionEnd::Release => self.lease.release().await.map(|()| None),
            TransactionEnd::Abandon { seen } => self.lease.abandon(seen).await.map(|()| None),
        };
        done.map_or_else(TransactionResult::Failed, TransactionResult::Recorded)
    }

    async fn ended_early(self, source: Source, seen: Option<Outcome>) -> TransactionResult {
        // If that is not taken, the lease lapses: nobody knows either way.
        let _ = self.lease.abandon(seen).await;
        TransactionResult::EndedEarly(source)
    }

    async fn again(mut self) -> TransactionResult {
        if self.reruns >= self.backend.terms.reruns {
            let _ = self.lease.release().await;
            return TransactionResult::Exhausted;
        }
        sleep(self.pause()).await;
        self.reruns += 1;
        TransactionResult::Rerun(self)
    }

    /// So that those who met do not meet again: up to 10 ms, then 20, 40, at most 160.
    fn pause(&self) -> Duration {
        let mut dice = [0];
        // Without dice there is no pause, which is as right.
        let _ = self.lease.shared.inner.entropy.fill(&mut dice);
        Duration::from_micros(u64::from(dice[0]) * (40 << self.reruns.min(4)))
    }
}

/// What became of a run, on its way to whoever drives it. If nobody is there any more, nobody runs it
/// again: then its key is free.
struct UndeliveredResult(Option<TransactionResult>);

impl Drop for UndeliveredResult {
    fn drop(&mut self) {
        let Some(TransactionResult::Rerun(again)) = self.0.take() else { return };
        let lease = again.into_lease();
        let inner = Arc::clone(&lease.shared.inner);
        // A drain does not miss it.
        let exchange = inner.backlog.begin_exchange();
        inner.runtime.spawn(async move {
            let _talking = exchange;
            // If it is not ours any more, or held back, that is as good.
            let _ = lease.release().await;
        });
    }
}
