//! The handle of a process to its sagas: starts, drives and signals them.

use std::collections::BTreeMap;
use std::fmt;
use std::future::Future;
use std::marker::PhantomData;
use std::num::NonZeroU32;
use std::sync::Arc;
use std::time::Duration;

use hapax_core::schedule::{EntryKey, NewEntry, QueueName, TransactionalSchedule};
use hapax_core::store::BoxFuture;
use hapax_core::transaction::{TransactionBackend, Transactions};
use hapax_core::{
    Claim, EntryId, Idempotency, Key, Lease, OperationId, Policy, RecordState, Scope, StoreError,
    SystemEntropy, canonicalize_value, value,
};
use serde::Serialize;
use serde::de::DeserializeOwned;
use tokio::time::{sleep, timeout};

use crate::definition::{Definition, Saga};
use crate::driver;
use crate::error::{SagaError, SagaStartError, SagasError, SignalError};
use crate::log::{Blob, Failure};
use crate::node::{Node, ScheduledSaga};
use crate::note::{CANCEL, FinalEnd, FinalOutcome, Note, fingerprint, policy};
use crate::schedule::on_schedule;
use crate::stats::SagaStats;

/// Longest and shortest interval at which the schedule is polled.
const POLL: Duration = Duration::from_secs(1);
const SHORTEST_POLL: Duration = Duration::from_millis(5);

/// First and longest interval at which a start looks whether the start of another caller was accepted.
const ACCEPTED_POLL: [Duration; 2] = [Duration::from_millis(5), Duration::from_millis(250)];

/// Pause before an entry that cannot be read is read again.
const UNREADABLE: Duration = Duration::from_secs(60);

/// First and longest interval at which a waiting caller looks for the outcome of a saga that runs
/// elsewhere.
const OUTCOME_POLL: [Duration; 2] = [Duration::from_millis(250), Duration::from_secs(2)];

/// The sagas of a process. Cheap to clone.
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
    limit: usize,
    error: Option<SagasError>,
}

impl SagasBuilder {
    /// Adds a definition. A process runs only sagas whose definition it has, by name and version.
    pub fn register<I, O, E>(mut self, saga: &Saga<I, O, E>) -> Self {
        let definition = Arc::clone(&saga.definition);
        let queue = definition.queue.clone();
        if let Some(other) = self.definitions.insert(queue, definition) {
            let (name, version) = (other.name, other.version);
            self.error.get_or_insert(SagasError::Twice { name, version });
        }
        self
    }

    /// Sets the database of steps of the kind [`within`](crate::SagaBuilder::within), which must be the
    /// one that has the records.
    pub fn transactions<D: Transactions>(mut self, backend: &TransactionBackend<D>) -> Self {
        self.transactions = Some(backend.any());
        self
    }

    /// Sets the lease: the time after which another node continues the sagas of a node that died.
    /// Default 30 s.
    pub fn lease(mut self, lease: Duration) -> Self {
        self.lease = lease;
        self
    }

    /// Sets the number of sagas that run at the same time; parked ones do not count. Default 64.
    pub fn limit(mut self, limit: usize) -> Self {
        self.limit = limit;
        self
    }

    /// Creates the handle.
    ///
    /// # Errors
    /// [`SagasError`].
    pub fn build(self) -> Result<Sagas, SagasError> {
        let Self { engine, definitions, transactions, lease, limit, error } = self;
        if let Some(error) = error {
            return Err(error);
        }
        if engine.store().capabilities().schedule.is_none() {
            return Err(SagasError::NoSchedule);
        }
        if lease < Policy::MIN_LEASE {
            return Err(SagasError::Lease { found: lease });
        }
        if !(1..=100_000).contains(&limit) {
            return Err(SagasError::Limit { found: limit });
        }
        let needs_database = |it: &&Arc<Definition>| it.is_within();
        if let Some(saga) = definitions.values().find(needs_database)
            && transactions.is_none()
        {
            return Err(SagasError::NoTransactions { name: saga.name });
        }
        let node = Node::new(engine, definitions, transactions, lease, limit);
        Ok(Sagas { node: Arc::new(node) })
    }
}

impl Sagas {
    /// Returns a builder over an engine, whose store also has the schedule.
    pub fn builder(engine: Idempotency) -> SagasBuilder {
        let (definitions, lease) = (BTreeMap::new(), Duration::from_secs(30));
        SagasBuilder { engine, definitions, transactions: None, lease, limit: 64, error: None }
    }

