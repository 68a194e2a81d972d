//! Calls of the functions of steps: within their timeouts, and only under a lease.
//!
//! *A function is polled until its timeout, and not once after it*, by the clock of the lease, which also
//! counts the time for which the process was frozen or its machine suspended. tokio polls a future before
//! its timeout, and both are due when such a process wakes: the call would go on long after others have
//! waited for its end. Its next owner waits for the timeout from the takeover on, which comes after the call
//! has begun.

use std::error::Error as StdError;
use std::future::{Future, poll_fn};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::pin::pin;
use std::task::Poll;
use std::time::Duration;

use hapax_core::transaction::{CheckpointCommit, TransactionBackend, TxHandle};
use hapax_core::{LeaseHandle, Verdict};
use tokio::time::timeout;
use tracing::{Instrument, Span};

use super::{Driver, RunEnd};
use crate::call::{CallContext, CallTries, Replacement};
use crate::definition::{Functions, text};
use crate::log::{Blob, Direction, Log, StepLog, StepOutcome, StuckReason};
use crate::note::step_key;
use crate::run::{Call, Kind, RunEvent, StuckCause, TryEnd, UndoFailure, too_large};
use crate::stats::Running;

impl Driver {
    /// Prepares a try.
    pub(super) async fn prepare(&mut self, call: Call) -> Result<Result<Blob, TryEnd>, RunEnd> {
        let step = &self.run.log().steps[call.step];
        let functions = self.functions(step)?;
        let prepare = functions.prepare.as_ref().ok_or(RunEnd::Dropped)?;
        let (context, argument) = (self.context(call), step.argument.0.clone());
        let span = self.span("prepare", call);
        let function = || prepare(context, argument).instrument(span);
        let ended = Self::guard(&self.handle, self.decided, call, function).await?;
        Ok(ended.unwrap_or_else(|error| Err(TryEnd::NotSent(error))))
    }

    pub(super) async fn call(&mut self, call: Call) -> Result<RunEvent, RunEnd> {
        if self.kind(call) == Some(Kind::Within) {
            return self.call_within(call).await;
        }
        let step = &self.run.log().steps[call.step];
        let functions = self.functions(step)?;
        let context = self.context(call);
        let replacement = context.replacement.clone();
        let argument = step.argument.0.clone();
        let (span, _running) = (self.span("step", call), self.running(call));
        let function = || (functions.call)(context, argument).instrument(span);
        let ended = Self::guard(&self.handle, self.decided, call, function).await?;
        if let Some(value) = replacement.take() {
            self.run.replace_prepared(call.step, value);
        }
        Ok(RunEvent::Called(ended.unwrap_or_else(TryEnd::Unknown)))
    }

    /// Calls a step whose writes commit with the log. Whatever did not commit did not happen.
    async fn call_within(&mut self, call: Call) -> Result<RunEvent, RunEnd> {
        let Some(backend) = self.node.transactions.clone() else {
            return Ok(RunEvent::Called(TryEnd::Faulted(no_database())));
        };
        let step = &self.run.log().steps[call.step];
        let functions = self.functions(step)?;
        let tx = self.handle.begin(&backend);
        let context = CallContext { tx: Some(tx.clone()), ..self.context(call) };
        let argument = step.argument.0.clone();
        let (span, _running) = (self.span("step", call), self.running(call));
        let function = || (functions.call)(context, argument).instrument(span);
        let ended = Self::guard(&self.handle, self.decided, call, function).await?;
        Ok(match ended.unwrap_or_else(TryEnd::NotSent) {
            TryEnd::Happened(value) if value.0.len() <= self.definition.terms.max_value => {
                let log = self.run.log_with(call.step, value.clone());
                match self.commit(&backend, tx, &log).await? {
                    Ok(Ok(())) => RunEvent::Committed(value),
                    Ok(Err(error)) => RunEvent::Called(TryEnd::NotSent(error)),
                    Err(fault) => RunEvent::Called(TryEnd::Lost(fault)),
                }
            }
            end => RunEvent::Called(match (self.roll_back(&backend, tx).await, end) {
                (Ok(()), end) => self.rolled_back(call, end),
                (Err(fault), _) => TryEnd::Lost(fault),
            }),
        })
    }

