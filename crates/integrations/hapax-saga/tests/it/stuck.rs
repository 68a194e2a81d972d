//! Stuck sagas, and the decisions of operators.

use std::num::NonZeroU32;
use std::time::Duration;

use hapax_core::{EntryId, Idempotency, Verdict};
use hapax_saga::log::{Direction, Failure, StuckReason};
use hapax_saga::{
    DecisionMismatch, Saga, SagaDecision, SagaError, SagaLookup, SagaOperator, SagaOperatorError,
    SagaView, StepContext, StepEffect, StepError, StepRetry, UndoError,
};

use crate::shop::{Answer, Cart, DAY, Refusal, Systems, cart, order};
use crate::world::{World, key, scope};

pub(crate) fn operator(world: &World) -> SagaOperator {
    SagaOperator::new(Idempotency::builder(world.store.clone()).build().unwrap())
}

/// Waits until the saga is stuck.
pub(crate) async fn stuck(operator: &SagaOperator) -> SagaView {
    for _ in 0..10_000 {
        let (sagas, _) = operator.list(None, NonZeroU32::MAX).await.unwrap();
        let stuck = |saga: &SagaView| saga.log.as_ref().is_some_and(|log| log.stuck.is_some());
        if let Some(saga) = sagas.into_iter().find(stuck) {
            return saga;
        }
        tokio::time::sleep(Duration::from_secs(1)).await;
    }
    panic!("no saga is stuck")
}

pub(crate) fn reason(saga: &SagaView) -> (StuckReason, Direction) {
    let stuck = saga.log.clone().unwrap().stuck.unwrap();
    (stuck.reason, stuck.direction)
}

#[tokio::test(start_paused = true)]
async fn a_step_out_of_tries_is_stuck_until_an_operator_grants_more() {
    let (world, systems) = (World::new(), Systems::default());
    let (saga, operator) = (order(&systems), operator(&world));
    let process = world.process(&saga);
    systems.answer("charge", &[Answer::NotSent; 5]);
    let started = process.sagas.start(&saga, &scope(), &key("k"), &cart()).await.unwrap();
    let view = stuck(&operator).await;
    let other = process.sagas.start(&saga, &scope(), &key("other"), &cart()).await.unwrap();
    assert_eq!(reason(&view), (StuckReason::Exhausted, Direction::Forward));
    let log = view.log.clone().unwrap();
    assert_eq!(log.stuck.clone().unwrap().step, Some(1));
    assert_eq!(log.steps[1].forward.begun, 5);
    assert_eq!(log.steps[1].forward.error.as_deref(), Some("connection refused"));
    // Others continue.
    assert_eq!(other.outcome().await.unwrap(), "visa:1999");
    // It is not forgotten.
    tokio::time::sleep(2 * DAY).await;
    assert!(started.poll_outcome().await.unwrap().is_none());
    let view = stuck(&operator).await;
    let skip = operator.decide(&view, &SagaDecision::Skip, "ann", "a test").await;
    assert!(matches!(skip, Err(SagaOperatorError::Mismatch(DecisionMismatch::NoUndo))));
    operator.decide(&view, &SagaDecision::Retry, "ann", "the bank is back").await.unwrap();
    assert_eq!(started.outcome().await.unwrap(), "visa:1999");
    // The decision was about the saga as it was read.
    let again = operator.decide(&view, &SagaDecision::Retry, "ann", "twice").await;
    assert!(matches!(again, Err(SagaOperatorError::Changed)), "{again:?}");
}

#[tokio::test(start_paused = true)]
async fn a_start_that_finds_a_stuck_saga_with_a_lapsed_lease_begins_no_execution() {
    let (world, systems) = (World::new(), Systems::default());
    let (saga, operator) = (order(&systems), operator(&world));
    let process = world.process(&saga);
    systems.answer("charge", &[Answer::NotSent; 5]);
    let start = async || process.sagas.start(&saga, &scope(), &key("k"), &cart()).await.unwrap();
    start().await;
    let before = stuck(&operator).await;
    process.task.abort();
    tokio::time::sleep(2 * DAY).await;
    assert!(!start().await.has_begun());
    let view = stuck(&operator).await;
    assert_eq!(view.attempt, before.attempt);
    operator.decide(&view, &SagaDecision::Retry, "ann", "the bank is back").await.unwrap();
    let started = start().await;
    assert!(started.has_begun());
    assert_eq!(started.outcome().await.unwrap(), "visa:1999");
}

