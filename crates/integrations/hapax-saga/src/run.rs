//! The run of a saga, without I/O: which effect is next, and what its result changes in the log.
//!
//! A [`Run`] polls the flow, and returns an [`Effect`] for its driver, which performs it and resumes
//! the run with an [`RunEvent`]. The driver of this crate and the simulator of its tests run the same
//! code. A driver that cannot perform an effect drops the run, as a crash does: the log says where
//! the next one continues.
//!
//! 1. A try is in the saved log before its call ([`Effect::Save`] precedes [`Effect::Call`]).
//! 2. A result is saved together with the next try, or before the flow waits for anything else. The
//!    result of a step that must not be repeated is saved at once.
//! 3. A step is called only after every other logged step was requested.
//! 4. Once a compensation has begun, no step runs forward.

mod compensate;
mod effect;
mod forward;
mod terms;

use std::collections::HashSet;
use std::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::task::{Context, Poll};

use hapax_core::Entropy;

pub use self::effect::{
    Call, Effect, FlowEnd, FlowFuture, RunEvent, SagaEnd, SagaFault, TryEnd, UndoFailure,
};
use self::forward::is_expired;
pub use self::terms::{Kind, RunTerms, StepTerms};
use crate::flow::{Desk, SIGNAL, StepRequest};
use crate::log::{
    Blob, Direction, Failure, Log, LogTime, MAX_STEPS, Parked, StepLog, StepOutcome, Stuck,
    StuckReason, UndoEnd,
};
use crate::retry::StepRetry;

/// Executions in a row without progress after which a saga is stuck.
pub const MAX_CRASHES: u32 = 5;

/// Next part of a run.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum State {
    Start,
    Flow,
    Forward(usize),
    Compensate,
    Ended,
}

/// The effect under way.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Pending {
    Save(AfterSave),
    Call(usize, Direction),
    Reconcile(usize, Direction),
    Look(usize, LogTime),
    LookForCancellation,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum AfterSave {
    Continue,
    Call(usize, Direction),
    Answer(usize),
}

/// A run of a saga.
pub struct Run {
    log: Log,
    terms: Arc<RunTerms>,
    flow: Option<FlowFuture>,
    desk: Arc<Desk>,
    requested: HashSet<usize>,
    state: State,
    pending: Option<Pending>,
    /// True if the log has changed since it was saved.
    unsaved: bool,
    /// The call of a try that was saved.
    calling: Option<(usize, Direction)>,
    /// Set if the saga is to be parked next.
    parking: Option<Parked>,
    /// SagaFault of a step, if the saga is to be stuck next.
    fault: Option<(usize, Direction, SagaFault)>,
}

impl fmt::Debug for Run {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Run")
            .field("log", &self.log)
            .field("state", &self.state)
            .field("pending", &self.pending)
            .finish_non_exhaustive()
    }
}

impl Run {
    /// Creates the run of attempt number `attempt` of the record, which continues `log`. `flow` makes
    /// the future of the flow, whose requests arrive at the desk.
    pub(crate) fn new(
        mut log: Log,
        terms: Arc<RunTerms>,
        attempt: u32,
        flow: impl FnOnce(Arc<Desk>) -> FlowFuture,
    ) -> Self {
        let desk = Arc::<Desk>::default();
        // The executions between did not save. The last one that did has crashed, unless it parked
        // the saga.
        let between = attempt.saturating_sub(log.attempt).saturating_sub(1);
        let last = u32::from(log.attempt > 0 && log.parked.is_none());
        log.crashes = log.crashes.saturating_add(between).saturating_add(last);
        // A log that was never saved is saved before the flow waits for anything: with it the saga counts
        // as accepted.
        let unsaved = log.attempt == 0;
        log.attempt = attempt;
        let compensates = log.failure.is_some();
        let flow = (!compensates && log.stuck.is_none()).then(|| flow(Arc::clone(&desk)));
        Self {
            log,
            terms,
            flow,
            desk,
            requested: HashSet::new(),
            state: State::Start,
            pending: None,
            unsaved,
            calling: None,
            parking: None,
            fault: None,
        }
    }

    /// Returns the log.
    #[must_use]
    pub const fn log(&self) -> &Log {
        &self.log
    }

