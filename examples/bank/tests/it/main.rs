//! Tests of the bank against a real server, which they start themselves.
#![allow(
    clippy::expect_used,
    clippy::panic,
    clippy::unwrap_used,
    reason = "a failure here is a failed test"
)]

/// All tests need PostgreSQL; `--skip postgres::` leaves them out.
mod postgres {
    mod client;
    mod handlers;
    mod kills;
    mod ledger;
    mod process;
    mod transfers;
}
