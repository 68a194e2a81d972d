//! Functions that execute each call in one transaction with its record.

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

/// Format of values and rejections, in the bytes of `crate::value`.
const FORMAT: &str = "transact/1";

/// Errors of an operation in a transaction. In both cases its writes are rolled back.
pub enum OperationError<E> {
    /// The operation is rejected, finally: the error is stored, and replayed.
    Rejected(E),
    /// The operation failed, and the next call executes; `?` makes this of any error. If the error
    /// states that the transaction lost against another, the operation runs again instead, and the
    /// caller does not get the error.
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
            Self::Rejected(error) => f.debug_tuple("Rejected").field(error).finish(),
            Self::Failed(error) => f.debug_tuple("Failed").field(error).finish(),
        }
    }
}

/// Errors of a call.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum TransactError<E> {
    /// The operation rejected the call, now or in an earlier call: every call with this key gets
    /// this.
    #[error("the operation rejected the call")]
    Rejected {
        /// The error of the operation.
        error: E,
        /// True if an earlier call executed it.
        replayed: bool,
    },
    /// The transaction was rolled back: nothing was done. The next call executes.
    #[error("the transaction was rolled back: {0}")]
    RolledBack(#[source] Source),
    /// The transaction lost against others each time: nothing was done. The next call executes.
    #[error("the transaction lost against others each time: retry")]
    Exhausted,
    /// There was no transaction: nothing was done. The next call executes.
    #[error(transparent)]
    NotBegun(TakeTxError),
    /// The result of COMMIT is unknown. A retry with the same key is safe, and returns the result.
    #[error("it is not known yet whether the transaction was committed: retry with the same key")]
    CommitUnknown,
    /// The operation panicked, kept its transaction, or ended it itself: its effect is unknown. The
    /// key follows its policy for unknown outcomes.
    #[error(
        "the operation panicked, kept its transaction or ended it itself: its effect is unknown; a retry follows the policy for unknown outcomes"
    )]
    Broken,
    /// The operation rejected the call, and the store has not accepted that yet: it is a deferred
    /// write.
    #[error("the operation rejected the call, but the store has not accepted that yet")]
    Pending,
    /// Another execution took over; the writes of this one were rolled back.
    #[error(
        "another execution took over, and the writes of this one were rolled back: retry for its outcome"
    )]
    Superseded,
    /// The first call is still executing.
    #[error("the first call with this key has no outcome yet")]
    InFlight {
        /// Time to wait before the next call.
        retry_after: Duration,
    },
    /// The key belongs to another request.
    #[error("the key was used for another request")]
    KeyReused,
    /// An earlier call may have happened, and must not execute again automatically.
    #[error("an earlier call may have taken effect: nothing is executed until that is known")]
    OutcomeUnknown,
    /// The key was not used by a function in a transaction. Nothing was executed.
    #[error("expected an outcome of a function in a transaction, found the format `{format}`")]
    OtherFormat {
        /// Name of the format.
        format: String,
    },
    /// The stored outcome has no value of this type, or the value cannot be serialized.
    #[error("the value cannot be read or written: {0}")]
    Unreadable(#[source] ValueError),
    /// The request cannot be serialized.
    #[error("the request cannot be serialized")]
    Request(#[source] ValueError),
    /// The claim failed. Nothing was executed.
    #[error(transparent)]
    Claim(#[from] ClaimError),
}

impl Idempotency {
    /// Executes `operation` once for `key` of `scope`, in a transaction that commits with the
    /// record of its value, and returns that value to every call with the same request: see
    /// [`crate::transaction`].
    ///
    /// - `operation` continues on a task if this future is dropped. It runs again from the beginning
    ///   if its transaction lost against another. It drops its [`Tx`] when it has written, at the
    ///   latest at its end, and has no effect outside of it.
    /// - Its result is stored, and requests are compared, as by [`Idempotency::at_most_once`].
    /// - A policy with [`OnUnknown::Reexecute`](crate::OnUnknown) fits: the transaction of a
    ///   crashed process was rolled back, so a second execution has no second effect. Under
    ///   `Block`, the default, and under `Reconcile`, which has no hook here, an operator decides
    ///   first.
    /// - Dropping this future leaves nothing behind during the claim, and stops nothing afterwards.
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
        let request = FunctionRequest::of(request).map_err(TransactError::Request)?;
        // Counted from here on: a drain waits for what this claim begins.
        let running = self.inner.backlog.begin_exchange();
        let mut claim = self.claim(scope, key, &request, policy).await;
        while let Ok(Claim::Reconcile(reconciliation)) = claim {
            claim = reconciliation.conclude(Verdict::CannotSay, &request).await;
        }
        let lease = match claim? {
            // No await since the claim succeeded: the lease cannot be dropped in between.
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
        let database: Arc<dyn AnyTransactions> = Arc::clone(&backend.database) as _;
        let ran = lease.transact_counted(running, backend, move |tx, lease| {
            let (working, database) = (operation(tx, lease), Arc::clone(&database));
            async move {
                let given = working.await;
                match ending(&*database, &given) {
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
    database: &dyn AnyTransactions,
    given: &Result<T, OperationError<E>>,
) -> Result<ExecutionEnd, ValueError> {
    let kept =
        |result: Result<&T, &E>| Ok(Outcome::new(FORMAT, value::write(&result, MAX_OUTCOME)?));
    Ok(match given {
        Ok(value) => ExecutionEnd::Complete { outcome: kept(Ok(value))?, retention: None },
        Err(OperationError::Rejected(error)) => {
            ExecutionEnd::Reject { outcome: kept(Err(error))?, retention: None }
        }
        Err(OperationError::Failed(error)) if database.any_is_conflict(&**error) => {
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
        // A failed operation was rolled back, whether or not its release was recorded.
        (
            ExecutionResult::Recorded(_) | ExecutionResult::Failed(_),
            Err(OperationError::Failed(error)),
        )
        | (ExecutionResult::RolledBack(error), _) => Err(TransactError::RolledBack(error)),
        (ExecutionResult::Recorded(_), Ok(value)) => Ok(Receipt { value, replayed: false, fence }),
        (ExecutionResult::Recorded(_), Err(OperationError::Rejected(error))) => {
            Err(TransactError::Rejected { error, replayed: false })
        }
        (ExecutionResult::Exhausted, _) => Err(TransactError::Exhausted),
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
