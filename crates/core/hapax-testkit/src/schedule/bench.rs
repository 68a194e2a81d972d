//! Helpers of the rules.

use std::collections::BTreeSet;
use std::num::NonZeroU32;
use std::ops::Deref;
use std::sync::Arc;
use std::time::Duration;

use hapax_core::schedule::{
    EntryKey, EntryPage, NewEntry, QueueName, QueueStatus, Schedule, ScheduleEntry,
};
use hapax_core::store::BoxFuture;
use hapax_core::{NamespacedSchedule, StoreError, Timestamp};
use tokio::task::JoinSet;

use super::ReopenFixture;
use crate::suite::StoreFixture;
use crate::suite::bench::{Bench, MAX_ATTEMPTS, pause, readable};

/// A time that is short enough to wait for, and long enough for some calls.
pub(super) const SOON: Duration = Duration::from_millis(200);

/// Number of tasks that insert many entries.
const INSERTERS: usize = 32;

/// A store with an empty schedule. Each call is repeated until it succeeds, as callers do.
pub(super) struct ScheduleBench<'a, F: StoreFixture>(Bench<'a, F>);

impl<'a, F: StoreFixture> Deref for ScheduleBench<'a, F> {
    type Target = Bench<'a, F>;

    fn deref(&self) -> &Self::Target {
        &self.0
    }
}

/// The result of a call.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Called<T> {
    pub(super) result: T,
    /// True if an earlier copy of the call was ambiguous: it may have been applied.
    pub(super) repeated: bool,
}

/// The reply of a call of `due`, with the times of the store's clock before and after it.
#[derive(Debug)]
pub(super) struct DueReply {
    pub(super) before: Timestamp,
    pub(super) entries: Vec<ScheduleEntry>,
    pub(super) next_in: Option<Duration>,
    pub(super) after: Timestamp,
}

impl DueReply {
    pub(super) fn keys(&self) -> Vec<EntryKey> {
        self.entries.iter().map(|entry| entry.key).collect()
    }

    /// Checks that `next_in` is the time until `due`.
    #[track_caller]
    pub(super) fn expect_next(&self, due: Timestamp) {
        let next_in = self.next_in.unwrap_or_else(|| panic!("no next entry: {self:?}"));
        let possible = due.since(self.after)..=due.since(self.before);
        assert!(possible.contains(&next_in), "{next_in:?} is not in {possible:?}");
    }
}

