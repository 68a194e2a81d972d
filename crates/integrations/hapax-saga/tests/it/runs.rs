//! Runs without a driver: each effect is performed by hand, at a time of the test's choice.

use std::collections::HashMap;
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use bytes::Bytes;
use hapax_core::{EntryId, Timestamp, Verdict};
use hapax_saga::log::{Blob, Direction, Log, LogTime, StepOutcome, StuckReason, UndoEnd};
use hapax_saga::run::{Effect, Run, RunEvent, SagaEnd, TryEnd, UndoFailure};
use hapax_saga::{
    DefinitionError, Saga, SagaDecision, StepBuilder, StepContext, StepEffect, StepError,
    StepHandle, StepRetry, UndoError,
};
use hapax_testkit::SeededEntropy;
use serde::Serialize;

use crate::shop::DAY;

const SECOND: Duration = Duration::from_secs(1);
const HOUR: Duration = Duration::from_secs(3_600);

/// A run whose effects the test performs.
struct Hand<'a, I> {
    saga: &'a Saga<I, u32, String>,
    input: I,
    run: Run,
    now: LogTime,
    entropy: SeededEntropy,
}

impl<'a, I: Serialize> Hand<'a, I> {
    fn new(saga: &'a Saga<I, u32, String>, input: I) -> Self {
        let now = LogTime::from(Timestamp::from_micros(1_790_000_000_000_000));
        let run = saga.simulate(None, EntryId::from_bytes([1; 16]), 1, now, &input).unwrap();
        Self { saga, input, run, now, entropy: SeededEntropy::new(1) }
    }

    fn log(&self) -> &Log {
        self.run.log()
    }

    /// Continues by this log, as another process does.
    fn again(&mut self, log: &Log) {
        let log = Log::decode(&log.encode().unwrap()).unwrap();
        let (id, attempt) = (EntryId::from_bytes(log.entry), log.attempt + 1);
        self.run = self.saga.simulate(Some(log), id, attempt, self.now, &self.input).unwrap();
    }

    fn advance(&mut self) -> Effect {
        match self.run.advance(&mut Context::from_waker(Waker::noop()), self.now) {
            Poll::Ready(effect) => effect,
            Poll::Pending => panic!("the flow waits for steps only"),
        }
    }

    fn resume(&mut self, event: RunEvent) {
        self.run.resume(event, self.now, &self.entropy);
    }

    /// Returns the next effect that is no save, no look for a cancellation and no pause.
    fn next(&mut self) -> Effect {
        loop {
            match self.advance() {
                Effect::Wait(until) => self.now = self.now.max(until),
                Effect::Save => self.resume(RunEvent::Saved(None)),
                Effect::LookForCancellation => self.resume(RunEvent::Cancelled(None)),
                Effect::Park if self.log().stuck.is_none() => {
                    self.now = self.now.max(self.log().parked.as_ref().unwrap().until);
                    let log = self.log().clone();
                    self.again(&log);
                }
                effect => return effect,
            }
        }
    }

    /// Decides about the stuck saga, and continues.
    fn decide(&mut self, decision: &SagaDecision) {
        let mut log = self.log().clone();
        log.decide(decision, "ann", "a test", self.now).unwrap();
        self.again(&log);
    }

    fn stuck(&self) -> (StuckReason, Direction) {
        let stuck = self.log().stuck.clone().expect("a stuck saga");
        (stuck.reason, stuck.direction)
    }
}

fn unknown() -> RunEvent {
    RunEvent::Called(TryEnd::Unknown("no reply".to_owned()))
}

fn happened(result: u32) -> RunEvent {
    RunEvent::Called(TryEnd::Happened(encoded(&result)))
}

fn encoded(value: &impl Serialize) -> Blob {
    Blob(hapax_core::value::write(value, 1 << 20).unwrap())
}

type Step<'a> = StepBuilder<'a, (), u32, u32, String>;

/// A step that the test performs.
async fn step(_: StepContext<()>, _: u32) -> Result<u32, StepError<String>> {
    Err(StepError::not_sent("not called"))
}

