//! Reconciliation of undecided operations without a retry: in the background and by an operator.

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use bytes::Bytes;
use hapax_core::{
    Claim, Clock, Fingerprint, FingerprintScheme, Idempotency, Inspect, MemoryCapacity,
    MemoryStore, OnUnknown, OperationRequest, Policy, Scope, Secret, Store, SystemClock, Terms,
    Timestamp,
};
use hapax_gateway::{Config, Gateway, OpenStore, RunningGateway, ScopeConfig, StoreUrl};
use hapax_http::Body;
use hapax_testkit::ManualClock;
use http::header::{AUTHORIZATION, HeaderName};
use http::{Method, Response};
use serde_json::{Value, json};
use tokio::sync::Semaphore;

use crate::world::{
    Answer, Seen, Upstream, config, did_not_happen, get, post_with, send, start, text, until,
};

/// An interval that no test waits for.
const NEVER: Duration = Duration::ZERO;
const OFTEN: Duration = Duration::from_millis(40);

/// An upstream whose first execution has an unknown outcome; GET gets what `says` is.
async fn upstream(says: impl Fn(&Seen) -> Response<Body> + Send + Sync + 'static) -> Upstream {
    Upstream::start(move |seen| {
        let response = match seen.method {
            Method::GET => says(&seen),
            _ if seen.header("idempotency-attempt") == "1" => text(500, "lost"),
            _ => text(201, "again"),
        };
        async move { response }
    })
    .await
}

fn reconciling(upstream: &Upstream, every: Duration) -> Config {
    let mut config = config(upstream.url());
    config.policy.on_unknown = OnUnknown::Reconcile;
    config.policy.reconcile_url =
        Some(format!("http://{}/outcome", upstream.address).parse().unwrap());
    let tenant = HeaderName::from_static("x-tenant");
    config.policy.scope = Some(ScopeConfig::Headers(vec![AUTHORIZATION, tenant]));
    config.reconcile_every = every;
    config
}

/// The same on a file, which has a secret.
fn on_file(upstream: &Upstream, folder: &Path, every: Duration) -> Config {
    let mut config = reconciling(upstream, every);
    config.store = StoreUrl::File(folder.join("hapax.db"));
    config
}

async fn pay(gateway: &RunningGateway) -> Answer {
    let fields =
        [("idempotency-key", "\"k\""), ("authorization", "Bearer a"), ("x-tenant", "acme")];
    post_with(gateway.local_addr(), "/pay", &fields, "x").await
}

/// The id of the one record.
async fn id(gateway: &RunningGateway) -> String {
    let page = get(gateway.admin_addr().unwrap(), "/api/keys").await.json();
    page["keys"][0]["id"].as_str().unwrap().to_owned()
}

async fn reconcile(gateway: &RunningGateway, id: &str) -> (u16, Value) {
    let fields = [("content-type", "application/json")];
    let path = format!("/api/keys/{id}/reconcile");
    let answer = send(gateway.admin_addr().unwrap(), "POST", &path, &fields, "{}").await;
    (answer.status, answer.json())
}

