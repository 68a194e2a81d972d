//! Limits of retries.

use std::num::NonZeroU32;
use std::sync::Arc;
use std::time::Duration;

use hapax_core::{Entropy, SystemEntropy};

/// Limits of [`UpdateLog::retrying`](crate::UpdateLog::retrying).
///
/// Pauses have full jitter: before attempt n + 1 the pause is random between
/// zero and `base` · 2ⁿ⁻¹, and at most `longest`. So callers that collided spread out, more widely
/// after each collision.
#[derive(Clone, Debug)]
pub struct Retry {
    attempts: NonZeroU32,
    base: Duration,
    longest: Duration,
    deadline: Duration,
    entropy: Arc<dyn Entropy>,
}

/// Upper bound of durations, with which no clock overflows.
const YEAR: Duration = Duration::from_secs(365 * 24 * 60 * 60);

impl Default for Retry {
    /// 5 attempts within 10 s, with pauses from 10 ms to 1 s.
    fn default() -> Self {
        Self {
            attempts: NonZeroU32::MIN.saturating_add(4),
            base: Duration::from_millis(10),
            longest: Duration::from_secs(1),
            deadline: Duration::from_secs(10),
            entropy: Arc::new(SystemEntropy),
        }
    }
}

impl Retry {
    /// Sets the number of attempts. With n concurrent writers of one row, one succeeds at a time,
    /// so more writers need more attempts.
    #[must_use]
    pub const fn attempts(mut self, attempts: NonZeroU32) -> Self {
        self.attempts = attempts;
        self
    }

    /// Sets the bound of the first pause, which doubles after each attempt, and the bound of all
    /// pauses; at most a year.
    #[must_use]
    pub const fn pauses(mut self, base: Duration, longest: Duration) -> Self {
        (self.base, self.longest) = (base, longest);
        self
    }

    /// Sets the deadline, counted from the call and including connections, statements and pauses;
    /// at most a year.
    #[must_use]
    pub const fn deadline(mut self, deadline: Duration) -> Self {
        self.deadline = deadline;
        self
    }

    /// Sets the source of randomness for the jitter. Default: the operating system.
    #[must_use]
    pub fn entropy(mut self, entropy: Arc<dyn Entropy>) -> Self {
        self.entropy = entropy;
        self
    }

    pub(crate) const fn most_attempts(&self) -> u32 {
        self.attempts.get()
    }

    pub(crate) fn within(&self) -> Duration {
        self.deadline.min(YEAR)
    }

    /// How long to wait after attempt `made`, counted from 1.
    pub(crate) fn pause(&self, made: u32) -> Duration {
        let doubled = 1_u32.checked_shl(made.saturating_sub(1)).unwrap_or(u32::MAX);
        let bound = self.base.saturating_mul(doubled).min(self.longest).min(YEAR);
        let mut bytes = [0; 4];
        match self.entropy.fill(&mut bytes) {
            Ok(()) => bound.mul_f64(f64::from(u32::from_le_bytes(bytes)) / f64::from(u32::MAX)),
            // Without randomness the longest pause is the safest.
            Err(_) => bound,
        }
    }
}

#[cfg(test)]
mod tests {
    use hapax_core::EntropyError;

    use super::*;

    #[derive(Debug)]
    struct Always(u8);

    impl Entropy for Always {
        fn fill(&self, bytes: &mut [u8]) -> Result<(), EntropyError> {
            if self.0 == 1 {
                return Err(EntropyError);
            }
            bytes.fill(self.0);
            Ok(())
        }
    }

    #[test]
    fn pauses_are_random_up_to_a_bound_that_doubles() {
        let with = |byte| {
            let retry = Retry::default().entropy(Arc::new(Always(byte)));
            [1, 2, 3, 7, 8, 40].map(|made| retry.pause(made).as_millis())
        };
        assert_eq!(with(0), [0; 6]);
        assert_eq!(with(255), [10, 20, 40, 640, 1_000, 1_000]);
        assert_eq!(with(128), [5, 10, 20, 321, 501, 501]);
        assert_eq!(with(1), with(255));
    }

    #[test]
    fn nothing_overflows() {
        let retry = Retry::default().entropy(Arc::new(Always(255)));
        let retry = retry.pauses(Duration::MAX, Duration::MAX).deadline(Duration::MAX);
        assert_eq!((retry.pause(1), retry.pause(99), retry.within()), (YEAR, YEAR, YEAR));
    }
}
