//! The flags of `hapax gateway`.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::str::FromStr;
use std::time::Duration;

use clap::builder::FalseyValueParser;
use clap::{Args, ValueEnum};
use hapax::{InFlight, OnUnknown};
use hapax_gateway::{
    CacheUrl, Callers, Config, ForwardAuth, Limits, Size, StoreUrl, Written, parse_duration,
};
use hapax_http::classify::Profile;
use hapax_http::problem::DocsUrl;
use hapax_http::server::{KeyRule, MissingScope, StoreOutage};
use http::{HeaderName, Method, Uri};

use super::transport::TransportArgs;
use crate::exit::{Failure, of};
use crate::logging::LogFormat;

/// Idempotency in front of any HTTP service
///
/// A request with an Idempotency-Key header runs once, however often it is sent: copies get the
/// first one's answer. Everything else passes through. Records are kept in a file, ./hapax.db unless
/// --store says otherwise; there is nothing to set up.
#[derive(Debug, Args)]
#[command(after_help = AFTER)]
pub(crate) struct GatewayArgs {
    /// Where clients connect
    #[arg(
        long, env = "HAPAX_LISTEN", value_name = "ADDR", default_value = "127.0.0.1:8080",
        value_parser = crate::addr
    )]
    listen: SocketAddr,

    /// The service to protect, like http://127.0.0.1:3000
    #[arg(long, env = "HAPAX_UPSTREAM", value_name = "URL")]
    upstream: Uri,

    /// The operators' listener; `off` for none
    #[arg(long, env = "HAPAX_ADMIN", value_name = "ADDR", default_value = "127.0.0.1:9090")]
    admin: AdminAddr,

    /// What operators must show as bearer token; needed unless --admin is on loopback
    #[arg(long, env = "HAPAX_ADMIN_TOKEN", value_name = "TOKEN", hide_env_values = true)]
    admin_token: Option<String>,

    /// Where records are kept: file:PATH, redis://HOST, rediss://HOST, postgres://USER@HOST/DB, or
    /// memory: (forgotten at the end)
    #[arg(
        long,
        env = "HAPAX_STORE",
        value_name = "URL",
        default_value = "file:./hapax.db",
        hide_env_values = true
    )]
    store: Written<StoreUrl>,

    /// What answers replays in front of the store: memory:, redis://HOST or rediss://HOST. What an
    /// operator releases may be replayed from it for another minute
    #[arg(long, env = "HAPAX_CACHE", value_name = "URL", hide_env_values = true)]
    cache: Option<Written<CacheUrl>>,

    /// The secrets that hide keys and seal records: 64 hexadecimal digits, or a ring of them
    /// [default: made beside a file: store; for others there are none]
    #[arg(long, env = "HAPAX_SECRET_FILE", value_name = "PATH")]
    secret_file: Option<PathBuf>,

    /// Whether protected methods need a key
    #[arg(long, env = "HAPAX_KEY", value_enum, default_value_t = Key::Optional)]
    key: Key,

    /// Protected methods
    #[arg(
        long, env = "HAPAX_METHODS", value_name = "METHOD,…", value_delimiter = ',',
        default_value = "POST,PATCH", value_parser = method
    )]
    methods: Vec<Method>,

    /// The request headers whose values together say who the caller is, so that the same key of two
    /// callers is two keys; `none` if all requests are one caller's [default: authorization if
    /// --listen is on loopback, else required]
    #[arg(long, env = "HAPAX_SCOPE", value_name = "HEADER,…", value_delimiter = ',')]
    scope: Option<Vec<HeaderName>>,

    /// A request without one of these headers: refused, or of a scope that all such share [default:
    /// shared with the default scope, else reject]
    #[arg(long, env = "HAPAX_SCOPE_MISSING", value_enum)]
    scope_missing: Option<Missing>,

    /// Asked by GET whether a request with a key is allowed, before it is executed or answered from
    /// the store: with its headers, and X-Forwarded-Method, -Uri, -Host, -Proto and -For. 2xx: it
    /// goes on; 3xx and 4xx are what the client gets; anything else is 503. Requests without a key
    /// are not asked about: your service authenticates them itself [default: a replay checks no
    /// credentials]
    #[arg(long, env = "HAPAX_AUTH_URL", value_name = "URL")]
    auth_url: Option<Uri>,

    /// Within which time --auth-url must have answered
    #[arg(
        long, env = "HAPAX_AUTH_TIMEOUT", value_name = "DUR", default_value = "2s",
        value_parser = parse_duration
    )]
    auth_timeout: Duration,

    /// Headers of the auth answer whose values together say who the caller is, instead of --scope; an
    /// answer without one of them is 503. They are copied like those of --auth-copy
    #[arg(long, env = "HAPAX_AUTH_SCOPE", value_name = "HEADER,…", value_delimiter = ',')]
    auth_scope: Vec<HeaderName>,

    /// Headers of the auth answer that your service gets; from clients it gets none of these names
    #[arg(long, env = "HAPAX_AUTH_COPY", value_name = "HEADER,…", value_delimiter = ',')]
    auth_copy: Vec<HeaderName>,

    /// How long a dead process blocks its key
    #[arg(
        long, env = "HAPAX_LEASE", value_name = "DUR", default_value = "30s",
        value_parser = parse_duration
    )]
    lease: Duration,

    /// How long an outcome is replayed
    #[arg(
        long, env = "HAPAX_RETENTION", value_name = "DUR", default_value = "24h",
        value_parser = parse_duration
    )]
    retention: Duration,

    /// A copy of a request that is still running: 409, or it waits for the answer
    #[arg(long, env = "HAPAX_IN_FLIGHT", value_enum, default_value_t = Copies::Reject)]
    in_flight: Copies,

    /// How long it waits
    #[arg(
        long, env = "HAPAX_WAIT_FOR", value_name = "DUR", default_value = "5s",
        value_parser = parse_duration
    )]
    wait_for: Duration,

    /// A retry of a request that may have happened: it runs again (at-least-once), or never by
    /// itself (at-most-once), or --reconcile-url is asked
    #[arg(long, env = "HAPAX_ON_UNKNOWN", value_enum, default_value_t = Unknown::Reexecute)]
    on_unknown: Unknown,

    /// With --on-unknown reconcile: where your service says what became of the request whose
    /// Idempotency-Key and Idempotency-Fence a GET brings, by 2xx with the answer that it should have
    /// got, or by 404 if it did not happen and never will under that fence
    #[arg(long, env = "HAPAX_RECONCILE_URL", value_name = "URL")]
    reconcile_url: Option<Uri>,

    /// Which answers are kept and replayed: `standard` (2xx, 3xx and most 4xx), `stripe-v1` (all but
    /// 409 and 429) or `success-only` (2xx)
    #[arg(long, env = "HAPAX_PROFILE", value_name = "NAME", default_value = "standard")]
    profile: Profile,

    /// While the store is unreachable: 503, or requests run unprotected
    #[arg(long, env = "HAPAX_STORE_OUTAGE", value_enum, default_value_t = Outage::Closed)]
    store_outage: Outage,

    /// The largest body of a request with a key
    #[arg(long, env = "HAPAX_MAX_REQUEST_BODY", value_name = "SIZE", default_value = "1MiB")]
    max_request_body: Size,

    /// The largest body of a response that is kept
    #[arg(long, env = "HAPAX_MAX_RESPONSE_BODY", value_name = "SIZE", default_value = "1MiB")]
    max_response_body: Size,

    /// The memory that the process may take in all: 192 KiB for each of --max-connections, 32 MiB
    /// for the program, and the rest for the store, outcomes held back, and bodies
    #[arg(long, env = "HAPAX_MAX_MEMORY", value_name = "SIZE", default_value = "512MiB")]
    max_memory: Size,

    /// Connections of clients, and requests under way on one of HTTP/2 beyond the first; further ones
    /// wait
    #[arg(
        long, env = "HAPAX_MAX_CONNECTIONS", value_name = "N", default_value_t = 1024,
        value_parser = clap::value_parser!(u32).range(1..=1_000_000)
    )]
    max_connections: u32,

    /// How long a client may take to send a request's head, or leave a connection idle
    #[arg(
        long, env = "HAPAX_HEAD_TIMEOUT", value_name = "DUR", default_value = "30s",
        value_parser = parse_duration
    )]
    head_timeout: Duration,

    /// How long a client may be silent in the middle of a body, or take nothing of an answer
    #[arg(
        long, env = "HAPAX_BODY_TIMEOUT", value_name = "DUR", default_value = "30s",
        value_parser = parse_duration
    )]
    body_timeout: Duration,

    /// How long the upstream may be silent; after that the outcome is unknown
    #[arg(
        long, env = "HAPAX_UPSTREAM_TIMEOUT", value_name = "DUR", default_value = "60s",
        value_parser = parse_duration
    )]
    upstream_timeout: Duration,

    /// How long the store may be silent before it counts as unreachable
    #[arg(
        long, env = "HAPAX_STORE_TIMEOUT", value_name = "DUR", default_value = "2s",
        value_parser = parse_duration
    )]
    store_timeout: Duration,

    /// Copies of one key that may wait
    #[arg(long, env = "HAPAX_MAX_WAITERS", value_name = "N", default_value_t = 100)]
    max_waiters: usize,

    /// Where the API documents its refusals
    #[arg(long, env = "HAPAX_DOCS_URL", value_name = "URL", value_parser = docs_url)]
    docs_url: Option<DocsUrl>,

    /// Replay Set-Cookie too
    #[arg(long, env = "HAPAX_REPLAY_SET_COOKIE", value_parser = FalseyValueParser::new())]
    replay_set_cookie: bool,

    /// On SIGTERM or SIGINT (Ctrl-C): how long work in hand may take to finish; another one, a second
    /// later or more, ends at once
    #[arg(
        long, env = "HAPAX_DRAIN_TIMEOUT", value_name = "DUR", default_value = "25s",
        value_parser = parse_duration
    )]
    drain_timeout: Duration,

    #[command(flatten)]
    transport: TransportArgs,

    /// How log lines look
    #[arg(long, env = "HAPAX_LOG_FORMAT", value_enum, default_value_t = LogFormat::Text)]
    pub(crate) log_format: LogFormat,

    /// What is logged: error, warn, info, debug, or directives like `info,hapax_gateway=debug`
    #[arg(long, env = "HAPAX_LOG", value_name = "LEVEL", default_value = "info")]
    pub(crate) log_level: String,
}

