//! wire.md 20: the store is away.

use hapax_core::{InFlight, OnUnknown};
use hapax_http::Body;
use hapax_http::problem::Code;
use hapax_http::server::{
    ExecutionHandle, IdempotencyLayer, RecordStatus, RequestEvent, RouteError, RouteOptions,
    RoutePolicy, ScopeSource, StoreOutage,
};
use http::Request;
use tokio::time::{Duration, sleep};

use super::world::{
    App, LEASE, Mood, Runs, Signal, World, app_of, begin, pay, reexecute, respond, send,
    with_policy,
};

#[tokio::test(start_paused = true)]
async fn with_a_slow_or_damaged_store_nothing_executes() {
    for mood in [Mood::Slow, Mood::Damaged] {
        let world = World::new();
        let runs = Runs::default();
        let count = runs.clone();
        let app = world.app(RouteOptions::default(), move |_| {
            count.next();
            async { respond(201, "") }
        });
        world.store.is(mood);
        let answer = send(&app, pay("k", "{}")).await;
        assert_eq!((answer.status.as_u16(), &*answer.code()), (503, "store-unavailable"));
        assert_eq!(answer.header("retry-after"), Some("1"));
        assert_eq!(runs.count(), 0);
        // What the refused claim may have left is gone once the store is back.
        world.store.is(Mood::Well);
        sleep(Duration::from_secs(3)).await;
        assert_eq!(send(&app, pay("k", "{}")).await.replayed(), Some("false"), "{mood:?}");
    }
}

/// An operator can do nothing with the id of an operation that was not claimed.
#[tokio::test(start_paused = true)]
async fn wire_34_a_rejection_has_the_operation_id_only_if_there_may_be_a_claim() {
    let world = World::with_secret();
    let app = world.app(RouteOptions::default(), |_| async { panic!("on purpose") });
    world.store.is(Mood::Down);
    let down = send(&app, pay("k", "{}")).await;
    assert_eq!(
        (&*down.code(), down.header("idempotency-operation-id")),
        ("store-unavailable", None)
    );
    // A record that cannot be read is one.
    world.store.is(Mood::Damaged);
    let damaged = send(&app, pay("k", "{}")).await;
    let id = damaged.header("idempotency-operation-id");
    assert_eq!((&*damaged.code(), id.map(str::len)), ("store-unavailable", Some(64)));
    // A rejection after a claim.
    world.store.is(Mood::Well);
    let panicked = send(&app, pay("k", "{}")).await;
    assert_eq!(
        (&*panicked.code(), panicked.header("idempotency-operation-id")),
        ("handler-failed", id)
    );
}

#[tokio::test(start_paused = true)]
async fn an_unreadable_record_does_not_count_as_an_outage() {
    let world = World::new();
    let options = RouteOptions { store_outage: StoreOutage::Open, ..reexecute() };
    let app = world.app(options, |request: Request<Body>| async move {
        let protected = request.extensions().get::<ExecutionHandle>().is_some();
        let mut response = respond(201, protected.to_string());
        response.headers_mut().insert("idempotency-outcome", "final".parse().unwrap());
        response
    });
    for mood in [Mood::Down, Mood::Slow] {
        world.store.is(mood);
        let answer = send(&app, pay("k", "{}")).await;
        assert_eq!((answer.status.as_u16(), &*answer.body), (201, &b"false"[..]));
        assert_eq!(answer.header("idempotency-protected"), Some("false"));
        assert_eq!((answer.replayed(), answer.header("idempotency-outcome")), (None, None));
        assert_eq!(world.events(), [RequestEvent::Unprotected]);
    }
    // A record that is there but cannot be read may be that of a first execution.
    world.store.is(Mood::Damaged);
    assert_eq!(send(&app, pay("k", "{}")).await.code(), "store-unavailable");
}

