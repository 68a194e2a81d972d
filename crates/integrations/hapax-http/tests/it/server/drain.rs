//! wire.md 23: draining.

use std::pin::Pin;
use std::task::{Context, Waker};
use std::time::Duration;

use hapax_core::{EngineLimits, Idempotency, InFlight, OnUnknown};
use hapax_http::server::{
    DrainReport, IdempotencyLayer, RouteOptions, RoutePolicy, ScopeSource, StoreOutage,
};
use tokio::time::{Instant, advance, sleep};

use super::world::{
    Mood, Runs, Signal, World, app_of, begin, pay, reexecute, respond, send, with_policy,
};

const GRACE: Duration = Duration::from_secs(25);

/// Returns the report of a drain after which the store has all outcomes.
fn report(cut_off: usize, left: usize) -> DrainReport {
    DrainReport { cut_off, left, deferred: 0 }
}

/// Returns a layer whose store went away during an execution: the outcome is only in memory.
async fn with_deferred_outcome() -> (World, IdempotencyLayer) {
    let world = World::new();
    let layer = world.layer(reexecute());
    let store = std::sync::Arc::clone(&world.store);
    let app = app_of(&layer, move |_| {
        store.is(Mood::Down);
        async { respond(201, "paid") }
    });
    let first = send(&app, pay("k", "{}")).await;
    assert_eq!(first.header("idempotency-recorded"), Some("pending"));
    (world, layer)
}

/// The store goes away during an execution, and returns during the drain: then the outcome is stored.
#[tokio::test(start_paused = true)]
async fn a_drain_waits_for_deferred_outcomes() {
    let (world, layer) = with_deferred_outcome().await;
    let drain = tokio::spawn(async move { layer.drain(GRACE).await });
    sleep(GRACE / 2).await;
    assert!(!drain.is_finished());
    world.store.is(Mood::Well);
    assert_eq!(drain.await.unwrap(), report(0, 0));
    // The process ends; after the lease, another one replays.
    sleep(super::world::LEASE * 2).await;
    let next = world.other_process();
    let app = next.app(reexecute(), |_| async { respond(201, "paid twice") });
    assert_eq!(&*send(&app, pay("k", "{}")).await.body, b"paid");
}

#[tokio::test(start_paused = true)]
async fn a_drain_without_a_store_counts_the_deferred_outcomes() {
    let (_world, layer) = with_deferred_outcome().await;
    let began = Instant::now();
    assert_eq!(layer.drain(GRACE).await, DrainReport { deferred: 1, ..report(0, 0) });
    assert_eq!(began.elapsed(), GRACE);
    assert_eq!(layer.engine().stats().deferred, 1);
}

#[tokio::test(start_paused = true)]
async fn wire_23_a_drain_rejects_new_requests_and_finishes_those_in_progress() {
    let world = World::new();
    let (runs, go) = (Runs::default(), Signal::new());
    let handler = (runs.clone(), go.clone());
    let layer = world.layer(RouteOptions::default());
    let app = app_of(&layer, move |_| {
        let (runs, go) = handler.clone();
        async move {
            runs.next();
            go.wait().await;
            respond(201, "done")
        }
    });
    let first = begin(&app, pay("k", "{}"));
    runs.reach(1).await;
    let drain = tokio::spawn({
        let layer = layer.clone();
        async move { layer.drain(GRACE).await }
    });
    sleep(Duration::from_secs(1)).await;
    let refused = send(&app, pay("other", "{}")).await;
    assert_eq!((refused.status.as_u16(), &*refused.code()), (503, "draining"));
    assert_eq!(refused.header("retry-after"), Some("1"));
    assert!(!drain.is_finished());
    go.give();
    assert_eq!(drain.await.unwrap(), report(0, 0));
    assert_eq!(first.await.unwrap().status, 201);

    let next = world.other_process();
    let app = next.app(RouteOptions::default(), |_| async { respond(201, "twice") });
    assert_eq!(&*send(&app, pay("k", "{}")).await.body, b"done");
}

