//! Functions of which each call is in one transaction with its record.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use serde::Serialize;
use serde::de::DeserializeOwned;

use super::{TakeTxError, TransactResult, TransactionBackend, Tx};
use crate::codec::MAX_OUTCOME;
use crate::engine::claim::{Claim, ClaimError};
use crate::engine::execution::{ExecutionEnd, ExecutionResult};
use crate::engine::function::Receipt;
use crate::engine::function::request::FunctionRequest;
use crate::engine::idempotency::Idempotency;
use crate::engine::lease::{FinishError, LeaseHandle};
use crate::exchange::Replay;
use crate::key::Key;
use crate::machine::Verdict;
use crate::policy::Policy;
use crate::record::{FencingToken, Outcome};
use crate::scope::Scope;
use crate::transaction::{AnyTransactions, Source, Transactions};
use crate::value::{self, ValueError};

/// How values and refusals are kept, in the bytes of `crate::value`.
const FORMAT: &str = "transact/1";

/// Why work in a transaction has no value. In both cases what it wrote is rolled back.
pub enum OperationError<E> {
    /// The answer is no, and stays so: it is kept, and replayed.
    Rejected(E),
    /// It did not work out, and the next call executes; `?` makes one of any error. If it says that
    /// the transaction lost against another, the work runs again, and the caller hears nothing.
    Failed(Source),
}

impl<E, X: Into<Source>> From<X> for OperationError<E> {
    fn from(error: X) -> Self {
        Self::Failed(error.into())
    }
}

impl<E: fmt::Debug> fmt::Debug for OperationError<E> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Rejected(error) => f.debug_tuple("Refused").field(error).finish(),
            Self::Failed(error) => f.debug_tuple("Failed").field(error).finish(),
        }
    }
}

