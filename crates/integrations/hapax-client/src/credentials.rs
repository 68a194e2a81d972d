//! Credentials, which a callback supplies for each try and which are never stored.

use std::error::Error;
use std::fmt;
use std::future::Future;
use std::sync::Arc;

use hapax_core::Idempotency;
use hapax_core::store::BoxFuture;
use http::header::{AUTHORIZATION, COOKIE, PROXY_AUTHORIZATION};
use http::{HeaderMap, HeaderName, HeaderValue, Method, Uri};

use crate::request::{RecordedRequest, is_framing};

/// Headers that are never stored.
pub(crate) const SECRET_HEADERS: [HeaderName; 3] = [AUTHORIZATION, COOKIE, PROXY_AUTHORIZATION];

/// Headers that are added to each try and never stored. Those of [`header`](Self::header) identify the
/// caller, and are compared between tries; those of [`varying_header`](Self::varying_header) are not. Its
/// `Debug` form shows names only.
#[derive(Clone, Default)]
pub struct Credentials {
    pub(crate) headers: HeaderMap,
    /// Headers that are not compared.
    pub(crate) varying: HeaderMap,
}

impl Credentials {
    /// Creates credentials without a header.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Creates `Authorization: Bearer TOKEN`; `token` is without `Bearer`.
    ///
    /// # Errors
    /// [`http::Error`] if the token has a byte that no header may contain.
    pub fn bearer(token: &str) -> Result<Self, http::Error> {
        Ok(Self::new().header(AUTHORIZATION, HeaderValue::try_from(format!("Bearer {token}"))?))
    }

    /// Adds a header that identifies the caller, such as a token. After a try that may have arrived, another
    /// value is [`SendError::CredentialsChanged`](crate::SendError::CredentialsChanged).
    #[must_use]
    pub fn header(mut self, name: HeaderName, mut value: HeaderValue) -> Self {
        value.set_sensitive(true);
        self.headers.append(name, value);
        self
    }

    /// Adds a header whose value differs between tries, such as a trace id, a date or a signature. It is
    /// sent and not compared, so it must not be what identifies the account to the server: after a try
    /// that may have arrived, the request of another account would be sent under the same key. If one
    /// header has both, declare the server as
    /// [scoped by account](crate::Server::scoped_by_account).
    #[must_use]
    pub fn varying_header(mut self, name: HeaderName, mut value: HeaderValue) -> Self {
        value.set_sensitive(true);
        self.varying.append(name, value);
        self
    }

    /// Returns the name of a header that is not for credentials: it would change the message, the key or
    /// the stored request.
    pub(crate) fn unfit(&self, request: &RecordedRequest, key: &HeaderName) -> Option<&HeaderName> {
        self.headers.keys().chain(self.varying.keys()).find(|name| {
            let is_stored = request.headers.iter().any(|(stored, _)| stored == name.as_str());
            is_framing(name) || is_stored || *name == key
        })
    }

    /// Returns a keyed hash of the headers that identify the caller: equal for equal ones. Without the
    /// secret of the journal no process can test a guess. Varying headers are left out, or no two tries would
    /// have equal credentials.
    pub(crate) fn hash(&self, engine: &Idempotency) -> String {
        let mut fields: Vec<(&str, &[u8])> =
            self.headers.iter().map(|(name, value)| (name.as_str(), value.as_bytes())).collect();
        fields.sort_by_key(|(name, _)| *name);
        let mut bytes = Vec::new();
        for field in fields.iter().flat_map(|(name, value)| [name.as_bytes(), value]) {
            bytes.extend_from_slice(&(field.len() as u64).to_be_bytes());
            bytes.extend_from_slice(field);
        }
        // A journal has a secret.
        engine.pseudonym(&bytes).unwrap_or_default()
    }
}

impl fmt::Debug for Credentials {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_set().entries(self.headers.keys().chain(self.varying.keys())).finish()
    }
}

/// Try that needs credentials.
#[derive(Clone, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub struct CredentialsRequest {
    /// The name of the operation.
    pub name: String,
    /// The method.
    pub method: Method,
    /// The URL.
    pub url: Uri,
    /// True if the server has rejected the last credentials with 401: return new ones, and none of a cache.
    pub previous_rejected: bool,
}

/// An error of the callback for credentials. Its text is neither stored nor logged.
pub type CredentialsError = Box<dyn Error + Send + Sync>;

type Supplied = BoxFuture<'static, Result<Credentials, CredentialsError>>;

/// The callback of a client.
#[derive(Clone)]
pub(crate) struct Supplier(Arc<dyn Fn(CredentialsRequest) -> Supplied + Send + Sync>);

impl Supplier {
    pub(crate) fn new<F, Fut>(supply: F) -> Self
    where
        F: Fn(CredentialsRequest) -> Fut + Send + Sync + 'static,
        Fut: Future<Output = Result<Credentials, CredentialsError>> + Send + 'static,
    {
        Self(Arc::new(move |request| Box::pin(supply(request))))
    }

    pub(crate) async fn supply(
        &self,
        request: CredentialsRequest,
    ) -> Result<Credentials, CredentialsError> {
        (self.0)(request).await
    }
}

impl fmt::Debug for Supplier {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Supplier")
    }
}
