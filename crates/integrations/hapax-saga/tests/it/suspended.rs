//! A machine that is suspended while a saga runs: its wall clock jumps, and its monotonic clock, that of the
//! paused runtime, does not.

use std::future::pending;
use std::num::NonZeroU32;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use hapax_core::store::{BoxFuture, Capabilities, Reaped, Snapshot, Swap, Swapped};
use hapax_core::{Clock, Idempotency, MemoryStore, OperationId, Store, StoreError};
use hapax_saga::{Saga, SagaOperator, Sagas, StepContext, StepError, StepRetry, StuckReason};
use hapax_testkit::ManualClock;
use tokio::sync::Notify;
use tokio::time::{Instant, sleep};

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
}

impl Machine {
    fn new(world: &World) -> Arc<Self> {
        let (wall, suspended) = (Arc::default(), AtomicU64::new(0));
        Arc::new(Self { store: Arc::clone(&world.store), wall, suspended })
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
            let swapped = self.store.swap(swap).await;
            let less = |left: u64| left.checked_sub(1);
            if self.suspended.fetch_update(Ordering::SeqCst, Ordering::SeqCst, less).is_ok() {
                self.wall.advance(WEEKEND);
            }
            swapped
        })
    }

    fn load<'a>(&'a self, id: &'a OperationId) -> BoxFuture<'a, Result<Snapshot, StoreError>> {
        self.store.load(id)
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
