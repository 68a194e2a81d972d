//! Claims.

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use tokio::sync::{OwnedSemaphorePermit, oneshot};
use tokio::time::{Instant, timeout_at};

use super::backlog::ActiveExchange;
use super::execution::catch;
use super::idempotency::{EngineState, Idempotency, deadline_after};
use super::lease::Lease;
use super::retry::{self, ExchangeError};
use super::waiters::{Waiter, is_live};
use crate::codec;
use crate::entropy::EntropyError;
use crate::exchange::{self, ClaimExchange, ClaimResult, Next, Replay};
use crate::fingerprint::{Fingerprint, FingerprintScheme};
use crate::key::Key;
use crate::machine::Verdict;
use crate::policy::{InFlight, Policy};
use crate::record::{FencingToken, WriteId};
use crate::scope::{OperationId, Scope};
use crate::store::{Snapshot, StoreError};

/// What is asked, as far as it must be told from another request under the same key.
pub trait OperationRequest: Send + Sync {
    /// The scheme in force here and now.
    fn scheme(&self) -> FingerprintScheme;

    /// The fingerprint by `scheme`, which may be one that a record was written with earlier;
    /// `None` if it is not known here.
    fn fingerprint(&self, scheme: &FingerprintScheme) -> Option<Fingerprint>;

    /// Returns the operation as operators are to see it, at most
    /// [`MAX_DESCRIPTION`](crate::codec::MAX_DESCRIPTION) bytes; a longer one is not kept. It must hold
    /// no credential. The engine asks for it, and keeps it, only where it has a secret.
    fn description(&self) -> Option<Bytes> {
        None
    }
}

/// A request as records have it: with a key its fingerprints are keyed, unless the record's scheme says
/// that it was written without one.
struct KeyedRequest<'a> {
    request: &'a dyn OperationRequest,
    key: Option<&'a [u8; 32]>,
}

impl OperationRequest for KeyedRequest<'_> {
    fn scheme(&self) -> FingerprintScheme {
        let scheme = self.request.scheme();
        if self.key.is_some() { scheme.keyed() } else { scheme }
    }

    fn fingerprint(&self, scheme: &FingerprintScheme) -> Option<Fingerprint> {
        match scheme.unkeyed() {
            // Without the key it cannot be compared: neither executed nor answered.
            Some(unkeyed) => Some(self.request.fingerprint(&unkeyed)?.keyed(self.key?)),
            None => self.request.fingerprint(scheme),
        }
    }
}

/// What a caller is to do.
#[derive(Debug)]
#[must_use]
pub enum Claim {
    /// Execute, under this lease.
    Execute(Lease),
    /// Answer with this.
    Replay(Replay),
    /// Tell the copy to come again.
    InFlight {
        /// For how long the first has been running.
        elapsed: Duration,
        /// For how long its lease lasts.
        remaining: Duration,
    },
    /// Refuse: the key belongs to another request.
    Mismatch,
    /// Refuse: it may have happened, and must not run again by itself.
    Unknown {
        /// When a claim may ask the hook, from now; `None` where asking again cannot help, because an
        /// operator has to decide.
        reconcile_in: Option<Duration>,
    },
    /// Ask the hook.
    Reconcile(Reconciliation),
}

