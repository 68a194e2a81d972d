//! The access log.

use std::os::unix::fs::PermissionsExt;
use std::path::Path;

use hapax_gateway::{RouteConfig, ScopeConfig};
use http::HeaderName;
use serde_json::Value;
use tokio::sync::{mpsc, oneshot};

use crate::world::{Raw, Upstream, config, post, post_with, request, start, text, until};

#[tokio::test(flavor = "multi_thread")]
async fn each_request_has_a_line_without_key_caller_and_query() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("access.jsonl");
    let upstream = Upstream::counting().await;
    let mut config = config(upstream.url());
    config.access_log = Some(path.clone());
    let gateway = start(config).await;
    let address = gateway.local_addr();
    let trace = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01";
    let fields = [("idempotency-key", "a-key"), ("traceparent", trace)];
    let target = "/pay/7?token=secret-query";
    assert_eq!(post_with(address, target, &fields, "x").await.status, 201);
    assert_eq!(post(address, target, "a-key", "x").await.status, 201);
    assert_eq!(post(address, target, "a-key", "other").await.status, 422);
    assert_eq!(post(address, target, "", "x").await.status, 400);
    assert_eq!(post_with(address, target, &[], "x").await.status, 201);
    let (text, lines) = lines(&path, 5).await;
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
    assert!(lines.iter().all(|line| line["path"] == "/pay/7"), "{text}");
    // Without a secret there are no hashes, by which a key could be guessed.
    assert!(!text.contains("a-key") && !text.contains("secret-query") && !text.contains("_hash"));
    let mode = std::fs::metadata(&path).unwrap().permissions().mode();
    assert_eq!(mode & 0o777, 0o600);
}

/// The lines of the log, once there are so many.
async fn lines(path: &Path, count: usize) -> (String, Vec<Value>) {
    let text = loop {
        let text = std::fs::read_to_string(path).unwrap();
        if text.matches('\n').count() >= count {
            break text;
        }
        tokio::task::yield_now().await;
    };
    let lines = text.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    (text, lines)
}

#[tokio::test(flavor = "multi_thread")]
async fn lines_have_hashes_of_key_and_caller_and_the_request_id() {
    let folder = tempfile::tempdir().unwrap();
    let [path, secret] = ["access.jsonl", "secret"].map(|name| folder.path().join(name));
    std::fs::write(&secret, "7".repeat(64)).unwrap();
    let upstream = Upstream::counting().await;
    let mut config = config(upstream.url());
    config.access_log = Some(path.clone());
    config.secret_file = Some(secret);
    let gateway = start(config).await;
    let address = gateway.local_addr();
    let ask = async |key: &str, caller: &str, id: &str| {
        let fields = [("idempotency-key", key), ("authorization", caller), ("x-request-id", id)];
        post_with(address, "/pay", &fields, "x").await
    };
    let first = ask("a-key", "Bearer a", "first").await;
    ask("a-key", "Bearer b", &"x".repeat(129)).await;
    ask("other", "Bearer a", "third").await;
    post(address, "/pay", "a-key", "x").await;
    let (text, lines) = lines(&path, 4).await;
    let [one, two, three, alone] = &lines[..] else { panic!("{text}") };
    assert_eq!(one["operation"], first.header("idempotency-operation-id"), "{text}");
    assert_eq!((&one["request_id"], &two["request_id"]), (&"first".into(), &Value::Null));
    let hash = |line: &Value, name: &str| line[name].as_str().map(str::to_owned).unwrap();
    let (key, caller) = (hash(one, "key_hash"), hash(one, "caller_hash"));
    assert_eq!((key.len(), caller.len()), (12, 12));
    assert_eq!((hash(two, "key_hash"), hash(three, "caller_hash")), (key.clone(), caller.clone()));
    assert!(hash(two, "caller_hash") != caller && hash(three, "key_hash") != key, "{text}");
    // A caller that sends nothing has no hash.
    assert!(hash(alone, "key_hash") == key && alone["caller_hash"].is_null(), "{text}");
    assert!(!text.contains("a-key") && !text.contains("Bearer"), "{text}");
}

/// A client may send one id in several headers, and a route may have its key or its caller in any header.
#[tokio::test(flavor = "multi_thread")]
async fn a_header_that_is_key_or_caller_is_not_logged() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("access.jsonl");
    let upstream = Upstream::counting().await;
    let mut config = config(upstream.url());
    config.access_log = Some(path.clone());
    let mut by_id = config.policy.clone();
    by_id.key_header = HeaderName::from_static("x-request-id");
    let mut of_caller = config.policy.clone();
    of_caller.scope = Some(ScopeConfig::headers([HeaderName::from_static("traceparent")]));
    config.routes =
        vec![RouteConfig::new("/by-id", by_id), RouteConfig::new("/of-caller", of_caller)];
    let gateway = start(config).await;
    let (key, id, trace) = ("idempotency-key", "x-request-id", "traceparent");
    let requests: [(&str, &[(&str, &str)]); 7] = [
        ("/by-id", &[(id, "not-logged"), (trace, "\"not-logged\"")]),
        ("/by-id", &[(id, "not-logged, as no key")]),
        ("/of-caller", &[(key, "k"), (trace, "not-logged"), (id, "logged")]),
        ("/pay", &[(key, "not-logged"), (id, "not-logged"), (trace, "not-logged")]),
        ("/pay", &[(key, "\"not-logged\"; a=b"), (id, "not-logged"), (trace, "logged")]),
        ("/pay", &[(key, "not-logged,"), (id, "not-logged,"), (trace, "logged")]),
        ("/pay", &[(key, "k"), (id, "logged"), (trace, "logged")]),
    ];
    for (target, fields) in requests {
        post_with(gateway.local_addr(), target, fields, "x").await;
    }
    let (text, lines) = lines(&path, requests.len()).await;
    assert!(!text.contains("not-logged"), "{text}");
    let logged =
        |name: &str| -> Vec<bool> { lines.iter().map(|it| it[name] == "logged").collect() };
    assert_eq!(logged("request_id"), [false, false, true, false, false, false, true]);
    assert_eq!(logged("traceparent"), [false, false, false, false, true, true, true]);
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
    // Its operation goes on, and is found by this line.
    assert!(hung_up["operation"].is_string(), "{hung_up}");
}
