//! Idempotency over HTTP.
//!
//! - [`server`]: the tower layer, for axum, tonic, bare hyper and other tower services.
//! - [`header`]: the headers, and the grammar of `Idempotency-Key`.
//! - [`problem`]: rejections, as RFC 9457 problem details.
//! - [`error_format`]: rejections for gRPC clients.
//! - [`fingerprint`]: the hash that identifies a request.
//! - [`classify`]: the meaning of a response for its key.
//! - [`statuses`]: classes of statuses, by route.
//! - [`stored_response`]: responses as outcomes.

#[cfg(feature = "axum")]
pub mod axum;
mod body;
pub mod classify;
pub mod error_format;
pub mod fingerprint;
pub mod header;
mod length;
mod log_throttle;
pub mod problem;
pub mod server;
pub mod statuses;
pub mod stored_response;

pub use body::{Body, BoxError};
