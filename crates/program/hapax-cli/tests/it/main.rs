//! The program from outside.
#![allow(
    clippy::expect_used,
    clippy::panic,
    clippy::unwrap_used,
    reason = "a failure here is a failed test"
)]

mod auth;
mod backup;
mod call;
mod check;
mod clients;
mod config;
mod damage;
mod decisions;
mod demo;
mod deploy;
mod emptied;
mod find;
mod first;
mod gateway;
mod help;
mod keys;
mod load;
mod messages;
mod missing;
mod quarantine;
mod reconciled;
mod reload;
mod rotation;
mod saga;
mod service;
mod session;
mod shared;
mod tls;
mod tokens;
mod torture;
mod upgrade;
mod waiting;
mod wire;
mod world;