/// Why a call has no value.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum TransactError<E> {
    /// The work refused, now or in an earlier call: every call with this key gets this.
    #[error("it was refused")]
    Rejected {
        /// What it said.
        error: E,
        /// Whether an earlier call executed it.
        replayed: bool,
    },
    /// It was rolled back: nothing was done. The next call executes.
    #[error("it was rolled back: {0}")]
    RolledBack(#[source] Source),
    /// Other transactions were in the way each time: nothing was done. The next call executes.
    #[error("other transactions were in the way")]
    InTheWay,
    /// There was no transaction to be had: nothing was done. The next call executes.
    #[error(transparent)]
    NotBegun(TakeTxError),
    /// Nobody knows whether it was committed. Calling again with the same key is safe, and tells.
    #[error("whether it was committed is not known yet")]
    CommitUnknown,
    /// The work panicked, kept its transaction, or ended it by itself: nobody knows what it did. The
    /// key goes by its policy for what is unknown.
    #[error("the work panicked, or did not give its transaction back as it was")]
    Broken,
    /// It was refused, and that is still on its way to the store.
    #[error("it was refused, and that is on its way to the store")]
    Pending,
    /// Another execution took over; what this one wrote was rolled back.
    #[error("another execution took over")]
    Superseded,
    /// The first call is still running.
    #[error("the first call with this key has no outcome yet")]
    InFlight {
        /// When to call again.
        retry_after: Duration,
    },
    /// The key belongs to another request.
    #[error("another request was made with this key")]
    KeyReused,
    /// An earlier call may have happened, and must not run again by itself.
    #[error("whether an earlier call took effect is not known")]
    OutcomeUnknown,
    /// The key was used by something that is no function in a transaction. Nothing was executed.
    #[error("what was kept is in another format: {format}")]
    OtherFormat {
        /// Its name.
        format: String,
    },
    /// What was kept is no value of this type, or the value can not be written.
    #[error("it cannot be read or written: {0}")]
    Unreadable(#[source] ValueError),
    /// The request cannot be written.
    #[error("the request cannot be written")]
    Request(#[source] ValueError),
    /// The store, while the key was claimed. Nothing was executed.
    #[error(transparent)]
    Claim(#[from] ClaimError),
}

impl Idempotency {
    /// Executes `work` once for `key` of `scope`, in a transaction that commits with the record of
    /// its value, and gives that to every call that asks the same: see [`crate::transaction`].
    ///
    /// - `work` runs on a task of its own, again and from the beginning where its transaction lost
    ///   against another. It drops its [`Tx`] when it has written, at the latest with its end, and
    ///   does nothing outside of it.
    /// - What it returns is kept, and requests are compared, as by [`Idempotency::at_most_once`].
    /// - A policy with [`OnUnknown::Reexecute`](crate::OnUnknown) fits: what died in the middle was
    ///   rolled back, so that a second execution has no second effect. Under `Block`, the default, and
    ///   under `Reconcile`, which has no hook here, an operator decides first.
    /// - Dropping this future leaves nothing behind while it claims, and stops nothing afterwards.
    ///
    /// # Errors
    /// [`TransactError`].
    pub async fn transact<D, R, T, E, W, F>(
        &self,
        backend: &TransactionBackend<D>,
        (scope, key): (&Scope, &Key),
        request: &R,
        policy: &Policy,
        mut operation: W,
    ) -> Result<Receipt<T>, TransactError<E>>
    where
        D: Transactions,
        R: Serialize + ?Sized,
        T: Serialize + DeserializeOwned + Send + 'static,
        E: Serialize + DeserializeOwned + Send + 'static,
        W: FnMut(Tx<D::Tx>, LeaseHandle) -> F + Send + 'static,
        F: Future<Output = Result<T, OperationError<E>>> + Send + 'static,
    {
        let asked = FunctionRequest::of(request).map_err(TransactError::Request)?;
        // Counted from here on: a drain does not miss what this claim begins.
        let _running = self.inner.backlog.begin_exchange();
        let mut claim = self.claim(scope, key, &asked, policy).await;
        while let Ok(Claim::Reconcile(question)) = claim {
            claim = question.conclude(Verdict::CannotSay, &asked).await;
        }
        let lease = match claim? {
            // No await since the claim was granted: it cannot be dropped in between.
            Claim::Execute(lease) => lease,
            Claim::Replay(replay) => return replayed(&replay),
            Claim::InFlight { elapsed, remaining } => {
                let retry_after = elapsed.min(remaining).max(Duration::from_secs(1));
                return Err(TransactError::InFlight { retry_after });
            }
            Claim::Mismatch => return Err(TransactError::KeyReused),
            Claim::Unknown { .. } | Claim::Reconcile(_) => {
                return Err(TransactError::OutcomeUnknown);
            }
        };
        let fence = lease.fence();
        let judge: Arc<dyn AnyTransactions> = Arc::clone(&backend.database) as _;
        let ran = lease.transact(backend, move |tx, lease| {
            let (working, judge) = (operation(tx, lease), Arc::clone(&judge));
            async move {
                let given = working.await;
                match ending(&*judge, &given) {
                    Ok(ending) => (ending, given),
                    Err(error) => {
                        (ExecutionEnd::Release, Err(OperationError::Failed(Box::new(error))))
                    }
                }
            }
        });
        conclude(ran.await, fence)
    }
}

fn replayed<T, E>(replay: &Replay) -> Result<Receipt<T>, TransactError<E>>
where
    T: DeserializeOwned,
    E: DeserializeOwned,
{
    if replay.outcome.format() != FORMAT {
        let format = replay.outcome.format().to_owned();
        return Err(TransactError::OtherFormat { format });
    }
    match value::read::<Result<T, E>>(replay.outcome.bytes()) {
        Ok(_) if replay.deferred => Err(TransactError::Pending),
        Ok(Ok(value)) => Ok(Receipt { value, replayed: true, fence: replay.fence }),
        Ok(Err(error)) => Err(TransactError::Rejected { error, replayed: true }),
        Err(error) => Err(TransactError::Unreadable(error)),
    }
}

fn ending<T: Serialize, E: Serialize>(
    judge: &dyn AnyTransactions,
    given: &Result<T, OperationError<E>>,
) -> Result<ExecutionEnd, ValueError> {
    let kept =
        |result: Result<&T, &E>| Ok(Outcome::new(FORMAT, value::write(&result, MAX_OUTCOME)?));
    Ok(match given {
        Ok(value) => ExecutionEnd::Complete { outcome: kept(Ok(value))?, retention: None },
        Err(OperationError::Rejected(error)) => {
            ExecutionEnd::Reject { outcome: kept(Err(error))?, retention: None }
        }
        Err(OperationError::Failed(error)) if judge.any_is_conflict(&**error) => {
            ExecutionEnd::Rerun
        }
        Err(OperationError::Failed(_)) => ExecutionEnd::Release,
    })
}

fn conclude<T, E>(
    ran: TransactResult<Result<T, OperationError<E>>>,
    fence: FencingToken,
) -> Result<Receipt<T>, TransactError<E>> {
    let (ended, given) = match ran {
        TransactResult::Ended(ended, given) => (ended, given),
        TransactResult::NotBegun(TakeTxError::Lease(FinishError::Lost | FinishError::Gone)) => {
            return Err(TransactError::Superseded);
        }
        TransactResult::NotBegun(error) => return Err(TransactError::NotBegun(error)),
        TransactResult::Panicked => return Err(TransactError::Broken),
    };
    match (ended, given) {
        // What failed was rolled back, whatever became of the record since.
        (
            ExecutionResult::Recorded(_) | ExecutionResult::Failed(_),
            Err(OperationError::Failed(error)),
        )
        | (ExecutionResult::RolledBack(error), _) => Err(TransactError::RolledBack(error)),
        (ExecutionResult::Recorded(_), Ok(value)) => Ok(Receipt { value, replayed: false, fence }),
        (ExecutionResult::Recorded(_), Err(OperationError::Rejected(error))) => {
            Err(TransactError::Rejected { error, replayed: false })
        }
        (ExecutionResult::Exhausted, _) => Err(TransactError::InTheWay),
        (ExecutionResult::Kept | ExecutionResult::EndedEarly(_), _) => Err(TransactError::Broken),
        (ExecutionResult::Failed(FinishError::Pending), _) => Err(TransactError::Pending),
        (ExecutionResult::Failed(FinishError::TooLarge), _) => {
            Err(TransactError::RolledBack(FinishError::TooLarge.into()))
        }
        (ExecutionResult::Failed(_), _) => Err(TransactError::Superseded),
        (ExecutionResult::Unknown | ExecutionResult::Rerun(_), _) => {
            Err(TransactError::CommitUnknown)
        }
    }
}
