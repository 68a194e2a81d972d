//! The engine's handle.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use tokio::runtime::Handle;
use tokio::sync::Semaphore;
use tokio::time::Instant;

use super::backlog::Backlog;
use super::claim::ClaimError;
use super::detach::{DetachOnDrop, DetachSwitch};
use super::lease_clock::LeaseClock;
use super::quarantine::QuarantineState;
use super::retry::{self, ExchangeError};
use super::timer::Timer;
use super::waiters::Waiters;
use crate::clock::{Clock, SystemClock, Timestamp};
use crate::entropy::{BufferedEntropy, Entropy};
use crate::exchange::{Executions, Next, Resolved, WriteExchange, WriteResult};
use crate::key::{CompositeKey, Key};
use crate::machine::Resolve;
use crate::namespace::{Namespace, NamespaceError, NamespacedSchedule};
use crate::schedule::Schedule;
use crate::scope::{OperationId, Scope};
use crate::secret::{KeyRing, Secret};
use crate::store::{BoxFuture, Snapshot, Store, StoreError};

/// The purpose of hashes of callers.
const CALLER: &str = "hapax 1 caller";

/// Limits of waiting and of deferred writes, in one process.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct EngineLimits {
    /// Waiters for one key; further duplicates get *in flight* at once. Default 100.
    pub waiters_per_key: usize,
    /// Waiters in all. Default 10,000.
    pub waiters: usize,
    /// Deferred writes while the store is unavailable; at that number, claims are rejected. Default
    /// 10,000.
    pub deferred: usize,
    /// Bytes of deferred outcomes; at that number, claims are rejected, and executions that end
    /// wait before their result is returned. Default 64 MiB.
    pub deferred_bytes: usize,
    /// Claims with an exchange in progress; further ones wait for a permit, in order, within the
    /// timeout of the store. Each may return an outcome of any size, so this bounds memory. At
    /// least 1. Default 1,024.
    pub claims: usize,
}

impl Default for EngineLimits {
    fn default() -> Self {
        Self {
            waiters_per_key: 100,
            waiters: 10_000,
            deferred: 10_000,
            deferred_bytes: 64 * 1024 * 1024,
            claims: 1024,
        }
    }
}

/// The current load of this process.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct EngineStats {
    /// Leases of executions in progress.
    pub in_flight: usize,
    /// Duplicates that wait.
    pub waiting: usize,
    /// Deferred writes.
    pub deferred: usize,
    /// Bytes of deferred outcomes.
    pub deferred_bytes: usize,
}

/// The engine, over a store. Cheap to clone; clones share everything.
///
/// It needs a tokio runtime with time enabled: exchanges with the store continue on tasks if their
/// caller is dropped, at any await.
#[derive(Clone, Debug)]
pub struct Idempotency {
    pub(super) inner: Arc<EngineState>,
}

#[derive(Debug)]
pub(super) struct EngineState {
    pub(super) store: Arc<dyn Store>,
    pub(super) entropy: Arc<dyn Entropy>,
    pub(super) lease_clock: LeaseClock,
    pub(super) secrets: Option<KeyRing>,
    pub(super) namespace: Namespace,
    /// The part of the store's schedule that belongs to the namespace.
    pub(super) schedule: Option<NamespacedSchedule>,
    /// The key of keyed fingerprints; `None` if no secret names records.
    pub(super) fingerprint_key: Option<[u8; 32]>,
    pub(super) store_timeout: Duration,
    pub(super) limits: EngineLimits,
    pub(super) waiters: Arc<Waiters>,
    pub(super) executions: Executions,
    pub(super) quarantines: Mutex<QuarantineState>,
    pub(super) backlog: Arc<Backlog>,
    /// Permits of claims with an exchange in progress.
    pub(super) permits: Arc<Semaphore>,
    pub(super) in_flight: AtomicUsize,
    pub(super) timer: Timer,
    pub(super) runtime: Handle,
}

