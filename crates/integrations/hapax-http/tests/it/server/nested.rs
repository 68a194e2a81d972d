//! wire.md 35: the target behind nested routers.

use std::sync::Arc;

use axum::Router;
use bytes::Bytes;
use hapax_core::{Inspect, MemoryCapacity, MemoryStore, Secret, Store, SystemClock};
use hapax_http::Body;
use hapax_http::server::{IdempotencyLayer, ResponseInfo, RouteOptions, ScopeSource};
use http::{Request, Uri};
use http_body_util::BodyExt;
use tower::ServiceExt;

use super::world::{Answer, Runs, World, app_of, pay, read, respond};

/// Returns a router whose route `/confirm` is behind the layer.
fn confirmations(layer: &IdempotencyLayer, runs: &Runs) -> Router {
    let runs = runs.clone();
    let confirm = move || {
        let run = runs.next();
        async move { respond(201, format!("run {run}")) }
    };
    Router::new().route("/confirm", axum::routing::post(confirm)).layer(layer.clone())
}

/// Returns a router that mounts these routes twice.
fn mounted_twice(routes: &Router) -> Router {
    Router::new().nest("/payments", routes.clone()).nest("/refunds", routes.clone())
}

fn to(target: &'static str) -> Request<Body> {
    let mut request = pay("k", "{}");
    *request.uri_mut() = Uri::from_static(target);
    request
}

async fn send(router: &Router, request: Request<Body>) -> Answer {
    let (head, body) = router.clone().oneshot(request).await.unwrap().into_parts();
    let body = body.collect().await.unwrap().to_bytes();
    Answer { status: head.status, headers: head.headers, body, trailers: None }
}

#[tokio::test(start_paused = true)]
async fn wire_35_routes_with_one_inner_path_are_two_operations() {
    let (world, runs) = (World::new(), Runs::default());
    let router = mounted_twice(&confirmations(&world.layer(RouteOptions::default()), &runs));
    assert_eq!(send(&router, to("/payments/confirm?a=1")).await.replayed(), Some("false"));
    assert_eq!(send(&router, to("/payments/confirm?a=1")).await.replayed(), Some("true"));
    assert_eq!(send(&router, to("/refunds/confirm?a=1")).await.code(), "key-reused");
    assert_eq!(runs.count(), 1);
}

/// A router of the service is no longer nested.
#[tokio::test(start_paused = true)]
async fn wire_35_a_retry_outside_of_nested_routers_is_the_same_request() {
    let (world, runs) = (World::new(), Runs::default());
    let layer = world.layer(RouteOptions::default());
    let nested = mounted_twice(&confirmations(&layer, &runs));
    let path = "/payments/confirm";
    let flat = axum::routing::post(|| async { respond(201, "flat") });
    let flat = Router::new().route(path, flat).layer(layer);
    let executed = send(&nested, to(path)).await;
    let replayed = send(&flat, to(path)).await;
    assert_eq!((replayed.replayed(), &replayed.body), (Some("true"), &executed.body));
}

/// Stores the record of an earlier release, which compared the stripped path of a request to `/payments/confirm`
/// and named the scheme `http/1`, as a layer outside of routers does. Returns the response.
async fn store_older(world: &World, options: RouteOptions) -> Answer {
    let app = app_of(&world.layer(options), |_| async { respond(201, "older") });
    let response = app.oneshot(to("/confirm")).await.unwrap();
    let info: &ResponseInfo = response.extensions().get().unwrap();
    let record = world.store.load(&info.operation.unwrap()).await.unwrap().stored.unwrap();
    assert_eq!(record.record.scheme.as_str(), "http/1;body=canonical");
    read(response).await
}

#[tokio::test(start_paused = true)]
async fn wire_35_a_retry_of_an_older_record_is_compared_by_the_stripped_path() {
    for flat in [false, true] {
        let (world, runs) = (World::new(), Runs::default());
        let routes = confirmations(&world.layer(RouteOptions::default()), &runs);
        let older = store_older(&world, RouteOptions::default()).await;
        let (router, [path, other]) = match flat {
            true => (routes, ["/confirm", "/confirm?a=1"]),
            false => (mounted_twice(&routes), ["/payments/confirm", "/payments/confirm?a=1"]),
        };
        let replayed = send(&router, to(path)).await;
        assert_eq!((replayed.replayed(), &replayed.body), (Some("true"), &older.body));
        assert_eq!(send(&router, to(other)).await.code(), "key-reused");
        assert_eq!(runs.count(), 0);
    }
}

