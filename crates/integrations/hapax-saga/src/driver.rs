//! The driver of a run: performs its effects on the store, the schedule and the steps' functions.
//!
//! *A driver that is dropped, at any await, leaves what a crash leaves*: the log of the last save. A
//! call under way is dropped with it, and the log has its try.
//!
//! *A process that was frozen calls nothing afterwards*: just before each call the driver reads by
//! its monotonic clock whether the lease may have lapsed since the save ([`LeaseHandle::remaining`]).
//!
//! *Parking*: the log is saved and the lease given up in one swap; then the entry is postponed, if it is
//! still due when it was; then signals and cancellations are looked for once more. A sender writes
//! the signal first and looks at the log afterwards, so that one of the two sees the other.

use std::future::{Future, poll_fn};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::pin::pin;
use std::sync::Arc;
use std::task::Poll;
use std::time::Duration;

use hapax_core::store::BoxFuture;
use hapax_core::transaction::{CheckpointCommit, TransactionBackend, TxHandle};
use hapax_core::{FinishError, Lease, LeaseHandle, OperationId, SystemEntropy, Verdict};
use tokio::time::{sleep, timeout};
use tracing::{Instrument, Span};

use crate::call::CallContext;
use crate::clock::StoreClock;
use crate::definition::{Definition, text};
use crate::log::{Blob, Direction, Log, StepOutcome, Stuck, StuckReason};
use crate::node::{Node, ScheduledSaga};
use crate::note::{CANCEL, FinalOutcome, step_key};
use crate::run::{Call, Effect, Kind, Run, RunEvent, SagaEnd, SagaFault, TryEnd, UndoFailure};
use crate::stats::{DefinitionCounters, Running, is_newly_stuck};

/// Pause before a save is repeated that got no definite reply.
const SAVE_AGAIN: Duration = Duration::from_millis(200);

/// The end of a run.
enum RunEnd {
    /// The log is to be parked.
    Parked,
    /// The record is to be completed.
    Complete(SagaEnd),
    /// The lease is lost, or may be: another node continues.
    Dropped,
}

/// Runs a saga under its lease until it ends, parks, or loses the lease.
pub(crate) async fn drive(
    node: Arc<Node>,
    definition: Arc<Definition>,
    lease: Lease,
    saga: ScheduledSaga,
) {
    let clock = StoreClock::new(lease.fence());
    let id = lease.id();
    let log = match lease.checkpoint().map(|log| Log::decode(log)) {
        None => definition.new_log(saga.key.id, clock.now()),
        Some(Ok(log)) => log,
        Some(Err(error)) => {
            // An operator needs to see it. It stays as it is, and is looked at again later.
            tracing::error!(saga = %definition.name, operation = ?id, %error, "the log of a saga cannot be read: run the version that wrote it");
            return node.set_aside(saga).await;
        }
    };
    let span = tracing::info_span!("saga", name = definition.name, version = definition.version, operation = %id, attempt = lease.attempt());
    let counters = node.counters(&definition);
    let running = counters.run();
    let was_stuck = log.stuck.clone();
    let run = definition.run(log, lease.attempt(), saga.input.clone());
    let mut driver = Driver { node, definition, counters, run, clock, handle: lease.handle(), id };
    let driving: BoxFuture<'_, ()> = Box::pin(async {
        let end: BoxFuture<'_, RunEnd> = Box::pin(driver.run());
        let end = lease.keep_alive(end).await;
        driver.count(&end, was_stuck.as_ref());
        drop(running);
        driver.end(lease, saga, end).await;
    });
    driving.instrument(span).await;
}

struct Driver {
    node: Arc<Node>,
    definition: Arc<Definition>,
    counters: Arc<DefinitionCounters>,
    run: Run,
    clock: StoreClock,
    handle: LeaseHandle,
    id: OperationId,
}

