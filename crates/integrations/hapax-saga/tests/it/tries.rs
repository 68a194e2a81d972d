//! Tries that a step prepares, postpones or ends, and the knowledge about earlier ones.

use std::num::NonZeroU32;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use hapax_core::Idempotency;
use hapax_saga::{Saga, SagaDecision, SagaOperator, SagaView, StepContext, StepError, StuckReason};
use tokio::time::Instant;

use crate::world::{Process, World, key, scope};

type End<T> = Result<T, StepError<String>>;

/// A call: its time, the age of the first try that may have arrived, and the prepared value.
type Call = (Instant, Option<Duration>, Option<String>);

/// The ends of the next tries; after the last one, tries succeed.
#[derive(Default)]
struct Script {
    prepared: Mutex<Vec<End<String>>>,
    called: Mutex<Vec<End<u32>>>,
    /// The value by which the next try replaces the prepared one.
    replacement: Mutex<Option<String>>,
    calls: Mutex<Vec<Call>>,
}

fn next<T>(script: &Mutex<Vec<End<T>>>) -> Option<End<T>> {
    let mut script = script.lock().unwrap();
    (!script.is_empty()).then(|| script.remove(0))
}

fn saga(script: &Arc<Script>) -> Saga<u32, u32, String> {
    let mut saga = Saga::define("tries", 1, Arc::clone(script));
    let step = saga
        .again("step", async |at: StepContext<Arc<Script>>, (): ()| {
            assert_eq!(at.input::<u32>().unwrap(), 7);
            at.calls.lock().unwrap().push((Instant::now(), at.age(), at.prepared()));
            if let Some(value) = at.replacement.lock().unwrap().take() {
                at.replace_prepared(&value).unwrap();
            }
            next(&at.called).unwrap_or(Ok(at.number()))
        })
        .prepare(async |at: StepContext<Arc<Script>>, (): ()| {
            let before = at.prepared::<String>();
            let default = || Ok(format!("{}-", before.unwrap_or_default()));
            next(&at.prepared).unwrap_or_else(default)
        })
        .no_undo();
    saga.flow(move |op, _: u32| async move { op.run(step, ()).await }).unwrap()
}

async fn outcome(process: &Process, saga: &Saga<u32, u32, String>) -> u32 {
    let started = process.sagas.start(saga, &scope(), &key("k"), &7).await.unwrap();
    started.outcome().await.unwrap()
}

async fn stuck(process: &Process, saga: &Saga<u32, u32, String>) -> SagaView {
    for _ in 0..1_000 {
        let page = process.sagas.unfinished(saga, None, NonZeroU32::MAX).await.unwrap();
        let stuck = |it: &(SagaView, u32)| it.0.log.as_ref().is_some_and(|log| log.stuck.is_some());
        if let Some((view, input)) = page.sagas.into_iter().find(stuck) {
            assert_eq!(input, 7);
            return view;
        }
        tokio::time::sleep(Duration::from_secs(1)).await;
    }
    panic!("no saga is stuck")
}

#[tokio::test(start_paused = true)]
async fn each_try_gets_the_value_that_was_prepared_and_saved_with_it() {
    let (world, script) = (World::new(), Arc::new(Script::default()));
    *script.called.lock().unwrap() = vec![Err(StepError::unknown("silent"))];
    let saga = saga(&script);
    let process = world.process(&saga);
    assert_eq!(outcome(&process, &saga).await, 2);
    let calls = script.calls.lock().unwrap();
    let prepared: Vec<_> = calls.iter().map(|call| call.2.as_deref()).collect();
    assert_eq!(prepared, [Some("-"), Some("--")]);
}

#[tokio::test(start_paused = true)]
async fn a_value_that_a_try_replaces_is_saved_before_the_pause_and_the_next_one_gets_it() {
    let (world, script) = (World::new(), Arc::new(Script::default()));
    // In memory, so that nothing else saves it.
    let after = Duration::from_secs(5);
    *script.called.lock().unwrap() =
        vec![Err(StepError::RetryAfter { after, source: "busy".into() })];
    *script.replacement.lock().unwrap() = Some("known".to_owned());
    let saga = saga(&script);
    let process = world.process(&saga);
    let started = process.sagas.start(&saga, &scope(), &key("k"), &7).await.unwrap();
    let saved = async || {
        let page = process.sagas.unfinished(&saga, None, NonZeroU32::MAX).await.unwrap();
        let log = page.sagas[0].0.log.as_ref()?;
        let prepared = log.steps.first()?.forward.prepared.as_ref()?;
        hapax_core::value::read::<String>(&prepared.0).ok()
    };
    // The clock does not go on meanwhile.
    let begun = Instant::now();
    for _ in 0..1_000 {
        if saved().await.as_deref() == Some("known") {
            break;
        }
        tokio::task::yield_now().await;
    }
    assert_eq!((saved().await.as_deref(), begun.elapsed()), (Some("known"), Duration::ZERO));
    assert_eq!(started.outcome().await.unwrap(), 2);
    let calls = script.calls.lock().unwrap();
    assert_eq!(calls[1].2.as_deref(), Some("known-"));
}

