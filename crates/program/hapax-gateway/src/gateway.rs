//! Start, reload and shutdown of a gateway.

mod error;
mod reload;
mod task;
mod user;
mod warn;

use std::net::SocketAddr;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::Duration;

use hapax_core::{EngineError, Idempotency, Store, SystemEntropy, Timestamp};
use hapax_http::header::IDEMPOTENCY_KEY;
use hapax_operators::{AdminToken, Audit, Census, Operators, RegisteredUser};
use hapax_proxy::tls::{AllCertificates, ReadCertificates, TlsError};
use hapax_proxy::{ConnectOptions, ListenerConfig, Shutdown, ShutdownPhase, listener};
use tokio::net::{TcpListener, TcpSocket};
use tokio::time::{sleep, timeout};

use crate::access::AccessLog;
use crate::admin::{self, Admin, EndedTask};
use crate::budget::{self, MemoryPlan};
use crate::config::{Config, ResolvedConfig};
use crate::handler::RequestHandler;
use crate::housekeeping::housekeeping;
use crate::metrics::Metrics;
use crate::reconcile::{self, BackgroundReconciler, UnretriedReconciler};
use crate::snapshot::{CurrentConfig, SharedResources};
use crate::store::{MeasuredStore, OpenStore, StoreFinding, StoreOpenError, StoreOpener};
use crate::tokens::Tokens;
pub use error::StartError;
pub use reload::ReloadError;
use reload::ReloadState;
use task::Task;

/// Requests to the upstream that may be in progress for each connection: its own, and one of a client
/// that has disconnected.
const UNDER_WAY: usize = 2;

/// Time that connections may take to write their last responses.
const CLOSE: Duration = Duration::from_secs(1);

/// Starts gateways.
#[derive(Clone, Copy, Debug)]
pub struct Gateway;

/// A running gateway. Dropping it closes its listeners and connections at once; executions under
/// way end on their own or with the runtime.
#[derive(Debug)]
pub struct RunningGateway {
    local_addr: SocketAddr,
    admin_addr: Option<SocketAddr>,
    resources: SharedResources,
    current: Arc<CurrentConfig>,
    reloading: ReloadState,
    engine: Idempotency,
    opened: OpenStore,
    certificates: AllCertificates,
    shutdown: Shutdown,
    access: Option<Arc<AccessLog>>,
    store_timeout: Duration,
    listener: Task,
    admin: Option<Task>,
    housekeeping: Task,
    /// The reconciliation without retries, if it is on.
    reconciling: Option<Task>,
    /// The entry in the register of the store, and the task that keeps it.
    user: RegisteredUser,
    registered: Task,
}

/// Requests and outcomes that a drain could not finish.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct ShutdownReport {
    /// Requests that did not end in time. The outcomes of those that were sent are recorded as
    /// unknown.
    pub cut_off: usize,
    /// Outcomes that the store did not accept in time. They are lost; their leases lapse.
    pub not_recorded: usize,
}

impl Gateway {
    /// Starts a gateway with `config`. It must be called on a tokio runtime.
    ///
    /// The gateway listens at once, and accepts connections once the store is open. It waits at
    /// most [`Config::store_wait`] for an unreachable store. Meanwhile `/healthz` of the admin
    /// listener is answered, and `/readyz` is 503. If the future is dropped, no client was
    /// accepted.
    ///
    /// # Errors
    /// [`StartError`].
    pub async fn start(config: Config) -> Result<RunningGateway, StartError> {
        let resolved = config.resolve()?;
        let certificates = resolved.certificates(&config).await?;
        resolved.tokens.as_ref().map_or(Ok(()), Tokens::check)?;
        // Clients that connect from here on wait in the kernel's queue until the store is open.
        let listeners = Listeners::bind(&config)?;
        let listen = local_addr(&listeners.data)?;
        let opening = opening(&config, &resolved, listeners.admin_addr);
        let opened = opening.open_within(config.store_wait, listen).await?;
        let running = run(&config, resolved, certificates, listeners, opened).await?;
        tokio::spawn(async move { opening.warn_of_broken().await });
        Ok(running)
    }

