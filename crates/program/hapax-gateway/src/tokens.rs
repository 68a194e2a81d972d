//! Claims of bearer tokens, by which callers are named.
//!
//! 1. A token is verified before a body is read and before anything is claimed or replayed; with an auth URL, after the
//!    auth server has allowed the request. Its claims are then an extension of the request, where the layer finds them.
//! 2. The gateway accepts asymmetric algorithms only. The key decides which ones: a token cannot choose another one than
//!    its key is for. Issuer, audience and expiry are required.
//! 3. Without keys, the auth server has verified the token. The gateway then reads its claims, and still rejects one that
//!    has expired.
//! 4. A request without a bearer token has no claims: the layer decides whether its scope is missing.

mod fetch;
mod keys;
#[cfg(test)]
mod tests;
mod verify;

use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::Duration;

use hapax_core::{Clock, SystemClock};
use hapax_http::server::{ClaimName, TokenClaims};
use hapax_proxy::{Origin, Upstream};
use http::HeaderMap;
use http::header::AUTHORIZATION;
use tokio::runtime::Handle;

use crate::config::{ExpectedToken, KeySource, TokenCheck};
use crate::metrics::{Metrics, TokenResult};
use fetch::{FetchedKeys, KeyFetcher, KeyUrl};
use keys::KeySet;
use verify::{InvalidToken, Token, Verified};

/// The keys of tokens cannot be used.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum JwtKeysError {
    /// The file cannot be read.
    #[error("{}: {error}", path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// The reason.
        error: String,
    },
    /// The file has no keys.
    #[error("{}: {error}", path.display())]
    Invalid {
        /// The file.
        path: PathBuf,
        /// The expected content, and the one that was found.
        error: String,
    },
}

/// Reads the claims of tokens, once they are verified.
#[derive(Debug)]
pub(crate) struct Tokens {
    check: Check,
    metrics: Arc<Metrics>,
}

#[derive(Debug)]
enum Check {
    ByAuth,
    Here { keys: Keys, expected: ExpectedToken },
}

#[derive(Debug)]
enum Keys {
    File(KeySet),
    Url(Arc<KeyFetcher>),
}

/// Reasons for which a request is rejected.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) enum TokenRejection {
    /// More than one `Authorization`.
    Ambiguous,
    /// The token does not verify; this is the reason, as a clause.
    Invalid(String),
    /// There are no keys to verify it with.
    Unavailable,
}

impl Tokens {
    /// Creates the reader of claims; reads the keys if they are in a file. Keys of a URL are not fetched before
    /// [`begin`](Self::begin). `client` makes a client of the URL, with a timeout.
    pub(crate) fn new(
        check: TokenCheck,
        metrics: Arc<Metrics>,
        client: impl FnOnce(Origin) -> (Upstream, Duration),
    ) -> Result<Self, JwtKeysError> {
        let check = match check {
            TokenCheck::ByAuth => Check::ByAuth,
            TokenCheck::Here { keys, expected } => {
                let keys = match keys {
                    KeySource::File(path) => Keys::File(KeySet::read(&path)?),
                    KeySource::Url(origin, path) => {
                        let (upstream, timeout) = client(origin);
                        let url = KeyUrl { upstream, path, timeout };
                        Keys::Url(Arc::new(KeyFetcher::new(url)))
                    }
                };
                Check::Here { keys, expected }
            }
        };
        Ok(Self { check, metrics })
    }

    /// Returns a reader that expects other tokens by the keys of this one; `None` if they do not have a URL.
    pub(crate) fn expecting(&self, expected: ExpectedToken) -> Option<Self> {
        let Check::Here { keys: Keys::Url(fetcher), .. } = &self.check else { return None };
        let check = Check::Here { keys: Keys::Url(Arc::clone(fetcher)), expected };
        Some(Self { check, metrics: Arc::clone(&self.metrics) })
    }

    /// Checks the keys without fetching any.
    pub(crate) fn check(check: &TokenCheck) -> Result<(), JwtKeysError> {
        match check {
            TokenCheck::Here { keys: KeySource::File(path), .. } => KeySet::read(path).map(drop),
            _ => Ok(()),
        }
    }

