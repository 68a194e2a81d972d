//! Sagas as operators see them.
//!
//! A list has no contents. A single saga has the results and rejections of its steps, as a single
//! record has its response; of an argument, as of a request, only the size.

use std::fmt;
use std::time::Duration;

use bytes::Bytes;
use hapax_core::schedule::{EntryKey, QueueName, QueueStatus};
use hapax_core::{Key, OperationId, Timestamp, value};
use hapax_saga::log::{Blob, Direction, Failure, Log, LoggedDecision, StepLog, StepOutcome, Tries};
use hapax_saga::{EndedSaga, EndedStep, SagaView, UnacceptedStart};
use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::decide::KEY_REUSED;
use super::id::{SagaId, seen};
use crate::keys::{OperationDescription, rfc3339};

/// Time for which an entry has to be due before its saga counts as overdue: every process with the
/// definition looks at what is due each second.
const OVERDUE: Duration = Duration::from_secs(10 * 60);

/// The detail of a rejected start.
const REJECTED: &str = "expected a free key for a saga that was started in a transaction, found a saga with another input: it never runs; the other saga may have happened: compare both inputs; if this one is another operation, start it under a key of its own; then `abort` removes it";

/// The state of a saga, for operators.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum SagaStateView {
    /// A process runs it, or will once the lease of one that died lapses.
    Running,
    /// Sleeping, or waiting for a signal or the next try: no process runs it.
    Parked,
    /// Due for more than 10 minutes: no process with its definition runs, or all are at their limit.
    Overdue,
    /// An operator has to decide.
    Stuck,
    /// Done, or undone.
    Ended,
}

impl SagaStateView {
    /// Returns the name of the state in the API.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Running => "running",
            Self::Parked => "parked",
            Self::Overdue => "overdue",
            Self::Stuck => "stuck",
            Self::Ended => "ended",
        }
    }
}

impl fmt::Display for SagaStateView {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

/// A saga in a list.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct SagaSummary {
    /// Its operation id: 64 hexadecimal digits. That of a rejected start is followed by a hyphen and the
    /// 32 digits of its entry, since its key belongs to another saga.
    pub id: String,
    /// Name of its definition; `None` of a saga that has ended.
    pub definition: Option<String>,
    /// Version of its definition.
    pub version: Option<u32>,
    /// The key under which it was started; only where a secret seals, and `None` before its start is
    /// accepted.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub key: Option<String>,
    /// Its state. A stuck saga may be overdue as well.
    pub state: SagaStateView,
    /// True if it has been due for more than 10 minutes.
    pub overdue: bool,
    /// True once the compensation has begun.
    pub compensating: bool,
    /// When it was started, RFC 3339, like all times here; `None` before its first step.
    pub started: Option<String>,
    /// When its entry in the schedule is due.
    pub due: Option<String>,
    /// Executions so far.
    pub attempt: u32,
    /// The reason for which an operator has to decide.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub stuck: Option<StuckView>,
    /// Time at which a parked saga continues, unless its signal or a cancellation arrives earlier.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub parked_until: Option<String>,
    /// Name of the signal that a parked saga waits for.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub signal: Option<String>,
}

/// The reason for which a saga is stuck.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct StuckView {
    /// The reason, such as `exhausted`, `unknown` or `diverged`; `key-reused` of a rejected start.
    pub reason: String,
    /// Name of the step.
    pub step: Option<String>,
    /// Number of the step among the requests of its name, from 0.
    pub nth: Option<u32>,
    /// `forward` or `undo`.
    pub direction: String,
    /// Sentence that says what was expected, what was found, and what to do.
    pub detail: String,
    /// Time at which it became stuck.
    pub since: String,
    /// Time from which a try of the step no longer takes effect, if that is later than now. A system may work
    /// on after its caller has gone.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub may_execute_until: Option<String>,
}

/// A saga with its steps and decisions.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct SagaDetails {
    /// The saga.
    #[serde(flatten)]
    pub summary: SagaSummary,
    /// Write id of its record, 32 hexadecimal digits: a decision names it, and counts only while the
    /// record has it. Of a start that no process has accepted, the id of its entry; `None` of a saga that
    /// has ended.
    pub write_id: Option<String>,
    /// The store's clock.
    pub now: Option<String>,
    /// End of the present lease.
    pub lease_until: Option<String>,
    /// `done` or `undone`; `None` of an unfinished saga.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub end: Option<String>,
    /// Why its steps are or were undone: `error`, or the reason of a cancellation.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub failure: Option<String>,
    /// The steps that its flow requested, in order.
    pub steps: Vec<SagaStepView>,
    /// Decisions of operators, in order.
    pub decisions: Vec<SagaDecisionView>,
}

