//! What a gateway is told, and what is refused before anything starts.

mod auth;

use std::fmt;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::path::PathBuf;
use std::time::Duration;

use hapax::machine::Hook;
use hapax::{InFlight, OnUnknown, Policy, PolicyError, Terms};
use hapax_http::classify::Profile;
use hapax_http::problem::DocsUrl;
use hapax_http::server::{KeyRule, MissingScope, RouteError, StoreOutage};
use hapax_http::stored::hop_by_hop;
use http::uri::{Authority, PathAndQuery, Scheme};
use http::{HeaderName, Method, Uri};

use crate::memory::{LargestBodies, Shares};
use crate::store::{CacheUrl, StoreUrl};
use crate::units::Size;
pub use auth::ForwardAuth;

/// Everything a gateway is told. [`Config::new`] has the defaults.
#[derive(Clone, Debug)]
pub struct Config {
    /// Where clients connect. Default `127.0.0.1:8080`.
    pub listen: SocketAddr,
    /// The service to protect: `http://HOST[:PORT]`.
    pub upstream: Uri,
    /// The operators' listener; `None` for none. Default `127.0.0.1:9090`.
    pub admin: Option<SocketAddr>,
    /// What operators must show as `Authorization: Bearer`; needed unless `admin` is on loopback.
    pub admin_token: Option<AdminToken>,
    /// Where records are kept. Default `file:./hapax.db`.
    pub store: StoreUrl,
    /// What is kept in front of the store, so that replays need not ask it.
    pub cache: Option<CacheUrl>,
    /// The file of the secrets, as [`KeyRing`](hapax::KeyRing) has it. A `file:` store makes its own
    /// beside it.
    pub secret_file: Option<PathBuf>,
    /// Whether protected methods need a key. Default: optional.
    pub key: KeyRule,
    /// Which methods are protected. Default POST and PATCH.
    pub methods: Vec<Method>,
    /// Who the caller is. Default: `authorization` on a loopback listener; elsewhere there is none.
    pub scope: Option<Callers>,
    /// Who is asked before a request with a key is executed or answered from the store. Default:
    /// nobody; then a replay checks no credentials.
    pub auth: Option<ForwardAuth>,
    /// What a request without its scope headers gets. Default: [`MissingScope::Shared`] with the
    /// default scope, else [`MissingScope::Reject`].
    pub scope_missing: Option<MissingScope>,
    /// How long a dead process blocks its key. Default 30 s.
    pub lease: Duration,
    /// How long an outcome is replayed. Default 24 h.
    pub retention: Duration,
    /// What a copy of a request in flight gets. Default: it is rejected.
    pub in_flight: InFlight,
    /// What a retry of an unknown outcome gets. Default: it is executed again.
    pub on_unknown: OnUnknown,
    /// Where to ask what became of an operation, `http://HOST[:PORT]/PATH`; for
    /// [`OnUnknown::Reconcile`].
    pub reconcile_url: Option<Uri>,
    /// What statuses mean. Default [`Profile::Standard`].
    pub profile: Profile,
    /// Whether requests are executed unprotected while the store is away. Default: they are not.
    pub store_outage: StoreOutage,
    /// The largest request body with a key, in bytes. Default 1 MiB.
    pub max_request_body: usize,
    /// The largest response body that is kept, in bytes. Default 1 MiB.
    pub max_response_body: usize,
    /// After which silence of the upstream an outcome is unknown. Default 60 s.
    pub upstream_timeout: Duration,
    /// After which silence the store counts as unreachable. Default 2 s.
    pub store_timeout: Duration,
    /// How many copies of one key may wait. Default 100.
    pub max_waiters: usize,
    /// Where the API documents its refusals.
    pub docs_url: Option<DocsUrl>,
    /// Whether `Set-Cookie` is replayed. Default `false`.
    pub replay_set_cookie: bool,
    /// How long work in hand may take to finish at the end. Default 25 s.
    pub drain_timeout: Duration,
    /// How much is served and held at once.
    pub limits: Limits,
}

