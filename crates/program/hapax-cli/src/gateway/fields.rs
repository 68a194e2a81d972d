//! What can be said by flags, by the environment and in a file: one list for all three, so that they
//! cannot drift apart. A flag `--max-memory` is `HAPAX_MAX_MEMORY` and `max_memory`.

use std::path::PathBuf;

use clap::Args;
use clap::builder::BoolishValueParser;
use hapax_gateway::{ByteSize, CacheUrl, StoreUrl, UrlText};
use hapax_http::classify::Profile;
use serde::{Deserialize, Serialize};

use super::fingerprint::{BodyFormArg, PointerArg};
use super::methods::{AnyMethodArg, MethodArg};
use super::transport::{ProtocolArg, TrustedArg};
use super::value_args::{
    AdminArg, CompletionOutageArg, DocsUrlArg, DurationArg, GrammarArg, HeaderArg, InFlightArg,
    KeyRuleArg, ListenArg, OnUnknownArg, ScopeMissingArg, StatusArg, StoreOutageArg, UrlArg, list,
    statuses, text, trimmed,
};
use crate::logging::LogFormat;

/// `[gateway]`: what there is one of.
#[derive(Clone, Debug, Default, Args, Deserialize, Serialize)]
#[serde(deny_unknown_fields, default)]
pub(super) struct GatewayFields {
    /// Where clients connect [default: 127.0.0.1:8080]
    #[arg(long, env = "HAPAX_LISTEN", value_name = "ADDR")]
    #[serde(with = "text")]
    pub(super) listen: Option<ListenArg>,

    /// The service to protect, like http://127.0.0.1:3000
    #[arg(long, env = "HAPAX_UPSTREAM", value_name = "URL")]
    #[serde(with = "text")]
    pub(super) upstream: Option<UrlArg>,

    /// The operators' listener; `off` for none [default: 127.0.0.1:9090]
    #[arg(long, env = "HAPAX_ADMIN", value_name = "ADDR")]
    #[serde(with = "text")]
    pub(super) admin: Option<AdminArg>,

    /// The file of the token that operators show; made with mode 0600 if there is none [default:
    /// PATH.admin-token beside a file: store, else ./hapax.admin-token]
    #[arg(long, env = "HAPAX_ADMIN_TOKEN_FILE", value_name = "PATH")]
    pub(super) admin_token_file: Option<PathBuf>,

    /// The file that operators' decisions are appended to [default: PATH.audit.jsonl beside a file:
    /// store, else ./hapax.audit.jsonl]
    #[arg(long, env = "HAPAX_AUDIT_FILE", value_name = "PATH")]
    pub(super) audit_file: Option<PathBuf>,

    /// A file that gets a line of JSON for each request, without key and caller; - is standard
    /// output [default: none]
    #[arg(long, env = "HAPAX_ACCESS_LOG", value_name = "PATH")]
    pub(super) access_log: Option<PathBuf>,

    /// Where records are kept: file:PATH, redis://HOST, rediss://HOST, postgres://USER@HOST/DB, or
    /// memory: (forgotten at the end) [default: file:./hapax.db]
    #[arg(long, env = "HAPAX_STORE", value_name = "URL", hide_env_values = true)]
    #[serde(with = "text")]
    pub(super) store: Option<UrlText<StoreUrl>>,

    /// What answers replays in front of the store: memory:, redis://HOST or rediss://HOST. What an
    /// operator releases may be replayed from it for another minute
    #[arg(long, env = "HAPAX_CACHE", value_name = "URL", hide_env_values = true)]
    #[serde(with = "text")]
    pub(super) cache: Option<UrlText<CacheUrl>>,

    /// The secrets that hide keys and seal records: 64 hexadecimal digits, or a ring of them
    /// [default: made beside a file: store; for others there are none]
    #[arg(long, env = "HAPAX_SECRET_FILE", value_name = "PATH")]
    pub(super) secret_file: Option<PathBuf>,

