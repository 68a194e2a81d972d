//! Bodies: limits, ends, and every byte.

use std::convert::Infallible;
use std::io;
use std::pin::Pin;
use std::task::{Context, Poll};

use axum::body::Bytes;
use axum::http::{HeaderMap, HeaderValue, Request};
use futures_util::stream;
use hapax_webhooks::WebhookLayer;
use http_body::{Frame, SizeHint};
use http_body_util::{BodyExt, Channel, StreamBody};

use crate::world::{
    NOW, STRIPE_SECRET, World, event, post, send, stripe_delivery, stripe_signature,
};

/// Returns a delivery whose body has these frames.
fn in_frames(
    signature: &str,
    frames: Vec<Result<Frame<Bytes>, io::Error>>,
) -> Request<impl http_body::Body<Data = Bytes, Error = io::Error> + Send + 'static> {
    let request = Request::post("/hooks").header("stripe-signature", signature);
    request.body(StreamBody::new(stream::iter(frames))).unwrap()
}

#[tokio::test]
async fn a_body_arrives_byte_for_byte() {
    let world = World::new();
    let receiver = world.receiver(world.stripe());
    let body = "\r\n{ \"id\":\t\"evt_1\" ,\"a\":1.10,\"a\":\"\\u00e9\u{e9}\"}\n\n";
    send(&receiver, stripe_delivery(body)).await.is_first(200, "execution 1");
    assert_eq!(world.handled()[0].body, body.as_bytes());

    let github = world.layer(WebhookLayer::github("github").secret("It's a Secret to Everybody"));
    let receiver = world.receiver(github);
    let every: Vec<u8> = (0..=255).cycle().take(100_000).collect();
    let code = crate::world::code(b"It's a Secret to Everybody", &[&every]);
    let signature = format!("sha256={}", crate::world::hex(&code));
    let headers = [("x-hub-signature-256", &*signature), ("x-github-delivery", "1")];
    send(&receiver, post(&headers, every.clone())).await.is_first(200, "execution 2");
    assert_eq!(world.handled()[1].body, every);
}

#[tokio::test]
async fn a_body_in_many_frames_arrives_whole() {
    let world = World::new();
    let receiver = world.receiver(world.stripe());
    let body = event("evt_1");
    let signature = stripe_signature(STRIPE_SECRET, NOW, &body);
    let bytes = body.bytes().map(|byte| Ok(Frame::data(Bytes::from(vec![byte]))));
    let mut trailers = HeaderMap::new();
    trailers.insert("x-trailer", HeaderValue::from_static("1"));
    let frames = bytes.chain([Ok(Frame::data(Bytes::new())), Ok(Frame::trailers(trailers))]);
    let request = in_frames(&signature, frames.collect());
    send(&receiver, request).await.is_first(200, "execution 1");
    assert_eq!(world.handled()[0].body, body);
}

#[tokio::test]
async fn a_body_over_the_limit_is_rejected() {
    let world = World::new();
    let body = event("evt_1");
    let signature = stripe_signature(STRIPE_SECRET, NOW, &body);
    // Without the HTTP layer, which has the same limit.
    let limited = |limit| {
        let builder = WebhookLayer::stripe("stripe").secret(STRIPE_SECRET).body_limit(limit);
        world.bare().layer(world.layer(builder))
    };
    let receiver = limited(body.len() - 1);
    send(&receiver, stripe_delivery(&body)).await.is_rejected(413, "body-too-large");
    // Without a declared length.
    let halves = body.as_bytes().chunks(20).map(|half| Ok(Frame::data(half.to_vec().into())));
    let request = in_frames(&signature, halves.collect());
    send(&receiver, request).await.is_rejected(413, "body-too-large");
    // The sender keeps the rest back: to read it would last for ever.
    let (mut sender, channel) = Channel::<Bytes, Infallible>::new(1);
    sender.send_data(Bytes::from(body.clone())).await.unwrap();
    let request = Request::post("/hooks").header("stripe-signature", &signature);
    let response = send(&receiver, request.body(channel).unwrap()).await;
    response.is_rejected(413, "body-too-large");
    drop(sender);
    world.assert_untouched();
    assert_eq!(send(&limited(body.len()), stripe_delivery(&body)).await.status, 200);
}

/// A body of a declared length, of which nothing ever arrives.
struct Declared(u64);

