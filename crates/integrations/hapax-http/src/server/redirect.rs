//! Redirects: the part of a response with 307 or 308 by which its request is answered again.

use std::sync::Arc;

use bytes::Bytes;
use hapax_core::Outcome;
use http::header::LOCATION;
use http::request::Parts;
use http::uri::PathAndQuery;
use http::{HeaderMap, Uri, response};
use percent_encoding::{AsciiSet, CONTROLS, percent_encode};

use super::describe::{original_target, set_target};
use super::policy::TargetFn;
use crate::fingerprint::is_same_target;
use crate::stored_response::{FullResponse, StoredResponse};

/// The target of a request, with which the targets of redirects are compared.
pub(super) struct RequestTarget {
    /// The target that the client sent.
    pub(super) uri: Uri,
    /// The route's function that returns the compared target, and the request's head.
    function: Option<(Arc<TargetFn>, Box<Parts>)>,
}

impl RequestTarget {
    pub(super) fn new(request: &Parts, function: Option<&Arc<TargetFn>>) -> Self {
        Self {
            uri: original_target(request).unwrap_or(&request.uri).clone(),
            function: function.map(|it| (Arc::clone(it), Box::new(request.clone()))),
        }
    }

    /// Returns the part of a redirect by which its request is answered again: status and `Location`. `None` if
    /// the request that follows it would have the target of this one, as on another host: it cannot be
    /// distinguished from a duplicate, and must execute there.
    pub(super) fn redirect(&self, head: &response::Parts) -> Option<Outcome> {
        let location = head.headers.get(LOCATION)?;
        let reference = location.as_bytes().trim_ascii();
        // Clients encode what is not allowed in a URL. One that does not sends it as it is.
        let encoded = percent_encode(reference, ENCODED).to_string();
        let forms = [Some(&*encoded), std::str::from_utf8(reference).ok()];
        let mut targets = forms.into_iter().flatten().filter_map(|it| resolve(&self.uri, it));
        if targets.any(|target| self.is_same(target)) {
            return None;
        }
        let headers = HeaderMap::from_iter([(LOCATION, location.clone())]);
        let (status, body) = (head.status, Bytes::new());
        let whole = FullResponse { status, headers, body, trailers: None };
        Some(StoredResponse::Whole(whole).outcome())
    }

    /// Returns whether a request to this target is compared by the same one.
    fn is_same(&self, target: PathAndQuery) -> bool {
        let target = with_target(&self.uri, target);
        match &self.function {
            None => is_same_target(&self.uri, &target),
            Some((function, request)) => {
                let mut next = request.clone();
                set_target(&mut next, target);
                is_same_target(&function(request), &function(&next))
            }
        }
    }
}

/// Returns the URI with another path and query.
pub(super) fn with_target(uri: &Uri, target: PathAndQuery) -> Uri {
    let mut parts = uri.clone().into_parts();
    parts.path_and_query = Some(target.clone());
    Uri::from_parts(parts).unwrap_or_else(|_| Uri::from(target))
}

/// Characters that clients encode in a URL; so are those that are not ASCII.
const ENCODED: &AsciiSet = &CONTROLS.add(b' ').add(b'"').add(b'<').add(b'>').add(b'`');

/// Returns the path and query to which a reference from this URI leads (RFC 3986, 5.2); `None` if it is no URL
/// with a host.
fn resolve(from: &Uri, reference: &str) -> Option<PathAndQuery> {
    let (reference, _) = reference.split_once('#').unwrap_or((reference, ""));
    let rest = match reference.split_once(':') {
        Some((scheme, rest)) if is_scheme(scheme) => rest.starts_with("//").then_some(rest)?,
        _ => reference,
    };
    let of_host = rest.strip_prefix("//").map(|rest| {
        // The part after the host.
        rest.find(['/', '?']).map_or("", |at| &rest[at..])
    });
    let target = of_host.unwrap_or(rest);
    let (path, query) =
        target.split_once('?').map_or((target, None), |(it, query)| (it, Some(query)));
    let (path, query) = match path {
        "" if of_host.is_none() => (from.path().to_owned(), query.or(from.query())),
        _ if of_host.is_some() || path.starts_with('/') => (without_dots(path), query),
        _ => {
            let folder = from.path().rsplit_once('/').map_or("", |(folder, _)| folder);
            (without_dots(&format!("{folder}/{path}")), query)
        }
    };
    query.map_or(path.clone(), |query| format!("{path}?{query}")).parse().ok()
}

