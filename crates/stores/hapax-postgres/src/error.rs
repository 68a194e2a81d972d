//! Errors, and what is known about the write after each.

use std::io;
use std::sync::Arc;

use hapax_core::StoreError;
use tokio_postgres::Error;
use tokio_postgres::error::{DbError, Severity, SqlState};

/// Reasons for which a store was not opened, or has no connection.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum PostgresConnectError {
    /// The URL is invalid, or has an unknown parameter.
    #[error("not a PostgreSQL URL: {0}")]
    Url(#[source] Error),
    /// A pool has an option that the store cannot use.
    #[error("the pool has {0}: change the pool, or open the store by its own options")]
    Pool(&'static str),
    /// Parameters for certificates contradict each other, or this build has no TLS.
    #[error("the certificates cannot be used: {0}")]
    CertificateParameters(&'static str),
    /// A certificate or a key is not valid, they do not belong together, or there is no root to trust.
    #[error("the certificates cannot be used: {0}")]
    Certificates(String),
    /// The file of a certificate or key cannot be read.
    #[error(
        "expected to read the file of a certificate or key, found an error: {path}: {source}: check the path"
    )]
    CertificateFile {
        /// The path.
        path: String,
        /// The error.
        source: io::Error,
    },
    /// The server cannot be reached, or rejects the login.
    #[error("cannot connect to PostgreSQL: {0}")]
    Connect(#[source] Error),
    /// The server did not answer in time.
    #[error("PostgreSQL did not answer in time")]
    TimedOut,
    /// A write on the new connection was not confirmed in time: no synchronous standby acknowledged
    /// it.
    #[error(
        "a COMMIT waits for a synchronous standby that does not acknowledge it, so that no read there \
         is confirmed: see pg_stat_replication and synchronous_standby_names, and bring the standby \
         back"
    )]
    Unconfirmed,
    /// The server is too old.
    #[error("PostgreSQL {found} is too old: 13 is the oldest that works")]
    TooOld {
        /// The server's major version.
        found: i32,
    },
    /// The server is a standby: it lags behind, and cannot be written.
    #[error(
        "the server is a standby; name all hosts: \
         postgres://USER@ONE,TWO/DATABASE?target_session_attrs=read-write"
    )]
    Standby,
    /// The server acknowledges writes that its crash may undo, and the options do not accept that.
    #[error(
        "{0}: a crash would lose acknowledged writes, so the store does not open; switch it on"
    )]
    Forgetful(UnsafeSetting),
    /// The tables are missing, or older than this build needs, and migration is switched off.
    #[error("{}", not_migrated(*.found, *.needed))]
    NotMigrated {
        /// The version of the tables; `None` if there are none.
        found: Option<i32>,
        /// The version that this build needs.
        needed: i32,
    },
    /// There are no tables, or no process has written to them, and the options require a store that was
    /// used before. Nothing was created.
    #[error(
        "expected a store that was used before, found {}: restore it, or correct the URL; a store \
         that is created in its place has no records",
        if *.tables { "tables that were never used, or were emptied" } else { "no tables" }
    )]
    Missing {
        /// Whether there are tables.
        tables: bool,
    },
    /// The tables belong to a later build.
    #[error("the tables have version {found}, this build supports {known}: run a newer build")]
    Newer {
        /// The version of the tables.
        found: i32,
        /// The latest version that this build supports.
        known: i32,
    },
    /// The migration failed and was rolled back.
    #[error("the migration failed: {0}")]
    Migration(#[source] Error),
    /// The search path of the role has no tables, and other schemas of the database have some. New ones would
    /// be empty, so that operations execute again.
    #[error(
        "expected the tables of the store in the search path, found them in the schema {found}: run ALTER ROLE \
         … SET search_path = … with that schema; for a store of its own, run the SQL of `hapax sql --part \
         store --new-schema --schema NAME` with the schema of the search path, or name another schema in \
         `PostgresOptions::schema`"
    )]
    OtherSchema {
        /// The schemas that have tables.
        found: String,
    },
    /// No schema of the search path exists.
    #[error(
        "expected a search path with a schema that exists, found none: create the schema, or run ALTER ROLE … \
         SET search_path = …"
    )]
    NoSchema,
    /// Other processes use another secret, or none while one is given here, or one while none is
    /// given. Their names of keys would differ, so that one key could execute twice.
    #[error(
        "expected the secret that names the stored records, found another secret, or one on one \
         side only: set the secret of the other processes, or none if they have none; a ring with `name \
         none` seals the records of a store that began without a secret"
    )]
    OtherSecret,
    /// A query failed while the server was checked.
    #[error("the server cannot be checked: {0}")]
    Query(#[source] Error),
}

