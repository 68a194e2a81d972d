//! The schedule of a [`MemoryStore`].

use std::collections::{BTreeMap, BTreeSet};
use std::mem::size_of;
use std::num::NonZeroU32;
use std::ops::Bound;
use std::sync::atomic::Ordering;
use std::sync::{MutexGuard, PoisonError};
use std::time::Duration;

use bytes::Bytes;

use super::{MemoryFull, MemoryStore};
use crate::clock::Timestamp;
use crate::schedule::{
    DueEntries, EntryKey, EntryPage, MAX_NOTE, NewEntry, QueueName, QueueStatus, Schedule,
    ScheduleEntry,
};
use crate::store::{BoxFuture, StoreError};

/// The entries, by key and by time.
#[derive(Default)]
pub(super) struct Entries {
    entries: BTreeMap<EntryKey, Entry>,
    due: BTreeMap<QueueName, BTreeSet<(Timestamp, EntryKey)>>,
}

struct Entry {
    queue: QueueName,
    due: Timestamp,
    note: Bytes,
}

impl Entry {
    fn with_key(&self, key: EntryKey) -> (EntryKey, Result<ScheduleEntry, StoreError>) {
        let Self { queue, due, note } = self;
        let entry = ScheduleEntry { key, queue: queue.clone(), due: *due, note: note.clone() };
        (key, Ok(entry))
    }
}

impl Entries {
    fn put(&mut self, key: EntryKey, entry: Entry) {
        self.due.entry(entry.queue.clone()).or_default().insert((entry.due, key));
        self.entries.insert(key, entry);
    }

    fn take(&mut self, key: EntryKey) -> Option<Entry> {
        let entry = self.entries.remove(&key)?;
        if let Some(due) = self.due.get_mut(&entry.queue) {
            due.remove(&(entry.due, key));
            if due.is_empty() {
                self.due.remove(&entry.queue);
            }
        }
        Some(entry)
    }
}

/// Returns the size of an entry with its keys in both maps.
fn size(note: &Bytes) -> usize {
    size_of::<Entry>() + 2 * size_of::<(Timestamp, EntryKey)>() + note.len()
}

impl MemoryStore {
    // Each change is one call of `put` or `take`, which do not panic.
    fn scheduled(&self) -> MutexGuard<'_, Entries> {
        self.entries.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn insert_now(&self, entry: NewEntry) -> Result<(), StoreError> {
        let NewEntry { key, queue, due_in, note } = entry;
        if note.len() > MAX_NOTE {
            return Err(StoreError::unavailable("the note is longer than 2 MiB"));
        }
        let mut entries = self.scheduled();
        if entries.entries.contains_key(&key) {
            return Ok(());
        }
        let limit = self.capacity.bytes - self.capacity.bytes / 8;
        super::add(&self.bytes, size(&note), limit)
            .ok_or_else(|| StoreError::unavailable(MemoryFull))?;
        let due = self.clock.now().after(due_in);
        entries.put(key, Entry { queue, due, note });
        Ok(())
    }

    fn due_now(&self, queues: &[QueueName], limit: NonZeroU32) -> DueEntries {
        let entries = self.scheduled();
        let now = self.clock.now();
        let limit = limit.get() as usize;
        let named: BTreeSet<_> = queues.iter().collect();
        // The first of each queue are enough, and one more shows the time of the next.
        let mut first: Vec<_> = named
            .into_iter()
            .filter_map(|queue| entries.due.get(queue))
            .flat_map(|due| due.iter().take(limit + 1).copied())
            .collect();
        first.sort_unstable();
        let count = first.iter().take(limit).take_while(|(due, _)| *due <= now).count();
        let found = first[..count]
            .iter()
            .filter_map(|(_, key)| entries.entries.get(key).map(|entry| entry.with_key(*key)));
        let next_in = first.get(count).map(|(due, _)| due.since(now));
        DueEntries { now, entries: found.collect(), next_in }
    }

    fn postpone_now(&self, key: EntryKey, expected: Option<Timestamp>, due_in: Duration) -> bool {
        let mut entries = self.scheduled();
        let is_expected = |entry: &Entry| expected.is_none_or(|expected| expected == entry.due);
        if !entries.entries.get(&key).is_some_and(is_expected) {
            return false;
        }
        let due = self.clock.now().after(due_in);
        if let Some(entry) = entries.take(key) {
            entries.put(key, Entry { due, ..entry });
        }
        true
    }

    fn entries_now(&self, after: Option<EntryKey>, limit: NonZeroU32) -> EntryPage {
        let entries = self.scheduled();
        let from = after.map_or(Bound::Unbounded, Bound::Excluded);
        let mut rest = entries.entries.range((from, Bound::Unbounded));
        let page = rest.by_ref().take(limit.get() as usize);
        let page = page.map(|(key, entry)| entry.with_key(*key)).collect();
        EntryPage::new(self.clock.now(), page, rest.next().is_some())
    }

    fn queues_now(&self) -> Vec<QueueStatus> {
        let entries = self.scheduled();
        let now = self.clock.now();
        let status = |(queue, due): (&QueueName, &BTreeSet<(Timestamp, EntryKey)>)| QueueStatus {
            queue: queue.clone(),
            entries: due.len() as u64,
            overdue: due.first().map_or(Duration::ZERO, |(due, _)| now.since(*due)),
        };
        entries.due.iter().map(status).collect()
    }
}

// Each future does all its work in one poll, as those of the store.
impl Schedule for MemoryStore {
    fn insert(&self, entry: NewEntry) -> BoxFuture<'_, Result<(), StoreError>> {
        Box::pin(async move { self.insert_now(entry) })
    }

    fn due<'a>(
        &'a self,
        queues: &'a [QueueName],
        limit: NonZeroU32,
    ) -> BoxFuture<'a, Result<DueEntries, StoreError>> {
        Box::pin(async move { Ok(self.due_now(queues, limit)) })
    }

    fn postpone(
        &self,
        key: EntryKey,
        expected: Option<Timestamp>,
        due_in: Duration,
    ) -> BoxFuture<'_, Result<bool, StoreError>> {
        Box::pin(async move { Ok(self.postpone_now(key, expected, due_in)) })
    }

    fn remove(&self, key: EntryKey) -> BoxFuture<'_, Result<(), StoreError>> {
        Box::pin(async move {
            if let Some(entry) = self.scheduled().take(key) {
                self.bytes.fetch_sub(size(&entry.note), Ordering::Relaxed);
            }
            Ok(())
        })
    }

    fn entries(
        &self,
        after: Option<EntryKey>,
        limit: NonZeroU32,
    ) -> BoxFuture<'_, Result<EntryPage, StoreError>> {
        Box::pin(async move { Ok(self.entries_now(after, limit)) })
    }

    fn queues(&self) -> BoxFuture<'_, Result<Vec<QueueStatus>, StoreError>> {
        Box::pin(async move { Ok(self.queues_now()) })
    }
}
