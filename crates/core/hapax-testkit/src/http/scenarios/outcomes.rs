//! Scenarios of statements 14–16: outcomes that are stored.

use std::collections::HashMap;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use bytes::Bytes;
use hapax_core::OnUnknown;
use hapax_http::Body;
use hapax_http::classify::{OutcomeClass, Profile};
use hapax_http::statuses::StatusLists;
use http::HeaderValue;

use super::execution::held;
use super::protocols::pieces;
use crate::http::frames::frames;
use crate::http::{
    ExecutionCount, Handler, HandlerGate, HandlerRequest, Hook, HookVerdict, ScenarioContext,
    ScenarioPolicy, TestInstance, handler, reply,
};

/// Returns a handler that counts, and answers with the status at the end of the path.
pub(super) fn by_path(runs: &ExecutionCount) -> Handler {
    let runs = runs.clone();
    handler(move |call| {
        let run = runs.next();
        let status = call.uri.path().rsplit('/').next().unwrap().parse().unwrap();
        async move { reply(status, body_of(status, run)) }
    })
}

/// Returns the body of the response with this status to this execution.
fn body_of(status: u16, run: usize) -> String {
    if status == 304 || status == 204 { String::new() } else { run.to_string() }
}

/// Sends two requests under one key: the first executes, and the second gets what this class means.
async fn twice(
    stage: &TestInstance,
    runs: &ExecutionCount,
    profile: Profile,
    status: u16,
    class: OutcomeClass,
) {
    let run = runs.count() + 1;
    let post = stage.post(&format!("k-{profile}-{status}")).to(&format!("/s/{status}"));
    stage.send(post.clone()).await.is_first(status, &body_of(status, run));
    assert_eq!(runs.count(), run);
    let second = stage.send(post).await;
    match class {
        OutcomeClass::Final => second.is_replay(status, &body_of(status, run)),
        OutcomeClass::Retryable => second.is_first(status, &body_of(status, run + 1)),
        OutcomeClass::Unknown => second.is_rejected(409, "outcome-unknown"),
    }
    assert_eq!(runs.count(), run + usize::from(class == OutcomeClass::Retryable));
}

async fn table(
    arena: ScenarioContext,
    profile: Profile,
    kept: &[u16],
    free: &[u16],
    unknown: &[u16],
) {
    let policy = ScenarioPolicy { profile, ..ScenarioPolicy::default() };
    listed(arena, policy, kept, free, unknown).await;
}

async fn listed(
    arena: ScenarioContext,
    policy: ScenarioPolicy,
    kept: &[u16],
    free: &[u16],
    unknown: &[u16],
) {
    let runs = ExecutionCount::new();
    // Under `block`, an unknown outcome differs from a released record.
    assert_eq!(policy.on_unknown, OnUnknown::Block);
    let profile = policy.profile;
    let stage = arena.start(policy, by_path(&runs)).await;
    for (statuses, class) in [
        (kept, OutcomeClass::Final),
        (free, OutcomeClass::Retryable),
        (unknown, OutcomeClass::Unknown),
    ] {
        for status in statuses {
            twice(&stage, &runs, profile, *status, class).await;
        }
    }
    stage.end().await;
}

pub async fn w14_statuses_by_default(arena: ScenarioContext) {
    // A 307 or 308 without `Location` is no redirect.
    let kept =
        [200, 201, 202, 204, 206, 301, 302, 303, 307, 308, 400, 402, 404, 405, 406, 409, 410];
    let also = [411, 412, 414, 415, 416, 417, 418, 422, 423, 424, 426, 428, 431, 451];
    let free = [401, 403, 408, 413, 421, 425, 429];
    let unknown = [500, 501, 502, 503, 504, 505, 507, 599];
    table(arena, Profile::Standard, &[&kept[..], &also].concat(), &free, &unknown).await;
}

