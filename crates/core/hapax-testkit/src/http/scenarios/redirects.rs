//! Scenarios of statement 33: redirects that repeat the request elsewhere.

use hapax_core::{InFlight, OnUnknown};
use hapax_http::Body;
use hapax_http::classify::Profile;
use hapax_http::fingerprint::{BodyForm, HttpFingerprintScheme};
use hapax_http::statuses::StatusLists;
use http::{HeaderValue, Response};

use crate::http::{
    ExecutionCount, Handler, HandlerGate, ScenarioContext, ScenarioPolicy, TestInstance,
    TestRequest, TestResponse, handler, reply,
};

/// The statuses.
const ELSEWHERE: [u16; 2] = [307, 308];

/// Returns a redirect, with a body and headers that its repetition does not have.
fn redirect(status: u16, target: &str) -> Response<Body> {
    let mut response = reply(status, "see there");
    response.headers_mut().insert("location", HeaderValue::from_str(target).unwrap());
    response
}

/// Returns a handler as frameworks have it for a path without its last slash: a path with one executes, and
/// another one is redirected to that.
fn with_slash(status: u16, runs: &ExecutionCount) -> Handler {
    let runs = runs.clone();
    handler(move |call| {
        let path = call.uri.path().to_owned();
        let run = path.ends_with('/').then(|| runs.next());
        async move {
            match run {
                Some(run) => reply(201, run.to_string()),
                None => redirect(status, &format!("{path}/")),
            }
        }
    })
}

/// Checks the redirect, as it came first or again.
#[track_caller]
fn is_redirect(answer: &TestResponse, status: u16, target: &str, is_first: bool) {
    let (body, replayed) = if is_first { ("see there", "false") } else { ("", "true") };
    assert_eq!(answer.header("location"), target, "{answer:?}");
    assert_eq!(answer.header("idempotency-replayed"), replayed, "{answer:?}");
    assert_eq!((answer.status.as_u16(), answer.text()), (status, body), "{answer:?}");
}

/// Sends a request as clients do that follow redirects, and returns the last response. The number of
/// redirects is bounded.
async fn follow(stage: &TestInstance, request: &TestRequest) -> TestResponse {
    let mut request = request.clone();
    for _ in 0..20 {
        let answer = stage.send(request.clone()).await;
        if !ELSEWHERE.contains(&answer.status.as_u16()) {
            return answer;
        }
        request = request.to(answer.header("location"));
    }
    panic!("too many redirects")
}

/// The second reply is lost, and the client begins anew with the first URL.
pub async fn w33_a_client_that_follows_a_redirect_has_one_effect(arena: ScenarioContext) {
    for status in ELSEWHERE {
        let runs = ExecutionCount::new();
        let stage = arena.start(ScenarioPolicy::default(), with_slash(status, &runs)).await;
        let post = stage.post(&format!("k-{status}"));
        follow(&stage, &post).await.is_first(201, "1");
        for _ in 0..3 {
            let again = stage.send(post.clone()).await;
            is_redirect(&again, status, "/payments/", false);
            follow(&stage, &post).await.is_replay(201, "1");
        }
        // Neither the first nor the second request.
        stage.send(post.clone().body("{}")).await.is_rejected(422, "key-reused");
        stage.send(post.to("/payments/").body("{}")).await.is_rejected(422, "key-reused");
        assert_eq!(runs.count(), 1);
        stage.end().await;
    }
}

pub async fn w33_a_redirect_is_sent_again_whatever_the_state(arena: ScenarioContext) {
    let (runs, gate) = (ExecutionCount::new(), HandlerGate::closed());
    let (counted, waits) = (runs.clone(), gate.clone());
    let target = handler(move |call| {
        let (path, waits) = (call.uri.path().to_owned(), waits.clone());
        let run = path.ends_with('/').then(|| counted.next());
        async move {
            if run.is_none() {
                return redirect(307, &format!("{path}/"));
            }
            waits.pass().await;
            reply(500, "failed")
        }
    });
    let policy = ScenarioPolicy { in_flight: InFlight::Reject, ..ScenarioPolicy::default() };
    assert_eq!(policy.on_unknown, OnUnknown::Block);
    let stage = arena.start(policy, target).await;
    let post = stage.post("k");
    let again = || async { is_redirect(&stage.send(post.clone()).await, 307, "/payments/", false) };
    is_redirect(&stage.send(post.clone()).await, 307, "/payments/", true);
    // Released, in flight, and unknown.
    again().await;
    let there = post.clone().to("/payments/");
    let executing = stage.begin(there.clone());
    runs.reach(1).await;
    again().await;
    stage.send(there.clone()).await.is_rejected(409, "in-flight");
    gate.open();
    executing.await.unwrap().is_first(500, "failed");
    again().await;
    stage.send(there).await.is_rejected(409, "outcome-unknown");
    assert_eq!(runs.count(), 1);
}

