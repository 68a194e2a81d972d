//! A receiver of Stripe's events, with a callback for each event.
//!
//! ```text
//! STRIPE_WEBHOOK_SECRET=whsec_… cargo run -p hapax-webhooks --example receiver
//! stripe listen --forward-to 127.0.0.1:3000/stripe   # shows the secret
//! ```

use std::error::Error;
use std::future::Future;
use std::sync::Arc;
use std::time::Duration;

use axum::body::Bytes;
use axum::http::StatusCode;
use axum::routing::post;
use axum::{Extension, Router};
use hapax_core::{Idempotency, MemoryStore, OnUnknown};
use hapax_http::server::{IdempotencyLayer, RouteError, RoutePolicy};
use hapax_webhooks::{VerifiedWebhook, WebhookLayer};
use tokio::net::TcpListener;

#[tokio::main]
async fn main() -> Result<(), Box<dyn Error>> {
    let secret = std::env::var("STRIPE_WEBHOOK_SECRET")?;
    let webhooks = WebhookLayer::stripe("stripe").secret(secret).build()?;
    // In memory, for the example: a service has `hapax-file`, or a store on a server.
    let engine = Idempotency::builder(MemoryStore::default()).build()?;
    let print = |event: Event| async move {
        println!("{}: {} bytes", event.id, event.body.len());
        Ok(())
    };
    let listener = TcpListener::bind("127.0.0.1:3000").await?;
    println!("http://{}/stripe", listener.local_addr()?);
    let (router, layer) = router(webhooks, engine, print)?;
    let ending = layer.drain_on_signal(Duration::from_secs(25));
    Ok(axum::serve(listener, router).with_graceful_shutdown(ending).await?)
}

/// An event, as the callback gets it.
pub(crate) struct Event {
    pub(crate) id: String,
    pub(crate) body: Bytes,
}

/// Returns a router that calls `callback` once for each event, and its layer. An error of it makes Stripe
/// send the event again, and the callback is called again.
pub(crate) fn router<C, F>(
    webhooks: WebhookLayer,
    engine: Idempotency,
    callback: C,
) -> Result<(Router, IdempotencyLayer), RouteError>
where
    C: Fn(Event) -> F + Send + Sync + 'static,
    F: Future<Output = Result<(), String>> + Send + 'static,
{
    let mut options = webhooks.route_options();
    // A callback that may be repeated: after a crash, Stripe's next attempt calls it again.
    options.policy.terms.on_unknown = OnUnknown::Reexecute;
    let policy = RoutePolicy::new(hapax_webhooks::scope(), options)?;
    let callback = Arc::new(callback);
    let handler = move |Extension(webhook): Extension<VerifiedWebhook>, body: Bytes| async move {
        let event = Event { id: webhook.key().as_str().to_owned(), body };
        match callback(event).await {
            Ok(()) => (StatusCode::OK, "received\n".to_owned()),
            // Not 4xx: the callback may have had a part of its effect.
            Err(error) => (StatusCode::INTERNAL_SERVER_ERROR, error),
        }
    };
    // The layer that is added last comes first.
    let idempotency = IdempotencyLayer::new(engine, policy);
    let route = Router::new().route("/stripe", post(handler));
    Ok((route.layer(idempotency.clone()).layer(webhooks), idempotency))
}
