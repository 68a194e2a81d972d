//! The suite finds stores that break its rules: each bug fails at least one of them.

use std::collections::BTreeMap;
use std::num::NonZeroU32;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use hapax_core::store::{
    BoxFuture, Capabilities, Cursor, Page, Reaped, ScanStep, Snapshot, Stamp, Stamped,
    StoredRecord, Swap, Swapped, Visitor, scan_by_pages,
};
use hapax_core::{
    Clock, FencingToken, Inspect, OperationId, RecordState, Store, StoreError, Timestamp,
};
use hapax_testkit::ManualClock;
use hapax_testkit::suite::{ClockFixture, StoreFixture, clock_rules, inspect_rules, store_rules};

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Bug {
    None,
    ChecksThenSets,
    RepeatsConflict,
    RepeatsWriteAgain,
    ConflictsWrite,
    ConflictsBringNothing,
    WritesInTwoSteps,
    SharesCellsOfSimilarKeys,
    TruncatesOutcomes,
    ForgetsWhetherAsking,
    ForgetsTheCheckpoint,
    FencesAreTheClock,
    FencesGrowWithEveryWrite,
    ReleasesForgetTheFence,
    LeasesCountFromZero,
    DeadlinesWrap,
    ExpiredIsAbsent,
    ReapsAtTheKeep,
    ReapsUndecidedRecords,
    ReapsWhatIsKeptForEver,
    ReapsByTheFirstWrite,
    ReapsPastTheLimit,
    ReapSaysThereIsNoMore,
    PagesRepeatTheirFirstKey,
    PagesLeaveOutTheExpired,
    PagesSayThereIsNoMore,
    WalksLeaveOutTheDone,
    WalksSinceATimeAreEmpty,
    FencesForgetTheLast,
}

#[derive(Debug)]
struct Broken {
    clock: Arc<ManualClock>,
    bug: Bug,
    records: Mutex<BTreeMap<OperationId, (StoredRecord, Timestamp)>>,
}

impl Broken {
    fn name(&self, key: OperationId) -> OperationId {
        let mut bytes = *key.as_bytes();
        if self.bug == Bug::SharesCellsOfSimilarKeys {
            bytes[31] = 0;
        }
        OperationId::from_bytes(bytes)
    }

    async fn swap(&self, swap: Swap) -> Swapped {
        let key = self.name(swap.id);
        if self.bug == Bug::ChecksThenSets {
            let before = self.records.lock().unwrap().get(&key).cloned();
            tokio::task::yield_now().await;
            let (answer, after) = self.decide(before, &swap);
            after.and_then(|after| self.records.lock().unwrap().insert(key, after));
            return answer;
        }
        if self.bug == Bug::WritesInTwoSteps {
            self.tear(&key, &swap);
            tokio::time::sleep(Duration::from_micros(100)).await;
        }
        let mut records = self.records.lock().unwrap();
        let (answer, after) = self.decide(records.get(&key).cloned(), &swap);
        after.and_then(|after| records.insert(key, after));
        answer
    }

    /// Writes the outcome, and leaves the tag to the second step.
    fn tear(&self, key: &OperationId, swap: &Swap) {
        if let Some((stored, _)) = self.records.lock().unwrap().get_mut(key)
            && Some(stored.write_id) == swap.expected
        {
            stored.record.state = swap.draft.record.state.clone();
        }
    }

    /// What to answer, and what to write if anything.
    fn decide(
        &self,
        before: Option<(StoredRecord, Timestamp)>,
        swap: &Swap,
    ) -> (Swapped, Option<(StoredRecord, Timestamp)>) {
        let now = self.clock.now();
        let first = before.as_ref().map_or(now, |(_, first)| *first);
        let found = before.map(|(stored, _)| stored);
        let after = self.write(now, found.as_ref(), swap);
        if let Some(stored) = &found
            && stored.write_id == swap.write_id
            && self.bug != Bug::RepeatsConflict
        {
            let again = (self.bug == Bug::RepeatsWriteAgain).then_some((after, first));
            return (Swapped::Stored(stamped(now, stored)), again);
        }
        if found.as_ref().map(|stored| stored.write_id) != swap.expected {
            let stored = found.filter(|_| self.bug != Bug::ConflictsBringNothing);
            let written = (self.bug == Bug::ConflictsWrite).then_some((after, first));
            return (Swapped::Conflict(Snapshot { now, stored }), written);
        }
        (Swapped::Stored(stamped(now, &after)), Some((after, first)))
    }

