//! Configuration snapshots: the configuration in force for a request.
//!
//! A request takes the [`ConfigSnapshot`] in force when it arrives and uses only this one to its
//! end; a reload replaces it for later requests. So no request sees a mixture, and none waits for a
//! reload. Resources that do not depend on the configuration (the engine and its store, memory,
//! connections, counters) are in [`SharedResources`] and outlive it.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use arc_swap::ArcSwap;
use hapax_core::{
    EngineError, Idempotency, InFlight, MemoryCapacity, MemoryStore, OnUnknown, SystemClock,
};
use hapax_http::problem::{Code, DocsUrl, Problem};
use hapax_http::server::{
    ClaimName, IdempotencyLayer, IdempotencyService, RouteOptions, RoutePolicy, ScopePart,
    ScopeSource,
};
use hapax_http::stored_response::Cookies;
use hapax_proxy::{ConnectOptions, Origin, Upstream, Upstreams};
use http::uri::PathAndQuery;
use http::{HeaderName, Method};
use tokio::runtime::Handle;
use tokio::sync::Semaphore;
use tower_http::cors::CorsLayer;
use tower_layer::Layer;

use crate::auth::Auth;
use crate::config::{
    Config, ConfigError, ForwardAuth, PolicyConfig, ResolvedConfig, ResolvedPolicy, RouteMode,
    ScopeConfig, TokenCheck,
};
use crate::context::RequestContext;
use crate::metrics::{Metrics, RouteCounts, RouteObserver};
use crate::observe::{self, ObservedRoute};
use crate::proxy::Proxy;
use crate::proxy::spoofing::ProtectedHeaders;
use crate::reconcile::{ReconcileClient, RouteReconciler, hook_name};
use crate::routes::RouteTable;
use crate::tokens::{JwtKeysError, Tokens};

/// Requests for the keys of tokens that may be in progress; one that is cancelled still counts for a moment.
const KEY_REQUESTS: usize = 4;

/// The configuration in force for new requests.
pub(crate) type CurrentConfig = ArcSwap<ConfigSnapshot>;

/// One configuration, with its routes and clients.
#[derive(Debug)]
pub(crate) struct ConfigSnapshot {
    table: RouteTable,
    routes: Vec<Arc<Route>>,
    /// Route of requests that match no other one.
    rest: Arc<Route>,
    /// Routes that reconcile, by name. Several may have one name.
    reconciling: HashMap<Arc<str>, Vec<Arc<Route>>>,
    /// Client of the auth URL, and its configuration.
    auth: Option<(ForwardAuth, Arc<Auth>)>,
    /// Reader of the claims of tokens, with its settings.
    tokens: Option<ConfiguredTokens>,
    upstream: Upstream,
    reconcile_clients: Vec<(ReconcileTarget, ReconcileClient)>,
    /// Parts of requests that name callers, of all policies.
    callers: Vec<Vec<ScopePart>>,
}

/// Settings and service of a route.
#[derive(Debug)]
pub(crate) struct Route {
    /// Name in metrics and logs; empty for requests without a route.
    pub(crate) name: Arc<str>,
    pub(crate) service: RouteService,
    pub(crate) docs: Option<DocsUrl>,
    pub(crate) cors: Option<CorsLayer>,
    pub(crate) counts: Arc<RouteCounts>,
    /// Header fields that the layer reads.
    pub(crate) names: ProtectedHeaders,
    /// Header that contains the key.
    pub(crate) key_header: HeaderName,
    /// Headers that name the caller.
    pub(crate) scope: Vec<HeaderName>,
    /// Claims of a bearer token that name the caller.
    pub(crate) claims: Vec<ClaimName>,
    /// Settings for operations that are reconciled without a retry, if they are.
    pub(crate) unretried: Option<UnretriedRoute>,
}

