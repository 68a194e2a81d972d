//! Starts that no process has accepted, and sagas that end without one: nothing of them has run.

use std::num::NonZeroU32;
use std::time::Duration;

use hapax_core::schedule::{EntryKey, EntryPage, QueueName, ScheduleEntry};
use hapax_core::store::{Snapshot, StoredRecord};
use hapax_core::{
    Claim, ClaimError, EntryId, Lease, OperationId, RecordState, StoreError, Timestamp,
};

use super::{SagaDecision, SagaOperator, SagaOperatorError};
use crate::definition::RETENTION;
use crate::log::Log;
use crate::note::{FinalOutcome, Note, policy};
use crate::run::SagaEnd;
use crate::schedule::on_schedule;

/// Beginning of the name of the queue of a definition.
const QUEUE: &str = "saga:";

/// Beginning of the name of the queue of its rejected starts.
const REJECTED: &str = "saga-rejected:";

/// Lease of the claim that ends a saga.
const LEASE: Duration = Duration::from_secs(30);

/// Number of entries that are read at once.
pub(crate) const PAGE: NonZeroU32 = NonZeroU32::new(8).unwrap();

/// A start that no process has accepted: an entry in the schedule without a saga of its own.
///
/// One that was inserted by [`Sagas::start_in`](crate::Sagas::start_in) waits for a process with its
/// definition. A rejected one waits for an operator.
#[derive(Clone, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub struct UnacceptedStart {
    /// Key of its entry.
    pub key: EntryKey,
    /// Name of its definition.
    pub definition: String,
    /// Version of its definition.
    pub version: u32,
    /// Time at which its entry is due; of a rejected one, time of the rejection.
    pub due: Timestamp,
    /// The store's clock when it was read.
    pub now: Timestamp,
    /// True if its key belongs to a saga with another input: it never runs.
    pub is_rejected: bool,
}

impl UnacceptedStart {
    /// Returns name and version of the definition to which a queue belongs, and whether the queue is that
    /// of its rejected starts; `None` if it is not of sagas.
    #[must_use]
    pub fn parse_queue(queue: &QueueName) -> Option<(&str, u32, bool)> {
        let name = queue.as_str();
        let (rest, is_rejected) = match name.strip_prefix(QUEUE) {
            Some(rest) => (rest, false),
            None => (name.strip_prefix(REJECTED)?, true),
        };
        let (name, version) = rest.rsplit_once(':')?;
        Some((name, version.parse().ok()?, is_rejected))
    }

    /// Returns the view of an entry that has no saga; `None` if its queue is not of sagas.
    #[must_use]
    pub fn of(key: EntryKey, queue: &QueueName, due: Timestamp, now: Timestamp) -> Option<Self> {
        let (name, version, is_rejected) = Self::parse_queue(queue)?;
        Some(Self { key, definition: name.to_owned(), version, due, now, is_rejected })
    }
}

impl Log {
    /// Returns whether no step may have happened: a flow may have requested steps that were not tried.
    pub(super) fn has_run_nothing(&self) -> bool {
        self.steps.iter().all(|step| {
            let tries = &step.forward;
            let is_tried = tries.begun > 0 || tries.open || tries.arrived || tries.first.is_some();
            step.outcome.is_none() && !is_tried
        })
    }
}

impl SagaOperator {
    /// Returns a start that no process has accepted, by the key of its entry; `None` if there is no such
    /// entry, or its operation has a saga and it was not rejected.
    ///
    /// # Errors
    /// [`SagaOperatorError::Store`].
    pub async fn start(
        &self,
        key: &EntryKey,
    ) -> Result<Option<UnacceptedStart>, SagaOperatorError> {
        let Some((entry, now)) = self.entry(key).await? else { return Ok(None) };
        let start = UnacceptedStart::of(*key, &entry.queue, entry.due, now);
        let is_free = self.record(&key.operation).await?.is_none();
        Ok(start.filter(|start| start.is_rejected || is_free))
    }

    /// Returns the first start that no process has accepted, of an operation without a saga.
    ///
    /// # Errors
    /// [`SagaOperatorError::Store`].
    pub async fn start_of(
        &self,
        id: &OperationId,
    ) -> Result<Option<UnacceptedStart>, SagaOperatorError> {
        if self.record(id).await?.is_some() {
            return Ok(None);
        }
        let EntryPage { now, entries, .. } = self.entries(Some(before(id)), PAGE).await?;
        let of_operation = entries.iter().filter(|(key, _)| key.operation == *id);
        let starts = of_operation.filter_map(|(key, entry)| {
            let entry = entry.as_ref().ok()?;
            let start = UnacceptedStart::of(*key, &entry.queue, entry.due, now);
            start.filter(|it| !it.is_rejected)
        });
        Ok(starts.into_iter().next())
    }

