use std::sync::atomic::{AtomicU64, Ordering};

use hapax_core::{Entropy, EntropyError};

/// Source of bytes that depend only on a seed. They are predictable: for tests only.
#[derive(Debug)]
pub struct SeededEntropy(AtomicU64);

impl SeededEntropy {
    /// Returns the source for `seed`.
    #[must_use]
    pub const fn new(seed: u64) -> Self {
        Self(AtomicU64::new(seed))
    }

    /// Returns the next number, any of 2⁶⁴.
    pub fn next(&self) -> u64 {
        // SplitMix64 visits every state once, so that 16 bytes do not repeat within a test.
        let state = self.0.fetch_add(GAMMA, Ordering::Relaxed).wrapping_add(GAMMA);
        mix(state)
    }

    /// Returns a number below `bound`, which is not zero.
    pub fn below(&self, bound: u64) -> u64 {
        // The bias is below one in 2³² for every bound that a test uses.
        ((u128::from(self.next()) * u128::from(bound)) >> 64) as u64
    }
}

impl Entropy for SeededEntropy {
    fn fill(&self, bytes: &mut [u8]) -> Result<(), EntropyError> {
        for chunk in bytes.chunks_mut(8) {
            let number = self.next().to_le_bytes();
            chunk.copy_from_slice(&number[..chunk.len()]);
        }
        Ok(())
    }
}

const GAMMA: u64 = 0x9e37_79b9_7f4a_7c15;

const fn mix(mut z: u64) -> u64 {
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}
