//! The address of a server, and how a client logs in.

use std::fmt;
use std::path::PathBuf;

use async_nats::{ConnectOptions, ServerAddr};
use percent_encoding::percent_decode_str;

use crate::JetStream;

/// Credentials of a client. Their `Debug` form shows none.
#[derive(Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum NatsCredentials {
    /// A user and its password.
    Password {
        /// Name of the user.
        user: String,
        /// Its password.
        password: String,
    },
    /// A token.
    Token(String),
    /// The seed of an nkey, which begins with `SU`.
    Nkey(String),
    /// The text of a credentials file, as `nsc` writes it: a JWT and the seed of its nkey.
    File(String),
}

impl NatsCredentials {
    /// Returns those of a URL, which the client library (async-nats 0.51) ignores.
    fn of_url(address: &ServerAddr) -> Option<Self> {
        let decoded = |text: &str| percent_decode_str(text).decode_utf8_lossy().into_owned();
        let user = decoded(address.username()?);
        Some(match address.password() {
            Some(password) => Self::Password { user, password: decoded(password) },
            None => Self::Token(user),
        })
    }
}

impl fmt::Debug for NatsCredentials {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let kind = match self {
            Self::Password { .. } => "Password",
            Self::Token(_) => "Token",
            Self::Nkey(_) => "Nkey",
            Self::File(_) => "File",
        };
        f.debug_struct(kind).finish_non_exhaustive()
    }
}

/// Error of the text of a credentials file. It shows nothing of the text.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
#[error(
    "expected a credentials file of NATS, with a user JWT and the seed of its nkey, found another text: create \
     it by `nsc generate creds`"
)]
pub struct NatsCredentialsError;

/// Address of a server, and how the client logs in. It connects as often as it is needed.
#[derive(Clone)]
#[must_use]
pub struct NatsConnector {
    url: String,
    options: ConnectOptions,
    has_credentials: bool,
    domain: Option<String>,
}

impl fmt::Debug for NatsConnector {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("NatsConnector")
    }
}

impl NatsConnector {
    /// Creates a connector of `nats://HOST`, or of `tls://HOST`, which requires TLS. A URL may have a user and
    /// its password, or a token: `nats://TOKEN@HOST`.
    pub fn new(url: impl Into<String>) -> Self {
        let (url, options) = (url.into(), ConnectOptions::new());
        Self { url, options, has_credentials: false, domain: None }
    }

    /// Sets the credentials, instead of those of the URL.
    ///
    /// # Errors
    /// [`NatsCredentialsError`]: the text is none of a credentials file.
    pub fn credentials(
        mut self,
        credentials: NatsCredentials,
    ) -> Result<Self, NatsCredentialsError> {
        self.options = with(self.options, credentials)?;
        self.has_credentials = true;
        Ok(self)
    }

    /// Trusts the certificates of a file in PEM, and no others, and requires TLS. The file is read at each
    /// connection.
    pub fn root_certificates(mut self, file: impl Into<PathBuf>) -> Self {
        self.options = self.options.add_root_certificates(file.into()).require_tls(true);
        self
    }

    /// Sets the client's certificate with its chain, and its key, each a file in PEM, and requires TLS. The files
    /// are read at each connection.
    pub fn client_certificate(
        mut self,
        certificate: impl Into<PathBuf>,
        key: impl Into<PathBuf>,
    ) -> Self {
        let options = self.options.add_client_certificate(certificate.into(), key.into());
        self.options = options.require_tls(true);
        self
    }

    /// Sets the domain of JetStream, whose requests begin with `$JS.DOMAIN.API` instead of `$JS.API`.
    pub fn domain(mut self, domain: impl Into<String>) -> Self {
        self.domain = Some(domain.into());
        self
    }

    /// Connects to the server. The client reconnects after the connection was lost.
    ///
    /// # Errors
    /// The error of the client, which does not repeat the URL.
    pub async fn connect(&self) -> Result<JetStream, async_nats::Error> {
        let address: ServerAddr = self.url.parse()?;
        // The client connects to the servers of a cluster too, whose URLs it has from a server, by its options alone.
        let mut options = match address.tls_required() {
            true => self.options.clone().require_tls(true),
            false => self.options.clone(),
        };
        if let Some(credentials) = NatsCredentials::of_url(&address)
            && !self.has_credentials
        {
            options = with(options, credentials)?;
        }
        let client = options.connect(address).await?;
        Ok(match &self.domain {
            Some(domain) => async_nats::jetstream::with_domain(client, domain),
            None => async_nats::jetstream::new(client),
        })
    }
}

fn with(
    options: ConnectOptions,
    credentials: NatsCredentials,
) -> Result<ConnectOptions, NatsCredentialsError> {
    Ok(match credentials {
        NatsCredentials::Password { user, password } => options.user_and_password(user, password),
        NatsCredentials::Token(token) => options.token(token),
        NatsCredentials::Nkey(seed) => options.nkey(seed),
        NatsCredentials::File(text) => {
            options.credentials(&text).map_err(|_| NatsCredentialsError)?
        }
    })
}

#[cfg(test)]
mod tests {
    use std::io::{BufRead as _, BufReader, Read as _, Write as _};
    use std::net::{SocketAddr, TcpListener};
    use std::sync::Arc;

