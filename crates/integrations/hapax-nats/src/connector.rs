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
        Self { url: url.into(), options: ConnectOptions::new(), has_credentials: false }
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

    /// Connects to the server. The client reconnects after the connection was lost.
    ///
    /// # Errors
    /// The error of the client, which does not repeat the URL.
    pub async fn connect(&self) -> Result<JetStream, async_nats::Error> {
        let address: ServerAddr = self.url.parse()?;
        let mut options = self.options.clone();
        if let Some(credentials) = NatsCredentials::of_url(&address)
            && !self.has_credentials
        {
            options = with(options, credentials)?;
        }
        Ok(async_nats::jetstream::new(options.connect(address).await?))
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
    use super::*;

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
