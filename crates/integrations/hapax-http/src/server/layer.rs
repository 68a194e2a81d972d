//! The layer.

use std::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::time::Duration;

use hapax_core::transaction::Transactions;
use hapax_core::{EngineError, Idempotency, IdempotencyBuilder, InFlight, OnUnknown, Store};
use http::Response;
use http::header::AUTHORIZATION;
use http::request::Parts;
use tokio::time::{Instant, timeout};
use tower_layer::Layer;

use super::budget::BodyBudgets;
use super::concurrency::ConcurrencyLimits;
use super::drain::{DrainGate, DrainReport, signalled};
use super::observe::{NoObserver, Observer, RequestEvent};
use super::policy::{KeyRule, RouteError, RouteOptions, RoutePolicy};
use super::recent::RecentExecutions;
use super::response_info::{ResponseInfo, ResponseSource};
use super::scope::{MissingScope, ScopeSource};
use super::service::IdempotencyService;
use super::transaction::TransactionBackend;
use crate::body::Body;
use crate::error_format::ErrorFormat;
use crate::log_throttle::LogThrottle;
use crate::problem::{DocsUrl, Problem};

/// A layer that makes every service idempotent. See the [module](super) for its rules.
///
/// Clones, and all their services, share one engine and drain together.
#[derive(Clone, Debug)]
pub struct IdempotencyLayer {
    pub(super) engine: Idempotency,
    pub(super) routes: Routes,
    docs: Option<DocsUrl>,
    observer: Arc<dyn Observer>,
    pub(super) memory: BodyBudgets,
    pub(super) concurrency: Arc<ConcurrencyLimits>,
    pub(super) gate: Arc<DrainGate>,
    /// Log lines about a store that is unavailable.
    pub(super) outage_log: Arc<LogThrottle>,
    pub(super) recent: Arc<RecentExecutions>,
    /// Log lines about executions of one key and request for two callers.
    pub(super) callers_log: Arc<LogThrottle>,
}

impl IdempotencyLayer {
    /// Returns the builder of a layer over `store`. [`IdempotencyLayerBuilder`] has the defaults.
    pub fn builder(store: impl Store) -> IdempotencyLayerBuilder {
        IdempotencyLayerBuilder {
            engine: Idempotency::builder(store),
            scope: None,
            options: RouteOptions::default(),
        }
    }

    /// Returns a layer that applies one policy to every request, on an engine that others may
    /// share.
    #[must_use]
    pub fn new(engine: Idempotency, policy: RoutePolicy) -> Self {
        Self::with(engine, Routes::One(Arc::new(policy)))
    }

    /// Creates a layer that gets the policy of each request from `route`; without a policy a
    /// request passes through.
    #[must_use]
    pub fn routed(
        engine: Idempotency,
        route: impl Fn(&Parts) -> Option<Arc<RoutePolicy>> + Send + Sync + 'static,
    ) -> Self {
        Self::with(engine, Routes::ByRequest(Arc::new(route)))
    }

    fn with(engine: Idempotency, routes: Routes) -> Self {
        Self {
            engine,
            routes,
            docs: None,
            observer: Arc::new(NoObserver),
            memory: BodyBudgets::unbounded(),
            concurrency: Arc::default(),
            gate: DrainGate::new(),
            outage_log: Arc::default(),
            recent: Arc::default(),
            callers_log: Arc::default(),
        }
    }

    /// Sets the place where rejections are documented. Default: none, their type is a URN.
    #[must_use]
    pub fn docs(mut self, docs: DocsUrl) -> Self {
        self.docs = Some(docs);
        self
    }

    /// Sets the observer of events. Default: none.
    #[must_use]
    pub fn observer(mut self, observer: Arc<dyn Observer>) -> Self {
        self.observer = observer;
        self
    }

    /// Limits the bytes of bodies in memory, those of up to 16 KiB not counted. Default: no limit
    /// except those of each body.
    ///
    /// 1. Three eighths are for requests: without memory, a request waits before it claims, up to
    ///    30 s, and then gets 503 `overloaded`.
    /// 2. A quarter is for responses until they are recorded, also while their writes are deferred:
    ///    without memory, a response waits for others to be recorded, never for clients. A response
    ///    without a declared length counts with its limit until it is read.
    /// 3. An eighth is for copies of a response while it is recorded.
    /// 4. A quarter is for responses on their way to clients. Without memory, because clients read
    ///    slowly, a response is recorded and not sent: 503 `outcome-pending`, and the client
    ///    retries; a replay gets 503 `overloaded`. A response that is too large to store, for which
    ///    a retry would not help, gets 409 `response-not-retained`.
    ///
    /// At least 2 MiB, and never less than one body of each kind at its route's limit: the limit is
    /// exact from sixteen times the largest response and three times the largest request.
    /// [`hapax_core::EngineLimits::claims`] and the store limit the memory of replays that are
    /// being read.
    #[must_use]
    pub fn body_memory(mut self, bytes: usize) -> Self {
        self.memory = BodyBudgets::bounded(bytes);
        self
    }

