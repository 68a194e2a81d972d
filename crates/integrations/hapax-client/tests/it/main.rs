//! Tests of the public API against servers on loopback.
#![allow(
    clippy::expect_used,
    clippy::panic,
    clippy::unwrap_used,
    reason = "a failure here is a failed test"
)]

mod accepted;
mod bank;
mod credentials;
#[cfg(feature = "file")]
mod cuts;
mod cutter;
#[cfg(feature = "file")]
mod examples;
mod expires;
mod faulty_logs;
#[cfg(feature = "file")]
mod files;
mod frees;
#[cfg(feature = "file")]
mod full_disk;
mod hooked_store;
mod http2;
mod http2_bank;
mod http2_resets;
mod keys;
#[cfg(feature = "file")]
mod kills;
#[cfg(feature = "tower")]
mod layer;
mod lists;
#[cfg(feature = "reqwest-middleware")]
mod middleware;
mod postgres;
mod protocol_cuts;
mod redis;
#[cfg(feature = "file")]
mod refusals;
#[cfg(feature = "reqwest")]
mod requests;
mod responses;
#[cfg(feature = "file")]
mod roles;
mod secrets;
mod sends;
mod shared;
mod stats;
mod storm;
mod takeovers;
mod unawaited;
mod world;