/// Why there is no claim. Nothing was executed, and what was claimed after all is released in the
/// background.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ClaimError {
    /// The store does not answer, or answered that it cannot. It told nothing of a record.
    #[error(transparent)]
    Store(#[from] StoreError),
    /// The store told of a record under this key, and then did not answer any more. So the request
    /// was made before, and nothing may execute without a claim.
    #[error("the store stopped answering in the middle of a claim")]
    Interrupted(#[source] StoreError),
    /// Too much is held back for the store already.
    #[error("too much is held back until the store returns")]
    Overloaded,
    /// The record was fingerprinted by a scheme that is not known here: by a newer version.
    #[error("the record was fingerprinted by a scheme that is not known here")]
    UnknownScheme,
    /// Others got ahead too many times in a row.
    #[error("too many others write under this key at once")]
    Contended,
    /// There was no randomness for a grant.
    #[error(transparent)]
    Entropy(#[from] EntropyError),
    /// The task that talked to the store did not end: the runtime is shutting down.
    #[error("the runtime is shutting down")]
    Shutdown,
}

impl Idempotency {
    /// Claims `key` of `scope` for `request`.
    ///
    /// 1. Each conversation with the store runs on a task of its own. Dropping this future never
    ///    leaves a claim behind: what lands unheard is released in the background.
    /// 2. Under [`InFlight::Wait`] copies wait here, and one of them is promoted when the owner
    ///    gives up. They wait as well until the hook may be asked and while another claim asks it,
    ///    and do not ask it after that, unless there was no answer in time.
    ///
    /// 3. A key that this engine is executing is in flight until that execution ends or its lease is
    ///    dropped, whatever the clock of the store says of the lease: clocks step, and processes
    ///    stand still. Another engine over the same store goes by the lease.
    ///
    /// The policy is taken as it is: [`Policy::check`] it once, where it is made.
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
        let key = self.operation_id(scope, key);
        let described = self.inner.secret.is_some().then(|| request.description()).flatten();
        let request = &KeyedRequest { request, key: self.inner.fingerprint_key.as_ref() };
        let scheme = request.scheme();
        let fingerprint = request.fingerprint(&scheme).ok_or(ClaimError::UnknownScheme)?;
        let Policy { terms, hook, .. } = *policy;
        let executions = self.inner.executions.clone();
        // A record that cannot be encoded would be no record at all.
        let description = described.filter(|text| text.len() <= codec::MAX_DESCRIPTION);
        let may_reconcile = true;
        let claim = exchange::ClaimRequest {
            scheme,
            fingerprint,
            terms,
            hook,
            may_reconcile,
            executions,
            description,
        };
        let deadline = match policy.in_flight {
            InFlight::Wait(timeout) => Some(deadline_after(timeout)),
            InFlight::Reject => None,
        };
        let call = ClaimCall { inner: Arc::clone(&self.inner), key, claim, deadline };
        call.claim(None, request).await
    }
}

/// What is heard of a claim.
enum ClaimProgress {
    Decided(Claim),
    /// To be told, unless waiting changes it.
    Pending(Pending),
}

/// Why there is nothing to be done yet.
#[derive(Clone, Copy)]
enum Pending {
    /// Somebody executes.
    InFlight { elapsed: Duration, remaining: Duration },
    /// Somebody asks a hook, until then.
    Reconciling { until: Instant, reconcile_at: Option<Instant> },
    /// This claim may ask the hook from then on, unless the record has another tag by then.
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

/// A call for a claim: what it takes to claim again, and until when it waits.
#[derive(Clone, Debug)]
struct ClaimCall {
    inner: Arc<EngineState>,
    key: OperationId,
    claim: exchange::ClaimRequest,
    deadline: Option<Instant>,
}

impl ClaimCall {
    /// Claims, if it was not `heard` yet what comes of that, and again whenever there is news, until
    /// there is something to be told or it is too late to wait for that.
    async fn claim(
        &self,
        mut progress: Option<ClaimProgress>,
        request: &dyn OperationRequest,
    ) -> Result<Claim, ClaimError> {
        let (mut waiter, mut claim) = (None, self.claim.clone());
        loop {
            let pending = match progress {
                Some(ClaimProgress::Decided(claim)) => return Ok(claim),
                Some(ClaimProgress::Pending(pending)) => Some(pending),
                None => None,
            };
            let seen = match pending {
                Some(pending) => match self.wait_for_change(&mut waiter, pending).await {
                    Some(news) => news,
                    None => return Ok(pending.into()),
                },
                None => None,
            };
            // Whoever has waited for an answer does not ask for another: all that wait would, one
            // after the other. If none came in time, somebody else has to.
            claim.may_reconcile = match pending {
                Some(Pending::Reconciling { until, .. }) => until <= Instant::now(),
                _ => true,
            };
            progress = match (self.once(claim.clone(), seen, request).await, pending) {
                (Ok(progress), _) => Some(progress),
                // It was there when it was last seen: no reason to forget that.
                (Err(ClaimError::Store(error)), Some(_)) => {
                    return Err(ClaimError::Interrupted(error));
                }
                (Err(ClaimError::Overloaded), Some(pending)) => return Ok(pending.into()),
                (Err(error), _) => return Err(error),
            };
        }
    }

    /// Sleeps until there is news, and gives what was seen, if anything; `None` if this call does not
    /// wait, or no longer.
    async fn wait_for_change(
        &self,
        waiter: &mut Option<Waiter>,
        pending: Pending,
    ) -> Option<Option<Snapshot>> {
        let deadline = self.deadline?;
        // From the moment that the hook may be asked on, that is the news.
        let (moment, known) = match pending {
            Pending::Due { reconcile_at, write_id } => (deadline.min(reconcile_at), Some(write_id)),
            Pending::InFlight { .. } | Pending::Reconciling { .. } => (deadline, None),
        };
        let Some(waiter) = waiter else {
            // Register first, then look once more: what happened in between is not missed.
            *waiter = Some(self.inner.waiters.register(self.key)?);
            return Some(None);
        };
        // Nothing is held across this await but a place in the crowd.
        let news = match waiter.changed(&self.inner, moment, known).await {
            Ok(news) => news,
            Err(_) if moment < deadline => return Some(None),
            Err(_) => return None,
        };
        // What is told now counts as known; what is told from here on wakes again.
        Some(news.map(|news| Snapshot::clone(&news)))
    }

    async fn once(
        &self,
        claim: exchange::ClaimRequest,
        seen: Option<Snapshot>,
        request: &dyn OperationRequest,
    ) -> Result<ClaimProgress, ClaimError> {
        let Self { inner, key, .. } = self;
        if let Some(held) = inner.backlog.outcome(key) {
            let fingerprint = request.fingerprint(&held.scheme).ok_or(ClaimError::UnknownScheme)?;
            return Ok(ClaimProgress::Decided(if fingerprint == held.fingerprint {
                Claim::Replay(held.replay.clone())
            } else {
                Claim::Mismatch
            }));
        }
        // A first execution under way in this process is as good as a record that the store told of:
        // without a claim nothing may execute beside it.
        let executes = inner.executions.executes(key);
        if inner.overloaded() {
            return Err(match executes {
                true => ClaimError::Interrupted(StoreError::unavailable(ClaimError::Overloaded)),
                false => ClaimError::Overloaded,
            });
        }
        let seen = match seen {
            // A claim for an absent record, as claims begin, would take over where the record of
            // the execution under way has expired and is removed.
            None if executes => Some(inner.load(key).await.map_err(ClaimError::Interrupted)?),
            seen => seen,
        };
        let started = match seen {
            Some(seen) => ClaimExchange::start_at(*key, claim, seen, &*inner.entropy),
            None => ClaimExchange::start(*key, claim, &*inner.entropy),
        };
        let (claiming, next) = started?;
        self.run_exchange(claiming, next, request).await
    }

    /// Runs a claim's conversations until there is something for the caller to do.
    async fn run_exchange(
        &self,
        mut claiming: ClaimExchange,
        mut next: Next<ClaimResult>,
        request: &dyn OperationRequest,
    ) -> Result<ClaimProgress, ClaimError> {
        let inner = &self.inner;
        let deadline = inner.deadline();
        // Kept until the caller has what it was told: dropped before, or after, nothing is owned by
        // it.
        let permit = timeout_at(deadline, Arc::clone(&inner.permits).acquire_owned()).await;
        // A turn that comes with the deadline is none: nothing is sent that nobody waits for.
        let Some(mut permit) =
            permit.ok().and_then(Result::ok).filter(|_| Instant::now() < deadline)
        else {
            let error = StoreError::unavailable("the claims before it were not answered in time");
            let known = claiming.has_seen_record();
            return Err(if known { ClaimError::Interrupted(error) } else { error.into() });
        };
        loop {
            let (reply, progress) = oneshot::channel();
            // Dropping this future from here on drops `heard`; the task goes on, and what it then
            // owns is released: by itself if it finds `heard` gone, else by `Handover`'s drop.
            let exchange = inner.backlog.begin_exchange();
            let said = ExchangeStart { claiming, next, deadline, permit };
            inner.runtime.spawn(run_claim(Arc::clone(inner), said, reply, exchange));
            let Ok(talked) = progress.await else { return Err(ClaimError::Shutdown) };
            let (back, claimed, again) = talked?;
            permit = again;
            let claim = match claimed {
                ExchangeEnd::Owned(handover) => Claim::Execute(handover.accept()),
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
                ExchangeEnd::Decided(ClaimResult::Contended | ClaimResult::Execute(_)) => {
                    return Err(ClaimError::Contended);
                }
            };
            return Ok(ClaimProgress::Decided(claim));
        }
    }
}

/// What a conversation came to.
enum ExchangeEnd {
    Owned(Handover),
    Decided(ClaimResult),
}

type ExchangeReply = Result<(ClaimExchange, ExchangeEnd, OwnedSemaphorePermit), ClaimError>;

/// What a conversation begins with.
struct ExchangeStart {
    claiming: ClaimExchange,
    next: Next<ClaimResult>,
    deadline: Instant,
    permit: OwnedSemaphorePermit,
}

/// One conversation, to its end, whether or not anybody still listens.
async fn run_claim(
    inner: Arc<EngineState>,
    said: ExchangeStart,
    reply: oneshot::Sender<ExchangeReply>,
    _talking: ActiveExchange,
) {
    let ExchangeStart { mut claiming, next, deadline, permit } = said;
    let result = retry::run(&*inner.store, &*inner.entropy, deadline, &mut claiming, next).await;
    let talked = match result {
        Ok(ClaimResult::Execute(ownership)) => {
            let lease = Lease::new(&inner, ownership);
            Ok((claiming, ExchangeEnd::Owned(Handover(Some(lease))), permit))
        }
        Ok(claimed) => Ok((claiming, ExchangeEnd::Decided(claimed), permit)),
        Err(ExchangeError::Store { swap, error, may_land }) => {
            let known = claiming.has_seen_record();
            if may_land {
                inner.release_when_landed(claiming, swap);
            } else {
                inner.release_owned(&claiming);
            }
            Err(if known { ClaimError::Interrupted(error) } else { ClaimError::Store(error) })
        }
        Err(ExchangeError::Entropy(error)) => {
            inner.release_owned(&claiming);
            Err(ClaimError::Entropy(error))
        }
    };
    // Nobody listens any more: dropping what comes back releases it.
    drop(reply.send(talked));
}

/// A lease on its way to the caller: released if it does not arrive.
struct Handover(Option<Lease>);

impl Handover {
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
            lease.release_undelivered();
        }
    }
}

