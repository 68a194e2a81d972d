//! What holds for requests, everywhere or on a route.

use std::num::NonZeroU32;
use std::time::Duration;

use hapax_core::machine::HookTiming;
use hapax_core::{InFlight, OnUnknown, Policy, PolicyError, Terms};
use hapax_http::classify::Profile;
use hapax_http::fingerprint::HttpFingerprintScheme;
use hapax_http::header::{Grammar, IDEMPOTENCY_KEY, may_have_key};
use hapax_http::problem::DocsUrl;
use hapax_http::server::{CompletionOutage, KeyRule, MissingScope, StoreOutage};
use hapax_http::statuses::StatusLists;
use hapax_http::stored_response::hop_by_hop;
use http::uri::PathAndQuery;
use http::{HeaderName, Method, Uri};
use tower_http::cors::CorsLayer;

use super::cors::Cors;
use super::{Config, ConfigError, origin};
use crate::upstream::Origin;

/// What holds for requests. `PolicyConfig::default()` has the defaults.
#[derive(Clone, PartialEq, Debug)]
pub struct PolicyConfig {
    /// Whether protected methods need a key. Default: optional.
    pub key: KeyRule,
    /// Which header has the key, alone; it is forwarded as it came. Default `Idempotency-Key`.
    pub key_header: HeaderName,
    /// Which values are keys. Default [`Grammar::Lenient`].
    pub grammar: Grammar,
    /// Which methods are protected. Default POST and PATCH.
    pub methods: Vec<Method>,
    /// The headers that name the caller. Default: `authorization`, or those of
    /// [`ForwardAuth::scope`](super::ForwardAuth::scope).
    pub scope: Option<ScopeConfig>,
    /// Handling of a request in which a scope header is missing or empty. Default:
    /// [`MissingScope::Reject`].
    pub scope_missing: Option<MissingScope>,
    /// What of a request counts when it is compared with a retry. Default: all but its headers, JSON
    /// and form data by what they say.
    pub fingerprint: HttpFingerprintScheme,
    /// How long a dead process blocks its key. Default 30 s.
    pub lease: Duration,
    /// How long an outcome is replayed. Default 24 h.
    pub retention: Duration,
    /// What a copy of a request in flight gets. Default: it is rejected.
    pub in_flight: InFlight,
    /// What a retry of an unknown outcome gets. Default: it is never executed again by itself.
    pub on_unknown: OnUnknown,
    /// Where to ask what became of an operation, `http://HOST[:PORT]/PATH`; for
    /// [`OnUnknown::Reconcile`].
    pub reconcile_url: Option<Uri>,
    /// What statuses mean. Default [`Profile::Standard`].
    pub profile: Profile,
    /// Statuses that the profile does not decide. Default: none.
    pub statuses: StatusLists,
    /// Whether requests are executed unprotected while the store is away. Default: they are not.
    pub store_outage: StoreOutage,
    /// What the client gets where the store goes away before an outcome is recorded. Default: the
    /// answer.
    pub completion_outage: CompletionOutage,
    /// Whether responses are streamed, and their keys final at the headers. Default: only
    /// `text/event-stream`.
    pub stream: bool,
    /// Whether answers say in `Idempotency-Expires` when a key may be used anew. Default `false`.
    pub expires: bool,
    /// The largest request body with a key, in bytes. Default 1 MiB.
    pub max_request_body: usize,
    /// The largest response body that is kept, in bytes. Default 1 MiB.
    pub max_response_body: usize,
    /// After which silence of the upstream an outcome is unknown. Default 60 s.
    pub upstream_timeout: Duration,
    /// How many keys of one caller may be in flight at once, in this process; a further one gets 429
    /// `too-many-in-flight`. Default: any number.
    pub max_in_flight_per_scope: Option<NonZeroU32>,
    /// Where the API documents its refusals.
    pub docs_url: Option<DocsUrl>,
    /// Whether `Set-Cookie` is replayed. Default `false`.
    pub replay_set_cookie: bool,
    /// Which web pages may use this. Default: what the upstream says, and nothing more.
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

/// What follows from a [`PolicyConfig`].
#[derive(Clone, Debug)]
pub(crate) struct ResolvedPolicy {
    pub(crate) callers: ScopeConfig,
    pub(crate) missing: MissingScope,
    pub(crate) reconcile: Option<(Origin, PathAndQuery)>,
    pub(crate) policy: Policy,
    pub(crate) cors: Option<CorsLayer>,
}

/// The longest retention: beyond it a duration is a slip of the pen, and times would overflow.
const MAX_RETENTION: Duration = Duration::from_secs(3653 * 86_400);

/// How long the upstream may take to say what became of an operation.
pub(crate) const ANSWER: Duration = Duration::from_millis(4_500);

/// By how much the layer is more patient than that: what gave no answer is counted before the layer
/// gives up.
const MARGIN: Duration = Duration::from_millis(500);

impl PolicyConfig {
    /// `config`: the one that it is part of.
    pub(super) fn resolve(&self, config: &Config) -> Result<ResolvedPolicy, ConfigError> {
        let reconcile = self.reconcile_url.as_ref().map(reconcile_target).transpose()?;
        if reconcile.is_some() && !self.is_asked(config) {
            return Err(ConfigError::ReconcileUrlUnused);
        }
        if self.methods.is_empty() {
            return Err(ConfigError::NoMethods);
        }
        if self.methods.contains(&Method::CONNECT) {
            return Err(ConfigError::Connect);
        }
        if let Some(name) = self.fingerprint.headers().iter().find(|name| names_nobody(name)) {
            return Err(ConfigError::StrippedFingerprint { header: name.clone() });
        }
        let (callers, missing) = self.callers(config)?;
        let key = &self.key_header;
        if !may_have_key(key)
            || callers.headers().contains(key)
            || (*key != IDEMPOTENCY_KEY && names_nobody(key))
        {
            return Err(ConfigError::KeyHeader { header: key.clone() });
        }
        if callers == ScopeConfig::Everyone && self.max_in_flight_per_scope.is_some() {
            return Err(ConfigError::OneCaller);
        }
        if self.upstream_timeout.is_zero() {
            return Err(ConfigError::Zero { field: "upstream_timeout" });
        }
        if let InFlight::Wait(patience) = self.in_flight {
            if patience.is_zero() {
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
        // Headers of an auth answer are none that pages send.
        let by_auth = config.auth.as_ref().is_some_and(|auth| !auth.scope.is_empty());
        let named = callers.headers().iter().filter(|_| !by_auth);
        let sent: Vec<_> = std::iter::once(key).chain(named).collect();
        let cors = self.cors.as_ref().map(|cors| cors.resolve(&self.methods, &sent)).transpose()?;
        let policy = self.engine(reconcile.is_some())?;
        Ok(ResolvedPolicy { callers, missing, policy, reconcile, cors })
    }

    /// Whether anybody would ask at its reconcile URL: itself, or a route that has it from here.
    fn is_asked(&self, config: &Config) -> bool {
        let asks = |policy: &Self| {
            policy.on_unknown == OnUnknown::Reconcile && policy.reconcile_url == self.reconcile_url
        };
        let inherited = config.policy.reconcile_url == self.reconcile_url;
        asks(self) || (inherited && config.policies().any(asks))
    }

    fn engine(&self, hook: bool) -> Result<Policy, ConfigError> {
        let Self { lease, retention, on_unknown, in_flight, upstream_timeout, .. } = *self;
        // What the dead owner sent may run for as long as an upstream may be silent.
        let hook = hook.then_some(HookTiming { after: upstream_timeout, timeout: ANSWER + MARGIN });
        let policy = Policy { terms: Terms { lease, retention, on_unknown }, in_flight, hook };
        match policy.check() {
            Ok(()) => Ok(policy),
            Err(PolicyError::NoHook) => Err(ConfigError::ReconcileUrl),
            Err(error) => Err(error.into()),
        }
    }

    /// Who the caller is, and what a request without those headers gets.
    pub(crate) fn callers(
        &self,
        config: &Config,
    ) -> Result<(ScopeConfig, MissingScope), ConfigError> {
        if let Some(auth) = config.auth.as_ref().filter(|auth| !auth.scope.is_empty()) {
            // They are in the request by then, from the answer.
            return Ok((ScopeConfig::Headers(auth.scope.clone()), MissingScope::Reject));
        }
        let missing = self.scope_missing.unwrap_or(MissingScope::Reject);
        let Some(scope) = &self.scope else {
            return Ok((ScopeConfig::Headers(vec![http::header::AUTHORIZATION]), missing));
        };
        if let ScopeConfig::Headers(names) = scope {
            if names.is_empty() {
                return Err(ConfigError::NoScopeHeaders);
            }
            if let Some(name) = names.iter().find(|name| names_nobody(name)) {
                return Err(ConfigError::StrippedScope { header: name.clone() });
            }
        }
        Ok((scope.clone(), missing))
    }
}

/// What the proxy strips, sets itself or does not believe says nothing of the caller; what a
/// message is sent with, such as its length or date, neither. `Host` may: of several hosts behind one
/// gateway, each has its own callers.
fn names_nobody(name: &HeaderName) -> bool {
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
    let origin = origin(uri).ok_or(ConfigError::ReconcileTarget)?;
    let path = uri.path_and_query().cloned().unwrap_or_else(|| PathAndQuery::from_static("/"));
    Ok((origin, path))
}

/// Who the caller is.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum ScopeConfig {
    /// The values of these headers, together.
    Headers(Vec<HeaderName>),
    /// Everyone is the same caller.
    Everyone,
}

impl ScopeConfig {
    /// The headers that name the caller.
    #[must_use]
    pub fn headers(&self) -> &[HeaderName] {
        match self {
            Self::Headers(names) => names,
            Self::Everyone => &[],
        }
    }
}
