//! Policies of requests, of the whole gateway or of a route.

use std::num::NonZeroU32;
use std::time::Duration;

use hapax_core::machine::HookTiming;
use hapax_core::{InFlight, OnUnknown, Policy, PolicyError, Terms};
use hapax_http::classify::Profile;
use hapax_http::fingerprint::HttpFingerprintScheme;
use hapax_http::header::{Grammar, IDEMPOTENCY_KEY, may_have_key};
use hapax_http::problem::DocsUrl;
use hapax_http::server::{CompletionOutage, KeyRule, MissingScope, ScopePart, StoreOutage};
use hapax_http::statuses::StatusLists;
use hapax_http::stored_response::hop_by_hop;
use hapax_proxy::Origin;
use http::uri::PathAndQuery;
use http::{HeaderName, Method, Uri};
use tower_http::cors::CorsLayer;

use super::authorization::{ReconcileAuthorization, UnretriedAuthorization};
use super::cors::Cors;
use super::{Config, ConfigError, no_target};

/// Policy of requests. `PolicyConfig::default()` has the defaults.
#[derive(Clone, PartialEq, Debug)]
pub struct PolicyConfig {
    /// Whether protected methods need a key. Default: optional.
    pub key: KeyRule,
    /// Header that contains the key and nothing else; it is forwarded unchanged. Default
    /// `Idempotency-Key`.
    pub key_header: HeaderName,
    /// Grammar of keys. Default [`Grammar::Lenient`].
    pub grammar: Grammar,
    /// Protected methods. Default POST and PATCH.
    pub methods: Vec<Method>,
    /// Parts of a request that name the caller: headers, cookies, claims of its token. Default: `authorization`, or those of
    /// [`ForwardAuth::scope`](super::ForwardAuth::scope).
    pub scope: Option<ScopeConfig>,
    /// Handling of a request in which a scope header is missing or empty. Default:
    /// [`MissingScope::Reject`].
    pub scope_missing: Option<MissingScope>,
    /// Parts of a request that are compared with a retry. Default: all but its headers; JSON
    /// is compared by its values, form data by its pairs or parts in order.
    pub fingerprint: HttpFingerprintScheme,
    /// Time for which a crashed process blocks its keys. Default 30 s.
    pub lease: Duration,
    /// Time for which an outcome is replayed. Default 24 h.
    pub retention: Duration,
    /// Handling of a duplicate of a request in flight. Default: it is rejected.
    pub in_flight: InFlight,
    /// Handling of a retry of an unknown outcome. Default: it is never executed again
    /// automatically.
    pub on_unknown: OnUnknown,
    /// URL that answers whether an operation happened, `http://HOST[:PORT]/PATH`; for
    /// [`OnUnknown::Reconcile`].
    pub reconcile_url: Option<Uri>,
    /// Credentials of reconcile requests without a retry, for this `reconcile_url`. Default: unknown, and operations of callers that credentials
    /// name are reconciled by retries only.
    pub reconcile_authorization: Option<ReconcileAuthorization>,
    /// Classification of statuses. Default [`Profile::Standard`].
    pub profile: Profile,
    /// Statuses that are classified differently from the profile. Default: none.
    pub statuses: StatusLists,
    /// Whether requests are executed unprotected while the store is unavailable. Default: they are
    /// not.
    pub store_outage: StoreOutage,
    /// Response to the client if the store becomes unavailable before an outcome is recorded.
    /// Default: the upstream's response.
    pub completion_outage: CompletionOutage,
    /// Whether responses are streamed, and their keys final at the headers. Default: only
    /// `text/event-stream`.
    pub stream: bool,
    /// Whether `Idempotency-Expires` in responses states when a key expires. Default `false`.
    pub expires: bool,
    /// Largest request body with a key, in bytes. Default 1 MiB.
    pub max_request_body: usize,
    /// Largest response body that is stored, in bytes. Default 1 MiB.
    pub max_response_body: usize,
    /// Time without progress of the upstream after which an outcome is unknown. Default 60 s.
    pub upstream_timeout: Duration,
    /// Number of keys of one caller that may be in flight at once, in this process; a further one
    /// gets 429 `too-many-in-flight`. Default: any number.
    pub max_in_flight_per_scope: Option<NonZeroU32>,
    /// URL of the API's documentation of its problems.
    pub docs_url: Option<DocsUrl>,
    /// Whether `Set-Cookie` is replayed. Default `false`.
    pub replay_set_cookie: bool,
    /// Web pages that may use this API. Default: the upstream's own CORS headers.
    pub cors: Option<Cors>,
}