    fn write(&self, now: Timestamp, found: Option<&StoredRecord>, swap: &Swap) -> StoredRecord {
        let last = found.map(|stored| stored.fence);
        let mut record = swap.draft.record.clone();
        if let RecordState::Done(outcome) = &record.state
            && self.bug == Bug::TruncatesOutcomes
        {
            let short = outcome.bytes().slice(..outcome.bytes().len().min(65_536));
            record.state = RecordState::Done(hapax_core::Outcome::new(outcome.format(), short));
        }
        if let RecordState::Unknown { reconciling, .. } = &mut record.state {
            *reconciling &= self.bug != Bug::ForgetsWhetherAsking;
        }
        if self.bug == Bug::ForgetsTheCheckpoint {
            record.checkpoint = None;
        }
        let released =
            record.state == RecordState::Released && self.bug == Bug::ReleasesForgetTheFence;
        let fence = match (swap.draft.stamp, last, self.bug) {
            _ if released => FencingToken::new(0),
            (Stamp::NextFence, _, Bug::FencesAreTheClock) => FencingToken::new(now.as_micros()),
            (Stamp::NextFence, Some(_), Bug::FencesForgetTheLast) => {
                FencingToken::next(Some(FencingToken::new(0)), now)
            }
            (Stamp::Keep, Some(last), bug) if bug != Bug::FencesGrowWithEveryWrite => last,
            _ => FencingToken::next(last, now),
        };
        let from = if self.bug == Bug::LeasesCountFromZero { Timestamp::default() } else { now };
        let after = |duration: Duration| match self.bug {
            Bug::DeadlinesWrap => {
                Timestamp::from_micros(from.as_micros().wrapping_add(duration.as_micros() as u64))
            }
            _ => from.after(duration),
        };
        StoredRecord {
            write_id: swap.write_id,
            fence,
            lease_until: after(swap.draft.lease),
            keep_until: swap.draft.keep.map(after),
            record,
        }
    }

    fn due(&self, stored: &StoredRecord, first: Timestamp) -> Timestamp {
        let lease = stored.record.terms.lease;
        match self.bug {
            Bug::ReapsAtTheKeep => stored.keep_until.unwrap_or(Timestamp::MAX),
            Bug::ReapsUndecidedRecords => stored.lease_until.after(lease),
            Bug::ReapsWhatIsKeptForEver => stored.keep_until.unwrap_or_default().after(lease),
            Bug::ReapsByTheFirstWrite => first.after(Duration::from_millis(300)),
            _ => stored.keep_until.map_or(Timestamp::MAX, |until| until.after(lease)),
        }
    }

    fn reap(&self, limit: usize) -> Reaped {
        let now = self.clock.now();
        let mut records = self.records.lock().unwrap();
        let due = |(_, (stored, first)): &(&_, &(StoredRecord, Timestamp))| {
            self.due(stored, *first) <= now
        };
        let limit = if self.bug == Bug::ReapsPastTheLimit { usize::MAX } else { limit };
        let keys: Vec<_> = records.iter().filter(due).map(|(key, _)| *key).collect();
        keys.iter().take(limit).for_each(|key| drop(records.remove(key)));
        Reaped {
            removed: keys.len().min(limit) as u32,
            more: keys.len() > limit && self.bug != Bug::ReapSaysThereIsNoMore,
        }
    }
}

fn stamped(now: Timestamp, stored: &StoredRecord) -> Stamped {
    Stamped { now, fence: stored.fence, lease_until: stored.lease_until }
}

impl Store for Broken {
    fn swap(&self, swap: Swap) -> BoxFuture<'_, Result<Swapped, StoreError>> {
        Box::pin(async move { Ok(self.swap(swap).await) })
    }

    fn load<'a>(&'a self, key: &'a OperationId) -> BoxFuture<'a, Result<Snapshot, StoreError>> {
        let now = self.clock.now();
        let stored =
            self.records.lock().unwrap().get(&self.name(*key)).map(|(stored, _)| stored.clone());
        let expired = |stored: &StoredRecord| stored.keep_until.is_some_and(|until| until <= now);
        let stored = stored.filter(|stored| self.bug != Bug::ExpiredIsAbsent || !expired(stored));
        Box::pin(async move { Ok(Snapshot { now, stored }) })
    }

    fn reap(&self, limit: NonZeroU32) -> BoxFuture<'_, Result<Reaped, StoreError>> {
        Box::pin(async move { Ok(self.reap(limit.get() as usize)) })
    }

    fn capabilities(&self) -> Capabilities<'_> {
        Capabilities::default()
    }
}

