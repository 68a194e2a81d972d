//! Waiters for writes of records.
//!
//! Each record with waiters is a channel, named like its key. The task that maintains the
//! connection subscribes to the channels; this module only has the list of waiters and notifies
//! them.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use hapax_core::OperationId;
use tokio::sync::{Notify, watch};

/// The list of waiters. The engine limits their number, and so the length of the list.
#[derive(Debug, Default)]
pub(crate) struct Watchers {
    wanted: Mutex<HashMap<OperationId, Wanted>>,
    /// Notified when a record gets its first waiter.
    pub(crate) more: Notify,
}

#[derive(Debug)]
struct Wanted {
    waiting: usize,
    written: watch::Sender<()>,
}

impl Watchers {
    /// Registers a waiter for `key`, from now on.
    pub(crate) fn watch(self: &Arc<Self>, key: OperationId) -> Watcher {
        let mut wanted = self.lock();
        let written = match wanted.entry(key) {
            Entry::Occupied(mut entry) => {
                entry.get_mut().waiting += 1;
                entry.get().written.subscribe()
            }
            Entry::Vacant(entry) => {
                let (sender, written) = watch::channel(());
                entry.insert(Wanted { waiting: 1, written: sender });
                self.more.notify_one();
                written
            }
        };
        Watcher { watchers: Arc::clone(self), key, written }
    }

    /// Notifies the waiters that `key` was written, or may have been.
    pub(crate) fn wake(&self, key: &OperationId) {
        if let Some(wanted) = self.lock().get(key) {
            wanted.written.send_replace(());
        }
    }

    /// Returns the records that have waiters.
    pub(crate) fn wanted(&self) -> Vec<OperationId> {
        self.lock().keys().copied().collect()
    }

    pub(crate) fn len(&self) -> usize {
        self.lock().len()
    }

    pub(crate) fn is_wanted(&self, key: &OperationId) -> bool {
        self.lock().contains_key(key)
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<OperationId, Wanted>> {
        // Nothing panics while the lock is held, and counts would stay consistent if something did.
        self.wanted.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A registered waiter. Dropping it ends the registration.
#[derive(Debug)]
pub(crate) struct Watcher {
    watchers: Arc<Watchers>,
    key: OperationId,
    written: watch::Receiver<()>,
}

impl Watcher {
    pub(crate) async fn written(mut self) {
        // The sender is in the list for as long as `self` exists.
        self.written.changed().await.ok();
    }
}

impl Drop for Watcher {
    fn drop(&mut self) {
        if let Entry::Occupied(mut entry) = self.watchers.lock().entry(self.key) {
            entry.get_mut().waiting -= 1;
            if entry.get().waiting == 0 {
                entry.remove();
            }
        }
    }
}
