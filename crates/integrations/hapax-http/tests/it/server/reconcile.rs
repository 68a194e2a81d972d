//! wire.md 15: the reconcile hook.

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use hapax_core::machine::HookTiming;
use hapax_core::machine::Verdict;
use hapax_core::{OnUnknown, PolicyError};
use hapax_http::server::{
    ExecutionHandle, Reconcile, ReconcileRequest, ReconciledResponse, RequestEvent, RouteError,
    RouteOptions, RoutePolicy, ScopeSource,
};
use http::Response;
use tokio::time::{Instant, sleep};

use super::world::{App, LEASE, Mood, Runs, World, begin, pay, respond, send, with_policy};

const TIMES: HookTiming =
    HookTiming { after: Duration::from_secs(60), timeout: Duration::from_secs(5) };

fn asking(hook: impl Reconcile) -> RouteOptions {
    let options = with_policy(|policy| {
        policy.terms.on_unknown = OnUnknown::Reconcile;
        policy.hook = Some(TIMES);
    });
    RouteOptions { reconcile: Some(Arc::new(hook)), ..options }
}

/// The first run answers 500; what a retry gets.
fn failing(world: &World, options: RouteOptions) -> (impl App, Runs) {
    let runs = Runs::default();
    let count = runs.clone();
    let app = world.app(options, move |_| {
        let run = count.next();
        async move { respond(if run == 1 { 500 } else { 201 }, format!("run {run}")) }
    });
    (app, runs)
}

#[tokio::test(start_paused = true)]
async fn wire_15_after_happened_the_response_is_replayed() {
    let world = World::new();
    let asked = Runs::default();
    let count = asked.clone();
    let hook = move |doubt: ReconcileRequest| {
        count.next();
        async move {
            assert_eq!(doubt.key.as_str(), "k");
            assert_eq!(doubt.request.headers["authorization"], "Bearer alice");
            let response = Response::builder()
                .status(201)
                .header("location", "/payments/1")
                .header("idempotency-status", "201")
                .body(Bytes::from(format!("under {}", doubt.fence)));
            Verdict::Happened(ReconciledResponse::from(response.unwrap()))
        }
    };
    let (app, runs) = failing(&world, asking(hook));
    send(&app, pay("k", "{}")).await;
    for _ in 0..2 {
        let answer = send(&app, pay("k", "{}")).await;
        assert_eq!((answer.status.as_u16(), answer.replayed()), (201, Some("true")));
        assert_eq!(answer.header("location"), Some("/payments/1"));
        assert_eq!(answer.header("idempotency-status"), None);
        assert!(answer.body.starts_with(b"under "));
    }
    assert_eq!((runs.count(), asked.count()), (1, 1));
    assert_eq!(
        world.events().iter().filter(|it| **it == RequestEvent::ReconcileStarted).count(),
        1
    );
}

#[tokio::test(start_paused = true)]
async fn wire_15_after_did_not_happen_the_retry_executes() {
    let world = World::new();
    let (app, runs) = failing(&world, asking(|_| async { Verdict::DidNotHappen }));
    send(&app, pay("k", "{}")).await;
    let answer = send(&app, pay("k", "{}")).await;
    assert_eq!((answer.replayed(), &*answer.body), (Some("false"), &b"run 2"[..]));
    assert_eq!(send(&app, pay("k", "{}")).await.replayed(), Some("true"));
    assert_eq!(runs.count(), 2);
}

#[tokio::test(start_paused = true)]
async fn wire_15_cannot_say_is_409() {
    let world = World::new();
    let asked = Runs::default();
    let count = asked.clone();
    let hook = move |_| {
        let ask = count.next();
        async move { if ask < 3 { Verdict::CannotSay } else { Verdict::DidNotHappen } }
    };
    let (app, runs) = failing(&world, asking(hook));
    send(&app, pay("k", "{}")).await;
    for _ in 0..2 {
        let answer = send(&app, pay("k", "{}")).await;
        assert_eq!((answer.status.as_u16(), &*answer.code()), (409, "outcome-unknown"));
    }
    assert_eq!(send(&app, pay("k", "{}")).await.status, 201);
    assert_eq!((runs.count(), asked.count()), (2, 3));
}

#[tokio::test(start_paused = true)]
async fn wire_15_a_hook_that_times_out_or_panics_cannot_say() {
    let world = World::new();
    let asked = Runs::default();
    let count = asked.clone();
    let hook = move |_| {
        let ask = count.next();
        assert!(ask != 2, "on purpose");
        async move {
            assert!(ask != 3, "on purpose");
            std::future::pending().await
        }
    };
    let (app, runs) = failing(&world, asking(hook));
    send(&app, pay("k", "{}")).await;
    let began = Instant::now();
    assert_eq!(send(&app, pay("k", "{}")).await.code(), "outcome-unknown");
    assert!(began.elapsed() >= TIMES.timeout && began.elapsed() < TIMES.timeout * 2);
    for _ in 0..2 {
        assert_eq!(send(&app, pay("k", "{}")).await.code(), "outcome-unknown");
    }
    assert_eq!((runs.count(), asked.count()), (1, 3));
}

