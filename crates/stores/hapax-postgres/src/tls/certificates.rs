//! Certificates that a URL names.

use percent_encoding::percent_decode_str;

use crate::error::PostgresConnectError;
use crate::options::PostgresOptions;

/// Parameters of a URL that name certificates, as in libpq: the roots, the client's certificate and its key.
pub(crate) const CERTIFICATE_PARAMETERS: [&str; 3] = ["sslrootcert", "sslcert", "sslkey"];

/// The prefix of a path, with which sqlx shows it.
const FILE: &str = "file: ";

/// The begin of PEM.
const PEM: &str = "-----BEGIN";

/// The largest file of certificates that is read, in bytes.
#[cfg(feature = "tls")]
const MAX_FILE: u64 = 4 << 20;

/// Certificates, each as PEM or as the path of its file.
#[derive(Default)]
pub(crate) struct Certificates {
    /// The roots; `system` for those of the operating system.
    pub(crate) roots: Option<String>,
    pub(crate) certificate: Option<String>,
    pub(crate) key: Option<String>,
}

impl Certificates {
    /// Returns the certificates that a URL names, and the URL without them: the client of the server does not know
    /// these parameters.
    pub(crate) fn of(url: &str) -> (String, Self) {
        let mut found = [const { None }; 3];
        let Some((start, query)) = url.split_once('?').filter(|(start, _)| start.contains("://"))
        else {
            return (url.to_owned(), Self::default());
        };
        let others = query.split('&').filter(|pair| {
            let (name, value) = pair.split_once('=').unwrap_or((pair, ""));
            let at = CERTIFICATE_PARAMETERS.iter().position(|it| *it == name);
            if let Some(at) = at {
                let value = percent_decode_str(value).decode_utf8_lossy();
                let is_content = value == "system" || value.starts_with(PEM);
                let file = if is_content { "" } else { FILE };
                found[at] = Some(format!("{file}{value}"));
            }
            at.is_none()
        });
        let others = others.collect::<Vec<_>>().join("&");
        let [roots, certificate, key] = found;
        (format!("{start}?{others}"), Self { roots, certificate, key })
    }

    pub(crate) const fn are_given(&self) -> bool {
        self.roots.is_some() || self.certificate.is_some() || self.key.is_some()
    }

    /// Makes the connections of `options` with TLS by these certificates.
    #[cfg(feature = "tls")]
    pub(crate) fn secure(
        self,
        options: PostgresOptions,
    ) -> Result<PostgresOptions, PostgresConnectError> {
        use crate::tls::rustls::{Rustls, RustlsCertificates};

        let roots = self.roots.as_deref().filter(|roots| *roots != "system");
        let roots = roots.map(pem).transpose()?;
        let certificate = self.certificate.as_deref().map(pem).transpose()?;
        let key = self.key.as_deref().map(pem).transpose()?;
        let client = match (&certificate, &key) {
            (Some(certificate), Some(key)) => Some((certificate.as_slice(), key.as_slice())),
            (None, None) => None,
            _ => {
                let expected = "expected sslcert and sslkey together, found one of them";
                return Err(PostgresConnectError::CertificateParameters(expected));
            }
        };
        let certificates = RustlsCertificates { roots: roots.as_deref(), client };
        Ok(options.tls(std::sync::Arc::new(Rustls::new(&certificates)?)))
    }

    /// Rejects TLS.
    #[cfg(not(feature = "tls"))]
    pub(crate) fn secure(
        self,
        _: PostgresOptions,
    ) -> Result<PostgresOptions, PostgresConnectError> {
        let text = "expected a build with the feature `tls`, found one without TLS";
        Err(PostgresConnectError::CertificateParameters(text))
    }
}

/// Reads a certificate or key. An error does not repeat a text that may be more than a path.
#[cfg(feature = "tls")]
fn pem(shown: &str) -> Result<Vec<u8>, PostgresConnectError> {
    let Some(path) = shown.strip_prefix(FILE) else { return Ok(shown.as_bytes().to_vec()) };
    let read = || {
        let metadata = std::fs::metadata(path)?;
        if !metadata.is_file() || metadata.len() > MAX_FILE {
            let text = "expected a regular file of at most 4 MiB";
            return Err(std::io::Error::new(std::io::ErrorKind::InvalidData, text));
        }
        std::fs::read(path)
    };
    read().map_err(|source| {
        let is_path = !path.contains(['?', '&', '=', '\n']);
        let path = if is_path { path } else { "a file named in the URL" };
        PostgresConnectError::CertificateFile { path: path.to_owned(), source }
    })
}
