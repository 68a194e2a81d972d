//! The census: a list of the undecided records of a store.
//!
//! 1. A store has no index on the state of records, because it would make every write slower. So
//!    the census reads all records page by page, and pauses four times as long as each page took: a
//!    million records take some minutes, with little effect on claims.
//! 2. Between two walks it includes the writes of this process, if they go through
//!    [`Census::watch`].
//! 3. A record that another process decided after the last walk is listed until the next walk. A
//!    decision about it is rejected, because its fence or state has changed.

use std::collections::{BTreeMap, HashMap};
use std::fmt;
use std::num::NonZeroU32;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::Duration;

use hapax_core::store::{
    BoxFuture, Capabilities, Cursor, Reaped, ScanStep, Snapshot, Stamped, StoredRecord, Swap,
    Swapped,
};
use hapax_core::{
    Inspect, Namespace, OnUnknown, OperationId, RecordState, Store, StoreError, Timestamp,
};
use serde::Serialize;
use tokio::time::{Instant, sleep};

use crate::keys::{RecordView, StateView, UndecidedGroups, rfc3339};

/// Largest number of listed records that a hook of this process may decide, and of all others; a later walk adds further
/// ones when others were decided. So records that wait for operators leave room for those that wait for a hook.
const MOST: usize = 10_000;

/// Number of routes that are counted separately.
const MOST_ROUTES: usize = 1_000;

/// Records of a page: of a walk in the background, and of a walk without pauses.
const PAGE: NonZeroU32 = NonZeroU32::MIN.saturating_add(31);
pub(crate) const LARGE_PAGE: NonZeroU32 = NonZeroU32::MIN.saturating_add(255);

/// Pauses after each page, and between two walks.
const PAUSE: (Duration, Duration) = (Duration::from_millis(10), Duration::from_secs(2));
const BETWEEN: Duration = Duration::from_secs(60);

/// Pause before the next walk if the store failed during one.
const AGAIN: Duration = Duration::from_secs(10);

/// The undecided records of a store, as of the last walk and this process's later writes.
#[derive(Default)]
pub struct Census {
    known: Mutex<CensusState>,
    /// The number of listed records, which is read without the lock.
    count: AtomicUsize,
    /// The namespace whose records a hook of this process may decide.
    namespace: Option<Namespace>,
}

#[derive(Default)]
struct CensusState {
    entries: HashMap<OperationId, CensusEntry>,
    /// The number of those that a hook of this process may decide.
    reconcilable: usize,
    /// The number of the walk in progress.
    walk: u64,
    /// The beginning of the last whole walk.
    as_of: Option<Timestamp>,
}

struct CensusEntry {
    view: RecordView,
    lapsed: bool,
    undecided: bool,
    /// Whether a hook of this process may decide it.
    reconcilable: bool,
    walk: u64,
}

impl CensusState {
    /// Adds an entry or replaces one, if there is room for its kind.
    fn insert(&mut self, id: &OperationId, entry: CensusEntry) {
        self.remove(id);
        let listed = match entry.reconcilable {
            true => self.reconcilable,
            false => self.entries.len() - self.reconcilable,
        };
        if listed < MOST {
            self.reconcilable += usize::from(entry.reconcilable);
            self.entries.insert(*id, entry);
        }
    }

    fn remove(&mut self, id: &OperationId) {
        let removed = self.entries.remove(id);
        self.reconcilable -= usize::from(removed.is_some_and(|entry| entry.reconcilable));
    }

    /// Returns whether records may be missing.
    fn is_full(&self) -> bool {
        self.reconcilable.max(self.entries.len() - self.reconcilable) >= MOST
    }
}

/// Counts of undecided records.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Undecided {
    /// Records whose owner wrote that the outcome is unknown.
    pub unknown: usize,
    /// Records whose owner's lease lapsed.
    pub lapsed: usize,
    /// The unknown and the lapsed ones of each route that has a name.
    pub by_route: BTreeMap<String, [usize; 2]>,
    /// The time at which the oldest execution began.
    pub oldest: Option<Timestamp>,
    /// The time at which the last complete walk began; `None` during the first.
    pub as_of: Option<Timestamp>,
}

