//! A gateway's life: start, run, drain, end.

use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::Duration;

use hapax::{Idempotency, Store};
use hapax_http::server::{
    IdempotencyLayer, RouteError, RouteOptions, RoutePolicy, ScopeSource, StoreOutage,
};
use hapax_http::stored::Cookies;
use tokio::net::TcpListener;
use tokio::task::JoinHandle;
use tokio::time::timeout;
use tower_layer::Layer;

use crate::admin::{self, Admin};
use crate::auth::Auth;
use crate::config::{Callers, Config, ConfigError, Settled};
use crate::front::Front;
use crate::housekeeping::housekeeping;
use crate::keys::Keys;
use crate::listener;
use crate::memory::{self, Shares};
use crate::metrics::Metrics;
use crate::proxy::Proxy;
use crate::reconcile::Asker;
use crate::store::{Measured, Opened, Opening, StoreOpenError, StoreUrl};
use crate::upstream::Upstream;
use crate::work::{Phase, Work};

/// How many requests to the upstream may be under way for each connection: its own, and that of a
/// client that has hung up.
const UNDER_WAY: usize = 2;

/// How long connections may take to write their last answers.
const CLOSE: Duration = Duration::from_secs(1);

/// Starts gateways.
#[derive(Clone, Copy, Debug)]
pub struct Gateway;

/// A gateway that runs. Dropping it closes its listeners and connections at once; executions under
/// way end with the runtime, or by themselves.
#[derive(Debug)]
pub struct Running {
    local_addr: SocketAddr,
    admin_addr: Option<SocketAddr>,
    layer: IdempotencyLayer,
    engine: Idempotency,
    upstreams: Vec<Upstream>,
    opened: Opened,
    work: Work,
    store_timeout: Duration,
    drain_timeout: Duration,
    listener: Task,
    admin: Option<Task>,
    housekeeping: Task,
}

/// What a drain left behind.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Ended {
    /// Requests that did not end in time: what was sent is recorded as unknown.
    pub cut_off: usize,
    /// Outcomes that the store did not take in time. They are lost; their leases lapse.
    pub not_recorded: usize,
}

