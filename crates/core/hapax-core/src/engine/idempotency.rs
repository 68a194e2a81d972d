//! The handle that doors hold.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use tokio::runtime::Handle;
use tokio::sync::Semaphore;
use tokio::time::Instant;

use super::backlog::Backlog;
use super::claim::ClaimError;
use super::retry::{self, ExchangeError};
use super::waiters::Waiters;
use crate::clock::Timestamp;
use crate::entropy::{Entropy, SystemEntropy};
use crate::exchange::{Executions, Resolved, WriteExchange, WriteResult};
use crate::key::{CompositeKey, Key};
use crate::machine::Resolve;
use crate::scope::{OperationId, Scope};
use crate::secret::Secret;
use crate::store::{Snapshot, Store, StoreError};

/// How much may wait and be held back, in one process.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct EngineLimits {
    /// Copies waiting for one key; further ones are told *in flight* at once. Default 100.
    pub waiters_per_key: usize,
    /// Copies waiting in all. Default 10,000.
    pub waiters: usize,
    /// Writes held back while the store is away; at that many, claims are refused. Default 10,000.
    pub deferred: usize,
    /// Bytes of outcomes held back; at that many, claims are refused, and executions that end wait
    /// before they are told that theirs is. Default 64 MiB.
    pub deferred_bytes: usize,
    /// Claims that talk to the store at one time; further ones wait for their turn, in order, within
    /// the time-out of the store. What each may be told is an outcome of any size, so that this
    /// bounds memory. At least 1. Default 1,024.
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

/// What is going on in this process.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct EngineStats {
    /// Leases held.
    pub in_flight: usize,
    /// Copies waiting.
    pub waiting: usize,
    /// Writes held back.
    pub deferred: usize,
    /// Bytes of outcomes held back.
    pub deferred_bytes: usize,
}

/// The engine, over a store. Cheap to clone; clones share everything.
///
/// It needs a tokio runtime with time enabled: conversations with the store run on tasks of their
/// own, so that a caller may be dropped at any await.
#[derive(Clone, Debug)]
pub struct Idempotency {
    pub(super) inner: Arc<EngineState>,
}

#[derive(Debug)]
pub(super) struct EngineState {
    pub(super) store: Arc<dyn Store>,
    pub(super) entropy: Arc<dyn Entropy>,
    pub(super) secret: Option<Secret>,
    /// The key of fingerprints; `None` without a secret.
    pub(super) fingerprint_key: Option<[u8; 32]>,
    pub(super) store_timeout: Duration,
    pub(super) limits: EngineLimits,
    pub(super) waiters: Arc<Waiters>,
    pub(super) executions: Executions,
    pub(super) backlog: Arc<Backlog>,
    /// Whose turn it is to be told something by the store.
    pub(super) permits: Arc<Semaphore>,
    pub(super) in_flight: AtomicUsize,
    pub(super) runtime: Handle,
}

impl EngineState {
    /// When whoever talks to the store now gives up.
    pub(super) fn deadline(&self) -> Instant {
        deadline_after(self.store_timeout)
    }

    /// Loads what is there, within the time that the store may take.
    pub(super) async fn load(&self, key: &OperationId) -> Result<Snapshot, StoreError> {
        let look = async {
            // A record may be of any size. A closed semaphore would bound nothing.
            let _turn = self.permits.acquire().await;
            self.store.load(key).await
        };
        match tokio::time::timeout(self.store_timeout, look).await {
            Ok(seen) => seen,
            Err(_) => Err(StoreError::unavailable("no answer in time")),
        }
    }

    pub(super) fn overloaded(&self) -> bool {
        let size = self.backlog.size();
        size.entries >= self.limits.deferred || size.bytes >= self.limits.deferred_bytes
    }
}

/// The moment `patience` from now; a year from now where that is further than clocks reach.
pub(super) fn deadline_after(store_timeout: Duration) -> Instant {
    const YEAR: Duration = Duration::from_secs(365 * 24 * 60 * 60);
    let now = Instant::now();
    now.checked_add(store_timeout).unwrap_or(now + YEAR)
}

impl Idempotency {
    /// Begins an engine over `store`, whose secret names the records and whose notifications wake
    /// waiters.
    pub fn builder(store: impl Store) -> IdempotencyBuilder {
        IdempotencyBuilder {
            store: Arc::new(store),
            entropy: Arc::new(SystemEntropy),
            store_timeout: Duration::from_secs(2),
            limits: EngineLimits::default(),
        }
    }

    /// The name under which the store keeps `key` of `scope`.
    #[must_use]
    pub fn operation_id(&self, scope: &Scope, key: &Key) -> OperationId {
        OperationId::derive(self.inner.secret.as_ref(), scope, key)
    }

