//! The driver of a run: performs its effects on the store, the schedule and the steps' functions.
//!
//! *A driver may be dropped at any await, with the effect of a crash*: the log of the last save remains.
//! A call begins after its try is in that log.
//!
//! *A process that was frozen calls nothing afterwards*, nor does one whose machine was suspended: just
//! before each call the driver reads by its monotonic clock and its wall clock whether the lease may have
//! lapsed since the save ([`LeaseHandle::remaining`]). If so, and it cannot be renewed, the log is parked
//! without the try, which was not called.
//!
//! *A store that is away ends no run*: a save or a look is repeated until it is answered or another
//! owner is found, also after the lease has lapsed. The result of a call is in this process only, and
//! as long as no process has taken over, the save is still accepted.
//!
//! *A start* inserts its entry and saves the first log at the same time, in one commit of a store that
//! groups them, and calls nothing before both are done: see [`Starting`].
//!
//! *Parking*: the log is saved and the lease given up in one swap; then the entry is moved to the end of
//! a short pause; then signals and cancellations are looked for once more. A sender writes
//! the signal first and looks at the log afterwards, so that one of the two sees the other.

mod call;
mod look;
mod start;

use std::future::{Future, poll_fn};
use std::pin::pin;
use std::sync::Arc;
use std::task::Poll;
use std::time::Duration;

use bytes::Bytes;
use hapax_core::store::BoxFuture;
use hapax_core::value::ValueError;
use hapax_core::{FinishError, Lease, LeaseHandle, OperationId, SystemEntropy};
use tokio::time::{sleep, timeout};
use tracing::Instrument;

use self::look::look;
pub(crate) use self::start::Starting;
use crate::clock::StoreClock;
use crate::definition::Definition;
use crate::log::{Blob, Direction, Log, Stuck};
use crate::node::{Node, ScheduledSaga};
use crate::note::{CANCEL, FinalOutcome};
use crate::run::{Effect, Run, RunEvent, SagaEnd};
use crate::stats::{DefinitionCounters, is_newly_stuck};

/// Pause before a save is repeated that got no definite reply.
const SAVE_AGAIN: Duration = Duration::from_millis(200);

/// Time after which a flow that waits for something that is no step is reported.
const FLOW_WAIT: Duration = Duration::from_secs(60);

/// The end of a run.
enum RunEnd {
    /// The log is to be parked.
    Parked,
    /// The lease may have lapsed before a call, which was not made: the log is to be parked without its
    /// try.
    NotCalled,
    /// The record is to be completed.
    Complete(SagaEnd),
    /// The lease is lost, or may be: another node continues.
    Dropped,
}

/// Runs a saga under its lease until it ends, parks, or loses the lease. The entry exists, unless it is
/// that of a saga that starts.
pub(crate) async fn drive(
    node: Arc<Node>,
    definition: Arc<Definition>,
    lease: Lease,
    saga: ScheduledSaga,
    starting: Option<Starting>,
) {
    let (handle, id) = (lease.handle(), lease.id());
    let mut log = match lease.checkpoint().map(|log| Log::decode(log)) {
        None => definition.new_log(saga.key.id, lease.fence().issued_at().into()),
        Some(Ok(log)) => log,
        Some(Err(error)) => {
            // An operator needs to see it. It stays as it is, and is looked at again later.
            tracing::error!(saga = %definition.name, operation = ?id, %error, "the log of a saga cannot be read: run the version that wrote it");
            // Nothing was executed: it is no crash.
            let _ = lease.withdraw().await;
            return node.set_aside(&saga).await;
        }
    };
    // Only an owner that took over can withdraw without releasing a record that may have been accepted.
    if lease.is_takeover() && !node.enter_alone(id, log.crashes_before(lease.attempt())) {
        // A start took it over. This execution does not count, and the entry is due.
        let _ = lease.withdraw().await;
        return;
    }
    let clock = StoreClock::new(handle.clone(), log.latest());
    match &starting {
        // The entry does not exist.
        Some(_) if log.attempt > 0 => log.not_begun(clock.now()),
        Some(_) => {}
        None => log.inserted = true,
    }
    let span = tracing::info_span!("saga", name = definition.name, version = definition.version, operation = %id, attempt = lease.attempt());
    let counters = node.counters(&definition);
    let running = counters.run();
    let was_stuck = log.stuck.clone();
    let input = saga.input.clone();
    let run = definition.run(log, lease.attempt(), input.clone());
    let decided = handle.elapsed();
    let mut driver =
        Driver { node, definition, counters, run, clock, decided, handle, id, input, starting };
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
    /// Time since the claim at which the run decided about its next effect.
    decided: Duration,
    handle: LeaseHandle,
    id: OperationId,
    input: Bytes,
    /// Set until the entry of a saga that starts is inserted.
    starting: Option<Starting>,
}

