//! The driver of one saga in a rehearsal: it saves the log in memory, and waits for nothing.

use std::collections::BTreeMap;
use std::future::poll_fn;
use std::time::Duration;

use bytes::Bytes;
use hapax_core::{
    Entropy, EntropyError, EntryId, FencingToken, Key, Namespace, OperationId, Scope, Timestamp,
    Verdict,
};
use tokio::time::timeout;

use super::{RehearsalFinding, RehearsalFindingKind};
use crate::call::{CallContext, CallTries, Replacement};
use crate::definition::Definition;
use crate::log::{Blob, Direction, Failure, Log, LogTime, StepLog, StepOutcome, StuckReason};
use crate::note::{is_pause, step_key};
use crate::run::{Call, Effect, Kind, Run, RunEvent, SagaEnd, TryEnd, UndoFailure};

/// The greatest number of effects of a saga.
const MAX_EFFECTS: u32 = 100_000;

/// Time for which a flow may wait for something that is no step.
const FLOW_TIMEOUT: Duration = Duration::from_secs(60);

/// A time in 2026, so that fences are as large as in production.
const BEGIN: u64 = 1_790_000_000_000_000;

/// The end of a part of a saga.
pub(super) enum Played {
    /// The saga has ended.
    Ended(SagaEnd),
    /// The flow returned an error, and nothing is undone yet.
    Failed,
    /// The process died just before the call of the chosen step.
    Stopped,
}

/// One saga.
pub(super) struct Stage<'a> {
    definition: &'a Definition,
    input: Bytes,
    signals: &'a BTreeMap<String, Blob>,
    id: OperationId,
    /// The saved log.
    log: Log,
    attempt: u32,
    now: LogTime,
    findings: &'a mut Vec<RehearsalFinding>,
}

impl<'a> Stage<'a> {
    pub(super) fn new(
        definition: &'a Definition,
        input: Bytes,
        signals: &'a BTreeMap<String, Blob>,
        number: u64,
        findings: &'a mut Vec<RehearsalFinding>,
    ) -> Self {
        let now = LogTime::from(Timestamp::from_micros(BEGIN));
        let log = definition.new_log(EntryId::from_bytes([0; 16]), now);
        Self { definition, input, signals, id: id(number), log, attempt: 0, now, findings }
    }

    /// Returns the steps so far, without pauses.
    pub(super) fn steps(&self) -> Vec<StepLog> {
        self.log.steps.iter().filter(|step| !is_pause(&step.name)).cloned().collect()
    }

    /// Runs the flow to its end, or until just before the call of `stop`. `None` if a finding ended
    /// it.
    pub(super) async fn forward(&mut self, stop: Option<(&str, u32)>) -> Option<Played> {
        let played = self.play(stop).await?;
        if let Played::Ended(SagaEnd::Done(output)) = &played {
            // Once more from the top: the same output.
            let again = self.play(None).await?;
            if !matches!(&again, Played::Ended(SagaEnd::Done(other)) if other == output) {
                let detail = "expected the same output of the resumed flow, found another: make a step of everything that may differ between two runs";
                self.find(RehearsalFindingKind::Diverged, None, detail.to_owned());
                return None;
            }
        }
        Some(played)
    }

    /// Undoes everything. `None` if a finding ended it.
    pub(super) async fn back(&mut self) -> Option<SagaEnd> {
        let reason = || Failure::Cancelled { reason: "rehearsal".to_owned() };
        self.log.failure.get_or_insert_with(reason);
        match self.play(None).await? {
            Played::Ended(end) => Some(end),
            Played::Failed | Played::Stopped => None,
        }
    }

    /// Makes the outcome of every step that happened unknown.
    pub(super) fn forget_outcomes(&mut self) {
        for step in &mut self.log.steps {
            if matches!(step.outcome, Some(StepOutcome::Happened(_))) {
                step.outcome = None;
                step.forward.arrived = true;
                // The reconcile function would find them.
                step.forward.checks = u32::MAX;
            }
        }
    }

