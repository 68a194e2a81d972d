//! Tests of clients that are killed with their servers.
#![allow(clippy::panic, clippy::unwrap_used, reason = "a failure here is a failed test")]

mod calls;
mod jobs;
mod postgres;
