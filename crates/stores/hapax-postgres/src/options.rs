//! Options of a store.

use std::str::FromStr;
use std::sync::Arc;
use std::time::Duration;

use hapax_core::store::parts::QueueLimits;
use hapax_core::{BufferedEntropy, Entropy, KeyRing, Sealer, Secret};
use tokio_postgres::Config;
use tokio_postgres::config::{Host, SslMode};

use crate::error::PostgresConnectError;
use crate::tls::certificates::Certificates;
use crate::tls::{Connected, Connector, Plain, drive};

/// Options of a [`PostgresStore`](crate::PostgresStore). Each method returns the changed options.
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
    pub(crate) queue: QueueLimits,
    pub(crate) prepare: bool,
    pub(crate) migrate: bool,
    pub(crate) must_exist: bool,
    pub(crate) allow_lost_writes: bool,
    pub(crate) listen: bool,
    pub(crate) identity: Option<String>,
}

impl PostgresOptions {
    /// Creates options for a server by its configuration. Timeouts and keep-alives of connections
    /// are set by [`timeout`](Self::timeout).
    #[must_use]
    pub fn new(config: Config) -> Self {
        Self {
            config,
            connector: Arc::new(Plain),
            ring: None,
            entropy: Arc::new(BufferedEntropy::default()),
            schema: None,
            timeout: Duration::from_secs(2),
            lanes: 1,
            batch: 128,
            queue: QueueLimits::default(),
            prepare: false,
            migrate: true,
            must_exist: false,
            allow_lost_writes: false,
            listen: false,
            identity: None,
        }
    }

    /// Names keys and seals records with `secret`. By default there is none. Pass
    /// [`PostgresStore::secret`](crate::PostgresStore::secret) to the engine.
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

    /// Connects to the server of these options for other uses than the store, with the same TLS. The
    /// connection is driven by a task, and ends when the client is dropped, or when the server
    /// acknowledges nothing within the timeout.
    ///
    /// # Errors
    /// [`PostgresConnectError::Connect`], [`PostgresConnectError::TimedOut`].
    pub async fn client(&self) -> Result<tokio_postgres::Client, PostgresConnectError> {
        let mut config = self.config.clone();
        self.detect_loss(&mut config);
        let connecting = self.connector.connect(&config);
        let connected = tokio::time::timeout(self.timeout, connecting).await;
        let connected = connected.map_err(|_| PostgresConnectError::TimedOut)?;
        let Connected { client, driver } = connected.map_err(PostgresConnectError::Connect)?;
        tokio::spawn(drive(driver, |_| {}));
        Ok(client)
    }

    /// Has the operating system detect a server that is unreachable.
    pub(crate) fn detect_loss(&self, config: &mut Config) {
        let answer = self.timeout;
        config.connect_timeout(answer).tcp_user_timeout(answer.max(Duration::from_secs(1)));
    }

    /// Makes connections with TLS through `connector`; whether the server may decline depends on
    /// the URL's `sslmode`. Without a connector, connections are not encrypted, except those of a
    /// URL with `sslmode=require`: with the feature `tls` they are encrypted, else they fail.
    #[must_use]
    pub fn tls(mut self, connector: Arc<dyn Connector>) -> Self {
        self.connector = connector;
        self
    }

    /// Sets the schema of the tables. By default that of the role's `search_path` which has them, else its first.
    #[must_use]
    pub fn schema(mut self, schema: impl Into<String>) -> Self {
        self.schema = Some(schema.into());
        self
    }

    /// Sets the time within which every request is answered, if only with an error; by default 2 s.
    /// The server ends a statement after three quarters of it, the wait for a lock after a quarter,
    /// or half for a swap that is sent alone, and an idle transaction after all of it.
    #[must_use]
    pub fn timeout(mut self, timeout: Duration) -> Self {
        self.timeout = timeout.max(Duration::from_millis(20));
        self
    }

    /// Sets the number of connections that write batches; by default 1, at least 1. Each key
    /// belongs to one of them. The crate's `MEASURED.md` has the gain of further ones.
    #[must_use]
    pub fn lanes(mut self, lanes: usize) -> Self {
        self.lanes = lanes.clamp(1, 64);
        self
    }

    /// Limits the swaps, or changes of the schedule, in a batch; by default 128, at least 1.
    #[must_use]
    pub fn batch(mut self, swaps: usize) -> Self {
        self.batch = swaps.clamp(1, 4096);
        self
    }

    /// Limits what may wait for each lane: swaps, and bytes of records in them. By default 4,096
    /// and 64 MiB; claims are rejected at seven eighths of either. At least 8 swaps. Changes of the
    /// schedule have a queue of their own, with the same limits.
    #[must_use]
    pub fn queue(mut self, swaps: usize, bytes: usize) -> Self {
        self.queue = QueueLimits { items: swaps.max(QueueLimits::MIN_ITEMS), bytes };
        self
    }

