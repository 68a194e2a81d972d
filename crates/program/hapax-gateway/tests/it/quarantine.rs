//! Quarantines of a store that may have lost records.

use std::net::SocketAddr;
use std::time::Duration;

use hapax_core::{Clock, OnUnknown, SystemClock};
use hapax_gateway::{Config, Gateway, RouteConfig, RunningGateway, StoreUrl};
use hapax_http::server::StoreOutage;
use hapax_testkit::servers::{PostgresServer, RedisServer};
use http::Method;
use serde_json::{Value, json};

use crate::world::{Answer, Upstream, config, did_not_happen, get, post, send, start, text};

fn on(url: &str, upstream: &Upstream, namespace: &str) -> Config {
    let mut config = config(upstream.url());
    config.store = url.parse().unwrap();
    config.namespace = Some(namespace.parse().unwrap());
    config.policy.on_unknown = OnUnknown::Reexecute;
    config.policy.store_outage = StoreOutage::Open;
    config
}

/// Sends a decision about a quarantine of the namespace `shop`.
async fn decide(gateway: &RunningGateway, path: &str, more: Value) -> Answer {
    let mut body = json!({ "namespace": "shop", "reason": "restored the backup of 02:00" });
    body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
    let json = [("content-type", "application/json")];
    send(gateway.admin_addr().unwrap(), "POST", path, &json, &body.to_string()).await
}

