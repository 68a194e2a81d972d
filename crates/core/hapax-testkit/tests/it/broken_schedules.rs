//! The suite finds schedules that break its rules: each bug fails at least one of them.

use std::collections::BTreeSet;
use std::num::NonZeroU32;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use bytes::Bytes;
use hapax_core::schedule::{
    DueEntries, EntryKey, EntryPage, MAX_NOTE, NewEntry, QueueName, QueueStatus, Schedule,
    ScheduleEntry,
};
use hapax_core::store::{BoxFuture, Capabilities, Reaped, Snapshot, Swap, Swapped};
use hapax_core::{
    Clock, EntryId, MemoryCapacity, MemoryStore, OperationId, Store, StoreError, Timestamp,
};
use hapax_testkit::ManualClock;
use hapax_testkit::schedule::{ReopenFixture, durable_schedule_rules, schedule_rules};
use hapax_testkit::suite::StoreFixture;
use tokio::task::yield_now;

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Bug {
    None,
    InsertionsReplace,
    InsertionsAreOnePerOperation,
    InsertionsHaveTwoSteps,
    InsertionsForgetTheQueuesCase,
    InsertionsOverflow,
    PostponementsCompareNothing,
    PostponementsCheckThenSet,
    PostponementsHaveTwoSteps,
    PostponementsForgetTheNote,
    PostponementsOfNothingSucceed,
    PostponementsOnlyDelay,
    RemovalsRemoveTheOperation,
    RemovalsOfNothingFail,
    DueHidesOtherQueues,
    DueReturnsOtherQueues,
    DueReturnsTheNextToo,
    DueLeavesOutThisMoment,
    DueIgnoresTheLimit,
    DueIsInOrderOfKey,
    DueRepeatsQueues,
    NextForgetsWhatIsLeft,
    NextIsOfAnyQueue,
    NextIsOfTheFirst,
    NotesAreTruncated,
    LongNotesAreTruncated,
    LongNotesAreAmbiguous,
    PagesRepeatTheirFirst,
    PagesSayThereIsNoMore,
    PagesAreInOrderOfTime,
    PagesLeaveOutWhatIsDue,
    QueuesCountWhatIsDue,
    QueuesStayWithoutEntries,
    QueuesAreOverdueAtOnce,
    ReapingRemovesEntries,
    ReopeningForgetsEntries,
    ReopeningForgetsNotes,
    ReopeningForgetsPostponements,
    ReopeningForgetsRemovals,
}

/// A memory store with a bug in its schedule.
#[derive(Debug)]
struct Broken {
    bug: Bug,
    clock: Arc<ManualClock>,
    inner: MemoryStore,
    /// Every entry as it was inserted, for what a bug brings back.
    inserted: Mutex<Vec<(NewEntry, Timestamp)>>,
}

type Found = (EntryKey, Result<ScheduleEntry, StoreError>);

fn due_of(found: &Found) -> Timestamp {
    found.1.as_ref().unwrap().due
}

impl Broken {
    fn new(bug: Bug, clock: Arc<ManualClock>) -> Self {
        let inner = MemoryStore::new(clock.clone(), MemoryCapacity::default());
        Self { bug, clock, inner, inserted: Mutex::default() }
    }

    async fn all(&self) -> Vec<Found> {
        Schedule::entries(&self.inner, None, NonZeroU32::MAX).await.unwrap().entries
    }

    async fn find(&self, key: EntryKey) -> Option<ScheduleEntry> {
        let all = self.all().await;
        all.into_iter().find(|found| found.0 == key).map(|found| found.1.unwrap())
    }

    /// Inserts an entry as it was found.
    async fn restore(&self, entry: ScheduleEntry) {
        let ScheduleEntry { key, queue, due, note } = entry;
        let due_in = due.since(self.clock.now());
        self.inner.insert(NewEntry { key, queue, due_in, note }).await.unwrap();
    }

    async fn inserts(&self, mut entry: NewEntry) -> Result<(), StoreError> {
        let key = entry.key;
        if self.bug == Bug::InsertionsAreOnePerOperation
            && self.all().await.iter().any(|found| found.0.operation == key.operation)
        {
            return Ok(());
        }
        match self.bug {
            Bug::InsertionsReplace => self.inner.remove(key).await?,
            Bug::InsertionsHaveTwoSteps if self.find(key).await.is_none() => {
                let torn = NewEntry { note: Bytes::new(), ..entry.clone() };
                self.inner.insert(torn).await?;
                yield_now().await;
                self.inner.remove(key).await?;
            }
            Bug::InsertionsForgetTheQueuesCase => {
                entry.queue = QueueName::new(entry.queue.as_str().to_lowercase()).unwrap();
            }
            Bug::InsertionsOverflow => {
                entry.due_in = Duration::from_micros(entry.due_in.as_micros() as u64 % (1 << 50));
            }
            Bug::NotesAreTruncated => entry.note.truncate(65_536),
            Bug::LongNotesAreTruncated => entry.note.truncate(MAX_NOTE),
            Bug::LongNotesAreAmbiguous if entry.note.len() > MAX_NOTE => {
                return Err(StoreError::ambiguous("too long"));
            }
            _ => {}
        }
        if entry.note.len() <= MAX_NOTE {
            let due = self.clock.now().after(entry.due_in);
            self.inserted.lock().unwrap().push((entry.clone(), due));
        }
        self.inner.insert(entry).await
    }

