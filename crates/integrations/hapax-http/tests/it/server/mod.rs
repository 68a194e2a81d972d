//! The layer, over the memory store, in paused time.

mod answers;
mod compatible;
mod drain;
mod execution;
mod grpc;
mod keys;
mod lengths;
#[cfg(feature = "axum")]
mod nested;
mod options;
mod outages;
mod outcomes;
mod reconcile;
mod scopes;
mod sizes;
mod trailers;
mod transactions;
mod world;
