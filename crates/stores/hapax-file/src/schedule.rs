//! The schedule, in the database of the records.
//!
//! A change waits in the queue of the writer, with the swaps, and is answered once its transaction
//! is durable. So the entry of an operation and its record share a sync, if they arrive together.

pub(crate) mod batch;
pub(crate) mod format;
pub(crate) mod reader;

use std::num::NonZeroU32;
use std::time::Duration;

use futures_channel::oneshot;
use hapax_core::schedule::{
    DueEntries, EntryKey, EntryPage, NewEntry, QueueName, QueueStatus, Schedule, ScheduleEntry,
};
use hapax_core::store::BoxFuture;
use hapax_core::store::parts::Admission;
use hapax_core::{StoreError, Timestamp};

use self::batch::{EntryChange, EntryJob};
use self::format::{SealedEntry, entry_key};
use self::reader::RawDue;
use crate::error::FileStoreError;
use crate::job::{Job, WriteJob};
use crate::pages::RawPage;
use crate::reader::ReadJob;
use crate::store::FileStore;

type OpenedEntry = (EntryKey, Result<ScheduleEntry, StoreError>);

impl FileStore {
    /// Queues a change of the schedule with `bytes`, and awaits its commit.
    async fn change(
        &self,
        key: EntryKey,
        change: EntryChange,
        bytes: usize,
        admission: Admission,
    ) -> Result<bool, StoreError> {
        let (reply, answer) = oneshot::channel();
        let job = Job::Write(WriteJob::Entry(EntryJob { key, change, reply }));
        self.shared
            .jobs
            .push(job, bytes, admission)
            .map_err(|refused| StoreError::unavailable(FileStoreError::from(refused)))?;
        // Without an answer the thread has ended, before or after the commit.
        answer.await.unwrap_or_else(|_| Err(StoreError::ambiguous(FileStoreError::Interrupted)))
    }

    fn open_entry(&self, key: EntryKey, found: Result<SealedEntry, StoreError>) -> OpenedEntry {
        (key, found.and_then(|sealed| sealed.open(key, &self.sealer)))
    }
}

// Cancellation: as that of the store's methods.
impl Schedule for FileStore {
    fn insert(&self, entry: NewEntry) -> BoxFuture<'_, Result<(), StoreError>> {
        Box::pin(async move {
            let NewEntry { key, queue, due_in, note } = entry;
            // Sealed here and not on the writer's thread, as records are.
            let sealed = self
                .sealer
                .seal_note(&key, &note, &*self.entropy)
                .map_err(StoreError::unavailable)?;
            let bytes = sealed.len();
            let change = EntryChange::Insert { queue, due_in, sealed };
            self.change(key, change, bytes, Admission::NewKey).await.map(drop)
        })
    }

    fn due<'a>(
        &'a self,
        queues: &'a [QueueName],
        limit: NonZeroU32,
    ) -> BoxFuture<'a, Result<DueEntries, StoreError>> {
        Box::pin(async move {
            let (queues, limit) = (queues.to_vec(), limit.get());
            let RawDue { now, found, next_in } =
                self.read(|reply| ReadJob::Due { queues, limit, reply }).await?;
            let open = |(key, sealed)| self.open_entry(key, sealed);
            Ok(DueEntries { now, entries: found.into_iter().map(open).collect(), next_in })
        })
    }

    fn postpone(
        &self,
        key: EntryKey,
        expected: Option<Timestamp>,
        due_in: Duration,
    ) -> BoxFuture<'_, Result<bool, StoreError>> {
        let change = EntryChange::Postpone { expected, due_in };
        Box::pin(self.change(key, change, 0, Admission::Any))
    }

    fn remove(&self, key: EntryKey) -> BoxFuture<'_, Result<(), StoreError>> {
        Box::pin(
            async move { self.change(key, EntryChange::Remove, 0, Admission::Any).await.map(drop) },
        )
    }

    fn entries(
        &self,
        after: Option<EntryKey>,
        limit: NonZeroU32,
    ) -> BoxFuture<'_, Result<EntryPage, StoreError>> {
        Box::pin(async move {
            let limit = limit.get();
            let RawPage { now, found, more } =
                self.read(|reply| ReadJob::Entries { after, limit, reply }).await?;
            let open = |(key, sealed)| self.open_entry(entry_key(&key), sealed);
            Ok(EntryPage::new(now, found.into_iter().map(open).collect(), more))
        })
    }

    fn queues(&self) -> BoxFuture<'_, Result<Vec<QueueStatus>, StoreError>> {
        Box::pin(self.read(|reply| ReadJob::Queues { reply }))
    }
}
