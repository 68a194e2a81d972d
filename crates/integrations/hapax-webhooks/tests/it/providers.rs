//! Published test vectors of each sender.

use axum::http::HeaderName;
use hapax_core::Timestamp;
use hapax_webhooks::{DeliveryIdLocation, HmacScheme, SignatureEncoding, WebhookLayer};

use crate::world::{
    NOW, STRIPE_SECRET, World, base64, code, event, hex, post, send, stripe_delivery,
};

/// The example of the specification of Standard Webhooks.
const STANDARD_SECRET: &str = concat!("whsec", "_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw");
const STANDARD_ID: &str = "msg_p5jXN8AQM9LWM0D4loKWxJek";
const STANDARD_TIME: u64 = 1_614_265_330;
const STANDARD_BODY: &str = r#"{"test": 2432232314}"#;
const STANDARD_SIGNATURE: &str = "v1,g0hM9SsE+OTPJTGt/tmIKtSyZlE3uFJELVlNIOLJ1OE=";

/// The example of GitHub's documentation.
const GITHUB_SECRET: &str = "It's a Secret to Everybody";
const GITHUB_BODY: &str = "Hello, World!";
const GITHUB_SIGNATURE: &str =
    "sha256=757107ea0eb2509fc211221cce984b8a37570b6d7586c22c46f4379c8b043e17";
const GITHUB_ID: &str = "72d3162e-cc78-11e3-81ab-4c9367dc0958";

#[tokio::test]
async fn the_published_delivery_of_standard_webhooks_is_accepted() {
    for names in [
        ["webhook-id", "webhook-timestamp", "webhook-signature"],
        ["svix-id", "svix-timestamp", "svix-signature"],
    ] {
        let world = World::new();
        world.clock.set(Timestamp::from_micros(STANDARD_TIME * 1_000_000));
        let builder = WebhookLayer::standard("standard").secret(STANDARD_SECRET);
        let receiver = world.receiver(world.layer(builder));
        let time = STANDARD_TIME.to_string();
        let values = [STANDARD_ID, &time, STANDARD_SIGNATURE];
        let headers: Vec<_> = names.into_iter().zip(values).collect();
        send(&receiver, post(&headers, STANDARD_BODY)).await.is_first(200, "execution 1");
        send(&receiver, post(&headers, STANDARD_BODY)).await.is_replay(200, "execution 1");
        let [handled] = &world.handled()[..] else { panic!("{:?}", world.handled()) };
        assert_eq!((&*handled.source, &*handled.key), ("standard", STANDARD_ID));
        assert_eq!(handled.timestamp, Some(Timestamp::from_micros(STANDARD_TIME * 1_000_000)));
        assert_eq!(handled.body, STANDARD_BODY);
    }
}

#[tokio::test]
async fn the_published_delivery_of_github_is_accepted() {
    let world = World::new();
    let github = world.layer(WebhookLayer::github("github").secret(GITHUB_SECRET));
    let receiver = world.receiver(github);
    let headers = [("x-hub-signature-256", GITHUB_SIGNATURE), ("x-github-delivery", GITHUB_ID)];
    send(&receiver, post(&headers, GITHUB_BODY)).await.is_first(200, "execution 1");
    send(&receiver, post(&headers, GITHUB_BODY)).await.is_replay(200, "execution 1");
    let [handled] = &world.handled()[..] else { panic!("{:?}", world.handled()) };
    assert_eq!((&*handled.key, handled.timestamp), (GITHUB_ID, None));
}

/// Stripe's published signature is checked in `secret.rs`: its secret is shorter than those that
/// the builder accepts. The value here comes from Python's `hmac`.
#[tokio::test]
async fn an_event_of_stripe_is_accepted_and_its_id_is_the_key() {
    let world = World::new();
    let receiver = world.receiver(world.stripe());
    let body = r#"{"id":"evt_1","type":"charge.succeeded"}"#;
    let known = "t=1790000000,v1=CODE,v0=00";
    let known = known.replace("CODE", STRIPE_CODE);
    send(&receiver, post(&[("stripe-signature", &known)], body)).await.is_first(200, "execution 1");
    send(&receiver, stripe_delivery(body)).await.is_replay(200, "execution 1");
    assert_eq!(world.handled()[0].key, "evt_1");
    assert_eq!(world.handled()[0].timestamp, Some(Timestamp::from_micros(NOW * 1_000_000)));
    assert_eq!(STRIPE_SECRET.len(), 26);
}

const STRIPE_CODE: &str = "fe036574609bf88c72c3b7ce7b4fca9e0c6b068a7252b5a5c727f403f6997faf";

#[tokio::test]
async fn a_further_attempt_of_stripe_with_fewer_pending_webhooks_is_replayed() {
    let world = World::new();
    let receiver = world.receiver(world.stripe());
    send(&receiver, stripe_delivery(&event("evt_1"))).await.is_first(200, "execution 1");
    let later = event("evt_1").replace(r#""pending_webhooks": 1"#, r#""pending_webhooks": 0"#);
    send(&receiver, stripe_delivery(&later)).await.is_replay(200, "execution 1");
    let other = event("evt_1").replace("succeeded", "failed");
    send(&receiver, stripe_delivery(&other)).await.is_rejected(422, "key-reused");
}

#[tokio::test]
async fn any_hmac_header_is_accepted_in_its_encoding_and_with_its_prefix() {
    let secret = "a text of 16 or more bytes";
    let body = r#"{"account": {"id": 7}, "event": "e-1"}"#;
    let code = code(secret.as_bytes(), &[body.as_bytes()]);
    let name = HeaderName::from_static("x-signature");
    for (encoding, signature) in
        [(SignatureEncoding::Hex, hex(&code)), (SignatureEncoding::Base64, base64(&code))]
    {
        for prefix in ["", "v1="] {
            let world = World::new();
            let id = DeliveryIdLocation::json(["/event", "/account/id"]).unwrap();
            let scheme = HmacScheme::new(name.clone(), encoding, id).prefix(prefix);
            let builder = WebhookLayer::hmac("other", scheme).secret(secret);
            let receiver = world.receiver(world.layer(builder));
            let signed = format!("{prefix}{signature}");
            let response = send(&receiver, post(&[("x-signature", &signed)], body)).await;
            response.is_first(200, "execution 1");
            assert_eq!(world.handled()[0].key, r#"[7,"e-1"]"#);
            for wrong in [format!("v2={signature}"), format!("{signed}00"), signed[1..].to_owned()]
            {
                let response = send(&receiver, post(&[("x-signature", &wrong)], body)).await;
                response.is_rejected(401, "invalid-signature");
            }
        }
    }
}