/// Settings for operations that are reconciled without a retry.
#[derive(Debug)]
pub(crate) struct UnretriedRoute {
    /// Hashes of its hook, one of which descriptions of operations have; none if the store seals nothing.
    pub(crate) hooks: Vec<String>,
    /// True if it is known what replaces a caller's credentials.
    pub(crate) replaces_credentials: bool,
    /// The reconcile URL, without its query.
    pub(crate) url: String,
    /// Time after which a first request can no longer be in progress: a lease, and the upstream timeout.
    pub(crate) wait: Duration,
}

/// Services of routes.
#[derive(Debug)]
pub(crate) enum RouteService {
    /// The layer with this policy, which protects these methods.
    Protected { layered: IdempotencyService<Proxy>, policy: Arc<RoutePolicy>, methods: Vec<Method> },
    /// The upstream, unprotected.
    Passed(Proxy),
    /// The upstream, unprotected; the results that the layer would have had are counted.
    Observed(ObservedRoute),
}

impl Route {
    /// Returns the policy that the layer applies.
    pub(crate) fn policy(&self) -> Option<&Arc<RoutePolicy>> {
        match &self.service {
            RouteService::Protected { policy, .. } => Some(policy),
            RouteService::Passed(_) => None,
            RouteService::Observed(observed) => Some(observed.policy()),
        }
    }
}

/// Settings of a reconcile client: URL, request headers, largest body, and timeout.
type ReconcileTarget = ((Origin, PathAndQuery), Vec<ScopePart>, usize, std::time::Duration);

/// Reader of the claims of tokens, with the settings that it was made of: check, and timeout.
pub(crate) type ConfiguredTokens = (TokenCheck, Duration, Arc<Tokens>);

impl ConfigSnapshot {
    /// Returns the route of a request.
    pub(crate) fn route(&self, path: &str, method: &Method) -> Result<&Arc<Route>, Problem> {
        match self.table.route(path, method) {
            Ok(found) => Ok(found.and_then(|index| self.routes.get(index)).unwrap_or(&self.rest)),
            Err(detail) => Err(Problem::new(Code::MalformedRequest, detail)),
        }
    }

    /// Returns the route of requests without a matching route.
    pub(crate) const fn rest(&self) -> &Arc<Route> {
        &self.rest
    }

    /// Returns whether a route reconciles.
    pub(crate) fn reconciles(&self) -> bool {
        !self.reconciling.is_empty()
    }

    /// Returns the routes of this name that reconcile.
    pub(crate) fn reconciling(&self, name: &str) -> &[Arc<Route>] {
        self.reconciling.get(name).map_or(&[], Vec::as_slice)
    }

    /// Returns the client of the auth URL.
    pub(crate) fn auth(&self) -> Option<&Arc<Auth>> {
        self.auth.as_ref().map(|(_, auth)| auth)
    }

    /// Returns the reader of the claims of tokens.
    pub(crate) fn tokens(&self) -> Option<&Arc<Tokens>> {
        self.tokens.as_ref().map(|(_, _, tokens)| tokens)
    }

    /// Begins to fetch the keys of tokens, if they have a URL. Metrics show their fetches from here on.
    pub(crate) fn fetch_keys(&self, runtime: &Handle, metrics: &Metrics) {
        metrics.jwt_keys(self.tokens().map(|tokens| tokens.begin(runtime)).unwrap_or_default());
    }

    /// Returns the clients of the reconcile URLs.
    pub(crate) fn reconcile_clients(&self) -> impl Iterator<Item = &ReconcileClient> {
        self.reconcile_clients.iter().map(|(_, reconciler)| reconciler)
    }

    /// Returns the parts of requests that name callers; the first are those of requests without a route.
    pub(crate) fn callers(&self) -> &[Vec<ScopePart>] {
        &self.callers
    }
}

/// Resources that outlive a configuration.
#[derive(Debug)]
pub(crate) struct SharedResources {
    /// The layer. It applies the policy of the route in each request's [`RequestContext`].
    pub(crate) layer: IdempotencyLayer,
    pub(crate) metrics: Arc<Metrics>,
    pub(crate) upstreams: Arc<Upstreams>,
    /// Requests to the upstream that may be in progress.
    pub(crate) concurrent: usize,
    /// Settings of connections to upstreams.
    pub(crate) connect: ConnectOptions,
    observing: IdempotencyLayer,
    pub(crate) observed: Arc<MemoryStore>,
    /// Memory for copies of bodies on observed routes.
    budget: Arc<Semaphore>,
}