/// Checks that of ten redirects in a row the record keeps eight: a client that follows all of them has one
/// effect, and one that begins anew is never executed a second time.
pub async fn w33_several_redirects_in_a_row_are_kept_up_to_a_limit(arena: ScenarioContext) {
    for (length, is_kept) in [(3, true), (8, true), (10, false)] {
        let (runs, counted) = (ExecutionCount::new(), ExecutionCount::new());
        let effects = counted.clone();
        let hops = runs.clone();
        let chain = handler(move |call| {
            let at: usize = call.uri.path().rsplit('/').next().unwrap().parse().unwrap();
            let effect = (at == length).then(|| effects.next());
            hops.next();
            async move {
                match effect {
                    Some(effect) => reply(201, effect.to_string()),
                    None => redirect(308, &format!("/hops/{}", at + 1)),
                }
            }
        });
        let stage = arena.start(ScenarioPolicy::default(), chain).await;
        let post = stage.post(&format!("k-{length}")).to("/hops/0");
        follow(&stage, &post).await.is_first(201, "1");
        assert_eq!(runs.count(), length + 1);
        let again = follow(&stage, &post).await;
        match is_kept {
            true => again.is_replay(201, "1"),
            false => again.is_rejected(422, "key-reused"),
        }
        assert_eq!((runs.count(), counted.count()), (length + 1, 1));
        stage.end().await;
    }
}

/// Neither the body of the redirected request nor its target counts before the target is claimed.
pub async fn w33_a_key_with_a_redirect_is_free_until_the_target_is_claimed(arena: ScenarioContext) {
    let runs = ExecutionCount::new();
    let stage = arena.start(ScenarioPolicy::default(), with_slash(307, &runs)).await;
    let post = stage.post("k");
    is_redirect(&stage.send(post.clone()).await, 307, "/payments/", true);
    let other = post.clone().to("/payments/").body("{}");
    stage.send(other.clone()).await.is_first(201, "1");
    stage.send(post.clone().to("/payments/")).await.is_rejected(422, "key-reused");
    is_redirect(&stage.send(post).await, 307, "/payments/", false);
    stage.send(other).await.is_replay(201, "1");
    assert_eq!(runs.count(), 1);
}

/// On another host or in another spelling, the request that follows is the same as a duplicate: it executes.
pub async fn w33_a_redirect_to_the_same_target_releases_the_key(arena: ScenarioContext) {
    for target in [
        "https://other.example/payments?a=1&b=2",
        "/payments?b=2&a=1",
        "payments?a=1&b=2",
        "./payments?a=1&b=2",
        "/v1/../payments?a=1&b=2",
        "?a=1&b=2#top",
    ] {
        let runs = ExecutionCount::new();
        let counted = runs.clone();
        let elsewhere = handler(move |_| {
            let run = counted.next();
            async move {
                match run {
                    1 => redirect(307, target),
                    run => reply(201, run.to_string()),
                }
            }
        });
        let stage = arena.start(ScenarioPolicy::default(), elsewhere).await;
        let post = stage.post(&format!("\"{target}\"")).to("/payments?a=1&b=2");
        is_redirect(&stage.send(post.clone()).await, 307, target, true);
        stage.send(post.clone()).await.is_first(201, "2");
        stage.send(post).await.is_replay(201, "2");
        stage.end().await;
    }
}

pub async fn w33_lists_and_headers_take_precedence(arena: ScenarioContext) {
    let listed =
        |statuses: &[&str]| statuses.iter().map(|it| it.parse().unwrap()).collect::<Vec<_>>();
    let cases = [
        (listed(&["307"]), listed(&[]), None),
        (listed(&[]), listed(&["3xx"]), None),
        (listed(&[]), listed(&[]), Some("final")),
        (listed(&[]), listed(&[]), Some("retryable")),
    ];
    for (number, (final_statuses, retryable_statuses, header)) in cases.into_iter().enumerate() {
        let is_final =
            header == Some("final") || (header.is_none() && retryable_statuses.is_empty());
        let statuses = StatusLists { final_statuses, retryable_statuses, ..StatusLists::default() };
        let policy = ScenarioPolicy { statuses, ..ScenarioPolicy::default() };
        let runs = ExecutionCount::new();
        let counted = runs.clone();
        let elsewhere = handler(move |_| {
            counted.next();
            async move {
                let mut response = redirect(307, "/there");
                if let Some(class) = header {
                    let class = HeaderValue::from_static(class);
                    response.headers_mut().insert("idempotency-outcome", class);
                }
                response
            }
        });
        let stage = arena.start(policy, elsewhere).await;
        let post = stage.post(&format!("k-{number}"));
        is_redirect(&stage.send(post.clone()).await, 307, "/there", true);
        let again = stage.send(post.clone()).await;
        match is_final {
            true => again.is_replay(307, "see there"),
            false => is_redirect(&again, 307, "/there", true),
        }
        let there = stage.send(post.to("/there")).await;
        match is_final {
            true => there.is_rejected(422, "key-reused"),
            false => is_redirect(&there, 307, "/there", true),
        }
        stage.end().await;
    }
}