impl http_body::Body for Declared {
    type Data = Bytes;
    type Error = Infallible;

    fn poll_frame(
        self: Pin<&mut Self>,
        _: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Infallible>>> {
        Poll::Pending
    }

    fn size_hint(&self) -> SizeHint {
        SizeHint::with_exact(self.0)
    }
}

#[tokio::test]
async fn a_declared_length_over_the_limit_is_rejected_before_the_body_is_read() {
    let world = World::new();
    let receiver = world.bare().layer(world.stripe());
    for length in [(1 << 20) + 1, u64::MAX] {
        let signature = stripe_signature(STRIPE_SECRET, NOW, "");
        let request = Request::post("/hooks").header("stripe-signature", &signature);
        let response = send(&receiver, request.body(Declared(length)).unwrap()).await;
        response.is_rejected(413, "body-too-large");
    }
    world.assert_untouched();
}

#[tokio::test]
async fn a_mebibyte_is_accepted_by_default_and_no_more() {
    let world = World::new();
    let receiver = world.receiver(world.stripe());
    for (size, status) in [((1 << 20) + 1, 413), (1 << 20, 200)] {
        let empty = r#"{"id": "evt_1", "text": ""}"#;
        let body = empty.replace(r#""""#, &format!(r#""{}""#, "x".repeat(size - empty.len())));
        assert_eq!(send(&receiver, stripe_delivery(&body)).await.status, status);
    }
}

#[tokio::test]
async fn an_invalid_head_is_rejected_before_the_body_is_read() {
    let world = World::new();
    let receiver = world.receiver(world.stripe());
    for signature in [None, Some(format!("t={},v1={}", NOW - 1000, "0".repeat(64)))] {
        // The sender keeps this body open: to read it would last for ever.
        let (sender, body) = Channel::<Bytes, Infallible>::new(1);
        let mut request = Request::post("/hooks").body(body).unwrap();
        if let Some(signature) = signature {
            request.headers_mut().insert("stripe-signature", signature.parse().unwrap());
        }
        assert_eq!(send(&receiver, request).await.status, 401);
        drop(sender);
    }
    world.assert_untouched();
}

#[tokio::test]
async fn a_body_that_breaks_off_is_rejected() {
    let world = World::new();
    let receiver = world.receiver(world.stripe());
    let body = event("evt_1");
    let signature = stripe_signature(STRIPE_SECRET, NOW, &body);
    for (kind, status, code) in [
        (io::ErrorKind::ConnectionReset, 400, "malformed-request"),
        (io::ErrorKind::TimedOut, 408, "request-timeout"),
    ] {
        // Even after its last byte: the end is missing.
        let whole = Ok(Frame::data(Bytes::from(body.clone())));
        let request = in_frames(&signature, vec![whole, Err(kind.into())]);
        send(&receiver, request).await.is_rejected(status, code);
    }
    world.assert_untouched();
}

#[tokio::test]
async fn a_body_that_is_shorter_than_declared_is_rejected() {
    let world = World::new();
    // Without the HTTP layer, which checks it too.
    let receiver = world.bare().layer(world.stripe());
    let body = event("evt_1");
    let signature = stripe_signature(STRIPE_SECRET, NOW, &body);
    let mut request = post(&[("stripe-signature", &signature)], body.clone());
    request.headers_mut().insert("content-length", (body.len() + 1).into());
    send(&receiver, request).await.is_rejected(400, "malformed-request");
    world.assert_untouched();
}

#[tokio::test]
async fn a_delivery_that_is_dropped_while_its_body_is_read_leaves_nothing() {
    let world = World::new();
    let receiver = world.receiver(world.stripe());
    let body = event("evt_1");
    let signature = stripe_signature(STRIPE_SECRET, NOW, &body);
    let (mut sender, channel) = Channel::<Bytes, Infallible>::new(1);
    let request = Request::post("/hooks").header("stripe-signature", &signature);
    let request = request.body(channel.boxed_unsync()).unwrap();
    let sending = tokio::spawn(async move { send(&receiver, request).await });
    sender.send_data(Bytes::from(body.clone())).await.unwrap();
    sender.send_data(Bytes::new()).await.unwrap();
    sending.abort();
    assert!(sending.await.unwrap_err().is_cancelled());
    world.assert_untouched();
}
