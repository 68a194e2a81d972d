//! How to connect.

use std::str::FromStr;
use std::sync::Arc;
use std::time::Duration;

use hapax_core::{Entropy, KeyRing, Sealer, Secret, SystemEntropy};
use tokio_postgres::Config;

use crate::error::PostgresConnectError;
use crate::tls::{Connector, Plain};

/// How to connect a [`PostgresStore`](crate::PostgresStore). Each method returns it changed.
///
/// ```
/// use hapax_postgres::PostgresOptions;
/// let options: PostgresOptions = "postgres://app@db.example/orders".parse()?;
/// let options = options.schema("hapax").lanes(2);
/// # Ok::<(), hapax_postgres::PostgresConnectError>(())
/// ```
#[derive(Clone, Debug)]
pub struct PostgresOptions {
    pub(crate) config: Config,
    pub(crate) connector: Arc<dyn Connector>,
    pub(crate) ring: Option<KeyRing>,
    pub(crate) entropy: Arc<dyn Entropy>,
    pub(crate) schema: Option<String>,
    pub(crate) timeout: Duration,
    pub(crate) lanes: usize,
    pub(crate) batch: usize,
    pub(crate) queue_items: usize,
    pub(crate) queue_bytes: usize,
    pub(crate) prepare: bool,
    pub(crate) migrate: bool,
    pub(crate) allow_forgetting: bool,
    pub(crate) listen: bool,
    pub(crate) identity: Option<String>,
}

impl PostgresOptions {
    /// A server by its configuration. Time-outs and keep-alives of connections are set by
    /// [`timeout`](Self::timeout).
    #[must_use]
    pub fn new(config: Config) -> Self {
        Self {
            config,
            connector: Arc::new(Plain),
            ring: None,
            entropy: Arc::new(SystemEntropy),
            schema: None,
            timeout: Duration::from_secs(2),
            lanes: 1,
            batch: 128,
            queue_items: 4096,
            queue_bytes: 64 << 20,
            prepare: false,
            migrate: true,
            allow_forgetting: false,
            listen: false,
            identity: None,
        }
    }

    /// Names keys and seals records by `secret`. By default there is none. The engine is given
    /// [`PostgresStore::secret`](crate::PostgresStore::secret).
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

    /// Makes connections by TLS as `connector` has it; whether the server may decline is up to the
    /// URL's `sslmode`. Without one, connections are in the clear, but those of a URL with
    /// `sslmode=require`: with the feature `tls` they are encrypted, else they fail.
    #[must_use]
    pub fn tls(mut self, connector: Arc<dyn Connector>) -> Self {
        self.connector = connector;
        self
    }

    /// The schema of the tables; by default the first of the role's `search_path`.
    #[must_use]
    pub fn schema(mut self, schema: impl Into<String>) -> Self {
        self.schema = Some(schema.into());
        self
    }

    /// After which an answer is given in any case, that there is none; by default 2 s. The server
    /// is told to give up on a statement after three quarters of it, on a lock after a quarter, or
    /// half for a swap that goes alone, and on us, within a transaction, after all of it.
    #[must_use]
    pub fn timeout(mut self, timeout: Duration) -> Self {
        self.timeout = timeout.max(Duration::from_millis(20));
        self
    }

    /// Connections that write batches; by default 1, at least 1. Each key has its lane. The crate's
    /// `MEASURED.md` has what more of them bring.
    #[must_use]
    pub fn lanes(mut self, lanes: usize) -> Self {
        self.lanes = lanes.clamp(1, 64);
        self
    }

    /// Swaps in a batch at most; by default 128, at least 1.
    #[must_use]
    pub fn batch(mut self, swaps: usize) -> Self {
        self.batch = swaps.clamp(1, 4096);
        self
    }

    /// What may wait in each lane: swaps, and bytes of records in them. By default 4,096 and
    /// 64 MiB; claims are refused at seven eighths of either. At least 8 swaps.
    #[must_use]
    pub fn queue(mut self, swaps: usize, bytes: usize) -> Self {
        self.queue_items = swaps.max(8);
        self.queue_bytes = bytes;
        self
    }

    /// Whether statements are prepared by name, once for each connection; by default not, because
    /// a pooler that hands out connections by transaction may not know the names. It saves the
    /// server from planning each statement anew.
    #[must_use]
    pub fn prepare(mut self, prepare: bool) -> Self {
        self.prepare = prepare;
        self
    }

    /// Whether missing tables are made, and old ones migrated; by default yes. Where not, run
    /// [`migrations`](crate::migrations) first; connecting then writes nothing, and where nobody
    /// has written yet, the first swap settles which secret is in use.
    #[must_use]
    pub fn migrate(mut self, migrate: bool) -> Self {
        self.migrate = migrate;
        self
    }

    /// Accepts a server that forgets what it acknowledged when it crashes
    /// ([`Forgetful`](crate::UnsafeSetting)): for tests, and where a duplicate after a crash is
    /// acceptable. By default such a server is refused, and the store's transactions set
    /// `synchronous_commit` to `on`.
    #[must_use]
    pub fn allow_forgetting(mut self, allow: bool) -> Self {
        self.allow_forgetting = allow;
        self
    }

    /// Whether to keep a connection on which processes tell each other (LISTEN, NOTIFY) of cells
    /// for which somebody waits; by default not. It needs a session of its own. Behind a pooler,
    /// which is recognised by what it does to the parameter `options` of the connection, nothing is
    /// listened to, whatever this says: copies then look from time to time.
    #[must_use]
    pub fn listen(mut self, listen: bool) -> Self {
        self.listen = listen;
        self
    }

    /// The identity that the tables are known to have: [`PostgresStore::known_identity`] of an earlier
    /// process. With it, tables that were emptied while no process had them open are noticed.
    ///
    /// [`PostgresStore::known_identity`]: crate::PostgresStore::known_identity
    #[must_use]
    pub fn identity(mut self, known: impl Into<String>) -> Self {
        self.identity = Some(known.into());
        self
    }

    pub(crate) fn sealer(&self) -> Sealer {
        self.ring.as_ref().map_or_else(Sealer::checksum, KeyRing::sealer)
    }

    pub(crate) fn naming_secret(&self) -> Option<&Secret> {
        self.ring.as_ref().map(KeyRing::naming)
    }
}

impl FromStr for PostgresOptions {
    type Err = PostgresConnectError;

    /// Reads `postgres://USER:PASSWORD@HOST:PORT/DATABASE?PARAMETER=VALUE`, or libpq's
    /// `name=value` form. `sslmode=verify-full` and `verify-ca` mean `require`, which believes in
    /// certificates only.
    fn from_str(url: &str) -> Result<Self, PostgresConnectError> {
        // The client knows no more than `require`, and does less by it than our TLS, which always
        // believes in certificates only.
        let strict = ["sslmode=verify-full", "sslmode=verify-ca"];
        let url =
            strict.iter().fold(url.to_owned(), |url, mode| url.replace(mode, "sslmode=require"));
        let options = url.parse().map(Self::new).map_err(PostgresConnectError::Url)?;
        #[cfg(feature = "tls")]
        if options.config.get_ssl_mode() == tokio_postgres::config::SslMode::Require {
            let tls = crate::tls::rustls::Rustls::new(&Default::default())?;
            return Ok(options.tls(Arc::new(tls)));
        }
        Ok(options)
    }
}