/// List of undecided records.
#[derive(Debug, Serialize)]
pub(crate) struct CensusList {
    pub(crate) keys: Vec<RecordView>,
    pub(crate) more: bool,
    pub(crate) as_of: Option<String>,
}

impl Census {
    /// Creates a census that has room of its own for the records of `namespace` that a hook may decide.
    #[must_use]
    pub fn of(namespace: Namespace) -> Self {
        Self { namespace: Some(namespace), ..Self::default() }
    }

    /// Wraps `store` so that the census sees each write through the returned store at once.
    #[must_use]
    pub fn watch(self: &Arc<Self>, store: Arc<dyn Store>) -> Arc<dyn Store> {
        Arc::new(CensusStore { store, census: Arc::clone(self) })
    }

    /// Returns the counts of undecided records.
    #[must_use]
    pub fn undecided(&self) -> Undecided {
        let known = self.lock();
        let mut found = Undecided { as_of: known.as_of, ..Undecided::default() };
        for entry in known.entries.values().filter(|entry| entry.undecided) {
            if entry.lapsed {
                found.lapsed += 1;
            } else {
                found.unknown += 1;
            }
            let described = entry.view.described.as_ref();
            if let Some(route) = described.and_then(|described| described.route.as_ref())
                && (found.by_route.len() < MOST_ROUTES || found.by_route.contains_key(route))
            {
                found.by_route.entry(route.clone()).or_default()[usize::from(entry.lapsed)] += 1;
            }
            let began = Timestamp::from_micros(entry.view.fence);
            found.oldest = Some(found.oldest.map_or(began, |oldest| oldest.min(began)));
        }
        found
    }

    /// Returns the records that wait for a decision, in groups.
    pub(crate) fn groups(&self) -> UndecidedGroups {
        let known = self.lock();
        let undecided = known.entries.values().filter(|entry| entry.undecided);
        let groups = UndecidedGroups::of(undecided.map(|entry| &entry.view));
        let more = known.is_full();
        UndecidedGroups { more, as_of: known.as_of.map(rfc3339), ..groups }
    }

    /// Returns the oldest ones.
    pub(crate) fn oldest(&self, limit: usize) -> CensusList {
        let known = self.lock();
        let mut keys: Vec<_> = known.entries.values().map(|entry| entry.view.clone()).collect();
        keys.sort_by(|a, b| (a.fence, &a.id).cmp(&(b.fence, &b.id)));
        let more = keys.len() > limit;
        keys.truncate(limit);
        CensusList { keys, more, as_of: known.as_of.map(rfc3339) }
    }

    /// Returns listed records under [`OnUnknown::Reconcile`] that have a rank: at most `limit`, those of the lowest rank
    /// and the oldest first, in turn of each route, so that no route waits for all records of another one.
    #[must_use]
    pub fn reconcilable(
        &self,
        limit: usize,
        mut rank: impl FnMut(&OperationId, &RecordView) -> Option<u32>,
    ) -> Vec<(OperationId, RecordView)> {
        let known = self.lock();
        let mut routes = HashMap::<_, Vec<_>>::new();
        for (id, CensusEntry { view, .. }) in &known.entries {
            let reconciles = view.on_unknown == OnUnknown::Reconcile.as_str();
            if let Some(rank) = if reconciles { rank(id, view) } else { None } {
                let route = view.described.as_ref().and_then(|it| it.route.as_deref());
                routes.entry(route).or_default().push((rank, view.fence, id, view));
            }
        }
        let mut listed = Vec::new();
        for mut route in routes.into_values() {
            route.sort_by_key(|(rank, fence, id, _)| (*rank, *fence, **id));
            listed.extend(route.into_iter().take(limit).enumerate());
        }
        listed.sort_by_key(|(turn, (rank, fence, id, _))| (*turn, *rank, *fence, **id));
        listed.truncate(limit);
        listed.into_iter().map(|(_, (_, _, id, view))| (*id, view.clone())).collect()
    }