    async fn postpones(
        &self,
        key: EntryKey,
        expected: Option<Timestamp>,
        due_in: Duration,
    ) -> Result<bool, StoreError> {
        let found = self.find(key).await;
        let is_expected = |found: &ScheduleEntry| expected.is_none_or(|due| due == found.due);
        let Some(entry) = found.filter(is_expected) else {
            return match self.bug {
                Bug::PostponementsOfNothingSucceed => Ok(true),
                Bug::PostponementsCompareNothing => self.inner.postpone(key, None, due_in).await,
                _ => self.inner.postpone(key, expected, due_in).await,
            };
        };
        let due = self.clock.now().after(due_in);
        match self.bug {
            Bug::PostponementsCheckThenSet => {
                yield_now().await;
                self.inner.postpone(key, None, due_in).await
            }
            Bug::PostponementsHaveTwoSteps => {
                self.inner.remove(key).await?;
                tokio::time::sleep(Duration::from_micros(100)).await;
                self.restore(ScheduleEntry { due, ..entry }).await;
                Ok(true)
            }
            Bug::PostponementsForgetTheNote => {
                self.inner.remove(key).await?;
                self.restore(ScheduleEntry { due, note: Bytes::new(), ..entry }).await;
                Ok(true)
            }
            Bug::PostponementsOnlyDelay if due < entry.due => Ok(true),
            _ => self.inner.postpone(key, expected, due_in).await,
        }
    }

    async fn removes(&self, key: EntryKey) -> Result<(), StoreError> {
        if self.bug == Bug::RemovalsOfNothingFail && self.find(key).await.is_none() {
            return Err(StoreError::unavailable("no such entry"));
        }
        if self.bug == Bug::RemovalsRemoveTheOperation {
            for (other, _) in self.all().await {
                if other.operation == key.operation {
                    self.inner.remove(other).await?;
                }
            }
        }
        self.inner.remove(key).await
    }

    async fn finds_due(
        &self,
        queues: &[QueueName],
        limit: NonZeroU32,
    ) -> Result<DueEntries, StoreError> {
        let names: Vec<_> = self.inner.queues().await?.into_iter().map(|one| one.queue).collect();
        let mut reply = self.inner.due(queues, limit).await?;
        let (now, whole) = (reply.now, NonZeroU32::MAX);
        match self.bug {
            Bug::DueHidesOtherQueues => {
                reply = self.inner.due(&names, limit).await?;
                reply.entries.retain(|found| queues.contains(&found.1.as_ref().unwrap().queue));
            }
            Bug::DueReturnsOtherQueues => reply = self.inner.due(&names, limit).await?,
            Bug::DueReturnsTheNextToo if reply.entries.is_empty() => {
                let mut rest = self.all().await;
                rest.retain(|found| queues.contains(&found.1.as_ref().unwrap().queue));
                rest.sort_by_key(due_of);
                reply.entries.extend(rest.into_iter().next());
            }
            Bug::DueLeavesOutThisMoment => reply.entries.retain(|found| due_of(found) < now),
            Bug::DueIgnoresTheLimit => reply = self.inner.due(queues, whole).await?,
            Bug::DueIsInOrderOfKey => reply.entries.sort_by_key(|found| found.0),
            Bug::DueRepeatsQueues => {
                reply.entries.clear();
                for queue in queues {
                    let of_queue = self.inner.due(std::slice::from_ref(queue), limit).await?;
                    reply.entries.extend(of_queue.entries);
                }
                reply.entries.sort_by_key(due_of);
                reply.entries.truncate(limit.get() as usize);
            }
            Bug::NextForgetsWhatIsLeft if reply.next_in == Some(Duration::ZERO) => {
                reply.next_in = self.inner.due(queues, whole).await?.next_in;
            }
            Bug::NextIsOfAnyQueue => reply.next_in = self.inner.due(&names, whole).await?.next_in,
            Bug::NextIsOfTheFirst => {
                let first = self.all().await.iter().map(due_of).min();
                reply.next_in = reply.next_in.and(first).map(|due| due.since(now));
            }
            _ => {}
        }
        Ok(reply)
    }