impl PostgresConnectError {
    /// Returns whether another attempt may succeed without any change to the server's configuration
    /// or to the options: the server was not reached, did not answer in time, is starting up or
    /// shutting down, or has no free connection; it is a standby, or its own standbys did not
    /// confirm a write.
    ///
    /// A wrong password, a database that does not exist, an untrusted certificate and another
    /// secret are none of these.
    #[must_use]
    pub fn is_unreachable(&self) -> bool {
        match self {
            // A failover is in progress: a host becomes the primary, or its standby connects.
            Self::TimedOut | Self::Standby | Self::Unconfirmed => true,
            Self::Connect(error) | Self::Query(error) | Self::Migration(error) => is_away(error),
            _ => false,
        }
    }
}

fn is_away(error: &Error) -> bool {
    if let Some(db) = error.as_db_error() {
        let code = db.code().code();
        // 08: a pooler has no server. 57P01 to 57P03: the server shuts down, crashed, or starts up.
        // 53300: all of its connections are in use.
        return code.starts_with("08") || code.starts_with("57P0") || code == "53300";
    }
    let source = std::error::Error::source(error);
    let io = source.and_then(|source| source.downcast_ref::<std::io::Error>());
    // TLS reports an untrusted certificate as invalid data.
    error.is_closed() || io.is_some_and(|io| io.kind() != std::io::ErrorKind::InvalidData)
}

fn not_migrated(found: Option<i32>, needed: i32) -> String {
    match found {
        None => "there are no tables yet: open the store for writing, which creates them".into(),
        Some(found) => format!(
            "the tables are of version {found}, and this build needs {needed}: open the store for \
             writing, which migrates them"
        ),
    }
}

/// Settings under which a server loses acknowledged writes in a crash.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub enum UnsafeSetting {
    /// `synchronous_commit = off`: the last moments before a crash are lost.
    SynchronousCommit,
    /// A table is unlogged: a crash empties it.
    Unlogged,
}

impl std::fmt::Display for UnsafeSetting {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::SynchronousCommit => "synchronous_commit is off",
            Self::Unlogged => "the table hapax_cells or hapax_schedule is unlogged",
        })
    }
}

/// Reasons for which the store gave no answer: the source within a [`StoreError`].
#[derive(Clone, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum PostgresStoreError {
    /// Too many requests wait already.
    #[error("too many requests wait for the database")]
    QueueFull,
    /// The store was closed, or its runtime is shutting down.
    #[error("the store is closed")]
    Closed,
    /// The tables are not those that were used before: new keys are rejected under `block` and
    /// `reconcile`. See [`PostgresStore::confirm`](crate::PostgresStore::confirm).
    #[error(
        "expected the tables that were used before, found emptied or replaced ones; operations whose \
         records were lost would execute again: restore the tables, or accept them with \
         `hapax store confirm`"
    )]
    Replaced,
    /// The tables have no schedule, because they were not migrated.
    #[error(
        "expected the table and functions of migration 3 (hapax_schedule), found none: open the store \
         for writing, which migrates the tables, or run the SQL of `hapax sql --part store`"
    )]
    NoSchedule,
    /// The server did not answer in time.
    #[error("the database did not answer in time")]
    TimedOut,
    /// The request waited in the queue until its timeout, so it was never sent.
    #[error("the request was not sent in time")]
    NotSent,
    /// There is no connection.
    #[error("no connection to the database: {0}")]
    Connect(#[source] Arc<PostgresConnectError>),
    /// Another transaction has locked the row, most likely one that was left open.
    #[error(
        "another transaction holds a lock on the record: end it (see pg_stat_activity), or retry"
    )]
    Locked,
    /// The server rejected the statement.
    #[error("the database rejected the statement ({}): {}", .0.code().code(), .0.message())]
    Rejected(#[source] Box<DbError>),
    /// The connection broke.
    #[error("the connection to the database broke: {0}")]
    Broken(#[source] Arc<Error>),
    /// The answer does not fit the statement.
    #[error(
        "the database gave an unexpected answer: check that no other program writes to the tables"
    )]
    UnexpectedAnswer,
    /// The table was rewritten during a walk over it.
    #[error("the table was rewritten, as by VACUUM FULL, during a walk over it: walk again")]
    Rewritten,
    /// The caller's connection is in no transaction.
    #[error("the connection is in no transaction: begin one before the swap")]
    NoTransaction,
    /// The caller's transaction has a savepoint. Rolling back to it would undo the record and keep
    /// the rest.
    #[error(
        "expected a transaction without an open savepoint, found one: release the savepoint, then write the record or the entry"
    )]
    Savepoint,
    /// The swap in the caller's transaction expects that there is no record. That is a claim, and
    /// claims commit on their own.
    #[error("a claim is not written within a transaction: claim before it begins")]
    ClaimInTransaction,
    /// The record is as expected, but it was written after the caller's transaction began, which
    /// under REPEATABLE READ or SERIALIZABLE does not see it.
    #[error(
        "the transaction began before the record was last written and does not see it: begin a new transaction"
    )]
    OldTransaction,
    /// The operation committed or rolled back the transaction that was begun for it, so that the
    /// connection is in another one, or in none.
    #[error("the operation ended its transaction itself: leave COMMIT and ROLLBACK to the library")]
    EndedEarly,
}

