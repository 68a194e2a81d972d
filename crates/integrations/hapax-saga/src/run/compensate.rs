//! Compensation: the undo of every step that happened or may have happened, in reverse order.

use hapax_core::Entropy;

use super::forward::{detail, is_checked, is_exhausted, is_expired, quiet_from};
use super::{Effect, Kind, Run, SagaEnd, State, StuckCause, UndoFailure};
use crate::log::{Direction, LogTime, StepLog, StepOutcome, StuckReason, UndoEnd};
use crate::note::is_pause;

impl Run {
    /// Decides about the last step that is not undone yet.
    pub(super) fn compensate(&mut self, now: LogTime) -> Option<Effect> {
        let Some(at) = self.log.steps.iter().rposition(|step| self.needs_undo(step)) else {
            self.state = State::Ended;
            return self.log.failure.clone().map(SagaEnd::Undone).map(Effect::Complete);
        };
        let step = &self.log.steps[at];
        let Some(terms) = self.terms_of(at) else {
            let detail = format!(
                "expected the undo of `{}`, found no such step in the definition: restore it, or `skip`",
                step.name
            );
            let fault = StuckCause { reason: StuckReason::NoSuchStep, detail };
            return Some(self.stuck(Some(at), Direction::Undo, fault, now));
        };
        if !terms.has_undo {
            self.log.steps[at].undone = Some(UndoEnd::Nothing);
            self.unsaved = true;
            return None;
        }
        if let Some(until) = step.undo.retry_at.filter(|until| now < *until) {
            return Some(self.wait(until, now));
        }
        // A system without keys executes also a try that arrives after a later one has ended, so that
        // the undo has to wait for all of them.
        // One may be from before an operator granted new tries, from which `since` and `begun` count.
        let is_repeated = terms.kind == Kind::Again
            && (step.forward.begun > 1 || step.forward.first < step.forward.since);
        if (step.outcome.is_none() || is_repeated) && step.undo.begun == 0 {
            let quiet = quiet_from(step, &terms, now);
            if now < quiet {
                return Some(self.wait(quiet, now));
            }
            let is_unknown = step.outcome.is_none();
            if is_unknown && terms.reconciles && !is_checked(&step.forward, &terms.retry, now) {
                return Some(self.reconcile(at, Direction::Undo, terms));
            }
        }
        let age = step.undo.first.map(|first| now.since(first));
        let reason = match terms.kind {
            Kind::Keyed { lifetime } if is_expired(age, lifetime, terms.undo_retry.timeout) => {
                StuckReason::KeyExpired
            }
            _ if is_exhausted(&step.undo, &terms.undo_retry, now) => StuckReason::Exhausted,
            _ => return Some(self.begin_try(at, Direction::Undo, now)),
        };
        let fault = StuckCause { reason, detail: detail(step, Direction::Undo) };
        Some(self.stuck(Some(at), Direction::Undo, fault, now))
    }

    /// Takes the end of an undo.
    pub(super) fn undone(
        &mut self,
        at: usize,
        end: Result<(), UndoFailure>,
        now: LogTime,
        entropy: &dyn Entropy,
    ) {
        let backoff = self.terms_of(at).map(|terms| terms.undo_retry.backoff);
        self.unsaved = true;
        self.log.crashes = 0;
        let step = &mut self.log.steps[at];
        let tries = &mut step.undo;
        tries.unknown();
        match end {
            Ok(()) => step.undone = Some(UndoEnd::Undone),
            Err(UndoFailure::Faulted(fault)) => self.fault = Some((at, Direction::Undo, fault)),
            Err(UndoFailure::Error(error)) => {
                tries.error = Some(error);
                tries.retry_at =
                    backoff.map(|backoff| now.after(backoff.pause(tries.begun, entropy)));
            }
        }
    }

    /// Returns whether a step happened or may have happened, and is not undone.
    pub(super) fn needs_undo(&self, step: &StepLog) -> bool {
        let kind = self.terms.steps.get(step.name.as_str()).map(|terms| terms.kind);
        step.undone.is_none()
            && !is_pause(&step.name)
            && match &step.outcome {
                Some(StepOutcome::Happened(_)) => true,
                // An earlier try may have had an effect, which the rejection of a later one does not
                // exclude: no key connects them. Nor is it known whether one does if the definition does not
                // have the step any more.
                Some(StepOutcome::Rejected(_)) => {
                    kind.is_none_or(|kind| kind == Kind::Again) && step.forward.arrived
                }
                None => step.forward.arrived,
            }
    }
}
