//! Errors of a configuration.

use std::cell::RefCell;
use std::error::Error;
use std::fmt;
use std::net::SocketAddr;

use hapax_core::PolicyError;
use hapax_http::server::RouteError;
use hapax_http::statuses::StatusOverlap;
use hapax_proxy::ByteSize;
use http::HeaderName;

/// An error that names settings by their fields. A program that reads settings has other names for
/// them, such as flags.
pub trait NamesSettings {
    /// Returns the error as a sentence in which settings have the names that `name` returns.
    fn describe(&self, name: &dyn Fn(&str) -> String) -> String;

    /// Returns the fields that the error names, in the order of the sentence.
    fn fields(&self) -> Vec<String> {
        let fields: RefCell<Vec<String>> = RefCell::default();
        let collect = |field: &str| {
            fields.borrow_mut().push(field.to_owned());
            String::new()
        };
        drop(self.describe(&collect));
        fields.into_inner()
    }

    /// Returns the index of the route that the error is about; `None` where it is about no route.
    fn route(&self) -> Option<usize>;
}

/// Declares errors. A sentence has texts, fields `[field]`, variables that have the name of a field
/// `(variable)`, and errors that name settings themselves `{error}`.
macro_rules! errors {
    ($(#[$meta:meta])* $error:ident {
        $($variant:ident $({ $($value:ident: $type:ty),* })? = { $($part:tt)* })*
    }) => {
        $(#[$meta])*
        pub enum $error {
            $($variant $({ $($value: $type),* })?),*
        }

        impl NamesSettings for $error {
            #[allow(unused_variables, reason = "not every value is in the text")]
            fn describe(&self, name: &dyn Fn(&str) -> String) -> String {
                match self {
                    $(Self::$variant $({ $($value),* })? => [$(errors!(part name, $part)),*].concat(),)*
                }
            }

            fn route(&self) -> Option<usize> {
                if let Self::Route { index, .. } = self { Some(*index) } else { None }
            }
        }

        impl fmt::Display for $error {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str(&self.describe(&|field| format!("`{field}`")))
            }
        }

        impl Error for $error {}
    };
    (part $name:ident, [$field:ident]) => { $name(stringify!($field)) };
    (part $name:ident, ($field:ident)) => { $name($field) };
    (part $name:ident, {$error:ident}) => { $error.describe($name) };
    (part $name:ident, $text:literal) => { format!($text) };
}

