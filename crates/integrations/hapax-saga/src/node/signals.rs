//! Signals and cancellations: records of their own, and the wake-up of a parked saga.

use std::sync::Arc;
use std::time::Duration;

use hapax_core::schedule::EntryKey;
use hapax_core::store::{Snapshot, StoredRecord};
use hapax_core::{
    Amendment, Claim, ClaimError, EntryId, Fingerprint, FingerprintScheme, InFlight, LeaseId,
    OnUnknown, OperationId, OperationRequest, Outcome, Policy, RecordState, StoreError, Terms,
    WriteResult,
};

use super::Node;
use crate::error::SignalError;
use crate::log::{Blob, Log};
use crate::note::{CANCEL, signal_id};

/// Format of signals.
const SIGNAL_FORMAT: &str = "saga-signal/1";

/// Retention of a signal: also of one that arrives long before the flow waits for it.
const SIGNAL_RETENTION: Duration = Duration::from_secs(365 * 24 * 60 * 60);

impl Node {
    /// Returns the value of a signal to the saga of this generation, once it was sent.
    pub(crate) async fn signal(
        &self,
        saga: &OperationId,
        generation: LeaseId,
        name: &str,
    ) -> Result<Option<Blob>, StoreError> {
        let id = signal_id(saga, generation, name);
        let Snapshot { stored, .. } = self.engine.load(&id).await?;
        Ok(match stored.map(|stored| stored.record.state) {
            Some(RecordState::Done(outcome)) if outcome.format() == SIGNAL_FORMAT => {
                Some(Blob(outcome.bytes().clone()))
            }
            _ => None,
        })
    }

    /// Stores a signal and wakes the saga. Returns false if the signal was sent before, perhaps with
    /// another value: the first counts.
    ///
    /// The signal belongs to the generation of the record. It outlives the record, but the next saga
    /// under the key has another generation, and does not find it.
    ///
    /// It runs on a spawned task: if the future is dropped, for example because an HTTP client disconnects,
    /// the signal is stored and its saga is woken nevertheless.
    pub(crate) async fn send(
        self: &Arc<Self>,
        saga: &OperationId,
        name: &str,
        value: Blob,
    ) -> Result<bool, SignalError> {
        let (node, saga, name) = (Arc::clone(self), *saga, name.to_owned());
        let sending = tokio::spawn(async move { node.send_and_wake(&saga, &name, value).await });
        sending.await.unwrap_or(Err(ClaimError::Shutdown.into()))
    }

    async fn send_and_wake(
        &self,
        saga: &OperationId,
        name: &str,
        value: Blob,
    ) -> Result<bool, SignalError> {
        let generation = self.unfinished(saga).await?;
        let terms = Terms {
            lease: self.lease,
            retention: SIGNAL_RETENTION,
            on_unknown: OnUnknown::Reexecute,
        };
        let in_flight = InFlight::Wait(self.engine.store_timeout());
        let policy = Policy { terms, in_flight, ..Policy::default() };
        let id = signal_id(saga, generation, name);
        let claim = self.engine.claim_id(id, &SignalRequest, &policy).await?;
        let is_first = match claim {
            Claim::Execute(lease) => {
                let outcome = Outcome::new(SIGNAL_FORMAT, value.0);
                let completed = lease.complete(outcome, None).await;
                completed.map_err(|error| ClaimError::from(StoreError::ambiguous(error)))?;
                true
            }
            // Only this process has it: the saga would look for it in vain, and it may yet be lost.
            Claim::Replay(replay) if replay.deferred => {
                let error = StoreError::ambiguous("the signal is a deferred write of this process");
                return Err(ClaimError::from(error).into());
            }
            Claim::Replay(_) => false,
            _ => return Err(ClaimError::Contended.into()),
        };
        // Also for one that was sent before: its sender may have died before the wake-up.
        self.wake(saga).await?;
        Ok(is_first)
    }

    /// Returns the generation of an unfinished saga.
    async fn unfinished(&self, saga: &OperationId) -> Result<LeaseId, SignalError> {
        let Snapshot { now, stored } = self.engine.load(saga).await.map_err(ClaimError::from)?;
        let is_kept = |it: &StoredRecord| it.keep_until.is_none_or(|until| now < until);
        match stored.filter(is_kept).map(|it| (it.record.state, it.record.generation)) {
            Some((RecordState::InFlight, generation)) => Ok(generation),
            Some((RecordState::Done(_), _)) => Err(SignalError::Ended),
            Some((RecordState::Released | RecordState::Unknown { .. }, _)) | None => {
                Err(SignalError::NotFound)
            }
        }
    }

    /// Lets a parked saga continue now. Does nothing if it is not parked: it looks for signals
    /// itself, after it has parked.
    pub(crate) async fn wake(&self, saga: &OperationId) -> Result<(), ClaimError> {
        loop {
            let seen = self.engine.load(saga).await?;
            let Some(stored) = &seen.stored else { return Ok(()) };
            let checkpoint = stored.record.checkpoint.as_ref();
            let log = checkpoint.and_then(|log| Log::decode(log).ok());
            let Some(log) = log.filter(|log| {
                stored.record.state == RecordState::InFlight
                    && log.parked.is_some()
                    && log.stuck.is_none()
            }) else {
                return Ok(());
            };
            let key = EntryKey { operation: *saga, id: EntryId::from_bytes(log.entry) };
            if log.attempt != stored.record.attempt {
                // A node has adopted it since, and an amendment would end its lease. It may crash
                // before its first save, while the entry is due much later.
                return Ok(self.make_due(key).await?);
            }
            let (expected, lease) = (stored.write_id, Duration::ZERO);
            let amendment = Amendment { expected, checkpoint: None, lease };
            let resolved = self.engine.amend(*saga, seen, amendment).await?;
            // Otherwise it has changed since it was read: look again.
            if let WriteResult::Recorded(_) = resolved.result {
                self.make_due(key).await?;
                return Ok(());
            }
        }
    }

    /// Returns whether what a parked saga waits for has arrived: its signal, or a cancellation.
    pub(crate) async fn is_awaited(
        &self,
        saga: &OperationId,
        generation: LeaseId,
        log: &Log,
    ) -> Result<bool, StoreError> {
        let Some(parked) = log.parked.as_ref().filter(|_| log.stuck.is_none()) else {
            return Ok(false);
        };
        // A saga that is being undone waits for no cancellation.
        let cancel = log.failure.is_none().then_some(CANCEL);
        for name in cancel.into_iter().chain(parked.signal.as_deref()) {
            if self.signal(saga, generation, name).await?.is_some() {
                return Ok(true);
            }
        }
        Ok(false)
    }
}

/// All signals of one name to one saga are one request: the first counts.
struct SignalRequest;

impl OperationRequest for SignalRequest {
    #[allow(clippy::expect_used, reason = "the name is short")]
    fn scheme(&self) -> FingerprintScheme {
        FingerprintScheme::new(SIGNAL_FORMAT).expect("the name is short")
    }

    fn fingerprint(&self, scheme: &FingerprintScheme) -> Option<Fingerprint> {
        (*scheme == self.scheme()).then(|| Fingerprint::builder(SIGNAL_FORMAT).finish())
    }
}
