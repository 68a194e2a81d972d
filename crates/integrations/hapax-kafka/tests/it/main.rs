//! Tests on the mock cluster of librdkafka, and on the cluster of `KAFKA_BOOTSTRAP` if it is set.
#![allow(
    clippy::expect_used,
    clippy::panic,
    clippy::unwrap_used,
    reason = "a failure here is a failed test"
)]

mod kafka;
mod postgres;
