//! Journals: the stores that have the operations of a client.

use std::fmt;
#[cfg(feature = "file")]
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use hapax_core::store::Inspect;
use hapax_core::{Clock, EngineError, Idempotency, StoreError};
#[cfg(feature = "file")]
use hapax_file::{FileOptions, FileStore, OpenError};
use hapax_saga::{DefinitionError, SagasBuildError};

/// The journal of a client: a store of operations, with a schedule and a secret.
///
/// Names become idempotency keys by the secret alone, so that the key is the same after a crash, and in a new
/// journal with the old secret. With another secret every name has another key, and an operation that has
/// happened happens again: back the secret up, and never replace it.
pub struct Journal {
    pub(crate) store: Arc<dyn Inspect>,
    namespace: Option<String>,
    is_new: bool,
}

impl fmt::Debug for Journal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Journal")
    }
}

impl Journal {
    /// Opens a journal in a file, for one process, and creates it if it does not exist. Its secret is in
    /// `PATH.secret`; both files have the mode 0600.
    ///
    /// # Errors
    /// [`JournalError::InUse`] of a journal that another process has open, [`JournalError::SecretMissing`],
    /// [`JournalError::Open`].
    #[cfg(feature = "file")]
    pub fn file(path: impl Into<PathBuf>) -> Result<Self, JournalError> {
        Self::open(FileOptions::new(path))
    }

    #[cfg(feature = "file")]
    fn open(options: FileOptions) -> Result<Self, JournalError> {
        let file = FileStore::open(options)?;
        let is_new = file.is_new();
        Ok(Self { is_new, ..Self::over(file)? })
    }

    /// Opens a journal in a file like [`file`](Self::file), and waits until the process that has it open
    /// has closed it, at most for `wait`.
    ///
    /// # Errors
    /// [`JournalError::InUse`] if the wait is over, [`JournalError::SecretMissing`], [`JournalError::Open`].
    #[cfg(feature = "file")]
    pub async fn file_within(
        path: impl Into<PathBuf>,
        wait: Duration,
    ) -> Result<Self, JournalError> {
        Self::open_within(FileOptions::new(path), wait).await
    }

    /// Opens a journal in a file like [`file_within`](Self::file_within), and creates none: for a process
    /// whose names were sent before, and for one that only lists or resumes operations.
    ///
    /// # Errors
    /// [`JournalError::Missing`] if there is no file, and those of [`file_within`](Self::file_within).
    #[cfg(feature = "file")]
    pub async fn existing_file_within(
        path: impl Into<PathBuf>,
        wait: Duration,
    ) -> Result<Self, JournalError> {
        Self::open_within(FileOptions::new(path).must_exist(true), wait).await
    }

    #[cfg(feature = "file")]
    async fn open_within(options: FileOptions, wait: Duration) -> Result<Self, JournalError> {
        const POLL: Duration = Duration::from_millis(50);
        let until = tokio::time::Instant::now().checked_add(wait);
        loop {
            let options = options.clone();
            // A large file takes a while.
            let opening = tokio::task::spawn_blocking(move || Self::open(options));
            match opening.await.map_err(|error| JournalError::Write(error.into()))? {
                Err(JournalError::InUse { .. })
                    if until.is_none_or(|until| tokio::time::Instant::now() < until) =>
                {
                    tokio::time::sleep(POLL).await;
                }
                opened => return opened,
            }
        }
    }

    /// Uses a store as the journal. Redis and PostgreSQL are for any number of processes.
    ///
    /// # Errors
    /// [`JournalError::NoSecret`], [`JournalError::NoSchedule`].
    pub fn over(store: impl Inspect) -> Result<Self, JournalError> {
        let capabilities = store.capabilities();
        if capabilities.naming().is_none() {
            return Err(JournalError::NoSecret);
        }
        if capabilities.schedule.is_none() {
            return Err(JournalError::NoSchedule);
        }
        Ok(Self { store: Arc::new(store), namespace: None, is_new: false })
    }

    /// Sets the [`Namespace`](hapax_core::Namespace) of the operations: the name of this program among those
    /// that share the journal, which PostgreSQL and Redis require. It is a part of each key.
    #[must_use]
    pub fn namespace(mut self, name: impl Into<String>) -> Self {
        self.namespace = Some(name.into());
        self
    }

