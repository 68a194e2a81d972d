//! A journal that calls a function at each write.

use std::fmt;
use std::num::NonZeroU32;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use hapax_core::schedule::{
    DueEntries, EntryKey, EntryPage, NewEntry, QueueName, QueueStatus, Schedule,
};
use hapax_core::store::{
    BoxFuture, Capabilities, Cursor, Page, Reaped, ScanStep, Snapshot, Swap, Swapped, Visitor,
};
use hapax_core::{Inspect, OperationId, Store, StoreError, Timestamp};

/// The moment of a call of the function.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Moment {
    Before,
    After,
}

/// The function: it gets the number of the write, from 1.
type Hook = Box<dyn Fn(u32, Moment) + Send + Sync>;

/// A journal that calls a function before and after each write.
pub(crate) struct HookedStore<S> {
    inner: S,
    writes: AtomicU32,
    hook: Hook,
}

impl<S> fmt::Debug for HookedStore<S> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("HookedStore")
    }
}

impl<S: Store> HookedStore<S> {
    pub(crate) fn new(inner: S, hook: impl Fn(u32, Moment) + Send + Sync + 'static) -> Self {
        Self { inner, writes: AtomicU32::new(0), hook: Box::new(hook) }
    }

    /// Returns the number of writes.
    pub(crate) fn writes(&self) -> u32 {
        self.writes.load(Ordering::SeqCst)
    }

    fn write<'a, T: 'a>(&'a self, write: BoxFuture<'a, T>) -> BoxFuture<'a, T> {
        Box::pin(async move {
            let number = self.writes.fetch_add(1, Ordering::SeqCst) + 1;
            (self.hook)(number, Moment::Before);
            let written = write.await;
            (self.hook)(number, Moment::After);
            written
        })
    }

    fn schedule(&self) -> &dyn Schedule {
        self.inner.capabilities().schedule.unwrap()
    }
}

#[deny(clippy::missing_trait_methods)]
impl<S: Store> Store for HookedStore<S> {
    fn swap(&self, swap: Swap) -> BoxFuture<'_, Result<Swapped, StoreError>> {
        self.write(self.inner.swap(swap))
    }

    fn load<'a>(&'a self, id: &'a OperationId) -> BoxFuture<'a, Result<Snapshot, StoreError>> {
        self.inner.load(id)
    }

    fn reap(&self, limit: NonZeroU32) -> BoxFuture<'_, Result<Reaped, StoreError>> {
        self.write(self.inner.reap(limit))
    }

    fn capabilities(&self) -> Capabilities<'_> {
        Capabilities { schedule: Some(self), ..self.inner.capabilities() }
    }
}

#[deny(clippy::missing_trait_methods)]
impl<S: Inspect> Inspect for HookedStore<S> {
    fn page(
        &self,
        after: Option<OperationId>,
        limit: NonZeroU32,
    ) -> BoxFuture<'_, Result<Page, StoreError>> {
        self.inner.page(after, limit)
    }

    fn scan<'a>(
        &'a self,
        from: Cursor,
        limit: NonZeroU32,
        visit: Visitor<'a>,
    ) -> BoxFuture<'a, Result<ScanStep, StoreError>> {
        self.inner.scan(from, limit, visit)
    }

    fn scan_all<'a>(
        &'a self,
        from: Cursor,
        limit: NonZeroU32,
        since: Option<Duration>,
        visit: Visitor<'a>,
    ) -> BoxFuture<'a, Result<ScanStep, StoreError>> {
        self.inner.scan_all(from, limit, since, visit)
    }
}

#[deny(clippy::missing_trait_methods)]
impl<S: Store> Schedule for HookedStore<S> {
    fn insert(&self, entry: NewEntry) -> BoxFuture<'_, Result<(), StoreError>> {
        self.write(self.schedule().insert(entry))
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
        self.write(self.schedule().postpone(key, expected, due_in))
    }

    fn remove(&self, key: EntryKey) -> BoxFuture<'_, Result<(), StoreError>> {
        self.write(self.schedule().remove(key))
    }

    fn entries(
        &self,
        after: Option<EntryKey>,
        limit: NonZeroU32,
    ) -> BoxFuture<'_, Result<EntryPage, StoreError>> {
        self.schedule().entries(after, limit)
    }

    fn queues(&self) -> BoxFuture<'_, Result<Vec<QueueStatus>, StoreError>> {
        self.schedule().queues()
    }
}
