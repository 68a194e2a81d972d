//! Webhooks that are verified, and executed once for each delivery id.
//!
//! A sender of webhooks repeats a delivery until it receives a 2xx, so a receiver gets some
//! deliveries twice, and anyone who knows its address can send others. [`WebhookLayer`] goes in
//! front of the HTTP layer ([`hapax_http::server`]):
//!
//! 1. It accepts POST requests only. The headers are checked before any of the body is read: there
//!    is one signature header, and a signed timestamp is within the tolerance (five minutes), in
//!    either direction.
//! 2. It reads the body up to a limit (1 MiB), and verifies the signature of these very bytes in
//!    constant time, with each of its secrets.
//! 3. Only then the delivery's id becomes the `Idempotency-Key`, in the scope of its source. The
//!    request is passed on with its body unchanged. A key or source that the sender supplied is
//!    replaced.
//! 4. A delivery that is not valid gets a problem document ([`WebhookRejection`]) and reaches
//!    neither the store nor the handler. The log has its code at level `debug`, since any caller
//!    can cause such lines; count responses of 401 to notice a wrong secret. No secret is in a log,
//!    an error or a `Debug` form.
//! 5. Everything after that is the HTTP layer's: the first attempt executes, a later one gets the
//!    same response.
//!
//! ```
//! use axum::{Extension, Router, routing::post};
//! use hapax_core::{Idempotency, MemoryStore};
//! use hapax_http::server::{IdempotencyLayer, RoutePolicy};
//! use hapax_webhooks::{VerifiedWebhook, WebhookLayer};
//!
//! async fn handle(Extension(webhook): Extension<VerifiedWebhook>, event: String) -> String {
//!     format!("{}: {} bytes", webhook.key().as_str(), event.len())
//! }
//!
//! # #[tokio::main(flavor = "current_thread")]
//! # async fn main() -> Result<(), Box<dyn std::error::Error>> {
//! # let secret = concat!("whsec", "_0123456789abcdef");
//! let engine = Idempotency::builder(MemoryStore::default()).build()?;
//! let webhooks = WebhookLayer::stripe("stripe").secret(secret).build()?;
//! let policy = RoutePolicy::new(hapax_webhooks::scope(), webhooks.route_options())?;
//! let idempotency = IdempotencyLayer::new(engine, policy);
//! // The layer that is added last comes first.
//! let app: Router =
//!     Router::new().route("/stripe", post(handle)).layer(idempotency).layer(webhooks);
//! # drop(app);
//! # Ok(())
//! # }
//! ```
//!
//! `cargo run -p hapax-webhooks --example receiver` is a receiver with a callback. With the feature
//! `sink`, `WebhookSink` is a sender: it publishes the messages of an outbox.
//!
//! # Senders
//!
//! | builder | signature | id | signed |
//! | --- | --- | --- | --- |
//! | [`standard`](WebhookLayer::standard) | `webhook-signature: v1,…` or `svix-signature` | `webhook-id` or `svix-id` | id, time, body |
//! | [`stripe`](WebhookLayer::stripe) | `Stripe-Signature: t=…,v1=…` | `id` of the event | time, body (and thus the id) |
//! | [`github`](WebhookLayer::github) | `X-Hub-Signature-256: sha256=…` | `X-GitHub-Delivery` | body |
//! | [`hmac`](WebhookLayer::hmac) | any header: hexadecimal or base64, with or without a prefix | any header, or JSON pointers into the body | body |
//!
//! All are HMAC-SHA256. An id has 1 to 255 characters of printable ASCII and is not blank; another
//! one, a missing one and a repeated header get 400, so that no two deliveries share a key by
//! accident. An id of Standard Webhooks has no full stop, which would make the signed content
//! ambiguous.
//!
//! # Sources
//!
//! The name that a builder takes is the scope of all its keys: equal ids of two sources have two
//! records. [`scope`] is the scope for the policy of the HTTP layer. It accepts only requests that
//! a webhook layer has verified; any other request gets 400 `missing-scope`. If the two layers are
//! in the wrong order, each delivery gets 400 too. The request also has the header
//! [`WEBHOOK_SOURCE`] for whatever is behind the receiver.
//!
//! Leave the key header of the route at `Idempotency-Key`: the webhook layer does not overwrite any
//! other. If one sender sends the same events to two endpoints, give each its own source; under one
//! name, the second endpoint gets 422 `key-reused`.
//!
//! # Further attempts
//!
//! | an attempt with the id of | gets |
//! | --- | --- |
//! | a delivery that executes now | 409 `in-flight` with `Retry-After`; its next attempt gets the stored response |
//! | a finished delivery | the stored response, byte for byte |
//! | a finished delivery, but with another body | 422 `key-reused` |
//! | a delivery that the handler answered with 4xx | a new execution |
//! | a delivery whose outcome is unknown | see [below](#unknown-outcomes) |
//! | any, while the store is unavailable | 503 `store-unavailable` with `Retry-After` |
//!
//! The supported senders count each of these errors as a failure and try again later. For another
//! sender, which does not retry after a 409, let duplicates wait: `policy.in_flight =
//! InFlight::Wait(…)`, for less time than the sender waits for a response.
//!
//! A *manual resend* (the button in the sender's dashboard) has the old id. It is replayed, and the
//! handler does not run. To have it run, release the record first, then resend:
//!
//! ```text
//! hapax keys release evt_123 --scope 'webhook-source: stripe' --forget --reason 'handler fixed'
//! ```
//!
//! `--store` or `--admin` names the store. If the service has a file open, it serves the operators'
//! API, as the crate `hapax-operators` shows, and the command calls it. In code, the record has the
//! id `engine.operation_id(&webhook.scope(), webhook.key())`.
//!
//! # Retention
//!
//! A record must outlast the sender's attempts, or a late one executes again:
//!
//! | sender | own attempts | manual resends |
//! | --- | --- | --- |
//! | Stripe | 3 days | of events of the last 30 days |
//! | Standard Webhooks | as the sender decides; the specification's example takes 3 days and 4 hours | as the sender decides |
//! | GitHub | none | of the last 3 days; 7 on GitHub Enterprise Server |
//!
//! [`WebhookLayer::route_options`] sets 31 days ([`WebhookLayer::RETENTION`]), in which one
//! delivery needs some hundred bytes and its response. Set a longer one for a sender that repeats
//! for longer. The 24 hours of the HTTP layer are too short for every sender that repeats by
//! itself.
//!
//! # Unknown outcomes
//!
//! After a crash, a panic or a 5xx it is unknown whether the delivery took effect. The sender
//! repeats it, and `on_unknown` decides:
//!
//! | the handler's effects | `on_unknown` |
//! | --- | --- |
//! | are rows that commit with the response ([`transactions`](hapax_http::server::transaction)) | `Reexecute`: effectively once |
//! | may happen twice, such as an update to the event's state | `Reexecute`: at least once |
//! | are in a system that can look up an operation id | `Reconcile`, with a hook |
//! | must not happen twice, and cannot be looked up | `Block`, the default: attempts get 409 `outcome-unknown` until an operator decides |
//!
//! Under `Block`, an operator should decide while the sender still repeats: afterwards the delivery
//! has to be resent by hand. A handler whose 5xx means that nothing happened adds
//! `Idempotency-Outcome: retryable`.
//!
//! # Not promised
//!
//! - *Order*. Senders do not keep it, nor does this crate.
//! - *A delivery that never arrives*. After its last attempt a sender gives up.
//! - *An id that the sender does not sign*: GitHub's, and any other in a header. An attacker who
//!   has captured a delivery and its signature can send it under another id, and it executes again.
//!   TLS keeps deliveries from being captured; where the body has an id, prefer
//!   [`DeliveryIdLocation::json`].
//! - *A signed time* for GitHub and [`hmac`](WebhookLayer::hmac). An old delivery with its id is a
//!   replay while there is a record, and executes after the retention.
//! - *Anything about other headers, path and query*. No supported sender signs them: a handler must
//!   not trust `X-GitHub-Event` more than the body.
//! - *Asymmetric signatures* (`v1a` of Standard Webhooks), which are ignored.
//! - *Slow senders*. The layer waits for a body as long as the server does. A connection occupies
//!   up to the limit of the body before its signature is verified: limit time and connections in
//!   front.

mod body;
mod config;
mod delivery;
mod future;
mod layer;
mod rejection;
mod scheme;
mod secret;
mod service;
#[cfg(feature = "sink")]
mod sink;

pub use body::WebhookBody;
pub use config::{SecretError, WebhookConfigError, WebhookLayerBuilder};
pub use delivery::{VerifiedWebhook, WEBHOOK_SOURCE, scope};
pub use future::WebhookFuture;
#[cfg(feature = "sink")]
pub use hapax_proxy::ConnectProxy;
pub use layer::WebhookLayer;
pub use rejection::WebhookRejection;
pub use scheme::{DeliveryIdLocation, HmacScheme, SignatureEncoding};
pub use service::WebhookService;
#[cfg(feature = "sink")]
pub use sink::{
    RejectedStatuses, UnexpectedResponse, WebhookSink, WebhookSinkBuilder, WebhookSinkError,
};
