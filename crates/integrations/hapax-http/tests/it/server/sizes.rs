//! wire.md 19: bodies that are too large, and streams.

use std::time::Duration;

use bytes::Bytes;
use hapax_http::Body;
use hapax_http::server::{RequestEvent, RouteOptions};
use http::{HeaderValue, Request, Response};
use http_body::Frame;
use http_body_util::BodyExt;
use tokio::time::{Instant, sleep};
use tower::ServiceExt;

use super::keys::Untouchable;
use super::world::{
    App, Frames, Mood, Runs, Signal, World, app_of, begin, pay, read, reexecute, respond, send,
};
use hapax_testkit::http::frames;

fn limits(request: usize, response: usize) -> RouteOptions {
    RouteOptions {
        max_request_body: request,
        max_response_body: response,
        ..RouteOptions::default()
    }
}

#[tokio::test(start_paused = true)]
async fn wire_19_a_request_over_its_limit_claims_nothing() {
    let world = World::new();
    let runs = Runs::default();
    let count = runs.clone();
    let app = world.app(limits(10, 10), move |_| {
        count.next();
        async { respond(201, "") }
    });
    // With a length it is refused unread, without one as soon as it shows.
    let answer = send(&app, pay("k", "").map(|_| Body::new(Untouchable))).await;
    assert_eq!((answer.status.as_u16(), &*answer.code()), (413, "body-too-large"));
    let frames = Frames::of(1000, 4);
    let polled = frames.read.clone();
    let answer = send(&app, pay("k", "").map(|_| Body::new(frames))).await;
    assert_eq!((answer.code(), polled.count()), ("body-too-large".into(), 3));
    assert_eq!((runs.count(), world.store.len()), (0, 0));
    let exact = pay("k", "").map(|_| Body::new(Frames::of(5, 2)));
    assert_eq!(send(&app, exact).await.status, 201);
}

#[tokio::test(start_paused = true)]
async fn wire_19_a_request_that_arrives_too_slowly_claims_nothing() {
    let world = World::new();
    let app = world.app(RouteOptions::default(), |_| async { respond(201, "") });
    let slow = std::io::Error::from(std::io::ErrorKind::TimedOut);
    let frames = [Ok(Frame::data(Bytes::from_static(b"{"))), Err(slow)];
    let answer = send(&app, pay("k", "").map(|_| Body::new(Frames::new(frames)))).await;
    assert_eq!((answer.status.as_u16(), &*answer.code()), (408, "request-timeout"));
    assert_eq!(world.store.len(), 0);
    assert_eq!(send(&app, pay("k", "{}")).await.status, 201);
}

#[tokio::test(start_paused = true)]
async fn wire_19_a_request_that_breaks_off_claims_nothing() {
    let world = World::new();
    let app = world.app(RouteOptions::default(), |_| async { respond(201, "") });
    let frames = [Ok(Frame::data(Bytes::from_static(b"{"))), Err(std::io::Error::other("cut"))];
    let answer = send(&app, pay("k", "").map(|_| Body::new(Frames::new(frames)))).await;
    assert_eq!((answer.status.as_u16(), &*answer.code()), (400, "malformed-request"));
    assert_eq!(world.store.len(), 0);
}

#[tokio::test(start_paused = true)]
async fn wire_23_limits_are_for_requests_with_a_key() {
    let world = World::new();
    let app = world.app(limits(10, 10), |request: Request<Body>| async {
        let body = request.into_body().collect().await.unwrap().to_bytes();
        respond(201, body)
    });
    let mut request = pay("k", "").map(|_| Body::new(Frames::of(100, 10)));
    request.headers_mut().remove("idempotency-key");
    assert_eq!(send(&app, request).await.body.len(), 1000);
}

async fn assert_not_retained(app: &impl App, status: u16) {
    let retry = send(app, pay("k", "{}")).await;
    assert_eq!((retry.status.as_u16(), &*retry.code()), (409, "response-not-retained"));
    assert_eq!(retry.problem()["original_status"], status);
}

#[tokio::test(start_paused = true)]
async fn wire_19_a_response_over_its_limit_is_delivered_once() {
    let world = World::new();
    let runs = Runs::default();
    let count = runs.clone();
    let app = world.app(limits(10, 10), move |_| {
        count.next();
        async {
            let mut response = Response::new(Body::new(Frames::of(50, 3)));
            *response.status_mut() = http::StatusCode::CREATED;
            response
        }
    });
    let first = send(&app, pay("k", "{}")).await;
    assert_eq!((first.status.as_u16(), first.replayed()), (201, Some("false")));
    assert_eq!(&first.body[..], &[b'x'; 150][..]);
    assert_not_retained(&app, 201).await;
    assert_eq!(runs.count(), 1);
    assert!(world.events().contains(&RequestEvent::NotRetained));
}

