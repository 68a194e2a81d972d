//! What is observed passes through as if nobody looked, and is counted.

use std::net::SocketAddr;
use std::sync::Arc;

use hapax_core::{InFlight, OnUnknown};
use hapax_gateway::{Config, RouteConfig, RouteMode, RunningGateway};
use hapax_http::server::KeyRule;
use tokio::sync::Semaphore;

use crate::world::{
    Raw, TIMEOUT, Upstream, config, get, post, post_with, request, start, text, until,
};

/// Everything observed.
fn observing(config: &mut Config) {
    let mut route = RouteConfig::new("/{*rest}", config.policy.clone());
    route.name = Some("all".into());
    route.handling = RouteMode::Observe;
    config.routes = vec![route];
}

/// Waits until the metrics say so of the route.
async fn counted(gateway: &RunningGateway, what: &str, count: u64) {
    let admin: SocketAddr = gateway.admin_addr().unwrap();
    let (name, label) = what.split_once(' ').unwrap();
    let line = format!("{name}{{route=\"all\",{label}}} {count}");
    let wait = async {
        while !get(admin, "/metrics").await.text().lines().any(|it| it == line) {
            tokio::task::yield_now().await;
        }
    };
    if tokio::time::timeout(TIMEOUT, wait).await.is_err() {
        panic!("never: {line} in\n{}", get(admin, "/metrics").await.text());
    }
}

const EXECUTE: &str = "hapax_would_total outcome=\"execute\"";
const REPLAY: &str = "hapax_would_total outcome=\"replay\"";