    /// Asked by GET whether a request with a key is allowed, before it is executed or answered from
    /// the store: with its headers, and X-Forwarded-Method, -Uri, -Host, -Proto and -For. 2xx: it
    /// goes on; 3xx and 4xx are what the client gets; anything else is 503. Requests without a key
    /// are not asked about: your service authenticates them itself [default: a replay checks no
    /// credentials]
    #[arg(long, env = "HAPAX_AUTH_URL", value_name = "URL", hide_env_values = true)]
    #[serde(with = "text")]
    pub(super) auth_url: Option<UrlArg>,

    /// Within which time --auth-url must have answered [default: 2s]
    #[arg(long, env = "HAPAX_AUTH_TIMEOUT", value_name = "DUR")]
    #[serde(with = "text")]
    pub(super) auth_timeout: Option<DurationArg>,

    /// Headers of the auth answer whose values together say who the caller is, instead of --scope; an
    /// answer without one of them is 503. They are copied like those of --auth-copy
    #[arg(long, env = "HAPAX_AUTH_SCOPE", value_name = "HEADER,…", value_delimiter = ',')]
    #[serde(with = "list")]
    pub(super) auth_scope: Option<Vec<HeaderArg>>,

    /// Headers of the auth answer that your service gets; from clients it gets none of these names
    #[arg(long, env = "HAPAX_AUTH_COPY", value_name = "HEADER,…", value_delimiter = ',')]
    #[serde(with = "list")]
    pub(super) auth_copy: Option<Vec<HeaderArg>>,

    /// The memory that the process may take in all: 192 KiB for each of --max-connections, 32 MiB
    /// for the program, and the rest for the store, outcomes held back, and bodies [default: 512MiB]
    #[arg(long, env = "HAPAX_MAX_MEMORY", value_name = "SIZE")]
    #[serde(with = "text")]
    pub(super) max_memory: Option<ByteSize>,

    /// Connections of clients; each request under way on an HTTP/2 connection after its first counts
    /// as one more. When all are taken, the oldest connection that has sent nothing is closed for a
    /// new one; without such a one, new ones wait [default: 1024]
    #[arg(long, env = "HAPAX_MAX_CONNECTIONS", value_name = "N", value_parser = clap::value_parser!(u32).range(1..=1_000_000))]
    pub(super) max_connections: Option<u32>,

    /// Connections of one peer address (IPv6: of its /64). At the bound its oldest connection that has
    /// sent nothing is closed, else the new one. Addresses of --trust-forwarded have no bound [default: three quarters of --max-connections]
    #[arg(long, env = "HAPAX_MAX_CONNECTIONS_PER_PEER", value_name = "N", value_parser = clap::value_parser!(u32).range(1..=1_000_000))]
    pub(super) max_connections_per_peer: Option<u32>,

    /// Copies of one key that may wait [default: 100]
    #[arg(long, env = "HAPAX_MAX_WAITERS", value_name = "N")]
    pub(super) max_waiters: Option<usize>,

    /// How long a client may take to send a request's head, or leave a connection idle
    /// [default: 30s]
    #[arg(long, env = "HAPAX_HEAD_TIMEOUT", value_name = "DUR")]
    #[serde(with = "text")]
    pub(super) head_timeout: Option<DurationArg>,

    /// How long a client may be silent in the middle of a body, or take nothing of an answer
    /// [default: 30s]
    #[arg(long, env = "HAPAX_BODY_TIMEOUT", value_name = "DUR")]
    #[serde(with = "text")]
    pub(super) body_timeout: Option<DurationArg>,

    /// How long the store may be silent before it counts as unreachable [default: 2s]
    #[arg(long, env = "HAPAX_STORE_TIMEOUT", value_name = "DUR")]
    #[serde(with = "text")]
    pub(super) store_timeout: Option<DurationArg>,

    /// How long a start waits for a store whose server is unreachable or starting up; 0s gives up at
    /// once. Until then connections wait, and /readyz is 503 [default: 30s]
    #[arg(long, env = "HAPAX_STORE_WAIT", value_name = "DUR")]
    #[serde(with = "text")]
    pub(super) store_wait: Option<DurationArg>,

    /// On SIGTERM or SIGINT (Ctrl-C): how long work in hand may take to finish; another one, a second
    /// later or more, ends at once [default: 25s]
    #[arg(long, env = "HAPAX_DRAIN_TIMEOUT", value_name = "DUR")]
    #[serde(with = "text")]
    pub(super) drain_timeout: Option<DurationArg>,

