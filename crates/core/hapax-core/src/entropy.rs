//! The only place that reads randomness.

use std::fmt;
use std::sync::{Mutex, PoisonError};

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

/// Random bytes of the operating system, read in blocks: a read costs a system call.
///
/// Every byte is returned once. A process that forks must not use one in both processes, and cannot
/// use an engine there: tokio does not support it. Of a virtual machine or a process that is restored
/// from a snapshot, only one copy may go on: restart the program in the others, or use
/// [`SystemEntropy`] on a kernel that renews its randomness then.
#[derive(Default)]
pub struct BufferedEntropy {
    block: Mutex<Block>,
}

const BLOCK: usize = 1024;

struct Block {
    bytes: [u8; BLOCK],
    used: usize,
}

impl Default for Block {
    fn default() -> Self {
        Self { bytes: [0; BLOCK], used: BLOCK }
    }
}

impl Entropy for BufferedEntropy {
    fn fill(&self, bytes: &mut [u8]) -> Result<(), EntropyError> {
        if bytes.len() > BLOCK {
            return SystemEntropy.fill(bytes);
        }
        // After a panic the block would be consistent: bytes count as used before they are copied.
        let mut block = self.block.lock().unwrap_or_else(PoisonError::into_inner);
        if bytes.len() > BLOCK - block.used {
            block.used = BLOCK;
            SystemEntropy.fill(&mut block.bytes)?;
            block.used = 0;
        }
        let from = block.used;
        block.used += bytes.len();
        let taken = &mut block.bytes[from..from + bytes.len()];
        bytes.copy_from_slice(taken);
        // A later reader of this memory finds no nonce of the past.
        taken.fill(0);
        Ok(())
    }
}

impl fmt::Debug for BufferedEntropy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("BufferedEntropy")
    }
}
