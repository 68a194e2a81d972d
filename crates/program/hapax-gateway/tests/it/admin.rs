//! The operators' listener.

use std::net::SocketAddr;
use std::num::NonZeroU32;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use hapax_core::store::{BoxFuture, Capabilities, Page, Reaped, Snapshot, Swap, Swapped};
use hapax_core::{
    Idempotency, Inspect, MemoryCapacity, MemoryStore, OnUnknown, OperationId, Scope, Store,
    StoreError, SystemClock,
};
use hapax_gateway::{CacheUrl, Gateway, OpenStore, ScopeConfig, StoreUrl};
use hapax_operators::{Audit, Decider, Decision, DecisionChannel, OperatorError, OperatorRecords};
use http::HeaderName;
use serde_json::{Value, json};

use crate::world::{
    Answer, Raw, TIMEOUT, Upstream, config, get, post, post_with, send, start, text, token,
};

/// Sends JSON; a decision without a reason gets one.
async fn tell(admin: SocketAddr, path: &str, body: &Value) -> Answer {
    let json = [("content-type", "application/json")];
    let mut body = body.clone();
    if body["fence"].is_number() && body["reason"].is_null() {
        body["reason"] = "a test".into();
    }
    send(admin, "POST", path, &json, &body.to_string()).await
}

