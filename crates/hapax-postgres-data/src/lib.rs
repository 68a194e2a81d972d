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
mod sql;
mod verified;

pub use error::{BoxError, DataError, ItemError, ServerError};
pub use events::{Append, EventLog, EventLogBuilder, Ids, Recorded};
pub use executor::{Executor, Pooled};
pub use insert::{InsertOrFetch, InsertOrFetchBuilder, Inserted};
pub use layout::{Column, LayoutError, Limits, Table};