/// Nothing says where the request is to be sent: it may have had its effect.
pub async fn w33_a_307_without_a_location_is_no_redirect(arena: ScenarioContext) {
    for (profile, is_final) in
        [(Profile::Standard, true), (Profile::StripeV1, true), (Profile::SuccessOnly, false)]
    {
        for status in ELSEWHERE {
            let runs = ExecutionCount::new();
            let counted = runs.clone();
            let nowhere = handler(move |_| {
                let run = counted.next();
                async move { reply(status, run.to_string()) }
            });
            let policy = ScenarioPolicy { profile, ..ScenarioPolicy::default() };
            let stage = arena.start(policy, nowhere).await;
            let post = stage.post(&format!("k-{profile}-{status}"));
            stage.send(post.clone()).await.is_first(status, "1");
            let again = stage.send(post).await;
            match is_final {
                true => again.is_replay(status, "1"),
                false => again.is_first(status, "2"),
            }
            stage.end().await;
        }
    }
}

/// Clients send what is not ASCII in UTF-8, with or without percent-encoding.
pub async fn w33_a_redirect_in_raw_utf_8_is_kept(arena: ScenarioContext) {
    let runs = ExecutionCount::new();
    let counted = runs.clone();
    let elsewhere = handler(move |_| {
        counted.next();
        async move {
            let mut response = reply(307, "see there");
            let target = HeaderValue::from_bytes("/café".as_bytes()).unwrap();
            response.headers_mut().insert("location", target);
            response
        }
    });
    let stage = arena.start(ScenarioPolicy::default(), elsewhere).await;
    let post = stage.post("k");
    for _ in 0..2 {
        let answer = stage.send(post.clone()).await;
        assert_eq!(answer.headers["location"].as_bytes(), "/café".as_bytes());
    }
    assert_eq!(runs.count(), 1);
}

pub async fn w33_redirects_are_kept_under_every_profile(arena: ScenarioContext) {
    for profile in [Profile::Standard, Profile::StripeV1, Profile::SuccessOnly] {
        let runs = ExecutionCount::new();
        let policy = ScenarioPolicy { profile, ..ScenarioPolicy::default() };
        let stage = arena.start(policy, with_slash(308, &runs)).await;
        let post = stage.post(&format!("k-{profile}"));
        follow(&stage, &post).await.is_first(201, "1");
        follow(&stage, &post).await.is_replay(201, "1");
        stage.end().await;
    }
}

/// The redirect was compared by another configuration than the request that followed it.
pub async fn w33_a_redirect_is_recognised_by_the_scheme_of_its_record(arena: ScenarioContext) {
    let runs = ExecutionCount::new();
    let raw = || HttpFingerprintScheme::new(BodyForm::Raw, Vec::new()).unwrap();
    let start = |fingerprint| {
        let policy = ScenarioPolicy { fingerprint, ..ScenarioPolicy::default() };
        arena.start(policy, with_slash(307, &runs))
    };
    let usual = ScenarioPolicy::default().fingerprint;
    let stage = start(usual.clone()).await;
    let post = stage.post("k");
    is_redirect(&stage.send(post.clone()).await, 307, "/payments/", true);
    stage.end().await;
    let stage = start(raw()).await;
    let post = stage.post("k");
    is_redirect(&stage.send(post.clone()).await, 307, "/payments/", false);
    stage.send(post.clone().to("/payments/")).await.is_first(201, "1");
    follow(&stage, &post).await.is_replay(201, "1");
    // Of the target the new configuration counts: white space is another body.
    let spaced = post.clone().body("{\"amount\": 100}");
    is_redirect(&stage.send(spaced.clone()).await, 307, "/payments/", false);
    stage.send(spaced.to("/payments/")).await.is_rejected(422, "key-reused");
    assert_eq!(runs.count(), 1);
    stage.end().await;
}