#[tokio::test(start_paused = true)]
async fn an_undo_out_of_tries_can_be_skipped_and_that_is_in_the_log() {
    let (world, systems) = (World::new(), Systems::default());
    let mut saga = Saga::define("trip", 1, systems.clone());
    let book = saga
        .keyed("book", DAY, async |at: StepContext<Systems>, n: u32| {
            at.note("book", at.key().as_str());
            Ok::<_, StepError<String>>(n)
        })
        .undo_retry(StepRetry::default().tries(3))
        .undo(async |at: StepContext<Systems>, _: u32, _: StepEffect<u32>| {
            at.note("release", at.key().as_str());
            Err::<(), UndoError>("out of order".into())
        });
    let saga = saga
        .flow(move |op, n: u32| async move {
            op.run(book, n).await?;
            Err::<(), _>("no seat".to_owned())
        })
        .unwrap();
    let (operator, process) = (operator(&world), world.process(&saga));
    let started = process.sagas.start(&saga, &scope(), &key("k"), &7).await.unwrap();
    let view = stuck(&operator).await;
    assert_eq!(reason(&view), (StuckReason::Exhausted, Direction::Undo));
    assert_eq!(systems.names(), ["book", "release", "release", "release"]);
    let abort = operator.decide(&view, &SagaDecision::Abort, "ann", "a test").await;
    assert!(matches!(abort, Err(SagaOperatorError::Mismatch(DecisionMismatch::Compensates))));
    operator.decide(&view, &SagaDecision::Retry, "ann", "again").await.unwrap();
    tokio::time::sleep(Duration::from_secs(3600)).await;
    let view = stuck(&operator).await;
    let decisions = view.log.clone().unwrap().decisions;
    assert_eq!((&*decisions[0].by, &*decisions[0].reason), ("ann", "again"));
    operator.decide(&view, &SagaDecision::Skip, "bob", "refunded by hand").await.unwrap();
    let outcome = started.outcome().await;
    assert!(matches!(&outcome, Err(SagaError::Undone(error)) if error == "no seat"));
    let SagaLookup::Ended(ended) = operator.show(&started.id()).await.unwrap() else {
        panic!("it has ended")
    };
    assert!(matches!(ended.failure, Some(Failure::Error(_))), "{ended:?}");
    assert_eq!(ended.steps[0].name, "book");
}

#[tokio::test(start_paused = true)]
async fn a_step_that_honors_no_key_is_not_repeated_when_its_outcome_is_unknown() {
    let (world, systems) = (World::new(), Systems::default());
    let (saga, operator) = (order(&systems), operator(&world));
    let process = world.process(&saga);
    systems.answer("notify", &[Answer::Unknown]);
    let started = process.sagas.start(&saga, &scope(), &key("k"), &cart()).await.unwrap();
    let view = stuck(&operator).await;
    assert_eq!(reason(&view), (StuckReason::Unknown, Direction::Forward));
    assert_eq!(systems.names(), ["reserve", "charge", "notify"]);
    let happened = SagaDecision::happened(&()).unwrap();
    operator.decide(&view, &happened, "ann", "the mail arrived").await.unwrap();
    assert_eq!(started.outcome().await.unwrap(), "visa:1999");
    assert_eq!(systems.names(), ["reserve", "charge", "notify"]);
}

#[tokio::test(start_paused = true)]
async fn an_aborted_saga_undoes_what_may_have_happened() {
    let (world, systems) = (World::new(), Systems::default());
    let (saga, operator) = (order(&systems), operator(&world));
    let process = world.process(&saga);
    systems.answer("charge", &[Answer::Unknown; 5]);
    let started = process.sagas.start(&saga, &scope(), &key("k"), &cart()).await.unwrap();
    let view = stuck(&operator).await;
    operator.decide(&view, &SagaDecision::Abort, "ann", "customer left").await.unwrap();
    let outcome = started.outcome().await;
    let text = "aborted by ann: customer left";
    assert!(matches!(&outcome, Err(SagaError::Cancelled { reason }) if reason == text));
    let names = systems.names();
    assert_eq!(names[names.len() - 2..], ["void", "free"]);
}

/// Returns a flow with these steps, each of which takes its name as argument.
fn steps(
    systems: &Systems,
    names: &'static [&'static str],
    stop: &'static str,
) -> Saga<(), (), String> {
    let mut saga = Saga::define("edited", 1, systems.clone());
    let mut handles = Vec::new();
    for name in ["a", "b", "c"] {
        handles.push(
            saga.keyed(name, DAY, async |at: StepContext<Systems>, name: String| {
                at.note(&name, at.key().as_str());
                match at.answered(&name) {
                    true => Err(StepError::unknown("no answer")),
                    false => Ok::<_, StepError<String>>(()),
                }
            })
            .retry(StepRetry::default().tries(2))
            .undo(
                async |at: StepContext<Systems>, name: String, _: StepEffect<()>| {
                    at.note(&format!("undo {name}"), at.key().as_str());
                    Ok::<_, UndoError>(())
                },
            ),
        );
    }
    systems.answer(stop, &[Answer::Unknown; 2]);
    saga.flow(move |op, (): ()| {
        let handles = handles.clone();
        async move {
            for name in names {
                let (name, argument) = name.split_once(':').unwrap_or((name, name));
                let at = ["a", "b", "c"].iter().position(|it| *it == name).unwrap();
                op.run(handles[at], argument.to_owned()).await?;
            }
            Ok(())
        }
    })
    .unwrap()
}