/// Outcome of a step, as far as it is known.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum StepOutcomeView {
    /// The step happened.
    Happened,
    /// The step was rejected, and has no effect.
    Rejected,
    /// The step may have happened.
    Unknown,
    /// No try of it was sent.
    NotSent,
}

impl StepOutcomeView {
    /// Returns the name of the outcome in the API.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Happened => "happened",
            Self::Rejected => "rejected",
            Self::Unknown => "unknown",
            Self::NotSent => "not-sent",
        }
    }
}

/// A step of a saga.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct SagaStepView {
    /// Its name.
    pub name: String,
    /// Its number among the requests of its name, from 0.
    pub nth: u32,
    /// Its outcome, as far as it is known.
    pub outcome: StepOutcomeView,
    /// The tries to run it.
    pub forward: TriesView,
    /// Bytes of its argument; `None` of a saga that has ended.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub argument_bytes: Option<usize>,
    /// Bytes of its result, or of its rejection.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub result_bytes: Option<usize>,
    /// Its result or its rejection, if JSON can express it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub result: Option<Value>,
    /// The tries to undo it; `None` if there was none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub undo: Option<TriesView>,
    /// End of its undo: `undone`; `nothing`, if the step did not happen or has no undo; or `skipped` by an
    /// operator.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub undone: Option<String>,
}

/// The tries of a step in one direction, since an operator granted new ones.
#[derive(Clone, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
pub struct TriesView {
    /// The key of its calls, which the called system has seen; `None` of a pause.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub key: Option<String>,
    /// Tries that began.
    pub tries: u32,
    /// True while one is in progress, or its process has died.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub open: bool,
    /// Time until which the last one was in progress: its end, or the takeover from its process; its
    /// begin while it is in progress, and for an undo.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub last: Option<String>,
    /// Time before which there is no further one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub retry_at: Option<String>,
    /// Text of the last error.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub error: Option<String>,
}

/// A decision of an operator about a saga.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct SagaDecisionView {
    /// The time.
    pub at: String,
    /// The operator.
    pub who: String,
    /// The decision, such as `retry` or `resolve happened`.
    pub action: String,
    /// The reason.
    pub why: String,
}

/// The unfinished sagas of one definition.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct DefinitionView {
    /// Its name.
    pub definition: String,
    /// Its version.
    pub version: u32,
    /// Number of its entries in the schedule, one for each unfinished saga. An entry may be left
    /// behind by one that has ended, until a process with the definition looks at it.
    pub unfinished: u64,
    /// Seconds for which the first entry has been due; zero if none is.
    pub due_for_s: u64,
    /// True if that is more than 10 minutes: no process with the definition runs, or all are at their
    /// limit.
    pub overdue: bool,
}

impl DefinitionView {
    /// Returns the view of a queue; `None` if it is not of sagas.
    pub(super) fn of(status: &QueueStatus) -> Option<Self> {
        let (definition, version, is_rejected) = UnacceptedStart::parse_queue(&status.queue)?;
        (!is_rejected).then(|| Self {
            definition: definition.to_owned(),
            version,
            unfinished: status.entries,
            due_for_s: status.overdue.as_secs(),
            overdue: status.overdue > OVERDUE,
        })
    }
}

/// Returns name and version of the definition to which a queue belongs.
fn definition(queue: &QueueName) -> Option<(&str, u32)> {
    UnacceptedStart::parse_queue(queue).map(|(name, version, _)| (name, version))
}

/// An entry of the schedule, without its note.
#[derive(Clone, Copy, Debug)]
pub(super) struct Scheduled<'a> {
    pub(super) queue: &'a QueueName,
    pub(super) due: Timestamp,
}

impl Scheduled<'_> {
    pub(super) fn is_overdue(&self, now: Timestamp) -> bool {
        now.since(self.due) > OVERDUE
    }
}

impl SagaSummary {
    /// Returns the view of a saga of which only the id and the state are known.
    fn none(id: String, state: SagaStateView) -> Self {
        Self {
            id,
            definition: None,
            version: None,
            key: None,
            state,
            overdue: false,
            compensating: false,
            started: None,
            due: None,
            attempt: 0,
            stuck: None,
            parked_until: None,
            signal: None,
        }
    }

