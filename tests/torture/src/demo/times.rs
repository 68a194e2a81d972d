//! How long things take in the demo: short, so that it ends soon.
//!
//! None of these decides what the demo shows. A slow machine makes leases lapse and clients retry
//! more often, which the safe set-ups have to stand; only that `reconcile` settles everything
//! needs [`TIMEOUT`] to be long enough.

use std::time::Duration;

/// What a charge takes at least.
pub(crate) const WORK: Duration = Duration::from_millis(5);

/// `--upstream-timeout` of the gateway.
pub(crate) const UPSTREAM: Duration = Duration::from_millis(600);

/// What takes the service as long as this counts as slow: the gateway may have given it up.
pub(crate) const SLOW: Duration = Duration::from_millis(300);

/// After this a client gives a request up and sends it again.
pub(crate) const REQUEST: Duration = Duration::from_millis(1_200);

/// What the service sleeps when it stalls: longer than anybody waits.
pub(crate) const STALL: Duration = Duration::from_millis(2_500);

/// How long a held request waits to be killed. It does not wait that long.
pub(crate) const HOLD: Duration = Duration::from_secs(10);

/// `--lease` of the gateway.
pub(crate) const LEASE: Duration = Duration::from_secs(1);

/// The longest pause of a client between two tries.
pub(crate) const PAUSE: Duration = Duration::from_millis(400);

/// How long a client goes on with a payment that gets no final answer.
pub(crate) const DEADLINE: Duration = Duration::from_secs(15);

/// How long a client comes back to a payment of which it was told that the outcome is unknown. A
/// dead gateway's lease has to lapse in it, and the service to be asked.
pub(crate) const TIMEOUT: Duration = Duration::from_secs(7);

/// The longest pause of a client between two tries of such a payment.
pub(crate) const LATER: Duration = Duration::from_millis(1_200);

/// After this the demo gives up: something is broken, not slow.
pub(crate) const WHOLE: Duration = Duration::from_secs(120);
