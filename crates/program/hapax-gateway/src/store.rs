//! Opening of the store that a URL names.

mod doctor;
mod drivers;
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

use hapax_core::driver::{
    DrivenStore, DriverOptions, StoreCount, StoreDriver, StoreDriverError, StoreDriverErrorKind,
};
use hapax_core::{Inspect, KeyRing, MemoryCapacity, MemoryStore, Secret, SystemClock, Timestamp};
use hapax_file::{FileOptions, FileStore, OpenError, SecretSource};
use hapax_redis::RedisOptions;
use hapax_tiered::{Cache, MemoryCache, Tiered, TieredStats};

use crate::budget::StoreMemoryPlan;
pub use doctor::StoreFinding;
pub use drivers::StoreDrivers;
use identity::IdentityFile;
use lazy_cache::BackgroundCache;
pub(crate) use measured::{MeasuredStore, StoreCalls};
pub use url::{CacheUrl, ServerUrl, StoreUrl, StoreUrlError, UrlText};

/// Largest number of requests that wait for a store. Their bytes are limited too, which is the
/// tighter limit for large requests.
const QUEUED_REQUESTS: usize = 4096;

/// Rejects a cache whose entries other writers could forge.
const UNSEALED_CACHE: &str = "expected a line `seal` with --cache on a server, found only `open`: leave --cache out \
     until every process has the ring, and the secret seals";

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
    /// Drivers of stores on servers.
    pub drivers: StoreDrivers,
    /// Bytes of memory for pages, cache and queue, or for the records if they are stored in memory
    /// only.
    pub memory: usize,
    /// Timeout of a server.
    pub timeout: Duration,
    /// Whether missing parts are created on a server: tables, and the name of the secret. Without
    /// them, records can be read and resolved, but not claimed. Without it a file must exist.
    pub make: bool,
    /// Whether a store that does not exist, or that no process has used, is rejected with
    /// [`StoreOpenError::Missing`].
    pub must_exist: bool,
}