    async fn pages(
        &self,
        after: Option<EntryKey>,
        limit: NonZeroU32,
    ) -> Result<EntryPage, StoreError> {
        let mut page = self.inner.entries(after, limit).await?;
        match self.bug {
            Bug::PagesRepeatTheirFirst => {
                if let Some(entry) = self.find(after.unwrap_or_else(none)).await {
                    page.entries.insert(0, (entry.key, Ok(entry)));
                    page.entries.truncate(limit.get() as usize);
                }
            }
            Bug::PagesSayThereIsNoMore => page.more = false,
            Bug::PagesAreInOrderOfTime => page.entries.sort_by_key(due_of),
            Bug::PagesLeaveOutWhatIsDue => page.entries.retain(|found| due_of(found) > page.now),
            _ => {}
        }
        Ok(page)
    }

    async fn counts(&self) -> Result<Vec<QueueStatus>, StoreError> {
        let mut queues = self.inner.queues().await?;
        match self.bug {
            Bug::QueuesCountWhatIsDue => {
                for status in &mut queues {
                    let queue = std::slice::from_ref(&status.queue);
                    let due = self.inner.due(queue, NonZeroU32::MAX).await?;
                    status.entries = due.entries.len() as u64;
                }
            }
            Bug::QueuesStayWithoutEntries => {
                let known: BTreeSet<_> = queues.iter().map(|one| one.queue.clone()).collect();
                for (entry, _) in &*self.inserted.lock().unwrap() {
                    if !known.contains(&entry.queue) {
                        let (queue, overdue) = (entry.queue.clone(), Duration::ZERO);
                        queues.push(QueueStatus { queue, entries: 0, overdue });
                    }
                }
            }
            Bug::QueuesAreOverdueAtOnce => {
                for status in &mut queues {
                    status.overdue = status.overdue.max(Duration::from_secs(1));
                }
            }
            _ => {}
        }
        Ok(queues)
    }

    /// Returns the store of the next process.
    async fn reopened(&self) -> Self {
        let next = Self::new(self.bug, self.clock.clone());
        let inserted = self.inserted.lock().unwrap().clone();
        for found in self.all().await {
            let mut entry = found.1.unwrap();
            match self.bug {
                Bug::ReopeningForgetsEntries if entry.due > self.clock.now() => continue,
                Bug::ReopeningForgetsNotes => entry.note.truncate(1_000_000),
                Bug::ReopeningForgetsPostponements => {
                    let first = inserted.iter().find(|(first, _)| first.key == entry.key);
                    entry.due = first.unwrap().1;
                }
                _ => {}
            }
            let due = entry.due;
            // The clock of the test stands still: what was due stays due at its time.
            let now = self.clock.now();
            self.clock.set(due.min(now));
            next.restore(entry).await;
            self.clock.set(now);
        }
        if self.bug == Bug::ReopeningForgetsRemovals {
            for (entry, _) in &inserted {
                next.inner.insert(entry.clone()).await.unwrap();
            }
        }
        *next.inserted.lock().unwrap() = inserted;
        next
    }
}

fn none() -> EntryKey {
    EntryKey { operation: OperationId::from_bytes([0; 32]), id: EntryId::from_bytes([0; 16]) }
}

impl Store for Broken {
    fn swap(&self, swap: Swap) -> BoxFuture<'_, Result<Swapped, StoreError>> {
        self.inner.swap(swap)
    }

    fn load<'a>(&'a self, key: &'a OperationId) -> BoxFuture<'a, Result<Snapshot, StoreError>> {
        self.inner.load(key)
    }

    fn reap(&self, limit: NonZeroU32) -> BoxFuture<'_, Result<Reaped, StoreError>> {
        Box::pin(async move {
            if self.bug == Bug::ReapingRemovesEntries {
                for found in self.all().await {
                    if due_of(&found) < self.clock.now() {
                        self.inner.remove(found.0).await?;
                    }
                }
            }
            self.inner.reap(limit).await
        })
    }

    fn capabilities(&self) -> Capabilities<'_> {
        Capabilities { schedule: Some(self), ..Capabilities::default() }
    }
}

impl Schedule for Broken {
    fn insert(&self, entry: NewEntry) -> BoxFuture<'_, Result<(), StoreError>> {
        Box::pin(self.inserts(entry))
    }

    fn due<'a>(
        &'a self,
        queues: &'a [QueueName],
        limit: NonZeroU32,
    ) -> BoxFuture<'a, Result<DueEntries, StoreError>> {
        Box::pin(self.finds_due(queues, limit))
    }

    fn postpone(
        &self,
        key: EntryKey,
        expected: Option<Timestamp>,
        due_in: Duration,
    ) -> BoxFuture<'_, Result<bool, StoreError>> {
        Box::pin(self.postpones(key, expected, due_in))
    }

    fn remove(&self, key: EntryKey) -> BoxFuture<'_, Result<(), StoreError>> {
        Box::pin(self.removes(key))
    }

    fn entries(
        &self,
        after: Option<EntryKey>,
        limit: NonZeroU32,
    ) -> BoxFuture<'_, Result<EntryPage, StoreError>> {
        Box::pin(self.pages(after, limit))
    }

    fn queues(&self) -> BoxFuture<'_, Result<Vec<QueueStatus>, StoreError>> {
        Box::pin(self.counts())
    }
}

