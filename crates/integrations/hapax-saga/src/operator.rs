//! Operators' view of sagas, and their decisions about stuck ones.
//!
//! Nothing here needs a definition: the log has all that an operator sees and decides about. A saga
//! that has run nothing is aborted without one, too.

mod starts;

use std::num::NonZeroU32;
use std::time::Duration;

use bytes::Bytes;
use hapax_core::schedule::{EntryKey, EntryPage, QueueStatus};
use hapax_core::store::StoredRecord;
use hapax_core::{
    Amendment, ClaimError, EntryId, Idempotency, Key, OperationId, RecordState, Scope, StoreError,
    Timestamp, WriteId, WriteResult, value,
};
use tokio::time::sleep;

use crate::log::{
    Blob, Direction, Failure, Log, LogTime, LoggedDecision, Parked, StepOutcome, Stuck, UndoEnd,
};
use crate::note::{EndedStep, FinalEnd, FinalOutcome, saga_id};
use crate::schedule::on_schedule;
pub use starts::UnacceptedStart;
pub(crate) use starts::{PAGE, before};

/// A decision about a stuck saga.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum SagaDecision {
    /// The stuck step, undo or flow gets new tries. A `once` step that may have happened, or a step whose
    /// key has expired, is not called: only its reconcile function is, if it has one.
    Retry,
    /// The step that is stuck happened, with this result, or its undo did, which has none. The result
    /// is a value of serde, encoded by [`SagaDecision::happened`].
    Happened(Blob),
    /// The step that is stuck, or its undo, did not happen, and never will: it is tried again under its
    /// key, which counts as new.
    DidNotHappen {
        /// Also while a try of it may still take effect.
        force: bool,
    },
    /// The undo that is stuck is skipped: its step's effect stays.
    Skip,
    /// The saga fails: what happened is undone. Applies also to a saga that is due and that no process
    /// runs, such as one whose definition no process has. If no try of a step is in its log, it ends at
    /// once, and its outcome is kept for 30 days, since the retention of the definition is not known; else a
    /// process with the definition has to undo them.
    Abort,
}

/// Pauses before the tries to wake a saga whose decision is written.
const WAKE: [Duration; 4] =
    [Duration::ZERO, Duration::from_millis(100), Duration::from_secs(1), Duration::from_secs(3)];

impl SagaDecision {
    /// Returns the decision that the step happened with this result, such as a JSON value.
    ///
    /// # Errors
    /// [`value::ValueError`] if the value is larger than 64 KiB or cannot be serialized.
    pub fn happened(result: &impl serde::Serialize) -> Result<Self, value::ValueError> {
        Ok(Self::Happened(Blob(value::write(result, 64 << 10)?)))
    }

    /// Returns the name of the decision.
    #[must_use]
    pub const fn as_str(&self) -> &'static str {
        match self {
            Self::Retry => "retry",
            Self::Happened(_) => "resolve happened",
            Self::DidNotHappen { .. } => "resolve did-not-happen",
            Self::Skip => "skip",
            Self::Abort => "abort",
        }
    }
}

/// Reasons for which a decision does not apply to a log.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum DecisionMismatch {
    /// The saga is not stuck.
    #[error(
        "expected a stuck saga, found one that continues by itself: no decision is needed; its service can cancel it"
    )]
    NotStuck,
    /// The saga is stuck in no step.
    #[error("expected a step that is stuck, found none: use `retry` or `abort`")]
    NoStep,
    /// The saga is stuck in no undo.
    #[error("expected a stuck undo, found none: `skip` applies only to an undo")]
    NoUndo,
    /// No process has accepted the start.
    #[error("expected a saga, found a start that no process has accepted: use `abort`")]
    NotAccepted,
    /// A try of the step may still take effect, so that it is not known yet that it did not happen.
    #[error(
        "a try of the step may still take effect for {} s: `happened` is accepted now; `did-not-happen` then, \
         or with `force`", remaining.as_secs_f64().ceil()
    )]
    MayTakeEffect {
        /// The time from which it cannot, by the store's clock.
        until: LogTime,
        /// The time until then.
        remaining: Duration,
    },
    /// The compensation has begun.
    #[error(
        "expected a saga that runs forward, found one that is being undone: use `retry` or `skip`"
    )]
    Compensates,
}

