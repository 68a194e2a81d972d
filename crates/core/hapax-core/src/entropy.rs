//! The only door to randomness.

use std::fmt;

/// Where grants, tags and nonces come from.
///
/// Whatever stands behind it must never repeat 16 bytes: ownership of a record rests on that.
pub trait Entropy: fmt::Debug + Send + Sync + 'static {
    /// Fills `bytes` with unpredictable ones.
    ///
    /// # Errors
    /// [`EntropyError`] when the source gives none. The caller then claims nothing.
    fn fill(&self, bytes: &mut [u8]) -> Result<(), EntropyError>;
}

/// The source of randomness failed.
#[derive(Clone, Copy, Debug, thiserror::Error)]
#[error("the operating system gave no random bytes")]
pub struct EntropyError;

/// The operating system's generator.
#[derive(Clone, Copy, Debug, Default)]
pub struct SystemEntropy;

impl Entropy for SystemEntropy {
    fn fill(&self, bytes: &mut [u8]) -> Result<(), EntropyError> {
        getrandom::fill(bytes).map_err(|_| EntropyError)
    }
}
