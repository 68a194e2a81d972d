//! Runs the examples as processes, which are killed in the middle of their work, and the adapter's suite.
#![allow(
    clippy::expect_used,
    clippy::panic,
    clippy::unwrap_used,
    reason = "a failure here is a failed test"
)]

mod nats;
mod postgres;
mod rabbitmq;
