//! Overload, outages of writes, and callers that wait.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use hapax_core::Idempotency;
use hapax_saga::{Saga, SagaLookup, SagaOperator};
use tokio::time::{sleep, timeout};

use crate::entries::die_before_the_log;
use crate::hooks::{Fault, HookedStore, StoreCall, entries};
use crate::shop::{Answer, DAY, Systems, cart, order};
use crate::world::{World, key, scope};

const SECOND: Duration = Duration::from_secs(1);

/// Waits for a signal, for days.
fn waits() -> Saga<u32, u32, String> {
    let saga = Saga::define("waits", 1, ());
    saga.flow(move |op, n: u32| async move {
        op.signal::<u32>("word", 3 * DAY).await;
        Ok(n)
    })
    .unwrap()
}

#[tokio::test(start_paused = true)]
async fn repeated_starts_of_a_saga_without_room_count_no_crash() {
    let (world, systems) = (World::new(), Systems::default());
    let (store, saga) = (HookedStore::new(&world), order(&systems));
    let process = store.process_with(&saga, 1, Duration::from_millis(200));
    systems.answer("charge", &[Answer::Hang]);
    process.sagas.start(&saga, &scope(), &key("first"), &cart()).await.unwrap();
    while systems.names().len() < 2 {
        sleep(Duration::from_millis(10)).await;
    }
    let second = process.sagas.start(&saga, &scope(), &key("second"), &cart()).await.unwrap();
    let operator = SagaOperator::new(Idempotency::builder(store.clone()).build().unwrap());
    for _ in 0..12 {
        let again = process.sagas.start(&saga, &scope(), &key("second"), &cart()).await.unwrap();
        assert!(!again.is_first());
        let lookup = operator.show(&second.id()).await.unwrap();
        let SagaLookup::Unfinished(view) = lookup else { panic!("it has not begun") };
        let log = view.log.unwrap();
        assert_eq!((view.attempt, log.attempt, log.crashes), (1, 1, 0));
        assert!(view.lease_until <= view.now, "another node can run it at once");
        sleep(Duration::from_millis(250)).await;
    }
    assert_eq!(second.outcome().await.unwrap(), "visa:1999");
}

#[tokio::test(start_paused = true)]
async fn looks_that_fail_are_not_repeated_at_once() {
    let (world, saga) = (World::new(), waits());
    let store = HookedStore::new(&world);
    let first = store.process(&saga);
    for n in 0..10 {
        first.sagas.start(&saga, &scope(), &key(&n.to_string()), &n).await.unwrap();
    }
    sleep(10 * SECOND).await;
    first.task.abort();
    sleep(4 * DAY).await;
    let polls = Arc::new(AtomicU32::new(0));
    let counted = Arc::clone(&polls);
    store.hook(move |call| match call {
        StoreCall::Due => {
            counted.fetch_add(1, Ordering::SeqCst);
            None
        }
        StoreCall::Swap(_) | StoreCall::Postpone(_) => Some(Fault::Unavailable),
        _ => None,
    });
    let second = store.process(&saga);
    sleep(2 * SECOND).await;
    let polls = polls.load(Ordering::SeqCst);
    assert!((1..20).contains(&polls), "{polls} polls");
    store.unhook();
    for n in 0..10 {
        let found = second.sagas.find(&saga, &scope(), &key(&n.to_string())).await.unwrap();
        assert_eq!(found.unwrap().outcome().await.unwrap(), n);
    }
}

#[tokio::test(start_paused = true)]
async fn an_entry_that_cannot_be_moved_is_not_looked_at_again_at_once() {
    let (world, saga) = (World::new(), waits());
    let store = HookedStore::new(&world);
    let process = store.process(&saga);
    let started = process.sagas.start(&saga, &scope(), &key("k"), &7).await.unwrap();
    sleep(10 * SECOND).await;
    let polls = Arc::new(AtomicU32::new(0));
    let counted = Arc::clone(&polls);
    store.hook(move |call| match call {
        StoreCall::Due => {
            counted.fetch_add(1, Ordering::SeqCst);
            None
        }
        StoreCall::Postpone(_) => Some(Fault::Unavailable),
        _ => None,
    });
    let entry = entries(&world).await[0];
    let schedule = hapax_core::Store::capabilities(&*world.store).schedule.unwrap();
    schedule.postpone(entry, None, Duration::ZERO).await.unwrap();
    sleep(3 * SECOND).await;
    let polls = polls.load(Ordering::SeqCst);
    assert!((1..20).contains(&polls), "{polls} polls");
    store.unhook();
    started.signal("word", &1).await.unwrap();
    assert_eq!(started.outcome().await.unwrap(), 7);
}

