//! The flow's side of a saga: the handle by which it requests steps.

use std::fmt;
use std::future::{Future, pending};
use std::marker::PhantomData;
use std::pin::Pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use hapax_core::value;
use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::log::{Blob, StepOutcome, StuckReason};
use crate::run::StuckCause;

/// Prefixes of the names of pauses in the log. Names of steps have no slash.
pub(crate) const SLEEP: &str = "sleep/";
pub(crate) const SIGNAL: &str = "signal/";

/// A step of a definition, which a flow requests by [`FlowContext::run`].
pub struct StepHandle<A, R, E> {
    pub(crate) name: &'static str,
    pub(crate) nth: u32,
    types: PhantomData<fn(A) -> Result<R, E>>,
}

impl<A, R, E> StepHandle<A, R, E> {
    pub(crate) const fn new(name: &'static str) -> Self {
        Self { name, nth: 0, types: PhantomData }
    }

    /// Returns request number `nth` of this step, for a flow that requests a step more than once. The
    /// step itself is number 0.
    #[must_use]
    pub const fn nth(self, nth: u32) -> Self {
        Self { nth, ..self }
    }
}

impl<A, R, E> Clone for StepHandle<A, R, E> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<A, R, E> Copy for StepHandle<A, R, E> {}

impl<A, R, E> fmt::Debug for StepHandle<A, R, E> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "StepHandle({} {})", self.name, self.nth)
    }
}

/// The context of a flow, by which it runs steps, sleeps and waits for signals.
///
/// A flow runs from the top after each crash and each pause, and gets the logged outcomes of its
/// steps. So make a step of everything that may differ between two runs: times, random values, look-ups.
#[derive(Clone)]
pub struct FlowContext {
    desk: Arc<StepChannel>,
}

impl fmt::Debug for FlowContext {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("FlowContext")
    }
}

impl FlowContext {
    pub(crate) const fn new(desk: Arc<StepChannel>) -> Self {
        Self { desk }
    }

    /// Runs a step, or returns its logged outcome. One step runs at a time.
    ///
    /// The returned future does not resolve if the saga is parked or stuck: the flow is dropped then,
    /// and runs again from the top when it continues.
    ///
    /// # Errors
    /// The error with which the step was rejected.
    pub async fn run<A, R, E>(&self, step: StepHandle<A, R, E>, argument: A) -> Result<R, E>
    where
        A: Serialize,
        R: DeserializeOwned,
        E: DeserializeOwned,
    {
        let argument = self.written(step.name, &argument).await;
        let (name, nth) = (step.name.to_owned(), step.nth);
        let outcome = self.desk.request(StepRequest { name, nth, argument, wait: None }).await;
        match outcome {
            StepOutcome::Happened(value) => Ok(self.read(step.name, step.nth, &value).await),
            StepOutcome::Rejected(error) => Err(self.read(step.name, step.nth, &error).await),
        }
    }

    /// Pauses for `duration`, counted from the first request of this pause. A pause of more than ten
    /// seconds parks the saga: it costs no memory then. `name` names the pause in the log; the saga is
    /// stuck if it requests a name twice, so put a number into it in a loop.
    pub async fn sleep(&self, name: &str, span: Duration) {
        let argument = self.written(name, &span).await;
        let (name, wait) = (format!("{SLEEP}{name}"), Some(Wait { span }));
        self.desk.request(StepRequest { name, nth: 0, argument, wait }).await;
    }

    /// Waits for the signal `name`, which each caller with the saga's key can send; the first one
    /// counts. Returns `None` if it does not arrive before `timeout`, counted from the first request. A
    /// name may be requested once. One that was sent before the wait is received if that was not more
    /// than 365 days ago.
    pub async fn signal<T: DeserializeOwned>(&self, name: &str, span: Duration) -> Option<T> {
        let argument = self.written(name, &span).await;
        let (full, wait) = (format!("{SIGNAL}{name}"), Some(Wait { span }));
        let request = StepRequest { name: full.clone(), nth: 0, argument, wait };
        match self.desk.request(request).await {
            StepOutcome::Happened(value) => Some(self.read(&full, 0, &value).await),
            StepOutcome::Rejected(_) => None,
        }
    }

    async fn written<T: Serialize>(&self, name: &str, value: &T) -> Blob {
        match value::write(value, hapax_core::codec::MAX_CHECKPOINT) {
            Ok(bytes) => Blob(bytes),
            Err(error) => {
                let detail = format!(
                    "expected an argument of `{name}` that can be serialized, found: {error}"
                );
                self.desk.fault(StuckReason::TooLarge, detail, None).await
            }
        }
    }

    async fn read<T: DeserializeOwned>(&self, name: &str, nth: u32, value: &Blob) -> T {
        match read_result(&value.0) {
            Ok(value) => value,
            Err(error) => {
                let detail = format!(
                    "expected a logged value of `{name}` of the type in this definition, found: {error}: restore the definition, or, if an operator gave the value, `resolve` with one of the type"
                );
                let step = Some((name.to_owned(), nth));
                self.desk.fault(StuckReason::Unreadable, detail, step).await
            }
        }
    }
}