    async fn play(&mut self, stop: Option<(&str, u32)>) -> Option<Played> {
        let was_failed = self.log.failure.is_some();
        let mut run = self.resume();
        for _ in 0..MAX_EFFECTS {
            let next = timeout(FLOW_TIMEOUT, poll_fn(|cx| run.advance(cx, self.now)));
            let Ok(effect) = next.await else { break };
            if !was_failed && run.log().failure.is_some() {
                self.save(&run);
                return Some(Played::Failed);
            }
            let event = match effect {
                Effect::Save => {
                    self.save(&run);
                    RunEvent::Saved(None)
                }
                Effect::Wait(until) => {
                    self.now = self.now.max(until);
                    continue;
                }
                Effect::Park => {
                    self.save(&run);
                    self.now = self.now.max(self.log.parked.as_ref()?.until);
                    if self.log.stuck.is_some() {
                        self.stuck();
                        return None;
                    }
                    run = self.resume();
                    continue;
                }
                Effect::Complete(end) => return Some(Played::Ended(end)),
                Effect::Look(name) => RunEvent::Signal(self.signals.get(&name).cloned()),
                Effect::LookForCancellation => RunEvent::Cancelled(None),
                Effect::Prepare(call) => {
                    let step = run.log().steps[call.step].clone();
                    RunEvent::Prepared(self.prepare(call, &step).await?)
                }
                Effect::Call(call) => {
                    let step = &run.log().steps[call.step];
                    if stop == Some((&step.name, step.nth)) {
                        self.save(&run);
                        return Some(Played::Stopped);
                    }
                    RunEvent::Called(self.call(call, step.clone()).await?)
                }
                Effect::Undo(call) => {
                    let step = run.log().steps[call.step].clone();
                    RunEvent::Undone(self.undo(call, step).await?)
                }
                Effect::Reconcile(call) => {
                    let step = run.log().steps[call.step].clone();
                    RunEvent::Reconciled(self.reconcile(call, step).await?)
                }
            };
            let before = ended(run.log());
            run.resume(event, self.now, &Halves);
            if ended(run.log()) > before {
                // The process dies after it has saved the log.
                self.save(&run);
                run = self.resume();
            }
        }
        let detail = "expected the end of the saga, found a flow that waits longer than 60 s for something that is not a step, or more than 100,000 effects: make a step of it, or end the loop";
        self.find(RehearsalFindingKind::Endless, None, detail.to_owned());
        None
    }

    /// Calls a step, twice if it may be repeated.
    async fn call(&mut self, call: Call, step: StepLog) -> Option<TryEnd> {
        let kind = self.definition.terms.steps.get(step.name.as_str())?.kind;
        if kind == Kind::Within {
            let name = &step.name;
            let detail = format!(
                "expected steps that a rehearsal can call, found `{name}` of the kind `within`: test this saga on its store"
            );
            self.find(RehearsalFindingKind::NoDatabase, Some(name), detail);
            return None;
        }
        let first = self.call_once(call, &step).await?;
        let is_decided = matches!(first, TryEnd::Happened(_) | TryEnd::Rejected(_));
        if !is_decided || kind == Kind::Once {
            return Some(first);
        }
        let again = Call { number: call.number.saturating_add(1), ..call };
        let second = self.call_once(again, &step).await?;
        if second != first && matches!(kind, Kind::Keyed { .. }) {
            let name = &step.name;
            let detail = format!(
                "expected a repeated call of `{name}` under its key to {}, found that it {}: return the first result",
                word(&first, false),
                word(&second, true),
            );
            self.find(RehearsalFindingKind::OtherResult, Some(name), detail);
        }
        Some(first)
    }

    async fn prepare(&self, call: Call, step: &StepLog) -> Option<Result<Blob, TryEnd>> {
        let functions = self.definition.functions.get(step.name.as_str())?;
        let prepare = functions.prepare.as_ref()?;
        Some(prepare(self.context(call, step), step.argument.0.clone()).await)
    }

    async fn call_once(&self, call: Call, step: &StepLog) -> Option<TryEnd> {
        let functions = self.definition.functions.get(step.name.as_str())?;
        let called = (functions.call)(self.context(call, step), step.argument.0.clone());
        let late = |_| TryEnd::Unknown(format!("no result within {:?}", call.timeout));
        Some(timeout(call.timeout, called).await.unwrap_or_else(late))
    }

    /// Calls an undo twice, and if the outcome is known, once more as if it were unknown.
    async fn undo(&mut self, call: Call, step: StepLog) -> Option<Result<(), UndoFailure>> {
        let known = match &step.outcome {
            Some(StepOutcome::Happened(result)) => Some(result.0.clone()),
            Some(StepOutcome::Rejected(_)) | None => None,
        };
        let first = self.undo_once(call, &step, known.clone()).await?;
        if first.is_err() {
            return Some(first);
        }
        let again = Call { number: call.number.saturating_add(1), ..call };
        let name = &step.name;
        if let Err(error) = self.undo_once(again, &step, known.clone()).await? {
            let detail = format!(
                "expected the undo of `{name}` to succeed again, found: {}: nothing is left to undo",
                text(&error)
            );
            self.find(RehearsalFindingKind::RepeatedUndo, Some(name), detail);
        } else if known.is_some()
            && let Err(error) = self.undo_once(again, &step, None).await?
        {
            let detail = format!(
                "expected the undo of `{name}` to succeed as `StepEffect::Unknown` when it is undone, found: {}",
                text(&error)
            );
            self.find(RehearsalFindingKind::UnknownUndo, Some(name), detail);
        }
        Some(first)
    }