    /// On SIGTERM or SIGINT: how long requests are still accepted while /readyz is 503 already, so that
    /// balancers send them elsewhere; --drain-timeout begins after it [default: 0s]
    #[arg(long, env = "HAPAX_DRAIN_DELAY", value_name = "DUR")]
    #[serde(with = "text")]
    pub(super) drain_delay: Option<DurationArg>,

    /// The listener's certificate, with its chain, in PEM; read again when it changes, and on SIGHUP
    /// [default: no TLS]
    #[arg(long, env = "HAPAX_TLS_CERT", value_name = "PATH")]
    pub(super) tls_cert: Option<PathBuf>,

    /// Its private key, in PEM
    #[arg(long, env = "HAPAX_TLS_KEY", value_name = "PATH")]
    pub(super) tls_key: Option<PathBuf>,

    /// Who signs clients' certificates, in PEM: then clients without one are not served
    #[arg(long, env = "HAPAX_TLS_CLIENT_CA", value_name = "PATH")]
    pub(super) tls_client_ca: Option<PathBuf>,

    /// Requests that one HTTP/2 connection may have open, as long as half of --max-connections are
    /// free [default: 100]
    #[arg(long, env = "HAPAX_MAX_STREAMS", value_name = "N")]
    pub(super) max_streams: Option<u32>,

    /// Whose Forwarded and X-Forwarded-* headers are believed and added to, rather than replaced:
    /// networks and addresses, `loopback`, or `none` [default: loopback]
    #[arg(long, env = "HAPAX_TRUST_FORWARDED", value_name = "NET,…", value_delimiter = ',')]
    #[serde(with = "list")]
    pub(super) trust_forwarded: Option<Vec<TrustedArg>>,

    /// What --upstream is spoken to in; `auto` is what it chooses behind https, else HTTP/1.1
    /// [default: auto]
    #[arg(long, env = "HAPAX_UPSTREAM_PROTOCOL", value_enum)]
    pub(super) upstream_protocol: Option<ProtocolArg>,

    /// The root certificates believed behind https URLs, in PEM [default: the system's]
    #[arg(long, env = "HAPAX_UPSTREAM_CA", value_name = "PATH")]
    pub(super) upstream_ca: Option<PathBuf>,

    /// The certificate shown to servers behind https URLs that ask for one, in PEM
    #[arg(long, env = "HAPAX_UPSTREAM_CERT", value_name = "PATH")]
    pub(super) upstream_cert: Option<PathBuf>,

    /// Its private key, in PEM
    #[arg(long, env = "HAPAX_UPSTREAM_KEY", value_name = "PATH")]
    pub(super) upstream_key: Option<PathBuf>,

    /// How long a connection to the upstream may take to be made; nothing is sent before
    /// [default: 5s]
    #[arg(long, env = "HAPAX_CONNECT_TIMEOUT", value_name = "DUR")]
    #[serde(with = "text")]
    pub(super) connect_timeout: Option<DurationArg>,

    /// How long a connection to the upstream may be idle and be used again: less than after which the
    /// upstream drops it [default: 1s]
    #[arg(long, env = "HAPAX_UPSTREAM_IDLE", value_name = "DUR")]
    #[serde(with = "text")]
    pub(super) upstream_idle: Option<DurationArg>,

    /// Give each request with a key a connection to the upstream of its own: a late second answer to
    /// one request is then never taken for the answer to the next [default: false]
    #[arg(long, env = "HAPAX_FRESH_CONNECTIONS", num_args = 0..=1, require_equals = true, default_missing_value = "true", value_parser = BoolishValueParser::new(), value_name = "BOOL")]
    pub(super) fresh_connections: Option<bool>,

    /// How log lines look [default: text]
    #[arg(long, env = "HAPAX_LOG_FORMAT", value_enum)]
    pub(super) log_format: Option<LogFormat>,