impl<'a, F: StoreFixture> ScheduleBench<'a, F>
where
    F::Store: Schedule,
{
    pub(super) async fn open(fixture: &'a F) -> Self {
        Self(Bench::open(fixture).await)
    }

    /// Opens the store again, as a new process does.
    pub(super) async fn reopened(self) -> Self
    where
        F: ReopenFixture,
    {
        let store = self.fixture().reopen(&self.store).await;
        Self(self.0.with(store))
    }

    pub(super) fn entry_key(&self) -> EntryKey {
        EntryKey { operation: self.key(), id: self.entry_id() }
    }

    /// Returns a new entry with a note of 20 bytes.
    pub(super) fn entry(&self, queue: &str, due_in: Duration) -> NewEntry {
        let note = self.bytes(20).into();
        NewEntry { key: self.entry_key(), queue: queue_named(queue), due_in, note }
    }

    /// Inserts a new entry; returns it as it was read.
    pub(super) async fn scheduled(&self, queue: &str, due_in: Duration) -> ScheduleEntry {
        let entry = self.entry(queue, due_in);
        self.insert(&entry).await;
        self.found(entry.key).await
    }

    pub(super) async fn insert(&self, entry: &NewEntry) {
        let called = insert(&*self.store, entry).await;
        self.settle(called).await;
    }

    /// Inserts the entries, several at a time.
    pub(super) async fn insert_all(&self, entries: &[NewEntry]) {
        let mut tasks = JoinSet::new();
        for share in entries.chunks(entries.len().div_ceil(INSERTERS).max(1)) {
            let (store, share) = (Arc::clone(&self.store), share.to_vec());
            tasks.spawn(async move {
                let mut repeated = false;
                for entry in &share {
                    repeated |= insert(&*store, entry).await.repeated;
                }
                repeated
            });
        }
        let repeated = tasks.join_all().await.contains(&true);
        self.settle(Called { result: (), repeated }).await;
    }

    pub(super) async fn postpone(
        &self,
        key: EntryKey,
        expected: Option<Timestamp>,
        due_in: Duration,
    ) -> Called<bool> {
        let called = postpone(&*self.store, key, expected, due_in).await;
        self.settle(called).await
    }

    /// Postpones an entry that is due at `expected`, if given; returns it as it was read.
    pub(super) async fn postponed(
        &self,
        key: EntryKey,
        expected: Option<Timestamp>,
        due_in: Duration,
    ) -> ScheduleEntry {
        let before = self.now().await;
        let called = self.postpone(key, expected, due_in).await;
        // After a copy that was applied, the expected due time has changed.
        assert!(called.result || called.repeated, "{key:?} was not postponed from {expected:?}");
        let found = self.found(key).await;
        let possible = before.after(due_in)..=self.now().await.after(due_in);
        assert!(possible.contains(&found.due), "due at {:?}, not in {possible:?}", found.due);
        found
    }

    pub(super) async fn remove(&self, key: EntryKey) {
        let called = again(|| self.store.remove(key)).await;
        self.settle(called).await;
    }

    /// Returns the entries of the queues that are due, and checks what is true for every reply.
    pub(super) async fn due(&self, queues: &[&str], limit: u32) -> DueReply {
        let names: Vec<_> = queues.iter().map(|queue| queue_named(queue)).collect();
        let limit = NonZeroU32::new(limit).unwrap();
        let before = self.now().await;
        let found = again(|| self.store.due(&names, limit)).await.result;
        let after = self.now().await;
        assert!(before <= found.now && found.now <= after, "{before:?} {found:?} {after:?}");
        let (now, next_in) = (found.now, found.next_in);
        let entries = whole(found.entries);
        assert!(entries.len() <= limit.get() as usize, "more than {limit}: {entries:?}");
        assert!(entries.is_sorted_by_key(|entry| entry.due), "not in order: {entries:?}");
        let distinct: BTreeSet<_> = entries.iter().map(|entry| entry.key).collect();
        assert_eq!(distinct.len(), entries.len(), "an entry was returned twice");
        for entry in &entries {
            assert!(entry.due <= now, "returned before its time, at {now:?}: {entry:?}");
            assert!(names.contains(&entry.queue), "of another queue: {entry:?}");
        }
        DueReply { before, entries, next_in, after }
    }

    /// Returns a page, and whether there is more.
    pub(super) async fn page(
        &self,
        after: Option<EntryKey>,
        limit: u32,
    ) -> (Vec<ScheduleEntry>, bool) {
        let limit = NonZeroU32::new(limit).unwrap();
        let page = again(|| self.store.entries(after, limit)).await.result;
        let entries = whole(page.entries);
        assert!(entries.len() <= limit.get() as usize, "more than {limit}: {entries:?}");
        assert!(!(entries.is_empty() && page.more), "an empty page that is not the last");
        (entries, page.more)
    }

    /// Returns a page of a namespace.
    pub(super) async fn page_of(
        &self,
        schedule: &NamespacedSchedule,
        after: Option<EntryKey>,
        limit: u32,
    ) -> EntryPage {
        let limit = NonZeroU32::new(limit).unwrap();
        again(|| schedule.entries(after, limit)).await.result
    }

    /// Returns all entries, by pages of `limit`.
    pub(super) async fn all_by(&self, limit: u32) -> Vec<ScheduleEntry> {
        let mut all = Vec::<ScheduleEntry>::new();
        loop {
            let (page, more) = self.page(all.last().map(|entry| entry.key), limit).await;
            all.extend(page);
            let is_ascending = all.is_sorted_by(|one, next| one.key < next.key);
            assert!(is_ascending, "pages of {limit} are not in ascending order: {all:?}");
            if !more {
                return all;
            }
        }
    }

    /// Returns all entries.
    pub(super) async fn all(&self) -> Vec<ScheduleEntry> {
        self.all_by(1_000).await
    }

    pub(super) async fn find(&self, key: EntryKey) -> Option<ScheduleEntry> {
        self.all().await.into_iter().find(|entry| entry.key == key)
    }

    pub(super) async fn found(&self, key: EntryKey) -> ScheduleEntry {
        self.find(key).await.expect("the entry was inserted and not removed")
    }

    pub(super) async fn queues(&self) -> Vec<QueueStatus> {
        again(|| self.store.queues()).await.result
    }

    /// Returns the time of the store's clock.
    pub(super) async fn now(&self) -> Timestamp {
        self.load(&self.key()).await.now
    }

    /// Returns once no earlier copy of a call can be applied any more.
    pub(super) async fn settle<T>(&self, called: Called<T>) -> Called<T> {
        if called.repeated {
            self.pass(Duration::from_micros(1)).await;
        }
        called
    }
}

pub(super) async fn insert(store: &dyn Schedule, entry: &NewEntry) -> Called<()> {
    again(|| store.insert(entry.clone())).await
}

pub(super) async fn postpone(
    store: &dyn Schedule,
    key: EntryKey,
    expected: Option<Timestamp>,
    due_in: Duration,
) -> Called<bool> {
    again(|| store.postpone(key, expected, due_in)).await
}

/// Repeats a call until it succeeds.
async fn again<'s, T>(call: impl Fn() -> BoxFuture<'s, Result<T, StoreError>>) -> Called<T> {
    let (mut repeated, mut last) = (false, None);
    for _ in 0..MAX_ATTEMPTS {
        match call().await {
            Ok(result) => return Called { result, repeated },
            Err(error) => {
                repeated |= matches!(error, StoreError::Ambiguous(_));
                last = Some(readable(error));
            }
        }
        pause().await;
    }
    panic!("{MAX_ATTEMPTS} calls of a schedule failed: {last:?}")
}

fn whole(found: Vec<(EntryKey, Result<ScheduleEntry, StoreError>)>) -> Vec<ScheduleEntry> {
    let whole = |(key, entry): (EntryKey, Result<ScheduleEntry, StoreError>)| {
        let entry = entry.unwrap_or_else(|error| panic!("the entry {key:?} is damaged: {error}"));
        assert_eq!(entry.key, key, "an entry under another key");
        entry
    };
    found.into_iter().map(whole).collect()
}

pub(super) fn queue_named(name: &str) -> QueueName {
    QueueName::new(name).unwrap()
}

/// Returns whether `found` is `entry` as it was inserted.
pub(super) fn is_same(found: &ScheduleEntry, entry: &NewEntry) -> bool {
    found.key == entry.key && found.queue == entry.queue && found.note == entry.note
}