/// Under `block` and `reconcile`: a service may answer 503 after its effect.
pub async fn w14_a_503_is_unknown_unless_its_header_states_retryable(arena: ScenarioContext) {
    let hook = Some(Hook::new(|_, _| HookVerdict::CannotSay));
    for (on_unknown, hook) in [(OnUnknown::Block, None), (OnUnknown::Reconcile, hook)] {
        let runs = ExecutionCount::new();
        let policy = ScenarioPolicy { on_unknown, hook, ..ScenarioPolicy::default() };
        let stage = arena.start(policy, dictated(&runs)).await;
        let said = |key: &str, text: &'static str| {
            stage.post(&format!("{key}-{on_unknown:?}")).kind("text/plain").body(text)
        };
        let bare = said("bare", "503");
        stage.send(bare.clone()).await.is_first(503, "1");
        stage.send(bare).await.is_rejected(409, "outcome-unknown");
        let shed = said("shed", "503\nIdempotency-Outcome: retryable");
        stage.send(shed.clone()).await.is_first(503, "2");
        stage.send(shed).await.is_first(503, "3");
        stage.end().await;
    }
}

pub async fn w14_a_503_is_retryable_under_reexecute(arena: ScenarioContext) {
    let runs = ExecutionCount::new();
    let policy = ScenarioPolicy { on_unknown: OnUnknown::Reexecute, ..ScenarioPolicy::default() };
    let stage = arena.start(policy, by_path(&runs)).await;
    let post = stage.post("k").to("/s/503");
    stage.send(post.clone()).await.is_first(503, "1");
    // A released record accepts another request; an unknown one does not.
    stage.send(post.body("{}")).await.is_first(503, "2");
    let post = stage.post("l").to("/s/500");
    stage.send(post.clone()).await.is_first(500, "3");
    stage.send(post.body("{}")).await.is_rejected(422, "key-reused");
}

/// Returns the status lists of a route.
fn lists(kept: &[&str], free: &[&str], unknown: &[&str]) -> StatusLists {
    let ranges = |texts: &[&str]| texts.iter().map(|text| text.parse().unwrap()).collect();
    StatusLists {
        final_statuses: ranges(kept),
        retryable_statuses: ranges(free),
        unknown_statuses: ranges(unknown),
    }
}

pub async fn w25_status_lists_take_precedence_over_the_profile(arena: ScenarioContext) {
    for profile in [Profile::Standard, Profile::StripeV1, Profile::SuccessOnly] {
        let statuses = lists(&["500", "401"], &["502-503", "202"], &["404", "3xx"]);
        let policy = ScenarioPolicy { profile, statuses, ..ScenarioPolicy::default() };
        let (kept, free, unknown) = ([500, 401, 201], [502, 503, 202], [404, 302]);
        listed(arena.clone(), policy, &kept, &free, &unknown).await;
    }
}

pub async fn w25_the_outcome_header_takes_precedence_over_the_status_lists(arena: ScenarioContext) {
    let runs = ExecutionCount::new();
    let policy =
        ScenarioPolicy { statuses: lists(&["500"], &[], &[]), ..ScenarioPolicy::default() };
    let stage = arena.start(policy, dictated(&runs)).await;
    let post = stage.post("k").kind("text/plain").body("500\nIdempotency-Outcome: unknown");
    stage.send(post.clone()).await.is_first(500, "1");
    stage.send(post).await.is_rejected(409, "outcome-unknown");
}

pub async fn w25_a_status_in_two_lists_is_rejected(arena: ScenarioContext) {
    let statuses = lists(&["200"], &["503"], &["5xx"]);
    let policy = ScenarioPolicy { statuses, ..ScenarioPolicy::default() };
    let said = arena.refused(policy, by_path(&ExecutionCount::new())).await;
    assert!(
        said.contains("retryable") && said.contains("unknown") && said.contains("503"),
        "{said}"
    );
}

pub async fn w14_a_response_that_breaks_off_is_unknown(arena: ScenarioContext) {
    breaks_off(arena, Profile::Standard).await;
}

pub async fn w23_under_any_profile_a_response_that_breaks_off_is_unknown(arena: ScenarioContext) {
    for profile in [Profile::StripeV1, Profile::SuccessOnly] {
        breaks_off(arena.clone(), profile).await;
    }
}

