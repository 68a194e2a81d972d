//! Scenarios of statement 21: rejections.

use hapax_core::OnUnknown;
use hapax_http::server::KeyRule;

use super::execution::held;
use super::outcomes::breaking;
use crate::http::{
    ExecutionCount, HandlerGate, ScenarioContext, ScenarioPolicy, TestInstance, TestResponse,
    counting,
};

/// Returns one rejection of each of three kinds.
async fn refusals(stage: &TestInstance) -> [TestResponse; 3] {
    [
        stage.send(stage.plain()).await,
        stage.send(stage.post("a, b")).await,
        stage.send(stage.post("k").body(vec![b' '; 2000])).await,
    ]
}

fn strict() -> ScenarioPolicy {
    ScenarioPolicy { key: KeyRule::Required, max_request_body: 1000, ..ScenarioPolicy::default() }
}

pub async fn w21_rejections_are_problem_details(arena: ScenarioContext) {
    let stage = arena.start(strict(), counting(&ExecutionCount::new())).await;
    let expected = [(400, "missing-key"), (400, "invalid-key"), (413, "body-too-large")];
    for (answer, (status, code)) in refusals(&stage).await.iter().zip(expected) {
        answer.is_rejected(status, code);
        let problem = answer.problem();
        assert_eq!(problem["type"], format!("urn:hapax:problem:{code}"));
        assert!(problem["detail"].as_str().unwrap().ends_with('.'));
        assert_eq!(answer.header("link"), "");
        assert_eq!(problem.as_object().unwrap().len(), 6, "{problem}");
    }
}

pub async fn w28_every_problem_has_an_error_for_sdks(arena: ScenarioContext) {
    let stage = arena.start(strict(), counting(&ExecutionCount::new())).await;
    for answer in refusals(&stage).await {
        assert_eq!(answer.problem()["error"]["type"], "invalid_request_error", "{answer:?}");
    }
    stage.send(stage.post("k").body("1")).await.is_first(201, "1");
    let reused = stage.send(stage.post("k").body("2")).await;
    reused.is_rejected(422, "key-reused");
    let problem = reused.problem();
    let message = problem["detail"].as_str().unwrap();
    let error = serde_json::json!({
        "type": "idempotency_error",
        "code": "key-reused",
        "message": message,
    });
    assert_eq!(problem["error"], error);
}

pub async fn w21_in_flight_has_retry_after(arena: ScenarioContext) {
    let (runs, gate) = (ExecutionCount::new(), HandlerGate::closed());
    let stage = arena.start(strict(), held(&runs, &gate)).await;
    let first = stage.begin(stage.post("k"));
    runs.reach(1).await;
    let problem = stage.send(stage.post("k")).await.problem();
    assert!(problem["retry_after"].as_u64().unwrap() >= 1);
    gate.open();
    first.await.unwrap().is_first(201, "1");
}

pub async fn w21_rejections_link_to_the_documentation(arena: ScenarioContext) {
    let docs = Some("https://docs.shop.example/idempotency");
    let stage =
        arena.start(ScenarioPolicy { docs, ..strict() }, counting(&ExecutionCount::new())).await;
    for answer in refusals(&stage).await {
        let problem = answer.problem();
        let code = problem["code"].as_str().unwrap();
        assert_eq!(problem["type"], format!("https://docs.shop.example/idempotency#{code}"));
        let link = "<https://docs.shop.example/idempotency>; rel=\"describedby\"";
        assert_eq!(answer.header("link"), link);
    }
}

/// A gateway in front stores the response, so that a rejection states its outcome class for it.
pub async fn w21_rejections_state_their_outcome_class_for_a_gateway_in_front(
    arena: ScenarioContext,
) {
    let (runs, gate) = (ExecutionCount::new(), HandlerGate::closed());
    let stage = arena.start(strict(), held(&runs, &gate)).await;
    let first = stage.begin(stage.post("k").header("idempotency-fence", "7"));
    runs.reach(1).await;
    for (post, status, code, class) in [
        (stage.post("k"), 409, "in-flight", "retryable"),
        (stage.post("k").body("{}"), 422, "key-reused", "retryable"),
        (stage.post("other").body(vec![b' '; 2000]), 413, "body-too-large", "retryable"),
        (stage.post("a, b"), 400, "invalid-key", "final"),
        (stage.plain(), 400, "missing-key", "final"),
    ] {
        let told = stage.send(post.clone().header("idempotency-fence", "7")).await;
        told.is_rejected(status, code);
        assert_eq!(told.header("idempotency-outcome"), class, "{code}");
        let other = stage.send(post).await;
        other.is_rejected(status, code);
        assert_eq!(other.header("idempotency-outcome"), "", "{code}");
    }
    gate.open();
    let first = first.await.unwrap();
    first.is_first(201, "1");
    assert_eq!(first.header("idempotency-outcome"), "");
}