impl Inspect for Broken {
    fn page(
        &self,
        after: Option<OperationId>,
        limit: NonZeroU32,
    ) -> BoxFuture<'_, Result<Page, StoreError>> {
        let now = self.clock.now();
        let after = |key: &OperationId| match after {
            Some(after) if self.bug == Bug::PagesRepeatTheirFirstKey => *key >= after,
            Some(after) => *key > after,
            None => true,
        };
        let shown = |stored: &StoredRecord| {
            self.bug != Bug::PagesLeaveOutTheExpired
                || stored.keep_until.is_none_or(|end| end > now)
        };
        let records = self.records.lock().unwrap();
        let mut rest: Vec<_> = records
            .iter()
            .filter(|(key, (stored, _))| after(key) && shown(stored))
            .map(|(key, (stored, _))| (*key, Ok(stored.clone())))
            .collect();
        let limit = limit.get() as usize;
        let more = rest.len() > limit && self.bug != Bug::PagesSayThereIsNoMore;
        rest.truncate(limit);
        Box::pin(async move { Ok(Page { now, records: rest, more }) })
    }

    fn scan_all<'a>(
        &'a self,
        from: Cursor,
        limit: NonZeroU32,
        since: Option<Duration>,
        visit: Visitor<'a>,
    ) -> BoxFuture<'a, Result<ScanStep, StoreError>> {
        if self.bug == Bug::WalksSinceATimeAreEmpty && since.is_some() {
            return Box::pin(async { Ok(ScanStep { now: self.clock.now(), next: None }) });
        }
        if self.bug != Bug::WalksLeaveOutTheDone {
            return scan_by_pages(self, from, limit, visit);
        }
        Box::pin(async move {
            let mut undecided = |key: &OperationId,
                                 stored: &Result<StoredRecord, StoreError>,
                                 now: Timestamp| {
                let is_done = |it: &StoredRecord| matches!(it.record.state, RecordState::Done(_));
                if !stored.as_ref().is_ok_and(is_done) {
                    visit(key, stored, now);
                }
            };
            scan_by_pages(self, from, limit, &mut undecided).await
        })
    }
}

struct Suspect(Bug, Arc<ManualClock>);

impl StoreFixture for Suspect {
    type Store = Broken;

    const REAPS_AUTOMATICALLY: bool = false;

    async fn open(&self) -> Arc<Broken> {
        let Self(bug, clock) = self;
        Arc::new(Broken { clock: clock.clone(), bug: *bug, records: Mutex::default() })
    }

    async fn pass(&self, _: &Broken, by: Duration) {
        self.1.advance(by);
    }
}

impl ClockFixture for Suspect {
    async fn step_back(&self, _: &Broken, by: Duration) {
        let now = self.1.now().as_micros();
        self.1.set(Timestamp::from_micros(now - by.as_micros() as u64));
    }
}

/// Whether every rule holds for a store with this bug.
async fn passes(bug: Bug) -> bool {
    let suspect = Suspect(bug, Arc::default());
    let rules = async move {
        store_rules(&suspect).await;
        inspect_rules(&suspect).await;
        clock_rules(&suspect).await;
    };
    // A rule that never ends, a page that repeats for ever, has found its bug as well.
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
async fn a_store_without_a_bug_passes() {
    assert!(passes(Bug::None).await);
}

found! {
    finds_a_check_before_a_set: ChecksThenSets
    finds_repeats_that_conflict: RepeatsConflict
    finds_repeats_that_write_again: RepeatsWriteAgain
    finds_conflicts_that_write: ConflictsWrite
    finds_conflicts_that_bring_nothing: ConflictsBringNothing
    finds_a_write_in_two_steps: WritesInTwoSteps
    finds_shared_cells: SharesCellsOfSimilarKeys
    finds_truncated_outcomes: TruncatesOutcomes
    finds_a_forgotten_question: ForgetsWhetherAsking
    finds_a_forgotten_checkpoint: ForgetsTheCheckpoint
    finds_fences_of_the_clock_alone: FencesAreTheClock
    finds_fences_of_any_write: FencesGrowWithEveryWrite
    finds_a_fence_lost_by_a_release: ReleasesForgetTheFence
    finds_leases_from_zero: LeasesCountFromZero
    finds_deadlines_that_wrap: DeadlinesWrap
    finds_expired_cells_that_are_hidden: ExpiredIsAbsent
    finds_reaping_at_the_keep: ReapsAtTheKeep
    finds_reaping_by_the_lease: ReapsUndecidedRecords
    finds_reaping_of_what_has_no_end: ReapsWhatIsKeptForEver
    finds_reaping_by_the_first_write: ReapsByTheFirstWrite
    finds_reaping_past_the_limit: ReapsPastTheLimit
    finds_reaping_that_stops_too_soon: ReapSaysThereIsNoMore
    finds_pages_that_overlap: PagesRepeatTheirFirstKey
    finds_pages_without_the_expired: PagesLeaveOutTheExpired
    finds_pages_that_end_too_soon: PagesSayThereIsNoMore
    finds_walks_without_the_done: WalksLeaveOutTheDone
    finds_empty_walks_since_a_time: WalksSinceATimeAreEmpty
    finds_fences_that_forget_the_last: FencesForgetTheLast
}