impl Driver {
    /// Runs the saga until the run is over.
    async fn run(&mut self) -> RunEnd {
        match self.perform().await {
            RunEnd::NotCalled => {
                self.run.interrupt(self.clock.now());
                RunEnd::Parked
            }
            end => end,
        }
    }

    /// Performs effects until the run is over.
    async fn perform(&mut self) -> RunEnd {
        loop {
            if self.handle.remaining().is_zero()
                && let Err(end) = self.renew().await
            {
                return end;
            }
            let effect = self.next().await;
            // Both are done before anything else is.
            let comes_with_save = matches!(effect, Some(Effect::Save | Effect::Prepare(_)));
            let is_inserted = comes_with_save || self.insert_first().await;
            let Some(effect) = effect.filter(|_| is_inserted) else {
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
                Effect::Save => match self.save_soon().await {
                    Ok(cancelled) => RunEvent::Saved(cancelled),
                    Err(end) => return end,
                },
                Effect::Look(signal) => {
                    match look(&self.node, &self.handle, &self.id, &signal).await {
                        Some(value) => RunEvent::Signal(value),
                        None => return RunEnd::Dropped,
                    }
                }
                Effect::LookForCancellation => {
                    match look(&self.node, &self.handle, &self.id, CANCEL).await {
                        Some(reason) => {
                            RunEvent::Cancelled(reason.map(|reason| cancellation(&reason)))
                        }
                        None => return RunEnd::Dropped,
                    }
                }
                Effect::Prepare(call) => match self.prepare_soon(call).await {
                    Ok(prepared) => RunEvent::Prepared(prepared),
                    Err(end) => return end,
                },
                Effect::Call(call) => match self.call(call).await {
                    Ok(event) => event,
                    Err(end) => return end,
                },
                Effect::Undo(call) => match self.undo(call).await {
                    Ok(event) => event,
                    Err(end) => return end,
                },
                Effect::Reconcile(call) => match self.reconcile(call).await {
                    Ok(verdict) => RunEvent::Reconciled(verdict),
                    Err(end) => return end,
                },
            };
            if let Some(step) = called {
                self.counters.called(&self.run.log().steps[step].name, &event);
            }
            let is_saved = matches!(
                event,
                RunEvent::Saved(_) | RunEvent::Committed(_) | RunEvent::UndoCommitted
            );
            self.run.resume(event, self.clock.now(), &SystemEntropy);
            if is_saved && self.run.log().crashes == 0 {
                self.node.leave_alone(&self.id);
            }
        }
    }

    /// Returns the next effect; `None` if the node shuts down, and in a quarantine. An effect that ends the run is
    /// performed nevertheless.
    async fn next(&mut self) -> Option<Effect> {
        let mut shutdown = pin!(self.node.shutdown());
        let (run, clock, handle) = (&mut self.run, &self.clock, &self.handle);
        let decided = &mut self.decided;
        let mut next = pin!(poll_fn(|cx| {
            *decided = handle.elapsed();
            if let Poll::Ready(effect) = run.advance(cx, clock.now()) {
                return Poll::Ready(Some(effect));
            }
            shutdown.as_mut().poll(cx).map(|()| None)
        }));
        let effect = match timeout(FLOW_WAIT, next.as_mut()).await {
            Ok(effect) => effect?,
            Err(_) => {
                self.counters.flow_waits();
                tracing::warn!(saga = %self.definition.name, operation = %self.id, "a flow has waited for a minute for something that is no step: make it a step, which has a timeout");
                next.await?
            }
        };
        let ends = matches!(effect, Effect::Park | Effect::Complete(_));
        let pauses = self.node.is_shutting_down() || self.node.engine.quarantines().pauses();
        (ends || !pauses).then_some(effect)
    }

    /// Saves the log as it is, because the lease may have lapsed: the process was frozen, its machine was
    /// suspended, or its wall clock stepped forward. If no process has taken over, the lease holds again;
    /// else the next save or call finds that. The run decides only then, by the present time, whether the
    /// next call may be made. A cancellation may have been acknowledged since the last look for one.
    async fn renew(&mut self) -> Result<(), RunEnd> {
        if let Some(log) = self.encoded(self.run.log()) {
            // Without a reply the lease stays lapsed, and nothing is called.
            let _ = self.handle.save(log).await;
        }
        if self.run.is_about_to_step() && !self.handle.remaining().is_zero() {
            let reason = look(&self.node, &self.handle, &self.id, CANCEL).await;
            let reason = reason.ok_or(RunEnd::Dropped)?.map(|reason| cancellation(&reason));
            self.run.resume(RunEvent::Cancelled(reason), self.clock.now(), &SystemEntropy);
        }
        Ok(())
    }

