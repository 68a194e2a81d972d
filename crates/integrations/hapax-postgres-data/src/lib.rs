//! Detection of duplicate writes in a caller's own tables.
//!
//! A unique constraint, a version or a position makes a write safe to repeat. The rest is the
//! result for the second writer, and the errors of the database for two writers at the same time.
//! This crate provides both, in readable SQL, on PostgreSQL 13 and later:
//!
//! 1. [`InsertOrFetch`]: rows with a key that the business has. Created, or there already, the same or
//!    with a difference; also for each item of a batch.
//! 2. [`EventLog`]: events in streams, appended at the version that their writer expects. Appended, or
//!    appended before at the same positions, or a conflict.
//! 3. [`VersionedRows`]: optimistic locking. Updated, not found, or a conflict with what is there.
//!    [`UpdateLog`]: the same with an operation id, which shows whether a COMMIT whose reply was
//!    lost was executed, and [retries](UpdateLog::retrying).
//!
//! The crate is no object-relational mapper and creates no tables. It uses no record and no store
//! of Hapax: it serves handlers behind a layer as well as services without one.
//!
//! ```no_run
//! # async fn example() -> Result<(), Box<dyn std::error::Error>> {
//! # let (mut client, _) = tokio_postgres::connect("", tokio_postgres::NoTls).await?;
//! use hapax_postgres_data::{InsertOrFetch, Inserted, TableName};
//! use serde_json::{Value, json};
//!
//! // CREATE TABLE shop.orders (id bigserial PRIMARY KEY, customer text, cart bigint,
//! //     amount numeric(12, 2), UNIQUE (customer, cart))
//! let orders = InsertOrFetch::into_table(TableName::in_schema("shop", "orders"))
//!     .key("customer")
//!     .key("cart")
//!     .field("amount")
//!     .also_read("id")
//!     .build()?;
//! let order = json!({"customer": "c-1", "cart": 7, "amount": "99.90"});
//! let transaction = client.transaction().await?;
//! match orders.insert::<_, Value>(&transaction, &order).await? {
//!     Inserted::Created(row) => println!("order {}", row["id"]),
//!     Inserted::Exists(row) => println!("order {}, as before", row["id"]),
//!     Inserted::ExistsWithDifferent { field, row } => {
//!         println!("order {} has another {field}", row["id"]);
//!     }
//! }
//! transaction.commit().await?;
//! # Ok(()) }
//! ```
//!
//! `examples/` has an order and an event-sourced account.
//!
//! # Connections
//! On an [`Executor`]: a plain connection, where each statement commits by itself, or a transaction of
//! the caller's, which commits it together with other writes; of tokio-postgres, or (feature `sqlx`)
//! of sqlx. Make each layout once, for one database, and keep it: its first call has the server
//! plan the statements, so that a unique constraint that is missing is found before it is needed. That
//! constraint has to stay.
//!
//! # Names
//! Tables and columns are the caller's. Names are checked when
//! a layout is built, and always quoted, so case and every character are significant. Values are
//! parameters. `sql()` of each layout shows its statements.
//!
//! # Values
//! Items and rows are serde values, whose fields are named as the columns are: every column of the
//! layout, and no other. They go to the server as JSON, and its types read them, as
//! `json_populate_record` does; rows come back as `row_to_json` writes them. So
//!
//! - what a type can be written as text, it can be given as a string: `uuid`, `timestamptz`,
//!   `numeric`, `bytea` (`\x00ff`), enums;
//! - a `numeric` is read as a number, of which serde keeps 15 digits or so, and so are numbers in
//!   `json` and `jsonb`: money is [read as text](Column::read_as_text), or by serde_json's `RawValue`,
//!   which loses nothing in either direction;
//! - an `f64` that is no number or infinite is null in JSON: give it as a string;
//! - null is null, not the column's default. A column that the layout does not name gets its
//!   default, unless its type is a domain that does not allow null;
//! - a value that is rounded or padded by its column's type is compared after that.
//!
//! How values are compared: [`Column`].
//!
//! # Isolation
//! Everything is made for READ COMMITTED, PostgreSQL's default. Under REPEATABLE READ and SERIALIZABLE a
//! transaction cannot see what others have committed since its first statement.
//!
//! - If that is in its way, it gets [`DataError::Again`]: begin a new transaction. A plain
//!   connection does so automatically.
//! - Otherwise results describe that moment. An append or an update at the true version is a
//!   [`Gap`](AppendResult::Gap) or a [`Conflict`](UpdateResult::Conflict) with an earlier
//!   `current`, a row that was inserted since is [`NotFound`](UpdateResult::NotFound), one that was
//!   deleted since [exists](Inserted::Exists), and an operation that was applied since is a
//!   `Conflict`. So conclude that an operation failed only from a result of a new transaction.
//! - A result of created, appended, updated or applied holds once the transaction commits.
//!
//! # Synchronous standbys
//! A call whose result is that the write was made before ([`Inserted::Exists`], [`AppendResult::AlreadyAppended`],
//! [`IdentifiedUpdate::AlreadyApplied`]) also writes a message to the write-ahead log, so that its COMMIT waits for the
//! synchronous standbys, under the `synchronous_commit` of the transaction. Otherwise the result may be a row whose own
//! COMMIT was cancelled while it waited, or which a crash made visible: a failover loses it. A call without a
//! transaction waits itself. Other results and reads ([`EventLog::read`], [`EventLog::version`],
//! [`VersionedRows::load`], the row of a conflict) do not wait: report them outside only after a write of your own has
//! committed. If that write is on a standby, so is what was read before it.
//!
//! # Errors
//! Errors are classified by SQLSTATE and severity alone. On a plain connection, races that a layout
//! expects always end in a result; everything else is a [`DataError`]. An error of the server ends
//! the caller's transaction, as always in PostgreSQL; a result never does.
//!
//! # Dropped futures
//! Nothing here sends a cancel request. A call that is dropped
//! leaves one statement, which the server executes completely or not at all; the same call, sent
//! again, finds the effect. It waits for locks as long as the connection's `lock_timeout` allows.
//! [`UpdateLog::retrying`], which takes connections itself, commits on its own task. Callers COMMIT
//! their own transactions where they are not dropped; the reply may be lost nonetheless, and then
//! the same call in a new transaction finds the result.

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

pub use error::{DataError, DriverError, ItemError, ServerError, StatementError};
pub use events::{AppendResult, EventLog, EventLogBuilder, IdScope, StoredEvent};
pub use executor::{Answering, Executor, Pooled, SqlParameter, SqlRow, SqlValue};
pub use insert::{InsertOrFetch, InsertOrFetchBuilder, Inserted};
pub use layout::{BatchLimits, Column, LayoutError, TableName};
pub use operations::{
    IdentifiedUpdate, Retried, RetryError, UpdateId, UpdateLog, UpdateLogBuilder,
};
pub use retry::Retry;
pub use versioned::{UpdateResult, VersionedRow, VersionedRows, VersionedRowsBuilder};
