//! A store that is another one than the gateway used before.

use std::path::Path;

use hapax_core::OnUnknown;
use hapax_gateway::{Config, Gateway, StoreUrl};
use serde_json::json;

use crate::world::{Answer, Upstream, config, get, post, send, start};

fn on_file(upstream: &Upstream, folder: &Path, on_unknown: OnUnknown) -> Config {
    let mut config = config(upstream.url());
    config.store = StoreUrl::File(folder.join("hapax.db"));
    config.policy.on_unknown = on_unknown;
    config.audit_file = None;
    config
}

fn is_rejected(answer: &Answer) {
    assert_eq!((answer.status, &*answer.code()), (503, "store-unavailable"), "{}", answer.text());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_new_file_beside_an_old_secret_executes_nothing_before_the_api_confirms_it() {
    let upstream = Upstream::counting().await;
    let folder = tempfile::tempdir().unwrap();
    // The first start needs no confirmation, nor does the next one.
    for key in ["first", "second"] {
        let gateway = start(on_file(&upstream, folder.path(), OnUnknown::Block)).await;
        assert_eq!(post(gateway.local_addr(), "/", key, "x").await.status, 201);
        gateway.shutdown().await;
    }
    std::fs::remove_file(folder.path().join("hapax.db")).unwrap();

    let gateway = start(on_file(&upstream, folder.path(), OnUnknown::Block)).await;
    let (address, admin) = (gateway.local_addr(), gateway.admin_addr().unwrap());
    for key in ["first", "third"] {
        is_rejected(&post(address, "/", key, "x").await);
    }
    let ready = get(admin, "/readyz").await;
    assert_eq!(ready.status, 200);
    assert!(ready.text().contains("hapax store confirm"), "{}", ready.text());
    assert!(get(admin, "/").await.text().contains("/api/store/confirm"));

    let json = ("content-type", "application/json");
    let confirm = async |fields: &[(&str, &str)], body: serde_json::Value| {
        send(admin, "POST", "/api/store/confirm", fields, &body.to_string()).await
    };
    let sure = json!({ "confirm": true, "reason": "a new year" });
    let audit = folder.path().join("hapax.db.audit.jsonl");
    assert_eq!(confirm(&[json, ("authorization", "")], sure.clone()).await.status, 401);
    let foreign = [json, ("origin", "http://evil.example")];
    assert_eq!(confirm(&foreign, sure.clone()).await.status, 403);
    for unsure in [
        json!({}),
        json!({ "confirm": false, "reason": "x" }),
        json!({ "confirm": true }),
        json!({ "confirm": true, "reason": " " }),
        json!({ "confirm": true, "reason": "x", "odd": 1 }),
    ] {
        let answer = confirm(&[json], unsure.clone()).await;
        assert_eq!((answer.status, &*answer.code()), (400, "bad-request"), "{unsure}");
    }
    is_rejected(&post(address, "/", "first", "x").await);
    assert_eq!(upstream.seen().len(), 2);
    assert!(!audit.exists());
    for replaced in [true, false] {
        let confirmed = confirm(&[json], sure.clone()).await;
        assert_eq!((confirmed.status, confirmed.json()), (200, json!({ "replaced": replaced })));
    }
    let audit = std::fs::read_to_string(audit).unwrap();
    let lines: Vec<serde_json::Value> =
        audit.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    let stages: Vec<_> = lines.iter().map(|line| line["stage"].as_str().unwrap()).collect();
    assert_eq!(stages, ["intended", "done", "intended", "done"]);
    assert_eq!((&lines[0]["store"], &lines[0]["why"]), (&"confirmed".into(), &"a new year".into()));
    assert_eq!(post(address, "/", "first", "x").await.status, 201);
    assert_eq!(get(admin, "/readyz").await.text(), "ready\n");
    gateway.shutdown().await;

    // It is remembered.
    let gateway = start(on_file(&upstream, folder.path(), OnUnknown::Block)).await;
    assert_eq!(post(gateway.local_addr(), "/", "fourth", "x").await.status, 201);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_new_file_beside_an_old_secret_executes_under_reexecute() {
    let upstream = Upstream::counting().await;
    let folder = tempfile::tempdir().unwrap();
    for status in ["ready\n", "ready, but the store was emptied or replaced"] {
        let gateway = start(on_file(&upstream, folder.path(), OnUnknown::Reexecute)).await;
        assert_eq!(post(gateway.local_addr(), "/", "key", "x").await.status, 201);
        let ready = get(gateway.admin_addr().unwrap(), "/readyz").await.text();
        assert!(ready.starts_with(status), "{ready}");
        gateway.shutdown().await;
        std::fs::remove_file(folder.path().join("hapax.db")).unwrap();
    }
    assert_eq!(upstream.seen().len(), 2);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_gateway_with_another_secret_does_not_start_on_a_file() {
    let upstream = Upstream::counting().await;
    let folder = tempfile::tempdir().unwrap();
    let config = on_file(&upstream, folder.path(), OnUnknown::Block);
    start(config.clone()).await.shutdown().await;
    std::fs::write(folder.path().join("hapax.db.secret"), "33".repeat(32)).unwrap();
    let error = Gateway::start(config).await.unwrap_err().to_string();
    for part in ["another secret", "set the secret of the database", "hapax.db"] {
        assert!(error.contains(part), "{part} is not in {error}");
    }
}