#[tokio::test(start_paused = true)]
async fn wire_19_a_too_large_response_is_final_before_the_client_gets_any_of_it() {
    let world = World::new();
    let read_so_far = Runs::default();
    let count = read_so_far.clone();
    let app = world.app(limits(10, 10), move |_| {
        let mut body = Frames::of(50, 3);
        body.read = count.clone();
        async { Response::new(Body::new(body)) }
    });
    let response = app.clone().oneshot(pay("k", "{}")).await.unwrap();
    // As soon as it shows: four frames of three bytes.
    assert_eq!(read_so_far.count(), 4);
    assert_not_retained(&app, 200).await;
    assert_eq!(read(response).await.body.len(), 150);
    assert_not_retained(&app, 200).await;
}

#[tokio::test(start_paused = true)]
async fn wire_19_a_response_at_its_limit_is_stored() {
    let world = World::new();
    let app = world.app(limits(10, 10), |_| async { Response::new(Body::new(Frames::of(5, 2))) });
    send(&app, pay("k", "{}")).await;
    let replay = send(&app, pay("k", "{}")).await;
    assert_eq!((replay.replayed(), &*replay.body), (Some("true"), &[b'x'; 10][..]));
}

#[tokio::test(start_paused = true)]
async fn wire_19_large_errors_are_not_made_final() {
    for (status, code) in [(503, ""), (500, "")] {
        let world = World::new();
        let options = RouteOptions { policy: reexecute().policy, ..limits(10, 10) };
        let runs = Runs::default();
        let count = runs.clone();
        let app = world.app(options, move |_| {
            count.next();
            async move { respond(status, vec![b'x'; 100]) }
        });
        for run in 1..=2 {
            let answer = send(&app, pay("k", "{}")).await;
            assert_eq!((answer.status.as_u16(), answer.body.len()), (status, 100));
            assert_eq!((&*answer.code(), runs.count()), (code, run));
        }
    }
}

/// A stream that goes on until it is told to end.
fn endless(go: Signal) -> Body {
    let (sender, body) = frames(1);
    tokio::spawn(async move {
        sender.data(Bytes::from_static(b"data: 1\n\n")).await;
        go.wait().await;
        sender.data(Bytes::from_static(b"data: 2\n\n")).await;
    });
    Body::new(body)
}

#[tokio::test(start_paused = true)]
async fn wire_19_streams_are_final_at_the_headers() {
    for (kind, stream) in [("Text/Event-Stream; charset=utf-8", false), ("text/plain", true)] {
        let world = World::new();
        let go = Signal::new();
        let handler = go.clone();
        let options = RouteOptions { stream, ..RouteOptions::default() };
        let app = world.app(options, move |_| {
            let mut response = Response::new(endless(handler.clone()));
            response.headers_mut().insert("content-type", HeaderValue::from_static(kind));
            async { response }
        });
        let response = app.clone().oneshot(pay("k", "{}")).await.unwrap();
        assert_not_retained(&app, 200).await;
        go.give();
        assert_eq!(&*read(response).await.body, b"data: 1\n\ndata: 2\n\n");
        assert_not_retained(&app, 200).await;
    }
}

#[tokio::test(start_paused = true)]
async fn wire_19_nothing_is_streamed_while_the_store_has_not_made_it_final() {
    let world = World::new();
    let runs = Runs::default();
    let count = runs.clone();
    let store = std::sync::Arc::clone(&world.store);
    let app = world.app(limits(10, 10), move |_| {
        count.next();
        store.is(Mood::Slow);
        async { Response::new(Body::new(Frames::of(50, 3))) }
    });
    let client = begin(&app, pay("k", "{}"));
    runs.reach(1).await;
    sleep(Duration::from_secs(1)).await;
    assert!(!client.is_finished());
    world.store.is(Mood::Well);
    assert_eq!(client.await.unwrap().body.len(), 150);
}

#[tokio::test(start_paused = true)]
async fn memory_for_bodies_is_bounded() {
    let world = World::new();
    let (inside, go) = (Runs::default(), Signal::new());
    let handler = (inside.clone(), go.clone());
    // A mebibyte and a half for requests: three at a time of half a mebibyte each.
    let layer = world.layer(limits(512 << 10, 512 << 10)).body_memory(4 << 20);
    let app = app_of(&layer, move |request: Request<Body>| {
        let (inside, go) = handler.clone();
        async move {
            inside.next();
            go.wait().await;
            drop(request);
            respond(201, vec![b'x'; 10 << 10])
        }
    });
    let full = || Body::from(Bytes::from(vec![b' '; 512 << 10]));
    let clients: Vec<_> =
        (0..6).map(|at| begin(&app, pay(&format!("k{at}"), "").map(|_| full()))).collect();
    sleep(Duration::from_secs(1)).await;
    assert_eq!(inside.count(), 3);
    // A small one needs no more than it says.
    let small = begin(&app, pay("small", ""));
    go.give();
    for client in clients {
        assert_eq!(client.await.unwrap().body.len(), 10 << 10);
    }
    assert_eq!(small.await.unwrap().status, 201);
    assert_eq!(inside.count(), 7);
}