    /// Returns the end of a try whose transaction was rolled back, so that it did not happen.
    fn rolled_back(&self, call: Call, end: TryEnd) -> TryEnd {
        let limit = self.definition.terms.max_value;
        match end {
            TryEnd::Unknown(error) => TryEnd::NotSent(error),
            TryEnd::Lost(fault) => TryEnd::Faulted(fault),
            TryEnd::Happened(value) => {
                let name = &self.run.log().steps[call.step].name;
                let advice = "its writes are rolled back: shorten the result, then `retry`";
                TryEnd::Faulted(too_large(name, limit, &value, advice))
            }
            end => end,
        }
    }

    /// Calls the undo of such a step.
    async fn undo_within(&mut self, call: Call) -> Result<RunEvent, RunEnd> {
        let Some(backend) = self.node.transactions.clone() else {
            return Ok(RunEvent::Undone(Err(UndoFailure::Faulted(no_database()))));
        };
        let tx = self.handle.begin(&backend);
        Ok(match self.call_undo(call, Some(tx.clone())).await? {
            Ok(()) => match self.commit(&backend, tx, &self.run.log_undone(call.step)).await? {
                Ok(Ok(())) => RunEvent::UndoCommitted,
                Ok(Err(error)) => RunEvent::Undone(Err(UndoFailure::Error(error))),
                Err(fault) => RunEvent::Undone(Err(UndoFailure::Faulted(fault))),
            },
            Err(failure) => RunEvent::Undone(Err(match self.roll_back(&backend, tx).await {
                Ok(()) => failure,
                Err(fault) => UndoFailure::Faulted(fault),
            })),
        })
    }

    /// Commits a transaction with a log. The inner error is that of a transaction that was rolled back,
    /// the outer one that of a step that ended it itself. After [`RunEnd::Dropped`] the next run finds in
    /// the log whether it was committed.
    async fn commit(
        &mut self,
        backend: &TransactionBackend,
        tx: TxHandle,
        log: &Log,
    ) -> Result<Result<Result<(), String>, StuckCause>, RunEnd> {
        let bytes = self.encoded(log).ok_or(RunEnd::Dropped)?;
        Ok(Ok(match self.handle.commit(backend, tx, bytes).await {
            CheckpointCommit::Committed => Ok(()),
            CheckpointCommit::RolledBack => Err("the transaction lost against another".to_owned()),
            CheckpointCommit::Rejected(error) => Err(text(&*error)),
            CheckpointCommit::EndedEarly(error) => return Ok(Err(ended_early(&*error))),
            CheckpointCommit::Lost(_) | CheckpointCommit::Unknown => return Err(RunEnd::Dropped),
        }))
    }

    /// Rolls a transaction back, unless the step ended it itself.
    async fn roll_back(
        &mut self,
        backend: &TransactionBackend,
        tx: TxHandle,
    ) -> Result<(), StuckCause> {
        self.handle.roll_back(backend, tx).await.map_err(|error| ended_early(&*error))
    }

    pub(super) async fn undo(&mut self, call: Call) -> Result<RunEvent, RunEnd> {
        match self.kind(call) {
            Some(Kind::Within) => self.undo_within(call).await,
            _ => Ok(RunEvent::Undone(self.call_undo(call, None).await?)),
        }
    }

    async fn call_undo(
        &mut self,
        call: Call,
        tx: Option<TxHandle>,
    ) -> Result<Result<(), UndoFailure>, RunEnd> {
        let step = &self.run.log().steps[call.step];
        let functions = self.functions(step)?;
        let undo = functions.undo.as_ref().ok_or(RunEnd::Dropped)?;
        let result = match &step.outcome {
            Some(StepOutcome::Happened(result)) => Some(result.0.clone()),
            Some(StepOutcome::Rejected(_)) | None => None,
        };
        let context = CallContext { tx, ..self.context(call) };
        let argument = step.argument.0.clone();
        let (span, _running) = (self.span("undo", call), self.running(call));
        let function = || undo(context, argument, result).instrument(span);
        let ended = Self::guard(&self.handle, self.decided, call, function).await?;
        Ok(ended.unwrap_or_else(|error| Err(UndoFailure::Error(error))))
    }

