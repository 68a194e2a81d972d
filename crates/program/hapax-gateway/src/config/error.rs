//! Errors of a configuration.

use std::net::SocketAddr;

use hapax_core::PolicyError;
use hapax_http::server::RouteError;
use hapax_http::statuses::StatusOverlap;
use http::HeaderName;

use crate::units::ByteSize;

/// Errors of a configuration.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[non_exhaustive]
#[allow(missing_docs, reason = "each says itself what it is")]
pub enum ConfigError {
    #[error("--upstream must be a URL like http://127.0.0.1:3000")]
    Upstream,
    #[error("--upstream is --listen ({0}): the gateway would call itself")]
    Loop(SocketAddr),
    #[error("--admin is --listen ({0}): give the operators' listener another port")]
    AdminIsListen(SocketAddr),
    #[error("--upstream must not have a path: paths are forwarded as they came")]
    UpstreamPath,
    #[error("--reconcile-url must be a URL like http://127.0.0.1:3000/outcome")]
    ReconcileTarget,
    #[error("--on-unknown reconcile needs --reconcile-url: there is no URL to reconcile with")]
    ReconcileUrl,
    #[error("--reconcile-url would never be asked without --on-unknown reconcile")]
    ReconcileUrlUnused,
    #[error("--auth-url must be a URL like http://127.0.0.1:4180/check")]
    AuthTarget,
    #[error("--auth-url is --listen ({0}): the gateway would ask itself")]
    AuthLoop(SocketAddr),
    #[error(
        "--auth-scope contradicts --scope: either the auth response or the request names the caller"
    )]
    TwoScopes,
    #[error("--auth-scope contradicts --scope-missing: the auth response must have the headers")]
    CallerIsNamed,
    #[error(
        "{flag} cannot be `{name}`: it belongs to a message, to the gateway or to the client's credentials"
    )]
    AuthHeader { flag: &'static str, name: HeaderName },
    #[error("--cache on a server is for stores that are slower: `file:` and `postgres://`")]
    CacheFor,
    #[error("--cache on a server needs --secret-file: other writers could forge responses")]
    CacheSecret,
    #[error("--methods names no method")]
    NoMethods,
    #[error("--methods cannot be CONNECT: it is not served")]
    Connect,
    #[error("--max-waiters 0 contradicts --in-flight wait: nobody could wait")]
    NoWaiters,
    #[error("--retention is longer than ten years")]
    LongRetention,
    #[error(
        "--key-header cannot be `{0}`: that header describes the message, its sender or its connection, or names the caller; a header of its own, like `X-Idempotency-Key`, is expected"
    )]
    KeyHeader(HeaderName),
    #[error("--scope names no header; `none` makes one scope for everyone")]
    NoScopeHeaders,
    #[error(
        "--scope cannot be `{0}`: the gateway strips that header, sets it itself or does not trust it"
    )]
    StrippedScope(HeaderName),
    #[error(
        "--fingerprint-headers cannot have `{0}`: the gateway strips that header, sets it itself or does not trust it"
    )]
    StrippedFingerprint(HeaderName),
    #[error("{0} is zero: expected a time above zero")]
    ZeroTimeout(&'static str),
    #[error(
        "--max-memory {memory} is too little for {connections} connections and the largest bodies: {needed} is enough, or give fewer --max-connections or smaller --max-request-body and --max-response-body"
    )]
    Memory { memory: ByteSize, connections: usize, needed: ByteSize },
    #[error(
        "--store-outage open contradicts --on-unknown {0}: a request that runs without a record could \
         run twice. Leave --store-outage closed, or say --on-unknown reexecute"
    )]
    OpenContradicts(&'static str),
    #[error(
        "--methods cannot be OPTIONS where --cors-origins is given: preflights are answered here"
    )]
    CorsMethod,
    #[error("{0} needs a URL that begins with https: it is used for TLS only")]
    TlsUnused(&'static str),
    #[error("--cors-origins names no origin")]
    NoOrigins,
    #[error(
        "--cors-origins: `{0}` is not an origin; expected a scheme and a host, like https://shop.example"
    )]
    Origin(String),
    #[error(
        "--cors-credentials contradicts `*` in {0}: browsers reject that, or take `*` for a name; list the values"
    )]
    CorsCredentials(&'static str),
    #[error("{0}: `*` stands alone")]
    CorsMixed(&'static str),
    #[error("--max-in-flight-per-scope needs --scope: `none` makes one scope for all callers")]
    OneCaller,
    #[error(
        "`observe` contradicts --auth-scope: an observed route sends no auth request, so the caller is unknown"
    )]
    ObserveAuth,
    #[error("the path {reason}")]
    RoutePath { reason: String },
    #[error("the name must have 1 to 64 visible ASCII characters other than `\"` and `\\`")]
    RouteName,
    #[error("there are too many routes: expected {0} at most")]
    ManyRoutes(usize),
    #[error("route {path}: {error}")]
    Route { index: usize, path: String, error: Box<ConfigError> },
    #[error(transparent)]
    Transport(#[from] super::TransportError),
    #[error("{flag}: {0}", flag = flag(.0))]
    Policy(#[from] PolicyError),
    #[error(transparent)]
    Statuses(#[from] StatusOverlap),
    #[error(transparent)]
    Options(#[from] RouteError),
}

/// Returns the flag whose value caused the error.
const fn flag(error: &PolicyError) -> &'static str {
    match error {
        PolicyError::NoLease | PolicyError::ShortLease => "--lease",
        // Either of them may have been configured.
        PolicyError::ShortRetention => "--retention and --lease",
        PolicyError::NoHook | PolicyError::NoHookTimeout => "--reconcile-url",
        _ => "--on-unknown",
    }
}
