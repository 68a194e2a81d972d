//! The worker of a process: claims sagas that are due, limits those that run, and sends signals.

mod signals;

use std::collections::hash_map::Entry;
use std::collections::{BTreeMap, HashMap};
use std::fmt;
use std::future::Future;
use std::num::NonZeroU32;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use bytes::Bytes;
use hapax_core::schedule::{EntryKey, NewEntry, QueueName};
use hapax_core::store::{BoxFuture, StoredRecord};
use hapax_core::transaction::TransactionBackend;
use hapax_core::{
    Claim, ClaimError, EntryId, Idempotency, Lease, OperationId, Outcome, RecordState, StoreError,
    SystemEntropy, Timestamp,
};
use tokio::sync::{Notify, OwnedSemaphorePermit, Semaphore, watch};

use crate::admission::Admission;
use crate::aside::Aside;
use crate::definition::Definition;
use crate::driver;
use crate::log::{Log, Parked};
use crate::note::{Note, policy, rejected_id};
use crate::schedule::on_schedule;
use crate::stats::DefinitionCounters;

/// Pause before an entry or a saga that cannot be read here is looked at again.
const SET_ASIDE: Duration = Duration::from_secs(60);

/// Executions in a row without progress after which a saga is a suspect.
const SUSPECT: u32 = 2;

/// Pause before a suspect is looked at again while another one runs.
const ALONE_AGAIN: Duration = Duration::from_secs(1);

/// Pause before this process looks again at an entry whose saga runs here, or could not be claimed.
pub(crate) const LOOK_AGAIN: Duration = Duration::from_secs(1);

/// Number of groups of callers that wait for the end of a saga.
const ENDED: usize = 1_024;

/// The sagas of one process.
pub(crate) struct Node {
    pub(crate) engine: Idempotency,
    pub(crate) definitions: BTreeMap<QueueName, Arc<Definition>>,
    /// The counters of each definition.
    pub(crate) counters: BTreeMap<QueueName, Arc<DefinitionCounters>>,
    pub(crate) transactions: Option<TransactionBackend>,
    pub(crate) lease: Duration,
    pub(crate) max_running: usize,
    /// One permit for each saga that may run here.
    pub(crate) permits: Arc<Semaphore>,
    /// Operations that are looked at or run here, with their outcomes once they are recorded.
    busy: Mutex<HashMap<OperationId, watch::Sender<Option<Outcome>>>>,
    /// The suspect that runs here: see [`Node::enter_alone`].
    alone: Mutex<Option<OperationId>>,
    /// Entries that are left alone here.
    pub(crate) aside: Aside,
    /// Notified when a saga has ended here. Callers that wait are in groups by operation id, so that the
    /// end of a saga does not let all of them read the store.
    ended: Box<[Notify]>,
    /// True if a look has failed since the last poll.
    pub(crate) has_failed: AtomicBool,
    /// Notified when an entry may be due.
    pub(crate) changed: Notify,
    /// Notified when a permit is free.
    pub(crate) freed: Notify,
    /// Decides about sagas that are due, if set.
    pub(crate) admission: Option<Admission>,
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
    /// `None` only while it is dropped.
    permit: Option<OwnedSemaphorePermit>,
}

impl Drop for Busy {
    fn drop(&mut self) {
        self.node.leave_alone(&self.id);
        self.node.busy().remove(&self.id);
        // Only then: a waiter waits for this if it has found the operation here.
        self.node.ended(&self.id).notify_waiters();
        drop(self.permit.take());
        self.node.freed.notify_one();
    }
}

