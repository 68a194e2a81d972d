//! Sleeps, signals and cancellations.

use std::time::Duration;

use hapax_saga::{At, Saga, SagaError, StepError, Undo, UndoError};
use tokio::time::Instant;

use crate::shop::{Answer, DAY, Systems, cart, order};
use crate::world::{World, key, scope};

fn approval(systems: &Systems) -> Saga<u32, String, String> {
    let mut saga = Saga::define("approval", 1, systems.clone());
    let ask = saga
        .again("ask", async |_: At<Systems>, n: u32| Ok::<_, StepError<String>>(n))
        .undo(async |_: At<Systems>, _: u32, _: Undo<u32>| Ok::<_, UndoError>(()));
    saga.flow(move |op, n: u32| async move {
        op.run(ask, n).await?;
        op.sleep("cool off", 3 * DAY).await;
        match op.signal::<String>("decision", DAY).await {
            Some(decision) => Ok(decision),
            None => Err("no decision".to_owned()),
        }
    })
    .unwrap()
}

#[tokio::test(start_paused = true)]
async fn a_saga_sleeps_for_days_and_receives_a_signal() {
    let (world, systems) = (World::new(), Systems::default());
    let saga = approval(&systems);
    let process = world.process(&saga);
    let begin = Instant::now();
    let started = process.sagas.start(&saga, &scope(), &key("k"), &7).await.unwrap();
    tokio::time::sleep(3 * DAY + Duration::from_secs(60)).await;
    assert!(started.signal("decision", &"yes").await.unwrap());
    assert!(!started.signal("decision", &"no").await.unwrap());
    assert_eq!(started.outcome().await.unwrap(), "yes");
    assert!(begin.elapsed() < 3 * DAY + Duration::from_secs(63), "{:?}", begin.elapsed());
}

#[tokio::test(start_paused = true)]
async fn a_signal_before_the_flow_waits_is_received() {
    let (world, systems) = (World::new(), Systems::default());
    let saga = approval(&systems);
    let process = world.process(&saga);
    let begin = Instant::now();
    let started = process.sagas.start(&saga, &scope(), &key("k"), &7).await.unwrap();
    assert!(started.signal("decision", &"yes").await.unwrap());
    assert_eq!(started.outcome().await.unwrap(), "yes");
    assert!(begin.elapsed() < 3 * DAY + Duration::from_secs(3), "{:?}", begin.elapsed());
}

#[tokio::test(start_paused = true)]
async fn a_signal_that_does_not_arrive_ends_the_wait() {
    let (world, systems) = (World::new(), Systems::default());
    let saga = approval(&systems);
    let process = world.process(&saga);
    let started = process.sagas.start(&saga, &scope(), &key("k"), &7).await.unwrap();
    let outcome = started.outcome().await;
    assert!(matches!(&outcome, Err(SagaError::Undone(error)) if error == "no decision"));
}

#[tokio::test(start_paused = true)]
async fn a_cancelled_saga_undoes_its_steps_at_once() {
    let (world, systems) = (World::new(), Systems::default());
    let saga = approval(&systems);
    let process = world.process(&saga);
    let begin = Instant::now();
    let started = process.sagas.start(&saga, &scope(), &key("k"), &7).await.unwrap();
    tokio::time::sleep(Duration::from_secs(60)).await;
    assert!(started.cancel("changed my mind").await.unwrap());
    let outcome = started.outcome().await;
    let reason = "changed my mind";
    assert!(matches!(&outcome, Err(SagaError::Cancelled { reason: found }) if found == reason));
    assert!(begin.elapsed() < Duration::from_secs(63), "{:?}", begin.elapsed());
}

#[tokio::test(start_paused = true)]
async fn a_shutdown_parks_what_runs_and_another_process_continues_at_once() {
    let (world, systems) = (World::new(), Systems::default());
    let saga = order(&systems);
    systems.answer("charge", &[Answer::Unknown; 3]);
    let first = world.process(&saga);
    let started = first.sagas.start(&saga, &scope(), &key("k"), &cart()).await.unwrap();
    while systems.names().len() < 2 {
        tokio::task::yield_now().await;
    }
    first.task.abort();
    assert!(first.sagas.run(std::future::ready(()), Duration::from_secs(25)).await);
    let (begin, calls) = (Instant::now(), systems.names().len());
    let second = world.process(&saga);
    while systems.names().len() == calls {
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    assert!(begin.elapsed() < Duration::from_secs(2), "{:?}", begin.elapsed());
    assert_eq!(started.outcome().await.unwrap(), "visa:1999");
    drop(second);
}
