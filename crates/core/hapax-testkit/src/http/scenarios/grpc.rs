//! Scenarios of statement 16 for gRPC: classes by grpc-status, rejections without a body.

use bytes::{BufMut, Bytes, BytesMut};
use hapax_core::OnUnknown;
use hapax_http::Body;
use hapax_http::classify::Profile;
use hapax_http::server::KeyRule;
use http::{HeaderMap, HeaderValue};
use http_body::Frame;

use super::execution::held;
use crate::http::frames::frames;
use crate::http::{
    ExecutionCount, Handler, HandlerGate, ScenarioContext, ScenarioPolicy, TestInstance,
    TestRequest, TestResponse, handler, reply,
};

/// Returns a message in its frame.
fn message(text: &str) -> Bytes {
    let mut frame = BytesMut::new();
    frame.put_u8(0);
    frame.put_u32(u32::try_from(text.len()).unwrap());
    frame.put_slice(text.as_bytes());
    frame.freeze()
}

/// Returns a handler that answers with the status in the request: in the trailers or, after `!`, in
/// the headers and without a message. After `=` comes the value of its outcome header.
fn asked_for(runs: &ExecutionCount) -> Handler {
    let runs = runs.clone();
    handler(move |call| {
        let run = runs.next();
        let text = std::str::from_utf8(&call.body[5..]).unwrap();
        let (status, said) = text.trim_start_matches('!').split_once('=').unzip();
        let status = status.unwrap_or(text.trim_start_matches('!'));
        let status = HeaderValue::from_str(status).unwrap();
        let said = said.map(|said| HeaderValue::from_str(said).unwrap());
        let bare = text.starts_with('!');
        async move {
            let mut response = reply(200, "");
            let kind = HeaderValue::from_static("application/grpc+proto");
            response.headers_mut().insert("content-type", kind);
            if let Some(said) = said {
                response.headers_mut().insert("idempotency-outcome", said);
            }
            if bare {
                response.headers_mut().insert("grpc-status", status);
                return response;
            }
            // HTTP/1.1 sends only trailers that are announced.
            let told = HeaderValue::from_static("grpc-status");
            response.headers_mut().insert("trailer", told);
            let mut trailers = HeaderMap::new();
            trailers.insert("grpc-status", status);
            let (sender, body) = frames(2);
            tokio::spawn(async move {
                sender.frame(Frame::data(message(&run.to_string()))).await;
                sender.frame(Frame::trailers(trailers)).await;
            });
            response.map(|_| Body::new(body))
        }
    })
}

fn call(stage: &TestInstance, key: &str, text: &str) -> TestRequest {
    let post = stage.post(key).to("/shop.Payments/Charge").kind("application/grpc");
    post.header("te", "trailers").body(message(text))
}

/// Returns the status of a gRPC response, from its trailers or its headers.
fn status(answer: &TestResponse) -> &str {
    assert_eq!(answer.status, 200);
    let trailers = answer.trailers.as_ref();
    let status = trailers.and_then(|map| map.get("grpc-status"));
    status.map_or(answer.header("grpc-status"), |value| value.to_str().unwrap())
}

pub async fn w16_grpc_is_classified_by_its_status(arena: ScenarioContext) {
    let runs = ExecutionCount::new();
    let policy = ScenarioPolicy { on_unknown: OnUnknown::Block, ..ScenarioPolicy::default() };
    let stage = arena.start(policy, asked_for(&runs)).await;
    for bare in ["", "!"] {
        for code in 0..=16 {
            let before = runs.count();
            let post = call(&stage, &format!("k-{code}-{}", bare.len()), &format!("{bare}{code}"));
            let first = stage.send(post.clone()).await;
            assert_eq!(status(&first), code.to_string());
            let second = stage.send(post).await;
            let expected = match code {
                8 => (2, code, "false"),
                2 | 4 | 13 | 14 | 15 => (1, 9, ""),
                _ => (1, code, "true"),
            };
            let replayed = second.header("idempotency-replayed");
            let found = (runs.count() - before, status(&second).parse().unwrap(), replayed);
            assert_eq!(found, expected, "{code}");
            if replayed == "true" {
                assert_eq!((&second.body, &second.trailers), (&first.body, &first.trailers));
            }
        }
    }
}

/// As with 503, the outcome is unknown under `block`.
pub async fn w16_grpc_unavailable_is_retryable_under_reexecute(arena: ScenarioContext) {
    let runs = ExecutionCount::new();
    let policy = ScenarioPolicy { on_unknown: OnUnknown::Reexecute, ..ScenarioPolicy::default() };
    let stage = arena.start(policy, asked_for(&runs)).await;
    for (code, again) in [("14", "14"), ("13", "9")] {
        let key = format!("k-{code}");
        assert_eq!(status(&stage.send(call(&stage, &key, code)).await), code);
        // A released record accepts another request; an unknown one does not.
        let other = stage.send(call(&stage, &key, &format!("!{code}"))).await;
        assert_eq!(status(&other), again);
    }
    assert_eq!(runs.count(), 3);
}

