//! An estimate of the store's clock during one execution.

use std::time::Duration;

use hapax_core::LeaseHandle;

use crate::log::LogTime;

/// The store's clock at the claim, continued by the clocks of this process.
///
/// The estimate begins with the fence, which the store issues from its clock at the claim, or with the latest
/// time of the log if that is later: so the times of one log grow, even if the store's clock steps back
/// between two executions, and no key is younger than it was.
///
/// From there the estimate advances by the larger of the times that passed on the monotonic clock and on
/// the wall clock ([`LeaseHandle::elapsed`]): a key also ages while the machine is suspended. A wall clock that steps
/// forward makes keys older, and ends pauses and settle times early, as a step of the store's clock does. A pause
/// that is set after the step may last longer by it: the next run estimates from the store's clock again.
#[derive(Clone, Debug)]
pub(crate) struct StoreClock {
    base: LogTime,
    /// Time since the claim at `base`.
    begin: Duration,
    lease: LeaseHandle,
}

impl StoreClock {
    /// Creates the clock of an execution, whose log has no time later than `latest`.
    pub(crate) fn new(lease: LeaseHandle, latest: LogTime) -> Self {
        // Counted from before the claim was sent: a key may seem older than it is, but not younger.
        let begin = lease.elapsed();
        let now = LogTime::from(lease.fence().issued_at()).after(begin);
        Self { base: latest.max(now), begin, lease }
    }

    pub(crate) fn now(&self) -> LogTime {
        self.base.after(self.lease.elapsed().saturating_sub(self.begin))
    }

    /// Returns the time from now to `until`.
    pub(crate) fn until(&self, until: LogTime) -> Duration {
        until.since(self.now())
    }
}
