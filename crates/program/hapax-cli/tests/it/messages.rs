//! `hapax messages` and `hapax relay`, with real servers.

mod nats;
