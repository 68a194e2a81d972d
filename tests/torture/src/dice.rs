//! Seeded choices: what is killed when, and who asks for what.

use std::time::Duration;

/// SplitMix64: small, and good enough to choose by.
#[derive(Clone, Debug)]
pub(crate) struct Dice(u64);

impl Dice {
    pub(crate) const fn new(seed: u64) -> Self {
        Self(seed)
    }

    /// Dice of their own for one actor.
    pub(crate) fn split(&mut self) -> Self {
        Self(self.roll())
    }

    pub(crate) fn roll(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        mix(self.0)
    }

    /// From 0 to `end` without it; 0 if `end` is 0.
    pub(crate) fn below(&mut self, end: u64) -> u64 {
        self.roll().checked_rem(end).unwrap_or(0)
    }

    /// Once in `times`, on average.
    pub(crate) fn once_in(&mut self, times: u64) -> bool {
        self.below(times) == 0
    }

    /// A time up to `limit_ms` milliseconds, in steps of microseconds.
    pub(crate) fn up_to(&mut self, limit_ms: u64) -> Duration {
        Duration::from_micros(self.below(limit_ms * 1000))
    }
}

/// A well-spread number for every number.
pub(crate) const fn mix(number: u64) -> u64 {
    let number = (number ^ (number >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let number = (number ^ (number >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    number ^ (number >> 31)
}