impl Driver {
    /// Performs effects until the run is over.
    async fn run(&mut self) -> RunEnd {
        loop {
            let Some(effect) = self.next().await else {
                self.run.interrupt(self.clock.now());
                return RunEnd::Parked;
            };
            let called = match &effect {
                Effect::Call(call) | Effect::Undo(call) => Some(call.step),
                _ => None,
            };
            let event = match effect {
                Effect::Park => return RunEnd::Parked,
                Effect::Complete(end) => return RunEnd::Complete(end),
                Effect::Wait(until) => {
                    tokio::select! {
                        () = sleep(self.clock.until(until)) => {}
                        () = self.handle.lost() => return RunEnd::Dropped,
                        () = self.node.shutdown() => {}
                    }
                    continue;
                }
                Effect::Save => match self.save().await {
                    Some(cancelled) => RunEvent::Saved(cancelled),
                    None => return RunEnd::Dropped,
                },
                Effect::Look(signal) => match self.look(&signal).await {
                    Some(value) => RunEvent::Signal(value),
                    None => return RunEnd::Dropped,
                },
                Effect::LookForCancellation => match self.look(CANCEL).await {
                    Some(reason) => RunEvent::Cancelled(reason.map(|reason| cancellation(&reason))),
                    None => return RunEnd::Dropped,
                },
                Effect::Call(call) => match self.call(call).await {
                    Some(event) => event,
                    None => return RunEnd::Dropped,
                },
                Effect::Undo(call) => match self.undo(call).await {
                    Some(event) => event,
                    None => return RunEnd::Dropped,
                },
                Effect::Reconcile(call) => match self.reconcile(call).await {
                    Some(verdict) => RunEvent::Reconciled(verdict),
                    None => return RunEnd::Dropped,
                },
            };
            if let Some(step) = called {
                self.counters.called(&self.run.log().steps[step].name, &event);
            }
            self.run.resume(event, self.clock.now(), &SystemEntropy);
        }
    }

    /// Returns the next effect; `None` if the node shuts down. An effect that ends the run is
    /// performed nevertheless.
    async fn next(&mut self) -> Option<Effect> {
        let mut shutdown = pin!(self.node.shutdown());
        let (run, clock) = (&mut self.run, &self.clock);
        let next = poll_fn(|cx| {
            if let Poll::Ready(effect) = run.advance(cx, clock.now()) {
                return Poll::Ready(Some(effect));
            }
            shutdown.as_mut().poll(cx).map(|()| None)
        });
        let effect = next.await?;
        let ends = matches!(effect, Effect::Park | Effect::Complete(_));
        (ends || !self.node.is_shutting_down()).then_some(effect)
    }

    /// Saves the log, and looks for a cancellation. `None`: the lease is lost, or may be.
    async fn save(&mut self) -> Option<Option<String>> {
        let log = self.run.log().encode().ok()?;
        let save = async {
            loop {
                match self.handle.save(log.clone()).await {
                    Ok(()) => return Some(()),
                    // The save may have arrived. A second one finds it, or writes it.
                    Err(FinishError::Pending) if !self.handle.remaining().is_zero() => {
                        sleep(SAVE_AGAIN).await;
                    }
                    Err(_) => return None,
                }
            }
        };
        // A cancellation that this look misses is found by the next one.
        let (saved, reason) = tokio::join!(save, self.node.signal(&self.id, CANCEL));
        saved?;
        Some(reason.ok().flatten().map(|reason| cancellation(&reason)))
    }

    /// Looks for a signal until the store answers. `None`: the lease is lost.
    async fn look(&mut self, name: &str) -> Option<Option<Blob>> {
        loop {
            match self.node.signal(&self.id, name).await {
                Ok(value) => return Some(value),
                Err(_) if self.handle.remaining().is_zero() => return None,
                Err(error) => {
                    tracing::debug!(operation = ?self.id, %error, "a signal cannot be looked up yet");
                    sleep(SAVE_AGAIN).await;
                }
            }
        }
    }

    async fn call(&mut self, call: Call) -> Option<RunEvent> {
        if self.kind(call) == Some(Kind::Within) {
            return self.call_within(call).await;
        }
        let step = &self.run.log().steps[call.step];
        let functions = self.definition.functions.get(step.name.as_str())?;
        let context = self.context(call);
        let argument = step.argument.0.clone();
        let (span, _running) = (self.span("step", call), self.running(call));
        let function = || (functions.call)(context, argument).instrument(span);
        let ended = Self::guard(&self.handle, call, function).await?;
        Some(RunEvent::Called(ended.unwrap_or_else(TryEnd::Unknown)))
    }

    /// Calls a step whose writes commit with the log. Whatever did not commit did not happen.
    async fn call_within(&mut self, call: Call) -> Option<RunEvent> {
        let Some(backend) = self.node.transactions.clone() else {
            return Some(RunEvent::Called(TryEnd::Faulted(no_database())));
        };
        let step = &self.run.log().steps[call.step];
        let functions = self.definition.functions.get(step.name.as_str())?;
        let tx = self.handle.begin(&backend);
        let context = CallContext { tx: Some(tx.clone()), ..self.context(call) };
        let argument = step.argument.0.clone();
        let (span, _running) = (self.span("step", call), self.running(call));
        let function = || (functions.call)(context, argument).instrument(span);
        let ended = Self::guard(&self.handle, call, function).await?;
        Some(match ended.unwrap_or_else(TryEnd::NotSent) {
            TryEnd::Happened(value) if value.0.len() <= self.definition.terms.max_value => {
                let log = self.run.log_with(call.step, value.clone());
                match self.commit(&backend, tx, &log).await? {
                    Ok(()) => RunEvent::Committed(value),
                    Err(error) => RunEvent::Called(TryEnd::NotSent(error)),
                }
            }
            end => RunEvent::Called(match (self.roll_back(&backend, tx).await, end) {
                (Ok(()), TryEnd::Unknown(error)) => TryEnd::NotSent(error),
                (Ok(()), end) => end,
                (Err(fault), _) => TryEnd::Lost(fault),
            }),
        })
    }

