//! The entries of one namespace in the schedule of a store.

use std::num::NonZeroU32;
use std::sync::Arc;
use std::time::Duration;

use super::Namespace;
use crate::clock::Timestamp;
use crate::schedule::{
    DueEntries, EntryKey, EntryPage, NewEntry, QueueName, QueueStatus, Schedule, ScheduleEntry,
};
use crate::store::{BoxFuture, Store, StoreError};

/// The entries of one namespace in the schedule of a store. Queues have their names within the namespace here.
///
/// A method that names an entry by its key finds it in every namespace: an operation id belongs to one of
/// them. An entry that cannot be read has no queue, so that the pages of every namespace have it. A page leaves
/// out the entries of other namespaces, and may have none: the next one begins at [`EntryPage::next`].
#[derive(Clone, Debug)]
pub struct NamespacedSchedule {
    store: Arc<dyn Store>,
    namespace: Namespace,
}

impl NamespacedSchedule {
    /// Creates the view; `None` if the store has no schedule.
    #[must_use]
    pub fn new(store: Arc<dyn Store>, namespace: Namespace) -> Option<Self> {
        store.capabilities().schedule.is_some().then_some(Self { store, namespace })
    }

    fn schedule(&self) -> Result<&dyn Schedule, StoreError> {
        // Its presence was checked, and a store does not lose it.
        let schedule = self.store.capabilities().schedule;
        schedule.ok_or_else(|| StoreError::unavailable("the store has no schedule any more"))
    }

    fn queue(&self, queue: &QueueName) -> Result<QueueName, StoreError> {
        self.namespace.queue(queue).map_err(StoreError::unavailable)
    }

    /// Renames the queue of an entry; `None` if the entry belongs to another namespace.
    fn local(&self, entry: KeyedEntry) -> Option<KeyedEntry> {
        let (key, entry) = entry;
        match entry {
            Ok(entry) => {
                let queue = self.namespace.local_queue(&entry.queue)?;
                Some((key, Ok(ScheduleEntry { queue, ..entry })))
            }
            Err(error) => Some((key, Err(error))),
        }
    }
}

type KeyedEntry = (EntryKey, Result<ScheduleEntry, StoreError>);

impl Schedule for NamespacedSchedule {
    fn insert(&self, entry: NewEntry) -> BoxFuture<'_, Result<(), StoreError>> {
        Box::pin(async move {
            let queue = self.queue(&entry.queue)?;
            self.schedule()?.insert(NewEntry { queue, ..entry }).await
        })
    }

    fn due<'a>(
        &'a self,
        queues: &'a [QueueName],
        limit: NonZeroU32,
    ) -> BoxFuture<'a, Result<DueEntries, StoreError>> {
        Box::pin(async move {
            let queues = queues.iter().map(|queue| self.queue(queue));
            let queues = queues.collect::<Result<Vec<_>, _>>()?;
            let mut due = self.schedule()?.due(&queues, limit).await?;
            due.entries = due.entries.into_iter().filter_map(|it| self.local(it)).collect();
            Ok(due)
        })
    }

    fn postpone(
        &self,
        key: EntryKey,
        expected: Option<Timestamp>,
        due_in: Duration,
    ) -> BoxFuture<'_, Result<bool, StoreError>> {
        Box::pin(async move { self.schedule()?.postpone(key, expected, due_in).await })
    }

    fn remove(&self, key: EntryKey) -> BoxFuture<'_, Result<(), StoreError>> {
        Box::pin(async move { self.schedule()?.remove(key).await })
    }

    fn entries(
        &self,
        after: Option<EntryKey>,
        limit: NonZeroU32,
    ) -> BoxFuture<'_, Result<EntryPage, StoreError>> {
        Box::pin(async move {
            // One read of the store, however many entries other namespaces have: their number must not delay
            // this one. The caller goes on after those that are left out.
            let mut page = self.schedule()?.entries(after, limit).await?;
            let mut others = None;
            page.entries = page
                .entries
                .into_iter()
                .filter_map(|(key, entry)| {
                    let local = self.local((key, entry));
                    if local.is_none() {
                        others = Some((key, others.map_or(1, |(_, count): (_, u32)| count + 1)));
                    }
                    local
                })
                .collect();
            page.others = others;
            Ok(page)
        })
    }

    fn queues(&self) -> BoxFuture<'_, Result<Vec<QueueStatus>, StoreError>> {
        Box::pin(async move {
            let queues = self.schedule()?.queues().await?;
            let local = queues.into_iter().filter_map(|status| {
                let queue = self.namespace.local_queue(&status.queue)?;
                Some(QueueStatus { queue, ..status })
            });
            Ok(local.collect())
        })
    }
}
