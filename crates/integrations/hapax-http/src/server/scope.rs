//! Scopes: sources of the caller's name.

use std::fmt;
use std::str::FromStr;
use std::sync::Arc;

use hapax_core::Scope;
use http::header::{
    AUTHORIZATION, COOKIE, HeaderMap, HeaderName, HeaderValue, InvalidHeaderName,
    PROXY_AUTHORIZATION,
};
use http::request::Parts;

use super::describe::names_caller;
use super::token_claims::{ClaimName, TokenClaims};
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
    Parts { parts: Arc<[ScopePart]>, names: Arc<[HeaderName]>, missing: MissingScope },
    Function(Arc<ScopeFn>),
}

type ScopeFn = dyn Fn(&Parts) -> Result<Scope, ScopeError> + Send + Sync;

/// A part of a request that names its caller, written as the name of a header, as `cookie:NAME`, or as `jwt:CLAIM`.
///
/// ```
/// use hapax_http::server::ScopePart;
/// for text in ["x-tenant", "cookie:session", "jwt:sub"] {
///     assert_eq!(text.parse::<ScopePart>().unwrap().to_string(), text);
/// }
/// ```
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum ScopePart {
    /// All values of a header.
    Header(HeaderName),
    /// The value of one cookie (RFC 6265). It must not be guessable, and must stay the same for all attempts of a caller.
    Cookie(CookieName),
    /// A claim of the bearer token, with its issuer. Its value is that in the request's [`TokenClaims`]: the layer
    /// reads no token itself.
    Claim(ClaimName),
}

/// The name of a cookie: a token, whose case counts. Contains `cookie:` before it.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct CookieName(Arc<str>);

const COOKIE_PREFIX: &str = "cookie:";

static COOKIES: HeaderName = COOKIE;

/// Detail of a request with two `Authorization` headers.
const TWO_TOKENS: &str = "The request must have one `Authorization` header, because a claim of its bearer token names the \
    caller, and it has more than one.";