    /// Saves the log, and looks for a cancellation. `None`: the lease is lost.
    async fn save(&mut self) -> Option<Option<String>> {
        let log = self.encoded(self.run.log())?;
        let handle = &self.handle;
        let save = async {
            loop {
                match handle.save(log.clone()).await {
                    Ok(()) => return Some(()),
                    // The save may have arrived. A second one finds it, or writes it.
                    Err(FinishError::Pending) if !handle.is_lost() => sleep(SAVE_AGAIN).await,
                    Err(_) => return None,
                }
            }
        };
        let (node, id, direction) = (&*self.node, &self.id, self.run.log().direction());
        let look = async {
            match direction {
                // Until it is answered: a call without it could follow a cancellation.
                Direction::Forward => look(node, handle, id, CANCEL).await,
                // What is being undone cannot be cancelled.
                Direction::Undo => Some(None),
            }
        };
        let (saved, reason) = tokio::join!(save, look);
        saved?;
        Some(reason?.map(|reason| cancellation(&reason)))
    }

    /// Encodes a log. `None`, which is reported: it is larger than a record can be.
    fn encoded(&self, log: &Log) -> Option<Bytes> {
        let report = |error: &ValueError| {
            tracing::error!(saga = %self.definition.name, operation = %self.id, %error, "the log of a saga cannot be saved: lower `max_log`");
        };
        log.encode().inspect_err(report).ok()
    }

    /// Counts the end of a run.
    fn count(&self, end: &RunEnd, was_stuck: Option<&Stuck>) {
        let log = self.run.log();
        match (end, &log.stuck) {
            (RunEnd::Dropped, _) => self.counters.lost(),
            (RunEnd::Parked, None) => self.counters.parked(),
            (RunEnd::Parked, stuck) if is_newly_stuck(was_stuck, stuck.as_ref()) => {
                self.counters.stuck(log.current_step().map(|step| step.name.as_str()));
            }
            (RunEnd::Parked | RunEnd::NotCalled | RunEnd::Complete(_), _) => {}
        }
    }

    /// Ends the lease by the end of the run.
    async fn end(self, lease: Lease, saga: ScheduledSaga, end: RunEnd) {
        match end {
            // `run` has parked it.
            RunEnd::NotCalled => {}
            RunEnd::Dropped => {
                tracing::debug!(operation = ?self.id, "another node continues a saga");
            }
            RunEnd::Parked => self.park(lease, saga).await,
            RunEnd::Complete(end) => self.complete(lease, saga, end).await,
        }
    }

    async fn park(self, lease: Lease, saga: ScheduledSaga) {
        let log = self.run.log();
        let (Some(parked), Some(bytes)) = (&log.parked, self.encoded(log)) else { return };
        let Self { node, definition, clock, handle, id, .. } = &self;
        if let Some(stuck) = &log.stuck {
            // Without the detail, which has the text of an error of another system.
            let step = stuck.step.and_then(|step| log.steps.get(step));
            let tries = step.map(|step| step.tries(stuck.direction).begun);
            let step = step.map(|step| step.name.as_str());
            tracing::warn!(saga = %definition.name, operation = %id, reason = stuck.reason.as_str(), step, tries, "a saga is stuck");
        }
        let span = clock.until(parked.until);
        if lease.park(bytes, span).await.is_err() {
            // The write is deferred, or another node continues: the entry is due before.
            return;
        }
        match span.is_zero() {
            // Another node continues at once. Making an entry due is right at any time.
            true => node.make_due(saga.key).await.unwrap_or_else(|error| {
                tracing::debug!(operation = ?id, %error, "the entry of a parked saga was not made due: another process resumes it within a lease");
            }),
            false => node.postpone_parked(saga.key, span).await,
        }
        if node.is_awaited(id, handle.generation(), log).await.unwrap_or(true) {
            node.wake(id).await.unwrap_or_else(|error| {
                tracing::warn!(operation = ?id, %error, "expected to wake a parked saga whose signal has arrived, found an error: it continues when its entry is due");
            });
        }
    }

    async fn complete(self, lease: Lease, saga: ScheduledSaga, end: SagaEnd) {
        let Self { node, definition, counters, run, id, .. } = self;
        let is_done = matches!(end, SagaEnd::Done(_));
        let report = |error: &ValueError| {
            tracing::error!(saga = %definition.name, operation = %id, %error, "the outcome of a saga cannot be saved: shorten it");
        };
        let outcome = FinalOutcome::new(run.log(), end).encode().inspect_err(report);
        let Ok(outcome) = outcome else { return };
        match lease.complete(outcome.clone(), Some(definition.retention)).await {
            // Only then: an entry is never missing while its saga is unfinished.
            Ok(_) => {
                counters.ended(is_done);
                node.note_outcome(&id, outcome);
                node.remove(&saga).await;
            }
            Err(error) => {
                tracing::debug!(operation = ?id, %error, "the outcome of a saga is not recorded yet");
            }
        }
    }
}

fn cancellation(reason: &Blob) -> String {
    hapax_core::value::read(&reason.0).unwrap_or_default()
}
