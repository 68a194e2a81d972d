//! The store on the server of an sqlx pool.

use percent_encoding::percent_decode_str;
use sqlx::ConnectOptions;
use sqlx::postgres::{PgConnectOptions, PgPool, PgSslMode};
use tokio_postgres::Config;
use tokio_postgres::config::SslMode;

use crate::error::PostgresConnectError;
use crate::options::PostgresOptions;
use crate::store::PostgresStore;
use crate::tls::certificates::{CERTIFICATE_PARAMETERS, Certificates};

impl PostgresOptions {
    /// Returns options for the server of `pool`, with its role, password, database and TLS.
    ///
    /// The store opens connections of its own, because it pipelines, which sqlx does not. Of the
    /// pool's `sslmode`, `require` and stricter need the feature `tls`, and the server's certificate is
    /// always verified; under `allow` and `prefer`, sqlx's default, the store uses TLS only if the pool has certificates.
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
            // As in a URL of the store, certificates imply `require`.
            PgSslMode::Allow | PgSslMode::Prefer if hidden.certificates.are_given() => {
                config.ssl_mode(SslMode::Require);
                hidden.certificates.secure(Self::new(config))
            }
            PgSslMode::Disable | PgSslMode::Allow | PgSslMode::Prefer => {
                config.ssl_mode(SslMode::Disable);
                Ok(Self::new(config))
            }
            PgSslMode::Require | PgSslMode::VerifyCa | PgSslMode::VerifyFull => {
                config.ssl_mode(SslMode::Require);
                hidden.certificates.secure(Self::new(config))
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
struct Hidden {
    password: Option<String>,
    certificates: Certificates,
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
        let [roots, certificate, key] = CERTIFICATE_PARAMETERS.map(value);
        Self { password, certificates: Certificates { roots, certificate, key } }
    }
}
