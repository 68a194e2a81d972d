//! The access log.

use std::os::unix::fs::PermissionsExt;

use serde_json::Value;
use tokio::sync::{mpsc, oneshot};

use crate::world::{Raw, Upstream, config, post, post_with, request, start, text, until};

#[tokio::test(flavor = "multi_thread")]
async fn each_request_has_a_line_without_key_and_caller() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("access.jsonl");
    let upstream = Upstream::counting().await;
    let mut config = config(upstream.url());
    config.access_log = Some(path.clone());
    let gateway = start(config).await;
    let address = gateway.local_addr();
    let trace = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01";
    let fields = [("idempotency-key", "a-key"), ("traceparent", trace)];
    assert_eq!(post_with(address, "/secret-path", &fields, "x").await.status, 201);
    assert_eq!(post(address, "/secret-path", "a-key", "x").await.status, 201);
    assert_eq!(post(address, "/secret-path", "a-key", "other").await.status, 422);
    assert_eq!(post(address, "/secret-path", "", "x").await.status, 400);
    assert_eq!(post_with(address, "/secret-path", &[], "x").await.status, 201);
    let text = loop {
        let text = std::fs::read_to_string(&path).unwrap();
        if text.lines().count() >= 5 {
            break text;
        }
        tokio::task::yield_now().await;
    };
    let lines: Vec<Value> = text.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    let seen: Vec<_> =
        lines.iter().map(|line| (line["outcome"].as_str().unwrap(), &line["status"])).collect();
    let expected = [
        ("executed", 201),
        ("replayed", 201),
        ("rejected", 422),
        ("rejected", 400),
        ("passed", 201),
    ];
    assert!(seen.iter().zip(expected).all(|(a, b)| a.0 == b.0 && *a.1 == b.1), "{text}");
    let first = &lines[0];
    assert_eq!((&first["method"], &first["traceparent"]), (&"POST".into(), &trace.into()));
    assert!(first["attempt"] == 1 && first["fence"].is_u64() && first["milliseconds"].is_f64());
    assert!(first["at"].as_str().is_some_and(|at| at.ends_with('Z')), "{first}");
    let operation = first["operation"].as_str().unwrap();
    assert!(lines[1..3].iter().all(|line| line["operation"] == operation), "{text}");
    assert!(lines[3]["operation"].is_null() && lines[4]["operation"].is_null(), "{text}");
    assert!(!text.contains("a-key") && !text.contains("secret-path"), "{text}");
    let mode = std::fs::metadata(&path).unwrap().permissions().mode();
    assert_eq!(mode & 0o777, 0o600);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_client_that_hangs_up_leaves_a_line_and_a_shutdown_loses_none() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("access.jsonl");
    let (begun, mut beginnings) = mpsc::channel::<oneshot::Sender<()>>(1);
    let upstream = Upstream::start(move |seen| {
        let begun = begun.clone();
        async move {
            if seen.headers.get("idempotency-key").is_some_and(|key| key == "hangs-up") {
                let (go, gone) = oneshot::channel();
                begun.send(go).await.unwrap();
                gone.await.unwrap();
            }
            text(201, "done")
        }
    })
    .await;
    let mut config = config(upstream.url());
    config.access_log = Some(path.clone());
    let gateway = start(config).await;
    let address = gateway.local_addr();
    let mut raw = Raw::connect(address).await;
    raw.send(request("POST", "/", &[("idempotency-key", "hangs-up")], "x")).await;
    let go = beginnings.recv().await.unwrap();
    drop(raw);
    let lines = || std::fs::read_to_string(&path).unwrap();
    until("the line of the client that hung up", || lines().contains("unanswered")).await;
    go.send(()).unwrap();
    for number in 0..200 {
        assert_eq!(post(address, "/", &format!("key-{number}"), "x").await.status, 201);
    }
    gateway.shutdown().await;
    let text = lines();
    let lines: Vec<Value> = text.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    assert_eq!(lines.len(), 201, "{text}");
    let hung_up = &lines[0];
    assert!(hung_up["outcome"] == "unanswered" && hung_up["status"].is_null(), "{hung_up}");
    assert_eq!(hung_up["method"], "POST");
}
