//! Reconciliation of undecided operations without a retry: in the background and by an operator.

mod claims;
mod guards;
mod passes;

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use hapax_core::{
    Claim, Clock, Fingerprint, FingerprintScheme, Idempotency, Inspect, MemoryCapacity,
    MemoryStore, OnUnknown, OperationRequest, Policy, Scope, Secret, Store, SystemClock, Terms,
    Timestamp,
};
use hapax_gateway::{
    Config, Gateway, OpenStore, ReconcileAuthorization, RunningGateway, ScopeConfig, StoreUrl,
};
use hapax_http::Body;
use hapax_testkit::ManualClock;
use http::header::{AUTHORIZATION, HeaderName};
use http::{Method, Response};
use serde_json::{Value, json};
use tokio::sync::Semaphore;

use crate::world::{
    Answer, Seen, TIMEOUT, Upstream, config, did_not_happen, get, post_with, send, start, text,
    until,
};

/// An interval that no test waits for.
const NEVER: Duration = Duration::ZERO;
const OFTEN: Duration = Duration::from_millis(40);

const HOUR: Duration = Duration::from_secs(3600);

/// An upstream whose first execution has an unknown outcome; GET gets what `says` is.
async fn upstream(says: impl Fn(&Seen) -> Response<Body> + Send + Sync + 'static) -> Upstream {
    Upstream::start(move |seen| {
        let response = match seen.method {
            Method::GET => says(&seen),
            _ => executed(&seen),
        };
        async move { response }
    })
    .await
}

/// The same; each GET waits for a permit.
async fn held(says: fn() -> Response<Body>) -> (Upstream, Arc<Semaphore>) {
    let permits = Arc::new(Semaphore::new(0));
    let of_service = Arc::clone(&permits);
    let upstream = Upstream::start(move |seen| {
        let permits = Arc::clone(&of_service);
        async move {
            if seen.method != Method::GET {
                return executed(&seen);
            }
            permits.acquire().await.unwrap().forget();
            says()
        }
    });
    (upstream.await, permits)
}

fn executed(seen: &Seen) -> Response<Body> {
    match seen.header("idempotency-attempt") {
        "1" => text(500, "lost"),
        _ => text(201, "again"),
    }
}

fn paid() -> Response<Body> {
    text(200, "paid")
}

/// The reconcile requests among what an upstream got.
fn asked(upstream: &Upstream) -> Vec<Seen> {
    upstream.seen().into_iter().filter(|seen| seen.method == Method::GET).collect()
}

fn reconciling(upstream: &Upstream, every: Duration) -> Config {
    let mut config = config(upstream.url());
    config.policy.on_unknown = OnUnknown::Reconcile;
    config.policy.reconcile_url =
        Some(format!("http://{}/outcome", upstream.address).parse().unwrap());
    config.policy.reconcile_authorization = Some(ReconcileAuthorization::Nothing);
    let tenant = HeaderName::from_static("x-tenant");
    config.policy.scope = Some(ScopeConfig::headers([AUTHORIZATION, tenant]));
    config.reconcile_every = every;
    config
}

/// The same on a file, which has a secret.
fn on_file(upstream: &Upstream, folder: &Path, every: Duration) -> Config {
    let mut config = reconciling(upstream, every);
    config.store = StoreUrl::File(folder.join("hapax.db"));
    config
}

const FIELDS: [(&str, &str); 3] =
    [("idempotency-key", "\"k\""), ("authorization", "Bearer a"), ("x-tenant", "acme")];

async fn pay(gateway: &RunningGateway) -> Answer {
    post_with(gateway.local_addr(), "/pay", &FIELDS, "x").await
}

/// The id of the one record.
async fn id(gateway: &RunningGateway) -> String {
    let page = get(gateway.admin_addr().unwrap(), "/api/keys").await.json();
    page["keys"][0]["id"].as_str().unwrap().to_owned()
}

/// Returns the answer of the operators' API to a call about a record.
async fn call(gateway: &RunningGateway, id: &str, what: &str, body: &Value) -> (u16, Value) {
    let fields = [("content-type", "application/json")];
    let path = format!("/api/keys/{id}/{what}");
    let body = body.to_string();
    let answer = send(gateway.admin_addr().unwrap(), "POST", &path, &fields, &body).await;
    (answer.status, answer.json())
}

/// The result of a reconciliation, or the reason for which there is none.
async fn reconcile(gateway: &RunningGateway, id: &str) -> String {
    let (status, found) = call(gateway, id, "reconcile", &json!({})).await;
    assert_eq!(status, 200, "{found}");
    let word = found["reason"].as_str().or(found["result"].as_str());
    word.unwrap().to_owned()
}