impl Log {
    /// Applies a decision about a stuck saga, which then continues. A saga that is not stuck can be
    /// aborted, if it is due and no node runs it.
    ///
    /// # Errors
    /// [`DecisionMismatch`]; the log is unchanged.
    pub fn decide(
        &mut self,
        decision: &SagaDecision,
        by: &str,
        reason: &str,
        at: LogTime,
    ) -> Result<(), DecisionMismatch> {
        let (step, direction) = match &self.stuck {
            Some(stuck) => (stuck.step, stuck.direction),
            None if *decision == SagaDecision::Abort => (None, self.direction()),
            None => return Err(DecisionMismatch::NotStuck),
        };
        // The store's clock may have stepped back since.
        let at = at.max(self.latest());
        let undo = step.filter(|_| direction == Direction::Undo);
        match decision {
            SagaDecision::Retry => {
                if let Some(step) = step {
                    self.steps[step].grant(direction);
                }
            }
            SagaDecision::Happened(result) => {
                let step = &mut self.steps[step.ok_or(DecisionMismatch::NoStep)?];
                match direction {
                    Direction::Forward => {
                        step.outcome = Some(StepOutcome::Happened(result.clone()));
                    }
                    Direction::Undo => step.undone = Some(UndoEnd::Undone),
                }
            }
            SagaDecision::DidNotHappen { force } => {
                let until = self.stuck.as_ref().and_then(Stuck::may_take_effect_until);
                if let Some(until) = until.filter(|until| at < *until && !force) {
                    let remaining = until.since(at);
                    return Err(DecisionMismatch::MayTakeEffect { until, remaining });
                }
                let step = &mut self.steps[step.ok_or(DecisionMismatch::NoStep)?];
                if direction == Direction::Forward {
                    // A result that could not be read is none.
                    step.outcome = None;
                }
                step.grant(direction);
                let tries = step.tries_mut(direction);
                (tries.arrived, tries.first) = (false, None);
            }
            SagaDecision::Skip => {
                let step = undo.ok_or(DecisionMismatch::NoUndo)?;
                self.steps[step].undone = Some(UndoEnd::Skipped);
            }
            SagaDecision::Abort if self.failure.is_some() => {
                return Err(DecisionMismatch::Compensates);
            }
            SagaDecision::Abort => {
                self.failure =
                    Some(Failure::Cancelled { reason: format!("aborted by {by}: {reason}") });
            }
        }
        self.log_decision(LoggedDecision {
            by: by.to_owned(),
            at,
            reason: reason.to_owned(),
            action: decision.as_str().to_owned(),
        });
        (self.stuck, self.crashes) = (None, 0);
        self.parked = Some(Parked { until: at, signal: None });
        Ok(())
    }

    /// Adds a decision. Of equal ones in a row the first and the last one stay: a program may decide the same
    /// whenever it runs, and the log has a limit. The last one is later than the one that it replaces: by
    /// that [`decided_since`] distinguishes them.
    fn log_decision(&mut self, mut decision: LoggedDecision) {
        let is_same = |it: &LoggedDecision| {
            (&it.by, &it.reason, &it.action) == (&decision.by, &decision.reason, &decision.action)
        };
        if let [.., before, last] = &self.decisions[..]
            && is_same(before)
            && is_same(last)
        {
            decision.at = decision.at.max(last.at.after(Duration::from_micros(1)));
            self.decisions.pop();
        }
        self.decisions.push(decision);
    }

    /// Returns the number of decisions and the time of the last one, which grow with each decision.
    fn decided(&self) -> (usize, Option<LogTime>) {
        (self.decisions.len(), self.decisions.last().map(|last| last.at))
    }

    /// Returns whether the last decision is this one, so that its repetition has only to wake the saga.
    fn has_decided(&self, decision: &SagaDecision, by: &str, reason: &str) -> bool {
        let is_same = |it: &LoggedDecision| {
            (&*it.by, &*it.reason, &*it.action) == (by, reason, decision.as_str())
        };
        let has_result = match decision {
            // About an undo, which has no result.
            SagaDecision::Happened(_) if self.failure.is_some() => true,
            SagaDecision::Happened(result) => self.steps.iter().any(
                |step| matches!(&step.outcome, Some(StepOutcome::Happened(it)) if it == result),
            ),
            _ => true,
        };
        self.stuck.is_none() && has_result && self.decisions.last().is_some_and(is_same)
    }
}

