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

/// Declares a table. A row has the help, the name, the type, the default in words if it differs
/// from the configuration's, marks, and the place of the value in the configuration, in the syntax
/// of [`place`].
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

/// Declares how a value is read from its place in a configuration, and returns how it is set there.
/// A place is a field; or a field of a part that may be absent, and the setting that creates the
/// part; or a value, and an expression that sets it, which may fail with `try_set`.
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
    /// The settings of a gateway.
    GATEWAY_SETTINGS: [Setting<Config>];
    /// Address for clients
    listen: Address, Fixed => (|it| it.listen);
    /// URL of the service to protect, like http://127.0.0.1:3000
    upstream: ServiceUrl = "" => (|it| it.upstream);
    /// Address of the operators' listener; `off` for none
    admin: AddressOrOff, Fixed => (|it| it.admin);
    /// File of the admin token; created with mode 0600 if it does not exist
    admin_token_file: Option<Path> = "PATH.admin-token beside a file: store, else ./hapax.admin-token",
        Fixed => (|it| it.admin_token_file);
    /// File to which operators' decisions are appended
    audit_file: Option<Path> = "PATH.audit.jsonl beside a file: store, else ./hapax.audit.jsonl",
        Fixed => (|it| it.audit_file);
    /// File with a line of JSON for each request, with hashes of key and caller; - is standard output
    access_log: Option<Path> = "none", Fixed => (|it| it.access_log);
    /// Store of the records: file:PATH, redis://HOST, rediss://HOST, postgres://USER@HOST/DB, or
    /// memory: (records are lost when the process ends). A file is for one gateway: replicas that have
    /// a file each execute a key once each, and nothing detects that
    store: Store, Fixed => (|it| it.store);
    /// Name of the service among those that share the store; each name has keys of its own. The empty name
    /// continues with records that were written without one
    namespace: Option<ServiceName> =
        "the empty name for file: and memory:; required for redis:, rediss:, redis+sentinel: and postgres:",
        Fixed => (|it| it.namespace);
    /// Reject a start without a store that was used before, rather than create one: a new store has no
    /// records, so that retries of earlier requests execute again. Leave it out for the first start
    store_must_exist: Flag, Fixed => (|it| it.store_must_exist);
    /// Cache from which outcomes are replayed, in front of the store: memory:, redis://HOST or
    /// rediss://HOST. The outcome of a released key may be replayed from it for another minute
    cache: Option<Cache>, Fixed => (|it| it.cache);
    /// File of the secrets that name and seal records: 64 hexadecimal digits, or a ring of secrets
    secret_file: Option<Path> = "for a file: store created beside it; for others none",
        Fixed => (|it| it.secret_file);
    /// Interval at which operations whose outcome is unknown are reconciled without a retry, under `on_unknown`
    /// reconcile; varied by a quarter, and longer after requests without a verdict. 0s for never
    reconcile_every: Time, Fixed => (|it| it.reconcile_every);
    /// Largest number of operations that are reconciled in an interval
    reconcile_limit: Connections, Fixed => (|it| it.reconcile_limit);
    /// URL that decides by GET whether a request with a key is allowed, before it is executed or
    /// replayed. It gets the request's headers, and X-Forwarded-Method, -Uri, -Host, -Proto and
    /// -For. 2xx allows; 3xx and 4xx are the client's response; anything else is 503. Requests
    /// without a key are not checked: your service authenticates them itself
    auth_url: Url = "a replay checks no credentials" => (
        get |it| it.auth.as_ref().map(|auth| &auth.url),
        set |it, url| it.auth = Some(ForwardAuth::new(url))
    );
    /// Timeout of `auth_url`
    auth_timeout: Time = "2s" => (
        |it| it.auth, |auth| auth.timeout, needs auth_url ": there is no auth request"
    );
    /// Headers of the auth response whose values together name the caller, instead of `scope`; a
    /// response without one of them is 503. They are copied like those of `auth_copy`
    auth_scope: Headers => (|it| it.auth, |auth| auth.scope, needs auth_url ": there is no answer");
    /// Headers of the auth response that your service gets; it gets none of these names from
    /// clients
    auth_copy: Headers => (|it| it.auth, |auth| auth.copy, needs auth_url ": there is no answer");
    /// Keys of the issuer of bearer tokens, where a claim names the caller (`scope` jwt:CLAIM): a file with a JWK Set,
    /// read at the start and on a reload; or its URL, read every five minutes, and for a token with an unknown key
    /// every ten seconds at most. A token that these keys do not verify is 401. Without it `auth_url` verifies tokens
    jwt_keys: Option<Keys> = "none" => (|it| it.jwt.keys);
    /// Issuer of the tokens: what their claim `iss` must be
    jwt_issuer: Option<Word> = "none" => (|it| it.jwt.issuer);
    /// Audience of the tokens: what their claim `aud` must be, or contain
    jwt_audience: Option<Word> = "none" => (|it| it.jwt.audience);
    /// Memory of the whole process: 192 KiB for each of `max_connections`, 32 MiB for the program,
    /// and the rest for the store, deferred outcomes, and bodies
    max_memory: Size, Fixed => (|it| it.limits.memory);
    /// Connections of clients; each request in progress on an HTTP/2 connection after its first
    /// counts as one more. At the limit, the oldest connection that has sent nothing is closed for
    /// a new one; without such a one, new ones wait
    max_connections: Connections, Fixed => (|it| it.limits.connections);
    /// Connections of one peer address (IPv6: of its /64). At the limit its oldest connection that
    /// has sent nothing is closed, else the new one. Addresses of `trust_forwarded` have no limit
    max_connections_per_peer: Option<Connections> = "three quarters of `max_connections`",
        Fixed => (|it| it.limits.connections_per_peer);
    /// Duplicates of one key that may wait
    max_waiters: Count<usize>, Fixed => (|it| it.max_waiters);
    /// Time in which a client must send a request's head, and for which it may leave a connection
    /// idle
    head_timeout: Time, Fixed => (|it| it.limits.head_timeout);
    /// Time for which a client may send nothing in the middle of a body, or read nothing of a
    /// response
    body_timeout: Time, Fixed => (|it| it.limits.stall);
    /// Time in which the store must answer; after it the store counts as unreachable
    store_timeout: Time, Fixed => (|it| it.store_timeout);
    /// Time for which a start waits for a store whose server is unreachable or starting up; 0s
    /// fails at once. Until then connections wait, and /readyz is 503
    store_wait: Time => (|it| it.store_wait);
    /// On SIGTERM or SIGINT (Ctrl-C): time in which requests in progress may finish and the store may
    /// accept deferred outcomes; a second signal, at least a second later, ends at once
    drain_timeout: Time => (|it| it.drain_timeout);
    /// On SIGTERM or SIGINT: time for which requests are still accepted while /readyz is already
    /// 503, so that load balancers choose other servers; `drain_timeout` begins after it
    drain_delay: Time = "0s" => (|it| it.drain_delay);
    /// Certificate of the listener, with its chain, in PEM; read again when it changes, and on
    /// SIGHUP
    tls_cert: Path = "no TLS", Fixed => (
        get |it| it.transport.tls.as_ref().map(|tls| &tls.certificate),
        set |it, certificate| it.transport.tls = Some(ListenTls {
            certificate, key: PathBuf::new(), client_ca: None
        })
    );
    /// Private key of `tls_cert`, in PEM
    tls_key: Path, Fixed => (
        |it| it.transport.tls, |tls| tls.key, needs tls_cert ": set both, or neither"
    );
    /// Authorities of clients' certificates, in PEM; clients without a certificate are then
    /// rejected
    tls_client_ca: Option<Path>, Fixed => (
        |it| it.transport.tls, |tls| tls.client_ca, needs tls_cert ": without it the listener has no TLS"
    );
    /// Requests that one HTTP/2 connection may have open, while half of `max_connections` are free
    max_streams: Count<u32>, Fixed => (|it| it.transport.streams);
    /// Peers whose Forwarded and X-Forwarded-* headers are trusted and extended, rather than
    /// replaced: networks and addresses, `loopback`, or `none`
    trust_forwarded: Networks, Fixed => (|it| it.transport.trusted);
    /// Protocol of `upstream`; with `auto` the upstream chooses by ALPN if its URL begins with
    /// https, else HTTP/1.1
    upstream_protocol: Choice<UpstreamProtocol>, Fixed => (|it| it.transport.upstream_protocol);
    /// Root certificates that are trusted behind https URLs, in PEM
    upstream_ca: Option<Path> = "the system's", Fixed => (|it| it.transport.upstream_tls.ca);
    /// Certificate for servers behind https URLs that request one, in PEM
    upstream_cert: Path, Fixed => (
        get |it| it.transport.upstream_tls.client.as_ref().map(|(certificate, _)| certificate),
        set |it, certificate| it.transport.upstream_tls.client = Some((certificate, PathBuf::new()))
    );
    /// Private key of `upstream_cert`, in PEM
    upstream_key: Path, Fixed => (
        |it| it.transport.upstream_tls.client, |client| client.1,
        needs upstream_cert ": set both, or neither"
    );
    /// Time in which a connection to the upstream must be established; nothing is sent before
    connect_timeout: Time, Fixed => (|it| it.transport.connect_timeout);
    /// Time for which a connection to the upstream may be idle and used again: less than the
    /// upstream's own limit
    upstream_idle: Time, Fixed => (|it| it.transport.upstream_idle);
    /// Use a separate connection to the upstream for each request with a key: a late second
    /// response to one request is then never taken for the response to the next
    fresh_connections: Flag, Fixed => (|it| it.transport.fresh_connections);
    /// Format of log lines
    log_format: Choice<LogFormat>, Fixed => (|it| it.log.format);
    /// Log level: error, warn, info, debug, or directives like `info,hapax_gateway=debug`
    log_level: Level, Fixed => (|it| it.log.level);
}

