//! The end of a transaction: the swap, COMMIT, and the check of a COMMIT without a reply.
//!
//! It runs on its own task, from beginning to end, with the lock on the ownership, so that nothing
//! else writes the record on behalf of this execution.

use std::sync::Arc;
use std::time::Duration;

use tokio::time::{Instant, sleep, timeout};

use super::{TransactionBackend, TxOptions};
use crate::clock::Timestamp;
use crate::engine::idempotency::deadline_after;
use crate::engine::lease::{FinishError, LeaseState};
use crate::engine::retry::{self, ExchangeError};
use crate::exchange::{CommitStatus, Completion, Next, Ownership, WriteResult};
use crate::record::Outcome;
use crate::store::{Snapshot, Swapped};
use crate::transaction::{AnyTx, Source, TxError};

/// Pause between checks of a COMMIT.
const ASK: Duration = Duration::from_millis(100);

/// Result of a transaction.
pub(in crate::engine) enum CommitResult {
    /// Committed with its record, which is stored until then.
    Yes(Option<Timestamp>),
    /// Rolled back; the record is still owned.
    Again,
    /// Rolled back by the database; the record is still owned.
    Rejected(Source),
    /// The operation ended it, with unknown effect; the record is still owned.
    EndedEarly(Source),
    /// Rolled back, and the record is no longer owned.
    Not(FinishError),
    /// Unknown.
    Unknown,
}

/// Rolls back within the timeout of the store. If the future is dropped, the transaction is rolled
/// back too.
///
/// # Errors
/// The operation had ended the transaction.
pub(in crate::engine) async fn roll_back(
    shared: &LeaseState,
    backend: &TransactionBackend,
    tx: AnyTx,
) -> Result<(), Source> {
    match timeout(shared.inner.store_timeout, backend.database.any_rollback(tx)).await {
        Ok(Err(TxError::EndedEarly(source))) => return Err(source),
        Ok(Ok(())) => {}
        Ok(Err(_)) | Err(_) => tracing::debug!(key = ?shared.key, "no answer to a rollback"),
    }
    Ok(())
}

pub(in crate::engine) async fn commit(
    shared: &LeaseState,
    backend: &TransactionBackend,
    mut tx: AnyTx,
    (outcome, retention): (Outcome, Option<Duration>),
) -> CommitResult {
    let TransactionBackend { database, terms } = backend;
    let mut held = shared.ownership.lock().await;
    let inner = &shared.inner;
    let completion = match held.as_ref() {
        Some(ownership) => ownership.completion(outcome, retention, &*inner.entropy),
        None => Ok(None),
    };
    let (Some(ownership), Ok(Some(completion))) = (held.as_mut(), &completion) else {
        return match (roll_back(shared, backend, tx).await, completion) {
            (Err(source), _) => CommitResult::EndedEarly(source),
            (Ok(()), Err(error)) => CommitResult::Rejected(error.into()),
            (Ok(()), Ok(_)) => CommitResult::Not(shared.lose(FinishError::Gone)),
        };
    };
    // No other transaction has the row locked for longer than a swap takes, or than an unresolved
    // COMMIT.
    let limit = inner.store_timeout.max(terms.commit_check);
    let swapped = timeout(limit, database.any_swap_in(&mut tx, completion.swap().clone())).await;
    let stamped = match swapped {
        Ok(Ok(Swapped::Stored(stamped))) => stamped,
        // COMMIT was not sent, and will not be.
        not_stored => {
            let rolled_back = roll_back(shared, backend, tx).await;
            let seen = match (not_stored, rolled_back) {
                // The conflict was found in the transaction itself.
                (Ok(Ok(Swapped::Conflict(seen))), _) => seen,
                (_, Err(source)) => return CommitResult::EndedEarly(source),
                (Ok(Err(TxError::Conflict(_))), _) => return CommitResult::Again,
                (Ok(Err(TxError::EndedEarly(source))), _) => {
                    return CommitResult::EndedEarly(source);
                }
                (Ok(Err(TxError::Failed(source) | TxError::Unknown(source))), _) => {
                    return CommitResult::Rejected(source);
                }
                _ => return CommitResult::Rejected("no answer to the last statement".into()),
            };
            let known = known(ownership, completion.status(seen), FinishError::Gone);
            return shared.conclude(&mut held, known);
        }
    };
    // Not cancelled: after the timeout it continues.
    let committing = inner.runtime.spawn({
        let database = Arc::clone(database);
        async move { database.any_commit(tx).await }
    });
    let known = match timeout(limit, committing).await {
        Ok(Ok(Ok(()))) => CommitState::Committed(completion.snapshot(stamped)),
        Ok(Ok(Err(TxError::Conflict(_)))) => return CommitResult::Again,
        Ok(Ok(Err(TxError::Failed(source)))) => return CommitResult::Rejected(source),
        // An unknown result: no statement of the operation runs between the swap and COMMIT.
        doubt => {
            if let Ok(Ok(Err(error))) = doubt {
                tracing::warn!(key = ?shared.key, error = ?error, "a COMMIT without an answer");
            }
            settle(shared, ownership, completion, *terms).await
        }
    };
    shared.conclude(&mut held, known)
}