    /// What is logged: error, warn, info, debug, or directives like `info,hapax_gateway=debug`
    /// [default: info]
    #[arg(long, env = "HAPAX_LOG", value_name = "LEVEL")]
    pub(super) log_level: Option<String>,
}

impl GatewayFields {
    /// What is not said here is as `other` says.
    pub(super) fn or(self, other: Self) -> Self {
        Self {
            listen: self.listen.or(other.listen),
            upstream: self.upstream.or(other.upstream),
            admin: self.admin.or(other.admin),
            admin_token_file: self.admin_token_file.or(other.admin_token_file),
            audit_file: self.audit_file.or(other.audit_file),
            access_log: self.access_log.or(other.access_log),
            store: self.store.or(other.store),
            cache: self.cache.or(other.cache),
            secret_file: self.secret_file.or(other.secret_file),
            auth_url: self.auth_url.or(other.auth_url),
            auth_timeout: self.auth_timeout.or(other.auth_timeout),
            auth_scope: self.auth_scope.or(other.auth_scope),
            auth_copy: self.auth_copy.or(other.auth_copy),
            max_memory: self.max_memory.or(other.max_memory),
            max_connections: self.max_connections.or(other.max_connections),
            max_connections_per_peer: self
                .max_connections_per_peer
                .or(other.max_connections_per_peer),
            max_waiters: self.max_waiters.or(other.max_waiters),
            head_timeout: self.head_timeout.or(other.head_timeout),
            body_timeout: self.body_timeout.or(other.body_timeout),
            store_timeout: self.store_timeout.or(other.store_timeout),
            store_wait: self.store_wait.or(other.store_wait),
            drain_timeout: self.drain_timeout.or(other.drain_timeout),
            drain_delay: self.drain_delay.or(other.drain_delay),
            tls_cert: self.tls_cert.or(other.tls_cert),
            tls_key: self.tls_key.or(other.tls_key),
            tls_client_ca: self.tls_client_ca.or(other.tls_client_ca),
            max_streams: self.max_streams.or(other.max_streams),
            trust_forwarded: self.trust_forwarded.or(other.trust_forwarded),
            upstream_protocol: self.upstream_protocol.or(other.upstream_protocol),
            upstream_ca: self.upstream_ca.or(other.upstream_ca),
            upstream_cert: self.upstream_cert.or(other.upstream_cert),
            upstream_key: self.upstream_key.or(other.upstream_key),
            connect_timeout: self.connect_timeout.or(other.connect_timeout),
            upstream_idle: self.upstream_idle.or(other.upstream_idle),
            fresh_connections: self.fresh_connections.or(other.fresh_connections),
            log_format: self.log_format.or(other.log_format),
            log_level: self.log_level.or(other.log_level),
        }
    }
}

/// `[policy]`, and the like in each `[[route]]`.
#[derive(Clone, Debug, Default, Args, Deserialize, Serialize)]
#[serde(deny_unknown_fields, default)]
pub(super) struct PolicyFields {
    /// Whether protected methods need a key [default: optional]
    #[arg(long, env = "HAPAX_KEY", value_enum)]
    pub(super) key: Option<KeyRuleArg>,

    /// The header that has the key, like X-Idempotency-Key or PayPal-Request-Id; it is forwarded as it
    /// came [default: idempotency-key]
    #[arg(long, env = "HAPAX_KEY_HEADER", value_name = "HEADER")]
    #[serde(with = "text")]
    pub(super) key_header: Option<HeaderArg>,

    /// What a key is: a quoted string, or a bare value as well [default: lenient]
    #[arg(long, env = "HAPAX_GRAMMAR", value_enum)]
    pub(super) grammar: Option<GrammarArg>,

    /// Protected methods [default: POST,PATCH]
    #[arg(long, env = "HAPAX_METHODS", value_name = "METHOD,…", value_delimiter = ',')]
    #[serde(with = "list")]
    pub(super) methods: Option<Vec<MethodArg>>,

    /// The request headers whose values together name the caller, so that the same key of two
    /// callers is two keys; `none` gives all callers one scope, in which they get each other's
    /// answers [default: authorization]
    #[arg(long, env = "HAPAX_SCOPE", value_name = "HEADER,…", value_delimiter = ',')]
    #[serde(with = "list")]
    pub(super) scope: Option<Vec<HeaderArg>>,

