//! A store that began without a secret, and gets one that seals.

use std::path::Path;

use hapax_core::{KeyRing, OnUnknown, Secret};
use hapax_gateway::{CacheUrl, Config, Gateway, ScopeConfig, StoreUrl};
use http::header::COOKIE;
use serde_json::{Value, json};

use crate::world::{Answer, Upstream, config, get, post_with, send, start, text};

const SECRET: Secret = Secret::new([7; 32]);

async fn upstream() -> Upstream {
    Upstream::start(|seen| async move {
        match seen.uri.path() {
            "/lost" => text(500, "broken"),
            _ => text(201, "canary-paid"),
        }
    })
    .await
}

fn on(url: &str, upstream: &Upstream, secret: Option<&Path>) -> Config {
    let mut config = config(upstream.url());
    config.store = url.parse().unwrap();
    config.namespace = Some("payments".parse().unwrap());
    config.policy.on_unknown = OnUnknown::Block;
    config.policy.scope = Some(ScopeConfig::headers([COOKIE]));
    config.secret_file = secret.map(Path::to_owned);
    config
}

async fn pay(address: std::net::SocketAddr, path: &str, key: &str) -> Answer {
    post_with(address, path, &[("idempotency-key", key), ("cookie", "session=1")], "x").await
}

async fn described(admin: std::net::SocketAddr) -> Value {
    let page = get(admin, "/api/keys?state=unknown").await.json();
    page["keys"][0]["described"].clone()
}

/// The store of `url` in each step: without a ring, with one that opens, with one that seals.
async fn sealed_in_steps(url: &str) {
    let (upstream, folder) = (upstream().await, tempfile::tempdir().unwrap());
    let [opens, seals] = ["opens", "seals"].map(|name| folder.path().join(name));
    let ring = KeyRing::unnamed(SECRET);
    std::fs::write(&opens, ring.to_text()).unwrap();
    std::fs::write(&seals, ring.sealing(SECRET).to_text()).unwrap();

    let bare = start(on(url, &upstream, None)).await;
    assert_eq!(pay(bare.local_addr(), "/", "old").await.status, 201);
    let first = start(on(url, &upstream, Some(&opens))).await;
    assert_eq!(pay(first.local_addr(), "/", "first").await.status, 201);
    bare.shutdown().await;
    let second = start(on(url, &upstream, Some(&seals))).await;
    assert_eq!(pay(second.local_addr(), "/", "second").await.status, 201);
    assert_eq!(pay(second.local_addr(), "/lost", "lost").await.status, 500);
    let executed = upstream.seen().len();
    for gateway in [&first, &second] {
        for key in ["old", "first", "second"] {
            let answer = pay(gateway.local_addr(), "/", key).await;
            assert_eq!((answer.status, &*answer.text()), (201, "canary-paid"), "{key}");
            // Its names are those without a secret, by which caller and key could be guessed.
            assert_eq!(answer.header("idempotency-operation-id"), "");
        }
    }
    let admin = second.admin_addr().unwrap();
    let kept = described(admin).await;
    let hash = kept["caller"][0]["hash"].as_str().unwrap();
    assert_eq!((&kept["key"], hash.len()), (&json!("lost"), 12), "{kept}");
    let json_type = [("content-type", "application/json")];
    let query = json!({ "key": "lost" }).to_string();
    let found = send(admin, "POST", "/api/keys/find", &json_type, &query).await.json();
    assert_eq!(found["keys"].as_array().map(Vec::len), Some(1), "{found}");
    let value = json!({ "value": "session=1" }).to_string();
    let same = send(admin, "POST", "/api/callers/hash", &json_type, &value).await.json();
    assert_eq!(same["hash"], hash);
    first.shutdown().await;
    second.shutdown().await;

    // A gateway without the ring finds no key free that it cannot read.
    let bare = start(on(url, &upstream, None)).await;
    for (path, key) in [("/", "second"), ("/lost", "lost")] {
        let answer = pay(bare.local_addr(), path, key).await;
        assert_eq!((answer.status, &*answer.code()), (503, "store-unavailable"), "{key}");
    }
    assert_eq!(upstream.seen().len(), executed);
    bare.shutdown().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_description_is_stored_once_the_store_seals() {
    let upstream = upstream().await;
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("ring");
    let first = KeyRing::unnamed(SECRET);
    for ring in [first.clone(), first.sealing(SECRET)] {
        std::fs::write(&file, ring.to_text()).unwrap();
        let gateway = start(on("memory:", &upstream, Some(&file))).await;
        assert_eq!(pay(gateway.local_addr(), "/lost", "lost").await.status, 500);
        let kept = described(gateway.admin_addr().unwrap()).await;
        assert_eq!(kept["key"] == "lost", ring.seals(), "{kept}");
        gateway.shutdown().await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_ring_that_does_not_suit_the_store_or_its_cache_is_rejected() {
    let upstream = upstream().await;
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("ring");
    std::fs::write(&file, KeyRing::unnamed(SECRET).to_text()).unwrap();
    let mut cached = on("postgres://u@127.0.0.1:1/x", &upstream, Some(&file));
    cached.cache = Some("redis://127.0.0.1:1".parse::<CacheUrl>().unwrap());
    let mut on_file = on("memory:", &upstream, Some(&file));
    on_file.store = StoreUrl::File(folder.path().join("hapax.db"));
    for (config, expected) in [(cached, "expected a line `seal`"), (on_file, "found `name none`")] {
        let error = Gateway::check(&config).await.unwrap_err().to_string();
        assert!(error.contains("--secret-file") && error.contains(expected), "{error}");
    }
    assert!(!folder.path().join("hapax.db").exists());
}

mod redis {
    use hapax_testkit::servers::RedisServer;

    #[tokio::test(flavor = "multi_thread")]
    async fn a_store_that_began_without_a_secret_is_sealed_in_steps() {
        let server = RedisServer::start().await;
        Box::pin(super::sealed_in_steps(&server.url())).await;
    }
}

mod postgres {
    use hapax_testkit::servers::PostgresServer;

    #[tokio::test(flavor = "multi_thread")]
    async fn a_store_that_began_without_a_secret_is_sealed_in_steps() {
        let server = PostgresServer::start().await;
        server.create_database("later").await;
        Box::pin(super::sealed_in_steps(&server.url("later"))).await;
    }
}