/// Returns a handler whose response breaks off in its body.
pub(super) fn breaking(runs: &ExecutionCount) -> Handler {
    let runs = runs.clone();
    handler(move |_| {
        runs.next();
        async move {
            let (sender, body) = frames(2);
            tokio::spawn(async move {
                sender.data(Bytes::from_static(b"half")).await;
                sender.abort("broken").await;
            });
            reply(201, "").map(|_| Body::new(body))
        }
    })
}

/// The response ends before its content length, without an error.
pub async fn w14_a_response_shorter_than_declared_is_unknown(arena: ScenarioContext) {
    let runs = ExecutionCount::new();
    let count = runs.clone();
    let short = handler(move |_| {
        count.next();
        async {
            let mut response = reply(201, "").map(|_| pieces(vec!["ha", "lf"], None));
            response.headers_mut().insert("content-length", HeaderValue::from_static("9"));
            response
        }
    });
    let policy = ScenarioPolicy { on_unknown: OnUnknown::Block, ..ScenarioPolicy::default() };
    let stage = arena.start(policy, short).await;
    stage.send(stage.post("k")).await.is_rejected(502, "upstream-broken");
    stage.send(stage.post("k")).await.is_rejected(409, "outcome-unknown");
    assert_eq!(runs.count(), 1);
}

async fn breaks_off(arena: ScenarioContext, profile: Profile) {
    let runs = ExecutionCount::new();
    let policy =
        ScenarioPolicy { profile, on_unknown: OnUnknown::Block, ..ScenarioPolicy::default() };
    let stage = arena.start(policy, breaking(&runs)).await;
    let post = stage.post(&format!("{profile}"));
    stage.send(post.clone()).await.is_rejected(502, "upstream-broken");
    stage.send(post).await.is_rejected(409, "outcome-unknown");
    assert_eq!(runs.count(), 1);
    stage.end().await;
}

/// Group `crashes`.
pub async fn w14_a_lease_that_lapsed_is_unknown(arena: ScenarioContext) {
    let (runs, gate) = (ExecutionCount::new(), HandlerGate::closed());
    let policy = ScenarioPolicy {
        lease: Duration::from_secs(1),
        on_unknown: OnUnknown::Block,
        ..ScenarioPolicy::default()
    };
    let stage = arena.start(policy.clone(), held(&runs, &gate)).await;
    let first = stage.begin(stage.post("k"));
    runs.reach(1).await;
    stage.instance().kill().await;
    first.abort();
    drop(stage);
    let stage = arena.start(policy, held(&runs, &gate)).await;
    let lapsed = |answer: &crate::http::TestResponse| answer.rejection().1 != "in-flight";
    stage.until(&stage.post("k"), lapsed).await.is_rejected(409, "outcome-unknown");
    assert_eq!(runs.count(), 1);
}

/// Group `crashes`.
pub async fn w15_a_lapsed_execution_runs_again_with_a_larger_fence(arena: ScenarioContext) {
    let (runs, gate) = (ExecutionCount::new(), HandlerGate::closed());
    let fences: Arc<Mutex<Vec<u64>>> = Arc::default();
    let noting = {
        let (held, fences) = (held(&runs, &gate), Arc::clone(&fences));
        handler(move |call: HandlerRequest| {
            fences.lock().unwrap().push(call.fence.unwrap());
            held(call)
        })
    };
    let (lease, on_unknown) = (Duration::from_secs(1), OnUnknown::Reexecute);
    let policy = ScenarioPolicy { lease, on_unknown, ..ScenarioPolicy::default() };
    let stage = arena.start(policy.clone(), noting.clone()).await;
    let first = stage.begin(stage.post("k"));
    runs.reach(1).await;
    stage.instance().kill().await;
    first.abort();
    drop(stage);
    gate.open();
    let stage = arena.start(policy, noting).await;
    stage.until(&stage.post("k"), |answer| answer.status == 201).await.is_first(201, "2");
    let fences = fences.lock().unwrap();
    assert!(fences[0] < fences[1], "{fences:?}");
}

