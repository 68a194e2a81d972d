//! Configuration of a gateway, and its validation before anything starts.

mod auth;
mod authorization;
mod cors;
mod error;
mod jwt;
mod lookup;
mod policy;
mod reconciling;
mod route;
mod settings;
mod transport;

use std::collections::BTreeSet;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::path::PathBuf;
use std::time::Duration;

use hapax_core::Namespace;
use hapax_proxy::Origin;
use hapax_proxy::tls::{AllCertificates, TlsError, UpstreamTls};
use http::Uri;
use http::uri::PathAndQuery;

use crate::budget::{MaxBodies, MemoryPlan};
use crate::store::{CacheUrl, StoreDrivers, StoreUrl};
pub use auth::ForwardAuth;
pub use authorization::ReconcileAuthorization;
pub use cors::{Cors, CorsHeaders, Origins};
pub use error::{ConfigError, NamesSettings};
pub(crate) use jwt::{ExpectedToken, KeySource, TokenCheck};
pub use jwt::{JwtConfig, JwtKeys};
pub use lookup::RouteMatch;
pub(crate) use policy::{ANSWER, ResolvedPolicy};
pub use policy::{PolicyConfig, ScopeConfig};
pub use route::{RouteConfig, RouteMode};
pub(crate) use settings::changed;
pub use settings::{
    GATEWAY_SETTINGS, GivenSettings, POLICY_SETTINGS, ROUTE_SETTINGS, Setting, SettingInfo,
    SettingWords, ValueKind, is_setting,
};
pub use transport::Transport;

/// Configuration of a gateway. [`Config::new`] has the defaults.
#[derive(Clone, Debug)]
pub struct Config {
    /// Address for clients. Default `127.0.0.1:8080`.
    pub listen: SocketAddr,
    /// URL of the service to protect: `http://HOST[:PORT]` or `https://HOST[:PORT]`.
    pub upstream: Uri,
    /// Address of the operators' listener; `None` for none. Default `127.0.0.1:9090`.
    pub admin: Option<SocketAddr>,
    /// File of the token that operators send as `Authorization: Bearer`; it is created if it does
    /// not exist. Default: [`default_path`](hapax_operators::AdminToken::default_path), next to a
    /// `file:` store, else `./hapax.admin-token`.
    pub admin_token_file: Option<PathBuf>,
    /// File to which operators' decisions are appended. Default:
    /// [`default_path`](hapax_operators::Audit::default_path), next to a `file:` store, else
    /// `./hapax.audit.jsonl`.
    pub audit_file: Option<PathBuf>,
    /// File with a line for each request; `-` is standard output. Default: none.
    pub access_log: Option<PathBuf>,
    /// Store of the records. Default `file:./hapax.db`.
    pub store: StoreUrl,
    /// Whether the start fails if the store does not exist, or no process has used it before. Default
    /// false: a store is created, with a warning in the log.
    pub store_must_exist: bool,
    /// Drivers of stores on servers. Default: Redis and PostgreSQL.
    pub drivers: StoreDrivers,
    /// Name of the service among those that share the store. A store on a server requires it; of another
    /// store the default is the default namespace.
    pub namespace: Option<Namespace>,
    /// Cache in front of the store, from which outcomes are replayed. Default: none.
    pub cache: Option<CacheUrl>,
    /// File of the secrets, in the format of [`KeyRing`](hapax_core::KeyRing). A `file:` store
    /// creates its own next to it.
    pub secret_file: Option<PathBuf>,
    /// Interval at which operations whose outcome is unknown are reconciled without a retry; zero for never. Default
    /// 60 s.
    pub reconcile_every: Duration,
    /// Largest number of operations that are reconciled without a retry in an interval. Default 256.
    pub reconcile_limit: usize,
    /// Forward authorisation of requests with a key, before they are executed or replayed. Default:
    /// none; then a replay checks no credentials.
    pub auth: Option<ForwardAuth>,
    /// Verification of the bearer tokens whose claims name callers. Default: none.
    pub jwt: JwtConfig,
    /// Timeout of the store, after which it counts as unreachable. Default 2 s.
    pub store_timeout: Duration,
    /// Time that a start waits for a store whose server is unreachable or starting up; zero makes
    /// the start fail at once. Default 30 s.
    pub store_wait: Duration,
    /// Number of duplicates of one key that may wait. Default 100.
    pub max_waiters: usize,
    /// Time that requests in progress may take to finish at shutdown. Default 25 s.
    pub drain_timeout: Duration,
    /// Time at shutdown during which requests are still accepted while `/readyz` is already 503.
    /// Default none.
    pub drain_delay: Duration,
    /// Limits of connections, memory and clients' timeouts.
    pub limits: ServerLimits,
    /// TLS, versions of HTTP, and trusted proxies.
    pub transport: Transport,
    /// Logs, for the program that has the gateway: the gateway itself begins none.
    pub log: LogConfig,
    /// The policy of requests for which no route matches.
    pub policy: PolicyConfig,
    /// Routes with their own policies. Their order does not decide which route a path matches.
    pub routes: Vec<RouteConfig>,
}

