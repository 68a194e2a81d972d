//! A process that is killed before and after every call of its store, its schedule and the systems
//! that its steps call; another process then continues.

use std::collections::{BTreeMap, BTreeSet};
use std::future::pending;
use std::num::NonZeroU32;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, OnceLock};
use std::time::Duration;

use hapax_core::schedule::{
    DueEntries, EntryKey, EntryPage, NewEntry, QueueName, QueueStatus, Schedule,
};
use hapax_core::store::{BoxFuture, Capabilities, Reaped, Snapshot, Swap, Swapped};
use hapax_core::{Idempotency, MemoryStore, OperationId, Store, StoreError, Timestamp};
use hapax_saga::{
    Saga, SagaError, Sagas, StepContext, StepEffect, StepError, StepRetry, UndoError,
};
use tokio::sync::Notify;

use crate::shop::DAY;
use crate::world::{key, scope};

/// Lease of the sagas in these tests.
const LEASE: Duration = Duration::from_millis(300);

/// The point at which a process is killed: the number of calls before it, begins and ends counted.
#[derive(Debug)]
pub(crate) struct Kill {
    at: usize,
    points: AtomicUsize,
    place: OnceLock<&'static str>,
    pub(crate) killed: Notify,
}

impl Kill {
    pub(crate) fn at(at: usize) -> Arc<Self> {
        let (points, place) = (AtomicUsize::new(0), OnceLock::new());
        Arc::new(Self { at, points, place, killed: Notify::new() })
    }

    /// Passes a point; does not return from the last one, nor from any after it.
    pub(crate) async fn point(&self, place: &'static str) {
        let point = self.points.fetch_add(1, Ordering::SeqCst);
        if point >= self.at {
            self.place.get_or_init(|| place);
            self.killed.notify_one();
            pending::<()>().await;
        }
    }

    /// Returns the name of the point at which the process was killed.
    pub(crate) fn place(&self) -> Option<&'static str> {
        self.place.get().copied()
    }

    /// Passes a point before a call, and one after it.
    pub(crate) async fn around<T>(
        &self,
        [before, after]: [&'static str; 2],
        call: impl Future<Output = T>,
    ) -> T {
        self.point(before).await;
        let result = call.await;
        self.point(after).await;
        result
    }
}

/// A store of a process that is killed.
#[derive(Debug)]
pub(crate) struct KilledStore {
    pub(crate) store: Arc<dyn Store>,
    pub(crate) kill: Arc<Kill>,
}

impl KilledStore {
    fn call<'a, T: Send + 'a>(
        &'a self,
        places: [&'static str; 2],
        call: impl FnOnce(&'a dyn Store, &'a dyn Schedule) -> BoxFuture<'a, Result<T, StoreError>>,
    ) -> BoxFuture<'a, Result<T, StoreError>> {
        let schedule = self.store.capabilities().schedule.expect("it has a schedule");
        Box::pin(self.kill.around(places, call(&*self.store, schedule)))
    }
}

impl Store for KilledStore {
    fn swap(&self, swap: Swap) -> BoxFuture<'_, Result<Swapped, StoreError>> {
        self.call(["before a swap", "after a swap"], |store, _| store.swap(swap))
    }

    fn load<'a>(&'a self, key: &'a OperationId) -> BoxFuture<'a, Result<Snapshot, StoreError>> {
        self.call(["before a load", "after a load"], |store, _| store.load(key))
    }

    fn reap(&self, limit: NonZeroU32) -> BoxFuture<'_, Result<Reaped, StoreError>> {
        self.store.reap(limit)
    }

    fn capabilities(&self) -> Capabilities<'_> {
        Capabilities { schedule: Some(self), ..self.store.capabilities() }
    }
}

impl Schedule for KilledStore {
    fn insert(&self, entry: NewEntry) -> BoxFuture<'_, Result<(), StoreError>> {
        self.call(["before insert", "after insert"], |_, schedule| schedule.insert(entry))
    }

    fn due<'a>(
        &'a self,
        queues: &'a [QueueName],
        limit: NonZeroU32,
    ) -> BoxFuture<'a, Result<DueEntries, StoreError>> {
        // Not counted: the number of polls depends on time.
        self.store.capabilities().schedule.expect("it has a schedule").due(queues, limit)
    }

    fn postpone(
        &self,
        key: EntryKey,
        expected: Option<Timestamp>,
        due_in: Duration,
    ) -> BoxFuture<'_, Result<bool, StoreError>> {
        self.call(["before postpone", "after postpone"], |_, schedule| {
            schedule.postpone(key, expected, due_in)
        })
    }

    fn remove(&self, key: EntryKey) -> BoxFuture<'_, Result<(), StoreError>> {
        self.call(["before remove", "after remove"], |_, schedule| schedule.remove(key))
    }

    fn entries(
        &self,
        after: Option<EntryKey>,
        limit: NonZeroU32,
    ) -> BoxFuture<'_, Result<EntryPage, StoreError>> {
        self.call(["before entries", "after entries"], |_, schedule| schedule.entries(after, limit))
    }

    fn queues(&self) -> BoxFuture<'_, Result<Vec<QueueStatus>, StoreError>> {
        self.call(["before queues", "after queues"], |_, schedule| schedule.queues())
    }
}

