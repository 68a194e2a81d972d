//! The layer around a bare tower service.

use std::io;

use axum::body::Bytes;
use axum::http::{HeaderMap, HeaderValue, Request, Response};
use futures_util::stream;
use hapax_http::Body;
use hapax_webhooks::WebhookRejection;
use http_body::Frame;
use http_body_util::{BodyExt, Full, StreamBody};
use tower::limit::ConcurrencyLimitLayer;
use tower::{Layer, Service, ServiceExt, service_fn};

use crate::world::{NOW, STRIPE_SECRET, World, event, post, stripe_delivery, stripe_signature};

#[tokio::test]
async fn trailers_are_passed_on() {
    let world = World::new();
    let service = world.stripe().layer(service_fn(|request: Request<Body>| async move {
        let body = request.into_body().collect().await.map_err(io::Error::other)?;
        let trailers = body.trailers().cloned().unwrap_or_default();
        Ok::<_, io::Error>(Response::new(Full::<Bytes>::from(format!("{trailers:?}"))))
    }));
    let body = event("evt_1");
    let signature = stripe_signature(STRIPE_SECRET, NOW, &body);
    let mut trailers = HeaderMap::new();
    trailers.insert("x-trailer", HeaderValue::from_static("1"));
    let frames = [Ok(Frame::data(Bytes::from(body))), Ok(Frame::trailers(trailers))];
    let body = StreamBody::new(stream::iter(frames.into_iter().map(|it: Result<_, io::Error>| it)));
    let request = Request::post("/").header("stripe-signature", &signature).body(body).unwrap();
    let response = service.oneshot(request).await.unwrap().into_body().collect().await.unwrap();
    assert_eq!(response.to_bytes(), r#"{"x-trailer": "1"}"#);
}

#[tokio::test]
async fn an_error_of_the_inner_service_is_passed_on_as_it_is() {
    let world = World::new();
    let service = world.stripe().layer(service_fn(|_: Request<Body>| async {
        Err::<Response<Full<Bytes>>, _>(io::Error::from(io::ErrorKind::AddrInUse))
    }));
    let error = service.oneshot(stripe_delivery(&event("evt_1"))).await.unwrap_err();
    assert_eq!(error.kind(), io::ErrorKind::AddrInUse);
}

#[tokio::test]
async fn a_rejection_is_an_extension_of_its_response() {
    let world = World::new();
    let service = world.stripe().layer(service_fn(|_: Request<Body>| async {
        Ok::<_, io::Error>(Response::new(Full::<Bytes>::default()))
    }));
    let rejected = service.clone().oneshot(post(&[], "{}")).await.unwrap();
    let reason = rejected.extensions().get::<WebhookRejection>().copied();
    assert_eq!(reason, Some(WebhookRejection::InvalidSignature));
    assert_eq!(
        (reason.unwrap().as_str(), rejected.status()),
        ("invalid-signature", reason.unwrap().status())
    );
    let accepted = service.oneshot(stripe_delivery(&event("evt_1"))).await.unwrap();
    assert!(accepted.extensions().get::<WebhookRejection>().is_none());
}

/// A service that is called without having been ready, such as a clone of it, panics.
#[tokio::test]
async fn the_service_that_was_ready_is_called() {
    let world = World::new();
    let inner = ConcurrencyLimitLayer::new(1).layer(service_fn(|_: Request<Body>| async {
        Ok::<_, io::Error>(Response::new(Full::<Bytes>::default()))
    }));
    let mut service = world.stripe().layer(inner);
    for id in ["evt_1", "evt_2"] {
        let ready = ServiceExt::<Request<Full<Bytes>>>::ready(&mut service).await.unwrap();
        let called = ready.call(stripe_delivery(&event(id)));
        assert_eq!(called.await.unwrap().status(), 200);
    }
}