async fn undo(_: StepContext<()>, _: u32, _: StepEffect<u32>) -> Result<(), UndoError> {
    Ok(())
}

/// Returns a saga of one step, which `fails` after it.
fn one(
    define: impl FnOnce(&mut hapax_saga::SagaBuilder<()>) -> StepHandle<u32, u32, String>,
    fails: bool,
) -> Saga<u32, u32, String> {
    let mut saga = Saga::define("by-hand", 1, ());
    let step = define(&mut saga);
    let flow = saga.flow(move |op, n: u32| async move {
        let result = op.run(step, n).await?;
        if fails { Err("it failed".to_owned()) } else { Ok(result) }
    });
    flow.unwrap()
}

#[test]
fn a_reconcile_function_that_cannot_say_is_asked_as_long_as_a_step_is_tried() {
    let within = |step: Step<'_>| {
        let step = step.retry(StepRetry::within(HOUR));
        step.reconcile(async |_: StepContext<()>, _: u32| Verdict::<u32>::CannotSay).undo(undo)
    };
    let saga = one(|saga| within(saga.keyed("charge", DAY, step)), false);
    // Forward; and in a compensation, which begins when the first try is unknown.
    for cancelled in [false, true] {
        let mut hand = Hand::new(&saga, 7);
        let begin = hand.now;
        assert!(matches!(hand.next(), Effect::Call(_)));
        hand.resume(unknown());
        if cancelled {
            let Effect::Wait(until) = hand.advance() else { panic!("a pause") };
            hand.now = until;
            assert_eq!(hand.advance(), Effect::Save);
            hand.resume(RunEvent::Saved(Some("no more".to_owned())));
        }
        let mut checks = 0;
        let last = loop {
            match hand.next() {
                Effect::Call(_) => hand.resume(unknown()),
                Effect::Reconcile(_) => {
                    checks += 1;
                    assert!(checks < 10_000, "asked for ever");
                    hand.resume(RunEvent::Reconciled(Verdict::CannotSay));
                }
                effect => break effect,
            }
        };
        assert!(checks > 1);
        assert!(hand.now.since(begin) < 3 * HOUR, "{:?}", hand.now.since(begin));
        match cancelled {
            false => assert_eq!(hand.stuck(), (StuckReason::Exhausted, Direction::Forward)),
            true => assert!(matches!(last, Effect::Undo(_)), "{last:?}"),
        }
    }
}

#[test]
fn a_try_begins_only_if_it_ends_within_the_lifetime_of_its_key() {
    let quick = |retry: StepRetry| retry.timeout(30 * SECOND).pauses(5 * SECOND, 5 * SECOND);
    let define = |step: Step<'_>| {
        let retry = quick(StepRetry::within(DAY));
        step.retry(retry).undo_retry(retry).undo(undo)
    };
    let saga = one(|saga| define(saga.keyed("charge", 60 * SECOND, step)), true);
    for direction in [Direction::Forward, Direction::Undo] {
        let mut hand = Hand::new(&saga, 7);
        let mut begins = Vec::new();
        loop {
            match hand.next() {
                Effect::Call(_) if direction == Direction::Undo => hand.resume(happened(1)),
                Effect::Call(_) => {
                    begins.push(hand.now);
                    hand.now = hand.now.after(SECOND);
                    hand.resume(unknown());
                }
                Effect::Undo(_) => {
                    begins.push(hand.now);
                    hand.now = hand.now.after(SECOND);
                    hand.resume(RunEvent::Undone(Err(UndoFailure::Error("away".to_owned()))));
                }
                _ => break,
            }
        }
        assert_eq!(hand.stuck(), (StuckReason::KeyExpired, direction));
        let last = begins.last().unwrap().since(begins[0]);
        assert!(begins.len() > 2 && last < 30 * SECOND, "{last:?}");
    }
}

