//! The store on the server of an sqlx pool.

#[cfg(feature = "tls")]
use std::fs;
#[cfg(feature = "tls")]
use std::sync::Arc;

use percent_encoding::percent_decode_str;
use sqlx::ConnectOptions;
use sqlx::postgres::{PgConnectOptions, PgPool, PgSslMode};
use tokio_postgres::Config;
use tokio_postgres::config::SslMode;

use crate::error::PostgresConnectError;
use crate::options::PostgresOptions;
use crate::store::PostgresStore;

/// The prefix with which sqlx shows a certificate that is a file.
#[cfg(feature = "tls")]
const FILE: &str = "file: ";

impl PostgresOptions {
    /// Returns options for the server of `pool`, with its role, password, database and TLS.
    ///
    /// The store opens connections of its own, because it pipelines, which sqlx does not. Of the
    /// pool's `sslmode`, `require` and stricter need the feature `tls`, and the server's certificate is
    /// always verified; under `allow` and `prefer`, sqlx's default, the store does not use TLS.
    ///
    /// # Errors
    /// [`PostgresConnectError::Pool`] if the store cannot use an option of the pool;
    /// [`PostgresConnectError::Certificates`].
    pub fn from_pool(pool: &PgPool) -> Result<Self, PostgresConnectError> {
        let options = pool.connect_options();
        let mut config = Config::new();
        match options.get_socket() {
            Some(socket) => config.host_path(socket),
            None => config.host(options.get_host()),
        };
        config.port(options.get_port()).user(options.get_username());
        if let Some(database) = options.get_database() {
            config.dbname(database);
        }
        if let Some(name) = options.get_application_name() {
            config.application_name(name);
        }
        if let Some(parameters) = options.get_options() {
            config.options(parameters);
        }
        let hidden = Hidden::of(&options);
        if let Some(password) = &hidden.password {
            config.password(password);
        }
        match options.get_ssl_mode() {
            PgSslMode::Disable | PgSslMode::Allow | PgSslMode::Prefer => {
                config.ssl_mode(SslMode::Disable);
                Ok(Self::new(config))
            }
            PgSslMode::Require | PgSslMode::VerifyCa | PgSslMode::VerifyFull => {
                config.ssl_mode(SslMode::Require);
                hidden.secured(Self::new(config))
            }
        }
    }
}

impl PostgresStore {
    /// Connects to the server of `pool`: see [`PostgresOptions::from_pool`].
    ///
    /// ```no_run
    /// # async fn run() -> Result<(), Box<dyn std::error::Error>> {
    /// let pool = sqlx::PgPool::connect("postgres://app@127.0.0.1/orders").await?;
    /// let store = hapax_postgres::PostgresStore::from_pool(pool).await?;
    /// # drop(store);
    /// # Ok(()) }
    /// ```
    ///
    /// # Errors
    /// [`PostgresConnectError`].
    ///
    /// # Panics
    /// Outside a tokio runtime with time and I/O.
    pub async fn from_pool(pool: PgPool) -> Result<Self, PostgresConnectError> {
        Self::connect(PostgresOptions::from_pool(&pool)?.listen(true)).await
    }
}

/// Options of a pool that only its URL shows.
#[cfg_attr(not(feature = "tls"), allow(dead_code, reason = "certificates need TLS"))]
struct Hidden {
    password: Option<String>,
    roots: Option<String>,
    certificate: Option<String>,
    key: Option<String>,
}

impl Hidden {
    fn of(options: &PgConnectOptions) -> Self {
        // The URL is built of host and user as they are: names that no URL may have would panic.
        let url = options.clone().host("localhost").username("app").to_url_lossy();
        let value = |name| {
            let pair = url.query_pairs().find(|(key, _)| key == name);
            pair.map(|(_, value)| value.into_owned())
        };
        let decoded = |text| percent_decode_str(text).decode_utf8_lossy().into_owned();
        let password = url.password().map(decoded);
        Self {
            password,
            roots: value("sslrootcert"),
            certificate: value("sslcert"),
            key: value("sslkey"),
        }
    }

    #[cfg(feature = "tls")]
    fn secured(self, options: PostgresOptions) -> Result<PostgresOptions, PostgresConnectError> {
        use crate::tls::rustls::{Rustls, RustlsCertificates};

        let roots = self.roots.as_deref().map(pem).transpose()?;
        let certificate = self.certificate.as_deref().map(pem).transpose()?;
        let key = self.key.as_deref().map(pem).transpose()?;
        let client = match (&certificate, &key) {
            (Some(certificate), Some(key)) => Some((certificate.as_slice(), key.as_slice())),
            (None, None) => None,
            _ => return Err(PostgresConnectError::Pool("a client certificate without its key")),
        };
        let certificates = RustlsCertificates { roots: roots.as_deref(), client };
        Ok(options.tls(Arc::new(Rustls::new(&certificates)?)))
    }

    #[cfg(not(feature = "tls"))]
    fn secured(self, _: PostgresOptions) -> Result<PostgresOptions, PostgresConnectError> {
        Err(PostgresConnectError::Pool("TLS, which needs the feature `tls`"))
    }
}

/// Reads a certificate or key as sqlx shows it: PEM, or the path of a file.
#[cfg(feature = "tls")]
fn pem(shown: &str) -> Result<Vec<u8>, PostgresConnectError> {
    match shown.strip_prefix(FILE) {
        Some(path) => fs::read(path)
            .map_err(|error| PostgresConnectError::Certificates(format!("{path}: {error}"))),
        None => Ok(shown.as_bytes().to_vec()),
    }
}