impl SharedResources {
    /// Creates the resources. `observed` is the memory of observed routes, in bytes.
    pub(crate) fn new(
        engine: Idempotency,
        bodies: usize,
        observed: usize,
        metrics: Arc<Metrics>,
        concurrent: usize,
        connect: ConnectOptions,
    ) -> Result<Self, EngineError> {
        let held = |engine| {
            IdempotencyLayer::routed(engine, |parts| {
                parts.extensions.get::<RequestContext>()?.route.policy().cloned()
            })
        };
        let capacity = MemoryCapacity { bytes: observed / 2, ..MemoryCapacity::default() };
        let store = Arc::new(MemoryStore::new(Arc::new(SystemClock), capacity));
        let budget = (observed / 2 / observe::UNIT).min(Semaphore::MAX_PERMITS);
        Ok(Self {
            layer: held(engine).body_memory(bodies),
            metrics,
            upstreams: Arc::default(),
            concurrent,
            connect,
            // Its bodies are copies within `room`.
            observing: held(Idempotency::builder(Arc::clone(&store)).build()?),
            observed: store,
            budget: Arc::new(Semaphore::new(budget)),
        })
    }

    /// Returns the reader of the claims of tokens of a configuration. It has the keys of `before` if they have the same
    /// URL and timeout; a file is read again.
    ///
    /// # Errors
    /// [`JwtKeysError`] for a file without keys.
    pub(crate) fn tokens(
        &self,
        config: &Config,
        resolved: &ResolvedConfig,
        before: Option<&ConfigSnapshot>,
    ) -> Result<Option<ConfiguredTokens>, JwtKeysError> {
        let Some(check) = resolved.tokens.clone() else { return Ok(None) };
        let timeout = config.auth.as_ref().map_or(ForwardAuth::TIMEOUT, |auth| auth.timeout);
        let before = before.and_then(|snapshot| snapshot.tokens.as_ref());
        if let Some((TokenCheck::Here { keys: theirs, .. }, limit, tokens)) = before
            && let TokenCheck::Here { keys, expected } = &check
            && (theirs, *limit) == (keys, timeout)
            && let Some(tokens) = tokens.expecting(expected.clone())
        {
            return Ok(Some((check, timeout, Arc::new(tokens))));
        }
        let client = |origin| {
            let upstream = Upstream::new(origin, timeout, KEY_REQUESTS, self.connect.http1());
            (self.upstreams.add(upstream), timeout)
        };
        let tokens = Tokens::new(check.clone(), Arc::clone(&self.metrics), client)?;
        Ok(Some((check, timeout, Arc::new(tokens))))
    }

