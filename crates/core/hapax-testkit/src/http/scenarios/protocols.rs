//! Scenarios of statement 22: versions, framing, trailers, expiry.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use bytes::Bytes;
use hapax_http::Body;
use http::{HeaderMap, HeaderValue};
use http_body::Frame;

use crate::http::frames::frames;
use crate::http::{
    ExecutionCount, HandlerRequest, Protocol, ScenarioContext, ScenarioPolicy, TestResponse,
    counting, handler, reply,
};

pub async fn w22_one_key_over_both_protocols(arena: ScenarioContext) {
    let runs = ExecutionCount::new();
    let stage = arena.start(ScenarioPolicy::default(), counting(&runs)).await;
    stage.send(stage.post("k")).await.is_first(201, "1");
    for protocol in [Protocol::Http1, Protocol::Http2] {
        let client = stage.client_in(protocol);
        client.send(stage.post("k").request()).await.is_replay(201, "1");
    }
    assert_eq!(runs.count(), 1);
}

/// Returns a body in pieces, with trailers if there are any.
pub(super) fn pieces<P: Into<Bytes>>(pieces: Vec<P>, trailers: Option<HeaderMap>) -> Body {
    let (sender, body) = frames(8);
    let frames: Vec<_> = pieces
        .into_iter()
        .map(|piece| Frame::data(piece.into()))
        .chain(trailers.map(Frame::trailers))
        .collect();
    tokio::spawn(async move {
        for frame in frames {
            if !sender.frame(frame).await {
                return;
            }
        }
    });
    Body::new(body)
}

pub async fn w22_chunks_and_a_length_are_the_same_body(arena: ScenarioContext) {
    let runs = ExecutionCount::new();
    let stage = arena.start(ScenarioPolicy::default(), counting(&runs)).await;
    let post = stage.post("k").kind("text/plain");
    let whole = stage.send(post.clone().body("hello world")).await;
    whole.is_first(201, "1");
    let chunked = post.with(pieces(vec!["", "hel", "lo wor", "ld", ""], None));
    stage.client().send(chunked).await.is_replay(201, "1");
}

pub async fn w22_request_trailers_reach_the_handler(arena: ScenarioContext) {
    let seen: Arc<Mutex<Vec<HandlerRequest>>> = Arc::default();
    let calls = Arc::clone(&seen);
    let note = handler(move |call| {
        calls.lock().unwrap().push(call);
        async { reply(201, "") }
    });
    let stage = arena.start(ScenarioPolicy::default(), note).await;
    let mut trailers = HeaderMap::new();
    trailers.insert("x-sum", HeaderValue::from_static("7"));
    let post = stage.post("k").header("trailer", "x-sum");
    stage.client().send(post.with(pieces(vec!["a", "b"], Some(trailers)))).await.is_first(201, "");
    let seen = seen.lock().unwrap();
    assert_eq!(seen[0].body, "ab");
    assert_eq!(seen[0].trailers.as_ref().unwrap()["x-sum"], "7");
}

pub async fn w22_trailers_are_stored_and_replayed(arena: ScenarioContext) {
    let give = handler(|_| async {
        let mut trailers = HeaderMap::new();
        trailers.insert("x-sum", HeaderValue::from_static("7"));
        trailers.append("x-sum", HeaderValue::from_static("8"));
        trailers.insert("idempotency-made-up", HeaderValue::from_static("1"));
        let mut response = reply(201, "").map(|_| pieces(vec!["ab", "c"], Some(trailers)));
        response.headers_mut().insert("trailer", HeaderValue::from_static("x-sum"));
        response
    });
    let stage = arena.start(ScenarioPolicy::default(), give).await;
    let post = stage.post("k").header("te", "trailers");
    for replayed in ["false", "true"] {
        let answer = stage.send(post.clone()).await;
        assert_eq!(answer.header("idempotency-replayed"), replayed);
        assert_eq!(answer.text(), "abc");
        let trailers = answer.trailers.unwrap();
        let sums: Vec<_> = trailers.get_all("x-sum").iter().collect();
        assert_eq!(sums, ["7", "8"]);
        assert_eq!(trailers.len(), 2, "{trailers:?}");
    }
}

/// A 100 of an upstream is checked by the gateway's tests: no handler here can send one.
pub async fn w22_a_100_continue_is_not_the_response(arena: ScenarioContext) {
    let runs = ExecutionCount::new();
    let stage = arena.start(ScenarioPolicy::default(), counting(&runs)).await;
    // The server sends 100 before it reads this body; the client's library skips it.
    let post = stage.post("k").header("expect", "100-continue");
    stage.send(post.clone()).await.is_first(201, "1");
    stage.send(post).await.is_replay(201, "1");
    stage.send(stage.post("k")).await.is_replay(201, "1");
}

pub async fn w22_responses_may_have_idempotency_expires(arena: ScenarioContext) {
    let runs = ExecutionCount::new();
    let retention = Duration::from_secs(1000);
    let policy = ScenarioPolicy { retention, expires: true, ..ScenarioPolicy::default() };
    let stage = arena.start(policy, counting(&runs)).await;
    let moment = |answer: &TestResponse| -> u64 {
        let date = answer.header("idempotency-expires");
        date.strip_prefix('@').unwrap_or_else(|| panic!("{answer:?}")).parse().unwrap()
    };
    let before = now();
    let first = stage.send(stage.post("k")).await;
    first.is_first(201, "1");
    let after = now();
    // The store's clock may differ a little.
    let said = moment(&first);
    assert!((before + 998..=after + 1003).contains(&said), "{before} {said} {after}");
    let replay = stage.send(stage.post("k")).await;
    replay.is_replay(201, "1");
    assert_eq!(moment(&replay), said);
}

pub async fn w22_by_default_responses_have_no_idempotency_expires(arena: ScenarioContext) {
    let stage = arena.start(ScenarioPolicy::default(), counting(&ExecutionCount::new())).await;
    for _ in 0..2 {
        assert_eq!(stage.send(stage.post("k")).await.header("idempotency-expires"), "");
    }
}

/// Returns the seconds since 1970.
fn now() -> u64 {
    hapax_core::Clock::now(&hapax_core::SystemClock).as_micros() / 1_000_000
}

pub async fn w22_a_key_may_be_reused_after_its_retention(arena: ScenarioContext) {
    let runs = ExecutionCount::new();
    let (lease, retention) = (Duration::from_secs(1), Duration::from_secs(1));
    let policy = ScenarioPolicy { lease, retention, ..ScenarioPolicy::default() };
    let stage = arena.start(policy, counting(&runs)).await;
    stage.send(stage.post("k")).await.is_first(201, "1");
    let anew = stage.post("k").body("{}");
    stage.until(&anew, |answer| answer.status == 201).await.is_first(201, "2");
}