    /// A request with a key in which a scope header is missing or empty. reject: 400; shared: one
    /// scope for all such callers, who get each other's answers [default: reject]
    #[arg(long, env = "HAPAX_SCOPE_MISSING", value_enum)]
    pub(super) scope_missing: Option<ScopeMissingArg>,

    /// How the body of a retry is compared: JSON and form data by what they say, all by its bytes, or
    /// not at all [default: canonical]
    #[arg(long, env = "HAPAX_FINGERPRINT_BODY", value_enum)]
    pub(super) fingerprint_body: Option<BodyFormArg>,

    /// Of a JSON body only what these pointers lead to counts, like /amount,/currency; `none` for all
    /// of it [default: none]
    #[arg(long, env = "HAPAX_FINGERPRINT_ONLY", value_name = "POINTER,…", value_delimiter = ',')]
    #[serde(with = "list")]
    pub(super) fingerprint_only: Option<Vec<PointerArg>>,

    /// Of a JSON body all but what these pointers lead to counts, like /sent_at [default: none]
    #[arg(long, env = "HAPAX_FINGERPRINT_EXCEPT", value_name = "POINTER,…", value_delimiter = ',')]
    #[serde(with = "list")]
    pub(super) fingerprint_except: Option<Vec<PointerArg>>,

    /// Headers that count too [default: none]
    #[arg(long, env = "HAPAX_FINGERPRINT_HEADERS", value_name = "HEADER,…", value_delimiter = ',')]
    #[serde(with = "list")]
    pub(super) fingerprint_headers: Option<Vec<HeaderArg>>,

    /// How long a dead process blocks its key [default: 30s]
    #[arg(long, env = "HAPAX_LEASE", value_name = "DUR")]
    #[serde(with = "text")]
    pub(super) lease: Option<DurationArg>,

    /// How long an outcome is replayed [default: 24h]
    #[arg(long, env = "HAPAX_RETENTION", value_name = "DUR")]
    #[serde(with = "text")]
    pub(super) retention: Option<DurationArg>,

    /// A copy of a request that is still running: 409, or it waits for the answer [default: reject]
    #[arg(long, env = "HAPAX_IN_FLIGHT", value_enum)]
    pub(super) in_flight: Option<InFlightArg>,

    /// How long it waits [default: 5s]
    #[arg(long, env = "HAPAX_WAIT_FOR", value_name = "DUR")]
    #[serde(with = "text")]
    pub(super) wait_for: Option<DurationArg>,

    /// The answer to a retry when the outcome is unknown. block: 409 until an operator resolves it
    /// (at-most-once); reexecute: it executes again and may take effect twice (at-least-once);
    /// reconcile: --reconcile-url decides [default: block]
    #[arg(long, env = "HAPAX_ON_UNKNOWN", value_enum)]
    pub(super) on_unknown: Option<OnUnknownArg>,

    /// Needed by --on-unknown reconcile: a GET here, with Idempotency-Operation-Id and
    /// Idempotency-Fence, asks what became of an operation. 2xx: its answer, which is replayed. 404
    /// with `Idempotency-Outcome: did-not-happen`: it did not happen, and the service rejects this
    /// fence from now on. Anything else: not known yet. Probed at start and on reload
    #[arg(long, env = "HAPAX_RECONCILE_URL", value_name = "URL", hide_env_values = true)]
    #[serde(with = "text")]
    pub(super) reconcile_url: Option<UrlArg>,

    /// Which answers are kept and replayed: `standard` (2xx, 3xx and most 4xx), `stripe-v1` (all but
    /// 409 and 429) or `success-only` (2xx). Under `standard` other 5xx leave open whether it happened,
    /// 503 too unless --on-unknown is reexecute [default: standard]
    #[arg(long, env = "HAPAX_PROFILE", value_name = "NAME")]
    #[serde(with = "text")]
    pub(super) profile: Option<Profile>,