    /// Returns whether this opening created the file, with a new secret: every name has another key than in
    /// any other journal. Of a store, `false`.
    #[must_use]
    pub const fn is_new(&self) -> bool {
        self.is_new
    }

    pub(crate) fn engine(&self, clock: Arc<dyn Clock>) -> Result<Idempotency, JournalError> {
        // A disk that synchronizes many writes may take seconds.
        const TIMEOUT: Duration = Duration::from_secs(10);
        let mut engine = Idempotency::builder(Arc::clone(&self.store)).clock(clock);
        if let Some(namespace) = &self.namespace {
            engine = engine.namespace(namespace);
        }
        Ok(engine.store_timeout(TIMEOUT).build()?)
    }
}

#[cfg(feature = "file")]
impl From<OpenError> for JournalError {
    /// Replaces advice that is for servers: a client has no admin address, and a new secret makes new keys.
    fn from(error: OpenError) -> Self {
        match error {
            OpenError::InUse { path, pid, .. } => Self::InUse { path, pid },
            OpenError::SecretMissing { path } => Self::SecretMissing { path },
            OpenError::OtherSecret => Self::OtherSecret,
            OpenError::Missing { path } => Self::Missing { path },
            error => Self::Open(error),
        }
    }
}

#[cfg(feature = "file")]
fn owner(pid: Option<u32>) -> String {
    pid.map_or_else(|| "another process".to_owned(), |pid| format!("process {pid}"))
}

/// Errors of a journal.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum JournalError {
    /// Another process has the file open.
    #[cfg(feature = "file")]
    #[error(
        "expected a journal that no other process has open, found {} open in {}: wait for that process by `Journal::file_within`, or share a journal in Redis or PostgreSQL",
        path.display(),
        owner(*pid)
    )]
    InUse {
        /// The lock file.
        path: PathBuf,
        /// The process that has it, if the lock file has its id.
        pid: Option<u32>,
    },
    /// There is no file at the path, and none is created.
    #[cfg(feature = "file")]
    #[error(
        "expected a journal at {}, found none: correct the path, or restore the file with its secret; a journal that is created in its place has a new secret, and sends every operation under a new key",
        path.display()
    )]
    Missing {
        /// The expected path, absolute.
        path: PathBuf,
    },
    /// The file exists and its secret does not. With a new secret every name would have a new key, and an
    /// operation that has happened would happen again.
    #[cfg(feature = "file")]
    #[error(
        "expected the secret of the journal in {}, found none: restore that file; a journal with a new secret sends every operation under a new key",
        path.display()
    )]
    SecretMissing {
        /// The file.
        path: PathBuf,
    },
    /// The file was written with another secret, under which every name has another key.
    #[cfg(feature = "file")]
    #[error(
        "expected the secret with which the journal was written, found another: restore that secret; a journal with a new secret sends every operation under a new key"
    )]
    OtherSecret,
    /// The file cannot be opened.
    #[cfg(feature = "file")]
    #[error("the journal cannot be opened: {0}")]
    Open(#[source] OpenError),
    /// The store has no secret that names records.
    #[error(
        "expected a store with a secret that names records, found none: set one; without it anyone can compute the keys from the names"
    )]
    NoSecret,
    /// The store has no schedule.
    #[error(
        "expected a store with a schedule, found none: use a file, Redis or PostgreSQL; in PostgreSQL, run the SQL of `hapax sql --part store`"
    )]
    NoSchedule,
    /// The engine cannot start.
    #[error(transparent)]
    Engine(#[from] EngineError),
    /// The sagas cannot start.
    #[error(transparent)]
    Sagas(#[from] SagasBuildError),
    /// The definition of the operations is invalid.
    #[error(transparent)]
    Definition(#[from] DefinitionError),
    /// The operation may still be tried: it has no response, and no reason to stop was recorded.
    #[error(
        "expected an operation that has a response or has stopped, found one that may still be tried: send or resume it until it has, then repeat this"
    )]
    UnderWay,
    /// The store is unavailable, full or damaged.
    #[error(
        "the journal is unavailable: {0}: nothing was sent by this call, or its response is not stored yet: send again with the same name"
    )]
    Store(#[from] StoreError),
    /// An operation could not be read or written.
    #[error("the journal could not read or write the operation: {0}")]
    Write(#[source] Box<dyn std::error::Error + Send + Sync>),
}