    /// Sets whether statements are prepared by name, once per connection, which saves the server
    /// from planning each statement anew. By default false, because a pooler in transaction mode
    /// may not know the names.
    #[must_use]
    pub fn prepare(mut self, prepare: bool) -> Self {
        self.prepare = prepare;
        self
    }

    /// Sets whether missing tables are created, and old ones migrated; by default true. With
    /// `false`, run [`migrations`](crate::migrations) first; connecting then writes nothing, and if
    /// no process has written yet, the first swap determines the secret in use.
    #[must_use]
    pub fn migrate(mut self, migrate: bool) -> Self {
        self.migrate = migrate;
        self
    }

    /// Sets whether tables that are missing, or that no process has written to, are an error:
    /// [`PostgresConnectError::Missing`]. By default false: missing tables are created, with a warning in
    /// the log. Older tables are migrated in either case.
    #[must_use]
    pub fn must_exist(mut self, must_exist: bool) -> Self {
        self.must_exist = must_exist;
        self
    }

    /// Accepts a server that loses acknowledged writes when it crashes
    /// ([`UnsafeSetting`](crate::UnsafeSetting)): for tests, and where a duplicate execution after
    /// a crash is acceptable. By default such a server is rejected, and the store's transactions
    /// set `synchronous_commit` to `on`.
    #[must_use]
    pub fn allow_lost_writes(mut self, allow: bool) -> Self {
        self.allow_lost_writes = allow;
        self
    }

    /// Sets whether to maintain a connection on which processes notify each other (LISTEN, NOTIFY)
    /// of records with waiters; by default false. It needs its own session. Behind a pooler, which
    /// is detected by its effect on the parameter `options` of the connection, the store does not
    /// listen even with `true`: waiters then poll.
    #[must_use]
    pub fn listen(mut self, listen: bool) -> Self {
        self.listen = listen;
        self
    }

    /// Sets the expected identity of the tables: [`PostgresStore::known_identity`] of an earlier
    /// process. With it, tables that were emptied while no process had them open are detected.
    ///
    /// [`PostgresStore::known_identity`]: crate::PostgresStore::known_identity
    #[must_use]
    pub fn identity(mut self, known: impl Into<String>) -> Self {
        self.identity = Some(known.into());
        self
    }

    /// Returns the place of the tables for log messages, without user and password.
    pub(crate) fn place(&self) -> String {
        let host = |host: &Host| match host {
            Host::Tcp(name) => name.clone(),
            #[cfg(unix)]
            Host::Unix(path) => path.display().to_string(),
        };
        let hosts: Vec<_> = self.config.get_hosts().iter().map(host).collect();
        let database = self.config.get_dbname().or(self.config.get_user()).unwrap_or_default();
        let schema = self.schema.as_ref().map(|schema| format!(", schema {schema}"));
        format!("database {database}{} at {}", schema.unwrap_or_default(), hosts.join(","))
    }

    pub(crate) fn sealer(&self) -> Sealer {
        self.ring.as_ref().map_or_else(Sealer::checksum, KeyRing::sealer)
    }

    pub(crate) fn naming_secret(&self) -> Option<&Secret> {
        self.ring.as_ref().and_then(KeyRing::naming)
    }
}

impl FromStr for PostgresOptions {
    type Err = PostgresConnectError;

    /// Parses `postgres://USER:PASSWORD@HOST:PORT/DATABASE?PARAMETER=VALUE`, or libpq's
    /// `name=value` form. `sslmode=verify-full` and `verify-ca` mean `require`, which trusts
    /// certificates only. In a URL, `sslrootcert`, `sslcert` and `sslkey` name files in PEM, which are read now, and
    /// imply `require`; `sslrootcert=system`, the default, trusts the roots of the operating system.
    fn from_str(url: &str) -> Result<Self, PostgresConnectError> {
        // The client supports no more than `require`, and checks less with it than our TLS, which
        // always verifies certificates.
        let strict = ["sslmode=verify-full", "sslmode=verify-ca"];
        let url =
            strict.iter().fold(url.to_owned(), |url, mode| url.replace(mode, "sslmode=require"));
        let (url, certificates) = Certificates::of(&url);
        let mut config: Config = url.parse().map_err(PostgresConnectError::Url)?;
        match config.get_ssl_mode() {
            SslMode::Disable if certificates.are_given() => {
                let text = "expected sslmode=require beside certificates, found disable";
                return Err(PostgresConnectError::CertificateParameters(text));
            }
            SslMode::Require => {}
            _ if certificates.are_given() => drop(config.ssl_mode(SslMode::Require)),
            _ => return Ok(Self::new(config)),
        }
        // Without the feature `tls`, a URL without certificates may be opened with another connector.
        if !cfg!(feature = "tls") && !certificates.are_given() {
            return Ok(Self::new(config));
        }
        certificates.secure(Self::new(config))
    }
}