/// A question for the hook: what became of the execution with this fence?
///
/// Dropping it asks nothing and changes nothing: after the hook's time-out the next claim asks.
#[derive(Debug)]
#[must_use]
pub struct Reconciliation {
    call: ClaimCall,
    claiming: ClaimExchange,
    fence: FencingToken,
}

impl Reconciliation {
    /// The fence of the execution in doubt.
    #[must_use]
    pub const fn fence(&self) -> FencingToken {
        self.fence
    }

    /// Returns the operation id: the name of scope and key, and of the record in the store.
    #[must_use]
    pub const fn id(&self) -> OperationId {
        self.call.key
    }

    /// Returns the number of the execution in doubt, from 1.
    #[must_use]
    pub fn attempt(&self) -> u32 {
        // The claim that asks has read the record.
        self.claiming.seen().stored.as_ref().map_or(1, |stored| stored.record.attempt)
    }

    /// The key that this execution had for systems downstream, as
    /// [`LeaseHandle::downstream`](super::LeaseHandle::downstream) gave it.
    #[must_use]
    pub fn downstream(&self) -> Key {
        self.call.key.downstream()
    }

    /// Calls the hook and [concludes](Self::conclude) with its verdict. A hook that panics, or takes
    /// longer than `timeout`, cannot say. Dropping the future drops the hook's; a later claim calls
    /// it again.
    ///
    /// # Errors
    /// [`ClaimError`]; nothing was executed.
    pub async fn reconcile(
        self,
        hook: impl Future<Output = Verdict>,
        timeout: Duration,
        request: &dyn OperationRequest,
    ) -> Result<Claim, ClaimError> {
        let verdict = match tokio::time::timeout(timeout, catch(hook)).await {
            Ok(Ok(verdict)) => verdict,
            Ok(Err(_)) | Err(_) => {
                tracing::warn!(fence = %self.fence, "the reconcile hook gave no answer");
                Verdict::CannotSay
            }
        };
        self.conclude(verdict, request).await
    }

    /// What the hook said. It counts only if the record has not changed since it was asked;
    /// otherwise the claim goes by what is there now, and waits if its policy says so and there is
    /// time left. As safe to drop as [`Idempotency::claim`].
    ///
    /// # Errors
    /// [`ClaimError`]; nothing was executed.
    pub async fn conclude(
        self,
        verdict: Verdict,
        request: &dyn OperationRequest,
    ) -> Result<Claim, ClaimError> {
        let Self { call, mut claiming, .. } = self;
        let inner = Arc::clone(&call.inner);
        let request = &KeyedRequest { request, key: inner.fingerprint_key.as_ref() };
        let next = claiming.reconciled(verdict, &*call.inner.entropy)?;
        let progress = call.run_exchange(claiming, next, request).await?;
        // Those who waited for the answer look what is there now.
        if matches!(progress, ClaimProgress::Decided(Claim::Replay(_) | Claim::Unknown { .. })) {
            call.inner.waiters.wake(&call.key, None);
        }
        // Apart, since it is rare and large.
        Box::pin(call.claim(Some(progress), request)).await
    }
}
