//! The contract's scenarios against a gateway: with its records in a file, on Redis and on Postgres,
//! in front of an upstream in HTTP/1.1, with Postgres in HTTP/2.

use std::net::SocketAddr;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use hapax_core::Idempotency;
use hapax_core::store::BoxFuture;
use hapax_gateway::{
    Config, Cors, Gateway, JwtConfig, JwtKeys, Origins, PolicyConfig, ReconcileAuthorization,
    RunningGateway, ScopeConfig, StoreUrl, UpstreamProtocol as Spoken,
};
use hapax_http::problem::DocsUrl;
use hapax_http::server::ScopePart;
use hapax_http::stored_response::Cookies;
use hapax_operators::{QuarantineStart, StoreRegister};
use hapax_testkit::faults::FaultProxy;
use hapax_testkit::http::{
    ExecutionCount, Group, Handler, HandlerRequest, Hook, HookRequest, HookVerdict, HttpFixture,
    Instance, Protocol, ScenarioPolicy, ScenarioScope, Starting, StoreLink, TestIssuer, TestServer,
    handler, play_all, reply, serve,
};
use hapax_testkit::servers::{PostgresServer, RedisServer};
use tempfile::TempDir;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpListener;
use tokio::runtime::Runtime;

use crate::world::{config as in_memory, post, start};

// `several` and `partitions` need two processes on one store: a file has one owner. `crashes` needs one
// that is killed, since a file is held by more than the tasks of a runtime: the program's own tests kill
// it. `outages` needs something between it and its store: nothing is between a gateway and its file, so
// the layer's tests play it on a file that can be cut off.
hapax_testkit::http_suite!(fixture; any, unretried, quarantines);

/// Scenarios at a time where they share a server.
const AT_ONCE: usize = 8;

const OTHERS: [Group; 2] = [Group::Unretried, Group::Quarantines];

async fn fixture() -> Arc<dyn HttpFixture> {
    Arc::new(Place::File(tempfile::tempdir().unwrap()))
}

mod redis {
    use super::*;

    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn all_scenarios() {
        let server = RedisServer::start().await;
        let place = Arc::new(Place::Server(server.url(), Spoken::Http1, None));
        let played = play_all(place, &Protocol::ALL, &Group::RETRIED, AT_ONCE).await;
        assert!(played > 200, "{played}");
    }

    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn scenarios_without_a_retry_and_in_quarantine() {
        let server = RedisServer::start().await;
        let place = Arc::new(Place::Server(server.url(), Spoken::Http1, Some(secret())));
        play_all(place, &Protocol::ALL, &OTHERS, AT_ONCE).await;
    }
}

mod postgres {
    use super::*;

    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn all_scenarios() {
        let server = PostgresServer::start().await;
        server.create_database("wire").await;
        let place = Arc::new(Place::Server(server.url("wire"), Spoken::Http2, None));
        let played = play_all(place, &Protocol::ALL, &Group::RETRIED, AT_ONCE).await;
        assert!(played > 200, "{played}");
    }

    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn scenarios_without_a_retry_and_in_quarantine() {
        let server = PostgresServer::start().await;
        server.create_database("wire").await;
        let place = Place::Server(server.url("wire"), Spoken::Http2, Some(secret()));
        play_all(Arc::new(place), &Protocol::ALL, &OTHERS, AT_ONCE).await;
    }
}

/// Where gateways keep their records.
enum Place {
    /// In a file, one gateway after the other.
    File(TempDir),
    /// On a server at this URL, each by a proxy of its own; upstreams are spoken to in this; with the secret in
    /// this folder, if there is one.
    Server(String, Spoken, Option<TempDir>),
}

/// A folder with the secret of a store.
fn secret() -> TempDir {
    let folder = tempfile::tempdir().unwrap();
    std::fs::write(folder.path().join("secret"), "7".repeat(64)).unwrap();
    folder
}

impl HttpFixture for Place {
    fn has_secret(&self) -> bool {
        matches!(self, Self::File(_) | Self::Server(.., Some(_)))
    }

    fn start(&self, policy: ScenarioPolicy, handler: Handler) -> Starting<'_> {
        Box::pin(async move {
            let upstream = serve(handler).await;
            let hook = match &policy.hook {
                Some(hook) => Some(serve(answers(hook.clone())).await),
                None => None,
            };
            let (store, link, spoken, secret) = match self {
                Self::File(folder) => {
                    (StoreUrl::File(folder.path().join("hapax.db")), None, Spoken::Auto, None)
                }
                Self::Server(url, spoken, secret) => {
                    let (link, url) = linked(url).await;
                    let url = url.parse().map_err(|error| format!("{error:?}"))?;
                    (url, Some(link), *spoken, secret.as_ref())
                }
            };
            let mut config = config(&policy, store, &upstream, hook.as_ref());
            config.secret_file = secret.map(|folder| folder.path().join("secret"));
            config.transport.upstream_protocol = spoken;
            let keys = issuer(&mut config).await;
            let runtime = tokio::runtime::Builder::new_multi_thread()
                .worker_threads(1)
                .enable_all()
                .build()
                .map_err(|error| error.to_string())?;
            let started = runtime.spawn(Gateway::start(config)).await.unwrap();
            let running = match started {
                Ok(running) => running,
                Err(error) => {
                    runtime.shutdown_background();
                    return Err(error.to_string());
                }
            };
            let address = running.local_addr();
            let held = Mutex::new(Some((running, runtime)));
            Ok(Box::new(Gate { address, held, link, _servers: (upstream, hook, keys) })
                as Box<dyn Instance>)
        })
    }
}

