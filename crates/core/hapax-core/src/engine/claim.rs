//! Claims.

use std::sync::Arc;
use std::time::Duration;

use tokio::sync::OwnedSemaphorePermit;
use tokio::time::{Instant, timeout_at};

use super::backlog::{ActiveExchange, DeferredOutcome};
use super::idempotency::{EngineState, Idempotency, deadline_after};
use super::lease::Lease;
use super::quarantine;
use super::reconciliation::Reconciliation;
use super::request::{KeyedRequest, OperationRequest};
use super::retry::{self, ExchangeError};
use super::waiters::{Waiter, is_live};
use crate::clock::Timestamp;
use crate::codec;
use crate::entropy::EntropyError;
use crate::exchange::{self, ClaimExchange, ClaimResult, Next, Replay};

use crate::key::Key;
use crate::policy::{InFlight, Policy};
use crate::record::{Redirect, WriteId};
use crate::scope::{OperationId, Scope};
use crate::store::{Snapshot, StoreError};

/// Result of a claim.
#[derive(Debug)]
#[must_use]
pub enum Claim {
    /// The caller executes, under this lease.
    Execute(Lease),
    /// The caller replays this outcome.
    Replay(Replay),
    /// Another execution is in progress: the caller retries later.
    InFlight {
        /// Time for which it has been in progress.
        elapsed: Duration,
        /// Time until its lease lapses.
        remaining: Duration,
    },
    /// The key belongs to another request.
    Mismatch,
    /// The operation may have happened, and does not execute again automatically.
    Unknown {
        /// Time from now until a claim may call the hook; `None` if a retry cannot help, because an
        /// operator has to decide.
        reconcile_in: Option<Duration>,
    },
    /// The caller calls the hook.
    Reconcile(Reconciliation),
}

/// Errors of a claim. Nothing was executed; a claim that landed after all is released in the
/// background.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ClaimError {
    /// The store is unavailable. It returned no record of the key.
    #[error(transparent)]
    Store(#[from] StoreError),
    /// The store returned a record of the key, and then became unavailable. So the request was made
    /// before, and must not execute without a claim.
    #[error(
        "the store returned a record of this key and then became unavailable: nothing was executed; retry"
    )]
    Interrupted(#[source] StoreError),
    /// The backlog of deferred writes is full.
    #[error("the backlog of deferred writes is full: retry when the store returns")]
    Overloaded,
    /// The record's fingerprint has a scheme that is not supported here: a newer version wrote it.
    #[error("the record's fingerprint has an unsupported scheme: run the version that wrote it")]
    UnknownScheme,
    /// The store may have lost the record of the key, and a [quarantine](super::Quarantine) that applies to it is in
    /// force. Or it is not known whether there is one, since the process has not written the register of the store in time.
    #[error(
        "expected a record of this key, found none, and the store may have lost it (quarantine, or its register was not \
         written): nothing was executed; retry with the same key after {} s", seconds(.retry_in)
    )]
    Quarantined {
        /// Time after which a retry may succeed, at most a minute.
        retry_in: Duration,
    },
    /// There is no record to adopt: it expired, was released, or never existed.
    #[error("there is no record to continue: it has expired or was released")]
    NotFound,
    /// Too many conflicts with other claims in a row.
    #[error("too many claims write this key at once: retry")]
    Contended,
    /// There was no randomness for a lease id.
    #[error(transparent)]
    Entropy(#[from] EntropyError),
    /// The exchange did not end: the runtime is shutting down, or the store panicked.
    #[error(
        "the exchange with the store did not end: the runtime is shutting down, or the store panicked"
    )]
    Shutdown,
}

/// Returns a time for a text: in whole seconds, at least 1.
fn seconds(time: &Duration) -> u64 {
    (time.as_secs_f64().ceil() as u64).max(1)
}

impl Idempotency {
    /// Claims `key` of `scope` for `request`.
    ///
    /// 1. Dropping this future never leaves a claim behind: an exchange with the store continues on a
    ///    task, and a claim that lands later is released in the background.
    /// 2. Under [`InFlight::Wait`] duplicates wait here, and one of them is promoted when the owner
    ///    releases. They also wait until the hook may be called and while another claim calls it,
    ///    and do not call it after that unless it gave no verdict in time.
    /// 3. A key that this engine executes is in flight until that execution ends or its lease is
    ///    dropped, whatever the store's clock shows: clocks step, and processes pause. Another
    ///    engine over the same store decides by the lease.
    ///
    /// The policy is not checked here: call [`Policy::check`] once, where it is made.
    ///
    /// # Errors
    /// [`ClaimError`]; nothing was executed.
    pub async fn claim(
        &self,
        scope: &Scope,
        key: &Key,
        request: &dyn OperationRequest,
        policy: &Policy,
    ) -> Result<Claim, ClaimError> {
        let made_at = key.made_at();
        self.claim_made_at(self.operation_id(scope, key), made_at, request, policy).await
    }

