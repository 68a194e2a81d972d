//! Runs the examples as processes, which are killed in the middle of sagas.
#![allow(
    clippy::expect_used,
    clippy::panic,
    clippy::unwrap_used,
    reason = "a failure here is a failed test"
)]

mod approval;
mod postgres;
mod world;
