//! Configuration of forward authorisation.

use std::time::Duration;

use hapax_http::stored_response::hop_by_hop;
use hapax_proxy::Origin;
use http::uri::PathAndQuery;
use http::{HeaderName, Uri};

use super::{Config, ConfigError, is_self, no_target};

/// Server that authorises requests with a key, and headers of its response that are used.
/// [`ForwardAuth::new`] has the defaults.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct ForwardAuth {
    /// URL of the server: `http://HOST[:PORT]/PATH`, or `https`.
    pub url: Uri,
    /// Time within which the complete response must arrive. Default 2 s.
    pub timeout: Duration,
    /// Headers of the response whose values together name the caller, in place of
    /// [`PolicyConfig::scope`](super::PolicyConfig::scope). They are copied to the request as well.
    /// Default: none.
    pub scope: Vec<HeaderName>,
    /// Headers of the response that are copied to the request for the upstream. Headers of these
    /// names that clients send are dropped from every request. Default: none.
    pub copy: Vec<HeaderName>,
}

impl ForwardAuth {
    /// Default of [`timeout`](Self::timeout).
    pub(crate) const TIMEOUT: Duration = Duration::from_secs(2);

    /// Configures a request to `url`, of whose response only the status is used.
    #[must_use]
    pub const fn new(url: Uri) -> Self {
        Self { url, timeout: Self::TIMEOUT, scope: Vec::new(), copy: Vec::new() }
    }

    /// Returns the headers that only the auth response can set, each once.
    pub(crate) fn given(&self) -> Vec<HeaderName> {
        let mut given = self.scope.clone();
        for name in &self.copy {
            if !given.contains(name) {
                given.push(name.clone());
            }
        }
        given
    }

    pub(super) fn target(&self, config: &Config) -> Result<(Origin, PathAndQuery), ConfigError> {
        let origin = Origin::of(&self.url)
            .ok_or_else(|| no_target("auth_url", &self.url, ConfigError::AuthTarget))?;
        if is_self(&origin, config.listen) {
            return Err(ConfigError::AuthLoop { address: config.listen });
        }
        if self.timeout.is_zero() {
            return Err(ConfigError::Zero { field: "auth_timeout" });
        }
        if !self.scope.is_empty() {
            if config.policies().any(|policy| policy.scope.is_some()) {
                return Err(ConfigError::TwoScopes);
            }
            if config.policies().any(|policy| policy.scope_missing.is_some()) {
                return Err(ConfigError::CallerIsNamed);
            }
        }
        for (field, names) in [("auth_scope", &self.scope), ("auth_copy", &self.copy)] {
            if let Some(name) = names.iter().find(|name| is_not_the_answers(name)) {
                return Err(ConfigError::AuthHeader { field, header: name.clone() });
            }
        }
        let path = self.url.path_and_query().cloned();
        Ok((origin, path.unwrap_or_else(|| PathAndQuery::from_static("/"))))
    }
}

/// Returns whether a header of the auth response must not be copied: fields about its own
/// connection and content, fields that the proxy sets itself, and clients' credentials. Requests
/// without an auth request would reach the upstream without those credentials, since clients'
/// headers of a copied name are dropped.
fn is_not_the_answers(name: &HeaderName) -> bool {
    let plain = name.as_str().replace('_', "-");
    hop_by_hop(name)
        || plain.starts_with("idempotency-")
        || plain.starts_with("content-")
        || matches!(
            plain.as_str(),
            "authorization"
                | "cookie"
                | "date"
                | "expect"
                | "forwarded"
                | "host"
                | "set-cookie"
                | "trailer"
                | "via"
                | "x-forwarded-for"
                | "x-forwarded-host"
                | "x-forwarded-proto"
        )
}