#[tokio::test(start_paused = true)]
async fn an_edited_flow_diverges_before_any_call_and_can_be_aborted() {
    for edited in [
        &["a:other", "b", "c"][..], // another argument
        &["b", "c"],                // a step left out
        &["c", "a", "b"],           // a new step before logged ones
        &[],                        // nothing
    ] {
        let (world, systems) = (World::new(), Systems::default());
        let operator = operator(&world);
        let before = steps(&systems, &["a", "b", "c"], "b");
        let process = world.process(&before);
        let started = process.sagas.start(&before, &scope(), &key("k"), &()).await.unwrap();
        let view = stuck(&operator).await;
        assert_eq!(systems.names(), ["a", "b", "b"]);
        process.task.abort();
        let after = steps(&systems, edited, "none");
        let _process = world.process(&after);
        operator.decide(&view, &SagaDecision::Retry, "ann", "deployed").await.unwrap();
        let view = stuck(&operator).await;
        assert_eq!(reason(&view).0, StuckReason::Diverged, "{edited:?}");
        assert_eq!(systems.names(), ["a", "b", "b"], "{edited:?}");
        operator.decide(&view, &SagaDecision::Abort, "ann", "a mistake").await.unwrap();
        let outcome = started.outcome().await;
        assert!(matches!(outcome, Err(SagaError::Cancelled { .. })), "{outcome:?}");
        assert_eq!(systems.names(), ["a", "b", "b", "undo b", "undo a"], "{edited:?}");
    }
}

#[tokio::test(start_paused = true)]
async fn a_flow_that_requests_logged_steps_in_another_order_continues() {
    let (world, systems) = (World::new(), Systems::default());
    let operator = operator(&world);
    let before = steps(&systems, &["a", "b", "c"], "c");
    let process = world.process(&before);
    let started = process.sagas.start(&before, &scope(), &key("k"), &()).await.unwrap();
    let view = stuck(&operator).await;
    process.task.abort();
    let after = steps(&systems, &["b", "a", "c"], "none");
    let _process = world.process(&after);
    operator.decide(&view, &SagaDecision::Retry, "ann", "deployed").await.unwrap();
    started.outcome().await.unwrap();
    assert_eq!(systems.names(), ["a", "b", "c", "c", "c"]);
}

#[tokio::test(start_paused = true)]
async fn a_step_whose_key_has_expired_is_stuck_and_not_called() {
    let (world, systems) = (World::new(), Systems::default());
    let mut saga = Saga::define("pay", 1, systems.clone());
    let pay = saga
        .keyed("pay", Duration::from_secs(5), async |at: StepContext<Systems>, (): ()| {
            at.note("pay", at.key().as_str());
            Err::<(), StepError<String>>(StepError::unknown("the bank is away"))
        })
        .retry(
            StepRetry::within(DAY)
                .timeout(Duration::from_millis(200))
                .pauses(Duration::from_secs(2), Duration::from_secs(2)),
        )
        .no_undo();
    let saga = saga.flow(move |op, (): ()| async move { op.run(pay, ()).await }).unwrap();
    let (operator, process) = (operator(&world), world.process(&saga));
    let begin = tokio::time::Instant::now();
    process.sagas.start(&saga, &scope(), &key("k"), &()).await.unwrap();
    let view = stuck(&operator).await;
    assert_eq!(reason(&view).0, StuckReason::KeyExpired);
    assert!(begin.elapsed() < Duration::from_secs(10));
    let last = view.log.unwrap().steps[0].forward.last.unwrap();
    assert!(last.since(view_start(&operator).await) <= Duration::from_millis(4_500));
}

async fn view_start(operator: &SagaOperator) -> hapax_saga::log::LogTime {
    stuck(operator).await.log.unwrap().steps[0].forward.first.unwrap()
}

