//! Effects that a run requests, and the events by which its driver reports their results.

use std::time::Duration;

use hapax_core::Verdict;
use hapax_core::store::BoxFuture;

use crate::log::{Blob, Direction, Failure, LogTime, StuckReason};

/// The future of a flow.
pub type FlowFuture = BoxFuture<'static, FlowEnd>;

/// The end of a flow.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum FlowEnd {
    /// The flow returned this value.
    Returned(Blob),
    /// The flow returned this error.
    Failed(Blob),
    /// The flow could not run, because of this fault.
    Faulted(StuckCause),
}

/// The cause for which a saga becomes stuck.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct StuckCause {
    /// The reason.
    pub reason: StuckReason,
    /// Text: expected and found.
    pub detail: String,
}

/// A call of a step's function, or of its undo.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Call {
    /// Position of the step in the log.
    pub step: usize,
    /// Whether it runs or is undone.
    pub direction: Direction,
    /// Number of the try, from 1.
    pub number: u32,
    /// Time after which the try is given up.
    pub timeout: Duration,
}

/// End of a saga.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum SagaEnd {
    /// The flow returned this value.
    Done(Blob),
    /// Every step that happened was undone, for this reason.
    Undone(Failure),
}

/// The next effect of a run.
#[derive(Clone, PartialEq, Eq, Debug)]
#[must_use]
pub enum Effect {
    /// Save the log and check for a cancellation at the same time; then [`RunEvent::Saved`].
    Save,
    /// Prepare the next try of a step; then [`RunEvent::Prepared`].
    Prepare(Call),
    /// Call the step's function; then [`RunEvent::Called`].
    Call(Call),
    /// Call the step's undo; then [`RunEvent::Undone`].
    Undo(Call),
    /// Call the step's reconcile function; then [`RunEvent::Reconciled`].
    Reconcile(Call),
    /// Look whether the signal has arrived; then [`RunEvent::Signal`].
    Look(String),
    /// Look whether the saga was cancelled; then [`RunEvent::Cancelled`].
    LookForCancellation,
    /// Wait until this time, and advance again.
    Wait(LogTime),
    /// Save the log, and give the lease up until the time of [`Log::parked`](crate::log::Log::parked).
    /// The run is over. If the saga waits for a signal, look for it once more afterwards.
    Park,
    /// Complete the record. The run is over.
    Complete(SagaEnd),
}

/// Result of an effect.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum RunEvent {
    /// The log was saved. With the reason of a cancellation, if there is one.
    Saved(Option<String>),
    /// The try was prepared, with this value to save, or ends without a call.
    Prepared(Result<Blob, TryEnd>),
    /// The try has ended.
    Called(TryEnd),
    /// The step happened, and [`Run::log_with`](super::Run::log_with) its result was saved together
    /// with its writes.
    Committed(Blob),
    /// The undo succeeded, and [`Run::log_undone`](super::Run::log_undone) was saved together with its
    /// writes.
    UndoCommitted,
    /// The undo has ended.
    Undone(Result<(), UndoFailure>),
    /// The reconcile function has ended.
    Reconciled(Verdict<Blob>),
    /// The signal's value, if it has arrived.
    Signal(Option<Blob>),
    /// The reason of the cancellation, if there is one.
    Cancelled(Option<String>),
}

/// End of a try.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum TryEnd {
    /// The step happened.
    Happened(Blob),
    /// The step was rejected, and has no effect.
    Rejected(Blob),
    /// Nothing was sent.
    NotSent(String),
    /// The step may have happened.
    Unknown(String),
    /// The step may have happened, and the called system names the time until the next try.
    RetryAfter(Duration, String),
    /// Nothing was called: this is no try, and the next one comes after this time.
    Postponed(Duration, String),
    /// The step cannot be called.
    Faulted(StuckCause),
    /// The step has ended, and its result cannot be stored.
    Lost(StuckCause),
}

/// Failure of an undo.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum UndoFailure {
    /// The undo is tried again.
    Error(String),
    /// The undo cannot be called.
    Faulted(StuckCause),
}
