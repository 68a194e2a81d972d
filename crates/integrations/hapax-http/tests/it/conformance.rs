//! The scenarios of the contract against the layer in an axum service, over sockets.

use std::fmt;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use axum::Router;
use axum::routing::any;
use hapax_core::machine::HookTiming;
use hapax_core::machine::Verdict;
use hapax_core::store::{BoxFuture, Capabilities, Reaped, Snapshot, Swap, Swapped};
use hapax_core::{
    Clock, EngineLimits, FencingToken, Idempotency, MemoryCapacity, MemoryStore, OperationId,
    Quarantine, Secret, Store, StoreError, SystemClock,
};
use hapax_file::{FileOptions, FileStore, OpenError};
use hapax_http::problem::{Code, DocsUrl, Problem};
use hapax_http::server::{
    IdempotencyLayer, Reconcile, ReconcileRequest, ReconciledResponse, RouteOptions, RoutePolicy,
    ScopePart, ScopeSource, TokenClaims,
};
use hapax_testkit::http::{
    Group, Handler, HookRequest, HookVerdict, HttpFixture, Instance, Protocol, ScenarioPolicy,
    ScenarioScope, Starting, StoreLink, TestIssuer, perform, play_all, reply,
};
use http::HeaderValue;
use http::header::{AUTHORIZATION, LINK, RETRY_AFTER};
use tempfile::TempDir;
use tokio::net::TcpListener;
use tokio::runtime::Runtime;
use tokio::sync::watch;
use tower_http::cors::CorsLayer;

hapax_testkit::http_suite!(fixture; any, crashes, outages, several, partitions, quarantines);

async fn fixture() -> Arc<dyn HttpFixture> {
    Arc::new(Memory(Arc::new(memory())))
}

fn memory() -> MemoryStore {
    MemoryStore::new(Arc::new(SystemClock), MemoryCapacity::default())
}

/// What a gateway on a file cannot show, having nothing between it and its file that could be cut.
/// Crashes are for the program's tests, since a file is held by more than a runtime's tasks; two
/// processes at a time a file has not.
mod on_a_file {
    use super::*;

    hapax_testkit::http_suite!(fixture; outages);

    async fn fixture() -> Arc<dyn HttpFixture> {
        Arc::new(File(tempfile::tempdir().unwrap()))
    }
}

/// Scenarios get on with each other on one store: where starting one is dear, that is how they
/// are played. This one has a secret.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn all_on_one_store() {
    let store = memory().secret(Secret::new([7; 32]));
    let fixture = Arc::new(Memory(Arc::new(store)));
    let played = play_all(fixture, &Protocol::ALL, &Group::RETRIED, 16).await;
    assert!(played > 200, "{played}");
}

/// Services on one memory store.
struct Memory(Arc<MemoryStore>);

impl HttpFixture for Memory {
    fn has_secret(&self) -> bool {
        self.0.capabilities().naming().is_some()
    }

    fn start(&self, policy: ScenarioPolicy, handler: Handler) -> Starting<'_> {
        start(Arc::clone(&self.0) as Arc<dyn Store>, policy, handler)
    }
}

/// Services on one file, one after the other.
struct File(TempDir);

impl HttpFixture for File {
    fn has_secret(&self) -> bool {
        true
    }

    fn start(&self, policy: ScenarioPolicy, handler: Handler) -> Starting<'_> {
        Box::pin(async move {
            let path = self.0.path().join("hapax.db");
            let opened = async {
                loop {
                    // The one before lets go of it when its last task has ended.
                    match FileStore::open(FileOptions::new(&path)) {
                        Err(OpenError::InUse { .. }) => tokio::task::yield_now().await,
                        opened => return opened.map_err(|error| error.to_string()),
                    }
                }
            };
            let store = tokio::time::timeout(hapax_testkit::http::TIMEOUT, opened).await;
            let store = store.expect("the file is still in use")?;
            start(Arc::new(store), policy, handler).await
        })
    }
}