    use async_nats::rustls::crypto::ring;
    use async_nats::rustls::pki_types::PrivatePkcs8KeyDer;
    use async_nats::rustls::{ServerConfig, ServerConnection, StreamOwned};
    use rcgen::{BasicConstraints, CertificateParams, CertifiedIssuer, DnType, IsCa, KeyPair};
    use tokio::task::spawn_blocking;

    use super::*;

    /// Returns the roots in PEM, and a server's side of TLS with a certificate for 127.0.0.1.
    fn server_side() -> (String, Arc<ServerConfig>) {
        let mut params = CertificateParams::new(Vec::new()).unwrap();
        params.distinguished_name.push(DnType::CommonName, "an authority");
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        let authority = CertifiedIssuer::self_signed(params, KeyPair::generate().unwrap()).unwrap();
        let key = KeyPair::generate().unwrap();
        let params = CertificateParams::new(vec!["127.0.0.1".to_owned()]).unwrap();
        let certificate = params.signed_by(&key, &authority).unwrap();
        let key = PrivatePkcs8KeyDer::from(key.serialize_der());
        let config = ServerConfig::builder_with_provider(Arc::new(ring::default_provider()))
            .with_safe_default_protocol_versions()
            .unwrap()
            .with_no_client_auth()
            .with_single_cert(vec![certificate.der().clone()], key.into())
            .unwrap();
        (authority.pem(), Arc::new(config))
    }

    /// Accepts one client of a server with TLS that names another server, and then ends.
    fn accept_once(listener: TcpListener, config: Arc<ServerConfig>, other: SocketAddr) {
        let (mut stream, _) = listener.accept().unwrap();
        drop(listener);
        let info = format!(
            "INFO {{\"version\":\"2.9.10\",\"max_payload\":1048576,\"headers\":true,\"tls_required\":true,\
             \"connect_urls\":[\"{other}\"]}}\r\n"
        );
        stream.write_all(info.as_bytes()).unwrap();
        let tls = ServerConnection::new(config).unwrap();
        let mut lines = BufReader::new(StreamOwned::new(tls, stream));
        let mut line = String::new();
        while !line.starts_with("PING") {
            line.clear();
            assert_ne!(lines.read_line(&mut line).unwrap(), 0, "the client has ended");
        }
        lines.get_mut().write_all(b"PONG\r\n").unwrap();
        lines.get_mut().flush().unwrap();
    }

    /// Accepts a client of a server without TLS. Returns the first byte that it sends.
    fn first_byte(listener: &TcpListener) -> u8 {
        let (mut stream, _) = listener.accept().unwrap();
        let info = b"INFO {\"version\":\"2.9.10\",\"max_payload\":1048576,\"headers\":true}\r\n";
        stream.write_all(info).unwrap();
        let mut first = [0];
        stream.read_exact(&mut first).unwrap();
        first[0]
    }

    #[tokio::test]
    async fn a_server_that_the_cluster_names_gets_no_credentials_without_tls() {
        let folder = tempfile::tempdir().unwrap();
        let (roots, config) = server_side();
        let file = folder.path().join("roots.pem");
        std::fs::write(&file, roots).unwrap();
        let bind = || TcpListener::bind(("127.0.0.1", 0)).unwrap();
        let (listener, plain) = (bind(), bind());
        let url = format!("tls://user:password@{}", listener.local_addr().unwrap());
        let other = plain.local_addr().unwrap();
        let serving = spawn_blocking(move || accept_once(listener, config, other));
        let first = spawn_blocking(move || first_byte(&plain));
        // The file takes the place of the system's certificates, which do not require TLS of other servers.
        let options = ConnectOptions::new().add_root_certificates(file);
        let connector = NatsConnector { options, ..NatsConnector::new(url) };
        let _client = connector.connect().await.unwrap();
        serving.await.unwrap();
        // A handshake begins with 22, and `CONNECT` with a letter.
        assert_eq!(first.await.unwrap(), 22);
    }

    #[test]
    fn credentials_are_not_shown() {
        let password =
            NatsCredentials::Password { user: "hidden".to_owned(), password: "hidden".to_owned() };
        let connector = NatsConnector::new("nats://hidden@127.0.0.1");
        let file = connector.clone().credentials(NatsCredentials::File("hidden".to_owned()));
        let connector = connector.credentials(password.clone()).unwrap();
        let shown = format!("{password:?} {connector:?} {:?}", file.unwrap_err());
        assert!(!shown.contains("hidden"), "{shown}");
    }

    #[test]
    fn a_url_has_a_user_and_a_password_or_a_token() {
        let of = |url: &str| NatsCredentials::of_url(&url.parse().unwrap());
        let (user, password) = ("a@b".to_owned(), "p:w".to_owned());
        let expected = NatsCredentials::Password { user, password };
        assert_eq!(of("nats://a%40b:p%3Aw@127.0.0.1"), Some(expected));
        assert_eq!(of("tls://t0ken@127.0.0.1"), Some(NatsCredentials::Token("t0ken".to_owned())));
        assert_eq!(of("nats://127.0.0.1"), None);
    }
}