    /// Returns the view of a start that has no record yet, without its definition.
    fn unaccepted(id: String, state: SagaStateView, due: Timestamp) -> Self {
        let overdue = state == SagaStateView::Overdue;
        Self { overdue, due: Some(rfc3339(due)), ..Self::none(id, state) }
    }

    /// Returns the view of a rejected start, without its definition.
    fn rejected(key: EntryKey, since: Timestamp) -> Self {
        let stuck = StuckView {
            reason: KEY_REUSED.to_owned(),
            step: None,
            nth: None,
            direction: Direction::Forward.as_str().to_owned(),
            detail: REJECTED.to_owned(),
            since: rfc3339(since),
            may_execute_until: None,
        };
        let id = SagaId::of_rejected(key).to_string();
        Self { stuck: Some(stuck), ..Self::none(id, SagaStateView::Stuck) }
    }

    /// Returns the view of an unfinished saga and its entry, if that exists.
    pub(super) fn of(saga: &SagaView, entry: Option<Scheduled<'_>>) -> Self {
        let log = saga.log.as_ref();
        // Before the first save only the entry names the definition.
        let queue = entry.and_then(|entry| definition(entry.queue));
        let overdue = entry.is_some_and(|entry| entry.is_overdue(saga.now));
        let stuck = log.and_then(|log| Some((log, log.stuck.as_ref()?)));
        // A process that took the saga over has not saved the log yet.
        let is_parked = |log: &&Log| log.attempt == saga.attempt || saga.lease_until <= saga.now;
        let parked = log.filter(is_parked).and_then(|log| log.parked.as_ref());
        let parked = parked.filter(|_| stuck.is_none());
        let state = match (stuck, overdue, parked) {
            (Some(_), _, _) => SagaStateView::Stuck,
            (None, true, _) => SagaStateView::Overdue,
            (None, false, Some(_)) => SagaStateView::Parked,
            (None, false, None) => SagaStateView::Running,
        };
        Self {
            id: saga.id.to_string(),
            definition: log
                .map(|log| log.definition.clone())
                .or_else(|| queue.map(|(name, _)| name.to_owned())),
            version: log.map(|log| log.version).or_else(|| queue.map(|(_, version)| version)),
            key: started_key(saga.description.as_ref()),
            state,
            overdue,
            compensating: log.is_some_and(|log| log.failure.is_some()),
            started: log.map(|log| time(log.started)),
            due: entry.map(|entry| rfc3339(entry.due)),
            attempt: saga.attempt,
            stuck: stuck.map(|(log, stuck)| StuckView::of(log, stuck, saga.now)),
            parked_until: parked.map(|parked| time(parked.until)),
            signal: parked.and_then(|parked| parked.signal.clone()),
        }
    }
}

impl StuckView {
    fn of(log: &Log, stuck: &hapax_saga::log::Stuck, now: Timestamp) -> Self {
        let until = stuck.may_take_effect_until().map(Timestamp::from);
        let step = stuck.step.and_then(|step| log.steps.get(step));
        Self {
            reason: stuck.reason.as_str().to_owned(),
            step: step.map(|step| step.name.clone()),
            nth: step.map(|step| step.nth),
            direction: stuck.direction.as_str().to_owned(),
            detail: stuck.detail.clone(),
            since: time(stuck.since),
            may_execute_until: until.filter(|until| now < *until).map(rfc3339),
        }
    }
}

impl SagaDetails {
    /// Returns the view of an unfinished saga and its entry, if that exists.
    pub(super) fn of(saga: &SagaView, entry: Option<Scheduled<'_>>) -> Self {
        let log = saga.log.as_ref();
        let steps = log.iter().flat_map(|log| &log.steps);
        let decisions = log.iter().flat_map(|log| &log.decisions);
        let failure = log.and_then(|log| log.failure.as_ref()).map(failure);
        Self {
            summary: SagaSummary::of(saga, entry),
            write_id: Some(crate::hex(saga.write_id.as_bytes())),
            now: Some(rfc3339(saga.now)),
            lease_until: Some(rfc3339(saga.lease_until)),
            end: None,
            failure,
            steps: steps.map(|step| SagaStepView::of(&saga.id, step)).collect(),
            decisions: decisions.map(SagaDecisionView::of).collect(),
        }
    }