/// A copy that was told of the first one is no first one, however far the store is away by then.
#[tokio::test(start_paused = true)]
async fn wire_20_open_does_not_execute_a_duplicate_that_waited() {
    let world = World::new();
    let runs = Runs::default();
    let count = runs.clone();
    let options = || {
        let mut options = RouteOptions { store_outage: StoreOutage::Open, ..reexecute() };
        options.policy.in_flight = InFlight::Wait(LEASE * 4);
        options
    };
    let handler = move |_| {
        let run = count.next();
        async move {
            if run == 1 {
                std::future::pending::<()>().await;
            }
            respond(201, "twice")
        }
    };
    // The process that executes finds its own execution in flight, and claims nothing.
    let app = world.app(options(), handler.clone());
    let elsewhere = world.other_process().app(options(), handler);
    let _first = begin(&app, pay("k", "{}"));
    runs.reach(1).await;
    let copy = begin(&elsewhere, pay("k", "{}"));
    sleep(Duration::from_secs(1)).await;
    // The owner cannot renew; the copy sees that, and cannot claim.
    world.store.is(Mood::ReadOnly);
    let copy = copy.await.unwrap();
    assert_eq!((copy.status.as_u16(), &*copy.code()), (503, "store-unavailable"));
    assert_eq!(runs.count(), 1);
}

#[test]
fn wire_20_open_with_block_or_reconcile_is_rejected() {
    let open = |options| RouteOptions { store_outage: StoreOutage::Open, ..options };
    // The default is `block`.
    let mut reconcile = RouteOptions::default();
    reconcile.policy.terms.on_unknown = OnUnknown::Reconcile;
    reconcile.policy.hook = Some(hapax_core::machine::HookTiming {
        after: Duration::from_secs(1),
        timeout: Duration::from_secs(1),
    });
    for options in [RouteOptions::default(), reconcile] {
        let refused = RoutePolicy::new(ScopeSource::shared(), open(options)).unwrap_err();
        assert_eq!(refused, RouteError::OpenWithoutReexecute);
    }
}

/// An app whose store goes away while its handler runs; the second run would say so.
fn leaving(world: &World, options: RouteOptions, status: u16) -> (impl App, Runs) {
    let runs = Runs::default();
    let count = runs.clone();
    let store = std::sync::Arc::clone(&world.store);
    let app = world.app(options, move |_| {
        let run = count.next();
        store.is(Mood::Down);
        async move { respond(status, format!("run {run}")) }
    });
    (app, runs)
}

#[tokio::test(start_paused = true)]
async fn wire_20_without_a_store_at_completion_the_response_is_delivered_as_pending() {
    let world = World::new();
    let (app, runs) = leaving(&world, RouteOptions::default(), 201);
    let first = send(&app, pay("k", "{}")).await;
    assert_eq!(
        (first.status.as_u16(), first.header("idempotency-recorded")),
        (201, Some("pending"))
    );
    assert_eq!(first.replayed(), Some("false"));
    // Copies that reach this process are answered from what is held back, and told so.
    let copy = send(&app, pay("k", "{}")).await;
    assert_eq!((copy.replayed(), &*copy.body), (Some("true"), &b"run 1"[..]));
    assert_eq!(copy.header("idempotency-recorded"), Some("pending"));
    assert_eq!(send(&app, pay("k", "[]")).await.code(), "key-reused");
    let other = world.other_process();
    let elsewhere = other.app(RouteOptions::default(), |_| async { respond(201, "twice") });
    assert_eq!(send(&elsewhere, pay("k", "{}")).await.code(), "store-unavailable");

    world.store.is(Mood::Well);
    world.engine.drain().await;
    let replay = send(&elsewhere, pay("k", "{}")).await;
    assert_eq!((replay.replayed(), &*replay.body), (Some("true"), &b"run 1"[..]));
    assert_eq!(replay.header("idempotency-recorded"), None);
    assert_eq!(runs.count(), 1);
    let pending = world.events().iter().any(|event| {
        matches!(event, RequestEvent::Executed { recorded: RecordStatus::Pending, attempt: 1, .. })
    });
    assert!(pending);
}

