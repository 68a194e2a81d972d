//! A receiver with a counting handler, and senders that sign.

use std::sync::{Arc, Mutex};

use axum::Router;
use axum::body::Bytes;
use axum::http::request::Parts;
use axum::http::{HeaderMap, Request, Response, StatusCode};
use axum::routing::any;
use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use hapax_core::{Idempotency, MemoryCapacity, MemoryStore, Timestamp};
use hapax_http::server::{IdempotencyLayer, RouteOptions, RoutePolicy};
use hapax_testkit::ManualClock;
use hapax_testkit::http::{TIMEOUT, TestResponse};
use hapax_webhooks::{VerifiedWebhook, WebhookLayer, WebhookLayerBuilder};
use hmac::{Hmac, KeyInit, Mac};
use http_body_util::{BodyExt, Full};
use sha2::Sha256;
use tokio::sync::{Notify, Semaphore};
use tower::ServiceExt;

/// The time at which the clock stands.
pub(crate) const NOW: u64 = 1_790_000_000;

/// A secret of Stripe's form, and another one.
pub(crate) const STRIPE_SECRET: &str = concat!("whsec", "_4f1c0d8e6b2a47c39d50");
pub(crate) const OTHER_SECRET: &str = concat!("whsec", "_0d8e6b2a47c39d504f1c");

/// A delivery as the handler got it.
#[derive(Clone, Debug)]
pub(crate) struct Handled {
    pub(crate) source: String,
    pub(crate) key: String,
    pub(crate) timestamp: Option<Timestamp>,
    pub(crate) headers: HeaderMap,
    pub(crate) body: Bytes,
}

/// A store, a clock, and the deliveries that the handler got.
pub(crate) struct World {
    pub(crate) store: Arc<MemoryStore>,
    pub(crate) clock: Arc<ManualClock>,
    pub(crate) engine: Idempotency,
    pub(crate) handler: Arc<Handler>,
}

/// The handler's state.
pub(crate) struct Handler {
    handled: Mutex<Vec<Handled>>,
    status: Mutex<StatusCode>,
    /// A permit for each execution that may end.
    pub(crate) may_end: Semaphore,
    /// Is notified when an execution begins.
    pub(crate) began: Notify,
}

impl World {
    pub(crate) fn new() -> Self {
        let clock = Arc::new(ManualClock::at(Timestamp::from_micros(NOW * 1_000_000)));
        let store = MemoryStore::new(Arc::clone(&clock) as _, MemoryCapacity::default());
        let store = Arc::new(store);
        let engine = Idempotency::builder(Arc::clone(&store)).build().unwrap();
        let handler = Handler {
            handled: Mutex::default(),
            status: Mutex::new(StatusCode::OK),
            may_end: Semaphore::new(Semaphore::MAX_PERMITS),
            began: Notify::new(),
        };
        Self { store, clock, engine, handler: Arc::new(handler) }
    }

    /// Returns the builder's layer, with the clock of this world.
    pub(crate) fn layer(&self, builder: WebhookLayerBuilder) -> WebhookLayer {
        builder.clock(Arc::clone(&self.clock) as _).build().unwrap()
    }

    /// Returns a layer for Stripe.
    pub(crate) fn stripe(&self) -> WebhookLayer {
        self.layer(WebhookLayer::stripe("stripe").secret(STRIPE_SECRET))
    }

    /// Returns the HTTP layer with the options of the webhook layer.
    pub(crate) fn idempotency(&self, options: RouteOptions) -> IdempotencyLayer {
        let policy = RoutePolicy::new(hapax_webhooks::scope(), options).unwrap();
        IdempotencyLayer::new(self.engine.clone(), policy)
    }

    /// Returns the receiver: the webhook layer, the HTTP layer and the handler, on every path.
    pub(crate) fn receiver(&self, webhooks: WebhookLayer) -> Router {
        let idempotency = self.idempotency(webhooks.route_options());
        self.bare().layer(idempotency).layer(webhooks)
    }

    /// Returns the handler without layers.
    pub(crate) fn bare(&self) -> Router {
        let handler = Arc::clone(&self.handler);
        let handle =
            move |parts: Parts, body: Bytes| async move { handler.handle(parts, body).await };
        Router::new().fallback(any(handle))
    }

    pub(crate) fn answer_with(&self, status: StatusCode) {
        *self.handler.status.lock().unwrap() = status;
    }

