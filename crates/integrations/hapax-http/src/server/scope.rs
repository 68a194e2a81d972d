//! Scopes: sources of the caller's name.

use std::fmt;
use std::sync::Arc;

use hapax_core::Scope;
use http::header::{AUTHORIZATION, HeaderMap, HeaderName, HeaderValue, PROXY_AUTHORIZATION};
use http::request::Parts;

use crate::problem::{Code, Problem};

/// Source of the scope of a key. There is no default: two callers in one scope can read each
/// other's responses.
///
/// A replay does not check credentials again. With credentials as the scope, any client that
/// presents them gets the response, even after they were revoked.
#[derive(Clone)]
pub struct ScopeSource(Source);

#[derive(Clone)]
enum Source {
    Shared,
    Headers { names: Arc<[HeaderName]>, missing: MissingScope },
    Function(Arc<ScopeFn>),
}

type ScopeFn = dyn Fn(&Parts) -> Result<Scope, ScopeError> + Send + Sync;

/// Treatment of a request without one of the headers that name the caller.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum MissingScope {
    /// The request is rejected: 400 `missing-scope`.
    #[default]
    Reject,
    /// An absent header names a caller too: all clients without it share one scope.
    Shared,
}

/// Reasons for which a request has no scope.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum ScopeError {
    /// The request does not name its caller: 400 `missing-scope`.
    Missing,
    /// The name changes with every request: 400 `unstable-scope`.
    Unstable,
}

impl ScopeSource {
    /// Returns one scope for every caller, which is right only where all callers trust each other.
    #[must_use]
    pub const fn shared() -> Self {
        Self(Source::Shared)
    }

    /// Returns a scope of all values of these headers together. An empty value counts as missing.
    ///
    /// Credentials (`Authorization`, `Proxy-Authorization`) that change with each request are
    /// rejected: under them every retry would come from another caller. The scheme decides:
    ///
    /// - signatures of each request: AWS (all versions), Signature, Hawk, SharedKey, SharedKeyLite,
    ///   any scheme with HMAC in its name, and OAuth 1 (`OAuth` with `oauth_` parameters; `OAuth`
    ///   with a plain token is a stable credential);
    /// - proofs, challenges and counters: DPoP, Digest, MAC, Mutual, HOBA, SCRAM, NTLM, Negotiate,
    ///   Concealed, PrivateToken.
    ///
    /// Basic, Bearer, GNAP and any other scheme count as stable. A token that is renewed between
    /// two attempts is another scope: then a [`function`](Self::function) should name the user.
    #[must_use]
    pub fn headers(names: impl IntoIterator<Item = HeaderName>, missing: MissingScope) -> Self {
        Self(Source::Headers { names: names.into_iter().collect(), missing })
    }

    /// Returns a scope from a function of the request's head, such as an authenticated user in the
    /// extensions. It must be the same for every attempt of a caller.
    #[must_use]
    pub fn function(
        scope: impl Fn(&Parts) -> Result<Scope, ScopeError> + Send + Sync + 'static,
    ) -> Self {
        Self(Source::Function(Arc::new(scope)))
    }

    /// Returns the scope of a request.
    ///
    /// # Errors
    /// The rejection: 400 `missing-scope` or `unstable-scope`.
    pub fn scope(&self, parts: &Parts) -> Result<Scope, Problem> {
        let scope = match &self.0 {
            Source::Shared => return Ok(Scope::shared()),
            Source::Function(function) => function(parts),
            Source::Headers { names, missing } => from_headers(&parts.headers, names, *missing),
        };
        scope.map_err(|error| match error {
            ScopeError::Missing => Problem::new(Code::MissingScope, self.missing(parts)),
            ScopeError::Unstable => Problem::new(Code::UnstableScope, self.unstable(parts)),
        })
    }