/// Waits until the one record has this state.
async fn reaches(gateway: &RunningGateway, id: &str, state: &str) {
    let wait = async {
        loop {
            let path = format!("/api/keys/{id}");
            let shown = get(gateway.admin_addr().unwrap(), &path).await.json();
            if shown["state"] == state {
                return;
            }
            tokio::task::yield_now().await;
        }
    };
    tokio::time::timeout(crate::world::TIMEOUT, wait).await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn wire_46_a_response_is_stored_without_a_retry_and_with_the_authorization_of_the_gateway() {
    let upstream = upstream(|_| text(200, "paid")).await;
    let folder = tempfile::tempdir().unwrap();
    let mut config = on_file(&upstream, folder.path(), OFTEN);
    let file = folder.path().join("authorization");
    std::fs::write(&file, "Bearer of-the-gateway\n").unwrap();
    config.policy.reconcile_authorization = Some(file);
    let gateway = start(config).await;
    assert_eq!(pay(&gateway).await.status, 500);
    let id = id(&gateway).await;
    reaches(&gateway, &id, "done").await;
    let seen = upstream.seen();
    assert_eq!(seen.len(), 2, "one execution, one reconcile request");
    let (execution, question) = (&seen[0], &seen[1]);
    assert_eq!((&question.method, question.uri.path()), (&Method::GET, "/outcome"));
    assert_eq!(question.header("authorization"), "Bearer of-the-gateway");
    assert_eq!(question.header("x-tenant"), "", "it has no header of the caller");
    for name in ["idempotency-key", "idempotency-fence", "idempotency-attempt"] {
        assert_eq!(question.header(name), execution.header(name), "{name}");
    }
    assert_eq!(question.header("idempotency-operation-id"), id);
    let answer = pay(&gateway).await;
    assert_eq!((answer.status, answer.text().as_str()), (200, "paid"));
    assert_eq!(answer.header("idempotency-replayed"), "true");
    assert_eq!(upstream.seen().len(), 2);
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
    assert_eq!(seen[1].header("authorization"), "", "there is no setting of it");
}

#[tokio::test(flavor = "multi_thread")]
async fn without_a_verdict_the_outcome_stays_unknown_and_is_requested_again() {
    let upstream = upstream(|_| text(404, "")).await;
    let folder = tempfile::tempdir().unwrap();
    let gateway = start(on_file(&upstream, folder.path(), OFTEN)).await;
    assert_eq!(pay(&gateway).await.status, 500);
    until("three reconcile requests", || upstream.seen().len() >= 4).await;
    let (status, found) = reconcile(&gateway, &id(&gateway).await).await;
    assert_eq!(status, 200);
    assert!(["cannot-say", "not-yet"].contains(&found["result"].as_str().unwrap()), "{found}");
    assert!(upstream.seen().iter().skip(1).all(|seen| seen.method == Method::GET));
    // It stops with the gateway.
    gateway.shutdown().await;
    let count = upstream.seen().len();
    tokio::time::sleep(OFTEN * 5).await;
    assert_eq!(upstream.seen().len(), count);
}

#[tokio::test(flavor = "multi_thread")]
async fn under_block_the_reconcile_url_is_not_requested() {
    let upstream = upstream(|_| did_not_happen()).await;
    let folder = tempfile::tempdir().unwrap();
    // The record was written under `block`; the setting has changed since.
    let mut config = on_file(&upstream, folder.path(), NEVER);
    (config.policy.on_unknown, config.policy.reconcile_url) = (OnUnknown::Block, None);
    let gateway = start(config).await;
    assert_eq!(pay(&gateway).await.status, 500);
    gateway.shutdown().await;
    let gateway = start(on_file(&upstream, folder.path(), NEVER)).await;
    let (status, found) = reconcile(&gateway, &id(&gateway).await).await;
    assert_eq!((status, &found["code"]), (409, &json!("not-reconcilable")), "{found}");
    assert_eq!(upstream.seen().len(), 1);
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

/// A store whose clock the test moves, with one record whose lease has lapsed.
async fn lapsed(described: Option<Value>) -> (Arc<ManualClock>, Arc<MemoryStore>) {
    let clock = Arc::new(ManualClock::at(Timestamp::from_micros(SystemClock.now().as_micros())));
    let store = MemoryStore::new(Arc::clone(&clock) as Arc<dyn Clock>, MemoryCapacity::default());
    let store = Arc::new(store.secret(Secret::new([7; 32])));
    let engine = Idempotency::builder(Arc::clone(&store) as Arc<dyn Store>).build().unwrap();
    let terms = Terms { on_unknown: OnUnknown::Reconcile, ..Policy::default().terms };
    let policy = Policy { terms, settle: Some(Duration::from_secs(60)), ..Policy::default() };
    let key = "left".parse().unwrap();
    let claimed = engine.claim(&Scope::shared(), &key, &Left(described), &policy).await.unwrap();
    // A lease that is dropped stands for a process that died.
    let Claim::Execute(lease) = claimed else { panic!() };
    drop(lease);
    clock.advance(terms.lease);
    (clock, store)
}

fn described() -> Value {
    json!({ "key": "left", "method": "POST", "target": "/pay", "namespace": "" })
}

async fn start_on(config: Config, store: &Arc<MemoryStore>) -> RunningGateway {
    let opened = OpenStore::new(Arc::clone(store) as Arc<dyn Inspect>, None);
    Gateway::start_on(config, opened).await.unwrap()
}

#[tokio::test(flavor = "multi_thread")]
async fn wire_26_a_lapsed_operation_is_not_reconciled_while_its_request_may_be_on_its_way() {
    let upstream = upstream(|_| text(200, "paid")).await;
    let (clock, store) = lapsed(Some(described())).await;
    let gateway = start_on(reconciling(&upstream, NEVER), &store).await;
    let id = id(&gateway).await;
    let (status, found) = reconcile(&gateway, &id).await;
    assert_eq!((status, &found["result"]), (200, &json!("not-yet")), "{found}");
    assert_eq!(found["retry_in_seconds"], 60.0);
    clock.advance(Duration::from_secs(59));
    assert_eq!(reconcile(&gateway, &id).await.1["retry_in_seconds"], 1.0);
    assert!(upstream.seen().is_empty());
    clock.advance(Duration::from_secs(1));
    assert_eq!(reconcile(&gateway, &id).await.1["result"], "happened");
    assert_eq!(reconcile(&gateway, &id).await.1["result"], "decided");
    assert_eq!(upstream.seen().len(), 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn an_operation_of_another_service_or_route_is_not_reconciled() {
    let upstream = upstream(|_| did_not_happen()).await;
    let mut cases = vec![(None, "that describes its request")];
    let mut earlier = described();
    earlier.as_object_mut().unwrap().remove("namespace");
    cases.push((Some(earlier), "that describes its request"));
    for (field, value, word) in [
        ("namespace", "other", "of the namespace \\\"\\\" of this gateway"),
        ("route", "refunds", "expected the route of the record, \\\"refunds\\\""),
        ("method", "GET", "expected a protected route"),
        ("target", &"/x".repeat(600), "that describes its request"),
    ] {
        let mut other = described();
        other[field] = value.into();
        cases.push((Some(other), word));
    }
    for (described, word) in cases {
        let (clock, store) = lapsed(described).await;
        clock.advance(Duration::from_secs(3600));
        let gateway = start_on(reconciling(&upstream, NEVER), &store).await;
        let (status, found) = reconcile(&gateway, &id(&gateway).await).await;
        assert_eq!((status, &found["code"]), (409, &json!("not-reconcilable")), "{found}");
        assert!(found.to_string().contains(word), "expected {word} in {found}");
    }
    assert!(upstream.seen().is_empty());
}

#[tokio::test(flavor = "multi_thread")]
async fn of_several_gateways_one_at_a_time_requests_the_reconcile_url() {
    let permits = Arc::new(Semaphore::new(0));
    let [now, most] = [(); 2].map(|()| Arc::new(AtomicUsize::new(0)));
    let upstream = {
        let (permits, now, most) = (Arc::clone(&permits), Arc::clone(&now), Arc::clone(&most));
        Upstream::start(move |_| {
            let (permits, now, most) = (Arc::clone(&permits), Arc::clone(&now), Arc::clone(&most));
            async move {
                most.fetch_max(now.fetch_add(1, Ordering::SeqCst) + 1, Ordering::SeqCst);
                permits.acquire().await.unwrap().forget();
                now.fetch_sub(1, Ordering::SeqCst);
                text(200, "paid")
            }
        })
        .await
    };
    let (clock, store) = lapsed(Some(described())).await;
    clock.advance(Duration::from_secs(3600));
    let mut gateways = Vec::new();
    for _ in 0..3 {
        gateways.push(start_on(reconciling(&upstream, OFTEN), &store).await);
    }
    until("a reconcile request", || now.load(Ordering::SeqCst) == 1).await;
    let id = id(&gateways[0]).await;
    for gateway in &gateways {
        assert_eq!(reconcile(gateway, &id).await.1["result"], "not-yet");
    }
    permits.add_permits(10);
    reaches(&gateways[1], &id, "done").await;
    assert_eq!(most.load(Ordering::SeqCst), 1);
    assert_eq!(upstream.seen().len(), 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_claim_that_a_killed_process_did_not_withdraw_is_reconciled_under_its_own_fence() {
    let upstream = upstream(|_| did_not_happen()).await;
    let (clock, store) = lapsed(Some(described())).await;
    clock.advance(Duration::from_secs(3600));
    let gateway = start_on(reconciling(&upstream, NEVER), &store).await;
    let id = id(&gateway).await;
    // A process that ends after the verdict, before it withdraws, leaves a record in flight.
    let engine = Idempotency::builder(Arc::clone(&store) as Arc<dyn Store>).build().unwrap();
    let hook = hapax_core::machine::HookTiming {
        after: Duration::from_secs(60),
        timeout: Duration::from_secs(5),
    };
    let terms = Terms { on_unknown: OnUnknown::Reconcile, ..Policy::default().terms };
    let policy = Policy { terms, hook: Some(hook), ..Policy::default() };
    let operation = hapax_core::OperationId::from_hex(&id).unwrap();
    let seen = engine.load(&operation).await.unwrap();
    let record = &seen.stored.as_ref().unwrap().record;
    let request = hapax_core::AdoptedRequest::new(record, None);
    let claim = engine.adopt_undecided(operation, seen, &request, &policy).await.unwrap();
    let Claim::Reconcile(question) = claim else { panic!("{claim:?}") };
    let first = question.fence();
    let verdict = hapax_core::machine::Verdict::DidNotHappen;
    let Claim::Execute(lease) = question.conclude(verdict, &request).await.unwrap() else {
        panic!()
    };
    let second = lease.fence();
    assert!(second > first);
    drop(lease);
    assert_eq!(reconcile(&gateway, &id).await.1["result"], "in-flight");
    clock.advance(terms.lease);
    assert_eq!(reconcile(&gateway, &id).await.1["result"], "not-yet");
    clock.advance(Duration::from_secs(60));
    assert_eq!(reconcile(&gateway, &id).await.1["result"], "did-not-happen");
    let seen = upstream.seen();
    assert_eq!(seen.len(), 1);
    assert_eq!(seen[0].header("idempotency-fence"), second.get().to_string());
}

#[tokio::test(flavor = "multi_thread")]
async fn an_unusable_file_of_the_authorization_is_an_error_of_the_configuration() {
    let upstream = upstream(|_| did_not_happen()).await;
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("authorization");
    let mut config = reconciling(&upstream, NEVER);
    config.policy.reconcile_authorization = Some(file.clone());
    for content in [None, Some(""), Some("a\nb"), Some(&*"x".repeat(9000))] {
        if let Some(content) = content {
            std::fs::write(&file, content).unwrap();
        }
        let error = config.check().unwrap_err().to_string();
        assert!(error.contains("`reconcile_authorization`"), "{error}");
    }
    std::fs::write(&file, "Bearer x\n").unwrap();
    config.check().unwrap();
    (config.policy.on_unknown, config.policy.reconcile_url) = (OnUnknown::Block, None);
    let error = config.check().unwrap_err().to_string();
    assert!(error.contains("has no effect without `on_unknown` reconcile"), "{error}");
}

mod redis {
    use hapax_testkit::servers::RedisServer;

    use super::*;

    #[tokio::test(flavor = "multi_thread")]
    async fn nothing_is_reconciled_while_gateways_of_the_namespace_have_several_upstreams() {
        let server = RedisServer::start().await;
        let folder = tempfile::tempdir().unwrap();
        let secret = folder.path().join("secret");
        std::fs::write(&secret, "7".repeat(64)).unwrap();
        let on_server = |upstream: &Upstream, namespace: &str| {
            let mut config = reconciling(upstream, NEVER);
            config.store = server.url().parse().unwrap();
            config.secret_file = Some(secret.clone());
            config.namespace = Some(namespace.parse().unwrap());
            config
        };
        let (ours, theirs) =
            (upstream(|_| did_not_happen()).await, upstream(|_| did_not_happen()).await);
        let gateway = start(on_server(&ours, "payments")).await;
        assert_eq!(pay(&gateway).await.status, 500);
        let id = id(&gateway).await;
        // Of another service: its reconcile URL knows nothing of the payment.
        let elsewhere = start(on_server(&theirs, "refunds")).await;
        let (status, found) = reconcile(&elsewhere, &id).await;
        assert_eq!((status, &found["code"]), (409, &json!("not-reconcilable")), "{found}");
        elsewhere.shutdown().await;
        // By mistake in the same namespace.
        let elsewhere = start(on_server(&theirs, "payments")).await;
        for gateway in [&gateway, &elsewhere] {
            let (status, found) = reconcile(gateway, &id).await;
            assert_eq!((status, &found["code"]), (409, &json!("not-reconcilable")), "{found}");
        }
        elsewhere.shutdown().await;
        assert_eq!(reconcile(&gateway, &id).await.1["result"], "did-not-happen");
        assert_eq!((ours.seen().len(), theirs.seen().len()), (2, 0));
    }
}
