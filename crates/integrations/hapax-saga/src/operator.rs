//! Operators' view of sagas, and their decisions about stuck ones.
//!
//! Nothing here needs a definition: the log has all that an operator sees and decides about.

use std::num::NonZeroU32;
use std::time::Duration;

use hapax_core::schedule::{EntryKey, EntryPage, QueueStatus};
use hapax_core::store::StoredRecord;
use hapax_core::{
    Amendment, ClaimError, EntryId, Idempotency, OperationId, RecordState, StoreError, Timestamp,
    WriteId, WriteResult, value,
};

use crate::log::{
    Blob, Direction, Failure, Log, LogTime, LoggedDecision, Parked, StepOutcome, UndoEnd,
};
use crate::note::FinalOutcome;
use crate::schedule::on_schedule;

/// A decision about a stuck saga.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum SagaDecision {
    /// The step that is stuck is tried again.
    Retry,
    /// The step that is stuck happened, with this result. The result is a value of serde, encoded by
    /// [`SagaDecision::happened`].
    Happened(Blob),
    /// The step that is stuck did not happen, and never will: it is tried again under its key.
    DidNotHappen,
    /// The undo that is stuck is skipped: its step's effect stays.
    Skip,
    /// The saga fails: what happened is undone.
    Abort,
}

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
            Self::DidNotHappen => "resolve did-not-happen",
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
    #[error("expected a stuck saga, found one that continues by itself: cancel it to undo it")]
    NotStuck,
    /// The saga is stuck in no step that runs forward.
    #[error("expected a step without outcome, found none: use `retry`, `skip` or `abort`")]
    NoStep,
    /// The saga is stuck in no undo.
    #[error("expected a stuck undo, found none: `skip` applies only to an undo")]
    NoUndo,
    /// The compensation has begun.
    #[error(
        "expected a saga that runs forward, found one that is being undone: use `retry` or `skip`"
    )]
    Compensates,
}

impl Log {
    /// Applies a decision about a stuck saga, which then continues.
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
        let stuck = self.stuck.clone().ok_or(DecisionMismatch::NotStuck)?;
        let step = stuck.step;
        let forward = step.filter(|_| stuck.direction == Direction::Forward);
        let undo = step.filter(|_| stuck.direction == Direction::Undo);
        match decision {
            SagaDecision::Retry => {
                if let Some(step) = step {
                    self.steps[step].tries_mut(stuck.direction).grant();
                }
            }
            SagaDecision::Happened(result) => {
                let step = forward.ok_or(DecisionMismatch::NoStep)?;
                self.steps[step].outcome = Some(StepOutcome::Happened(result.clone()));
            }
            SagaDecision::DidNotHappen => {
                let step = forward.ok_or(DecisionMismatch::NoStep)?;
                let tries = &mut self.steps[step].forward;
                tries.grant();
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
        let (by, reason) = (by.to_owned(), reason.to_owned());
        self.decisions.push(LoggedDecision {
            by,
            at,
            reason,
            action: decision.as_str().to_owned(),
        });
        (self.stuck, self.crashes) = (None, 0);
        self.parked = Some(Parked { until: at, signal: None });
        Ok(())
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
    /// End of the present lease: a node runs the saga until then, or it is parked.
    pub lease_until: Timestamp,
    /// Number of executions so far.
    pub attempt: u32,
    /// Its log; `None` before the first save.
    pub log: Option<Log>,
}

/// A saga that was looked up.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum SagaLookup {
    /// An unfinished saga.
    Unfinished(Box<SagaView>),
    /// A saga that is done or was undone, with these steps.
    Ended(Vec<crate::note::HistoryStep>),
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
    /// The saga has changed since it was read.
    #[error("the saga has changed since it was read: show it, and decide again")]
    Changed,
    /// The log cannot be read.
    #[error("the log of the saga cannot be read: run the version that wrote it")]
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

/// Sagas of a store, for operators.
#[derive(Clone, Debug)]
pub struct SagaOperator {
    engine: Idempotency,
}

impl SagaOperator {
    /// Creates the view over an engine, whose store has the schedule.
    #[must_use]
    pub const fn new(engine: Idempotency) -> Self {
        Self { engine }
    }

    /// Returns a page of unfinished sagas in order of operation id, after `after`, and where the next
    /// page begins; `None` at the end. Entries of sagas that have ended are left out.
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
        let mut last = None;
        for (key, entry) in &page.entries {
            last = Some(*key);
            let is_saga = entry.as_ref().is_ok_and(|it| it.queue.as_str().starts_with("saga:"));
            let is_new = sagas.last().is_none_or(|saga| saga.id != key.operation);
            if !is_saga || !is_new {
                continue;
            }
            if let SagaLookup::Unfinished(saga) = self.show(&key.operation).await? {
                sagas.push(*saga);
            }
        }
        Ok((sagas, last.filter(|_| page.more)))
    }

    /// Returns the queues of the schedule: one for each definition and version, with the number of its
    /// unfinished sagas. One that is overdue has no node that runs it.
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
            RecordState::InFlight => {
                Ok(SagaLookup::Unfinished(Box::new(view(*id, seen.now, &stored)?)))
            }
            RecordState::Done(outcome) => {
                let outcome = FinalOutcome::decode(outcome).ok_or(SagaOperatorError::Unreadable)?;
                Ok(SagaLookup::Ended(outcome.history))
            }
            RecordState::Unknown { .. } | RecordState::Released => Ok(SagaLookup::NotFound),
        }
    }

    /// Decides about a stuck saga that was [shown](Self::show). The decision, its author and its
    /// reason go into the log in one write, unless the saga has changed since.
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
        let seen = self.engine.load(&saga.id).await?;
        let stored = seen.stored.as_ref().ok_or(SagaOperatorError::NotFound)?;
        if stored.write_id != saga.write_id {
            return Err(SagaOperatorError::Changed);
        }
        let mut log = saga.log.clone().ok_or(DecisionMismatch::NotStuck)?;
        log.decide(decision, by, reason, seen.now.into())?;
        let amendment = Amendment {
            expected: saga.write_id,
            checkpoint: Some(log.encode()?),
            lease: Duration::ZERO,
        };
        match self.engine.amend(saga.id, seen, amendment).await?.result {
            WriteResult::Recorded(_) => {}
            _ => return Err(SagaOperatorError::Changed),
        }
        let key = EntryKey { operation: saga.id, id: EntryId::from_bytes(log.entry) };
        on_schedule(&self.engine, |it| it.postpone(key, None, Duration::ZERO)).await?;
        Ok(())
    }
}

fn view(
    id: OperationId,
    now: Timestamp,
    stored: &StoredRecord,
) -> Result<SagaView, SagaOperatorError> {
    let log = stored.record.checkpoint.as_ref().map(|log| Log::decode(log)).transpose();
    Ok(SagaView {
        id,
        write_id: stored.write_id,
        now,
        lease_until: stored.lease_until,
        attempt: stored.record.attempt,
        log: log.map_err(|_| SagaOperatorError::Unreadable)?,
    })
}
