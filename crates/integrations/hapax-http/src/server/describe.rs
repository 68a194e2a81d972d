//! The description of a request for operators: its key, method, path and caller.
//!
//! 1. It is sealed in the record, and stored only if the store seals it.
//! 2. The value of a scope header is shown if the header's name says that it names a caller, like
//!    `X-Tenant`. Any other value may be a credential: it is shown as a short keyed hash, which an
//!    operator finds by entering the value. A claim of a token is no credential, and is shown unless its name says
//!    otherwise.
//! 3. The query is left out, since API keys are sent in it.
//! 4. On a route with a named hook it also has what a reconciliation without a retry needs: a keyed hash of the hook's
//!    name, the namespace, whether it is gRPC, and whether values that are no credentials are not shown (`partial`).

use std::sync::OnceLock;

use bytes::Bytes;
use hapax_core::{Fingerprint, FingerprintScheme, Idempotency, Key, OperationRequest};
use http::Uri;
use http::request::Parts;
use serde_json::{Value, json};

use super::scope::ScopePart;
use super::token_claims::CLAIM_PREFIX;
use crate::classify::is_grpc;
use crate::fingerprint::{HttpRequest, is_of_original};

/// The longest path that is shown, in bytes.
const MAX_TARGET: usize = 1024;

/// The longest value of a header that is shown, in bytes.
const MAX_VALUE: usize = 128;

/// The longest claim that is shown, with its issuer, in bytes.
const MAX_CLAIM: usize = 256;
/// The most values of a scope that are shown.
const MOST_CALLERS: usize = 4;

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

/// Claims that may be credentials: of a session, of one token or of one login.
const SECRET_CLAIMS: [&str; 6] = ["code", "jti", "nonce", "otp", "pin", "sid"];

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
    /// The parts that form its scope.
    pub(super) scope: &'a [ScopePart],
    /// The name of its route; empty for the default route.
    pub(super) route: &'a str,
    /// Its fingerprint by the scheme in force, once it is computed.
    pub(super) computed: OnceLock<Fingerprint>,
    /// The name of its hook.
    pub(super) hook: Option<&'a str>,
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
        let fingerprint = match self.original.filter(|_| is_of_original(scheme)) {
            Some(uri) => HttpRequest { uri, ..self.request.clone() }.fingerprint(scheme),
            None => self.request.fingerprint(scheme),
        };
        if let Some(fingerprint) = fingerprint
            && *scheme == self.scheme()
        {
            self.computed.get_or_init(|| fingerprint);
        }
        fingerprint
    }

    fn description(&self) -> Option<Bytes> {
        let path = self.original.unwrap_or(self.request.uri).path();
        let target = &path[..path.floor_char_boundary(MAX_TARGET)];
        let mut found = Vec::new();
        for part in self.scope {
            // A request has a scope before it has a description.
            let _ = part.add_values(self.parts, &mut found);
        }
        // No header has a claim, so a reconciliation lacks nothing without it.
        let is_hidden = |(part, value): &(&str, &[u8])| {
            !part.starts_with(CLAIM_PREFIX) && names_caller(part) && shown(part, value).is_none()
        };
        let is_partial = found.len() > MOST_CALLERS || found.iter().any(is_hidden);
        let values = found.into_iter().filter_map(|(part, value)| self.caller(part, value));
        let mut described = json!({
            "key": self.key.as_str(),
            "method": self.parts.method.as_str(),
            "target": target,
            "caller": values.take(MOST_CALLERS).collect::<Vec<_>>(),
        });
        if let Some(hook) = self.hook.and_then(|name| self.engine.pseudonym(name.as_bytes())) {
            described["hook"] = hook.into();
            // An operation id does not show its namespace.
            described["namespace"] = self.engine.namespace().as_str().into();
            for (field, value) in [("grpc", is_grpc(&self.parts.headers)), ("partial", is_partial)]
            {
                if value {
                    described[field] = value.into();
                }
            }
        }
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
    /// Returns a value of the scope as operators see it.
    fn caller(&self, part: &str, value: &[u8]) -> Option<Value> {
        match shown(part, value).filter(|_| names_caller(part)) {
            Some(text) => Some(json!({ "header": part, "value": text })),
            None => {
                let hash = self.engine.pseudonym(value)?;
                Some(json!({ "header": part, "hash": hash }))
            }
        }
    }
}

/// Returns a value of a part of a scope as it is shown, if it is short and plain text.
fn shown<'a>(part: &str, value: &'a [u8]) -> Option<&'a str> {
    let is_plain = |text: &&str| text.bytes().all(|byte| matches!(byte, b' '..=b'~' | b'\t'));
    let most = if part.starts_with(CLAIM_PREFIX) { MAX_CLAIM } else { MAX_VALUE };
    let is_short = |text: &&str| text.len() <= most;
    std::str::from_utf8(value).ok().filter(is_plain).filter(is_short)
}

/// Returns whether the values of a part of a scope name a caller and are no credentials; a cookie may be one.
pub(super) fn names_caller(name: &str) -> bool {
    if let Some(claim) = name.strip_prefix(CLAIM_PREFIX) {
        // Of a name that is a URI, its host says nothing about the value.
        let mut words = claim.rsplit(['/', ':', '#']).filter(|word| !word.is_empty());
        let word = words.next().unwrap_or(claim).to_ascii_lowercase();
        return !CREDENTIALS.iter().any(|part| word.contains(*part))
            && !SECRET_CLAIMS.contains(&word.as_str());
    }
    let has = |part: &&str| name.contains(*part);
    NAMES.iter().any(has) && !CREDENTIALS.iter().any(has)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn scope_headers_that_may_be_credentials_are_shown_as_hashes() {
        for name in ["x-tenant", "x-user-id", "x-customer", "host", "x-org"] {
            assert!(names_caller(name), "{name}");
        }
        for name in [
            "authorization",
            "cookie",
            "cookie:user",
            "proxy-authorization",
            "x-api-key",
            "x-user-token",
            "x-client-secret",
            "x-session-user",
            "x-signature",
            "x-forwarded-access",
            "apikey",
        ] {
            assert!(!names_caller(name), "{name}");
        }
    }

    #[test]
    fn claims_are_shown_unless_their_names_are_those_of_credentials() {
        for name in ["jwt:sub", "jwt:https://auth.example/tenant", "jwt:urn:token:customer"] {
            assert!(names_caller(name), "{name}");
        }
        for name in [
            "jwt:session_id",
            "jwt:https://example.com/apiKey",
            "jwt:https://example.com/apiKey/",
            "jwt:at_hash_token",
            "jwt:sid",
            "jwt:jti",
        ] {
            assert!(!names_caller(name), "{name}");
        }
    }
}