fn start<'a>(store: Arc<dyn Store>, policy: ScenarioPolicy, handler: Handler) -> Starting<'a> {
    Box::pin(async move {
        let store = Arc::new(Linked { store, up: watch::Sender::new(true) });
        // Of its own, so that it can end as a process does: with all its tasks at once.
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(1)
            .enable_all()
            .build()
            .map_err(|error| error.to_string())?;
        let (grace, cors) = (policy.grace, policy.cors);
        let has_claim = matches!(&policy.callers, ScenarioScope::Parts(parts, _)
            if parts.iter().any(|part| matches!(part, ScopePart::Claim(_))));
        let entered = runtime.enter();
        let layer = layer(policy, Arc::clone(&store));
        drop(entered);
        let layer = match layer {
            Ok(layer) => layer,
            Err(error) => {
                runtime.shutdown_background();
                return Err(error);
            }
        };
        let handle = move |request: axum::extract::Request| {
            let handler = Arc::clone(&handler);
            async move { perform(&handler, request).await }
        };
        let mounted = Router::new().route("/{*rest}", any(handle.clone())).layer(layer.clone());
        let app = Router::new().fallback(handle).layer(layer.clone());
        // Each strips its prefix before the layer, which finds the whole target with this feature.
        let app = match cfg!(feature = "axum") {
            true => {
                app.nest("/mounted/payments", mounted.clone()).nest("/mounted/refunds", mounted)
            }
            false => app,
        };
        let app = match has_claim {
            true => app.layer(axum::middleware::from_fn(verify)),
            false => app,
        };
        let app = match cors {
            Some(origin) => app.layer(cors_of(origin)),
            None => app,
        };
        let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        listener.set_nonblocking(true).unwrap();
        let address = listener.local_addr().unwrap();
        runtime.spawn(async move {
            let listener = TcpListener::from_std(listener).unwrap();
            axum::serve(listener, app).await
        });
        let runtime = Mutex::new(Some(runtime));
        Ok(Box::new(Service { address, layer, grace, store, runtime }) as Box<dyn Instance>)
    })
}

/// Middleware in front of the layer, which verifies the tokens of callers, as in any service.
async fn verify(
    mut request: axum::extract::Request,
    next: axum::middleware::Next,
) -> axum::response::Response {
    let token = request.headers().get(AUTHORIZATION).and_then(|it| it.to_str().ok());
    let token = token.and_then(|it| {
        let (scheme, token) = it.split_once(' ')?;
        scheme.eq_ignore_ascii_case("bearer").then(|| token.trim().to_owned())
    });
    if let Some(token) = token {
        let Some(claims) = TestIssuer::of_scenarios().verify(&token) else {
            let problem = Problem::new(Code::InvalidToken, "The token does not verify.");
            return problem.response(None).map(axum::body::Body::from);
        };
        let mut named = TokenClaims::new(claims["iss"].as_str().unwrap()).unwrap();
        for (name, value) in &claims {
            named = match (value.as_str(), value.as_i64()) {
                (Some(text), _) => named.text(name, text),
                (_, Some(number)) => named.integer(name, number.into()),
                _ => named,
            };
        }
        request.extensions_mut().insert(named);
    }
    next.run(request).await
}

/// Whatever answers web pages is around the layer, as in any service.
fn cors_of(origin: &'static str) -> CorsLayer {
    CorsLayer::new()
        .allow_origin([HeaderValue::from_static(origin)])
        .allow_credentials(true)
        .expose_headers([LINK, RETRY_AFTER])
}

fn layer(policy: ScenarioPolicy, store: Arc<Linked>) -> Result<IdempotencyLayer, String> {
    let limits =
        EngineLimits { waiters_per_key: policy.waiters_per_key, ..EngineLimits::default() };
    let engine = Idempotency::builder(store as Arc<dyn Store>)
        .namespace(policy.namespace.unwrap_or_default().as_str())
        .store_timeout(policy.store_timeout)
        .limits(limits)
        .build()
        .unwrap();
    let mut options = RouteOptions {
        key: policy.key,
        key_header: policy.key_header,
        grammar: policy.grammar,
        methods: policy.methods,
        fingerprint: policy.fingerprint,
        profile: policy.profile,
        statuses: policy.statuses,
        cookies: policy.cookies,
        stream: policy.stream,
        expires: policy.expires,
        max_request_body: policy.max_request_body,
        max_response_body: policy.max_response_body,
        store_outage: policy.store_outage,
        completion_outage: policy.completion_outage,
        ..RouteOptions::default()
    };
    options.policy.terms.lease = policy.lease;
    options.policy.terms.retention = policy.retention;
    options.policy.terms.on_unknown = policy.on_unknown;
    options.policy.in_flight = policy.in_flight;
    if let Some(hook) = policy.hook {
        let timeout = Duration::from_secs(5);
        options.policy.hook = Some(HookTiming { after: timeout, timeout });
        options.reconcile = Some(Arc::new(move |doubt: ReconcileRequest| {
            let truth = hook.ask(&HookRequest {
                key: doubt.key.as_str(),
                fence: number(doubt.fence),
                attempt: doubt.attempt,
                operation: &doubt.id.to_string(),
            });
            async move {
                match truth {
                    HookVerdict::Happened(status, text) => {
                        let mut response = http::Response::new(text.into());
                        *response.status_mut() = reply(status, "").status();
                        Verdict::Happened(ReconciledResponse::from(response))
                    }
                    HookVerdict::DidNotHappen => Verdict::DidNotHappen,
                    HookVerdict::CannotSay => Verdict::CannotSay,
                }
            }
        }) as Arc<dyn Reconcile>);
    }
    let scope = match policy.callers {
        ScenarioScope::Shared => ScopeSource::shared(),
        ScenarioScope::Parts(parts, missing) => ScopeSource::parts(parts, missing),
    };
    let route = RoutePolicy::new(scope, options).map_err(|error| error.to_string())?;
    let mut layer = IdempotencyLayer::new(engine, route);
    if let Some(docs) = policy.docs {
        layer = layer.docs(DocsUrl::new(docs).map_err(|error| error.to_string())?);
    }
    Ok(layer)
}

