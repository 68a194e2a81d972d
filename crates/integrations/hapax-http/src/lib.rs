//! Idempotency over HTTP.
//!
//! - [`server`]: the tower layer, for axum, tonic, bare hyper and other tower services.
//! - [`header`]: the headers, and the grammar of `Idempotency-Key`.
//! - [`problem`]: rejections, as RFC 9457 problem details.
//! - [`error_format`]: rejections for gRPC clients.
//! - [`fingerprint`]: fingerprints of requests.
//! - [`classify`]: outcome classes of responses.
//! - [`statuses`]: a route's lists of statuses.
//! - [`stored_response`]: responses as outcomes.

#[cfg(feature = "axum")]
pub mod axum;
mod body;
pub mod classify;
pub mod error_format;
pub mod fingerprint;
pub mod header;
mod length;
#[doc(hidden)]
pub mod log_throttle;
pub mod problem;
pub mod server;
pub mod statuses;
pub mod stored_response;

pub use body::{Body, BoxError};
