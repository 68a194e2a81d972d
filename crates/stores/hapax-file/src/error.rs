//! Errors of the store.

use std::io;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};

use hapax_core::{KeyRingError, StoreError};
use redb::StorageError;

use crate::queue::PushError;

/// Reasons for which a database did not open. Nothing was changed, except that files may have been
/// created.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum OpenError {
    /// Another process, or another store of this process, has the database open.
    #[error("{} is open in {}: stop that process, or use its admin address", path.display(), who(*pid, *admin))]
    InUse {
        /// The lock file.
        path: PathBuf,
        /// The process that has the lock, if the lock file has its id.
        pid: Option<u32>,
        /// The operators' address of that process, if the lock file has it.
        admin: Option<SocketAddr>,
    },
    /// There is no database, and the options require one. Nothing was created.
    #[error(
        "expected a database at {}, found none: restore it, mount its disk, or correct the path; a \
         store that is created in its place has no records",
        path.display()
    )]
    Missing {
        /// The expected path, absolute.
        path: PathBuf,
    },
    /// The database exists and its secret does not. A new secret would make every record unreadable
    /// and every key look unused.
    #[error(
        "the database exists but its secret {} is missing: put it back, or move the database away",
        path.display()
    )]
    SecretMissing {
        /// The expected path.
        path: PathBuf,
    },
    /// The file contains no valid secrets.
    #[error("{} contains no valid secret: {source}", path.display())]
    SecretUnreadable {
        /// The file.
        path: PathBuf,
        /// The reason.
        source: KeyRingError,
    },
    /// The file has the line `name none`. A database whose secret is in a file has one that names its records.
    #[error(
        "expected a line `name` with the secret of the database in {}, found `name none`: that is for stores on \
         servers that began without a secret",
        path.display()
    )]
    Unnamed {
        /// The file.
        path: PathBuf,
    },
    /// The database was written under another secret, or under none while one is given, or under
    /// one while none is given.
    #[error(
        "expected the secret with which the database was written, found another secret, or one on \
         one side only: set the secret of the database, or none if it was written without one"
    )]
    OtherSecret,
    /// The database has a format that this build does not support.
    #[error("the database has format {found}; this build reads format {known}")]
    Format {
        /// The database's format.
        found: u64,
        /// This build's format.
        known: u64,
    },
    /// A part of the file on which everything depends is damaged.
    #[error(
        "the database is damaged and cannot be opened: {0}; write the intact records to a new file with \
         `hapax doctor --salvage OLD NEW`, and keep the old one"
    )]
    Damaged(#[source] redb::Error),
    /// The file is no database, or it cannot be opened for another reason.
    #[error("the database cannot be opened: {0}")]
    Database(#[source] redb::Error),
    /// A file could not be read, written or locked.
    #[error("{}: {source}", path.display())]
    Io {
        /// The file.
        path: PathBuf,
        /// The reason.
        source: io::Error,
    },
}

impl OpenError {
    pub(crate) fn io(path: &Path, source: io::Error) -> Self {
        Self::Io { path: path.into(), source }
    }

    /// Returns whether the disk was full.
    pub(crate) fn is_full(&self) -> bool {
        matches!(self, Self::Database(error) if is_full(error))
    }

    pub(crate) fn database(error: impl Into<redb::Error>) -> Self {
        match error.into() {
            error @ redb::Error::Corrupted(_) => Self::Damaged(error),
            error => Self::Database(error),
        }
    }
}

/// Returns whether the disk was full.
pub(crate) fn is_full(error: &redb::Error) -> bool {
    use io::ErrorKind::{QuotaExceeded, StorageFull};
    matches!(error, redb::Error::Io(error) if matches!(error.kind(), StorageFull | QuotaExceeded))
}

/// Checks that a database can be at `path`: the path is no folder, and its folder exists.
pub(crate) fn check_place(path: &Path) -> Result<(), OpenError> {
    let wrong = |kind, what: String| Err(OpenError::io(path, io::Error::new(kind, what)));
    if path.is_dir() {
        let file = path.join("hapax.db");
        let what = format!("this is a folder: name a file in it, such as {}", file.display());
        return wrong(io::ErrorKind::IsADirectory, what);
    }
    let folder = crate::backing::directory(path);
    if folder.is_dir() {
        return Ok(());
    }
    let what = format!("there is no folder {}: create it, or name another one", folder.display());
    wrong(io::ErrorKind::NotFound, what)
}

/// Checks that there is a file at `path`.
pub(crate) fn check_file(path: &Path) -> Result<(), OpenError> {
    let wrong = |kind, what| Err(OpenError::io(path, io::Error::new(kind, what)));
    if path.is_dir() {
        return wrong(io::ErrorKind::IsADirectory, "this is a folder: name the database in it");
    }
    match path.try_exists() {
        Ok(true) => Ok(()),
        Ok(false) => {
            wrong(io::ErrorKind::NotFound, "there is no such file: name a database that exists")
        }
        Err(error) => Err(OpenError::io(path, error)),
    }
}

fn who(pid: Option<u32>, admin: Option<SocketAddr>) -> String {
    match (pid, admin) {
        (Some(pid), Some(admin)) => format!("process {pid}, which answers at {admin}"),
        (Some(pid), None) => format!("process {pid}"),
        (None, _) => "another process".to_owned(),
    }
}

/// Reasons for which the store gave no answer: the source within a [`StoreError`].
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum FileStoreError {
    /// Too many requests wait for the disk already.
    #[error("too many requests wait for the disk: retry")]
    QueueFull,
    /// The store was closed.
    #[error("the store is closed: open it again")]
    Closed,
    /// New keys are rejected so that requests in progress can still be recorded.
    #[error("only {free} bytes are free on the disk, new keys need {needed}: free disk space")]
    DiskFull {
        /// Free bytes.
        free: u64,
        /// Free bytes from which on new keys are accepted.
        needed: u64,
    },
    /// The disk is full and the reserve is used up: nothing is recorded until there is space.
    #[error("the disk is full: free disk space")]
    ReserveUsed,
    /// The file is not the one that was used before: new keys are rejected under `block` and
    /// `reconcile`. See [`FileStore::expect`](crate::FileStore::expect).
    #[error(
        "expected the file that was used before, found another one; operations of the former file \
         would execute again: restore that file, or accept this one with `hapax store confirm`"
    )]
    Replaced,
    /// The file was moved, removed or replaced while it was open: the next process would not find what is written.
    #[error(
        "expected the file that this process opened at its path, found none or another one: move it back, or stop this process \
         before another file is put in its place; until then nothing is written"
    )]
    Moved,
    /// A write failed, and the database is not reopened yet.
    #[error("a write failed and the database is being reopened")]
    Reopening,
    /// Too many requests wait for memory to read large records: see
    /// [`FileOptions::reading_bytes`](crate::FileOptions::reading_bytes).
    #[error("too many requests wait for memory to read large records")]
    ReadersFull,
    /// The thread ended before it answered.
    #[error("the store's thread ended before it answered")]
    Interrupted,
    /// The database engine failed.
    #[error("the database failed: {0}")]
    Engine(#[source] redb::Error),
}

impl FileStoreError {
    pub(crate) fn engine(error: impl Into<redb::Error>) -> Self {
        Self::Engine(error.into())
    }
}

impl From<PushError> for FileStoreError {
    fn from(refused: PushError) -> Self {
        match refused {
            PushError::Full => Self::QueueFull,
            PushError::Closed => Self::Closed,
        }
    }
}

/// Returns the error of an operation that changed nothing: damage is corrupt, all else unavailable.
pub(crate) fn unchanged(error: StorageError) -> StoreError {
    match error {
        StorageError::Corrupted(_) => StoreError::corrupt(FileStoreError::engine(error)),
        other => StoreError::unavailable(FileStoreError::engine(other)),
    }
}
