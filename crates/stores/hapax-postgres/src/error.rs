//! What can go wrong, and what is then known.

use std::sync::Arc;

use hapax_core::StoreError;
use tokio_postgres::Error;
use tokio_postgres::error::{DbError, Severity, SqlState};

/// Why there is no connection to a store.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum PostgresConnectError {
    /// The URL is none, or names a parameter that is not known.
    #[error("not a PostgreSQL URL: {0}")]
    Url(#[source] Error),
    /// A pool has an option that the store cannot use.
    #[error("the pool has {0}: change the pool, or open the store by its own options")]
    Pool(&'static str),
    /// A certificate or a key cannot be read, or there is no root to trust.
    #[error("certificates: {0}")]
    Certificates(String),
    /// The server cannot be reached, or does not let us in.
    #[error("cannot connect to PostgreSQL: {0}")]
    Connect(#[source] Error),
    /// No answer in time.
    #[error("PostgreSQL gives no answer")]
    TimedOut,
    /// A write on the new connection was not confirmed in time: no synchronous standby acknowledged it.
    #[error(
        "a COMMIT waits for a synchronous standby that does not acknowledge it, so that nothing read \
         there counts: see pg_stat_replication and synchronous_standby_names, and bring the standby \
         back"
    )]
    Unconfirmed,
    /// The server is too old.
    #[error("PostgreSQL {found} is too old: 13 is the oldest that works")]
    TooOld {
        /// Its major version.
        found: i32,
    },
    /// The server is a standby: it lags behind, and nothing can be written.
    #[error(
        "the server is a standby; name all hosts: \
         postgres://USER@ONE,TWO/DATABASE?target_session_attrs=read-write"
    )]
    Standby,
    /// The server acknowledges what a crash of it may undo, and nobody said that this is
    /// acceptable.
    #[error(
        "{0}: a crash would make it forget what it acknowledged; no gateway starts there; switch it on"
    )]
    Forgetful(UnsafeSetting),
    /// The tables are missing, or older than this build needs, and migrating was switched off.
    #[error("{}", not_migrated(*.found, *.needed))]
    NotMigrated {
        /// Their version; `None` if there are none.
        found: Option<i32>,
        /// This build's.
        needed: i32,
    },
    /// The tables belong to a newer build.
    #[error("the tables are of version {found}, this build knows {known}")]
    Newer {
        /// Their version.
        found: i32,
        /// The newest that this build knows.
        known: i32,
    },
    /// The migration failed; nothing of it was done.
    #[error("the migration failed: {0}")]
    Migration(#[source] Error),
    /// Other processes write under another secret, or under none while one is given here, or the
    /// other way round: their keys would be other keys, and nothing would protect one from the
    /// other.
    #[error(
        "the database is used with another secret than was given, or none was: give the secret of the \
         other processes; to begin with another, empty hapax_secrets and hapax_cells, and confirm that"
    )]
    OtherSecret,
    /// A query failed while the server was looked at.
    #[error("the server cannot be looked at: {0}")]
    Query(#[source] Error),
}

impl PostgresConnectError {
    /// Returns whether another attempt may succeed without any change to the server's configuration or
    /// to the options: the server was not reached, did not answer in time, is starting up or shutting
    /// down, or has no connection to spare; it is a standby, or its own standbys did not confirm a write.
    ///
    /// A wrong password, a database that does not exist, a certificate that is not trusted and another
    /// secret are none of these.
    #[must_use]
    pub fn is_unreachable(&self) -> bool {
        match self {
            // A failover goes on: a host becomes the primary, or its standby connects.
            Self::TimedOut | Self::Standby | Self::Unconfirmed => true,
            Self::Connect(error) | Self::Query(error) | Self::Migration(error) => is_away(error),
            _ => false,
        }
    }
}

fn is_away(error: &Error) -> bool {
    if let Some(db) = error.as_db_error() {
        let code = db.code().code();
        // 08: a pooler has no server. 57P01 to 57P03: it shuts down, crashed, or starts up. 53300: all
        // of its connections are taken.
        return code.starts_with("08") || code.starts_with("57P0") || code == "53300";
    }
    let source = std::error::Error::source(error);
    let io = source.and_then(|source| source.downcast_ref::<std::io::Error>());
    // TLS reports a certificate that is not trusted as invalid data.
    error.is_closed() || io.is_some_and(|io| io.kind() != std::io::ErrorKind::InvalidData)
}

fn not_migrated(found: Option<i32>, needed: i32) -> String {
    match found {
        None => "there are no tables yet: who opens the store to write in it makes them".into(),
        Some(found) => format!(
            "the tables are of version {found}, and this build needs {needed}: who opens the store \
             to write in it brings them up to date"
        ),
    }
}

/// What makes a server forget.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub enum UnsafeSetting {
    /// `synchronous_commit = off`: the last moments before a crash are lost.
    SynchronousCommit,
    /// The table is unlogged: emptied by a crash.
    Unlogged,
}

impl std::fmt::Display for UnsafeSetting {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::SynchronousCommit => "synchronous_commit is off",
            Self::Unlogged => "the table hapax_cells is unlogged",
        })
    }
}

