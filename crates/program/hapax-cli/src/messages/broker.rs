//! How a command logs in at a broker, beside the URL: credentials and certificates, each in a file.

use std::path::{Path, PathBuf};

use clap::Args;
use hapax_nats::{NatsConnector, NatsCredentials};
use hapax_rabbitmq::RabbitLogin;

use crate::exit::{CliError, of};
use crate::secrets;

const CREDENTIALS: &str = "--broker-credentials";
const CA: &str = "--broker-ca";
const CERT: &str = "--broker-cert";
const KEY: &str = "--broker-key";

/// Largest file that is read, in bytes.
const MAX_FILE: u64 = 4 << 20;

/// Begin of a credentials file of NATS.
const NATS_FILE: &str = "-----BEGIN NATS USER JWT-----";

/// Files with which a command logs in at a broker.
#[derive(Debug, Default, Args)]
pub(crate) struct BrokerArgs {
    /// NATS and RabbitMQ: file of the credentials, as lines NAME=VALUE: user and password; of NATS also
    /// token alone, or nkey alone, the seed of a user; or a credentials file that nsc wrote
    #[arg(long, value_name = "PATH", env = "HAPAX_BROKER_CREDENTIALS")]
    broker_credentials: Option<PathBuf>,
    /// NATS and RabbitMQ: the file of the root certificates to trust, in PEM [default: the system's]
    #[arg(long, value_name = "PATH", env = "HAPAX_BROKER_CA")]
    broker_ca: Option<PathBuf>,
    /// NATS and RabbitMQ: the file of the client's certificate with its chain, in PEM. Without other
    /// credentials a RabbitMQ server takes the user from it (EXTERNAL)
    #[arg(long, value_name = "PATH", env = "HAPAX_BROKER_CERT", requires = "broker_key")]
    broker_cert: Option<PathBuf>,
    /// NATS and RabbitMQ: the file of the key of --broker-cert, in PEM
    #[arg(long, value_name = "PATH", env = "HAPAX_BROKER_KEY", requires = "broker_cert")]
    broker_key: Option<PathBuf>,
}

/// Contents of a file of credentials.
#[derive(PartialEq, Eq)]
enum Credentials {
    Password { user: String, password: String },
    Token(String),
    Nkey(String),
    NatsFile(String),
}

impl BrokerArgs {
    /// Rejects the flags if the URL of `flag` is that of another server.
    pub(crate) fn rejected_with_others(&self, flag: &str) -> Result<(), CliError> {
        let files = [
            (CREDENTIALS, &self.broker_credentials),
            (CA, &self.broker_ca),
            (CERT, &self.broker_cert),
            (KEY, &self.broker_key),
        ];
        match files.iter().find(|(_, file)| file.is_some()) {
            None => Ok(()),
            Some((own, _)) => Err(CliError::usage(format!(
                "{own}: expected a NATS or RabbitMQ server in {flag}, found another server: remove {own}"
            ))),
        }
    }

    /// Returns the connector of the NATS server at `url`, which `flag` names. The client reads the certificates at
    /// each connection.
    pub(crate) fn nats(&self, url: &str, flag: &str) -> Result<NatsConnector, CliError> {
        let mut connector = NatsConnector::new(url);
        if let Some(credentials) = self.credentials(url, flag)? {
            let credentials = match credentials {
                Credentials::Password { user, password } => {
                    NatsCredentials::Password { user, password }
                }
                Credentials::Token(token) => NatsCredentials::Token(token),
                Credentials::Nkey(seed) => NatsCredentials::Nkey(seed),
                Credentials::NatsFile(text) => NatsCredentials::File(text),
            };
            connector = connector.credentials(credentials).map_err(of(CREDENTIALS))?;
        }
        if let Some(ca) = &self.broker_ca {
            read(CA, ca)?;
            connector = connector.root_certificates(ca);
        }
        if let (Some(cert), Some(key)) = (&self.broker_cert, &self.broker_key) {
            read(CERT, cert)?;
            read_key(key)?;
            connector = connector.client_certificate(cert, key);
        }
        Ok(connector)
    }

    /// Returns the login at the RabbitMQ server at `url`, which `flag` names; `None` if the URL says all of it.
    pub(crate) fn rabbit(&self, url: &str, flag: &str) -> Result<Option<RabbitLogin>, CliError> {
        let ca = self.broker_ca.as_deref().map(|ca| read(CA, ca)).transpose()?;
        let client = match (&self.broker_cert, &self.broker_key) {
            (Some(cert), Some(key)) => Some((read(CERT, cert)?, read_key(key)?)),
            _ => None,
        };
        let has_certificates = ca.is_some() || client.is_some();
        if has_certificates && super::scheme(url).as_deref() != Some("amqps") {
            let own = if ca.is_some() { CA } else { CERT };
            return Err(CliError::usage(format!(
                "{own}: expected amqps://HOST in {flag}, found a connection without TLS: correct the URL, or remove \
                 {own}"
            )));
        }
        let credentials = self.credentials(url, flag)?;
        if credentials.is_none() && !has_certificates {
            return Ok(None);
        }
        let mut login = RabbitLogin::default();
        match credentials {
            Some(Credentials::Password { user, password }) => {
                login = login.password(user, password);
            }
            Some(_) => {
                return Err(CliError::usage(format!(
                    "{CREDENTIALS}: expected user and password for a RabbitMQ server, found credentials of NATS: name \
                     another file"
                )));
            }
            None if client.is_some() && !has_user(url) => login = login.external(),
            None => {}
        }
        if has_certificates {
            let client = client.as_ref().map(|(cert, key)| (&cert[..], &key[..]));
            // Another program may be replacing the files.
            login = login
                .certificates(ca.as_deref(), client)
                .map_err(|error| of("--broker-ca, --broker-cert, --broker-key")(error).may_end())?;
        }
        Ok(Some(login))
    }

