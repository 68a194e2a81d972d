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
use tower_layer::Layer;

use super::budget::BodyBudgets;
use super::concurrency::ConcurrencyLimits;
use super::drain::{DrainGate, DrainReport};
use super::observe::{NoObserver, Observer, RequestEvent};
use super::policy::{KeyRule, RouteError, RouteOptions, RoutePolicy};
use super::response_info::{ResponseInfo, ResponseSource};
use super::scope::{MissingScope, ScopeSource};
use super::service::IdempotencyService;
use super::transaction::TransactionBackend;
use crate::body::Body;
use crate::error_format::ErrorFormat;
use crate::log_throttle::LogThrottle;
use crate::problem::{DocsUrl, Problem};

/// Makes every service it wraps idempotent. See the [module](super) for what that means.
///
/// Clones, and all services they wrap, share one engine and drain together.
#[derive(Clone, Debug)]
pub struct IdempotencyLayer {
    pub(super) engine: Idempotency,
    pub(super) routes: Routes,
    docs: Option<DocsUrl>,
    observer: Arc<dyn Observer>,
    pub(super) memory: BodyBudgets,
    pub(super) concurrency: Arc<ConcurrencyLimits>,
    pub(super) gate: Arc<DrainGate>,
    /// Log lines about a store that is away.
    pub(super) outage_log: Arc<LogThrottle>,
}

impl IdempotencyLayer {
    /// Begins a layer over `store`. [`IdempotencyLayerBuilder`] has the defaults.
    pub fn builder(store: impl Store) -> IdempotencyLayerBuilder {
        IdempotencyLayerBuilder {
            engine: Idempotency::builder(store),
            scope: None,
            options: RouteOptions::default(),
        }
    }

    /// Returns a layer that applies one policy to every request, on an engine that others use too.
    #[must_use]
    pub fn new(engine: Idempotency, policy: RoutePolicy) -> Self {
        Self::with(engine, Routes::One(Arc::new(policy)))
    }

    /// A layer that asks `route` for the policy of each request; without one it passes through.
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
        }
    }

    /// Where refusals are documented. Default: nowhere, their type is a URN.
    #[must_use]
    pub fn docs(mut self, docs: DocsUrl) -> Self {
        self.docs = Some(docs);
        self
    }

    /// Who counts. Default: nobody.
    #[must_use]
    pub fn observer(mut self, observer: Arc<dyn Observer>) -> Self {
        self.observer = observer;
        self
    }

    /// How many bytes of bodies are held in memory at one time, those of up to 16 KiB not counted.
    /// Default: no bound but the limits of each.
    ///
    /// 1. Three eighths are for requests: one for which there is no room waits before it claims, up
    ///    to 30 s, and then gets 503 `overloaded`.
    /// 2. A quarter is for responses until they are recorded, also while they are held back: one
    ///    for which there is no room waits for others to be recorded, never for clients. Of a
    ///    response that does not say its length, the limit counts until it is read.
    /// 3. An eighth is for the copies of it while it is recorded.
    /// 4. A quarter is for answers on their way to clients. One for which there is no room because
    ///    clients read slowly is recorded and not sent: 503 `outcome-pending`, and the client asks
    ///    again; a replay gets 503 `overloaded`. What could not be asked for again, being too large
    ///    to be kept, gets 409 `response-not-retained`.
    ///
    /// At least 2 MiB, and never less than one body of each kind at its route's limit: give it
    /// sixteen times the largest response and thrice the largest request to be held to it. What
    /// replays take before they are answers is for [`hapax_core::EngineLimits::claims`] and the
    /// store to bound.
    #[must_use]
    pub fn body_memory(mut self, bytes: usize) -> Self {
        self.memory = BodyBudgets::bounded(bytes);
        self
    }

    /// Ends the layer's work: new requests get 503 `draining`; what is inside may end within
    /// `grace`; then it is cut off, and its outcomes are recorded as unknown.
    ///
    /// Inside is a request with a key of a route, until its outcome is recorded or held back. What
    /// this does not wait for is what the server does with its connections: requests without a
    /// key that are under way, and the rest of answers that are recorded, be they on their way to a
    /// client, streams, or too large to keep. That is for the server's own shutdown, and for its
    /// bound: a client that does not read would hold it up for ever.
    ///
    /// Resolves when nothing is inside, at the latest twice the engine's
    /// [`store_timeout`](Idempotency::store_timeout) after the grace: what is inside then is not
    /// recorded, and its leases lapse unless it ends after all. What is held back for a store that
    /// is away is a matter for [`Idempotency::drain`]. Dropping this stops waiting, not draining.
    pub async fn drain(&self, grace: Duration) -> DrainReport {
        self.gate.drain(grace, self.engine.store_timeout().saturating_mul(2)).await
    }

    /// Tells the observer. One that panics must cost nobody a lease or an answer.
    pub(super) fn observe(&self, policy: &RoutePolicy, event: RequestEvent) {
        let observe = || self.observer.observe(&policy.options.name, event);
        if catch_unwind(AssertUnwindSafe(observe)).is_err() {
            tracing::error!(?event, "the observer panicked");
        }
    }

    /// Answers with a problem.
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

/// Builds an [`IdempotencyLayer`].
///
/// By default:
/// 1. A caller is named by the header `Authorization`; a request without it gets 400
///    `missing-scope`.
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
    /// Sets where the caller's name comes from.
    pub fn scope(mut self, scope: ScopeSource) -> Self {
        self.scope = Some(scope);
        self
    }

    /// Rejects protected requests without a key: 400 `missing-key`.
    pub const fn require_key(mut self) -> Self {
        self.options.key = KeyRule::Required;
        self
    }

    /// Sets what a retry after an unknown outcome leads to.
    pub const fn on_unknown(mut self, on_unknown: OnUnknown) -> Self {
        self.options.policy.terms.on_unknown = on_unknown;
        self
    }

    /// Sets how long a duplicate waits for a request in flight. By default it gets 409 at once.
    pub const fn wait(mut self, timeout: Duration) -> Self {
        self.options.policy.in_flight = InFlight::Wait(timeout);
        self
    }

    /// Sets how long an outcome is replayed. By default 24 h.
    pub const fn retention(mut self, retention: Duration) -> Self {
        self.options.policy.terms.retention = retention;
        self
    }

    /// Commits what handlers write together with the record: see
    /// [`transaction`](super::transaction). A key is then required. Where handlers have no effect
    /// outside of the transaction, [`OnUnknown::Reexecute`] fits: what did not commit was rolled
    /// back.
    pub fn transactions<D: Transactions>(self, database: D) -> Self {
        let mut builder = self.require_key();
        builder.options.transactions = Some(TransactionBackend::new(Arc::new(database)));
        builder
    }

    /// Sets the time that the store has to answer. By default 2 s.
    pub fn store_timeout(mut self, timeout: Duration) -> Self {
        self.engine = self.engine.store_timeout(timeout);
        self
    }

    /// Replaces all options of the route, also those set so far.
    pub fn options(mut self, options: RouteOptions) -> Self {
        self.options = options;
        self
    }

    /// Starts the engine on the runtime of the caller.
    ///
    /// # Errors
    /// [`LayerError`] names the option or the limit that cannot hold.
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
    /// The options of the route do not go together.
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

/// Which policy holds for a request.
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