#[tokio::test(start_paused = true)]
async fn a_wait_for_body_memory_times_out() {
    let world = World::new();
    let go = Signal::new();
    let gate = go.clone();
    let layer = world.layer(limits(512 << 10, 512 << 10)).body_memory(4 << 20);
    let app = app_of(&layer, move |request: Request<Body>| {
        let go = gate.clone();
        async move {
            go.wait().await;
            drop(request);
            respond(201, "")
        }
    });
    let full = |key: &str| pay(key, "").map(|_| Body::from(Bytes::from(vec![b' '; 512 << 10])));
    let hanging: Vec<_> = ["a", "b", "c"].map(|key| begin(&app, full(key))).into();
    sleep(Duration::from_secs(1)).await;
    let began = Instant::now();
    let late = send(&app, full("late")).await;
    assert_eq!((late.status.as_u16(), &*late.code()), (503, "overloaded"));
    assert_eq!(late.header("retry-after"), Some("1"));
    assert_eq!(began.elapsed().as_secs(), 30);
    go.give();
    for client in hanging {
        assert_eq!(client.await.unwrap().status, 201);
    }
    assert_eq!(send(&app, full("late")).await.status, 201);
}

#[tokio::test(start_paused = true)]
async fn unused_body_memory_is_returned() {
    let world = World::new();
    let (inside, go) = (Runs::default(), Signal::new());
    let handler = (inside.clone(), go.clone());
    let layer = world.layer(limits(512 << 10, 512 << 10)).body_memory(4 << 20);
    let app = app_of(&layer, move |request: Request<Body>| {
        let (inside, go) = handler.clone();
        async move {
            inside.next();
            go.wait().await;
            drop(request);
            respond(201, "")
        }
    });
    // Of unknown length: each takes most of the pool until it turns out to be small.
    let clients: Vec<_> = (0..10)
        .map(|at| pay(&format!("k{at}"), "").map(|_| Body::new(Frames::of(3, 10 << 10))))
        .map(|request| begin(&app, request))
        .collect();
    inside.reach(10).await;
    go.give();
    for client in clients {
        assert_eq!(client.await.unwrap().status, 201);
    }
}

/// What a client that does not read takes from the others: room for large answers, nothing else.
#[tokio::test(start_paused = true)]
async fn recording_does_not_wait_for_clients() {
    let world = World::new();
    let runs = Runs::default();
    let count = runs.clone();
    // Room for one answer of 400 KiB on its way to a client.
    let layer = world.layer(limits(512 << 10, 512 << 10)).body_memory(2 << 20);
    let app = app_of(&layer, move |request: Request<Body>| {
        count.next();
        let size = match request.uri().path() {
            "/large" => 400 << 10,
            "/streamed" => 600 << 10,
            _ => 16 << 10,
        };
        async move { Response::new(Body::new(Frames::of(size >> 10, 1 << 10))) }
    });
    let to = |path: &'static str, key: &str| {
        let mut request = pay(key, "{}");
        *request.uri_mut() = http::Uri::from_static(path);
        request
    };
    let began = Instant::now();
    let unread = app.clone().oneshot(to("/large", "slow")).await.unwrap();
    // Its own answer, then the replay.
    for code in ["outcome-pending", "overloaded"] {
        let victim = send(&app, to("/large", "victim")).await;
        assert_eq!((victim.status.as_u16(), &*victim.code()), (503, code));
        assert_eq!((victim.header("retry-after"), runs.count()), (Some("1"), 2));
    }
    let streamed = send(&app, to("/streamed", "streamed")).await;
    assert_eq!((streamed.status.as_u16(), &*streamed.code()), (409, "response-not-retained"));
    assert_eq!(streamed.problem()["original_status"], 200);
    // Small answers need no room.
    assert_eq!(send(&app, to("/small", "small")).await.body.len(), 16 << 10);
    assert_eq!(began.elapsed(), Duration::ZERO);

    // All of it was recorded.
    assert_eq!(read(unread).await.body.len(), 400 << 10);
    let replay = send(&app, to("/large", "victim")).await;
    assert_eq!((replay.replayed(), replay.body.len()), (Some("true"), 400 << 10));
    assert_eq!(send(&app, to("/streamed", "streamed")).await.code(), "response-not-retained");
    assert_eq!(runs.count(), 4);
}