    /// Returns the deliveries that the handler got.
    pub(crate) fn handled(&self) -> Vec<Handled> {
        self.handler.handled.lock().unwrap().clone()
    }

    /// Asserts that nothing was claimed and nothing executed.
    #[track_caller]
    pub(crate) fn assert_untouched(&self) {
        assert!(self.store.is_empty(), "the store has {} records", self.store.len());
        assert_eq!(self.handled().len(), 0, "{:?}", self.handled());
    }
}

impl Handler {
    async fn handle(&self, parts: Parts, body: Bytes) -> (StatusCode, String) {
        let verified = parts.extensions.get::<VerifiedWebhook>();
        let number = {
            let mut handled = self.handled.lock().unwrap();
            handled.push(Handled {
                source: verified.map_or(String::new(), |it| it.source().to_owned()),
                key: verified.map_or(String::new(), |it| it.key().as_str().to_owned()),
                timestamp: verified.and_then(VerifiedWebhook::timestamp),
                headers: parts.headers,
                body,
            });
            handled.len()
        };
        self.began.notify_one();
        self.may_end.acquire().await.unwrap().forget();
        let status = *self.status.lock().unwrap();
        (status, format!("execution {number}"))
    }
}

/// Sends a request through the router, in this process.
pub(crate) async fn send<B>(router: &Router, request: Request<B>) -> TestResponse
where
    B: axum::body::HttpBody<Data = Bytes> + Send + 'static,
    B::Error: Into<axum::BoxError>,
{
    let request = request.map(axum::body::Body::new);
    let response = async { read(router.clone().oneshot(request).await.unwrap()).await };
    tokio::time::timeout(TIMEOUT, response).await.expect("no response in time")
}

async fn read(response: Response<axum::body::Body>) -> TestResponse {
    let (parts, body) = response.into_parts();
    let body = body.collect().await.unwrap();
    let trailers = body.trailers().cloned();
    TestResponse { status: parts.status, headers: parts.headers, body: body.to_bytes(), trailers }
}

/// Returns a POST request with these headers and this body.
pub(crate) fn post(headers: &[(&str, &str)], body: impl Into<Bytes>) -> Request<Full<Bytes>> {
    let mut request = Request::post("/hooks").header("content-type", "application/json");
    for (name, value) in headers {
        request = request.header(*name, *value);
    }
    request.body(Full::new(body.into())).unwrap()
}

pub(crate) fn code(secret: &[u8], parts: &[&[u8]]) -> [u8; 32] {
    let mut mac = Hmac::<Sha256>::new_from_slice(secret).unwrap();
    parts.iter().for_each(|part| mac.update(part));
    mac.finalize().into_bytes().into()
}

pub(crate) fn hex(code: &[u8]) -> String {
    code.iter().map(|byte| format!("{byte:02x}")).collect()
}

pub(crate) fn base64(code: &[u8]) -> String {
    STANDARD.encode(code)
}

/// Returns the value of `Stripe-Signature` at this time.
pub(crate) fn stripe_signature(secret: &str, time: u64, body: &str) -> String {
    let time = time.to_string();
    let code = code(secret.as_bytes(), &[time.as_bytes(), b".", body.as_bytes()]);
    format!("t={time},v1={}", hex(&code))
}

/// Returns an event of Stripe.
pub(crate) fn event(id: &str) -> String {
    format!(r#"{{"id": "{id}", "type": "charge.succeeded", "pending_webhooks": 1}}"#)
}

/// Returns a delivery of Stripe that is signed now.
pub(crate) fn stripe_delivery(body: &str) -> Request<Full<Bytes>> {
    let signature = stripe_signature(STRIPE_SECRET, NOW, body);
    post(&[("stripe-signature", &signature)], body.to_owned())
}

/// Returns a secret of Standard Webhooks with these bytes.
pub(crate) fn standard_secret(key: &[u8]) -> String {
    ["whsec_", &base64(key)].concat()
}

/// Returns `webhook-signature`.
pub(crate) fn standard_signature(key: &[u8], id: &[u8], time: u64, body: &str) -> String {
    let time = time.to_string();
    let parts: [&[u8]; 5] = [id, b".", time.as_bytes(), b".", body.as_bytes()];
    format!("v1,{}", base64(&code(key, &parts)))
}