/// Has tokens verified by the keys of the issuer of scenarios, if a claim names callers.
async fn issuer(config: &mut Config) -> Option<TestServer> {
    let parts = config.policy.scope.iter().flat_map(ScopeConfig::parts);
    if !parts.into_iter().any(|part| matches!(part, ScopePart::Claim(_))) {
        return None;
    }
    let set = TestIssuer::of_scenarios().key_set();
    let keys = serve(handler(move |_| {
        let answer = reply(200, set.clone());
        async move { answer }
    }))
    .await;
    config.jwt = JwtConfig {
        keys: Some(JwtKeys::Url(format!("http://{}/keys", keys.address).parse().unwrap())),
        issuer: Some(TestIssuer::ISSUER.to_owned()),
        audience: Some(TestIssuer::AUDIENCE.to_owned()),
    };
    Some(keys)
}

/// What a hook says, as a server that is asked over HTTP.
fn answers(hook: Hook) -> Handler {
    handler(move |call: HandlerRequest| {
        let marked = || {
            let mut response = reply(404, "");
            let marker = "did-not-happen".parse().unwrap();
            response.headers_mut().insert("idempotency-outcome", marker);
            response
        };
        let fence = call.fence.unwrap();
        let key = call.headers["idempotency-key"].as_bytes();
        let key = hapax_http::header::decode(key, hapax_http::header::Grammar::Lenient).unwrap();
        // Fence 0 is the gateway's probe.
        let truth = (fence > 0).then(|| {
            hook.ask(&HookRequest {
                key: key.as_str(),
                fence,
                attempt: call.attempt.unwrap(),
                operation: call.operation.as_deref().unwrap(),
            })
        });
        async move {
            match truth.unwrap_or(HookVerdict::DidNotHappen) {
                HookVerdict::Happened(status, text) => {
                    let mut response = reply(200, text);
                    let status = status.to_string().parse().unwrap();
                    response.headers_mut().insert("idempotency-status", status);
                    response
                }
                HookVerdict::DidNotHappen => marked(),
                HookVerdict::CannotSay => reply(503, ""),
            }
        }
    })
}

fn config(
    policy: &ScenarioPolicy,
    store: StoreUrl,
    upstream: &TestServer,
    hook: Option<&TestServer>,
) -> Config {
    let mut config = Config::new(format!("http://{}", upstream.address).parse().unwrap());
    config.listen = "127.0.0.1:0".parse().unwrap();
    config.admin = None;
    config.store = store;
    config.namespace = policy.namespace.clone();
    config.store_timeout = policy.store_timeout;
    config.max_waiters = policy.waiters_per_key;
    config.drain_timeout = policy.grace;
    config.reconcile_every = policy.reconcile_every;
    let (scope, scope_missing) = match &policy.callers {
        ScenarioScope::Shared => (hapax_gateway::ScopeConfig::Everyone, None),
        ScenarioScope::Parts(parts, missing) => {
            (hapax_gateway::ScopeConfig::Parts(parts.clone()), Some(*missing))
        }
    };
    config.policy = PolicyConfig {
        key: policy.key,
        key_header: policy.key_header.clone(),
        grammar: policy.grammar,
        methods: policy.methods.clone(),
        scope: Some(scope),
        scope_missing,
        fingerprint: policy.fingerprint.clone(),
        lease: policy.lease,
        retention: policy.retention,
        in_flight: policy.in_flight,
        on_unknown: policy.on_unknown,
        reconcile_url: hook.map(|it| format!("http://{}/outcome", it.address).parse().unwrap()),
        reconcile_authorization: hook.map(|_| ReconcileAuthorization::Nothing),
        profile: policy.profile,
        statuses: policy.statuses.clone(),
        store_outage: policy.store_outage,
        completion_outage: policy.completion_outage,
        stream: policy.stream,
        expires: policy.expires,
        max_request_body: policy.max_request_body,
        max_response_body: policy.max_response_body,
        upstream_timeout: Duration::from_secs(20),
        max_in_flight_per_scope: None,
        docs_url: policy.docs.map(|docs| DocsUrl::new(docs).unwrap()),
        replay_set_cookie: policy.cookies == Cookies::Keep,
        cors: policy.cors.map(|origin| Cors {
            credentials: true,
            ..Cors::new(Origins::List(vec![origin.to_owned()]))
        }),
    };
    config
}

