//! Scenarios of statement 29: the header that has the key.

use std::sync::{Arc, Mutex};

use http::HeaderName;
use http::header::HeaderMap;

use crate::http::{
    ExecutionCount, HandlerRequest, ScenarioContext, ScenarioPolicy, counting, handler, reply,
};

const OTHER: HeaderName = HeaderName::from_static("x-idempotency-key");

pub async fn w29_a_route_may_have_the_key_in_another_header(arena: ScenarioContext) {
    let seen: Arc<Mutex<Vec<HeaderMap>>> = Arc::default();
    let noted = Arc::clone(&seen);
    let service = handler(move |call: HandlerRequest| {
        let mut seen = noted.lock().unwrap();
        seen.push(call.headers);
        let run = seen.len().to_string();
        async move { reply(201, run) }
    });
    let stage = arena
        .start(ScenarioPolicy { key_header: OTHER, ..ScenarioPolicy::default() }, service)
        .await;
    let key = format!("\"{}\"; a=b", arena.unique("key"));
    let post = || stage.plain().header("x-idempotency-key", &key);
    stage.send(post()).await.is_first(201, "1");
    stage.send(post()).await.is_replay(201, "1");
    // Only this header has the key.
    stage.send(post().header("idempotency-key", "other")).await.is_replay(201, "1");
    stage.send(stage.post("k")).await.is_unmarked(201, "2");
    // The same grammar applies, and the value is forwarded unchanged.
    let refused = stage.send(stage.plain().header("x-idempotency-key", "a, b")).await;
    refused.is_rejected(400, "invalid-key");
    let detail = refused.problem()["detail"].as_str().unwrap().to_owned();
    assert!(detail.contains("x-idempotency-key"), "{detail}");
    let seen = seen.lock().unwrap();
    assert_eq!(seen.len(), 2);
    assert_eq!(seen[0]["x-idempotency-key"], key.as_str());
}

pub async fn w29_a_header_spelled_with_an_underscore_is_rejected(arena: ScenarioContext) {
    let runs = ExecutionCount::new();
    let stage = arena.start(ScenarioPolicy::default(), counting(&runs)).await;
    for post in [
        stage.plain().header("idempotency_key", "k"),
        stage.post("k").header("idempotency_key", "other"),
    ] {
        let refused = stage.send(post).await;
        refused.is_rejected(400, "malformed-request");
        let detail = refused.problem()["detail"].as_str().unwrap().to_owned();
        assert!(detail.contains("`idempotency_key`"), "{detail}");
        assert!(detail.contains("`idempotency-key` is expected"), "{detail}");
    }
    assert_eq!(runs.count(), 0);
}