/// Limits of connections and memory, and timeouts of clients.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct ServerLimits {
    /// Connections of clients; each request in progress on an HTTP/2 connection beyond its first
    /// counts as one. If the limit is reached, the oldest connection that has sent no byte is
    /// closed for a new one; without such a connection, new ones wait. Default 1,024.
    pub connections: usize,
    /// Part of `connections` that one peer may use: an IPv4 address, or an IPv6 network of 64 bits.
    /// Further connections of the peer are closed, and further requests on its HTTP/2 connections
    /// wait. Proxies in [`Transport::trusted`] have no such limit. Default three quarters of
    /// `connections`: one peer never uses all of them, and the default is enough for a proxy that
    /// is not trusted.
    pub connections_per_peer: Option<usize>,
    /// Bytes of memory that the process may use in all. Default 512 MiB.
    ///
    /// The program uses [32 MiB](ServerLimits::PROGRAM) of it, and each connection [192
    /// KiB](ServerLimits::PER_CONNECTION). The rest is divided:
    ///
    /// - An eighth is for deferred writes while the store is unavailable.
    /// - A `file:` store uses an eighth each for its pages, for writes in its queue, and for large
    ///   records that are read from it.
    /// - A `memory:` store keeps its records in three eighths.
    /// - For a store on a server, half of these three eighths is for its queue, and half for the
    ///   outcomes that it returns.
    /// - A cache uses a quarter of the three eighths, and the outcomes that it returns another
    ///   quarter.
    /// - Up to a sixteenth is for [observed](RouteMode::Observe) routes.
    /// - The remainder is for bodies of more than 16 KiB of requests with keys and of their
    ///   responses, as [`body_memory`](hapax_http::server::IdempotencyLayer::body_memory)
    ///   describes. A request body is not read until there is memory for it. A response without
    ///   memory for it is recorded, and its client gets an error that requests a retry.
    pub memory: usize,
    /// Time that a client may take to send a request's head, that a connection may be idle, and
    /// that an HTTP/2 request may wait for a permit. Default 30 s.
    pub head_timeout: Duration,
    /// Time that a client may send nothing in the middle of a body, or receive nothing of a
    /// response. Default 30 s.
    pub stall: Duration,
}

impl ServerLimits {
    /// Returns the number of connections that one peer may have.
    #[must_use]
    pub fn per_peer(&self) -> usize {
        self.connections_per_peer.unwrap_or(self.connections - self.connections / 4)
    }
}

impl Default for ServerLimits {
    fn default() -> Self {
        Self {
            connections: 1024,
            connections_per_peer: None,
            memory: 512 << 20,
            head_timeout: Duration::from_secs(30),
            stall: Duration::from_secs(30),
        }
    }
}

/// Logs of the program that has the gateway.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct LogConfig {
    /// Format of log lines. Default: [`LogFormat::Text`].
    pub format: LogFormat,
    /// A level, or directives like `info,hapax_gateway=debug`. Default `info`.
    pub level: String,
}

impl Default for LogConfig {
    fn default() -> Self {
        Self { format: LogFormat::Text, level: "info".to_owned() }
    }
}

/// Formats of log lines.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum LogFormat {
    /// As text.
    Text,
    /// As JSON.
    Json,
}

impl Default for Config {
    /// Returns the defaults, without an upstream: [`Config::check`] rejects them.
    fn default() -> Self {
        Self::new(Uri::default())
    }
}

