//! Steps, their retries, their undo, and crashes between them.

use std::time::Duration;

use hapax_saga::{Saga, SagaError, SagaStartError, StepContext, StepError};
use tokio::time::{Instant, sleep};

use crate::shop::{Answer, Cart, Refusal, Systems, cart, order};
use crate::world::{World, key, scope};

#[tokio::test(start_paused = true)]
async fn every_step_runs_once_and_the_output_is_the_outcome() {
    let (world, systems) = (World::new(), Systems::default());
    let saga = order(&systems);
    let process = world.process(&saga);
    for _ in 0..2 {
        let started = process.sagas.start(&saga, &scope(), &key("k"), &cart()).await.unwrap();
        assert_eq!(started.outcome().await.unwrap(), "visa:1999");
    }
    assert_eq!(systems.names(), ["reserve", "charge", "notify"]);
}

#[tokio::test(start_paused = true)]
async fn a_step_that_another_task_of_the_flow_requests_is_called_at_once() {
    let (world, systems) = (World::new(), Systems::default());
    let mut saga = Saga::define("spawns", 1, systems.clone());
    let note = async |at: StepContext<Systems>, (): ()| {
        at.note("note", "");
        Ok::<_, StepError<String>>(())
    };
    let note = saga.again("note", note).no_undo();
    let saga = saga.flow(move |op, (): ()| async move {
        let requests = async move {
            sleep(Duration::from_secs(1)).await;
            op.run(note, ()).await
        };
        tokio::spawn(requests).await.unwrap()
    });
    let saga = saga.unwrap();
    let process = world.process(&saga);
    let begin = Instant::now();
    let started = process.sagas.start(&saga, &scope(), &key("k"), &()).await.unwrap();
    started.outcome().await.unwrap();
    assert!(begin.elapsed() < Duration::from_secs(10), "{:?}", begin.elapsed());
}

#[tokio::test(start_paused = true)]
async fn another_input_under_the_key_is_rejected() {
    let (world, systems) = (World::new(), Systems::default());
    let saga = order(&systems);
    let process = world.process(&saga);
    let started = process.sagas.start(&saga, &scope(), &key("k"), &cart()).await.unwrap();
    let other = Cart { cents: 1, ..cart() };
    let rejected = process.sagas.start(&saga, &scope(), &key("k"), &other).await;
    assert!(matches!(rejected, Err(SagaStartError::KeyReused)));
    started.outcome().await.unwrap();
    let rejected = process.sagas.start(&saga, &scope(), &key("k"), &other).await;
    assert!(matches!(rejected, Err(SagaStartError::KeyReused)));
}

#[tokio::test(start_paused = true)]
async fn a_rejected_step_undoes_the_earlier_ones_and_its_error_is_the_outcome() {
    let (world, systems) = (World::new(), Systems::default());
    let saga = order(&systems);
    let process = world.process(&saga);
    systems.answer("charge", &[Answer::Reject]);
    for _ in 0..2 {
        let started = process.sagas.start(&saga, &scope(), &key("k"), &cart()).await.unwrap();
        let outcome = started.outcome().await;
        assert!(matches!(outcome, Err(SagaError::Undone(Refusal::Declined))), "{outcome:?}");
    }
    assert_eq!(systems.names(), ["reserve", "charge", "free"]);
}

#[tokio::test(start_paused = true)]
async fn a_failed_step_is_tried_again_under_its_key() {
    let (world, systems) = (World::new(), Systems::default());
    let saga = order(&systems);
    let process = world.process(&saga);
    systems.answer("charge", &[Answer::NotSent, Answer::Unknown, Answer::Panic, Answer::Hang]);
    let started = process.sagas.start(&saga, &scope(), &key("k"), &cart()).await.unwrap();
    assert_eq!(started.outcome().await.unwrap(), "visa:1999");
    let calls = systems.calls();
    let charges: Vec<_> = calls.iter().filter(|(name, _)| name == "charge").collect();
    assert_eq!(charges.len(), 5);
    assert!(charges.iter().all(|(_, key)| *key == charges[0].1));
    assert_ne!(calls[0].1, charges[0].1);
}

#[tokio::test(start_paused = true)]
async fn an_undo_is_tried_until_it_succeeds_and_one_of_an_unknown_step_waits() {
    let (world, systems) = (World::new(), Systems::default());
    let saga = order(&systems);
    let process = world.process(&saga);
    systems.answer("notify", &[Answer::Reject]);
    systems.answer("refund", &[Answer::Unknown, Answer::NotSent]);
    let started = process.sagas.start(&saga, &scope(), &key("k"), &cart()).await.unwrap();
    let outcome = started.outcome().await;
    assert!(matches!(outcome, Err(SagaError::Undone(Refusal::Declined))), "{outcome:?}");
    let names = systems.names();
    assert_eq!(names, ["reserve", "charge", "notify", "refund", "refund", "refund", "free"]);
}

#[tokio::test(start_paused = true)]
async fn another_process_continues_after_a_crash_in_a_step() {
    let (world, systems) = (World::new(), Systems::default());
    let saga = order(&systems);
    systems.answer("charge", &[Answer::Hang]);
    // The first process is a runtime of its own, which ends.
    let first = std::thread::scope(|threads| {
        let crash = || {
            let runtime = tokio::runtime::Builder::new_current_thread()
                .enable_all()
                .start_paused(true)
                .build()
                .unwrap();
            runtime.block_on(async {
                let process = world.process(&saga);
                process.sagas.start(&saga, &scope(), &key("k"), &cart()).await.unwrap();
                while systems.names().last().is_none_or(|name| name != "charge") {
                    tokio::task::yield_now().await;
                }
            });
        };
        threads.spawn(crash).join()
    });
    first.unwrap();
    assert_eq!(systems.names(), ["reserve", "charge"]);
    let process = world.process(&saga);
    let begin = tokio::time::Instant::now();
    let started = process.sagas.start(&saga, &scope(), &key("k"), &cart()).await.unwrap();
    assert_eq!(started.outcome().await.unwrap(), "visa:1999");
    assert!(begin.elapsed() < Duration::from_secs(33), "{:?}", begin.elapsed());
    assert_eq!(systems.names(), ["reserve", "charge", "charge", "notify"]);
}
