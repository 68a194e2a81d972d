//! Keys and sources that a sender names itself.

use axum::http::{HeaderValue, Request};
use hapax_http::server::{IdempotencyLayer, MissingScope, RoutePolicy, ScopeSource};
use hapax_webhooks::{WEBHOOK_SOURCE, WebhookLayer};
use http_body_util::Full;

use crate::world::{
    NOW, OTHER_SECRET, STRIPE_SECRET, World, event, post, send, stripe_delivery, stripe_signature,
};

fn with<B>(mut request: Request<B>, headers: &[(&'static str, &str)]) -> Request<B> {
    for (name, value) in headers {
        request.headers_mut().append(*name, HeaderValue::from_str(value).unwrap());
    }
    request
}

#[tokio::test]
async fn a_key_of_the_sender_is_replaced() {
    let world = World::new();
    let receiver = world.receiver(world.stripe());
    for keys in [&["\"mine\""][..], &["other", "third"], &[""], &["a, b"]] {
        let keys: Vec<_> = keys.iter().map(|key| ("idempotency-key", *key)).collect();
        let request = with(stripe_delivery(&event("evt_1")), &keys);
        assert_eq!(send(&receiver, request).await.text(), "execution 1");
    }
    let lines: Vec<_> =
        world.handled()[0].headers.get_all("idempotency-key").iter().cloned().collect();
    assert_eq!(lines, ["\"evt_1\""]);
    // The key of the first request is unused: another delivery gets no response of it.
    send(&receiver, stripe_delivery(&event("mine"))).await.is_first(200, "execution 2");
}

#[tokio::test]
async fn a_source_of_the_sender_is_replaced() {
    let world = World::new();
    let receiver = world.receiver(world.stripe());
    for source in ["github", "stripe", ""] {
        let headers = [("webhook-source", source), ("webhook-source", "second")];
        let request = with(stripe_delivery(&event("evt_1")), &headers);
        assert_eq!(send(&receiver, request).await.text(), "execution 1");
    }
    let [handled] = &world.handled()[..] else { panic!("{:?}", world.handled()) };
    let lines: Vec<_> = handled.headers.get_all(WEBHOOK_SOURCE).iter().cloned().collect();
    assert_eq!(lines, ["stripe"]);
    assert_eq!(handled.source, "stripe");
}

#[tokio::test]
async fn other_spellings_of_key_and_source_are_removed() {
    let world = World::new();
    let receiver = world.receiver(world.stripe());
    let headers = [("idempotency_key", "mine"), ("webhook_source", "github")];
    let request = with(stripe_delivery(&event("evt_1")), &headers);
    send(&receiver, request).await.is_first(200, "execution 1");
    let headers = &world.handled()[0].headers;
    assert!(!headers.contains_key("idempotency_key") && !headers.contains_key("webhook_source"));
}

#[tokio::test]
async fn a_connection_header_that_names_the_key_is_rejected() {
    let world = World::new();
    let receiver = world.receiver(world.stripe());
    let request = with(stripe_delivery(&event("evt_1")), &[("connection", "idempotency-key")]);
    send(&receiver, request).await.is_rejected(400, "malformed-request");
    world.assert_untouched();
}

#[tokio::test]
async fn equal_ids_of_two_sources_have_two_records() {
    let world = World::new();
    let first = world.receiver(world.stripe());
    let builder = WebhookLayer::stripe("stripe-test").secret(OTHER_SECRET);
    let second = world.receiver(world.layer(builder));
    let body = event("evt_1");
    send(&first, stripe_delivery(&body)).await.is_first(200, "execution 1");
    let signature = stripe_signature(OTHER_SECRET, NOW, &body);
    let of_second = || post(&[("stripe-signature", &signature)], body.clone());
    send(&second, of_second()).await.is_first(200, "execution 2");
    send(&first, stripe_delivery(&body)).await.is_replay(200, "execution 1");
    send(&second, of_second()).await.is_replay(200, "execution 2");
    // A source does not choose another one by its header.
    let request = with(of_second(), &[("webhook-source", "stripe")]);
    send(&second, request).await.is_replay(200, "execution 2");
    assert_eq!(world.store.len(), 2);
}

#[tokio::test]
async fn without_the_webhook_layer_nothing_executes() {
    let world = World::new();
    let options = world.stripe().route_options();
    let receiver = world.bare().layer(world.idempotency(options));
    let headers = [("idempotency-key", "\"evt_1\""), ("webhook-source", "stripe")];
    let request = with(stripe_delivery(&event("evt_1")), &headers);
    send(&receiver, request).await.is_rejected(400, "missing-scope");
    send(&receiver, stripe_delivery(&event("evt_1"))).await.is_rejected(400, "missing-key");
    world.assert_untouched();
}

#[tokio::test]
async fn with_the_layers_in_the_wrong_order_nothing_executes() {
    let world = World::new();
    let webhooks = world.stripe();
    let idempotency = world.idempotency(webhooks.route_options());
    let receiver = world.bare().layer(webhooks).layer(idempotency);
    send(&receiver, stripe_delivery(&event("evt_1"))).await.is_rejected(400, "missing-key");
    let request = with(stripe_delivery(&event("evt_1")), &[("idempotency-key", "\"evt_1\"")]);
    send(&receiver, request).await.is_rejected(400, "missing-scope");
    world.assert_untouched();
}

#[tokio::test]
async fn the_source_header_forms_the_same_scope_as_the_extension() {
    let world = World::new();
    send(&world.receiver(world.stripe()), stripe_delivery(&event("evt_1"))).await;
    let webhooks = world.stripe();
    let scope = ScopeSource::headers([WEBHOOK_SOURCE], MissingScope::Reject);
    let policy = RoutePolicy::new(scope, webhooks.route_options()).unwrap();
    let idempotency = IdempotencyLayer::new(world.engine.clone(), policy);
    let receiver = world.bare().layer(idempotency).layer(webhooks);
    let request = with(stripe_delivery(&event("evt_1")), &[("webhook-source", "github")]);
    send(&receiver, request).await.is_replay(200, "execution 1");
    let signature = stripe_signature(STRIPE_SECRET, NOW, "{}");
    let request = Request::post("/").header("stripe-signature", signature);
    let response = send(&receiver, request.body(Full::from("{}")).unwrap()).await;
    response.is_rejected(400, "invalid-delivery-id");
}