#[tokio::test(start_paused = true)]
async fn wire_20_a_deferred_release_lets_the_next_request_execute() {
    let world = World::new();
    let (app, runs) = leaving(&world, RouteOptions::default(), 429);
    let first = send(&app, pay("k", "{}")).await;
    assert_eq!(
        (first.status.as_u16(), first.header("idempotency-recorded")),
        (429, Some("pending"))
    );
    world.store.is(Mood::Well);
    world.engine.drain().await;
    assert_eq!(&*send(&app, pay("k", "{}")).await.body, b"run 2");
    assert_eq!(runs.count(), 2);
}

#[tokio::test(start_paused = true)]
async fn wire_20_a_completion_deferred_beyond_the_lease_may_be_taken_over() {
    for (policy, code) in [(OnUnknown::Reexecute, ""), (OnUnknown::Block, "outcome-unknown")] {
        let world = World::new();
        let options = || with_policy(|it| it.terms.on_unknown = policy);
        let (runs, go) = (Runs::default(), Signal::new());
        let handler = (runs.clone(), go.clone());
        let app = world.app(options(), move |_| {
            let (runs, go) = handler.clone();
            async move {
                runs.next();
                go.wait().await;
                respond(201, "here")
            }
        });
        let first = begin(&app, pay("k", "{}"));
        runs.reach(1).await;
        world.store.is(Mood::Down);
        go.give();
        assert_eq!(first.await.unwrap().header("idempotency-recorded"), Some("pending"));
        // Held-back writes are tried about every second: somebody else is quicker here.
        sleep(LEASE * 2).await;
        world.store.is(Mood::Well);
        let other = world.other_process();
        let elsewhere = other.app(options(), |_| async { respond(201, "there") });
        let answer = send(&elsewhere, pay("k", "{}")).await;
        assert_eq!(answer.code(), code);
    }
}

#[tokio::test(start_paused = true)]
async fn wire_20_with_a_full_backlog_claims_are_rejected() {
    let world = World::new();
    let store = std::sync::Arc::clone(&world.store) as std::sync::Arc<dyn hapax_core::Store>;
    let limits = hapax_core::EngineLimits { deferred: 1, ..hapax_core::EngineLimits::default() };
    let engine = hapax_core::Idempotency::builder(store).limits(limits).build().unwrap();
    let policy = RoutePolicy::new(ScopeSource::shared(), RouteOptions::default()).unwrap();
    let layer = IdempotencyLayer::new(engine.clone(), policy);
    let (runs, store) = (Runs::default(), std::sync::Arc::clone(&world.store));
    let count = runs.clone();
    let app = app_of(&layer, move |_| {
        count.next();
        store.is(Mood::Down);
        async { respond(201, "paid") }
    });
    assert_eq!(send(&app, pay("k", "{}")).await.header("idempotency-recorded"), Some("pending"));
    // Even once the store is back, until it has taken what is held back.
    world.store.is(Mood::ReadOnly);
    assert_eq!(send(&app, pay("other", "{}")).await.code(), "store-unavailable");
    assert_eq!(send(&app, pay("k", "{}")).await.replayed(), Some("true"));
    world.store.is(Mood::Well);
    engine.drain().await;
    assert_eq!(send(&app, pay("other", "{}")).await.status, 201);
    assert_eq!(runs.count(), 2);
}

#[tokio::test(start_paused = true)]
async fn wire_20_rejections_during_an_outage_are_counted() {
    let world = World::new();
    let app = world.app(RouteOptions::default(), |_| async { respond(201, "") });
    world.store.is(Mood::Down);
    send(&app, pay("k", "{}")).await;
    assert_eq!(world.events(), [RequestEvent::Rejected(Code::StoreUnavailable)]);
}
