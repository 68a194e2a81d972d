//! Options of a store.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use hapax_core::store::parts::QueueLimits;
use hapax_core::{BufferedEntropy, Entropy, KeyRing, Sealer, Secret};

use crate::error::RedisConnectError;
use crate::url::RedisUrl;

/// Options of a [`RedisStore`](crate::RedisStore). Each method returns the changed options.
///
/// | URL | connects to |
/// | --- | --- |
/// | `redis://[USER:PASSWORD@]HOST[:PORT][/DB]` | a server; or a node of a cluster, through which the other nodes are found (feature `cluster`) |
/// | `redis://HOST:PORT,HOST:PORT,…` | nodes of a cluster, of which one must answer |
/// | `redis+sentinel://[USER:PASSWORD@]HOST[:PORT],…/MASTER[/DB]` | the master that these sentinels know by that name (feature `sentinel`) |
/// | `rediss://…`, `rediss+sentinel://…` | the same, with TLS (feature `tls`). The parameters `sslrootcert`, `sslcert` and `sslkey` name files in PEM: the roots to trust instead of the system's, and certificate and key of the client. They also hold for sentinels. They are read at each connection; for a cluster only when the store connects, and its later connections to nodes have the same ones |
/// | `redis+unix:///PATH` | a server's socket |
///
/// ```
/// use std::time::Duration;
/// use hapax_redis::RedisOptions;
///
/// let options = RedisOptions::new("redis://hapax:word@127.0.0.1:6379/2")
///     .prefix("orders:")
///     .timeout(Duration::from_secs(1));
/// // The debug output contains no password.
/// assert!(!format!("{options:?}").contains("word"));
/// ```
#[derive(Clone)]
pub struct RedisOptions {
    pub(crate) url: String,
    pub(crate) prefix: String,
    pub(crate) ring: Option<KeyRing>,
    pub(crate) entropy: Arc<dyn Entropy>,
    pub(crate) timeout: Duration,
    pub(crate) allow_eviction: bool,
    pub(crate) make: bool,
    pub(crate) must_exist: bool,
    pub(crate) identity: Option<String>,
    pub(crate) queue: QueueLimits,
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

    /// Sets the expected identity of the store: [`RedisStore::known_identity`] of an earlier
    /// process. With it, a store that was emptied while no process used it is detected.
    ///
    /// [`RedisStore::known_identity`]: crate::RedisStore::known_identity
    #[must_use]
    pub fn identity(mut self, known: impl Into<String>) -> Self {
        self.identity = Some(known.into());
        self
    }

    /// Creates options for the store at `url`.
    #[must_use]
    pub fn new(url: impl Into<String>) -> Self {
        Self {
            url: url.into(),
            prefix: "hapax:".into(),
            ring: None,
            entropy: Arc::new(BufferedEntropy::default()),
            timeout: Duration::from_secs(2),
            allow_eviction: false,
            make: true,
            must_exist: false,
            identity: None,
            queue: QueueLimits::default(),
            #[cfg(feature = "tls")]
            tls: TlsFiles::default(),
        }
    }

    /// Sets the prefix of the names of keys and channels; by default `hapax:`. At most
    /// [`RedisOptions::MAX_PREFIX`] bytes of letters, digits and `:` `.` `_` `-` `/`, so that the
    /// prefix has no meaning in patterns and does not force keys into one slot of a cluster.
    #[must_use]
    pub fn prefix(mut self, prefix: impl Into<String>) -> Self {
        self.prefix = prefix.into();
        self
    }

    /// Names keys and seals records with this secret. By default there is none, and outcomes are
    /// readable on the server. Pass [`RedisStore::secret`](crate::RedisStore::secret) to the
    /// engine.
    #[must_use]
    pub fn secret(self, secret: Secret) -> Self {
        self.key_ring(KeyRing::new(secret))
    }

    /// Names keys and seals records with these secrets. The one that seals can be replaced, and added to a
    /// store that began without: [`KeyRing::unnamed`].
    #[must_use]
    pub fn key_ring(mut self, ring: KeyRing) -> Self {
        self.ring = Some(ring);
        self
    }

    /// Sets the source of nonces. By default the operating system.
    #[must_use]
    pub fn entropy(mut self, entropy: Arc<dyn Entropy>) -> Self {
        self.entropy = entropy;
        self
    }