    /// Returns the engine, which functions, sagas and consumers of the same service share.
    #[must_use]
    pub const fn engine(&self) -> &Idempotency {
        &self.engine
    }

    /// Drains the layer: new requests get 503 `draining`; requests in progress may end within
    /// `grace`; then they are cut off, and their outcomes recorded as unknown.
    ///
    /// A request with a key counts until its outcome is recorded or deferred. The drain does not
    /// wait for requests without a key, nor for the rest of recorded responses, on their way to
    /// clients, streamed, or too large to store. The server's own shutdown does, with its own
    /// limit: a client that does not read would delay it without end.
    ///
    /// Resolves when no request is in progress and the store has accepted all writes of the engine,
    /// at the latest after the grace; if requests were cut off, twice the engine's
    /// [`store_timeout`](Idempotency::store_timeout) later. Requests that end after that are not
    /// recorded, and their leases lapse. Dropping this future stops waiting, not draining.
    pub async fn drain(&self, grace: Duration) -> DrainReport {
        let (began, last) = (Instant::now(), self.engine.store_timeout().saturating_mul(2));
        let report = self.gate.drain(grace, last).await;
        let limit = if report.cut_off == 0 { grace } else { grace.saturating_add(last) };
        let rest = limit.saturating_sub(began.elapsed());
        let _ = timeout(rest, self.engine.deferred_written()).await;
        DrainReport { deferred: self.engine.stats().deferred, ..report }
    }

    /// Waits for SIGTERM or SIGINT (elsewhere than on Unix: Ctrl-C) and [drains](Self::drain) the layer.
    /// Logs what the drain left. For `axum::serve`:
    ///
    /// ```no_run
    /// # async fn run(layer: hapax_http::server::IdempotencyLayer) -> std::io::Result<()> {
    /// let app: axum::Router = axum::Router::new()
    ///     .route("/orders", axum::routing::post(|| async { "ordered" }))
    ///     .layer(layer.clone());
    /// let listener = tokio::net::TcpListener::bind("127.0.0.1:3000").await?;
    /// let ending = layer.drain_on_signal(std::time::Duration::from_secs(25));
    /// axum::serve(listener, app).with_graceful_shutdown(ending).await
    /// # }
    /// ```
    pub async fn drain_on_signal(self, grace: Duration) {
        signalled().await;
        let report = self.drain(grace).await;
        let DrainReport { cut_off, left, deferred } = report;
        if report == DrainReport::default() {
            tracing::info!("drained");
        } else {
            tracing::error!(
                cut_off,
                left,
                deferred,
                "the drain left outcomes that the store does not have: the policies for unknown outcomes apply"
            );
        }
    }

    /// Returns whether a secret names records: otherwise their ids reveal caller and key to guesses.
    pub(super) fn names_by_secret(&self) -> bool {
        self.engine.store().capabilities().naming().is_some()
    }

    /// Notifies the observer. A panic of it must not cost a lease or a response.
    pub(super) fn observe(&self, policy: &RoutePolicy, event: RequestEvent) {
        let observe = || self.observer.observe(&policy.options.name, event);
        if catch_unwind(AssertUnwindSafe(observe)).is_err() {
            tracing::error!(?event, "the observer panicked");
        }
    }

    /// Returns a problem as a response.
    pub(super) fn reject(
        &self,
        policy: &RoutePolicy,
        error_format: ErrorFormat,
        problem: &Problem,
    ) -> Response<Body> {
        self.observe(policy, RequestEvent::Rejected(problem.code()));
        let mut response = error_format.render(problem, self.docs.as_ref()).map(Body::from);
        let rejected = ResponseInfo { operation: None, by: ResponseSource::Rejection };
        response.extensions_mut().insert(rejected);
        response
    }
}

