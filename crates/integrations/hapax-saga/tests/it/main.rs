//! Tests of the public API, and a simulation.
#![allow(
    clippy::expect_used,
    clippy::panic,
    clippy::unwrap_used,
    reason = "a failure here is a failed test"
)]

mod kills;
mod pauses;
mod postgres;
mod redis;
#[cfg(feature = "rehearsal")]
mod rehearsal;
#[cfg(feature = "axum")]
mod routes;
mod shop;
mod sim;
mod stats;
mod steps;
mod stuck;
mod versions;
mod world;
