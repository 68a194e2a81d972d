//! Durations of the demo, short so that it ends soon.
//!
//! None of them decides what the demo shows. On a slow machine leases lapse and clients retry more
//! often, which the safe set-ups must tolerate. There is one exception: `reconcile` resolves every
//! payment only if [`TIMEOUT`] is long enough.

use std::time::Duration;

/// The shortest time of a charge.
pub(crate) const WORK: Duration = Duration::from_millis(5);

/// `--upstream-timeout` of the gateway.
pub(crate) const UPSTREAM: Duration = Duration::from_millis(600);

/// The time from which a request counts as slow: the gateway may have reached its timeout.
pub(crate) const SLOW: Duration = Duration::from_millis(300);

/// The timeout of a client's request, after which the client retries.
pub(crate) const REQUEST: Duration = Duration::from_millis(1_200);

/// The length of a stall of the service: longer than every timeout.
pub(crate) const STALL: Duration = Duration::from_millis(2_500);

/// The limit of the time that a held request waits for the kill, which comes long before.
pub(crate) const HOLD: Duration = Duration::from_secs(10);

/// `--lease` of the gateway.
pub(crate) const LEASE: Duration = Duration::from_secs(1);

/// The longest pause of a client between two attempts.
pub(crate) const PAUSE: Duration = Duration::from_millis(400);

/// The time in which a client retries a payment without a final answer.
pub(crate) const DEADLINE: Duration = Duration::from_secs(15);

/// The time in which a client retries a payment whose outcome is unknown. The lease of a killed
/// gateway must lapse within it, and the reconcile request follow.
pub(crate) const TIMEOUT: Duration = Duration::from_secs(7);

/// The longest pause of a client between two attempts of such a payment.
pub(crate) const LATER: Duration = Duration::from_millis(1_200);

/// The time in which a process must listen, restarts included.
pub(crate) const START: Duration = Duration::from_secs(10);

/// The time that the service may take to finish requests under way.
pub(crate) const DRAIN: Duration = Duration::from_secs(15);

/// The limit of the whole demo. After this time something is broken, not slow.
pub(crate) const WHOLE: Duration = Duration::from_secs(120);