    /// Returns a short keyed hash of a caller's credential, for operators; `None` without a secret.
    #[must_use]
    pub fn pseudonym(&self, value: &[u8]) -> Option<String> {
        self.inner.secret.as_ref().map(|secret| secret.pseudonym(value))
    }

    /// Which candidate of `key` to call with: the earlier one if there is a record of it that a
    /// retry would find, else the current one. `scope` is that of the call; for a declared function
    /// there is `Function::choose`. Safe to drop: it reads.
    ///
    /// A record that was released counts as well: whoever has its key will call again with it. It is
    /// there for a lease after the release.
    ///
    /// # Errors
    /// [`ClaimError::Store`]: it cannot be told, so do not call.
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

    /// The store underneath.
    #[must_use]
    pub fn store(&self) -> &Arc<dyn Store> {
        &self.inner.store
    }

    /// How long the store may take to answer.
    #[must_use]
    pub fn store_timeout(&self) -> Duration {
        self.inner.store_timeout
    }

    /// What is going on in this process.
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

    /// An operator's decision about a record, on a task of its own: it goes on when the caller
    /// is dropped, and those who wait for the key hear of it. Returns also what it replaced, or was
    /// refused for.
    ///
    /// # Errors
    /// [`ClaimError`]; after [`StoreError::Ambiguous`] it may have been written: look again.
    pub async fn resolve(
        &self,
        key: OperationId,
        resolve: Resolve,
    ) -> Result<Resolved, ClaimError> {
        let inner = Arc::clone(&self.inner);
        let exchange = inner.backlog.begin_exchange();
        let task = inner.runtime.clone().spawn(async move {
            let _talking = exchange;
            let load = inner.store.load(&key);
            let seen = match tokio::time::timeout(inner.store_timeout, load).await {
                Ok(seen) => seen.map_err(ClaimError::from)?,
                Err(_) => return Err(StoreError::unavailable("no answer in time").into()),
            };
            // The owner is alive in this process, whatever the clock says of its lease: released, the
            // key would execute a second time beside it.
            if seen.stored.is_some() && !resolve.force && inner.executions.runs(&key, &seen) {
                return Ok(Resolved { result: WriteResult::Rejected, was: seen });
            }
            let (mut writing, next) = WriteExchange::resolve(key, seen, resolve, &*inner.entropy)?;
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
        task.await.unwrap_or_else(|error| Err(StoreError::ambiguous(error).into()))
    }

    /// Resolves when nothing is held back any more, no conversation is under way and no function
    /// runs or is being called. To be awaited before a process ends, with a time-out: while the store
    /// is away, or a function hangs, or a call of one still waits, it does not resolve.
    pub async fn drain(&self) {
        self.inner.backlog.empty().await;
    }
}

/// What an engine is made of.
#[derive(Debug)]
#[must_use]
pub struct IdempotencyBuilder {
    store: Arc<dyn Store>,
    entropy: Arc<dyn Entropy>,
    store_timeout: Duration,
    limits: EngineLimits,
}

impl IdempotencyBuilder {
    /// How long the store may take to answer before it counts as unreachable. Default 2 s.
    pub fn store_timeout(mut self, timeout: Duration) -> Self {
        self.store_timeout = timeout;
        self
    }

    /// How much may wait and be held back.
    pub fn limits(mut self, limits: EngineLimits) -> Self {
        self.limits = limits;
        self
    }

    /// Another source of randomness; for tests.
    pub fn entropy(mut self, entropy: Arc<dyn Entropy>) -> Self {
        self.entropy = entropy;
        self
    }

    /// Starts the engine on the runtime of the caller.
    ///
    /// # Errors
    /// [`EngineError`] names the limit that cannot hold, or the missing runtime.
    pub fn build(self) -> Result<Idempotency, EngineError> {
        let Self { store, entropy, store_timeout, limits } = self;
        if store_timeout.is_zero() {
            return Err(EngineError::NoStoreTimeout);
        }
        if !(1..=Semaphore::MAX_PERMITS).contains(&limits.claims) {
            return Err(EngineError::Claims { found: limits.claims });
        }
        let runtime = Handle::try_current().map_err(|_| EngineError::NoRuntime)?;
        let secret = store.capabilities().secret.cloned();
        Ok(Idempotency {
            inner: Arc::new(EngineState {
                store,
                entropy,
                fingerprint_key: secret.as_ref().map(|it| it.subkey("hapax 1 fingerprint key")),
                secret,
                store_timeout,
                limits,
                waiters: Arc::new(Waiters::new(limits.waiters_per_key, limits.waiters)),
                executions: Executions::default(),
                backlog: Arc::new(Backlog::new()),
                permits: Arc::new(Semaphore::new(limits.claims)),
                in_flight: AtomicUsize::new(0),
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