#[tokio::test]
async fn observed_duplicates_execute_and_are_counted() {
    let upstream = Upstream::counting().await;
    let mut config = config(upstream.url());
    config.policy.key = KeyRule::Required;
    observing(&mut config);
    let gateway = start(config).await;
    let address = gateway.local_addr();
    for number in 1..=3_u64 {
        let answer = post(address, "/pay", "k", r#"{"a": 1}"#).await;
        assert_eq!((answer.status, answer.text()), (201, number.to_string()));
        assert!(answer.headers.iter().all(|(name, _)| !name.starts_with("idempotency-")));
        counted(&gateway, EXECUTE, 1).await;
        if number > 1 {
            counted(&gateway, REPLAY, number - 1).await;
        }
    }
    for (fields, code, body) in [
        (&[("idempotency-key", "k")][..], "key-reused", "other"),
        (&[], "missing-key", "x"),
        (&[("idempotency-key", "")], "invalid-key", "x"),
        (&[("idempotency-key", "z"), ("authorization", "Digest a=b")], "unstable-scope", "x"),
    ] {
        assert_eq!(post_with(address, "/pay", fields, body).await.status, 201);
        counted(&gateway, &format!("hapax_would_refuse_total code=\"{code}\""), 1).await;
    }
    let large = "x".repeat((1 << 20) + 1);
    assert_eq!(post(address, "/pay", "large", &large).await.status, 201);
    counted(&gateway, "hapax_would_refuse_total code=\"body-too-large\"", 1).await;
    assert_eq!(upstream.seen().last().unwrap().body.len(), large.len());
    let seen = upstream.seen();
    assert!(seen.iter().all(|seen| seen.header("idempotency-fence").is_empty()));
    assert_eq!(seen.len(), 8);
    // Nothing of it is in the store.
    let admin = gateway.admin_addr().unwrap();
    let keys = get(admin, "/api/keys").await;
    assert_eq!(keys.json()["keys"].as_array().map(Vec::len), Some(0), "{}", keys.text());
    gateway.shutdown().await;
}

#[tokio::test]
async fn an_observed_outcome_header_is_counted_and_removed() {
    let upstream = Upstream::start(|seen| async move {
        let mut answer = text(500, "failed");
        if seen.header("idempotency-key") == "said" {
            let word = http::HeaderValue::from_static("retryable");
            answer.headers_mut().insert("idempotency-outcome", word);
        }
        answer
    })
    .await;
    let mut config = config(upstream.url());
    config.policy.on_unknown = OnUnknown::Reconcile;
    config.policy.reconcile_url = Some(upstream.url());
    observing(&mut config);
    let gateway = start(config).await;
    let address = gateway.local_addr();
    // Released, and executed again.
    for number in 1..=2 {
        let answer = post(address, "/", "said", "x").await;
        assert_eq!((answer.status, answer.header("idempotency-outcome")), (500, ""));
        counted(&gateway, EXECUTE, number).await;
    }
    // Unknown; whom one would ask is not asked.
    post(address, "/", "unsaid", "x").await;
    counted(&gateway, EXECUTE, 3).await;
    post(address, "/", "unsaid", "x").await;
    counted(&gateway, "hapax_would_total outcome=\"ask\"", 1).await;
    assert_eq!(upstream.seen().len(), 4);
    gateway.shutdown().await;
}

#[tokio::test]
async fn observed_duplicates_in_flight_and_disconnected_clients_are_counted() {
    let gate = Arc::new(Semaphore::new(0));
    let opened = Arc::clone(&gate);
    let upstream = Upstream::start(move |_| {
        let gate = Arc::clone(&opened);
        async move {
            gate.acquire().await.unwrap().forget();
            text(201, "made")
        }
    })
    .await;
    let mut config = config(upstream.url());
    config.policy.in_flight = InFlight::Wait(TIMEOUT);
    observing(&mut config);
    let gateway = start(config).await;
    let address = gateway.local_addr();
    let send = async |key: &str| {
        let mut raw = Raw::connect(address).await;
        raw.send(request("POST", "/", &[("idempotency-key", key)], "x")).await;
        raw
    };
    let mut first = send("k").await;
    until("it is in progress", || upstream.seen().len() == 1).await;
    let mut copy = send("k").await;
    counted(&gateway, "hapax_would_total outcome=\"wait\"", 1).await;
    until("so is its copy", || upstream.seen().len() == 2).await;
    gate.add_permits(2);
    assert_eq!((first.answer().await.status, copy.answer().await.status), (201, 201));
    counted(&gateway, EXECUTE, 1).await;
    // Protected, it would have gone on to its end.
    let gone = send("gone").await;
    until("it is in progress", || upstream.seen().len() == 3).await;
    drop(gone);
    counted(&gateway, EXECUTE, 2).await;
    gate.add_permits(2);
    assert_eq!(post(address, "/", "gone", "x").await.status, 201);
    counted(&gateway, REPLAY, 1).await;
    gateway.shutdown().await;
}

#[tokio::test]
async fn protection_begins_without_records_of_the_observation() {
    let upstream = Upstream::counting().await;
    let mut config = config(upstream.url());
    let protected = config.clone();
    observing(&mut config);
    let gateway = start(config).await;
    let address = gateway.local_addr();
    assert_eq!(post(address, "/", "k", "x").await.text(), "1");
    counted(&gateway, EXECUTE, 1).await;
    gateway.reload(protected).unwrap();
    let first = post(address, "/", "k", "x").await;
    assert_eq!((first.text().as_str(), first.header("idempotency-replayed")), ("2", "false"));
    let second = post(address, "/", "k", "x").await;
    assert_eq!((second.text().as_str(), second.header("idempotency-replayed")), ("2", "true"));
    gateway.shutdown().await;
}

#[tokio::test]
async fn without_memory_for_observing_requests_are_not_delayed() {
    let upstream = Upstream::counting().await;
    let mut config = config(upstream.url());
    // As little as is enough, so that nothing is left for observing.
    config.limits.memory = 1 << 20;
    let needed = config.check().unwrap_err().to_string();
    let needed = needed.split("bodies: ").nth(1).unwrap().split(' ').next().unwrap();
    config.limits.memory = needed.parse::<hapax_gateway::ByteSize>().unwrap().0;
    observing(&mut config);
    let gateway = start(config).await;
    let body = "x".repeat(1 << 20);
    for key in ["a", "b", "a"] {
        assert_eq!(post(gateway.local_addr(), "/", key, &body).await.status, 201);
    }
    counted(&gateway, "hapax_would_total outcome=\"unmeasured\"", 3).await;
    gateway.shutdown().await;
}