    /// Returns the detail of 400 `missing-scope`.
    fn missing(&self, parts: &Parts) -> String {
        let lacks = |name: &&HeaderName| !parts.headers.get_all(*name).iter().any(has_text);
        match self.names().iter().find(lacks) {
            Some(name) => format!(
                "An idempotency key needs its caller: the request must have the header `{name}`, \
                 and it is missing or empty. A client sends it. An operator can name another \
                 header in `scope`, or set `scope_missing` to `shared` or `scope` to `none`: \
                 callers that share a scope get each other's responses when their keys are equal."
            ),
            None => "An idempotency key needs its caller, and the server finds none in this \
                     request. A client sends its credentials."
                .to_owned(),
        }
    }

    /// Returns the detail of 400 `unstable-scope`.
    fn unstable(&self, parts: &Parts) -> String {
        let changes = |name: &&HeaderName| {
            is_credentials(name) && parts.headers.get_all(*name).iter().any(changes_by_request)
        };
        match self.names().iter().find(changes) {
            Some(name) => format!(
                "The scheme of `{name}` makes other credentials for each request, so a retry would \
                 count as another caller's request and could execute again. A client uses a scheme \
                 whose value stays the same (Bearer, Basic). An operator names in `scope` a header \
                 that stays the same for all attempts of one caller, or has the caller named by \
                 forward authorisation (`auth_scope`)."
            ),
            None => "The caller's credentials change with each request, so a retry would count as \
                     another caller's request and could execute again. A client uses credentials \
                     that stay the same for all attempts."
                .to_owned(),
        }
    }

    /// Returns the scope headers; empty if a function returns the scope.
    #[must_use]
    pub fn names(&self) -> &[HeaderName] {
        match &self.0 {
            Source::Headers { names, .. } => names,
            Source::Shared | Source::Function(_) => &[],
        }
    }
}

impl fmt::Debug for ScopeSource {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.0 {
            Source::Shared => f.write_str("ScopeSource(shared)"),
            Source::Headers { names, missing } => {
                f.debug_tuple("ScopeSource").field(names).field(missing).finish()
            }
            Source::Function(_) => f.write_str("ScopeSource(function)"),
        }
    }
}

fn from_headers(
    headers: &HeaderMap,
    names: &[HeaderName],
    missing: MissingScope,
) -> Result<Scope, ScopeError> {
    let mut parts = Vec::new();
    for name in names {
        let before = parts.len();
        for value in headers.get_all(name).iter().filter(|value| has_text(value)) {
            if is_credentials(name) && changes_by_request(value) {
                return Err(ScopeError::Unstable);
            }
            parts.push((name.as_str(), value.as_bytes()));
        }
        if parts.len() == before && missing == MissingScope::Reject {
            return Err(ScopeError::Missing);
        }
    }
    Ok(Scope::of(parts))
}

fn has_text(value: &HeaderValue) -> bool {
    !value.as_bytes().trim_ascii().is_empty()
}

fn is_credentials(name: &HeaderName) -> bool {
    [AUTHORIZATION, PROXY_AUTHORIZATION].contains(name)
}

fn changes_by_request(credentials: &HeaderValue) -> bool {
    let text = String::from_utf8_lossy(credentials.as_bytes().trim_ascii());
    let (scheme, rest) = text.split_once([' ', '\t']).unwrap_or((&text, ""));
    // The usual schemes need no copy.
    if ["bearer", "basic"].iter().any(|usual| scheme.eq_ignore_ascii_case(usual)) {
        return false;
    }
    let scheme = scheme.to_ascii_lowercase();
    match &*scheme {
        "oauth" => rest.to_ascii_lowercase().contains("oauth_"),
        "signature" | "hawk" | "sharedkey" | "sharedkeylite" | "dpop" | "digest" | "mac"
        | "mutual" | "hoba" | "ntlm" | "negotiate" | "concealed" | "privatetoken" => true,
        _ => {
            ["aws", "scram-"].iter().any(|head| scheme.starts_with(head)) || scheme.contains("hmac")
        }
    }
}
