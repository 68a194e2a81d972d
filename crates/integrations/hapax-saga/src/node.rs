//! The sagas of one process: those that run here, and access to the store and its schedule.

use std::collections::{BTreeMap, HashSet};
use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use bytes::Bytes;
use std::future::Future;

use hapax_core::schedule::{EntryKey, NewEntry, QueueName};
use hapax_core::store::{BoxFuture, Snapshot, StoredRecord};
use hapax_core::transaction::TransactionBackend;
use hapax_core::{
    Amendment, Claim, ClaimError, EntryId, Fingerprint, FingerprintScheme, Idempotency, InFlight,
    Lease, OnUnknown, OperationId, OperationRequest, Outcome, Policy, RecordState, StoreError,
    SystemEntropy, Terms, Timestamp, WriteResult,
};
use tokio::sync::{Notify, OwnedSemaphorePermit, Semaphore, watch};

use crate::definition::Definition;
use crate::driver;
use crate::log::{Blob, Log};
use crate::note::{CANCEL, Note, policy, signal_id};
use crate::schedule::on_schedule;
use crate::stats::DefinitionCounters;

/// Format of signals.
const SIGNAL_FORMAT: &str = "saga-signal/1";

/// Retention of a signal: also of one that arrives long before the flow waits for it.
const SIGNAL_RETENTION: Duration = Duration::from_secs(365 * 24 * 60 * 60);

/// Pause before a saga that cannot be read here is looked at again.
const SET_ASIDE: Duration = Duration::from_secs(60);

/// The sagas of one process.
pub(crate) struct Node {
    pub(crate) engine: Idempotency,
    pub(crate) definitions: BTreeMap<QueueName, Arc<Definition>>,
    /// The counters of each definition.
    pub(crate) counters: BTreeMap<QueueName, Arc<DefinitionCounters>>,
    pub(crate) transactions: Option<TransactionBackend>,
    pub(crate) lease: Duration,
    pub(crate) limit: usize,
    /// One permit for each saga that may run here.
    pub(crate) permits: Arc<Semaphore>,
    /// Operations that are looked at or run here.
    busy: Mutex<HashSet<OperationId>>,
    /// Notified when a saga has ended here.
    pub(crate) ended: Notify,
    /// Notified when an entry may be due, or a permit may be free.
    pub(crate) changed: Notify,
    shutdown: watch::Sender<bool>,
}

impl fmt::Debug for Node {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Node")
            .field("definitions", &self.definitions)
            .field("busy", &self.busy().len())
            .finish_non_exhaustive()
    }
}

/// The entry of a saga and its input.
#[derive(Clone, Debug)]
pub(crate) struct ScheduledSaga {
    pub(crate) key: EntryKey,
    /// Time at which the entry is due, as far as it is known here.
    pub(crate) due: Option<Timestamp>,
    pub(crate) input: Bytes,
}

/// An operation that is looked at or runs here, until this is dropped.
pub(crate) struct Busy {
    node: Arc<Node>,
    id: OperationId,
    _permit: OwnedSemaphorePermit,
}

impl Drop for Busy {
    fn drop(&mut self) {
        self.node.busy().remove(&self.id);
        self.node.changed.notify_one();
    }
}

impl Node {
    pub(crate) fn new(
        engine: Idempotency,
        definitions: BTreeMap<QueueName, Arc<Definition>>,
        transactions: Option<TransactionBackend>,
        lease: Duration,
        limit: usize,
    ) -> Self {
        let counters = |(queue, definition): (&QueueName, &Arc<Definition>)| {
            (queue.clone(), Arc::new(DefinitionCounters::new(definition)))
        };
        Self {
            engine,
            counters: definitions.iter().map(counters).collect(),
            definitions,
            transactions,
            lease,
            limit,
            permits: Arc::new(Semaphore::new(limit)),
            busy: Mutex::default(),
            ended: Notify::new(),
            changed: Notify::new(),
            shutdown: watch::Sender::new(false),
        }
    }

    /// Returns the definition of this name and version, if it is registered here.
    pub(crate) fn definition(&self, name: &str, version: u32) -> Option<Arc<Definition>> {
        let mut definitions = self.definitions.values();
        definitions.find(|it| it.name == name && it.version == version).map(Arc::clone)
    }

    /// Returns the counters of a definition.
    pub(crate) fn counters(&self, definition: &Definition) -> Arc<DefinitionCounters> {
        let counters = self.counters.get(&definition.queue).map(Arc::clone);
        counters.unwrap_or_else(|| Arc::new(DefinitionCounters::new(definition)))
    }