/// How much a gateway serves and holds at once, and how slow its clients may be.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Limits {
    /// Connections of clients; further ones wait to be accepted. Default 1,024.
    pub connections: usize,
    /// Bytes of memory that the process may take in all. Default 512 MiB.
    ///
    /// The program has [32 MiB](Limits::PROGRAM) of it, and each connection
    /// [192 KiB](Limits::PER_CONNECTION). Of the rest an eighth each is for pages of a store that
    /// is a file, for what waits to be written to it, for outcomes that are held back while
    /// the store is away, and for large records on their way from it; a `memory:` store
    /// keeps its records in three eighths; with a store on a server they are for what waits for it
    /// and for the outcomes that it tells, by halves. A cache has a quarter of them, and so have
    /// outcomes that it tells. What is left is for bodies of more than 16 KiB of requests with keys
    /// and of their responses, as
    /// [`body_memory`](hapax_http::server::IdempotencyLayer::body_memory) says: a body for which
    /// there is no room is not read until there is; an answer for which there is none is recorded,
    /// and its client told to ask again.
    pub memory: usize,
    /// How long a client may take to send a request's head; also how long a connection may be
    /// idle. Default 30 s.
    pub head_timeout: Duration,
    /// How long a client may be silent in the middle of a body, or take nothing of an answer.
    /// Default 30 s.
    pub stall: Duration,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            connections: 1024,
            memory: 512 << 20,
            head_timeout: Duration::from_secs(30),
            stall: Duration::from_secs(30),
        }
    }
}

impl Config {
    /// The defaults, in front of `upstream`.
    #[must_use]
    pub fn new(upstream: Uri) -> Self {
        let Terms { lease, retention, on_unknown } = Policy::default().terms;
        Self {
            listen: (Ipv4Addr::LOCALHOST, 8080).into(),
            upstream,
            admin: Some((Ipv4Addr::LOCALHOST, 9090).into()),
            admin_token: None,
            store: StoreUrl::File("./hapax.db".into()),
            cache: None,
            secret_file: None,
            key: KeyRule::Optional,
            methods: vec![Method::POST, Method::PATCH],
            scope: None,
            auth: None,
            scope_missing: None,
            lease,
            retention,
            in_flight: InFlight::Reject,
            on_unknown,
            reconcile_url: None,
            profile: Profile::Standard,
            store_outage: StoreOutage::Closed,
            max_request_body: 1 << 20,
            max_response_body: 1 << 20,
            upstream_timeout: Duration::from_secs(60),
            store_timeout: Duration::from_secs(2),
            max_waiters: 100,
            docs_url: None,
            replay_set_cookie: false,
            drain_timeout: Duration::from_secs(25),
            limits: Limits::default(),
        }
    }

