//! The store's clock, as far as a runner knows it.

use std::time::Duration;

use hapax_core::FencingToken;
use tokio::time::Instant;

use crate::log::LogTime;

/// The store's clock at the claim, continued by this process's monotonic clock.
///
/// It begins with the fence, which the store issues from its clock at the claim. Fences grow, so that
/// the times of one log do too, even if the store's clock steps back between two executions.
#[derive(Clone, Copy, Debug)]
pub(crate) struct StoreClock {
    base: LogTime,
    since: Instant,
}

impl StoreClock {
    pub(crate) fn new(fence: FencingToken) -> Self {
        Self { base: fence.issued_at().into(), since: Instant::now() }
    }

    pub(crate) fn now(&self) -> LogTime {
        self.base.after(self.since.elapsed())
    }

    /// Returns the time from now to `until`.
    pub(crate) fn until(&self, until: LogTime) -> Duration {
        until.since(self.now())
    }
}