impl Config {
    /// Returns the default configuration in front of `upstream`.
    #[must_use]
    pub fn new(upstream: Uri) -> Self {
        Self {
            listen: (Ipv4Addr::LOCALHOST, 8080).into(),
            upstream,
            admin: Some((Ipv4Addr::LOCALHOST, 9090).into()),
            admin_token_file: None,
            audit_file: None,
            access_log: None,
            store: StoreUrl::File("./hapax.db".into()),
            store_must_exist: false,
            drivers: StoreDrivers::default(),
            namespace: None,
            cache: None,
            secret_file: None,
            reconcile_every: Self::RECONCILE_EVERY,
            reconcile_limit: Self::RECONCILE_LIMIT,
            auth: None,
            jwt: JwtConfig::default(),
            store_timeout: Duration::from_secs(2),
            store_wait: Duration::from_secs(30),
            max_waiters: 100,
            drain_timeout: Duration::from_secs(25),
            drain_delay: Duration::ZERO,
            limits: ServerLimits::default(),
            transport: Transport::default(),
            log: LogConfig::default(),
            policy: PolicyConfig::default(),
            routes: Vec::new(),
        }
    }

    /// Checks whether a gateway can start with this configuration.
    ///
    /// # Errors
    /// [`ConfigError`] for settings that would otherwise only fail in production.
    pub fn check(&self) -> Result<(), ConfigError> {
        let resolved = self.resolve()?;
        self.check_reconciling()?;
        crate::routes::RouteTable::new(&self.policy, &self.routes).map(drop)?;
        drop(resolved);
        Ok(())
    }

    /// Computes the settings that depend on each other, and rejects those that would only fail in
    /// production.
    pub(crate) fn resolve(&self) -> Result<ResolvedConfig, ConfigError> {
        self.transport.check()?;
        let upstream = Origin::of(&self.upstream)
            .ok_or_else(|| no_target("upstream", &self.upstream, ConfigError::Upstream))?;
        if self.upstream.path_and_query().is_some_and(|path| path.as_str() != "/") {
            return Err(ConfigError::UpstreamPath);
        }
        if is_self(&upstream, self.listen) {
            return Err(ConfigError::Loop { address: self.listen });
        }
        // With port 0 each listener gets a different port.
        if self.admin.is_some_and(|admin| is_same(admin, self.listen)) {
            return Err(ConfigError::AdminIsListen { address: self.listen });
        }
        if self.store_must_exist && self.store == StoreUrl::Memory {
            return Err(ConfigError::NoEffect {
                field: "store_must_exist",
                relation: "contradicts",
                other: "store",
                why: " memory:, which each start creates: leave out one of them",
            });
        }
        let auth = self.auth.as_ref().map(|auth| auth.target(self)).transpose()?;
        let tokens = self.jwt.resolve(self)?;
        if matches!(self.store, StoreUrl::Server(_)) && self.namespace.is_none() {
            return Err(ConfigError::NoNamespace);
        }
        if matches!(self.cache, Some(CacheUrl::Redis(_)))
            && (matches!(&self.store, StoreUrl::Server(url) if url.is_redis())
                || self.store == StoreUrl::Memory)
        {
            return Err(ConfigError::CacheFor);
        }
        if matches!(self.cache, Some(CacheUrl::Redis(_)))
            && self.secret_file.is_none()
            && !matches!(self.store, StoreUrl::File(_))
        {
            return Err(ConfigError::CacheSecret);
        }
        for (field, value) in [
            ("store_timeout", self.store_timeout),
            ("head_timeout", self.limits.head_timeout),
            ("body_timeout", self.limits.stall),
        ] {
            if value.is_zero() {
                return Err(ConfigError::Zero { field });
            }
        }
        let policy = self.policy.resolve(self)?;
        let routes = self.resolve_routes()?;
        let mut largest = MaxBodies { request: 0, response: 0 };
        for policy in self.policies() {
            largest.request = largest.request.max(policy.max_request_body);
            largest.response = largest.response.max(policy.max_response_body);
        }
        let memory = self.limits.memory_plan(largest)?;
        let resolved = ResolvedConfig { upstream, auth, tokens, policy, routes, memory, largest };
        // A reload cannot introduce the first https URL, which needs a restart.
        let UpstreamTls { ca, client } = &self.transport.upstream_tls;
        for (field, is_said) in [("upstream_ca", ca.is_some()), ("upstream_cert", client.is_some())]
        {
            if is_said && !resolved.is_secure() {
                return Err(ConfigError::TlsUnused { field });
            }
        }
        Ok(resolved)
    }

