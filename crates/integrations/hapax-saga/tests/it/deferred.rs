//! Writes that the store accepts late.

use std::time::Duration;

use hapax_core::store::Swap;
use hapax_core::{Outcome, RecordState};
use hapax_saga::log::Log;
use hapax_saga::{Saga, StepContext, StepError};
use tokio::time::{Instant, sleep};

use crate::hooks::{Fault, HookedStore, StoreCall};
use crate::shop::{Answer, DAY, Systems, cart, order};
use crate::world::{World, key, scope};

const HOUR: Duration = Duration::from_secs(3600);

fn is_parking(swap: &Swap) -> bool {
    let checkpoint = swap.draft.record.checkpoint.as_ref();
    checkpoint.is_some_and(|log| Log::decode(log).unwrap().parked.is_some())
}

fn waits() -> Saga<u32, String, String> {
    let saga = Saga::define("waits", 1, ());
    saga.flow(move |op, _: u32| async move {
        Ok(op.signal::<String>("word", 3 * DAY).await.unwrap_or_default())
    })
    .unwrap()
}

#[tokio::test(start_paused = true)]
async fn a_signal_that_is_a_deferred_write_is_not_acknowledged() {
    let world = World::new();
    let (store, saga) = (HookedStore::new(&world), waits());
    let process = store.process(&saga);
    let started = process.sagas.start(&saga, &scope(), &key("k"), &7).await.unwrap();
    sleep(Duration::from_secs(5)).await;
    store.hook(|call| match call {
        StoreCall::Swap(swap) => match &swap.draft.record.state {
            RecordState::Done(outcome) => is_signal(outcome).then_some(Fault::Ambiguous),
            _ => None,
        },
        _ => None,
    });
    assert!(started.signal("word", &"yes").await.is_err());
    // The caller repeats it at once. Only this process has it: the saga would not find it.
    assert!(started.signal("word", &"yes").await.is_err());
    store.unhook();
    let begin = Instant::now();
    while started.signal("word", &"yes").await.is_err() {
        sleep(Duration::from_millis(100)).await;
    }
    assert_eq!(started.outcome().await.unwrap(), "yes");
    assert!(begin.elapsed() < Duration::from_secs(30), "{:?}", begin.elapsed());
}

fn is_signal(outcome: &Outcome) -> bool {
    outcome.format() == "saga-signal/1"
}

#[tokio::test(start_paused = true)]
async fn a_pause_that_is_stored_late_ends_in_time() {
    let (world, systems) = (World::new(), Systems::default());
    let store = HookedStore::new(&world);
    let mut saga = Saga::define("sleeper", 1, systems.clone());
    let wake = saga
        .again("wake", async |at: StepContext<Systems>, (): ()| {
            at.note("wake", "");
            Ok::<_, StepError<String>>(())
        })
        .no_undo();
    let saga = saga
        .flow(move |op, (): ()| async move {
            op.sleep("three hours", 3 * HOUR).await;
            op.run(wake, ()).await
        })
        .unwrap();
    let process = store.process(&saga);
    let begin = Instant::now();
    store.hook(|call| match call {
        StoreCall::Swap(swap) => is_parking(swap).then_some(Fault::Unavailable),
        _ => None,
    });
    let started = process.sagas.start(&saga, &scope(), &key("k"), &()).await.unwrap();
    sleep(HOUR / 6).await;
    store.unhook();
    started.outcome().await.unwrap();
    let late = begin.elapsed() - 3 * HOUR;
    assert!(late < Duration::from_secs(60), "{late:?} late");
}

#[tokio::test(start_paused = true)]
async fn a_shutdown_waits_until_the_last_log_is_stored() {
    let (world, systems) = (World::new(), Systems::default());
    let (store, saga) = (HookedStore::new(&world), order(&systems));
    systems.answer("charge", &[Answer::Hang]);
    let process = store.process(&saga);
    process.sagas.start(&saga, &scope(), &key("k"), &cart()).await.unwrap();
    while systems.names().len() < 2 {
        sleep(Duration::from_millis(10)).await;
    }
    process.task.abort();
    store.hook(|call| match call {
        StoreCall::Swap(swap) => is_parking(swap).then_some(Fault::Unavailable),
        _ => None,
    });
    let shutdown = || process.sagas.run(std::future::ready(()), Duration::from_secs(60));
    assert!(!shutdown().await, "the log is a deferred write");
    store.unhook();
    assert!(shutdown().await);
}
