//! Opening of the store that a URL names.

mod doctor;
mod identity;
mod lazy_cache;
mod measured;
mod url;
mod wait;

use std::error::Error;
use std::fmt;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use hapax_core::{Inspect, KeyRing, MemoryCapacity, MemoryStore, Secret, SystemClock};
use hapax_file::{FileOptions, FileStore, OpenError, SecretSource};
use hapax_postgres::PostgresStore;
use hapax_redis::RedisStore;
use hapax_tiered::{Cache, MemoryCache, Tiered, TieredStats};

use crate::budget::StoreMemoryPlan;
pub use doctor::StoreFinding;
use identity::IdentityFile;
use lazy_cache::LazyCache;
pub(crate) use measured::{MeasuredStore, StoreCalls};
pub use url::{CacheUrl, ServerUrl, StoreUrl, StoreUrlError, UrlText};

/// Largest number of requests that wait for a store. Their bytes are limited too, which is the
/// tighter limit for large requests.
const QUEUED_REQUESTS: usize = 4096;

/// Settings for opening a store.
#[derive(Clone, Debug)]
pub struct StoreOpener {
    /// URL of the store.
    pub store: StoreUrl,
    /// Cache in front of it.
    pub cache: Option<CacheUrl>,
    /// File of its secrets, in the format of [`KeyRing`]. A `file:` store creates its own next to
    /// it; the other stores use none by default.
    pub secret_file: Option<PathBuf>,
    /// File of the admin token, for [`diagnose`](Self::diagnose). Default: that of
    /// [`StoreUrl::token_file`].
    pub token_file: Option<PathBuf>,
    /// Operators' address of the gateway, which is written to the lock of a file.
    pub admin: Option<SocketAddr>,
    /// Bytes of memory for pages, cache and queue, or for the records if they are stored in memory
    /// only.
    pub memory: usize,
    /// Timeout of a server.
    pub timeout: Duration,
    /// Whether missing parts are created on a server: tables, and the name of the secret. Without
    /// them, records can be read and resolved, but not claimed.
    pub make: bool,
}

/// A store that is open.
#[derive(Clone, Debug)]
pub struct OpenStore {
    /// The store.
    pub store: Arc<dyn Inspect>,
    /// The secret that names its records; the engine needs the same one.
    pub secret: Option<Secret>,
    kind: Kind,
    cache: Option<CacheStats>,
    /// Bytes for outcomes that claims read; `None` if the store bounds them itself.
    replies: Option<usize>,
    /// The stored identity of the store, if there is one.
    remembered: Option<IdentityFile>,
}

#[derive(Clone, Debug)]
enum Kind {
    Other,
    File(Arc<FileStore>),
    Redis(Arc<RedisStore>),
    Postgres(Arc<PostgresStore>),
}

/// Counters of a cache.
#[derive(Clone)]
struct CacheStats(Arc<dyn Fn() -> TieredStats + Send + Sync>);

impl fmt::Debug for CacheStats {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0().fmt(f)
    }
}

/// Errors of opening a store.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum StoreOpenError {
    /// The secret is missing, unreadable, or that of another store.
    #[error("--secret-file: {}: {reason}", path.display())]
    Secret {
        /// The file of the secret, or the store that has another secret.
        path: PathBuf,
        /// The cause.
        reason: String,
    },
    /// The file of the store is unusable.
    #[error("{}", of_file(path, source))]
    File {
        /// The file.
        path: PathBuf,
        /// The cause.
        source: OpenError,
    },
    /// The URL of a server has an invalid setting.
    #[error("{url}: {}", chain(&**source))]
    Url {
        /// The URL, without its secrets.
        url: String,
        /// The cause.
        source: Box<dyn Error + Send + Sync>,
    },
    /// The server of the store returned an error or is unreachable.
    #[error("{url}: {}", chain(&**source))]
    Server {
        /// The URL, without its secrets.
        url: String,
        /// The cause.
        source: Box<dyn Error + Send + Sync>,
    },
    /// The server of the store was unreachable for the complete waiting time.
    #[error("{source} (waited {} for it: --store-wait)", seconds(*waited))]
    TimedOut {
        /// The waiting time.
        waited: Duration,
        /// Error of the last attempt.
        source: Box<StoreOpenError>,
    },
    /// The runtime is shutting down.
    #[error("the runtime is shutting down")]
    Shutdown,
}