    /// Returns the view of a start that no process has accepted.
    pub(super) fn unaccepted(start: &UnacceptedStart) -> Self {
        let overdue = start.now.since(start.due) > OVERDUE;
        let id = SagaId::from(start.key.operation).to_string();
        let summary = match (start.is_rejected, overdue) {
            (true, _) => SagaSummary::rejected(start.key, start.due),
            (false, true) => SagaSummary::unaccepted(id, SagaStateView::Overdue, start.due),
            // A process with its definition accepts it soon.
            (false, false) => SagaSummary::unaccepted(id, SagaStateView::Parked, start.due),
        };
        let definition = Some(start.definition.clone());
        let summary = SagaSummary { definition, version: Some(start.version), ..summary };
        Self {
            summary,
            write_id: Some(crate::hex(seen(start).as_bytes())),
            now: Some(rfc3339(start.now)),
            lease_until: None,
            end: None,
            failure: None,
            steps: Vec::new(),
            decisions: Vec::new(),
        }
    }

    /// Returns the view of a saga that has ended.
    pub(super) fn ended(id: &OperationId, ended: &EndedSaga) -> Self {
        let key = started_key(ended.description.as_ref());
        let summary =
            SagaSummary { key, ..SagaSummary::none(id.to_string(), SagaStateView::Ended) };
        Self {
            summary,
            write_id: None,
            now: None,
            lease_until: None,
            end: Some(if ended.failure.is_none() { "done" } else { "undone" }.to_owned()),
            failure: ended.failure.as_ref().map(failure),
            steps: ended.steps.iter().map(|step| SagaStepView::ended(id, step)).collect(),
            decisions: ended.decisions.iter().map(SagaDecisionView::of).collect(),
        }
    }
}

/// Returns the key in the description of a start.
fn started_key(description: Option<&Bytes>) -> Option<String> {
    let described: OperationDescription = serde_json::from_slice(description?).ok()?;
    Some(described.key).filter(|key| !key.is_empty())
}

/// Returns the text for the reason of a compensation.
fn failure(failure: &Failure) -> String {
    match failure {
        Failure::Error(_) => "error".to_owned(),
        Failure::Cancelled { reason } => reason.clone(),
    }
}

impl SagaStepView {
    fn of(saga: &OperationId, step: &StepLog) -> Self {
        let tries = |direction, tries| TriesView::of(step.key(saga, direction), tries);
        let forward = step.tries(Direction::Forward);
        let (outcome, result) = match &step.outcome {
            Some(StepOutcome::Happened(result)) => (StepOutcomeView::Happened, Some(result)),
            Some(StepOutcome::Rejected(error)) => (StepOutcomeView::Rejected, Some(error)),
            None if forward.open || forward.arrived => (StepOutcomeView::Unknown, None),
            None => (StepOutcomeView::NotSent, None),
        };
        let undo = step.tries(Direction::Undo);
        Self {
            name: step.name.clone(),
            nth: step.nth,
            outcome,
            forward: tries(Direction::Forward, forward),
            argument_bytes: Some(step.argument.0.len()),
            result_bytes: result.map(|result| result.0.len()),
            result: result.and_then(json),
            undo: (*undo != Tries::default()).then(|| tries(Direction::Undo, undo)),
            undone: step.undone.map(|end| end.as_str().to_owned()),
        }
    }

    fn ended(saga: &OperationId, step: &EndedStep) -> Self {
        let tries = |direction, tries| TriesView {
            tries,
            key: step.key(saga, direction).map(|key| key.as_str().to_owned()),
            ..TriesView::default()
        };
        Self {
            name: step.name.clone(),
            nth: step.nth,
            outcome: match step.happened {
                Some(true) => StepOutcomeView::Happened,
                Some(false) => StepOutcomeView::Rejected,
                None => StepOutcomeView::Unknown,
            },
            forward: tries(Direction::Forward, step.tries),
            argument_bytes: None,
            result_bytes: None,
            result: None,
            undo: (step.undo_tries > 0).then(|| tries(Direction::Undo, step.undo_tries)),
            undone: step.undone.map(|end| end.as_str().to_owned()),
        }
    }
}

impl TriesView {
    fn of(key: Option<Key>, tries: &Tries) -> Self {
        Self {
            key: key.map(|key| key.as_str().to_owned()),
            tries: tries.begun,
            open: tries.open,
            last: tries.last.map(time),
            retry_at: tries.retry_at.map(time),
            error: tries.error.clone(),
        }
    }
}

impl SagaDecisionView {
    fn of(decision: &LoggedDecision) -> Self {
        Self {
            at: time(decision.at),
            who: decision.by.clone(),
            action: decision.action.clone(),
            why: decision.reason.clone(),
        }
    }
}

fn time(time: impl Into<Timestamp>) -> String {
    rfc3339(time.into())
}

/// Returns a value as JSON; `None` if JSON cannot express it.
fn json(blob: &Blob) -> Option<Value> {
    value::read(&blob.0).ok()
}
