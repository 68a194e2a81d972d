//! The layer of webhooks against deliveries that its senders did not sign, and one that they did.
//!
//! 1. Without a valid signature no delivery reaches the service, whatever its headers and body are:
//!    the response is a problem of status 4xx.
//! 2. A delivery with a signature of any scheme and a plain id reaches the service: with its body
//!    unchanged, and its id as the key. With another id the body is unchanged, or the response is
//!    such a problem.
#![no_main]

use std::convert::Infallible;
use std::sync::{Arc, LazyLock, Mutex};

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use bytes::Bytes;
use hapax_core::{Clock, Timestamp};
use hapax_http::Body;
use hapax_webhooks::{
    DeliveryIdLocation, HmacScheme, SignatureEncoding, VerifiedWebhook, WebhookLayer,
};
use hmac::{Hmac, KeyInit as _, Mac as _};
use http::{HeaderName, HeaderValue, Request, Response};
use http_body_util::Full;
use libfuzzer_sys::fuzz_target;
use serde_json::json;
use sha2::Sha256;
use tower::{Layer as _, ServiceExt as _, service_fn};

const NOW: u64 = 1_700_000_000;
const SECRET: &[u8; 32] = b"a secret that no sender may have";
const NAMES: [&str; 8] = [
    "webhook-id",
    "webhook-timestamp",
    "webhook-signature",
    "stripe-signature",
    "x-hub-signature-256",
    "x-github-delivery",
    "content-length",
    "idempotency-key",
];

#[derive(Debug)]
struct FixedClock;

impl Clock for FixedClock {
    fn now(&self) -> Timestamp {
        Timestamp::from_micros(NOW * 1_000_000)
    }
}

fn whsec() -> String {
    format!("whsec_{}", STANDARD.encode(SECRET))
}

static LAYERS: LazyLock<[WebhookLayer; 4]> = LazyLock::new(|| {
    let whsec = whsec();
    let pointers = DeliveryIdLocation::json(["/a", "/b/0"]).expect("valid pointers");
    let header = HeaderName::from_static("x-hub-signature-256");
    let hmac = HmacScheme::new(header, SignatureEncoding::Base64, pointers).prefix("v1=");
    [
        WebhookLayer::standard("fuzz").secret(&whsec),
        WebhookLayer::stripe("fuzz").secret(&whsec),
        WebhookLayer::github("fuzz").secret(SECRET),
        WebhookLayer::hmac("fuzz", hmac).secret(SECRET),
    ]
    .map(|layer| layer.clock(Arc::new(FixedClock)).build().expect("valid settings"))
});

fuzz_target!(|input: (u8, Vec<(u8, Vec<u8>)>, Vec<u8>)| {
    let (scheme, headers, body) = input;
    let mut request = Request::post("/hooks");
    for (name, value) in &headers {
        let Ok(value) = HeaderValue::from_bytes(value) else { continue };
        request = request.header(NAMES[usize::from(*name) % NAMES.len()], value);
    }
    let request = request.body(Full::new(Bytes::from(body.clone()))).expect("valid headers");
    let layer = &LAYERS[usize::from(scheme) % LAYERS.len()];
    assert_eq!(deliver(layer, request), None, "a delivery without a signature passed");

    // The same with a signature of each scheme, and with an id that the scheme accepts.
    let id = headers.first().map_or(&[][..], |(_, id)| id);
    for scheme in Scheme::ALL {
        let sent = scheme.delivery(&body, id);
        let passed = deliver(&LAYERS[scheme as usize], sent.request);
        match sent.key {
            Some(key) => assert_eq!(passed, Some((sent.body, key)), "{scheme:?}"),
            // An id or a body that the scheme may reject.
            None => assert!(passed.is_none_or(|(passed, _)| passed == sent.body), "{scheme:?}"),
        }
    }
});

/// The schemes, as their layers are in `LAYERS`.
#[derive(Clone, Copy, Debug)]
enum Scheme {
    Standard,
    Stripe,
    GitHub,
    Hmac,
}

