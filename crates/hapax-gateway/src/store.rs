//! Opening a store by its URL.

use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use hapax::{Inspect, MemoryCapacity, MemoryStore, Secret, SystemClock};
use hapax_embedded::{EmbeddedStore, OpenError, Options, SecretSource};

use crate::config::StoreUrl;

/// Requests that may wait for a file. Their bytes are the tighter limit where they are large.
const QUEUED_REQUESTS: usize = 4096;

/// A store that is open.
#[derive(Clone, Debug)]
pub struct Opened {
    /// The store.
    pub store: Arc<dyn Inspect>,
    /// The secret that names its records: the engine needs the same.
    pub secret: Option<Secret>,
    file: Option<Arc<EmbeddedStore>>,
}

/// Why a store did not open.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum StoreOpenError {
    /// The secret: it is missing, unreadable, or another store's.
    #[error("--secret-file: {}: {reason}", path.display())]
    Secret {
        /// Which file: the secret's, or the store's that has another one.
        path: PathBuf,
        /// What is wrong with it.
        reason: String,
    },
    /// The file of the store.
    #[error("{}: {source}", path.display())]
    File {
        /// Which file.
        path: PathBuf,
        /// What is wrong with it.
        source: OpenError,
    },
    /// The runtime is shutting down.
    #[error("the runtime is shutting down")]
    Shutdown,
}

impl Opened {
    /// Any store, such as one that a test made.
    #[must_use]
    pub fn new(store: Arc<dyn Inspect>, secret: Option<Secret>) -> Self {
        Self { store, secret, file: None }
    }

    /// Opens the store at `url`, which may take `memory` bytes: for pages and what waits to be
    /// written, or for its records if they are nowhere else. A file's lock will name `admin` as
    /// where its records can be asked about.
    ///
    /// # Errors
    /// [`StoreOpenError`].
    pub async fn open(
        url: &StoreUrl,
        secret_file: Option<&Path>,
        admin: Option<SocketAddr>,
        memory: usize,
    ) -> Result<Self, StoreOpenError> {
        match url {
            StoreUrl::Memory => {
                let secret = secret_file.map(read_secret).transpose()?;
                let capacity = MemoryCapacity { bytes: memory, ..MemoryCapacity::default() };
                let store = MemoryStore::new(Arc::new(SystemClock), capacity);
                Ok(Self::new(Arc::new(store), secret))
            }
            StoreUrl::File(path) => {
                let third = memory / 3;
                let mut options = Options::new(path)
                    .cache_bytes(third)
                    .queue(QUEUED_REQUESTS, third)
                    .reading_bytes(third);
                if let Some(secret_file) = secret_file {
                    // One is made at the store's own place only. A file that somebody names is
                    // there, or its name is a mistake.
                    read_secret(secret_file)?;
                    options = options.secret(SecretSource::File(secret_file.into()));
                }
                if let Some(admin) = admin {
                    options = options.admin(admin);
                }
                // It blocks on the disk.
                let opened =
                    tokio::task::spawn_blocking(move || EmbeddedStore::open(options)).await;
                let store = opened
                    .map_err(|_| StoreOpenError::Shutdown)?
                    .map_err(|source| secret_or_file(path, source))?;
                let store = Arc::new(store);
                Ok(Self {
                    secret: store.secret().cloned(),
                    store: Arc::clone(&store) as Arc<dyn Inspect>,
                    file: Some(store),
                })
            }
        }
    }

    /// Closes it, so that another process can open it at once.
    pub async fn close(&self) {
        if let Some(file) = &self.file {
            file.close().await;
        }
    }
}

/// What is wrong with the secret is for whoever configures it to mend.
fn secret_or_file(file: &Path, source: OpenError) -> StoreOpenError {
    let path = match &source {
        OpenError::SecretMissing { path } | OpenError::SecretUnreadable { path } => path.clone(),
        OpenError::OtherSecret => file.into(),
        _ => return StoreOpenError::File { path: file.into(), source },
    };
    StoreOpenError::Secret { path, reason: source.to_string() }
}

fn read_secret(path: &Path) -> Result<Secret, StoreOpenError> {
    let wrong = |reason: String| StoreOpenError::Secret { path: path.into(), reason };
    let text = std::fs::read_to_string(path).map_err(|error| wrong(error.to_string()))?;
    Secret::from_hex(&text).ok_or_else(|| wrong("64 hexadecimal digits were expected".into()))
}