    /// Returns the next effect; pending while the flow waits for something else than a step.
    ///
    /// It must not be called while an effect is under way whose event is still to come.
    pub fn advance(&mut self, cx: &mut Context<'_>, now: LogTime) -> Poll<Effect> {
        if let Some((step, direction, fault)) = self.fault.take() {
            return Poll::Ready(self.stuck(Some(step), direction, fault, now));
        }
        if let Some(parked) = self.parking.take() {
            return Poll::Ready(self.park(parked));
        }
        if let Some((step, direction)) = self.calling.take()
            && let Some(effect) = self.call(step, direction, now)
        {
            return Poll::Ready(effect);
        }
        loop {
            match self.state {
                State::Start => {
                    if let Some(effect) = self.start(now) {
                        return Poll::Ready(effect);
                    }
                }
                State::Flow => match self.poll_flow(cx, now) {
                    Poll::Ready(None) => {}
                    Poll::Ready(Some(effect)) => return Poll::Ready(effect),
                    Poll::Pending if self.unsaved => {
                        return Poll::Ready(self.save(AfterSave::Continue));
                    }
                    Poll::Pending => return Poll::Pending,
                },
                State::Forward(step) => {
                    if let Some(effect) = self.forward(step, now) {
                        return Poll::Ready(effect);
                    }
                }
                State::Compensate => {
                    if let Some(effect) = self.compensate(now) {
                        return Poll::Ready(effect);
                    }
                }
                State::Ended => return Poll::Pending,
            }
        }
    }

    /// Returns the log with the end of a step's undo, for a transaction that commits both.
    #[must_use]
    pub fn log_undone(&self, step: usize) -> Log {
        let mut log = self.log.clone();
        log.crashes = 0;
        log.steps[step].undo.unknown();
        log.steps[step].undone = Some(UndoEnd::Undone);
        log
    }

    /// Returns the log with the result of a step, for a transaction that commits both.
    #[must_use]
    pub fn log_with(&self, step: usize, value: Blob) -> Log {
        let mut log = self.log.clone();
        log.crashes = 0;
        log.steps[step].forward.unknown();
        log.steps[step].outcome = Some(StepOutcome::Happened(value));
        log
    }

    /// Ends the run before its next effect is performed, so that another node continues at once: what
    /// was not saved or called is as if it had not begun. The log is then to be saved, and the lease
    /// to be given up.
    pub fn interrupt(&mut self, now: LogTime) {
        let begun = match self.pending.take() {
            Some(
                Pending::Save(AfterSave::Call(step, direction)) | Pending::Call(step, direction),
            ) => Some((step, direction)),
            _ => self.calling.take(),
        };
        if let Some((step, direction)) = begun {
            self.log.steps[step].tries_mut(direction).not_sent();
        }
        self.log.parked = Some(Parked { until: now, signal: None });
        self.state = State::Ended;
    }

    /// Takes the result of an effect.
    pub fn resume(&mut self, event: RunEvent, now: LogTime, entropy: &dyn Entropy) {
        match (self.pending.take(), event) {
            (Some(Pending::Save(after)), RunEvent::Saved(cancelled)) => {
                self.unsaved = false;
                self.saved(after, cancelled);
            }
            (Some(Pending::Call(step, Direction::Forward)), RunEvent::Called(end)) => {
                self.called(step, end, now, entropy);
            }
            (Some(Pending::Call(step, Direction::Forward)), RunEvent::Committed(value)) => {
                self.log = self.log_with(step, value);
                self.unsaved = false;
            }
            (Some(Pending::Call(step, Direction::Undo)), RunEvent::UndoCommitted) => {
                self.log = self.log_undone(step);
                self.unsaved = false;
            }
            (Some(Pending::Call(step, Direction::Undo)), RunEvent::Undone(end)) => {
                self.undone(step, end, now, entropy);
            }
            (Some(Pending::Reconcile(step, direction)), RunEvent::Reconciled(verdict)) => {
                self.reconciled(step, direction, verdict, now, entropy);
            }
            (Some(Pending::Look(step, asked)), RunEvent::Signal(value)) => {
                self.looked(step, value, asked);
            }
            (Some(Pending::LookForCancellation), RunEvent::Cancelled(reason)) => match reason {
                Some(reason) => self.cancel(reason),
                None => self.state = State::Flow,
            },
            // Not an event of the effect under way: the effect stays.
            (pending, _) => self.pending = pending,
        }
    }

