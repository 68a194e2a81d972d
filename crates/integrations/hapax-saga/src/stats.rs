//! Counters of the sagas of a process.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use crate::definition::Definition;
use crate::log::{Direction, Stuck};
use crate::run::{RunEvent, TryEnd};

/// Counters of the sagas of a process since its start, by definition and step.
///
/// Sagas that are parked or stuck are in no process: [`SagaOperator::census`](crate::SagaOperator::census)
/// counts those of the store.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
#[non_exhaustive]
pub struct SagaStats {
    /// The definitions, by name and version.
    pub definitions: Vec<DefinitionStats>,
}

/// Counters of a definition.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
#[non_exhaustive]
pub struct DefinitionStats {
    /// Its name.
    pub name: &'static str,
    /// Its version.
    pub version: u32,
    /// Sagas that run now.
    pub running: u64,
    /// Runs that have begun.
    pub runs: u64,
    /// Runs that ended because the saga was parked.
    pub parked: u64,
    /// Sagas that became stuck.
    pub stuck: u64,
    /// Runs that ended because their lease was lost, or may have been.
    pub lost: u64,
    /// Starts in a transaction that were rejected, since their key had another input.
    pub rejected: u64,
    /// Times that a flow waited for a minute for something that is no step.
    pub flow_waits: u64,
    /// Sagas whose flow returned.
    pub done: u64,
    /// Sagas that were undone.
    pub undone: u64,
    /// The steps, by name.
    pub steps: Vec<StepStats>,
}

/// Counters of a step.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
#[non_exhaustive]
pub struct StepStats {
    /// Its name.
    pub name: &'static str,
    /// Calls that are in progress now, in either direction.
    pub running: u64,
    /// Tries.
    pub tries: u64,
    /// Tries that happened.
    pub happened: u64,
    /// Tries that were rejected.
    pub rejected: u64,
    /// Tries that were not sent.
    pub not_sent: u64,
    /// Tries of which it is unknown whether they happened.
    pub unknown: u64,
    /// Tries of its undo.
    pub undo_tries: u64,
    /// Tries of its undo that failed.
    pub undo_failures: u64,
    /// Times that a saga became stuck in it.
    pub stuck: u64,
}

#[derive(Debug)]
pub(crate) struct DefinitionCounters {
    name: &'static str,
    version: u32,
    running: AtomicU64,
    runs: AtomicU64,
    parked: AtomicU64,
    stuck: AtomicU64,
    lost: AtomicU64,
    rejected: AtomicU64,
    flow_waits: AtomicU64,
    done: AtomicU64,
    undone: AtomicU64,
    steps: BTreeMap<&'static str, StepCounters>,
}

#[derive(Debug, Default)]
struct StepCounters {
    running: AtomicU64,
    tries: AtomicU64,
    happened: AtomicU64,
    rejected: AtomicU64,
    not_sent: AtomicU64,
    unknown: AtomicU64,
    undo_tries: AtomicU64,
    undo_failures: AtomicU64,
    stuck: AtomicU64,
}

/// A run or a call in progress, until this is dropped.
pub(crate) struct Running {
    counters: Arc<DefinitionCounters>,
    step: Option<&'static str>,
}

impl Drop for Running {
    fn drop(&mut self) {
        if let Some(running) = self.counters.running(self.step) {
            running.fetch_sub(1, Ordering::Relaxed);
        }
    }
}

impl DefinitionCounters {
    pub(crate) fn new(definition: &Definition) -> Self {
        let steps = definition.terms.steps.keys();
        Self {
            name: definition.name,
            version: definition.version,
            running: AtomicU64::new(0),
            runs: AtomicU64::new(0),
            parked: AtomicU64::new(0),
            stuck: AtomicU64::new(0),
            lost: AtomicU64::new(0),
            rejected: AtomicU64::new(0),
            flow_waits: AtomicU64::new(0),
            done: AtomicU64::new(0),
            undone: AtomicU64::new(0),
            steps: steps.map(|step| (*step, StepCounters::default())).collect(),
        }
    }