struct Suspect(Bug, Arc<ManualClock>);

impl StoreFixture for Suspect {
    type Store = Broken;

    const REAPS_AUTOMATICALLY: bool = false;

    async fn open(&self) -> Arc<Broken> {
        Arc::new(Broken::new(self.0, self.1.clone()))
    }

    async fn pass(&self, _: &Broken, by: Duration) {
        self.1.advance(by);
    }
}

impl ReopenFixture for Suspect {
    async fn reopen(&self, store: &Broken) -> Arc<Broken> {
        Arc::new(store.reopened().await)
    }
}

/// Whether every rule holds for a schedule with this bug.
async fn passes(bug: Bug) -> bool {
    let suspect = Suspect(bug, Arc::default());
    let rules = async move {
        schedule_rules(&suspect).await;
        durable_schedule_rules(&suspect).await;
    };
    // A rule that never ends has found its bug as well.
    let rules = tokio::time::timeout(Duration::from_secs(60), rules);
    matches!(tokio::spawn(rules).await, Ok(Ok(())))
}

macro_rules! found {
    ($($name:ident: $bug:ident)*) => {
        $(
            #[tokio::test(flavor = "multi_thread", worker_threads = 4)]
            async fn $name() {
                assert!(!passes(Bug::$bug).await, "{:?} keeps every rule", Bug::$bug);
            }
        )*
    };
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn a_schedule_without_a_bug_passes() {
    assert!(passes(Bug::None).await);
}

found! {
    finds_insertions_that_replace: InsertionsReplace
    finds_one_entry_per_operation: InsertionsAreOnePerOperation
    finds_insertions_in_two_steps: InsertionsHaveTwoSteps
    finds_queues_without_case: InsertionsForgetTheQueuesCase
    finds_delays_that_overflow: InsertionsOverflow
    finds_postponements_without_comparison: PostponementsCompareNothing
    finds_postponements_that_check_then_set: PostponementsCheckThenSet
    finds_postponements_in_two_steps: PostponementsHaveTwoSteps
    finds_postponements_without_note: PostponementsForgetTheNote
    finds_postponements_of_nothing: PostponementsOfNothingSucceed
    finds_postponements_that_only_delay: PostponementsOnlyDelay
    finds_removals_of_an_operation: RemovalsRemoveTheOperation
    finds_removals_that_fail_again: RemovalsOfNothingFail
    finds_hidden_queues: DueHidesOtherQueues
    finds_entries_of_other_queues: DueReturnsOtherQueues
    finds_entries_before_their_time: DueReturnsTheNextToo
    finds_entries_left_out_at_their_time: DueLeavesOutThisMoment
    finds_an_ignored_limit: DueIgnoresTheLimit
    finds_due_entries_in_order_of_key: DueIsInOrderOfKey
    finds_repeated_queues: DueRepeatsQueues
    finds_a_next_time_without_what_is_left: NextForgetsWhatIsLeft
    finds_a_next_time_of_another_queue: NextIsOfAnyQueue
    finds_a_next_time_of_what_was_returned: NextIsOfTheFirst
    finds_truncated_notes: NotesAreTruncated
    finds_long_notes_that_are_truncated: LongNotesAreTruncated
    finds_long_notes_that_are_ambiguous: LongNotesAreAmbiguous
    finds_pages_of_entries_that_overlap: PagesRepeatTheirFirst
    finds_pages_of_entries_that_end_too_soon: PagesSayThereIsNoMore
    finds_pages_in_order_of_time: PagesAreInOrderOfTime
    finds_pages_without_what_is_due: PagesLeaveOutWhatIsDue
    finds_counts_of_what_is_due: QueuesCountWhatIsDue
    finds_queues_without_entries: QueuesStayWithoutEntries
    finds_queues_that_are_overdue_at_once: QueuesAreOverdueAtOnce
    finds_reaping_of_entries: ReapingRemovesEntries
    finds_entries_lost_at_reopening: ReopeningForgetsEntries
    finds_notes_cut_at_reopening: ReopeningForgetsNotes
    finds_postponements_lost_at_reopening: ReopeningForgetsPostponements
    finds_removals_lost_at_reopening: ReopeningForgetsRemovals
}
