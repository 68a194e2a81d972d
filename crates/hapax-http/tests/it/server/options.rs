//! Routes and what their options may be.

use std::sync::Arc;
use std::time::Duration;

use hapax::PolicyError;
use hapax_http::server::{
    IdempotencyLayer, KeyRule, RouteError, RouteOptions, RoutePolicy, ScopeSource,
};

use super::world::{World, app_of, pay, respond, send, with_policy};

#[tokio::test(start_paused = true)]
async fn each_request_goes_by_its_routes_policy() {
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
fn options_that_break_promises_are_refused() {
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
