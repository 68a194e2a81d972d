//! The handle of a process to its sagas: starts, drives and signals them.

mod start;

use std::collections::BTreeMap;
use std::future::Future;
use std::marker::PhantomData;
use std::num::NonZeroU32;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use hapax_core::schedule::{EntryKey, NewEntry, QueueName, TransactionalSchedule};
use hapax_core::store::{Snapshot, StoredRecord};
use hapax_core::transaction::{TransactionBackend, Transactions};
use hapax_core::{
    EntryId, Idempotency, Key, OperationId, Policy, Record, RecordState, Scope, StoreError,
    SystemEntropy, canonicalize_value, value,
};
use serde::Serialize;
use tokio::task::JoinSet;
use tokio::time::{sleep, timeout};

use self::start::start;
use crate::admission::{Admission, AdmissionDenied};
use crate::definition::{Definition, Saga};
use crate::error::{SagaStartError, SagasBuildError};
use crate::handle::{Found, SagaHandle};
use crate::log::Blob;
use crate::node::{LOOK_AGAIN, Node, ScheduledSaga};
use crate::note::{Note, fingerprint, saga_id};
use crate::operator::{PAGE, before};
use crate::schedule::on_schedule;
use crate::stats::SagaStats;

/// Longest and shortest interval at which the schedule is polled.
const POLL: Duration = Duration::from_secs(1);
const SHORTEST_POLL: Duration = Duration::from_millis(5);

/// Entries that are read at once at least, if some may be denied: they hide no others for long.
const DENIED: u32 = 64;

/// The shortest retention of an outcome, in leases. The entry of a start in a transaction outlives its saga if
/// its removal fails. It is looked at within a lease, and removed, if it is within the retention; after that it
/// begins the saga again.
const RETAINED_LEASES: u32 = 10;

/// Shortest interval at which the schedule is polled while looks fail.
const FAILED_POLL: Duration = Duration::from_millis(250);

/// The client and worker of sagas in a process: starts them, and runs those that are due. Cheap to clone.
#[derive(Clone, Debug)]
pub struct Sagas {
    pub(crate) node: Arc<Node>,
}

/// A builder of [`Sagas`].
#[derive(Debug)]
#[must_use]
pub struct SagasBuilder {
    engine: Idempotency,
    definitions: BTreeMap<QueueName, Arc<Definition>>,
    transactions: Option<TransactionBackend>,
    lease: Duration,
    max_running: usize,
    admission: Option<Admission>,
    error: Option<SagasBuildError>,
}

impl SagasBuilder {
    /// Adds a definition. A process runs only sagas whose definition it has, by name and version.
    pub fn register<I, O, E>(mut self, saga: &Saga<I, O, E>) -> Self {
        let definition = Arc::clone(&saga.definition);
        let queue = definition.queue.clone();
        if let Some(other) = self.definitions.insert(queue, definition) {
            let (name, version) = (other.name, other.version);
            self.error.get_or_insert(SagasBuildError::Twice { name, version });
        }
        self
    }

    /// Sets the database of steps of the kind [`within`](crate::SagaBuilder::within), which must be the
    /// one that has the records.
    pub fn transactions<D: Transactions>(mut self, backend: &TransactionBackend<D>) -> Self {
        self.transactions = Some(backend.any());
        self
    }

    /// Sets the lease: the time after which another process resumes the sagas of a process that died.
    /// At least 100 ms, and at most a tenth of the retention of each definition. Default 30 s. It is not
    /// renewed within a transaction: set it to at least the longest time of one.
    pub fn lease(mut self, lease: Duration) -> Self {
        self.lease = lease;
        self
    }

    /// Sets the largest number of sagas that run at the same time, 1 to 100,000; parked ones do not count,
    /// and further ones wait in the schedule. Default 64. The
    /// definitions of a process share it, in the order in which their sagas are due: where many sagas of
    /// one definition with long steps delay another one, drive it by [`Sagas`] of its own.
    pub fn max_running(mut self, max_running: usize) -> Self {
        self.max_running = max_running;
        self
    }