    /// Statuses that are kept and replayed, whatever the profile says, like 404, 5xx or 500-502; `none`
    /// for none [default: none]
    #[arg(long, env = "HAPAX_FINAL_STATUSES", value_name = "STATUS,…", value_delimiter = ',')]
    #[serde(with = "statuses")]
    pub(super) final_statuses: Option<Vec<StatusArg>>,

    /// Statuses after which a retry executes: the service had no effect before it answered so
    /// [default: none]
    #[arg(long, env = "HAPAX_RETRYABLE_STATUSES", value_name = "STATUS,…", value_delimiter = ',')]
    #[serde(with = "statuses")]
    pub(super) retryable_statuses: Option<Vec<StatusArg>>,

    /// Statuses after which the request may or may not have happened [default: none]
    #[arg(long, env = "HAPAX_UNKNOWN_STATUSES", value_name = "STATUS,…", value_delimiter = ',')]
    #[serde(with = "statuses")]
    pub(super) unknown_statuses: Option<Vec<StatusArg>>,

    /// While the store is unreachable. closed: 503; open: requests execute unprotected, which needs
    /// --on-unknown reexecute [default: closed]
    #[arg(long, env = "HAPAX_STORE_OUTAGE", value_enum)]
    pub(super) store_outage: Option<StoreOutageArg>,

    /// Where the store goes away before an outcome is recorded: the client gets the answer, marked as
    /// pending, or 503 [default: deliver]
    #[arg(long, env = "HAPAX_COMPLETION_OUTAGE", value_enum)]
    pub(super) completion_outage: Option<CompletionOutageArg>,

    /// Stream responses: their keys are final at the headers, and only the status is kept [default:
    /// only text/event-stream]
    #[arg(long, env = "HAPAX_STREAM", num_args = 0..=1, require_equals = true, default_missing_value = "true", value_parser = BoolishValueParser::new(), value_name = "BOOL")]
    pub(super) stream: Option<bool>,

    /// Say in Idempotency-Expires when a key may be used anew [default: false]
    #[arg(long, env = "HAPAX_EXPIRES", num_args = 0..=1, require_equals = true, default_missing_value = "true", value_parser = BoolishValueParser::new(), value_name = "BOOL")]
    pub(super) expires: Option<bool>,

    /// The largest body of a request with a key [default: 1MiB]
    #[arg(long, env = "HAPAX_MAX_REQUEST_BODY", value_name = "SIZE")]
    #[serde(with = "text")]
    pub(super) max_request_body: Option<ByteSize>,

    /// The largest body of a response that is kept [default: 1MiB]
    #[arg(long, env = "HAPAX_MAX_RESPONSE_BODY", value_name = "SIZE")]
    #[serde(with = "text")]
    pub(super) max_response_body: Option<ByteSize>,

    /// How long the upstream may be silent; after that the outcome is unknown [default: 60s]
    #[arg(long, env = "HAPAX_UPSTREAM_TIMEOUT", value_name = "DUR")]
    #[serde(with = "text")]
    pub(super) upstream_timeout: Option<DurationArg>,

    /// Keys of one caller that may be in flight at once, in this process; a further one gets 429. 0
    /// for any number [default: 0]
    #[arg(long, env = "HAPAX_MAX_IN_FLIGHT_PER_SCOPE", value_name = "N")]
    pub(super) max_in_flight_per_scope: Option<u32>,

    /// Where the API documents its refusals; `none` for nowhere [default: none]
    #[arg(long, env = "HAPAX_DOCS_URL", value_name = "URL")]
    #[serde(with = "text")]
    pub(super) docs_url: Option<DocsUrlArg>,

    /// Replay Set-Cookie too [default: false]
    #[arg(long, env = "HAPAX_REPLAY_SET_COOKIE", num_args = 0..=1, require_equals = true, default_missing_value = "true", value_parser = BoolishValueParser::new(), value_name = "BOOL")]
    pub(super) replay_set_cookie: Option<bool>,

    /// Pages of which origins may use this, like https://shop.example, or `*`; `none` leaves CORS to
    /// your service. Preflights are answered here [default: none]
    #[arg(long, env = "HAPAX_CORS_ORIGINS", value_name = "ORIGIN,…", value_delimiter = ',', value_parser = trimmed)]
    #[serde(with = "list")]
    pub(super) cors_origins: Option<Vec<String>>,

