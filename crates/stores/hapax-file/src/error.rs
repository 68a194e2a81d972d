//! What can go wrong.

use std::io;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};

use hapax_core::{KeyRingError, StoreError};
use redb::StorageError;

use crate::queue::PushError;

/// Why a database did not open. Nothing was changed, but that files may have been created.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum OpenError {
    /// Another process, or another store of this one, has it open.
    #[error("{} is held by {}", path.display(), who(*pid, *admin))]
    InUse {
        /// The lock file.
        path: PathBuf,
        /// The process that holds it, if it said so.
        pid: Option<u32>,
        /// Where that process can be asked, if it said so.
        admin: Option<SocketAddr>,
    },
    /// The database exists and its secret does not. A new one would make every record
    /// unreadable and every key look unused.
    #[error(
        "the database exists but its secret {} is missing: put it back, or move the database away",
        path.display()
    )]
    SecretMissing {
        /// Where it was expected.
        path: PathBuf,
    },
    /// The file holds no secrets.
    #[error("{} holds no secret: {source}", path.display())]
    SecretUnreadable {
        /// Which file.
        path: PathBuf,
        /// What is wrong with it.
        source: KeyRingError,
    },
    /// The database was written under another secret, or under none while one is given, or the
    /// other way round.
    #[error(
        "the database was written under another secret than the one given, or under none: give the \
         secret that belongs to it; to begin with another, move the database away, after which every \
         key looks unused, and confirm the new one"
    )]
    OtherSecret,
    /// A format that this build does not know.
    #[error("the database has format {found}; this build reads format {known}")]
    Format {
        /// The database's.
        found: u64,
        /// This build's.
        known: u64,
    },
    /// A part of the file without which nothing else can be used is damaged.
    #[error(
        "the database is damaged and cannot be opened: {0}; write what is whole to a new file with \
         `hapax doctor --salvage OLD NEW`, and keep the old one"
    )]
    Damaged(#[source] redb::Error),
    /// Not a database, or one that something else keeps from opening.
    #[error("the database cannot be opened: {0}")]
    Database(#[source] redb::Error),
    /// A file could not be read, written or locked.
    #[error("{}: {source}", path.display())]
    Io {
        /// Which file.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
}

impl OpenError {
    pub(crate) fn io(path: &Path, source: io::Error) -> Self {
        Self::Io { path: path.into(), source }
    }

    /// Whether there was no room on the disk.
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

/// Whether there was no room on the disk.
pub(crate) fn is_full(error: &redb::Error) -> bool {
    use io::ErrorKind::{QuotaExceeded, StorageFull};
    matches!(error, redb::Error::Io(error) if matches!(error.kind(), StorageFull | QuotaExceeded))
}

/// Checks that a database can be at `path`: it is no folder, and is in one.
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

/// Why the store gave no answer: the source within a [`StoreError`].
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum FileStoreError {
    /// Too much is waiting for the disk already.
    #[error("too many requests wait for the disk")]
    QueueFull,
    /// The store was closed.
    #[error("the store is closed")]
    Closed,
    /// New keys are refused so that what is under way can still be recorded.
    #[error("only {free} bytes are free on the disk, new keys need {needed}")]
    DiskFull {
        /// Bytes that are free.
        free: u64,
        /// The least that new keys need.
        needed: u64,
    },
    /// The disk is full, and the reserve is used up: nothing is recorded until there is room.
    #[error("the disk is full: make room")]
    MemoryFull,
    /// The file is not the one that was used before: new keys are rejected under `block` and
    /// `reconcile`. See [`FileStore::expect`](crate::FileStore::expect).
    #[error(
        "the file is another one than was used before, so that what that one held would execute again: \
         put it back, or accept this one with `hapax store confirm`"
    )]
    Replaced,
    /// A write failed, and the database is not open again yet.
    #[error("a write failed and the database is being reopened")]
    Reopening,
    /// Too many large records are on their way to callers: see
    /// [`Options::reading_bytes`](crate::FileOptions::reading_bytes).
    #[error("too many wait for large records")]
    Crowded,
    /// The thread that wrote gave no answer.
    #[error("the write was interrupted")]
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

/// For an operation that changed nothing: damage is damage, anything else may pass.
pub(crate) fn unchanged(error: StorageError) -> StoreError {
    match error {
        StorageError::Corrupted(_) => StoreError::corrupt(FileStoreError::engine(error)),
        other => StoreError::unavailable(FileStoreError::engine(other)),
    }
}
