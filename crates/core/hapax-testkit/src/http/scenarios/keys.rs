//! Scenarios of statements 1–5: keys.

use std::sync::{Arc, Mutex};

use hapax_http::Body;
use hapax_http::header::Grammar;
use hapax_http::server::KeyRule;
use http::Method;

use crate::http::frames::frames;
use crate::http::{
    ExecutionCount, HandlerRequest, ScenarioContext, ScenarioPolicy, counting, handler, reply,
};

pub async fn w01_quoted_and_bare_are_one_key(arena: ScenarioContext) {
    let runs = ExecutionCount::new();
    let stage = arena.start(ScenarioPolicy::default(), counting(&runs)).await;
    stage.send(stage.post("\"8e03978e\"")).await.is_first(201, "1");
    stage.send(stage.post("8e03978e")).await.is_replay(201, "1");
    stage.send(stage.post("  \"8e03978e\"  ")).await.is_replay(201, "1");
    stage.send(stage.post("8e03978F")).await.is_first(201, "2");
}

pub async fn w01_parameters_are_parsed_and_ignored(arena: ScenarioContext) {
    let runs = ExecutionCount::new();
    let stage = arena.start(ScenarioPolicy::default(), counting(&runs)).await;
    stage.send(stage.post("\"k\"; origin=mobile; n=1")).await.is_first(201, "1");
    stage.send(stage.post("\"k\"")).await.is_replay(201, "1");
    stage.send(stage.post("\"k\"; =")).await.is_rejected(400, "invalid-key");
}

pub async fn w01_a_strict_route_accepts_strings_only(arena: ScenarioContext) {
    let runs = ExecutionCount::new();
    let policy = ScenarioPolicy { grammar: Grammar::Strict, ..ScenarioPolicy::default() };
    let stage = arena.start(policy, counting(&runs)).await;
    stage.send(stage.post("k")).await.is_rejected(400, "invalid-key");
    stage.send(stage.post("\"k\"")).await.is_first(201, "1");
}

pub async fn w02_a_key_has_1_to_255_characters(arena: ScenarioContext) {
    let runs = ExecutionCount::new();
    let stage = arena.start(ScenarioPolicy::default(), counting(&runs)).await;
    let long = "k".repeat(255);
    stage.send(stage.post("k")).await.is_first(201, "1");
    stage.send(stage.post(&long)).await.is_first(201, "2");
    stage.send(stage.post(&format!("\"{long}\""))).await.is_replay(201, "2");
    stage.send(stage.post(&format!("\"{}\"", "\\\"".repeat(255)))).await.is_first(201, "3");
    stage.send(stage.post(&format!("{long}k"))).await.is_rejected(400, "invalid-key");
    stage.send(stage.post(&format!("\"{long}k\""))).await.is_rejected(400, "invalid-key");
}

pub async fn w02_a_quoted_key_may_have_any_printable_ascii(arena: ScenarioContext) {
    let runs = ExecutionCount::new();
    let stage = arena.start(ScenarioPolicy::default(), counting(&runs)).await;
    let printable: String = (' '..='~')
        .flat_map(|it| if it == '"' || it == '\\' { vec!['\\', it] } else { vec![it] })
        .collect();
    stage.send(stage.post(&format!("\"{printable}\""))).await.is_first(201, "1");
    stage.send(stage.post("\" \"")).await.is_first(201, "2");
}

pub async fn w02_a_bare_key_may_have_visible_ascii_except_four_characters(arena: ScenarioContext) {
    let runs = ExecutionCount::new();
    let stage = arena.start(ScenarioPolicy::default(), counting(&runs)).await;
    let bare: String = ('!'..='~').filter(|it| !"\",;\\".contains(*it)).collect();
    stage.send(stage.post(&bare)).await.is_first(201, "1");
    for not in ["a\"b", "a,b", "a;b", "a\\b", "a b"] {
        stage.send(stage.post(not)).await.is_rejected(400, "invalid-key");
    }
    assert_eq!(runs.count(), 1);
}

pub async fn w03_an_invalid_key_is_400_and_claims_nothing(arena: ScenarioContext) {
    let runs = ExecutionCount::new();
    let stage = arena.start(ScenarioPolicy::default(), counting(&runs)).await;
    let bad: [&[u8]; 12] = [
        b"",
        b"\"\"",
        b"\"a\", \"b\"",
        b"a, b",
        b"\"a\\nb\"",
        b"\"a",
        b"a\"",
        b"\"a\tb\"",
        b"caf\xc3\xa9",
        b"\"caf\xe9\"",
        b"\"a\" b",
        b":YQ==:\"",
    ];
    for key in bad {
        let answer = stage.send(stage.plain().header("idempotency-key", key)).await;
        answer.is_rejected(400, "invalid-key");
    }
    let two = stage.post("a").more("idempotency-key", "a");
    stage.send(two).await.is_rejected(400, "invalid-key");
    assert_eq!(runs.count(), 0);
    stage.send(stage.post("a")).await.is_first(201, "1");
}

