//! How a database is opened.

use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use hapax_core::{Clock, Entropy, KeyRing, Secret, SystemClock, SystemEntropy};

/// Where the secret of a database comes from.
#[derive(Clone, Debug)]
pub enum SecretSource {
    /// A file, as [`KeyRing`] has it: read if it exists, made (mode 0600, one secret) if neither it
    /// nor the database does.
    File(PathBuf),
    /// This one.
    Secret(Secret),
    /// These, of which the one that seals can be replaced.
    Ring(KeyRing),
    /// There is none: names can be guessed, and records read, by whoever reads the file.
    None,
}

impl SecretSource {
    /// The secrets, where they are not in a file.
    pub(crate) fn ring(&self) -> Option<KeyRing> {
        match self {
            Self::Secret(secret) => Some(KeyRing::new(secret.clone())),
            Self::Ring(ring) => Some(ring.clone()),
            Self::File(_) | Self::None => None,
        }
    }
}

/// How to open an [`FileStore`](crate::FileStore). Each method returns it changed.
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
    pub(crate) cache_bytes: usize,
    pub(crate) queue_items: usize,
    pub(crate) queue_bytes: usize,
    pub(crate) reading_bytes: usize,
    pub(crate) min_free_bytes: u64,
    pub(crate) quick_recovery_above: u64,
    pub(crate) verify: bool,
    pub(crate) check_for: Duration,
}

impl FileOptions {
    /// The database at `path`, made if it does not exist, with its secret in `PATH.secret`.
    #[must_use]
    pub fn new(path: impl Into<PathBuf>) -> Self {
        let path = path.into();
        let secret = SecretSource::File(crate::files::with_suffix(&path, ".secret"));
        Self {
            path,
            secret,
            clock: Arc::new(SystemClock),
            entropy: Arc::new(SystemEntropy),
            admin: None,
            cache_bytes: 64 << 20,
            queue_items: 4096,
            queue_bytes: 64 << 20,
            reading_bytes: 64 << 20,
            min_free_bytes: 64 << 20,
            quick_recovery_above: QUICK_RECOVERY_ABOVE,
            verify: false,
            check_for: Duration::from_secs(5),
        }
    }

    /// Where the database is.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Where the secret comes from; by default `PATH.secret`.
    #[must_use]
    pub fn secret(mut self, secret: SecretSource) -> Self {
        self.secret = secret;
        self
    }

    /// The clock of leases, retention and fences; by default the operating system's.
    #[must_use]
    pub fn clock(mut self, clock: Arc<dyn Clock>) -> Self {
        self.clock = clock;
        self
    }

    /// Where nonces come from; by default the operating system.
    #[must_use]
    pub fn entropy(mut self, entropy: Arc<dyn Entropy>) -> Self {
        self.entropy = entropy;
        self
    }

    /// What the lock file says about where this process can be asked; by default nothing.
    #[must_use]
    pub fn admin(mut self, admin: SocketAddr) -> Self {
        self.admin = Some(admin);
        self
    }

    /// Memory for pages of the database; by default 64 MiB.
    #[must_use]
    pub const fn cache_bytes(mut self, bytes: usize) -> Self {
        self.cache_bytes = bytes;
        self
    }

    /// What may wait for the disk: requests, and bytes of records in them. By default 4,096 and
    /// 64 MiB; claims are refused at seven eighths of either. At least 8 requests.
    #[must_use]
    pub fn queue(mut self, requests: usize, bytes: usize) -> Self {
        self.queue_items = requests.max(8);
        self.queue_bytes = bytes;
        self
    }

    /// Memory for records of more than 16 KiB on their way to those who asked, in bytes, each of which
    /// is there sealed and opened; by default 64 MiB. Who asks for more than there is room for waits
    /// for its turn; one that is larger than all of it is alone.
    #[must_use]
    pub const fn reading_bytes(mut self, bytes: usize) -> Self {
        self.reading_bytes = bytes;
        self
    }

    /// Below how many free bytes new keys are refused; by default 64 MiB.
    #[must_use]
    pub const fn min_free_bytes(mut self, bytes: u64) -> Self {
        self.min_free_bytes = bytes;
        self
    }

    /// From which size of the file on every commit also saves the map of its pages, so that
    /// opening after a crash need not walk them: 0 for always, `u64::MAX` for never; by default
    /// 2 GiB. The crate's `ENGINE.md` has what either costs.
    #[must_use]
    pub const fn quick_recovery_above(mut self, bytes: u64) -> Self {
        self.quick_recovery_above = bytes;
        self
    }

    /// The time for which opening reads records, to find damage before it serves; by default 5
    /// seconds. The rest is read in the background. Keys whose records are damaged are rejected, all
    /// others are served.
    #[must_use]
    pub const fn check_for(mut self, bound: Duration) -> Self {
        self.check_for = bound;
        self
    }

    /// Whether opening reads all records, and fails where one of them is damaged; about a second for
    /// each GiB; by default not. Damage is found in any case whenever it is met, and by the check
    /// in the background.
    #[must_use]
    pub const fn verify(mut self, verify: bool) -> Self {
        self.verify = verify;
        self
    }
}

/// The engine doubles its file, so a shorter one holds at most 1 GiB: walked in two seconds.
const QUICK_RECOVERY_ABOVE: u64 = 2 << 30;
