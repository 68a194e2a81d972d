//! Futures that run to their end, whether or not their caller does.

use std::fmt;
use std::mem;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::pin::Pin;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use tokio::runtime::Handle;
use tracing::{Instrument, Span};

use super::execution::{OperationPanicked, catch};
use super::idempotency::EngineState;
use super::timer::{Due, TimerEntry};
use crate::store::BoxFuture;

/// A future that its caller polls, and that continues on a task of the engine's runtime:
///
/// 1. if the caller drops it before its end;
/// 2. when a third of the lease has passed: nothing proceeds between two polls, so a caller that
///    keeps the future without polling it would let the lease lapse;
/// 3. when the engine is drained, which would wait for such a caller.
///
/// In the last two cases the caller waits for the task. Before the switch is on, the future stays
/// with its caller.
///
/// It is never polled in two places: it is in a box, which moves to the task. The task polls it at
/// once, so that an event between the last poll of the caller and that one is not missed, and from
/// then on it wakes the task. If the caller is gone, the output is dropped on the task.
///
/// Its timers and connections belong to the engine's runtime, within which it is polled: that of the
/// caller may end before the task does. Task-local values of the caller do not move.
///
/// A panic ends the future: it is not polled again and does not move. Before the switch is on, the
/// panic is passed to the caller.
#[must_use = "the future runs where this is polled"]
pub struct DetachOnDrop<T: Send + 'static>(Place<T>);

enum Place<T: Send + 'static> {
    /// With the caller, which has not polled it.
    New(BoxFuture<'static, T>, DetachTerms),
    /// Pending after a poll.
    Pending(Arc<SharedFuture<T>>, TimerEntry),
    /// After its end.
    Ended,
}

/// The moment from which a [`DetachOnDrop`] detaches. If it is dropped before, it is cancelled.
#[derive(Clone, Debug, Default)]
pub struct DetachSwitch(Arc<AtomicBool>);

impl DetachSwitch {
    /// Detaches the future from now on. Only the future itself calls this, in one of its polls.
    pub fn turn_on(&self) {
        self.0.store(true, Ordering::Relaxed);
    }

    fn is_on(&self) -> bool {
        self.0.load(Ordering::Relaxed)
    }
}

/// Conditions under which a future moves to a task.
struct DetachTerms {
    inner: Arc<EngineState>,
    /// `None` if it detaches from the beginning.
    switch: Option<DetachSwitch>,
    /// Time after which it moves if it is still pending.
    after: Duration,
    span: Span,
}

impl DetachTerms {
    fn detaches(&self) -> bool {
        self.switch.as_ref().is_none_or(DetachSwitch::is_on)
    }

    fn poll<T>(
        &self,
        future: &mut BoxFuture<'static, T>,
        cx: &mut Context<'_>,
    ) -> Poll<Result<T, OperationPanicked>> {
        let _entered = self.inner.runtime.enter();
        match catch_unwind(AssertUnwindSafe(|| future.as_mut().poll(cx))) {
            Ok(poll) => poll.map(Ok),
            Err(_) if self.detaches() => Poll::Ready(Err(OperationPanicked)),
            Err(panic) => resume_unwind(panic),
        }
    }

    fn spawn(&self, task: impl Future<Output = ()> + Send + 'static) {
        // A runtime that shuts down drops the task.
        self.inner.runtime.spawn(task.instrument(self.span.clone()));
    }
}

/// A future that its caller and a task can reach. It is with one of them at a time.
struct SharedFuture<T> {
    terms: DetachTerms,
    state: Mutex<State<T>>,
}

enum State<T> {
    /// With the caller, which polls it when this is woken.
    Waiting { future: BoxFuture<'static, T>, caller: Waker, is_scheduled: bool },
    /// The caller polls it now. If it is due, it moves when that poll ends.
    Polled { is_due: bool },
    /// On a task, which wakes the caller.
    OnTask { caller: Waker },
    /// The task has ended.
    Output(Result<T, OperationPanicked>),
    /// The caller has the output, or is gone.
    Taken,
}

impl<T: Send + 'static> DetachOnDrop<T> {
    /// Creates the future, which moves to a task `after` this time at the latest. Its task is spawned
    /// within the present span.
    pub(super) fn new(
        inner: &Arc<EngineState>,
        switch: Option<DetachSwitch>,
        after: Duration,
        future: BoxFuture<'static, T>,
    ) -> Self {
        let (inner, span) = (Arc::clone(inner), Span::current());
        Self(Place::New(future, DetachTerms { inner, switch, after, span }))
    }
}

impl<T: Send + 'static> Future for DetachOnDrop<T> {
    type Output = Result<T, OperationPanicked>;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        match mem::replace(&mut self.0, Place::Ended) {
            // Most futures end at their first poll, and need no more than this.
            Place::New(mut future, terms) => {
                let output = terms.poll(&mut future, cx);
                if output.is_pending() {
                    let caller = cx.waker().clone();
                    let state = State::Waiting { future, caller, is_scheduled: true };
                    let shared = Arc::new(SharedFuture { terms, state: Mutex::new(state) });
                    let entry = shared.schedule();
                    self.0 = Place::Pending(shared, entry);
                }
                output
            }
            Place::Pending(shared, mut entry) => {
                let output = shared.poll(cx);
                if output.is_pending() {
                    if shared.must_be_scheduled() {
                        entry = shared.schedule();
                    }
                    self.0 = Place::Pending(shared, entry);
                }
                output
            }
            // As futures may, it stays pending if it is polled again after it was ready.
            Place::Ended => Poll::Pending,
        }
    }
}