    /// Settles what depends on each other, and refuses what would only show in production.
    pub(crate) fn settle(&self) -> Result<Settled, ConfigError> {
        let upstream = authority(&self.upstream).ok_or(ConfigError::Upstream)?;
        if self.upstream.path_and_query().is_some_and(|path| path.as_str() != "/") {
            return Err(ConfigError::UpstreamPath);
        }
        if is_self(&upstream, self.listen) {
            return Err(ConfigError::Loop(self.listen));
        }
        let reconcile = self.reconcile_url.as_ref().map(reconcile_target).transpose()?;
        if reconcile.is_some() && self.on_unknown != OnUnknown::Reconcile {
            return Err(ConfigError::NeverAsked);
        }
        if self.methods.is_empty() {
            return Err(ConfigError::NoMethods);
        }
        if self.methods.contains(&Method::CONNECT) {
            return Err(ConfigError::Connect);
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
        let (callers, missing) = self.callers()?;
        for (name, value) in [
            ("--upstream-timeout", self.upstream_timeout),
            ("--store-timeout", self.store_timeout),
            ("--head-timeout", self.limits.head_timeout),
            ("--body-timeout", self.limits.stall),
        ] {
            if value.is_zero() {
                return Err(ConfigError::ZeroTimeout(name));
            }
        }
        if let InFlight::Wait(patience) = self.in_flight
            && patience.is_zero()
        {
            return Err(ConfigError::ZeroTimeout("--wait-for"));
        }
        if matches!(self.in_flight, InFlight::Wait(_)) && self.max_waiters == 0 {
            return Err(ConfigError::NobodyWaits);
        }
        if self.retention > MAX_RETENTION {
            return Err(ConfigError::LongRetention);
        }
        let largest =
            LargestBodies { request: self.max_request_body, response: self.max_response_body };
        let memory = self.limits.shares(largest)?;
        if self.store_outage == StoreOutage::Open {
            match self.on_unknown {
                OnUnknown::Reexecute => {}
                OnUnknown::Block => return Err(ConfigError::OpenContradicts("block")),
                OnUnknown::Reconcile => return Err(ConfigError::OpenContradicts("reconcile")),
            }
        }
        if let Some(admin) = self.admin
            && !admin.ip().is_loopback()
            && self.admin_token.is_none()
        {
            return Err(ConfigError::AdminToken(admin));
        }
        if self.admin_token.as_ref().is_some_and(|token| !is_token(token.as_str())) {
            return Err(ConfigError::TokenText);
        }
        let policy = self.policy()?;
        Ok(Settled { upstream, auth, reconcile, callers, missing, policy, memory })
    }

    fn policy(&self) -> Result<Policy, ConfigError> {
        let Self { lease, retention, on_unknown, in_flight, upstream_timeout, .. } = *self;
        let hook = self
            .reconcile_url
            .is_some()
            // What the dead owner sent may run for as long as an upstream may be silent.
            .then_some(Hook { after: upstream_timeout, timeout: ANSWER });
        let policy = Policy { terms: Terms { lease, retention, on_unknown }, in_flight, hook };
        match policy.check() {
            Ok(()) => Ok(policy),
            Err(PolicyError::NoHook) => Err(ConfigError::ReconcileUrl),
            Err(error) => Err(error.into()),
        }
    }

    fn callers(&self) -> Result<(Callers, MissingScope), ConfigError> {
        if let Some(auth) = self.auth.as_ref().filter(|auth| !auth.scope.is_empty()) {
            // They are in the request by then, from the answer.
            return Ok((Callers::Headers(auth.scope.clone()), MissingScope::Reject));
        }
        let Some(scope) = &self.scope else {
            if !self.listen.ip().is_loopback() {
                return Err(ConfigError::Scope(self.listen));
            }
            let missing = self.scope_missing.unwrap_or(MissingScope::Shared);
            return Ok((Callers::Headers(vec![http::header::AUTHORIZATION]), missing));
        };
        if let Callers::Headers(names) = scope {
            if names.is_empty() {
                return Err(ConfigError::NoScopeHeaders);
            }
            if let Some(name) = names.iter().find(|name| names_nobody(name)) {
                return Err(ConfigError::StrippedScope(name.clone()));
            }
        }
        Ok((scope.clone(), self.scope_missing.unwrap_or(MissingScope::Reject)))
    }
}

/// What the proxy strips, sets itself or does not believe says nothing of the caller; what a
/// message is sent with, such as its length or date, neither.
fn names_nobody(name: &HeaderName) -> bool {
    let plain = name.as_str().replace('_', "-");
    hop_by_hop(name)
        || plain.starts_with("idempotency-")
        || plain.starts_with("x-forwarded-")
        || matches!(
            plain.as_str(),
            "content-length" | "date" | "expect" | "forwarded" | "host" | "trailer" | "via"
        )
}

/// The longest retention: beyond it a duration is a slip of the pen, and times would overflow.
const MAX_RETENTION: Duration = Duration::from_secs(3653 * 86_400);

/// How long the upstream may take to say what became of an operation.
pub(crate) const ANSWER: Duration = Duration::from_secs(5);

/// What operators must show. Its `Debug` form does not.
#[derive(Clone, PartialEq, Eq)]
pub struct AdminToken(String);

impl AdminToken {
    pub(crate) fn as_str(&self) -> &str {
        &self.0
    }
}

impl<T: Into<String>> From<T> for AdminToken {
    fn from(token: T) -> Self {
        Self(token.into())
    }
}

impl fmt::Debug for AdminToken {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("AdminToken(..)")
    }
}

/// What follows from a [`Config`].
#[derive(Debug)]
pub(crate) struct Settled {
    pub(crate) upstream: Authority,
    pub(crate) auth: Option<(Authority, PathAndQuery)>,
    pub(crate) reconcile: Option<(Authority, PathAndQuery)>,
    pub(crate) callers: Callers,
    pub(crate) missing: MissingScope,
    pub(crate) policy: Policy,
    pub(crate) memory: Shares,
}

/// Who the caller is.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Callers {
    /// The values of these headers, together.
    Headers(Vec<HeaderName>),
    /// Everyone is the same caller.
    Everyone,
}

impl Callers {
    /// The headers that name the caller.
    #[must_use]
    pub fn headers(&self) -> &[HeaderName] {
        match self {
            Self::Headers(names) => names,
            Self::Everyone => &[],
        }
    }
}