    fn functions(&self, step: &StepLog) -> Result<&Functions, RunEnd> {
        self.definition.functions.get(step.name.as_str()).ok_or(RunEnd::Dropped)
    }

    fn kind(&self, call: Call) -> Option<Kind> {
        let name = self.run.log().steps[call.step].name.as_str();
        self.definition.terms.steps.get(name).map(|terms| terms.kind)
    }

    pub(super) async fn reconcile(&mut self, call: Call) -> Result<Verdict<Blob>, RunEnd> {
        let step = &self.run.log().steps[call.step];
        let functions = self.functions(step)?;
        let reconcile = functions.reconcile.as_ref().ok_or(RunEnd::Dropped)?;
        // A reconcile function gets the key of the step, also during the compensation.
        let context = self.context(Call { direction: Direction::Forward, ..call });
        let argument = step.argument.0.clone();
        let span = self.span("reconcile", call);
        let function = || reconcile(context, argument).instrument(span);
        let ended = Self::guard(&self.handle, self.decided, call, function).await?;
        Ok(ended.unwrap_or(Verdict::CannotSay))
    }

    /// Returns the span of a call. It has no key, no scope and no contents.
    fn span(&self, function: &'static str, call: Call) -> Span {
        let step = &self.run.log().steps[call.step];
        tracing::info_span!(
            "call",
            function,
            step = step.name,
            nth = step.nth,
            try_number = call.number
        )
    }

    fn running(&self, call: Call) -> Option<Running> {
        self.counters.call(&self.run.log().steps[call.step].name, call.direction)
    }

    fn context(&self, call: Call) -> CallContext {
        let step = &self.run.log().steps[call.step];
        let key = step_key(&self.id, call.direction, &step.name, step.nth);
        let tries = CallTries::new(step.tries(call.direction), call.number, self.clock.now());
        let (fence, input) = (self.handle.fence(), self.input.clone());
        let (tx, replacement) = (None, Replacement::default());
        CallContext { key, fence, id: self.id, input, tries, tx, replacement }
    }

    /// Calls a function within its timeout, which counts from the decision to call it: from the time
    /// `decided` of the lease's clock. An error is that of a call whose result is unknown.
    async fn guard<F: Future>(
        handle: &LeaseHandle,
        decided: Duration,
        call: Call,
        function: impl FnOnce() -> F,
    ) -> Result<Result<F::Output, String>, RunEnd> {
        let Call { timeout: time, .. } = call;
        let is_late = || handle.elapsed().saturating_sub(decided) >= time;
        if handle.is_lost() {
            return Err(RunEnd::Dropped);
        }
        if is_late() || handle.remaining().is_zero() {
            return Err(RunEnd::NotCalled);
        }
        let late =
            || format!("expected a result within {time:?}, found none: the call was dropped");
        let panicked = || "the function panicked, see the standard error of the service".to_owned();
        let Ok(future) = catch_unwind(AssertUnwindSafe(function)) else {
            return Ok(Err(panicked()));
        };
        let mut future = pin!(future);
        let caught = poll_fn(|cx| {
            if is_late() {
                return Poll::Ready(Err(late()));
            }
            match catch_unwind(AssertUnwindSafe(|| future.as_mut().poll(cx))) {
                Ok(poll) => poll.map(Ok),
                Err(_) => Poll::Ready(Err(panicked())),
            }
        });
        tokio::select! {
            biased;
            () = handle.lost() => Err(RunEnd::Dropped),
            ended = timeout(time, caught) => Ok(ended.unwrap_or_else(|_| Err(late()))),
        }
    }
}

fn ended_early(error: &(dyn StdError + 'static)) -> StuckCause {
    let detail = format!(
        "expected a transaction that the step does not end itself, found one whose writes may be committed: {}",
        text(error)
    );
    StuckCause { reason: StuckReason::Unknown, detail }
}

fn no_database() -> StuckCause {
    let detail = "expected a database for steps of the kind `within`, found none: set `SagasBuilder::transactions`";
    StuckCause { reason: StuckReason::NoSuchStep, detail: detail.to_owned() }
}
