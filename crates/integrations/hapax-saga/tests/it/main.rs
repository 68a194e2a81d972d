//! Tests of the public API, and a simulation.
#![allow(
    clippy::expect_used,
    clippy::panic,
    clippy::unwrap_used,
    reason = "a failure here is a failed test"
)]

mod away;
mod decisions;
mod deferred;
mod entries;
mod full;
mod generations;
mod hooks;
mod kills;
mod load;
mod outages;
mod pauses;
mod postgres;
mod processes;
mod quarantine;
mod redis;
#[cfg(feature = "rehearsal")]
mod rehearsal;
#[cfg(feature = "axum")]
mod routes;
mod runs;
mod shop;
mod sim;
mod stats;
mod steps;
mod stuck;
mod suspects;
mod suspended;
mod tries;
mod versions;
mod woken;
mod world;
