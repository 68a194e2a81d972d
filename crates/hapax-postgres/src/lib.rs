//! Hapax on PostgreSQL.

mod cell;
mod connect;
mod diagnose;
mod error;
mod link;
mod listen;
mod look;
mod options;
mod queue;
mod reader;
mod schema;
mod shared;
mod sql;
mod store;
mod tls;
mod transactional;
mod upkeep;
mod writer;

pub use diagnose::{Finding, Severity, diagnose};
pub use error::{ConnectError, Forgetful, PostgresError};
pub use options::Options;
pub use schema::migrations;
pub use store::{PostgresStats, PostgresStore};
pub use tls::{Connector, Tls};