/// Why a configuration is refused.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[non_exhaustive]
#[allow(missing_docs, reason = "each says itself what it is")]
pub enum ConfigError {
    #[error("--upstream must be a URL like http://127.0.0.1:3000 (https is not in this build)")]
    Upstream,
    #[error("--upstream is --listen ({0}): the gateway would call itself")]
    Loop(SocketAddr),
    #[error("--upstream must not have a path: paths are forwarded as they came")]
    UpstreamPath,
    #[error(
        "--reconcile-url must be a URL like http://127.0.0.1:3000/outcome (https is not in this build)"
    )]
    ReconcileTarget,
    #[error("--on-unknown reconcile needs --reconcile-url: there is nobody to ask")]
    ReconcileUrl,
    #[error("--reconcile-url would never be asked without --on-unknown reconcile")]
    NeverAsked,
    #[error(
        "--auth-url must be a URL like http://127.0.0.1:4180/check (https is not in this build)"
    )]
    AuthTarget,
    #[error("--auth-url is --listen ({0}): the gateway would ask itself")]
    AuthLoop(SocketAddr),
    #[error(
        "--auth-scope contradicts --scope: either the auth answer or the request says who the caller is"
    )]
    TwoScopes,
    #[error("--auth-scope contradicts --scope-missing: an auth answer without them counts as none")]
    CallerIsNamed,
    #[error(
        "{flag} cannot be `{name}`: it belongs to a message, to the gateway or to the client's credentials"
    )]
    AuthHeader { flag: &'static str, name: HeaderName },
    #[error("--cache on a server is for stores that are slower: `file:` and `postgres://`")]
    CacheFor,
    #[error("--cache on a server needs --secret-file: whoever writes there could make up answers")]
    CacheSecret,
    #[error("--methods names no method")]
    NoMethods,
    #[error("--methods cannot be CONNECT: it is not served")]
    Connect,
    #[error("--max-waiters 0 contradicts --in-flight wait: nobody could wait")]
    NobodyWaits,
    #[error("--retention is longer than ten years")]
    LongRetention,
    #[error("--scope names no header; `none` makes one scope for everyone")]
    NoScopeHeaders,
    #[error(
        "--scope cannot be `{0}`: the gateway strips that header, sets it itself or does not believe it"
    )]
    StrippedScope(HeaderName),
    #[error(
        "--scope is required when --listen ({0}) is not on loopback: name the headers that identify the caller, or `none`"
    )]
    Scope(SocketAddr),
    #[error("{0} is zero: nothing could ever happen in time")]
    ZeroTimeout(&'static str),
    #[error(
        "--max-memory {memory} is too little for {connections} connections and the largest bodies: {needed} is enough, or give fewer --max-connections or smaller --max-request-body and --max-response-body"
    )]
    Memory { memory: Size, connections: usize, needed: Size },
    #[error(
        "--store-outage open contradicts --on-unknown {0}: what runs unprotected could run twice"
    )]
    OpenContradicts(&'static str),
    #[error("--admin-token is required when --admin ({0}) is not on loopback")]
    AdminToken(SocketAddr),
    #[error("--admin-token must be visible ASCII, at least one character")]
    TokenText,
    #[error(transparent)]
    Policy(#[from] PolicyError),
    #[error(transparent)]
    Route(#[from] RouteError),
}

fn authority(uri: &Uri) -> Option<Authority> {
    if uri.scheme() != Some(&Scheme::HTTP) {
        return None;
    }
    let authority = uri.authority()?;
    // `user@host` would send credentials nobody asked for.
    let named = !authority.host().is_empty() && !authority.as_str().contains('@');
    // A port that is none must not become the default one.
    let port = match authority.as_str().strip_prefix(authority.host())? {
        "" => true,
        port => port.strip_prefix(':').is_some_and(is_port),
    };
    (named && port).then(|| authority.clone())
}

fn is_port(text: &str) -> bool {
    text.bytes().all(|byte| byte.is_ascii_digit()) && text.parse::<u16>().is_ok_and(|it| it > 0)
}

/// Whether `authority` is certain to be where the gateway itself listens.
fn is_self(authority: &Authority, listen: SocketAddr) -> bool {
    if authority.port_u16().unwrap_or(80) != listen.port() {
        return false;
    }
    let host = authority.host().trim_start_matches('[').trim_end_matches(']');
    if host.eq_ignore_ascii_case("localhost") {
        return listen.ip().is_loopback() || listen.ip().is_unspecified();
    }
    host.parse::<IpAddr>().is_ok_and(|ip| {
        ip == listen.ip()
            || (listen.ip().is_unspecified() && (ip.is_loopback() || ip.is_unspecified()))
    })
}

fn reconcile_target(uri: &Uri) -> Result<(Authority, PathAndQuery), ConfigError> {
    let authority = authority(uri).ok_or(ConfigError::ReconcileTarget)?;
    let path = uri.path_and_query().cloned().unwrap_or_else(|| PathAndQuery::from_static("/"));
    Ok((authority, path))
}

fn is_token(token: &str) -> bool {
    !token.is_empty() && token.bytes().all(|byte| byte.is_ascii_graphic())
}
