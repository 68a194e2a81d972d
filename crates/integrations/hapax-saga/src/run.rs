//! The run of a saga, without I/O: which effect is next, and what its result changes in the log.
//!
//! A [`Run`] polls the flow, and returns an [`Effect`] for its driver, which performs it and resumes
//! the run with a [`RunEvent`]. The driver of this crate and the simulator of its tests run the same
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
mod request;
mod terms;

use std::collections::HashSet;
use std::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::task::{Context, Poll};

use hapax_core::Entropy;

pub use self::effect::{
    Call, Effect, FlowEnd, FlowFuture, RunEvent, SagaEnd, StuckCause, TryEnd, UndoFailure,
};
use self::forward::is_expired;
pub(crate) use self::forward::too_large;
pub use self::terms::{Kind, RunTerms, StepTerms};
use crate::flow::StepChannel;
use crate::log::{
    Blob, Direction, Failure, Log, LogTime, Parked, StepOutcome, Stuck, StuckReason, UndoEnd,
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

/// The effect in progress.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Pending {
    Save(AfterSave),
    Prepare(usize),
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
    /// The value that the flow returned.
    output: Option<Blob>,
    desk: Arc<StepChannel>,
    requested: HashSet<usize>,
    state: State,
    pending: Option<Pending>,
    /// True if the log has changed since it was saved.
    unsaved: bool,
    /// The call of a try that was saved.
    calling: Option<(usize, Direction)>,
    /// The step whose next try was prepared.
    prepared: Option<usize>,
    /// The pause in which this run found the log. Its saves have none: a process runs the saga.
    continued: Option<Parked>,
    /// True if a prepared value was replaced since the log was saved.
    replaced: bool,
    /// Set if the saga is to be parked next.
    parking: Option<Parked>,
    /// The cause for which the saga becomes stuck next, with the step and its direction.
    fault: Option<(usize, Direction, StuckCause)>,
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
        flow: impl FnOnce(Arc<StepChannel>) -> FlowFuture,
    ) -> Self {
        let desk = Arc::<StepChannel>::default();
        log.crashes = log.crashes_before(attempt);
        // The first save comes before the flow waits for anything: the entry of a start is inserted with it,
        // and the saga is accepted then. A start that inserts the entry of an existing log saves it again.
        let unsaved = log.attempt == 0 || !log.inserted;
        log.attempt = attempt;
        let continued = log.parked.take();
        let compensates = log.failure.is_some();
        let flow = (!compensates && log.stuck.is_none()).then(|| flow(Arc::clone(&desk)));
        Self {
            log,
            terms,
            flow,
            output: None,
            desk,
            requested: HashSet::new(),
            state: State::Start,
            pending: None,
            unsaved,
            calling: None,
            prepared: None,
            continued,
            replaced: false,
            parking: None,
            fault: None,
        }
    }

    /// Returns the log.
    #[must_use]
    pub const fn log(&self) -> &Log {
        &self.log
    }

    /// Notes that the entry of the saga has been inserted.
    pub const fn inserted(&mut self) {
        self.log.inserted = true;
    }

    /// Returns the next effect; pending while the flow waits for something else than a step.
    ///
    /// Must not be called while an effect is in progress, since its event follows.
    pub fn advance(&mut self, cx: &mut Context<'_>, now: LogTime) -> Poll<Effect> {
        if let Some((step, direction, fault)) = self.fault.take() {
            return Poll::Ready(self.stuck(Some(step), direction, fault, now));
        }
        if let Some(parked) = self.parking.take() {
            return Poll::Ready(self.park(parked));
        }
        if let Some(step) = self.prepared.take() {
            return Poll::Ready(self.begin_try(step, Direction::Forward, now));
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

    /// Replaces the value that was prepared for the try of a step, whose end comes next.
    pub fn replace_prepared(&mut self, step: usize, value: Blob) {
        self.log.steps[step].forward.prepared = Some(value);
        self.replaced = true;
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
            self.log.steps[step].tries_mut(direction).not_begun();
        }
        self.log.parked = Some(Parked { until: now, signal: None });
        self.state = State::Ended;
    }

    /// Returns whether the next effect calls a step whose try is saved.
    pub(crate) const fn is_about_to_step(&self) -> bool {
        matches!(self.calling, Some((_, Direction::Forward)))
    }

    /// Takes the result of an effect.
    pub fn resume(&mut self, event: RunEvent, now: LogTime, entropy: &dyn Entropy) {
        match (self.pending.take(), event) {
            (Some(Pending::Save(after)), RunEvent::Saved(cancelled)) => {
                (self.unsaved, self.replaced) = (false, false);
                self.saved(after, cancelled);
            }
            (Some(Pending::Prepare(step)), RunEvent::Prepared(prepared)) => {
                self.prepared(step, prepared, now, entropy);
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
            // Found once more just before a call.
            (None, RunEvent::Cancelled(Some(reason))) if self.is_about_to_step() => {
                if let Some((step, _)) = self.calling.take() {
                    self.log.steps[step].forward.not_begun();
                    self.cancel(reason);
                }
            }
            // An event of another effect is ignored; the one in progress stays pending.
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
        let parked = self.continued.take();
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
            "expected `{name}` ({}) to end, found {crashes} executions in a row that ended without progress, by a crash or a lost lease: see the logs of the service, correct it, then `retry`",
            direction.as_str()
        );
        self.stuck(step, direction, StuckCause { reason: StuckReason::Crashed, detail }, now)
    }

    /// Calls a step whose try is saved; `None` if its key has expired meanwhile: the save may have
    /// taken long.
    fn call(&mut self, step: usize, direction: Direction, now: LogTime) -> Option<Effect> {
        let terms = self.terms_of(step);
        let retry = terms.map_or_else(StepRetry::default, |terms| match direction {
            Direction::Forward => terms.retry,
            Direction::Undo => terms.undo_retry,
        });
        let tries = self.log.steps[step].tries_mut(direction);
        if let Some(Kind::Keyed { lifetime }) = terms.map(|terms| terms.kind)
            && tries.arrived
            && is_expired(tries.first.map(|first| now.since(first)), lifetime, retry.timeout)
        {
            tries.not_begun();
            self.unsaved = true;
            return None;
        }
        let number = tries.begun;
        self.pending = Some(Pending::Call(step, direction));
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
                self.log.steps[step].forward.not_begun();
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
        fault: StuckCause,
        now: LogTime,
    ) -> Effect {
        let StuckCause { reason, detail } = fault;
        let quiet = step.and_then(|step| self.quiet(step, direction));
        self.log.stuck = Some(Stuck { reason, step, direction, detail, since: now, quiet });
        self.park_stuck(now)
    }

    /// Returns the time from which no try of a step can take effect any more; `None` if none may have had an
    /// effect, or if the definition does not have the step.
    fn quiet(&self, step: usize, direction: Direction) -> Option<LogTime> {
        let terms = self.terms_of(step).filter(|terms| terms.kind != Kind::Within)?;
        let retry = match direction {
            Direction::Forward => terms.retry,
            Direction::Undo => terms.undo_retry,
        };
        let tries = self.log.steps[step].tries(direction);
        let last = tries.last.filter(|_| tries.arrived || tries.open)?;
        Some(last.after(retry.timeout).after(terms.settle))
    }

    fn park_stuck(&mut self, now: LogTime) -> Effect {
        let until = now.after(self.terms.stuck_for);
        self.park(Parked { until, signal: None })
    }

    /// Polls the flow. `Ready(None)`: the state has changed.
    fn poll_flow(&mut self, cx: &mut Context<'_>, now: LogTime) -> Poll<Option<Effect>> {
        let Some(flow) = &mut self.flow else {
            self.state = State::Ended;
            let output = self.output.take().map(SagaEnd::Done);
            return Poll::Ready(output.map(Effect::Complete));
        };
        let polled = catch_unwind(AssertUnwindSafe(|| flow.as_mut().poll(cx)));
        if let Some((fault, step)) = self.desk.take_fault() {
            let step = step.and_then(|(name, nth)| self.log.find(&name, nth));
            return Poll::Ready(Some(self.stuck(step, Direction::Forward, fault, now)));
        }
        match polled {
            Ok(Poll::Pending) => match self.desk.poll_request(cx) {
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
                let fault = StuckCause { reason: StuckReason::Panicked, detail };
                Poll::Ready(Some(self.stuck(None, Direction::Forward, fault, now)))
            }
        }
    }

    fn flow_ended(&mut self, end: FlowEnd, now: LogTime) -> Option<Effect> {
        if let FlowEnd::Faulted(fault) = end {
            return Some(self.stuck(None, Direction::Forward, fault, now));
        }
        if let Some(fault) = self.diverged(|step| {
            format!("expected a request of the logged step {step}, found the end of the flow: restore the flow, then `retry`, or `abort`")
        }) {
            return Some(self.stuck(None, Direction::Forward, fault, now));
        }
        match end {
            FlowEnd::Returned(value) => {
                // The last look was before the last call, if there was one in this run.
                self.output = Some(value);
                self.pending = Some(Pending::LookForCancellation);
                Some(Effect::LookForCancellation)
            }
            FlowEnd::Failed(error) if error.0.len() > self.max_error() => {
                let advice = "return a shorter one, then `retry`, or `abort`";
                let fault = too_large("the error", self.max_error(), &error, advice);
                Some(self.stuck(None, Direction::Forward, fault, now))
            }
            FlowEnd::Failed(error) => {
                self.begin_compensation(Failure::Error(error));
                None
            }
            FlowEnd::Faulted(_) => None,
        }
    }

    /// Returns the largest error of a flow, which becomes a part of the log, in bytes.
    fn max_error(&self) -> usize {
        self.terms.max_value.max(self.terms.max_log)
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
