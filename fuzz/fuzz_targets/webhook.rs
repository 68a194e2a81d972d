//! The layer of webhooks against deliveries that its senders did not sign, and one that they did.
//!
//! 1. Without a valid signature no delivery reaches the service, whatever its headers and body are:
//!    the response is a problem of status 4xx.
//! 2. Of a delivery with a signature the service gets the body unchanged, or the response is such a
//!    problem: of an id that is not valid, for instance.
#![no_main]

use std::convert::Infallible;
use std::sync::{Arc, LazyLock, Mutex};

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use bytes::Bytes;
use hapax_core::{Clock, Timestamp};
use hapax_http::Body;
use hapax_webhooks::{DeliveryId, HmacScheme, SignatureEncoding, WebhookLayer};
use hmac::{Hmac, KeyInit as _, Mac as _};
use http::{HeaderName, HeaderValue, Request, Response};
use http_body_util::Full;
use libfuzzer_sys::fuzz_target;
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

static LAYERS: LazyLock<[WebhookLayer; 4]> = LazyLock::new(|| {
    let whsec = format!("whsec_{}", STANDARD.encode(SECRET));
    let pointers = DeliveryId::json(["/a", "/b/0"]).expect("valid pointers");
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

    // The same with a signature, as GitHub makes it.
    let mut signed = Request::post("/hooks");
    if let Some(id) = headers.first().and_then(|(_, id)| HeaderValue::from_bytes(id).ok()) {
        signed = signed.header("x-github-delivery", id);
    }
    let mut mac = Hmac::<Sha256>::new_from_slice(SECRET).expect("any length");
    mac.update(&body);
    let code = mac.finalize().into_bytes();
    let code: String = code.iter().map(|byte| format!("{byte:02x}")).collect();
    let signed = signed.header("x-hub-signature-256", format!("sha256={code}"));
    let signed = signed.body(Full::new(Bytes::from(body.clone()))).expect("valid headers");
    if let Some(passed) = deliver(&LAYERS[2], signed) {
        assert_eq!(passed, body);
    }
});

/// Sends a delivery through a layer. Returns the body that the service got, if it was called.
fn deliver(layer: &WebhookLayer, request: Request<Full<Bytes>>) -> Option<Vec<u8>> {
    let passed = Arc::new(Mutex::new(None));
    let place = Arc::clone(&passed);
    let service = layer.layer(service_fn(move |request: Request<Body>| {
        let place = Arc::clone(&place);
        async move {
            use http_body_util::BodyExt as _;
            let body = request.into_body().collect().await.expect("a whole body").to_bytes();
            assert!(place.lock().expect("one thread").replace(body.to_vec()).is_none());
            Ok::<_, Infallible>(Response::new(Full::new(Bytes::new())))
        }
    }));
    let runtime = tokio::runtime::Builder::new_current_thread().build().expect("a runtime");
    let response = runtime.block_on(service.oneshot(request)).expect("infallible");
    let passed = passed.lock().expect("one thread").take();
    assert_eq!(passed.is_none(), response.status().is_client_error());
    passed
}
