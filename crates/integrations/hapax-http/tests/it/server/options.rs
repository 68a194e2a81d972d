//! Routes and what their options may be.

use std::num::NonZeroU32;
use std::sync::Arc;
use std::time::Duration;

use hapax_core::{EngineError, InFlight, MemoryStore, OnUnknown, PolicyError};
use hapax_http::server::{
    IdempotencyLayer, KeyRule, LayerError, RouteError, RouteOptions, RoutePolicy, ScopeSource,
};
use http::header::{AUTHORIZATION, HeaderValue};

use super::world::{Runs, Signal, World, app_of, begin, pay, respond, send, with_policy};

#[tokio::test(start_paused = true)]
async fn each_request_follows_the_policy_of_its_route() {
    let world = World::new();
    let policy = |options| Arc::new(RoutePolicy::new(ScopeSource::shared(), options).unwrap());
    let strict = policy(RouteOptions { key: KeyRule::Required, ..RouteOptions::default() });
    let lax = policy(RouteOptions::default());
    let layer =
        IdempotencyLayer::routed(world.engine.clone(), move |parts| match parts.uri.path() {
            "/payments" => Some(Arc::clone(&strict)),
            "/orders" => Some(Arc::clone(&lax)),
            _ => None,
        });
    let app = app_of(&layer, |_| async { respond(201, "") });
    let at = |path: &'static str, key: Option<&'static str>| {
        let mut request = pay(key.unwrap_or_default(), "{}");
        *request.uri_mut() = http::Uri::from_static(path);
        if key.is_none() {
            request.headers_mut().remove("idempotency-key");
        }
        request
    };
    assert_eq!(send(&app, at("/payments", None)).await.code(), "missing-key");
    assert_eq!(send(&app, at("/orders", None)).await.replayed(), None);
    assert_eq!(send(&app, at("/orders", Some("k"))).await.replayed(), Some("false"));
    for _ in 0..2 {
        // No policy: not even a bad key matters.
        assert_eq!(send(&app, at("/health", Some(""))).await.replayed(), None);
    }
}

#[test]
fn options_that_break_a_guarantee_are_rejected() {
    let error = |options| RoutePolicy::new(ScopeSource::shared(), options).unwrap_err();
    let no_lease = with_policy(|policy| policy.terms.lease = Duration::ZERO);
    assert_eq!(error(no_lease), RouteError::Policy(PolicyError::NoLease));
    let short = with_policy(|policy| policy.terms.retention = Duration::from_secs(1));
    assert_eq!(error(short), RouteError::Policy(PolicyError::ShortRetention));
    let no_methods = RouteOptions { methods: Vec::new(), ..RouteOptions::default() };
    assert_eq!(error(no_methods), RouteError::NoMethods);
    let large = RouteOptions {
        max_response_body: RouteOptions::MAX_RESPONSE_BODY + 1,
        ..RouteOptions::default()
    };
    assert_eq!(error(large), RouteError::LargeResponses);
    let policy = RoutePolicy::new(ScopeSource::shared(), RouteOptions::default()).unwrap();
    assert_eq!(policy.options().max_request_body, 1 << 20);
}

#[tokio::test(start_paused = true)]
async fn keys_in_flight_are_limited_per_caller() {
    let world = World::new();
    let (runs, go) = (Runs::default(), Signal::new());
    let handler = (runs.clone(), go.clone());
    let options = RouteOptions {
        max_in_flight_per_scope: NonZeroU32::new(1),
        ..with_policy(|policy| policy.in_flight = InFlight::Wait(Duration::from_secs(60)))
    };
    let app = world.app(options, move |_| {
        let (runs, go) = handler.clone();
        async move {
            runs.next();
            go.wait().await;
            respond(201, "done")
        }
    });
    let first = begin(&app, pay("1", "{}"));
    runs.reach(1).await;
    let copy = begin(&app, pay("1", "{}"));
    let refused = send(&app, pay("2", "{}")).await;
    assert_eq!((refused.status.as_u16(), &*refused.code()), (429, "too-many-in-flight"));
    assert_eq!(refused.header("retry-after"), Some("1"));
    // A client that hangs up frees nothing: its request goes on.
    first.abort();
    assert_eq!(send(&app, pay("2", "{}")).await.status, 429);
    go.give();
    assert_eq!(copy.await.unwrap().replayed(), Some("true"));
    go.give();
    assert_eq!(send(&app, pay("2", "{}")).await.status, 201);
    assert_eq!(runs.count(), 2);
}

#[tokio::test(start_paused = true)]
async fn a_layer_with_defaults_names_callers_by_authorization() {
    let layer = IdempotencyLayer::builder(MemoryStore::default()).build().unwrap();
    let app = app_of(&layer, |_| async { respond(201, "") });
    let by = |caller: &'static str| {
        let mut request = pay("k-1", "{}");
        request.headers_mut().insert(AUTHORIZATION, HeaderValue::from_static(caller));
        request
    };
    let mut anonymous = pay("k-1", "{}");
    anonymous.headers_mut().remove(AUTHORIZATION);
    assert_eq!(send(&app, anonymous).await.code(), "missing-scope");
    assert_eq!(send(&app, by("Bearer a")).await.replayed(), Some("false"));
    assert_eq!(send(&app, by("Bearer a")).await.replayed(), Some("true"));
    assert_eq!(send(&app, by("Bearer b")).await.replayed(), Some("false"), "another caller");
}

#[tokio::test]
async fn a_layer_that_requires_keys_rejects_requests_without_one() {
    let layer = IdempotencyLayer::builder(MemoryStore::default())
        .scope(ScopeSource::shared())
        .require_key()
        .wait(Duration::from_secs(1))
        .retention(Duration::from_secs(60))
        .on_unknown(OnUnknown::Reexecute)
        .build()
        .unwrap();
    let app = app_of(&layer, |_| async { respond(201, "") });
    let mut keyless = pay("k-1", "{}");
    keyless.headers_mut().remove("idempotency-key");
    assert_eq!(send(&app, keyless).await.code(), "missing-key");
}

#[tokio::test]
async fn a_layer_with_contradictory_options_is_not_built() {
    let builder = || IdempotencyLayer::builder(MemoryStore::default());
    let error = builder().retention(Duration::from_secs(1)).build().unwrap_err();
    assert_eq!(error, LayerError::Route(RouteError::Policy(PolicyError::ShortRetention)));
    let error = builder().store_timeout(Duration::ZERO).build().unwrap_err();
    assert_eq!(error, LayerError::Engine(EngineError::NoStoreTimeout));
}

#[test]
fn a_layer_is_not_built_outside_of_a_runtime() {
    let error = IdempotencyLayer::builder(MemoryStore::default()).build().unwrap_err();
    assert_eq!(error, LayerError::Engine(EngineError::NoRuntime));
}
