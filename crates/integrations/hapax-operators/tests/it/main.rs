//! The operators' API as a service mounts it.
#![allow(
    clippy::expect_used,
    clippy::panic,
    clippy::unwrap_used,
    reason = "a failure here is a failed test"
)]

mod decisions;
mod faults;
mod find;
mod keys;
mod register;
mod sagas;
mod world;