impl StoreOpenError {
    /// Returns whether the store's server was unreachable or is starting up, so that a later
    /// attempt may succeed. Waiting does not fix wrong credentials, another secret or an unfit
    /// server.
    #[must_use]
    pub fn is_unreachable(&self) -> bool {
        let Self::Server { source, .. } = self else { return false };
        let redis = source.downcast_ref().map(hapax_redis::RedisConnectError::is_unreachable);
        let postgres =
            source.downcast_ref().map(hapax_postgres::PostgresConnectError::is_unreachable);
        redis.or(postgres).unwrap_or(false)
    }
}

impl StoreOpener {
    /// Creates the settings of `store`, with 64 MiB and a timeout of 2 s.
    #[must_use]
    pub const fn new(store: StoreUrl) -> Self {
        Self {
            store,
            cache: None,
            secret_file: None,
            token_file: None,
            admin: None,
            memory: 64 << 20,
            timeout: Duration::from_secs(2),
            make: true,
        }
    }

    /// Opens the store.
    ///
    /// # Errors
    /// [`StoreOpenError`].
    pub async fn open(&self) -> Result<OpenStore, StoreOpenError> {
        let opened = self.open_store().await?;
        let opened = OpenStore { remembered: self.remembered(opened.secret.as_ref()), ..opened };
        // Stored before the first claim, so that a store that is emptied afterwards is recognised.
        // A process that only inspects the store does not change the stored identity.
        if self.make && !opened.is_replaced() {
            opened.remember();
        }
        Ok(opened)
    }

    fn remembered(&self, secret: Option<&Secret>) -> Option<IdentityFile> {
        IdentityFile::of(&self.store, self.secret_file.as_deref(), secret)
    }

    /// Returns the stored identity of the store.
    fn known(&self, ring: Option<&KeyRing>) -> Option<String> {
        self.remembered(ring.map(KeyRing::naming))?.read()
    }

    async fn open_store(&self) -> Result<OpenStore, StoreOpenError> {
        let ring = self.secret_file.as_deref().map(read_ring).transpose()?;
        let memory = self.memory_plan().store;
        match &self.store {
            StoreUrl::Memory => {
                let capacity = MemoryCapacity { bytes: memory, ..MemoryCapacity::default() };
                let secret = ring.as_ref().map(|ring| ring.naming().clone());
                let store = MemoryStore::new(Arc::new(SystemClock), capacity);
                let store = Arc::new(secret.iter().cloned().fold(store, MemoryStore::secret));
                self.tiered(store, secret, ring, Kind::Other)
            }
            StoreUrl::File(path) => {
                let store = self.file(path, memory).await?;
                let (secret, kind) = (store.secret().cloned(), Kind::File(Arc::clone(&store)));
                let known = self.remembered(secret.as_ref()).and_then(|line| line.read());
                if let Some(known) = known {
                    store.expect(&known);
                }
                self.tiered(store, secret, ring, kind)
            }
            StoreUrl::Redis(url) => {
                let mut options = self.redis(url, memory, ring.as_ref());
                if let Some(known) = self.known(ring.as_ref()) {
                    options = options.identity(known);
                }
                let store = RedisStore::connect(options).await;
                let store = Arc::new(store.map_err(|error| server(url, error))?);
                let (secret, kind) = (store.secret().cloned(), Kind::Redis(Arc::clone(&store)));
                self.tiered(store, secret, ring, kind)
            }
            StoreUrl::Postgres(url) => {
                let mut options = self.postgres(url, memory, ring.as_ref())?;
                if let Some(known) = self.known(ring.as_ref()) {
                    options = options.identity(known);
                }
                let store = PostgresStore::connect(options).await;
                let store = Arc::new(store.map_err(|error| server(url, error))?);
                let (secret, kind) = (store.secret().cloned(), Kind::Postgres(Arc::clone(&store)));
                self.tiered(store, secret, ring, kind)
            }
        }
    }

