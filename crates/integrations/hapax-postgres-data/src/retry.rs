//! Limits of retries.

use std::num::NonZeroU32;
use std::sync::Arc;
use std::time::Duration;

use hapax_core::{Backoff, Entropy, SystemEntropy};

/// Limits of [`UpdateLog::retrying`](crate::UpdateLog::retrying).
///
/// Pauses have full jitter: before attempt n + 1 the pause is random between
/// zero and `base` · 2ⁿ⁻¹, and at most `longest`. So callers that collided spread out, more widely
/// after each collision.
#[derive(Clone, Debug)]
pub struct Retry {
    attempts: NonZeroU32,
    pauses: Backoff,
    deadline: Duration,
    entropy: Arc<dyn Entropy>,
}

/// Upper bound of the deadline, with which no clock overflows.
const YEAR: Duration = Duration::from_secs(365 * 24 * 60 * 60);

impl Default for Retry {
    /// 5 attempts within 10 s, with pauses from 10 ms to 1 s.
    fn default() -> Self {
        Self {
            attempts: NonZeroU32::MIN.saturating_add(4),
            pauses: Backoff::new(Duration::from_millis(10), Duration::from_secs(1)),
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
    pub fn pauses(mut self, base: Duration, longest: Duration) -> Self {
        self.pauses = Backoff::new(base, longest);
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

    /// Returns the pause after attempt `made`, counted from 1.
    pub(crate) fn pause(&self, made: u32) -> Duration {
        self.pauses.pause(made, &*self.entropy)
    }
}