/// A store that is open.
#[derive(Clone, Debug)]
pub struct OpenStore {
    /// The store.
    pub store: Arc<dyn Inspect>,
    /// The secret that names its records.
    pub secret: Option<Secret>,
    /// The store as its driver opened it; `None` for memory and for [`OpenStore::new`].
    driven: Option<Arc<dyn DrivenStore>>,
    file: Option<Arc<FileStore>>,
    cache: Option<CacheStats>,
    /// Bytes for outcomes that claims read; `None` if the store bounds them itself.
    replies: Option<usize>,
    /// The stored identity of the store, if there is one.
    remembered: Option<IdentityFile>,
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
    #[error("--secret-file (HAPAX_SECRET_FILE): {}: {reason}", path.display())]
    Secret {
        /// The file of the secret; the file or URL of a store that has another secret.
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
    /// There is no store, and one is required. Nothing was created.
    #[error("{}", missing(place, *by_setting))]
    Missing {
        /// The URL, with the absolute path of a file, and without its secrets.
        place: String,
        /// Whether [`StoreOpener::must_exist`] requires it. Otherwise the purpose does: a new store has
        /// nothing to read.
        by_setting: bool,
    },
    /// The URL of a server has an invalid setting.
    #[error("{url}: {}", chain(source))]
    Url {
        /// The URL, without its secrets.
        url: String,
        /// The cause.
        source: StoreDriverError,
    },
    /// The server of the store returned an error or is unreachable.
    #[error("{url}: {}", chain(source))]
    Server {
        /// The URL, without its secrets.
        url: String,
        /// The cause.
        source: StoreDriverError,
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
        matches!(self, Self::Server { source, .. } if source.is_unreachable())
    }
}

impl StoreOpener {
    /// Creates the settings of `store`, with 64 MiB and a timeout of 2 s.
    #[must_use]
    pub fn new(store: StoreUrl) -> Self {
        Self {
            store,
            cache: None,
            secret_file: None,
            token_file: None,
            admin: None,
            drivers: StoreDrivers::default(),
            memory: 64 << 20,
            timeout: Duration::from_secs(2),
            make: true,
            must_exist: false,
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
        self.remembered(ring.and_then(KeyRing::naming))?.read()
    }

    /// Returns whether the file of secrets states that records are named without a secret (`name none`).
    #[must_use]
    pub fn is_unnamed(&self) -> bool {
        matches!(self.ring(), Ok(Some(ring)) if ring.naming().is_none())
    }

    fn ring(&self) -> Result<Option<KeyRing>, StoreOpenError> {
        self.secret_file.as_deref().map(|path| self.read_ring(path)).transpose()
    }

    /// Reads secrets, and rejects those that do not suit the store or its cache.
    fn read_ring(&self, path: &Path) -> Result<KeyRing, StoreOpenError> {
        let wrong = |reason: String| StoreOpenError::Secret { path: path.into(), reason };
        let text = std::fs::read_to_string(path).map_err(|error| wrong(error.to_string()))?;
        let ring = KeyRing::parse(&text).map_err(|error| wrong(error.to_string()))?;
        if ring.naming().is_none() && matches!(self.store, StoreUrl::File(_)) {
            return Err(wrong(OpenError::Unnamed { path: path.into() }.to_string()));
        }
        if !ring.seals() && matches!(self.cache, Some(CacheUrl::Redis(_))) {
            return Err(wrong(UNSEALED_CACHE.to_owned()));
        }
        Ok(ring)
    }

    async fn open_store(&self) -> Result<OpenStore, StoreOpenError> {
        let ring = self.ring()?;
        let memory = self.memory_plan().store;
        match &self.store {
            StoreUrl::Memory => {
                let capacity = MemoryCapacity { bytes: memory, ..MemoryCapacity::default() };
                let secret = ring.as_ref().and_then(KeyRing::naming).cloned();
                let store = MemoryStore::new(Arc::new(SystemClock), capacity);
                let store = Arc::new(ring.into_iter().fold(store, MemoryStore::key_ring));
                self.tiered(OpenStore::new(store, secret), "")
            }
            StoreUrl::File(path) => {
                let store = self.file(path, memory).await?;
                let secret = store.secret().cloned();
                let known = self.remembered(secret.as_ref()).and_then(|line| line.read());
                if let Some(known) = known {
                    store.expect(&known);
                }
                let name = DrivenStore::cache_name(&*store);
                let file = Some(Arc::clone(&store));
                let opened = OpenStore { file, ..OpenStore::driven(store, secret) };
                self.tiered(opened, &name)
            }
            StoreUrl::Server(url) => {
                let identity = self.known(ring.as_ref());
                let options =
                    DriverOptions { identity, ..self.options(url, memory, ring.as_ref()) };
                let store = self.driver(url)?.open(options).await;
                let store = store.map_err(|error| match error.kind {
                    StoreDriverErrorKind::Missing => self.missing(),
                    _ => server(url, error),
                })?;
                let secret = store.capabilities().naming().cloned();
                let name = store.cache_name();
                self.tiered(OpenStore::driven(store, secret), &name)
            }
        }
    }

    /// Checks the secrets and the URLs without opening anything. It blocks while a file is read.
    ///
    /// # Errors
    /// [`StoreOpenError::Secret`] and [`StoreOpenError::Url`].
    pub fn check(&self) -> Result<(), StoreOpenError> {
        let ring = self.ring()?;
        match &self.store {
            StoreUrl::Memory | StoreUrl::File(_) => {}
            StoreUrl::Server(url) => {
                let options = self.options(url, self.memory, ring.as_ref());
                self.driver(url)?.check(&options).map_err(|error| server(url, error))?;
            }
        }
        if let Some(CacheUrl::Redis(url)) = &self.cache {
            let options = self.redis(url, self.memory);
            options.check().map_err(|error| server(url, error.into()))?;
        }
        Ok(())
    }

    fn memory_plan(&self) -> StoreMemoryPlan {
        let on_server = matches!(self.store, StoreUrl::Server(_));
        StoreMemoryPlan::split(self.memory, on_server, self.cache.is_some())
    }

    fn driver(&self, url: &ServerUrl) -> Result<&dyn StoreDriver, StoreOpenError> {
        let driver = self.drivers.of(url.scheme()).map(|driver| &**driver);
        driver.ok_or_else(|| {
            server(url, StoreDriverError::new(StoreDriverErrorKind::Options, StoreUrlError::Store))
        })
    }

    /// Returns the options of a store on a server; `memory` is for its queue.
    fn options(&self, url: &ServerUrl, memory: usize, ring: Option<&KeyRing>) -> DriverOptions {
        DriverOptions {
            url: url.as_str().to_owned(),
            secrets: ring.cloned(),
            identity: None,
            queue_bytes: memory,
            timeout: self.timeout,
            make: self.make,
            must_exist: self.must_exist,
        }
    }

    /// Returns the options of a cache on Redis; `memory` is for its queue.
    fn redis(&self, url: &ServerUrl, memory: usize) -> RedisOptions {
        self.options(url, memory, None).into()
    }

    async fn file(&self, path: &Path, memory: usize) -> Result<Arc<FileStore>, StoreOpenError> {
        let third = memory / 3;
        let mut options = FileOptions::new(path)
            .must_exist(self.must_exist || !self.make)
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
        let store =
            opened.map_err(|_| StoreOpenError::Shutdown)?.map_err(|source| match source {
                OpenError::Missing { .. } => self.missing(),
                source => secret_or_file(path, source),
            })?;
        Ok(Arc::new(store))
    }

    fn missing(&self) -> StoreOpenError {
        StoreOpenError::Missing { place: self.store.absolute(), by_setting: self.must_exist }
    }

    /// Returns the store with its cache in front, if one is configured. `name` distinguishes it from
    /// others at the same URL.
    fn tiered(&self, opened: OpenStore, name: &str) -> Result<OpenStore, StoreOpenError> {
        let shares = self.memory_plan();
        let replies = (shares.replies > 0).then_some(shares.replies);
        let cache: Arc<dyn Cache> = match &self.cache {
            None => {
                return Ok(OpenStore { replies, ..opened });
            }
            Some(CacheUrl::Memory) => Arc::new(MemoryCache::new(shares.cache)),
            Some(CacheUrl::Redis(url)) => {
                let options = self.redis(url, shares.cache);
                // Invalid options will not become valid later.
                options.check().map_err(|error| server(url, error.into()))?;
                Arc::new(BackgroundCache::new(url, options))
            }
        };
        // Other gateways may have their cache on the same server, and a store at the same URL or a
        // similar one: as seen from another machine, by another user, in another schema. They must
        // not find the entries of this one, so the complete URL and the store's identity are part
        // of the name.
        let name = format!("{name} {}", self.store.whole());
        let mut options = hapax_tiered::TieredOptions::default().authority(&name);
        // Also those of a file that created its own secret. If they seal nothing, the cache is in memory.
        if let Some(ring) = opened.store.capabilities().secrets.filter(|ring| ring.seals()) {
            options = options.key_ring(ring);
        }
        let tiered = Arc::new(Tiered::with(Arc::new(Arc::clone(&opened.store)), cache, options));
        let counts = Arc::clone(&tiered);
        let cache = Some(CacheStats(Arc::new(move || counts.stats())));
        Ok(OpenStore { store: tiered, cache, replies, ..opened })
    }
}

impl OpenStore {
    /// Creates an open store from any store, such as one of a test.
    #[must_use]
    pub fn new(store: Arc<dyn Inspect>, secret: Option<Secret>) -> Self {
        Self {
            store,
            secret,
            driven: None,
            file: None,
            cache: None,
            replies: None,
            remembered: None,
        }
    }

