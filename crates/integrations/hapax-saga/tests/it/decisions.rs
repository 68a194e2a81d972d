//! Decisions about sagas that are not stuck, or whose results or logs cannot be read.

use std::num::NonZeroU32;
use std::time::Duration;

use bytes::Bytes;
use hapax_core::schedule::Schedule;
use hapax_core::{Amendment, Claim, Idempotency, OnUnknown, OperationId, Policy};
use hapax_saga::log::{
    Blob, Direction, Failure, Log, Parked, StepLog, StepOutcome, Stuck, StuckReason, Tries,
};
use hapax_saga::run::Run;
use hapax_saga::{
    Saga, SagaDecision, SagaError, SagaOperatorError, StepContext, StepError, StepRetry,
};

use crate::shop::{Answer, DAY, Systems, cart, order};
use crate::stuck::{operator, reason, stuck};
use crate::world::{World, key, scope};

/// Returns a saga of one step without a key, whose answer is lost, and which returns its result.
fn ask<R>(systems: &Systems) -> Saga<(), R, String>
where
    R: serde::Serialize + serde::de::DeserializeOwned + Send + 'static,
{
    let mut saga = Saga::define("ask", 1, systems.clone());
    let ask = saga
        .once("ask", async |_: StepContext<Systems>, (): ()| {
            Err::<R, StepError<String>>(StepError::unknown("no answer"))
        })
        .no_undo();
    saga.flow(move |op, (): ()| async move { op.run(ask, ()).await }).unwrap()
}

#[tokio::test(start_paused = true)]
async fn a_step_resolved_with_another_type_is_stuck_and_can_be_resolved_again() {
    let (world, systems) = (World::new(), Systems::default());
    let (saga, operator) = (ask::<u32>(&systems), operator(&world));
    let process = world.process(&saga);
    let started = process.sagas.start(&saga, &scope(), &key("k"), &()).await.unwrap();
    let view = stuck(&operator).await;
    let wrong = SagaDecision::happened(&"seven").unwrap();
    operator.decide(&view, &wrong, "ann", "they told me").await.unwrap();
    tokio::time::sleep(Duration::from_secs(5)).await;
    let view = stuck(&operator).await;
    assert_eq!(reason(&view), (StuckReason::Unreadable, Direction::Forward));
    assert_eq!(view.log.clone().unwrap().stuck.unwrap().step, Some(0));
    let right = SagaDecision::happened(&7_u32).unwrap();
    operator.decide(&view, &right, "ann", "they told me").await.unwrap();
    assert_eq!(started.outcome().await.unwrap(), 7);
}

#[tokio::test(start_paused = true)]
async fn a_missing_value_is_resolved_with_null() {
    let (world, systems) = (World::new(), Systems::default());
    let (saga, operator) = (ask::<Option<u32>>(&systems), operator(&world));
    let process = world.process(&saga);
    let started = process.sagas.start(&saga, &scope(), &key("k"), &()).await.unwrap();
    let view = stuck(&operator).await;
    let null = SagaDecision::happened(&serde_json::Value::Null).unwrap();
    operator.decide(&view, &null, "ann", "there is none").await.unwrap();
    assert_eq!(started.outcome().await.unwrap(), None);
}

#[tokio::test(start_paused = true)]
async fn an_overdue_saga_can_be_aborted_and_is_undone_when_its_definition_is_back() {
    let (world, systems) = (World::new(), Systems::default());
    let (saga, operator) = (order(&systems), operator(&world));
    systems.answer("charge", &[Answer::NotSent; 10]);
    let old = world.process(&saga);
    let started = old.sagas.start(&saga, &scope(), &key("k"), &cart()).await.unwrap();
    tokio::time::sleep(Duration::from_millis(10)).await;
    old.task.abort();
    assert!(old.sagas.run(std::future::ready(()), Duration::from_secs(60)).await);
    tokio::time::sleep(Duration::from_secs(660)).await;
    let (sagas, _) = operator.list(None, NonZeroU32::MAX).await.unwrap();
    let view = &sagas[0];
    assert!(view.log.as_ref().unwrap().stuck.is_none());
    let calls = systems.names();
    let retry = operator.decide(view, &SagaDecision::Retry, "ann", "a test").await;
    assert!(matches!(retry, Err(SagaOperatorError::Mismatch(_))), "{retry:?}");
    // Twice, as after a lost answer.
    for _ in 0..2 {
        operator.decide(view, &SagaDecision::Abort, "ann", "customer left").await.unwrap();
    }
    let _process = world.process(&saga);
    let outcome = started.outcome().await;
    let text = "aborted by ann: customer left";
    assert!(matches!(&outcome, Err(SagaError::Cancelled { reason }) if reason == text));
    assert_eq!(systems.names()[calls.len()..], ["free"]);
}

