//! Tests of the public API.
#![allow(
    clippy::expect_used,
    clippy::panic,
    clippy::unwrap_used,
    reason = "a failure here is a failed test"
)]

mod canonical_json;
mod codec;
mod engine;
mod examples;
mod json_pointers;
mod keys;
mod machine;
mod sequence;
