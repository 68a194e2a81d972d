//! Entries of the schedule that this process leaves alone for a time.
//!
//! They stay due, so that another process may look at them at once: one that has the newer version, or
//! another secret. A postponement would be for all processes.

use std::collections::HashMap;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use hapax_core::schedule::EntryKey;
use tokio::time::Instant;

/// The greatest number of entries. A poll reads that many more, so that they hide no others.
const MAX: usize = 512;

/// The entries, with the time until which they are left alone.
#[derive(Debug, Default)]
pub(crate) struct Aside(Mutex<HashMap<EntryKey, Instant>>);

impl Aside {
    /// Leaves an entry alone for `span`. Returns false if there are too many such entries.
    pub(crate) fn set(&self, key: EntryKey, span: Duration) -> bool {
        let mut entries = self.entries();
        let has_room = entries.len() < MAX || entries.contains_key(&key);
        if has_room {
            entries.insert(key, Instant::now() + span);
        }
        has_room
    }

    /// Returns whether an entry is left alone.
    pub(crate) fn has(&self, key: &EntryKey) -> bool {
        self.entries().contains_key(key)
    }

    /// Returns the number of entries that are left alone.
    pub(crate) fn count(&self) -> u32 {
        u32::try_from(self.entries().len()).unwrap_or(u32::MAX)
    }

    /// Returns the entries whose time has not passed.
    fn entries(&self) -> MutexGuard<'_, HashMap<EntryKey, Instant>> {
        // Each change is one call of the map.
        let mut entries = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let now = Instant::now();
        entries.retain(|_, until| now < *until);
        entries
    }
}
