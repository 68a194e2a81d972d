//! The wire contract from outside. Tests are named after its numbered statements.
#![allow(
    clippy::expect_used,
    clippy::panic,
    clippy::unwrap_used,
    reason = "a failure here is a failed test"
)]

mod classify;
mod conformance;
mod debug;
mod error_format;
mod examples;
mod fingerprint;
mod golden;
mod header;
mod problem;
mod server;
mod stored_response;