#[test]
fn a_definition_without_tries_or_with_a_timeout_beyond_its_key_is_rejected() {
    let build = |lifetime, retry, undo_retry| {
        let mut saga = Saga::define("rejected", 1, ());
        let charge = saga.keyed("charge", lifetime, step).retry(retry).undo_retry(undo_retry);
        let charge = charge.undo(undo);
        saga.flow(move |op, n: u32| async move { op.run(charge, n).await }).map(drop)
    };
    let (some, none) = (StepRetry::default(), StepRetry::default().tries(0));
    let (name, timeout) = ("charge", 30 * SECOND);
    assert_eq!(build(DAY, some, some), Ok(()));
    assert_eq!(build(DAY, none, some), Err(DefinitionError::Tries { name }));
    assert_eq!(build(DAY, some, none), Err(DefinitionError::Tries { name }));
    let rejected = Err(DefinitionError::Lifetime { name, lifetime: timeout, timeout });
    assert_eq!(build(timeout, some, some), rejected);
    assert_eq!(build(timeout, some.timeout(SECOND), some), rejected);
    assert_eq!(build(timeout, some.timeout(SECOND), some.timeout(SECOND)), Ok(()));
}

#[test]
fn an_undo_waits_for_tries_from_before_an_operators_retry() {
    let settle = 60 * SECOND;
    let define = |step: Step<'_>| {
        let retry = StepRetry::default().tries(1).timeout(5 * SECOND);
        step.retry(retry).settle(settle).undo(undo)
    };
    let saga = one(|saga| define(saga.again("hold", step)), true);
    let mut hand = Hand::new(&saga, 7);
    assert!(matches!(hand.next(), Effect::Call(_)));
    // Given up, and perhaps still on its way.
    hand.now = hand.now.after(5 * SECOND);
    hand.resume(unknown());
    assert_eq!(hand.next(), Effect::Park);
    let last = hand.now;
    hand.decide(&SagaDecision::Retry);
    assert!(matches!(hand.next(), Effect::Call(_)));
    hand.resume(happened(1));
    assert!(matches!(hand.next(), Effect::Undo(_)));
    assert!(hand.now.since(last) >= settle + 5 * SECOND, "{:?}", hand.now.since(last));
}

#[test]
fn a_cancellation_is_looked_for_before_the_end() {
    let saga = one(|saga| saga.keyed("charge", DAY, step).undo(undo), false);
    let mut hand = Hand::new(&saga, 7);
    assert!(matches!(hand.next(), Effect::Call(_)));
    hand.resume(happened(1));
    // The process dies after the save of its result, and the saga is cancelled.
    let log = hand.log().clone();
    hand.again(&log);
    assert_eq!(hand.advance(), Effect::LookForCancellation);
    hand.resume(RunEvent::Cancelled(Some("no more".to_owned())));
    assert!(matches!(hand.next(), Effect::Undo(_)));
    hand.resume(RunEvent::Undone(Ok(())));
    assert!(matches!(hand.next(), Effect::Complete(SagaEnd::Undone(_))));
    hand.again(&log);
    assert_eq!(hand.next(), Effect::Complete(SagaEnd::Done(encoded(&1_u32))));
}

#[test]
fn a_rejection_that_is_too_large_has_no_effect() {
    let saga = one(|saga| saga.once("wire", step).undo(undo), false);
    let mut hand = Hand::new(&saga, 7);
    assert!(matches!(hand.next(), Effect::Call(_)));
    let large = Blob(Bytes::from(vec![0; 70 << 10]));
    hand.resume(RunEvent::Called(TryEnd::Rejected(large)));
    assert_eq!(hand.next(), Effect::Park);
    assert_eq!(hand.stuck(), (StuckReason::TooLarge, Direction::Forward));
    assert!(!hand.log().steps[0].forward.arrived);
    let detail = hand.log().stuck.clone().unwrap().detail;
    assert!(detail.contains("rejected") && !detail.contains("resolve"), "{detail}");
    // Without an effect there is nothing to undo, and a retry calls it.
    let log = hand.log().clone();
    hand.decide(&SagaDecision::Retry);
    assert!(matches!(hand.next(), Effect::Call(_)));
    hand.again(&log);
    hand.decide(&SagaDecision::Abort);
    assert!(matches!(hand.next(), Effect::Complete(SagaEnd::Undone(_))));
}