impl EngineState {
    /// Creates a future for a part of an execution with this lease. It continues on a task if its
    /// caller drops it, or keeps it without polling it.
    pub(super) fn detach_on_drop<T: Send + 'static>(
        self: &Arc<Self>,
        lease: Duration,
        future: BoxFuture<'static, T>,
    ) -> DetachOnDrop<T> {
        DetachOnDrop::new(self, None, lease / 3, future)
    }

    /// Returns the deadline of an exchange that begins now.
    pub(super) fn deadline(&self) -> Instant {
        deadline_after(self.store_timeout)
    }

    /// Loads a record within the timeout of the store.
    pub(super) async fn load(&self, key: &OperationId) -> Result<Snapshot, StoreError> {
        let load = async {
            // A record may be of any size. A closed semaphore would bound nothing.
            let _permit = self.permits.acquire().await;
            self.store.load(key).await
        };
        match tokio::time::timeout(self.store_timeout, load).await {
            Ok(seen) => seen,
            Err(_) => Err(StoreError::unavailable("no answer within the timeout")),
        }
    }

    pub(super) fn overloaded(&self) -> bool {
        let size = self.backlog.size();
        size.entries >= self.limits.deferred || size.bytes >= self.limits.deferred_bytes
    }
}

/// Returns the time `timeout` from now; a year from now if that is beyond what clocks represent.
pub(super) fn deadline_after(timeout: Duration) -> Instant {
    const YEAR: Duration = Duration::from_secs(365 * 24 * 60 * 60);
    let now = Instant::now();
    now.checked_add(timeout).unwrap_or(now + YEAR)
}

impl Idempotency {
    /// Returns a builder of an engine over `store`, whose secret names the records and whose
    /// notifications wake waiters.
    pub fn builder(store: impl Store) -> IdempotencyBuilder {
        IdempotencyBuilder {
            store: Arc::new(store),
            entropy: Arc::new(BufferedEntropy::default()),
            clock: Arc::new(SystemClock),
            namespace: None,
            store_timeout: Duration::from_secs(2),
            limits: EngineLimits::default(),
        }
    }

    /// Returns the operation id of `key` in `scope` and the engine's namespace, which names the record in the
    /// store.
    #[must_use]
    pub fn operation_id(&self, scope: &Scope, key: &Key) -> OperationId {
        let naming = self.inner.secrets.as_ref().and_then(KeyRing::naming);
        OperationId::derive(naming, &self.inner.namespace, scope, key)
    }

    /// Returns the namespace.
    #[must_use]
    pub fn namespace(&self) -> &Namespace {
        &self.inner.namespace
    }

    /// Returns the entries of the namespace in the schedule of the store; `None` if the store has no schedule.
    #[must_use]
    pub fn schedule(&self) -> Option<&dyn Schedule> {
        self.inner.schedule.as_ref().map(|schedule| schedule as &dyn Schedule)
    }

    /// Returns a short keyed hash of a caller's credential, for operators; `None` if the store seals nothing.
    /// The key of the hash is derived from the secret that names records. A store without one derives it from the secret that
    /// seals, so that the hash changes when that secret is rotated.
    #[must_use]
    pub fn pseudonym(&self, value: &[u8]) -> Option<String> {
        self.hashing().next().map(|secret| secret.pseudonym(CALLER, value))
    }

    /// Returns every hash that [`pseudonym`](Self::pseudonym) may have returned in a process that wrote the
    /// records of the store: by each secret of the ring, if none names records. Empty if the store seals nothing.
    #[must_use]
    pub fn pseudonyms(&self, value: &[u8]) -> Vec<String> {
        self.hashing().map(|secret| secret.pseudonym(CALLER, value)).collect()
    }

    /// Returns a short keyed hash of a key, for logs, like [`pseudonym`](Self::pseudonym).
    #[must_use]
    pub fn key_pseudonym(&self, key: &Key) -> Option<String> {
        let secret = self.hashing().next();
        secret.map(|secret| secret.pseudonym("hapax 1 key pseudonym", key.as_str().as_bytes()))
    }

    fn hashing(&self) -> impl Iterator<Item = &Secret> {
        self.inner.secrets.iter().flat_map(KeyRing::hashing)
    }

    /// Returns the candidate of `key` to call with: the earlier one if it has a record that a retry
    /// would find, else the current one. `scope` is that of the call; a declared function has
    /// `Function::choose`. Safe to drop: it only reads.
    ///
    /// A released record counts too, because its caller retries with its key. It stays for a lease
    /// after the release.
    ///
    /// # Errors
    /// [`ClaimError::Store`]: the candidate is unknown, so do not call.
    pub async fn choose(&self, scope: &Scope, key: &CompositeKey) -> Result<Key, ClaimError> {
        let inner = &self.inner;
        let [previous, current] = key.candidates();
        let record = self.operation_id(scope, previous);
        if inner.backlog.outcome(&record).is_some() {
            return Ok(previous.clone());
        }
        let seen = inner.load(&record).await?;
        let kept = |until: Option<Timestamp>| until.is_none_or(|until| seen.now < until);
        let found = seen.stored.is_some_and(|stored| kept(stored.keep_until));
        Ok(if found { previous } else { current }.clone())
    }

