//! Scenarios of statement 19: limits, and responses that are not stored.

use bytes::Bytes;
use hapax_http::Body;
use http::header::{CONTENT_TYPE, HeaderValue};
use http_body_util::BodyExt;

use super::protocols::pieces;
use crate::http::frames::frames;
use crate::http::{
    ExecutionCount, Handler, HandlerGate, ScenarioContext, ScenarioPolicy, counting, handler, reply,
};

pub async fn w19_a_request_over_its_limit_is_413_and_claims_nothing(arena: ScenarioContext) {
    let runs = ExecutionCount::new();
    let policy = ScenarioPolicy { max_request_body: 1000, ..ScenarioPolicy::default() };
    let stage = arena.start(policy, counting(&runs)).await;
    stage.send(stage.post("k").body(vec![b'x'; 1001])).await.is_rejected(413, "body-too-large");
    let chunked = stage.post("k").with(pieces(vec![vec![b'x'; 700]; 2], None));
    let chunked = stage.client().send(chunked).await;
    chunked.is_rejected(413, "body-too-large");
    assert_eq!(runs.count(), 0);
    // Nothing was claimed: another request may use the key.
    stage.send(stage.post("k").body(vec![b'x'; 1000])).await.is_first(201, "1");
}

pub async fn w23_body_limits_are_for_protected_requests_with_a_key(arena: ScenarioContext) {
    let runs = ExecutionCount::new();
    let policy = ScenarioPolicy { max_request_body: 1000, ..ScenarioPolicy::default() };
    let stage = arena.start(policy, counting(&runs)).await;
    let large = vec![b'x'; 100_000];
    stage.send(stage.plain().body(large.clone())).await.is_unmarked(201, "1");
    let put = stage.post("k").method(http::Method::PUT).body(large);
    stage.send(put).await.is_unmarked(201, "2");
}

/// Returns a handler that answers with as many bytes as its body states.
fn sized(runs: &ExecutionCount) -> Handler {
    let runs = runs.clone();
    handler(move |call| {
        runs.next();
        let size = std::str::from_utf8(&call.body).unwrap().parse().unwrap();
        async move { reply(201, vec![b'y'; size]) }
    })
}

pub async fn w19_a_response_over_its_limit_is_delivered_completely_and_once(
    arena: ScenarioContext,
) {
    let runs = ExecutionCount::new();
    let policy = ScenarioPolicy { max_response_body: 10_000, ..ScenarioPolicy::default() };
    let stage = arena.start(policy, sized(&runs)).await;
    let large = stage.post("large").kind("text/plain").body("2000000");
    stage.send(large.clone()).await.is_first(201, &"y".repeat(2_000_000));
    for _ in 0..2 {
        let retry = stage.send(large.clone()).await;
        retry.is_rejected(409, "response-not-retained");
        assert_eq!(retry.problem()["original_status"], 201);
    }
    let full = stage.post("full").kind("text/plain").body("10000");
    stage.send(full.clone()).await.is_first(201, &"y".repeat(10_000));
    stage.send(full).await.is_replay(201, &"y".repeat(10_000));
    assert_eq!(runs.count(), 2);
}

/// Returns a handler that sends one piece, and the rest after the gate opens.
fn streaming(runs: &ExecutionCount, gate: &HandlerGate, kind: &'static str) -> Handler {
    let held = (runs.clone(), gate.clone());
    handler(move |_| {
        let (runs, gate) = held.clone();
        async move {
            runs.next();
            let (sender, body) = frames(2);
            tokio::spawn(async move {
                sender.data(Bytes::from_static(b"data: 1\n\n")).await;
                gate.pass().await;
                sender.data(Bytes::from_static(b"data: 2\n\n")).await;
            });
            let mut response = reply(200, "").map(|_| Body::new(body));
            response.headers_mut().insert(CONTENT_TYPE, HeaderValue::from_static(kind));
            response
        }
    })
}

async fn streams(arena: ScenarioContext, policy: ScenarioPolicy, kind: &'static str) {
    let (runs, gate) = (ExecutionCount::new(), HandlerGate::closed());
    let stage = arena.start(policy, streaming(&runs, &gate, kind)).await;
    let mut connection = stage.client().connect().await;
    let mut first = connection.ask(stage.post("k").request()).await;
    assert_eq!(first.headers()["idempotency-replayed"], "false");
    let piece = tokio::time::timeout(crate::http::TIMEOUT, first.frame()).await.unwrap();
    assert_eq!(piece.unwrap().unwrap().into_data().unwrap(), "data: 1\n\n");
    // The outcome was final with the headers: a duplicate gets it while the stream continues.
    let retry = stage.send(stage.post("k")).await;
    retry.is_rejected(409, "response-not-retained");
    assert_eq!(retry.problem()["original_status"], 200);
    gate.open();
    let rest = tokio::time::timeout(crate::http::TIMEOUT, first.collect()).await.unwrap();
    assert_eq!(rest.unwrap().to_bytes(), "data: 2\n\n");
    assert_eq!(runs.count(), 1);
}

pub async fn w19_event_streams_are_final_at_the_headers(arena: ScenarioContext) {
    streams(arena, ScenarioPolicy::default(), "text/event-stream; charset=utf-8").await;
}

pub async fn w19_a_route_may_stream_every_response(arena: ScenarioContext) {
    streams(
        arena,
        ScenarioPolicy { stream: true, ..ScenarioPolicy::default() },
        "application/x-ndjson",
    )
    .await;
}
