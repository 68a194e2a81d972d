//! Scenarios of statement 23: the reading of ambiguous requests.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use hapax_core::OnUnknown;
use hapax_http::fingerprint::{BodyForm, HttpFingerprintScheme};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

use super::execution::held;
use crate::http::{
    ExecutionCount, HandlerGate, Protocol, Raw2, ScenarioContext, ScenarioPolicy, StreamEnd,
    TestClient, counting, handler, reply,
};

pub async fn w23_a_released_key_accepts_another_fingerprint(arena: ScenarioContext) {
    let runs = ExecutionCount::new();
    let count = runs.clone();
    let busy_once = handler(move |_| {
        let run = count.next();
        async move { reply(if run == 1 { 429 } else { 201 }, run.to_string()) }
    });
    let stage = arena.start(ScenarioPolicy::default(), busy_once).await;
    stage.send(stage.post("k")).await.is_first(429, "1");
    let other = stage.post("k").body(r#"{"amount":1}"#);
    stage.send(other.clone()).await.is_first(201, "2");
    stage.send(stage.post("k")).await.is_rejected(422, "key-reused");
    stage.send(other).await.is_replay(201, "2");
}

pub async fn w23_connection_must_not_name_key_or_scope(arena: ScenarioContext) {
    let runs = ExecutionCount::new();
    let stage = arena.start(ScenarioPolicy::default(), counting(&runs)).await;
    let (client, caller) = (stage.client(), arena.unique("caller"));
    if arena.protocol() == Protocol::Http2 {
        // HTTP/2 has no such header.
        for named in ["idempotency-key", "close, authorization", "x-other"] {
            let fate = fate(client, &caller, &[("connection", named)], None).await;
            assert_refused(fate, named);
        }
        assert_eq!(runs.count(), 0);
        stage.send(stage.post("k").header("authorization", &caller)).await.is_first(201, "1");
        return;
    }
    for named in ["Idempotency-Key", "close, authorization", "x, IDEMPOTENCY-KEY"] {
        let post = stage.post("k").header("connection", named);
        client.send(post.request()).await.is_rejected(400, "malformed-request");
    }
    assert_eq!(runs.count(), 0);
    let harmless = stage.post("k").header("connection", "keep-alive, x-other");
    client.send(harmless.request()).await.is_first(201, "1");
}

/// `Connection` must not name any other part that decides whether two requests are the same.
pub async fn w23_connection_must_not_name_a_fingerprinted_header(arena: ScenarioContext) {
    let runs = ExecutionCount::new();
    let fingerprint =
        HttpFingerprintScheme::new(BodyForm::Canonical, ["x-tenant".parse().unwrap()]).unwrap();
    let policy = ScenarioPolicy { fingerprint, ..ScenarioPolicy::default() };
    let stage = arena.start(policy, counting(&runs)).await;
    let client = stage.client_in(Protocol::Http1);
    for named in ["X-Tenant", "close, x-tenant", "x-http-method-override", "x-method-override"] {
        let post = stage.post("k").header("connection", named).header("x-tenant", "1");
        client.send(post.request()).await.is_rejected(400, "malformed-request");
    }
    assert_eq!(runs.count(), 0);
    client.send(stage.post("k").header("x-tenant", "1").request()).await.is_first(201, "1");
}

/// Returns the head of a payment of `caller` under `k`.
fn head(caller: &str) -> Vec<(&str, &str)> {
    vec![
        (":method", "POST"),
        (":scheme", "http"),
        (":authority", "shop.example"),
        (":path", "/payments"),
        ("authorization", caller),
        ("idempotency-key", "k"),
    ]
}

/// Sends a payment with these fields at its end, and this body; returns the end of its stream.
async fn fate(
    client: TestClient,
    caller: &str,
    fields: &[(&str, &str)],
    body: Option<&[u8]>,
) -> StreamEnd {
    let mut raw = Raw2::connect(client).await;
    raw.head(1, &[&head(caller)[..], fields].concat(), body.is_none()).await;
    if let Some(body) = body {
        raw.data(1, body, true).await;
    }
    raw.fate(1).await
}

#[track_caller]
fn assert_refused(fate: StreamEnd, what: &str) {
    assert!([StreamEnd::Rejected, StreamEnd::Answered(400)].contains(&fate), "{what}: {fate:?}");
}

/// Checks that a malformed message in HTTP/2 is an error of its stream (RFC 9113, 8.1.1), or 400.
async fn malformed_in_http2(arena: ScenarioContext) {
    let runs = ExecutionCount::new();
    let stage = arena.start(ScenarioPolicy::default(), counting(&runs)).await;
    let (client, caller) = (stage.client(), arena.unique("caller"));
    for field in [
        // Fields about connections, which HTTP/2 does not allow (8.2.2).
        ("connection", "close"),
        ("transfer-encoding", "chunked"),
        ("keep-alive", "timeout=5"),
        ("proxy-connection", "close"),
        ("upgrade", "h2c"),
        ("te", "gzip"),
        // Invalid names (8.2.1), and pseudo-headers where they are not allowed (8.3).
        ("X-Upper", "1"),
        ("bad name", "1"),
        (":path", "/other"),
        (":status", "200"),
        (":made-up", "1"),
        ("content-length", "1"),
        ("content-length", "one"),
    ] {
        assert_refused(fate(client, &caller, &[field], None).await, &format!("{field:?}"));
    }
    for length in ["2", "4"] {
        let fields = [("content-length", length)];
        assert_refused(fate(client, &caller, &fields, Some(b"abc")).await, length);
    }
    for missing in [":method", ":scheme", ":path"] {
        let mut fields = head(&caller);
        fields.retain(|(name, _)| *name != missing);
        let mut raw = Raw2::connect(client).await;
        raw.head(1, &fields, true).await;
        assert_refused(raw.fate(1).await, missing);
    }
    assert_eq!(runs.count(), 0);
    // Nothing was claimed, so that a well-formed request executes.
    let well = fate(client, &caller, &[("content-length", "3"), ("te", "trailers")], Some(b"abc"));
    assert_eq!(well.await, StreamEnd::Answered(0), "201, which has no place in the table");
    assert_eq!(runs.count(), 1);
}

pub async fn w23_malformed_framing_is_400(arena: ScenarioContext) {
    if arena.protocol() == Protocol::Http2 {
        return malformed_in_http2(arena).await;
    }
    let runs = ExecutionCount::new();
    let stage = arena.start(ScenarioPolicy::default(), counting(&runs)).await;
    let caller = arena.unique("caller");
    for framing in [
        "content-length: 2\r\ncontent-length: 3\r\n\r\nabc",
        "content-length: -1\r\n\r\n",
        "content-length: 0x2\r\n\r\nab",
        "transfer-encoding: chunked, gzip\r\n\r\n0\r\n\r\n",
        "content-length: 1\r\nbad name: 1\r\n\r\nab",
        "content-length: 1\r\n folded: 1\r\n\r\na",
    ] {
        let mut stream = TcpStream::connect(stage.client().address).await.unwrap();
        let head = format!(
            "POST /payments HTTP/1.1\r\nhost: a\r\nauthorization: {caller}\r\nidempotency-key: k\r\n"
        );
        stream.write_all(format!("{head}{framing}").as_bytes()).await.unwrap();
        let mut status = [0; 12];
        let read = tokio::time::timeout(crate::http::TIMEOUT, stream.read_exact(&mut status)).await;
        read.expect("no response in time").expect("no response");
        assert_eq!(&status, b"HTTP/1.1 400", "{framing:?}");
    }
    assert_eq!(runs.count(), 0);
    // Nothing was claimed.
    let post = stage.post("k").header("authorization", caller);
    stage.send(post).await.is_first(201, "1");
}

pub async fn w23_paths_reach_the_handler_unchanged(arena: ScenarioContext) {
    let seen: Arc<Mutex<Vec<String>>> = Arc::default();
    let targets = Arc::clone(&seen);
    let note = handler(move |call| {
        targets.lock().unwrap().push(call.uri.path_and_query().unwrap().to_string());
        async { reply(201, "") }
    });
    let stage = arena.start(ScenarioPolicy::default(), note).await;
    let targets =
        ["/%70ay", "/a//b", "/a/../b/./c", "/a%2Fb%2f", "/p?", "/p?b=2&a=1&&x=%20+y", "/p;v=1"];
    for (at, target) in targets.iter().enumerate() {
        stage.send(stage.post(&format!("k-{at}")).to(target)).await.is_first(201, "");
    }
    assert_eq!(*seen.lock().unwrap(), targets);
}

pub async fn w23_while_draining_new_requests_get_503(arena: ScenarioContext) {
    let (runs, gate) = (ExecutionCount::new(), HandlerGate::closed());
    let stage = arena.start(ScenarioPolicy::default(), held(&runs, &gate)).await;
    // Connections are opened now: new ones may be rejected during the drain.
    let mut connections = Vec::new();
    for _ in 0..4 {
        let mut connection = stage.client().connect().await;
        connection.send(stage.post("a, b").request()).await.is_rejected(400, "invalid-key");
        connections.push(connection);
    }
    let mut connection = connections.pop().unwrap();
    let first = stage.begin(stage.post("k"));
    runs.reach(1).await;
    let drained = tokio::spawn(stage.instance().drain());
    let refused = loop {
        // Until the drain has begun, a duplicate gets `in-flight`.
        let answer = match connection.try_send(stage.post("k").request()).await {
            Ok(answer) => answer,
            // In HTTP/2 the connection may state that it takes no more requests.
            Err(_) if arena.protocol() == Protocol::Http2 => break None,
            Err(error) => panic!("{error}"),
        };
        if answer.status != 409 {
            break Some(answer);
        }
        if answer.header("connection") == "close" {
            connection = connections.pop().expect("one connection for each that closes");
        }
    };
    if let Some(refused) = refused {
        refused.is_rejected(503, "draining");
        assert_ne!(refused.header("retry-after"), "");
    }
    gate.open();
    first.await.unwrap().is_first(201, "1");
    tokio::time::timeout(crate::http::TIMEOUT, drained).await.unwrap().unwrap();
    // The outcome of the request in progress is recorded.
    drop(stage);
    let stage = arena.start(ScenarioPolicy::default(), counting(&runs)).await;
    stage.send(stage.post("k")).await.is_replay(201, "1");
}

pub async fn w23_a_request_that_a_drain_cuts_off_is_unknown(arena: ScenarioContext) {
    let (runs, gate) = (ExecutionCount::new(), HandlerGate::closed());
    let policy = ScenarioPolicy {
        grace: Duration::from_millis(300),
        on_unknown: OnUnknown::Block,
        ..ScenarioPolicy::default()
    };
    let stage = arena.start(policy.clone(), held(&runs, &gate)).await;
    let first = stage.begin(stage.post("k"));
    runs.reach(1).await;
    tokio::time::timeout(crate::http::TIMEOUT, stage.instance().drain()).await.unwrap();
    // How the connection ends decides whether the client gets a response.
    first.abort();
    drop(stage);
    let stage = arena.start(policy, counting(&runs)).await;
    stage.send(stage.post("k")).await.is_rejected(409, "outcome-unknown");
    assert_eq!(runs.count(), 1);
}
