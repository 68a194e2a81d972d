//! What holds for requests: one configuration at a time.
//!
//! A request takes the [`ConfigSnapshot`] of the moment it arrives and is served by that alone, to its end; a
//! reload replaces it for requests to come. So no request sees a mixture, and none is held up. What
//! is not of a configuration (the engine and its store, memory, connections, counts) outlives it and
//! is [`SharedResources`].

use std::sync::{Arc, PoisonError, RwLock};

use hapax_core::{
    EngineError, Idempotency, InFlight, MemoryCapacity, MemoryStore, OnUnknown, SystemClock,
};
use hapax_http::problem::{Code, DocsUrl, Problem};
use hapax_http::server::{
    IdempotencyLayer, IdempotencyService, RouteOptions, RoutePolicy, ScopeSource,
};
use hapax_http::stored_response::Cookies;
use http::uri::PathAndQuery;
use http::{HeaderName, Method};
use tokio::sync::Semaphore;
use tower_http::cors::CorsLayer;
use tower_layer::Layer;

use crate::auth::Auth;
use crate::config::{
    Config, ConfigError, ForwardAuth, PolicyConfig, ResolvedConfig, ResolvedPolicy, RouteMode,
    ScopeConfig,
};
use crate::metrics::{Metrics, RouteCounts, RouteObserver};
use crate::observe::{self, ObservedRoute};
use crate::proxy::Proxy;
use crate::proxy::spoofing::ProtectedHeaders;
use crate::reconcile::{ReconcileClient, RouteReconciler};
use crate::routes::RouteTable;
use crate::upstream::{ConnectOptions, Origin, Upstream, Upstreams};

/// The configuration that holds for new requests.
#[derive(Debug)]
pub(crate) struct CurrentConfig(RwLock<Arc<ConfigSnapshot>>);

impl CurrentConfig {
    pub(crate) fn new(snapshot: ConfigSnapshot) -> Self {
        Self(RwLock::new(Arc::new(snapshot)))
    }

    pub(crate) fn now(&self) -> Arc<ConfigSnapshot> {
        Arc::clone(&self.0.read().unwrap_or_else(PoisonError::into_inner))
    }

    pub(crate) fn replace(&self, snapshot: ConfigSnapshot) {
        *self.0.write().unwrap_or_else(PoisonError::into_inner) = Arc::new(snapshot);
    }
}

/// One configuration, at work.
#[derive(Debug)]
pub(crate) struct ConfigSnapshot {
    table: RouteTable,
    routes: Vec<Arc<Route>>,
    /// For what falls under no route.
    rest: Arc<Route>,
    /// Whom it asks whether a request is allowed, and as it was told.
    auth: Option<(ForwardAuth, Arc<Auth>)>,
    upstream: Upstream,
    reconcile_clients: Vec<(ReconcileTarget, ReconcileClient)>,
    /// The headers that name callers, of all policies.
    callers: Vec<Vec<HeaderName>>,
}

/// What holds on a route.
#[derive(Debug)]
pub(crate) struct Route {
    /// Its name in metrics and logs; that of the rest is empty.
    pub(crate) name: Arc<str>,
    pub(crate) service: RouteService,
    pub(crate) docs: Option<DocsUrl>,
    pub(crate) cors: Option<CorsLayer>,
    pub(crate) counts: Arc<RouteCounts>,
    /// Fields that count on it.
    pub(crate) names: ProtectedHeaders,
    /// The header that has the key.
    pub(crate) key_header: HeaderName,
    /// The headers that name the caller.
    pub(crate) scope: Vec<HeaderName>,
}

/// Who answers on a route.
#[derive(Debug)]
pub(crate) enum RouteService {
    /// The layer, under this policy, which protects these methods.
    Protected { layered: IdempotencyService<Proxy>, policy: PolicyExtension, methods: Vec<Method> },
    /// The upstream.
    Passed(Proxy),
    /// The upstream, and it is found out what the layer would have done.
    Observed(ObservedRoute),
}

/// A request extension: the policy that the layer holds it to.
#[derive(Clone, Debug)]
pub(crate) struct PolicyExtension(pub(crate) Arc<RoutePolicy>);

/// Whom to ask what became of an operation, with which headers, for how much, and for how long.
type ReconcileTarget = ((Origin, PathAndQuery), Vec<HeaderName>, usize, std::time::Duration);

impl ConfigSnapshot {
    /// The route that a request falls under.
    pub(crate) fn route(&self, path: &str, method: &Method) -> Result<&Arc<Route>, Problem> {
        match self.table.route(path, method) {
            Ok(found) => Ok(found.and_then(|index| self.routes.get(index)).unwrap_or(&self.rest)),
            Err(detail) => Err(Problem::new(Code::MalformedRequest, detail)),
        }
    }

