//! Reconciliation without a retry, by a process that has no request for the operation.

use std::time::Duration;

use bytes::Bytes;
use tokio::time::timeout;

use super::claim::ClaimError;
use super::execution::catch;
use super::idempotency::Idempotency;
use crate::clock::Timestamp;
use crate::exchange::{Resolved, WriteExchange, WriteResult};
use crate::machine::{Announcement, Verdict};
use crate::policy::Policy;
use crate::record::{FencingToken, RecordState};
use crate::scope::OperationId;
use crate::store::{Snapshot, StoredRecord};

/// An operation to reconcile without a retry.
#[derive(Clone, Debug)]
pub struct UndecidedOperation<'a> {
    /// Its operation id.
    pub id: OperationId,
    /// Its record, which was [loaded](Idempotency::load) just now.
    pub seen: Snapshot,
    /// Fence of the execution whose outcome is unknown, from the record by which the hook was chosen. A record with
    /// another fence is not changed.
    pub fence: FencingToken,
    /// Name of its route, by which [quarantines](super::Quarantine) apply.
    pub route: Option<&'a str>,
    /// Time from the last write of the record until the hook may be called, in any process, if the outcome was unknown
    /// by then.
    pub pause: Duration,
    /// Decision that the record keeps if the operation did not happen, for operators.
    pub note: Option<Bytes>,
}

/// Result of a reconciliation without a retry.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Reconciled {
    /// The operation happened, and retries get the outcome.
    Happened,
    /// The operation did not happen: the key is released, and the next claim executes.
    DidNotHappen,
    /// The hook could not say: the outcome stays unknown.
    CannotSay,
    /// The hook may be called later: the first request may still be on its way, the last call was just now, or
    /// another process calls the hook.
    NotYet {
        /// The time until then.
        retry_in: Duration,
    },
    /// An execution is in progress, or its outcome is on its way to the store.
    InFlight,
    /// An operator or a retry has to decide: the policy of the record or of the route does not call a hook, or the
    /// record has a checkpoint, from which a retry may continue.
    Blocked,
    /// There is nothing to decide about this execution: the record is done, was released or executed anew, or is gone.
    Decided,
}

impl Reconciled {
    /// Returns the name of the result in the operators' API and in the audit file.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Happened => "happened",
            Self::DidNotHappen => "did-not-happen",
            Self::CannotSay => "cannot-say",
            Self::NotYet { .. } => "not-yet",
            Self::InFlight => "in-flight",
            Self::Blocked => "blocked",
            Self::Decided => "decided",
        }
    }
}

impl Idempotency {
    /// Calls `hook`, with fence and attempt, about an operation whose outcome is unknown, and concludes with its verdict.
    /// It claims nothing and executes nothing: after *did not happen* the key is released.
    ///
    /// 1. Only the record with the fence of `undecided` is changed, and only if record and `policy` have
    ///    [`OnUnknown::Reconcile`](crate::OnUnknown::Reconcile).
    /// 2. The hook is not called before the first request has ended: after a crash, a lease, the hook's
    ///    [`after`](crate::HookTiming::after) and the record's settle time after the last renewal.
    /// 3. The record announces the call, so that no other process or retry calls the hook at the same time. The
    ///    verdict counts only if the record has not changed since.
    ///
    /// A hook that panics or takes longer than its timeout cannot say. If the future is dropped, a write in progress
    /// continues; a hook whose verdict is missing is called again after its timeout.
    ///
    /// # Errors
    /// [`ClaimError`]; the outcome stays unknown, or the verdict was stored after all.
    pub async fn reconcile_without_retry<F>(
        &self,
        undecided: UndecidedOperation<'_>,
        policy: &Policy,
        hook: impl FnOnce(FencingToken, u32) -> F,
    ) -> Result<Reconciled, ClaimError>
    where
        F: Future<Output = Verdict>,
    {
        let UndecidedOperation { id, seen, fence, route, pause, note } = undecided;
        let inner = &self.inner;
        if !inner.timer.is_running() {
            return Err(ClaimError::Shutdown);
        }
        let Some(timing) = policy.hook else { return Ok(Reconciled::Blocked) };
        // The owner is in this process, whatever the store's clock shows of its lease, or it has ended and the store
        // has not accepted its outcome yet.
        if inner.executions.runs(&id, &seen) || inner.backlog.outcome(&id).is_some() {
            return Ok(Reconciled::InFlight);
        }
        let applied = inner.quarantines().of(route);
        let announcement = Announcement {
            expected: fence,
            terms: policy.terms,
            hook: timing,
            pause,
            quarantine: applied.map(|quarantine| quarantine.of_key(None)),
        };
        let started = WriteExchange::announce(id, seen, announcement, &*inner.entropy)?;
        let (now, stored) = match self.write(id, started).await? {
            Resolved { result: WriteResult::Recorded(announced), .. } => match announced {
                Snapshot { now, stored: Some(stored) } => (now, stored),
                Snapshot { stored: None, .. } => return Err(ClaimError::Contended),
            },
            resolved => return not_written(&resolved, fence),
        };
        let (announced, attempt) = (stored.write_id, stored.record.attempt);
        let verdict = match timeout(timing.timeout, catch(hook(fence, attempt))).await {
            // A quarantine that has begun since: a later execution, whose record is lost, may have sent a request.
            Ok(Ok(Verdict::DidNotHappen)) if inner.quarantines().of(route) != applied => {
                Verdict::CannotSay
            }
            Ok(Ok(verdict)) => verdict,
            Ok(Err(_)) | Err(_) => {
                tracing::warn!(%fence, "the reconcile hook panicked or timed out: the outcome stays unknown");
                Verdict::CannotSay
            }
        };
        let reconciled = match &verdict {
            Verdict::Happened(_) => Reconciled::Happened,
            Verdict::DidNotHappen => Reconciled::DidNotHappen,
            Verdict::CannotSay => Reconciled::CannotSay,
        };
        let seen = Snapshot { now, stored: Some(stored) };
        let concluded = (verdict, note);
        let started = WriteExchange::conclude(id, seen, announced, concluded, &*inner.entropy)?;
        let resolved = self.write(id, started).await?;
        match resolved.result {
            WriteResult::Recorded(_) => Ok(reconciled),
            _ => not_written(&resolved, fence),
        }
    }
}

/// Returns the result for a record that was not written, by the record that prevented it.
fn not_written(resolved: &Resolved, fence: FencingToken) -> Result<Reconciled, ClaimError> {
    let Resolved { result, was: Snapshot { now, stored } } = resolved;
    let retry_in = |until: Timestamp| Reconciled::NotYet { retry_in: until.since(*now) };
    let stored = stored.as_ref().filter(|stored| stored.fence == fence);
    Ok(match (result, stored) {
        (WriteResult::MayExecute { until }, _) => retry_in(*until),
        (WriteResult::Rejected, Some(StoredRecord { record, lease_until, .. })) => {
            match record.state {
                RecordState::InFlight if now < lease_until => Reconciled::InFlight,
                _ => Reconciled::Blocked,
            }
        }
        (WriteResult::Changed, Some(StoredRecord { record, lease_until, .. })) => {
            match record.state {
                // Another call of the hook was announced, after the time of this one.
                RecordState::Unknown { reconciling: true, .. } => retry_in(*lease_until),
                _ => Reconciled::Decided,
            }
        }
        (WriteResult::NotFound | WriteResult::Changed, _) => Reconciled::Decided,
        _ => return Err(ClaimError::Contended),
    })
}
