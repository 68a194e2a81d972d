//! Forward authorisation, as it is configured.

use std::time::Duration;

use hapax_http::stored_response::hop_by_hop;
use http::uri::PathAndQuery;
use http::{HeaderName, Uri};

use super::{Config, ConfigError, is_self, origin};
use crate::upstream::Origin;

/// Who is asked whether a request with a key may have an answer, and what of the answer counts.
/// [`ForwardAuth::new`] has the defaults.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct ForwardAuth {
    /// Where: `http://HOST[:PORT]/PATH`, or `https`.
    pub url: Uri,
    /// Within which time there must be a whole answer. Default 2 s.
    pub timeout: Duration,
    /// Headers of the answer whose values together say who the caller is, in place of
    /// [`PolicyConfig::scope`](super::PolicyConfig::scope). They are copied as well. Default: none.
    pub scope: Vec<HeaderName>,
    /// Headers of the answer that the upstream gets. Clients' own of these names are dropped from
    /// every request. Default: none.
    pub copy: Vec<HeaderName>,
}

impl ForwardAuth {
    /// Asks at `url`, and takes from the answer only its status.
    #[must_use]
    pub const fn new(url: Uri) -> Self {
        Self { url, timeout: Duration::from_secs(2), scope: Vec::new(), copy: Vec::new() }
    }

    /// The headers that only the answer can set, each once.
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
        let origin = origin(&self.url).ok_or(ConfigError::AuthTarget)?;
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

/// What an answer cannot say about a caller: what concerns its own sending and content, what the
/// proxy sets itself, and the credentials that clients send, without which requests that are not
/// asked about would reach the upstream.
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
