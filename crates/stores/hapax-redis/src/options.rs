//! How a store is opened.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use hapax_core::{Entropy, KeyRing, Sealer, Secret, SystemEntropy};

use crate::error::RedisConnectError;
use crate::url::RedisUrl;

/// How to open a [`RedisStore`](crate::RedisStore). Each method returns it changed.
///
/// | URL | where |
/// | --- | --- |
/// | `redis://[USER:PASSWORD@]HOST[:PORT][/DB]` | a server; or a node of a cluster, whose other nodes are then found (feature `cluster`) |
/// | `redis://HOST:PORT,HOST:PORT,…` | nodes of a cluster, of which one must answer |
/// | `redis+sentinel://[USER:PASSWORD@]HOST[:PORT],…/MASTER[/DB]` | the master that these sentinels know by that name (feature `sentinel`) |
/// | `rediss://…`, `rediss+sentinel://…` | the same, by TLS (feature `tls`) |
/// | `redis+unix:///PATH` | a server's socket |
///
/// ```
/// use std::time::Duration;
/// use hapax_redis::RedisOptions;
///
/// let options = RedisOptions::new("redis://hapax:word@127.0.0.1:6379/2")
///     .prefix("orders:")
///     .timeout(Duration::from_secs(1));
/// // What is shown tells no password.
/// assert!(!format!("{options:?}").contains("word"));
/// ```
#[derive(Clone)]
pub struct RedisOptions {
    pub(crate) url: String,
    pub(crate) prefix: String,
    ring: Option<KeyRing>,
    pub(crate) entropy: Arc<dyn Entropy>,
    pub(crate) timeout: Duration,
    pub(crate) allow_eviction: bool,
    pub(crate) make: bool,
    pub(crate) identity: Option<String>,
    pub(crate) queue_items: usize,
    pub(crate) queue_bytes: usize,
    #[cfg(feature = "tls")]
    pub(crate) tls: TlsFiles,
}

/// Certificates, in PEM.
#[cfg(feature = "tls")]
#[derive(Clone, Default)]
pub(crate) struct TlsFiles {
    pub(crate) roots: Option<Vec<u8>>,
    pub(crate) client: Option<(Vec<u8>, Vec<u8>)>,
}

impl RedisOptions {
    /// The longest prefix, in bytes.
    pub const MAX_PREFIX: usize = 64;

    /// The identity that the store is known to have: [`RedisStore::known_identity`] of an earlier
    /// process. With it, a store that was emptied while no process used it is noticed.
    ///
    /// [`RedisStore::known_identity`]: crate::RedisStore::known_identity
    #[must_use]
    pub fn identity(mut self, known: impl Into<String>) -> Self {
        self.identity = Some(known.into());
        self
    }

    /// The store at `url`.
    #[must_use]
    pub fn new(url: impl Into<String>) -> Self {
        Self {
            url: url.into(),
            prefix: "hapax:".into(),
            ring: None,
            entropy: Arc::new(SystemEntropy),
            timeout: Duration::from_secs(2),
            allow_eviction: false,
            make: true,
            identity: None,
            queue_items: 4096,
            queue_bytes: 64 << 20,
            #[cfg(feature = "tls")]
            tls: TlsFiles::default(),
        }
    }

    /// What the names of keys and channels begin with; by default `hapax:`. At most
    /// [`RedisOptions::MAX_PREFIX`] bytes, letters, digits and `:` `.` `_` `-` `/`: so it has no meaning
    /// in patterns and puts no two keys into one slot of a cluster on purpose.
    #[must_use]
    pub fn prefix(mut self, prefix: impl Into<String>) -> Self {
        self.prefix = prefix.into();
        self
    }

    /// Names keys and seals records by this secret. By default there is none: whoever reads the
    /// server then reads outcomes. The engine is given
    /// [`RedisStore::secret`](crate::RedisStore::secret).
    #[must_use]
    pub fn secret(self, secret: Secret) -> Self {
        self.key_ring(KeyRing::new(secret))
    }