    /// Checks the secrets and the URLs without opening anything. It blocks while a file is read.
    ///
    /// # Errors
    /// [`StoreOpenError::Secret`] and [`StoreOpenError::Url`].
    pub fn check(&self) -> Result<(), StoreOpenError> {
        let ring = self.secret_file.as_deref().map(read_ring).transpose()?;
        match &self.store {
            StoreUrl::Memory | StoreUrl::File(_) => {}
            StoreUrl::Redis(url) => {
                let checked = self.redis(url, self.memory, ring.as_ref()).check();
                checked.map_err(|error| server(url, error))?;
            }
            StoreUrl::Postgres(url) => drop(self.postgres(url, self.memory, ring.as_ref())?),
        }
        if let Some(CacheUrl::Redis(url)) = &self.cache {
            self.redis(url, self.memory, None).check().map_err(|error| server(url, error))?;
        }
        Ok(())
    }

    fn memory_plan(&self) -> StoreMemoryPlan {
        let on_server = matches!(self.store, StoreUrl::Redis(_) | StoreUrl::Postgres(_));
        StoreMemoryPlan::split(self.memory, on_server, self.cache.is_some())
    }

    /// Returns the options of a Redis store; `memory` is for its queue.
    pub(crate) fn redis(
        &self,
        url: &ServerUrl,
        memory: usize,
        ring: Option<&KeyRing>,
    ) -> hapax_redis::RedisOptions {
        let options = hapax_redis::RedisOptions::new(url.as_str())
            .timeout(self.timeout)
            .queue(QUEUED_REQUESTS, memory)
            .make(self.make);
        match ring {
            Some(ring) => options.key_ring(ring.clone()),
            None => options,
        }
    }

    /// Returns the options of a Postgres store; `memory` is for its queue.
    pub(crate) fn postgres(
        &self,
        url: &ServerUrl,
        memory: usize,
        ring: Option<&KeyRing>,
    ) -> Result<hapax_postgres::PostgresOptions, StoreOpenError> {
        let options: hapax_postgres::PostgresOptions = url
            .as_str()
            .parse()
            .map_err(|error: hapax_postgres::PostgresConnectError| server(url, error))?;
        let options = options
            .timeout(self.timeout)
            .queue(QUEUED_REQUESTS, memory)
            .listen(true)
            .migrate(self.make);
        Ok(match ring {
            Some(ring) => options.key_ring(ring.clone()),
            None => options,
        })
    }

    async fn file(&self, path: &Path, memory: usize) -> Result<Arc<FileStore>, StoreOpenError> {
        let third = memory / 3;
        let mut options = FileOptions::new(path)
            .cache_bytes(third)
            .queue(QUEUED_REQUESTS, third)
            .reading_bytes(third);
        if let Some(secret_file) = &self.secret_file {
            // A secret is created only at the store's default path. A file that is configured must
            // exist; otherwise its name is a mistake.
            options = options.secret(SecretSource::File(secret_file.clone()));
        }
        if let Some(admin) = self.admin {
            options = options.admin(admin);
        }
        // It blocks on the disk.
        let opened = tokio::task::spawn_blocking(move || FileStore::open(options)).await;
        let store = opened
            .map_err(|_| StoreOpenError::Shutdown)?
            .map_err(|source| secret_or_file(path, source))?;
        Ok(Arc::new(store))
    }

