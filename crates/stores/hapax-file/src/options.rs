//! Options of a database.

use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use hapax_core::store::parts::QueueLimits;
use hapax_core::{BufferedEntropy, Clock, Entropy, KeyRing, Secret, SystemClock};

/// Sources of a database's secret.
#[derive(Clone, Debug)]
pub enum SecretSource {
    /// A file in the format of [`KeyRing`]: read if it exists, created (mode 0600, one secret) if
    /// neither it nor the database does. It names records, so `name none` is rejected.
    File(PathBuf),
    /// The given secret.
    Secret(Secret),
    /// The given secrets, of which the one that seals can be replaced, or added to a database that was created
    /// with [`None`](Self::None): [`KeyRing::unnamed`].
    Ring(KeyRing),
    /// No secret: anyone who can read the file can guess names and read records.
    None,
}

impl SecretSource {
    /// Returns the secrets, unless they are in a file.
    pub(crate) fn ring(&self) -> Option<KeyRing> {
        match self {
            Self::Secret(secret) => Some(KeyRing::new(secret.clone())),
            Self::Ring(ring) => Some(ring.clone()),
            Self::File(_) | Self::None => None,
        }
    }
}

/// Options of a [`FileStore`](crate::FileStore). Each method returns the changed options.
///
/// ```
/// use hapax_file::FileOptions;
/// let options = FileOptions::new("hapax.db").cache_bytes(256 << 20);
/// assert_eq!(options.path(), "hapax.db");
/// ```
#[derive(Clone, Debug)]
pub struct FileOptions {
    pub(crate) path: PathBuf,
    pub(crate) secret: SecretSource,
    pub(crate) clock: Arc<dyn Clock>,
    pub(crate) entropy: Arc<dyn Entropy>,
    pub(crate) admin: Option<SocketAddr>,
    pub(crate) must_exist: bool,
    pub(crate) cache_bytes: usize,
    pub(crate) queue: QueueLimits,
    pub(crate) reading_bytes: usize,
    pub(crate) min_free_bytes: u64,
    pub(crate) quick_recovery_above: u64,
    pub(crate) verify: bool,
    pub(crate) check_for: Duration,
}

impl FileOptions {
    /// Creates options for the database at `path`, which is created if it does not exist, with its
    /// secret in `PATH.secret`.
    #[must_use]
    pub fn new(path: impl Into<PathBuf>) -> Self {
        let path = path.into();
        let secret = SecretSource::File(crate::files::with_suffix(&path, ".secret"));
        Self {
            path,
            secret,
            clock: Arc::new(SystemClock),
            entropy: Arc::new(BufferedEntropy::default()),
            admin: None,
            must_exist: false,
            cache_bytes: 64 << 20,
            queue: QueueLimits::default(),
            reading_bytes: 64 << 20,
            min_free_bytes: 64 << 20,
            quick_recovery_above: QUICK_RECOVERY_ABOVE,
            verify: false,
            check_for: Duration::from_secs(3),
        }
    }

    /// Returns the path of the database.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Sets the source of the secret; by default `PATH.secret`.
    #[must_use]
    pub fn secret(mut self, secret: SecretSource) -> Self {
        self.secret = secret;
        self
    }

    /// Sets the clock of leases, retention and fences. By default the operating system's.
    #[must_use]
    pub fn clock(mut self, clock: Arc<dyn Clock>) -> Self {
        self.clock = clock;
        self
    }

    /// Sets the source of nonces. By default the operating system.
    #[must_use]
    pub fn entropy(mut self, entropy: Arc<dyn Entropy>) -> Self {
        self.entropy = entropy;
        self
    }

    /// Sets the operators' address of this process, for the lock file. By default there is none.
    #[must_use]
    pub fn admin(mut self, admin: SocketAddr) -> Self {
        self.admin = Some(admin);
        self
    }

    /// Sets whether a missing database is an error, [`OpenError::Missing`](crate::OpenError::Missing).
    /// By default false: a database is created, with a warning in the log.
    #[must_use]
    pub const fn must_exist(mut self, must_exist: bool) -> Self {
        self.must_exist = must_exist;
        self
    }

    /// Sets the memory for pages of the database. 64 MiB by default.
    #[must_use]
    pub const fn cache_bytes(mut self, bytes: usize) -> Self {
        self.cache_bytes = bytes;
        self
    }

    /// Limits what may wait for the disk: requests, and bytes of records in them. By default 4,096
    /// and 64 MiB; claims are rejected at seven eighths of either. At least 8 requests.
    #[must_use]
    pub fn queue(mut self, requests: usize, bytes: usize) -> Self {
        self.queue = QueueLimits { items: requests.max(QueueLimits::MIN_ITEMS), bytes };
        self
    }

    /// Sets the memory budget for reading records of more than 16 KiB, in bytes; by default 64 MiB.
    /// Each record is in memory twice, sealed and opened. A read beyond the budget waits; a record
    /// larger than the whole budget is read alone.
    #[must_use]
    pub const fn reading_bytes(mut self, bytes: usize) -> Self {
        self.reading_bytes = bytes;
        self
    }

    /// Sets the number of free bytes below which new keys are rejected. 64 MiB by default.
    #[must_use]
    pub const fn min_free_bytes(mut self, bytes: u64) -> Self {
        self.min_free_bytes = bytes;
        self
    }

    /// Sets the size of the file from which on every commit also saves the map of its pages, so
    /// that opening after a crash need not walk them: 0 for always, `u64::MAX` for never; by
    /// default 2 GiB. The crate's `ENGINE.md` has the cost of either.
    #[must_use]
    pub const fn quick_recovery_above(mut self, bytes: u64) -> Self {
        self.quick_recovery_above = bytes;
        self
    }

    /// Sets for how long opening reads records, to find damage before the store serves; by default
    /// 3 seconds. The rest is read in the background. Keys whose records are damaged are rejected,
    /// all others are served.
    #[must_use]
    pub const fn check_for(mut self, bound: Duration) -> Self {
        self.check_for = bound;
        self
    }

    /// Sets whether opening reads all records, and fails if one of them is damaged; about a second
    /// per GiB. By default false. In any case damage is found by reads, and by the check in the
    /// background.
    #[must_use]
    pub const fn verify(mut self, verify: bool) -> Self {
        self.verify = verify;
        self
    }
}

/// The engine doubles its file, so a shorter one has at most 1 GiB: walked in two seconds.
const QUICK_RECOVERY_ABOVE: u64 = 2 << 30;