    /// Reads the file of credentials.
    fn credentials(&self, url: &str, flag: &str) -> Result<Option<Credentials>, CliError> {
        let Some(file) = &self.broker_credentials else { return Ok(None) };
        if has_user(url) {
            return Err(CliError::usage(format!(
                "{CREDENTIALS}: expected a URL without a user or token in {flag}, found one with it: remove it from \
                 the URL"
            )));
        }
        secrets::warn_if_open(file);
        let text = String::from_utf8(read(CREDENTIALS, file)?).unwrap_or_default();
        match parse(&text) {
            Ok(credentials) => Ok(Some(credentials)),
            Err(error) => {
                Err(CliError::usage(format!("{CREDENTIALS}: {}: {error}", file.display())))
            }
        }
    }
}

/// Returns whether a URL has a user or a token.
fn has_user(url: &str) -> bool {
    let (_, rest) = url.split_once("://").unwrap_or_default();
    rest.split('/').next().is_some_and(|authority| authority.contains('@'))
}

/// Reads a file, which may be there at the next start.
fn read(flag: &str, path: &Path) -> Result<Vec<u8>, CliError> {
    let read = || {
        let metadata = std::fs::metadata(path)?;
        if !metadata.is_file() || metadata.len() > MAX_FILE {
            let text = "it is no regular file of at most 4 MiB";
            return Err(std::io::Error::new(std::io::ErrorKind::InvalidData, text));
        }
        std::fs::read(path)
    };
    read().map_err(|error| {
        let path = path.display();
        CliError::unavailable(format!(
            "{flag}: expected a file that can be read, found an error for {path}: {error}"
        ))
    })
}

/// Reads the private key of the client, and warns if other users can read it.
fn read_key(path: &Path) -> Result<Vec<u8>, CliError> {
    secrets::warn_if_key_open(path);
    read(KEY, path)
}

/// Parses the text of a file of credentials. An error has none of its values.
fn parse(text: &str) -> Result<Credentials, String> {
    if text.contains(NATS_FILE) {
        return Ok(Credentials::NatsFile(text.to_owned()));
    }
    let names = ["user", "password", "token", "nkey"];
    let mut found = [const { None }; 4];
    for (number, line) in (1..).zip(text.lines()) {
        if line.trim().is_empty() || line.starts_with('#') {
            continue;
        }
        let (name, value) = line.split_once('=').unwrap_or_default();
        let Some(at) = names.iter().position(|it| *it == name.trim()) else {
            return Err(format!(
                "line {number}: expected user=, password=, token= or nkey=, found another text"
            ));
        };
        if found[at].replace(value.to_owned()).is_some() {
            let name = names[at];
            return Err(format!(
                "line {number}: expected {name} once, found it again: remove one of both"
            ));
        }
    }
    match found {
        [Some(user), Some(password), None, None] => Ok(Credentials::Password { user, password }),
        [None, None, Some(token), None] => Ok(Credentials::Token(token)),
        [None, None, None, Some(seed)] if seed.starts_with("SU") => Ok(Credentials::Nkey(seed)),
        [None, None, None, Some(_)] => {
            Err("expected the seed of a user, which begins with SU, found another nkey".to_owned())
        }
        _ => Err("expected user and password together, or token or nkey alone, found others: correct the file"
            .to_owned()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_has_a_user_with_a_password_or_a_token_or_a_seed() {
        let (user, password) = ("app".to_owned(), " s3=cret ".to_owned());
        let expected = Credentials::Password { user, password };
        assert!(parse("# of orders\r\nuser=app\r\n\r\npassword= s3=cret \r\n") == Ok(expected));
        assert!(parse("token=t0ken") == Ok(Credentials::Token("t0ken".to_owned())));
        assert!(parse("nkey=SUhidden\n") == Ok(Credentials::Nkey("SUhidden".to_owned())));
        let file = format!("{NATS_FILE}\nhidden\n");
        assert!(parse(&file) == Ok(Credentials::NatsFile(file.clone())));
        for (wrong, expected) in [
            ("", "expected user and password together"),
            ("user=hidden", "expected user and password together"),
            ("user=a\npassword=hidden\ntoken=hidden", "token or nkey alone"),
            ("hidden", "line 1: expected user="),
            ("user=a\n\nuser=hidden", "line 3: expected user once"),
            ("nkey=SAhidden", "the seed of a user"),
        ] {
            let Err(error) = parse(wrong) else { panic!("{wrong}") };
            assert!(error.contains(expected) && !error.contains("hidden"), "{error}");
        }
    }
}
