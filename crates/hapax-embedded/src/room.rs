//! Room for large records on their way to those who asked.

use tokio::sync::{Semaphore, SemaphorePermit};

/// Bytes of one permit: a place has no more than 2^32 of them.
const UNIT: usize = 1024;

/// A record is there sealed and opened.
const COPIES: usize = 2;

#[derive(Debug)]
pub(crate) struct Room {
    free: Semaphore,
    units: u32,
}

/// Room for one record; given back when dropped.
#[derive(Debug)]
pub(crate) struct Place<'a> {
    bytes: usize,
    _permit: Option<SemaphorePermit<'a>>,
}

impl Room {
    pub(crate) fn new(bytes: usize) -> Self {
        let units = units(bytes).max(1);
        Self { free: Semaphore::new(units as usize), units }
    }

    /// A place for a record of so many sealed bytes. What is larger than all of the room takes all
    /// of it. Those who wait are served in order; dropped, a wait leaves no trace.
    pub(crate) async fn place(&self, bytes: usize) -> Place<'_> {
        let needed = units(bytes.saturating_mul(COPIES));
        let (permits, bytes) =
            if needed < self.units { (needed, bytes) } else { (self.units, usize::MAX) };
        // It is never closed.
        Place { bytes, _permit: self.free.acquire_many(permits).await.ok() }
    }
}

impl Place<'_> {
    /// How large a record fits.
    pub(crate) const fn bytes(&self) -> usize {
        self.bytes
    }
}

fn units(bytes: usize) -> u32 {
    u32::try_from(bytes.div_ceil(UNIT)).unwrap_or(u32::MAX)
}