    /// Calls the undo of such a step.
    async fn undo_within(&mut self, call: Call) -> Option<RunEvent> {
        let Some(backend) = self.node.transactions.clone() else {
            return Some(RunEvent::Undone(Err(UndoFailure::Faulted(no_database()))));
        };
        let tx = self.handle.begin(&backend);
        Some(match self.call_undo(call, Some(tx.clone())).await? {
            Ok(()) => match self.commit(&backend, tx, &self.run.log_undone(call.step)).await? {
                Ok(()) => RunEvent::UndoCommitted,
                Err(error) => RunEvent::Undone(Err(UndoFailure::Error(error))),
            },
            Err(failure) => RunEvent::Undone(Err(match self.roll_back(&backend, tx).await {
                Ok(()) => failure,
                Err(fault) => UndoFailure::Faulted(fault),
            })),
        })
    }

    /// Commits a transaction with a log. An error is that of a transaction that was rolled back.
    /// `None`: the next run finds in the log whether it was committed.
    async fn commit(
        &mut self,
        backend: &TransactionBackend,
        tx: TxHandle,
        log: &Log,
    ) -> Option<Result<(), String>> {
        match self.handle.commit(backend, tx, log.encode().ok()?).await {
            CheckpointCommit::Committed => Some(Ok(())),
            CheckpointCommit::RolledBack => {
                Some(Err("the transaction lost against another".to_owned()))
            }
            CheckpointCommit::Rejected(error) => Some(Err(text(&*error))),
            CheckpointCommit::Lost(_) | CheckpointCommit::Unknown => None,
        }
    }

    /// Rolls a transaction back, unless the step ended it itself.
    async fn roll_back(
        &mut self,
        backend: &TransactionBackend,
        tx: TxHandle,
    ) -> Result<(), SagaFault> {
        self.handle.roll_back(backend, tx).await.map_err(|error| SagaFault {
            reason: StuckReason::Unknown,
            detail: format!(
                "expected a transaction that the step does not end itself, found one whose writes may be committed: {}",
                text(&*error)
            ),
        })
    }

    async fn undo(&mut self, call: Call) -> Option<RunEvent> {
        match self.kind(call) {
            Some(Kind::Within) => self.undo_within(call).await,
            _ => Some(RunEvent::Undone(self.call_undo(call, None).await?)),
        }
    }

    async fn call_undo(
        &mut self,
        call: Call,
        tx: Option<TxHandle>,
    ) -> Option<Result<(), UndoFailure>> {
        let step = &self.run.log().steps[call.step];
        let functions = self.definition.functions.get(step.name.as_str())?;
        let undo = functions.undo.as_ref()?;
        let result = match &step.outcome {
            Some(StepOutcome::Happened(result)) => Some(result.0.clone()),
            Some(StepOutcome::Rejected(_)) | None => None,
        };
        let context = CallContext { tx, ..self.context(call) };
        let argument = step.argument.0.clone();
        let (span, _running) = (self.span("undo", call), self.running(call));
        let function = || undo(context, argument, result).instrument(span);
        let ended = Self::guard(&self.handle, call, function).await?;
        Some(ended.unwrap_or_else(|error| Err(UndoFailure::Error(error))))
    }

    fn kind(&self, call: Call) -> Option<Kind> {
        let name = self.run.log().steps[call.step].name.as_str();
        self.definition.terms.steps.get(name).map(|terms| terms.kind)
    }

    async fn reconcile(&mut self, call: Call) -> Option<Verdict<Blob>> {
        let step = &self.run.log().steps[call.step];
        let functions = self.definition.functions.get(step.name.as_str())?;
        let reconcile = functions.reconcile.as_ref()?;
        // The question is about the step's own key.
        let context = self.context(Call { direction: Direction::Forward, ..call });
        let argument = step.argument.0.clone();
        let span = self.span("reconcile", call);
        let function = || reconcile(context, argument).instrument(span);
        let ended = Self::guard(&self.handle, call, function).await?;
        Some(ended.unwrap_or(Verdict::CannotSay))
    }

    /// Returns the span of a call. It has no key, no scope and no contents.
    fn span(&self, kind: &'static str, call: Call) -> Span {
        let step = &self.run.log().steps[call.step];
        tracing::info_span!("call", kind, step = step.name, nth = step.nth, number = call.number)
    }