    /// Starts a saga, or finds the one that was started under this key. Once this returns, the saga
    /// runs to its end, in this process or in another one.
    ///
    /// 1. The claim comes first, then the entry in the schedule, then the first step. Only the owner of
    ///    the claim inserts an entry: that of a rejected duplicate could reach the record of the first
    ///    request with another input.
    /// 2. A late copy of the claim is released by the engine, or the entry is found by a node without
    ///    a record, and removed. A late copy of the entry is found beside a record that has ended or
    ///    has its own entry, and removed; beside one in flight it runs the same input.
    ///
    /// Dropping the future does not stop a start.
    ///
    /// # Errors
    /// [`SagaStartError`]. After [`SagaStartError::Store`] it may run nevertheless: start it again under the
    /// same key.
    pub async fn start<I, O, E>(
        &self,
        saga: &Saga<I, O, E>,
        scope: &Scope,
        key: &Key,
        input: &I,
    ) -> Result<Started<O, E>, SagaStartError>
    where
        I: Serialize,
    {
        let definition = self
            .registered(saga)
            .map(Arc::clone)
            .ok_or(SagaStartError::NotRegistered { name: saga.definition.name })?;
        let id = self.id(saga, scope, key);
        let note = note(input, false)?;
        let node = Arc::clone(&self.node);
        let starting = tokio::spawn(start(node, definition, id, note));
        let is_first = starting.await.map_err(|_| SagaStartError::Shutdown)??;
        Ok(Started { node: Arc::clone(&self.node), id, is_first, types: PhantomData })
    }

    /// Returns the entry that starts a saga in a transaction of the caller: the saga runs if and only
    /// if the transaction that [inserts](hapax_core::schedule::TransactionalSchedule::insert_in) the
    /// entry commits. There is no record before a node has claimed it.
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
        Ok(NewEntry {
            key: EntryKey { operation, id },
            queue: saga.definition.queue.clone(),
            due_in: Duration::ZERO,
            note: note(input, true)?.encode()?,
        })
    }

    /// Starts a saga in a transaction of the caller, in the database that has the records.
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
        Ok(schedule.insert_in(tx, entry).await?)
    }

    /// Returns the saga that was started under a key, if there is one.
    ///
    /// # Errors
    /// [`StoreError`].
    pub async fn find<I, O, E>(
        &self,
        saga: &Saga<I, O, E>,
        scope: &Scope,
        key: &Key,
    ) -> Result<Option<Started<O, E>>, StoreError> {
        let id = self.id(saga, scope, key);
        let stored = self.node.engine.load(&id).await?.stored;
        let exists = stored.is_some_and(|stored| stored.record.state != RecordState::Released);
        let node = Arc::clone(&self.node);
        Ok(exists.then_some(Started { node, id, is_first: false, types: PhantomData }))
    }

    /// Returns the definition of a saga that is registered here.
    pub(crate) fn registered<I, O, E>(&self, saga: &Saga<I, O, E>) -> Option<&Arc<Definition>> {
        let known = self.node.definitions.get(&saga.definition.queue);
        known.filter(|known| Arc::ptr_eq(known, &saga.definition))
    }

    fn id<I, O, E>(&self, saga: &Saga<I, O, E>, scope: &Scope, key: &Key) -> OperationId {
        // The version is not part of it: a retry after an upgrade finds the saga.
        let scope = scope.within("saga", saga.definition.name);
        self.node.engine.operation_id(&scope, key)
    }

    /// Returns the counters of this process.
    #[must_use]
    pub fn stats(&self) -> SagaStats {
        let counters = self.node.counters.values();
        SagaStats { definitions: counters.map(|counters| counters.read()).collect() }
    }

    /// Drives what is due, until `shutdown` resolves. Then what runs is parked, due now, so that
    /// other nodes continue at once; this waits up to `drain` for calls under way. Returns whether
    /// all runs have ended.
    pub async fn run(&self, shutdown: impl Future<Output = ()>, drain: Duration) -> bool {
        tokio::select! {
            () = self.poll() => {}
            () = shutdown => {}
        }
        let node = &self.node;
        node.begin_shutdown();
        let all = u32::try_from(node.limit).unwrap_or(u32::MAX);
        timeout(drain, node.permits.acquire_many(all)).await.is_ok()
    }

    async fn poll(&self) {
        let node = &self.node;
        let queues: Vec<_> = node.definitions.keys().cloned().collect();
        loop {
            // Registered before the schedule is read: a change after that is noticed.
            let changed = node.changed.notified();
            let free = u32::try_from(node.permits.available_permits()).unwrap_or(u32::MAX);
            let pause = match NonZeroU32::new(free.min(256)) {
                None => POLL,
                Some(limit) => self.poll_once(&queues, limit).await,
            };
            tokio::select! {
                () = changed => {}
                () = sleep(pause) => {}
            }
        }
    }

    /// Looks at what is due. Returns the time until the next poll.
    async fn poll_once(&self, queues: &[QueueName], limit: NonZeroU32) -> Duration {
        let node = &self.node;
        let due = match on_schedule(&node.engine, |schedule| schedule.due(queues, limit)).await {
            Ok(due) => due,
            Err(error) => {
                tracing::warn!(%error, "the schedule cannot be read: it is tried again");
                return POLL;
            }
        };
        for (key, entry) in due.entries {
            let entry = match entry {
                Ok(entry) => entry,
                Err(error) => {
                    tracing::error!(operation = %key.operation, %error, "an entry of the schedule cannot be read: compare the secrets of all processes");
                    // It must not hide others.
                    let postponed = on_schedule(&node.engine, |schedule| {
                        schedule.postpone(key, None, UNREADABLE)
                    });
                    let _ = postponed.await;
                    continue;
                }
            };
            let saga = ScheduledSaga { key, due: Some(entry.due), input: bytes::Bytes::new() };
            let Ok(note) = Note::decode(&entry.note) else {
                tracing::error!(operation = %key.operation, "the note of a saga cannot be read: run the version that wrote it");
                node.set_aside(saga).await;
                continue;
            };
            if node.is_busy(&key.operation) {
                node.postpone(&saga, node.lease).await;
                continue;
            }
            let Ok(permit) = Arc::clone(&node.permits).try_acquire_owned() else { break };
            let Some(busy) = node.enter(key.operation, permit) else { continue };
            let saga = ScheduledSaga { input: note.input.0.clone(), ..saga };
            let node = Arc::clone(node);
            tokio::spawn(async move {
                node.look(saga, note, entry.queue).await;
                drop(busy);
            });
        }
        due.next_in.unwrap_or(POLL).clamp(SHORTEST_POLL, POLL)
    }
}