/// Returns a handler that fails on its first execution.
fn failing_once(runs: &ExecutionCount, fences: &Arc<Mutex<Vec<u64>>>) -> Handler {
    let (runs, fences) = (runs.clone(), Arc::clone(fences));
    handler(move |call| {
        let run = runs.next();
        fences.lock().unwrap().push(call.fence.unwrap());
        async move { reply(if run == 1 { 500 } else { 201 }, run.to_string()) }
    })
}

pub async fn w15_reexecute_runs_again_with_a_larger_fence(arena: ScenarioContext) {
    let (runs, fences) = (ExecutionCount::new(), Arc::default());
    let policy = ScenarioPolicy { on_unknown: OnUnknown::Reexecute, ..ScenarioPolicy::default() };
    let stage = arena.start(policy, failing_once(&runs, &fences)).await;
    stage.send(stage.post("k")).await.is_first(500, "1");
    stage.send(stage.post("k")).await.is_first(201, "2");
    stage.send(stage.post("k")).await.is_replay(201, "2");
    let fences = fences.lock().unwrap();
    assert!(fences[0] < fences[1], "{fences:?}");
}

/// `block` is the default.
pub async fn w15_under_block_nothing_executes_again_without_a_decision(arena: ScenarioContext) {
    let (runs, fences) = (ExecutionCount::new(), Arc::default());
    let stage = arena.start(ScenarioPolicy::default(), failing_once(&runs, &fences)).await;
    stage.send(stage.post("k")).await.is_first(500, "1");
    for _ in 0..3 {
        stage.send(stage.post("k")).await.is_rejected(409, "outcome-unknown");
    }
    assert_eq!(runs.count(), 1);
}

type Asked = Arc<Mutex<Vec<(String, u64)>>>;

async fn reconciled(
    arena: &ScenarioContext,
    truth: HookVerdict,
) -> (TestInstance, ExecutionCount, Arc<Mutex<Vec<u64>>>, Asked) {
    let (runs, fences, asked) = (ExecutionCount::new(), Arc::default(), Asked::default());
    let noted = Arc::clone(&asked);
    let hook = Hook::new(move |key, fence| {
        noted.lock().unwrap().push((key.to_owned(), fence));
        truth.clone()
    });
    let (on_unknown, hook) = (OnUnknown::Reconcile, Some(hook));
    let policy = ScenarioPolicy { on_unknown, hook, ..ScenarioPolicy::default() };
    let stage = arena.start(policy, failing_once(&runs, &fences)).await;
    stage.send(stage.post("\"a key\"")).await.is_first(500, "1");
    (stage, runs, fences, asked)
}

pub async fn w15_after_happened_the_response_is_replayed(arena: ScenarioContext) {
    let truth = HookVerdict::Happened(201, "charged");
    let (stage, runs, fences, asked) = reconciled(&arena, truth).await;
    stage.send(stage.post("\"a key\"")).await.is_replay(201, "charged");
    stage.send(stage.post("\"a key\"")).await.is_replay(201, "charged");
    assert_eq!(runs.count(), 1);
    let fence = fences.lock().unwrap()[0];
    assert_eq!(*asked.lock().unwrap(), [("a key".to_owned(), fence)]);
}

pub async fn w15_after_did_not_happen_the_retry_executes(arena: ScenarioContext) {
    let (stage, runs, fences, asked) = reconciled(&arena, HookVerdict::DidNotHappen).await;
    stage.send(stage.post("\"a key\"")).await.is_first(201, "2");
    stage.send(stage.post("\"a key\"")).await.is_replay(201, "2");
    assert_eq!((runs.count(), asked.lock().unwrap().len()), (2, 1));
    let fences = fences.lock().unwrap();
    assert!(fences[0] < fences[1], "{fences:?}");
}