#[tokio::test(start_paused = true)]
async fn a_saga_that_runs_is_not_aborted() {
    let (world, systems) = (World::new(), Systems::default());
    let (saga, operator) = (order(&systems), operator(&world));
    systems.answer("reserve", &[Answer::Hang]);
    let process = world.process(&saga);
    let started = process.sagas.start(&saga, &scope(), &key("k"), &cart()).await.unwrap();
    tokio::time::sleep(Duration::from_secs(1)).await;
    let (sagas, _) = operator.list(None, NonZeroU32::MAX).await.unwrap();
    let abort = operator.decide(&sagas[0], &SagaDecision::Abort, "ann", "a test").await;
    assert!(matches!(abort, Err(SagaOperatorError::Mismatch(_))), "{abort:?}");
    assert_eq!(started.outcome().await.unwrap(), "visa:1999");
}

/// Replaces the log of a parked saga by bytes that are none.
async fn damage(world: &World, id: OperationId) {
    let engine = Idempotency::builder(world.store.clone()).build().unwrap();
    let seen = engine.load(&id).await.unwrap();
    let expected = seen.stored.as_ref().unwrap().write_id;
    let checkpoint = Some(Bytes::from_static(b"no log"));
    let amendment = Amendment { expected, checkpoint, lease: Duration::ZERO };
    engine.amend(id, seen, amendment).await.unwrap();
}

#[tokio::test(start_paused = true)]
async fn a_log_that_cannot_be_read_hides_no_other_saga_and_gets_no_second_entry() {
    let (world, systems) = (World::new(), Systems::default());
    let (saga, operator) = (order(&systems), operator(&world));
    systems.answer("charge", &[Answer::NotSent; 10]);
    let process = world.process(&saga);
    let mut ids = Vec::new();
    for name in ["a", "b"] {
        let started = process.sagas.start(&saga, &scope(), &key(name), &cart()).await.unwrap();
        ids.push(started.id());
    }
    stuck(&operator).await;
    tokio::time::sleep(Duration::from_secs(3600)).await;
    process.task.abort();
    damage(&world, ids[0]).await;
    let (sagas, _) = operator.list(None, NonZeroU32::MAX).await.unwrap();
    let listed = |id| sagas.iter().find(|saga| saga.id == id).unwrap();
    assert!(listed(ids[0]).is_unreadable && listed(ids[0]).log.is_none());
    assert!(!listed(ids[1]).is_unreadable && listed(ids[1]).log.is_some());
    let shown = operator.show(&ids[0]).await;
    assert!(matches!(shown, Err(SagaOperatorError::Unreadable)), "{shown:?}");
    // The same start finds it.
    let again = process.sagas.start(&saga, &scope(), &key("a"), &cart()).await.unwrap();
    assert!(!again.is_first());
    let entries = world.store.entries(None, NonZeroU32::MAX).await.unwrap().entries;
    let of_first = entries.iter().filter(|(key, _)| key.operation == ids[0]);
    assert_eq!(of_first.count(), 1);
}

/// Replaces the log of a parked saga.
async fn change(world: &World, id: OperationId, change: impl FnOnce(&mut Log)) {
    let engine = Idempotency::builder(world.store.clone()).build().unwrap();
    let seen = engine.load(&id).await.unwrap();
    let stored = seen.stored.as_ref().unwrap();
    let mut log = Log::decode(stored.record.checkpoint.as_ref().unwrap()).unwrap();
    change(&mut log);
    let (expected, checkpoint) = (stored.write_id, Some(log.encode().unwrap()));
    let amendment = Amendment { expected, checkpoint, lease: DAY };
    engine.amend(id, seen, amendment).await.unwrap();
}

#[tokio::test(start_paused = true)]
async fn a_decision_about_a_saga_that_is_stuck_in_a_pause_does_not_end_the_pause() {
    for decision in [SagaDecision::Retry, SagaDecision::DidNotHappen { force: false }] {
        let world = World::new();
        let saga = Saga::define("waits", 1, ()).flow(move |op, (): ()| async move {
            op.signal::<u32>("number", 3 * DAY).await.ok_or_else(|| "it is too late".to_owned())
        });
        let (saga, operator) = (saga.unwrap(), operator(&world));
        let process = world.process(&saga);
        let started = process.sagas.start(&saga, &scope(), &key("k"), &()).await.unwrap();
        tokio::time::sleep(Duration::from_secs(5)).await;
        change(&world, started.id(), |log| {
            let (reason, direction) = (StuckReason::Crashed, Direction::Forward);
            let (step, since, detail) = (Some(0), log.started, String::new());
            log.stuck = Some(Stuck { reason, step, direction, detail, since, quiet: None });
        })
        .await;
        let view = stuck(&operator).await;
        operator.decide(&view, &decision, "ann", "the service is repaired").await.unwrap();
        tokio::time::sleep(Duration::from_secs(600)).await;
        assert!(started.poll_outcome().await.unwrap().is_none(), "{decision:?}");
        started.signal("number", &7).await.unwrap();
        assert_eq!(started.outcome().await.unwrap(), 7);
    }
}

