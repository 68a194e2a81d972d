//! Redirects: the part of a response with 307 or 308 by which its request is answered again.

use bytes::Bytes;
use hapax_core::Outcome;
use http::header::LOCATION;
use http::uri::PathAndQuery;
use http::{HeaderMap, Uri, response};

use crate::stored_response::{FullResponse, StoredResponse};

/// Returns the part of a redirect by which its request is answered again: status and `Location`. `None` if the
/// target has the path and query of the request, as on another host: the request that follows it cannot be
/// distinguished from a duplicate, and must execute there.
pub(crate) fn redirect(from: &Uri, head: &response::Parts) -> Option<Outcome> {
    let location = head.headers.get(LOCATION)?;
    let target = String::from_utf8_lossy(location.as_bytes());
    let target = target.split_once('#').map_or(&*target, |(target, _)| target);
    let path = from.path_and_query().map_or("/", PathAndQuery::as_str);
    let of_host = match target.split_once("//") {
        // Of `https://HOST/PATH` and `//HOST/PATH`, the part after the host.
        Some((scheme, rest)) if scheme.is_empty() || is_scheme(scheme) => {
            rest.find(['/', '?']).map_or("/", |at| &rest[at..])
        }
        _ => target,
    };
    if of_host.is_empty() || of_host == path {
        return None;
    }
    let headers = HeaderMap::from_iter([(LOCATION, location.clone())]);
    let (status, body) = (head.status, Bytes::new());
    Some(StoredResponse::Whole(FullResponse { status, headers, body, trailers: None }).outcome())
}

/// Returns whether a text is the scheme of a URL with its colon.
fn is_scheme(text: &str) -> bool {
    let word = text.strip_suffix(':').unwrap_or_default();
    !word.is_empty()
        && word.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"+-.".contains(&byte))
}

#[cfg(test)]
mod tests {
    use http::{Response, StatusCode};

    use super::*;

    fn kept(from: &'static str, location: &'static str) -> bool {
        let response = Response::builder().status(307).header(LOCATION, location).header("x", "y");
        let (head, ()) = response.body(()).unwrap().into_parts();
        let kept = redirect(&Uri::from_static(from), &head);
        if let Some(outcome) = &kept {
            let Ok(StoredResponse::Whole(whole)) = StoredResponse::from_outcome(outcome) else {
                panic!("{outcome:?}")
            };
            let headers = HeaderMap::from_iter([(LOCATION, location.parse().unwrap())]);
            assert_eq!(whole.status, StatusCode::TEMPORARY_REDIRECT);
            assert_eq!((whole.headers, whole.body, whole.trailers), (headers, Bytes::new(), None));
        }
        kept.is_some()
    }

    #[test]
    fn a_redirect_to_another_path_or_query_is_kept_with_status_and_location() {
        for location in [
            "/payments/",
            "payments/",
            "?b=1",
            "https://api.example/payments/",
            "//other/v2/payments",
            "https://other",
            "/payments?a=2#top",
            "/payments?a=1&b=//x/payments?a=1",
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
}