fn note<I: Serialize>(input: &I, transactional: bool) -> Result<Note, SagaStartError> {
    let fingerprint = fingerprint(&canonicalize_value(input)?);
    let input = Blob(value::write(input, hapax_core::schedule::MAX_NOTE - 1024)?);
    Ok(Note { input, fingerprint, transactional })
}

/// Returns whether this start is the first.
async fn start(
    node: Arc<Node>,
    definition: Arc<Definition>,
    id: OperationId,
    note: Note,
) -> Result<bool, SagaStartError> {
    let Some(lease) = claim(&node, id, &note).await? else { return Ok(false) };
    let is_first = lease.checkpoint().is_none();
    let permit = Arc::clone(&node.permits).try_acquire_owned().ok();
    let busy = permit.filter(|_| !node.is_shutting_down()).and_then(|it| node.enter(id, it));
    // An owner that has saved a log had inserted its entry.
    let log = lease.checkpoint().and_then(|log| crate::log::Log::decode(log).ok());
    // Its saga has the version of its log, whichever version this start has.
    let own = match &log {
        Some(log) => node.definition(&log.definition, log.version),
        None => Some(definition),
    };
    let Some(definition) = own else {
        // A process that has this version continues it. If that is not stored, the lease lapses.
        let _ = lease.withdraw().await;
        return Ok(false);
    };
    let entry = match log {
        Some(log) => EntryId::from_bytes(log.entry),
        None => {
            let due_in = if busy.is_some() { node.lease } else { Duration::ZERO };
            let queue = definition.queue.clone();
            let inserting: BoxFuture<'_, _> = Box::pin(node.insert(id, queue, due_in, &note));
            let inserted = lease.keep_alive(inserting).await;
            match inserted {
                Ok(key) => key.id,
                Err(error) => {
                    // Nothing was executed. An entry that arrives later finds no record in flight.
                    let _ = lease.withdraw().await;
                    return Err(error.into());
                }
            }
        }
    };
    let key = EntryKey { operation: id, id: entry };
    let saga = ScheduledSaga { key, due: None, input: note.input.0 };
    match busy {
        Some(busy) => {
            tokio::spawn(async move {
                driver::drive(node, definition, lease, saga).await;
                drop(busy);
            });
        }
        // No room here: parked, due now.
        None => park_new(&node, &definition, lease, entry).await,
    }
    Ok(is_first)
}