/// Systems that honor keys, and outlive the processes that call them.
#[derive(Clone, Default)]
struct Outside {
    effects: Arc<Mutex<Effects>>,
    kill: Option<Arc<Kill>>,
}

#[derive(Default)]
struct Effects {
    /// Keys and arguments that each call had, by name.
    calls: BTreeMap<String, BTreeSet<(String, u32)>>,
    /// Effects, by name.
    effects: BTreeMap<String, u32>,
}

impl Outside {
    async fn call(&self, name: &str, key: &str, argument: u32) {
        if let Some(kill) = &self.kill {
            kill.point("before a step").await;
        }
        {
            let mut effects = self.effects.lock().unwrap();
            let calls = effects.calls.entry(name.to_owned()).or_default();
            if calls.insert((key.to_owned(), argument)) {
                *effects.effects.entry(name.to_owned()).or_default() += 1;
            }
        }
        if let Some(kill) = &self.kill {
            kill.point("after a step").await;
        }
    }
}

const STEPS: [&str; 5] = ["one", "two", "three", "four", "five"];

/// Returns a saga of five steps. Step `rejected`, if there is one, is rejected.
fn five(outside: &Outside, rejected: Option<usize>) -> Saga<u32, u32, String> {
    let mut saga = Saga::define("five", 1, outside.clone());
    let mut steps = Vec::new();
    for (at, name) in STEPS.into_iter().enumerate() {
        let is_rejected = rejected == Some(at);
        let run = move |at: StepContext<Outside>, n: u32| async move {
            if is_rejected {
                return Err(StepError::Rejected(format!("{name} is rejected")));
            }
            at.call(name, at.key().as_str(), n).await;
            Ok::<_, StepError<String>>(n + 1)
        };
        let undo = move |at: StepContext<Outside>, n: u32, _: StepEffect<u32>| async move {
            at.call(&format!("undo {name}"), at.key().as_str(), n).await;
            Ok::<_, UndoError>(())
        };
        let quick = StepRetry::default().timeout(Duration::from_secs(2));
        let step = saga.keyed(name, DAY, run).retry(quick).settle(Duration::ZERO);
        steps.push(step.undo(undo));
    }
    saga.flow(move |op, mut n: u32| {
        let steps = steps.clone();
        async move {
            for step in steps {
                n = op.run(step, n).await?;
            }
            Ok(n)
        }
    })
    .unwrap()
}

/// A store that processes open one after the other.
pub(crate) trait KillFixture: Sync {
    /// Opens the store; the earlier process has ended.
    fn open(&self) -> impl Future<Output = Arc<dyn Store>>;
}

fn sagas(store: impl Store, saga: &Saga<u32, u32, String>) -> Sagas {
    let engine = Idempotency::builder(store).namespace("").build().unwrap();
    Sagas::builder(engine).register(saga).lease(LEASE).build().unwrap()
}

/// Runs a process in a runtime of its own, until it is killed or its saga has ended. Returns whether
/// it was killed.
fn first_process(
    fixture: &impl KillFixture,
    outside: &Outside,
    rejected: Option<usize>,
    (name, at): (&str, usize),
) -> bool {
    let kill = Kill::at(at);
    let outside = Outside { kill: Some(Arc::clone(&kill)), ..outside.clone() };
    let saga = five(&outside, rejected);
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    // All that the process has is dropped with the runtime, as in a kill.
    runtime.block_on(async {
        let store = KilledStore { store: fixture.open().await, kill: Arc::clone(&kill) };
        let sagas = sagas(store, &saga);
        let work = async {
            let started = sagas.start(&saga, &scope(), &key(name), &1).await.unwrap();
            let _ = started.outcome().await;
        };
        tokio::select! {
            () = kill.killed.notified() => true,
            () = work => false,
            _ = sagas.run(pending(), Duration::ZERO) => unreachable!("it does not shut down"),
        }
    })
}