impl Node {
    pub(crate) fn new(
        engine: Idempotency,
        definitions: BTreeMap<QueueName, Arc<Definition>>,
        transactions: Option<TransactionBackend>,
        lease: Duration,
        max_running: usize,
        admission: Option<Admission>,
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
            max_running,
            permits: Arc::new(Semaphore::new(max_running)),
            busy: Mutex::default(),
            alone: Mutex::default(),
            aside: Aside::default(),
            ended: (0..ENDED).map(|_| Notify::new()).collect(),
            has_failed: AtomicBool::new(false),
            changed: Notify::new(),
            freed: Notify::new(),
            admission,
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

    fn busy(&self) -> MutexGuard<'_, HashMap<OperationId, watch::Sender<Option<Outcome>>>> {
        // Each change is one call of the map.
        self.busy.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Marks an operation as looked at here; `None` if it already is.
    pub(crate) fn enter(
        self: &Arc<Self>,
        id: OperationId,
        permit: OwnedSemaphorePermit,
    ) -> Option<Busy> {
        match self.busy().entry(id) {
            Entry::Occupied(_) => None,
            Entry::Vacant(free) => {
                free.insert(watch::Sender::new(None));
                Some(Busy { node: Arc::clone(self), id, permit: Some(permit) })
            }
        }
    }

    pub(crate) fn is_busy(&self, id: &OperationId) -> bool {
        self.busy().contains_key(id)
    }

    /// Returns the outcome that an operation which is looked at or runs here will have recorded. The
    /// sender is dropped if that ends without one.
    pub(crate) fn outcome_here(
        &self,
        id: &OperationId,
    ) -> Option<watch::Receiver<Option<Outcome>>> {
        self.busy().get(id).map(watch::Sender::subscribe)
    }

    /// Notifies callers that wait for the outcome of a saga, which is recorded.
    pub(crate) fn note_outcome(&self, id: &OperationId, outcome: Outcome) {
        if let Some(waiting) = self.busy().get(id) {
            waiting.send_replace(Some(outcome));
        }
        self.ended(id).notify_waiters();
    }

    /// Returns what is notified when a saga has ended here.
    pub(crate) fn ended(&self, id: &OperationId) -> &Notify {
        // An operation id is a hash.
        let [first, second, ..] = *id.as_bytes();
        &self.ended[usize::from(u16::from_be_bytes([first, second])) % ENDED]
    }

    /// Lets a suspect run here; false while another one does.
    ///
    /// A suspect is a saga whose last executions ended with their process. One of those that ran
    /// together may end each of their processes; if they went on together, all would be stuck. Alone
    /// among suspects, each of the others gets past its step. One crash makes no suspect: all that ran
    /// in a process that was killed go on together.
    pub(crate) fn enter_alone(&self, id: OperationId, crashes: u32) -> bool {
        // Each use is one call or assignment.
        let mut alone = self.alone.lock().unwrap_or_else(PoisonError::into_inner);
        crashes < SUSPECT || *alone.get_or_insert(id) == id
    }

    /// Notes that a saga has made progress, which is saved, or does not run any more.
    pub(crate) fn leave_alone(&self, id: &OperationId) {
        let mut alone = self.alone.lock().unwrap_or_else(PoisonError::into_inner);
        *alone = alone.filter(|other| other != id);
    }

    /// Makes all executions park.
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
        match self.claim(&saga, &note, &definition).await {
            Ok(Some(lease)) => {
                // Another process would load the record for nothing.
                self.postpone(&saga, self.lease).await;
                // Its due time is not known any more.
                let saga = ScheduledSaga { due: None, ..saga };
                match self.accept(&lease, saga, note, queue).await {
                    Ok(saga) => driver::drive(self, definition, lease, saga, None).await,
                    // The entry that was looked at is due after a lease.
                    Err(error) => {
                        tracing::warn!(operation = ?lease.id(), %error, "the entry of a transactional start could not be replaced: it is tried again when the lease lapses");
                        // Nothing was executed: it is no crash.
                        let _ = lease.withdraw().await;
                        self.has_failed.store(true, Ordering::Relaxed);
                    }
                }
            }
            Ok(None) => {}
            Err(error) => {
                // The entry stays due, for other nodes too.
                tracing::warn!(operation = ?saga.key.operation, %error, "a saga that is due could not be claimed: it is tried again in 1 s");
                match error {
                    ClaimError::Store(StoreError::Corrupt(_)) => self.set_aside(&saga).await,
                    _ => self.fail(&saga),
                }
            }
        }
    }