#[tokio::test(start_paused = true)]
async fn the_age_begins_with_the_first_try_that_may_have_arrived() {
    let (world, script) = (World::new(), Arc::new(Script::default()));
    let after = Duration::from_secs(100);
    let later = |source: &str| Err(StepError::RetryAfter { after, source: source.into() });
    *script.called.lock().unwrap() =
        vec![Err(StepError::not_sent("no route")), later("busy"), later("busy")];
    let saga = saga(&script);
    let process = world.process(&saga);
    assert_eq!(outcome(&process, &saga).await, 4);
    let calls = script.calls.lock().unwrap();
    let ages: Vec<_> = calls.iter().map(|call| call.1).collect();
    assert_eq!(ages[..2], [None, None]);
    assert!(ages[2].unwrap() >= after && ages[3].unwrap() >= 2 * after, "{ages:?}");
    assert!(calls[2].0 - calls[1].0 >= after, "no earlier than the system said");
}

#[tokio::test(start_paused = true)]
async fn a_postponed_try_is_not_counted_and_calls_nothing() {
    let (world, script) = (World::new(), Arc::new(Script::default()));
    let after = Duration::from_secs(60);
    let postponed = || Err(StepError::Postponed { after, source: "no budget".into() });
    *script.prepared.lock().unwrap() = vec![postponed(), postponed()];
    let saga = saga(&script);
    let process = world.process(&saga);
    let begun = Instant::now();
    assert_eq!(outcome(&process, &saga).await, 1);
    let calls = script.calls.lock().unwrap();
    assert!(calls.len() == 1 && calls[0].0 - begun >= 2 * after, "{calls:?}");
}

#[tokio::test(start_paused = true)]
async fn an_error_of_the_preparation_never_counts_as_a_try_that_may_have_arrived() {
    let (world, script) = (World::new(), Arc::new(Script::default()));
    let after = Duration::from_secs(1);
    *script.prepared.lock().unwrap() = vec![
        Err(StepError::unknown("no credentials")),
        Err(StepError::RetryAfter { after, source: "no credentials".into() }),
        Err(StepError::not_sent("no credentials")),
    ];
    let saga = saga(&script);
    let process = world.process(&saga);
    assert_eq!(outcome(&process, &saga).await, 3, "the tries that were not sent count");
    assert_eq!(script.calls.lock().unwrap()[0].1, None);
}

#[tokio::test(start_paused = true)]
async fn a_prepared_value_that_is_too_large_is_not_saved_and_nothing_is_called() {
    let (world, script) = (World::new(), Arc::new(Script::default()));
    *script.prepared.lock().unwrap() = vec![Ok("x".repeat(20 << 20)), Ok("x".repeat(70 << 10))];
    let saga = saga(&script);
    let process = world.process(&saga);
    let started = process.sagas.start(&saga, &scope(), &key("k"), &7).await.unwrap();
    let engine = Idempotency::builder(world.store.clone()).build().unwrap();
    let operator = SagaOperator::new(engine);
    for number in 0..2 {
        let view = stuck(&process, &saga).await;
        let stuck = view.log.clone().unwrap().stuck.unwrap();
        assert_eq!(stuck.reason, StuckReason::TooLarge, "{}", stuck.detail);
        let reason = format!("shortened, {number}");
        operator.decide(&view, &SagaDecision::Retry, "ann", &reason).await.unwrap();
        tokio::time::sleep(Duration::from_secs(5)).await;
    }
    started.outcome().await.unwrap();
    assert_eq!(script.calls.lock().unwrap().len(), 1);
}

#[tokio::test(start_paused = true)]
async fn a_flow_whose_error_is_too_large_is_stuck() {
    let world = World::new();
    let saga = Saga::define("errs", 1, ());
    let saga =
        saga.flow(move |_, _: u32| async move { Err::<u32, _>("x".repeat(300 << 10)) }).unwrap();
    let process = world.process(&saga);
    process.sagas.start(&saga, &scope(), &key("k"), &7).await.unwrap();
    let stuck = stuck(&process, &saga).await.log.unwrap().stuck.unwrap();
    assert_eq!((stuck.reason, stuck.step), (StuckReason::TooLarge, None), "{}", stuck.detail);
}

#[tokio::test(start_paused = true)]
async fn a_step_that_ends_its_tries_is_stuck_with_its_own_reason_until_it_is_retried() {
    for sent in [false, true] {
        let (world, script) = (World::new(), Arc::new(Script::default()));
        let reason = StuckReason::Step("unauthorized".to_owned());
        let end = StepError::Stuck { reason: reason.clone(), source: "401".into(), sent };
        *script.called.lock().unwrap() = vec![Err(end)];
        let saga = saga(&script);
        let process = world.process(&saga);
        let started = process.sagas.start(&saga, &scope(), &key("k"), &7).await.unwrap();
        let view = stuck(&process, &saga).await;
        let stuck = view.log.clone().unwrap().stuck.unwrap();
        assert_eq!((stuck.reason, &*stuck.detail), (reason, "401"));
        let engine = Idempotency::builder(world.store.clone()).build().unwrap();
        let operator = SagaOperator::new(engine);
        operator.decide(&view, &SagaDecision::Retry, "ann", "signed in").await.unwrap();
        assert_eq!(started.outcome().await.unwrap(), 1);
        assert_eq!(script.calls.lock().unwrap()[1].1.is_some(), sent);
    }
}