    fn driven(store: Arc<dyn DrivenStore>, secret: Option<Secret>) -> Self {
        Self { driven: Some(Arc::clone(&store)), ..Self::new(store, secret) }
    }

    /// Returns whether the store was emptied or replaced since it was last used, and no operator
    /// has confirmed it. Then new keys are rejected under `block` and `reconcile`.
    #[must_use]
    pub fn is_replaced(&self) -> bool {
        self.driven.as_ref().is_some_and(|store| store.is_replaced())
    }

    /// Accepts the store as it is: operations of the previous store may execute again. On a server,
    /// all gateways accept it.
    ///
    /// # Errors
    /// The store's error; the confirmation may have succeeded nevertheless.
    pub async fn confirm(&self) -> Result<(), Box<dyn Error + Send + Sync>> {
        if let Some(store) = &self.driven {
            store.confirm().await?;
        }
        tracing::warn!(
            "an operator confirmed the store: operations of the previous one may execute again"
        );
        self.remember();
        Ok(())
    }

    /// Stores the current identity of the store.
    fn remember(&self) {
        let identity = self.driven.as_ref().and_then(|store| store.identity());
        if let (Some(remembered), Some(identity)) = (&self.remembered, identity) {
            remembered.write(&identity);
        }
    }

    /// Returns the time at which the store was created, by its own clock; `None` in memory, and if it is
    /// not known, as for a store of an earlier release.
    #[must_use]
    pub fn created(&self) -> Option<Timestamp> {
        self.driven.as_ref()?.created()
    }

