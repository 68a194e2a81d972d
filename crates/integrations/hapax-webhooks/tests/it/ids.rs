//! Ids of deliveries as keys.

use axum::http::{HeaderName, HeaderValue, Request};
use hapax_core::Key;
use hapax_webhooks::{DeliveryIdLocation, HmacScheme, SignatureEncoding, WebhookLayer};
use http_body_util::Full;
use proptest::prelude::{ProptestConfig, any, proptest};
use tower::ServiceExt;

use crate::world::{
    NOW, World, code, hex, post, send, standard_secret, standard_signature, stripe_delivery,
};

const KEY: &[u8] = b"twenty-four bytes or more of key";
const GITHUB_SECRET: &str = "It's a Secret to Everybody";

/// Returns a signed delivery of GitHub with this id.
fn github(id: &[u8]) -> Request<Full<axum::body::Bytes>> {
    let signature = format!("sha256={}", hex(&code(GITHUB_SECRET.as_bytes(), &[b"{}"])));
    let mut request = post(&[("x-hub-signature-256", &signature)], "{}");
    request.headers_mut().insert("x-github-delivery", HeaderValue::from_bytes(id).unwrap());
    request
}

#[tokio::test]
async fn an_id_that_cannot_be_a_key_is_rejected() {
    let world = World::new();
    let builder = WebhookLayer::github("github").secret(GITHUB_SECRET);
    let receiver = world.receiver(world.layer(builder));
    let long = [b'x'; 256];
    for id in [&b""[..], b" ", b"   ", "é".as_bytes(), b"\xff", b"a\tb", &long] {
        send(&receiver, github(id)).await.is_rejected(400, "invalid-delivery-id");
    }
    let mut missing = github(b"1");
    missing.headers_mut().remove("x-github-delivery");
    send(&receiver, missing).await.is_rejected(400, "invalid-delivery-id");
    let mut repeated = github(b"1");
    repeated.headers_mut().append("x-github-delivery", HeaderValue::from_static("1"));
    send(&receiver, repeated).await.is_rejected(400, "invalid-delivery-id");
    world.assert_untouched();
}

#[tokio::test]
async fn an_id_with_unusual_characters_is_a_key_of_its_own() {
    let world = World::new();
    let builder = WebhookLayer::github("github").secret(GITHUB_SECRET);
    let receiver = world.receiver(world.layer(builder));
    let long = [b'x'; 255];
    let ids =
        [&b"a"[..], b"a ", b"\"a\"", b"a;b=1", b"a, b", b"a\\", b"\\\"", b"?1", b":YQ==:", &long];
    for (number, id) in ids.into_iter().enumerate() {
        let body = format!("execution {}", number + 1);
        send(&receiver, github(id)).await.is_first(200, &body);
        send(&receiver, github(id)).await.is_replay(200, &body);
        assert_eq!(world.handled()[number].key.as_bytes(), id);
    }
}

#[tokio::test]
async fn an_empty_id_that_is_signed_is_rejected() {
    let world = World::new();
    let builder = WebhookLayer::standard("standard").secret(standard_secret(KEY));
    let receiver = world.receiver(world.layer(builder));
    for id in [&b""[..], "é".as_bytes(), b" "] {
        let signature = standard_signature(KEY, id, NOW, "{}");
        let time = NOW.to_string();
        let headers = [("webhook-timestamp", &*time), ("webhook-signature", &*signature)];
        let mut request = post(&headers, "{}");
        request.headers_mut().insert("webhook-id", HeaderValue::from_bytes(id).unwrap());
        send(&receiver, request).await.is_rejected(400, "invalid-delivery-id");
    }
    world.assert_untouched();
}

/// A signed delivery `msg_1` at one time, with a body that begins with digits and a full stop, has
/// the signed content of a delivery `msg_1.TIME` too.
#[tokio::test]
async fn content_is_not_accepted_under_a_second_id() {
    let world = World::new();
    let builder = WebhookLayer::standard("standard").secret(standard_secret(KEY));
    let receiver = world.receiver(world.layer(builder));
    let time = NOW.to_string();
    let body = format!("{time}.text");
    let signature = standard_signature(KEY, b"msg_1", NOW, &body);
    let deliver = |id: &str, body: &str| {
        let headers =
            [("webhook-id", id), ("webhook-timestamp", &*time), ("webhook-signature", &*signature)];
        post(&headers, body.to_owned())
    };
    send(&receiver, deliver("msg_1", &body)).await.is_first(200, "execution 1");
    let second = send(&receiver, deliver(&format!("msg_1.{time}"), "text")).await;
    second.is_rejected(400, "invalid-delivery-id");
    assert_eq!((world.store.len(), world.handled().len()), (1, 1));
}