/// Claims a saga that starts; `None` if it was accepted before.
///
/// It was accepted once its record has a log, which its owner saves after it has inserted the entry.
/// An owner that died before that is taken over.
async fn claim(node: &Node, id: OperationId, note: &Note) -> Result<Option<Lease>, SagaStartError> {
    let [mut pause, longest] = ACCEPTED_POLL;
    loop {
        match node.engine.claim_id(id, note, &policy(node.lease)).await? {
            Claim::Execute(lease) => return Ok(Some(lease)),
            Claim::Mismatch => return Err(SagaStartError::KeyReused),
            Claim::InFlight { remaining, .. } => {
                let stored = node.engine.load(&id).await?.stored;
                if stored.is_some_and(|stored| stored.record.checkpoint.is_some()) {
                    return Ok(None);
                }
                sleep(pause.min(remaining)).await;
                pause = (pause * 2).min(longest);
            }
            Claim::Replay(_) | Claim::Unknown { .. } | Claim::Reconcile(_) => return Ok(None),
        }
    }
}

async fn park_new(node: &Node, definition: &Definition, lease: Lease, entry: EntryId) {
    if lease.checkpoint().is_none() {
        let now = lease.fence().issued_at().into();
        if let Ok(log) = definition.new_log(entry, now).encode() {
            // If that is not stored, the lease lapses, and the entry is due.
            let _ = lease.park(log, Duration::ZERO).await;
        }
    }
    node.changed.notify_one();
}

/// A saga that was started. It runs to its end, whether or not this is kept.
pub struct Started<O, E> {
    pub(crate) node: Arc<Node>,
    id: OperationId,
    is_first: bool,
    types: PhantomData<fn() -> Result<O, E>>,
}

impl<O, E> fmt::Debug for Started<O, E> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Started").field(&self.id).finish()
    }
}

impl<O: DeserializeOwned, E: DeserializeOwned> Started<O, E> {
    /// Returns the operation id of the saga.
    #[must_use]
    pub const fn id(&self) -> OperationId {
        self.id
    }

    /// Returns whether nothing had been executed under this key before.
    #[must_use]
    pub const fn is_first(&self) -> bool {
        self.is_first
    }

    /// Waits for the outcome. Dropping the future stops the wait, not the saga.
    ///
    /// # Errors
    /// [`SagaError`].
    pub async fn outcome(&self) -> Result<O, SagaError<E>> {
        let [mut pause, longest] = OUTCOME_POLL;
        loop {
            let ended = self.node.ended.notified();
            match self.poll_outcome().await? {
                Some(outcome) => return outcome,
                None => {
                    tokio::select! {
                        () = ended => {}
                        () = sleep(pause) => pause = (pause * 2).min(longest),
                    }
                }
            }
        }
    }

    /// Returns the outcome if the saga has ended.
    ///
    /// # Errors
    /// [`StoreError`].
    pub async fn poll_outcome(&self) -> Result<Option<Result<O, SagaError<E>>>, StoreError> {
        let stored = self.node.engine.load(&self.id).await?.stored;
        Ok(match stored.map(|stored| stored.record.state) {
            None | Some(RecordState::Released) => Some(Err(SagaError::Gone)),
            Some(RecordState::InFlight | RecordState::Unknown { .. }) => None,
            Some(RecordState::Done(outcome)) => {
                Some(match FinalOutcome::decode(&outcome).map(|outcome| outcome.end) {
                    Some(FinalEnd::Done(value)) => {
                        value::read(&value.0).map_err(|_| SagaError::Unreadable)
                    }
                    Some(FinalEnd::Undone(Failure::Error(error))) => {
                        Err(value::read(&error.0).map_or(SagaError::Unreadable, SagaError::Undone))
                    }
                    Some(FinalEnd::Undone(Failure::Cancelled { reason })) => {
                        Err(SagaError::Cancelled { reason })
                    }
                    None => Err(SagaError::Unreadable),
                })
            }
        })
    }

    /// Sends a signal, for [`Op::signal`](crate::Op::signal). Returns false if one of this name was
    /// sent before: the first counts. Once this returns, the saga receives the signal, also after a
    /// crash.
    ///
    /// # Errors
    /// [`SignalError`]; the signal may have been sent.
    pub async fn signal<T: Serialize>(&self, name: &str, signal: &T) -> Result<bool, SignalError> {
        if name.is_empty() {
            return Err(SignalError::Name);
        }
        Ok(self.node.send(&self.id, name, Blob(value::write(signal, 64 << 10)?)).await?)
    }

    /// Cancels the saga: no further step runs forward, and what happened is undone. A saga that has
    /// ended meanwhile stays as it is. A stuck saga needs a decision of an operator.
    ///
    /// # Errors
    /// [`SignalError`]; the saga may have been cancelled.
    pub async fn cancel(&self, reason: &str) -> Result<bool, SignalError> {
        Ok(self.node.send(&self.id, CANCEL, Blob(value::write(reason, 4 << 10)?)).await?)
    }
}