/// Why the store gave no answer: the source within a [`StoreError`].
#[derive(Clone, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum PostgresStoreError {
    /// Too much is waiting already.
    #[error("too many requests wait for the database")]
    QueueFull,
    /// The store was closed, or its runtime is shutting down.
    #[error("the store is closed")]
    Closed,
    /// The tables are not those that were used before: new keys are rejected under `block` and
    /// `reconcile`. See [`PostgresStore::confirm`](crate::PostgresStore::confirm).
    #[error(
        "the store was emptied or replaced since it was last used, so that what it held would execute \
         again: `hapax store confirm` accepts that"
    )]
    Replaced,
    /// The server did not answer in time.
    #[error("the database gave no answer in time")]
    TimedOut,
    /// Its turn did not come in time, so it was never sent.
    #[error("the request was not sent in time")]
    NotSent,
    /// There is no connection.
    #[error("no connection to the database: {0}")]
    Connect(#[source] Arc<PostgresConnectError>),
    /// Somebody else holds the row: a transaction that was left open, most likely.
    #[error("the record is locked by another transaction")]
    Locked,
    /// The server refused the statement.
    #[error("the database refused it ({}): {}", .0.code().code(), .0.message())]
    Rejected(#[source] Box<DbError>),
    /// The connection broke.
    #[error("the connection to the database broke: {0}")]
    Broken(#[source] Arc<Error>),
    /// The answer is not one to this statement.
    #[error("the database gave an answer that makes no sense")]
    Nonsense,
    /// The table was rewritten during a walk over it.
    #[error("the table was rewritten, as by VACUUM FULL, during a walk over it: walk again")]
    Rewritten,
    /// In a transaction of the caller's: there is none.
    #[error("there is no transaction")]
    NoTransaction,
    /// In a transaction of the caller's: there is a savepoint. To roll back to it would undo the
    /// record, and leave the rest.
    #[error("a record is not written within a savepoint")]
    Savepoint,
    /// In a transaction of the caller's: the swap expects that there is no record. That is a
    /// claim, and claims commit by themselves.
    #[error("a claim is not written within a transaction")]
    ClaimInTransaction,
    /// In a transaction of the caller's: the record is as expected, but it was written after the
    /// transaction had begun, which under REPEATABLE READ or SERIALIZABLE does not see it.
    #[error("the transaction began before the record was last written, and does not see it")]
    OldTransaction,
    /// In a transaction that was begun here: whoever had it committed it or rolled it back, so that
    /// this is another one, or none.
    #[error("the work has ended its transaction by itself")]
    EndedEarly,
}

/// What became of a transaction that did not get to its end.
#[derive(Clone, Debug)]
pub(crate) enum TransactionFailure {
    /// The server said that it did not happen.
    Rejected(Box<DbError>),
    /// Nobody knows.
    Lost(PostgresStoreError),
}

impl TransactionFailure {
    /// By SQLSTATE and severity alone; texts are translated.
    pub(crate) fn of(error: Error) -> Self {
        let ends = |db: &DbError| {
            // A server, or a pooler between, that ends the connection (FATAL, PANIC) answers no
            // particular statement: with BEGIN to COMMIT sent at once, the COMMIT may have been
            // carried out before. 08: the pooler lost the server. 57P: the server goes away.
            !matches!(db.parsed_severity(), Some(Severity::Error))
                || db.code().code().starts_with("08")
                || db.code().code().starts_with("57P")
        };
        match error.as_db_error() {
            Some(db) if !ends(db) => Self::Rejected(Box::new(db.clone())),
            _ => Self::Lost(PostgresStoreError::Broken(Arc::new(error))),
        }
    }

    /// BEGIN failed: what followed it ran outside of a transaction, if at all.
    pub(crate) fn of_session(error: Error) -> Self {
        Self::Lost(PostgresStoreError::Broken(Arc::new(error)))
    }

    /// For a statement in a transaction of its own, whose COMMIT was sent along.
    pub(crate) fn into_store_error(self) -> StoreError {
        match self {
            // It was rolled back.
            Self::Rejected(db) => refused(db),
            // It may have been committed, or may yet be.
            Self::Lost(error) => StoreError::ambiguous(error),
        }
    }

    /// For a statement that changes nothing: whatever happened, nothing did.
    pub(crate) fn into_read_error(self) -> StoreError {
        match self {
            Self::Rejected(db) => refused(db),
            Self::Lost(error) => StoreError::unavailable(error),
        }
    }

    /// Whether a lock was not to be had in time.
    pub(crate) fn is_locked(&self) -> bool {
        matches!(self, Self::Rejected(db) if *db.code() == SqlState::LOCK_NOT_AVAILABLE)
    }

    /// Whether the connection must not be used again: another server has to be found, or the
    /// statements prepared anew.
    pub(crate) fn ends_connection(&self) -> bool {
        match self {
            Self::Lost(_) => true,
            Self::Rejected(db) => {
                *db.code() == SqlState::READ_ONLY_SQL_TRANSACTION // it became a standby
                    || *db.code() == SqlState::INVALID_SQL_STATEMENT_NAME // a pooler in between
                    || *db.code() == SqlState::DUPLICATE_PSTATEMENT // likewise
                    || *db.code() == SqlState::FEATURE_NOT_SUPPORTED // the table was altered
            }
        }
    }
}

/// An error that the server answered a statement with, whose transaction it rolled back.
pub(crate) fn refused(db: Box<DbError>) -> StoreError {
    let code = db.code();
    if *code == SqlState::DATA_CORRUPTED || *code == SqlState::INDEX_CORRUPTED {
        // The page or the index is damaged: nothing that is read there counts.
        StoreError::corrupt(PostgresStoreError::Rejected(db))
    } else if *code == SqlState::LOCK_NOT_AVAILABLE {
        StoreError::unavailable(PostgresStoreError::Locked)
    } else {
        // 40001, 40P01: rolled back in favour of another. 57014: statement_timeout. 53: out of
        // disk, memory or connections. 25006: a standby. 42: the tables are not there, or not
        // ours to write. 23: a row that the tables do not allow. Whatever it is, it is undone.
        StoreError::unavailable(PostgresStoreError::Rejected(db))
    }
}
