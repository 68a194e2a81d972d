//! The tower layer.
//!
//! 1. A request is protected if its route has a policy, its method is among the policy's, and it
//!    has an `Idempotency-Key` (or needs one). Any other passes through untouched.
//! 2. Its body is read, up to a limit, before anything is claimed. A bad key or an unknown caller
//!    is refused before that.
//! 3. From the claim on, the handler runs on a task of its own: a client that hangs up neither
//!    cancels it nor loses its outcome. The handler finds an [`ExecutionHandle`] in the request's
//!    extensions.
//! 4. The response is read, up to a limit, classified ([`crate::classify`]) and recorded; only
//!    then does the client get it. One that is too large, or a stream, is final without its body
//!    before the client gets any of it; a client that hangs up after that does cancel the stream.
//! 5. The handler's own errors are untouched. What they mean for the key is *unknown*.
//! 6. Where a route has [`RouteOptions::transactions`], what the handler writes in its
//!    [`transaction`] commits with its response.
//!
//! # Frameworks
//!
//! | framework | how | example, run by the tests |
//! | --- | --- | --- |
//! | axum | `Router::layer` | `examples/axum.rs`, with a drain at the end |
//! | tonic | `Server::builder().layer`; refusals are gRPC statuses | `examples/tonic` |
//! | bare hyper | around a `service_fn` | `examples/hyper.rs` |
//! | actix-web | not this layer: see below | |
//!
//! actix-web is not made of tower services: its handlers live on the thread that accepted the
//! request and are no `Send` futures, while an execution here is a task of its own that outlives
//! its client's connection. There, put the gateway in front; or claim in the handler, by
//! [`Idempotency::claim`](hapax_core::Idempotency::claim) with [`header::key`](crate::header::key)
//! and a [`fingerprint::Asked`](crate::fingerprint::HttpRequest), keep answers as
//! [`stored_response::Stored`](crate::stored_response::StoredResponse), and run the work under
//! [`Lease::keep_alive`](hapax_core::Lease::keep_alive) in `actix_web::rt::spawn`, so that a client
//! that hangs up does not cancel it.
//!
//! What answers web pages, such as `CorsLayer` of tower-http, goes around this layer: then scripts
//! may read refusals and replays as they may read any answer, and preflights are answered.
//!
//! A layer inside of a router that strips a path prefix sees the stripped path: give
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
