//! A file as a store of a program: identity, counters and end.

use std::error::Error;

use hapax_core::Timestamp;
use hapax_core::driver::{DrivenStore, StoreCount};
use hapax_core::store::BoxFuture;

use crate::store::FileStore;

impl DrivenStore for FileStore {
    fn cache_name(&self) -> String {
        Self::identity(self)
    }

    fn identity(&self) -> Option<String> {
        Some(Self::identity(self))
    }

    fn created(&self) -> Option<Timestamp> {
        Some(Self::created(self))
    }

    fn is_replaced(&self) -> bool {
        Self::is_replaced(self)
    }

    fn confirm(&self) -> BoxFuture<'_, Result<(), Box<dyn Error + Send + Sync>>> {
        Self::confirm(self);
        Box::pin(async { Ok(()) })
    }

    fn counts(&self) -> Vec<StoreCount> {
        let stats = self.stats();
        // A value is left out while it is unknown, so that no alert fires.
        [
            ("batches_total", "Transactions made durable.", Some(stats.commits)),
            ("batched_swaps_total", "Swaps in those.", Some(stats.swaps)),
            ("reopened_total", "Times that the file was opened again.", Some(stats.reopened)),
            ("damaged_blocks", "Damaged blocks of the file.", Some(stats.damaged as u64)),
            ("queued", "Requests that wait for the disk.", Some(stats.queued as u64)),
            ("file_bytes", "The file's length.", Some(stats.file_bytes.unwrap_or(0))),
            ("disk_free_bytes", "Free bytes of the disk.", stats.free_bytes),
        ]
        .into_iter()
        .filter_map(|(name, help, value)| Some(StoreCount { name, help, value: value? }))
        .collect()
    }

    fn close(&self) -> BoxFuture<'_, ()> {
        Box::pin(Self::close(self))
    }
}