impl Default for PolicyConfig {
    fn default() -> Self {
        let Terms { lease, retention, on_unknown } = Policy::default().terms;
        Self {
            key: KeyRule::Optional,
            key_header: IDEMPOTENCY_KEY,
            grammar: Grammar::Lenient,
            methods: vec![Method::POST, Method::PATCH],
            scope: None,
            scope_missing: None,
            fingerprint: HttpFingerprintScheme::default(),
            lease,
            retention,
            in_flight: InFlight::Reject,
            on_unknown,
            reconcile_url: None,
            reconcile_authorization: None,
            profile: Profile::Standard,
            statuses: StatusLists::default(),
            store_outage: StoreOutage::Closed,
            completion_outage: CompletionOutage::Deliver,
            stream: false,
            expires: false,
            max_request_body: 1 << 20,
            max_response_body: 1 << 20,
            upstream_timeout: Duration::from_secs(60),
            max_in_flight_per_scope: None,
            docs_url: None,
            replay_set_cookie: false,
            cors: None,
        }
    }
}

/// Values computed from a [`PolicyConfig`].
#[derive(Clone, Debug)]
pub(crate) struct ResolvedPolicy {
    pub(crate) callers: ScopeConfig,
    pub(crate) missing: MissingScope,
    pub(crate) reconcile: Option<(Origin, PathAndQuery)>,
    /// `Authorization` of reconcile requests without a retry; `None` if it is unknown.
    pub(crate) authorization: Option<UnretriedAuthorization>,
    pub(crate) policy: Policy,
    pub(crate) cors: Option<CorsLayer>,
}

/// Longest retention: a longer one is a typing error, and times would overflow.
const MAX_RETENTION: Duration = Duration::from_secs(3653 * 86_400);

/// Time within which a reconcile URL must answer.
pub(crate) const ANSWER: Duration = Duration::from_millis(4_500);

/// Extra time of the layer, so that a missing answer is counted before the layer gives up.
const MARGIN: Duration = Duration::from_millis(500);

impl PolicyConfig {
    /// Computes the values of this policy, which is part of `config`.
    pub(super) fn resolve(&self, config: &Config) -> Result<ResolvedPolicy, ConfigError> {
        let reconcile = self.reconcile_url.as_ref().map(reconcile_target).transpose()?;
        if reconcile.is_some() && !self.reconciles(config) {
            return Err(ConfigError::ReconcileUrlUnused);
        }
        let authorization = self.reconcile_authorization.as_ref();
        let uses = |policy: &Self| {
            policy.on_unknown == OnUnknown::Reconcile
                && policy.reconcile_authorization.as_ref() == authorization
        };
        if authorization.is_some() && !config.policies().any(uses) {
            return Err(ConfigError::ReconcileAuthorizationUnused);
        }
        let authorization = authorization.map(ReconcileAuthorization::read).transpose()?;
        if self.methods.is_empty() {
            return Err(ConfigError::NoMethods);
        }
        if self.methods.contains(&Method::CONNECT) {
            return Err(ConfigError::Connect);
        }
        if let Some(name) = self.fingerprint.headers().iter().find(|name| is_untrusted(name)) {
            return Err(ConfigError::StrippedFingerprint { header: name.clone() });
        }
        let (callers, missing) = self.callers(config)?;
        if self.has_claim() && !config.jwt.is_complete() && config.auth.is_none() {
            return Err(ConfigError::ClaimUnverified);
        }
        let key = &self.key_header;
        if !may_have_key(key)
            || callers.names().any(|name| name == key)
            || (*key != IDEMPOTENCY_KEY && is_untrusted(key))
        {
            return Err(ConfigError::KeyHeader { header: key.clone() });
        }
        if callers == ScopeConfig::Everyone && self.max_in_flight_per_scope.is_some() {
            return Err(ConfigError::OneCaller);
        }
        if self.upstream_timeout.is_zero() {
            return Err(ConfigError::Zero { field: "upstream_timeout" });
        }
        if let InFlight::Wait(limit) = self.in_flight {
            if limit.is_zero() {
                return Err(ConfigError::Zero { field: "wait_for" });
            }
            if config.max_waiters == 0 {
                return Err(ConfigError::NoWaiters);
            }
        }
        if self.retention > MAX_RETENTION {
            return Err(ConfigError::LongRetention);
        }
        if self.store_outage == StoreOutage::Open {
            match self.on_unknown {
                OnUnknown::Reexecute => {}
                OnUnknown::Block | OnUnknown::Reconcile => {
                    let policy = self.on_unknown.as_str();
                    return Err(ConfigError::OpenContradicts { policy });
                }
            }
        }
        self.statuses.check()?;
        // Pages do not send the headers of an auth response.
        let by_auth = config.auth.as_ref().is_some_and(|auth| !auth.scope.is_empty());
        let named = callers.names().filter(|_| !by_auth);
        let sent: Vec<_> = std::iter::once(key).chain(named).collect();
        let cors = self.cors.as_ref().map(|cors| cors.resolve(&self.methods, &sent)).transpose()?;
        let policy = self.engine(reconcile.is_some())?;
        Ok(ResolvedPolicy { callers, missing, policy, reconcile, authorization, cors })
    }

