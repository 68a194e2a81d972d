//! The store against real servers, which the tests start themselves.
#![allow(
    clippy::expect_used,
    clippy::panic,
    clippy::unwrap_used,
    reason = "a failure here is a failed test"
)]

/// Whoever leaves Redis out leaves out what is in here: `--skip redis::`.
mod redis;