/// Why a gateway did not start. Nothing is left running.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum StartError {
    /// It was told something that cannot be.
    #[error(transparent)]
    Config(#[from] ConfigError),
    /// An address could not be listened on.
    #[error("cannot listen on {address}: {source}")]
    Listen {
        /// Which.
        address: SocketAddr,
        /// Why.
        source: io::Error,
    },
    /// The store did not open.
    #[error(transparent)]
    Store(#[from] StoreOpenError),
}

impl From<RouteError> for StartError {
    fn from(error: RouteError) -> Self {
        Self::Config(error.into())
    }
}

impl Gateway {
    /// Starts a gateway as `config` says. It must be called on a tokio runtime.
    ///
    /// # Errors
    /// [`StartError`].
    pub async fn start(config: Config) -> Result<Running, StartError> {
        let settled = config.settle()?;
        let listeners = Listeners::bind(&config).await?;
        let opening = Opening {
            store: config.store.clone(),
            cache: config.cache.clone(),
            secret_file: config.secret_file.clone(),
            admin: listeners.admin_addr()?,
            memory: settled.memory.store,
            // Sooner than the engine gives up: a store that says that nothing was sent is worth more
            // than silence, after which anything may have happened.
            timeout: config.store_timeout * 3 / 4,
            make: true,
        };
        let opened = opening.open().await?;
        run(&config, settled, listeners, opened)
    }

    /// Starts a gateway on a store that is open already; `config.store` is ignored,
    /// and the store's part of the memory is for whoever opened it to keep.
    ///
    /// # Errors
    /// [`StartError`].
    pub async fn start_on(config: Config, opened: Opened) -> Result<Running, StartError> {
        let settled = config.settle()?;
        let listeners = Listeners::bind(&config).await?;
        run(&config, settled, listeners, opened)
    }
}

impl Running {
    /// Where clients connect.
    #[must_use]
    pub const fn local_addr(&self) -> SocketAddr {
        self.local_addr
    }

    /// Where operators connect.
    #[must_use]
    pub const fn admin_addr(&self) -> Option<SocketAddr> {
        self.admin_addr
    }

    /// The engine, and what it has in hand.
    #[must_use]
    pub const fn engine(&self) -> &Idempotency {
        &self.engine
    }

    /// Drains and ends.
    ///
    /// 1. No new connections; new requests on those that are there get 503 `draining`.
    /// 2. What is in hand may end within `drain_timeout`, and is recorded.
    /// 3. What has not ended then is cut off. Of what was sent to the upstream the outcome is
    ///    recorded as unknown; what was not sent is released.
    /// 4. What is held back for the store gets one more store time-out; then everything is closed.
    pub async fn shutdown(mut self) -> Ended {
        tracing::info!(requests = self.work.in_hand(), "draining");
        self.work.enter(Phase::Draining);
        let (work, engine) = (self.work.clone(), self.engine.clone());
        let idle = || work.in_hand() == 0 && engine.stats().in_flight == 0;
        let in_time = listener::settled(self.drain_timeout, idle).await;
        let mut ended = Ended::default();
        if !in_time {
            ended.cut_off = work.in_hand().max(engine.stats().in_flight);
            for upstream in &self.upstreams {
                upstream.cut();
            }
        }
        // What the cut ended is recorded now; what hangs elsewhere is unknown.
        let drained = self.layer.drain(self.store_timeout).await;
        ended.cut_off = ended.cut_off.max(drained.cut_off);
        if timeout(self.store_timeout, self.engine.drain()).await.is_err() {
            ended.not_recorded = self.engine.stats().held_back;
        }
        self.work.enter(Phase::Closing);
        self.listener.join(CLOSE).await;
        if let Some(admin) = &mut self.admin {
            admin.join(CLOSE).await;
        }
        self.housekeeping.0.abort();
        self.opened.close().await;
        tracing::info!(cut_off = ended.cut_off, not_recorded = ended.not_recorded, "ended");
        ended
    }
}

/// A task that ends with its owner.
#[derive(Debug)]
struct Task(JoinHandle<()>);

impl Task {
    async fn join(&mut self, limit: Duration) {
        if timeout(limit, &mut self.0).await.is_err() {
            self.0.abort();
        }
    }
}

impl Drop for Task {
    fn drop(&mut self) {
        self.0.abort();
    }
}

struct Listeners {
    data: TcpListener,
    admin: Option<TcpListener>,
}

impl Listeners {
    async fn bind(config: &Config) -> Result<Self, StartError> {
        let data = bind(config.listen).await?;
        let admin = match config.admin {
            Some(address) => Some(bind(address).await?),
            None => None,
        };
        Ok(Self { data, admin })
    }

    /// With the port that the kernel chose, where it was to choose one.
    fn admin_addr(&self) -> Result<Option<SocketAddr>, StartError> {
        self.admin.as_ref().map(local_addr).transpose()
    }
}

async fn bind(address: SocketAddr) -> Result<TcpListener, StartError> {
    TcpListener::bind(address).await.map_err(|source| StartError::Listen { address, source })
}

fn local_addr(listener: &TcpListener) -> Result<SocketAddr, StartError> {
    let unbound = (std::net::Ipv4Addr::UNSPECIFIED, 0).into();
    listener.local_addr().map_err(|source| StartError::Listen { address: unbound, source })
}

fn run(
    config: &Config,
    settled: Settled,
    listeners: Listeners,
    opened: Opened,
) -> Result<Running, StartError> {
    let metrics = Arc::new(Metrics::new(config.retention));
    let engine = engine(config, settled.memory, &opened, &metrics);
    let scope_headers = settled.callers.headers().to_vec();
    let asker = settled.reconcile.map(|target| {
        let timeout = config.upstream_timeout;
        Asker::new(target, scope_headers.clone(), config.max_response_body, timeout)
    });
    let concurrent = config.limits.connections.saturating_mul(UNDER_WAY);
    let upstream = Upstream::new(settled.upstream, config.upstream_timeout, concurrent);
    let auth = settled.auth.zip(config.auth.as_ref());
    let auth = auth.map(|(target, told)| Auth::new(target, told, Arc::clone(&metrics)));
    let auth = auth.map(Arc::new);
    let upstreams = std::iter::once(&upstream)
        .chain(asker.as_ref().map(Asker::upstream))
        .chain(auth.as_deref().map(Auth::upstream))
        .cloned()
        .collect::<Vec<_>>();

    let options = RouteOptions {
        key: config.key,
        methods: config.methods.clone(),
        policy: settled.policy,
        reconcile: asker.map(|asker| Arc::new(asker) as _),
        profile: config.profile,
        cookies: if config.replay_set_cookie { Cookies::Keep } else { Cookies::Drop },
        max_request_body: config.max_request_body,
        max_response_body: config.max_response_body,
        store_outage: config.store_outage,
        ..RouteOptions::default()
    };
    let scope = match &settled.callers {
        Callers::Everyone => ScopeSource::shared(),
        Callers::Headers(names) => ScopeSource::headers(names.iter().cloned(), settled.missing),
    };
    let mut layer = IdempotencyLayer::new(engine.clone(), RoutePolicy::new(scope, options)?)
        .body_memory(settled.memory.bodies)
        .observer(Arc::clone(&metrics) as _);
    if let Some(docs) = &config.docs_url {
        layer = layer.docs(docs.clone());
    }

    let work = Work::new();
    let proxy = Proxy { upstream, docs: config.docs_url.clone(), metrics: Arc::clone(&metrics) };
    let front = Arc::new(Front {
        service: layer.layer(proxy),
        auth,
        work: work.clone(),
        methods: config.methods.clone(),
        stall: config.limits.stall,
        docs: config.docs_url.clone(),
        metrics: Arc::clone(&metrics),
    });
    let (local_addr, admin_addr) = (local_addr(&listeners.data)?, listeners.admin_addr()?);
    let keys = Keys::new(engine.clone(), Arc::clone(&opened.store), config.store_timeout);
    let admin = Arc::new(Admin {
        keys,
        opened: opened.clone(),
        engine: engine.clone(),
        metrics: Arc::clone(&metrics),
        work: work.clone(),
        token: config.admin_token.clone(),
        scope: scope_headers,
        store_up: AtomicBool::new(true),
    });
    warn(config, &opened);
    Ok(Running {
        local_addr,
        admin_addr,
        layer,
        engine,
        housekeeping: Task(tokio::spawn(housekeeping(
            Arc::clone(&opened.store) as Arc<dyn Store>,
            metrics,
            upstreams.clone(),
        ))),
        upstreams,
        opened,
        work,
        store_timeout: config.store_timeout,
        drain_timeout: config.drain_timeout,
        listener: Task(tokio::spawn(listener::serve(listeners.data, front, config.limits))),
        admin: listeners.admin.map(|listener| Task(tokio::spawn(admin::serve(listener, admin)))),
    })
}

fn engine(config: &Config, memory: Shares, opened: &Opened, metrics: &Metrics) -> Idempotency {
    let store =
        Measured::new(Arc::clone(&opened.store), Arc::clone(&metrics.calls), config.store_timeout);
    let mut limits = hapax::Limits {
        waiters_per_key: config.max_waiters,
        held_back_bytes: memory.held_back,
        ..hapax::Limits::default()
    };
    if let Some(told) = opened.told() {
        limits.claims = memory::claims(told, config.max_response_body);
    }
    let mut builder =
        Idempotency::builder(Arc::new(store)).store_timeout(config.store_timeout).limits(limits);
    if let Some(secret) = &opened.secret {
        builder = builder.secret(secret.clone());
    }
    if let Some(notify) = &opened.notify {
        builder = builder.notify(Arc::clone(notify));
    }
    builder.build()
}

fn warn(config: &Config, opened: &Opened) {
    if opened.secret.is_none() {
        tracing::warn!("there is no secret: whoever reads the store can guess keys and callers");
    }
    if let StoreUrl::Redis(url) | StoreUrl::Postgres(url) = &config.store
        && url.is_in_the_clear()
    {
        tracing::warn!("the store is reached in the clear: use rediss://, or sslmode=require");
    }
    if config.store_outage == StoreOutage::Open {
        tracing::warn!("while the store is away, requests are executed unprotected");
    }
}