/// A saga as operators see it.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct SagaView {
    /// Its operation id.
    pub id: OperationId,
    /// Write id of the record that was read; a decision counts only while the record has it.
    pub write_id: WriteId,
    /// The store's clock when it was read.
    pub now: Timestamp,
    /// End of the current lease: until then a process runs the saga, or it is parked.
    pub lease_until: Timestamp,
    /// Number of executions so far.
    pub attempt: u32,
    /// The description of its start for operators, JSON with its `key`; only where a secret seals.
    pub description: Option<Bytes>,
    /// Its log; `None` before the first save, and if it cannot be read.
    pub log: Option<Log>,
    /// True if its log cannot be read: another version wrote it.
    pub is_unreadable: bool,
}

impl SagaView {
    /// Returns whether this decision was the last one, so that its repetition has only to wake the saga.
    #[must_use]
    pub fn has_decided(&self, decision: &SagaDecision, by: &str, reason: &str) -> bool {
        self.log.as_ref().is_some_and(|log| log.has_decided(decision, by, reason))
    }
}

/// A saga that has ended.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct EndedSaga {
    /// The description of its start for operators, JSON with its `key`; only where a secret seals.
    pub description: Option<Bytes>,
    /// The reason for which it was undone; `None` if it is done.
    pub failure: Option<Failure>,
    /// Its steps.
    pub steps: Vec<EndedStep>,
    /// The decisions of operators about it.
    pub decisions: Vec<LoggedDecision>,
}

/// A saga that was looked up.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum SagaLookup {
    /// An unfinished saga.
    Unfinished(Box<SagaView>),
    /// A saga that is done or was undone.
    Ended(EndedSaga),
    /// There is no saga with this id.
    NotFound,
}

