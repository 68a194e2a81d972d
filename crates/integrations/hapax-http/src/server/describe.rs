//! The description of a request for operators: its key, method, path and caller.
//!
//! 1. It is sealed in the record, and stored only if the engine has a secret.
//! 2. The value of a scope header is shown if the header's name says that it names a caller, like
//!    `X-Tenant`. Any other value may be a credential: it is shown as a short keyed hash, which an
//!    operator finds by entering the value.
//! 3. The query is left out, since API keys are sent in it.

use bytes::Bytes;
use hapax_core::{Fingerprint, FingerprintScheme, Idempotency, Key, OperationRequest};
use http::request::Parts;
use http::{HeaderName, HeaderValue, Uri};
use serde_json::{Value, json};

use crate::fingerprint::{HttpRequest, is_of_original};

/// The longest path that is shown, in bytes.
const MAX_TARGET: usize = 1024;

/// The longest value of a header that is shown, in bytes.
const MAX_VALUE: usize = 128;

/// Returns the target that reached the outermost router of axum, if there is one.
#[cfg(feature = "axum")]
pub(super) fn original_target(parts: &Parts) -> Option<&Uri> {
    parts.extensions.get().map(|::axum::extract::OriginalUri(original)| original)
}

/// Returns `None`: without the feature `axum`, no router is known.
#[cfg(not(feature = "axum"))]
pub(super) const fn original_target(_: &Parts) -> Option<&Uri> {
    None
}

/// Sets the target that the client sent, as this layer would get a request to it: without the prefix that routers
/// of axum have stripped.
#[cfg(feature = "axum")]
pub(super) fn set_target(parts: &mut Parts, target: Uri) {
    let Some(original) = parts.extensions.get_mut::<::axum::extract::OriginalUri>() else {
        parts.uri = target;
        return;
    };
    let prefix = original.0.path().strip_suffix(parts.uri.path()).unwrap_or_default();
    let inner = target.path_and_query().and_then(|it| it.as_str().strip_prefix(prefix));
    let inner = inner.filter(|it| it.starts_with('/')).and_then(|it| it.parse().ok());
    parts.uri =
        inner.map_or_else(|| target.clone(), |it| super::redirect::with_target(&target, it));
    original.0 = target;
}

/// Sets the target that the client sent.
#[cfg(not(feature = "axum"))]
pub(super) fn set_target(parts: &mut Parts, target: Uri) {
    parts.uri = target;
}

/// Parts of the names of headers that name a caller.
const NAMES: [&str; 16] = [
    "account",
    "client",
    "company",
    "customer",
    "host",
    "member",
    "merchant",
    "org",
    "project",
    "shop",
    "site",
    "store",
    "team",
    "tenant",
    "user",
    "workspace",
];

/// Parts of the names of headers that may be credentials, whatever else the name contains.
const CREDENTIALS: [&str; 13] = [
    "api",
    "assertion",
    "auth",
    "bearer",
    "cookie",
    "cred",
    "jwt",
    "key",
    "pass",
    "secret",
    "session",
    "sign",
    "token",
];

/// A request with the data of its claim.
pub(super) struct DescribedHttpRequest<'a> {
    /// The request, with the target that earlier releases compared.
    pub(super) request: HttpRequest<'a>,
    /// The target that is compared within a router: that of the route's function, or the one that reached the
    /// outermost router.
    pub(super) original: Option<&'a Uri>,
    pub(super) engine: &'a Idempotency,
    pub(super) key: &'a Key,
    pub(super) parts: &'a Parts,
    /// The headers that form its scope.
    pub(super) scope: &'a [HeaderName],
    /// The name of its route; empty for the default route.
    pub(super) route: &'a str,
}

impl OperationRequest for DescribedHttpRequest<'_> {
    fn route(&self) -> Option<&str> {
        Some(self.route)
    }

    /// Within a router it is never `http/1` or `http/3`, also where no router has changed the target: a nested request finds
    /// a record of that scheme by its stripped path, and it must not be that of another route of this build.
    fn scheme(&self) -> FingerprintScheme {
        self.request.scheme.name_of(self.request.headers, self.original.is_some()).clone()
    }

    fn fingerprint(&self, scheme: &FingerprintScheme) -> Option<Fingerprint> {
        match self.original.filter(|_| is_of_original(scheme)) {
            Some(uri) => HttpRequest { uri, ..self.request.clone() }.fingerprint(scheme),
            None => self.request.fingerprint(scheme),
        }
    }

    fn description(&self) -> Option<Bytes> {
        let path = self.original.unwrap_or(self.request.uri).path();
        let target = &path[..path.floor_char_boundary(MAX_TARGET)];
        let values = self.scope.iter().flat_map(|name| {
            let values = self.parts.headers.get_all(name).iter();
            values.filter_map(move |value| self.caller(name, value))
        });
        let mut described = json!({
            "key": self.key.as_str(),
            "method": self.parts.method.as_str(),
            "target": target,
            "caller": values.take(4).collect::<Vec<_>>(),
        });
        if !self.route.is_empty() {
            described["route"] = self.route.into();
        }
        let trace = self.parts.headers.get("traceparent").filter(|value| value.len() <= 64);
        if let Some(trace) = trace.and_then(|value| value.to_str().ok()) {
            described["traceparent"] = trace.into();
        }
        serde_json::to_vec(&described).ok().map(Bytes::from)
    }
}

impl DescribedHttpRequest<'_> {
    /// Returns a header of the scope as operators see it.
    fn caller(&self, name: &HeaderName, value: &HeaderValue) -> Option<Value> {
        let shown =
            value.to_str().ok().filter(|text| names_caller(name) && text.len() <= MAX_VALUE);
        match shown {
            Some(text) => Some(json!({ "header": name.as_str(), "value": text })),
            None => {
                let hash = self.engine.pseudonym(value.as_bytes())?;
                Some(json!({ "header": name.as_str(), "hash": hash }))
            }
        }
    }
}

/// Returns whether the values of a header name a caller and are no credentials.
fn names_caller(name: &HeaderName) -> bool {
    let has = |part: &&str| name.as_str().contains(*part);
    NAMES.iter().any(has) && !CREDENTIALS.iter().any(has)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn scope_headers_that_may_be_credentials_are_shown_as_hashes() {
        for name in ["x-tenant", "x-user-id", "x-customer", "host", "x-org"] {
            assert!(names_caller(&HeaderName::from_static(name)), "{name}");
        }
        for name in [
            "authorization",
            "cookie",
            "proxy-authorization",
            "x-api-key",
            "x-user-token",
            "x-client-secret",
            "x-session-user",
            "x-signature",
            "x-forwarded-access",
            "apikey",
        ] {
            assert!(!names_caller(&HeaderName::from_static(name)), "{name}");
        }
    }
}
