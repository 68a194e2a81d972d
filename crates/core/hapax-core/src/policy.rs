//! Policies: the terms of claims, and the answers to duplicates.

use std::time::Duration;

use crate::machine::HookTiming;
use crate::record::{OnUnknown, Terms};

/// The answer to a duplicate while the operation is in flight.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum InFlight {
    /// Rejects the duplicate at once.
    #[default]
    Reject,
    /// Waits this long for the outcome. The waiter may be promoted if the owner ends without one.
    Wait(Duration),
}

/// The terms of a claim, and the treatment of duplicates and of unknown outcomes.
///
/// The default: a lease of 30 s (a crashed process blocks its key that long), a retention of 24 h
/// (clients may retry that long), rejection of duplicates in flight, and no second execution of an
/// unknown operation until an operator decides ([`OnUnknown::Block`]).
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
    /// Lease, retention, and the treatment of an unknown outcome.
    pub terms: Terms,
    /// The answer to duplicates while the operation is in flight.
    pub in_flight: InFlight,
    /// The times at which a hook may be called; required for [`OnUnknown::Reconcile`].
    pub hook: Option<HookTiming>,
}

impl Policy {
    /// The shortest lease. It leaves time for three renewals in a slow store.
    pub const MIN_LEASE: Duration = Duration::from_millis(100);

    /// Rejects a policy that would fail only in production.
    ///
    /// # Errors
    /// [`PolicyError`] names the setting, or the settings that contradict each other.
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
        }
    }
}

/// Errors of a policy.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum PolicyError {
    /// The lease is zero.
    #[error("the lease is zero: set at least 100ms")]
    NoLease,
    /// The lease is shorter than [`Policy::MIN_LEASE`] and would lapse before it is renewed.
    #[error("the lease is under 100ms and would lapse before it is renewed: set at least 100ms")]
    ShortLease,
    /// The retention is shorter than the lease. An outcome would expire while its execution may
    /// still run.
    #[error("the retention is shorter than the lease: set at least the lease")]
    ShortRetention,
    /// [`OnUnknown::Reconcile`] is set, but there is no hook.
    #[error("`reconcile` needs a hook that reports whether an operation happened: set one")]
    NoHook,
    /// The timeout of the hook is zero.
    #[error("the timeout of the hook is zero: set a longer one")]
    NoHookTimeout,
}
