//! Writes that happen once.
//!
//! # Values
//! todo

mod error;
mod events;
mod executor;
mod insert;
mod items;
mod layout;
mod operations;
mod retry;
mod sql;
mod verified;
mod versioned;

pub use error::{BoxError, DataError, ItemError, ServerError};
pub use events::{Append, EventLog, EventLogBuilder, Ids, Recorded};
pub use executor::{Executor, Pooled};
pub use insert::{InsertOrFetch, InsertOrFetchBuilder, Inserted};
pub use layout::{Column, LayoutError, Limits, Table};
pub use operations::{Operation, Operations, OperationsBuilder, Retried, RetryError};
pub use retry::Retry;
pub use versioned::{Loaded, Update, VersionedRows, VersionedRowsBuilder};