    /// Returns the store.
    #[must_use]
    pub fn store(&self) -> &Arc<dyn Store> {
        &self.inner.store
    }

    /// Returns the timeout of the store.
    #[must_use]
    pub fn store_timeout(&self) -> Duration {
        self.inner.store_timeout
    }

    /// Returns the current load of this process.
    #[must_use]
    pub fn stats(&self) -> EngineStats {
        let size = self.inner.backlog.size();
        EngineStats {
            in_flight: self.inner.in_flight.load(Ordering::Relaxed),
            waiting: self.inner.waiters.waiting(),
            deferred: size.entries,
            deferred_bytes: size.bytes,
        }
    }

    /// Creates a future for a claim and its execution, with this lease. If its caller drops it before
    /// it turns `switch` on, it is cancelled; after that it continues on a task, so that an execution
    /// always gets its record. It turns the switch on when it has a lease, before the next await.
    pub fn detach_on_drop<T: Send + 'static>(
        &self,
        switch: DetachSwitch,
        lease: Duration,
        future: BoxFuture<'static, T>,
    ) -> DetachOnDrop<T> {
        DetachOnDrop::new(&self.inner, Some(switch), lease / 3, future)
    }

    /// Applies an operator's decision about a record. This continues if the caller is dropped, and
    /// waiters for the key are woken. Also returns the record that it replaced, or
    /// for which it was rejected.
    ///
    /// # Errors
    /// [`ClaimError`]; after [`StoreError::Ambiguous`] it may have been written: read the record
    /// again.
    pub async fn resolve(
        &self,
        key: OperationId,
        resolve: Resolve,
    ) -> Result<Resolved, ClaimError> {
        let seen = self.load(&key).await?;
        // The owner runs in this process, whatever the clock shows of its lease: after a
        // release, the key would execute a second time beside it.
        if seen.stored.is_some() && !resolve.force && self.inner.executions.runs(&key, &seen) {
            return Ok(Resolved { result: WriteResult::Rejected, was: seen });
        }
        let started = WriteExchange::resolve(key, seen, resolve, &*self.inner.entropy)?;
        self.write(key, started).await
    }

    /// Loads the record of `key`, within the timeout of the store.
    ///
    /// # Errors
    /// [`StoreError`].
    pub async fn load(&self, key: &OperationId) -> Result<Snapshot, StoreError> {
        self.inner.load(key).await
    }

    /// Runs a write to its end, also if the caller is dropped.
    pub(super) async fn write(
        &self,
        key: OperationId,
        (mut writing, next): (WriteExchange, Next<WriteResult>),
    ) -> Result<Resolved, ClaimError> {
        let inner = Arc::clone(&self.inner);
        let exchange = inner.backlog.begin_exchange();
        let running = Box::pin(async move {
            let _exchange = exchange;
            let written =
                retry::run(&*inner.store, &*inner.entropy, inner.deadline(), &mut writing, next)
                    .await;
            match written {
                Ok(written) => {
                    if let WriteResult::Recorded(seen) = &written {
                        inner.waiters.wake(&key, Some(seen.clone()));
                    }
                    Ok(Resolved { result: written, was: writing.into_seen() })
                }
                Err(ExchangeError::Store { error, may_land: true, .. }) => {
                    Err(StoreError::ambiguous(error).into())
                }
                Err(ExchangeError::Store { error, .. }) => Err(error.into()),
                Err(ExchangeError::Entropy(error)) => Err(error.into()),
            }
        });
        let written = self.inner.detach_on_drop(self.inner.store_timeout, running);
        written.await.unwrap_or_else(|error| Err(StoreError::ambiguous(error).into()))
    }

    /// Resolves when the store has accepted, or rejected, all [deferred](EngineStats::deferred) writes. Await
    /// it with a timeout. Unlike [`drain`](Self::drain) it does not wait for what is in progress.
    pub async fn deferred_written(&self) {
        self.inner.backlog.written().await;
    }

    /// Resolves when nothing is deferred, no exchange is in progress and no function executes or is
    /// being called. Await it with a timeout before a process ends: while the store is unavailable,
    /// a function hangs or a call waits, it does not resolve.
    ///
    /// Executions whose callers keep their futures without polling them continue on tasks. A call
    /// that has no lease yet does not: drop it.
    pub async fn drain(&self) {
        let _drain = self.inner.timer.drain(&self.inner.runtime);
        self.inner.backlog.empty().await;
    }
}

