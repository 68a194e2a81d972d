//! The store against real servers, which the tests start themselves.
#![allow(
    clippy::expect_used,
    clippy::panic,
    clippy::unwrap_used,
    reason = "a failure here is a failed test"
)]

#[cfg(feature = "cluster")]
mod cluster;
mod connecting;
mod doctor;
mod faults;
mod histories;
mod secrets;
#[cfg(feature = "sentinel")]
mod sentinel;
mod suite;
mod support;
#[cfg(feature = "tls")]
mod tls;
mod waking;
mod weaknesses;