struct Gate {
    address: SocketAddr,
    held: Mutex<Option<(RunningGateway, Runtime)>>,
    link: Option<Frozen>,
    _servers: (TestServer, Option<TestServer>, Option<TestServer>),
}

impl Drop for Gate {
    fn drop(&mut self) {
        if let Some((running, runtime)) = self.held.lock().unwrap().take() {
            let end = move || {
                drop(running);
                runtime.shutdown_timeout(Duration::from_secs(10));
            };
            std::thread::spawn(end).join().unwrap();
        }
    }
}

impl Instance for Gate {
    fn address(&self) -> SocketAddr {
        self.address
    }

    fn drain(&self) -> BoxFuture<'static, ()> {
        let held = self.held.lock().unwrap().take();
        Box::pin(async move {
            let Some((running, runtime)) = held else { return };
            let _ = runtime.spawn(running.shutdown()).await.unwrap();
            runtime.shutdown_background();
        })
    }

    fn kill(&self) -> BoxFuture<'_, ()> {
        let held = self.held.lock().unwrap().take();
        Box::pin(async move {
            let Some((running, runtime)) = held else { return };
            let end = move || {
                runtime.shutdown_timeout(Duration::from_secs(10));
                drop(running);
            };
            tokio::task::spawn_blocking(end).await.unwrap();
        })
    }

    fn link(&self) -> Option<&dyn StoreLink> {
        self.link.as_ref().map(|link| link as &dyn StoreLink)
    }

    fn quarantine(&self) -> Option<BoxFuture<'_, ()>> {
        let held = self.held.lock().unwrap();
        let (running, runtime) = held.as_ref()?;
        let begun = runtime.spawn(begin_quarantine(running.engine().clone()));
        Some(Box::pin(async move { begun.await.unwrap() }))
    }
}

/// Writes a quarantine into the register of the store, and waits until the gateway has read it.
async fn begin_quarantine(engine: Idempotency) {
    let start = QuarantineStart {
        namespace: engine.namespace().clone(),
        route: None,
        duration: Duration::from_secs(600),
        any_namespace: true,
        reason: "a scenario".to_owned(),
        who: "a scenario".to_owned(),
    };
    let register = StoreRegister::new(Arc::clone(engine.store()), engine.store_timeout());
    register.begin_quarantine(&start).await.unwrap();
    while engine.quarantines().in_force().is_empty() {
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

/// A way to a server that can fall silent.
struct Frozen(FaultProxy);

/// A proxy in front of the server of this URL, and the URL by it.
async fn linked(url: &str) -> (Frozen, String) {
    let (head, rest) = url.split_once("127.0.0.1:").unwrap();
    let digits = rest.len() - rest.trim_start_matches(|it: char| it.is_ascii_digit()).len();
    let port: u16 = rest[..digits].parse().unwrap();
    let proxy = FaultProxy::before(([127, 0, 0, 1], port).into(), 1).await.unwrap();
    let url = format!("{head}{}{}", proxy.address(), &rest[digits..]);
    (Frozen(proxy), url)
}

impl StoreLink for Frozen {
    fn cut(&self) -> BoxFuture<'_, ()> {
        self.0.freeze();
        Box::pin(async {})
    }

    fn mend(&self) -> BoxFuture<'_, ()> {
        self.0.thaw();
        Box::pin(async {})
    }
}

/// What an upstream says before its answer, which no service of the scenarios can.
#[tokio::test(flavor = "multi_thread")]
async fn w22_informational_responses_are_never_stored() {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let runs = ExecutionCount::new();
    let count = runs.clone();
    tokio::spawn(async move {
        while let Ok((mut stream, _)) = listener.accept().await {
            let run = count.next();
            // The whole request is one segment here: it is small.
            let mut request = vec![0; 16 * 1024];
            let _ = stream.read(&mut request).await;
            let informational = "HTTP/1.1 102 Processing\r\n\r\nHTTP/1.1 103 Early Hints\r\n\
                                 link: </early>; rel=preload\r\n\r\n";
            let answer = format!("HTTP/1.1 201 Created\r\ncontent-length: 1\r\n\r\n{run}");
            for part in [informational, &answer] {
                stream.write_all(part.as_bytes()).await.unwrap();
                stream.flush().await.unwrap();
            }
        }
    });
    let gateway = start(in_memory(format!("http://{address}").parse().unwrap())).await;
    for replayed in ["false", "true"] {
        let answer = post(gateway.local_addr(), "/pay", "k", "x").await;
        assert_eq!((answer.status, answer.text().as_str()), (201, "1"));
        assert_eq!(answer.header("idempotency-replayed"), replayed);
        assert_eq!(answer.header("link"), "");
    }
    assert_eq!(runs.count(), 1);
}
