//! The layer in front of the HTTP layer, over the memory store and a clock that tests move.
#![allow(
    clippy::expect_used,
    clippy::panic,
    clippy::unwrap_used,
    reason = "a failure here is a failed test"
)]

mod bodies;
mod config;
mod connections;
mod duplicates;
mod ids;
mod logs;
mod providers;
mod services;
mod signatures;
#[cfg(feature = "sink")]
mod sink;
mod smuggling;
mod world;
