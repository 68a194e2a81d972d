//! A machine that is suspended while a saga runs: its wall clock jumps, and its monotonic clock, that of the
//! paused runtime, does not.

use std::future::pending;
use std::num::NonZeroU32;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use hapax_core::store::{BoxFuture, Capabilities, Reaped, Snapshot, Swap, Swapped};
use hapax_core::{Clock, Idempotency, MemoryStore, OperationId, Store, StoreError};
use hapax_saga::log::Log;
use hapax_saga::{
    Saga, SagaError, SagaHandle, SagaOperator, Sagas, StepContext, StepError, StepRetry,
    StuckReason,
};
use hapax_testkit::ManualClock;
use tokio::sync::Notify;
use tokio::time::{Instant, sleep, timeout};

use crate::shop::{DAY, Systems};
use crate::world::{World, key, scope};

const WEEKEND: Duration = Duration::from_secs(63 * 60 * 60);

/// A store of other machines, which are not suspended. This machine is, each time that one of the next
/// replies has arrived.
#[derive(Debug)]
struct Machine {
    store: Arc<MemoryStore>,
    wall: Arc<ManualClock>,
    suspended: AtomicU64,
    /// True if the machine is suspended once a try is saved, and wakes without a network.
    wakes_offline: AtomicBool,
    /// The time at which the network is there again.
    online: Mutex<Option<Instant>>,
    /// A saga that is cancelled once its next try is saved, while the machine is suspended.
    cancels: Mutex<Option<SagaHandle<(), String>>>,
}

impl Machine {
    fn new(world: &World) -> Arc<Self> {
        let (store, wall) = (Arc::clone(&world.store), Arc::default());
        let (suspended, wakes_offline) = (AtomicU64::new(0), AtomicBool::new(false));
        let (online, cancels) = (Mutex::default(), Mutex::default());
        Arc::new(Self { store, wall, suspended, wakes_offline, online, cancels })
    }

    async fn connect(&self) -> Result<(), StoreError> {
        let online = *self.online.lock().unwrap();
        match online.is_some_and(|online| Instant::now() < online) {
            true => {
                sleep(Duration::from_millis(1)).await;
                Err(StoreError::unavailable("no network"))
            }
            false => Ok(()),
        }
    }

    fn engine(self: &Arc<Self>) -> Idempotency {
        Idempotency::builder(Arc::clone(self)).clock(self.wall.clone()).build().unwrap()
    }

    fn sagas<I, O, E>(self: &Arc<Self>, saga: &Saga<I, O, E>) -> Sagas {
        let sagas = Sagas::builder(self.engine()).register(saga).build().unwrap();
        let running = sagas.clone();
        tokio::spawn(async move { running.run(pending(), Duration::ZERO).await });
        sagas
    }
}

impl Store for Machine {
    fn swap(&self, swap: Swap) -> BoxFuture<'_, Result<Swapped, StoreError>> {
        Box::pin(async move {
            self.connect().await?;
            let log = swap.draft.record.checkpoint.as_ref().map(|log| Log::decode(log).unwrap());
            let swapped = self.store.swap(swap).await;
            let less = |left: u64| left.checked_sub(1);
            if self.suspended.fetch_update(Ordering::SeqCst, Ordering::SeqCst, less).is_ok() {
                self.wall.advance(WEEKEND);
            }
            let is_call = log.is_some_and(|log| log.steps.iter().any(|step| step.forward.open));
            let cancels = if is_call { self.cancels.lock().unwrap().take() } else { None };
            if let Some(saga) = cancels {
                saga.cancel("a test").await.unwrap();
                self.wall.advance(WEEKEND);
            }
            if is_call && self.wakes_offline.swap(false, Ordering::SeqCst) {
                self.wall.advance(WEEKEND);
                *self.online.lock().unwrap() = Some(Instant::now() + Duration::from_secs(20));
            }
            swapped
        })
    }

    fn load<'a>(&'a self, id: &'a OperationId) -> BoxFuture<'a, Result<Snapshot, StoreError>> {
        Box::pin(async move {
            self.connect().await?;
            self.store.load(id).await
        })
    }

    fn reap(&self, limit: NonZeroU32) -> BoxFuture<'_, Result<Reaped, StoreError>> {
        self.store.reap(limit)
    }

    fn capabilities(&self) -> Capabilities<'_> {
        self.store.capabilities()
    }
}

