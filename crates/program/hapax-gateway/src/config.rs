//! What a gateway is told, and what is refused before anything starts.

mod auth;
mod cors;
mod error;
mod lookup;
mod policy;
mod route;
mod settings;
mod transport;

use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::path::PathBuf;
use std::time::Duration;

use http::Uri;
use http::uri::{PathAndQuery, Scheme};
use rustls::pki_types::ServerName;

use crate::budget::{MaxBodies, MemoryPlan};
use crate::store::{CacheUrl, StoreUrl};
use crate::tls::{AllCertificates, TlsError};
use crate::upstream::Origin;
pub use auth::ForwardAuth;
pub use cors::{Cors, CorsHeaders, Origins};
pub use error::{ConfigError, NamesSettings};
pub use lookup::RouteMatch;
pub(crate) use policy::{ANSWER, ResolvedPolicy};
pub use policy::{PolicyConfig, ScopeConfig};
pub use route::{RouteConfig, RouteMode};
pub(crate) use settings::changed;
pub use settings::{
    GATEWAY_SETTINGS, GivenSettings, POLICY_SETTINGS, ROUTE_SETTINGS, Setting, SettingInfo,
    SettingWords, ValueKind, is_setting,
};
pub use transport::{IpNetwork, ListenTls, NetworkError, Transport, UpstreamProtocol, UpstreamTls};

/// Everything a gateway is told. [`Config::new`] has the defaults.
#[derive(Clone, Debug)]
pub struct Config {
    /// Where clients connect. Default `127.0.0.1:8080`.
    pub listen: SocketAddr,
    /// The service to protect: `http://HOST[:PORT]` or `https://HOST[:PORT]`.
    pub upstream: Uri,
    /// The operators' listener; `None` for none. Default `127.0.0.1:9090`.
    pub admin: Option<SocketAddr>,
    /// The file of the token that operators show as `Authorization: Bearer`; it is made if there is
    /// none. Default: [`default_path`](hapax_operators::AdminToken::default_path), beside a `file:` store, else
    /// `./hapax.admin-token`.
    pub admin_token_file: Option<PathBuf>,
    /// The file that operators' decisions are appended to. Default:
    /// [`default_path`](hapax_operators::Audit::default_path), beside a `file:` store, else
    /// `./hapax.audit.jsonl`.
    pub audit_file: Option<PathBuf>,
    /// The file that each request has a line in; `-` is standard output. Default: none.
    pub access_log: Option<PathBuf>,
    /// Where records are kept. Default `file:./hapax.db`.
    pub store: StoreUrl,
    /// What is kept in front of the store, so that replays need not ask it.
    pub cache: Option<CacheUrl>,
    /// The file of the secrets, as [`KeyRing`](hapax_core::KeyRing) has it. A `file:` store makes its own
    /// beside it.
    pub secret_file: Option<PathBuf>,
    /// Who is asked before a request with a key is executed or answered from the store. Default:
    /// nobody; then a replay checks no credentials.
    pub auth: Option<ForwardAuth>,
    /// After which silence the store counts as unreachable. Default 2 s.
    pub store_timeout: Duration,
    /// How long a start waits for a store whose server is unreachable or starting up; zero to give up
    /// at once. Default 30 s.
    pub store_wait: Duration,
    /// How many copies of one key may wait. Default 100.
    pub max_waiters: usize,
    /// How long work in hand may take to finish at the end. Default 25 s.
    pub drain_timeout: Duration,
    /// How long requests are still accepted at the end while `/readyz` is 503 already. Default none.
    pub drain_delay: Duration,
    /// How much is served and held at once.
    pub limits: ServerLimits,
    /// TLS, versions of HTTP, and who is believed.
    pub transport: Transport,
    /// Logs, for the program that has the gateway: the gateway itself begins none.
    pub log: LogConfig,
    /// What holds where no route says otherwise.
    pub policy: PolicyConfig,
    /// Paths for which something else holds. Which of them a path falls under does not depend on
    /// their order.
    pub routes: Vec<RouteConfig>,
}

/// How much a gateway serves and holds at once, and how slow its clients may be.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct ServerLimits {
    /// Connections of clients, and what HTTP/2 has under way on one beyond its first request. Where there
    /// are as many, the oldest connection that has sent no byte is closed for a new one; without such a
    /// one, new ones wait. Default 1,024.
    pub connections: usize,
    /// Places of `connections` that one peer may take: an IPv4 address, or an IPv6 network of 64 bits. Further
    /// connections of it are closed, and further requests on its HTTP/2 connections wait. Those that
    /// [`Transport::trusted`] names are proxies and have no bound. Default three quarters of
    /// `connections`: one peer never takes all places, and a proxy that is not named has enough.
    pub connections_per_peer: Option<usize>,
    /// Bytes of memory that the process may take in all. Default 512 MiB.
    ///
    /// The program has [32 MiB](ServerLimits::PROGRAM) of it, and each connection
    /// [192 KiB](ServerLimits::PER_CONNECTION). Of the rest an eighth each is for pages of a store that
    /// is a file, for what waits to be written to it, for outcomes that are held back while
    /// the store is away, and for large records on their way from it; a `memory:` store
    /// keeps its records in three eighths; with a store on a server they are for what waits for it
    /// and for the outcomes that it tells, by halves. A cache has a quarter of them, and so have
    /// outcomes that it tells. Up to a sixteenth of the rest is for what is
    /// [observed](RouteMode::Observe). What is left is for bodies of more than 16 KiB of requests
    /// with keys and of their responses, as
    /// [`body_memory`](hapax_http::server::IdempotencyLayer::body_memory) says: a body for which
    /// there is no room is not read until there is; an answer for which there is none is recorded,
    /// and its client told to ask again.
    pub memory: usize,
    /// How long a client may take to send a request's head; also how long a connection may be
    /// idle, and how long a request of HTTP/2 may wait for a place. Default 30 s.
    pub head_timeout: Duration,
    /// How long a client may be silent in the middle of a body, or take nothing of an answer.
    /// Default 30 s.
    pub stall: Duration,
}

