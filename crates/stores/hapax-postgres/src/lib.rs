//! Hapax on PostgreSQL: a durable store that any number of processes share.
//!
//! 1. What was acknowledged is committed. A request costs two transactions, a claim and a
//!    completion; requests that wait while one is under way share the next one.
//! 2. Any number of processes use the same tables: gateways, services, workers. The server's clock
//!    is the only one that counts.
//! 3. [`Transactional`](hapax_core::Transactional): a record can commit with the caller's own writes, in
//!    one transaction, by tokio-postgres or (feature `sqlx`) sqlx. [`PgTransactions`] and
//!    `SqlxTransactions` are all of that for functions and HTTP handlers: see
//!    [`hapax_core::transaction`].
//! 4. Nothing waits for ever. A server that is frozen, gone or in the way of a lock is an error
//!    within [`PostgresOptions::timeout`], which says whether it may have happened all the same; and it is
//!    found again by itself.
//! 5. It keeps no state in a session, so that it works behind PgBouncer in transaction mode; only
//!    [`PostgresOptions::prepare`] does, and must be off there, as it is by default, and
//!    [`PostgresOptions::listen`], which finds out by itself.
//!
//! ```no_run
//! # async fn example() -> Result<(), Box<dyn std::error::Error>> {
//! use std::sync::Arc;
//! use hapax_postgres::{PostgresOptions, PostgresStore};
//!
//! let options: PostgresOptions = "postgres://app@db.example/orders".parse()?;
//! let store = PostgresStore::connect(options).await?;
//! let idempotency = hapax_core::Idempotency::builder(Arc::new(store)).build()?;
//! # Ok(()) }
//! ```
//!
//! # When it forgets
//! Not in a crash: a server whose `synchronous_commit` is off, and tables that are unlogged, are
//! refused unless [`PostgresOptions::allow_forgetting`], and the store's own transactions commit with `on`,
//! whatever the setting has become since. A record in a transaction of a caller's is as durable as
//! that: the caller's connection decides, but for [`PgTransactions`], whose COMMIT is. It does forget
//!
//! - in a failover to a standby that is replicated to asynchronously: what was acknowledged last.
//!   Name the standby in `synchronous_standby_names`, or accept it: see [below](#failover);
//! - with `fsync = off`, in a crash of the system;
//! - when it is restored from a backup: everything since.
//!
//! [`diagnose`] looks for the first, as far as standbys are connected, for the second, and for more.
//!
//! # The tables
//! [`PostgresStore::connect`] makes and migrates them, in a transaction that many processes may run
//! at once; or run [`migrations`] yourself. A role that only serves needs `SELECT`, `INSERT`,
//! `UPDATE` and `DELETE` on the three tables, and their two functions, which anybody may call.
//!
//! | column of `hapax_cells` | what |
//! | --- | --- |
//! | `key` | the hash that names the record, keyed where there is a secret |
//! | `state` | `in-flight`, `unknown`, `done`, `released` |
//! | `fence`, `lease_until`, `keep_until` | as the server stamped them, in microseconds since 1970 |
//! | `due_at` | from when on it may be purged: a lease after `keep_until` |
//! | `sweep_at` | when the purge looks at it; indexed, and left alone by what usually happens |
//! | `tag`, `sealed` | which write this is; the record, sealed under the secret |
//!
//! The state is there for operators to count by; it decides nothing, and a row whose state is not
//! the record's is damaged. [`Store::reap`](hapax_core::Store::reap) purges, five hundred rows in a
//! transaction, passing by what is locked; autovacuum does the rest.
//!
//! # The secret
//! Processes that share the tables must name keys by the same secret, or all by none: else the same
//! key has two names, and nothing stops its second execution. Whoever comes with another is
//! refused ([`PostgresConnectError::OtherSecret`]), on every connection that is made. The secret that seals
//! can be replaced ([`PostgresOptions::key_ring`]), the one that names cannot; to begin with another, empty
//! `hapax_secrets` and `hapax_cells`, and confirm that.
//!
//! # Failover
//! With `synchronous_standby_names` set, what was acknowledged is on a standby, and survives its
//! promotion: every COMMIT of the store waits for the standby, and so does one write on each new
//! connection before anything that is read there counts. PostgreSQL shows a commit whose standby is
//! away after a crash, although a promotion loses it: the store takes no notice of such a row until
//! the standby has it. While no standby is there, claims are rejected, and connections fail with
//! [`PostgresConnectError::Unconfirmed`].
//!
//! - Name all hosts: `postgres://app@one,two/orders?target_session_attrs=read-write`. The store uses
//!   the one that is the primary, and finds the next one after a failover. Each host may take
//!   [`PostgresOptions::timeout`] to connect and as much to confirm. A former primary that is cut off from its
//!   standbys is passed over, for it confirms nothing.
//! - Never end a backend that waits for a standby (`pg_cancel_backend`, `pg_terminate_backend`, wait
//!   event `SyncRep`), and never take the standby out of `synchronous_standby_names` to get commits
//!   going again: what waits is acknowledged at once, without a copy.
//! - A cluster manager may take the standby out by itself when it fails. Patroni does, unless
//!   `synchronous_mode_strict` is on: set it. SQL does not show that setting, so [`diagnose`] does not
//!   know it.
//! - A role whose `synchronous_commit` is `local` or `remote_write` acknowledges transactions of its
//!   own before a standby has them on disk. The store's transactions and [`PgTransactions`] use `on`;
//!   a caller's own with [`Transactional`](hapax_core::Transactional) do not.
//!
//! # Emptied tables
//! The tables have an identity of their own. When they are truncated, dropped or replaced by others,
//! what they held would execute again: new keys are rejected then under `block` and `reconcile`
//! ([`PostgresStoreError::Replaced`]), with an error in the log under `reexecute`, until
//! [`PostgresStore::confirm`] says that it was meant. Without [`PostgresOptions::identity`] that is noticed by
//! processes that had the tables open. `DELETE` is not noticed: purging deletes as well.
//!
//! # The clock
//! Leases, retention and fences go by the server's clock. A step forward lapses leases and ends
//! retentions early. A step back makes both last longer, and fences of a key grow regardless; only
//! a key that was purged may see a smaller one, if the clock went back by more than its lease.
//!
//! # TLS
//! With the feature `tls`, a URL with `sslmode=require` makes connections by rustls, to servers
//! whose certificate a root of the system vouches for; [`PostgresOptions::tls`] with `Rustls` names other
//! roots, and a certificate of our own. Without that, connections are in the clear.
//!
//! # Its own connections
//! One connection writes batches ([`PostgresOptions::lanes`]); one loads, up to four carry swaps that have
//! to go alone, and those are closed when they are idle; one pages and purges; one listens, if it
//! is to. A pool would add nothing: each has its task, which never drops a transaction half-way,
//! and nobody borrows one.

mod connect;
mod diagnose;
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
mod schema;
mod secret;
mod server_info;
mod shared;
mod sql;
mod store;
mod tls;
mod transactional;
mod transactions;
mod walk;
mod writer;

pub use diagnose::diagnose;
pub use error::{PostgresConnectError, PostgresStoreError, UnsafeSetting};
pub use options::PostgresOptions;
pub use schema::migrations;
pub use store::{PostgresStats, PostgresStore};
#[cfg(feature = "tls")]
pub use tls::rustls::{Rustls, RustlsCertificates};
pub use tls::{Connector, MakeTls};
#[cfg(feature = "sqlx")]
pub use transactions::sqlx::SqlxTransactions;
pub use transactions::{PgTransactions, PgTx};