    /// Checks whether a gateway could start, without listening, connecting, opening or creating
    /// anything. It finds contradictory settings, invalid URLs, and unusable files of certificates
    /// and secrets.
    ///
    /// # Errors
    /// [`StartError`].
    pub async fn check(config: &Config) -> Result<(), StartError> {
        config.check()?;
        let resolved = config.resolve()?;
        resolved.certificates(config).await?;
        resolved.tokens.as_ref().map_or(Ok(()), Tokens::check)?;
        if let Some(path) = config.token_file().filter(|path| path.exists()) {
            AdminToken::read(&path).map_err(|source| StartError::AdminToken { path, source })?;
        }
        let opening = opening(config, &resolved, None);
        // It reads a file. If this future is dropped, the task ends on its own.
        let checked = tokio::task::spawn_blocking(move || opening.check()).await;
        checked.map_err(|_| StoreOpenError::Shutdown)??;
        Ok(())
    }

    /// Requests each reconcile URL of a configuration with an operation that never existed, and
    /// returns whether the responses are as required, and which files of `reconcile_authorization` are open to other users.
    /// It neither listens nor opens a store.
    ///
    /// # Errors
    /// [`StartError`] where the configuration cannot be.
    pub async fn probe(config: &Config) -> Result<Vec<StoreFinding>, StartError> {
        let resolved = config.resolve()?;
        let certificates = resolved.certificates(config).await?;
        let engine = Idempotency::builder(Arc::new(hapax_core::MemoryStore::default())).build()?;
        let (metrics, connect) = (Arc::new(Metrics::new()), dialling(config, &certificates));
        let open_files = resolved.open_files();
        let snapshot = SharedResources::new(engine, 0, 0, metrics, 1, connect)?
            .snapshot(config, resolved, None, None)?;
        let mut findings: Vec<_> = open_files.iter().map(|path| warn::finding(path)).collect();
        for client in snapshot.reconcile_clients() {
            findings.push(reconcile::finding(client.clone()).await);
        }
        Ok(findings)
    }

    /// Starts a gateway on an open store. It ignores `config.store`; the caller keeps the store
    /// within its part of the memory.
    ///
    /// # Errors
    /// [`StartError`].
    pub async fn start_on(config: Config, opened: OpenStore) -> Result<RunningGateway, StartError> {
        let resolved = config.resolve()?;
        let certificates = resolved.certificates(&config).await?;
        let listeners = Listeners::bind(&config)?;
        run(&config, resolved, certificates, listeners, opened).await
    }
}

impl RunningGateway {
    /// Returns the address for clients.
    #[must_use]
    pub const fn local_addr(&self) -> SocketAddr {
        self.local_addr
    }

    /// Returns the address for operators.
    #[must_use]
    pub const fn admin_addr(&self) -> Option<SocketAddr> {
        self.admin_addr
    }

    /// Returns the time at which the store was created, if it is known.
    #[must_use]
    pub fn store_created(&self) -> Option<Timestamp> {
        self.opened.created()
    }

    /// Returns the engine, which counts the operations in progress.
    #[must_use]
    pub const fn engine(&self) -> &Idempotency {
        &self.engine
    }

    /// Reads the certificate files again. New connections use them; if they are unusable, the
    /// previous certificates stay in force. The gateway does this every few seconds as well.
    ///
    /// # Errors
    /// [`TlsError`], the first one.
    pub async fn reload_certificates(&self) -> Result<(), TlsError> {
        self.certificates.reload().await
    }

    /// Reads the certificate files again without applying them, so that they and a configuration
    /// can be applied together or not at all. Dropping the result changes nothing.
    ///
    /// # Errors
    /// [`TlsError`], the first one.
    pub async fn read_certificates(&self) -> Result<ReadCertificates, TlsError> {
        self.certificates.read_again().await
    }

    /// Applies `config` to new requests. Requests in progress keep the configuration that they began
    /// with.
    ///
    /// A configuration with a change that needs a restart is rejected as a whole.
    ///
    /// # Errors
    /// [`ReloadError`] if the configuration is invalid or needs a restart. The previous one stays
    /// in force.
    pub fn reload(&self, config: Config) -> Result<(), ReloadError> {
        self.reloading.reload(config, &self.resources, &self.current, &self.user)
    }

