//! Decisions of operators, as changes of a log.

use hapax_saga::log::{Decision, Failure, Log, LogTime, StepOutcome, UndoEnd};

use super::flows::blob;

/// The word for a decision.
pub(crate) struct Decided(pub(crate) &'static str);

/// The error of a step of which an operator knows that it did not happen.
const DID_NOT_HAPPEN: u64 = 3;

/// Lets the saga continue with new tries.
pub(crate) fn retry(log: &mut Log) -> Decided {
    if let Some(stuck) = log.stuck.take()
        && let Some(at) = stuck.step
    {
        let step = &mut log.steps[at];
        for tries in [&mut step.forward, &mut step.undo] {
            tries.begun = 0;
            tries.checks = 0;
            tries.retry_at = None;
        }
    }
    log.crashes = 0;
    Decided("retry")
}

/// Skips the undo that is stuck.
pub(crate) fn skip(log: &mut Log) -> Decided {
    if let Some(stuck) = log.stuck.take()
        && let Some(at) = stuck.step
    {
        log.steps[at].undone = Some(UndoEnd::Skipped);
    }
    log.crashes = 0;
    Decided("skip")
}

/// Begins the compensation.
pub(crate) fn abort(log: &mut Log, reason: &str) -> Decided {
    log.stuck = None;
    log.crashes = 0;
    log.failure.get_or_insert(Failure::Cancelled { reason: reason.to_owned() });
    Decided("abort")
}

/// Gives the step that is stuck its outcome.
pub(crate) fn resolve(log: &mut Log, effect: Option<u64>) -> Decided {
    if let Some(stuck) = log.stuck.take()
        && let Some(at) = stuck.step
    {
        log.steps[at].outcome = Some(match effect {
            Some(effect) => StepOutcome::Happened(blob(effect)),
            None => StepOutcome::Rejected(blob(DID_NOT_HAPPEN)),
        });
    }
    log.crashes = 0;
    Decided("resolve")
}

/// Adds a decision to the log.
pub(crate) fn note(log: &mut Log, action: &str, reason: &str, at: LogTime) {
    log.decisions.push(Decision {
        by: "operator".to_owned(),
        at,
        reason: reason.to_owned(),
        action: action.to_owned(),
    });
}
