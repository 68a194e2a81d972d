//! Tests of inboxes and consumers.
#![allow(
    clippy::expect_used,
    clippy::panic,
    clippy::unwrap_used,
    reason = "a failure here is a failed test"
)]

mod claims;
mod ids;
mod letters;
mod lifecycle;
mod relay;
mod world;