#[tokio::test(start_paused = true)]
async fn wire_15_one_claim_at_a_time_calls_the_hook() {
    let world = World::new();
    let asked = Runs::default();
    let count = asked.clone();
    let hook = move |_| {
        count.next();
        async {
            sleep(Duration::from_secs(2)).await;
            Verdict::DidNotHappen
        }
    };
    let (app, runs) = failing(&world, asking(hook));
    send(&app, pay("k", "{}")).await;
    let copies: Vec<_> = (0..10).map(|_| begin(&app, pay("k", "{}"))).collect();
    let mut unknown = 0;
    for copy in copies {
        unknown += usize::from(copy.await.unwrap().code() == "outcome-unknown");
    }
    assert_eq!((unknown, asked.count(), runs.count()), (9, 1, 2));
}

/// A lapsed owner may still be waiting for its upstream: it is not asked about before that ends,
/// and its own late outcome wins.
#[tokio::test(start_paused = true)]
async fn wire_15_after_a_lapse_the_hook_is_called_once_the_upstream_timeout_has_passed() {
    let world = World::new();
    let (asked, runs) = (Runs::default(), Runs::default());
    let count = asked.clone();
    let hook = move |_| {
        count.next();
        async { Verdict::DidNotHappen }
    };
    let count = runs.clone();
    let handler = move |_| {
        let run = count.next();
        async move {
            if run == 1 {
                std::future::pending::<()>().await;
            }
            respond(201, format!("run {run}"))
        }
    };
    let stuck = world.app(asking(hook.clone()), handler.clone());
    // The process that executes asks nothing: it knows.
    let app = world.other_process().app(asking(hook), handler);
    let _stuck = begin(&stuck, pay("k", "{}"));
    runs.reach(1).await;
    world.store.is(Mood::Down);
    sleep(LEASE + TIMES.after / 2).await;
    world.store.is(Mood::Well);
    let early = send(&app, pay("k", "{}")).await;
    assert_eq!((&*early.code(), asked.count()), ("outcome-unknown", 0));
    // Until then, and no longer.
    let come_again: u64 = early.header("retry-after").unwrap().parse().unwrap();
    assert!((1..=(TIMES.after / 2).as_secs()).contains(&come_again), "{come_again}");
    world.store.is(Mood::Down);
    sleep(LEASE + TIMES.after).await;
    world.store.is(Mood::Well);
    assert_eq!(&*send(&app, pay("k", "{}")).await.body, b"run 2");
    assert_eq!((asked.count(), runs.count()), (1, 2));
}

#[tokio::test(start_paused = true)]
async fn wire_15_did_not_happen_gives_a_larger_fence() {
    let world = World::new();
    let doubted = Arc::new(std::sync::Mutex::new(None));
    let note = Arc::clone(&doubted);
    let hook = move |doubt: ReconcileRequest| {
        *note.lock().unwrap() = Some(doubt.fence);
        async { Verdict::DidNotHappen }
    };
    let fences = Arc::new(std::sync::Mutex::new(Vec::new()));
    let seen = Arc::clone(&fences);
    let app = world.app(asking(hook), move |request| {
        let execution = request.extensions().get::<ExecutionHandle>().unwrap();
        seen.lock().unwrap().push(execution.fence());
        let attempt = execution.attempt();
        async move { respond(if attempt == 1 { 500 } else { 201 }, "") }
    });
    send(&app, pay("k", "{}")).await;
    send(&app, pay("k", "{}")).await;
    let fences = fences.lock().unwrap().clone();
    assert_eq!(*doubted.lock().unwrap(), Some(fences[0]));
    assert!(fences[0] < fences[1]);
}

#[test]
fn a_hook_without_timing_or_policy_is_rejected() {
    let error = |options| RoutePolicy::new(ScopeSource::shared(), options).unwrap_err();
    let mut options = asking(|_| async { Verdict::CannotSay });
    options.policy.hook = None;
    assert_eq!(error(options), RouteError::Policy(PolicyError::NoHook));
    let mut options = asking(|_| async { Verdict::CannotSay });
    options.reconcile = None;
    assert_eq!(error(options), RouteError::NoReconcile);
    let mut options = asking(|_| async { Verdict::CannotSay });
    options.policy = RouteOptions::default().policy;
    assert_eq!(error(options), RouteError::NoHookTiming);
}
