//! Requests of the flow: the step of the log that each one means.

use hapax_core::value;

use super::{Effect, Run, State, StuckCause};
use crate::flow::{SIGNAL, StepRequest};
use crate::log::{Direction, LogTime, MAX_STEPS, StepLog, StuckReason};

impl Run {
    /// Returns the fault of a flow that has not requested every logged step.
    pub(super) fn diverged(&self, detail: impl Fn(&str) -> String) -> Option<StuckCause> {
        let (_, step) =
            self.log.steps.iter().enumerate().find(|(at, _)| !self.requested.contains(at))?;
        let name = format!("`{}` number {}", step.name, step.nth);
        Some(StuckCause { reason: StuckReason::Diverged, detail: detail(&name) })
    }

    pub(super) fn request(&mut self, request: StepRequest, now: LogTime) -> Option<Effect> {
        match self.admit(&request, now) {
            Ok(step) if self.log.steps[step].outcome.is_some() => {
                self.answer(step);
                None
            }
            Ok(step) => {
                self.state = State::Forward(step);
                None
            }
            Err(fault) => Some(self.stuck(None, Direction::Forward, fault, now)),
        }
    }

    /// Finds the requested step in the log, or adds it.
    fn admit(&mut self, request: &StepRequest, now: LogTime) -> Result<usize, StuckCause> {
        let StepRequest { name, nth, argument, wait } = request;
        let fault = |reason, detail| Err(StuckCause { reason, detail });
        if wait.is_none() && !self.terms.steps.contains_key(name.as_str()) {
            let detail = format!(
                "expected a step of the definition, found `{name}`: define it, then `retry`, or `abort`"
            );
            return fault(StuckReason::NoSuchStep, detail);
        }
        if name == SIGNAL {
            let detail =
                "expected a name of the signal, found an empty one: correct the flow, then `retry`"
                    .to_owned();
            return fault(StuckReason::NoSuchStep, detail);
        }
        if let Some(at) = self.log.find(name, *nth) {
            if !self.requested.insert(at) {
                let detail = format!(
                    "expected one request of `{name}` number {nth}, found two: number them with `nth`"
                );
                return fault(StuckReason::Diverged, detail);
            }
            // In another order of a map it is the same: that of a `HashMap` differs between processes.
            if !value::is_same(&self.log.steps[at].argument.0, &argument.0) {
                let detail = format!(
                    "expected the logged argument of `{name}` number {nth}, found another: restore the flow, or `abort`"
                );
                return fault(StuckReason::Diverged, detail);
            }
            if self.log.steps[at].outcome.is_some() {
                return Ok(at);
            }
        }
        let found = self.log.find(name, *nth);
        // Steps are requested one at a time: when one without outcome was requested first, every
        // other had been.
        if let Some(fault) = self.diverged(|step| {
            format!(
                "expected a request of the logged step {step}, found one of `{name}` number {nth}: restore the flow, then `retry`, or `abort`"
            )
        }) {
            return Err(fault);
        }
        if let Some(at) = found {
            return Ok(at);
        }
        let size = argument.0.len();
        if size > self.terms.max_value {
            let limit = self.terms.max_value;
            let detail = format!(
                "expected an argument of `{name}` of at most {limit} bytes, found {size}: pass a reference to the data, then `retry`, or `abort`"
            );
            return fault(StuckReason::TooLarge, detail);
        }
        if self.log.steps.len() >= MAX_STEPS || self.log.size() + size > self.terms.max_log {
            let (steps, bytes) = (self.log.steps.len(), self.log.size());
            let detail = format!(
                "expected a log of at most {MAX_STEPS} steps and {} bytes, found {steps} steps and {bytes} bytes: use another saga for the rest",
                self.terms.max_log
            );
            return fault(StuckReason::TooLarge, detail);
        }
        let mut step = StepLog::new(name, *nth, argument.clone());
        if let Some(wait) = wait {
            step.forward.retry_at = Some(now.after(wait.span));
        }
        self.log.steps.push(step);
        self.unsaved = true;
        let at = self.log.steps.len() - 1;
        self.requested.insert(at);
        Ok(at)
    }
}
