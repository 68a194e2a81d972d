//! The layer.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use hapax_core::{Clock, JsonPointers};
use hapax_http::fingerprint::{BodyForm, HttpFingerprintScheme, JsonParts};
use hapax_http::header::Grammar;
use hapax_http::server::{KeyRule, RouteOptions};
use hapax_http::statuses::StatusLists;
use http::header::CONTENT_LENGTH;
use http::request::Parts;
use http::{HeaderName, HeaderValue, Method};
use tower_layer::Layer;

use crate::config::WebhookLayerBuilder;
use crate::delivery::{VerifiedWebhook, key};
use crate::rejection::{Rejected, WebhookRejection};
use crate::scheme::{
    DeliveryIdLocation, HmacScheme, SignatureEncoding, SignatureScheme, SignedHead, check_time,
};
use crate::secret::SigningSecrets;
use crate::service::WebhookService;

/// A layer that accepts validly signed deliveries of one source, and makes the id of each its key.
/// See the [crate](crate) for its rules.
///
/// The `Debug` form shows no secret.
#[derive(Clone)]
pub struct WebhookLayer(Arc<WebhookSettings>);

/// The settings of a layer.
pub(crate) struct WebhookSettings {
    pub(crate) source: Arc<str>,
    /// The same, as a header has it.
    pub(crate) name: HeaderValue,
    pub(crate) scheme: SignatureScheme,
    pub(crate) secrets: SigningSecrets,
    pub(crate) tolerance: Duration,
    pub(crate) body_limit: usize,
    pub(crate) clock: Arc<dyn Clock>,
}

impl WebhookLayer {
    /// The retention in [`route_options`](Self::route_options). It is longer than the time for
    /// which any supported sender retries a delivery, or offers a manual resend of it.
    pub const RETENTION: Duration = Duration::from_secs(31 * 24 * 60 * 60);

    /// Returns the builder for a sender that follows [Standard Webhooks](https://www.standardwebhooks.com),
    /// by its symmetric signature `v1`. Svix's earlier names, `svix-id` and so on, are accepted
    /// too. The secret is `whsec_` and base64. `source` names the sender, and is its scope.
    pub fn standard(source: impl Into<String>) -> WebhookLayerBuilder {
        WebhookLayerBuilder::new(source.into(), SignatureScheme::Standard)
    }

    /// Returns the builder for Stripe. The secret is that of the endpoint, which begins with
    /// `whsec_`; the id is that of the event.
    pub fn stripe(source: impl Into<String>) -> WebhookLayerBuilder {
        WebhookLayerBuilder::new(source.into(), SignatureScheme::Stripe)
    }

    /// Returns the builder for GitHub: `X-Hub-Signature-256`, and the id in `X-GitHub-Delivery`.
    /// GitHub signs neither that id nor a timestamp: see the [crate](crate#not-promised).
    pub fn github(source: impl Into<String>) -> WebhookLayerBuilder {
        let id = DeliveryIdLocation::header(HeaderName::from_static("x-github-delivery"));
        let header = HeaderName::from_static("x-hub-signature-256");
        let scheme = HmacScheme::new(header, SignatureEncoding::Hex, id).prefix("sha256=");
        Self::hmac(source, scheme)
    }

    /// Returns the builder for a sender that signs its body by HMAC-SHA256.
    pub fn hmac(source: impl Into<String>, scheme: HmacScheme) -> WebhookLayerBuilder {
        WebhookLayerBuilder::new(source.into(), SignatureScheme::Hmac(scheme))
    }

    pub(crate) fn new(settings: WebhookSettings) -> Self {
        Self(Arc::new(settings))
    }

