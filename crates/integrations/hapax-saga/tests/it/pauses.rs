//! Sleeps, signals and cancellations.

use std::num::NonZeroU32;
use std::time::Duration;

use hapax_saga::{Saga, SagaError, SignalError, StepContext, StepEffect, StepError, UndoError};
use tokio::time::Instant;

use crate::shop::{Answer, DAY, Systems, cart, order};
use crate::stuck::operator;
use crate::world::{World, key, scope};

fn approval(systems: &Systems) -> Saga<u32, String, String> {
    let mut saga = Saga::define("approval", 1, systems.clone());
    let ask = saga
        .again("ask", async |_: StepContext<Systems>, n: u32| Ok::<_, StepError<String>>(n))
        .undo(async |_: StepContext<Systems>, _: u32, _: StepEffect<u32>| Ok::<_, UndoError>(()));
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
    // The first one counts, whether the saga has ended by now or not.
    let second = started.signal("decision", &"no").await;
    assert!(matches!(second, Ok(false) | Err(SignalError::Ended)), "{second:?}");
    assert_eq!(started.outcome().await.unwrap(), "yes");
    assert!(begin.elapsed() < 3 * DAY + Duration::from_secs(63), "{:?}", begin.elapsed());
}

#[tokio::test(start_paused = true)]
async fn a_pause_that_is_shorter_than_the_lease_ends_in_time() {
    let world = World::new();
    let nap = Duration::from_secs(12);
    let saga = Saga::define("nap", 1, ()).flow(move |op, _: u32| async move {
        op.sleep("nap", nap).await;
        // After a resume too.
        let signal = op.signal::<u32>("signal", nap).await;
        Ok::<_, String>(signal.is_none())
    });
    let saga = saga.unwrap();
    let process = world.process(&saga);
    let begin = Instant::now();
    let started = process.sagas.start(&saga, &scope(), &key("k"), &7).await.unwrap();
    assert!(started.outcome().await.unwrap());
    // Each pause ends within a poll; the caller looks every two seconds at most.
    let late = begin.elapsed() - 2 * nap;
    assert!(late < Duration::from_secs(4), "{late:?}");
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
async fn a_wait_ends_without_a_signal_at_its_timeout() {
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

#[tokio::test(start_paused = true)]
async fn sagas_that_have_shut_down_drive_nothing_more() {
    let (world, systems) = (World::new(), Systems::default());
    let saga = order(&systems);
    systems.answer("charge", &[Answer::NotSent; 3]);
    let process = world.process(&saga);
    let started = process.sagas.start(&saga, &scope(), &key("k"), &cart()).await.unwrap();
    while systems.names().len() < 2 {
        tokio::task::yield_now().await;
    }
    let drain = Duration::from_secs(25);
    assert!(process.sagas.run(std::future::ready(()), drain).await);
    // The run that was in progress has ended too.
    tokio::time::timeout(drain, process.task).await.unwrap().unwrap();
    let view = async || {
        let (sagas, _) = operator(&world).list(None, NonZeroU32::MAX).await.unwrap();
        sagas.into_iter().next().unwrap()
    };
    let (before, begin) = (view().await, Instant::now());
    assert!(process.sagas.run(std::future::pending(), drain).await);
    assert!(begin.elapsed() < Duration::from_secs(1), "{:?}", begin.elapsed());
    let after = view().await;
    assert_eq!((after.write_id, after.attempt), (before.write_id, before.attempt));
    let _other = world.process(&saga);
    assert_eq!(started.outcome().await.unwrap(), "visa:1999");
}