    /// Drains the gateway and shuts it down.
    ///
    /// 0. For `drain_delay`, `/readyz` is 503 and requests are served as before, so that load
    ///    balancers choose other servers before any request is rejected.
    /// 1. No new connections are accepted; new requests on open connections get 503 `draining`.
    /// 2. Requests in progress may end within `drain_timeout`, and their outcomes are recorded, also if
    ///    the store returns only within this time.
    /// 3. Requests that have not ended by then are cut off. If a request was sent to the upstream,
    ///    its outcome is recorded as unknown; otherwise its key is released.
    /// 4. Deferred writes get one more store timeout; then everything is closed. The report counts
    ///    those that the store has not accepted.
    pub async fn shutdown(mut self) -> ShutdownReport {
        let delay = self.reloading.drain_delay();
        if !delay.is_zero() {
            tracing::info!(?delay, "not ready any more; connections are accepted until the drain");
            self.shutdown.enter(ShutdownPhase::Leaving);
            sleep(delay).await;
        }
        tracing::info!(requests = self.shutdown.active_requests(), "draining");
        self.shutdown.enter(ShutdownPhase::Draining);
        let (shutdown, engine) = (self.shutdown.clone(), self.engine.clone());
        let reconciling = self.reconciling.take();
        // Their outcomes may be in memory only: ended here, the process would lose them.
        let idle = || {
            let (stats, reconciling) = (engine.stats(), reconciling.as_ref());
            shutdown.active_requests() == 0
                && stats.in_flight == 0
                && stats.deferred == 0
                && reconciling.is_none_or(|task| task.0.is_finished())
        };
        let in_time = listener::settled(self.reloading.drain_timeout(), idle).await;
        drop(reconciling);
        let mut ended = ShutdownReport::default();
        if !in_time {
            ended.cut_off = shutdown.active_requests().max(engine.stats().in_flight);
            self.resources.upstreams.cut();
        }
        // The requests that were cut off are recorded now; those that still do not end become
        // unknown.
        let (drained, _) = tokio::join!(
            self.resources.layer.drain(self.store_timeout),
            // What operators and the background began.
            timeout(self.store_timeout, self.engine.drain()),
        );
        ended.cut_off = ended.cut_off.max(drained.cut_off);
        ended.not_recorded = self.engine.stats().deferred;
        self.shutdown.enter(ShutdownPhase::Closing);
        self.listener.join(CLOSE).await;
        if let Some(access) = &self.access {
            // Aborted requests write their lines when they are dropped.
            listener::settled(CLOSE / 10, || shutdown.active_requests() == 0).await;
            access.flush(CLOSE).await;
        }
        if let Some(admin) = &mut self.admin {
            admin.join(CLOSE).await;
        }
        self.housekeeping.0.abort();
        // Its last write must not follow the removal.
        self.registered.0.abort();
        self.registered.join(CLOSE).await;
        self.user.remove().await;
        self.opened.close().await;
        tracing::info!(cut_off = ended.cut_off, not_recorded = ended.not_recorded, "ended");
        ended
    }
}

/// Connections that may wait to be accepted, up to the limit of the system (`net.core.somaxconn`).
const BACKLOG: u32 = 4096;

struct Listeners {
    data: TcpListener,
    admin: Option<RunningAdmin>,
    /// The address, with the port that the kernel chose for port 0.
    admin_addr: Option<SocketAddr>,
    shutdown: Shutdown,
}

/// An admin listener that answers; dropping it closes it.
struct RunningAdmin(Option<admin::AdminServer>);

impl RunningAdmin {
    fn open(mut self, admin: Arc<Admin>, operators: &Operators) -> Option<Task> {
        self.0.take().map(|serving| Task(serving.open(admin, operators)))
    }
}

impl Drop for RunningAdmin {
    fn drop(&mut self) {
        if let Some(serving) = &self.0 {
            serving.abort();
        }
    }
}

impl Listeners {
    fn bind(config: &Config) -> Result<Self, StartError> {
        let shutdown = Shutdown::default();
        let data = bind(config.listen)?;
        let admin = config.admin.map(bind).transpose()?;
        let admin_addr = admin.as_ref().map(local_addr).transpose()?;
        let begin =
            |listener| RunningAdmin(Some(admin::AdminServer::begin(listener, shutdown.clone())));
        Ok(Self { data, admin: admin.map(begin), admin_addr, shutdown })
    }
}

fn bind(address: SocketAddr) -> Result<TcpListener, StartError> {
    let bound = || {
        let socket = match address {
            SocketAddr::V4(_) => TcpSocket::new_v4(),
            SocketAddr::V6(_) => TcpSocket::new_v6(),
        }?;
        // Allows a port whose last connections are in TIME_WAIT, and not one that is in use.
        socket.set_reuseaddr(true)?;
        socket.bind(address)?;
        socket.listen(BACKLOG)
    };
    bound().map_err(|source| StartError::Listen { address, source })
}