pub async fn w03_the_body_need_not_be_read(arena: ScenarioContext) {
    let runs = ExecutionCount::new();
    let stage = arena.start(ScenarioPolicy::default(), counting(&runs)).await;
    // The client does not send its body before a 100, which never comes.
    let (body, never) = frames(1);
    let post = stage.post("a, b").header("expect", "100-continue").header("content-length", "5");
    let mut connection = stage.client().connect().await;
    let response = connection.ask(post.with(Body::new(never))).await;
    assert_eq!(response.status(), 400);
    drop(body);
    assert_eq!(runs.count(), 0);
}

pub async fn w04_a_required_key_is_required(arena: ScenarioContext) {
    let runs = ExecutionCount::new();
    let policy = ScenarioPolicy { key: KeyRule::Required, ..ScenarioPolicy::default() };
    let stage = arena.start(policy, counting(&runs)).await;
    stage.send(stage.plain()).await.is_rejected(400, "missing-key");
    assert_eq!(runs.count(), 0);
    stage.send(stage.post("k")).await.is_first(201, "1");
    stage.send(stage.plain().method(Method::GET).body("")).await.is_unmarked(201, "2");
}

pub async fn w04_without_an_optional_key_a_request_passes_untouched(arena: ScenarioContext) {
    let runs = ExecutionCount::new();
    let stage = arena.start(ScenarioPolicy::default(), counting(&runs)).await;
    for run in ["1", "2"] {
        stage.send(stage.plain()).await.is_unmarked(201, run);
    }
}

/// The handler receives all that was sent, and no headers of ours.
pub async fn w04_without_a_key_the_handler_gets_the_request_unchanged(arena: ScenarioContext) {
    let calls: Arc<Mutex<Vec<HandlerRequest>>> = Arc::default();
    let noted = Arc::clone(&calls);
    let note = handler(move |call| {
        noted.lock().unwrap().push(call);
        async { reply(418, "as it is") }
    });
    let stage = arena.start(ScenarioPolicy::default(), note).await;
    let body: Vec<u8> = (0..=255).collect();
    let post = stage.plain().to("/a//b%2F?b=2&a=1").kind("x/y; z=\"1\"").body(body.clone());
    let post = post.more("x-two", "1").more("x-two", "2").header("x-opaque", b"caf\xe9");
    stage.send(post).await.is_unmarked(418, "as it is");
    let calls = calls.lock().unwrap();
    let [call] = &calls[..] else { panic!("{} calls", calls.len()) };
    assert_eq!((&call.method, call.fence, call.attempt), (&Method::POST, None, None));
    assert_eq!(call.uri.path_and_query().unwrap(), "/a//b%2F?b=2&a=1");
    assert_eq!(call.body, body);
    assert_eq!(call.headers["content-type"], "x/y; z=\"1\"");
    assert_eq!(call.headers["x-opaque"].as_bytes(), b"caf\xe9");
    assert!(call.headers.get_all("x-two").iter().eq(["1", "2"]));
    assert!(!call.headers.keys().any(|name| name.as_str().starts_with("idempotency-")));
}

pub async fn w05_post_and_patch_are_protected_by_default(arena: ScenarioContext) {
    let runs = ExecutionCount::new();
    let stage = arena.start(ScenarioPolicy::default(), counting(&runs)).await;
    for (method, run) in [(Method::POST, "1"), (Method::PATCH, "2")] {
        let post = stage.post(method.as_str()).method(method);
        stage.send(post.clone()).await.is_first(201, run);
        stage.send(post).await.is_replay(201, run);
    }
    for (method, run) in [(Method::PUT, 3), (Method::DELETE, 5), (Method::GET, 7)] {
        // The key is ignored, even a malformed one.
        for (key, run) in [("k", run), ("a, b", run + 1)] {
            let post = stage.post(key).method(method.clone()).body("");
            stage.send(post).await.is_unmarked(201, &run.to_string());
        }
    }
}

pub async fn w05_the_route_sets_the_protected_methods(arena: ScenarioContext) {
    let runs = ExecutionCount::new();
    let methods = vec![Method::PUT, Method::DELETE];
    let stage =
        arena.start(ScenarioPolicy { methods, ..ScenarioPolicy::default() }, counting(&runs)).await;
    for (method, run) in [(Method::PUT, "1"), (Method::DELETE, "2")] {
        let post = stage.post(method.as_str()).method(method);
        stage.send(post.clone()).await.is_first(201, run);
        stage.send(post).await.is_replay(201, run);
    }
    stage.send(stage.post("k")).await.is_unmarked(201, "3");
}