/// A failed execution may have happened; the gateway in front gets `unknown`.
pub async fn w21_an_unknown_outcome_is_unknown_for_a_gateway_in_front(arena: ScenarioContext) {
    let runs = ExecutionCount::new();
    let policy = ScenarioPolicy { on_unknown: OnUnknown::Block, ..ScenarioPolicy::default() };
    let stage = arena.start(policy, breaking(&runs)).await;
    let post = stage.post("k").header("idempotency-fence", "7");
    for (status, code) in [(502, "upstream-broken"), (409, "outcome-unknown")] {
        let told = stage.send(post.clone()).await;
        told.is_rejected(status, code);
        assert_eq!(told.header("idempotency-outcome"), "unknown", "{code}");
    }
}

pub async fn w21_rejections_have_the_routes_cors_headers(arena: ScenarioContext) {
    let cors = Some("https://shop.example");
    let stage =
        arena.start(ScenarioPolicy { cors, ..strict() }, counting(&ExecutionCount::new())).await;
    let from = |origin: &str| stage.plain().header("origin", origin);
    let allowed = stage.send(from("https://shop.example")).await;
    allowed.is_rejected(400, "missing-key");
    assert_eq!(allowed.header("access-control-allow-origin"), "https://shop.example");
    assert_eq!(allowed.header("access-control-allow-credentials"), "true");
    let exposed = allowed.header("access-control-expose-headers").to_ascii_lowercase();
    assert!(exposed.contains("retry-after") && exposed.contains("link"), "{exposed}");
    assert!(allowed.header("vary").to_ascii_lowercase().contains("origin"));
    let other = stage.send(from("https://evil.example")).await;
    other.is_rejected(400, "missing-key");
    // Absent, or the origin that is allowed: a browser compares.
    let allowed = other.header("access-control-allow-origin");
    assert!(["", "https://shop.example"].contains(&allowed), "{allowed}");
}

/// Every response to a page has CORS headers.
pub async fn w21_every_response_to_a_page_has_cors_headers(arena: ScenarioContext) {
    let cors = Some("https://shop.example");
    let (runs, gate) = (ExecutionCount::new(), HandlerGate::closed());
    let stage = arena.start(ScenarioPolicy { cors, ..strict() }, held(&runs, &gate)).await;
    let readable = |answer: &TestResponse, status: u16| {
        assert_eq!(answer.status, status, "{answer:?}");
        assert_eq!(answer.header("access-control-allow-origin"), "https://shop.example");
        assert_eq!(answer.header("access-control-allow-credentials"), "true");
    };
    let post = stage.post("k").header("origin", "https://shop.example");
    let first = stage.begin(post.clone());
    runs.reach(1).await;
    readable(&stage.send(post.clone()).await, 409);
    readable(&stage.send(post.clone().body("{}")).await, 422);
    gate.open();
    let first = first.await.unwrap();
    first.is_first(201, "1");
    readable(&first, 201);
    let replay = stage.send(post).await;
    replay.is_replay(201, "1");
    readable(&replay, 201);
}

pub async fn w21_without_cors_there_are_no_such_headers(arena: ScenarioContext) {
    let stage = arena.start(strict(), counting(&ExecutionCount::new())).await;
    let answer = stage.send(stage.plain().header("origin", "https://shop.example")).await;
    answer.is_rejected(400, "missing-key");
    let cors = |name: &http::HeaderName| name.as_str().starts_with("access-control-");
    assert!(!answer.headers.keys().any(cors), "{answer:?}");
}