    /// Gives a saga without a log an entry of its own, which replaces the one that was looked at.
    ///
    /// So the entry that a log names was inserted by the owner that saved the log first, after its
    /// claim. From then on the record is in flight until the saga has ended, and no process can have
    /// decided before to remove that entry. A process that finds another entry of the operation
    /// beside a log removes it. An entry that was inserted in a transaction of its caller must not stay: it
    /// begins the saga again once the record has ended and expired.
    async fn accept(
        &self,
        lease: &Lease,
        saga: ScheduledSaga,
        note: Note,
        queue: QueueName,
    ) -> Result<ScheduledSaga, StoreError> {
        if lease.checkpoint().is_some() {
            return Ok(saga);
        }
        // A process that seals may have written it, and this one may not yet.
        let seals = self.engine.store().capabilities().seals();
        let note = Note { transactional: false, key: note.key.filter(|_| seals), ..note };
        let id = self.insert(saga.key.operation, queue, self.lease, &note);
        let inserting: BoxFuture<'_, _> = Box::pin(id);
        let key = lease.keep_alive(inserting).await?;
        // If that fails, it is removed when it is looked at beside the log.
        self.remove(&saga).await;
        Ok(ScheduledSaga { key, ..saga })
    }

    /// Returns whether an entry exists.
    pub(crate) async fn has_entry(&self, key: EntryKey) -> Result<bool, StoreError> {
        // The one before it in the order of keys; of the first one, a page from the beginning.
        let before = u128::from_be_bytes(*key.id.as_bytes()).checked_sub(1);
        let before = before.map(|id| EntryId::from_bytes(id.to_be_bytes()));
        let after = before.map(|id| EntryKey { id, ..key });
        let page = on_schedule(&self.engine, |it| it.entries(after, NonZeroU32::MIN)).await?;
        Ok(page.entries.first().is_some_and(|(found, _)| *found == key))
    }