    /// Claims the operation `key` for `request`, as [`claim`](Self::claim) does. In a quarantine every operation
    /// without a record is rejected: an id contains no time.
    ///
    /// # Errors
    /// [`ClaimError`]; nothing was executed.
    pub async fn claim_id(
        &self,
        key: OperationId,
        request: &dyn OperationRequest,
        policy: &Policy,
    ) -> Result<Claim, ClaimError> {
        self.claim_made_at(key, None, request, policy).await
    }

    async fn claim_made_at(
        &self,
        key: OperationId,
        made_at: Option<Timestamp>,
        request: &dyn OperationRequest,
        policy: &Policy,
    ) -> Result<Claim, ClaimError> {
        if !self.inner.timer.is_running() {
            // No lease would be renewed.
            return Err(ClaimError::Shutdown);
        }
        let seals = self.inner.store.capabilities().seals();
        let described = seals.then(|| request.description()).flatten();
        let request = &KeyedRequest { request, key: self.inner.fingerprint_key.as_ref() };
        let scheme = request.scheme();
        let fingerprint = request.fingerprint(&scheme).ok_or(ClaimError::UnknownScheme)?;
        let Policy { terms, settle, hook, keep_released, .. } = *policy;
        let executions = self.inner.executions.clone();
        // A record that cannot be encoded must not be written.
        let description = described.filter(|text| text.len() <= codec::MAX_DESCRIPTION);
        let claim = exchange::ClaimRequest {
            scheme,
            fingerprint,
            terms,
            settle,
            hook,
            may_reconcile: true,
            executions,
            description,
            keep_released,
            adopts: false,
            quarantine: None,
        };
        let deadline = match policy.in_flight {
            InFlight::Wait(timeout) => Some(deadline_after(timeout)),
            InFlight::Reject => None,
        };
        let call = ClaimCall { inner: Arc::clone(&self.inner), key, made_at, claim, deadline };
        // Most claims are decided by their first exchange. A wait is rare and large.
        let claimed = match call.once(call.claim.clone(), None, request).await {
            Ok(ClaimProgress::Decided(claim)) => Ok(claim),
            Ok(pending) => Box::pin(call.wait(pending, request)).await,
            Err(error) => Err(error),
        };
        claimed.map_err(|error| self.inner.quarantines().error_of(request.route(), error))
    }
}

/// Result of one exchange of a claim.
pub(super) enum ClaimProgress {
    Decided(Claim),
    /// A result for the caller, unless waiting changes it.
    Pending(Pending),
}

/// Reasons to wait.
#[derive(Clone, Copy)]
pub(super) enum Pending {
    /// An execution is in progress.
    InFlight { elapsed: Duration, remaining: Duration },
    /// Another claim calls the hook, until then.
    Reconciling { until: Instant, reconcile_at: Option<Instant> },
    /// This claim may call the hook from then on, unless the record has another write id by then.
    Due { reconcile_at: Instant, write_id: WriteId },
}

impl From<Pending> for Claim {
    fn from(pending: Pending) -> Self {
        match pending {
            Pending::InFlight { elapsed, remaining } => Self::InFlight { elapsed, remaining },
            Pending::Reconciling { reconcile_at, .. } => {
                Self::Unknown { reconcile_in: reconcile_at.map(until) }
            }
            Pending::Due { reconcile_at, .. } => {
                Self::Unknown { reconcile_in: Some(until(reconcile_at)) }
            }
        }
    }
}

fn until(moment: Instant) -> Duration {
    moment.saturating_duration_since(Instant::now())
}

/// A claim in progress: the values that each further exchange needs, and the end of its wait.
#[derive(Clone, Debug)]
pub(super) struct ClaimCall {
    pub(super) inner: Arc<EngineState>,
    pub(super) key: OperationId,
    /// Time at which the client made the key, if the key contains it.
    pub(super) made_at: Option<Timestamp>,
    pub(super) claim: exchange::ClaimRequest,
    pub(super) deadline: Option<Instant>,
}