type Bank = (Systems, Arc<Machine>);

/// A step whose first try is unknown, after a weekend.
fn pay(bank: &Bank) -> Saga<(), u32, String> {
    let mut saga = Saga::define("pay", 1, bank.clone());
    let pay = async |at: StepContext<Bank>, (): ()| {
        at.0.note("pay", at.key().as_str());
        if at.number() == 1 {
            at.1.wall.advance(WEEKEND);
            return Err::<_, StepError<String>>(StepError::unknown("the connection broke"));
        }
        Ok(7)
    };
    let retry = StepRetry::within(10 * DAY).timeout(Duration::from_secs(5));
    let pay = saga.keyed("pay", DAY, pay).retry(retry).no_undo();
    saga.flow(move |op, (): ()| async move { op.run(pay, ()).await }).unwrap()
}

#[tokio::test(start_paused = true)]
async fn a_key_ages_while_the_machine_is_suspended() {
    let (world, systems) = (World::new(), Systems::default());
    let bank = (systems.clone(), Machine::new(&world));
    let saga = pay(&bank);
    let sagas = bank.1.sagas(&saga);
    let begin = Instant::now();
    sagas.start(&saga, &scope(), &key("k"), &()).await.unwrap();
    let operator = SagaOperator::new(bank.1.engine());
    let stuck = loop {
        let (found, _) = operator.list(None, NonZeroU32::MAX).await.unwrap();
        let stuck = found.into_iter().find_map(|saga| saga.log?.stuck);
        if let Some(stuck) = stuck {
            break stuck;
        }
        sleep(Duration::from_secs(1)).await;
    };
    assert_eq!(stuck.reason, StuckReason::KeyExpired);
    assert!(begin.elapsed() < DAY);
    assert_eq!(
        systems.names(),
        ["pay"],
        "nothing is sent with a key that the bank may have forgotten"
    );
}

#[tokio::test(start_paused = true)]
async fn a_call_that_was_suspended_past_its_timeout_goes_no_further() {
    type Payer = (Systems, Arc<Notify>);
    let (world, payer) = (World::new(), Payer::default());
    let machine = Machine::new(&world);
    let mut saga = Saga::define("token", 1, payer.clone());
    let post = async |at: StepContext<Payer>, (): ()| {
        let (systems, token) = &*at;
        systems.note("token", &at.number().to_string());
        token.notified().await;
        systems.note("post", &at.number().to_string());
        Ok::<_, StepError<String>>(())
    };
    let post = saga.again("post", post).retry(StepRetry::within(10 * DAY)).no_undo();
    let saga = saga.flow(move |op, (): ()| async move { op.run(post, ()).await }).unwrap();
    let sagas = machine.sagas(&saga);
    let started = sagas.start(&saga, &scope(), &key("k"), &()).await.unwrap();
    while payer.0.names().is_empty() {
        tokio::task::yield_now().await;
    }
    // The reply is there when the machine wakes, before any timer has fired.
    machine.wall.advance(WEEKEND);
    payer.1.notify_one();
    while payer.0.names().len() < 2 {
        sleep(Duration::from_millis(100)).await;
    }
    payer.1.notify_one();
    started.outcome().await.unwrap();
    let calls = [("token", "1"), ("token", "2"), ("post", "2")];
    assert_eq!(payer.0.calls(), calls.map(|(name, number)| (name.to_owned(), number.to_owned())));
}