const AFTER: &str = "\
Durations are written 250ms, 30s, 5m, 24h, 7d; sizes 64KiB, 1MiB, 2GiB.
Exit codes: 0 after a drain, 64 for what cannot be configured, 69 where an address or the store is
not to be had.

  hapax gateway --upstream http://127.0.0.1:3000
  curl -i http://127.0.0.1:8080/orders -H 'Idempotency-Key: 8e03978e' -d '{\"item\": 7}'";

impl GatewayArgs {
    /// What they say.
    pub(super) fn config(self) -> Result<Config, Failure> {
        let mut config = Config::new(self.upstream);
        config.listen = self.listen;
        config.admin = self.admin.0;
        config.admin_token = self.admin_token.map(Into::into);
        config.store = self.store.read().map_err(of("--store"))?;
        config.cache = self.cache.map(Written::read).transpose().map_err(of("--cache"))?;
        config.secret_file = self.secret_file;
        config.key = match self.key {
            Key::Optional => KeyRule::Optional,
            Key::Required => KeyRule::Required,
        };
        config.methods = self.methods;
        config.scope = self.scope.map(callers).transpose()?;
        config.scope_missing = self.scope_missing.map(|missing| match missing {
            Missing::Reject => MissingScope::Reject,
            Missing::Shared => MissingScope::Shared,
        });
        config.auth = match self.auth_url {
            Some(url) => Some(ForwardAuth {
                url,
                timeout: self.auth_timeout,
                scope: self.auth_scope,
                copy: self.auth_copy,
            }),
            None if self.auth_scope.is_empty() && self.auth_copy.is_empty() => None,
            None => {
                let reason = "--auth-scope and --auth-copy need --auth-url: there is no answer";
                return Err(Failure::usage(reason));
            }
        };
        config.lease = self.lease;
        config.retention = self.retention;
        config.in_flight = match self.in_flight {
            Copies::Reject => InFlight::Reject,
            Copies::Wait => InFlight::Wait(self.wait_for),
        };
        config.on_unknown = match self.on_unknown {
            Unknown::Reexecute => OnUnknown::Reexecute,
            Unknown::Block => OnUnknown::Block,
            Unknown::Reconcile => OnUnknown::Reconcile,
        };
        config.reconcile_url = self.reconcile_url;
        config.profile = self.profile;
        config.store_outage = match self.store_outage {
            Outage::Closed => StoreOutage::Closed,
            Outage::Open => StoreOutage::Open,
        };
        config.max_request_body = self.max_request_body.0;
        config.max_response_body = self.max_response_body.0;
        config.upstream_timeout = self.upstream_timeout;
        config.store_timeout = self.store_timeout;
        config.max_waiters = self.max_waiters;
        config.docs_url = self.docs_url;
        config.replay_set_cookie = self.replay_set_cookie;
        config.drain_timeout = self.drain_timeout;
        config.transport = self.transport.transport()?;
        config.limits = Limits {
            connections: self.max_connections as usize,
            memory: self.max_memory.0,
            head_timeout: self.head_timeout,
            stall: self.body_timeout,
        };
        Ok(config)
    }
}

