//! The builder of the sink, and the errors of its settings.

use std::fmt;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use hapax_core::{Clock, SystemClock};
use hapax_proxy::tls::{AllCertificates, TlsError, UpstreamTls};
use hapax_proxy::{ConnectOptions, ConnectProxy, Origin, Upstream};
use http::Uri;
use http::uri::PathAndQuery;
use tokio::sync::Semaphore;

use super::{RejectedStatuses, WebhookSink};
use crate::config::SecretError;
use crate::scheme::SignatureScheme;
use crate::secret::{MAX_SECRETS, SigningSecrets};

/// A builder of a [`WebhookSink`]. Its `Debug` form shows neither the URL nor a secret.
#[must_use = "`build` makes the sink"]
pub struct WebhookSinkBuilder {
    url: String,
    secrets: Vec<Vec<u8>>,
    roots: Option<PathBuf>,
    proxy: Option<ConnectProxy>,
    timeout: Duration,
    max_response: usize,
    rejected: RejectedStatuses,
    clock: Arc<dyn Clock>,
}

impl WebhookSinkBuilder {
    /// The default of [`timeout`](Self::timeout).
    pub const TIMEOUT: Duration = Duration::from_secs(10);

    /// The default of [`max_response`](Self::max_response), in bytes.
    pub const MAX_RESPONSE: usize = 64 * 1024;

    pub(super) fn new(url: String) -> Self {
        Self {
            url,
            secrets: Vec::new(),
            roots: None,
            proxy: None,
            timeout: Self::TIMEOUT,
            max_response: Self::MAX_RESPONSE,
            rejected: RejectedStatuses::default(),
            clock: Arc::new(SystemClock),
        }
    }

    /// Adds a signing secret of Standard Webhooks: `whsec_` and the base64 of at least 24 bytes.
    /// Every request has a signature for each secret, at most eight: during a rotation the new one
    /// and the earlier one.
    pub fn secret(mut self, secret: impl AsRef<[u8]>) -> Self {
        self.secrets.push(secret.as_ref().to_vec());
        self
    }

    /// Sets a file of the root certificates to trust, in PEM. Default: the system's.
    pub fn roots(mut self, file: impl Into<PathBuf>) -> Self {
        self.roots = Some(file.into());
        self
    }

    /// Sets the proxy through which the endpoint is reached, by a tunnel (`CONNECT`). Default: none, whatever the
    /// environment says.
    pub fn proxy(mut self, proxy: ConnectProxy) -> Self {
        self.proxy = Some(proxy);
        self
    }

    /// Sets the time for a request from its beginning to the end of its response. Default 10 s.
    pub const fn timeout(mut self, timeout: Duration) -> Self {
        self.timeout = timeout;
        self
    }

    /// Sets the bytes of a response's body that are read; the rest of a longer one is ignored, and its
    /// connection closed. An error repeats its beginning. Default 64 KiB.
    pub const fn max_response(mut self, bytes: usize) -> Self {
        self.max_response = bytes;
        self
    }

    /// Sets the statuses by which the endpoint permanently rejects a message. Default: those that are
    /// about the message.
    pub const fn rejected(mut self, statuses: RejectedStatuses) -> Self {
        self.rejected = statuses;
        self
    }

    /// Sets the clock of the timestamps.
    pub fn clock(mut self, clock: Arc<dyn Clock>) -> Self {
        self.clock = clock;
        self
    }

    /// Reads the root certificates, and builds the sink. It does not connect.
    ///
    /// # Errors
    /// [`WebhookSinkError`] names the setting that is not valid; it contains neither the URL nor a
    /// secret.
    pub async fn build(self) -> Result<WebhookSink, WebhookSinkError> {
        let Self { url, secrets, roots, proxy, timeout, max_response, rejected, clock } = self;
        let (origin, path_and_query) = parse(&url)?;
        if timeout.is_zero() {
            return Err(WebhookSinkError::Timeout);
        }
        if secrets.len() > MAX_SECRETS {
            return Err(WebhookSinkError::TooManySecrets { found: secrets.len() });
        }
        let form = SignatureScheme::Standard.secret_form();
        let parsed = SigningSecrets::parse(form, &secrets)
            .map_err(|(number, error)| WebhookSinkError::Secret { number, error })?;
        let tls = match (origin.secure, roots) {
            (false, Some(_)) => return Err(WebhookSinkError::RootsWithoutTls),
            (false, None) => None,
            (true, ca) => {
                let files = UpstreamTls { ca, client: None };
                let read = AllCertificates::read(None, Some(files)).await;
                read.map_err(certificates)?.upstream
            }
        };
        let connect = ConnectOptions { tls, proxy, ..ConnectOptions::default() };
        // Relay and consumer limit the messages in flight.
        let endpoint = Upstream::new(origin, timeout, Semaphore::MAX_PERMITS, connect);
        let secrets = (!secrets.is_empty()).then_some(parsed);
        Ok(WebhookSink {
            endpoint,
            path_and_query,
            secrets,
            timeout,
            max_response,
            rejected,
            clock,
        })
    }
}

