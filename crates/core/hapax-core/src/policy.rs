//! Policies of operations.

use std::time::Duration;

use crate::machine::HookTiming;
use crate::record::{OnUnknown, Terms};

/// The handling of a duplicate while the first request is in flight.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum InFlight {
    /// The duplicate is rejected at once.
    #[default]
    Reject,
    /// The duplicate waits this long for the outcome, or takes over if the owner releases.
    Wait(Duration),
}

/// The terms of a claim, and the handling of duplicates and unknown outcomes.
///
/// The default: a lease of 30 s (the time for which a crashed process blocks its key), a retention
/// of 24 h (the time in which clients may retry), rejection of duplicates in flight, and no second
/// execution after an unknown outcome before an operator resolves it ([`OnUnknown::Block`]).
///
/// ```
/// use std::time::Duration;
/// use hapax_core::{Policy, PolicyError};
/// let mut policy = Policy::default();
/// policy.terms.lease = Duration::ZERO;
/// assert_eq!(policy.check(), Err(PolicyError::NoLease));
/// ```
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Policy {
    /// Lease, retention, and the rule for unknown outcomes.
    pub terms: Terms,
    /// Duplicates of a request in flight.
    pub in_flight: InFlight,
    /// Times at which a hook may be called; required for [`OnUnknown::Reconcile`].
    pub hook: Option<HookTiming>,
    /// Time after a lapse, or after an end without a response, in which a request that the execution sends to
    /// another system may still execute there, such as the timeout of the call; stored in the record. An
    /// operator's *did not happen* is rejected until it and
    /// [`SETTLE_MARGIN`](crate::machine::SETTLE_MARGIN) have passed. `None` if it sends none, the default.
    pub settle: Option<Duration>,
    /// Time for which a released key keeps its number of attempts; never less than the lease. A
    /// caller that claims again after a backoff needs a longer time than the longest backoff,
    /// or each claim is attempt 1.
    pub keep_released: Duration,
}

impl Policy {
    /// The shortest lease: three renewals must fit, with a slow store.
    pub const MIN_LEASE: Duration = Duration::from_millis(100);

    /// Checks the policy.
    ///
    /// # Errors
    /// [`PolicyError`] names the settings that contradict each other.
    pub fn check(&self) -> Result<(), PolicyError> {
        let Terms { lease, retention, on_unknown } = self.terms;
        if lease.is_zero() {
            return Err(PolicyError::NoLease);
        }
        if lease < Self::MIN_LEASE {
            return Err(PolicyError::ShortLease);
        }
        if retention < lease {
            return Err(PolicyError::ShortRetention);
        }
        match (on_unknown, self.hook) {
            (OnUnknown::Reconcile, None) => Err(PolicyError::NoHook),
            (_, Some(hook)) if hook.timeout.is_zero() => Err(PolicyError::NoHookTimeout),
            _ => Ok(()),
        }
    }
}

impl Default for Policy {
    fn default() -> Self {
        Self {
            terms: Terms {
                lease: Duration::from_secs(30),
                retention: Duration::from_secs(24 * 60 * 60),
                on_unknown: OnUnknown::default(),
            },
            in_flight: InFlight::default(),
            hook: None,
            settle: None,
            keep_released: Duration::ZERO,
        }
    }
}

/// Errors of a policy.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum PolicyError {
    /// The lease is zero, so a claim would own nothing.
    #[error("the lease is zero: expected at least 100ms")]
    NoLease,
    /// The lease is shorter than [`Policy::MIN_LEASE`], so it would lapse before it can be renewed.
    #[error("the lease is shorter than 100ms: it would lapse before it is renewed")]
    ShortLease,
    /// The retention is shorter than the lease, so an outcome would be removed while its execution
    /// may still run.
    #[error("the retention is shorter than the lease: outcomes would be removed too early")]
    ShortRetention,
    /// The policy is to reconcile, and there is no hook.
    #[error("`reconcile` needs a hook: configure one")]
    NoHook,
    /// The hook has no time to answer.
    #[error("the timeout of the hook is zero: expected a duration in which it can answer")]
    NoHookTimeout,
}