    /// What they may send, or `*` [default: GET,HEAD,POST,PUT,PATCH,DELETE]
    #[arg(long, env = "HAPAX_CORS_METHODS", value_name = "METHOD,…", value_delimiter = ',')]
    #[serde(with = "list")]
    pub(super) cors_methods: Option<Vec<AnyMethodArg>>,

    /// With which headers, or `*`; the key header and the scope headers are always among them
    /// [default: authorization,content-type]
    #[arg(long, env = "HAPAX_CORS_HEADERS", value_name = "HEADER,…", value_delimiter = ',')]
    #[serde(with = "list")]
    pub(super) cors_headers: Option<Vec<HeaderArg>>,

    /// Which headers of answers they may read, besides Idempotency-*, Retry-After and Link [default:
    /// none]
    #[arg(long, env = "HAPAX_CORS_EXPOSE", value_name = "HEADER,…", value_delimiter = ',')]
    #[serde(with = "list")]
    pub(super) cors_expose: Option<Vec<HeaderArg>>,

    /// Whether they may send cookies and the like [default: false]
    #[arg(long, env = "HAPAX_CORS_CREDENTIALS", num_args = 0..=1, require_equals = true, default_missing_value = "true", value_parser = BoolishValueParser::new(), value_name = "BOOL")]
    pub(super) cors_credentials: Option<bool>,

    /// For how long a browser may keep the answer to a preflight [default: its own choice]
    #[arg(long, env = "HAPAX_CORS_MAX_AGE", value_name = "DUR")]
    #[serde(with = "text")]
    pub(super) cors_max_age: Option<DurationArg>,
}

impl PolicyFields {
    /// What is not said here is as `other` says.
    pub(super) fn or(self, other: Self) -> Self {
        Self {
            key: self.key.or(other.key),
            key_header: self.key_header.or(other.key_header),
            grammar: self.grammar.or(other.grammar),
            methods: self.methods.or(other.methods),
            scope: self.scope.or(other.scope),
            scope_missing: self.scope_missing.or(other.scope_missing),
            fingerprint_body: self.fingerprint_body.or(other.fingerprint_body),
            fingerprint_only: self.fingerprint_only.or(other.fingerprint_only),
            fingerprint_except: self.fingerprint_except.or(other.fingerprint_except),
            fingerprint_headers: self.fingerprint_headers.or(other.fingerprint_headers),
            lease: self.lease.or(other.lease),
            retention: self.retention.or(other.retention),
            in_flight: self.in_flight.or(other.in_flight),
            wait_for: self.wait_for.or(other.wait_for),
            on_unknown: self.on_unknown.or(other.on_unknown),
            reconcile_url: self.reconcile_url.or(other.reconcile_url),
            profile: self.profile.or(other.profile),
            final_statuses: self.final_statuses.or(other.final_statuses),
            retryable_statuses: self.retryable_statuses.or(other.retryable_statuses),
            unknown_statuses: self.unknown_statuses.or(other.unknown_statuses),
            store_outage: self.store_outage.or(other.store_outage),
            completion_outage: self.completion_outage.or(other.completion_outage),
            stream: self.stream.or(other.stream),
            expires: self.expires.or(other.expires),
            max_request_body: self.max_request_body.or(other.max_request_body),
            max_response_body: self.max_response_body.or(other.max_response_body),
            upstream_timeout: self.upstream_timeout.or(other.upstream_timeout),
            max_in_flight_per_scope: self.max_in_flight_per_scope.or(other.max_in_flight_per_scope),
            docs_url: self.docs_url.or(other.docs_url),
            replay_set_cookie: self.replay_set_cookie.or(other.replay_set_cookie),
            cors_origins: self.cors_origins.or(other.cors_origins),
            cors_methods: self.cors_methods.or(other.cors_methods),
            cors_headers: self.cors_headers.or(other.cors_headers),
            cors_expose: self.cors_expose.or(other.cors_expose),
            cors_credentials: self.cors_credentials.or(other.cors_credentials),
            cors_max_age: self.cors_max_age.or(other.cors_max_age),
        }
    }
}
