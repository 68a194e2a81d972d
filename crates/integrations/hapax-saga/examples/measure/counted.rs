//! A store that counts its calls.

use std::num::NonZeroU32;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use hapax_core::schedule::{
    DueEntries, EntryKey, EntryPage, NewEntry, QueueName, QueueStatus, Schedule,
};
use hapax_core::store::{BoxFuture, Capabilities, Reaped, Snapshot, Swap, Swapped};
use hapax_core::{OperationId, Store, StoreError, Timestamp};

/// Numbers of calls.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Calls {
    pub(crate) swaps: u64,
    pub(crate) loads: u64,
    /// Insertions, postponements and removals.
    pub(crate) changes: u64,
    /// Reads of the schedule.
    pub(crate) polls: u64,
}

impl Calls {
    pub(crate) const fn writes(&self) -> u64 {
        self.swaps + self.changes
    }

    pub(crate) const fn all(&self) -> u64 {
        self.writes() + self.loads + self.polls
    }
}

/// A store that counts its calls.
#[derive(Debug)]
pub(crate) struct Counted {
    store: Arc<dyn Store>,
    counts: [AtomicU64; 4],
}

impl Counted {
    pub(crate) fn new(store: Arc<dyn Store>) -> Arc<Self> {
        Arc::new(Self { store, counts: Default::default() })
    }

    /// Returns the counts since the last call of this.
    pub(crate) fn take(&self) -> Calls {
        let [swaps, loads, changes, polls] =
            self.counts.each_ref().map(|count| count.swap(0, Ordering::Relaxed));
        Calls { swaps, loads, changes, polls }
    }

    fn count(&self, kind: usize) {
        self.counts[kind].fetch_add(1, Ordering::Relaxed);
    }

    fn schedule(&self, kind: usize) -> Result<&dyn Schedule, StoreError> {
        self.count(kind);
        let none = || StoreError::unavailable("expected a store with a schedule");
        self.store.capabilities().schedule.ok_or_else(none)
    }
}

impl Store for Counted {
    fn swap(&self, swap: Swap) -> BoxFuture<'_, Result<Swapped, StoreError>> {
        self.count(0);
        self.store.swap(swap)
    }

    fn load<'a>(&'a self, key: &'a OperationId) -> BoxFuture<'a, Result<Snapshot, StoreError>> {
        self.count(1);
        self.store.load(key)
    }

    fn reap(&self, limit: NonZeroU32) -> BoxFuture<'_, Result<Reaped, StoreError>> {
        self.store.reap(limit)
    }

    fn capabilities(&self) -> Capabilities<'_> {
        Capabilities { schedule: Some(self), ..self.store.capabilities() }
    }
}

impl Schedule for Counted {
    fn insert(&self, entry: NewEntry) -> BoxFuture<'_, Result<(), StoreError>> {
        Box::pin(async move { self.schedule(2)?.insert(entry).await })
    }

    fn due<'a>(
        &'a self,
        queues: &'a [QueueName],
        limit: NonZeroU32,
    ) -> BoxFuture<'a, Result<DueEntries, StoreError>> {
        Box::pin(async move { self.schedule(3)?.due(queues, limit).await })
    }

    fn postpone(
        &self,
        key: EntryKey,
        expected: Option<Timestamp>,
        due_in: Duration,
    ) -> BoxFuture<'_, Result<bool, StoreError>> {
        Box::pin(async move { self.schedule(2)?.postpone(key, expected, due_in).await })
    }

    fn remove(&self, key: EntryKey) -> BoxFuture<'_, Result<(), StoreError>> {
        Box::pin(async move { self.schedule(2)?.remove(key).await })
    }

    fn entries(
        &self,
        after: Option<EntryKey>,
        limit: NonZeroU32,
    ) -> BoxFuture<'_, Result<EntryPage, StoreError>> {
        Box::pin(async move { self.schedule(3)?.entries(after, limit).await })
    }

    fn queues(&self) -> BoxFuture<'_, Result<Vec<QueueStatus>, StoreError>> {
        Box::pin(async move { self.schedule(3)?.queues().await })
    }
}