/// A builder of an engine.
#[derive(Debug)]
#[must_use]
pub struct IdempotencyBuilder {
    store: Arc<dyn Store>,
    entropy: Arc<dyn Entropy>,
    clock: Arc<dyn Clock>,
    namespace: Option<Result<Namespace, NamespaceError>>,
    store_timeout: Duration,
    limits: EngineLimits,
}

impl IdempotencyBuilder {
    /// Sets the [`Namespace`]: the name of this service among those that share the store. A store that several
    /// processes can open requires it. `""` is the namespace of records that were written without one.
    pub fn namespace(mut self, name: impl AsRef<str>) -> Self {
        self.namespace = Some(Namespace::new(name));
        self
    }

    /// Sets the time within which the store must answer. Default 2 s.
    pub fn store_timeout(mut self, timeout: Duration) -> Self {
        self.store_timeout = timeout;
        self
    }

    /// Sets the limits.
    pub fn limits(mut self, limits: EngineLimits) -> Self {
        self.limits = limits;
        self
    }

    /// Sets another source of randomness, for tests.
    pub fn entropy(mut self, entropy: Arc<dyn Entropy>) -> Self {
        self.entropy = entropy;
        self
    }

    /// Sets the wall clock that shows, beside the monotonic clock, how much of a lease has passed: see
    /// [`LeaseHandle::remaining`](crate::LeaseHandle::remaining). Default [`SystemClock`].
    pub fn clock(mut self, clock: Arc<dyn Clock>) -> Self {
        self.clock = clock;
        self
    }

    /// Starts the engine on the runtime of the caller.
    ///
    /// # Errors
    /// [`EngineError`] names the limit that is out of range, or the missing runtime.
    pub fn build(self) -> Result<Idempotency, EngineError> {
        let Self { store, entropy, clock, namespace, store_timeout, limits } = self;
        let namespace = match namespace {
            Some(namespace) => namespace?,
            None if store.capabilities().shared => return Err(EngineError::NoNamespace),
            None => Namespace::default(),
        };
        if store_timeout.is_zero() {
            return Err(EngineError::NoStoreTimeout);
        }
        if !(1..=Semaphore::MAX_PERMITS).contains(&limits.claims) {
            return Err(EngineError::Claims { found: limits.claims });
        }
        let runtime = Handle::try_current().map_err(|_| EngineError::NoRuntime)?;
        let secrets = store.capabilities().secrets.cloned();
        let naming = secrets.as_ref().and_then(KeyRing::naming);
        Ok(Idempotency {
            inner: Arc::new(EngineState {
                schedule: NamespacedSchedule::new(Arc::clone(&store), namespace.clone()),
                namespace,
                store,
                entropy,
                lease_clock: LeaseClock::new(clock),
                fingerprint_key: naming.map(|it| it.subkey("hapax 1 fingerprint key")),
                secrets,
                store_timeout,
                limits,
                waiters: Arc::new(Waiters::new(limits.waiters_per_key, limits.waiters)),
                executions: Executions::default(),
                quarantines: Mutex::default(),
                backlog: Arc::new(Backlog::new()),
                permits: Arc::new(Semaphore::new(limits.claims)),
                in_flight: AtomicUsize::new(0),
                timer: Timer::start(&runtime),
                runtime,
            }),
        })
    }
}

/// Reasons for which an engine cannot start.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum EngineError {
    /// The caller is outside of a tokio runtime.
    #[error("the engine spawns tasks, and there is no tokio runtime: build it within one")]
    NoRuntime,
    /// Several processes can open the store, and no namespace was set.
    #[error(
        "expected a namespace, since several services can share this store, found none: call `.namespace(\"\")` \
         if the store has records of this service, else `.namespace(\"NAME\")` with the name of this service. Under \
         another namespace every key is new, and retries execute again"
    )]
    NoNamespace,
    /// The namespace is no valid name.
    #[error(transparent)]
    Namespace(#[from] NamespaceError),
    /// The store would have no time to answer.
    #[error("the store timeout is zero: expected a duration such as 2 s")]
    NoStoreTimeout,
    /// The number of concurrent claims is out of range.
    #[error(
        "expected 1 to {} concurrent claims, found {found}: change `EngineLimits::claims`",
        Semaphore::MAX_PERMITS
    )]
    Claims {
        /// The configured number.
        found: usize,
    },
}