    /// Decides about each saga that is due here, by its operation id and its input, before it is claimed.
    /// The returned value is a guard: it is dropped when the run of the saga has ended, or was not begun. An
    /// error counts no attempt. Starts are always admitted.
    pub fn admission(
        mut self,
        admit: impl Fn(&OperationId, &[u8]) -> Result<Box<dyn Send>, AdmissionDenied>
        + Send
        + Sync
        + 'static,
    ) -> Self {
        self.admission = Some(Admission::new(admit));
        self
    }

    /// Creates the handle.
    ///
    /// # Errors
    /// [`SagasBuildError`].
    pub fn build(self) -> Result<Sagas, SagasBuildError> {
        let Self { engine, definitions, transactions, lease, max_running, admission, error } = self;
        if let Some(error) = error {
            return Err(error);
        }
        if engine.schedule().is_none() {
            return Err(SagasBuildError::NoSchedule);
        }
        if lease < Policy::MIN_LEASE {
            return Err(SagasBuildError::Lease { found: lease });
        }
        if !(1..=100_000).contains(&max_running) {
            return Err(SagasBuildError::MaxRunning { found: max_running });
        }
        let namespace = engine.namespace();
        if let Some(saga) = definitions.values().find(|it| namespace.queue(&it.rejected).is_err()) {
            return Err(SagasBuildError::LongName { name: saga.name });
        }
        let least = lease.saturating_mul(RETAINED_LEASES);
        if let Some(saga) = definitions.values().find(|it| it.retention < least) {
            let (name, retention) = (saga.name, saga.retention);
            return Err(SagasBuildError::Retention { name, retention, least });
        }
        let needs_database = |it: &&Arc<Definition>| it.is_within();
        if let Some(saga) = definitions.values().find(needs_database)
            && transactions.is_none()
        {
            return Err(SagasBuildError::NoTransactions { name: saga.name });
        }
        let node = Node::new(engine, definitions, transactions, lease, max_running, admission);
        Ok(Sagas { node: Arc::new(node) })
    }
}

impl Sagas {
    /// Returns a builder over an engine, whose store also has the schedule.
    pub fn builder(engine: Idempotency) -> SagasBuilder {
        let (definitions, lease) = (BTreeMap::new(), Duration::from_secs(30));
        let (transactions, admission, error) = (None, None, None);
        let max_running = 64;
        SagasBuilder { engine, definitions, transactions, lease, max_running, admission, error }
    }

    /// Starts a saga, or finds the one that was started under this key. Once this returns, the saga
    /// runs to its end, in this process or in another one.
    ///
    /// 1. The claim comes first, then the entry in the schedule and at the same time the first log, then the
    ///    first step. Only the owner of the claim inserts an entry: that of a rejected duplicate could
    ///    reach the record of the first request with another input.
    /// 2. A late copy of the claim is released by the engine, or the entry is found by a node without
    ///    a record, and removed. A late copy of the entry is found beside a record that has ended or
    ///    whose log has another entry, and removed; beside one without a log it runs the same input.
    ///
    /// Dropping the future does not stop a start.
    ///
    /// # Errors
    /// [`SagaStartError`]. After [`SagaStartError::Store`] it may run nevertheless: start it again
    /// under the same key.
    pub async fn start<I, O, E>(
        &self,
        saga: &Saga<I, O, E>,
        scope: &Scope,
        key: &Key,
        input: &I,
    ) -> Result<SagaHandle<O, E>, SagaStartError>
    where
        I: Serialize,
    {
        let request = canonicalize_value(input)?;
        self.start_request(saga, (scope, key), input, &request).await
    }