    /// Builds the snapshot of a configuration; it reuses the clients in `before` whose settings are
    /// equal.
    pub(crate) fn snapshot(
        &self,
        config: &Config,
        resolved: ResolvedConfig,
        tokens: Option<ConfiguredTokens>,
        before: Option<&ConfigSnapshot>,
    ) -> Result<ConfigSnapshot, ConfigError> {
        let table = RouteTable::new(&config.policy, &config.routes)?;
        let upstream = before
            .map(|snapshot| &snapshot.upstream)
            .filter(|upstream| *upstream.origin() == resolved.upstream)
            .cloned()
            .unwrap_or_else(|| {
                let timeout = config.policy.upstream_timeout;
                self.upstreams.add(Upstream::new(
                    resolved.upstream.clone(),
                    timeout,
                    self.concurrent,
                    self.connect.clone(),
                ))
            });
        let mut builder = SnapshotBuilder {
            resources: self,
            before,
            upstream: &upstream,
            reconcile_clients: Vec::new(),
        };
        let rest = builder.route("", RouteMode::Protect, &config.policy, &resolved.policy)?;
        let mut callers = vec![resolved.policy.callers.parts().to_vec()];
        let mut routes = Vec::with_capacity(config.routes.len());
        for (index, (config, resolved)) in config.routes.iter().zip(&resolved.routes).enumerate() {
            let route = builder.route(config.name(), config.handling, &config.policy, resolved);
            routes.push(route.map_err(|error| config.error(index, error))?);
            if !callers.iter().any(|parts| parts == resolved.callers.parts()) {
                callers.push(resolved.callers.parts().to_vec());
            }
        }
        let reconcile_clients = builder.reconcile_clients;
        let auth = resolved.auth.zip(config.auth.as_ref()).map(|(target, config)| {
            let same =
                before.and_then(|snapshot| snapshot.auth.as_ref()).filter(|(it, _)| it == config);
            same.cloned().unwrap_or_else(|| {
                let auth = Auth::new(target, config, &self.connect, Arc::clone(&self.metrics));
                self.upstreams.add(auth.upstream().clone());
                (config.clone(), Arc::new(auth))
            })
        });
        let mut reconciling = HashMap::<_, Vec<_>>::new();
        for route in routes.iter().chain([&rest]).filter(|route| route.unretried.is_some()) {
            reconciling.entry(Arc::clone(&route.name)).or_default().push(Arc::clone(route));
        }
        Ok(ConfigSnapshot {
            table,
            routes,
            rest,
            reconciling,
            auth,
            tokens,
            upstream,
            reconcile_clients,
            callers,
        })
    }
}

/// Builder of a snapshot.
struct SnapshotBuilder<'a> {
    resources: &'a SharedResources,
    before: Option<&'a ConfigSnapshot>,
    upstream: &'a Upstream,
    reconcile_clients: Vec<(ReconcileTarget, ReconcileClient)>,
}

