//! Trailers: what is said in them to this layer, or in its name, goes no further.

use bytes::Bytes;
use hapax_http::Body;
use hapax_http::server::{RouteOptions, StoreOutage};
use http::{HeaderMap, HeaderName, HeaderValue, Request, Response};
use http_body::Frame;
use http_body_util::BodyExt;

use super::world::{Frames, Mood, World, pay, reexecute, respond, send};

/// A body of so many frames of three bytes, and these trailers.
fn with_trailers(frames: usize, names: &[&'static str]) -> Body {
    let mut trailers = HeaderMap::new();
    for name in names {
        trailers.append(*name, HeaderValue::from_static("7"));
    }
    let data = (0..frames).map(|_| Ok(Frame::data(Bytes::from_static(b"xyz"))));
    Body::new(Frames::new(data.chain([Ok(Frame::trailers(trailers))])))
}

const MIXED: &[&str] = &["x-sum", "idempotency-outcome", "idempotency-replayed"];

fn names(trailers: Option<&HeaderMap>) -> Vec<&str> {
    trailers.iter().flat_map(|trailers| trailers.keys()).map(HeaderName::as_str).collect()
}

#[tokio::test(start_paused = true)]
async fn wire_16_idempotency_trailers_of_a_handler_do_not_reach_the_client() {
    // Kept; too large to be kept; a stream.
    for (frames, stream) in [(2, false), (20, false), (2, true)] {
        let world = World::new();
        let options = RouteOptions { stream, max_response_body: 10, ..RouteOptions::default() };
        let app =
            world.app(options, move |_| async move { Response::new(with_trailers(frames, MIXED)) });
        let first = send(&app, pay("k", "{}")).await;
        assert_eq!((names(first.trailers.as_ref()), first.body.len()), (vec!["x-sum"], frames * 3));
        let replay = send(&app, pay("k", "{}")).await;
        if frames == 2 && !stream {
            assert_eq!(
                (replay.replayed(), names(replay.trailers.as_ref())),
                (Some("true"), vec!["x-sum"])
            );
        } else {
            assert_eq!(replay.code(), "response-not-retained");
        }
    }
}

#[tokio::test(start_paused = true)]
async fn wire_16_with_only_idempotency_trailers_the_client_gets_none() {
    let world = World::new();
    let app = world.app(RouteOptions::default(), |_| async {
        Response::new(with_trailers(1, &["idempotency-outcome"]))
    });
    for replayed in ["false", "true"] {
        let answer = send(&app, pay("k", "{}")).await;
        assert_eq!((answer.replayed(), answer.trailers.as_ref()), (Some(replayed), None));
    }
}

#[tokio::test(start_paused = true)]
async fn wire_20_idempotency_trailers_are_removed_from_unprotected_responses() {
    let world = World::new();
    let options = RouteOptions { store_outage: StoreOutage::Open, ..reexecute() };
    let app = world.app(options, |_| async { Response::new(with_trailers(2, MIXED)) });
    world.store.is(Mood::Down);
    let answer = send(&app, pay("k", "{}")).await;
    assert_eq!(answer.header("idempotency-protected"), Some("false"));
    assert_eq!(names(answer.trailers.as_ref()), ["x-sum"]);
}

/// A client's fence would be taken for ours.
#[tokio::test(start_paused = true)]
async fn wire_13_a_clients_fence_does_not_reach_the_handler() {
    let world = World::new();
    let app = world.app(RouteOptions::default(), |request: Request<Body>| async {
        let body = request.into_body().collect().await.unwrap();
        respond(201, names(body.trailers()).join(","))
    });
    let sent = ["idempotency-fence", "x-sum", "idempotency-attempt"];
    let request = || pay("k", "").map(|_| with_trailers(1, &sent));
    assert_eq!(&*send(&app, request()).await.body, b"x-sum");
    let mut keyless = request();
    keyless.headers_mut().remove("idempotency-key");
    assert_eq!(&*send(&app, keyless).await.body, b"x-sum");
}
