//! TLS by rustls.

use std::fmt;
use std::future::Future;
use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use hapax_core::store::BoxFuture;
use rustls::pki_types::pem::{self, PemObject};
use rustls::pki_types::{CertificateDer, InvalidDnsNameError, PrivateKeyDer, ServerName};
use rustls::{ClientConfig, RootCertStore};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio_postgres::tls::{ChannelBinding, MakeTlsConnect, TlsConnect};
use tokio_postgres::{Config, Error, Socket};
use tokio_rustls::TlsConnector;

use super::{Connected, Connector, connect};
use crate::error::PostgresConnectError;

/// TLS that requires valid certificates: the server's must be signed by a trusted root, and name
/// the host of the URL. That is stricter than `sslmode=require` in other clients.
#[derive(Clone)]
pub struct Rustls(Arc<ClientConfig>);

/// Trusted roots and the client certificate, in PEM.
#[derive(Clone, Copy, Default)]
pub struct RustlsCertificates<'a> {
    /// The roots; `None` for the system's.
    pub roots: Option<&'a [u8]>,
    /// The client certificate with its chain, and its key.
    pub client: Option<(&'a [u8], &'a [u8])>,
}

impl Rustls {
    /// Creates a connector with these certificates.
    ///
    /// # Errors
    /// [`PostgresConnectError::Certificates`] if they cannot be read, or there are no roots.
    pub fn new(certificates: &RustlsCertificates<'_>) -> Result<Self, PostgresConnectError> {
        let wrong =
            |error: &dyn fmt::Display| PostgresConnectError::Certificates(error.to_string());
        let mut roots = RootCertStore::empty();
        match certificates.roots {
            Some(pem) => {
                for root in chain(pem)? {
                    roots.add(root).map_err(|error| wrong(&error))?;
                }
            }
            None => {
                // Certificates that cannot be parsed are skipped.
                roots.add_parsable_certificates(rustls_native_certs::load_native_certs().certs);
            }
        }
        if roots.is_empty() {
            return Err(wrong(&"there is no root to trust"));
        }
        // The process may have installed another provider; this one is always available.
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let config = ClientConfig::builder_with_provider(provider)
            .with_safe_default_protocol_versions()
            .map_err(|error| wrong(&error))?
            .with_root_certificates(roots);
        let config = match certificates.client {
            Some((own, key)) => {
                let key = PrivateKeyDer::from_pem_slice(key)
                    .map_err(|error| wrong(&no_pem("the client's key", &error)))?;
                let own = config.with_client_auth_cert(chain(own)?, key);
                own.map_err(|error| match error {
                    rustls::Error::InconsistentKeys(_) => {
                        wrong(&"expected the key of the client's certificate, found another key")
                    }
                    error => wrong(&error),
                })?
            }
            None => config.with_no_client_auth(),
        };
        Ok(Self(Arc::new(config)))
    }
}

fn chain(pem: &[u8]) -> Result<Vec<CertificateDer<'static>>, PostgresConnectError> {
    let chain: Result<Vec<_>, _> = CertificateDer::pem_slice_iter(pem).collect();
    chain.map_err(|error| PostgresConnectError::Certificates(no_pem("certificates", &error)))
}

/// Returns an error as text. That of the library has bytes as numbers.
fn no_pem(expected: &str, error: &pem::Error) -> String {
    let found = match error {
        pem::Error::MissingSectionEnd { .. } => "a section without its end: the file is not whole",
        pem::Error::IllegalSectionStart { .. } => "a malformed line that begins a section",
        pem::Error::Base64Decode(_) => "a section that is not Base64",
        pem::Error::NoItemsFound => "none",
        error => return format!("expected {expected} in PEM, found an error: {error}"),
    };
    format!("expected {expected} in PEM, found {found}")
}

impl fmt::Debug for Rustls {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Rustls(..)")
    }
}

impl fmt::Debug for RustlsCertificates<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // It contains a key.
        f.write_str("Certificates(..)")
    }
}

impl Connector for Rustls {
    fn connect<'a>(&'a self, config: &'a Config) -> BoxFuture<'a, Result<Connected, Error>> {
        Box::pin(connect(config, Make(Arc::clone(&self.0))))
    }
}

/// Creates handshakes.
#[derive(Clone)]
struct Make(Arc<ClientConfig>);

impl MakeTlsConnect<Socket> for Make {
    type Stream = Stream;
    type TlsConnect = Handshake;
    type Error = InvalidDnsNameError;

    fn make_tls_connect(&mut self, host: &str) -> Result<Handshake, InvalidDnsNameError> {
        let host = ServerName::try_from(host.to_owned())?;
        Ok(Handshake { connector: TlsConnector::from(Arc::clone(&self.0)), host })
    }
}

/// A handshake that has not begun.
struct Handshake {
    connector: TlsConnector,
    host: ServerName<'static>,
}

impl TlsConnect<Socket> for Handshake {
    type Stream = Stream;
    type Error = io::Error;
    type Future = Pin<Box<dyn Future<Output = io::Result<Stream>> + Send>>;

    fn connect(self, socket: Socket) -> Self::Future {
        Box::pin(async move { Ok(Stream(self.connector.connect(self.host, socket).await?)) })
    }
}

/// An encrypted connection.
struct Stream(tokio_rustls::client::TlsStream<Socket>);

impl tokio_postgres::tls::TlsStream for Stream {
    /// None: the certificate identifies the server.
    fn channel_binding(&self) -> ChannelBinding {
        ChannelBinding::none()
    }
}

impl AsyncRead for Stream {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        Pin::new(&mut self.0).poll_read(context, buffer)
    }
}

impl AsyncWrite for Stream {
    fn poll_write(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &[u8],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.0).poll_write(context, buffer)
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.0).poll_flush(context)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.0).poll_shutdown(context)
    }
}