    /// The same for a request in canonical JSON, of which `input` was read. It stays the same when
    /// the type of the input gets a further field.
    pub(crate) async fn start_request<I: Serialize, O, E>(
        &self,
        saga: &Saga<I, O, E>,
        (scope, key): (&Scope, &Key),
        input: &I,
        request: &[u8],
    ) -> Result<SagaHandle<O, E>, SagaStartError> {
        let definition = self
            .registered(saga)
            .map(Arc::clone)
            .ok_or(SagaStartError::NotRegistered { name: saga.definition.name })?;
        let id = self.id(saga, scope, key);
        let note = Note { key: self.sealed_key(key), ..note(input, request, false)? };
        let (node, caller) = (Arc::clone(&self.node), Arc::new(()));
        let starting = tokio::spawn(start(node, definition, id, note, Arc::downgrade(&caller)));
        let found = starting.await.map_err(|_| SagaStartError::Shutdown)??;
        Ok(SagaHandle { node: Arc::clone(&self.node), id, found, types: PhantomData })
    }

    /// Returns the entry that starts a saga once the caller has inserted it, by
    /// [`insert_in`](hapax_core::schedule::TransactionalSchedule::insert_in), in a transaction that
    /// commits. Until a process claims it, the saga has no record. The key is not checked, not even in a quarantine:
    /// see [`start_in`](Self::start_in).
    ///
    /// # Errors
    /// [`SagaStartError`].
    pub fn entry<I: Serialize, O, E>(
        &self,
        saga: &Saga<I, O, E>,
        scope: &Scope,
        key: &Key,
        input: &I,
    ) -> Result<NewEntry, SagaStartError> {
        let operation = self.id(saga, scope, key);
        let id = EntryId::fresh(&SystemEntropy)?;
        let note = note(input, &canonicalize_value(input)?, true)?;
        // The caller inserts it into the schedule of the store, which has the queues of all namespaces.
        let queue = self.node.engine.namespace().queue(&saga.definition.queue);
        Ok(NewEntry {
            key: EntryKey { operation, id },
            queue: queue.map_err(StoreError::unavailable)?,
            due_in: Duration::ZERO,
            note: Note { key: self.sealed_key(key), ..note }.encode()?,
        })
    }

    /// Starts a saga in a transaction of the caller, in the database that has the records. A key that
    /// belongs to a saga with another input is rejected, and in a [quarantine](hapax_core::Quarantine) one
    /// without a saga. Of two transactions that commit one key with
    /// two inputs at the same time, one start is rejected afterwards: it never runs, an error is logged
    /// once, and it is in the list of stuck sagas until an operator [removes](crate::SagaOperator::abort_start)
    /// it.
    ///
    /// # Errors
    /// [`SagaStartError`]; `tx` can then only be rolled back.
    pub async fn start_in<Tx: ?Sized, I: Serialize, O, E>(
        &self,
        schedule: &impl TransactionalSchedule<Tx>,
        tx: &mut Tx,
        saga: &Saga<I, O, E>,
        (scope, key): (&Scope, &Key),
        input: &I,
    ) -> Result<(), SagaStartError> {
        let entry = self.entry(saga, scope, key, input)?;
        let note = note(input, &canonicalize_value(input)?, true)?;
        let seen = self.node.engine.load(&entry.key.operation).await?;
        // It would begin once the quarantine has ended.
        self.node.engine.quarantines().check(&seen)?;
        if let Some(record) = accepted(seen)
            && self.node.engine.is_of_request(&record, &note) == Some(false)
        {
            return Err(SagaStartError::KeyReused);
        }
        Ok(schedule.insert_in(tx, entry).await?)
    }

    /// Returns the saga that was started under a key; `None` if there is none, its outcome has expired, or
    /// it was started in a [transaction](Self::start_in) and no process has accepted it yet.
    ///
    /// # Errors
    /// [`StoreError`].
    pub async fn find<I, O, E>(
        &self,
        saga: &Saga<I, O, E>,
        scope: &Scope,
        key: &Key,
    ) -> Result<Option<SagaHandle<O, E>>, StoreError> {
        let id = self.id(saga, scope, key);
        let exists = match accepted(self.node.engine.load(&id).await?) {
            None => false,
            Some(it) if it.state == RecordState::InFlight && it.checkpoint.is_none() => {
                self.is_accepted(id).await?
            }
            Some(_) => true,
        };
        let node = Arc::clone(&self.node);
        let found = Found::Unfinished;
        Ok(exists.then_some(SagaHandle { node, id, found, types: PhantomData }))
    }