/// Kills a process at each point, or at each `stride`-th, and lets another one continue.
pub(crate) fn another_process_continues(
    fixture: &impl KillFixture,
    rejected: Option<usize>,
    stride: usize,
) {
    let mut at = 0;
    loop {
        let name = format!("k-{at}-{}", rejected.is_some());
        let outside = Outside::default();
        let killed = first_process(fixture, &outside, rejected, (&name, at));
        let saga = five(&outside, rejected);
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        runtime.block_on(async {
            let sagas = sagas(fixture.open().await, &saga);
            let work = async {
                // The client retries: the first process may have died before it accepted.
                let started = sagas.start(&saga, &scope(), &key(&name), &1).await.unwrap();
                let outcome = started.outcome().await;
                match (rejected, outcome) {
                    (None, Ok(6)) => {}
                    (Some(step), Err(SagaError::Undone(error))) => {
                        assert_eq!(error, format!("{} is rejected", STEPS[step]));
                    }
                    (_, outcome) => panic!("killed at {at}: {outcome:?}"),
                }
            };
            tokio::select! {
                () = work => {}
                _ = sagas.run(pending(), Duration::ZERO) => unreachable!("it does not shut down"),
            }
        });
        check(&outside, rejected, at);
        if !killed {
            assert!(at > 30, "the process was killed at {at} points");
            return;
        }
        at += stride;
    }
}

/// Each system saw one key and one argument for each step, and all steps were done or undone.
fn check(outside: &Outside, rejected: Option<usize>, at: usize) {
    let effects = outside.effects.lock().unwrap();
    let count = |name: &str| effects.effects.get(name).copied().unwrap_or(0);
    for (step, name) in STEPS.into_iter().enumerate() {
        let happens = rejected.is_none_or(|rejected| step < rejected);
        assert_eq!(count(name), u32::from(happens), "{name}, killed at {at}");
        let undone = happens && rejected.is_some();
        assert_eq!(
            count(&format!("undo {name}")),
            u32::from(undone),
            "undo {name}, killed at {at}"
        );
    }
    let keys: Vec<_> = effects.calls.values().flatten().map(|(key, _)| key).collect();
    assert_eq!(keys.iter().collect::<BTreeSet<_>>().len(), keys.len());
}

/// Starts a server on a runtime that outlives the processes of a test.
pub(crate) fn on_server<S>(starting: impl Future<Output = S>) -> (tokio::runtime::Runtime, S) {
    let runtime =
        tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
    let server = runtime.block_on(starting);
    (runtime, server)
}

struct File(tempfile::TempDir);

impl KillFixture for File {
    async fn open(&self) -> Arc<dyn Store> {
        let options = hapax_file::FileOptions::new(self.0.path().join("sagas.db"));
        loop {
            match hapax_file::FileStore::open(options.clone()) {
                Ok(store) => return Arc::new(store),
                // The earlier process is still closing the file.
                Err(hapax_file::OpenError::InUse { .. }) => std::thread::yield_now(),
                Err(error) => panic!("{error}"),
            }
        }
    }
}

#[test]
fn a_saga_in_a_file_is_continued_wherever_its_process_is_killed() {
    let file = File(tempfile::tempdir().unwrap());
    another_process_continues(&file, None, 1);
    another_process_continues(&file, Some(4), 1);
}

struct Memory(Arc<MemoryStore>);

impl KillFixture for Memory {
    async fn open(&self) -> Arc<dyn Store> {
        self.0.clone()
    }
}

#[test]
fn a_saga_is_continued_wherever_its_process_is_killed() {
    another_process_continues(&Memory(Arc::default()), None, 1);
}

#[test]
fn a_compensation_is_continued_wherever_its_process_is_killed() {
    another_process_continues(&Memory(Arc::default()), Some(4), 1);
}

/// The entry of a start is due a lease later: by then the lease of a starter that died has lapsed.
#[tokio::test(start_paused = true)]
async fn a_saga_whose_starter_died_at_once_is_run_within_a_lease_and_two_seconds() {
    // After the claim and its entry, beside the first save.
    for at in 0..20 {
        if dies_after_its_entry(at).await {
            return;
        }
    }
    panic!("no place is after the entry");
}

/// Kills a starter at a point. Returns whether the entry has just been inserted there; if so, the saga is
/// continued.
async fn dies_after_its_entry(at: usize) -> bool {
    let (world, outside) = (crate::world::World::new(), Outside::default());
    let saga = five(&outside, None);
    let process = world.process(&saga);
    let kill = Kill::at(at);
    let store = KilledStore { store: world.store.clone(), kill: Arc::clone(&kill) };
    let engine = Idempotency::builder(store).namespace("").build().unwrap();
    let starter = Sagas::builder(engine).register(&saga).build().unwrap();
    let (scope, key) = (scope(), key("k"));
    let begin = tokio::time::Instant::now();
    tokio::select! {
        _ = starter.start(&saga, &scope, &key, &1) => panic!("it was killed before that"),
        () = kill.killed.notified() => {}
    }
    if kill.place() != Some("after insert") {
        return false;
    }
    let started = process.sagas.find(&saga, &scope, &key).await.unwrap().unwrap();
    drop(starter);
    assert_eq!(started.outcome().await.unwrap(), 6);
    // The default lease, the interval of polls, and that of the wait for the outcome.
    assert!(begin.elapsed() <= Duration::from_secs(30 + 2), "{:?}", begin.elapsed());
    true
}
