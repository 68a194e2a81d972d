//! The tower layer.
//!
//! 1. A request is protected if its route has a policy, its method is among the policy's, and it
//!    has an `Idempotency-Key` (or needs one). Any other request passes through untouched.
//! 2. The body is read, up to a limit, before the claim. An invalid key or a missing scope is
//!    rejected before that.
//! 3. From the claim on, the handler runs on a task of its own: if the client disconnects, the
//!    handler is not cancelled and its outcome is recorded. The handler finds an
//!    [`ExecutionHandle`] in the request's extensions.
//! 4. The response is read, up to a limit, classified ([`crate::classify`]) and recorded; only then
//!    is it sent to the client. A response that is too large, or a stream, is recorded as final
//!    without its body before any of it is sent; a client that disconnects after that cancels the
//!    stream.
//! 5. Errors that the handler returns are passed on unchanged. They make the outcome *unknown*.
//! 6. On a route with [`RouteOptions::transactions`], the handler's writes in its [`transaction`]
//!    commit with its response.
//!
//! # Frameworks
//!
//! | framework | use | example, executed by the tests |
//! | --- | --- | --- |
//! | axum | `Router::layer` | `examples/axum.rs`, with a drain at the end |
//! | tonic | `Server::builder().layer`; rejections are gRPC statuses | `examples/tonic` |
//! | bare hyper | around a `service_fn` | `examples/hyper.rs` |
//! | actix-web | not this layer: see below | |
//!
//! actix-web does not use tower services. Its handlers stay on the thread that accepted the
//! request, and their futures are not `Send`, while an execution of this layer is a task that
//! outlives its client's connection. Two ways remain. One is the gateway, in front of the service.
//! The other is a claim in the handler: claim with
//! [`Idempotency::claim`](hapax_core::Idempotency::claim), with [`header::key`](crate::header::key)
//! and a [`fingerprint::HttpRequest`](crate::fingerprint::HttpRequest); store responses as
//! [`stored_response::StoredResponse`](crate::stored_response::StoredResponse); execute with
//! [`Lease::keep_alive`](hapax_core::Lease::keep_alive) in `actix_web::rt::spawn`, so that a client
//! that disconnects does not cancel the execution.
//!
//! Middleware for browsers, such as `CorsLayer` of tower-http, belongs around this layer. Scripts
//! can then read rejections and replays like any response, and preflight requests are answered.
//!
//! Inside of a router that strips a path prefix, the layer sees the stripped path. Set
//! [`RouteOptions::target`] there, or two routes may count as one.
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
mod response_info;
mod scope;
mod service;
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
pub use response_info::{ResponseInfo, ResponseSource};
pub use scope::{MissingScope, ScopeError, ScopeSource};
pub use service::IdempotencyService;