    fn running(&self, call: Call) -> Option<Running> {
        self.counters.call(&self.run.log().steps[call.step].name, call.direction)
    }

    /// Counts the end of a run.
    fn count(&self, end: &RunEnd, was_stuck: Option<&Stuck>) {
        let log = self.run.log();
        match (end, &log.stuck) {
            (RunEnd::Dropped, _) => self.counters.lost(),
            (RunEnd::Parked, None) => self.counters.parked(),
            (RunEnd::Parked, stuck) if is_newly_stuck(was_stuck, stuck.as_ref()) => {
                self.counters.stuck(log.present().map(|step| step.name.as_str()));
            }
            (RunEnd::Parked | RunEnd::Complete(_), _) => {}
        }
    }

    fn context(&self, call: Call) -> CallContext {
        let step = &self.run.log().steps[call.step];
        let key = step_key(&self.id, call.direction, &step.name, step.nth);
        CallContext { key, fence: self.handle.fence(), number: call.number, tx: None }
    }

    /// Calls a function within its timeout. `None`: the lease is lost, or may have been before the
    /// call. An error is that of a call whose result is unknown.
    async fn guard<F: Future>(
        handle: &LeaseHandle,
        call: Call,
        function: impl FnOnce() -> F,
    ) -> Option<Result<F::Output, String>> {
        if handle.remaining().is_zero() {
            return None;
        }
        let panicked = || "the function panicked".to_owned();
        let Ok(future) = catch_unwind(AssertUnwindSafe(function)) else {
            return Some(Err(panicked()));
        };
        let mut future = pin!(future);
        let caught =
            poll_fn(|cx| match catch_unwind(AssertUnwindSafe(|| future.as_mut().poll(cx))) {
                Ok(poll) => poll.map(Ok),
                Err(_) => Poll::Ready(Err(panicked())),
            });
        tokio::select! {
            ended = timeout(call.timeout, caught) => {
                let late = |_| Err(format!("no result within {:?}", call.timeout));
                Some(ended.unwrap_or_else(late))
            }
            () = handle.lost() => None,
        }
    }

    /// Ends the lease by the end of the run.
    async fn end(self, lease: Lease, saga: ScheduledSaga, end: RunEnd) {
        match end {
            RunEnd::Dropped => {
                tracing::debug!(operation = ?self.id, "another node continues a saga");
            }
            RunEnd::Parked => self.park(lease, saga).await,
            RunEnd::Complete(end) => self.complete(lease, saga, end).await,
        }
    }

    async fn park(self, lease: Lease, saga: ScheduledSaga) {
        let Self { node, definition, run, clock, id, .. } = self;
        let log = run.log();
        let (Some(parked), Ok(bytes)) = (&log.parked, log.encode()) else { return };
        if let Some(stuck) = &log.stuck {
            tracing::warn!(saga = %definition.name, operation = %id, reason = ?stuck.reason, detail = %stuck.detail, "a saga is stuck");
        }
        let span = clock.until(parked.until);
        if lease.park(bytes, span).await.is_err() {
            // The write is deferred, or another node continues: the entry is due before.
            return;
        }
        match span.is_zero() {
            // Another node continues at once. Making an entry due is right at any time.
            true => node.make_due(saga.key).await.unwrap_or_else(|error| {
                tracing::debug!(operation = ?id, %error, "an entry was not made due: it is due within a lease");
            }),
            false => node.postpone(&saga, span).await,
        }
        if node.is_awaited(&id, log).await.unwrap_or(true) {
            node.wake(&id).await.unwrap_or_else(|error| {
                tracing::warn!(operation = ?id, %error, "a saga could not be woken: it continues when its entry is due");
            });
        }
    }

    async fn complete(self, lease: Lease, saga: ScheduledSaga, end: SagaEnd) {
        let Self { node, definition, counters, run, id, .. } = self;
        let is_done = matches!(end, SagaEnd::Done(_));
        let Ok(outcome) = FinalOutcome::new(run.log(), end).encode() else { return };
        match lease.complete(outcome, Some(definition.retention)).await {
            // Only then: an entry is never missing while its saga is unfinished.
            Ok(_) => {
                counters.ended(is_done);
                node.remove(&saga).await;
            }
            Err(error) => {
                tracing::debug!(operation = ?id, %error, "the outcome of a saga is not recorded yet");
            }
        }
        node.ended.notify_waiters();
    }
}

fn no_database() -> SagaFault {
    let detail = "expected a database for steps of the kind `within`, found none: set `SagasBuilder::transactions`";
    SagaFault { reason: StuckReason::NoSuchStep, detail: detail.to_owned() }
}

fn cancellation(reason: &Blob) -> String {
    hapax_core::value::read(&reason.0).unwrap_or_default()
}
