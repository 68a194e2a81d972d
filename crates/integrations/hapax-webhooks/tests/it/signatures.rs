//! Deliveries that are not valid: nothing is claimed, nothing executes.

use std::time::Duration;

use axum::http::{Method, Request};
use hapax_core::Timestamp;
use hapax_webhooks::{WebhookLayer, WebhookLayerBuilder};
use http_body_util::Full;

use crate::world::{
    NOW, OTHER_SECRET, STRIPE_SECRET, World, code, event, hex, post, send, standard_secret,
    standard_signature, stripe_delivery, stripe_signature,
};

const KEY: &[u8] = b"twenty-four bytes or more of key";

fn standard() -> WebhookLayerBuilder {
    WebhookLayer::standard("standard").secret(standard_secret(KEY))
}

#[tokio::test]
async fn a_signature_of_another_secret_or_body_is_rejected() {
    let world = World::new();
    let receiver = world.receiver(world.stripe());
    let body = event("evt_1");
    let wrong_secret = stripe_signature(OTHER_SECRET, NOW, &body);
    let wrong_body = stripe_signature(STRIPE_SECRET, NOW, &event("evt_2"));
    let wrong_time =
        stripe_signature(STRIPE_SECRET, NOW, &body).replace("t=1790000000", "t=1790000001");
    for signature in [wrong_secret, wrong_body, wrong_time] {
        let response =
            send(&receiver, post(&[("stripe-signature", &signature)], body.clone())).await;
        response.is_rejected(401, "invalid-signature");
        assert_eq!(response.header("www-authenticate"), "Signature");
    }
    world.assert_untouched();
}

#[tokio::test]
async fn a_missing_repeated_or_malformed_signature_is_rejected() {
    let world = World::new();
    let receiver = world.receiver(world.stripe());
    let body = event("evt_1");
    let signature = stripe_signature(STRIPE_SECRET, NOW, &body);
    let code = signature.split_once("v1=").unwrap().1.to_owned();
    let mut requests = vec![post(&[], body.clone())];
    requests.push(post(&[("stripe-signature", &*signature); 2], body.clone()));
    for malformed in [
        String::new(),
        "garbage".into(),
        format!("v1={code}"),
        format!("t={NOW}"),
        format!("t={NOW},v0={code}"),
        format!("t={NOW},t={NOW},v1={code}"),
        format!("t=,v1={code}"),
        format!("t=+{NOW},v1={code}"),
        format!("t=-1,v1={code}"),
        format!("t=99999999999999999999,v1={code}"),
        format!("t={NOW},v1={}", &code[1..]),
        format!("t={NOW}{}", format!(",v1={code}").repeat(33)),
    ] {
        requests.push(post(&[("stripe-signature", &malformed)], body.clone()));
    }
    for request in requests {
        send(&receiver, request).await.is_rejected(401, "invalid-signature");
    }
    world.assert_untouched();
}

#[tokio::test]
async fn each_header_of_standard_webhooks_is_required_once() {
    let world = World::new();
    let receiver = world.receiver(world.layer(standard()));
    let (time, body) = (NOW.to_string(), "{}");
    let signature = standard_signature(KEY, b"msg_1", NOW, body);
    let whole = [
        ("webhook-id", "msg_1"),
        ("webhook-timestamp", &*time),
        ("webhook-signature", &*signature),
    ];
    for at in 0..3 {
        let (status, code) =
            if at == 0 { (400, "invalid-delivery-id") } else { (401, "invalid-signature") };
        let mut missing = whole.to_vec();
        missing.remove(at);
        let mut repeated = whole.to_vec();
        repeated.push(whole[at]);
        for headers in [missing, repeated] {
            send(&receiver, post(&headers, body)).await.is_rejected(status, code);
        }
        // The names of Svix do not complete those of Standard Webhooks.
        let svix = whole[at].0.replace("webhook", "svix");
        let mut mixed = whole.to_vec();
        mixed[at].0 = &svix;
        assert!(send(&receiver, post(&mixed, body)).await.status.is_client_error());
    }
    world.assert_untouched();
    send(&receiver, post(&whole, body)).await.is_first(200, "execution 1");
}

