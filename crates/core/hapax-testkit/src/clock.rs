use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use hapax_core::{Clock, Timestamp};

/// A clock that moves only when it is told to.
#[derive(Debug)]
pub struct ManualClock(AtomicU64);

impl ManualClock {
    /// A clock that shows `now`.
    #[must_use]
    pub const fn at(now: Timestamp) -> Self {
        Self(AtomicU64::new(now.as_micros()))
    }

    /// Moves it on by `by`.
    pub fn advance(&self, by: Duration) {
        self.set(self.now().after(by));
    }

    /// Sets it, forwards or backwards.
    pub fn set(&self, now: Timestamp) {
        self.0.store(now.as_micros(), Ordering::SeqCst);
    }
}

impl Default for ManualClock {
    /// Shows a moment in 2026, so that fences look as they do in earnest.
    fn default() -> Self {
        Self::at(Timestamp::from_micros(1_790_000_000_000_000))
    }
}

impl Clock for ManualClock {
    fn now(&self) -> Timestamp {
        Timestamp::from_micros(self.0.load(Ordering::SeqCst))
    }
}