    /// Decides how the run begins.
    fn start(&mut self, now: LogTime) -> Option<Effect> {
        for step in &mut self.log.steps {
            let kind = self.terms.steps.get(step.name.as_str()).map(|terms| terms.kind);
            if step.forward.open && kind == Some(Kind::Within) {
                // Its outcome would be in the log.
                step.forward.not_sent();
            }
            for tries in [&mut step.forward, &mut step.undo] {
                if tries.open {
                    tries.unknown();
                    // The last owner may have called until its lease lapsed, long after it saved the
                    // try.
                    tries.last = Some(now);
                }
            }
        }
        if self.log.stuck.is_some() {
            return Some(self.park_stuck(now));
        }
        let parked = self.log.parked.take();
        self.state = match self.log.failure {
            Some(_) => State::Compensate,
            None => State::Flow,
        };
        if self.log.crashes >= MAX_CRASHES {
            return Some(self.crashed(now));
        }
        let is_early = parked.is_some_and(|parked| now < parked.until);
        if is_early && self.state == State::Flow {
            // Woken by a signal or a cancellation, or by a store whose leases all lapsed.
            self.pending = Some(Pending::LookForCancellation);
            return Some(Effect::LookForCancellation);
        }
        None
    }

    fn crashed(&mut self, now: LogTime) -> Effect {
        let (step, direction) = match self.log.failure {
            Some(_) => {
                (self.log.steps.iter().rposition(|step| self.needs_undo(step)), Direction::Undo)
            }
            None => {
                let open = self.log.steps.iter().rposition(|step| step.outcome.is_none());
                (open, Direction::Forward)
            }
        };
        let crashes = self.log.crashes;
        let name = step.map_or("the flow", |step| self.log.steps[step].name.as_str());
        let detail = format!(
            "expected `{name}` ({}) to end, found that its process ended {crashes} times in a row: correct it, then `retry`",
            direction.as_str()
        );
        self.stuck(step, direction, SagaFault { reason: StuckReason::Crashed, detail }, now)
    }

    /// Calls a step whose try is saved; `None` if its key has expired meanwhile: the save may have
    /// taken long.
    fn call(&mut self, step: usize, direction: Direction, now: LogTime) -> Option<Effect> {
        let terms = self.terms_of(step);
        let tries = self.log.steps[step].tries_mut(direction);
        if let Some(Kind::Keyed { lifetime }) = terms.map(|terms| terms.kind)
            && tries.arrived
            && is_expired(tries.first.map(|first| now.since(first)), lifetime)
        {
            tries.not_sent();
            self.unsaved = true;
            return None;
        }
        let number = tries.begun;
        self.pending = Some(Pending::Call(step, direction));
        let retry = terms.map_or_else(StepRetry::default, |terms| match direction {
            Direction::Forward => terms.retry,
            Direction::Undo => terms.undo_retry,
        });
        let call = Call { step, direction, number, timeout: retry.timeout };
        Some(match direction {
            Direction::Forward => Effect::Call(call),
            Direction::Undo => Effect::Undo(call),
        })
    }

    fn saved(&mut self, after: AfterSave, cancelled: Option<String>) {
        match (after, cancelled) {
            (AfterSave::Call(step, Direction::Forward), Some(reason)) => {
                // Not called: the try did not begin after all.
                self.log.steps[step].forward.not_sent();
                self.cancel(reason);
            }
            (AfterSave::Call(step, direction), _) => self.calling = Some((step, direction)),
            (AfterSave::Continue | AfterSave::Answer(_), Some(reason))
                if self.log.failure.is_none() =>
            {
                self.cancel(reason);
            }
            (AfterSave::Answer(step), _) => self.answer(step),
            (AfterSave::Continue, _) => {}
        }
    }

    fn cancel(&mut self, reason: String) {
        self.begin_compensation(Failure::Cancelled { reason });
    }

    fn begin_compensation(&mut self, failure: Failure) {
        self.log.failure = Some(failure);
        self.unsaved = true;
        self.flow = None;
        self.state = State::Compensate;
    }

    fn save(&mut self, after: AfterSave) -> Effect {
        self.pending = Some(Pending::Save(after));
        Effect::Save
    }

    /// Waits until `until`: in this process if that is soon, else parked.
    fn wait(&mut self, until: LogTime, now: LogTime) -> Effect {
        if until.since(now) <= self.terms.park_after {
            return Effect::Wait(until);
        }
        self.park(Parked { until, signal: None })
    }

    fn park(&mut self, parked: Parked) -> Effect {
        self.log.parked = Some(parked);
        self.state = State::Ended;
        Effect::Park
    }

    fn stuck(
        &mut self,
        step: Option<usize>,
        direction: Direction,
        fault: SagaFault,
        now: LogTime,
    ) -> Effect {
        let SagaFault { reason, detail } = fault;
        self.log.stuck = Some(Stuck { reason, step, direction, detail, since: now });
        self.park_stuck(now)
    }

    fn park_stuck(&mut self, now: LogTime) -> Effect {
        let until = now.after(self.terms.stuck_for);
        self.park(Parked { until, signal: None })
    }