/// A delivery with a signature.
struct Delivery {
    request: Request<Full<Bytes>>,
    body: Vec<u8>,
    /// The key, if the delivery has to pass.
    key: Option<String>,
}

impl Scheme {
    const ALL: [Self; 4] = [Self::Standard, Self::Stripe, Self::GitHub, Self::Hmac];

    /// Signs `input` as the body, or JSON with the id where the scheme finds it.
    fn delivery(self, input: &[u8], id: &[u8]) -> Delivery {
        let (text, rest) = (String::from_utf8_lossy(id), String::from_utf8_lossy(input));
        let body = match self {
            Self::Standard | Self::GitHub => input.to_vec(),
            Self::Stripe => json!({"id": text, "rest": rest}).to_string().into_bytes(),
            Self::Hmac => json!({"a": text, "b": ["one"], "rest": rest}).to_string().into_bytes(),
        };
        let now = NOW.to_string();
        let (hex, base64) = match self {
            Self::Standard => codes(SECRET, &[id, b".", now.as_bytes(), b".", &body]),
            Self::Stripe => codes(whsec().as_bytes(), &[now.as_bytes(), b".", &body]),
            Self::GitHub | Self::Hmac => codes(SECRET, &[&body]),
        };
        let request = Request::post("/hooks");
        let request = match self {
            Self::Standard => request
                .header("webhook-timestamp", &now)
                .header("webhook-signature", format!("v1,{base64}")),
            Self::Stripe => request.header("stripe-signature", format!("t={now},v1={hex}")),
            Self::GitHub => request.header("x-hub-signature-256", format!("sha256={hex}")),
            Self::Hmac => request.header("x-hub-signature-256", format!("v1={base64}")),
        };
        let request = match (self, HeaderValue::from_bytes(id)) {
            (Self::Standard, Ok(id)) => request.header("webhook-id", id),
            (Self::GitHub, Ok(id)) => request.header("x-github-delivery", id),
            _ => request,
        };
        let request = request.body(Full::new(Bytes::from(body.clone()))).expect("valid headers");
        // Ids that every scheme accepts.
        let is_plain = (1..=64).contains(&id.len()) && id.iter().all(u8::is_ascii_alphanumeric);
        let key = is_plain.then(|| match self {
            Self::Hmac => json!([text, "one"]).to_string(),
            _ => text.into_owned(),
        });
        Delivery { request, body, key }
    }
}

/// Returns the HMAC of `parts`, in hexadecimal digits and in base64.
fn codes(secret: &[u8], parts: &[&[u8]]) -> (String, String) {
    let mut mac = Hmac::<Sha256>::new_from_slice(secret).expect("any length");
    parts.iter().for_each(|part| mac.update(part));
    let code = mac.finalize().into_bytes();
    (code.iter().map(|byte| format!("{byte:02x}")).collect(), STANDARD.encode(code))
}

/// Sends a delivery through a layer. Returns the body and the key that the service got, if it was
/// called.
fn deliver(layer: &WebhookLayer, request: Request<Full<Bytes>>) -> Option<(Vec<u8>, String)> {
    let passed = Arc::new(Mutex::new(None));
    let place = Arc::clone(&passed);
    let service = layer.layer(service_fn(move |request: Request<Body>| {
        let place = Arc::clone(&place);
        async move {
            use http_body_util::BodyExt as _;
            let verified = request.extensions().get::<VerifiedWebhook>().expect("verified");
            let key = verified.key().as_str().to_owned();
            let body = request.into_body().collect().await.expect("a whole body").to_bytes();
            assert!(place.lock().expect("one thread").replace((body.to_vec(), key)).is_none());
            Ok::<_, Infallible>(Response::new(Full::new(Bytes::new())))
        }
    }));
    let runtime = tokio::runtime::Builder::new_current_thread().build().expect("a runtime");
    let response = runtime.block_on(service.oneshot(request)).expect("infallible");
    let passed = passed.lock().expect("one thread").take();
    assert_eq!(passed.is_none(), response.status().is_client_error());
    passed
}
