//! The testkit against the memory store, and against what it must find.

#![allow(
    clippy::expect_used,
    clippy::panic,
    clippy::unwrap_used,
    reason = "tests fail by panicking"
)]

mod broken;
mod broken_schedules;
mod doubt;
mod faults;
mod history;
mod memory;
mod sim;