    /// Walks again and again, until the census is dropped.
    pub(crate) async fn run(this: Weak<Self>, store: Arc<dyn Inspect>) {
        loop {
            let Some(census) = this.upgrade() else { return };
            let begun = Instant::now();
            let walked = census.walk(&*store, true).await;
            drop(census);
            match walked {
                Ok(()) => sleep(begun.elapsed().max(BETWEEN)).await,
                Err(error) => {
                    tracing::debug!(%error, "a walk of the census ended early");
                    sleep(AGAIN).await;
                }
            }
        }
    }

    /// Reads all records once, with pauses or without. [`OperatorsBuilder::build`](crate::OperatorsBuilder::build) does so
    /// again and again. If the future is dropped, the records that were read until then are listed.
    ///
    /// # Errors
    /// [`StoreError`]; the records that were read until then are listed.
    pub async fn walk(&self, store: &dyn Inspect, pause: bool) -> Result<(), StoreError> {
        let (mut place, mut began) = (Cursor::default(), None);
        let walk = {
            let mut known = self.lock();
            known.walk += 1;
            known.walk
        };
        loop {
            let asked = Instant::now();
            let mut visit =
                |id: &OperationId, stored: &Result<StoredRecord, StoreError>, now: Timestamp| {
                    if let Ok(stored) = stored {
                        self.saw(id, stored, now);
                    }
                };
            let page = if pause { PAGE } else { LARGE_PAGE };
            let ScanStep { now, next } = store.scan(place, page, &mut visit).await?;
            let took = asked.elapsed();
            began.get_or_insert(now);
            let Some(next) = next else { break };
            place = next;
            if pause {
                sleep((took * 4).clamp(PAUSE.0, PAUSE.1)).await;
            }
        }
        self.look_again(store, walk).await?;
        self.lock().as_of = began;
        Ok(())
    }