pub async fn w15_cannot_say_is_409(arena: ScenarioContext) {
    let (stage, runs, _, asked) = reconciled(&arena, HookVerdict::CannotSay).await;
    stage.send(stage.post("\"a key\"")).await.is_rejected(409, "outcome-unknown");
    stage.send(stage.post("\"a key\"")).await.is_rejected(409, "outcome-unknown");
    assert_eq!((runs.count(), asked.lock().unwrap().len()), (1, 2));
}

/// From the key alone, the hook could not distinguish the operations of two callers.
pub async fn w24_two_callers_with_one_key_get_their_own_outcomes(arena: ScenarioContext) {
    let charged: Arc<Mutex<HashMap<String, &'static str>>> = Arc::default();
    let runs = ExecutionCount::new();
    let (books, count) = (Arc::clone(&charged), runs.clone());
    let service = handler(move |call: HandlerRequest| {
        // The first execution charges the first caller; the second fails before it charges the
        // second caller.
        let (status, receipt) = match count.next() {
            1 => (500, Some("receipt of the first")),
            2 => (500, None),
            _ => (201, Some("receipt of the second")),
        };
        if let Some(receipt) = receipt {
            books.lock().unwrap().insert(call.operation.unwrap(), receipt);
        }
        async move { reply(status, receipt.unwrap_or_default()) }
    });
    let hook = Hook::of_request(move |asked| {
        assert_eq!((asked.key, asked.attempt), ("k", 1));
        let receipt = charged.lock().unwrap().get(asked.operation).copied();
        receipt.map_or(HookVerdict::DidNotHappen, |receipt| HookVerdict::Happened(201, receipt))
    });
    let (on_unknown, hook) = (OnUnknown::Reconcile, Some(hook));
    let policy = ScenarioPolicy { on_unknown, hook, ..ScenarioPolicy::default() };
    let stage = arena.start(policy, service).await;
    let other = arena.unique("Bearer other");
    let second = || stage.post("\"k\"").header("authorization", &other);
    stage.send(stage.post("\"k\"")).await.is_first(500, "receipt of the first");
    stage.send(second()).await.is_first(500, "");
    stage.send(second()).await.is_first(201, "receipt of the second");
    stage.send(stage.post("\"k\"")).await.is_replay(201, "receipt of the first");
    stage.send(second()).await.is_replay(201, "receipt of the second");
    assert_eq!(runs.count(), 3);
}

pub async fn w27_outcome_unknown_has_retry_after(arena: ScenarioContext) {
    let (stage, ..) = reconciled(&arena, HookVerdict::CannotSay).await;
    let answer = stage.send(stage.post("\"a key\"")).await;
    answer.is_rejected(409, "outcome-unknown");
    assert_eq!(answer.header("retry-after"), "1");
    stage.end().await;
    // Under `block` an operator has to decide.
    let (runs, fences) = (ExecutionCount::new(), Arc::default());
    let stage = arena.start(ScenarioPolicy::default(), failing_once(&runs, &fences)).await;
    stage.send(stage.post("k")).await.is_first(500, "1");
    let answer = stage.send(stage.post("k")).await;
    answer.is_rejected(409, "outcome-unknown");
    assert_eq!(answer.header("retry-after"), "");
}

pub async fn w16_under_stripe_v1_all_but_409_and_429_are_final(arena: ScenarioContext) {
    let kept = [200, 302, 400, 401, 403, 404, 408, 500, 502, 503, 504];
    table(arena, Profile::StripeV1, &kept, &[409, 429], &[]).await;
}

pub async fn w16_under_success_only_2xx_is_final(arena: ScenarioContext) {
    let free = [301, 304, 307, 308, 400, 404, 409, 422, 500, 502];
    table(arena, Profile::SuccessOnly, &[200, 201, 202, 204], &free, &[]).await;
}

/// Returns a handler that answers with the status and the headers that the request's body lists,
/// one `name: value` a line after the status.
pub(super) fn dictated(runs: &ExecutionCount) -> Handler {
    let runs = runs.clone();
    handler(move |call| {
        let run = runs.next();
        let text = String::from_utf8(call.body.to_vec()).unwrap();
        async move {
            let mut lines = text.lines();
            let mut response = reply(lines.next().unwrap().parse().unwrap(), run.to_string());
            for (name, value) in lines.filter_map(|line| line.split_once(": ")) {
                let name: http::HeaderName = name.parse().unwrap();
                response.headers_mut().append(name, HeaderValue::from_str(value).unwrap());
            }
            response
        }
    })
}