/// Error of a text that names no part of a request.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
#[error("expected the name of a header, cookie:NAME or jwt:CLAIM")]
pub struct InvalidScopePart;

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
    /// The request names two callers, such as by two cookies of one name: 400 `malformed-request`.
    Ambiguous,
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
        Self::parts(names.into_iter().map(ScopePart::Header), missing)
    }

    /// Returns a scope of these parts together; those that are headers count as in [`headers`](Self::headers). An empty
    /// cookie counts as missing, and so does a claim that the request's [`TokenClaims`] do not have. Two cookies of one
    /// name, as of two paths or domains, are rejected with 400 `malformed-request`: their order is not defined. So are
    /// two `Authorization` headers where a claim names the caller.
    #[must_use]
    pub fn parts(parts: impl IntoIterator<Item = ScopePart>, missing: MissingScope) -> Self {
        let parts: Arc<[_]> = parts.into_iter().collect();
        let names = parts.iter().map(|part| part.header().clone()).collect();
        Self(Source::Parts { parts, names, missing })
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
            Source::Parts { parts: named, missing, .. } => from_parts(parts, named, *missing),
        };
        scope.map_err(|error| match error {
            ScopeError::Missing => Problem::new(Code::MissingScope, self.missing(parts)),
            ScopeError::Unstable => Problem::new(Code::UnstableScope, self.unstable(parts)),
            ScopeError::Ambiguous => Problem::new(Code::MalformedRequest, self.ambiguous(parts)),
        })
    }

    /// Returns the detail of 400 `missing-scope`.
    fn missing(&self, parts: &Parts) -> String {
        let lacks = |part: &&ScopePart| part.count(parts) == Ok(0);
        match self.scope_parts().iter().find(lacks) {
            Some(part) => format!(
                "An idempotency key needs its caller: the request must have {}, \
                 and it is missing or empty. A client sends it. An operator can name another \
                 one in `scope`, or set `scope_missing` to `shared` or `scope` to `none`: \
                 callers that share a scope get each other's responses when their keys are equal.",
                part.kind()
            ),
            None => "An idempotency key needs its caller, and the server finds none in this \
                     request. A client sends its credentials."
                .to_owned(),
        }
    }

    /// Returns the detail of 400 `unstable-scope`.
    fn unstable(&self, parts: &Parts) -> String {
        let changes = |part: &&ScopePart| {
            let mut values = parts.headers.get_all(part.header()).iter();
            part.is_credentials() && values.any(|it| changes_by_request(it.as_bytes()))
        };
        match self.scope_parts().iter().find(changes) {
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

    /// Returns the detail of 400 `malformed-request`.
    fn ambiguous(&self, parts: &Parts) -> String {
        let is_ambiguous = |part: &&ScopePart| part.count(parts).is_err();
        match self.scope_parts().iter().find(is_ambiguous) {
            Some(ScopePart::Claim(_)) => TWO_TOKENS.to_owned(),
            Some(part) => format!(
                "The request must have {} once, because it names the caller, and it is there more than once. An \
                 operator sets it for one path and domain.",
                part.kind()
            ),
            None => "The request must name one caller, and names more than one.".to_owned(),
        }
    }

    /// Returns the scope headers, `Cookie` for a cookie and `Authorization` for a claim; empty if a function returns the
    /// scope.
    #[must_use]
    pub fn names(&self) -> &[HeaderName] {
        match &self.0 {
            Source::Parts { names, .. } => names,
            Source::Shared | Source::Function(_) => &[],
        }
    }

    pub(super) fn scope_parts(&self) -> &[ScopePart] {
        match &self.0 {
            Source::Parts { parts, .. } => parts,
            Source::Shared | Source::Function(_) => &[],
        }
    }
}

impl fmt::Debug for ScopeSource {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.0 {
            Source::Shared => f.write_str("ScopeSource(shared)"),
            Source::Parts { parts, missing, .. } => {
                f.debug_tuple("ScopeSource").field(parts).field(missing).finish()
            }
            Source::Function(_) => f.write_str("ScopeSource(function)"),
        }
    }
}

impl ScopePart {
    /// Returns the header that contains it.
    #[must_use]
    pub fn header(&self) -> &HeaderName {
        match self {
            Self::Header(name) => name,
            Self::Cookie(_) => &COOKIES,
            Self::Claim(_) => &AUTHORIZATION,
        }
    }

    /// Returns its text.
    #[must_use]
    pub fn as_str(&self) -> &str {
        match self {
            Self::Header(name) => name.as_str(),
            Self::Cookie(CookieName(text)) => text,
            Self::Claim(name) => name.text(),
        }
    }

    /// Returns whether a request has its values by credentials: they may be credentials, of which descriptions of requests
    /// show hashes, or are claims of a token.
    #[must_use]
    pub fn is_of_credentials(&self) -> bool {
        matches!(self, Self::Claim(_)) || !names_caller(self.as_str())
    }

