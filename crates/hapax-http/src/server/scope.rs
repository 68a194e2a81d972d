//! Whose key it is.

use std::fmt;
use std::sync::Arc;

use hapax::Scope;
use http::header::{AUTHORIZATION, HeaderMap, HeaderName, HeaderValue, PROXY_AUTHORIZATION};
use http::request::Parts;

use crate::problem::{Code, Problem};

/// Where the scope of a key comes from. There is no default: two callers in one scope can see
/// each other's answers.
///
/// A replay does not check credentials again. With credentials as the scope, whoever can present
/// them gets the answer, even after they were revoked.
#[derive(Clone)]
pub struct ScopeSource(Source);

#[derive(Clone)]
enum Source {
    Shared,
    Headers { names: Arc<[HeaderName]>, missing: MissingScope },
    Function(Arc<ScopeFn>),
}

type ScopeFn = dyn Fn(&Parts) -> Result<Scope, ScopeRefused> + Send + Sync;

/// What becomes of a request without one of the headers that name the caller.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum MissingScope {
    /// It is refused: 400 `missing-scope`.
    #[default]
    Reject,
    /// A header that is not there is a caller of its own: all who send none share a scope.
    Shared,
}

/// Why a request has no scope.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum ScopeRefused {
    /// It does not say who the caller is: 400 `missing-scope`.
    Missing,
    /// It says it in a way that changes with every request: 400 `unstable-scope`.
    Unstable,
}

impl ScopeSource {
    /// One scope for every caller. Only right where all callers trust each other.
    #[must_use]
    pub const fn shared() -> Self {
        Self(Source::Shared)
    }

    /// All values of these headers together. A value without content counts as missing: whoever
    /// sends one says no more of the caller than whoever sends none.
    ///
    /// Credentials (`Authorization`, `Proxy-Authorization`) that change by request are refused:
    /// under them every retry would come from another caller. They are told by their scheme:
    ///
    /// - signatures of each request: AWS (all versions), Signature, Hawk, SharedKey, SharedKeyLite,
    ///   whatever has HMAC in its name, and OAuth 1 (`OAuth` with `oauth_` parameters; `OAuth` with
    ///   a plain token is a stable credential);
    /// - proofs, challenges and counters: DPoP, Digest, MAC, Mutual, HOBA, SCRAM, NTLM, Negotiate,
    ///   Concealed, PrivateToken.
    ///
    /// Basic, Bearer, GNAP and any other scheme count as stable. A token that is renewed between
    /// two attempts still is another scope: then a [`function`](Self::function) should name the
    /// user.
    #[must_use]
    pub fn headers(names: impl IntoIterator<Item = HeaderName>, missing: MissingScope) -> Self {
        Self(Source::Headers { names: names.into_iter().collect(), missing })
    }

    /// What a function of the request's head says: an authenticated user out of the extensions,
    /// say. It must be the same for every attempt of the same caller.
    #[must_use]
    pub fn function(
        scope: impl Fn(&Parts) -> Result<Scope, ScopeRefused> + Send + Sync + 'static,
    ) -> Self {
        Self(Source::Function(Arc::new(scope)))
    }

    pub(super) fn scope(&self, parts: &Parts) -> Result<Scope, Problem> {
        let refused = match &self.0 {
            Source::Shared => return Ok(Scope::shared()),
            Source::Function(scope) => scope(parts),
            Source::Headers { names, missing } => from_headers(&parts.headers, names, *missing),
        };
        refused.map_err(|refused| match refused {
            ScopeRefused::Missing => {
                let lacks = |name: &&HeaderName| !parts.headers.get_all(*name).iter().any(says);
                let detail = match self.names().iter().find(lacks) {
                    Some(name) => format!("The request does not say who the caller is: `{name}`."),
                    None => "The request does not say who the caller is.".to_owned(),
                };
                Problem::new(Code::MissingScope, detail)
            }
            ScopeRefused::Unstable => Problem::new(
                Code::UnstableScope,
                "These credentials change with every request, so that a retry could not be told \
                 from another caller's request.",
            ),
        })
    }

    /// The headers it reads.
    pub(super) fn names(&self) -> &[HeaderName] {
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
) -> Result<Scope, ScopeRefused> {
    let mut parts = Vec::new();
    for name in names {
        let before = parts.len();
        for value in headers.get_all(name).iter().filter(|value| says(value)) {
            let credentials = [AUTHORIZATION, PROXY_AUTHORIZATION].contains(name);
            if credentials && changes_by_request(value) {
                return Err(ScopeRefused::Unstable);
            }
            parts.push((name.as_str(), value.as_bytes()));
        }
        if parts.len() == before && missing == MissingScope::Reject {
            return Err(ScopeRefused::Missing);
        }
    }
    Ok(Scope::of(parts))
}

fn says(value: &HeaderValue) -> bool {
    !value.as_bytes().trim_ascii().is_empty()
}

fn changes_by_request(credentials: &HeaderValue) -> bool {
    let text = String::from_utf8_lossy(credentials.as_bytes().trim_ascii()).to_ascii_lowercase();
    let (scheme, rest) = text.split_once([' ', '\t']).unwrap_or((&text, ""));
    match scheme {
        "oauth" => rest.contains("oauth_"),
        "signature" | "hawk" | "sharedkey" | "sharedkeylite" | "dpop" | "digest" | "mac"
        | "mutual" | "hoba" | "ntlm" | "negotiate" | "concealed" | "privatetoken" => true,
        _ => {
            ["aws", "scram-"].iter().any(|head| scheme.starts_with(head)) || scheme.contains("hmac")
        }
    }
}