/// A builder of an [`IdempotencyLayer`].
///
/// By default:
/// 1. The header `Authorization` names the caller; a request without it gets 400 `missing-scope`.
/// 2. A key is optional: a request without one passes through unprotected.
/// 3. POST and PATCH are protected.
/// 4. After an unknown outcome nothing executes until an operator decides ([`OnUnknown::Block`]).
#[derive(Debug)]
#[must_use]
pub struct IdempotencyLayerBuilder {
    engine: IdempotencyBuilder,
    scope: Option<ScopeSource>,
    options: RouteOptions,
}

impl IdempotencyLayerBuilder {
    /// Sets the source of the caller's name.
    pub fn scope(mut self, scope: ScopeSource) -> Self {
        self.scope = Some(scope);
        self
    }

    /// Rejects protected requests without a key: 400 `missing-key`.
    pub const fn require_key(mut self) -> Self {
        self.options.key = KeyRule::Required;
        self
    }

    /// Sets the treatment of a retry after an unknown outcome.
    pub const fn on_unknown(mut self, on_unknown: OnUnknown) -> Self {
        self.options.policy.terms.on_unknown = on_unknown;
        self
    }

    /// Sets the time that a duplicate waits for a request in flight. By default it gets 409 at
    /// once.
    pub const fn wait(mut self, timeout: Duration) -> Self {
        self.options.policy.in_flight = InFlight::Wait(timeout);
        self
    }

    /// Sets the lease: the time for which a process that crashed blocks its keys. By default 30 s. It
    /// is not renewed within a transaction: set it to at least the longest time of one.
    pub const fn lease(mut self, lease: Duration) -> Self {
        self.options.policy.terms.lease = lease;
        self
    }

    /// Sets the time for which an outcome is replayed. By default 24 h.
    pub const fn retention(mut self, retention: Duration) -> Self {
        self.options.policy.terms.retention = retention;
        self
    }

    /// Commits the handlers' writes together with the record, as
    /// [`transaction`](super::transaction) explains. A key is then required. If handlers have no
    /// effect outside of the transaction, [`OnUnknown::Reexecute`] fits: without a commit all was
    /// rolled back.
    pub fn transactions<D: Transactions>(self, database: D) -> Self {
        let mut builder = self.require_key();
        builder.options.transactions = Some(TransactionBackend::new(Arc::new(database)));
        builder
    }

    /// Sets the [`Namespace`](hapax_core::Namespace): the name of this service among those that share the
    /// store, which PostgreSQL and Redis require.
    pub fn namespace(mut self, name: impl AsRef<str>) -> Self {
        self.engine = self.engine.namespace(name);
        self
    }

    /// Sets the timeout of the store. By default 2 s.
    pub fn store_timeout(mut self, timeout: Duration) -> Self {
        self.engine = self.engine.store_timeout(timeout);
        self
    }

    /// Replaces all options of the route, including those set so far.
    pub fn options(mut self, options: RouteOptions) -> Self {
        self.options = options;
        self
    }

    /// Starts the engine on the caller's runtime and returns the layer.
    ///
    /// # Errors
    /// [`LayerError`] names the option or the limit that is not valid.
    pub fn build(self) -> Result<IdempotencyLayer, LayerError> {
        let Self { engine, scope, options } = self;
        let scope =
            scope.unwrap_or_else(|| ScopeSource::headers([AUTHORIZATION], MissingScope::Reject));
        let policy = RoutePolicy::new(scope, options)?;
        Ok(IdempotencyLayer::new(engine.build()?, policy))
    }
}

/// Reasons for which a layer cannot be built.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum LayerError {
    /// The options of the route contradict each other.
    #[error(transparent)]
    Route(#[from] RouteError),
    /// The engine cannot start.
    #[error(transparent)]
    Engine(#[from] EngineError),
}

impl<S> Layer<S> for IdempotencyLayer {
    type Service = IdempotencyService<S>;

    fn layer(&self, inner: S) -> IdempotencyService<S> {
        IdempotencyService::new(Arc::new(self.clone()), inner)
    }
}

type RouteFn = dyn Fn(&Parts) -> Option<Arc<RoutePolicy>> + Send + Sync;

/// The source of the policy of a request.
#[derive(Clone)]
pub(super) enum Routes {
    One(Arc<RoutePolicy>),
    ByRequest(Arc<RouteFn>),
}

impl Routes {
    pub(super) fn policy(&self, parts: &Parts) -> Option<Arc<RoutePolicy>> {
        match self {
            Self::One(policy) => Some(Arc::clone(policy)),
            Self::ByRequest(route) => route(parts),
        }
    }
}

impl fmt::Debug for Routes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::One(policy) => policy.fmt(f),
            Self::ByRequest(_) => f.write_str("by request"),
        }
    }
}
