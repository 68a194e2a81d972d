//! The only place that reads randomness.

use std::fmt;

/// The source of lease ids, write ids and nonces.
///
/// It must never repeat 16 bytes: the ownership of records depends on that.
pub trait Entropy: fmt::Debug + Send + Sync + 'static {
    /// Fills `bytes` with unpredictable ones.
    ///
    /// # Errors
    /// [`EntropyError`] if the source returns none. The caller then claims nothing.
    fn fill(&self, bytes: &mut [u8]) -> Result<(), EntropyError>;
}

/// Failure of a source of randomness.
#[derive(Clone, Copy, Debug, thiserror::Error)]
#[error("the operating system gave no random bytes")]
pub struct EntropyError;

/// The randomness of the operating system.
#[derive(Clone, Copy, Debug, Default)]
pub struct SystemEntropy;

impl Entropy for SystemEntropy {
    fn fill(&self, bytes: &mut [u8]) -> Result<(), EntropyError> {
        getrandom::fill(bytes).map_err(|_| EntropyError)
    }
}