errors! {
    /// Errors of a configuration. As text they name the fields of settings.
    #[derive(Clone, PartialEq, Eq, Debug)]
    #[non_exhaustive]
    #[allow(missing_docs, reason = "the message of each variant describes it")]
    ConfigError {
        Value { field: &'static str, error: String } = { (field) ": {error}" }
        NoEffect {
            field: &'static str, relation: &'static str, other: &'static str, why: &'static str
        } = { (field) " {relation} " (other) "{why}" }
        PassingRoute { field: &'static str } = {
            (field) " contradicts `protect = false`: its requests pass through"
        }
        ObserveProtect { protect: bool } = {
            [observe] " contradicts `protect = {protect}`: an observed route is not protected; leave out \
             one of them"
        }
        OnlyAndExcept = {
            [fingerprint_except] " contradicts " [fingerprint_only] ": leave out one of them"
        }
        NotCanonical = {
            [fingerprint_body] " must be `canonical` with " [fingerprint_only] " or "
            [fingerprint_except] ": they are about what JSON says"
        }
        NoUpstream = { [upstream] " is required: the service to protect" }
        Upstream = { [upstream] " must be a URL like http://127.0.0.1:3000" }
        Credentials { field: &'static str } = {
            (field) " must be a URL without a user name and password: no credentials are sent from it; remove them"
        }
        UpstreamPath = { [upstream] " must not have a path: paths are forwarded unchanged" }
        Loop { address: SocketAddr } = {
            [upstream] " is " [listen] " ({address}): the gateway would call itself"
        }
        AdminIsListen { address: SocketAddr } = {
            [admin] " is " [listen] " ({address}): give the operators' listener another port"
        }
        ReconcileTarget = {
            [reconcile_url] " must be a URL like http://127.0.0.1:3000/outcome"
        }
        ReconcileUrl = {
            [on_unknown] " reconcile needs " [reconcile_url] ": set the URL that decides whether an operation happened"
        }
        ReconcileUrlUnused = {
            [reconcile_url] " has no effect without " [on_unknown] " reconcile"
        }
        ReconcileAuthorization { path: String, reason: String, is_missing: bool } = {
            [reconcile_authorization] ": {path}: {reason}"
        }
        ReconcileAuthorizationUnused = {
            [reconcile_authorization] " has no effect without " [on_unknown] " reconcile; a route with another " [reconcile_url] " does not inherit it"
        }
        ReconcileNever = {
            [reconcile_authorization] " has no effect with " [reconcile_every] " 0s and " [admin] " off: neither an interval \
             nor an operator causes a reconcile request without a retry; set one of them"
        }
        AuthTarget = { [auth_url] " must be a URL like http://127.0.0.1:4180/check" }
        AuthLoop { address: SocketAddr } = {
            [auth_url] " is " [listen] " ({address}): the gateway would call itself"
        }
        TwoScopes = {
            [auth_scope] " contradicts " [scope] ": either the auth response or the request names the \
             caller"
        }
        CallerIsNamed = {
            [auth_scope] " contradicts " [scope_missing] ": the auth response must have the headers"
        }
        JwtKeysTarget = {
            [jwt_keys] " must be a file, or a URL like https://login.example/.well-known/jwks.json"
        }
        JwtKeysLoop { address: SocketAddr } = {
            [jwt_keys] " is " [listen] " ({address}): the gateway would call itself"
        }
        ClaimUnverified = {
            [scope] " jwt:CLAIM needs " [jwt_keys] ", " [jwt_issuer] " and " [jwt_audience] ", or " [auth_url]
            ": a token that is not verified names no caller"
        }
        AuthHeader { field: &'static str, header: HeaderName } = {
            (field) " cannot be `{header}`: it belongs to a message, to the gateway or to the client's \
             credentials"
        }
        NoNamespace = {
            [namespace] " is required, since several services can share the store: set an empty name (\"\") if the \
             store has records of this service, which were written without a namespace, else the name of this \
             service. Under another namespace every key is new, and retries execute again"
        }
        CacheFor = {
            [cache] " on a server is for stores that are slower: `file:` and `postgres://`"
        }
        CacheSecret = {
            [cache] " on a server needs " [secret_file] ": other writers could forge responses"
        }
        NoMethods = { [methods] " is empty: expected at least one method" }
        Connect = { [methods] " cannot be CONNECT: it is not served" }
        NoWaiters = { [max_waiters] " 0 contradicts " [in_flight] " wait: no duplicate could wait" }
        LongRetention = { [retention] " is longer than ten years" }
        ShortRetention { error: PolicyError } = { [retention] " and " [lease] ": {error}" }
        KeyHeader { header: HeaderName } = {
            [key_header] " cannot be `{header}`: that header describes the message, its sender or its \
             connection, or names the caller; a header of its own, like `X-Idempotency-Key`, is expected"
        }
        NoScopeHeaders = { [scope] " names no header; `none` makes one scope for all callers" }
        StrippedScope { header: HeaderName } = {
            [scope] " cannot be `{header}`: the gateway strips that header, sets it itself or does not \
             believe it"
        }
        StrippedFingerprint { header: HeaderName } = {
            [fingerprint_headers] " cannot have `{header}`: the gateway strips that header, sets it \
             itself or does not believe it"
        }
        Zero { field: &'static str } = { (field) " is zero: expected a time above zero" }
        NoStreams = { [max_streams] " 0: expected at least 1, or no HTTP/2 request could be made" }
        NoKey { certificate: &'static str, key: &'static str } = {
            (certificate) " and " (key) " belong together: set both, or neither"
        }
        TlsUnused { field: &'static str } = {
            (field) " needs a URL that begins with https: it is used for TLS only"
        }
        Memory { memory: ByteSize, connections: usize, needed: ByteSize } = {
            [max_memory] " {memory} is too little for {connections} connections and the largest bodies: \
             {needed} is enough, or give fewer " [max_connections] " or smaller " [max_request_body]
            " and " [max_response_body]
        }
        OpenContradicts { policy: &'static str } = {
            [store_outage] " open contradicts " [on_unknown] " {policy}: a request that executes without a \
             record could execute twice. Leave " [store_outage] " closed, or set " [on_unknown] " reexecute"
        }
        CorsMethod = {
            [methods] " cannot be OPTIONS where " [cors_origins] " is given: preflights are answered here"
        }
        NoOrigins = { [cors_origins] " is empty: expected at least one origin, or `none`" }
        Origin { origin: String } = {
            [cors_origins] ": `{origin}` is no origin, which is a scheme and a host, like \
             https://shop.example"
        }
        CorsCredentials { field: &'static str } = {
            [cors_credentials] " contradicts `*` in " (field) ": browsers reject that, or take `*` for a \
             name"
        }
        CorsMixed { field: &'static str } = { (field) ": `*` must be the only element" }
        OneCaller = {
            [max_in_flight_per_scope] " needs " [scope] ": `none` makes one scope for all callers"
        }
        ObserveAuth = {
            [observe] " contradicts " [auth_scope] ": an observed route sends no auth request, so \
             its caller is unknown"
        }
        ObserveClaim = {
            [observe] " with " [scope] " jwt:CLAIM needs " [jwt_keys] ": an observed route sends no auth request, so its \
             tokens would not be verified"
        }
        RoutePath { reason: String } = { "the path {reason}" }
        RouteName = {
            "the name must have 1 to 64 visible ASCII characters other than `\"` and `\\`"
        }
        ManyRoutes { most: usize } = { "there are too many routes: expected at most {most}" }
        Route { index: usize, path: String, error: Box<ConfigError> } = { "route {path}: " {error} }
        Statuses { one: &'static str, other: &'static str, status: u16 } = {
            (one) " and " (other) " both have {status}: leave it in one of them"
        }
        Policy { field: &'static str, error: PolicyError } = { (field) ": {error}" }
        Options { error: RouteError } = { "{error}" }
    }
}

impl ConfigError {
    /// Returns whether another start with the same configuration may succeed: a file is not there yet.
    #[must_use]
    pub fn may_end(&self) -> bool {
        match self {
            Self::ReconcileAuthorization { is_missing, .. } => *is_missing,
            Self::Route { error, .. } => error.may_end(),
            _ => false,
        }
    }

    /// Returns the error of a setting that has no effect without another one.
    pub(super) const fn needs(field: &'static str, other: &'static str, why: &'static str) -> Self {
        Self::NoEffect { field, relation: "needs", other, why }
    }
}

impl From<PolicyError> for ConfigError {
    fn from(error: PolicyError) -> Self {
        let field = match error {
            PolicyError::NoLease | PolicyError::ShortLease => "lease",
            // Either of them may have been given.
            PolicyError::ShortRetention => return Self::ShortRetention { error },
            PolicyError::NoHook | PolicyError::NoHookTimeout => "reconcile_url",
            _ => "on_unknown",
        };
        Self::Policy { field, error }
    }
}

impl From<StatusOverlap> for ConfigError {
    fn from(StatusOverlap { one, other, status }: StatusOverlap) -> Self {
        let [one, other] = [one, other].map(|class| match class.as_str() {
            "final" => "final_statuses",
            "retryable" => "retryable_statuses",
            _ => "unknown_statuses",
        });
        Self::Statuses { one, other, status }
    }
}

impl From<RouteError> for ConfigError {
    fn from(error: RouteError) -> Self {
        Self::Options { error }
    }
}