    /// Aborts a start that no process has accepted.
    ///
    /// A rejected one is removed; of it remains what the caller notes. Another one ends as a cancelled
    /// saga, which keeps author, time and reason, and is replayed to later starts under its key. One whose
    /// caller got an error is removed.
    ///
    /// # Errors
    /// [`SagaOperatorError::NotFound`] if it does not exist any more, [`SagaOperatorError::Changed`] if a
    /// process has accepted it.
    pub async fn abort_start(
        &self,
        start: &UnacceptedStart,
        by: &str,
        reason: &str,
    ) -> Result<(), SagaOperatorError> {
        let (entry, _) = self.entry(&start.key).await?.ok_or(SagaOperatorError::NotFound)?;
        // By its queue, whatever the caller has put into `start`.
        let (_, _, is_rejected) =
            UnacceptedStart::parse_queue(&entry.queue).ok_or(SagaOperatorError::NotFound)?;
        if is_rejected {
            return Ok(on_schedule(&self.engine, |it| it.remove(start.key)).await?);
        }
        let id = start.key.operation;
        if self.record(&id).await?.is_some() {
            return Err(SagaOperatorError::Changed);
        }
        let note = Note::decode(&entry.note).map_err(|_| SagaOperatorError::Unreadable)?;
        if !note.transactional {
            // As a process would: its start inserted it after a claim that is no more.
            return Ok(on_schedule(&self.engine, |it| it.remove(start.key)).await?);
        }
        match self.engine.claim_id(id, &note, &policy(LEASE)).await? {
            Claim::Execute(lease) => self.end_without_log(lease, by, reason).await,
            _ => Err(SagaOperatorError::Changed),
        }
    }

    /// Aborts a saga without a log, which no process runs. It has called nothing, so that it ends without
    /// its definition.
    pub(super) async fn abort_without_log(
        &self,
        id: OperationId,
        seen: Snapshot,
        by: &str,
        reason: &str,
    ) -> Result<(), SagaOperatorError> {
        match self.engine.adopt(id, seen, &policy(LEASE)).await? {
            Claim::Execute(lease) => self.end_without_log(lease, by, reason).await,
            _ => Err(SagaOperatorError::Changed),
        }
    }

    /// Ends an aborted saga that has run nothing, unless a process has continued it.
    pub(super) async fn end_without_process(
        &self,
        id: OperationId,
        log: &Log,
    ) -> Result<(), SagaOperatorError> {
        let seen = self.engine.load(&id).await?;
        let Claim::Execute(lease) = self.engine.adopt(id, seen, &policy(LEASE)).await? else {
            return Ok(());
        };
        let found = lease.checkpoint().and_then(|found| Log::decode(found).ok());
        if found.as_ref() != Some(log) {
            let _ = lease.withdraw().await;
            return Ok(());
        }
        self.end(lease, log).await
    }

    async fn end_without_log(
        &self,
        lease: Lease,
        by: &str,
        reason: &str,
    ) -> Result<(), SagaOperatorError> {
        if lease.checkpoint().is_some() {
            let _ = lease.withdraw().await;
            return Err(SagaOperatorError::Changed);
        }
        let at = lease.fence().issued_at().into();
        let mut log = Log::new("", 0, EntryId::from_bytes([0; 16]), at);
        log.decide(&SagaDecision::Abort, by, reason, at)?;
        self.end(lease, &log).await
    }

    /// Completes the record of an aborted saga and removes its entries.
    async fn end(&self, lease: Lease, log: &Log) -> Result<(), SagaOperatorError> {
        let failure = log.failure.clone().ok_or(SagaOperatorError::Changed)?;
        let id = lease.id();
        let outcome = FinalOutcome::new(log, SagaEnd::Undone(failure)).encode()?;
        let completed = lease.complete(outcome, Some(RETENTION)).await;
        completed.map_err(|error| ClaimError::from(StoreError::ambiguous(error)))?;
        if let Err(error) = self.remove_entries(&id).await {
            tracing::warn!(operation = %id, %error, "an entry of an aborted saga was not removed: a process with its definition removes it");
        }
        Ok(())
    }

    /// Removes the entries of a saga that has ended, except for those of transactional starts with another
    /// input.
    async fn remove_entries(&self, id: &OperationId) -> Result<(), StoreError> {
        let Some(stored) = self.record(id).await? else { return Ok(()) };
        let mut after = before(id);
        loop {
            let page = self.entries(Some(after), PAGE).await?;
            for (key, entry) in &page.entries {
                if key.operation != *id {
                    return Ok(());
                }
                let Ok(entry) = entry else { continue };
                let Ok(note) = Note::decode(&entry.note) else { continue };
                let is_own = !note.transactional
                    || self.engine.is_of_request(&stored.record, &note) == Some(true);
                if is_own && entry.queue.as_str().starts_with(QUEUE) {
                    on_schedule(&self.engine, |it| it.remove(*key)).await?;
                }
            }
            match page.next() {
                Some(next) if next.operation == *id => after = next,
                _ => return Ok(()),
            }
        }
    }

    /// Returns an entry, and the time of the store's clock.
    async fn entry(
        &self,
        key: &EntryKey,
    ) -> Result<Option<(ScheduleEntry, Timestamp)>, SagaOperatorError> {
        let id = u128::from_be_bytes(*key.id.as_bytes());
        let after = match id.checked_sub(1) {
            Some(id) => EntryKey { id: EntryId::from_bytes(id.to_be_bytes()), ..*key },
            None => return Ok(None),
        };
        let mut page = self.entries(Some(after), NonZeroU32::MIN).await?;
        match page.entries.pop() {
            Some((found, entry)) if found == *key => Ok(Some((entry?, page.now))),
            _ => Ok(None),
        }
    }

    /// Returns the record of an operation, unless it is released or has expired.
    async fn record(&self, id: &OperationId) -> Result<Option<StoredRecord>, StoreError> {
        let Snapshot { now, stored } = self.engine.load(id).await?;
        Ok(stored.filter(|it| {
            it.keep_until.is_none_or(|until| now < until)
                && it.record.state != RecordState::Released
        }))
    }
}

/// Returns the key before the entries of an operation.
pub(crate) fn before(id: &OperationId) -> EntryKey {
    EntryKey { operation: *id, id: EntryId::from_bytes([0; 16]) }
}