    fn resolve_routes(&self) -> Result<Vec<ResolvedPolicy>, ConfigError> {
        if self.routes.len() > RouteConfig::MOST {
            return Err(ConfigError::ManyRoutes { most: RouteConfig::MOST });
        }
        let settle = |(index, route): (usize, &RouteConfig)| {
            route.resolve(self).map_err(|error| route.error(index, error))
        };
        self.routes.iter().enumerate().map(settle).collect()
    }

    /// Returns the file of the admin token; `None` without an admin listener.
    pub(crate) fn token_file(&self) -> Option<PathBuf> {
        self.admin?;
        Some(self.admin_token_file.clone().unwrap_or_else(|| self.store.token_file()))
    }

    /// Returns the default policy, then that of each route.
    pub(crate) fn policies(&self) -> impl Iterator<Item = &PolicyConfig> {
        std::iter::once(&self.policy).chain(self.routes.iter().map(|route| &route.policy))
    }
}

/// Values computed from a [`Config`].
#[derive(Debug)]
pub(crate) struct ResolvedConfig {
    pub(crate) upstream: Origin,
    pub(crate) auth: Option<(Origin, PathAndQuery)>,
    /// The verification of bearer tokens, if they name callers.
    pub(crate) tokens: Option<TokenCheck>,
    pub(crate) policy: ResolvedPolicy,
    /// Policies of the routes, in the same order.
    pub(crate) routes: Vec<ResolvedPolicy>,
    pub(crate) memory: MemoryPlan,
    pub(crate) largest: MaxBodies,
}

impl ResolvedConfig {
    /// Returns whether any server is reached over TLS.
    pub(crate) fn is_secure(&self) -> bool {
        let policies = std::iter::once(&self.policy).chain(&self.routes);
        let targets = policies.filter_map(|policy| policy.reconcile.as_ref()).chain(&self.auth);
        let keys = match &self.tokens {
            Some(TokenCheck::Here { keys: KeySource::Url(origin, _), .. }) => origin.secure,
            _ => false,
        };
        self.upstream.secure || keys || targets.into_iter().any(|(origin, _)| origin.secure)
    }

    /// Returns the files of `reconcile_authorization` that users other than their owners could read or write when they
    /// were read.
    pub(crate) fn open_files(&self) -> BTreeSet<PathBuf> {
        let policies = std::iter::once(&self.policy).chain(&self.routes);
        let read = policies.filter_map(|policy| policy.authorization.as_ref());
        read.filter_map(|authorization| authorization.open_file.clone()).collect()
    }

    /// Reads the certificates that are needed.
    pub(crate) async fn certificates(&self, config: &Config) -> Result<AllCertificates, TlsError> {
        let Transport { tls, upstream_tls, .. } = config.transport.clone();
        AllCertificates::read(tls, self.is_secure().then_some(upstream_tls)).await
    }
}

/// Returns whether two listeners would bind the same address.
fn is_same(a: SocketAddr, b: SocketAddr) -> bool {
    let everywhere = a.ip().is_unspecified() || b.ip().is_unspecified();
    a.port() == b.port()
        && a.port() != 0
        && (a.ip() == b.ip() || (everywhere && a.is_ipv4() == b.is_ipv4()))
}

/// Returns the error of a URL that is no target: `other`, unless it has credentials.
fn no_target(field: &'static str, url: &Uri, other: ConfigError) -> ConfigError {
    let has_credentials = url.authority().is_some_and(|authority| authority.as_str().contains('@'));
    if has_credentials { ConfigError::Credentials { field } } else { other }
}

/// Returns whether `origin` is certainly the gateway's own listener.
fn is_self(origin: &Origin, listen: SocketAddr) -> bool {
    if origin.port() != listen.port() {
        return false;
    }
    let host = origin.host();
    if host.eq_ignore_ascii_case("localhost") {
        return listen.ip().is_loopback() || listen.ip().is_unspecified();
    }
    host.parse::<IpAddr>().is_ok_and(|ip| {
        ip == listen.ip()
            || (listen.ip().is_unspecified() && (ip.is_loopback() || ip.is_unspecified()))
    })
}