/// An address, or `off`.
#[derive(Clone, Copy, Debug)]
struct AdminAddr(Option<SocketAddr>);

impl FromStr for AdminAddr {
    type Err = &'static str;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        if text == "off" {
            return Ok(Self(None));
        }
        text.parse()
            .map(|addr| Self(Some(addr)))
            .map_err(|_| "expected an IP address and a port, like 127.0.0.1:9090, or `off`")
    }
}

#[derive(Clone, Copy, PartialEq, Eq, Debug, ValueEnum)]
enum Key {
    Optional,
    Required,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug, ValueEnum)]
enum Missing {
    Reject,
    Shared,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug, ValueEnum)]
enum Copies {
    Reject,
    Wait,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug, ValueEnum)]
enum Unknown {
    Reexecute,
    Block,
    Reconcile,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug, ValueEnum)]
enum Outage {
    Closed,
    Open,
}

/// `none` alone is everyone.
fn callers(names: Vec<HeaderName>) -> Result<Callers, Failure> {
    match &names[..] {
        [only] if only == "none" => Ok(Callers::Everyone),
        names if names.iter().any(|name| name == "none") => {
            Err(Failure::usage("--scope: `none` stands alone"))
        }
        _ => Ok(Callers::Headers(names)),
    }
}

/// Methods are case-sensitive, and nobody means `post`.
fn method(text: &str) -> Result<Method, &'static str> {
    Method::from_bytes(text.to_ascii_uppercase().as_bytes()).map_err(|_| "not a method")
}

fn docs_url(text: &str) -> Result<DocsUrl, String> {
    DocsUrl::new(text).map_err(|error| error.to_string())
}
