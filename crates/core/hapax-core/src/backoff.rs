//! Pauses between attempts.

use std::time::Duration;

use crate::entropy::Entropy;

/// Upper bound of pauses, with which no clock overflows.
const YEAR: Duration = Duration::from_secs(365 * 24 * 60 * 60);

/// Pauses with full jitter: after attempt n the pause is random between zero and `first` · 2ⁿ⁻¹, and
/// at most `longest`. So callers that failed together spread out, more widely after each attempt.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Backoff {
    first: Duration,
    longest: Duration,
}

impl Backoff {
    /// Creates pauses with the bound of the first one and the bound of all; at most a year.
    #[must_use]
    pub fn new(first: Duration, longest: Duration) -> Self {
        Self { first: first.min(YEAR), longest: longest.min(YEAR) }
    }

    /// Returns the bound of all pauses.
    #[must_use]
    pub const fn longest(&self) -> Duration {
        self.longest
    }

    /// Returns the pause after attempt `made`, counted from 1. Without randomness it is the longest
    /// possible one.
    #[must_use]
    pub fn pause(&self, made: u32, entropy: &dyn Entropy) -> Duration {
        let doubled = 1_u32.checked_shl(made.saturating_sub(1)).unwrap_or(u32::MAX);
        let bound = self.first.saturating_mul(doubled).min(self.longest);
        let mut bytes = [0; 4];
        match entropy.fill(&mut bytes) {
            Ok(()) => bound.mul_f64(f64::from(u32::from_le_bytes(bytes)) / f64::from(u32::MAX)),
            Err(_) => bound,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::entropy::EntropyError;

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
        let backoff = Backoff::new(Duration::from_millis(10), Duration::from_secs(1));
        let with =
            |byte| [1, 2, 3, 7, 8, 40].map(|made| backoff.pause(made, &Always(byte)).as_millis());
        assert_eq!(with(0), [0; 6]);
        assert_eq!(with(255), [10, 20, 40, 640, 1_000, 1_000]);
        assert_eq!(with(128), [5, 10, 20, 321, 501, 501]);
        assert_eq!(with(1), with(255));
    }

    #[test]
    fn nothing_overflows() {
        let backoff = Backoff::new(Duration::MAX, Duration::MAX);
        assert_eq!([1, 99].map(|made| backoff.pause(made, &Always(255))), [YEAR; 2]);
    }
}
