//! A store that does not answer for a while, or whose clock steps back, while a saga runs.

use std::future::pending;
use std::num::NonZeroU32;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use hapax_core::store::{BoxFuture, Capabilities, Reaped, Snapshot, Swap, Swapped};
use hapax_core::{
    Clock, Idempotency, MemoryCapacity, MemoryStore, OperationId, Store, StoreError, Timestamp,
};
use hapax_saga::{
    Saga, SagaDecision, SagaError, SagaOperator, SagaView, Sagas, StepContext, StepEffect,
    StepError, StepRetry, UndoError,
};
use tokio::sync::Notify;
use tokio::time::{Instant, sleep};

use crate::shop::{DAY, Systems};
use crate::world::{key, scope};

/// Wall-clock time that follows tokio's, and steps back.
#[derive(Debug)]
struct SteppedClock {
    begin: Instant,
    back: AtomicU64,
}

impl Clock for SteppedClock {
    fn now(&self) -> Timestamp {
        let passed = self.begin.elapsed() + Duration::from_secs(1_000_000);
        let back = Duration::from_secs(self.back.load(Ordering::SeqCst));
        Timestamp::from_micros(1_790_000_000_000_000).after(passed - back)
    }
}

/// A store, of which all calls fail, or the loads of other records than one.
#[derive(Debug)]
struct AwayStore {
    store: MemoryStore,
    clock: Arc<SteppedClock>,
    all: AtomicBool,
    except: Mutex<Option<OperationId>>,
}

impl AwayStore {
    fn new() -> Arc<Self> {
        let clock = Arc::new(SteppedClock { begin: Instant::now(), back: AtomicU64::new(0) });
        let store = MemoryStore::new(clock.clone(), MemoryCapacity::default());
        Arc::new(Self { store, clock, all: AtomicBool::new(false), except: Mutex::default() })
    }

    fn check(&self, is_away: bool) -> Result<(), StoreError> {
        match is_away || self.all.load(Ordering::SeqCst) {
            true => Err(StoreError::unavailable("away")),
            false => Ok(()),
        }
    }

    fn sagas<I, O, E>(self: &Arc<Self>, saga: &Saga<I, O, E>) -> Sagas {
        let engine = Idempotency::builder(Arc::clone(self)).build().unwrap();
        let sagas = Sagas::builder(engine).register(saga).build().unwrap();
        let running = sagas.clone();
        tokio::spawn(async move { running.run(pending(), Duration::ZERO).await });
        sagas
    }
}

impl Store for AwayStore {
    fn swap(&self, swap: Swap) -> BoxFuture<'_, Result<Swapped, StoreError>> {
        Box::pin(async move {
            self.check(false)?;
            self.store.swap(swap).await
        })
    }

    fn load<'a>(&'a self, key: &'a OperationId) -> BoxFuture<'a, Result<Snapshot, StoreError>> {
        Box::pin(async move {
            self.check(self.except.lock().unwrap().is_some_and(|except| except != *key))?;
            self.store.load(key).await
        })
    }

    fn reap(&self, limit: NonZeroU32) -> BoxFuture<'_, Result<Reaped, StoreError>> {
        self.store.reap(limit)
    }

    fn capabilities(&self) -> Capabilities<'_> {
        self.store.capabilities()
    }
}

/// Two steps; the first one waits for `go` after it has announced its call.
#[derive(Clone, Default)]
struct Two {
    systems: Systems,
    called: Arc<Notify>,
    go: Arc<Notify>,
}

fn two(state: &Two) -> Saga<(), u32, String> {
    let mut saga = Saga::define("two", 1, state.clone());
    let one = async |at: StepContext<Two>, (): ()| {
        at.systems.note("one", "");
        at.called.notify_one();
        at.go.notified().await;
        Ok::<_, StepError<String>>(1)
    };
    let undo = async |at: StepContext<Two>, (): (), _: StepEffect<u32>| {
        at.systems.note("undo one", "");
        Ok::<_, UndoError>(())
    };
    let one = saga.keyed("one", DAY, one).undo(undo);
    let two = async |at: StepContext<Two>, (): ()| {
        at.systems.note("two", "");
        Ok::<_, StepError<String>>(2)
    };
    let two = saga.keyed("two", DAY, two).no_undo();
    let flow = saga.flow(move |op, (): ()| async move {
        op.run(one, ()).await?;
        op.run(two, ()).await
    });
    flow.unwrap()
}