/// The failure of a transaction.
#[derive(Clone, Debug)]
pub(crate) enum TransactionFailure {
    /// The server answered that the transaction was rolled back.
    Rejected(Box<DbError>),
    /// The transaction may have been committed.
    Lost(PostgresStoreError),
}

impl TransactionFailure {
    /// Classifies an error by SQLSTATE and severity alone, because texts are translated.
    pub(crate) fn of(error: Error) -> Self {
        let ends = |db: &DbError| {
            // A server or pooler that ends the connection (FATAL, PANIC) answers no particular
            // statement: since BEGIN to COMMIT are sent at once, the COMMIT may have been executed
            // before. 08: the pooler lost the server. 57P: the server shuts down.
            !matches!(db.parsed_severity(), Some(Severity::Error))
                || db.code().code().starts_with("08")
                || db.code().code().starts_with("57P")
        };
        match error.as_db_error() {
            Some(db) if !ends(db) => Self::Rejected(Box::new(db.clone())),
            _ => Self::Lost(PostgresStoreError::Broken(Arc::new(error))),
        }
    }

    /// Classifies a failed BEGIN: the statements after it were executed outside of a transaction,
    /// if at all.
    pub(crate) fn of_session(error: Error) -> Self {
        Self::Lost(PostgresStoreError::Broken(Arc::new(error)))
    }

    /// Returns the error of a statement in a separate transaction, whose COMMIT was sent along.
    pub(crate) fn into_store_error(self) -> StoreError {
        match self {
            // It was rolled back.
            Self::Rejected(db) => refused(db),
            // It may have been committed, or may still be.
            Self::Lost(error) => StoreError::ambiguous(error),
        }
    }

    /// Returns the error of a statement that changes nothing in any case.
    pub(crate) fn into_read_error(self) -> StoreError {
        match self {
            Self::Rejected(db) => refused(db),
            Self::Lost(error) => StoreError::unavailable(error),
        }
    }

    /// Returns whether a lock was not acquired in time.
    pub(crate) fn is_locked(&self) -> bool {
        matches!(self, Self::Rejected(db) if *db.code() == SqlState::LOCK_NOT_AVAILABLE)
    }

    /// Returns whether the connection must not be used again, because another server must be found
    /// or the statements prepared anew.
    pub(crate) fn ends_connection(&self) -> bool {
        match self {
            Self::Lost(_) => true,
            Self::Rejected(db) => {
                *db.code() == SqlState::READ_ONLY_SQL_TRANSACTION // it became a standby
                    || *db.code() == SqlState::INVALID_SQL_STATEMENT_NAME // a pooler in between
                    || *db.code() == SqlState::DUPLICATE_PSTATEMENT // a pooler in between, too
                    || *db.code() == SqlState::FEATURE_NOT_SUPPORTED // the table was altered
            }
        }
    }
}

/// Returns whether the server rejected a statement because a table or a function does not exist.
pub(crate) fn is_missing(code: &SqlState) -> bool {
    *code == SqlState::UNDEFINED_TABLE || *code == SqlState::UNDEFINED_FUNCTION
}

/// Returns the error of a statement that the server rejected, whose transaction it rolled back.
pub(crate) fn refused(db: Box<DbError>) -> StoreError {
    let code = db.code();
    if *code == SqlState::DATA_CORRUPTED || *code == SqlState::INDEX_CORRUPTED {
        // The page or the index is damaged: reads of it are not valid.
        StoreError::corrupt(PostgresStoreError::Rejected(db))
    } else if *code == SqlState::LOCK_NOT_AVAILABLE {
        StoreError::unavailable(PostgresStoreError::Locked)
    } else {
        // 40001, 40P01: rolled back in favour of another. 57014: statement_timeout. 53: out of
        // disk, memory or connections. 25006: a standby. 42: missing tables or permissions. 23: a
        // row that the tables do not allow. In every case the transaction is undone.
        StoreError::unavailable(PostgresStoreError::Rejected(db))
    }
}
