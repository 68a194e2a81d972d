//! Durations of the demo: short, so that it ends soon.
//!
//! None of these decides the result. A slow machine makes leases lapse and clients retry more
//! often, which the safe setups have to withstand; only the promise that `reconcile` resolves
//! everything needs a [`TIMEOUT`] that is long enough.

use std::time::Duration;

/// The minimum duration of a charge.
pub(crate) const WORK: Duration = Duration::from_millis(5);

/// `--upstream-timeout` of the gateway.
pub(crate) const UPSTREAM: Duration = Duration::from_millis(600);

/// A request of the service that takes this long counts as slow: the gateway may have timed out.
pub(crate) const SLOW: Duration = Duration::from_millis(300);

/// The timeout of a client's request, after which it retries.
pub(crate) const REQUEST: Duration = Duration::from_millis(1_200);

/// The duration of a stall: longer than every timeout.
pub(crate) const STALL: Duration = Duration::from_millis(2_500);

/// The limit for which a held request waits to be killed.
pub(crate) const HOLD: Duration = Duration::from_secs(10);

/// `--lease` of the gateway.
pub(crate) const LEASE: Duration = Duration::from_secs(1);

/// The longest pause of a client between two attempts.
pub(crate) const PAUSE: Duration = Duration::from_millis(400);

/// The time for which a client retries a payment without a final response.
pub(crate) const DEADLINE: Duration = Duration::from_secs(15);

/// The time for which a client retries a payment whose outcome is unknown. In it the lease of a
/// killed gateway has to lapse, and the service has to be queried.
pub(crate) const TIMEOUT: Duration = Duration::from_secs(7);

/// The longest pause of a client between two such attempts.
pub(crate) const LATER: Duration = Duration::from_millis(1_200);

/// The timeout of the demo: something is broken, not slow.
pub(crate) const WHOLE: Duration = Duration::from_secs(120);