    /// Begins to fetch keys, if they have a URL and it has not begun. Returns the flag that is set while the last fetch
    /// has failed.
    pub(crate) fn begin(&self, runtime: &Handle) -> Arc<AtomicBool> {
        match &self.check {
            Check::Here { keys: Keys::Url(fetcher), .. } => fetcher.begin(runtime),
            _ => Arc::default(),
        }
    }

    /// Returns the claims `wanted` of the request's token; `None` if it has no bearer token.
    ///
    /// Dropping the future changes nothing.
    pub(crate) async fn claims(
        &self,
        headers: &HeaderMap,
        wanted: &[ClaimName],
    ) -> Result<Option<TokenClaims>, TokenRejection> {
        let Some(text) = bearer(headers)? else { return Ok(None) };
        let verified = match text.ok_or(InvalidToken::Malformed) {
            Ok(text) => self.verify(text).await,
            Err(error) => Err(TokenFailure::Invalid(error)),
        };
        let claims = verified.and_then(|verified| Ok(verified.claims(wanted)?));
        let result = match &claims {
            Ok(_) => TokenResult::Verified,
            Err(TokenFailure::Invalid(_)) => TokenResult::Invalid,
            Err(TokenFailure::Unavailable) => TokenResult::Unavailable,
        };
        self.metrics.token(result);
        claims.map(Some).map_err(|failure| match failure {
            TokenFailure::Invalid(error) => {
                tracing::debug!(%error, "a bearer token was rejected");
                TokenRejection::Invalid(error.to_string())
            }
            TokenFailure::Unavailable => TokenRejection::Unavailable,
        })
    }

    async fn verify(&self, text: &str) -> Result<Verified, TokenFailure> {
        let (keys, expected) = match &self.check {
            Check::ByAuth => return Ok(Verified::by_auth(text, now())?),
            Check::Here { keys, expected } => (keys, expected),
        };
        let token = Token::read(text)?;
        let known = |set: &KeySet| token.verify(set, expected, now());
        match keys {
            Keys::File(set) => Ok(known(set)?),
            Keys::Url(fetcher) => {
                let fetched = fetcher.keys().await.ok_or(TokenFailure::Unavailable)?;
                match known(&fetched.set) {
                    Err(InvalidToken::UnknownKey) => {}
                    result => return Ok(result?),
                }
                // The issuer may have a new key. A fetch that fails does not say that it has none.
                match fetcher.newer(fetched.round).await {
                    Some(FetchedKeys { has_failed: true, .. }) => Err(TokenFailure::Unavailable),
                    Some(fetched) => Ok(known(&fetched.set)?),
                    None if fetched.has_failed => Err(TokenFailure::Unavailable),
                    None => Err(InvalidToken::UnknownKey.into()),
                }
            }
        }
    }
}

#[derive(Debug)]
enum TokenFailure {
    Invalid(InvalidToken),
    Unavailable,
}

impl From<InvalidToken> for TokenFailure {
    fn from(error: InvalidToken) -> Self {
        Self::Invalid(error)
    }
}

/// Returns the bearer token: the outer `None` without one, the inner one if it is no text.
fn bearer(headers: &HeaderMap) -> Result<Option<Option<&str>>, TokenRejection> {
    let mut values = headers.get_all(AUTHORIZATION).iter();
    let (value, second) = (values.next(), values.next());
    if second.is_some() {
        return Err(TokenRejection::Ambiguous);
    }
    let Some(value) = value.map(|value| value.as_bytes().trim_ascii()) else { return Ok(None) };
    let end = value.iter().position(|byte| matches!(byte, b' ' | b'\t')).unwrap_or(value.len());
    let (scheme, token) = value.split_at(end);
    let token = token.trim_ascii();
    if !scheme.eq_ignore_ascii_case(b"bearer") || token.is_empty() {
        return Ok(None);
    }
    Ok(Some(std::str::from_utf8(token).ok()))
}

/// Returns the seconds since 1970.
fn now() -> f64 {
    SystemClock.now().as_micros() as f64 / 1e6
}