impl<T: Send + 'static> Drop for DetachOnDrop<T> {
    fn drop(&mut self) {
        match mem::replace(&mut self.0, Place::Ended) {
            Place::New(future, terms) if terms.detaches() => {
                terms.spawn(async move { drop(future.await) });
            }
            Place::Pending(shared, _) if shared.terms.detaches() => {
                let state = mem::replace(&mut *shared.lock(), State::Taken);
                if let State::Waiting { future, .. } = state {
                    shared.terms.spawn(async move { drop(future.await) });
                }
            }
            Place::New(..) | Place::Pending(..) | Place::Ended => {}
        }
    }
}

impl<T: Send + 'static> SharedFuture<T> {
    fn schedule(self: &Arc<Self>) -> TimerEntry {
        let work = Arc::downgrade(self) as Weak<dyn Due>;
        self.terms.inner.timer.enter_drained(self.terms.after, work)
    }

    /// Returns whether it was due before its switch was on.
    fn must_be_scheduled(&self) -> bool {
        match &mut *self.lock() {
            State::Waiting { is_scheduled, .. } => !mem::replace(is_scheduled, true),
            _ => false,
        }
    }

    /// Polls it for its caller.
    fn poll(self: &Arc<Self>, cx: &mut Context<'_>) -> Poll<Result<T, OperationPanicked>> {
        let mut state = self.lock();
        let (mut future, is_scheduled) = match mem::replace(&mut *state, State::Taken) {
            State::Waiting { future, is_scheduled, .. } => (future, is_scheduled),
            State::OnTask { mut caller } => {
                caller.clone_from(cx.waker());
                *state = State::OnTask { caller };
                return Poll::Pending;
            }
            State::Output(output) => return Poll::Ready(output),
            State::Polled { .. } | State::Taken => return Poll::Pending,
        };
        *state = State::Polled { is_due: false };
        drop(state);
        let output = self.terms.poll(&mut future, cx);
        if output.is_pending() {
            let caller = cx.waker().clone();
            let mut state = self.lock();
            let is_due = matches!(*state, State::Polled { is_due: true });
            if is_due && self.terms.detaches() {
                self.move_to_task(state, future, caller);
            } else {
                let is_scheduled = is_scheduled && !is_due;
                *state = State::Waiting { future, caller, is_scheduled };
            }
        }
        output
    }

    fn move_to_task(
        self: &Arc<Self>,
        mut state: MutexGuard<'_, State<T>>,
        future: BoxFuture<'static, T>,
        caller: Waker,
    ) {
        *state = State::OnTask { caller };
        drop(state);
        let end = TaskEnd(Arc::clone(self));
        self.terms.spawn(async move {
            let output = catch(future).await;
            end.0.end(output);
        });
    }

    fn end(&self, output: Result<T, OperationPanicked>) {
        let mut state = self.lock();
        match mem::replace(&mut *state, State::Taken) {
            State::OnTask { caller } => {
                *state = State::Output(output);
                drop(state);
                caller.wake();
            }
            // The caller is gone. The output is dropped without the lock.
            other => {
                *state = other;
                drop(state);
            }
        }
    }

    fn move_if_due(self: Arc<Self>, is_due: bool) {
        let mut state = self.lock();
        match mem::replace(&mut *state, State::Taken) {
            State::Waiting { future, caller, .. } if self.terms.detaches() => {
                self.move_to_task(state, future, caller);
            }
            // Its next poll schedules it again: only a poll turns the switch on.
            State::Waiting { future, caller, is_scheduled } => {
                let is_scheduled = is_scheduled && !is_due;
                *state = State::Waiting { future, caller, is_scheduled };
            }
            State::Polled { .. } => *state = State::Polled { is_due: true },
            other => *state = other,
        }
    }

    fn lock(&self) -> MutexGuard<'_, State<T>> {
        // No code under the lock panics.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl<T: Send + 'static> Due for SharedFuture<T> {
    fn begin(self: Arc<Self>, _: &Handle) {
        self.move_if_due(true);
    }

    fn drain(self: Arc<Self>, _: &Handle) {
        self.move_if_due(false);
    }
}

/// The end of a task. Without an output, because the runtime shuts down, the caller gets an error.
struct TaskEnd<T: Send + 'static>(Arc<SharedFuture<T>>);

impl<T: Send + 'static> Drop for TaskEnd<T> {
    fn drop(&mut self) {
        self.0.end(Err(OperationPanicked));
    }
}

impl<T: Send + 'static> fmt::Debug for DetachOnDrop<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let ended = matches!(self.0, Place::Ended);
        f.debug_struct("DetachOnDrop").field("ended", &ended).finish_non_exhaustive()
    }
}

impl<T> fmt::Debug for SharedFuture<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("SharedFuture").finish_non_exhaustive()
    }
}