impl ClaimCall {
    /// Claims again at each notification, until there is a result for the caller or its wait is over.
    pub(super) async fn wait(
        &self,
        mut progress: ClaimProgress,
        request: &dyn OperationRequest,
    ) -> Result<Claim, ClaimError> {
        let (mut waiter, mut claim) = (None, self.claim.clone());
        loop {
            let pending = match progress {
                ClaimProgress::Decided(claim) => return Ok(claim),
                ClaimProgress::Pending(pending) => pending,
            };
            let Some(seen) = self.wait_for_change(&mut waiter, pending).await else {
                return Ok(pending.into());
            };
            // A claim that has waited for another claim's hook does not call the hook itself:
            // otherwise all waiters would, one after the other. If that hook gave no verdict in
            // time, this claim may call it.
            claim.may_reconcile = match pending {
                Pending::Reconciling { until, .. } => until <= Instant::now(),
                Pending::InFlight { .. } | Pending::Due { .. } => true,
            };
            progress = match self.once(claim.clone(), seen, request).await {
                Ok(progress) => progress,
                // The operation was in progress when it was last seen, so it was requested before.
                Err(ClaimError::Store(error)) => return Err(ClaimError::Interrupted(error)),
                Err(ClaimError::Overloaded) => return Ok(pending.into()),
                Err(error) => return Err(error),
            };
        }
    }

    /// Sleeps until there is a notification, and returns the snapshot that came with it, if any;
    /// `None` if this call does not wait, or no longer.
    async fn wait_for_change(
        &self,
        waiter: &mut Option<Waiter>,
        pending: Pending,
    ) -> Option<Option<Snapshot>> {
        let deadline = self.deadline?;
        // The time from which the hook may be called counts as a notification.
        let (moment, known) = match pending {
            Pending::Due { reconcile_at, write_id } => (deadline.min(reconcile_at), Some(write_id)),
            Pending::InFlight { .. } | Pending::Reconciling { .. } => (deadline, None),
        };
        let Some(waiter) = waiter else {
            // Register first, then read once more: nothing between the two is missed.
            *waiter = Some(self.inner.waiters.register(self.key)?);
            return Some(None);
        };
        // Nothing is held across this await but the waiter.
        let seen = match waiter.changed(&self.inner, moment, known).await {
            Ok(seen) => seen,
            Err(_) if moment < deadline => return Some(None),
            Err(_) => return None,
        };
        // Notifications so far count as seen; later ones wake again.
        Some(seen.map(|seen| Snapshot::clone(&seen)))
    }

    pub(super) async fn once(
        &self,
        mut claim: exchange::ClaimRequest,
        seen: Option<Snapshot>,
        request: &dyn OperationRequest,
    ) -> Result<ClaimProgress, ClaimError> {
        let Self { inner, key, made_at, .. } = self;
        if let Some(found) = inner.backlog.outcome(key) {
            return answered_by(&found, request).map(ClaimProgress::Decided);
        }
        // A first execution in progress in this process counts like a record in the store: nothing
        // may execute beside it without a claim.
        let executes = inner.executions.executes(key);
        let quarantine = inner.quarantines().of(request.route());
        if inner.overloaded() {
            return Err(match executes {
                true => ClaimError::Interrupted(StoreError::unavailable(ClaimError::Overloaded)),
                false => ClaimError::Overloaded,
            });
        }
        let seen = match (seen, quarantine) {
            // A claim that expects no record would take over where the record of the execution
            // in progress has expired and was removed.
            (None, _) if executes => Some(inner.load(key).await.map_err(ClaimError::Interrupted)?),
            // It depends on the record whether the claim executes.
            (None, Some(_)) => Some(inner.load(key).await?),
            (seen, _) => seen,
        };
        claim.quarantine = quarantine.map(|quarantine| quarantine.of_key(*made_at));
        let started = match seen {
            Some(seen) => ClaimExchange::start_at(*key, claim, seen, &*inner.entropy),
            None => ClaimExchange::start(*key, claim, &*inner.entropy),
        };
        let (claiming, next) = started?;
        // Boxed, since it is moved to the exchange and back.
        self.run_exchange(Box::new(claiming), next, request).await
    }