    /// Returns options for the route of the HTTP layer behind this one. They differ from the
    /// defaults in these points:
    ///
    /// 1. The route has the source's name, and protects POST requests only, which need a key. The
    ///    key header must stay `Idempotency-Key`, which this layer overwrites.
    /// 2. The limit of the body is that of this layer.
    /// 3. The retention is [`RETENTION`](Self::RETENTION).
    /// 4. A handler's 4xx is retryable: it is not stored, and the sender's next attempt executes.
    ///    By default it would be replayed to each attempt.
    /// 5. For Stripe, `/pending_webhooks` does not count in the comparison of bodies: it changes
    ///    between two attempts if an event has several endpoints.
    ///
    /// [`OnUnknown`](hapax_core::OnUnknown) stays at `Block`: [choose](crate#unknown-outcomes) by
    /// the effects of the handler.
    #[must_use]
    pub fn route_options(&self) -> RouteOptions {
        let mut options = RouteOptions {
            name: Arc::clone(&self.0.source),
            key: KeyRule::Required,
            grammar: Grammar::Strict,
            methods: vec![Method::POST],
            max_request_body: self.0.body_limit,
            statuses: StatusLists {
                retryable_statuses: "4xx".parse().into_iter().collect(),
                ..StatusLists::default()
            },
            ..RouteOptions::default()
        };
        options.policy.terms.retention = Self::RETENTION;
        if matches!(self.0.scheme, SignatureScheme::Stripe)
            && let Ok(pending) = JsonPointers::new(["/pending_webhooks"])
            && let Ok(scheme) = HttpFingerprintScheme::new(BodyForm::Canonical, [])
            && let Ok(scheme) = scheme.json(JsonParts::Except(pending))
        {
            options.fingerprint = scheme;
        }
        options
    }

    pub(crate) fn body_limit(&self) -> usize {
        self.0.body_limit
    }

    /// Checks the head of a delivery, before any of its body is read.
    pub(crate) fn check_head(&self, parts: &Parts) -> Result<SignedHead, Rejected> {
        if parts.method != Method::POST {
            let detail =
                format!("Expected POST, found {}: send the delivery as POST.", parts.method);
            return Err(Rejected::new(WebhookRejection::MethodNotAllowed, detail));
        }
        let head = self.0.scheme.head(&parts.headers)?;
        if let Some(timestamp) = head.timestamp {
            check_time(timestamp, &*self.0.clock, self.0.tolerance)?;
        }
        Ok(head)
    }

    /// Checks the body of a delivery. If it is valid, the request becomes one of this delivery.
    pub(crate) fn check_body(
        &self,
        head: &SignedHead,
        parts: &mut Parts,
        body: &[u8],
    ) -> Result<(), Rejected> {
        // HTTP/2 ends the body of a stream that was reset without an error like a whole one.
        let declared = parts.headers.get(CONTENT_LENGTH).and_then(|value| value.to_str().ok());
        let declared = declared.and_then(|text| text.parse::<usize>().ok());
        if declared.is_some_and(|declared| declared != body.len()) {
            let detail =
                "Expected a body of the declared length, found another one: send it whole.";
            return Err(Rejected::new(WebhookRejection::MalformedRequest, detail));
        }
        if !self.0.secrets.verify(&[&head.before_body, body], &head.signatures) {
            let detail = "Expected a signature of this content with the shared secret, found \
                          another one: compare the secrets of sender and receiver, and let \
                          nothing change the body on its way.";
            return Err(Rejected::new(WebhookRejection::InvalidSignature, detail));
        }
        let key = key(&head.id, body)?;
        let verified = VerifiedWebhook::new(Arc::clone(&self.0.source), key, head.timestamp);
        verified.mark(&self.0.name, parts);
        Ok(())
    }

    /// Writes a rejection to the log. Any caller can cause one, so the level is low.
    pub(crate) fn log(&self, rejected: &Rejected) {
        let code = rejected.reason.as_str();
        tracing::debug!(source = &*self.0.source, code, "a delivery was rejected");
    }
}

impl fmt::Debug for WebhookLayer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("WebhookLayer")
            .field("source", &self.0.source)
            .field("scheme", &self.0.scheme)
            .field("secrets", &self.0.secrets)
            .field("tolerance", &self.0.tolerance)
            .field("body_limit", &self.0.body_limit)
            .finish_non_exhaustive()
    }
}

impl<S> Layer<S> for WebhookLayer {
    type Service = WebhookService<S>;

    fn layer(&self, inner: S) -> WebhookService<S> {
        WebhookService::new(self.clone(), inner)
    }
}