/// Errors of operators' calls.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum SagaOperatorError {
    /// There is no unfinished saga with this id.
    #[error("expected an unfinished saga, found none with this id: it has ended, or never began")]
    NotFound,
    /// The decision does not apply.
    #[error(transparent)]
    Mismatch(#[from] DecisionMismatch),
    /// The decision is written, and the saga could not be woken: it continues when its entry is due,
    /// perhaps a day later. The same decision again wakes it.
    #[error("the decision is recorded, but the saga could not be woken: decide the same again")]
    NotWoken(#[source] StoreError),
    /// The saga has changed since it was read.
    #[error("the saga has changed since it was read: show it, and decide again")]
    Changed,
    /// The log cannot be read.
    #[error(
        "expected a step log of this version, found another encoding or damage: use the version of `hapax` or of the service that wrote it"
    )]
    Unreadable,
    /// The store is unavailable, or has no schedule.
    #[error(transparent)]
    Store(#[from] StoreError),
    /// The decision could not be written.
    #[error(transparent)]
    Write(#[from] ClaimError),
    /// The log is too large to be written.
    #[error(transparent)]
    Value(#[from] value::ValueError),
}

impl SagaOperatorError {
    /// Returns whether the error is that of one record, and not of the store.
    pub(crate) const fn is_of_one_saga(&self) -> bool {
        matches!(self, Self::Unreadable | Self::Store(StoreError::Corrupt(_)))
    }
}

/// Sagas of a store, for operators.
#[derive(Clone, Debug)]
pub struct SagaOperator {
    pub(crate) engine: Idempotency,
}

impl SagaOperator {
    /// Creates the view over an engine, whose store has the schedule.
    #[must_use]
    pub const fn new(engine: Idempotency) -> Self {
        Self { engine }
    }

    /// Returns a page of unfinished sagas in order of operation id, after `after`, and where the next
    /// page begins; `None` at the end. Sagas that have ended are left out, and [starts](UnacceptedStart) that
    /// no process has accepted. One whose log cannot be read
    /// is [marked](SagaView::is_unreadable); one whose record cannot be read is left out, and
    /// [`census`](Self::census) counts it.
    ///
    /// # Errors
    /// [`SagaOperatorError::Store`].
    pub async fn list(
        &self,
        after: Option<EntryKey>,
        limit: NonZeroU32,
    ) -> Result<(Vec<SagaView>, Option<EntryKey>), SagaOperatorError> {
        let page = self.entries(after, limit).await?;
        let mut sagas: Vec<SagaView> = Vec::new();
        for (key, entry) in &page.entries {
            let is_saga = entry.as_ref().is_ok_and(|it| it.queue.as_str().starts_with("saga:"));
            let is_new = sagas.last().is_none_or(|saga| saga.id != key.operation);
            if !is_saga || !is_new {
                continue;
            }
            let seen = match self.engine.load(&key.operation).await {
                Ok(seen) => seen,
                // It must not hide the others.
                Err(error @ StoreError::Corrupt(_)) => {
                    tracing::warn!(operation = %key.operation, %error, "a saga cannot be listed");
                    continue;
                }
                Err(error) => return Err(error.into()),
            };
            let stored = seen.stored.filter(|stored| stored.record.scheme.is_saga());
            if let Some(stored) = stored.filter(|it| it.record.state == RecordState::InFlight) {
                sagas.push(view(key.operation, seen.now, &stored));
            }
        }
        Ok((sagas, page.next()))
    }

    /// Returns the queues of the schedule: one for each definition and version, with the number of its
    /// unfinished sagas. If it is overdue for minutes, no process with the definition runs, or all are
    /// at their limit.
    ///
    /// # Errors
    /// [`SagaOperatorError::Store`].
    pub async fn definitions(&self) -> Result<Vec<QueueStatus>, SagaOperatorError> {
        let mut queues = on_schedule(&self.engine, |schedule| schedule.queues()).await?;
        queues.retain(|queue| queue.queue.as_str().starts_with("saga:"));
        Ok(queues)
    }

    /// Returns a page of the schedule's entries.
    pub(crate) async fn entries(
        &self,
        after: Option<EntryKey>,
        limit: NonZeroU32,
    ) -> Result<EntryPage, StoreError> {
        on_schedule(&self.engine, |it| it.entries(after, limit)).await
    }

    /// Returns the operation id of the saga that was started under a key, with the name of its definition.
    #[must_use]
    pub fn id(&self, definition: &str, scope: &Scope, key: &Key) -> OperationId {
        saga_id(&self.engine, definition, scope, key)
    }

    /// Looks a saga up.
    ///
    /// # Errors
    /// [`SagaOperatorError`].
    pub async fn show(&self, id: &OperationId) -> Result<SagaLookup, SagaOperatorError> {
        let seen = self.engine.load(id).await?;
        let Some(stored) = seen.stored.filter(|stored| stored.record.scheme.is_saga()) else {
            return Ok(SagaLookup::NotFound);
        };
        match &stored.record.state {
            RecordState::InFlight => match view(*id, seen.now, &stored) {
                view if view.is_unreadable => Err(SagaOperatorError::Unreadable),
                view => Ok(SagaLookup::Unfinished(Box::new(view))),
            },
            RecordState::Done(outcome) => {
                let outcome = FinalOutcome::decode(outcome).ok_or(SagaOperatorError::Unreadable)?;
                let failure = match outcome.end {
                    FinalEnd::Done(_) => None,
                    FinalEnd::Undone(failure) => Some(failure),
                };
                let FinalOutcome { history: steps, decisions, .. } = outcome;
                let description = stored.record.notes.description.clone();
                Ok(SagaLookup::Ended(EndedSaga { description, failure, steps, decisions }))
            }
            RecordState::Unknown { .. } | RecordState::Released => Ok(SagaLookup::NotFound),
        }
    }

    /// Decides about a stuck saga that was [shown](Self::show). The decision, its author and its
    /// reason go into the log in one write, unless the saga has changed since. Then the saga is woken.
    /// The same decision by the same author for the same reason can be repeated: it is written once,
    /// and each call wakes the saga, which changes nothing if it runs. Once the saga is stuck again, it is
    /// another decision. Dropping the future does not stop it.
    ///
    /// # Errors
    /// [`SagaOperatorError`]; after an ambiguous [`SagaOperatorError::Write`] show the saga again.
    pub async fn decide(
        &self,
        saga: &SagaView,
        decision: &SagaDecision,
        by: &str,
        reason: &str,
    ) -> Result<(), SagaOperatorError> {
        let (operator, saga, decision) = (self.clone(), saga.clone(), decision.clone());
        let (by, reason) = (by.to_owned(), reason.to_owned());
        // Between its write and the wake-up the saga would wait until its entry is due.
        let deciding =
            async move { operator.decide_and_wake(&saga, &decision, &by, &reason).await };
        tokio::spawn(deciding).await.unwrap_or(Err(ClaimError::Shutdown.into()))
    }

    async fn decide_and_wake(
        &self,
        saga: &SagaView,
        decision: &SagaDecision,
        by: &str,
        reason: &str,
    ) -> Result<(), SagaOperatorError> {
        let seen = self.engine.load(&saga.id).await?;
        let stored = seen.stored.as_ref().ok_or(SagaOperatorError::NotFound)?;
        if let Some(log) = decided_since(saga, stored, decision, by, reason) {
            return self.resume(saga.id, &log).await;
        }
        if stored.write_id != saga.write_id {
            return Err(SagaOperatorError::Changed);
        }
        let is_stuck = saga.log.as_ref().is_some_and(|log| log.stuck.is_some());
        // A process runs it, or it continues by itself when its pause ends.
        if !is_stuck && seen.now < stored.lease_until {
            return Err(DecisionMismatch::NotStuck.into());
        }
        let attempt = stored.record.attempt;
        let Some(mut log) = saga.log.clone() else {
            return match decision {
                _ if saga.is_unreadable => Err(SagaOperatorError::Unreadable),
                SagaDecision::Abort => self.abort_without_log(saga.id, seen, by, reason).await,
                _ => Err(DecisionMismatch::NotStuck.into()),
            };
        };
        log.decide(decision, by, reason, seen.now.into())?;
        // Executions that only found it stuck do not count as crashes of what is decided.
        log.attempt = attempt;
        let amendment = Amendment {
            expected: saga.write_id,
            checkpoint: Some(log.encode()?),
            lease: Duration::ZERO,
        };
        match self.engine.amend(saga.id, seen, amendment).await?.result {
            WriteResult::Recorded(_) => self.resume(saga.id, &log).await,
            _ => Err(SagaOperatorError::Changed),
        }
    }

    /// Lets a saga continue whose decision is written. One that was aborted and has run nothing ends here.
    async fn resume(&self, operation: OperationId, log: &Log) -> Result<(), SagaOperatorError> {
        self.wake(operation, log).await?;
        match log.failure.is_some() && log.has_run_nothing() {
            true => self.end_without_process(operation, log).await,
            false => Ok(()),
        }
    }

    /// Makes the entry of a saga due, whose decision is written. Without that it would continue when its
    /// entry is due: a stuck one is looked at once a day, and the key of a step may expire before.
    async fn wake(&self, operation: OperationId, log: &Log) -> Result<(), SagaOperatorError> {
        let key = EntryKey { operation, id: EntryId::from_bytes(log.entry) };
        let mut woken = Ok(false);
        for pause in WAKE {
            sleep(pause).await;
            woken = on_schedule(&self.engine, |it| it.postpone(key, None, Duration::ZERO)).await;
            if woken.is_ok() {
                break;
            }
        }
        woken.map(drop).map_err(SagaOperatorError::NotWoken)
    }
}

/// Returns the log of a saga that was decided about in the same way since it was read.
fn decided_since(
    saga: &SagaView,
    stored: &StoredRecord,
    decision: &SagaDecision,
    by: &str,
    reason: &str,
) -> Option<Log> {
    let log = Log::decode(stored.record.checkpoint.as_ref()?).ok()?;
    let is_later = saga.log.as_ref().is_none_or(|seen| {
        // The last decision of a log that was stuck was about an earlier fault.
        seen.stuck.is_none() || seen.decided() < log.decided()
    });
    let is_unfinished = stored.record.state == RecordState::InFlight;
    (is_unfinished && is_later && log.has_decided(decision, by, reason)).then_some(log)
}

fn view(id: OperationId, now: Timestamp, stored: &StoredRecord) -> SagaView {
    let log = stored.record.checkpoint.as_ref().map(|log| Log::decode(log));
    SagaView {
        id,
        write_id: stored.write_id,
        now,
        lease_until: stored.lease_until,
        attempt: stored.record.attempt,
        description: stored.record.notes.description.clone(),
        is_unreadable: matches!(log, Some(Err(_))),
        log: log.and_then(Result::ok),
    }
}