    /// Inserts an entry under a new id.
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
        self.insert_entry(NewEntry { key, queue, due_in, note }).await?;
        Ok(key)
    }

    /// Inserts an entry. One with its key stays as it is.
    pub(crate) async fn insert_entry(&self, entry: NewEntry) -> Result<(), StoreError> {
        on_schedule(&self.engine, |schedule| schedule.insert(entry)).await
    }

    /// Claims the saga of an entry, or moves or removes the entry.
    async fn claim(
        &self,
        saga: &ScheduledSaga,
        note: &Note,
        definition: &Definition,
    ) -> Result<Option<Lease>, ClaimError> {
        let id = saga.key.operation;
        let seen = self.engine.load(&id).await?;
        let now = seen.now;
        let is_kept = |it: &&StoredRecord| {
            it.keep_until.is_none_or(|until| now < until)
                && it.record.state != RecordState::Released
        };
        let Some(stored) = seen.stored.as_ref().filter(is_kept) else {
            if note.transactional {
                let claimed = self.engine.claim_id(id, note, &policy(self.lease)).await;
                return self.claimed(saga, claimed).await;
            }
            // It was never accepted.
            self.remove(saga).await;
            return Ok(None);
        };
        let is_in_flight = stored.record.state == RecordState::InFlight;
        match self.engine.is_of_request(&stored.record, note) {
            Some(true) if is_in_flight => {}
            Some(false) if note.transactional => {
                match is_in_flight && stored.record.checkpoint.is_none() {
                    // The other start may yet be withdrawn.
                    true => self.postpone(saga, self.lease).await,
                    false => self.reject(saga, note, definition).await,
                }
                return Ok(None);
            }
            None if is_in_flight || note.transactional => {
                tracing::error!(operation = %id, "the record of a saga cannot be read: run the version that wrote it");
                self.set_aside(saga).await;
                return Ok(None);
            }
            // It has ended, or the entry is that of a rejected start.
            _ => {
                self.remove(saga).await;
                return Ok(None);
            }
        }
        let log = match stored.record.checkpoint.as_ref().map(|log| Log::decode(log)).transpose() {
            Ok(log) => log,
            Err(error) => {
                // Not adopted: that would count as a crash, and keep it from those that can read it.
                tracing::error!(operation = %id, %error, "the log of a saga cannot be read: run the version that wrote it");
                self.set_aside(saga).await;
                return Ok(None);
            }
        };
        if log.as_ref().is_some_and(|log| log.entry != *saga.key.id.as_bytes()) {
            // The saga has its own entry, in the queue of its version: see `accept`.
            self.remove(saga).await;
            return Ok(None);
        }
        if now < stored.lease_until {
            let mut rest = stored.lease_until.since(now);
            let is_parked = log
                .as_ref()
                .is_some_and(|log| log.parked.is_some() && log.attempt == stored.record.attempt);
            if !is_parked {
                // A transaction of a step has a lease of its own, and its end sets that of the saga again.
                rest = rest.min(self.lease);
            }
            if let Some(log) = log
                && let Some(parked) = waiting(stored, &log)
            {
                // The lease counts from the write of the log, which may have been deferred.
                let pause = parked.until.since(now.into());
                if rest > pause.saturating_add(LOOK_AGAIN) {
                    rest = pause;
                }
                // The node that parked it may have crashed before it looked once more.
                let generation = stored.record.generation;
                if rest.is_zero() || self.is_awaited(&id, generation, &log).await? {
                    self.wake(&id).await?;
                    return Ok(None);
                }
            }
            self.postpone(saga, rest).await;
            return Ok(None);
        }
        // Before it is adopted, which counts as an execution.
        let attempt = stored.record.attempt;
        let crashes = log.map_or(attempt, |log| log.crashes_before(attempt.saturating_add(1)));
        if !self.enter_alone(id, crashes) {
            self.postpone(saga, ALONE_AGAIN).await;
            return Ok(None);
        }
        let claimed = self.engine.adopt(id, seen, &policy(self.lease)).await;
        self.claimed(saga, claimed).await
    }

    /// Returns the lease of a claim, unless the record has another entry by now, or cannot be read.
    async fn claimed(
        &self,
        saga: &ScheduledSaga,
        claimed: Result<Claim, ClaimError>,
    ) -> Result<Option<Lease>, ClaimError> {
        match claimed {
            Ok(Claim::Execute(lease)) => {
                let log = lease.checkpoint().map(|log| Log::decode(log));
                let is_own = |log: &Log| log.entry == *saga.key.id.as_bytes();
                if log.is_none_or(|log| log.as_ref().is_ok_and(is_own)) {
                    return Ok(Some(lease));
                }
                // The next look finds what it is.
                let _ = lease.withdraw().await;
                Ok(None)
            }
            Ok(Claim::InFlight { remaining, .. }) => {
                let rest = remaining.clamp(Duration::from_millis(100), self.lease);
                self.postpone(saga, rest).await;
                Ok(None)
            }
            // The entry is due again, and the next look finds what the record is now: the outcome may be
            // a deferred write of this process.
            Ok(_) | Err(ClaimError::NotFound) => {
                self.aside.set(saga.key, LOOK_AGAIN);
                Ok(None)
            }
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
            self.fail(saga);
        }
    }

    /// Makes the entry of a saga that was parked here due when the saga is. It is due within a lease, so
    /// that a longer pause leaves it to the look at that time.
    ///
    /// Without a condition, since its due time is not known. So it may replace that of a sender's
    /// wake-up: the look for signals, which follows, repeats the wake-up, and after a crash before that
    /// the saga continues at the end of the pause, which is less than a lease.
    pub(crate) async fn postpone_parked(&self, key: EntryKey, pause: Duration) {
        if pause >= self.lease {
            return;
        }
        let call = on_schedule(&self.engine, |schedule| schedule.postpone(key, None, pause));
        if let Err(error) = call.await {
            tracing::debug!(operation = ?key.operation, %error, "an entry was not moved to the end of a pause: it is due within a lease");
        }
    }

    /// Moves the entry of a transactional start whose key belongs to a saga with another input to the
    /// queue of rejected starts. It never runs. The transaction of its caller has committed, so it is
    /// not dropped: it stays until an operator removes it.
    ///
    /// The key of the new entry is derived, so that a repetition after a crash inserts no second one.
    async fn reject(&self, saga: &ScheduledSaga, note: &Note, definition: &Definition) {
        let (operation, id) = (saga.key.operation, rejected_id(saga.key.id));
        let seals = self.engine.store().capabilities().seals();
        let note = Note { key: note.key.clone().filter(|_| seals), ..note.clone() };
        let Ok(note) = note.encode() else { return };
        let (key, queue) = (EntryKey { operation, id }, definition.rejected.clone());
        let entry = NewEntry { key, queue, due_in: Duration::ZERO, note };
        if let Err(error) = on_schedule(&self.engine, |schedule| schedule.insert(entry)).await {
            tracing::debug!(%operation, %error, "a start was not rejected: it is looked at again");
            return self.fail(saga);
        }
        self.counters(definition).rejected();
        tracing::error!(%operation, saga = definition.name, "expected a free key for a saga that was started in a transaction, found a saga with another input: it never runs; `hapax saga list` has it; compare both inputs; if it is another operation, start it under a key of its own; then remove it by `hapax saga abort`");
        self.remove(saga).await;
    }

    /// Removes the entry of a saga that has ended.
    pub(crate) async fn remove(&self, saga: &ScheduledSaga) {
        let call = on_schedule(&self.engine, |schedule| schedule.remove(saga.key));
        if let Err(error) = call.await {
            tracing::debug!(operation = ?saga.key.operation, %error, "an entry was not removed: it is looked at again");
            self.fail(saga);
        }
    }

    /// Leaves an entry alone for a moment that stays due because the store fails.
    fn fail(&self, saga: &ScheduledSaga) {
        self.aside.set(saga.key, LOOK_AGAIN);
        self.has_failed.store(true, Ordering::Relaxed);
    }

    /// Leaves a saga alone that cannot be read here. If there are too many, it is postponed.
    pub(crate) async fn set_aside(&self, saga: &ScheduledSaga) {
        if !self.aside.set(saga.key, SET_ASIDE) {
            self.postpone(saga, SET_ASIDE).await;
        }
    }

    /// Leaves an entry alone that cannot be read here.
    pub(crate) async fn set_entry_aside(&self, key: EntryKey) {
        if !self.aside.set(key, SET_ASIDE) {
            // It must not hide others, whenever it is due.
            let call = on_schedule(&self.engine, |it| it.postpone(key, None, SET_ASIDE));
            let _ = call.await;
        }
    }

    /// Makes the entry of a saga that was claimed here due at the end of the lease, whenever it was due.
    pub(crate) async fn due_within_lease(&self, key: EntryKey) -> Result<(), StoreError> {
        on_schedule(&self.engine, |schedule| schedule.postpone(key, None, self.lease)).await?;
        Ok(())
    }

    /// Makes an entry due now.
    pub(crate) async fn make_due(&self, key: EntryKey) -> Result<(), StoreError> {
        on_schedule(&self.engine, |schedule| schedule.postpone(key, None, Duration::ZERO)).await?;
        self.changed.notify_one();
        Ok(())
    }
}

/// Returns the pause of a saga that is parked and not stuck: no node has adopted it since.
fn waiting<'a>(stored: &StoredRecord, log: &'a Log) -> Option<&'a Parked> {
    let is_waiting = log.attempt == stored.record.attempt && log.stuck.is_none();
    log.parked.as_ref().filter(|_| is_waiting)
}