    /// Loads the known records that the walk did not visit: one that is written during a walk may move
    /// past it.
    async fn look_again(&self, store: &dyn Inspect, walk: u64) -> Result<(), StoreError> {
        let missed: Vec<OperationId> = {
            let known = self.lock();
            let missed = known.entries.iter().filter(|(_, entry)| entry.walk < walk);
            missed.map(|(id, _)| *id).collect()
        };
        for id in missed {
            match store.load(&id).await {
                Ok(Snapshot { now, stored: Some(stored) }) => self.saw(&id, &stored, now),
                Ok(Snapshot { stored: None, .. }) => self.remove_if(&id, |_| true),
                Err(StoreError::Corrupt(_)) => {}
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }

    /// Removes a record that was decided elsewhere; one of another execution stays.
    pub fn forget(&self, id: &OperationId, fence: u64) {
        self.remove_if(id, |view| view.fence == fence);
    }

    fn remove_if(&self, id: &OperationId, removes: impl FnOnce(&RecordView) -> bool) {
        let mut known = self.lock();
        if known.entries.get(id).is_some_and(|entry| removes(&entry.view)) {
            known.remove(id);
        }
        self.count.store(known.entries.len(), Ordering::Relaxed);
    }

    fn saw(&self, id: &OperationId, stored: &StoredRecord, now: Timestamp) {
        let unknown = StateView::of(stored, now) == StateView::Unknown;
        if !unknown && self.count.load(Ordering::Relaxed) == 0 {
            return;
        }
        // A view is texts: it is made of the few records that are listed, before the lock.
        let view = unknown.then(|| RecordView::named(id, stored, now));
        let mut known = self.lock();
        match view {
            Some(view) => {
                let entry = CensusEntry {
                    lapsed: matches!(stored.record.state, RecordState::InFlight),
                    undecided: stored.record.terms.on_unknown != OnUnknown::Reexecute,
                    reconcilable: self.is_reconcilable(&view),
                    view,
                    walk: known.walk,
                };
                known.insert(id, entry);
            }
            None => known.remove(id),
        }
        self.count.store(known.entries.len(), Ordering::Relaxed);
    }

    /// Returns whether a hook of this process may decide a record.
    fn is_reconcilable(&self, view: &RecordView) -> bool {
        let described = view.described.as_ref().filter(|described| described.hook.is_some());
        let theirs = described.and_then(|described| described.namespace.as_deref());
        view.on_unknown == OnUnknown::Reconcile.as_str()
            && self.namespace.as_ref().is_some_and(|ours| theirs == Some(ours.as_str()))
    }

    fn lock(&self) -> MutexGuard<'_, CensusState> {
        self.known.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl fmt::Debug for Census {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Census").field("undecided", &self.undecided()).finish()
    }
}

/// A store whose writes a census sees.
#[derive(Debug)]
struct CensusStore {
    store: Arc<dyn Store>,
    census: Arc<Census>,
}

impl Store for CensusStore {
    fn swap(&self, swap: Swap) -> BoxFuture<'_, Result<Swapped, StoreError>> {
        let unknown = matches!(swap.draft.record.state, RecordState::Unknown { .. });
        if !unknown && self.census.count.load(Ordering::Relaxed) == 0 {
            return self.store.swap(swap);
        }
        Box::pin(async move {
            let (id, write_id, draft) = (swap.id, swap.write_id, swap.draft.clone());
            let swapped = self.store.swap(swap).await?;
            if let Swapped::Stored(Stamped { now, fence, lease_until }) = swapped {
                let keep_until = draft.keep.map(|keep| now.after(keep));
                let stored =
                    StoredRecord { write_id, fence, lease_until, keep_until, record: draft.record };
                self.census.saw(&id, &stored, now);
            }
            Ok(swapped)
        })
    }

    fn load<'a>(&'a self, key: &'a OperationId) -> BoxFuture<'a, Result<Snapshot, StoreError>> {
        self.store.load(key)
    }

    fn reap(&self, limit: NonZeroU32) -> BoxFuture<'_, Result<Reaped, StoreError>> {
        self.store.reap(limit)
    }

    fn capabilities(&self) -> Capabilities<'_> {
        self.store.capabilities()
    }
}

#[cfg(test)]
mod tests {
    use hapax_core::{
        Claim, Clock, Fingerprint, FingerprintScheme, Idempotency, Key, MemoryStore,
        OperationRequest, Policy, Scope, Secret, Terms,
    };

    use super::*;