impl SnapshotBuilder<'_> {
    fn route(
        &mut self,
        name: &str,
        handling: RouteMode,
        config: &PolicyConfig,
        resolved: &ResolvedPolicy,
    ) -> Result<Arc<Route>, ConfigError> {
        let resources = self.resources;
        let counts = resources.metrics.route(name);
        let proxy = Proxy {
            upstream: self.upstream.with_timeout(config.upstream_timeout),
            docs: config.docs_url.clone(),
            counts: Arc::clone(&counts),
        };
        let scope = match &resolved.callers {
            ScopeConfig::Everyone => ScopeSource::shared(),
            ScopeConfig::Parts(parts) => {
                ScopeSource::parts(parts.iter().cloned(), resolved.missing)
            }
        };
        let mut url = None;
        let service = match handling {
            RouteMode::Pass => RouteService::Passed(proxy),
            RouteMode::Protect => {
                let reconciler = resolved
                    .reconcile
                    .clone()
                    .map(|target| self.reconcile_client(target, config, resolved));
                url = reconciler.as_ref().map(ReconcileClient::url);
                let mut options = options(name, config, resolved);
                let is_shared = resources.layer.engine().store().capabilities().shared;
                options.hook_name = hook_name(config, resolved, is_shared);
                options.reconcile = reconciler.map(|reconciler| {
                    let (route, counts) = (Arc::from(name), Arc::clone(&counts));
                    let authorization =
                        resolved.authorization.as_ref().and_then(|it| it.value.clone());
                    Arc::new(RouteReconciler { reconciler, route, counts, authorization }) as _
                });
                let policy = Arc::new(RoutePolicy::new(scope, options)?);
                let seen = RouteObserver {
                    metrics: Arc::clone(&resources.metrics),
                    counts: Arc::clone(&counts),
                    retention: config.retention,
                };
                let mut layer = resources.layer.clone().observer(Arc::new(seen));
                if let Some(docs) = &config.docs_url {
                    layer = layer.docs(docs.clone());
                }
                let methods = config.methods.clone();
                RouteService::Protected { layered: layer.layer(proxy), policy, methods }
            }
            RouteMode::Observe => {
                let options = observe::options(options(name, config, resolved));
                let policy = Arc::new(RoutePolicy::new(scope, options)?);
                let waits = config.in_flight != InFlight::Reject;
                let asks = config.on_unknown == OnUnknown::Reconcile;
                RouteService::Observed(ObservedRoute::new(
                    &resources.observing,
                    policy,
                    proxy,
                    Arc::clone(&resources.budget),
                    Arc::clone(&counts),
                    (waits, asks),
                ))
            }
        };
        // An observed route keeps the upstream's CORS headers.
        let cors = resolved.cors.clone().filter(|_| handling != RouteMode::Observe);
        let scope: Vec<_> = resolved.callers.names().cloned().collect();
        let claims = resolved.callers.parts().iter().filter_map(|part| match part {
            ScopePart::Claim(name) => Some(name.clone()),
            _ => None,
        });
        let claims = claims.collect();
        let key_header = config.key_header.clone();
        let counted = scope.iter().chain(config.fingerprint.headers()).chain([&key_header]);
        let names = ProtectedHeaders::new(counted);
        let docs = config.docs_url.clone();
        let unretried = match &service {
            RouteService::Protected { policy, .. } if policy.options().hook_name.is_some() => {
                Some(UnretriedRoute {
                    hooks: policy.hook_hashes(resources.layer.engine()),
                    replaces_credentials: resolved.authorization.is_some(),
                    url: url.unwrap_or_default(),
                    wait: config.lease.saturating_add(config.upstream_timeout),
                })
            }
            _ => None,
        };
        Ok(Arc::new(Route {
            name: name.into(),
            service,
            docs,
            cors,
            counts,
            names,
            key_header,
            scope,
            claims,
            unretried,
        }))
    }

    /// Returns the reconcile client with these settings; routes share it, also with the snapshot
    /// before.
    fn reconcile_client(
        &mut self,
        target: (Origin, PathAndQuery),
        config: &PolicyConfig,
        resolved: &ResolvedPolicy,
    ) -> ReconcileClient {
        let timeout = config.upstream_timeout;
        let mut shown = resolved.callers.parts().to_vec();
        shown.push(config.key_header.clone().into());
        let question = (target, shown, config.max_response_body, timeout);
        let earlier = self.before.map_or(&[][..], |snapshot| &snapshot.reconcile_clients);
        let known = |reconcile_clients: &[(ReconcileTarget, ReconcileClient)]| {
            reconcile_clients
                .iter()
                .find(|(it, _)| *it == question)
                .map(|(_, reconciler)| reconciler.clone())
        };
        if let Some(reconciler) = known(&self.reconcile_clients) {
            return reconciler;
        }
        if let Some(reconciler) = known(earlier) {
            self.reconcile_clients.push((question, reconciler.clone()));
            return reconciler;
        }
        let resources = self.resources;
        let (target, shown, max_body, timeout) = question.clone();
        let reconciler = ReconcileClient::new(target, shown, max_body, timeout, &resources.connect);
        self.resources.upstreams.add(reconciler.upstream().clone());
        self.reconcile_clients.push((question, reconciler.clone()));
        reconciler
    }
}

fn options(name: &str, config: &PolicyConfig, resolved: &ResolvedPolicy) -> RouteOptions {
    RouteOptions {
        name: Arc::from(name),
        key: config.key,
        key_header: config.key_header.clone(),
        grammar: config.grammar,
        fingerprint: config.fingerprint.clone(),
        expires: config.expires,
        methods: config.methods.clone(),
        policy: resolved.policy,
        profile: config.profile,
        statuses: config.statuses.clone(),
        cookies: if config.replay_set_cookie { Cookies::Keep } else { Cookies::Drop },
        stream: config.stream,
        max_request_body: config.max_request_body,
        max_response_body: config.max_response_body,
        max_in_flight_per_scope: config.max_in_flight_per_scope,
        store_outage: config.store_outage,
        completion_outage: config.completion_outage,
        reconcile: None,
        hook_name: None,
        // The services that it protects write to other databases.
        transactions: None,
        // It sees targets as clients send them, and responses are classified by their status and
        // headers.
        target: None,
        classify: None,
    }
}