fn local_addr(listener: &TcpListener) -> Result<SocketAddr, StartError> {
    let unbound = (std::net::Ipv4Addr::UNSPECIFIED, 0).into();
    listener.local_addr().map_err(|source| StartError::Listen { address: unbound, source })
}

async fn run(
    config: &Config,
    resolved: ResolvedConfig,
    certificates: AllCertificates,
    listeners: Listeners,
    opened: OpenStore,
) -> Result<RunningGateway, StartError> {
    let token = config.token_file().map(|path| admin_token(&path)).transpose()?;
    let access = config.access_log.as_deref().map(access_log).transpose()?.map(Arc::new);
    let metrics = Arc::new(Metrics::new());
    let MemoryPlan { bodies, observed, .. } = resolved.memory;
    let census = Arc::new(Census::of(config.namespace.clone().unwrap_or_default()));
    let engine = engine(config, &resolved, &opened, &metrics, &census)?;
    // Before any client is accepted.
    let user = user::enter(config, &resolved, &engine, local_addr(&listeners.data)?).await?;
    let connect = dialling(config, &certificates);
    let concurrent = config.limits.connections.saturating_mul(UNDER_WAY);
    let resources = SharedResources::new(
        engine.clone(),
        bodies,
        observed,
        Arc::clone(&metrics),
        concurrent,
        connect,
    )?;
    let reloading = ReloadState::new(config.clone(), resolved.largest);
    let open_files = resolved.open_files();
    let tokens = resources.tokens(config, &resolved, None)?;
    let snapshot = resources.snapshot(config, resolved, tokens, None)?;
    let current = Arc::new(CurrentConfig::from_pointee(snapshot));
    reloading.fetch_keys(&current, &resources);
    reloading.probe(&current);
    let Listeners { data, admin: probed, admin_addr, shutdown } = listeners;
    let handler = Arc::new(RequestHandler {
        current: Arc::clone(&current),
        shutdown: shutdown.clone(),
        stall: config.limits.stall,
        access: access.clone(),
    });
    let clients = clients(config, &certificates);
    let local_addr = local_addr(&data)?;
    let reconciler = Arc::new(UnretriedReconciler {
        layer: resources.layer.clone(),
        current: Arc::clone(&current),
        metrics: Arc::clone(&metrics),
    });
    let reconciling = reconciling(config, &reconciler, &census, &opened, &shutdown);
    let ended = EndedTask::default();
    let admin = Arc::new(Admin {
        reconciler,
        opened: opened.clone(),
        engine: engine.clone(),
        metrics: Arc::clone(&metrics),
        shutdown: shutdown.clone(),
        store_up: AtomicBool::new(true),
        ended: Arc::clone(&ended),
    });
    warn::warn(config, &opened, &open_files);
    warn::warn_without_secret(config, &engine);
    let registered = user.clone();
    let serving = probed.zip(token).and_then(|(probed, token)| {
        let (snapshot, stats) = (Arc::clone(&current), Arc::clone(&admin));
        let operators = Operators::builder(engine.clone(), Arc::clone(&opened.store))
            .store_timeout(config.store_timeout)
            .scope_parts(move || snapshot.load().callers().to_vec())
            .stats(move || stats.stats())
            .census(census)
            .user(registered)
            .build(token, audit(config, local_addr));
        probed.open(admin, &operators)
    });
    let listening = listener::serve(data, handler, clients, shutdown.clone());
    let listening = task::reported("the listener for clients", listening, ended);
    Ok(RunningGateway {
        local_addr,
        admin_addr,
        engine,
        housekeeping: Task::supervised("housekeeping", {
            let (store, certificates) = (Arc::clone(&opened.store), certificates.clone());
            let observed = Arc::clone(&resources.observed);
            let upstreams = Arc::clone(&resources.upstreams);
            move || {
                housekeeping(
                    Arc::clone(&store) as Arc<dyn Store>,
                    Arc::clone(&observed) as Arc<dyn Store>,
                    Arc::clone(&metrics),
                    Arc::clone(&upstreams),
                    certificates.clone(),
                )
            }
        }),
        reconciling,
        registered: Task::supervised("the entry in the register of the store", {
            let user = user.clone();
            move || {
                let user = user.clone();
                async move { user.refresh().await }
            }
        }),
        user,
        resources,
        current,
        reloading,
        opened,
        certificates,
        shutdown,
        access,
        store_timeout: config.store_timeout,
        listener: Task(tokio::spawn(listening)),
        admin: serving,
    })
}