    /// Appends its values that are not empty, each with the text of the part.
    pub(super) fn add_values<'a>(
        &'a self,
        request: &'a Parts,
        found: &mut Vec<(&'a str, &'a [u8])>,
    ) -> Result<(), ScopeError> {
        let value = match self {
            Self::Header(name) => {
                let values = request.headers.get_all(name).iter().filter(|it| has_text(it));
                found.extend(values.map(|value| (name.as_str(), value.as_bytes())));
                return Ok(());
            }
            Self::Cookie(name) => name.value(&request.headers)?,
            Self::Claim(name) => {
                if request.headers.get_all(AUTHORIZATION).iter().nth(1).is_some() {
                    return Err(ScopeError::Ambiguous);
                }
                let claims = request.extensions.get::<TokenClaims>();
                claims.and_then(|claims| claims.value(name)).map(str::as_bytes)
            }
        };
        found.extend(value.map(|value| (self.as_str(), value)));
        Ok(())
    }

    /// Returns the cookie of this part as `NAME=VALUE`, without others of the same header. `None` if it is a header, or the
    /// request does not have the cookie once.
    #[must_use]
    pub fn cookie(&self, headers: &HeaderMap) -> Option<Vec<u8>> {
        let Self::Cookie(name) = self else { return None };
        let value = name.value(headers).ok()??;
        Some([name.as_str().as_bytes(), b"=", value].concat())
    }

    /// Returns the number of its values that are not empty.
    fn count(&self, request: &Parts) -> Result<usize, ScopeError> {
        let mut found = Vec::new();
        self.add_values(request, &mut found)?;
        Ok(found.len())
    }

    /// Returns what it is, with its name.
    fn kind(&self) -> String {
        match self {
            Self::Header(name) => format!("the header `{name}`"),
            Self::Cookie(name) => format!("the cookie `{}`", name.as_str()),
            Self::Claim(name) => {
                format!("the claim `{}` of a bearer token in `Authorization`", name.as_str())
            }
        }
    }

    /// Returns whether its value is that of a header of credentials, whose scheme may change it with each request.
    fn is_credentials(&self) -> bool {
        matches!(self, Self::Header(name) if [AUTHORIZATION, PROXY_AUTHORIZATION].contains(name))
    }
}

impl CookieName {
    fn as_str(&self) -> &str {
        &self.0[COOKIE_PREFIX.len()..]
    }

    /// Returns the value of the cookie; `None` if it is missing or empty.
    fn value<'a>(&self, headers: &'a HeaderMap) -> Result<Option<&'a [u8]>, ScopeError> {
        let name = self.as_str().as_bytes();
        // HTTP/2 may have a line for each cookie (RFC 9113, 8.2.3).
        let pairs = headers.get_all(COOKIE).iter();
        let pairs = pairs.flat_map(|line| line.as_bytes().split(|byte| *byte == b';'));
        let mut values = pairs.filter_map(|pair| {
            let at = pair.iter().position(|byte| *byte == b'=')?;
            (pair[..at].trim_ascii() == name).then(|| pair[at + 1..].trim_ascii())
        });
        let (value, second) = (values.next(), values.next());
        match second {
            Some(_) => Err(ScopeError::Ambiguous),
            None => Ok(value.filter(|value| !value.is_empty())),
        }
    }
}

impl From<HeaderName> for ScopePart {
    fn from(name: HeaderName) -> Self {
        Self::Header(name)
    }
}

impl fmt::Display for ScopePart {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

impl FromStr for ScopePart {
    type Err = InvalidScopePart;

    fn from_str(text: &str) -> Result<Self, InvalidScopePart> {
        let invalid = |_: InvalidHeaderName| InvalidScopePart;
        if let Some(claim) = ClaimName::read(text) {
            return claim.map(Self::Claim).ok_or(InvalidScopePart);
        }
        let Some(cookie) = text.strip_prefix(COOKIE_PREFIX) else {
            return text.parse().map(Self::Header).map_err(invalid);
        };
        // Names of headers and cookies are tokens (RFC 9110, 5.6.2; RFC 6265, 4.1.1).
        cookie.parse::<HeaderName>().map_err(invalid)?;
        Ok(Self::Cookie(CookieName(text.into())))
    }
}

fn from_parts(
    request: &Parts,
    parts: &[ScopePart],
    missing: MissingScope,
) -> Result<Scope, ScopeError> {
    let mut found = Vec::new();
    for part in parts {
        let before = found.len();
        part.add_values(request, &mut found)?;
        let values = &found[before..];
        if values.is_empty() && missing == MissingScope::Reject {
            return Err(ScopeError::Missing);
        }
        if part.is_credentials() && values.iter().any(|(_, it)| changes_by_request(it)) {
            return Err(ScopeError::Unstable);
        }
    }
    Ok(Scope::of(found))
}

fn has_text(value: &HeaderValue) -> bool {
    !value.as_bytes().trim_ascii().is_empty()
}

fn changes_by_request(credentials: &[u8]) -> bool {
    let text = String::from_utf8_lossy(credentials.trim_ascii());
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
