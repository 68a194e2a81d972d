//! Tests of consumers that are killed and frozen. `cargo xtask torture` runs more of the same.

mod nats;