    async fn undo_once(
        &self,
        call: Call,
        step: &StepLog,
        known: Option<Bytes>,
    ) -> Option<Result<(), UndoFailure>> {
        let functions = self.definition.functions.get(step.name.as_str())?;
        let undo = functions.undo.as_ref()?;
        let undone = undo(self.context(call, step), step.argument.0.clone(), known);
        let late = |_| Err(UndoFailure::Error(format!("no result within {:?}", call.timeout)));
        Some(timeout(call.timeout, undone).await.unwrap_or_else(late))
    }

    async fn reconcile(&mut self, call: Call, step: StepLog) -> Option<Verdict<Blob>> {
        let functions = self.definition.functions.get(step.name.as_str())?;
        let reconcile = functions.reconcile.as_ref()?;
        let call = Call { direction: Direction::Forward, ..call };
        let asked = reconcile(self.context(call, &step), step.argument.0.clone());
        let verdict = timeout(call.timeout, asked).await.unwrap_or(Verdict::CannotSay);
        // Only the step before which the process died is reconciled on the way back.
        if self.log.failure.is_some() && matches!(verdict, Verdict::Happened(_)) {
            let name = &step.name;
            let detail = format!(
                "expected `DidNotHappen` or `CannotSay` of the reconcile function of `{name}`, which was never called, found `Happened`"
            );
            self.find(RehearsalFindingKind::Reconciled, Some(name), detail);
        }
        Some(verdict)
    }

    fn context(&self, call: Call, step: &StepLog) -> CallContext {
        let key = step_key(&self.id, call.direction, &step.name, step.nth);
        let fence = FencingToken::new(BEGIN + u64::from(self.attempt));
        let tries = CallTries::new(step.tries(call.direction), call.number, self.now);
        let (input, tx, replacement) = (self.input.clone(), None, Replacement::default());
        CallContext { key, fence, id: self.id, input, tries, tx, replacement }
    }

    fn save(&mut self, run: &Run) {
        self.log = run.log().clone();
    }

    /// Continues by the saved log, as another process does.
    fn resume(&mut self) -> Run {
        let log = self.log.encode().and_then(|log| Log::decode(&log));
        self.attempt = self.attempt.saturating_add(1);
        // A log that cannot be encoded is too large; the run finds that too.
        let log = log.unwrap_or_else(|_| self.log.clone());
        self.definition.run(log, self.attempt, self.input.clone())
    }

    fn stuck(&mut self) {
        let Some(stuck) = self.log.stuck.clone() else { return };
        let fault = match stuck.reason {
            StuckReason::Diverged => RehearsalFindingKind::Diverged,
            _ => RehearsalFindingKind::Stuck,
        };
        let name = stuck.step.and_then(|step| self.log.steps.get(step)).map(|it| it.name.clone());
        self.find(fault, name.as_deref(), stuck.detail);
    }

    fn find(&mut self, fault: RehearsalFindingKind, step: Option<&str>, detail: String) {
        let is_known = |it: &RehearsalFinding| it.fault == fault && it.step.as_deref() == step;
        if !self.findings.iter().any(is_known) {
            self.findings.push(RehearsalFinding { fault, step: step.map(str::to_owned), detail });
        }
    }
}

/// Returns the number of steps that have ended, and of those that are undone.
fn ended(log: &Log) -> usize {
    let ended =
        |step: &StepLog| usize::from(step.outcome.is_some()) + usize::from(step.undone.is_some());
    log.steps.iter().map(ended).sum()
}

fn word(end: &TryEnd, found: bool) -> &'static str {
    match (end, found) {
        (TryEnd::Happened(_), false) => "return the first result",
        (TryEnd::Happened(_), true) => "returned another result",
        (TryEnd::Rejected(_), false) => "be rejected by the first error",
        (TryEnd::Rejected(_), true) => "was rejected, by another error if the first call was too",
        (
            TryEnd::NotSent(_)
            | TryEnd::Unknown(_)
            | TryEnd::RetryAfter(..)
            | TryEnd::Postponed(..),
            _,
        ) => "ended without a result",
        (TryEnd::Faulted(_) | TryEnd::Lost(_), _) => "has a result that cannot be stored",
    }
}

fn text(failure: &UndoFailure) -> &str {
    match failure {
        UndoFailure::Error(error) => error,
        UndoFailure::Faulted(fault) => &fault.detail,
    }
}

#[allow(clippy::expect_used, reason = "digits are valid in a key")]
fn id(number: u64) -> OperationId {
    let key = Key::new(number.to_string()).expect("digits are valid in a key");
    OperationId::derive(None, &Namespace::default(), &Scope::of([("rehearsal", "saga")]), &key)
}

/// Entropy that is none: every pause is half of its bound.
#[derive(Debug)]
struct Halves;

impl Entropy for Halves {
    fn fill(&self, bytes: &mut [u8]) -> Result<(), EntropyError> {
        bytes.fill(0x80);
        Ok(())
    }
}