    /// Runs exchanges until there is a result for the caller.
    pub(super) async fn run_exchange(
        &self,
        mut claiming: Box<ClaimExchange>,
        mut next: Next<ClaimResult>,
        request: &dyn OperationRequest,
    ) -> Result<ClaimProgress, ClaimError> {
        let inner = &self.inner;
        let deadline = inner.deadline();
        // Kept until the caller has its result. A future that is dropped before or after that owns
        // no key.
        let permit = timeout_at(deadline, Arc::clone(&inner.permits).acquire_owned()).await;
        // A permit that arrives at the deadline is not used: no swap is sent if no caller awaits
        // its reply.
        let Some(mut permit) =
            permit.ok().and_then(Result::ok).filter(|_| Instant::now() < deadline)
        else {
            let error = StoreError::unavailable(
                "no permit within the store timeout: earlier claims have no reply",
            );
            let known = claiming.has_seen_record();
            return Err(if known { ClaimError::Interrupted(error) } else { error.into() });
        };
        loop {
            // If this future is dropped from here on, the exchange continues on a task. A key that it
            // then acquires is released by the drop of `Handover`. If it ends here instead, the
            // handover is accepted in the same poll.
            let exchange = inner.backlog.begin_exchange();
            let start = ExchangeStart { claiming, next, deadline, permit };
            let running = Box::pin(run_claim(Arc::clone(inner), start, exchange));
            let running = inner.detach_on_drop(self.claim.terms.lease, running);
            let Ok(reply) = running.await else { return Err(ClaimError::Shutdown) };
            let (back, end, returned) = reply?;
            permit = returned;
            let claim = match end {
                // No lease would be renewed. This one lapses, or is released.
                ExchangeEnd::Owned(..) if !inner.timer.is_running() => {
                    return Err(ClaimError::Shutdown);
                }
                // The caller did not poll. The lease may lapse before its first renewal, so it is not
                // handed over; dropping it releases the key.
                ExchangeEnd::Owned(handover, _) if handover.is_stale() => {
                    let (elapsed, remaining) = (handover.age(), Duration::ZERO);
                    return Ok(ClaimProgress::Pending(Pending::InFlight { elapsed, remaining }));
                }
                // The process has confirmed it. The record that this claim found, if any, may be older. The
                // claim is withdrawn.
                ExchangeEnd::Owned(..)
                    if !self.claim.adopts
                        && inner.quarantines().began_after(back.quarantine(), request.route()) =>
                {
                    return Err(quarantine::rejected(Duration::ZERO));
                }
                ExchangeEnd::Owned(handover, _exchange) => Claim::Execute(handover.accept()),
                ExchangeEnd::Decided(ClaimResult::Rehash(scheme)) => {
                    let fingerprint =
                        request.fingerprint(&scheme).ok_or(ClaimError::UnknownScheme)?;
                    claiming = back;
                    next = claiming.rehashed(scheme, fingerprint, &*inner.entropy)?;
                    continue;
                }
                ExchangeEnd::Decided(ClaimResult::Reconcile(fence)) => {
                    Claim::Reconcile(Reconciliation { call: self.clone(), claiming: back, fence })
                }
                ExchangeEnd::Decided(ClaimResult::Replay(replay)) => Claim::Replay(replay),
                ExchangeEnd::Decided(ClaimResult::InFlight { elapsed, remaining }) => {
                    return Ok(ClaimProgress::Pending(Pending::InFlight { elapsed, remaining }));
                }
                ExchangeEnd::Decided(ClaimResult::Mismatch) => Claim::Mismatch,
                ExchangeEnd::Decided(ClaimResult::Unknown { reconcile_in }) => {
                    match (back.seen(), reconcile_in) {
                        (Snapshot { now, stored: Some(stored) }, _) if is_live(back.seen()) => {
                            let until = deadline_after(stored.lease_until.since(*now));
                            let reconcile_at = reconcile_in.map(deadline_after);
                            return Ok(ClaimProgress::Pending(Pending::Reconciling {
                                until,
                                reconcile_at,
                            }));
                        }
                        (Snapshot { stored: Some(stored), .. }, Some(reconcile_in))
                            if !reconcile_in.is_zero() =>
                        {
                            let (reconcile_at, write_id) =
                                (deadline_after(reconcile_in), stored.write_id);
                            return Ok(ClaimProgress::Pending(Pending::Due {
                                reconcile_at,
                                write_id,
                            }));
                        }
                        _ => Claim::Unknown { reconcile_in },
                    }
                }
                ExchangeEnd::Decided(ClaimResult::Quarantined { remaining }) => {
                    return Err(quarantine::rejected(remaining));
                }
                ExchangeEnd::Decided(ClaimResult::NotFound) => return Err(ClaimError::NotFound),
                ExchangeEnd::Decided(ClaimResult::Contended | ClaimResult::Execute(_)) => {
                    return Err(ClaimError::Contended);
                }
            };
            return Ok(ClaimProgress::Decided(claim));
        }
    }
}