const NO_ORIGINS: &str = ": no page may do anything";

settings! {
    /// The settings of a policy, for all routes or for one.
    POLICY_SETTINGS: [Setting<PolicyConfig>];
    /// Whether protected methods need a key
    key: Choice<KeyRule> => (|it| it.key);
    /// Header that contains the key, like X-Idempotency-Key or PayPal-Request-Id; it is forwarded
    /// unchanged
    key_header: Header => (|it| it.key_header);
    /// Grammar of keys. strict: quoted strings only; lenient: bare values as well
    grammar: Choice<Grammar> => (|it| it.grammar);
    /// Protected methods
    methods: Methods => (|it| it.methods);
    /// Request headers, cookies as cookie:NAME, and claims of a bearer token as jwt:CLAIM, like jwt:sub, whose values
    /// together name the caller, so that the same key of two callers is two keys; `none` gives all callers one scope,
    /// in which they get each other's responses. A claim needs `jwt_keys`, `jwt_issuer` and `jwt_audience`, or `auth_url`
    scope: Option<Callers> = "authorization" => (|it| it.scope);
    /// Handling of a request with a key in which a scope header is missing or empty. reject: 400;
    /// shared: one scope for all such callers, who get each other's responses
    scope_missing: Option<Choice<MissingScope>> = "reject" => (
        get |it| Some(&it.scope_missing),
        try_set |it, missing| {
            it.scope_missing = missing;
            match it.scope {
                Some(ScopeConfig::Everyone) => Err(ConfigError::NoEffect {
                    field: "scope_missing",
                    relation: "contradicts",
                    other: "scope",
                    why: " none: no header can be missing",
                }),
                _ => Ok(()),
            }
        }
    );
    /// Comparison of the body of a retry. canonical: JSON by its values, form data by its pairs or
    /// parts in order, other bodies by their bytes; raw: all bodies by their bytes; none: not compared
    fingerprint_body: Choice<BodyForm> => (
        get |it| Some(it.fingerprint.body_form()),
        try_set |it, body| set_fingerprint(it, "fingerprint_body", body, None, None)
    );
    /// Parts of a JSON body that are compared, as JSON pointers like /amount,/currency; `none` for
    /// all of it
    fingerprint_only: Pointers => (
        get |it| Some(match it.fingerprint.json_parts() {
            JsonParts::Only(pointers) => Some(pointers.clone()),
            JsonParts::All | JsonParts::Except(_) => None,
        }),
        try_set |it, only| set_json_parts(it, "fingerprint_only", only.map(JsonParts::Only))
    );
    /// Parts of a JSON body that are not compared, as JSON pointers like /sent_at
    fingerprint_except: Pointers => (
        get |it| Some(match it.fingerprint.json_parts() {
            JsonParts::Except(pointers) => Some(pointers.clone()),
            JsonParts::All | JsonParts::Only(_) => None,
        }),
        try_set |it, except| set_json_parts(it, "fingerprint_except", except.map(JsonParts::Except))
    );
    /// Headers that are compared too
    fingerprint_headers: Headers => (
        get |it| Some(it.fingerprint.headers().to_vec()),
        try_set |it, headers| {
            let body = it.fingerprint.body_form();
            set_fingerprint(it, "fingerprint_headers", body, Some(headers), None)
        }
    );
    /// Time for which a crashed process blocks its key
    lease: Time => (|it| it.lease);
    /// Time for which an outcome is replayed
    retention: Time => (|it| it.retention);
    /// Handling of a duplicate in flight: 409, or it waits for the response
    in_flight: InFlightRule => (|it| it.in_flight);
    /// Time for which a duplicate waits, if `in_flight` is wait
    wait_for: Time = "5s" => (
        get |it| match it.in_flight {
            InFlight::Wait(time) => Some(time),
            InFlight::Reject => None,
        },
        try_set |it, time| match &mut it.in_flight {
            InFlight::Wait(wait_for) => { *wait_for = time; Ok(()) }
            InFlight::Reject => {
                Err(ConfigError::needs("wait_for", "in_flight", " wait: no duplicate waits"))
            }
        }
    );
    /// Handling of a retry when the outcome is unknown. block: 409 until an operator resolves it
    /// (at-most-once); reexecute: it executes again and may take effect twice (at-least-once);
    /// reconcile: the response of `reconcile_url` decides
    on_unknown: Choice<OnUnknown> => (|it| it.on_unknown);
    /// URL that decides for `on_unknown` reconcile whether an operation happened: a GET with
    /// Idempotency-Operation-Id and Idempotency-Fence. 2xx: its response, which is replayed. 404
    /// with `Idempotency-Outcome: did-not-happen`: it did not happen, and the service rejects this
    /// fence from now on. Anything else: not known yet. Probed at start and on reload
    reconcile_url: Option<Url> => (|it| it.reconcile_url);
    /// File with the value of Authorization in requests to `reconcile_url` that no retry causes: those of
    /// `reconcile_every` and `hapax keys reconcile`. It replaces the credentials of the caller, which no record has;
    /// `none` if the URL needs none. A route with another `reconcile_url` does not inherit it
    reconcile_authorization: Option<Authorization> = "operations of callers with credentials wait for retries"
        => (|it| it.reconcile_authorization);
    /// Responses that are stored and replayed: `standard` (2xx, most 3xx and most 4xx), `stripe-v1` (all
    /// but 307, 308, 409 and 429) or `success-only` (2xx). A 307 or 308 with `Location` releases the key; a retry of the
    /// same request gets the redirect again. Under `standard` the outcome of other 5xx is unknown, of 503
    /// too unless `on_unknown` is reexecute
    profile: ProfileName => (|it| it.profile);
    /// Statuses that are stored and replayed, whatever the profile, like 404, 5xx or 500-502;
    /// `none` for none
    final_statuses: Statuses => (|it| it.statuses.final_statuses);
    /// Statuses after which a retry executes, because the service returns them only before any
    /// effect
    retryable_statuses: Statuses => (|it| it.statuses.retryable_statuses);
    /// Statuses after which the outcome is unknown
    unknown_statuses: Statuses => (|it| it.statuses.unknown_statuses);
    /// Handling of requests while the store is unreachable. closed: 503; open: they execute
    /// unprotected, which needs `on_unknown` reexecute
    store_outage: Choice<StoreOutage> => (|it| it.store_outage);
    /// Handling of a response whose outcome the store has not accepted. deliver: the client gets
    /// it, marked as pending; withhold: 503
    completion_outage: Choice<CompletionOutage> => (|it| it.completion_outage);
    /// Stream responses: their keys are final at the headers, and only the status is stored
    stream: Flag = "only text/event-stream" => (|it| it.stream);
    /// Send Idempotency-Expires: the time from which a key may be used anew
    expires: Flag => (|it| it.expires);
    /// Largest body of a request with a key
    max_request_body: Size => (|it| it.max_request_body);
    /// Largest body of a response that is stored
    max_response_body: Size => (|it| it.max_response_body);
    /// Time in which the upstream must answer; after it the outcome is unknown
    upstream_timeout: Time = "60s", Unprotected => (|it| it.upstream_timeout);
    /// Keys of one caller that may be in flight at once, in this process; a further one gets 429. 0
    /// for any number
    max_in_flight_per_scope: Count<u32> => (
        get |it| Some(it.max_in_flight_per_scope.map_or(0, NonZeroU32::get)),
        set |it, count| it.max_in_flight_per_scope = NonZeroU32::new(count)
    );
    /// URL of the documentation of the API's rejections; `none` for none
    docs_url: DocsUrlOrNone, Unprotected => (|it| it.docs_url);
    /// Replay Set-Cookie too
    replay_set_cookie: Flag => (|it| it.replay_set_cookie);
    /// Origins of web pages that may use the API, like https://shop.example, or `*`; with `none`
    /// the service handles CORS. With origins the gateway answers preflights
    cors_origins: OriginsOrNone, Unprotected => (
        get |it| Some(it.cors.as_ref().map(|cors| cors.origins.clone())),
        set |it, origins| it.cors = origins.map(Cors::new)
    );
    /// Methods that web pages of `cors_origins` may send, or `*`
    cors_methods: PageMethods = "GET,HEAD,POST,PUT,PATCH,DELETE", Unprotected =>
        (|it| it.cors, |cors| cors.methods, needs cors_origins NO_ORIGINS);
    /// Headers that web pages of `cors_origins` may send, or `*`; the key header and the scope
    /// headers are always included
    cors_headers: PageHeaders = "authorization,content-type", Unprotected =>
        (|it| it.cors, |cors| cors.headers, needs cors_origins NO_ORIGINS);
    /// Headers of responses that web pages of `cors_origins` may read, besides Idempotency-*,
    /// Retry-After and Link
    cors_expose: Headers = "none", Unprotected =>
        (|it| it.cors, |cors| cors.expose, needs cors_origins NO_ORIGINS);
    /// Whether web pages of `cors_origins` may send cookies and other credentials
    cors_credentials: Flag = "false", Unprotected =>
        (|it| it.cors, |cors| cors.credentials, needs cors_origins NO_ORIGINS);
    /// Time for which a browser may store the response to a preflight
    cors_max_age: Option<Time> = "the browser's default", Unprotected =>
        (|it| it.cors, |cors| cors.max_age, needs cors_origins NO_ORIGINS);
}

settings! {
    /// The settings of a route alone.
    ROUTE_SETTINGS: [Setting<RouteConfig>];
    /// Paths of the route, like /payments, /orders/{id} or /v2/{*rest}
    path: Name = "" => (|it| it.path);
    /// Name of the route in metrics
    name: Option<Name> = "its path" => (|it| it.name);
    /// Only count the results that protection would have; the requests pass through
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

/// Sets the parts of a request that are compared; headers and parts of JSON that are not given
/// stay.
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
