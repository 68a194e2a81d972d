//! Tests of inboxes and consumers.
#![allow(
    clippy::expect_used,
    clippy::panic,
    clippy::unwrap_used,
    reason = "a failure here is a failed test"
)]

mod batches;
mod claims;
mod crashes;
mod dead_letters;
mod delays;
mod faults;
mod ids;
mod lifecycle;
mod memory;
mod namespaces;
mod order;
mod quarantine;
mod relay;
mod transactions;
mod world;