/// Profiles are about HTTP statuses; the 200 of a gRPC response does not count.
pub async fn w16_profiles_do_not_apply_to_grpc(arena: ScenarioContext) {
    for profile in [Profile::StripeV1, Profile::SuccessOnly] {
        let runs = ExecutionCount::new();
        let policy =
            ScenarioPolicy { profile, on_unknown: OnUnknown::Block, ..ScenarioPolicy::default() };
        let stage = arena.start(policy, asked_for(&runs)).await;
        for (code, class) in [("0", "true"), ("5", "true"), ("8", "false"), ("13", ""), ("99", "")]
        {
            let post = call(&stage, &format!("k-{profile}-{code}"), code);
            assert_eq!(status(&stage.send(post.clone()).await), code);
            let second = stage.send(post).await;
            assert_eq!(second.header("idempotency-replayed"), class, "{profile} {code}");
        }
        assert_eq!(runs.count(), 6);
        stage.end().await;
    }
}

pub async fn w16_a_grpc_response_overrides_its_status(arena: ScenarioContext) {
    let runs = ExecutionCount::new();
    let policy = ScenarioPolicy { on_unknown: OnUnknown::Block, ..ScenarioPolicy::default() };
    let stage = arena.start(policy, asked_for(&runs)).await;
    for (said, replayed) in [
        ("14=final", "true"),
        ("14=retryable", "false"),
        ("0=retryable", "false"),
        ("!0=unknown", ""),
        ("!13=final", "true"),
    ] {
        let post = call(&stage, &format!("\"k {said}\""), said);
        let first = stage.send(post.clone()).await;
        assert_eq!(first.header("idempotency-replayed"), "false");
        assert_eq!(first.header("idempotency-outcome"), "");
        let second = stage.send(post).await;
        assert_eq!(second.header("idempotency-replayed"), replayed, "{said}");
    }
}

#[track_caller]
fn is_rejected(answer: &TestResponse, code: &str, word: &str) {
    assert_eq!(answer.status, 200);
    assert_eq!(answer.header("content-type"), "application/grpc");
    // A trailers-only response: all of it is in the head.
    assert_eq!(answer.header("grpc-status"), code, "{answer:?}");
    let message = answer.header("grpc-message");
    assert!(message.starts_with(&format!("{word}: ")), "{message}");
    assert!(answer.body.is_empty() && answer.trailers.is_none());
}

pub async fn w16_grpc_rejections_are_trailers_only(arena: ScenarioContext) {
    let (runs, gate) = (ExecutionCount::new(), HandlerGate::closed());
    let policy = ScenarioPolicy {
        key: KeyRule::Required,
        max_request_body: 100,
        ..ScenarioPolicy::default()
    };
    let stage = arena.start(policy, held(&runs, &gate)).await;
    let first = stage.begin(call(&stage, "k", "a"));
    runs.reach(1).await;
    let in_flight = stage.send(call(&stage, "k", "a")).await;
    is_rejected(&in_flight, "10", "in-flight");
    assert_eq!(in_flight.header("grpc-retry-pushback-ms"), "1000");
    is_rejected(&stage.send(call(&stage, "k", "b")).await, "9", "key-reused");
    is_rejected(&stage.send(call(&stage, "a, b", "a")).await, "3", "invalid-key");
    let without = call(&stage, "k", "a").without("idempotency-key");
    is_rejected(&stage.send(without).await, "3", "missing-key");
    let anonymous = call(&stage, "k", "a").without("authorization");
    is_rejected(&stage.send(anonymous).await, "3", "missing-scope");
    is_rejected(&stage.send(call(&stage, "large", &"x".repeat(200))).await, "8", "body-too-large");
    gate.open();
    first.await.unwrap().is_first(201, "1");
}

/// Group `outages`.
pub async fn w16_grpc_without_a_store_is_unavailable(arena: ScenarioContext) {
    let runs = ExecutionCount::new();
    let store_timeout = std::time::Duration::from_secs(1);
    let stage = arena
        .start(ScenarioPolicy { store_timeout, ..ScenarioPolicy::default() }, asked_for(&runs))
        .await;
    stage.cut().await;
    is_rejected(&stage.send(call(&stage, "k", "0")).await, "14", "store-unavailable");
    assert_eq!(runs.count(), 0);
}
