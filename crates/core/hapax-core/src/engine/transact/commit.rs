//! The end of a transaction: the swap, COMMIT, and the check of a COMMIT without a reply.
//!
//! All of it runs on one task, with the lock on the ownership, so that nothing else writes the
//! record on behalf of this execution.

use std::sync::Arc;
use std::time::Duration;

use tokio::time::{Instant, sleep, timeout};

use super::{TransactionBackend, TxOptions};
use crate::clock::Timestamp;
use crate::engine::idempotency::deadline_after;
use crate::engine::lease::{FinishError, LeaseState};
use crate::engine::retry::{self, ExchangeError};
use crate::exchange::{CommitStatus, Completion, Next, Ownership, WriteResult};
use crate::machine::OwnerAction;
use crate::store::{Snapshot, Swapped};
use crate::transaction::{AnyTx, Source, TxError};

/// Interval at which the result of a COMMIT is checked.
const CHECK_INTERVAL: Duration = Duration::from_millis(100);

/// Result of a commit.
pub(in crate::engine) enum CommitResult {
    /// The transaction was committed with its record, which is stored until then.
    Committed(Option<Timestamp>),
    /// The transaction was rolled back; this execution still owns the record.
    RolledBack,
    /// The transaction was rolled back because the database rejected it; this execution still owns
    /// the record.
    Rejected(Source),
    /// The operation ended the transaction, with an unknown result; this execution still owns the
    /// record.
    EndedEarly(Source),
    /// The transaction was rolled back, and this execution does not own the record any more.
    Lost(FinishError),
    /// The result is unknown.
    Unknown,
}

/// Rolls back, within the timeout of the store. If the future is dropped after that, the
/// transaction is rolled back nevertheless. Returns an error if the operation had ended the
/// transaction.
pub(in crate::engine) async fn roll_back(
    shared: &LeaseState,
    backend: &TransactionBackend,
    tx: AnyTx,
) -> Result<(), Source> {
    match timeout(shared.inner.store_timeout, backend.database.any_rollback(tx)).await {
        Ok(Err(TxError::EndedEarly(source))) => return Err(source),
        Ok(Ok(())) => {}
        Ok(Err(_)) | Err(_) => tracing::debug!(key = ?shared.key, "no reply to a rollback"),
    }
    Ok(())
}

/// Commits with `action`, a completion or a checkpoint, as the last statement.
pub(in crate::engine) async fn commit(
    shared: &LeaseState,
    backend: &TransactionBackend,
    mut tx: AnyTx,
    action: OwnerAction,
) -> CommitResult {
    let inner = &shared.inner;
    // A checkpoint sets the lease anew.
    let is_checkpoint = matches!(action, OwnerAction::Checkpoint { .. });
    let lease_from = is_checkpoint.then(|| inner.lease_clock.now());
    let TransactionBackend { database, terms } = backend;
    let mut guard = shared.ownership.lock().await;
    let completion = match guard.as_ref() {
        Some(ownership) => ownership.completion(action, &*inner.entropy),
        None => Ok(None),
    };
    let (Some(ownership), Ok(Some(completion))) = (guard.as_mut(), &completion) else {
        return match (roll_back(shared, backend, tx).await, completion) {
            (Err(source), _) => CommitResult::EndedEarly(source),
            (Ok(()), Err(error)) => CommitResult::Rejected(error.into()),
            (Ok(()), Ok(_)) => CommitResult::Lost(shared.lose(FinishError::Gone)),
        };
    };
    // Only a swap, or a transaction whose COMMIT is ambiguous, locks the row meanwhile, and neither
    // for longer than this.
    let limit = inner.store_timeout.max(terms.commit_check);
    let swapped = timeout(limit, database.any_swap_in(&mut tx, completion.swap().clone())).await;
    let stamped = match swapped {
        Ok(Ok(Swapped::Stored(stamped))) => stamped,
        // COMMIT was not sent, and will not be.
        not_stored => {
            let rolled_back = roll_back(shared, backend, tx).await;
            let seen = match (not_stored, rolled_back) {
                // The swap read that in its own transaction.
                (Ok(Ok(Swapped::Conflict(seen))), _) => seen,
                (_, Err(source)) => return CommitResult::EndedEarly(source),
                (Ok(Err(TxError::Conflict(_))), _) => return CommitResult::RolledBack,
                (Ok(Err(TxError::EndedEarly(source))), _) => {
                    return CommitResult::EndedEarly(source);
                }
                (Ok(Err(TxError::Failed(source) | TxError::Unknown(source))), _) => {
                    return CommitResult::Rejected(source);
                }
                _ => return CommitResult::Rejected("no reply to the last statement".into()),
            };
            let known = known(ownership, completion.status(seen), FinishError::Gone);
            return shared.conclude(&mut guard, known, lease_from);
        }
    };
    // Not cancelled: if the timeout passes, it continues.
    let committing = inner.runtime.spawn({
        let database = Arc::clone(database);
        async move { database.any_commit(tx).await }
    });
    let known = match timeout(limit, committing).await {
        Ok(Ok(Ok(()))) => CommitState::Committed(completion.snapshot(stamped)),
        Ok(Ok(Err(TxError::Conflict(_)))) => return CommitResult::RolledBack,
        Ok(Ok(Err(TxError::Failed(source)))) => return CommitResult::Rejected(source),
        // Ambiguous. Nothing of the operation runs between the swap and COMMIT.
        ambiguous => {
            if let Ok(Ok(Err(error))) = ambiguous {
                tracing::warn!(key = ?shared.key, error = ?error, "a COMMIT got no reply: its result is being determined");
            }
            resolve_commit(shared, ownership, completion, *terms).await
        }
    };
    shared.conclude(&mut guard, known, lease_from)
}

