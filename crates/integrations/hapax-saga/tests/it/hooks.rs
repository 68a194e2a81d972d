//! A store in memory whose calls a test observes, delays and fails, and processes over it.

use std::fmt;
use std::num::NonZeroU32;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use hapax_core::schedule::{
    DueEntries, EntryKey, EntryPage, NewEntry, QueueName, QueueStatus, Schedule,
    TransactionalSchedule,
};
use hapax_core::store::{BoxFuture, Capabilities, Reaped, Snapshot, Swap, Swapped};
use hapax_core::{Idempotency, MemoryStore, OperationId, Store, StoreError, Timestamp};
use hapax_saga::{Saga, Sagas};
use tokio::time::sleep;

use crate::world::{Process, World};

/// A call of a [`HookedStore`].
#[derive(Debug)]
pub(crate) enum StoreCall<'a> {
    Load(&'a OperationId),
    Swap(&'a Swap),
    Insert,
    Due,
    Postpone(EntryKey),
    Remove,
}

/// Fault of a call: an error instead of the call, or a delay before it.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Fault {
    Unavailable,
    Ambiguous,
    Corrupt,
    Late,
}

type Hook = Box<dyn Fn(&StoreCall<'_>) -> Option<Fault> + Send>;

/// The store.
#[derive(Default)]
pub(crate) struct HookedStore {
    inner: Arc<MemoryStore>,
    hook: Mutex<Option<Hook>>,
    /// An operation whose entries cannot be read.
    damaged: Mutex<Option<OperationId>>,
}

impl fmt::Debug for HookedStore {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("HookedStore")
    }
}

impl HookedStore {
    pub(crate) fn new(world: &World) -> Arc<Self> {
        Arc::new(Self { inner: Arc::clone(&world.store), ..Self::default() })
    }

    /// Sets what happens to each call from now on.
    pub(crate) fn hook(&self, hook: impl Fn(&StoreCall<'_>) -> Option<Fault> + Send + 'static) {
        *self.hook.lock().unwrap() = Some(Box::new(hook));
    }

    pub(crate) fn unhook(&self) {
        *self.hook.lock().unwrap() = None;
    }

    /// Damages the entries of an operation, or of none.
    pub(crate) fn damage(&self, operation: Option<OperationId>) {
        *self.damaged.lock().unwrap() = operation;
    }

    /// Starts a process over this store.
    pub(crate) fn process<I, O, E>(self: &Arc<Self>, saga: &Saga<I, O, E>) -> Process {
        self.process_with(saga, 64, Duration::from_secs(30))
    }

    pub(crate) fn process_with<I, O, E>(
        self: &Arc<Self>,
        saga: &Saga<I, O, E>,
        limit: usize,
        lease: Duration,
    ) -> Process {
        let engine = Idempotency::builder(Arc::clone(self)).build().unwrap();
        let sagas = Sagas::builder(engine.clone()).register(saga);
        let sagas = sagas.max_running(limit).lease(lease).build().unwrap();
        let running = sagas.clone();
        let task = tokio::spawn(async move {
            running.run(std::future::pending(), Duration::ZERO).await;
        });
        Process { sagas, engine, task }
    }

    async fn call<T>(
        &self,
        call: StoreCall<'_>,
        made: impl Future<Output = Result<T, StoreError>>,
    ) -> Result<T, StoreError> {
        let fault = self.hook.lock().unwrap().as_ref().and_then(|hook| hook(&call));
        match fault {
            None => made.await,
            // Time passes, or a paused clock would not advance.
            Some(fault) => {
                sleep(Duration::from_millis(1)).await;
                Err(match fault {
                    Fault::Late => return made.await,
                    Fault::Unavailable => StoreError::unavailable("on purpose"),
                    Fault::Ambiguous => StoreError::ambiguous("on purpose"),
                    Fault::Corrupt => StoreError::corrupt("on purpose"),
                })
            }
        }
    }

    fn schedule(&self) -> &dyn Schedule {
        self.inner.capabilities().schedule.unwrap()
    }
}

impl Store for HookedStore {
    fn swap(&self, swap: Swap) -> BoxFuture<'_, Result<Swapped, StoreError>> {
        Box::pin(async move {
            let copy = swap.clone();
            self.call(StoreCall::Swap(&copy), self.inner.swap(swap)).await
        })
    }

    fn load<'a>(&'a self, key: &'a OperationId) -> BoxFuture<'a, Result<Snapshot, StoreError>> {
        Box::pin(self.call(StoreCall::Load(key), self.inner.load(key)))
    }

    fn reap(&self, limit: NonZeroU32) -> BoxFuture<'_, Result<Reaped, StoreError>> {
        self.inner.reap(limit)
    }

    fn capabilities(&self) -> Capabilities<'_> {
        Capabilities { schedule: Some(self), ..self.inner.capabilities() }
    }
}

impl Schedule for HookedStore {
    fn insert(&self, entry: NewEntry) -> BoxFuture<'_, Result<(), StoreError>> {
        Box::pin(self.call(StoreCall::Insert, self.schedule().insert(entry)))
    }

    fn due<'a>(
        &'a self,
        queues: &'a [QueueName],
        limit: NonZeroU32,
    ) -> BoxFuture<'a, Result<DueEntries, StoreError>> {
        Box::pin(async move {
            let mut due = self.call(StoreCall::Due, self.schedule().due(queues, limit)).await?;
            let damaged = *self.damaged.lock().unwrap();
            for (key, entry) in &mut due.entries {
                if damaged == Some(key.operation) {
                    *entry = Err(StoreError::corrupt("damaged on purpose"));
                }
            }
            Ok(due)
        })
    }

    fn postpone(
        &self,
        key: EntryKey,
        expected: Option<Timestamp>,
        due_in: Duration,
    ) -> BoxFuture<'_, Result<bool, StoreError>> {
        let made = self.schedule().postpone(key, expected, due_in);
        Box::pin(self.call(StoreCall::Postpone(key), made))
    }

    fn remove(&self, key: EntryKey) -> BoxFuture<'_, Result<(), StoreError>> {
        Box::pin(self.call(StoreCall::Remove, self.schedule().remove(key)))
    }

    fn entries(
        &self,
        after: Option<EntryKey>,
        limit: NonZeroU32,
    ) -> BoxFuture<'_, Result<EntryPage, StoreError>> {
        self.schedule().entries(after, limit)
    }

    fn queues(&self) -> BoxFuture<'_, Result<Vec<QueueStatus>, StoreError>> {
        self.schedule().queues()
    }
}

/// The transaction commits each insertion by itself.
impl TransactionalSchedule<()> for HookedStore {
    fn insert_in<'a>(
        &'a self,
        _: &'a mut (),
        entry: NewEntry,
    ) -> BoxFuture<'a, Result<(), StoreError>> {
        self.insert(entry)
    }
}

/// Returns the entries of the schedule.
pub(crate) async fn entries(world: &World) -> Vec<EntryKey> {
    let schedule = world.store.capabilities().schedule.unwrap();
    let page = schedule.entries(None, NonZeroU32::MAX).await.unwrap();
    page.entries.into_iter().map(|(key, _)| key).collect()
}