#[tokio::test(start_paused = true)]
async fn no_step_is_called_while_a_cancellation_cannot_be_looked_for() {
    let (store, state) = (AwayStore::new(), Two::default());
    let saga = two(&state);
    let sagas = store.sagas(&saga);
    let started = sagas.start(&saga, &scope(), &key("k"), &()).await.unwrap();
    state.called.notified().await;
    assert!(started.cancel("no more").await.unwrap());
    // The record of the saga can be read and written, that of the cancellation not yet.
    *store.except.lock().unwrap() = Some(started.id());
    state.go.notify_one();
    sleep(Duration::from_secs(100)).await;
    assert_eq!(state.systems.names(), ["one"]);
    *store.except.lock().unwrap() = None;
    let outcome = started.outcome().await;
    assert!(matches!(outcome, Err(SagaError::Cancelled { .. })), "{outcome:?}");
    assert_eq!(state.systems.names(), ["one", "undo one"]);
}

#[tokio::test(start_paused = true)]
async fn a_result_survives_a_store_that_is_away_for_longer_than_the_lease() {
    let (store, systems) = (AwayStore::new(), Systems::default());
    let mut saga = Saga::define("wire", 1, (systems.clone(), store.clone()));
    let wire = async |at: StepContext<(Systems, Arc<AwayStore>)>, (): ()| {
        let (systems, store) = &*at;
        systems.note("wire", "");
        store.all.store(true, Ordering::SeqCst);
        Ok::<u32, StepError<String>>(7)
    };
    let wire = saga.once("wire", wire).no_undo();
    let saga = saga.flow(move |op, (): ()| async move { op.run(wire, ()).await }).unwrap();
    let sagas = store.sagas(&saga);
    let started = sagas.start(&saga, &scope(), &key("k"), &()).await.unwrap();
    while systems.names().is_empty() {
        tokio::task::yield_now().await;
    }
    // Three leases.
    sleep(Duration::from_secs(90)).await;
    assert!(started.poll_outcome().await.is_err());
    store.all.store(false, Ordering::SeqCst);
    assert_eq!(started.outcome().await.unwrap(), 7);
    assert_eq!(systems.names(), ["wire"]);
}

#[tokio::test(start_paused = true)]
async fn the_times_of_a_log_grow_although_the_stores_clock_steps_back() {
    let (store, systems) = (AwayStore::new(), Systems::default());
    let mut saga = Saga::define("pay", 1, systems.clone());
    let pay = async |at: StepContext<Systems>, (): ()| {
        at.note("pay", "");
        Err::<u32, StepError<String>>(StepError::unknown("the bank is away"))
    };
    let (lifetime, second) = (Duration::from_secs(60), Duration::from_secs(1));
    let retry = StepRetry::within(12 * second).timeout(second).pauses(4 * second, 4 * second);
    let pay = saga.keyed("pay", lifetime, pay).retry(retry).no_undo();
    let saga = saga.flow(move |op, (): ()| async move { op.run(pay, ()).await }).unwrap();
    let sagas = store.sagas(&saga);
    sagas.start(&saga, &scope(), &key("k"), &()).await.unwrap();
    let operator = SagaOperator::new(Idempotency::builder(store.clone()).build().unwrap());
    let mut before = stuck(&operator).await;
    // Each time an hour back: of the twelve seconds of tries, at most five fit in the lifetime.
    for _ in 0..8 {
        store.clock.back.fetch_add(3_600, Ordering::SeqCst);
        operator.decide(&before, &SagaDecision::Retry, "ann", "the bank is back").await.unwrap();
        sleep(60 * second).await;
        let view = stuck(&operator).await;
        let stuck = |view: &SagaView| view.log.clone().unwrap().stuck.unwrap();
        assert!(stuck(&view).since >= stuck(&before).since);
        before = view;
    }
    let log = before.log.unwrap();
    assert_eq!(log.stuck.unwrap().reason, hapax_saga::log::StuckReason::KeyExpired);
    let tries = &log.steps[0].forward;
    let age = tries.last.unwrap().since(tries.first.unwrap());
    assert!(age <= lifetime, "{age:?}");
}

async fn stuck(operator: &SagaOperator) -> SagaView {
    for _ in 0..1_000 {
        let (sagas, _) = operator.list(None, NonZeroU32::MAX).await.unwrap();
        let stuck = |saga: &SagaView| saga.log.as_ref().is_some_and(|log| log.stuck.is_some());
        if let Some(saga) = sagas.into_iter().find(stuck) {
            return saga;
        }
        sleep(Duration::from_secs(1)).await;
    }
    panic!("no saga is stuck")
}
