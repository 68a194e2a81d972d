//! Sagas that are woken, and the times at which their entries are due.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use hapax_core::schedule::Schedule;
use hapax_core::{Idempotency, RecordState};
use hapax_saga::{Saga, SagaDecision, SagaOperator, SagaStartError};
use tokio::sync::Notify;
use tokio::time::{Instant, sleep, timeout};

use crate::hooks::{Fault, HookedStore, StoreCall};
use crate::shop::{Answer, DAY, Systems, cart, order};
use crate::stuck::stuck;
use crate::world::{World, key, scope};

const MINUTE: Duration = Duration::from_secs(60);

/// Waits for a word, and then for a minute.
fn waits() -> Saga<u32, String, String> {
    let saga = Saga::define("waits", 1, ());
    saga.flow(move |op, _: u32| async move {
        let word = op.signal::<String>("word", 3 * DAY).await;
        op.sleep("a minute", MINUTE).await;
        Ok(word.unwrap_or_default())
    })
    .unwrap()
}

#[tokio::test(start_paused = true)]
async fn a_signal_whose_sender_has_gone_wakes_its_saga() {
    let (world, saga) = (World::new(), waits());
    let store = HookedStore::new(&world);
    let process = store.process(&saga);
    let started = process.sagas.start(&saga, &scope(), &key("k"), &7).await.unwrap();
    sleep(Duration::from_secs(5)).await;
    let (wakes, is_stored) = (Arc::new(Notify::new()), AtomicBool::new(false));
    let waking = Arc::clone(&wakes);
    store.hook(move |call| match call {
        StoreCall::Swap(swap) => {
            if matches!(swap.draft.record.state, RecordState::Done(_)) {
                is_stored.store(true, Ordering::SeqCst);
            }
            None
        }
        StoreCall::Load(_) if is_stored.swap(false, Ordering::SeqCst) => {
            waking.notify_one();
            Some(Fault::Late)
        }
        _ => None,
    });
    tokio::select! {
        biased;
        () = wakes.notified() => {}
        sent = started.signal("word", &"yes") => panic!("it is not dropped: {sent:?}"),
    }
    store.unhook();
    let begin = Instant::now();
    let outcome = timeout(DAY, started.outcome()).await;
    assert_eq!(outcome.expect("it is woken").unwrap(), "yes");
    assert!(begin.elapsed() < 2 * MINUTE, "{:?}", begin.elapsed());
}

#[tokio::test(start_paused = true)]
async fn a_decision_whose_operator_has_gone_wakes_its_saga() {
    let (world, systems) = (World::new(), Systems::default());
    let (store, saga) = (HookedStore::new(&world), order(&systems));
    let process = store.process(&saga);
    systems.answer("charge", &[Answer::NotSent; 5]);
    let started = process.sagas.start(&saga, &scope(), &key("k"), &cart()).await.unwrap();
    let engine = Idempotency::builder(Arc::clone(&store)).build().unwrap();
    let operator = SagaOperator::new(engine);
    let view = stuck(&operator).await;
    let (wakes, is_first) = (Arc::new(Notify::new()), AtomicBool::new(true));
    let waking = Arc::clone(&wakes);
    store.hook(move |call| {
        let is_wake = matches!(call, StoreCall::Postpone(_));
        (is_wake && is_first.swap(false, Ordering::SeqCst)).then(|| {
            waking.notify_one();
            Fault::Late
        })
    });
    tokio::select! {
        biased;
        () = wakes.notified() => {}
        made = operator.decide(&view, &SagaDecision::Retry, "ann", "the bank is back") => {
            panic!("it is not dropped: {made:?}")
        }
    }
    let begin = Instant::now();
    assert_eq!(started.outcome().await.unwrap(), "visa:1999");
    assert!(begin.elapsed() < MINUTE, "{:?}", begin.elapsed());
}

#[tokio::test(start_paused = true)]
async fn a_saga_that_a_start_continues_pauses_no_longer_than_it_says() {
    let (world, saga) = (World::new(), waits());
    let store = HookedStore::new(&world);
    let process = store.process(&saga);
    let started = process.sagas.start(&saga, &scope(), &key("k"), &7).await.unwrap();
    sleep(Duration::from_secs(5)).await;
    // Its lease is ended, and its entry is still due in three days.
    store.hook(|call| matches!(call, StoreCall::Postpone(_)).then_some(Fault::Unavailable));
    started.signal("word", &"yes").await.unwrap_err();
    let start = async || process.sagas.start(&saga, &scope(), &key("k"), &7).await;
    let failed = start().await;
    assert!(matches!(failed, Err(SagaStartError::Store(_))), "{failed:?}");
    store.unhook();
    let begin = Instant::now();
    assert!(start().await.unwrap().has_begun());
    let outcome = timeout(DAY, started.outcome()).await;
    assert_eq!(outcome.expect("it does not sleep for days").unwrap(), "yes");
    assert!(begin.elapsed() < 2 * MINUTE, "{:?}", begin.elapsed());
}

#[tokio::test(start_paused = true)]
async fn an_entry_is_due_within_a_lease_although_its_record_is_held_for_longer() {
    let (world, systems) = (World::new(), Systems::default());
    let (store, saga) = (HookedStore::new(&world), order(&systems));
    systems.answer("reserve", &[Answer::Hang; 20]);
    // As during a transaction of a step.
    let first = store.process_with(&saga, 64, MINUTE);
    let lease = Duration::from_secs(1);
    let _second = store.process_with(&saga, 64, lease);
    first.sagas.start(&saga, &scope(), &key("k"), &cart()).await.unwrap();
    sleep(MINUTE + 10 * lease).await;
    let page = world.store.entries(None, std::num::NonZeroU32::MIN).await.unwrap();
    let due = page.entries[0].1.as_ref().unwrap().due;
    assert!(due.since(page.now) <= lease, "{:?}", due.since(page.now));
}