    /// Returns whether a claim whose record has no log yet keeps its record: a start has inserted its
    /// entry. Beside the entry of a transactional start, a process that cannot insert its own entry
    /// releases the record and claims it again later: a caller that waited for the outcome meanwhile would
    /// find none.
    async fn is_accepted(&self, operation: OperationId) -> Result<bool, StoreError> {
        let after = Some(before(&operation));
        let page = on_schedule(&self.node.engine, |it| it.entries(after, PAGE)).await?;
        let mut exists = false;
        for (_, entry) in page.entries.iter().filter(|(key, _)| key.operation == operation) {
            let note = entry.as_ref().ok().and_then(|it| Note::decode(&it.note).ok());
            if note.is_some_and(|note| note.transactional) {
                return Ok(false);
            }
            exists = true;
        }
        Ok(exists)
    }

    /// Returns the definition of a saga that is registered here.
    pub(crate) fn registered<I, O, E>(&self, saga: &Saga<I, O, E>) -> Option<&Arc<Definition>> {
        let known = self.node.definitions.get(&saga.definition.queue);
        known.filter(|known| Arc::ptr_eq(known, &saga.definition))
    }

    pub(crate) fn id<I, O, E>(
        &self,
        saga: &Saga<I, O, E>,
        scope: &Scope,
        key: &Key,
    ) -> OperationId {
        saga_id(&self.node.engine, saga.definition.name, scope, key)
    }

    /// Returns the key as operators see it, if entries and records are sealed.
    fn sealed_key(&self, key: &Key) -> Option<String> {
        let seals = self.node.engine.store().capabilities().seals();
        seals.then(|| key.as_str().to_owned())
    }

    /// Returns the counters of this process.
    #[must_use]
    pub fn stats(&self) -> SagaStats {
        let counters = self.node.counters.values();
        SagaStats { definitions: counters.map(|counters| counters.read()).collect() }
    }

    /// Drives what is due, until `shutdown` resolves. Then what runs is parked, due now, so that
    /// other nodes continue at once; this waits up to `drain` for calls in progress, and for writes of
    /// the engine that the store has not accepted yet. Returns whether all runs have ended and
    /// nothing is left to be written. The engine [drains](Idempotency::drain) all that uses it.
    ///
    /// The end is that of these sagas and of their clones: another call of `run`, in progress or later, drives
    /// nothing more, and ends like this one. To go on, build others.
    pub async fn run(&self, shutdown: impl Future<Output = ()>, drain: Duration) -> bool {
        let node = &self.node;
        tokio::select! {
            biased;
            // It would claim again and again what parks.
            () = node.shutdown() => {}
            () = shutdown => {}
            () = self.poll() => {}
        }
        node.begin_shutdown();
        let all = u32::try_from(node.max_running).unwrap_or(u32::MAX);
        let ended = async {
            // Never closed.
            let _all = node.permits.acquire_many(all).await;
            // A log or an outcome may be a deferred write, which ends with this process.
            node.engine.drain().await;
        };
        timeout(drain, ended).await.is_ok()
    }

    async fn poll(&self) {
        let node = &self.node;
        let queues: Vec<_> = node.definitions.keys().cloned().collect();
        loop {
            // Registered before the schedule is read: a change after that is noticed.
            let (changed, freed) = (node.changed.notified(), node.freed.notified());
            let free = u32::try_from(node.permits.available_permits()).unwrap_or(u32::MAX);
            let least = if node.admission.is_some() { DENIED } else { 0 };
            let limit = if free == 0 { 0 } else { free.max(least).min(256) };
            let (pause, is_rest) = match NonZeroU32::new(limit) {
                None => (POLL, true),
                // Those that are left alone are due too, and hide no others.
                Some(limit) => {
                    self.poll_once(&queues, limit.saturating_add(node.aside.count())).await
                }
            };
            tokio::select! {
                () = changed => {}
                // A moment later, so that one poll begins several sagas.
                () = freed, if is_rest => sleep(SHORTEST_POLL).await,
                () = sleep(pause) => {}
            }
            if node.has_failed.swap(false, Ordering::Relaxed) {
                sleep(FAILED_POLL).await;
            }
        }
    }