#[tokio::test]
async fn a_json_body_without_a_usable_id_is_rejected() {
    let world = World::new();
    let receiver = world.receiver(world.stripe());
    for body in [
        "",
        "no JSON",
        "{}",
        "[]",
        "\"evt_1\"",
        r#"{"id": null}"#,
        r#"{"id": ""}"#,
        r#"{"id": "  "}"#,
        r#"{"id": true}"#,
        r#"{"id": 1.5}"#,
        r#"{"id": 123456789012345678901234567890}"#,
        r#"{"id": ["evt_1"]}"#,
        r#"{"id": {"id": "evt_1"}}"#,
        r#"{"id": "é"}"#,
        "{\"id\": \"a\\u0000\"}",
        r#"{"id": "evt_1"} trailing"#,
        &format!(r#"{{"id": "{}"}}"#, "x".repeat(256)),
        &format!("{}1{}", "[".repeat(10_000), "]".repeat(10_000)),
    ] {
        let response = send(&receiver, stripe_delivery(body)).await;
        response.is_rejected(400, "invalid-delivery-id");
    }
    world.assert_untouched();
}

#[tokio::test]
async fn every_one_of_several_pointers_must_have_a_value() {
    let world = World::new();
    let id = DeliveryIdLocation::json(["/b", "/a"]).unwrap();
    let name = HeaderName::from_static("x-signature");
    let scheme = HmacScheme::new(name, SignatureEncoding::Hex, id);
    let secret = "a text of 16 or more bytes";
    let builder = WebhookLayer::hmac("other", scheme).secret(secret);
    let receiver = world.receiver(world.layer(builder));
    let signed = |body: &str| {
        let signature = hex(&code(secret.as_bytes(), &[body.as_bytes()]));
        post(&[("x-signature", &signature)], body.to_owned())
    };
    for body in [r#"{"a": "1"}"#, r#"{"b": "1"}"#, r#"{"a": "1", "b": ""}"#] {
        send(&receiver, signed(body)).await.is_rejected(400, "invalid-delivery-id");
    }
    world.assert_untouched();
    // Parts do not run into each other.
    for (number, body) in
        [r#"{"a": "1", "b": "23"}"#, r#"{"a": "12", "b": "3"}"#, r#"{"a": 12, "b": "3"}"#]
            .into_iter()
            .enumerate()
    {
        let response = send(&receiver, signed(body)).await;
        response.is_first(200, &format!("execution {}", number + 1));
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    /// A key is the id itself, or the delivery is rejected; no other id has it.
    #[test]
    fn any_header_value_is_a_key_or_rejected(id in proptest::collection::vec(any::<u8>(), 0..300)) {
        let Ok(value) = HeaderValue::from_bytes(&id) else { return Ok(()) };
        let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build().unwrap();
        runtime.block_on(async {
            let world = World::new();
            let builder = WebhookLayer::github("github").secret(GITHUB_SECRET);
            let receiver = world.receiver(world.layer(builder));
            let mut request = github(b"1");
            request.headers_mut().insert("x-github-delivery", value);
            let request = request.map(axum::body::Body::new);
            let status = receiver.oneshot(request).await.unwrap().status();
            let is_blank = id.iter().all(|byte| *byte == b' ');
            match std::str::from_utf8(&id).ok().and_then(|text| Key::new(text).ok()) {
                Some(key) if !is_blank => assert_eq!(world.handled()[0].key, key.as_str()),
                _ => {
                    assert_eq!(status, 400);
                    world.assert_untouched();
                }
            }
        });
    }

    /// No header is accepted as a signature unless it is one.
    #[test]
    fn no_other_text_is_a_signature(text in "[ -~]{0,120}", fields in "(t=[0-9]{0,12},?|v1=[0-9a-f]{64},?| ){0,6}") {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build().unwrap();
        runtime.block_on(async {
            let world = World::new();
            let receiver = world.receiver(world.stripe());
            for value in [&text, &fields] {
                let request = post(&[("stripe-signature", value)], "{\"id\": \"evt_1\"}");
                assert_eq!(send(&receiver, request).await.status, 401);
            }
            world.assert_untouched();
        });
    }
}