    /// What holds for what falls under no route.
    pub(crate) const fn rest(&self) -> &Arc<Route> {
        &self.rest
    }

    /// Whom it asks whether a request is allowed.
    pub(crate) fn auth(&self) -> Option<&Arc<Auth>> {
        self.auth.as_ref().map(|(_, auth)| auth)
    }

    /// Whom it asks what became of operations.
    pub(crate) fn reconcile_clients(&self) -> impl Iterator<Item = &ReconcileClient> {
        self.reconcile_clients.iter().map(|(_, reconciler)| reconciler)
    }

    /// The headers that name callers: first those of what falls under no route.
    pub(crate) fn callers(&self) -> &[Vec<HeaderName>] {
        &self.callers
    }
}

/// What outlives a configuration.
#[derive(Debug)]
pub(crate) struct SharedResources {
    /// It holds requests to what they bear as [`PolicyExtension`].
    pub(crate) layer: IdempotencyLayer,
    pub(crate) metrics: Arc<Metrics>,
    pub(crate) upstreams: Arc<Upstreams>,
    /// How many requests may be under way to the upstream.
    pub(crate) concurrent: usize,
    /// How upstreams are connected to.
    pub(crate) connect: ConnectOptions,
    observing: IdempotencyLayer,
    pub(crate) observed: Arc<MemoryStore>,
    /// For copies of bodies that are observed.
    budget: Arc<Semaphore>,
}

impl SharedResources {
    /// `observed`: bytes for what is observed.
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
                parts
                    .extensions
                    .get::<PolicyExtension>()
                    .map(|PolicyExtension(policy)| Arc::clone(policy))
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

    /// Puts a configuration to work, with what `before` has of it.
    pub(crate) fn snapshot(
        &self,
        config: &Config,
        resolved: ResolvedConfig,
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
        let mut callers = vec![resolved.policy.callers.headers().to_vec()];
        let mut routes = Vec::with_capacity(config.routes.len());
        for (index, (config, resolved)) in config.routes.iter().zip(&resolved.routes).enumerate() {
            let route = builder.route(config.name(), config.handling, &config.policy, resolved);
            routes.push(route.map_err(|error| config.error(index, error))?);
            if !callers.iter().any(|names| names == resolved.callers.headers()) {
                callers.push(resolved.callers.headers().to_vec());
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
        Ok(ConfigSnapshot { table, routes, rest, auth, upstream, reconcile_clients, callers })
    }
}

/// A configuration that is being put to work.
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
            ScopeConfig::Headers(names) => {
                ScopeSource::headers(names.iter().cloned(), resolved.missing)
            }
        };
        let service = match handling {
            RouteMode::Pass => RouteService::Passed(proxy),
            RouteMode::Protect => {
                let reconciler = resolved
                    .reconcile
                    .clone()
                    .map(|target| self.reconcile_client(target, config, resolved));
                let mut options = options(name, config, resolved);
                options.reconcile = reconciler.map(|reconciler| {
                    let (route, counts) = (Arc::from(name), Arc::clone(&counts));
                    Arc::new(RouteReconciler { reconciler, route, counts }) as _
                });
                let policy = PolicyExtension(Arc::new(RoutePolicy::new(scope, options)?));
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
        // What is observed is the upstream's own answer.
        let cors = resolved.cors.clone().filter(|_| handling != RouteMode::Observe);
        let scope = resolved.callers.headers().to_vec();
        let key_header = config.key_header.clone();
        let counted = scope.iter().chain(config.fingerprint.headers()).chain([&key_header]);
        let names = ProtectedHeaders::new(counted);
        let docs = config.docs_url.clone();
        Ok(Arc::new(Route {
            name: name.into(),
            service,
            docs,
            cors,
            counts,
            names,
            key_header,
            scope,
        }))
    }

    /// Routes that ask the same share who asks, also with those of the configuration before.
    fn reconcile_client(
        &mut self,
        target: (Origin, PathAndQuery),
        config: &PolicyConfig,
        resolved: &ResolvedPolicy,
    ) -> ReconcileClient {
        let timeout = config.upstream_timeout;
        let mut shown = resolved.callers.headers().to_vec();
        shown.push(config.key_header.clone());
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
        // What it protects writes elsewhere.
        transactions: None,
        // It sees targets as clients know them, and responses say themselves what they mean.
        target: None,
        classify: None,
    }
}