#[tokio::test(start_paused = true)]
async fn a_try_that_was_given_up_is_reconciled_after_it_can_no_longer_arrive() {
    let (world, systems) = (World::new(), Systems::default());
    let mut saga = Saga::define("pay", 1, systems.clone());
    let pay = saga
        .once("pay", async |at: StepContext<Systems>, (): ()| {
            // The bank answers after 3 s, to a try that is given up after 1 s.
            let bank = (*at).clone();
            tokio::spawn(async move {
                tokio::time::sleep(Duration::from_secs(3)).await;
                bank.note("paid", "");
            });
            std::future::pending::<Result<u32, StepError<String>>>().await
        })
        .retry(StepRetry::default().timeout(Duration::from_secs(1)))
        .settle(Duration::from_secs(10))
        .reconcile(async |at: StepContext<Systems>, (): ()| {
            match at.names().iter().any(|name| name == "paid") {
                true => Verdict::Happened(7),
                false => Verdict::DidNotHappen,
            }
        })
        .undo(async |_: StepContext<Systems>, (): (), _: StepEffect<u32>| Ok::<_, UndoError>(()));
    let saga = saga.flow(move |op, (): ()| async move { op.run(pay, ()).await }).unwrap();
    let process = world.process(&saga);
    let started = process.sagas.start(&saga, &scope(), &key("k"), &()).await.unwrap();
    assert_eq!(started.outcome().await.unwrap(), 7);
    assert_eq!(systems.names(), ["paid"]);
}

#[tokio::test(start_paused = true)]
async fn a_saga_without_a_process_waits_and_is_overdue_and_others_run() {
    let (world, systems) = (World::new(), Systems::default());
    let (saga, operator) = (order(&systems), operator(&world));
    systems.answer("charge", &[Answer::Hang]);
    let old = world.process(&saga);
    let started = old.sagas.start(&saga, &scope(), &key("k"), &cart()).await.unwrap();
    old.task.abort();
    // The process shuts down and parks it, once its call has ended.
    assert!(old.sagas.run(std::future::ready(()), Duration::from_secs(60)).await);
    let other = steps(&systems, &["a"], "none");
    let new = world.process(&other);
    tokio::time::sleep(Duration::from_secs(660)).await;
    new.sagas.start(&other, &scope(), &key("k"), &()).await.unwrap().outcome().await.unwrap();
    let definitions = operator.definitions().await.unwrap();
    assert_eq!(definitions.len(), 1);
    assert_eq!(definitions[0].queue.as_str(), "saga:place-order:1");
    assert!(definitions[0].overdue >= Duration::from_secs(600));
    let _old = world.process(&saga);
    assert_eq!(started.outcome().await.unwrap(), "visa:1999");
}

#[tokio::test(start_paused = true)]
async fn a_saga_with_a_logged_value_of_another_type_is_stuck() {
    let (world, systems) = (World::new(), Systems::default());
    let operator = operator(&world);
    let define = |systems: &Systems, text: bool| -> Saga<(), (), String> {
        let mut saga = Saga::define("typed", 1, systems.clone());
        let wait = Duration::from_secs(3600);
        if text {
            let look = saga
                .again("look", async |_: StepContext<Systems>, (): ()| {
                    Ok::<_, StepError<String>>("text".to_owned())
                })
                .no_undo();
            saga.flow(move |op, (): ()| async move {
                let _: String = op.run(look, ()).await?;
                op.sleep("hour", wait).await;
                Ok(())
            })
        } else {
            let look = saga
                .again("look", async |_: StepContext<Systems>, (): ()| {
                    Ok::<_, StepError<String>>(7_u32)
                })
                .no_undo();
            saga.flow(move |op, (): ()| async move {
                let _: u32 = op.run(look, ()).await?;
                op.sleep("hour", wait).await;
                Ok(())
            })
        }
        .unwrap()
    };
    let before = define(&systems, true);
    let process = world.process(&before);
    process.sagas.start(&before, &scope(), &key("k"), &()).await.unwrap();
    tokio::time::sleep(Duration::from_secs(60)).await;
    process.task.abort();
    let after = define(&systems, false);
    let process = world.process(&after);
    let view = stuck(&operator).await;
    assert_eq!(reason(&view).0, StuckReason::Unreadable);
    assert_eq!(view.log.clone().unwrap().stuck.unwrap().step, Some(0));
    let started = process.sagas.start(&after, &scope(), &key("k"), &()).await.unwrap();
    let happened = SagaDecision::happened(&7_u32).unwrap();
    operator.decide(&view, &happened, "ann", "it was number 7").await.unwrap();
    started.outcome().await.unwrap();
}

#[test]
fn a_decision_about_a_log_that_is_not_stuck_changes_nothing() {
    let systems = Systems::default();
    let now = hapax_core::Timestamp::from_micros(1).into();
    let id = EntryId::from_bytes([1; 16]);
    let run = order(&systems).simulate(None, id, 1, now, &Cart { card: "x".into(), cents: 1 });
    let mut log = run.unwrap().log().clone();
    let before = log.clone();
    let decided = log.decide(&SagaDecision::Retry, "ann", "a test", now);
    assert_eq!(decided, Err(DecisionMismatch::NotStuck));
    assert_eq!(log, before);
    let _: Refusal = Refusal::SoldOut;
}