fn number(fence: FencingToken) -> u64 {
    fence.to_string().parse().unwrap()
}

/// A service on a runtime of its own.
struct Service {
    address: SocketAddr,
    layer: IdempotencyLayer,
    grace: Duration,
    store: Arc<Linked>,
    runtime: Mutex<Option<Runtime>>,
}

impl Service {
    fn end(&self) {
        if let Some(runtime) = self.runtime.lock().unwrap().take() {
            runtime.shutdown_background();
        }
    }
}

impl Drop for Service {
    fn drop(&mut self) {
        self.end();
    }
}

impl Instance for Service {
    fn address(&self) -> SocketAddr {
        self.address
    }

    fn drain(&self) -> BoxFuture<'static, ()> {
        let (layer, grace) = (self.layer.clone(), self.grace);
        Box::pin(async move {
            let _ = layer.drain(grace).await;
        })
    }

    fn kill(&self) -> BoxFuture<'_, ()> {
        let runtime = self.runtime.lock().unwrap().take();
        Box::pin(async {
            // Until its threads have ended: nothing of it goes on.
            let end = || runtime.map(|runtime| runtime.shutdown_timeout(Duration::from_secs(10)));
            tokio::task::spawn_blocking(end).await.unwrap();
        })
    }

    fn link(&self) -> Option<&dyn StoreLink> {
        Some(&*self.store)
    }

    /// By the engine: a service that enters the register of its store reads them there.
    fn quarantine(&self) -> Option<BoxFuture<'_, ()>> {
        let now = SystemClock.now();
        let until = now.after(Duration::from_secs(600));
        let quarantine = Quarantine { route: None, since: now, until };
        self.layer.engine().quarantines().replace(vec![quarantine], now);
        Some(Box::pin(async {}))
    }
}

/// The way to a store: while it is cut, what is sent does not arrive, and nobody says so.
struct Linked {
    store: Arc<dyn Store>,
    up: watch::Sender<bool>,
}

impl fmt::Debug for Linked {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Linked")
    }
}

impl Linked {
    async fn arrive(&self) {
        let _ = self.up.subscribe().wait_for(|up| *up).await;
    }
}

impl StoreLink for Linked {
    fn cut(&self) -> BoxFuture<'_, ()> {
        self.up.send_replace(false);
        Box::pin(async {})
    }

    fn mend(&self) -> BoxFuture<'_, ()> {
        self.up.send_replace(true);
        Box::pin(async {})
    }
}

impl Store for Linked {
    fn swap(&self, swap: Swap) -> BoxFuture<'_, Result<Swapped, StoreError>> {
        Box::pin(async move {
            self.arrive().await;
            self.store.swap(swap).await
        })
    }

    fn load<'a>(&'a self, key: &'a OperationId) -> BoxFuture<'a, Result<Snapshot, StoreError>> {
        Box::pin(async move {
            self.arrive().await;
            self.store.load(key).await
        })
    }

    fn reap(&self, limit: std::num::NonZeroU32) -> BoxFuture<'_, Result<Reaped, StoreError>> {
        self.store.reap(limit)
    }

    fn capabilities(&self) -> Capabilities<'_> {
        self.store.capabilities()
    }
}