impl fmt::Debug for WebhookSinkBuilder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("WebhookSinkBuilder")
            .field("secrets", &self.secrets.len())
            .field("timeout", &self.timeout)
            .finish_non_exhaustive()
    }
}

fn certificates(error: TlsError) -> WebhookSinkError {
    match error {
        TlsError::NoRoots => WebhookSinkError::NoRoots,
        error => WebhookSinkError::Roots(error.into()),
    }
}

/// Returns the server of a URL, and the path and query on it.
fn parse(url: &str) -> Result<(Origin, PathAndQuery), WebhookSinkError> {
    if url.contains('#') {
        return Err(WebhookSinkError::Fragment);
    }
    let uri: Uri = url.parse().map_err(|_| WebhookSinkError::Url)?;
    if uri.authority().is_some_and(|authority| authority.as_str().contains('@')) {
        return Err(WebhookSinkError::Credentials);
    }
    let origin = Origin::of(&uri).ok_or(WebhookSinkError::Url)?;
    let path_and_query = uri.into_parts().path_and_query;
    Ok((origin, path_and_query.unwrap_or_else(|| PathAndQuery::from_static("/"))))
}

/// Reasons for which a [`WebhookSink`] cannot be built.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum WebhookSinkError {
    /// The URL does not name a server.
    #[error("expected http://HOST/PATH or https://HOST/PATH, found another URL")]
    Url,
    /// The URL has a user name or a password.
    #[error(
        "expected a URL without user name and password, found one with them: remove them, and let \
         the endpoint verify the signature"
    )]
    Credentials,
    /// The URL has a fragment.
    #[error("expected a URL without a fragment, found `#`, which no server receives: remove it")]
    Fragment,
    /// The timeout is zero.
    #[error("expected a timeout of at least 1 ms, found zero")]
    Timeout,
    /// There are too many secrets.
    #[error("expected at most 8 signing secrets, found {found}: remove those that have expired")]
    TooManySecrets {
        /// The number of secrets.
        found: usize,
    },
    /// A secret is not valid.
    #[error("signing secret {number}: {error}")]
    Secret {
        /// The number of the secret, from 1, in the order of the calls.
        number: usize,
        /// The reason for which it is not valid.
        error: SecretError,
    },
    /// There are root certificates for a URL without TLS.
    #[error("expected https:// with root certificates, found http://, which needs none")]
    RootsWithoutTls,
    /// The system has no root certificates, and none were given.
    #[error("expected root certificates, found none on this system: name a file of them")]
    NoRoots,
    /// The file of root certificates cannot be used.
    #[error("root certificates: {0}")]
    Roots(#[source] Box<dyn std::error::Error + Send + Sync>),
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_url_has_a_server_a_path_and_a_query_only() {
        for (url, host, target) in [
            ("https://shop.example", "shop.example", "/"),
            ("http://[::1]:8080/hooks?a=b", "[::1]:8080", "/hooks?a=b"),
            ("HTTPS://shop.example:8443/", "shop.example:8443", "/"),
        ] {
            let (origin, path) = parse(url).unwrap();
            assert_eq!((origin.authority.as_str(), path.as_str()), (host, target), "{url}");
        }
        let error = |url: &str| parse(url).unwrap_err().to_string();
        assert!(error("https://user:secret@shop.example/").contains("without user name"));
        assert!(error("https://token@shop.example/").contains("without user name"));
        assert!(error("https://shop.example/#part").contains("fragment"));
        for url in
            ["", "/hooks", "ftp://a/", "https:///hooks", "https://a:0/", "https://a:x/", "a b"]
        {
            assert!(error(url).contains("expected http://HOST/PATH"), "{url}");
        }
    }
}
