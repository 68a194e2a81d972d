//! Rehearsal of a saga, for tests: its flow is interrupted everywhere, and all that may be repeated is.
//!
//! A [`Rehearsal`] runs the saga's steps, which call a service's test doubles, without a store, and
//! without waiting: pauses, backoffs and settle times pass at once.
//!
//! 1. The flow is dropped after each step, and resumed from the top by the encoded log.
//! 2. Every `keyed` and `again` step is called twice, under the same key. A `keyed` step must return
//!    the same the second time; an `again` step may return another result, and the first counts.
//! 3. Then everything is undone: each undo is called twice, and a third time as
//!    [`StepEffect::Unknown`](crate::StepEffect::Unknown).
//! 4. In a second saga everything that happened is undone as `StepEffect::Unknown`, each undo twice.
//! 5. In one more saga for each step that has an undo, the process dies just before that step is
//!    called: its undo gets `StepEffect::Unknown`, or its reconcile function is called, for something that
//!    never happened.
//! 6. In the last saga the flow runs as in 1 and 2. Its effects stay, and its end is the
//!    [outcome](RehearsalReport::outcome).
//!
//! Each of these sagas has its own operation id, so the keys of its steps differ. A step that sends
//! another name than its key to a system finds the undone effects of the earlier sagas there.
//!
//! *Not rehearsed*: steps at the same time; whether a late call under a key has no effect after its
//! undo, which [`StepEffect`](crate::StepEffect) requires; the limits of the log; the store, and steps
//! of the kind `within`, whose transactions need it.
//!
//! ```
//! use hapax_saga::rehearsal::{RehearsalFindingKind, rehearse};
//! use hapax_saga::{StepContext, Saga, StepError};
//!
//! async fn charge(_: StepContext<()>, cents: u64) -> Result<u64, StepError<String>> {
//!     Ok(cents)
//! }
//!
//! # fn random() -> u64 { use std::sync::atomic::{AtomicU64, Ordering}; static LAST: AtomicU64 = AtomicU64::new(0); LAST.fetch_add(1, Ordering::Relaxed) }
//! # #[tokio::main(flavor = "current_thread")]
//! # async fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let mut order = Saga::define("order", 1, ());
//! let charge = order.again("charge", charge).no_undo();
//! // Not a step, so that it differs when the flow is resumed.
//! let order = order.flow(move |op, cents: u64| async move { op.run(charge, cents + random()).await })?;
//! let report = rehearse(&order, &1999).await;
//! assert_eq!(report.findings[0].fault, RehearsalFindingKind::Diverged);
//! # Ok(())
//! # }
//! ```

mod stage;

use std::collections::BTreeMap;
use std::fmt;

use bytes::Bytes;
use hapax_core::value::{self, ValueError};
use serde::Serialize;
use serde::de::DeserializeOwned;

use self::stage::{Played, Stage};
use crate::Saga;
use crate::log::{Blob, Failure, StepLog};
use crate::run::SagaEnd;

/// The greatest number of steps whose undo is rehearsed for a step that was never called.
const MAX_UNCALLED: usize = 64;

/// Rehearses a saga without signals: see [`Rehearsal`].
pub async fn rehearse<I, O, E>(saga: &Saga<I, O, E>, input: &I) -> RehearsalReport<O, E>
where
    I: Serialize,
    O: DeserializeOwned,
    E: DeserializeOwned,
{
    Rehearsal::new(saga).run(input).await
}

/// A rehearsal of a saga, with the signals that it receives.
pub struct Rehearsal<'a, I, O, E> {
    saga: &'a Saga<I, O, E>,
    signals: BTreeMap<String, Blob>,
}

impl<I, O, E> fmt::Debug for Rehearsal<'_, I, O, E> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Rehearsal").field(&self.saga.definition).finish()
    }
}

