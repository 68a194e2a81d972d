//! The gateway from outside: real sockets, upstreams of every kind.
#![allow(
    clippy::expect_used,
    clippy::panic,
    clippy::unwrap_used,
    reason = "a failure here is a failed test"
)]

mod access;
mod admin;
mod ambiguous;
mod auth;
mod copies;
mod crowd;
mod cut;
mod described;
mod drain;
mod drivers;
mod emptied;
mod failures;
mod feigned;
mod grpc;
mod http2;
mod load;
mod namespaces;
mod nested;
mod npm;
mod observing;
mod operators;
mod proxy;
mod pypi;
mod quarantine;
mod reconcile;
mod refused;
mod routes;
mod sealed_later;
mod stripe;
mod switch;
mod tls;
mod tokens;
mod two;
mod undecided;
mod unretried;
mod wire;
mod world;