    fn busy(&self) -> MutexGuard<'_, HashSet<OperationId>> {
        // Each change is one call of the set.
        self.busy.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Marks an operation as looked at here; `None` if it already is.
    pub(crate) fn enter(
        self: &Arc<Self>,
        id: OperationId,
        permit: OwnedSemaphorePermit,
    ) -> Option<Busy> {
        self.busy().insert(id).then(|| Busy { node: Arc::clone(self), id, _permit: permit })
    }

    pub(crate) fn is_busy(&self, id: &OperationId) -> bool {
        self.busy().contains(id)
    }

    /// Asks all runs to park.
    pub(crate) fn begin_shutdown(&self) {
        self.shutdown.send_replace(true);
    }

    pub(crate) fn is_shutting_down(&self) -> bool {
        *self.shutdown.borrow()
    }

    /// Resolves when the node shuts down.
    pub(crate) fn shutdown(&self) -> impl Future<Output = ()> + use<> {
        let mut shutdown = self.shutdown.subscribe();
        async move {
            // The sender is in the node, of which the caller has a reference.
            let _ = shutdown.wait_for(|is_down| *is_down).await;
        }
    }

    /// Looks at an entry that is due, and runs its saga if it can be claimed.
    pub(crate) async fn look(self: Arc<Self>, saga: ScheduledSaga, note: Note, queue: QueueName) {
        let Some(definition) = self.definitions.get(&queue).map(Arc::clone) else { return };
        match self.claim(&saga, &note).await {
            Ok(Some(lease)) => {
                // Another node that finds the entry due would look in vain.
                self.postpone(&saga, self.lease).await;
                // Its due time is not known any more.
                let saga = ScheduledSaga { due: None, ..saga };
                match self.accept(&lease, saga, note, queue).await {
                    Ok(saga) => driver::drive(self, definition, lease, saga).await,
                    // The lease lapses, and the entry is due then.
                    Err(error) => {
                        tracing::warn!(operation = ?lease.id(), %error, "a saga could not be accepted: it is tried again");
                    }
                }
            }
            Ok(None) => {}
            Err(error) => {
                // The entry stays due.
                tracing::warn!(operation = ?saga.key.operation, %error, "a saga could not be claimed: it is tried again");
                self.postpone(&saga, Duration::from_secs(1)).await;
            }
        }
    }

    /// Replaces an entry that was inserted in a transaction of its caller. Of the one that stays,
    /// nothing begins once the record has ended and expired.
    async fn accept(
        &self,
        lease: &Lease,
        saga: ScheduledSaga,
        note: Note,
        queue: QueueName,
    ) -> Result<ScheduledSaga, StoreError> {
        if !note.transactional || lease.checkpoint().is_some() {
            return Ok(saga);
        }
        let note = Note { transactional: false, ..note };
        let id = self.insert(saga.key.operation, queue, self.lease, &note);
        let inserting: BoxFuture<'_, _> = Box::pin(id);
        let key = lease.keep_alive(inserting).await?;
        self.remove(&saga).await;
        Ok(ScheduledSaga { key, ..saga })
    }

    /// Inserts an entry.
    pub(crate) async fn insert(
        &self,
        operation: OperationId,
        queue: QueueName,
        due_in: Duration,
        note: &Note,
    ) -> Result<EntryKey, StoreError> {
        let id = EntryId::fresh(&SystemEntropy).map_err(StoreError::unavailable)?;
        let key = EntryKey { operation, id };
        let note = note.encode().map_err(StoreError::unavailable)?;
        let entry = NewEntry { key, queue, due_in, note };
        on_schedule(&self.engine, |schedule| schedule.insert(entry)).await?;
        Ok(key)
    }