#[tokio::test(start_paused = true)]
async fn a_step_that_was_not_called_because_the_lease_lapsed_is_called_later() {
    let (world, systems) = (World::new(), Systems::default());
    let machine = Machine::new(&world);
    let mut saga = Saga::define("wire", 1, systems.clone());
    let wire = async |at: StepContext<Systems>, (): ()| {
        at.note("wire", "");
        Ok::<_, StepError<String>>(())
    };
    let wire = saga.once("wire", wire).no_undo();
    let saga = saga.flow(move |op, (): ()| async move { op.run(wire, ()).await }).unwrap();
    let sagas = machine.sagas(&saga);
    machine.wakes_offline.store(true, Ordering::SeqCst);
    let started = sagas.start(&saga, &scope(), &key("k"), &()).await.unwrap();
    let outcome = async {
        loop {
            match started.outcome().await {
                Err(SagaError::Store(_)) => sleep(Duration::from_secs(1)).await,
                outcome => break outcome,
            }
        }
    };
    let outcome = timeout(Duration::from_secs(600), outcome).await;
    outcome.expect("it is not stuck").unwrap();
    assert!(machine.online.lock().unwrap().is_some());
    assert_eq!(systems.names(), ["wire"]);
}

#[tokio::test(start_paused = true)]
async fn a_step_is_not_called_once_a_cancellation_was_acknowledged_while_the_machine_was_suspended()
{
    type Cancels = (Systems, Arc<Notify>);
    let (world, state) = (World::new(), Cancels::default());
    let machine = Machine::new(&world);
    let mut saga = Saga::define("two", 1, state.clone());
    let one = async |at: StepContext<Cancels>, (): ()| {
        at.0.note("one", "");
        at.1.notified().await;
        Ok::<_, StepError<String>>(())
    };
    let one = saga.again("one", one).no_undo();
    let two = async |at: StepContext<Cancels>, (): ()| {
        at.0.note("two", "");
        Ok::<_, StepError<String>>(())
    };
    let two = saga.again("two", two).no_undo();
    let saga = saga.flow(move |op, (): ()| async move {
        op.run(one, ()).await?;
        op.run(two, ()).await
    });
    let saga = saga.unwrap();
    let sagas = machine.sagas(&saga);
    let started = sagas.start(&saga, &scope(), &key("k"), &()).await.unwrap();
    while state.0.names().is_empty() {
        tokio::task::yield_now().await;
    }
    let other = world.process(&saga);
    let handle = other.sagas.find(&saga, &scope(), &key("k")).await.unwrap();
    // Once the next try is saved.
    *machine.cancels.lock().unwrap() = handle;
    other.task.abort();
    state.1.notify_one();
    let outcome = started.outcome().await;
    assert!(matches!(outcome, Err(SagaError::Cancelled { .. })), "{outcome:?}");
    assert_eq!(state.0.names(), ["one"]);
}

#[tokio::test(start_paused = true)]
async fn a_runner_whose_wall_clock_jumped_past_its_lease_calls_nothing_until_it_has_renewed_it() {
    let (world, systems) = (World::new(), Systems::default());
    let bank = (systems.clone(), Machine::new(&world));
    let mut saga = Saga::define("note", 1, bank.clone());
    let note = async |at: StepContext<Bank>, (): ()| {
        at.0.note("note", &at.1.suspended.load(Ordering::SeqCst).to_string());
        Ok::<_, StepError<String>>(())
    };
    let note = saga.again("note", note).no_undo();
    let saga = saga.flow(move |op, (): ()| async move { op.run(note, ()).await }).unwrap();
    let sagas = bank.1.sagas(&saga);
    let before = bank.1.wall.now();
    bank.1.suspended.store(6, Ordering::SeqCst);
    let started = sagas.start(&saga, &scope(), &key("k"), &()).await.unwrap();
    started.outcome().await.unwrap();
    // After each of the six replies the lease seemed to have lapsed.
    assert_eq!(systems.calls(), [("note".into(), "0".into())]);
    assert!(bank.1.wall.now().since(before) >= 6 * WEEKEND);
}