    /// Looks at what is due. Returns the time until the next poll, and whether there may be sagas that are
    /// due and were not begun.
    async fn poll_once(&self, queues: &[QueueName], limit: NonZeroU32) -> (Duration, bool) {
        let node = &self.node;
        // Its records may be older than what its steps did.
        if node.engine.quarantines().pauses() {
            return (POLL, false);
        }
        let due = match on_schedule(&node.engine, |schedule| schedule.due(queues, limit)).await {
            Ok(due) => due,
            Err(error) => {
                tracing::warn!(%error, "expected the due entries of the schedule, found an error: the next poll is in 1 s; no saga is resumed until then");
                return (POLL, true);
            }
        };
        let (mut denied, found, mut begun) = (JoinSet::new(), due.entries.len(), 0);
        for (key, entry) in due.entries {
            if node.aside.has(&key) {
                continue;
            }
            let entry = match entry {
                Ok(entry) => entry,
                Err(error) => {
                    tracing::error!(operation = %key.operation, %error, "an entry of the schedule cannot be read: compare the secrets of all processes");
                    node.set_entry_aside(key).await;
                    continue;
                }
            };
            let saga = ScheduledSaga { key, due: Some(entry.due), input: bytes::Bytes::new() };
            let Ok(note) = Note::decode(&entry.note) else {
                tracing::error!(operation = %key.operation, "expected the payload of a start in an entry of the schedule, found another encoding: run the version that wrote it; it is read again in 60 s");
                node.set_aside(&saga).await;
                continue;
            };
            if node.is_busy(&key.operation) {
                // Not postponed by a lease: it may be due because of a signal that arrived while its
                // saga was parked, of which this process is about to end the run.
                if !node.aside.set(key, LOOK_AGAIN) {
                    node.postpone(&saga, node.lease).await;
                }
                continue;
            }
            let admission = node.admission.as_ref();
            let admitted = admission.map(|it| it.admit(&key.operation, &note.input.0)).transpose();
            let admitted = match admitted {
                Ok(admitted) => admitted,
                Err(AdmissionDenied::LeftAlone(pause)) if node.aside.set(key, pause) => continue,
                Err(AdmissionDenied::LeftAlone(pause) | AdmissionDenied::Postponed(pause)) => {
                    let node = Arc::clone(node);
                    denied.spawn(async move { node.postpone(&saga, pause).await });
                    continue;
                }
            };
            let Ok(permit) = Arc::clone(&node.permits).try_acquire_owned() else { break };
            let Some(busy) = node.enter(key.operation, permit) else { continue };
            begun += 1;
            let saga = ScheduledSaga { input: note.input.0.clone(), ..saga };
            let node = Arc::clone(node);
            tokio::spawn(async move {
                node.look(saga, note, entry.queue).await;
                drop((admitted, busy));
            });
        }
        while denied.join_next().await.is_some() {}
        let is_rest = begun < found || found >= usize::try_from(limit.get()).unwrap_or(usize::MAX);
        (due.next_in.unwrap_or(POLL).clamp(SHORTEST_POLL, POLL), is_rest)
    }
}

/// Returns the record of an operation that was accepted and not released, within its retention.
fn accepted(Snapshot { now, stored }: Snapshot) -> Option<Record> {
    let is_kept = |it: &StoredRecord| it.keep_until.is_none_or(|until| now < until);
    let record = stored.filter(is_kept).map(|stored| stored.record);
    record.filter(|record| record.state != RecordState::Released)
}

fn note<I: Serialize>(
    input: &I,
    request: &[u8],
    transactional: bool,
) -> Result<Note, SagaStartError> {
    let fingerprint = fingerprint(request);
    let input = Blob(value::write(input, hapax_core::schedule::MAX_NOTE - 1024)?);
    Ok(Note { input, fingerprint, transactional, key: None })
}
