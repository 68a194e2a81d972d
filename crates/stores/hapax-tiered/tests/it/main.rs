//! The cache in front of stores, from outside.
#![allow(
    clippy::expect_used,
    clippy::panic,
    clippy::unwrap_used,
    reason = "a failure here is a failed test"
)]

mod caches;
mod coherence;
mod functions;
#[cfg(feature = "redis")]
mod redis;
mod replays;
mod suite;
mod support;
