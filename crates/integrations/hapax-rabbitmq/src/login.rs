//! How a client logs in, and which certificates it uses.

use std::fmt;
use std::io;

use lapin::tcp::{RustlsConnector, RustlsConnectorConfig};
use lapin::uri::{AMQPScheme, AMQPUri, AMQPUserInfo, SASLMechanism};
use rustls::pki_types::pem::PemObject as _;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};

use crate::connection::RabbitUrlError;

/// Error of certificates or of a key. It shows nothing of them.
#[derive(Debug, thiserror::Error)]
#[error("expected {expected}, found {found}")]
pub struct RabbitCertificateError {
    expected: &'static str,
    found: String,
}

/// How a client logs in, and which certificates it uses, instead of what the URL says. The `Debug` form shows
/// nothing of them.
#[derive(Clone, Default)]
#[must_use]
pub struct RabbitLogin {
    mechanism: Option<SASLMechanism>,
    user: Option<(String, String)>,
    pub(crate) tls: Option<RustlsConnector>,
}

impl fmt::Debug for RabbitLogin {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RabbitLogin").field("tls", &self.tls.is_some()).finish_non_exhaustive()
    }
}

impl RabbitLogin {
    /// Logs in with a user and its password (`PLAIN`).
    pub fn password(mut self, user: impl Into<String>, password: impl Into<String>) -> Self {
        self.mechanism = Some(SASLMechanism::Plain);
        self.user = Some((user.into(), password.into()));
        self
    }

    /// Logs in by the client's certificate (`EXTERNAL`), from which the server takes the user. It needs the
    /// plugin `rabbitmq_auth_mechanism_ssl`.
    pub fn external(mut self) -> Self {
        self.mechanism = Some(SASLMechanism::External);
        self
    }

    /// Sets certificates, in PEM: `roots` to trust instead of the system's, and of the client its chain and its
    /// key. The URL must be `amqps://`.
    ///
    /// # Errors
    /// [`RabbitCertificateError`].
    pub fn certificates(
        mut self,
        roots: Option<&[u8]>,
        client: Option<(&[u8], &[u8])>,
    ) -> Result<Self, RabbitCertificateError> {
        let unusable = |expected| {
            move |error: io::Error| RabbitCertificateError { expected, found: error.to_string() }
        };
        let config = match roots {
            Some(pem) => RustlsConnectorConfig::default().with_parsable_certificates(chain(pem)?),
            None => RustlsConnectorConfig::new_with_native_certs()
                .map_err(unusable("root certificates of the system"))?,
        };
        let connector = match client {
            None => config.connector_with_no_client_auth(),
            Some((certificates, key)) => {
                let key =
                    PrivateKeyDer::from_pem_slice(key).map_err(|_| RabbitCertificateError {
                        expected: "the key of the client's certificate in PEM, not encrypted",
                        found: "another text".to_owned(),
                    })?;
                config.connector_with_single_cert(chain(certificates)?, key)
            }
        };
        let connector =
            connector.map_err(unusable("certificates and a key that belong together"))?;
        self.tls = Some(connector);
        Ok(self)
    }

    /// Changes the address of a server.
    pub(crate) fn apply(&self, uri: &mut AMQPUri) -> Result<(), RabbitUrlError> {
        if self.tls.is_some() && uri.scheme != AMQPScheme::AMQPS {
            return Err(RabbitUrlError::new("certificates need amqps://"));
        }
        uri.query.auth_mechanism = self.mechanism.or(uri.query.auth_mechanism);
        if let Some((username, password)) = self.user.clone() {
            uri.authority.userinfo = AMQPUserInfo { username, password };
        }
        Ok(())
    }
}

fn chain(pem: &[u8]) -> Result<Vec<CertificateDer<'static>>, RabbitCertificateError> {
    let found: Result<Vec<_>, _> = CertificateDer::pem_slice_iter(pem).collect();
    match found {
        Ok(chain) if !chain.is_empty() => Ok(chain),
        _ => Err(RabbitCertificateError {
            expected: "certificates in PEM",
            found: "another text".to_owned(),
        }),
    }
}
