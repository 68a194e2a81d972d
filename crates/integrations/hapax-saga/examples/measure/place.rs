//! Stores, each with a file or a server of its own.

use std::sync::Arc;
use std::time::Duration;

use hapax_core::Store;
use hapax_file::{FileOptions, FileStore};
use hapax_postgres::{PostgresOptions, PostgresStore};
use hapax_redis::{RedisOptions, RedisStore};
use hapax_testkit::servers::{
    PostgresServer, PostgresServerOptions, RedisServer, RedisServerOptions,
};

use crate::Outcome;

/// Timeout of the stores: a checkpoint on a busy disk may delay a commit.
const TIMEOUT: Duration = Duration::from_secs(60);

/// A place in which processes open a store.
pub(crate) struct Place {
    pub(crate) name: &'static str,
    server: Server,
}

enum Server {
    /// The store of the only process.
    File {
        store: Arc<FileStore>,
        _folder: tempfile::TempDir,
    },
    Redis(RedisServer),
    Postgres(PostgresServer),
}

impl Place {
    pub(crate) const NAMES: [&str; 3] = ["file", "redis", "postgres"];

    pub(crate) async fn start(name: &str) -> Outcome<Self> {
        let (name, server) = match name {
            "file" => {
                let folder = tempfile::tempdir()?;
                let options = FileOptions::new(folder.path().join("sagas.db"));
                let store = Arc::new(FileStore::open(options)?);
                ("file", Server::File { store, _folder: folder })
            }
            "redis" => {
                // A rewrite of the log takes a core for seconds, in some rounds only.
                let options = RedisServerOptions::new().set("auto-aof-rewrite-percentage", "0");
                ("redis", Server::Redis(RedisServer::start_with(options).await))
            }
            "postgres" => {
                let options = PostgresServerOptions::new()
                    .set("fsync", "on")
                    .set("shared_buffers", "256MB")
                    .set("max_wal_size", "4GB");
                ("postgres", Server::Postgres(PostgresServer::start_with(options).await))
            }
            other => {
                return Err(
                    format!("expected file, redis, postgres or all, found `{other}`").into()
                );
            }
        };
        Ok(Self { name, server })
    }

    /// Opens the store as another process does. A file has one process.
    pub(crate) async fn open(&self) -> Outcome<Arc<dyn Store>> {
        Ok(match &self.server {
            Server::File { store, .. } => store.clone(),
            Server::Redis(server) => {
                let options = RedisOptions::new(server.url()).timeout(TIMEOUT);
                Arc::new(RedisStore::connect(options).await?)
            }
            Server::Postgres(server) => {
                let options: PostgresOptions = server.url("postgres").parse()?;
                Arc::new(PostgresStore::connect(options.timeout(TIMEOUT)).await?)
            }
        })
    }

    /// Returns how many processes can open it.
    pub(crate) const fn processes(&self) -> usize {
        match self.server {
            Server::File { .. } => 1,
            Server::Redis(_) | Server::Postgres(_) => 3,
        }
    }

    /// Lets the server bring its statistics up to date, as its own maintenance does in time.
    pub(crate) async fn settle(&self) {
        if let Server::Postgres(server) = &self.server {
            server.sql("postgres", "VACUUM ANALYZE").await;
            server.sql("postgres", "CHECKPOINT").await;
        }
    }
}