#[tokio::test(start_paused = true)]
async fn the_end_of_a_saga_lets_only_its_own_callers_read() {
    let (world, saga) = (World::new(), waits());
    let store = HookedStore::new(&world);
    let process = store.process(&saga);
    let mut started = Vec::new();
    for n in 0..220 {
        let key = key(&n.to_string());
        started.push(Arc::new(process.sagas.start(&saga, &scope(), &key, &n).await.unwrap()));
    }
    let mut waiting = Vec::new();
    for started in started.clone() {
        waiting.push(tokio::spawn(async move { started.outcome().await }));
    }
    sleep(30 * SECOND).await;
    let loads = Arc::new(AtomicU32::new(0));
    let counted = Arc::clone(&loads);
    store.hook(move |call| {
        if let StoreCall::Load(_) = call {
            counted.fetch_add(1, Ordering::SeqCst);
        }
        None
    });
    for (n, started) in started.iter().enumerate().take(20) {
        started.signal("word", &1).await.unwrap();
        assert_eq!(started.outcome().await.unwrap() as usize, n);
    }
    let loads = loads.load(Ordering::SeqCst);
    assert!(loads < 1_500, "{loads} loads, where all callers would read 20 times 200");
    for waiting in waiting.drain(..20) {
        waiting.await.unwrap().unwrap();
    }
}

#[tokio::test(start_paused = true)]
async fn a_start_whose_caller_is_gone_waits_no_longer() {
    let (world, saga) = (World::new(), waits());
    let store = HookedStore::new(&world);
    die_before_the_log(&world, &saga, &7);
    let second = store.process(&saga);
    second.task.abort();
    let start = async { second.sagas.start(&saga, &scope(), &key("k"), &7).await };
    assert!(timeout(5 * SECOND, start).await.is_err(), "it waits for the other start");
    let reads = Arc::new(AtomicU32::new(0));
    let counted = Arc::clone(&reads);
    sleep(SECOND).await;
    store.hook(move |_| {
        counted.fetch_add(1, Ordering::SeqCst);
        None
    });
    sleep(5 * SECOND).await;
    assert_eq!(reads.load(Ordering::SeqCst), 0);
    // The caller of this one waits until the lease has lapsed.
    store.unhook();
    let started = second.sagas.start(&saga, &scope(), &key("k"), &7).await.unwrap();
    let _third = store.process(&saga);
    started.signal("word", &1).await.unwrap();
    assert_eq!(started.outcome().await.unwrap(), 7);
}

#[tokio::test(start_paused = true)]
async fn a_saga_that_could_not_be_accepted_has_no_crash() {
    let (world, systems) = (World::new(), Systems::default());
    let (store, saga) = (HookedStore::new(&world), order(&systems));
    let process = store.process(&saga);
    let entry = process.sagas.entry(&saga, &scope(), &key("k"), &cart()).unwrap();
    let schedule = hapax_core::Store::capabilities(&*world.store).schedule.unwrap();
    schedule.insert(entry).await.unwrap();
    store.hook(|call| matches!(call, StoreCall::Insert).then_some(Fault::Unavailable));
    sleep(Duration::from_secs(600)).await;
    assert_eq!(systems.names(), [""; 0]);
    store.unhook();
    sleep(Duration::from_secs(60)).await;
    let started = process.sagas.find(&saga, &scope(), &key("k")).await.unwrap().unwrap();
    let outcome = timeout(60 * SECOND, started.outcome()).await;
    assert_eq!(outcome.expect("it is not stuck").unwrap(), "visa:1999");
}

#[tokio::test(start_paused = true)]
async fn a_census_and_a_list_pass_over_a_damaged_record() {
    let (world, saga) = (World::new(), waits());
    let store = HookedStore::new(&world);
    let process = store.process(&saga);
    let mut ids = Vec::new();
    for n in 0..3 {
        let key = key(&n.to_string());
        ids.push(process.sagas.start(&saga, &scope(), &key, &n).await.unwrap().id());
    }
    sleep(10 * SECOND).await;
    let damaged = ids[1];
    store.hook(move |call| {
        matches!(call, StoreCall::Load(id) if **id == damaged).then_some(Fault::Corrupt)
    });
    let operator = SagaOperator::new(Idempotency::builder(store.clone()).build().unwrap());
    let census = operator.census(100).await.unwrap();
    assert_eq!((census.unreadable, census.steps[0].parked), (1, 2));
    let (listed, next) = operator.list(None, std::num::NonZeroU32::MAX).await.unwrap();
    assert_eq!((listed.len(), next), (2, None));
}