/// The result of a commit, where known.
enum CommitState {
    Committed(Snapshot),
    Owned,
    Lost(FinishError),
    Unknown,
}

fn known(ownership: &mut Ownership, status: CommitStatus, gone: FinishError) -> CommitState {
    match status {
        CommitStatus::Committed(seen) => CommitState::Committed(seen),
        CommitStatus::Owned(seen) => {
            ownership.update(seen);
            CommitState::Owned
        }
        CommitStatus::Lost => CommitState::Lost(FinishError::Lost),
        CommitStatus::Gone => CommitState::Lost(gone),
    }
}

/// Renews, expecting the write id from before the transaction: see [`crate::transaction`].
///
/// The last swap sent may be applied after it was given up. If it is, the transaction was rolled
/// back, and the record of an ended execution lasts a little longer.
async fn resolve_commit(
    shared: &LeaseState,
    ownership: &mut Ownership,
    completion: &Completion,
    terms: TxOptions,
) -> CommitState {
    let inner = &shared.inner;
    let deadline = deadline_after(terms.commit_check);
    let renewed = ownership.write(shared.renewal(), &*inner.entropy);
    let Ok((mut writing, mut next)) = renewed else {
        return CommitState::Unknown;
    };
    loop {
        let until = deadline.min(inner.deadline());
        let run = retry::run(&*inner.store, &*inner.entropy, until, &mut writing, next);
        match run.await {
            Ok(written) => {
                let status = match written {
                    WriteResult::Recorded(seen) => completion.renewed(writing.seen(), seen),
                    _ => completion.status(writing.into_seen()),
                };
                return match known(ownership, status, FinishError::Gone) {
                    // The record may have been committed, and removed since.
                    CommitState::Lost(FinishError::Gone) => CommitState::Unknown,
                    known => known,
                };
            }
            // Most likely the transaction whose COMMIT is ambiguous has locked the row. Send the
            // same swap again.
            Err(ExchangeError::Store { swap, .. })
                if Instant::now() + CHECK_INTERVAL < deadline =>
            {
                sleep(CHECK_INTERVAL).await;
                next = Next::Send(*swap);
            }
            Err(_) => return CommitState::Unknown,
        }
    }
}

impl LeaseState {
    /// `lease_from` is set for a checkpoint, after which the execution goes on: a time of the lease clock
    /// before its lease began.
    fn conclude(
        &self,
        guard: &mut Option<Ownership>,
        known: CommitState,
        lease_from: Option<Duration>,
    ) -> CommitResult {
        match (known, lease_from) {
            (CommitState::Committed(seen), Some(from)) => {
                if let Some(ownership) = guard {
                    ownership.update(seen);
                    self.hold_from(from, ownership);
                }
                CommitResult::Committed(None)
            }
            (CommitState::Committed(seen), None) => {
                *guard = None;
                let until = seen.stored.as_ref().and_then(|stored| stored.keep_until);
                self.inner.waiters.wake(&self.key, Some(seen));
                CommitResult::Committed(until)
            }
            (CommitState::Owned, _) => CommitResult::RolledBack,
            (CommitState::Lost(error), _) => CommitResult::Lost(self.lose(error)),
            (CommitState::Unknown, _) => CommitResult::Unknown,
        }
    }
}
