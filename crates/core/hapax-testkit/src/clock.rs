use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use hapax_core::{Clock, Timestamp};

/// A clock that moves only when a test moves it.
#[derive(Debug)]
pub struct ManualClock(AtomicU64);

impl ManualClock {
    /// Returns a clock that shows `now`.
    #[must_use]
    pub const fn at(now: Timestamp) -> Self {
        Self(AtomicU64::new(now.as_micros()))
    }

    /// Moves the clock forward by `by`.
    pub fn advance(&self, by: Duration) {
        self.set(self.now().after(by));
    }

    /// Sets the clock, forwards or backwards.
    pub fn set(&self, now: Timestamp) {
        self.0.store(now.as_micros(), Ordering::SeqCst);
    }
}

impl Default for ManualClock {
    /// Returns a clock that shows a time in 2026, so that fences are as large as in production.
    fn default() -> Self {
        Self::at(Timestamp::from_micros(1_790_000_000_000_000))
    }
}

impl Clock for ManualClock {
    fn now(&self) -> Timestamp {
        Timestamp::from_micros(self.0.load(Ordering::SeqCst))
    }
}