/// Not even if the inner path of one is the path of the other.
#[tokio::test(start_paused = true)]
async fn wire_35_a_route_outside_of_a_nest_and_one_within_are_two_operations() {
    let by_function = RouteOptions {
        target: Some(Arc::new(|request| request.uri.clone())),
        ..RouteOptions::default()
    };
    for options in [RouteOptions::default(), by_function] {
        for paths in [["/confirm", "/refunds/confirm"], ["/refunds/confirm", "/confirm"]] {
            let (world, runs) = (World::new(), Runs::default());
            let nested = confirmations(&world.layer(RouteOptions::default()), &runs);
            let router =
                confirmations(&world.layer(options.clone()), &runs).nest("/refunds", nested);
            assert_eq!(send(&router, to(paths[0])).await.replayed(), Some("false"));
            assert_eq!(send(&router, to(paths[1])).await.code(), "key-reused", "{paths:?}");
            assert_eq!(send(&router, to(paths[0])).await.replayed(), Some("true"));
            assert_eq!(runs.count(), 1);
        }
    }
}

/// A function that returns the target prevails, under each scheme.
#[tokio::test(start_paused = true)]
async fn wire_35_a_target_function_finds_its_older_records() {
    let (world, runs) = (World::new(), Runs::default());
    store_older(&world, RouteOptions::default()).await;
    let options = RouteOptions {
        target: Some(Arc::new(|_| Uri::from_static("/confirm"))),
        ..RouteOptions::default()
    };
    let routes = confirmations(&world.layer(options), &runs);
    assert_eq!(
        send(&mounted_twice(&routes), to("/refunds/confirm")).await.replayed(),
        Some("true")
    );
}

/// The first request is redirected there, and the next one executes.
#[tokio::test(start_paused = true)]
async fn wire_33_a_redirect_to_the_same_target_behind_nested_routers_is_not_kept() {
    let by_function = RouteOptions {
        target: Some(Arc::new(|request| request.uri.path().replace("/v1", "").parse().unwrap())),
        ..RouteOptions::default()
    };
    let cases = [
        (RouteOptions::default(), "/payments/confirm", "confirm", true),
        (RouteOptions::default(), "/payments/confirm", "/refunds/../payments/confirm", true),
        (RouteOptions::default(), "/payments/confirm", "/confirm", false),
        (by_function.clone(), "/payments/confirm", "/payments/v1/confirm", true),
        (by_function, "/payments/confirm", "/payments/v2/confirm", false),
    ];
    for (options, target, location, is_same) in cases {
        let (world, runs) = (World::new(), Runs::default());
        let counted = runs.clone();
        let confirm = move || {
            let mut response = respond(201, "");
            if counted.next() == 1 {
                response = respond(307, "");
                response.headers_mut().insert("location", location.parse().unwrap());
            }
            async { response }
        };
        let routes = Router::new().route("/confirm", axum::routing::post(confirm));
        let router = mounted_twice(&routes.layer(world.layer(options)));
        assert_eq!(send(&router, to(target)).await.status, 307);
        let again = send(&router, to(target)).await;
        let expected = if is_same { (201, "false", 2) } else { (307, "true", 1) };
        let found = (again.status.as_u16(), again.replayed().unwrap(), runs.count());
        assert_eq!(found, expected, "{location}");
    }
}

#[tokio::test(start_paused = true)]
async fn operators_see_the_target_that_the_client_sent() {
    let memory = MemoryStore::new(Arc::new(SystemClock), MemoryCapacity::default());
    let store = Arc::new(memory.secret(Secret::new([7; 32])));
    let layer = IdempotencyLayer::builder(Arc::clone(&store)).scope(ScopeSource::shared());
    let routes = confirmations(&layer.build().unwrap(), &Runs::default());
    send(&mounted_twice(&routes), to("/payments/confirm")).await;
    let page = store.page(None, std::num::NonZeroU32::MIN).await.unwrap();
    let record = &page.records[0].1.as_ref().unwrap().record;
    let description: Bytes = record.notes.description.clone().unwrap();
    let described: serde_json::Value = serde_json::from_slice(&description).unwrap();
    assert_eq!(described["target"], "/payments/confirm");
    assert!(record.scheme.as_str().ends_with("http/2;body=canonical"), "{:?}", record.scheme);
}