pub async fn w16_a_response_overrides_its_status(arena: ScenarioContext) {
    let runs = ExecutionCount::new();
    let policy = ScenarioPolicy { on_unknown: OnUnknown::Block, ..ScenarioPolicy::default() };
    let stage = arena.start(policy, dictated(&runs)).await;
    let say = |status: u16, class: &str| {
        let key = format!("{status} {class}");
        let body = format!("{status}\nIdempotency-Outcome: {class}");
        stage.post(&format!("\"{key}\"")).kind("text/plain").body(body)
    };
    stage.send(say(500, "final")).await.is_first(500, "1");
    stage.send(say(500, "final")).await.is_replay(500, "1");
    stage.send(say(200, "retryable")).await.is_first(200, "2");
    stage.send(say(200, "retryable")).await.is_first(200, "3");
    stage.send(say(404, "unknown")).await.is_first(404, "4");
    stage.send(say(404, "unknown")).await.is_rejected(409, "outcome-unknown");
}

pub async fn w16_a_response_sets_its_retention(arena: ScenarioContext) {
    let runs = ExecutionCount::new();
    // Without the handler's header, the outcome would be stored for an hour.
    let lease = Duration::from_secs(1);
    let stage =
        arena.start(ScenarioPolicy { lease, ..ScenarioPolicy::default() }, dictated(&runs)).await;
    let post = stage.post("k").kind("text/plain").body("201\nIdempotency-Retention: 1");
    stage.send(post.clone()).await.is_first(201, "1");
    let again = stage.until(&post, |answer| answer.header("idempotency-replayed") == "false").await;
    again.is_first(201, "2");
}

pub async fn w16_no_idempotency_header_of_a_handler_reaches_the_client(arena: ScenarioContext) {
    let runs = ExecutionCount::new();
    let stage = arena.start(ScenarioPolicy::default(), dictated(&runs)).await;
    let said = "201\nIdempotency-Outcome: final\nIdempotency-Retention: 60\n\
                Idempotency-Replayed: true\nIdempotency-Recorded: never\nIdempotency-Fence: 1\n\
                Idempotency-Operation-Id: 1\nIdempotency-Made-Up: yes\nX-Mine: 1";
    let post = stage.post("k").kind("text/plain").body(said);
    for replayed in ["false", "true"] {
        let answer = stage.send(post.clone()).await;
        assert_eq!(answer.header("x-mine"), "1");
        let ours: Vec<_> = answer
            .headers
            .iter()
            .filter(|(name, _)| name.as_str().starts_with("idempotency-"))
            .collect();
        assert_eq!(ours.len(), if arena.has_secret() { 2 } else { 1 }, "{ours:?}");
        assert_eq!(answer.header("idempotency-replayed"), replayed);
        assert_ne!(answer.header("idempotency-operation-id"), "1");
    }
}

pub async fn w23_an_invalid_override_is_ignored(arena: ScenarioContext) {
    let runs = ExecutionCount::new();
    let stage = arena.start(ScenarioPolicy::default(), dictated(&runs)).await;
    for (at, said) in [
        "Idempotency-Outcome: Final",
        "Idempotency-Outcome: retryable\nIdempotency-Outcome: retryable",
        "Idempotency-Outcome: maybe\nIdempotency-Retention: 0",
        "Idempotency-Retention: -1",
        "Idempotency-Retention: 1.5",
    ]
    .iter()
    .enumerate()
    {
        let run = (at + 1).to_string();
        let post = stage.post(&format!("k-{at}")).kind("text/plain").body(format!("201\n{said}"));
        stage.send(post.clone()).await.is_first(201, &run);
        stage.send(post).await.is_replay(201, &run);
    }
}
