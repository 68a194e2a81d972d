//! Stores as a gateway opens them, each with files or a server of its own, and walks through them.

use std::num::NonZeroU32;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use hapax_core::store::Cursor as Position;
use hapax_core::store::{Capabilities, BoxFuture, Page, Reaped, ScanStep, Snapshot, Swap, Swapped, Visitor};
use hapax_core::{
    Idempotency, Inspect, MemoryCapacity, MemoryStore, OperationId, Store, StoreError, SystemClock,
    SystemEntropy,
};
use hapax_gateway::{CacheUrl, OpenStore, StoreOpener};
use hapax_operators::{AdminToken, Audit, Census, Operators};
use hapax_testkit::servers::{PostgresServer, PostgresServerOptions, RedisServer};
use tempfile::TempDir;

use crate::Failure;

pub const NAMES: [&str; 5] = ["memory", "file", "redis", "postgres", "tiered"];

/// A gateway's default time after which a store counts as unreachable.
pub const TIMEOUT: Duration = Duration::from_secs(2);
/// The share of a gateway's memory that its store has by default.
const MEMORY: usize = 108 << 20;

/// Files or a server with records. They are removed when it is dropped.
pub struct Place {
    opening: StoreOpener,
    memory: Option<Arc<MemoryStore>>,
    _redis: Option<RedisServer>,
    postgres: Option<PostgresServer>,
    folder: TempDir,
    /// The place in the store where the next walk begins.
    at: Arc<Mutex<Position>>,
}

impl Place {
    pub async fn new(name: &str) -> Result<Self, Failure> {
        let folder = tempfile::tempdir()?;
        let secret = folder.path().join("secret");
        std::fs::write(&secret, "5a".repeat(32))?;
        let (mut memory, mut redis, mut postgres, mut cache) = (None, None, None, None);
        let mut url = format!("file:{}", folder.path().join("hapax.db").display());
        match name {
            // That of a gateway is full at a million records.
            "memory" => {
                let capacity = MemoryCapacity { records: usize::MAX, bytes: 8 << 30 };
                memory = Some(Arc::new(MemoryStore::new(Arc::new(SystemClock), capacity)));
            }
            "file" => {}
            "redis" => url = redis.insert(RedisServer::start().await).url(),
            "postgres" => {
                // Durable, and with the memory that it has by default.
                let options = PostgresServerOptions::new().set("fsync", "on");
                let options = options.set("shared_buffers", "128MB");
                url = postgres.insert(PostgresServer::start_with(options).await).url("postgres");
            }
            "tiered" => cache = Some(CacheUrl::Memory),
            other => return Err(format!("expected one of {NAMES:?}, found `{other}`").into()),
        }
        let secret_file = Some(secret);
        let opening =
            StoreOpener { cache, secret_file, memory: MEMORY, ..StoreOpener::new(url.parse()?) };
        Ok(Self { opening, memory, _redis: redis, postgres, folder, at: Arc::default() })
    }

    /// Opens the store. Its answers may take most of `timeout`.
    pub async fn open(&self, timeout: Duration) -> Result<OpenStore, Failure> {
        Ok(match &self.memory {
            Some(store) => OpenStore::new(store.clone(), None),
            None => StoreOpener { timeout: timeout * 3 / 4, ..self.opening.clone() }.open().await?,
        })
    }

    /// Begins a walk of `census` through `store`, as a gateway does at its start, but where the walk
    /// before it ended.
    pub fn walk(
        &self,
        store: &Arc<dyn Inspect>,
        engine: &Idempotency,
        census: &Arc<Census>,
    ) -> Result<Walk, Failure> {
        let path = |name: &str| -> PathBuf { self.folder.path().join(name) };
        let [ended, whole] = [false; 2].map(AtomicBool::new);
        let at = Arc::clone(&self.at);
        let gate = Arc::new(Gate { store: Arc::clone(store), at, ended, whole });
        let operators = Operators::builder(engine.clone(), Arc::clone(&gate) as Arc<dyn Inspect>)
            .store_timeout(TIMEOUT)
            .census(Arc::clone(census))
            .build(
                AdminToken::read_or_make(&path("token"), &SystemEntropy)?,
                Audit::new(path("audit.jsonl"), "bench"),
            );
        Ok(Walk { operators, gate })
    }

    /// Stops the server.
    pub async fn stop(mut self) {
        if let Some(postgres) = &mut self.postgres {
            postgres.stop().await;
        }
    }
}

/// Returns an engine on `store`, with the secret of `opened`.
pub fn engine(opened: &OpenStore, store: Arc<dyn Store>, timeout: Duration) -> Idempotency {
    Idempotency::builder(store).namespace("").store_timeout(timeout).build().expect("there is a runtime")
}

/// A walk through a store at a gateway's pace. Dropped, it ends at its next page.
pub struct Walk {
    pub operators: Operators,
    gate: Arc<Gate>,
}

impl Walk {
    /// Returns whether it came to the end of the store.
    pub fn is_whole(&self) -> bool {
        self.gate.whole.load(Ordering::Relaxed)
    }
}

impl Drop for Walk {
    fn drop(&mut self) {
        self.gate.ended.store(true, Ordering::Relaxed);
    }
}

/// A store through which a walk can be ended.
#[derive(Debug)]
struct Gate {
    store: Arc<dyn Inspect>,
    at: Arc<Mutex<Position>>,
    ended: AtomicBool,
    whole: AtomicBool,
}

impl Gate {
    fn at(&self) -> MutexGuard<'_, Position> {
        self.at.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Store for Gate {
    fn swap(&self, swap: Swap) -> BoxFuture<'_, Result<Swapped, StoreError>> {
        self.store.swap(swap)
    }

    fn load<'a>(&'a self, key: &'a OperationId) -> BoxFuture<'a, Result<Snapshot, StoreError>> {
        self.store.load(key)
    }

    fn reap(&self, limit: NonZeroU32) -> BoxFuture<'_, Result<Reaped, StoreError>> {
        self.store.reap(limit)
    }

    fn capabilities(&self) -> Capabilities<'_> {
        self.store.capabilities()
    }
}

impl Inspect for Gate {
    fn page(
        &self,
        after: Option<OperationId>,
        limit: NonZeroU32,
    ) -> BoxFuture<'_, Result<Page, StoreError>> {
        self.store.page(after, limit)
    }

    fn scan<'a>(
        &'a self,
        _: Position,
        limit: NonZeroU32,
        visit: Visitor<'a>,
    ) -> BoxFuture<'a, Result<ScanStep, StoreError>> {
        Box::pin(async move {
            if self.ended.load(Ordering::Relaxed) {
                return Err(StoreError::unavailable("the walk is ended"));
            }
            let from = self.at().clone();
            let scanned = self.store.scan(from, limit, visit).await?;
            *self.at() = scanned.next.clone().unwrap_or_default();
            self.whole.fetch_or(scanned.next.is_none(), Ordering::Relaxed);
            Ok(scanned)
        })
    }
}
