//! Errors of a start.

use std::io;
use std::net::SocketAddr;
use std::path::PathBuf;

use hapax_core::EngineError;
use hapax_operators::{RegisterError, TokenError};
use hapax_proxy::tls::TlsError;

use crate::config::ConfigError;
use crate::store::StoreOpenError;
use crate::tokens::JwtKeysError;

/// Errors of starting a gateway. Nothing is left running.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum StartError {
    /// The configuration is invalid.
    #[error(transparent)]
    Config(#[from] ConfigError),
    /// The engine cannot start.
    #[error(transparent)]
    Engine(#[from] EngineError),
    /// An address could not be listened on.
    #[error("cannot listen on {address}: {source}")]
    Listen {
        /// The address.
        address: SocketAddr,
        /// The cause.
        source: io::Error,
    },
    /// Certificates cannot be used.
    #[error(transparent)]
    Tls(#[from] TlsError),
    /// There is no admin token.
    #[error("--admin-token-file: {}: {source}", path.display())]
    AdminToken {
        /// The file.
        path: PathBuf,
        /// The reason.
        source: TokenError,
    },
    /// The access log cannot be written.
    #[error("--access-log: {}: {source}", path.display())]
    AccessLog {
        /// The file.
        path: PathBuf,
        /// The reason.
        source: io::Error,
    },
    /// The store did not open.
    #[error(transparent)]
    Store(#[from] StoreOpenError),
    /// The keys of bearer tokens cannot be used.
    #[error("--jwt-keys: {0}")]
    JwtKeys(#[from] JwtKeysError),
    /// Another process uses the namespace in another way, or the register of the store is unavailable.
    #[error(transparent)]
    Register(#[from] RegisterError),
}