#[tokio::test(start_paused = true)]
async fn wire_23_a_request_that_does_not_end_within_the_grace_is_unknown() {
    let world = World::new();
    let runs = Runs::default();
    let count = runs.clone();
    let options = || with_policy(|policy| policy.terms.on_unknown = OnUnknown::Block);
    let layer = world.layer(options());
    let app = app_of(&layer, move |_| {
        count.next();
        std::future::pending()
    });
    let client = begin(&app, pay("k", "{}"));
    runs.reach(1).await;
    let began = Instant::now();
    assert_eq!(layer.drain(GRACE).await, report(1, 0));
    assert!(began.elapsed() < GRACE + Duration::from_secs(1));
    let answer = client.await.unwrap();
    assert_eq!((answer.status.as_u16(), &*answer.code()), (504, "upstream-timeout"));

    let next = world.other_process();
    let app = next.app(options(), |_| async { respond(201, "twice") });
    assert_eq!(send(&app, pay("k", "{}")).await.code(), "outcome-unknown");
}

#[tokio::test(start_paused = true)]
async fn wire_23_a_waiter_at_the_end_of_the_grace_is_rejected() {
    let world = World::new();
    let runs = Runs::default();
    let count = runs.clone();
    let options = with_policy(|policy| policy.in_flight = InFlight::Wait(GRACE * 4));
    let layer = world.layer(options);
    let app = app_of(&layer, move |_| {
        count.next();
        std::future::pending()
    });
    let _first = begin(&app, pay("k", "{}"));
    runs.reach(1).await;
    let waiting = begin(&app, pay("k", "{}"));
    sleep(Duration::from_secs(1)).await;
    assert_eq!(layer.drain(GRACE).await, report(2, 0));
    assert_eq!(waiting.await.unwrap().code(), "draining");
    assert_eq!(runs.count(), 1);
}

#[tokio::test(start_paused = true)]
async fn wire_23_an_unprotected_execution_is_cut_off_too() {
    let world = World::new();
    let runs = Runs::default();
    let count = runs.clone();
    let options = RouteOptions { store_outage: StoreOutage::Open, ..reexecute() };
    let layer = world.layer(options);
    let app = app_of(&layer, move |_| {
        count.next();
        std::future::pending()
    });
    world.store.is(Mood::Down);
    let client = begin(&app, pay("k", "{}"));
    runs.reach(1).await;
    assert_eq!(layer.drain(GRACE).await, report(1, 0));
    assert_eq!(client.await.unwrap().code(), "upstream-timeout");
}

/// A client that is gone does not keep a drain from waiting for its work.
#[tokio::test(start_paused = true)]
async fn a_drain_waits_for_executions_of_disconnected_clients() {
    let world = World::new();
    let (runs, ended) = (Runs::default(), Runs::default());
    let handler = (runs.clone(), ended.clone());
    let layer = world.layer(RouteOptions::default());
    let app = app_of(&layer, move |_| {
        let (runs, ended) = handler.clone();
        async move {
            runs.next();
            sleep(Duration::from_secs(10)).await;
            ended.next();
            respond(201, "")
        }
    });
    let client = begin(&app, pay("k", "{}"));
    runs.reach(1).await;
    client.abort();
    assert_eq!(layer.drain(GRACE).await, report(0, 0));
    assert_eq!(ended.count(), 1);
}

/// Polls once, and says whether it is ready.
fn poll<F: Future + Unpin>(future: &mut F) -> bool {
    let mut cx = Context::from_waker(Waker::noop());
    Pin::new(future).poll(&mut cx).is_ready()
}