    /// Returns the bytes for outcomes that claims read at once; `None` if the store bounds them.
    pub(crate) const fn replies(&self) -> Option<usize> {
        self.replies
    }

    /// Returns the store if it is a file.
    pub(crate) fn file(&self) -> Option<Arc<FileStore>> {
        self.file.clone()
    }

    /// Returns the counters of the store and of its cache.
    pub(crate) fn counts(&self) -> Vec<StoreCount> {
        let mut counts = self.driven.as_ref().map(|store| store.counts()).unwrap_or_default();
        let created = self.created().map(|created| created.as_micros() / 1_000_000);
        counts.extend(created.map(|value| StoreCount {
            name: "created_seconds",
            help: "The time at which the store was created, in seconds since 1970.",
            value,
        }));
        if let Some(CacheStats(stats)) = &self.cache {
            let stats = stats();
            let cached = [
                ("cache_hits_total", "Replays answered by the cache.", stats.hits),
                ("cache_misses_total", "Lookups in the cache without a result.", stats.misses),
                ("cache_failures_total", "Times that the cache did not answer.", stats.failures),
            ];
            counts.extend(cached.map(StoreCount::from));
        }
        counts
    }

    /// Closes the store, so that another process can open it at once, and writes its queue.
    pub async fn close(&self) {
        if let Some(store) = &self.driven {
            store.close().await;
        }
    }
}

fn server(url: &ServerUrl, source: StoreDriverError) -> StoreOpenError {
    let url = url.to_string();
    match source.kind {
        StoreDriverErrorKind::Options => StoreOpenError::Url { url, source },
        StoreDriverErrorKind::OtherSecret => {
            StoreOpenError::Secret { path: url.into(), reason: source.to_string() }
        }
        _ => StoreOpenError::Server { url, source },
    }
}

fn seconds(time: Duration) -> String {
    format!("{:.0} s", time.as_secs_f64())
}

fn missing(place: &str, by_setting: bool) -> String {
    let (because, then) = if by_setting {
        (
            ", because of --store-must-exist",
            "restore it, mount its disk, or correct --store; leave --store-must-exist out only for the \
             first start, because a new store has no records and retries of earlier requests execute \
             again",
        )
    } else {
        ("", "correct the path or URL in --store")
    };
    format!("expected a store that was used before at {place}{because}, found none: {then}")
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
        OpenError::SecretMissing { path }
        | OpenError::SecretUnreadable { path, .. }
        | OpenError::Unnamed { path } => path.clone(),
        OpenError::OtherSecret => file.into(),
        _ => return StoreOpenError::File { path: file.into(), source },
    };
    StoreOpenError::Secret { path, reason: source.to_string() }
}