    /// Returns whether the reconcile URL is used: by this policy, or by a route that inherits it.
    fn reconciles(&self, config: &Config) -> bool {
        let asks = |policy: &Self| {
            policy.on_unknown == OnUnknown::Reconcile && policy.reconcile_url == self.reconcile_url
        };
        let inherited = config.policy.reconcile_url == self.reconcile_url;
        asks(self) || (inherited && config.policies().any(asks))
    }

    fn engine(&self, hook: bool) -> Result<Policy, ConfigError> {
        let Self { lease, retention, on_unknown, in_flight, upstream_timeout, .. } = *self;
        // A request of a crashed owner may still be in progress for as long as the upstream's
        // timeout.
        let hook = hook.then_some(HookTiming { after: upstream_timeout, timeout: ANSWER + MARGIN });
        let terms = Terms { lease, retention, on_unknown };
        let settle = Some(upstream_timeout);
        let policy = Policy { terms, in_flight, hook, settle, ..Policy::default() };
        match policy.check() {
            Ok(()) => Ok(policy),
            Err(PolicyError::NoHook) => Err(ConfigError::ReconcileUrl),
            Err(error) => Err(error.into()),
        }
    }

    /// Returns the scope headers, and the handling of requests without them.
    pub(crate) fn callers(
        &self,
        config: &Config,
    ) -> Result<(ScopeConfig, MissingScope), ConfigError> {
        if let Some(auth) = config.auth.as_ref().filter(|auth| !auth.scope.is_empty()) {
            // The request contains them by then, copied from the auth response.
            return Ok((ScopeConfig::headers(auth.scope.iter().cloned()), MissingScope::Reject));
        }
        let missing = self.scope_missing.unwrap_or(MissingScope::Reject);
        let Some(scope) = &self.scope else {
            return Ok((ScopeConfig::headers([http::header::AUTHORIZATION]), missing));
        };
        if let ScopeConfig::Parts(parts) = scope {
            if parts.is_empty() {
                return Err(ConfigError::NoScopeHeaders);
            }
            let mut names = parts.iter().map(ScopePart::header);
            if let Some(name) = names.find(|name| is_untrusted(name)) {
                return Err(ConfigError::StrippedScope { header: name.clone() });
            }
        }
        Ok((scope.clone(), missing))
    }
}

/// Returns whether a header cannot name the caller: fields that the proxy strips, sets itself or
/// does not trust, and fields about the sending of a message, such as its length or date. `Host`
/// can: of several hosts behind one gateway, each has its own callers.
fn is_untrusted(name: &HeaderName) -> bool {
    let plain = name.as_str().replace('_', "-");
    hop_by_hop(name)
        || plain.starts_with("idempotency-")
        || plain.starts_with("x-forwarded-")
        || matches!(
            plain.as_str(),
            "content-length"
                | "date"
                | "expect"
                | "forwarded"
                | "trailer"
                | "via"
                | "x-original-url"
                | "x-real-ip"
                | "x-rewrite-url"
        )
}

fn reconcile_target(uri: &Uri) -> Result<(Origin, PathAndQuery), ConfigError> {
    let origin = Origin::of(uri)
        .ok_or_else(|| no_target("reconcile_url", uri, ConfigError::ReconcileTarget))?;
    let path = uri.path_and_query().cloned().unwrap_or_else(|| PathAndQuery::from_static("/"));
    Ok((origin, path))
}

/// Source of the caller's name.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum ScopeConfig {
    /// The values of these parts of a request, together.
    Parts(Vec<ScopePart>),
    /// One scope for all requests.
    Everyone,
}

impl ScopeConfig {
    /// Returns the source that is the values of these headers, together.
    #[must_use]
    pub fn headers(names: impl IntoIterator<Item = HeaderName>) -> Self {
        Self::Parts(names.into_iter().map(ScopePart::Header).collect())
    }

    /// Returns the parts of a request that name the caller.
    #[must_use]
    pub fn parts(&self) -> &[ScopePart] {
        match self {
            Self::Parts(parts) => parts,
            Self::Everyone => &[],
        }
    }

    /// Returns the headers that contain these parts.
    pub(crate) fn names(&self) -> impl Iterator<Item = &HeaderName> {
        self.parts().iter().map(ScopePart::header)
    }
}
