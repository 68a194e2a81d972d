//! What is printed for people who debug shows nothing that was sent.

use std::fmt::Debug;

use bytes::Bytes;
use hapax_core::machine::Verdict;
use hapax_core::{FencingToken, Key, Namespace, OperationId, Scope};
use hapax_http::fingerprint::{HttpFingerprintScheme, HttpRequest};
use hapax_http::server::{ReconcileRequest, ReconciledResponse};
use hapax_http::stored_response::{Cookies, FullResponse, StoredResponse};
use http::{HeaderMap, Request, Response};

/// In every place that a request or a response has for it.
const SECRET: &str = "s3cr3t";

#[track_caller]
fn assert_silent(value: &impl Debug) {
    // The bytes themselves may be printed as numbers, too.
    let numbers = format!("{:?}", SECRET.as_bytes());
    let numbers = numbers.trim_matches(['[', ']']);
    for text in [format!("{value:?}"), format!("{value:#?}")] {
        let flat: String = text.split_whitespace().collect::<Vec<_>>().join(" ");
        assert!(!text.contains(SECRET) && !flat.contains(numbers), "{text}");
    }
}

fn response() -> Response<Bytes> {
    Response::builder()
        .header("location", format!("/payments/{SECRET}"))
        .body(Bytes::from_static(SECRET.as_bytes()))
        .unwrap()
}

fn request() -> http::request::Parts {
    let request = Request::post(format!("/payments/{SECRET}?token={SECRET}"))
        .header("authorization", format!("Bearer {SECRET}"))
        .header("idempotency-key", SECRET)
        .body(())
        .unwrap();
    request.into_parts().0
}

#[test]
fn debug_of_a_reconcile_request_and_its_verdict_shows_no_contents() {
    let key: Key = SECRET.parse().unwrap();
    let id = OperationId::derive(None, &Namespace::default(), &Scope::shared(), &key);
    let doubt =
        ReconcileRequest { fence: FencingToken::new(17), id, attempt: 1, key, request: request() };
    assert_silent(&doubt);
    assert!(format!("{doubt:?}").contains("17"));
    assert_silent(&Verdict::Happened(ReconciledResponse::from(response())));
}

#[test]
fn debug_of_a_claimed_request_shows_no_contents() {
    let request = request();
    assert_silent(&HttpRequest {
        scheme: &HttpFingerprintScheme::default(),
        method: &request.method,
        uri: &request.uri,
        headers: &request.headers,
        body: SECRET.as_bytes(),
    });
}

#[test]
fn debug_of_a_stored_response_shows_no_contents() {
    let trailers = HeaderMap::from_iter([(
        http::HeaderName::from_static("x-sum"),
        http::HeaderValue::from_static(SECRET),
    )]);
    let whole = FullResponse::of(&response(), Some(&trailers), Cookies::Keep);
    assert_silent(&whole);
    assert_silent(&StoredResponse::Whole(whole.clone()));
    assert_silent(&StoredResponse::Whole(whole).outcome());
}