impl<'a, I, O, E> Rehearsal<'a, I, O, E>
where
    I: Serialize,
    O: DeserializeOwned,
    E: DeserializeOwned,
{
    /// Creates the rehearsal. A signal that is not [set](Self::signal) does not arrive in time.
    #[must_use]
    pub const fn new(saga: &'a Saga<I, O, E>) -> Self {
        Self { saga, signals: BTreeMap::new() }
    }

    /// Sets the value of a signal, which has arrived when the flow waits for it.
    ///
    /// # Errors
    /// [`ValueError`] if the value is larger than 64 KiB or cannot be serialized.
    pub fn signal<T: Serialize>(mut self, name: &str, signal: &T) -> Result<Self, ValueError> {
        self.signals.insert(name.to_owned(), Blob(value::write(signal, 64 << 10)?));
        Ok(self)
    }

    /// Runs the rehearsal. A step that panics makes this panic.
    pub async fn run(self, input: &I) -> RehearsalReport<O, E> {
        let mut report = RehearsalReport { outcome: None, findings: Vec::new(), steps: Vec::new() };
        let input = match value::write(input, hapax_core::schedule::MAX_NOTE) {
            Ok(input) => input,
            Err(error) => {
                let detail = format!("expected an input that can be serialized, found: {error}");
                report.add(RehearsalFindingKind::Stuck, None, detail);
                return report;
            }
        };
        let mut first = self.stage(1, &input, &mut report.findings);
        let Some(_) = first.forward(None).await else { return report };
        let steps = first.steps();
        first.back().await;
        report.steps = steps.iter().map(RehearsedStep::of).collect();

        let mut unknown = self.stage(2, &input, &mut report.findings);
        if unknown.forward(None).await.is_some() {
            unknown.forget_outcomes();
            unknown.back().await;
        }
        let undoable = steps.iter().filter(|step| self.has_undo(step)).take(MAX_UNCALLED);
        for (step, number) in undoable.zip(3..) {
            let mut uncalled = self.stage(number, &input, &mut report.findings);
            if let Some(Played::Stopped) = uncalled.forward(Some((&step.name, step.nth))).await {
                uncalled.back().await;
            }
        }
        let mut last = self.stage(u64::MAX, &input, &mut report.findings);
        let end = match last.forward(None).await {
            Some(Played::Ended(end)) => Some(end),
            Some(Played::Failed) => last.back().await,
            Some(Played::Stopped) | None => None,
        };
        report.outcome = end.and_then(outcome);
        report
    }

    fn stage<'s>(
        &'s self,
        number: u64,
        input: &Bytes,
        findings: &'s mut Vec<RehearsalFinding>,
    ) -> Stage<'s> {
        Stage::new(&self.saga.definition, input.clone(), &self.signals, number, findings)
    }

    fn has_undo(&self, step: &StepLog) -> bool {
        let terms = self.saga.definition.terms.steps.get(step.name.as_str());
        terms.is_some_and(|terms| terms.has_undo)
    }
}

fn outcome<O: DeserializeOwned, E: DeserializeOwned>(end: SagaEnd) -> Option<Result<O, E>> {
    match end {
        SagaEnd::Done(output) => value::read(&output.0).ok().map(Ok),
        SagaEnd::Undone(Failure::Error(error)) => value::read(&error.0).ok().map(Err),
        SagaEnd::Undone(Failure::Cancelled { .. }) => None,
    }
}

/// Result of a rehearsal.
#[derive(Clone, PartialEq, Eq, Debug)]
#[must_use = "the findings are here"]
pub struct RehearsalReport<O, E> {
    /// The end of the last saga; `None` if a finding stopped it.
    pub outcome: Option<Result<O, E>>,
    /// The faults, each once for a step.
    pub findings: Vec<RehearsalFinding>,
    /// The steps of the first saga, in the order of their requests, without pauses.
    pub steps: Vec<RehearsedStep>,
}

impl<O, E> RehearsalReport<O, E> {
    /// Returns the outcome of a rehearsal without findings.
    ///
    /// # Errors
    /// [`RehearsalError`] with the findings.
    pub fn into_outcome(self) -> Result<Result<O, E>, RehearsalError> {
        match self.outcome {
            Some(outcome) if self.findings.is_empty() => Ok(outcome),
            _ => Err(RehearsalError { findings: self.findings }),
        }
    }

    fn add(&mut self, fault: RehearsalFindingKind, step: Option<String>, detail: String) {
        self.findings.push(RehearsalFinding { fault, step, detail });
    }
}

/// A step of a rehearsed saga.
#[derive(Clone, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub struct RehearsedStep {
    /// Its name.
    pub name: String,
    /// Its number among the requests of this name.
    pub nth: u32,
    /// True if it happened, false if it was rejected.
    pub happened: bool,
}

impl RehearsedStep {
    fn of(step: &StepLog) -> Self {
        let happened = matches!(step.outcome, Some(crate::log::StepOutcome::Happened(_)));
        Self { name: step.name.clone(), nth: step.nth, happened }
    }
}

/// A fault that a rehearsal found.
#[derive(Clone, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub struct RehearsalFinding {
    /// The fault.
    pub fault: RehearsalFindingKind,
    /// The name of the step, if it is one of a step.
    pub step: Option<String>,
    /// The sentence: expected, found, and what to do.
    pub detail: String,
}

impl fmt::Display for RehearsalFinding {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.detail)
    }
}

/// Kinds of findings.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
#[non_exhaustive]
pub enum RehearsalFindingKind {
    /// The resumed flow requests other steps or arguments, or returns another output: something outside
    /// of a step differs between two runs, such as a time, a random value or a look-up.
    Diverged,
    /// The saga is stuck.
    Stuck,
    /// A repeated call of a `keyed` step ended otherwise than the first.
    OtherResult,
    /// A repeated undo failed.
    RepeatedUndo,
    /// An undo as [`StepEffect::Unknown`](crate::StepEffect::Unknown) failed after the step was undone.
    UnknownUndo,
    /// The reconcile function found that a step happened that was never called.
    Reconciled,
    /// A step is of the kind `within`: its transaction needs the store.
    NoDatabase,
    /// The flow waits for something that is no step, or the saga does not end.
    Endless,
}

/// A rehearsal with findings.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct RehearsalError {
    /// The findings.
    pub findings: Vec<RehearsalFinding>,
}

impl fmt::Display for RehearsalError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "expected a rehearsal without findings, found {}", self.findings.len())?;
        self.findings.iter().try_for_each(|finding| write!(f, "; {finding}"))
    }
}

impl std::error::Error for RehearsalError {}
