//! Hapax on PostgreSQL: a durable store that any number of processes share.
//!
//! 1. Acknowledged writes are committed. A request costs two transactions, a claim and a
//!    completion; requests that wait while one is in progress share the next one.
//! 2. Any number of processes use the same tables: gateways, services, workers. Only the server's
//!    clock is used.
//! 3. [`Transactional`](hapax_core::Transactional): a record can commit with the caller's own
//!    writes, in one transaction, by tokio-postgres or (feature `sqlx`) sqlx. [`PgTransactions`]
//!    and `SqlxTransactions` provide all of that for functions and HTTP handlers: see
//!    [`hapax_core::transaction`].
//! 4. Every wait is bounded. If the server is frozen or unreachable, or a row is locked, the
//!    request fails within [`PostgresOptions::timeout`], with an error that distinguishes whether
//!    it may have been executed. Connections are made again automatically.
//! 5. The store keeps no state in a session, so it works behind PgBouncer in transaction mode. The
//!    exceptions are [`PostgresOptions::prepare`], which must be off there, as it is by default,
//!    and [`PostgresOptions::listen`], which detects a pooler.
//!
//! ```no_run
//! # async fn example() -> Result<(), Box<dyn std::error::Error>> {
//! use std::sync::Arc;
//! use hapax_postgres::{PostgresOptions, PostgresStore};
//!
//! let options: PostgresOptions = "postgres://app@db.example/orders".parse()?;
//! let store = PostgresStore::connect(options).await?;
//! let idempotency = hapax_core::Idempotency::builder(Arc::new(store)).namespace("orders").build()?;
//! # Ok(()) }
//! ```
//!
//! # When it loses records
//! Not in a crash: a server whose `synchronous_commit` is off, and tables that are unlogged, are
//! rejected unless [`PostgresOptions::allow_lost_writes`] is set, and the store's own transactions
//! commit with `on`, even if the setting has changed since. A record in a caller's transaction is
//! as durable as that transaction: the caller's connection decides, except for [`PgTransactions`],
//! whose COMMIT uses `on` too. Records are lost
//!
//! - in a failover to a standby with asynchronous replication: the last acknowledged writes. Name
//!   the standby in `synchronous_standby_names`, or accept the loss: see [below](#failover);
//! - with `fsync = off`, in a crash of the system;
//! - when the database is restored from a backup: everything since.
//!
//! [`diagnose`] checks for the first, for the connected standbys, for the second, and for more.
//!
//! # The tables
//! [`PostgresStore::connect`] creates and migrates them, in a transaction that many processes may
//! run at once; or run [`migrations`] yourself. The store uses [`PostgresOptions::schema`] if it is set;
//! else the schema of the search path that has the tables; else the first schema of the search path. If
//! none is set and only a schema outside of the search path has tables, [`PostgresStore::connect`] fails,
//! and [`migrations_beside_others`] creates the tables of a store of its own.
//! A role that only serves needs `SELECT`, `INSERT`, `UPDATE` and `DELETE` on the four tables, and their
//! functions, which every role may call.
//!
//! | column of `hapax_cells` | content |
//! | --- | --- |
//! | `key` | the hash that names the record, keyed if there is a secret |
//! | `state` | `in-flight`, `unknown`, `done`, `released` |
//! | `fence`, `lease_until`, `keep_until` | as the server stamped them, in microseconds since 1970 |
//! | `due_at` | time from which on it may be purged: a lease after `keep_until` |
//! | `sweep_at` | time at which the purge checks the row; indexed, and unchanged by most writes |
//! | `tag`, `sealed` | the write id; the record, sealed under the secret |
//!
//! The state lets operators count records; it decides nothing, and a row whose state is not the
//! record's is damaged. [`Store::reap`](hapax_core::Store::reap) purges, five hundred rows in a
//! transaction, and skips locked rows; autovacuum does the rest.
//!
//! # The schedule
//! [`hapax_core::schedule`] is the table `hapax_schedule`: operation id, entry id, queue, `due_at` in
//! microseconds since 1970, and the sealed note. Its changes are batched on a connection of their own.
//! A poll is one statement, by an index on queue and time. An entry can commit with the caller's own
//! writes ([`TransactionalSchedule`](hapax_core::schedule::TransactionalSchedule)), in every
//! transaction in which a record can.
//!
//! Tables of an earlier release have no schedule. Without permission to migrate them
//! ([`PostgresOptions::migrate`]) the store serves records, and its schedule is absent
//! ([`PostgresStoreError::NoSchedule`]).
//!
//! # The secret
//! Processes that share the tables must name keys by the same secret, or all by none: else the same
//! key has two names, and nothing prevents its second execution. A process with another secret is
//! rejected ([`PostgresConnectError::OtherSecret`]), on every connection that is made. The secret
//! that seals can be replaced ([`PostgresOptions::key_ring`]), also where none names keys
//! ([`KeyRing::unnamed`](hapax_core::KeyRing::unnamed)); the secret that names cannot. To
//! begin with another, empty `hapax_secrets`, `hapax_cells` and `hapax_schedule`, and confirm that.
//!
//! # Failover
//! With `synchronous_standby_names` set, acknowledged writes are on a standby and survive its
//! promotion: every COMMIT of the store waits for the standby, and so does one write on each new
//! connection before its reads are used, and one with each claim or load that wrote nothing. After a
//! crash, or when the session of a COMMIT that waits is cancelled or terminated, PostgreSQL shows a
//! commit that its standby does not have, although a promotion loses it: the store does not use such a
//! row until the standby has it. While no standby is connected, claims are rejected, and connections fail with
//! [`PostgresConnectError::Unconfirmed`].
//!
//! - Name all hosts: `postgres://app@one,two/orders?target_session_attrs=read-write`. The store
//!   uses the one that is the primary, and finds the next one after a failover. Each host may take
//!   [`PostgresOptions::timeout`] to connect and as much to confirm. A former primary that is cut
//!   off from its standbys is skipped, because it confirms nothing.
//! - Never end a backend that waits for a standby (`pg_cancel_backend`, `pg_terminate_backend`,
//!   wait event `SyncRep`), and never take the standby out of `synchronous_standby_names` to
//!   unblock commits: waiting commits are then acknowledged at once, without replication. The store's own
//!   connections notice a cancelled wait; those of your pool do not.
//! - A cluster manager may take the standby out automatically when it fails. Patroni does, unless
//!   `synchronous_mode_strict` is on: set it. SQL does not show that setting, so [`diagnose`]
//!   cannot check it.
//! - A role whose `synchronous_commit` is `local` or `remote_write` acknowledges its own
//!   transactions before a standby has them on disk. The store's transactions and
//!   [`PgTransactions`] use `on`; a caller's own with [`Transactional`](hapax_core::Transactional)
//!   do not.
//!
//! # Emptied tables
//! The tables have an identity. When they are truncated, dropped or replaced by others, their
//! operations would execute again: new keys are then rejected under `block` and `reconcile`
//! ([`PostgresStoreError::Replaced`]), with an error in the log under `reexecute`, until
//! [`PostgresStore::confirm`] accepts the tables. Entries of the schedule are rejected too. Without [`PostgresOptions::identity`] only
//! processes that had the tables open detect it. `DELETE` is not detected: purging deletes as well. An
//! emptied `hapax_schedule` is not detected either: its operations are not continued.
//!
//! # The clock
//! Leases, retention and fences use the server's clock. A step forward lapses leases and ends
//! retentions early. A step back makes both last longer, and fences of a key grow regardless; only
//! a key that was purged may get a smaller one, if the clock went back by more than its lease.
//!
//! # TLS
//! With the feature `tls`, a URL with `sslmode=require` makes connections by rustls, to servers
//! whose certificate is signed by a root of the system; [`PostgresOptions::tls`] with `Rustls` sets
//! other roots, and a client certificate. Without the feature, connections are not encrypted.
//!
//! # Connections of the store
//! One connection writes batches ([`PostgresOptions::lanes`]); one loads; up to four are for swaps
//! that must be sent alone, and are closed when idle, as are the two that change the schedule; one
//! pages, purges and polls the schedule; one listens, if enabled. A pool would add nothing: each connection has one task, which never drops a transaction
//! before its end, and is never lent.

mod connect;
mod diagnose;
mod driver;
mod error;
mod hosts;
mod identity;
mod link;
mod listen;
mod maintenance;
mod options;
#[cfg(feature = "sqlx")]
mod pool;
mod queue;
mod reader;
mod record;
mod schedule;
mod schema;
mod secret;
mod server_info;
mod shared;
mod sql;
mod store;
mod swaps;
mod tls;
mod transactional;
mod transactions;
mod walk;
mod writer;

pub use diagnose::diagnose;
pub use driver::PostgresDriver;
pub use error::{PostgresConnectError, PostgresStoreError, UnsafeSetting};
pub use link::CONFIRM_READS;
pub use options::PostgresOptions;
pub use schema::{SchemaName, SchemaNameError, migrations, migrations_beside_others};
pub use store::{PostgresStats, PostgresStore};
#[cfg(feature = "tls")]
pub use tls::rustls::{Rustls, RustlsCertificates};
pub use tls::{Connector, MakeTls};
#[cfg(feature = "sqlx")]
pub use transactions::sqlx::SqlxTransactions;
pub use transactions::{PgTransactions, PgTx};