#[test]
fn a_verdict_that_is_too_large_is_none() {
    let define = |step: Step<'_>| {
        let step = step.retry(StepRetry::default().tries(1));
        step.reconcile(async |_: StepContext<()>, _: u32| Verdict::<u32>::CannotSay).undo(undo)
    };
    let saga = one(|saga| define(saga.once("wire", step)), false);
    let mut hand = Hand::new(&saga, 7);
    assert!(matches!(hand.next(), Effect::Call(_)));
    hand.resume(unknown());
    assert!(matches!(hand.next(), Effect::Reconcile(_)));
    let large = Blob(Bytes::from(vec![0; 70 << 10]));
    hand.resume(RunEvent::Reconciled(Verdict::Happened(large)));
    assert_eq!(hand.next(), Effect::Park);
    assert_eq!(hand.stuck(), (StuckReason::Unknown, Direction::Forward));
    assert_eq!(hand.log().steps[0].outcome, None);
    let detail = hand.log().stuck.clone().unwrap().detail;
    assert!(detail.contains("at most 65536 bytes"), "{detail}");
}

#[test]
fn an_operator_resolves_an_undo_whose_key_has_expired() {
    let define = |step: Step<'_>| {
        let retry = StepRetry::within(DAY).pauses(5 * SECOND, 5 * SECOND);
        step.undo_retry(retry).undo(undo)
    };
    let saga = one(|saga| define(saga.keyed("charge", 60 * SECOND, step)), true);
    let mut hand = Hand::new(&saga, 7);
    assert!(matches!(hand.next(), Effect::Call(_)));
    hand.resume(happened(1));
    while let Effect::Undo(_) = hand.next() {
        hand.now = hand.now.after(SECOND);
        hand.resume(RunEvent::Undone(Err(UndoFailure::Error("away".to_owned()))));
    }
    assert_eq!(hand.stuck(), (StuckReason::KeyExpired, Direction::Undo));
    let log = hand.log().clone();
    // The key stays expired.
    hand.decide(&SagaDecision::Retry);
    assert_eq!(hand.next(), Effect::Park);
    assert_eq!(hand.stuck(), (StuckReason::KeyExpired, Direction::Undo));

    hand.again(&log);
    hand.decide(&SagaDecision::happened(&()).unwrap());
    assert!(matches!(hand.next(), Effect::Complete(SagaEnd::Undone(_))));
    let step = &hand.log().steps[0];
    assert_eq!(step.undone, Some(UndoEnd::Undone));
    assert_eq!(step.outcome, Some(StepOutcome::Happened(encoded(&1_u32))));

    hand.again(&log);
    // The last try of the undo can no longer take effect.
    hand.now = hand.now.after(300 * SECOND);
    hand.decide(&SagaDecision::DidNotHappen { force: false });
    assert!(matches!(hand.next(), Effect::Undo(_)));
}

#[test]
fn a_map_in_another_order_is_the_same_argument() {
    let mut saga = Saga::define("maps", 1, ());
    let quote = async |_: StepContext<()>, _: HashMap<String, u32>| {
        Err::<u32, _>(StepError::<String>::not_sent("not called"))
    };
    let quote = saga.again("quote", quote).no_undo();
    let charge = saga.again("charge", step).no_undo();
    let saga = saga.flow(move |op, items: HashMap<String, u32>| async move {
        let cents = op.run(quote, items).await?;
        op.run(charge, cents).await
    });
    let saga = saga.unwrap();
    let items = (0..8).map(|n| (format!("article-{n}"), n)).collect();
    let mut hand = Hand::new(&saga, items);
    assert!(matches!(hand.next(), Effect::Call(_)));
    hand.resume(happened(1));
    let log = hand.log().clone();
    for _ in 0..8 {
        hand.again(&log);
        let Effect::Call(call) = hand.next() else { panic!("{:?}", hand.log().stuck) };
        assert_eq!(call.step, 1);
    }
    // Another one is not.
    hand.input.insert("article-0".to_owned(), 1);
    hand.again(&log);
    assert_eq!(hand.next(), Effect::Park);
    assert_eq!(hand.stuck().0, StuckReason::Diverged);
}
