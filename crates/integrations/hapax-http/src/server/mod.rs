//! The tower layer.
//!
//! 1. A request is protected if its route has a policy, its method is among the policy's, and it
//!    has an `Idempotency-Key` (or needs one). Any other request passes through unchanged.
//! 2. Its body is read, up to a limit, before the claim. An invalid key or an unknown caller is
//!    rejected before that.
//! 3. From the claim on, a client that disconnects neither cancels the handler nor loses its outcome:
//!    the handler continues on a task. So does one that takes longer than a third of the lease; a
//!    handler therefore must not use task-local values of services around the layer. The request's
//!    extensions have an [`ExecutionHandle`] for the handler.
//! 4. The response is read, up to a limit, classified ([`crate::classify`]) and recorded; only then
//!    does the client get it. A response that is too large, or a stream, is recorded as final without
//!    its body before the client gets any of it; a client that disconnects after that cancels the
//!    stream.
//! 5. Errors of the handler's service are passed on. They leave the outcome *unknown*.
//! 6. On a route with [`RouteOptions::transactions`], the handler's writes in its [`transaction`]
//!    commit with its response.
//!
//! # Frameworks
//!
//! | framework | use | example, executed by the tests |
//! | --- | --- | --- |
//! | axum | `Router::layer` | `examples/payments.rs`, with a drain at the end |
//! | tonic | `Server::builder().layer`; rejections are gRPC statuses | `examples/tonic` |
//! | bare hyper | around a `service_fn` | `examples/hyper.rs` |
//! | actix-web | not this layer: see below | |
//!
//! actix-web does not consist of tower services: its handlers stay on the thread that accepted the
//! request and are no `Send` futures, while an execution here outlives its client's connection on a
//! task. Put the gateway in front; or claim in the handler, by
//! [`Idempotency::claim`](hapax_core::Idempotency::claim) with [`header::key`](crate::header::key) and
//! an [`HttpRequest`](crate::fingerprint::HttpRequest), store responses as
//! [`StoredResponse`](crate::stored_response::StoredResponse), and execute under
//! [`Lease::keep_alive`](hapax_core::Lease::keep_alive) in `actix_web::rt::spawn`, so that a client
//! that disconnects does not cancel the execution.
//!
//! Middleware for web pages, such as `CorsLayer` of tower-http, goes around this layer: then scripts
//! may read rejections and replays like any response, and preflights are answered.
//!
//! A request is compared by the target that the client sent. Routers of axum 0.8 may be nested: with the
//! feature `axum`, the layer takes the target that reached the outermost one. Inside of any other service
//! that changes the target, such as a router that strips a prefix, the layer sees the changed one, and two
//! routes may count as one: place the layer outside, or have [`RouteOptions::target`] return what the
//! client sent, which an outer service keeps in an extension of the request.
//!
//! ```
//! use hapax_core::MemoryStore;
//! use hapax_http::server::IdempotencyLayer;
//!
//! # #[tokio::main(flavor = "current_thread")]
//! # async fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let layer = IdempotencyLayer::builder(MemoryStore::default()).require_key().build()?;
//!
//! let app: axum::Router = axum::Router::new()
//!     .route("/orders", axum::routing::post(|| async { "ordered" }))
//!     .layer(layer);
//! # drop(app);
//! # Ok(())
//! # }
//! ```

mod budget;
mod collect;
mod concurrency;
mod describe;
mod drain;
mod execute;
mod future;
mod handle;
mod layer;
mod observe;
mod policy;
mod protect;
mod recent;
mod reconcile;
mod redirect;
mod request_names;
mod response_info;
mod scope;
mod service;
mod token_claims;
pub mod transaction;

pub use drain::DrainReport;
pub use future::ResponseFuture;
pub use handle::ExecutionHandle;
pub use layer::{IdempotencyLayer, IdempotencyLayerBuilder, LayerError};
pub use observe::{Observer, RecordStatus, RequestEvent};
pub use policy::{
    ClassifyFn, CompletionOutage, KeyRule, Reconcile, ReconcileRequest, ReconciledResponse,
    RouteError, RouteOptions, RoutePolicy, StoreOutage, TargetFn,
};
pub use reconcile::UnretriedRequest;
pub use request_names::{RequestNames, RequestNamesSlot, caller_hash};
pub use response_info::{ResponseInfo, ResponseSource};
pub use scope::{CookieName, InvalidScopePart, MissingScope, ScopeError, ScopePart, ScopeSource};
pub use service::IdempotencyService;
pub use token_claims::{ClaimName, InvalidIssuer, TokenClaims};