fn clients(config: &Config, certificates: &AllCertificates) -> ListenerConfig {
    ListenerConfig {
        connections: config.limits.connections,
        connections_per_peer: config.limits.per_peer(),
        head_timeout: config.limits.head_timeout,
        stall: config.limits.stall,
        streams: config.transport.streams,
        trusted: config.transport.trusted.clone(),
        tls: certificates.listener.clone(),
        trimmed: vec![IDEMPOTENCY_KEY],
    }
}

/// Begins the reconciliation without retries in the background, if it is on.
fn reconciling(
    config: &Config,
    reconciler: &Arc<UnretriedReconciler>,
    census: &Arc<Census>,
    opened: &OpenStore,
    shutdown: &Shutdown,
) -> Option<Task> {
    let background = BackgroundReconciler {
        reconciler: Arc::clone(reconciler),
        census: Arc::clone(census),
        // The operators' API makes it walk.
        walked: config.admin.is_none().then(|| Arc::clone(&opened.store)),
        shutdown: shutdown.clone(),
        every: config.reconcile_every,
        limit: config.reconcile_limit,
    };
    (!config.reconcile_every.is_zero()).then(|| Task(tokio::spawn(background.run())))
}

/// Reads the token, or creates it. It is called after the store is open, so that a start that fails
/// for another reason leaves no file.
fn admin_token(path: &Path) -> Result<AdminToken, StartError> {
    let failed = |source| StartError::AdminToken { path: path.into(), source };
    AdminToken::read_or_make(path, &SystemEntropy).map_err(failed)
}

fn dialling(config: &Config, certificates: &AllCertificates) -> ConnectOptions {
    ConnectOptions {
        protocol: config.transport.upstream_protocol,
        tls: certificates.upstream.clone(),
        timeout: config.transport.connect_timeout,
        idle: config.transport.upstream_idle,
        fresh: config.transport.fresh_connections,
        proxy: None,
    }
}

fn access_log(path: &Path) -> Result<AccessLog, StartError> {
    AccessLog::open(path).map_err(|source| StartError::AccessLog { path: path.to_owned(), source })
}

fn audit(config: &Config, listens: SocketAddr) -> Audit {
    let path = config.audit_file.clone().unwrap_or_else(|| config.store.audit_file());
    Audit::new(path, format!("{listens}, process {}", std::process::id()))
}

fn opening(config: &Config, resolved: &ResolvedConfig, admin: Option<SocketAddr>) -> StoreOpener {
    StoreOpener {
        store: config.store.clone(),
        drivers: config.drivers.clone(),
        cache: config.cache.clone(),
        secret_file: config.secret_file.clone(),
        token_file: config.token_file(),
        admin,
        memory: resolved.memory.store,
        // Shorter than the engine's timeout: an error of the store may state that nothing was sent,
        // while after the engine's timeout the write may have been applied.
        timeout: config.store_timeout * 3 / 4,
        make: true,
        must_exist: config.store_must_exist,
    }
}

fn engine(
    config: &Config,
    resolved: &ResolvedConfig,
    opened: &OpenStore,
    metrics: &Metrics,
    census: &Arc<Census>,
) -> Result<Idempotency, EngineError> {
    let store = MeasuredStore::new(
        Arc::clone(&opened.store),
        Arc::clone(&metrics.calls),
        config.store_timeout,
    );
    let mut limits = hapax_core::EngineLimits {
        waiters_per_key: config.max_waiters,
        deferred_bytes: resolved.memory.deferred,
        ..hapax_core::EngineLimits::default()
    };
    if let Some(replies) = opened.replies() {
        limits.claims = budget::claims(replies, resolved.largest.response);
    }
    let engine = Idempotency::builder(census.watch(Arc::new(store)))
        .store_timeout(config.store_timeout)
        .limits(limits);
    match &config.namespace {
        Some(namespace) => engine.namespace(namespace.as_str()),
        // The configuration of a store that the caller opened does not say whether it is shared.
        None => engine,
    }
    .build()
}