    /// Polls the flow. `Ready(None)`: the state has changed.
    fn poll_flow(&mut self, cx: &mut Context<'_>, now: LogTime) -> Poll<Option<Effect>> {
        let Some(flow) = &mut self.flow else {
            self.state = State::Ended;
            return Poll::Ready(None);
        };
        let polled = catch_unwind(AssertUnwindSafe(|| flow.as_mut().poll(cx)));
        if let Some(fault) = self.desk.take_fault() {
            return Poll::Ready(Some(self.stuck(None, Direction::Forward, fault, now)));
        }
        match polled {
            Ok(Poll::Pending) => match self.desk.take_request() {
                Some(request) => Poll::Ready(self.request(request, now)),
                None => Poll::Pending,
            },
            Ok(Poll::Ready(end)) => {
                self.flow = None;
                Poll::Ready(self.flow_ended(end, now))
            }
            Err(_) => {
                self.flow = None;
                let detail = "the flow panicked: correct it, then `retry`, or `abort`".to_owned();
                let fault = SagaFault { reason: StuckReason::Panicked, detail };
                Poll::Ready(Some(self.stuck(None, Direction::Forward, fault, now)))
            }
        }
    }

    fn flow_ended(&mut self, end: FlowEnd, now: LogTime) -> Option<Effect> {
        if let FlowEnd::Faulted(fault) = end {
            return Some(self.stuck(None, Direction::Forward, fault, now));
        }
        if let Some(fault) = self.diverged(|step| {
            format!("expected a request of the step {step}, found the end of the flow")
        }) {
            return Some(self.stuck(None, Direction::Forward, fault, now));
        }
        match end {
            FlowEnd::Returned(value) => {
                self.state = State::Ended;
                Some(Effect::Complete(SagaEnd::Done(value)))
            }
            FlowEnd::Failed(error) => {
                self.begin_compensation(Failure::Error(error));
                None
            }
            FlowEnd::Faulted(_) => None,
        }
    }

    /// Returns the fault of a flow that has not requested every logged step.
    fn diverged(&self, detail: impl Fn(&str) -> String) -> Option<SagaFault> {
        let (_, step) =
            self.log.steps.iter().enumerate().find(|(at, _)| !self.requested.contains(at))?;
        let name = format!("`{}` number {}", step.name, step.nth);
        Some(SagaFault { reason: StuckReason::Diverged, detail: detail(&name) })
    }

    fn request(&mut self, request: StepRequest, now: LogTime) -> Option<Effect> {
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
    fn admit(&mut self, request: &StepRequest, now: LogTime) -> Result<usize, SagaFault> {
        let StepRequest { name, nth, argument, wait } = request;
        let fault = |reason, detail| Err(SagaFault { reason, detail });
        if wait.is_none() && !self.terms.steps.contains_key(name.as_str()) {
            let detail = format!("expected a step of the definition, found `{name}`: define it");
            return fault(StuckReason::NoSuchStep, detail);
        }
        if name == SIGNAL {
            let detail = "expected a name of the signal, found an empty one".to_owned();
            return fault(StuckReason::NoSuchStep, detail);
        }
        if let Some(at) = self.log.find(name, *nth) {
            if !self.requested.insert(at) {
                let detail = format!(
                    "expected one request of `{name}` number {nth}, found two: number them with `nth`"
                );
                return fault(StuckReason::Diverged, detail);
            }
            if self.log.steps[at].argument != *argument {
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
                "expected a request of the logged step {step}, found one of `{name}` number {nth}"
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
            let detail =
                format!("expected an argument of `{name}` of at most {limit} bytes, found {size}");
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
        step.forward.retry_at = wait.as_ref().map(|wait| now.after(wait.span));
        self.log.steps.push(step);
        self.unsaved = true;
        let at = self.log.steps.len() - 1;
        self.requested.insert(at);
        Ok(at)
    }

    /// Gives the flow the outcome of a step.
    fn answer(&mut self, step: usize) {
        if let Some(outcome) = &self.log.steps[step].outcome {
            self.desk.answer(outcome.clone());
        }
        self.state = State::Flow;
    }

    /// Sets the outcome of a step, which was found in this run.
    fn set_outcome(&mut self, step: usize, outcome: StepOutcome) {
        self.log.steps[step].outcome = Some(outcome);
        self.log.crashes = 0;
        self.unsaved = true;
    }

    fn terms_of(&self, step: usize) -> Option<StepTerms> {
        self.terms.steps.get(self.log.steps[step].name.as_str()).copied()
    }
}