    /// Names keys and seals records by these secrets, of which the one that seals can be replaced.
    #[must_use]
    pub fn key_ring(mut self, ring: KeyRing) -> Self {
        self.ring = Some(ring);
        self
    }

    /// Where nonces come from; by default the operating system.
    #[must_use]
    pub fn entropy(mut self, entropy: Arc<dyn Entropy>) -> Self {
        self.entropy = entropy;
        self
    }

    /// How long an answer may take, and a connection; by default 2 s. Should not be longer than
    /// the engine's, which gives up by itself. Of a cluster, each node has half of it for an answer
    /// and a quarter for a connection, and looking at all of them takes as long again at most.
    #[must_use]
    pub const fn timeout(mut self, timeout: Duration) -> Self {
        self.timeout = timeout;
        self
    }

    /// Accepts servers that evict, or do not say whether they do. What they remove is forgotten,
    /// and a retry of its operation runs again, silently: for tests and for what may run twice.
    #[must_use]
    pub const fn allow_eviction(mut self) -> Self {
        self.allow_eviction = true;
        self
    }

    /// Whether to leave the secret's mark on a server that has none; by default so. Whoever only
    /// looks leaves nothing, is refused where there is another's all the same, and cannot claim
    /// new keys.
    #[must_use]
    pub const fn make(mut self, make: bool) -> Self {
        self.make = make;
        self
    }

    /// What may wait for the server: requests, and bytes of records in them. By default 4,096 and
    /// 64 MiB; new keys are refused at seven eighths of either. At least 8 requests.
    #[must_use]
    pub fn queue(mut self, requests: usize, bytes: usize) -> Self {
        self.queue_items = requests.max(8);
        self.queue_bytes = bytes;
        self
    }

    /// Trusts these certificates (PEM) instead of the system's.
    #[cfg(feature = "tls")]
    #[must_use]
    pub fn tls_roots(mut self, pem: impl Into<Vec<u8>>) -> Self {
        self.tls.roots = Some(pem.into());
        self
    }

    /// Shows this certificate to servers that ask for one: chain and key, in PEM.
    #[cfg(feature = "tls")]
    #[must_use]
    pub fn tls_client(mut self, chain: impl Into<Vec<u8>>, key: impl Into<Vec<u8>>) -> Self {
        self.tls.client = Some((chain.into(), key.into()));
        self
    }

    /// Whether a store could be opened so, as far as that can be told without a server.
    ///
    /// # Errors
    /// [`RedisConnectError::Url`] and [`RedisConnectError::Option`].
    pub fn check(&self) -> Result<(), RedisConnectError> {
        self.target().map(drop)
    }

    pub(crate) fn sealer(&self) -> Sealer {
        self.ring.as_ref().map_or_else(Sealer::checksum, KeyRing::sealer)
    }

    pub(crate) fn naming_secret(&self) -> Option<&Secret> {
        self.ring.as_ref().map(KeyRing::naming)
    }

    /// What the URL says, and whether the rest goes with it.
    pub(crate) fn target(&self) -> Result<RedisUrl, RedisConnectError> {
        let fits = |byte: u8| byte.is_ascii_alphanumeric() || b":._-/".contains(&byte);
        if self.prefix.len() > Self::MAX_PREFIX || !self.prefix.bytes().all(fits) {
            return Err(RedisConnectError::Option(
                "the prefix may hold 64 letters, digits and : . _ - / at most",
            ));
        }
        if self.timeout.is_zero() {
            return Err(RedisConnectError::Option("a time-out of zero answers nothing"));
        }
        RedisUrl::parse(self)
    }
}

impl fmt::Debug for RedisOptions {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // The URL may hold a password.
        f.debug_struct("Options")
            .field("target", &self.target().ok())
            .field("prefix", &self.prefix)
            .field("timeout", &self.timeout)
            .field("allow_eviction", &self.allow_eviction)
            .finish_non_exhaustive()
    }
}