/// Returns an absolute path without its segments `.` and `..`.
fn without_dots(path: &str) -> String {
    let mut kept = Vec::new();
    let mut is_folder = false;
    for segment in path.split('/').skip(1) {
        is_folder = matches!(segment, "." | "..");
        match segment {
            "." => {}
            ".." => drop(kept.pop()),
            _ => kept.push(segment),
        }
    }
    if is_folder {
        kept.push("");
    }
    format!("/{}", kept.join("/"))
}

/// Returns whether a text is the scheme of a URL.
fn is_scheme(text: &str) -> bool {
    text.starts_with(|first: char| first.is_ascii_alphabetic())
        && text.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"+-.".contains(&byte))
}

#[cfg(test)]
mod tests {
    use http::{HeaderValue, Request, Response, StatusCode};

    use super::*;

    fn kept_by(function: Option<&Arc<TargetFn>>, from: &str, location: &str) -> bool {
        let (request, ()) = Request::get(from).body(()).unwrap().into_parts();
        let location = HeaderValue::from_bytes(location.as_bytes()).unwrap();
        let response = Response::builder().status(307).header(LOCATION, &location).header("x", "y");
        let (head, ()) = response.body(()).unwrap().into_parts();
        let kept = RequestTarget::new(&request, function).redirect(&head);
        if let Some(outcome) = &kept {
            let Ok(StoredResponse::Whole(whole)) = StoredResponse::from_outcome(outcome) else {
                panic!("{outcome:?}")
            };
            let headers = HeaderMap::from_iter([(LOCATION, location)]);
            assert_eq!(whole.status, StatusCode::TEMPORARY_REDIRECT);
            assert_eq!((whole.headers, whole.body, whole.trailers), (headers, Bytes::new(), None));
        }
        kept.is_some()
    }

    fn kept(from: &str, location: &str) -> bool {
        kept_by(None, from, location)
    }

    #[test]
    fn a_redirect_to_another_path_or_query_is_kept_with_status_and_location() {
        for location in [
            "/payments/",
            "payments/",
            "./",
            "..",
            "v2",
            "?b=1",
            "?",
            "https://api.example/payments/",
            "//other/v2/payments",
            "https://other",
            "/payments?a=2#top",
            "/payments?a=1&b=//x/payments?a=1",
            "/v2/payments?a=1",
            "payments:confirm",
            "mailto:payments?a=1",
            "/café",
        ] {
            assert!(kept("/payments?a=1", location), "{location}");
        }
        assert!(kept("http://api.example/", "/payments"));
    }

    #[test]
    fn a_redirect_to_the_same_path_elsewhere_is_not_kept() {
        for location in [
            "/payments?a=1",
            "https://other.example/payments?a=1",
            "//other:8443/payments?a=1#top",
            "http://[::1]:80/payments?a=1",
            "",
            "#top",
        ] {
            assert!(!kept("/payments?a=1", location), "{location}");
        }
        assert!(!kept("http://api.example/", "https://api.example"));
    }

    #[test]
    fn a_redirect_to_the_same_target_in_another_spelling_is_not_kept() {
        for location in [
            "payments?b=2&a=1",
            "./payments?a=1&b=2",
            "?a=1&b=2",
            "?b=2&a=1",
            "../v1/payments?a=1&b=2",
            "/v1/payments?b=2&a=1",
            "/v2/../v1/./payments?a=1&b=2",
            "https://other.example/v1/x/../payments?a=1&b=2",
            " /v1/payments?a=1&b=2",
        ] {
            assert!(!kept("/v1/payments?a=1&b=2", location), "{location}");
        }
        assert!(!kept("/caf%C3%A9", "/café"));
        assert!(!kept("/café", "café"));
        assert!(!kept("/a%20b", "/a b"));
        assert!(!kept("/v1/", "."));
        assert!(!kept("/v1/", "x/.."));
        assert!(!kept("http://api.example/v1?a=1", "?a=1"));
    }

    #[test]
    fn a_redirect_to_what_a_function_returns_for_its_request_is_not_kept() {
        let version: Arc<TargetFn> = Arc::new(|request| {
            let path = request.uri.path().trim_start_matches("/v1").to_owned();
            path.parse().unwrap()
        });
        assert!(!kept_by(Some(&version), "/payments", "/v1/payments"));
        assert!(!kept_by(Some(&version), "/v1/payments?a=1", "/payments"));
        assert!(kept_by(Some(&version), "/payments", "/v1/payments/"));
    }
}
