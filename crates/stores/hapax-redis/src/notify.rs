//! Who waits to hear that a cell was written.
//!
//! Each cell that somebody waits for is a channel, named like its key. The keeper of the
//! connection subscribes to what is wanted here; this only keeps the list and passes on the news.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use hapax_core::OperationId;
use tokio::sync::{Notify, watch};

/// The list of those who wait, as long as it is: whoever waits has a place in the engine's crowd,
/// and those are counted.
#[derive(Debug, Default)]
pub(crate) struct Watchers {
    wanted: Mutex<HashMap<OperationId, Wanted>>,
    /// Somebody waits for a cell that nobody waited for.
    pub(crate) more: Notify,
}

#[derive(Debug)]
struct Wanted {
    waiting: usize,
    written: watch::Sender<()>,
}

impl Watchers {
    /// Hears what happens to `key` from now on.
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

    /// `key` was written, or may have been.
    pub(crate) fn wake(&self, key: &OperationId) {
        if let Some(wanted) = self.lock().get(key) {
            wanted.written.send_replace(());
        }
    }

    /// The cells that somebody waits for now.
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
        // Nothing panics while it is held; and counts stay whole if something did.
        self.wanted.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A place among those who wait; given up when dropped.
#[derive(Debug)]
pub(crate) struct Watcher {
    watchers: Arc<Watchers>,
    key: OperationId,
    written: watch::Receiver<()>,
}

impl Watcher {
    pub(crate) async fn written(mut self) {
        // The sender is on the list as long as this is.
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