    /// A request of a route.
    struct Asked(&'static str);

    impl OperationRequest for Asked {
        fn scheme(&self) -> FingerprintScheme {
            FingerprintScheme::new("http/test").unwrap()
        }

        fn fingerprint(&self, _: &FingerprintScheme) -> Option<Fingerprint> {
            Some(Fingerprint::from_bytes([1; 32]))
        }

        fn description(&self) -> Option<bytes::Bytes> {
            let described = serde_json::json!({
                "key": "a key", "method": "POST", "target": "/pay", "route": self.0,
                "namespace": "", "hook": "a hook",
            });
            Some(described.to_string().into())
        }
    }

    fn engine(store: Arc<dyn Store>) -> Idempotency {
        Idempotency::builder(store).build().unwrap()
    }

    async fn claim(engine: &Idempotency, key: &str, on_unknown: OnUnknown) -> hapax_core::Lease {
        claim_on(engine, "pay", key, on_unknown).await
    }

    async fn claim_on(
        engine: &Idempotency,
        route: &'static str,
        key: &str,
        on_unknown: OnUnknown,
    ) -> hapax_core::Lease {
        let terms = Terms {
            lease: Duration::from_secs(30),
            retention: Duration::from_secs(3600),
            on_unknown,
        };
        let policy = Policy { terms, ..Policy::default() };
        let key = Key::new(key).unwrap();
        match engine.claim(&Scope::shared(), &key, &Asked(route), &policy).await.unwrap() {
            Claim::Execute(lease) => lease,
            other => panic!("{other:?}"),
        }
    }

    #[tokio::test]
    async fn records_left_by_a_crash_and_unknown_ones_are_counted_oldest_first() {
        let clock = Arc::new(hapax_testkit::ManualClock::default());
        let store = MemoryStore::new(Arc::clone(&clock) as Arc<dyn Clock>, Default::default());
        let store = Arc::new(store.secret(Secret::new([7; 32])));
        let census = Arc::new(Census::default());
        let elsewhere = engine(Arc::clone(&store) as Arc<dyn Store>);
        let here = engine(census.watch(Arc::clone(&store) as Arc<dyn Store>));
        // Dropped leases stand for processes that died.
        for (key, policy) in [("first", OnUnknown::Block), ("runs-again", OnUnknown::Reexecute)] {
            drop(claim(&elsewhere, key, policy).await);
        }
        for number in 0..600 {
            let lease = claim(&elsewhere, &format!("done-{number}"), OnUnknown::Block).await;
            lease.complete(hapax_core::Outcome::new("http/1", ""), None).await.unwrap();
        }
        assert_eq!(census.undecided(), Undecided::default());
        claim(&here, "second", OnUnknown::Reconcile).await.abandon(None).await.unwrap();
        assert_eq!(census.undecided().unknown, 1, "known without a walk");
        clock.advance(Duration::from_secs(31));
        census.walk(&*store, false).await.unwrap();
        let found = census.undecided();
        assert_eq!((found.unknown, found.lapsed), (1, 1));
        assert_eq!(found.by_route, BTreeMap::from([("pay".to_owned(), [1, 1])]));
        assert!(found.oldest.is_some() && found.as_of.is_some());
        let listed = census.oldest(10);
        assert!(listed.keys.is_sorted_by_key(|key| key.fence) && !listed.more);
        assert_eq!(listed.keys.len(), 3);
        let described = listed.keys[0].described.as_ref().unwrap();
        assert_eq!((described.key.as_str(), described.method.as_deref()), ("a key", Some("POST")));
        assert_eq!(census.oldest(2).keys.len(), 2);
        // It is decided here: the census knows without another walk.
        let id = here.operation_id(&Scope::shared(), &Key::new("second").unwrap());
        let fence = store.load(&id).await.unwrap().stored.unwrap().fence;
        let resolve = hapax_core::machine::Resolve {
            expected: fence,
            force: false,
            forget: false,
            resolution: hapax_core::machine::DefiniteVerdict::DidNotHappen,
            note: None,
            restart: false,
        };
        here.resolve(id, resolve).await.unwrap();
        assert_eq!(census.undecided().unknown, 0);
    }

    #[tokio::test]
    async fn reconcilable_records_are_those_of_the_lowest_rank_and_the_oldest_up_to_a_limit() {
        let clock = Arc::new(hapax_testkit::ManualClock::default());
        let store = MemoryStore::new(Arc::clone(&clock) as Arc<dyn Clock>, Default::default());
        let (store, census) = (Arc::new(store), Arc::new(Census::default()));
        let engine = engine(census.watch(Arc::clone(&store) as Arc<dyn Store>));
        for key in ["a", "b", "c", "d"] {
            clock.advance(Duration::from_millis(1));
            claim(&engine, key, OnUnknown::Reconcile).await.abandon(None).await.unwrap();
        }
        claim(&engine, "blocked", OnUnknown::Block).await.abandon(None).await.unwrap();
        let id = |key: &str| engine.operation_id(&Scope::shared(), &Key::new(key).unwrap());
        let rank = |it: &OperationId, _: &RecordView| match it {
            it if *it == id("a") => Some(1),
            it if *it == id("c") => None,
            _ => Some(0),
        };
        for (limit, expected) in [(2, &["b", "d"][..]), (9, &["b", "d", "a"])] {
            let listed: Vec<_> =
                census.reconcilable(limit, rank).into_iter().map(|(id, _)| id).collect();
            assert_eq!(listed, expected.iter().map(|key| id(key)).collect::<Vec<_>>());
        }
    }

    #[tokio::test]
    async fn a_route_with_many_records_leaves_another_route_its_turn() {
        let clock = Arc::new(hapax_testkit::ManualClock::default());
        let store = MemoryStore::new(Arc::clone(&clock) as Arc<dyn Clock>, Default::default());
        let store = Arc::new(store.secret(Secret::new([7; 32])));
        let census = Arc::new(Census::default());
        let engine = engine(census.watch(Arc::clone(&store) as Arc<dyn Store>));
        let keys: Vec<_> = (0..10).map(|number| format!("a-{number}")).collect();
        let of_a = keys.iter().map(|key| ("a", &**key));
        for (route, key) in of_a.chain([("b", "b-0"), ("b", "b-1")]) {
            clock.advance(Duration::from_millis(1));
            let lease = claim_on(&engine, route, key, OnUnknown::Reconcile).await;
            lease.abandon(None).await.unwrap();
        }
        let id = |key: &str| engine.operation_id(&Scope::shared(), &Key::new(key).unwrap());
        for (limit, expected) in
            [(1, &["a-0"][..]), (2, &["a-0", "b-0"]), (5, &["a-0", "b-0", "a-1", "b-1", "a-2"])]
        {
            let listed = census.reconcilable(limit, |_, _| Some(0)).into_iter().map(|(id, _)| id);
            assert_eq!(
                listed.collect::<Vec<_>>(),
                expected.iter().map(|it| id(it)).collect::<Vec<_>>()
            );
        }
        // After a failure of those of `a` it is the turn of `b`, also within a limit of one.
        let rank = |_: &OperationId, view: &RecordView| {
            let described = view.described.as_ref()?;
            Some(u32::from(described.route.as_deref() == Some("a")))
        };
        assert_eq!(census.reconcilable(1, rank)[0].0, id("b-0"));
    }

    #[tokio::test]
    async fn records_that_wait_for_operators_leave_room_for_those_that_wait_for_a_hook() {
        let store = MemoryStore::new(Arc::new(hapax_core::SystemClock), Default::default());
        let store = Arc::new(store.secret(Secret::new([7; 32])));
        let engine = engine(Arc::clone(&store) as Arc<dyn Store>);
        let load = async |key: &str| {
            let id = engine.operation_id(&Scope::shared(), &Key::new(key).unwrap());
            let Snapshot { now, stored } = store.load(&id).await.unwrap();
            (id, stored.unwrap(), now)
        };
        claim(&engine, "blocks", OnUnknown::Block).await.abandon(None).await.unwrap();
        claim(&engine, "reconciles", OnUnknown::Reconcile).await.abandon(None).await.unwrap();
        let (_, blocks, now) = load("blocks").await;
        let (id, reconciles, _) = load("reconciles").await;
        let [ours, other] = ["", "other"].map(|name| Census::of(Namespace::new(name).unwrap()));
        for census in [&ours, &other] {
            for number in 0..MOST as u64 {
                let mut other = [0; 32];
                other[..8].copy_from_slice(&number.to_be_bytes());
                census.saw(&OperationId::from_bytes(other), &blocks, now);
            }
            assert!(census.groups().more);
            census.saw(&id, &reconciles, now);
        }
        let listed = |census: &Census| census.reconcilable(9, |_, _| Some(0)).len();
        assert_eq!((listed(&ours), listed(&other)), (1, 0));
        // What was decided leaves its room to another one.
        let fence = reconciles.fence.get();
        ours.forget(&id, fence + 1);
        assert_eq!(listed(&ours), 1);
        ours.forget(&id, fence);
        assert_eq!((listed(&ours), ours.lock().reconcilable), (0, 0));
        ours.saw(&id, &reconciles, now);
        assert_eq!((listed(&ours), ours.lock().entries.len()), (1, MOST + 1));
    }
}