    /// Returns the store with its cache in front, if one is configured.
    fn tiered<S: Inspect>(
        &self,
        store: Arc<S>,
        secret: Option<Secret>,
        ring: Option<KeyRing>,
        kind: Kind,
    ) -> Result<OpenStore, StoreOpenError> {
        let shares = self.memory_plan();
        let replies = (shares.replies > 0).then_some(shares.replies);
        let cache: Arc<dyn Cache> = match &self.cache {
            None => {
                return Ok(OpenStore { kind, replies, ..OpenStore::new(store, secret) });
            }
            Some(CacheUrl::Memory) => Arc::new(MemoryCache::new(shares.cache)),
            Some(CacheUrl::Redis(url)) => {
                let options = self.redis(url, shares.cache, None);
                // Invalid options will not become valid later.
                options.check().map_err(|error| server(url, error))?;
                Arc::new(LazyCache::new(url, options))
            }
        };
        // Other gateways may have their cache on the same server, and a store at the same URL or a
        // similar one: as seen from another machine, by another user, in another schema. They must
        // not find the entries of this one, so the complete URL and the store's identity are part
        // of the name.
        let made = match &kind {
            Kind::File(store) => store.identity(),
            Kind::Postgres(store) => store.identity(),
            Kind::Redis(_) | Kind::Other => String::new(),
        };
        let name = format!("{made} {}", self.store.whole());
        let mut options = hapax_tiered::TieredOptions::default().authority(&name);
        // A file that created its own secret seals its cache with it.
        if let Some(ring) = ring.or_else(|| secret.clone().map(KeyRing::new)) {
            options = options.key_ring(&ring);
        }
        let tiered = Arc::new(Tiered::with(store, cache, options));
        let counts = Arc::clone(&tiered);
        let cache = Some(CacheStats(Arc::new(move || counts.stats())));
        Ok(OpenStore { kind, cache, replies, ..OpenStore::new(tiered, secret) })
    }
}

impl OpenStore {
    /// Creates an open store from any store, such as one of a test.
    #[must_use]
    pub fn new(store: Arc<dyn Inspect>, secret: Option<Secret>) -> Self {
        Self { store, secret, kind: Kind::Other, cache: None, replies: None, remembered: None }
    }

    /// Returns whether the store was emptied or replaced since it was last used, and no operator
    /// has confirmed it. Then new keys are rejected under `block` and `reconcile`.
    #[must_use]
    pub fn is_replaced(&self) -> bool {
        match &self.kind {
            Kind::Redis(store) => store.is_replaced(),
            Kind::Postgres(store) => store.is_replaced(),
            Kind::File(store) => store.is_replaced(),
            Kind::Other => false,
        }
    }

    /// Accepts the store as it is: operations of the previous store may execute again. On a server,
    /// all gateways accept it.
    ///
    /// # Errors
    /// The store's error; the confirmation may have succeeded nevertheless.
    pub async fn confirm(&self) -> Result<(), Box<dyn Error + Send + Sync>> {
        match &self.kind {
            Kind::Redis(store) => store.confirm().await?,
            Kind::Postgres(store) => store.confirm().await?,
            Kind::File(store) => store.confirm(),
            Kind::Other => {}
        }
        tracing::warn!(
            "an operator confirmed the store: operations of the previous one may execute again"
        );
        self.remember();
        Ok(())
    }

    /// Stores the current identity of the store.
    fn remember(&self) {
        let identity = match &self.kind {
            Kind::File(store) => Some(store.identity()),
            Kind::Redis(store) => store.known_identity(),
            Kind::Postgres(store) => store.known_identity(),
            Kind::Other => None,
        };
        if let (Some(remembered), Some(identity)) = (&self.remembered, identity) {
            remembered.write(&identity);
        }
    }

    /// Returns the bytes for outcomes that claims read at once; `None` if the store bounds them.
    pub(crate) const fn replies(&self) -> Option<usize> {
        self.replies
    }

    /// Returns the store if it is a file.
    pub(crate) fn file(&self) -> Option<Arc<FileStore>> {
        match &self.kind {
            Kind::File(store) => Some(Arc::clone(store)),
            Kind::Other | Kind::Redis(_) | Kind::Postgres(_) => None,
        }
    }