/// The handler's answer and the end of the grace come between two polls: the answer counts.
#[tokio::test(start_paused = true)]
async fn a_response_that_is_ready_at_the_end_of_the_grace_is_recorded() {
    const GRACE: Duration = Duration::from_secs(1);
    for mood in [Mood::Well, Mood::Down] {
        // Where both are ready and either may be taken, some of these would be cut off.
        for _ in 0..20 {
            let world = World::new();
            let (runs, go) = (Runs::default(), Signal::new());
            let handler = (runs.clone(), go.clone());
            let options = RouteOptions { store_outage: StoreOutage::Open, ..reexecute() };
            let layer = world.layer(options);
            let app = app_of(&layer, move |_| {
                let (runs, go) = handler.clone();
                async move {
                    runs.next();
                    go.wait().await;
                    respond(201, "paid")
                }
            });
            world.store.is(mood);
            let client = begin(&app, pay("k", "{}"));
            runs.reach(1).await;
            let mut drain = Box::pin(layer.drain(GRACE));
            assert!(!poll(&mut drain));
            advance(GRACE * 2).await;
            // No await from here to the end of the grace: the work is not polled in between.
            go.give();
            assert!(!poll(&mut drain));
            let answer = client.await.unwrap();
            assert_eq!((answer.status.as_u16(), &*answer.body), (201, &b"paid"[..]), "{mood:?}");
            assert_eq!(drain.await, report(1, 0));
        }
    }
}

/// Neither a handler that gives no way nor a store that is away keeps a process from ending.
#[tokio::test(start_paused = true)]
async fn wire_23_a_drain_ends_with_a_blocked_handler_and_an_unavailable_store() {
    let world = World::new();
    let limits = EngineLimits { deferred_bytes: 1, ..EngineLimits::default() };
    let store = std::sync::Arc::clone(&world.store) as std::sync::Arc<dyn hapax_core::Store>;
    let engine = Idempotency::builder(store).limits(limits).build().unwrap();
    let policy = RoutePolicy::new(ScopeSource::shared(), RouteOptions::default()).unwrap();
    let layer = IdempotencyLayer::new(engine.clone(), policy);
    let runs = Runs::default();
    let (count, store) = (runs.clone(), std::sync::Arc::clone(&world.store));
    let app = app_of(&layer, move |_| {
        count.next();
        store.is(Mood::Down);
        async { respond(201, "done") }
    });
    let client = begin(&app, pay("k", "{}"));
    runs.reach(1).await;
    let began = Instant::now();
    // Its outcome is held back, and waits to be told so until there is room for it.
    assert_eq!(layer.drain(GRACE).await, DrainReport { deferred: 1, ..report(1, 1) });
    assert_eq!(began.elapsed(), GRACE + engine.store_timeout() * 2);
    world.store.is(Mood::Well);
    engine.drain().await;
    assert_eq!(client.await.unwrap().header("idempotency-recorded"), Some("pending"));
    let next = world.other_process();
    let policy = RoutePolicy::new(ScopeSource::shared(), RouteOptions::default()).unwrap();
    let layer = IdempotencyLayer::new(next.engine.clone(), policy);
    let app = app_of(&layer, |_| async { respond(201, "twice") });
    assert_eq!(&*send(&app, pay("k", "{}")).await.body, b"done");
}

/// What is claimed when time is up is released, not begun and cut off.
#[tokio::test(start_paused = true)]
async fn a_claim_at_the_end_of_the_grace_is_released() {
    const GRACE: Duration = Duration::from_millis(500);
    for _ in 0..20 {
        let world = World::new();
        let runs = Runs::default();
        let count = runs.clone();
        let layer = world.layer(RouteOptions::default());
        let app = app_of(&layer, move |_| {
            count.next();
            async { respond(201, "") }
        });
        world.store.is(Mood::Slow);
        let client = begin(&app, pay("k", "{}"));
        sleep(GRACE / 5).await;
        // The request's task finds in one turn that the claim is granted and that time is up.
        let store = std::sync::Arc::clone(&world.store);
        let drain = tokio::spawn(async move {
            let mut drain = Box::pin(layer.drain(GRACE));
            assert!(!poll(&mut drain));
            advance(GRACE * 2).await;
            store.is(Mood::Well);
            assert!(!poll(&mut drain));
            drain.await
        });
        let answer = client.await.unwrap();
        assert_eq!((answer.status.as_u16(), &*answer.code()), (503, "draining"));
        assert_eq!((drain.await.unwrap(), runs.count()), (report(1, 0), 0));
        world.engine.drain().await;
        let next = world.other_process();
        let app = next.app(RouteOptions::default(), |_| async { respond(201, "next") });
        assert_eq!(send(&app, pay("k", "{}")).await.status, 201);
    }
}
