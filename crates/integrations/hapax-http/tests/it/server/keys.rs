//! wire.md 1–5: keys.

use std::pin::Pin;
use std::task::{Context, Poll};

use bytes::Bytes;
use hapax_http::Body;
use hapax_http::server::{RequestEvent, RouteOptions};
use http::{HeaderValue, Method, Request};
use http_body::{Frame, SizeHint};

use super::world::{App, Log, Runs, World, begin, pay, respond, send};

fn counting(world: &World, options: RouteOptions) -> (impl App, Runs) {
    let runs = Runs::default();
    let count = runs.clone();
    let app = world.app(options, move |_| {
        let run = count.next();
        async move { respond(201, format!("run {run}")) }
    });
    (app, runs)
}

/// A body of a gibibyte that must not be read.
pub(super) struct Untouchable;

impl http_body::Body for Untouchable {
    type Data = Bytes;
    type Error = std::io::Error;

    fn poll_frame(
        self: Pin<&mut Self>,
        _: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, std::io::Error>>> {
        panic!("the body was read");
    }

    fn size_hint(&self) -> SizeHint {
        SizeHint::with_exact(1 << 30)
    }
}

#[tokio::test(start_paused = true)]
async fn wire_03_an_invalid_key_is_rejected_before_the_body_is_read() {
    let world = World::new();
    let (app, runs) = counting(&world, RouteOptions::default());
    let long = "k".repeat(256);
    let bad: [&[u8]; 7] =
        [b"", b"\"\"", long.as_bytes(), b"\"a\", \"b\"", br#""a\n""#, b"\"a", b"\xc3\xa9"];
    for value in bad {
        let mut request = pay("x", "").map(|_| Body::new(Untouchable));
        request.headers_mut().insert("idempotency-key", HeaderValue::from_bytes(value).unwrap());
        let answer = send(&app, request).await;
        assert_eq!((answer.status.as_u16(), &*answer.code()), (400, "invalid-key"), "{value:?}");
    }
    let mut request = pay("a", "").map(|_| Body::new(Untouchable));
    request.headers_mut().append("idempotency-key", HeaderValue::from_static("a"));
    assert_eq!(send(&app, request).await.code(), "invalid-key");
    assert_eq!((runs.count(), world.store.len()), (0, 0));
}

#[tokio::test(start_paused = true)]
async fn a_request_that_passes_unprotected_is_not_observed() {
    let world = World::new();
    let app = world.app(RouteOptions::default(), |request: Request<Body>| async move {
        assert_eq!(request.headers()["x-other"], "7");
        assert_eq!(request.headers()["idempotency-made-up"], "8");
        // Only ours to say.
        assert!(!request.headers().contains_key("idempotency-fence"));
        let mut response = respond(500, "");
        response.headers_mut().insert("idempotency-outcome", HeaderValue::from_static("final"));
        response
    });
    for _ in 0..2 {
        let request = Request::post("/").header("x-other", "7").header("idempotency-made-up", "8");
        let request = request.header("idempotency-fence", "9").body(Body::empty());
        let answer = send(&app, request.unwrap()).await;
        assert_eq!(answer.replayed(), None);
        assert_eq!(answer.header("idempotency-outcome"), Some("final"));
    }
    assert_eq!(world.store.len(), 0);
    assert_eq!(world.events(), []);
}

/// A reconcile URL may be in a service that has the layer on all of its routes.
#[tokio::test(start_paused = true)]
async fn wire_15_a_reconcile_request_keeps_its_fence_through_the_layer() {
    let world = World::new();
    let app = world.app(RouteOptions::default(), |request: Request<Body>| async move {
        let fence = request.headers().get("idempotency-fence").map(|it| it.to_str().unwrap());
        respond(200, fence.unwrap_or("none").to_owned())
    });
    for (method, heard) in [("GET", "9"), ("PUT", "none"), ("DELETE", "none")] {
        let request = Request::builder().method(method).uri("/").header("idempotency-fence", "9");
        let answer = send(&app, request.body(Body::empty()).unwrap()).await;
        assert_eq!(&*answer.body, heard.as_bytes(), "{method}");
    }
}

#[tokio::test(start_paused = true)]
async fn wire_05_the_route_sets_the_protected_methods() {
    let world = World::new();
    let options = RouteOptions { methods: vec![Method::PUT], ..RouteOptions::default() };
    let (app, runs) = counting(&world, options);
    for (method, total) in [("PUT", 1), ("PUT", 1), ("POST", 2), ("POST", 3)] {
        let mut request = pay("k", "{}");
        *request.method_mut() = method.parse().unwrap();
        begin(&app, request).await.unwrap();
        assert_eq!(runs.count(), total);
    }
}

#[tokio::test(start_paused = true)]
async fn a_key_of_a_method_that_is_not_protected_is_counted_and_logged_once() {
    let log = Log::default();
    let subscriber = tracing_subscriber::fmt().with_writer(log.clone()).finish();
    let _guard = tracing::subscriber::set_default(subscriber);
    let world = World::new();
    let (app, _) = counting(&world, RouteOptions::default());
    let with_method = |method: &str| {
        let mut request = pay("k", "{}");
        *request.method_mut() = method.parse().unwrap();
        request
    };
    for method in ["PAY", "PUT", "DELETE", "PUT"] {
        begin(&app, with_method(method)).await.unwrap();
        assert_eq!(world.events(), [RequestEvent::KeyIgnored], "{method}");
    }
    let mut keyless = with_method("PUT");
    keyless.headers_mut().remove("idempotency-key");
    for request in [with_method("GET"), keyless] {
        begin(&app, request).await.unwrap();
        assert_eq!(world.events(), []);
    }
    let log = log.text();
    let lines: Vec<_> = log.lines().filter(|line| line.contains("is not protected")).collect();
    assert!(matches!(lines[..], [line] if line.contains("method=PUT")), "{log}");
}