#[tokio::test]
async fn one_valid_signature_among_others_suffices() {
    let world = World::new();
    let receiver = world.receiver(world.layer(standard()));
    let (time, body) = (NOW.to_string(), "{}");
    let valid = standard_signature(KEY, b"msg_1", NOW, body);
    let other = standard_signature(&[7; 32], b"msg_1", NOW, body);
    let several = format!("v1a,aGVsbG8= v1,not-base64 {other} {valid}");
    let headers =
        [("webhook-id", "msg_1"), ("webhook-timestamp", &*time), ("webhook-signature", &*several)];
    send(&receiver, post(&headers, body)).await.is_first(200, "execution 1");

    let receiver = world.receiver(world.stripe());
    let body = event("evt_1");
    let other = hex(&code(OTHER_SECRET.as_bytes(), &[b"x"]));
    let valid = stripe_signature(STRIPE_SECRET, NOW, &body);
    let several = valid.replace(",v1=", &format!(", v1={other},v1="));
    send(&receiver, post(&[("stripe-signature", &several)], body))
        .await
        .is_first(200, "execution 2");
}

#[tokio::test]
async fn each_of_several_secrets_is_accepted_and_no_other() {
    let world = World::new();
    let builder = WebhookLayer::stripe("stripe").secret(OTHER_SECRET).secret(STRIPE_SECRET);
    let receiver = world.receiver(world.layer(builder));
    for (number, secret) in [OTHER_SECRET, STRIPE_SECRET].into_iter().enumerate() {
        let body = event(&format!("evt_{number}"));
        let signature = stripe_signature(secret, NOW, &body);
        let response = send(&receiver, post(&[("stripe-signature", &signature)], body)).await;
        response.is_first(200, &format!("execution {}", number + 1));
    }
    let body = event("evt_3");
    let signature = stripe_signature(concat!("whsec", "_aaaaaaaaaaaaaaaa"), NOW, &body);
    let response = send(&receiver, post(&[("stripe-signature", &signature)], body)).await;
    response.is_rejected(401, "invalid-signature");
    assert_eq!((world.store.len(), world.handled().len()), (2, 2));
}

#[tokio::test]
async fn a_timestamp_outside_the_tolerance_is_rejected_in_both_directions() {
    let world = World::new();
    let receiver = world.receiver(world.stripe());
    let now = |seconds: u64, micros: u64| {
        world.clock.set(Timestamp::from_micros(seconds * 1_000_000 + micros));
    };
    for (seconds, micros) in [(NOW + 300, 1), (NOW + 301, 0), (NOW - 301, 999_999), (0, 0)] {
        now(seconds, micros);
        let response = send(&receiver, stripe_delivery(&event("evt_1"))).await;
        response.is_rejected(401, "timestamp-outside-tolerance");
    }
    world.assert_untouched();
    for (number, seconds) in [NOW + 300, NOW - 300].into_iter().enumerate() {
        now(seconds, 0);
        let response = send(&receiver, stripe_delivery(&event(&format!("evt_{number}")))).await;
        response.is_first(200, &format!("execution {}", number + 1));
    }
}

#[tokio::test]
async fn a_configured_tolerance_applies_to_standard_webhooks() {
    let world = World::new();
    let builder = standard().tolerance(Duration::from_secs(10));
    let receiver = world.receiver(world.layer(builder));
    for (time, is_accepted) in [(NOW - 11, false), (NOW + 11, false), (NOW - 10, true)] {
        let signature = standard_signature(KEY, b"msg_1", time, "{}");
        let time = time.to_string();
        let headers = [
            ("webhook-id", "msg_1"),
            ("webhook-timestamp", &*time),
            ("webhook-signature", &*signature),
        ];
        let response = send(&receiver, post(&headers, "{}")).await;
        match is_accepted {
            true => response.is_first(200, "execution 1"),
            false => response.is_rejected(401, "timestamp-outside-tolerance"),
        }
    }
}

#[tokio::test]
async fn a_signed_request_of_another_method_is_rejected() {
    let world = World::new();
    let receiver = world.receiver(world.stripe());
    let body = event("evt_1");
    let signature = stripe_signature(STRIPE_SECRET, NOW, &body);
    for method in [Method::GET, Method::PUT, Method::PATCH, Method::DELETE, Method::OPTIONS] {
        let request = Request::builder().method(method).header("stripe-signature", &signature);
        let response = send(&receiver, request.body(Full::from(body.clone())).unwrap()).await;
        response.is_rejected(405, "method-not-allowed");
        assert_eq!(response.header("allow"), "POST");
    }
    world.assert_untouched();
}