async fn show(gateway: &RunningGateway, id: &str) -> Value {
    get(gateway.admin_addr().unwrap(), &format!("/api/keys/{id}")).await.json()
}

/// Waits until the one record has this state.
async fn reaches(gateway: &RunningGateway, id: &str, state: &str) {
    let wait = async {
        while show(gateway, id).await["state"] != state {
            tokio::task::yield_now().await;
        }
    };
    tokio::time::timeout(TIMEOUT, wait).await.unwrap();
}

/// Waits until the metrics have this line.
async fn measures(gateway: &RunningGateway, line: &str) {
    let wait = async {
        let has_line = async || {
            let metrics = get(gateway.admin_addr().unwrap(), "/metrics").await.text();
            metrics.lines().any(|it| it == line)
        };
        while !has_line().await {
            tokio::task::yield_now().await;
        }
    };
    tokio::time::timeout(TIMEOUT, wait).await.unwrap_or_else(|_| panic!("never: {line}"));
}

#[tokio::test(flavor = "multi_thread")]
async fn wire_46_a_response_is_stored_without_a_retry_by_a_request_in_the_callers_name() {
    let upstream = upstream(|_| paid()).await;
    let folder = tempfile::tempdir().unwrap();
    let mut config = on_file(&upstream, folder.path(), OFTEN);
    let file = folder.path().join("authorization");
    std::fs::write(&file, "Bearer of-the-gateway\n").unwrap();
    config.policy.reconcile_authorization = Some(ReconcileAuthorization::File(file));
    let gateway = start(config).await;
    assert_eq!(pay(&gateway).await.status, 500);
    let id = id(&gateway).await;
    reaches(&gateway, &id, "done").await;
    let seen = upstream.seen();
    assert_eq!(seen.len(), 2, "one execution, one reconcile request");
    let (execution, request) = (&seen[0], &seen[1]);
    assert_eq!((&request.method, request.uri.path()), (&Method::GET, "/outcome"));
    assert_eq!(request.header("authorization"), "Bearer of-the-gateway");
    assert_eq!(request.header("x-tenant"), "acme");
    for name in ["idempotency-key", "idempotency-fence", "idempotency-attempt"] {
        assert_eq!(request.header(name), execution.header(name), "{name}");
    }
    assert_eq!(request.header("idempotency-operation-id"), id);
    let answer = pay(&gateway).await;
    assert_eq!((answer.status, answer.text().as_str()), (200, "paid"));
    assert_eq!(answer.header("idempotency-replayed"), "true");
    assert_eq!(upstream.seen().len(), 2);
    measures(&gateway, "hapax_unretried_total{result=\"happened\"} 1").await;
    measures(&gateway, "hapax_reconcile_questions_total 1").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn wire_46_after_did_not_happen_the_key_is_released_and_nothing_executes_without_a_retry() {
    let upstream = upstream(|_| did_not_happen()).await;
    let folder = tempfile::tempdir().unwrap();
    let gateway = start(on_file(&upstream, folder.path(), OFTEN)).await;
    assert_eq!(pay(&gateway).await.status, 500);
    reaches(&gateway, &id(&gateway).await, "released").await;
    assert_eq!(upstream.seen().len(), 2, "one execution, one reconcile request");
    let answer = pay(&gateway).await;
    assert_eq!((answer.status, answer.text().as_str()), (201, "again"));
    let seen = upstream.seen();
    let fence = |index: usize| seen[index].header("idempotency-fence").parse::<u64>().unwrap();
    assert_eq!(fence(1), fence(0));
    assert!(fence(2) > fence(0));
    assert_eq!(seen[2].header("idempotency-attempt"), "2");
    assert_eq!(seen[1].header("authorization"), "");
}

/// A request of a process that died, with its description.
struct Left(Option<Value>);

impl OperationRequest for Left {
    fn scheme(&self) -> FingerprintScheme {
        FingerprintScheme::new("http/test").unwrap()
    }

    fn fingerprint(&self, _: &FingerprintScheme) -> Option<Fingerprint> {
        Some(Fingerprint::from_bytes([1; 32]))
    }

    fn description(&self) -> Option<Bytes> {
        self.0.as_ref().map(|described| described.to_string().into())
    }
}

/// A store with a secret, whose clock the test moves.
fn store() -> (Arc<ManualClock>, Arc<MemoryStore>) {
    let clock = Arc::new(ManualClock::at(Timestamp::from_micros(SystemClock.now().as_micros())));
    let store = MemoryStore::new(Arc::clone(&clock) as Arc<dyn Clock>, MemoryCapacity::default());
    (clock, Arc::new(store.secret(Secret::new([7; 32]))))
}

fn engine(store: &Arc<MemoryStore>) -> Idempotency {
    Idempotency::builder(Arc::clone(store) as Arc<dyn Store>).build().unwrap()
}

/// Leaves a record under this key whose lease has lapsed.
async fn leave(clock: &ManualClock, store: &Arc<MemoryStore>, key: &str, described: Option<Value>) {
    let terms = Terms { on_unknown: OnUnknown::Reconcile, ..Policy::default().terms };
    let policy = Policy { terms, settle: Some(Duration::from_secs(60)), ..Policy::default() };
    let (scope, key) = (Scope::shared(), key.parse().unwrap());
    let claimed = engine(store).claim(&scope, &key, &Left(described), &policy).await.unwrap();
    // A lease that is dropped stands for a process that died.
    let Claim::Execute(lease) = claimed else { panic!() };
    drop(lease);
    clock.advance(terms.lease);
}

/// The description of a request to a gateway in front of `upstream`.
fn described(store: &Arc<MemoryStore>, upstream: &Upstream) -> Value {
    let hook =
        format!("http://{}/outcome idempotency-key authorization,x-tenant", upstream.address);
    let hook = engine(store).pseudonym(hook.as_bytes());
    json!({ "key": "left", "method": "POST", "target": "/pay", "namespace": "", "hook": hook })
}

async fn start_on(config: Config, store: &Arc<impl Inspect>) -> RunningGateway {
    let opened = OpenStore::new(Arc::clone(store) as Arc<dyn Inspect>, None);
    Gateway::start_on(config, opened).await.unwrap()
}

#[tokio::test(flavor = "multi_thread")]
async fn wire_26_a_lapsed_operation_is_not_reconciled_while_its_request_may_be_on_its_way() {
    let upstream = upstream(|_| paid()).await;
    let (clock, store) = store();
    leave(&clock, &store, "left", Some(described(&store, &upstream))).await;
    let gateway = start_on(reconciling(&upstream, NEVER), &store).await;
    let id = id(&gateway).await;
    for (advance, remaining) in [(0, 60.0), (59, 1.0)] {
        clock.advance(Duration::from_secs(advance));
        let (_, found) = call(&gateway, &id, "reconcile", &json!({})).await;
        assert_eq!(
            (&found["result"], &found["retry_in_seconds"]),
            (&json!("not-yet"), &json!(remaining))
        );
    }
    assert!(upstream.seen().is_empty());
    clock.advance(Duration::from_secs(1));
    // The first digits of an id name its record.
    assert_eq!(reconcile(&gateway, &id[..8]).await, "happened");
    assert_eq!(reconcile(&gateway, &id).await, "decided");
    assert_eq!(upstream.seen().len(), 1);
}

/// Once the gateway that executed it has ended, only its record says whose operation it is.
#[tokio::test(flavor = "multi_thread")]
async fn a_service_does_not_decide_about_the_operations_of_another_one() {
    let (ours, theirs) = (upstream(|_| paid()).await, upstream(|_| did_not_happen()).await);
    let (_clock, store) = store();
    let gateway = start_on(reconciling(&ours, NEVER), &store).await;
    assert_eq!(pay(&gateway).await.status, 500);
    let id = id(&gateway).await;
    gateway.shutdown().await;
    // In the same namespace by mistake, or after a change of the URL.
    let gateway = start_on(reconciling(&theirs, OFTEN), &store).await;
    assert_eq!(reconcile(&gateway, &id).await, "other-hook");
    measures(&gateway, "hapax_unretried_not_requested{reason=\"other-hook\"} 1").await;
    assert_eq!(show(&gateway, &id).await["state"], "unknown");
    gateway.shutdown().await;
    assert!(theirs.seen().is_empty());
    let gateway = start_on(reconciling(&ours, NEVER), &store).await;
    assert_eq!(reconcile(&gateway, &id).await, "happened");
}

/// A release may change the URL while gateways of the last one run.
#[tokio::test(flavor = "multi_thread")]
async fn an_operation_that_another_service_executed_anew_is_not_decided_by_the_first_one() {
    let [first, second] = [(); 2].map(|()| {
        Upstream::start(|seen| async move {
            match seen.method {
                Method::GET => did_not_happen(),
                _ => text(500, "lost"),
            }
        })
    });
    let (first, second) = (first.await, second.await);
    let (_clock, store) = store();
    let gateway = start_on(reconciling(&first, NEVER), &store).await;
    assert_eq!(pay(&gateway).await.status, 500);
    let id = id(&gateway).await;
    gateway.shutdown().await;
    let gateway = start_on(reconciling(&second, NEVER), &store).await;
    assert_eq!(pay(&gateway).await.status, 500);
    assert_eq!(show(&gateway, &id).await["attempt"], 2);
    gateway.shutdown().await;
    let gateway = start_on(reconciling(&first, NEVER), &store).await;
    assert_eq!(reconcile(&gateway, &id).await, "other-hook");
    assert!(asked(&first).is_empty());
}

#[tokio::test(flavor = "multi_thread")]
async fn no_request_is_sent_about_a_record_that_does_not_show_its_service_and_its_caller() {
    let upstream = upstream(|_| did_not_happen()).await;
    let (clock, store) = store();
    let whole = described(&store, &upstream);
    let with = |field: &str, value: Value| {
        let mut described = whole.clone();
        described[field] = value;
        Some(described)
    };
    let mut cases = vec![(None, "not-described"), (with("hook", Value::Null), "not-described")];
    for (field, value, reason) in [
        ("namespace", json!("other"), "other-namespace"),
        ("route", json!("refunds"), "no-route"),
        ("hook", json!("0123456789ab"), "other-hook"),
        ("partial", json!(true), "hidden-caller"),
        (
            "caller",
            json!([{ "header": "authorization", "hash": "0123456789ab" }]),
            "no-authorization",
        ),
    ] {
        cases.push((with(field, value), reason));
    }
    for (number, (described, _)) in cases.iter().enumerate() {
        leave(&clock, &store, &number.to_string(), described.clone()).await;
    }
    clock.advance(HOUR);
    let mut config = reconciling(&upstream, OFTEN);
    config.policy.reconcile_authorization = None;
    let gateway = start_on(config, &store).await;
    let engine = engine(&store);
    for (number, (_, reason)) in cases.iter().enumerate() {
        let key = number.to_string().parse().unwrap();
        let id = engine.operation_id(&Scope::shared(), &key).to_string();
        assert_eq!(reconcile(&gateway, &id).await, *reason);
    }
    for (reason, count) in [("not-described", 2), ("no-authorization", 1), ("hidden-caller", 1)] {
        let line = format!("hapax_unretried_not_requested{{reason=\"{reason}\"}} {count}");
        measures(&gateway, &line).await;
    }
    assert!(upstream.seen().is_empty());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_caller_that_is_not_shown_whole_is_reconciled_by_retries_only() {
    let upstream = upstream(|_| did_not_happen()).await;
    let (_clock, store) = store();
    let gateway = start_on(reconciling(&upstream, NEVER), &store).await;
    let long = "x".repeat(129);
    for tenants in [vec![long.as_str()], vec!["a", "b", "c", "d"]] {
        let fields = [("idempotency-key", "\"k\""), ("authorization", "Bearer a")];
        let tenants = tenants.into_iter().map(|tenant| ("x-tenant", tenant));
        let fields: Vec<_> = fields.into_iter().chain(tenants).collect();
        assert_eq!(post_with(gateway.local_addr(), "/pay", &fields, "x").await.status, 500);
    }
    let page = get(gateway.admin_addr().unwrap(), "/api/keys/undecided").await.json();
    let listed = page["keys"].as_array().unwrap();
    assert_eq!((listed.len(), &page["next"]), (2, &Value::Null));
    for record in listed {
        let reason = reconcile(&gateway, record["id"].as_str().unwrap()).await;
        assert_eq!(reason, "hidden-caller", "{record}");
    }
    assert!(asked(&upstream).is_empty());
}

#[tokio::test(flavor = "multi_thread")]
async fn without_a_secret_or_under_block_the_reconcile_url_is_not_requested() {
    let upstream = upstream(|_| did_not_happen()).await;
    let gateway = start(reconciling(&upstream, OFTEN)).await;
    assert_eq!(pay(&gateway).await.status, 500);
    assert_eq!(reconcile(&gateway, &id(&gateway).await).await, "not-described");
    measures(&gateway, "hapax_unretried_not_requested{reason=\"not-described\"} 1").await;
    // The record was written under `block`; the setting has changed since.
    let (_clock, store) = store();
    let mut config = reconciling(&upstream, NEVER);
    (config.policy.on_unknown, config.policy.reconcile_url) = (OnUnknown::Block, None);
    config.policy.reconcile_authorization = None;
    let gateway = start_on(config, &store).await;
    assert_eq!(pay(&gateway).await.status, 500);
    gateway.shutdown().await;
    let gateway = start_on(reconciling(&upstream, NEVER), &store).await;
    assert_eq!(reconcile(&gateway, &id(&gateway).await).await, "blocked");
    assert!(asked(&upstream).is_empty());
}

/// The operator looked into the ledger while the service answered, and the client's retry has executed.
#[tokio::test(flavor = "multi_thread")]
async fn a_verdict_about_an_earlier_execution_does_not_decide_about_the_present_one() {
    let (upstream, permits) = held(did_not_happen).await;
    let (_clock, store) = store();
    let gateway = Arc::new(start_on(reconciling(&upstream, NEVER), &store).await);
    assert_eq!(pay(&gateway).await.status, 500);
    let id = id(&gateway).await;
    let (on, of) = (Arc::clone(&gateway), id.clone());
    let requested = tokio::spawn(async move { reconcile(&on, &of).await });
    until("a reconcile request", || asked(&upstream).len() == 1).await;
    let fence = show(&gateway, &id).await["fence"].clone();
    let released = json!({ "fence": fence, "reason": "not in the ledger" });
    assert_eq!(call(&gateway, &id, "release", &released).await.0, 200);
    let answer = pay(&gateway).await;
    assert_eq!((answer.status, answer.text().as_str()), (201, "again"));
    permits.add_permits(1);
    assert_eq!(requested.await.unwrap(), "decided");
    let answer = pay(&gateway).await;
    assert_eq!((answer.status, answer.text().as_str()), (201, "again"));
    assert_eq!(answer.header("idempotency-replayed"), "true");
    assert_eq!(upstream.seen().len(), 3, "two executions, one reconcile request");
}

#[tokio::test(flavor = "multi_thread")]
async fn an_unusable_file_of_the_authorization_is_an_error_of_the_configuration() {
    let upstream = upstream(|_| did_not_happen()).await;
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("authorization");
    let mut config = on_file(&upstream, folder.path(), NEVER);
    config.policy.reconcile_authorization = Some(ReconcileAuthorization::File(file.clone()));
    assert!(config.check().unwrap_err().may_end(), "it is not there yet");
    for content in ["", "a\nb", &"x".repeat(9000)] {
        std::fs::write(&file, content).unwrap();
        let error = config.check().unwrap_err();
        assert!(
            !error.may_end() && error.to_string().contains("`reconcile_authorization`"),
            "{error}"
        );
    }
    std::fs::write(&file, "Bearer x\n").unwrap();
    config.check().unwrap();
    (config.policy.on_unknown, config.policy.reconcile_url) = (OnUnknown::Block, None);
    let error = config.check().unwrap_err().to_string();
    assert!(error.contains("has no effect without `on_unknown` reconcile"), "{error}");
}

/// Two services on one server, in two namespaces and, by mistake, in one.
async fn two_services(url: &str) {
    let folder = tempfile::tempdir().unwrap();
    let secret = folder.path().join("secret");
    std::fs::write(&secret, "7".repeat(64)).unwrap();
    let on_server = |upstream: &Upstream, namespace: &str| {
        let mut config = reconciling(upstream, NEVER);
        config.store = url.parse().unwrap();
        config.secret_file = Some(secret.clone());
        config.namespace = Some(namespace.parse().unwrap());
        config
    };
    let (ours, theirs) =
        (upstream(|_| did_not_happen()).await, upstream(|_| did_not_happen()).await);
    let gateway = start(on_server(&ours, "payments")).await;
    assert_eq!(pay(&gateway).await.status, 500);
    let id = id(&gateway).await;
    for (namespace, reason) in [("refunds", "other-namespace"), ("payments", "other-hook")] {
        let elsewhere = start(on_server(&theirs, namespace)).await;
        assert_eq!(reconcile(&elsewhere, &id).await, reason);
        elsewhere.shutdown().await;
    }
    assert_eq!(reconcile(&gateway, &id).await, "did-not-happen");
    assert_eq!((ours.seen().len(), theirs.seen().len()), (2, 0));
}

mod redis {
    use hapax_testkit::servers::RedisServer;

    #[tokio::test(flavor = "multi_thread")]
    async fn a_service_does_not_decide_about_the_operations_of_another_one() {
        let server = RedisServer::start().await;
        super::two_services(&server.url()).await;
    }
}

mod postgres {
    use hapax_testkit::servers::PostgresServer;

    #[tokio::test(flavor = "multi_thread")]
    async fn a_service_does_not_decide_about_the_operations_of_another_one() {
        let server = PostgresServer::start().await;
        server.create_database("two").await;
        super::two_services(&server.url("two")).await;
    }
}