#[tokio::test(start_paused = true)]
async fn executions_of_a_stuck_saga_do_not_count_as_crashes_of_what_is_decided() {
    let (world, systems) = (World::new(), Systems::default());
    let (saga, operator) = (order(&systems), operator(&world));
    systems.answer("charge", &[Answer::NotSent; 5]);
    let process = world.process(&saga);
    let started = process.sagas.start(&saga, &scope(), &key("k"), &cart()).await.unwrap();
    stuck(&operator).await;
    process.task.abort();
    tokio::time::sleep(2 * DAY).await;
    let engine = Idempotency::builder(world.store.clone()).build().unwrap();
    let mut policy = Policy::default();
    policy.terms.on_unknown = OnUnknown::Reexecute;
    for _ in 0..6 {
        let seen = engine.load(&started.id()).await.unwrap();
        let claimed = engine.adopt(started.id(), seen, &policy).await.unwrap();
        assert!(matches!(claimed, Claim::Execute(_)), "{claimed:?}");
        // Its process dies.
        drop(claimed);
        tokio::time::sleep(2 * policy.terms.lease).await;
    }
    let view = stuck(&operator).await;
    operator.decide(&view, &SagaDecision::Retry, "ann", "the bank is back").await.unwrap();
    let _process = world.process(&saga);
    let outcome = tokio::time::timeout(DAY, started.outcome()).await;
    assert_eq!(outcome.expect("it is not stuck").unwrap(), "visa:1999");
}

/// Returns a definition of one step, and a run that continues a log, which a test changes before.
fn continued(change: impl FnOnce(&mut Log)) -> Run {
    let mut saga = Saga::define("one-step", 1, ());
    let pay = saga
        .again("pay", async |_: StepContext<()>, (): ()| Ok::<_, StepError<String>>(()))
        .no_undo();
    let saga = saga.flow(move |op, (): ()| async move { op.run(pay, ()).await }).unwrap();
    let now = hapax_core::Timestamp::from_micros(1_000_000).into();
    let id = hapax_core::EntryId::from_bytes([1; 16]);
    let mut log = saga.simulate(None, id, 1, now, &()).unwrap().log().clone();
    change(&mut log);
    saga.simulate(Some(log), id, 2, now, &()).unwrap()
}

#[test]
fn a_run_that_continues_a_parked_log_saves_it_as_one_that_runs() {
    let now = hapax_core::Timestamp::from_micros(1_000_000).into();
    let run = continued(|log| log.parked = Some(Parked { until: now, signal: None }));
    assert_eq!((&run.log().parked, run.log().crashes), (&None, 0));
}

#[test]
fn a_rejected_step_whose_earlier_try_may_have_arrived_is_not_left_out_without_its_definition() {
    let now = hapax_core::Timestamp::from_micros(1_000_000).into();
    let mut run = continued(|log| {
        log.failure = Some(Failure::Cancelled { reason: "a test".to_owned() });
        log.steps.push(StepLog {
            name: "removed".to_owned(),
            nth: 0,
            argument: Blob::default(),
            forward: Tries { begun: 2, arrived: true, ..Tries::default() },
            outcome: Some(StepOutcome::Rejected(Blob::default())),
            undo: Tries::default(),
            undone: None,
        });
    });
    let mut cx = std::task::Context::from_waker(std::task::Waker::noop());
    assert_eq!(run.advance(&mut cx, now), std::task::Poll::Ready(hapax_saga::run::Effect::Park));
    let stuck = run.log().stuck.as_ref().unwrap();
    assert_eq!((&stuck.reason, stuck.step), (&StuckReason::NoSuchStep, Some(0)));
}

#[test]
fn a_try_that_was_not_called_does_not_count() {
    let mut saga = Saga::define("one-try", 1, ());
    let pay = saga
        .keyed("pay", crate::shop::DAY, async |_: StepContext<()>, (): ()| {
            Ok::<_, StepError<String>>(())
        })
        .retry(StepRetry::default().tries(1))
        .no_undo();
    let saga = saga.flow(move |op, (): ()| async move { op.run(pay, ()).await }).unwrap();
    let now = hapax_core::Timestamp::from_micros(1_000_000).into();
    let id = hapax_core::EntryId::from_bytes([1; 16]);
    for is_saved in [false, true] {
        let mut run = saga.simulate(None, id, 1, now, &()).unwrap();
        let mut cx = std::task::Context::from_waker(std::task::Waker::noop());
        let saving = run.advance(&mut cx, now);
        assert_eq!(saving, std::task::Poll::Ready(hapax_saga::run::Effect::Save));
        if is_saved {
            let saved = hapax_saga::run::RunEvent::Saved(None);
            run.resume(saved, now, &hapax_core::SystemEntropy);
            assert!(matches!(
                run.advance(&mut cx, now),
                std::task::Poll::Ready(hapax_saga::run::Effect::Call(_))
            ));
        }
        assert_eq!(run.log().steps[0].forward.begun, 1);
        run.interrupt(now);
        let tries = &run.log().steps[0].forward;
        let found = (tries.begun, tries.open, tries.since, tries.first);
        assert_eq!(found, (0, false, None, None), "saved: {is_saved}");
    }
}