    /// Sets the timeout of an answer, and of a connection attempt; by default 2 s. It should not
    /// exceed the engine's own timeout. In a cluster each node has half of it for an answer and a
    /// quarter for a connection, and checking all nodes takes at most the same time again.
    #[must_use]
    pub const fn timeout(mut self, timeout: Duration) -> Self {
        self.timeout = timeout;
        self
    }

    /// Accepts servers that evict, or do not report whether they do. The operation of an evicted
    /// record executes again on a retry, unnoticed: for tests, and for operations that may execute
    /// twice.
    #[must_use]
    pub const fn allow_eviction(mut self) -> Self {
        self.allow_eviction = true;
        self
    }

    /// Sets whether to write the secret's mark and the identity to a server that has none; by
    /// default true. With `false` the store writes neither and cannot claim new keys; it is still
    /// rejected where another secret is in use.
    #[must_use]
    pub const fn make(mut self, make: bool) -> Self {
        self.make = make;
        self
    }

    /// Sets whether a server without the secret's mark or the identity, which no process has used, is an
    /// error when the store is opened: [`RedisConnectError::Missing`](crate::RedisConnectError::Missing).
    /// By default false: both are written, with a warning in the log.
    #[must_use]
    pub const fn must_exist(mut self, must_exist: bool) -> Self {
        self.must_exist = must_exist;
        self
    }

    /// Limits what may wait for the server: requests, and bytes of records in them. By default
    /// 4,096 and 64 MiB; new keys are rejected at seven eighths of either. At least 8 requests.
    #[must_use]
    pub fn queue(mut self, requests: usize, bytes: usize) -> Self {
        self.queue = QueueLimits { items: requests.max(QueueLimits::MIN_ITEMS), bytes };
        self
    }

    /// Trusts these certificates (PEM) instead of the system's.
    #[cfg(feature = "tls")]
    #[must_use]
    pub fn tls_roots(mut self, pem: impl Into<Vec<u8>>) -> Self {
        self.tls.roots = Some(pem.into());
        self
    }

    /// Authenticates with this certificate to servers that request one: chain and key, in PEM.
    #[cfg(feature = "tls")]
    #[must_use]
    pub fn tls_client(mut self, chain: impl Into<Vec<u8>>, key: impl Into<Vec<u8>>) -> Self {
        self.tls.client = Some((chain.into(), key.into()));
        self
    }

    /// Checks the options, where that is possible without a server. It blocks while a file is read.
    ///
    /// # Errors
    /// [`RedisConnectError::Url`], [`RedisConnectError::Option`] and [`RedisConnectError::CertificateFile`].
    pub fn check(&self) -> Result<(), RedisConnectError> {
        let checked = self.target();
        #[cfg(feature = "tls")]
        let checked = checked.and_then(|url| url.certificates.read(&self.tls));
        checked.map(drop)
    }

    pub(crate) fn sealer(&self) -> Sealer {
        self.ring.as_ref().map_or_else(Sealer::checksum, KeyRing::sealer)
    }

    pub(crate) fn naming_secret(&self) -> Option<&Secret> {
        self.ring.as_ref().and_then(KeyRing::naming)
    }

    /// Parses the URL, and checks the other options.
    pub(crate) fn target(&self) -> Result<RedisUrl, RedisConnectError> {
        let fits = |byte: u8| byte.is_ascii_alphanumeric() || b":._-/".contains(&byte);
        if self.prefix.len() > Self::MAX_PREFIX || !self.prefix.bytes().all(fits) {
            return Err(RedisConnectError::Option(
                "the prefix must be at most 64 letters, digits and : . _ - /",
            ));
        }
        if self.timeout.is_zero() {
            return Err(RedisConnectError::Option("the timeout must be longer than zero"));
        }
        RedisUrl::parse(self)
    }
}

impl fmt::Debug for RedisOptions {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // The URL may contain a password.
        f.debug_struct("Options")
            .field("target", &self.target().ok())
            .field("prefix", &self.prefix)
            .field("timeout", &self.timeout)
            .field("allow_eviction", &self.allow_eviction)
            .finish_non_exhaustive()
    }
}
