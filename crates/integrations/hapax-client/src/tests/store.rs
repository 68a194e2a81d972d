//! A store in memory whose clock follows that of tokio, which counts its writes.

use std::fmt;
use std::num::NonZeroU32;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use hapax_core::schedule::{
    DueEntries, EntryKey, EntryPage, NewEntry, QueueName, QueueStatus, Schedule,
};
use hapax_core::store::{BoxFuture, Capabilities, Page, Reaped, Snapshot, Swap, Swapped};
use hapax_core::{
    Clock, Inspect, MemoryCapacity, MemoryStore, OperationId, Secret, Store, StoreError, Timestamp,
};
use tokio::time::{Instant, sleep};

#[derive(Debug)]
struct PausedClock(Instant);

impl Clock for PausedClock {
    fn now(&self) -> Timestamp {
        Timestamp::from_micros(1_790_000_000_000_000).after(self.0.elapsed())
    }
}

pub(super) struct CountedStore {
    store: MemoryStore,
    clock: Arc<dyn Clock>,
    writes: AtomicU64,
    /// Time that each write takes.
    latency: Duration,
    /// True while no call succeeds.
    fails: AtomicBool,
    /// Operations whose record, and whose entry, cannot be read.
    damaged: Mutex<[Option<OperationId>; 2]>,
}

impl fmt::Debug for CountedStore {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("CountedStore")
    }
}

impl CountedStore {
    pub(super) fn new(latency: Duration) -> Arc<Self> {
        let capacity = MemoryCapacity { records: 4_000_000, bytes: 8 << 30 };
        let clock: Arc<dyn Clock> = Arc::new(PausedClock(Instant::now()));
        let store = MemoryStore::new(Arc::clone(&clock), capacity);
        let store = store.secret(Secret::new([7; 32]));
        let (writes, fails, damaged) = Default::default();
        Arc::new(Self { store, clock, writes, latency, fails, damaged })
    }

    /// Returns the clock, which clients have as their wall clock too: that of the machine would count the
    /// time that the test takes.
    pub(super) fn clock(&self) -> Arc<dyn Clock> {
        Arc::clone(&self.clock)
    }

    pub(super) fn fail(&self, fails: bool) {
        self.fails.store(fails, Ordering::Relaxed);
    }

    pub(super) fn damage(&self, record: OperationId, entry: OperationId) {
        *self.damaged.lock().unwrap() = [Some(record), Some(entry)];
    }

    fn check(&self) -> Result<(), StoreError> {
        let fails = self.fails.load(Ordering::Relaxed);
        if fails { Err(StoreError::unavailable("it is away")) } else { Ok(()) }
    }

    pub(super) fn writes(&self) -> u64 {
        self.writes.load(Ordering::Relaxed)
    }

    async fn write<T>(
        &self,
        write: impl Future<Output = Result<T, StoreError>>,
    ) -> Result<T, StoreError> {
        self.check()?;
        self.writes.fetch_add(1, Ordering::Relaxed);
        if !self.latency.is_zero() {
            sleep(self.latency).await;
        }
        write.await
    }

    fn schedule(&self) -> &dyn Schedule {
        self.store.capabilities().schedule.unwrap()
    }
}

impl Store for CountedStore {
    fn swap(&self, swap: Swap) -> BoxFuture<'_, Result<Swapped, StoreError>> {
        Box::pin(self.write(self.store.swap(swap)))
    }

    fn load<'a>(&'a self, id: &'a OperationId) -> BoxFuture<'a, Result<Snapshot, StoreError>> {
        Box::pin(async move {
            self.check()?;
            if self.damaged.lock().unwrap()[0] == Some(*id) {
                return Err(StoreError::corrupt("a test damaged it"));
            }
            self.store.load(id).await
        })
    }

    fn reap(&self, limit: NonZeroU32) -> BoxFuture<'_, Result<Reaped, StoreError>> {
        self.store.reap(limit)
    }

    fn capabilities(&self) -> Capabilities<'_> {
        Capabilities { schedule: Some(self), ..self.store.capabilities() }
    }
}

impl Inspect for CountedStore {
    fn page(
        &self,
        after: Option<OperationId>,
        limit: NonZeroU32,
    ) -> BoxFuture<'_, Result<Page, StoreError>> {
        self.store.page(after, limit)
    }
}

impl Schedule for CountedStore {
    fn insert(&self, entry: NewEntry) -> BoxFuture<'_, Result<(), StoreError>> {
        Box::pin(self.write(self.schedule().insert(entry)))
    }

    fn due<'a>(
        &'a self,
        queues: &'a [QueueName],
        limit: NonZeroU32,
    ) -> BoxFuture<'a, Result<DueEntries, StoreError>> {
        self.schedule().due(queues, limit)
    }

    fn postpone(
        &self,
        key: EntryKey,
        expected: Option<Timestamp>,
        due_in: Duration,
    ) -> BoxFuture<'_, Result<bool, StoreError>> {
        Box::pin(self.write(self.schedule().postpone(key, expected, due_in)))
    }

    fn remove(&self, key: EntryKey) -> BoxFuture<'_, Result<(), StoreError>> {
        Box::pin(self.write(self.schedule().remove(key)))
    }

    fn entries(
        &self,
        after: Option<EntryKey>,
        limit: NonZeroU32,
    ) -> BoxFuture<'_, Result<EntryPage, StoreError>> {
        Box::pin(async move {
            let mut page = self.schedule().entries(after, limit).await?;
            let damaged = self.damaged.lock().unwrap()[1];
            for (key, entry) in &mut page.entries {
                if damaged == Some(key.operation) {
                    *entry = Err(StoreError::corrupt("a test damaged it"));
                }
            }
            Ok(page)
        })
    }

    fn queues(&self) -> BoxFuture<'_, Result<Vec<QueueStatus>, StoreError>> {
        self.schedule().queues()
    }
}
