//! Sagas that follow one another under one key.

use std::time::Duration;

use hapax_core::{Idempotency, MemoryStore};
use hapax_saga::{
    DefinitionError, Saga, SagaError, Sagas, SagasBuildError, SignalError, StepContext, StepEffect,
    StepError, UndoError,
};
use tokio::time::sleep;

use crate::shop::{DAY, Systems};
use crate::world::{World, key, scope};

/// The time for which an outcome is stored.
const KEPT: Duration = Duration::from_secs(300);

/// Ships once it is approved.
fn approved(systems: &Systems) -> Saga<u32, String, String> {
    let mut saga = Saga::define("approved", 1, systems.clone()).retention(KEPT);
    let ship = saga
        .again("ship", async |at: StepContext<Systems>, n: u32| {
            at.note("ship", at.key().as_str());
            Ok::<_, StepError<String>>(n)
        })
        .undo(async |_: StepContext<Systems>, _: u32, _: StepEffect<u32>| Ok::<_, UndoError>(()));
    saga.flow(move |op, n: u32| async move {
        match op.signal::<String>("approval", 3 * DAY).await {
            Some(approval) => op.run(ship, n).await.map(|_| approval),
            None => Err("not approved".to_owned()),
        }
    })
    .unwrap()
}

#[tokio::test(start_paused = true)]
async fn a_signal_to_an_earlier_saga_under_the_key_is_not_received() {
    let (world, systems) = (World::new(), Systems::default());
    let saga = approved(&systems);
    let process = world.process(&saga);
    let first = process.sagas.start(&saga, &scope(), &key("k"), &7).await.unwrap();
    assert!(first.signal("approval", &"first").await.unwrap());
    assert_eq!(first.outcome().await.unwrap(), "first");
    sleep(2 * KEPT).await;
    let second = process.sagas.start(&saga, &scope(), &key("k"), &7).await.unwrap();
    assert!(second.is_first());
    sleep(KEPT).await;
    assert!(second.poll_outcome().await.unwrap().is_none(), "it waits for its own approval");
    assert_eq!(systems.names(), ["ship"]);
    assert!(second.signal("approval", &"second").await.unwrap());
    assert_eq!(second.outcome().await.unwrap(), "second");
}

#[tokio::test(start_paused = true)]
async fn a_cancellation_of_an_earlier_saga_under_the_key_cancels_no_other() {
    let (world, systems) = (World::new(), Systems::default());
    let saga = approved(&systems);
    let process = world.process(&saga);
    let first = process.sagas.start(&saga, &scope(), &key("k"), &7).await.unwrap();
    assert!(first.cancel("withdrawn").await.unwrap());
    assert!(matches!(first.outcome().await, Err(SagaError::Cancelled { .. })));
    sleep(2 * KEPT).await;
    let second = process.sagas.start(&saga, &scope(), &key("k"), &7).await.unwrap();
    sleep(KEPT).await;
    assert!(second.signal("approval", &"second").await.unwrap());
    assert_eq!(second.outcome().await.unwrap(), "second");
}

#[tokio::test(start_paused = true)]
async fn a_signal_to_a_saga_that_has_ended_or_expired_is_rejected() {
    let (world, systems) = (World::new(), Systems::default());
    let saga = approved(&systems);
    let process = world.process(&saga);
    let started = process.sagas.start(&saga, &scope(), &key("k"), &7).await.unwrap();
    started.signal("approval", &"yes").await.unwrap();
    started.outcome().await.unwrap();
    let late = started.signal("approval", &"late").await;
    assert!(matches!(late, Err(SignalError::Ended)), "{late:?}");
    let late = started.cancel("late").await;
    assert!(matches!(late, Err(SignalError::Ended)), "{late:?}");
    sleep(2 * KEPT).await;
    let late = started.signal("approval", &"later").await;
    assert!(matches!(late, Err(SignalError::NotFound)), "{late:?}");
}

#[tokio::test]
async fn a_retention_of_less_than_ten_leases_is_rejected() {
    let saga = approved(&Systems::default());
    let build = |lease| {
        let engine = Idempotency::builder(MemoryStore::default()).build().unwrap();
        Sagas::builder(engine).register(&saga).lease(lease).build()
    };
    assert!(build(KEPT / 10).is_ok());
    let lease = KEPT / 10 + Duration::from_millis(1);
    let (name, retention, least) = ("approved", KEPT, lease * 10);
    let rejected = build(lease).unwrap_err();
    assert_eq!(rejected, SagasBuildError::Retention { name, retention, least });
}

#[test]
fn a_step_whose_key_outlives_the_outcome_is_rejected() {
    let define = |retention| {
        let mut saga = Saga::define("pay", 1, ()).retention(retention);
        let pay = saga
            .keyed("pay", DAY, async |_: StepContext<()>, (): ()| Ok::<_, StepError<String>>(()))
            .no_undo();
        saga.flow(move |op, (): ()| async move { op.run(pay, ()).await })
    };
    let hour = Duration::from_secs(3600);
    let rejected = define(hour).unwrap_err();
    let expected = DefinitionError::KeyOutlives { step: "pay", lifetime: DAY, retention: hour };
    assert_eq!(rejected, expected);
    assert!(define(DAY).is_ok());
}