    /// Claims the saga of an entry, or moves or removes the entry.
    async fn claim(&self, saga: &ScheduledSaga, note: &Note) -> Result<Option<Lease>, ClaimError> {
        let id = saga.key.operation;
        let seen = self.engine.load(&id).await?;
        let now = seen.now;
        let is_kept = |it: &&StoredRecord| it.keep_until.is_none_or(|until| now < until);
        let stored = seen.stored.as_ref().filter(is_kept);
        let claimed = match stored.map(|stored| (stored, &stored.record.state)) {
            None | Some((_, RecordState::Released)) if note.transactional => {
                self.engine.claim_id(id, note, &policy(self.lease)).await
            }
            Some((stored, RecordState::InFlight))
                if self.engine.is_of_request(&stored.record, note) =>
            {
                if now < stored.lease_until {
                    // The node that parked it may have crashed before it looked once more.
                    if let Some(log) = parked(stored)
                        && self.is_awaited(&id, &log).await?
                    {
                        self.wake(&id).await?;
                        return Ok(None);
                    }
                    self.postpone(saga, stored.lease_until.since(now)).await;
                    return Ok(None);
                }
                self.engine.adopt(id, seen, &policy(self.lease)).await
            }
            // It has ended, was never accepted, or the record is of another request.
            _ => {
                self.remove(saga).await;
                return Ok(None);
            }
        };
        match claimed {
            Ok(Claim::Execute(lease)) => Ok(Some(lease)),
            Ok(Claim::InFlight { remaining, .. }) => {
                self.postpone(saga, remaining.max(Duration::from_millis(100))).await;
                Ok(None)
            }
            // The entry is due again, and the next look finds what the record is now.
            Ok(_) | Err(ClaimError::NotFound) => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// Makes an entry due later, if it is still due when it was. Without that condition a wake-up by
    /// another process could be lost.
    pub(crate) async fn postpone(&self, saga: &ScheduledSaga, due_in: Duration) {
        let Some(due) = saga.due else { return };
        let call =
            on_schedule(&self.engine, |schedule| schedule.postpone(saga.key, Some(due), due_in));
        if let Err(error) = call.await {
            tracing::debug!(operation = ?saga.key.operation, %error, "an entry was not postponed: it is looked at again");
        }
    }

    /// Removes the entry of a saga that has ended.
    pub(crate) async fn remove(&self, saga: &ScheduledSaga) {
        let call = on_schedule(&self.engine, |schedule| schedule.remove(saga.key));
        if let Err(error) = call.await {
            tracing::debug!(operation = ?saga.key.operation, %error, "an entry was not removed: it is looked at again");
        }
    }

    /// Postpones a saga that cannot run here.
    pub(crate) async fn set_aside(&self, saga: ScheduledSaga) {
        self.postpone(&saga, SET_ASIDE).await;
    }

    /// Returns the value of a signal, once it was sent.
    pub(crate) async fn signal(
        &self,
        saga: &OperationId,
        name: &str,
    ) -> Result<Option<Blob>, StoreError> {
        let Snapshot { stored, .. } = self.engine.load(&signal_id(saga, name)).await?;
        Ok(match stored.map(|stored| stored.record.state) {
            Some(RecordState::Done(outcome)) if outcome.format() == SIGNAL_FORMAT => {
                Some(Blob(outcome.bytes().clone()))
            }
            _ => None,
        })
    }

    /// Stores a signal and wakes the saga. Returns false if the signal was sent before, perhaps with
    /// another value: the first counts.
    pub(crate) async fn send(
        &self,
        saga: &OperationId,
        name: &str,
        value: Blob,
    ) -> Result<bool, ClaimError> {
        let terms = Terms {
            lease: self.lease,
            retention: SIGNAL_RETENTION,
            on_unknown: OnUnknown::Reexecute,
        };
        let in_flight = InFlight::Wait(self.engine.store_timeout());
        let policy = Policy { terms, in_flight, ..Policy::default() };
        let claim = self.engine.claim_id(signal_id(saga, name), &SignalRequest, &policy).await?;
        let is_first = match claim {
            Claim::Execute(lease) => {
                let outcome = Outcome::new(SIGNAL_FORMAT, value.0);
                lease.complete(outcome, None).await.map_err(StoreError::ambiguous)?;
                true
            }
            Claim::Replay(_) => false,
            _ => return Err(ClaimError::Contended),
        };
        // Also for one that was sent before: its sender may have died before the wake-up.
        self.wake(saga).await?;
        Ok(is_first)
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
        log: &Log,
    ) -> Result<bool, StoreError> {
        let Some(parked) = log.parked.as_ref().filter(|_| log.stuck.is_none()) else {
            return Ok(false);
        };
        // A saga that is being undone waits for no cancellation.
        let cancel = log.failure.is_none().then_some(CANCEL);
        for name in cancel.into_iter().chain(parked.signal.as_deref()) {
            if self.signal(saga, name).await?.is_some() {
                return Ok(true);
            }
        }
        Ok(false)
    }

    /// Makes an entry due now.
    pub(crate) async fn make_due(&self, key: EntryKey) -> Result<(), StoreError> {
        on_schedule(&self.engine, |schedule| schedule.postpone(key, None, Duration::ZERO)).await?;
        self.changed.notify_one();
        Ok(())
    }
}

/// Returns the log of a record that is parked: no node has adopted it since.
fn parked(stored: &StoredRecord) -> Option<Log> {
    let log = Log::decode(stored.record.checkpoint.as_ref()?).ok()?;
    (log.parked.is_some() && log.attempt == stored.record.attempt).then_some(log)
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