/// Returns the answer to a claim while a write about its key is deferred.
fn answered_by(
    found: &DeferredOutcome,
    request: &dyn OperationRequest,
) -> Result<Claim, ClaimError> {
    let by = |scheme| request.fingerprint(scheme).ok_or(ClaimError::UnknownScheme);
    if by(&found.scheme)? == found.fingerprint {
        return Ok(Claim::Replay(found.replay.clone()));
    }
    for Redirect { scheme, fingerprint, outcome } in &found.redirects {
        if by(scheme)? == *fingerprint {
            let outcome = outcome.clone();
            return Ok(Claim::Replay(Replay { outcome, deferred: false, ..found.replay.clone() }));
        }
    }
    if found.releases {
        // It may execute once the key is released in the store.
        let error =
            StoreError::unavailable("the store has not accepted the release of the key yet");
        return Err(ClaimError::Interrupted(error));
    }
    Ok(Claim::Mismatch)
}

/// Result of an exchange.
enum ExchangeEnd {
    /// The exchange ends after the handover: a drain waits for the release of an undelivered lease.
    Owned(Handover, ActiveExchange),
    Decided(ClaimResult),
}

type ExchangeReply = Result<(Box<ClaimExchange>, ExchangeEnd, OwnedSemaphorePermit), ClaimError>;

/// Input of an exchange.
struct ExchangeStart {
    claiming: Box<ClaimExchange>,
    next: Next<ClaimResult>,
    deadline: Instant,
    permit: OwnedSemaphorePermit,
}

/// Runs one exchange to its end.
async fn run_claim(
    inner: Arc<EngineState>,
    start: ExchangeStart,
    exchange: ActiveExchange,
) -> ExchangeReply {
    let ExchangeStart { mut claiming, next, deadline, permit } = start;
    let mut sent_at = inner.lease_clock.now();
    let (store, entropy) = (&*inner.store, &*inner.entropy);
    let mut on_send = || sent_at = inner.lease_clock.now();
    let result =
        retry::run_timed(store, entropy, deadline, &mut *claiming, next, &mut on_send).await;
    match result {
        Ok(ClaimResult::Execute(ownership)) => {
            let lease = Lease::new(&inner, ownership, sent_at);
            Ok((claiming, ExchangeEnd::Owned(Handover(Some(lease)), exchange), permit))
        }
        Ok(claimed) => Ok((claiming, ExchangeEnd::Decided(claimed), permit)),
        Err(ExchangeError::Store { swap, error, may_land }) => {
            let known = claiming.has_seen_record();
            if may_land {
                inner.release_when_landed(*claiming, swap);
            } else {
                inner.release_owned(&claiming);
            }
            Err(if known { ClaimError::Interrupted(error) } else { ClaimError::Store(error) })
        }
        Err(ExchangeError::Entropy(error)) => {
            inner.release_owned(&claiming);
            Err(ClaimError::Entropy(error))
        }
    }
}

/// A lease on its way to the caller. It is released if it does not arrive.
struct Handover(Option<Lease>);

impl Handover {
    /// Returns whether so much of the lease has passed that it could lapse before its first renewal,
    /// which is due after a third of it: the store's reply was slow or not read at once, or the
    /// caller did not poll.
    fn is_stale(&self) -> bool {
        let lease = self.0.as_ref().map(|lease| lease.shared.terms().lease);
        lease.is_some_and(|lease| self.age() > lease / 2)
    }

    fn age(&self) -> Duration {
        self.0.as_ref().map_or(Duration::ZERO, |lease| lease.shared.age())
    }

    #[allow(clippy::unreachable, reason = "only `accept` takes it, and it takes `self`")]
    fn accept(mut self) -> Lease {
        match self.0.take() {
            Some(lease) => lease,
            None => unreachable!("a handover is accepted once"),
        }
    }
}

impl Drop for Handover {
    fn drop(&mut self) {
        if let Some(lease) = self.0.take() {
            lease.withdraw_undelivered();
        }
    }
}
