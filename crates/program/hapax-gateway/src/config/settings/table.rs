//! The tables of all settings, in the order in which they are read and shown.

use std::borrow::Borrow;
use std::num::NonZeroU32;
use std::path::PathBuf;

use hapax_core::{InFlight, OnUnknown};
use hapax_http::fingerprint::{BodyForm, HttpFingerprintScheme, JsonParts};
use hapax_http::header::Grammar;
use hapax_http::server::{CompletionOutage, KeyRule, MissingScope, StoreOutage};
use hapax_proxy::UpstreamProtocol;
use hapax_proxy::tls::ListenTls;
use http::HeaderName;

use super::super::{
    Config, ConfigError, Cors, ForwardAuth, LogFormat, PolicyConfig, RouteConfig, RouteMode,
    ScopeConfig,
};
use super::types::*;
use super::{Mark, Setting, SettingInfo, default_of};

/// Declares a table. A row has the help, the name, the type, the default in words where it is not that
/// of the configuration, marks, and the place of the value in the configuration, as [`place`] takes it.
macro_rules! settings {
    ($(#[$meta:meta])* $table:ident: [Setting<$target:ty>];
    $(
        $(#[doc = $help:literal])+
        $name:ident: $type:ty $(= $default:tt)? $(, $mark:ident)* => $place:tt;
    )*) => {
        $(#[$meta])*
        pub static $table: &[Setting<$target>] = &[$({
            const NAME: &str = stringify!($name);
            type Value = <$type as SettingType>::Value;
            place!(read $target, $place);
            const GET: fn(&$target) -> Option<Vec<String>> =
                |target| read(target).and_then(|value| <$type>::write(value.borrow()));
            Setting {
                info: SettingInfo {
                    name: NAME,
                    kind: <$type>::KIND,
                    placeholder: <$type>::PLACEHOLDER,
                    help: concat!($($help),+),
                    default: settings!(default $($default)?),
                    check: <$type>::check,
                    has_secret: <$type>::HAS_SECRET,
                    marks: &[$(Mark::$mark),*],
                },
                get: GET,
                set: |target, words| {
                    let value = <$type>::read(words);
                    let value = value.map_err(|error| ConfigError::Value { field: NAME, error })?;
                    let set: fn(&mut $target, Value) -> Result<(), ConfigError> =
                        place!(set NAME, $place);
                    set(target, value)
                },
                differs: |before, after| read(before) != read(after),
            }
        }),*];
    };
    (default) => { || default_of(GET) };
    (default "") => { || None };
    (default $default:tt) => { || Some($default.to_owned()) };
}

/// Declares how a value is read from its place in a configuration, and returns how it is set there. A place
/// is a field; a field of a part that may be absent, and the setting that makes the part; or a value, and
/// an expression that sets it, which may fail with `try_set`.
macro_rules! place {
    (read $target:ty, (|$it:ident| $field:expr)) => {
        fn read($it: &$target) -> Option<impl Borrow<Value> + PartialEq> {
            Some(&$field)
        }
    };
    (read $target:ty, (|$it:ident| $part:expr, |$in:ident| $field:expr, $($needs:tt)*)) => {
        fn read($it: &$target) -> Option<impl Borrow<Value> + PartialEq> {
            $part.as_ref().map(|$in| &$field)
        }
    };
    (read $target:ty, (get |$it:ident| $value:expr, $($set:tt)*)) => {
        fn read($it: &$target) -> Option<impl Borrow<Value> + PartialEq> {
            $value
        }
    };
    (set $name:ident, (|$it:ident| $field:expr)) => {
        |$it, value| {
            $field = value;
            Ok(())
        }
    };
    (set $name:ident, (
        |$it:ident| $part:expr, |$in:ident| $field:expr, needs $other:ident $why:expr
    )) => {
        |$it, value| {
            let missing = || ConfigError::needs($name, stringify!($other), $why);
            let $in = $part.as_mut().ok_or_else(missing)?;
            $field = value;
            Ok(())
        }
    };
    (set $name:ident, (get |$it:ident| $get:expr, set |$target:ident, $value:ident| $set:expr)) => {
        |$target, $value| {
            $set;
            Ok(())
        }
    };
    (set $name:ident, (get |$it:ident| $get:expr, try_set $set:expr)) => {
        $set
    };
}

settings! {
    /// The settings of a gateway, of which there is one.
    GATEWAY_SETTINGS: [Setting<Config>];
    /// Where clients connect
    listen: Address, Fixed => (|it| it.listen);
    /// The service to protect, like http://127.0.0.1:3000
    upstream: ServiceUrl = "" => (|it| it.upstream);
    /// The operators' listener; `off` for none
    admin: AddressOrOff, Fixed => (|it| it.admin);
    /// The file of the token that operators show; made with mode 0600 if there is none
    admin_token_file: Option<Path> = "PATH.admin-token beside a file: store, else ./hapax.admin-token",
        Fixed => (|it| it.admin_token_file);
    /// The file that operators' decisions are appended to
    audit_file: Option<Path> = "PATH.audit.jsonl beside a file: store, else ./hapax.audit.jsonl",
        Fixed => (|it| it.audit_file);
    /// A file that gets a line of JSON for each request, without key and caller; - is standard
    /// output
    access_log: Option<Path> = "none", Fixed => (|it| it.access_log);
    /// Where records are kept: file:PATH, redis://HOST, rediss://HOST, postgres://USER@HOST/DB, or
    /// memory: (forgotten at the end)
    store: Store, Fixed => (|it| it.store);
    /// What answers replays in front of the store: memory:, redis://HOST or rediss://HOST. What an
    /// operator releases may be replayed from it for another minute
    cache: Option<Cache>, Fixed => (|it| it.cache);
    /// The secrets that hide keys and seal records: 64 hexadecimal digits, or a ring of them
    secret_file: Option<Path> = "made beside a file: store; for others there are none",
        Fixed => (|it| it.secret_file);
    /// Asked by GET whether a request with a key is allowed, before it is executed or answered from
    /// the store: with its headers, and X-Forwarded-Method, -Uri, -Host, -Proto and -For. 2xx: it
    /// goes on; 3xx and 4xx are what the client gets; anything else is 503. Requests without a key
    /// are not asked about: your service authenticates them itself
    auth_url: Url = "a replay checks no credentials" => (
        get |it| it.auth.as_ref().map(|auth| &auth.url),
        set |it, url| it.auth = Some(ForwardAuth::new(url))
    );
    /// Within which time `auth_url` must have answered
    auth_timeout: Time = "2s" => (
        |it| it.auth, |auth| auth.timeout, needs auth_url ": nobody is asked"
    );
    /// Headers of the auth answer whose values together say who the caller is, instead of `scope`; an
    /// answer without one of them is 503. They are copied like those of `auth_copy`
    auth_scope: Headers => (|it| it.auth, |auth| auth.scope, needs auth_url ": there is no answer");
    /// Headers of the auth answer that your service gets; from clients it gets none of these names
    auth_copy: Headers => (|it| it.auth, |auth| auth.copy, needs auth_url ": there is no answer");
    /// The memory that the process may take in all: 192 KiB for each of `max_connections`, 32 MiB
    /// for the program, and the rest for the store, outcomes held back, and bodies
    max_memory: Size, Fixed => (|it| it.limits.memory);
    /// Connections of clients; each request under way on an HTTP/2 connection after its first counts
    /// as one more. When all are taken, the oldest connection that has sent nothing is closed for a
    /// new one; without such a one, new ones wait
    max_connections: Connections, Fixed => (|it| it.limits.connections);
    /// Connections of one peer address (IPv6: of its /64). At the bound its oldest connection that has
    /// sent nothing is closed, else the new one. Addresses of `trust_forwarded` have no bound
    max_connections_per_peer: Option<Connections> = "three quarters of `max_connections`",
        Fixed => (|it| it.limits.connections_per_peer);
    /// Copies of one key that may wait
    max_waiters: Count<usize>, Fixed => (|it| it.max_waiters);
    /// How long a client may take to send a request's head, or leave a connection idle
    head_timeout: Time, Fixed => (|it| it.limits.head_timeout);
    /// How long a client may be silent in the middle of a body, or take nothing of an answer
    body_timeout: Time, Fixed => (|it| it.limits.stall);
    /// How long the store may be silent before it counts as unreachable
    store_timeout: Time, Fixed => (|it| it.store_timeout);
    /// How long a start waits for a store whose server is unreachable or starting up; 0s gives up at
    /// once. Until then connections wait, and /readyz is 503
    store_wait: Time => (|it| it.store_wait);
    /// On SIGTERM or SIGINT (Ctrl-C): how long work in hand may take to finish; another one, a second
    /// later or more, ends at once
    drain_timeout: Time => (|it| it.drain_timeout);
    /// On SIGTERM or SIGINT: how long requests are still accepted while /readyz is 503 already, so that
    /// balancers send them elsewhere; `drain_timeout` begins after it
    drain_delay: Time = "0s" => (|it| it.drain_delay);
    /// The listener's certificate, with its chain, in PEM; read again when it changes, and on SIGHUP
    tls_cert: Path = "no TLS", Fixed => (
        get |it| it.transport.tls.as_ref().map(|tls| &tls.certificate),
        set |it, certificate| it.transport.tls = Some(ListenTls {
            certificate, key: PathBuf::new(), client_ca: None
        })
    );
    /// Its private key, in PEM
    tls_key: Path, Fixed => (
        |it| it.transport.tls, |tls| tls.key, needs tls_cert ": they go together"
    );
    /// Who signs clients' certificates, in PEM: then clients without one are not served
    tls_client_ca: Option<Path>, Fixed => (
        |it| it.transport.tls, |tls| tls.client_ca, needs tls_cert ": they go together"
    );
    /// Requests that one HTTP/2 connection may have open, as long as half of `max_connections` are
    /// free
    max_streams: Count<u32>, Fixed => (|it| it.transport.streams);
    /// Whose Forwarded and X-Forwarded-* headers are believed and added to, rather than replaced:
    /// networks and addresses, `loopback`, or `none`
    trust_forwarded: Networks, Fixed => (|it| it.transport.trusted);
    /// What `upstream` is spoken to in; `auto` is what it chooses behind https, else HTTP/1.1
    upstream_protocol: Choice<UpstreamProtocol>, Fixed => (|it| it.transport.upstream_protocol);
    /// The root certificates believed behind https URLs, in PEM
    upstream_ca: Option<Path> = "the system's", Fixed => (|it| it.transport.upstream_tls.ca);
    /// The certificate shown to servers behind https URLs that ask for one, in PEM
    upstream_cert: Path, Fixed => (
        get |it| it.transport.upstream_tls.client.as_ref().map(|(certificate, _)| certificate),
        set |it, certificate| it.transport.upstream_tls.client = Some((certificate, PathBuf::new()))
    );
    /// Its private key, in PEM
    upstream_key: Path, Fixed => (
        |it| it.transport.upstream_tls.client, |client| client.1,
        needs upstream_cert ": they go together"
    );
    /// How long a connection to the upstream may take to be made; nothing is sent before
    connect_timeout: Time, Fixed => (|it| it.transport.connect_timeout);
    /// How long a connection to the upstream may be idle and be used again: less than after which the
    /// upstream drops it
    upstream_idle: Time, Fixed => (|it| it.transport.upstream_idle);
    /// Give each request with a key a connection to the upstream of its own: a late second answer to
    /// one request is then never taken for the answer to the next
    fresh_connections: Flag, Fixed => (|it| it.transport.fresh_connections);
    /// How log lines look
    log_format: Choice<LogFormat>, Fixed => (|it| it.log.format);
    /// What is logged: error, warn, info, debug, or directives like `info,hapax_gateway=debug`
    log_level: Level, Fixed => (|it| it.log.level);
}

const NO_ORIGINS: &str = ": no page may do anything";

settings! {
    /// The settings of a policy, everywhere or on a route.
    POLICY_SETTINGS: [Setting<PolicyConfig>];
    /// Whether protected methods need a key
    key: Choice<KeyRule> => (|it| it.key);
    /// The header that has the key, like X-Idempotency-Key or PayPal-Request-Id; it is forwarded as it
    /// came
    key_header: Header => (|it| it.key_header);
    /// What a key is: a quoted string, or a bare value as well
    grammar: Choice<Grammar> => (|it| it.grammar);
    /// Protected methods
    methods: Methods => (|it| it.methods);
    /// The request headers whose values together name the caller, so that the same key of two
    /// callers is two keys; `none` gives all callers one scope, in which they get each other's
    /// answers
    scope: Option<Callers> = "authorization" => (|it| it.scope);
    /// A request with a key in which a scope header is missing or empty. reject: 400; shared: one
    /// scope for all such callers, who get each other's answers
    scope_missing: Option<Choice<MissingScope>> = "reject" => (
        get |it| Some(&it.scope_missing),
        try_set |it, missing| {
            it.scope_missing = missing;
            match it.scope {
                Some(ScopeConfig::Everyone) => Err(ConfigError::NoEffect {
                    field: "scope_missing",
                    relation: "contradicts",
                    other: "scope",
                    why: " none: nobody can lack it",
                }),
                _ => Ok(()),
            }
        }
    );
    /// How the body of a retry is compared: JSON and form data by what they say, all by its bytes, or
    /// not at all
    fingerprint_body: Choice<BodyForm> => (
        get |it| Some(it.fingerprint.body_form()),
        try_set |it, body| set_fingerprint(it, "fingerprint_body", body, None, None)
    );
    /// Of a JSON body only what these pointers lead to counts, like /amount,/currency; `none` for all
    /// of it
    fingerprint_only: Pointers => (
        get |it| Some(match it.fingerprint.json_parts() {
            JsonParts::Only(pointers) => Some(pointers.clone()),
            JsonParts::All | JsonParts::Except(_) => None,
        }),
        try_set |it, only| set_json_parts(it, "fingerprint_only", only.map(JsonParts::Only))
    );
    /// Of a JSON body all but what these pointers lead to counts, like /sent_at
    fingerprint_except: Pointers => (
        get |it| Some(match it.fingerprint.json_parts() {
            JsonParts::Except(pointers) => Some(pointers.clone()),
            JsonParts::All | JsonParts::Only(_) => None,
        }),
        try_set |it, except| set_json_parts(it, "fingerprint_except", except.map(JsonParts::Except))
    );
    /// Headers that count too
    fingerprint_headers: Headers => (
        get |it| Some(it.fingerprint.headers().to_vec()),
        try_set |it, headers| {
            let body = it.fingerprint.body_form();
            set_fingerprint(it, "fingerprint_headers", body, Some(headers), None)
        }
    );
    /// How long a dead process blocks its key
    lease: Time => (|it| it.lease);
    /// How long an outcome is replayed
    retention: Time => (|it| it.retention);
    /// A copy of a request that is still running: 409, or it waits for the answer
    in_flight: InFlightRule => (|it| it.in_flight);
    /// How long it waits
    wait_for: Time = "5s" => (
        get |it| match it.in_flight {
            InFlight::Wait(time) => Some(time),
            InFlight::Reject => None,
        },
        try_set |it, time| match &mut it.in_flight {
            InFlight::Wait(wait_for) => { *wait_for = time; Ok(()) }
            InFlight::Reject => {
                Err(ConfigError::needs("wait_for", "in_flight", " wait: nobody waits"))
            }
        }
    );
    /// The answer to a retry when the outcome is unknown. block: 409 until an operator resolves it
    /// (at-most-once); reexecute: it executes again and may take effect twice (at-least-once);
    /// reconcile: `reconcile_url` decides
    on_unknown: Choice<OnUnknown> => (|it| it.on_unknown);
    /// Needed by `on_unknown` reconcile: a GET here, with Idempotency-Operation-Id and
    /// Idempotency-Fence, asks what became of an operation. 2xx: its answer, which is replayed. 404
    /// with `Idempotency-Outcome: did-not-happen`: it did not happen, and the service rejects this
    /// fence from now on. Anything else: not known yet. Probed at start and on reload
    reconcile_url: Option<Url> => (|it| it.reconcile_url);
    /// Which answers are kept and replayed: `standard` (2xx, 3xx and most 4xx), `stripe-v1` (all but
    /// 409 and 429) or `success-only` (2xx). Under `standard` other 5xx leave open whether it happened,
    /// 503 too unless `on_unknown` is reexecute
    profile: ProfileName => (|it| it.profile);
    /// Statuses that are kept and replayed, whatever the profile says, like 404, 5xx or 500-502; `none`
    /// for none
    final_statuses: Statuses => (|it| it.statuses.final_statuses);
    /// Statuses after which a retry executes: the service had no effect before it answered so
    retryable_statuses: Statuses => (|it| it.statuses.retryable_statuses);
    /// Statuses after which the request may or may not have happened
    unknown_statuses: Statuses => (|it| it.statuses.unknown_statuses);
    /// While the store is unreachable. closed: 503; open: requests execute unprotected, which needs
    /// `on_unknown` reexecute
    store_outage: Choice<StoreOutage> => (|it| it.store_outage);
    /// Where the store goes away before an outcome is recorded: the client gets the answer, marked as
    /// pending, or 503
    completion_outage: Choice<CompletionOutage> => (|it| it.completion_outage);
    /// Stream responses: their keys are final at the headers, and only the status is kept
    stream: Flag = "only text/event-stream" => (|it| it.stream);
    /// Say in Idempotency-Expires when a key may be used anew
    expires: Flag => (|it| it.expires);
    /// The largest body of a request with a key
    max_request_body: Size => (|it| it.max_request_body);
    /// The largest body of a response that is kept
    max_response_body: Size => (|it| it.max_response_body);
    /// How long the upstream may be silent; after that the outcome is unknown
    upstream_timeout: Time = "60s", Unprotected => (|it| it.upstream_timeout);
    /// Keys of one caller that may be in flight at once, in this process; a further one gets 429. 0
    /// for any number
    max_in_flight_per_scope: Count<u32> => (
        get |it| Some(it.max_in_flight_per_scope.map_or(0, NonZeroU32::get)),
        set |it, count| it.max_in_flight_per_scope = NonZeroU32::new(count)
    );
    /// Where the API documents its refusals; `none` for nowhere
    docs_url: DocsUrlOrNone, Unprotected => (|it| it.docs_url);
    /// Replay Set-Cookie too
    replay_set_cookie: Flag => (|it| it.replay_set_cookie);
    /// Pages of which origins may use this, like https://shop.example, or `*`; `none` leaves CORS to
    /// your service. Preflights are answered here
    cors_origins: OriginsOrNone, Unprotected => (
        get |it| Some(it.cors.as_ref().map(|cors| cors.origins.clone())),
        set |it, origins| it.cors = origins.map(Cors::new)
    );
    /// What they may send, or `*`
    cors_methods: PageMethods = "GET,HEAD,POST,PUT,PATCH,DELETE", Unprotected =>
        (|it| it.cors, |cors| cors.methods, needs cors_origins NO_ORIGINS);
    /// With which headers, or `*`; the key header and the scope headers are always among them
    cors_headers: PageHeaders = "authorization,content-type", Unprotected =>
        (|it| it.cors, |cors| cors.headers, needs cors_origins NO_ORIGINS);
    /// Which headers of answers they may read, besides Idempotency-*, Retry-After and Link
    cors_expose: Headers = "none", Unprotected =>
        (|it| it.cors, |cors| cors.expose, needs cors_origins NO_ORIGINS);
    /// Whether they may send cookies and the like
    cors_credentials: Flag = "false", Unprotected =>
        (|it| it.cors, |cors| cors.credentials, needs cors_origins NO_ORIGINS);
    /// For how long a browser may keep the answer to a preflight
    cors_max_age: Option<Time> = "its own choice", Unprotected =>
        (|it| it.cors, |cors| cors.max_age, needs cors_origins NO_ORIGINS);
}

settings! {
    /// The settings of a route alone.
    ROUTE_SETTINGS: [Setting<RouteConfig>];
    /// The paths of the route, like /payments, /orders/{id} or /v2/{*rest}
    path: Name = "" => (|it| it.path);
    /// What metrics call the route
    name: Option<Name> = "its path" => (|it| it.name);
    /// Only count what would become of its requests, which pass through
    observe: Flag = "false" => (
        get |it| (it.handling == RouteMode::Observe).then_some(true),
        set |it, observe| it.handling = if observe { RouteMode::Observe } else { RouteMode::Protect }
    );
    /// Whether its requests are protected; if not, they pass through
    protect: Flag = "true" => (
        get |it| (it.handling == RouteMode::Pass).then_some(false),
        try_set |it, protect| match (it.handling, protect) {
            (RouteMode::Observe, _) => Err(ConfigError::ObserveProtect { protect }),
            (_, true) => Ok(()),
            (_, false) => { it.handling = RouteMode::Pass; Ok(()) }
        }
    );
}

fn set_json_parts(
    policy: &mut PolicyConfig,
    field: &'static str,
    parts: Option<JsonParts>,
) -> Result<(), ConfigError> {
    let Some(parts) = parts else { return Ok(()) };
    let body = policy.fingerprint.body_form();
    if *policy.fingerprint.json_parts() != JsonParts::All {
        return Err(ConfigError::OnlyAndExcept);
    }
    if body != BodyForm::Canonical {
        return Err(ConfigError::NotCanonical);
    }
    set_fingerprint(policy, field, body, None, Some(parts))
}

/// Sets what of a request counts; headers and parts of JSON stay where they are not given.
fn set_fingerprint(
    policy: &mut PolicyConfig,
    field: &'static str,
    body: BodyForm,
    headers: Option<Vec<HeaderName>>,
    parts: Option<JsonParts>,
) -> Result<(), ConfigError> {
    let headers = headers.unwrap_or_else(|| policy.fingerprint.headers().to_vec());
    let parts = parts.unwrap_or_else(|| policy.fingerprint.json_parts().clone());
    let scheme = HttpFingerprintScheme::new(body, headers).and_then(|scheme| scheme.json(parts));
    policy.fingerprint =
        scheme.map_err(|error| ConfigError::Value { field, error: error.to_string() })?;
    Ok(())
}