async fn begin(gateway: &RunningGateway, more: Value) {
    let mut body = json!({ "seconds": 600 });
    body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
    let begun = decide(gateway, "/api/quarantines", body).await;
    assert_eq!(begun.status, 200, "{}", begun.text());
    let confirmed = async {
        loop {
            let listed = get(gateway.admin_addr().unwrap(), "/api/quarantines").await.json();
            if listed["quarantines"][0]["unconfirmed"] == json!([]) {
                return listed;
            }
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    };
    let listed = tokio::time::timeout(Duration::from_secs(60), confirmed).await.unwrap();
    assert_ne!(listed["quarantines"][0]["confirmed"], 0, "{listed}");
}

fn is_rejected(answer: &Answer) {
    assert_eq!((answer.status, &*answer.code()), (503, "quarantined"), "{}", answer.text());
    let seconds: u64 = answer.header("retry-after").parse().unwrap();
    assert!((1..=60).contains(&seconds), "{seconds}");
}

/// Returns a UUID of version 7 that is made now.
fn made_now() -> String {
    let millis = (SystemClock.now().as_micros() / 1000 + 1).to_be_bytes();
    let digits = millis[2..].iter().map(|byte| format!("{byte:02x}")).collect::<String>();
    format!("{}-{}-7cc3-98c4-dc0c0c07398f", &digits[..8], &digits[8..])
}

/// Repeats a request until it executes.
async fn until_executed(address: SocketAddr, key: &str) {
    let executed = async {
        while post(address, "/", key, "x").await.status != 201 {
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    };
    tokio::time::timeout(Duration::from_secs(60), executed).await.unwrap();
}

async fn every_gateway_rejects_unknown_keys_until_the_end(url: &str) {
    let upstream = Upstream::counting().await;
    let first = start(on(url, &upstream, "shop")).await;
    let second = start(on(url, &upstream, "shop")).await;
    let bank = start(on(url, &upstream, "bank")).await;
    assert_eq!(post(first.local_addr(), "/", "known", "x").await.status, 201);
    begin(&first, json!({})).await;
    let executed = upstream.seen().len();
    for gateway in [&first, &second] {
        let address = gateway.local_addr();
        let replayed = post(address, "/", "known", "x").await;
        assert_eq!((replayed.status, replayed.header("idempotency-replayed")), (201, "true"));
        is_rejected(&post(address, "/", "lost", "x").await);
    }
    assert_eq!(upstream.seen().len(), executed);
    assert_eq!(post(second.local_addr(), "/", &made_now(), "x").await.status, 201);
    assert_eq!(post(bank.local_addr(), "/", "lost", "x").await.status, 201);

    let admin = second.admin_addr().unwrap();
    let ready = get(admin, "/readyz").await;
    assert_eq!(ready.status, 200);
    let said = ready.text();
    assert!(said.contains("in quarantine: keys without a record do not execute until"), "{said}");
    assert!(!said.contains("on the routes"), "{said}");
    let metrics = get(admin, "/metrics").await.text();
    assert!(metrics.contains("hapax_quarantine_end_seconds{route=\"\"} "), "{metrics}");
    let others = get(bank.admin_addr().unwrap(), "/metrics").await.text();
    assert!(!others.contains("hapax_quarantine_end_seconds{"), "{others}");

    // One that starts now applies it before its first request.
    let third = start(on(url, &upstream, "shop")).await;
    is_rejected(&post(third.local_addr(), "/", "lost", "x").await);

    let ended = decide(&second, "/api/quarantines/end", json!({})).await;
    assert_eq!(ended.status, 200, "{}", ended.text());
    for gateway in [&first, &second, &third] {
        until_executed(gateway.local_addr(), "lost").await;
    }
    assert_eq!(decide(&second, "/api/quarantines/end", json!({})).await.status, 404);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn every_gateway_on_postgres_rejects_unknown_keys_until_the_end() {
    let server = PostgresServer::start().await;
    Box::pin(every_gateway_rejects_unknown_keys_until_the_end(&server.url("postgres"))).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn every_gateway_on_redis_rejects_unknown_keys_until_the_end() {
    let server = RedisServer::start().await;
    Box::pin(every_gateway_rejects_unknown_keys_until_the_end(&server.url())).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_quarantine_of_a_file_applies_at_once_and_survives_a_restart() {
    let (upstream, folder) = (Upstream::counting().await, tempfile::tempdir().unwrap());
    let on_file = || {
        let mut config = config(upstream.url());
        config.store = StoreUrl::File(folder.path().join("hapax.db"));
        config.namespace = Some("shop".parse().unwrap());
        config.audit_file = None;
        config
    };
    let gateway = start(on_file()).await;
    begin(&gateway, json!({})).await;
    is_rejected(&post(gateway.local_addr(), "/", "lost", "x").await);
    gateway.shutdown().await;
    let gateway = start(on_file()).await;
    is_rejected(&post(gateway.local_addr(), "/", "lost", "x").await);
    assert_eq!(decide(&gateway, "/api/quarantines/end", json!({})).await.status, 200);
    assert_eq!(post(gateway.local_addr(), "/", "lost", "x").await.status, 201);
    let lines = std::fs::read_to_string(folder.path().join("hapax.db.audit.jsonl")).unwrap();
    let lines: Vec<Value> = lines.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    let stages: Vec<_> = lines.iter().map(|it| (&it["store"], &it["stage"])).collect();
    let [begun, ended] = [json!("quarantined"), json!("quarantine-ended")];
    let [intended, done] = [json!("intended"), json!("done")];
    assert_eq!(
        stages,
        [(&begun, &intended), (&begun, &done), (&ended, &intended), (&ended, &done)]
    );
    assert_eq!((&lines[0]["namespace"], &lines[0]["seconds"]), (&json!("shop"), &json!(600)));
    let of_other = json!({ "namespace": "bank", "seconds": 600, "any_namespace": true });
    let rejected = decide(&gateway, "/api/quarantines", of_other).await;
    assert_eq!(rejected.status, 400);
    let expected =
        r#"of the process that has the file open (\"shop\"), found \"bank\": name that one"#;
    assert!(rejected.text().contains(expected), "{}", rejected.text());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_quarantine_of_a_route_leaves_the_others() {
    let (upstream, server) = (Upstream::counting().await, RedisServer::start().await);
    let mut config = on(&server.url(), &upstream, "shop");
    config.routes = vec![RouteConfig::new("/payments", config.policy.clone())];
    let gateway = start(config).await;
    let misspelt = json!({ "seconds": 600, "route": "/payment" });
    let rejected = decide(&gateway, "/api/quarantines", misspelt).await;
    assert_eq!((rejected.status, &*rejected.code()), (400, "bad-request"));
    assert!(rejected.text().contains("(/payments), found"), "{}", rejected.text());
    begin(&gateway, json!({ "route": "/payments" })).await;
    is_rejected(&post(gateway.local_addr(), "/payments", "lost", "x").await);
    assert_eq!(post(gateway.local_addr(), "/", "lost", "x").await.status, 201);
    let said = get(gateway.admin_addr().unwrap(), "/readyz").await.text();
    assert!(said.contains(" on the routes /payments: see"), "{said}");
    for bad in [json!({ "seconds": 0 }), json!({ "seconds": 86_401 }), json!({ "odd": 1 })] {
        assert_eq!(decide(&gateway, "/api/quarantines", bad).await.status, 400);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_key_without_a_record_is_reconciled() {
    let server = RedisServer::start().await;
    let upstream = Upstream::start(|seen| {
        let is_known = seen.header("idempotency-key").contains("known");
        let response = match (seen.method, is_known) {
            (Method::GET, true) => text(200, "paid before"),
            (Method::GET, false) => did_not_happen(),
            _ => text(201, "paid"),
        };
        async move { response }
    })
    .await;
    let mut config = on(&server.url(), &upstream, "shop");
    config.policy.store_outage = StoreOutage::default();
    config.policy.on_unknown = OnUnknown::Reconcile;
    config.policy.reconcile_url = Some(format!("{}outcome", upstream.url()).parse().unwrap());
    config.policy.lease = Duration::from_secs(1);
    config.policy.upstream_timeout = Duration::from_secs(1);
    let gateway = Gateway::start(config).await.unwrap();
    begin(&gateway, json!({})).await;
    let address = gateway.local_addr();
    // Requests of the lost execution may be on their way until lease and time-out have passed.
    let answered = async |key| {
        loop {
            let answer = post(address, "/", key, "x").await;
            if answer.status != 503 {
                return answer;
            }
            is_rejected(&answer);
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    };
    let known = answered("known").await;
    assert_eq!((known.status, &*known.text()), (200, "paid before"));
    let lost = answered("lost").await;
    assert_eq!((lost.status, &*lost.text()), (201, "paid"));
    let executed = upstream.seen().iter().filter(|it| it.method == Method::POST).count();
    assert_eq!(executed, 1);
}
