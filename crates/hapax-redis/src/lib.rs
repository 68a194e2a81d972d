//! Hapax on Redis or Valkey.

mod cell;
mod connection;
mod diagnose;
mod door;
mod error;
mod facts;
mod link;
mod names;
mod options;
mod pages;
mod script;
mod store;
mod target;
mod watches;

pub use diagnose::{Finding, Severity, diagnose};
pub use error::{ConnectError, RedisStoreError};
pub use facts::Unfit;
pub use options::Options;
pub use store::RedisStore;