#[tokio::test(flavor = "multi_thread")]
async fn records_are_listed_shown_and_found() {
    let upstream =
        Upstream::start(
            |seen| async move { text(seen.uri.path()[1..].parse().unwrap(), "an answer") },
        )
        .await;
    let gateway = start(config(upstream.url())).await;
    let (address, admin) = (gateway.local_addr(), gateway.admin_addr().unwrap());
    let mut other = config(upstream.url());
    other.policy.scope = Some(ScopeConfig::headers([HeaderName::from_static("x-tenant")]));
    for key in 0..5 {
        post(address, "/201", &format!("done-{key}"), "x").await;
    }
    for key in 0..3 {
        post(address, "/500", &format!("unknown-{key}"), "x").await;
    }
    post(address, "/429", "released", "x").await;
    let mine = [("idempotency-key", "mine"), ("authorization", "Bearer a")];
    post_with(address, "/201", &mine, "x").await;

    // Pages of two, until there are no more.
    let mut ids = Vec::new();
    let mut path = "/api/keys?limit=2".to_owned();
    loop {
        let page = get(admin, &path).await.json();
        let keys = page["keys"].as_array().unwrap();
        assert!(keys.len() <= 2);
        ids.extend(keys.iter().map(|key| key["id"].as_str().unwrap().to_owned()));
        match page["next"].as_str() {
            Some(next) => path = format!("/api/keys?limit=2&after={next}"),
            None => break,
        }
    }
    assert_eq!(ids.len(), 9);
    assert!(ids.is_sorted());
    let unknown = get(admin, "/api/keys?state=unknown").await.json();
    assert_eq!(unknown["keys"].as_array().unwrap().len(), 3);
    let released = get(admin, "/api/keys?state=released").await.json();
    assert_eq!(released["keys"].as_array().unwrap().len(), 1);
    assert_eq!(get(admin, "/api/keys?state=odd").await.status, 400);
    assert_eq!(get(admin, "/api/keys/abc").await.status, 400);
    assert_eq!(get(admin, &format!("/api/keys/{}", "0".repeat(64))).await.status, 404);

    let found = tell(admin, "/api/keys/lookup", &json!({"key": "mine", "scope": "Bearer a"})).await;
    assert_eq!(found.status, 200, "{}", found.text());
    let found = found.json();
    assert_eq!((&found["state"], &found["attempt"]), (&json!("done"), &json!(1)));
    assert_eq!(found["response"]["status"], 201);
    assert_eq!(found["response"]["body"], "an answer");
    // Not all of it: what was asked could be guessed from that.
    assert_eq!(found["fingerprint"].as_str().unwrap().len(), 8);
    assert!(ids.contains(&found["id"].as_str().unwrap().to_owned()));
    let named = json!({"key": "mine", "scope": [["Authorization", "Bearer a"]]});
    assert_eq!(tell(admin, "/api/keys/lookup", &named).await.json()["id"], found["id"]);
    assert_eq!(tell(admin, "/api/keys/lookup", &json!({"key": "mine"})).await.status, 404);
    let nobody = json!({"key": "mine", "scope": [["x-tenant", "a"]]});
    assert_eq!(tell(admin, "/api/keys/lookup", &nobody).await.status, 404);
    let odd = json!({"key": "mine", "scope": [["x tenant", "a"]]});
    assert_eq!(tell(admin, "/api/keys/lookup", &odd).await.status, 400);
    // Under another scope, what was recorded before is still found by what named its caller.
    gateway.reload(other).unwrap();
    assert_eq!(tell(admin, "/api/keys/lookup", &named).await.json()["id"], found["id"]);
    assert_eq!(tell(admin, "/api/keys/lookup", &nobody).await.status, 404);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_finished_record_is_released_only_with_forget() {
    let upstream = Upstream::counting().await;
    let gateway = start(config(upstream.url())).await;
    let (address, admin) = (gateway.local_addr(), gateway.admin_addr().unwrap());
    assert_eq!(post(address, "/", "k", "x").await.status, 201);
    let seen = tell(admin, "/api/keys/lookup", &json!({"key": "k"})).await.json();
    let (id, fence) = (seen["id"].as_str().unwrap(), &seen["fence"]);
    let began = seen["began"].as_str().unwrap();
    let ended = seen["ended"].as_str().unwrap();
    assert!(began <= ended && ended <= seen["now"].as_str().unwrap(), "{seen}");

    let (release, resolve) = (format!("/api/keys/{id}/release"), format!("/api/keys/{id}/resolve"));
    let did_not = json!({"fence": fence, "outcome": "did-not-happen"});
    for (path, decision) in [(&release, json!({"fence": fence})), (&resolve, did_not)] {
        let refused = tell(admin, path, &decision).await;
        assert_eq!((refused.status, refused.code().as_str()), (409, "done"));
        let said = refused.text();
        assert!(said.contains(ended) && said.contains("forget") && !said.contains("--"), "{said}");
    }
    assert_eq!(post(address, "/", "k", "x").await.header("idempotency-replayed"), "true");
    let changed = tell(admin, &release, &json!({"fence": 1, "forget": true})).await;
    assert_eq!((changed.status, changed.code().as_str()), (409, "changed"));
    let forgotten = tell(admin, &release, &json!({"fence": fence, "forget": true})).await;
    let was = json!({"state": "done", "status": 201, "ended": ended});
    assert_eq!((forgotten.status, &forgotten.json()["was"]), (200, &was));
    assert_eq!(post(address, "/", "k", "x").await.header("idempotency-replayed"), "false");
    assert_eq!(upstream.seen().len(), 2);
}

#[tokio::test(flavor = "multi_thread")]
async fn the_api_index_lists_every_path() {
    let upstream = Upstream::counting().await;
    let gateway = start(config(upstream.url())).await;
    let admin = gateway.admin_addr().unwrap();
    assert_eq!(post(gateway.local_addr(), "/", "k", "x").await.status, 201);
    let record = tell(admin, "/api/keys/lookup", &json!({"key": "k"})).await.json();
    let text = get(admin, "/").await.text();
    for path in ["/api", "/api/"] {
        let index = get(admin, path).await;
        assert_eq!(index.status, 200, "{path}");
        let index = index.json();
        let entries = index["api"].as_array().unwrap();
        for entry in entries {
            let (method, path) =
                (entry["method"].as_str().unwrap(), entry["path"].as_str().unwrap());
            let known = path.replace("ID", record["id"].as_str().unwrap());
            // There is what it is about; of what changes something, that is not said.
            let there = match method {
                // The record is not of a saga.
                "GET" if path == "/api/sagas/ID" => {
                    get(admin, &known).await.text().contains("expected a saga")
                }
                "GET" => get(admin, &known).await.status == 200,
                _ => tell(admin, &known, &json!({})).await.code() == "bad-request",
            };
            assert!(there, "{method} {path}");
            assert!(text.contains(path), "{path} in {text}");
        }
        assert_eq!(entries.len(), 23);
    }
    let odd = tell(admin, "/api/odd", &json!({})).await;
    assert_eq!((odd.status, odd.code().as_str()), (404, "not-found"));
    let odd = get(admin, "/api/odd").await;
    assert_eq!((odd.status, odd.code().as_str()), (404, "not-found"));
}

/// A response is nothing that a function could read.
#[tokio::test]
async fn a_record_of_a_function_is_released_only_with_any_kind_and_never_resolved() {
    let store = Arc::new(MemoryStore::new(Arc::new(SystemClock), MemoryCapacity::default()));
    let engine = Idempotency::builder(Arc::clone(&store) as Arc<_>).build().unwrap();
    let folder = tempfile::tempdir().unwrap();
    let audit = Audit::new(folder.path().join("audit"), "a test");
    let keys = OperatorRecords::new(engine.clone(), store, audit, Duration::from_secs(10));
    let (scope, key) = (Scope::shared(), "of-a-function".parse().unwrap());
    let call = async || {
        engine.at_most_once::<u32, _, _, _, _>(&(&scope, &key, 1), || async { Err("broken") }).await
    };
    call().await.unwrap_err();
    let id = engine.operation_id(&scope, &key);
    let fence = keys.show(&id).await.unwrap().fence;
    let by = || Decider { who: "a test".into(), by: DecisionChannel::Cli, from: "here".into() };
    let decision = |outcome: &str, any_kind: bool| -> Decision {
        let decision =
            json!({"fence": fence, "reason": "r", "outcome": outcome, "any_kind": any_kind});
        serde_json::from_value(decision).unwrap()
    };
    for any_kind in [false, true] {
        let refused = keys.resolve(&id, decision("happened", any_kind), by()).await.unwrap_err();
        assert!(
            matches!(&refused, OperatorError::NotHttp { scheme } if scheme.starts_with("function/"))
        );
        assert_eq!(refused.code(), "bad-request");
    }
    let refused = keys.resolve(&id, decision("did-not-happen", false), by()).await.unwrap_err();
    assert!(matches!(&refused, OperatorError::OtherKind { .. }), "{refused:?}");
    assert_eq!(refused.code(), "other-kind");
    keys.resolve(&id, decision("did-not-happen", true), by()).await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn an_operator_resolves_an_unknown_outcome() {
    let upstream = Upstream::start(|_| async { text(500, "broken") }).await;
    let mut config = config(upstream.url());
    config.policy.on_unknown = OnUnknown::Block;
    let gateway = start(config).await;
    let (address, admin) = (gateway.local_addr(), gateway.admin_addr().unwrap());
    for key in ["happened", "not"] {
        assert_eq!(post(address, "/", key, "x").await.status, 500);
        assert_eq!(post(address, "/", key, "x").await.code(), "outcome-unknown");
    }
    let seen = tell(admin, "/api/keys/lookup", &json!({"key": "happened"})).await.json();
    let (id, fence) = (seen["id"].as_str().unwrap(), seen["fence"].as_u64().unwrap());
    let path = format!("/api/keys/{id}/resolve");
    let mut decision = json!({
        "fence": fence + 1, "outcome": "happened", "status": 201, "body_base64": "aGkA",
        "headers": [["content-type", "text/plain"]],
    });
    let changed = tell(admin, &path, &decision).await;
    assert_eq!((changed.status, changed.code().as_str()), (409, "changed"));
    assert!(changed.text().contains(&format!("unknown with fence {fence}")), "{changed:?}");
    decision["fence"] = fence.into();
    assert_eq!(tell(admin, &path, &decision).await.status, 200);
    let answer = post(address, "/", "happened", "x").await;
    assert_eq!((answer.status, answer.body.as_slice()), (201, b"hi\0".as_slice()));
    assert_eq!(answer.header("content-type"), "text/plain");

    let seen = tell(admin, "/api/keys/lookup", &json!({"key": "not"})).await.json();
    let path = format!("/api/keys/{}/release", seen["id"].as_str().unwrap());
    let fence = json!({"fence": seen["fence"]});
    let released = tell(admin, &path, &fence).await;
    assert_eq!(released.status, 200);
    assert_eq!(released.json()["was"], json!({"state": "unknown", "status": 500}));
    let again = tell(admin, &path, &fence).await;
    assert_eq!((again.status, again.code().as_str()), (409, "released"));
    assert_eq!(post(address, "/", "not", "x").await.status, 500);
    assert_eq!(upstream.seen().len(), 3);

    for bad in [
        json!({"fence": 1, "outcome": "happened", "status": 101}),
        json!({"fence": 1, "outcome": "happened", "body": "a", "body_base64": "YQ=="}),
        json!({"fence": 1, "outcome": "did-not-happen", "status": 200}),
        json!({"fence": 1, "outcome": "perhaps"}),
        json!({"outcome": "happened"}),
        json!({"fence": 1, "outcome": "happened", "headers": [["a b", "c"]]}),
        json!({"fence": 1, "outcome": "happened", "headers": [["Content-Length", "3"]]}),
        json!({"fence": 1, "outcome": "happened", "headers": [["transfer-encoding", "chunked"]]}),
        json!({"fence": 1, "outcome": "happened", "headers": [["Idempotency-Replayed", "no"]]}),
        json!({"fence": 1, "outcome": "happened", "headers": [["connection", "close"]]}),
        json!({"fence": 1, "outcome": "happened", "headers": [["date", "today"]]}),
        json!({"fence": 1, "outcome": "happened", "status": 204, "body": "x"}),
        json!({"fence": 1, "outcome": "happened", "status": 304, "body": "x"}),
    ] {
        let answer = tell(admin, &format!("/api/keys/{id}/resolve"), &bad).await;
        assert_eq!((answer.status, answer.code().as_str()), (400, "bad-request"), "{bad}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn w39_a_request_without_a_response_is_not_released_while_the_service_may_work_on() {
    let upstream = Upstream::start(|_| std::future::pending()).await;
    let mut config = config(upstream.url());
    config.policy.on_unknown = OnUnknown::Block;
    config.policy.upstream_timeout = Duration::from_millis(300);
    let gateway = start(config).await;
    let (address, admin) = (gateway.local_addr(), gateway.admin_addr().unwrap());
    for (key, how, more, status) in [
        ("a", "release", json!({}), 409),
        ("b", "resolve", json!({"outcome": "did-not-happen"}), 409),
        ("c", "release", json!({"force": true}), 200),
        ("d", "resolve", json!({"outcome": "happened", "status": 201}), 200),
    ] {
        assert_eq!(post(address, "/", key, "x").await.code(), "upstream-timeout");
        let seen = tell(admin, "/api/keys/lookup", &json!({"key": key})).await.json();
        let until = &seen["may_execute_until"];
        assert!(until.is_string() && seen["response"].is_null(), "{seen}");
        let mut decision = json!({"fence": seen["fence"]});
        for (name, value) in more.as_object().unwrap() {
            decision[name] = value.clone();
        }
        let path = format!("/api/keys/{}/{how}", seen["id"].as_str().unwrap());
        let decided = tell(admin, &path, &decision).await;
        assert_eq!(decided.status, status, "{key}: {decided:?}");
        if status == 409 {
            assert_eq!(decided.code(), "may-execute");
            assert_eq!(&decided.json()["may_execute_until"], until);
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn the_api_needs_its_token_on_loopback_and_probes_do_not() {
    let upstream = Upstream::counting().await;
    let folder = tempfile::tempdir().unwrap();
    let mut config = config(upstream.url());
    config.store = StoreUrl::File(folder.path().join("hapax.db"));
    config.admin_token_file = None;
    let gateway = start(config).await;
    let admin = gateway.admin_addr().unwrap();
    let file = folder.path().join("hapax.db.admin-token");
    assert!(!hapax_operators::is_open_to_others(&file));
    let token = format!("Bearer {}", std::fs::read_to_string(&file).unwrap().trim());
    for path in ["/healthz", "/readyz", "/metrics"] {
        let bare = [("authorization", "")];
        assert_eq!(send(admin, "GET", path, &bare, "").await.status, 200, "{path}");
    }
    for path in ["/", "/api", "/api/", "/api/stats", "/api/keys", "/api/nothing"] {
        for wrong in ["", "Bearer ", "Bearer 0123456789abcdef0123456789abcdef", &token[..70]] {
            let answer = send(admin, "GET", path, &[("authorization", wrong)], "").await;
            let seen = (answer.status, answer.header("www-authenticate"));
            assert_eq!(seen, (401, "Bearer"), "{path} {wrong}");
        }
        let status = send(admin, "GET", path, &[("authorization", &*token)], "").await.status;
        assert_eq!(status, if path == "/api/nothing" { 404 } else { 200 }, "{path}");
    }
    let lookup = r#"{"key": "k"}"#;
    let shown = ("authorization", &*token);
    let foreign = [shown, ("content-type", "application/json"), ("origin", "http://evil.example")];
    assert_eq!(send(admin, "POST", "/api/keys/lookup", &foreign, lookup).await.status, 403);
    let form = [shown, ("content-type", "text/plain")];
    assert_eq!(send(admin, "POST", "/api/keys/lookup", &form, lookup).await.status, 415);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_caller_is_found_by_the_bytes_it_sent() {
    let upstream = Upstream::counting().await;
    let gateway = start(config(upstream.url())).await;
    let mine = [("idempotency-key", "k"), ("authorization", "Bearer é")];
    assert_eq!(post_with(gateway.local_addr(), "/", &mine, "x").await.status, 201);
    let asked = json!({"key": "k", "scope": "Bearer é"});
    let found = tell(gateway.admin_addr().unwrap(), "/api/keys/lookup", &asked).await;
    assert_eq!(found.status, 200, "{}", found.text());
}

#[tokio::test(flavor = "multi_thread")]
async fn idle_connections_do_not_block_operators() {
    let upstream = Upstream::counting().await;
    let gateway = start(config(upstream.url())).await;
    let admin = gateway.admin_addr().unwrap();
    let mut silent = Vec::new();
    for _ in 0..64 {
        let mut raw = Raw::connect(admin).await;
        raw.send("GET /healthz HTTP/1.1\r\n").await;
        silent.push(raw);
    }
    // It waits until one of them has had its time.
    assert_eq!(get(admin, "/healthz").await.status, 200);
    for mut raw in silent {
        raw.rest().await;
    }
    let mut raw = Raw::connect(admin).await;
    let shown = format!("host: {admin}\r\nauthorization: {}\r\n", token());
    let head = format!("{shown}content-type: application/json\r\ncontent-length: 9\r\n");
    raw.send(format!("POST /api/keys/lookup HTTP/1.1\r\n{head}\r\n{{")).await;
    assert_eq!(raw.answer().await.status, 400, "a body that does not come");
}

#[tokio::test(flavor = "multi_thread")]
async fn metrics_count_executions_replays_and_rejections() {
    let upstream = Upstream::counting().await;
    let gateway = start(config(upstream.url())).await;
    let (address, admin) = (gateway.local_addr(), gateway.admin_addr().unwrap());
    post(address, "/", "k", "x").await;
    post(address, "/", "k", "x").await;
    post(address, "/", "k", "other").await;
    let answer = get(admin, "/metrics").await;
    assert!(answer.header("content-type").starts_with("text/plain; version=0.0.4"));
    let text = answer.text();
    for line in [
        "hapax_executions_total{class=\"final\",recorded=\"stored\"} 1",
        "hapax_replays_total 1",
        "hapax_refusals_total{code=\"key-reused\"} 1",
        "hapax_store_up 1",
        "hapax_in_flight 0",
    ] {
        assert!(text.lines().any(|it| it == line), "{line} is not in\n{text}");
    }
    let stats = get(admin, "/api/stats").await.json();
    assert_eq!(stats["since_start"]["executed"]["final"], 1);
    assert_eq!(stats["since_start"]["replayed"], 1);
}

/// A memory store that can be away.
#[derive(Debug)]
pub(crate) struct Away {
    pub(crate) store: MemoryStore,
    pub(crate) away: AtomicBool,
}

impl Away {
    fn check(&self) -> Result<(), StoreError> {
        if self.away.load(Ordering::SeqCst) {
            return Err(StoreError::unavailable("away"));
        }
        Ok(())
    }
}

impl Store for Away {
    fn swap(&self, swap: Swap) -> BoxFuture<'_, Result<Swapped, StoreError>> {
        Box::pin(async move {
            self.check()?;
            self.store.swap(swap).await
        })
    }

    fn load<'a>(&'a self, key: &'a OperationId) -> BoxFuture<'a, Result<Snapshot, StoreError>> {
        Box::pin(async move {
            self.check()?;
            self.store.load(key).await
        })
    }

    fn reap(&self, limit: NonZeroU32) -> BoxFuture<'_, Result<Reaped, StoreError>> {
        Box::pin(async move {
            self.check()?;
            self.store.reap(limit).await
        })
    }

    fn capabilities(&self) -> Capabilities<'_> {
        self.store.capabilities()
    }
}

impl Inspect for Away {
    fn page(
        &self,
        after: Option<OperationId>,
        limit: NonZeroU32,
    ) -> BoxFuture<'_, Result<Page, StoreError>> {
        Box::pin(async move {
            self.check()?;
            self.store.page(after, limit).await
        })
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn readiness_follows_the_store() {
    let upstream = Upstream::counting().await;
    let memory = MemoryStore::new(Arc::new(SystemClock), MemoryCapacity::default());
    let store = Arc::new(Away { store: memory, away: AtomicBool::new(false) });
    let opened = OpenStore::new(Arc::clone(&store) as Arc<dyn Inspect>, None);
    let gateway = Gateway::start_on(config(upstream.url()), opened).await.unwrap();
    let (address, admin) = (gateway.local_addr(), gateway.admin_addr().unwrap());
    assert_eq!(get(admin, "/readyz").await.status, 200);
    store.away.store(true, Ordering::SeqCst);
    assert_eq!(get(admin, "/readyz").await.status, 503);
    assert_eq!(get(admin, "/healthz").await.status, 200);
    assert_eq!(get(admin, "/api/keys").await.code(), "store-unavailable");
    assert!(get(admin, "/metrics").await.text().contains("hapax_store_up 0"));
    let answer = post(address, "/", "k", "x").await;
    assert_eq!((answer.status, answer.code().as_str()), (503, "store-unavailable"));
    assert_eq!(answer.header("retry-after"), "1");
    assert_eq!(upstream.seen().len(), 0);
    store.away.store(false, Ordering::SeqCst);
    assert_eq!(get(admin, "/readyz").await.status, 200);
    assert_eq!(post(address, "/", "k", "x").await.status, 201);
}

#[tokio::test(flavor = "multi_thread")]
async fn calls_of_the_store_and_of_its_cache_are_counted() {
    let upstream = Upstream::counting().await;
    let mut config = config(upstream.url());
    config.cache = Some(CacheUrl::Memory);
    let gateway = start(config).await;
    let (address, admin) = (gateway.local_addr(), gateway.admin_addr().unwrap());
    let value = |text: &str, name: &str| {
        let line = text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(' '));
        line.unwrap_or_else(|| panic!("{name} is not in\n{text}")).parse::<u64>().unwrap()
    };
    assert_eq!(post(address, "/", "k", "x").await.header("idempotency-replayed"), "false");
    // The first replay puts the record into the cache, by a task that the next one may overtake.
    let replays = async {
        loop {
            let answer = post(address, "/", "k", "x").await;
            assert_eq!(answer.header("idempotency-replayed"), "true");
            let text = get(admin, "/metrics").await.text();
            if value(&text, "hapax_store_cache_hits_total") > 0 {
                return text;
            }
        }
    };
    let text = tokio::time::timeout(TIMEOUT, replays).await.unwrap();
    assert!(value(&text, "hapax_store_swaps_total{answer=\"stored\"}") >= 2, "{text}");
    assert!(value(&text, "hapax_store_swap_seconds_count") >= 2, "{text}");
}