    /// Counts a run.
    pub(crate) fn run(self: &Arc<Self>) -> Running {
        add(&self.runs);
        self.enter(None)
    }

    /// Counts a call of a step's function.
    pub(crate) fn call(self: &Arc<Self>, step: &str, direction: Direction) -> Option<Running> {
        let (name, step) = self.steps.get_key_value(step)?;
        add(match direction {
            Direction::Forward => &step.tries,
            Direction::Undo => &step.undo_tries,
        });
        Some(self.enter(Some(name)))
    }

    fn enter(self: &Arc<Self>, step: Option<&'static str>) -> Running {
        if let Some(running) = self.running(step) {
            add(running);
        }
        Running { counters: Arc::clone(self), step }
    }

    fn running(&self, step: Option<&'static str>) -> Option<&AtomicU64> {
        match step {
            Some(step) => self.steps.get(step).map(|step| &step.running),
            None => Some(&self.running),
        }
    }

    /// Counts the end of a call.
    pub(crate) fn called(&self, step: &str, event: &RunEvent) {
        let Some(step) = self.steps.get(step) else { return };
        let counter = match event {
            RunEvent::Called(TryEnd::Happened(_) | TryEnd::Lost(_)) | RunEvent::Committed(_) => {
                &step.happened
            }
            RunEvent::Called(TryEnd::Rejected(_)) => &step.rejected,
            RunEvent::Called(TryEnd::NotSent(_) | TryEnd::Faulted(_) | TryEnd::Postponed(..)) => {
                &step.not_sent
            }
            RunEvent::Called(TryEnd::Unknown(_) | TryEnd::RetryAfter(..)) => &step.unknown,
            RunEvent::Undone(Err(_)) => &step.undo_failures,
            _ => return,
        };
        add(counter);
    }

    pub(crate) fn parked(&self) {
        add(&self.parked);
    }

    /// Counts a saga that became stuck, in this step.
    pub(crate) fn stuck(&self, step: Option<&str>) {
        add(&self.stuck);
        if let Some(step) = step.and_then(|step| self.steps.get(step)) {
            add(&step.stuck);
        }
    }

    pub(crate) fn lost(&self) {
        add(&self.lost);
    }

    pub(crate) fn rejected(&self) {
        add(&self.rejected);
    }

    pub(crate) fn flow_waits(&self) {
        add(&self.flow_waits);
    }

    pub(crate) fn ended(&self, is_done: bool) {
        add(if is_done { &self.done } else { &self.undone });
    }

    pub(crate) fn read(&self) -> DefinitionStats {
        let steps = self.steps.iter().map(|(name, step)| StepStats {
            name,
            running: get(&step.running),
            tries: get(&step.tries),
            happened: get(&step.happened),
            rejected: get(&step.rejected),
            not_sent: get(&step.not_sent),
            unknown: get(&step.unknown),
            undo_tries: get(&step.undo_tries),
            undo_failures: get(&step.undo_failures),
            stuck: get(&step.stuck),
        });
        DefinitionStats {
            name: self.name,
            version: self.version,
            running: get(&self.running),
            runs: get(&self.runs),
            parked: get(&self.parked),
            stuck: get(&self.stuck),
            lost: get(&self.lost),
            rejected: get(&self.rejected),
            flow_waits: get(&self.flow_waits),
            done: get(&self.done),
            undone: get(&self.undone),
            steps: steps.collect(),
        }
    }
}

/// Returns whether a saga became stuck in this run.
pub(crate) fn is_newly_stuck(before: Option<&Stuck>, after: Option<&Stuck>) -> bool {
    after.is_some() && after != before
}

fn add(counter: &AtomicU64) {
    counter.fetch_add(1, Ordering::Relaxed);
}

fn get(counter: &AtomicU64) -> u64 {
    counter.load(Ordering::Relaxed)
}