impl ServerLimits {
    /// Connections that one peer may have.
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
    /// How lines look. Default: [`LogFormat::Text`].
    pub format: LogFormat,
    /// What is logged: a level, or directives like `info,hapax_gateway=debug`. Default `info`.
    pub level: String,
}

impl Default for LogConfig {
    fn default() -> Self {
        Self { format: LogFormat::Text, level: "info".to_owned() }
    }
}

/// How log lines look.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum LogFormat {
    /// As text.
    Text,
    /// As JSON.
    Json,
}

impl Default for Config {
    /// The defaults, without an upstream: [`Config::check`] refuses them.
    fn default() -> Self {
        Self::new(Uri::default())
    }
}

impl Config {
    /// The defaults, in front of `upstream`.
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
            cache: None,
            secret_file: None,
            auth: None,
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

    /// Whether it can be started.
    ///
    /// # Errors
    /// [`ConfigError`] says what would only show in production.
    pub fn check(&self) -> Result<(), ConfigError> {
        let resolved = self.resolve()?;
        crate::routes::RouteTable::new(&self.policy, &self.routes).map(drop)?;
        drop(resolved);
        Ok(())
    }

    /// Settles what depends on each other, and refuses what would only show in production.
    pub(crate) fn resolve(&self) -> Result<ResolvedConfig, ConfigError> {
        self.transport.check()?;
        let upstream = origin(&self.upstream).ok_or(ConfigError::Upstream)?;
        if self.upstream.path_and_query().is_some_and(|path| path.as_str() != "/") {
            return Err(ConfigError::UpstreamPath);
        }
        if is_self(&upstream, self.listen) {
            return Err(ConfigError::Loop { address: self.listen });
        }
        // With port 0 each has a port of its own.
        if self.admin.is_some_and(|admin| is_same(admin, self.listen)) {
            return Err(ConfigError::AdminIsListen { address: self.listen });
        }
        let auth = self.auth.as_ref().map(|auth| auth.target(self)).transpose()?;
        if matches!(self.cache, Some(CacheUrl::Redis(_)))
            && matches!(self.store, StoreUrl::Memory | StoreUrl::Redis(_))
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
        let resolved = ResolvedConfig { upstream, auth, policy, routes, memory, largest };
        // A reload cannot make it otherwise: what is https when there was none before needs a restart.
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

    /// The file of the admin token; `None` without an admin listener.
    pub(crate) fn token_file(&self) -> Option<PathBuf> {
        self.admin?;
        Some(self.admin_token_file.clone().unwrap_or_else(|| self.store.token_file()))
    }

    /// The policy of everything, and that of each route.
    pub(crate) fn policies(&self) -> impl Iterator<Item = &PolicyConfig> {
        std::iter::once(&self.policy).chain(self.routes.iter().map(|route| &route.policy))
    }
}

/// What follows from a [`Config`].
#[derive(Debug)]
pub(crate) struct ResolvedConfig {
    pub(crate) upstream: Origin,
    pub(crate) auth: Option<(Origin, PathAndQuery)>,
    pub(crate) policy: ResolvedPolicy,
    /// Of each route, in their order.
    pub(crate) routes: Vec<ResolvedPolicy>,
    pub(crate) memory: MemoryPlan,
    pub(crate) largest: MaxBodies,
}

impl ResolvedConfig {
    /// Whether any server is behind TLS.
    pub(crate) fn is_secure(&self) -> bool {
        let policies = std::iter::once(&self.policy).chain(&self.routes);
        let asked = policies.filter_map(|policy| policy.reconcile.as_ref()).chain(&self.auth);
        self.upstream.secure || asked.into_iter().any(|(origin, _)| origin.secure)
    }

    /// Reads the certificates that are needed.
    pub(crate) async fn certificates(&self, config: &Config) -> Result<AllCertificates, TlsError> {
        let Transport { tls, upstream_tls, .. } = config.transport.clone();
        AllCertificates::read(tls, self.is_secure().then_some(upstream_tls)).await
    }
}

fn origin(uri: &Uri) -> Option<Origin> {
    let secure = match uri.scheme() {
        Some(scheme) if *scheme == Scheme::HTTP => false,
        Some(scheme) if *scheme == Scheme::HTTPS => true,
        _ => return None,
    };
    let authority = uri.authority()?;
    // `user@host` would send credentials nobody asked for.
    let named = !authority.host().is_empty() && !authority.as_str().contains('@');
    // A port that is none must not become the default one.
    let port = match authority.as_str().strip_prefix(authority.host())? {
        "" => true,
        port => port.strip_prefix(':').is_some_and(is_port),
    };
    let origin = Origin { secure, authority: authority.clone() };
    // A certificate is for a name or an address.
    let certain = !secure || ServerName::try_from(origin.host()).is_ok();
    (named && port && certain).then_some(origin)
}

fn is_port(text: &str) -> bool {
    text.bytes().all(|byte| byte.is_ascii_digit()) && text.parse::<u16>().is_ok_and(|it| it > 0)
}

/// Whether `origin` is certain to be where the gateway itself listens.
/// Whether two listeners would take each other's connections.
fn is_same(a: SocketAddr, b: SocketAddr) -> bool {
    let everywhere = a.ip().is_unspecified() || b.ip().is_unspecified();
    a.port() == b.port()
        && a.port() != 0
        && (a.ip() == b.ip() || (everywhere && a.is_ipv4() == b.is_ipv4()))
}

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