/// Reads a logged result. An operator's JSON `null` is logged as `()`, and is also a missing value.
pub(crate) fn read_result<T: DeserializeOwned>(bytes: &[u8]) -> Result<T, value::ValueError> {
    value::read(bytes).or_else(|error| {
        let [unit, none] = [value::write(&(), 16)?, value::write(&None::<()>, 16)?];
        if bytes == unit { value::read(&none).map_err(|_| error) } else { Err(error) }
    })
}

/// A request of a flow.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) struct StepRequest {
    pub(crate) name: String,
    pub(crate) nth: u32,
    pub(crate) argument: Blob,
    /// Set for a pause.
    pub(crate) wait: Option<Wait>,
}

/// A pause.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) struct Wait {
    pub(crate) span: Duration,
}

/// A fault that a flow reports, with name and number of the step whose logged value it is about.
type DeskFault = (StuckCause, Option<(String, u32)>);

/// The channel between a flow and its run: one request at a time, then its outcome.
#[derive(Default)]
pub(crate) struct StepChannel(Mutex<ChannelState>);

#[derive(Default)]
struct ChannelState {
    last: u64,
    /// Number of the request without an answer.
    open: Option<u64>,
    request: Option<StepRequest>,
    answer: Option<(u64, StepOutcome)>,
    fault: Option<DeskFault>,
    waker: Option<Waker>,
    /// The run, if it waits for a request.
    run: Option<Waker>,
}

/// Wakes a task, if there is one. The channel is not locked: a waker may drop what it wakes.
fn wake(waker: Option<Waker>) {
    if let Some(waker) = waker {
        waker.wake();
    }
}

impl StepChannel {
    fn lock(&self) -> MutexGuard<'_, ChannelState> {
        // Locked for assignments only.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn request(&self, request: StepRequest) -> Requested<'_> {
        Requested { desk: self, request: Some(request), number: 0 }
    }

    /// Reports a fault. The run drops the flow, so that this does not resolve.
    async fn fault<T>(
        &self,
        reason: StuckReason,
        detail: String,
        step: Option<(String, u32)>,
    ) -> T {
        let run = {
            let mut state = self.lock();
            state.fault = Some((StuckCause { reason, detail }, step));
            state.run.take()
        };
        wake(run);
        pending().await
    }

    pub(crate) fn take_fault(&self) -> Option<DeskFault> {
        self.lock().fault.take()
    }

    /// Takes the request of the flow. Without one, a later request or fault wakes the run: it may come from
    /// another task.
    pub(crate) fn poll_request(&self, cx: &Context<'_>) -> Option<StepRequest> {
        let mut state = self.lock();
        let request = state.request.take();
        if request.is_none() {
            state.run = Some(cx.waker().clone());
            if state.fault.is_some() {
                cx.waker().wake_by_ref();
            }
        }
        request
    }

    /// Answers the request that was taken.
    pub(crate) fn answer(&self, outcome: StepOutcome) {
        let mut state = self.lock();
        if let Some(number) = state.open.take() {
            state.answer = Some((number, outcome));
        }
        let waker = state.waker.take();
        drop(state);
        wake(waker);
    }
}

/// A request until its answer.
struct Requested<'a> {
    desk: &'a StepChannel,
    request: Option<StepRequest>,
    number: u64,
}

impl Future for Requested<'_> {
    type Output = StepOutcome;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<StepOutcome> {
        let desk = self.desk;
        let mut state = desk.lock();
        if let Some(request) = self.request.take() {
            if state.open.is_some() {
                let detail = format!(
                    "expected one step at a time, found a request of `{}` while another is in progress: await each, then `retry`",
                    request.name
                );
                state.fault = Some((StuckCause { reason: StuckReason::Diverged, detail }, None));
                let run = state.run.take();
                drop(state);
                wake(run);
                return Poll::Pending;
            }
            state.last += 1;
            state.open = Some(state.last);
            state.request = Some(request);
            state.waker = Some(cx.waker().clone());
            let (number, run) = (state.last, state.run.take());
            drop(state);
            wake(run);
            self.number = number;
            return Poll::Pending;
        }
        match state.answer.take() {
            Some((number, outcome)) if number == self.number => Poll::Ready(outcome),
            other => {
                state.answer = other;
                state.waker = Some(cx.waker().clone());
                Poll::Pending
            }
        }
    }
}

impl Drop for Requested<'_> {
    fn drop(&mut self) {
        let mut state = self.desk.lock();
        // A request that was not taken is withdrawn.
        if self.number > 0 && state.open == Some(self.number) && state.request.take().is_some() {
            state.open = None;
        }
    }
}
