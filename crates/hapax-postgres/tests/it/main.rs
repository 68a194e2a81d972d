//! The store against real servers, which the tests start themselves.
#![allow(
    clippy::expect_used,
    clippy::panic,
    clippy::unwrap_used,
    reason = "a failure here is a failed test"
)]

mod connecting;
mod faults;
mod histories;
mod locks;
mod purging;
#[path = "../../examples/deadlocks/scramble.rs"]
mod scramble;
mod secrets;
mod suite;
mod support;
mod transactions;
mod waking;
