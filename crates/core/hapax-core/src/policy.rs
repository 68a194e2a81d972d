//! What a door agrees with its callers.

use std::time::Duration;

use crate::machine::HookTiming;
use crate::record::{OnUnknown, Terms};

/// What a copy gets while the first request is in flight.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum InFlight {
    /// It is told so at once.
    #[default]
    Reject,
    /// It waits this long for the answer, or to take over if the owner gives up.
    Wait(Duration),
}

/// The terms of a claim, and how copies and unknown outcomes are treated.
///
/// The default: a lease of 30 s (how long a dead process blocks its key), a retention of 24 h
/// (how long clients may retry), rejection of copies in flight, and no second execution of what is
/// unknown until an operator resolves it ([`OnUnknown::Block`]).
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
    /// Lease, retention, and what an unknown outcome leads to.
    pub terms: Terms,
    /// Copies of a request in flight.
    pub in_flight: InFlight,
    /// When a hook may be asked; needed for [`OnUnknown::Reconcile`].
    pub hook: Option<HookTiming>,
}

impl Policy {
    /// The shortest lease: three renewals must fit with room for a slow store.
    pub const MIN_LEASE: Duration = Duration::from_millis(100);

    /// Refuses what would only show in production.
    ///
    /// # Errors
    /// [`PolicyError`] says what does not go together.
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

/// Why a policy is refused.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum PolicyError {
    /// A lease of zero holds nothing.
    #[error("the lease is zero: a claim would hold nothing")]
    NoLease,
    /// A lease under [`Policy::MIN_LEASE`] lapses before it can be renewed.
    #[error("the lease is under 100ms: it would lapse before it is renewed")]
    ShortLease,
    /// An outcome would be forgotten while its execution may still run.
    #[error("the retention is shorter than the lease: outcomes would be forgotten too early")]
    ShortRetention,
    /// There is nobody to ask.
    #[error("`reconcile` needs a hook to ask what became of an operation")]
    NoHook,
    /// A hook without time to answer.
    #[error("the hook's time-out is zero: it could never answer")]
    NoHookTimeout,
}