/// Known state of a COMMIT.
enum CommitState {
    Committed(Snapshot),
    Held,
    Not(FinishError),
    Nothing,
}

fn known(ownership: &mut Ownership, told: CommitStatus, gone: FinishError) -> CommitState {
    match told {
        CommitStatus::Committed(seen) => CommitState::Committed(seen),
        CommitStatus::Owned(seen) => {
            ownership.update(seen);
            CommitState::Held
        }
        CommitStatus::Lost => CommitState::Not(FinishError::Lost),
        CommitStatus::Gone => CommitState::Not(gone),
    }
}

/// Renews, expecting the record as it was before the transaction: see [`crate::transaction`].
///
/// The last swap may land after it was given up. Then the transaction was rolled back, and the
/// record of a crashed execution lasts a little longer.
async fn settle(
    shared: &LeaseState,
    ownership: &mut Ownership,
    completion: &Completion,
    terms: TxOptions,
) -> CommitState {
    let inner = &shared.inner;
    let deadline = deadline_after(terms.commit_check);
    let renew = shared.longer(terms.lease);
    let Ok((mut writing, mut next)) = ownership.write(renew, &*inner.entropy) else {
        return CommitState::Nothing;
    };
    loop {
        let until = deadline.min(inner.deadline());
        let run = retry::run(&*inner.store, &*inner.entropy, until, &mut writing, next);
        match run.await {
            Ok(WriteResult::Recorded(seen)) => {
                ownership.update(seen);
                return CommitState::Held;
            }
            Ok(_) => {
                match known(ownership, completion.status(writing.into_seen()), FinishError::Gone) {
                    // The transaction may have been committed, and the record removed since.
                    CommitState::Not(FinishError::Gone) => return CommitState::Nothing,
                    known => return known,
                }
            }
            // Most likely the row is locked by the unresolved transaction. The same swap again.
            Err(ExchangeError::Store { swap, .. }) if Instant::now() + ASK < deadline => {
                sleep(ASK).await;
                next = Next::Send(*swap);
            }
            Err(_) => return CommitState::Nothing,
        }
    }
}

impl LeaseState {
    fn conclude(&self, held: &mut Option<Ownership>, known: CommitState) -> CommitResult {
        match known {
            CommitState::Committed(seen) => {
                *held = None;
                let until = seen.stored.as_ref().and_then(|stored| stored.keep_until);
                self.inner.waiters.wake(&self.key, Some(seen));
                CommitResult::Yes(until)
            }
            CommitState::Held => CommitResult::Again,
            CommitState::Not(how) => CommitResult::Not(self.lose(how)),
            CommitState::Nothing => CommitResult::Unknown,
        }
    }
}
