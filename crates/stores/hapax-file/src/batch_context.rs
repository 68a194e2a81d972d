//! Conditions under which the writes of a transaction are applied.

use crate::record::Epoch;

/// Conditions under which a batch is applied.
#[derive(Clone, Copy, Debug)]
pub(crate) struct BatchContext {
    pub(crate) epoch: Epoch,
    /// The reason for which new keys are rejected, if they are.
    pub(crate) full: Option<DiskFull>,
    /// True if nothing can be written.
    pub(crate) no_writes: bool,
    /// True if the index of expiry is damaged: then records are written without an entry there, and
    /// stay until the file is salvaged.
    pub(crate) no_index: bool,
}

#[derive(Clone, Copy, Debug)]
pub(crate) struct DiskFull {
    pub(crate) free: u64,
    pub(crate) needed: u64,
}