    /// Returns the store's counters: name of the metric, help and value. Those whose names end in
    /// `_total` never decrease.
    pub(crate) fn counts(&self) -> Vec<(&'static str, &'static str, u64)> {
        let mut counts = match &self.kind {
            Kind::Other => Vec::new(),
            Kind::File(store) => {
                let stats = store.stats();
                let mut counts = vec![
                    ("batches_total", "Transactions made durable.", stats.commits),
                    ("batched_swaps_total", "Swaps in those.", stats.swaps),
                    ("reopened_total", "Times that the file was opened again.", stats.reopened),
                    ("damaged_blocks", "Damaged blocks of the file.", stats.damaged as u64),
                    ("queued", "Requests that wait for the disk.", stats.queued as u64),
                    ("file_bytes", "The file's length.", stats.file_bytes.unwrap_or(0)),
                ];
                // The metric is omitted if the free space is unknown, so that no alert fires.
                counts.extend(
                    stats
                        .free_bytes
                        .map(|free| ("disk_free_bytes", "Free bytes of the disk.", free)),
                );
                counts
            }
            Kind::Redis(store) => {
                let stats = store.stats();
                vec![
                    ("connections_total", "Connections made.", stats.connections),
                    ("queued", "Requests that wait for an answer.", stats.waiting as u64),
                    (
                        "awaited",
                        "Keys that duplicates wait for at this gateway.",
                        stats.awaited as u64,
                    ),
                ]
            }
            Kind::Postgres(store) => {
                let stats = store.stats();
                vec![
                    ("batches_total", "Transactions with swaps that were sent.", stats.batches),
                    ("batched_swaps_total", "Swaps in those.", stats.swaps),
                    ("again_total", "Swaps sent again because of a race.", stats.again),
                    ("alone_total", "Swaps that went alone.", stats.alone),
                    ("connections_total", "Connections made.", stats.connections),
                    ("queued", "Swaps that wait.", stats.queued as u64),
                    (
                        "awaited_elsewhere",
                        "Keys that duplicates wait for at other gateways.",
                        stats.awaited as u64,
                    ),
                ]
            }
        };
        if let Some(CacheStats(stats)) = &self.cache {
            let stats = stats();
            counts.extend([
                ("cache_hits_total", "Replays answered by the cache.", stats.hits),
                ("cache_misses_total", "Lookups in the cache without a result.", stats.misses),
                ("cache_failures_total", "Times that the cache did not answer.", stats.failures),
            ]);
        }
        counts
    }

    /// Closes the store, so that another process can open it at once, and writes its queue.
    pub async fn close(&self) {
        match &self.kind {
            Kind::File(file) => file.close().await,
            Kind::Postgres(store) => store.close().await,
            Kind::Redis(_) | Kind::Other => {}
        }
    }
}

fn server(url: &ServerUrl, source: impl Error + Send + Sync + 'static) -> StoreOpenError {
    let (url, source): (_, Box<dyn Error + Send + Sync>) = (url.to_string(), source.into());
    let redis = source.downcast_ref::<hapax_redis::RedisConnectError>();
    let postgres = source.downcast_ref::<hapax_postgres::PostgresConnectError>();
    let unreadable = matches!(redis, Some(hapax_redis::RedisConnectError::Url(_)))
        || matches!(postgres, Some(hapax_postgres::PostgresConnectError::Url(_)));
    match unreadable {
        true => StoreOpenError::Url { url, source },
        false => StoreOpenError::Server { url, source },
    }
}

fn seconds(time: Duration) -> String {
    format!("{:.0} s", time.as_secs_f64())
}

/// Returns the error and its causes: libraries leave the reason to the source.
fn chain(error: &(dyn Error + 'static)) -> String {
    let mut said = error.to_string();
    let mut cause = error.source();
    while let Some(error) = cause {
        let more = error.to_string();
        if !said.contains(&more) {
            said = said + ": " + &more;
        }
        cause = error.source();
    }
    said
}

/// Describes the error, with the file named once.
fn of_file(file: &Path, source: &OpenError) -> String {
    match source {
        OpenError::Io { path, .. } if path == file => source.to_string(),
        _ => format!("{}: {source}", file.display()),
    }
}

/// Classifies errors of the secret as [`StoreOpenError::Secret`], since its configuration must be
/// fixed.
fn secret_or_file(file: &Path, source: OpenError) -> StoreOpenError {
    let path = match &source {
        OpenError::SecretMissing { path } | OpenError::SecretUnreadable { path, .. } => {
            path.clone()
        }
        OpenError::OtherSecret => file.into(),
        _ => return StoreOpenError::File { path: file.into(), source },
    };
    StoreOpenError::Secret { path, reason: source.to_string() }
}

fn read_ring(path: &Path) -> Result<KeyRing, StoreOpenError> {
    let wrong = |reason: String| StoreOpenError::Secret { path: path.into(), reason };
    let text = std::fs::read_to_string(path).map_err(|error| wrong(error.to_string()))?;
    KeyRing::parse(&text).map_err(|error| wrong(error.to_string()))
}
