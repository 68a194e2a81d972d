//! The embedded store from outside.
#![allow(
    clippy::expect_used,
    clippy::panic,
    clippy::unwrap_used,
    reason = "a failure here is a failed test"
)]

mod backups;
mod emptied;
mod faults;
mod files;
mod flips;
mod functions;
mod histories;
mod images;
mod lock;
mod medium;
mod schedule;
mod suite;
mod support;
