use bytes::Bytes;
use hapax_core::Outcome;
use hapax_http::stored_response::{
    Cookies, FORMAT, FullResponse, StoredResponse, StoredResponseError,
};
use http::header::{HeaderMap, HeaderName, HeaderValue};
use http::{Response, StatusCode};
use proptest::prelude::*;

fn headers() -> impl Strategy<Value = HeaderMap> {
    let name = "[a-z][a-z0-9-]{0,8}".prop_map(|name| HeaderName::try_from(name).unwrap());
    let value = prop::collection::vec(prop_oneof![Just(b'\t'), 0x20..=0x7eu8, 0x80u8..], 0..12)
        .prop_map(|value| HeaderValue::from_bytes(&value).unwrap());
    prop::collection::vec((name, value), 0..8).prop_map(|lines| {
        let mut map = HeaderMap::new();
        for (name, value) in lines {
            map.append(name, value);
        }
        map
    })
}

fn stored() -> impl Strategy<Value = StoredResponse> {
    let status = || (100u16..1000).prop_map(|status| StatusCode::from_u16(status).unwrap());
    let body = prop::collection::vec(any::<u8>(), 0..64).prop_map(Bytes::from);
    let whole = (status(), headers(), body, prop::option::of(headers()));
    prop_oneof![
        1 => status().prop_map(|status| StoredResponse::NotRetained { status }),
        4 => whole.prop_map(|(status, headers, body, trailers)| {
            StoredResponse::Whole(FullResponse { status, headers, body, trailers })
        }),
    ]
}

proptest! {
    #[test]
    fn wire_17_what_is_stored_is_read_back(stored in stored()) {
        prop_assert_eq!(StoredResponse::from_outcome(&stored.outcome()), Ok(stored));
    }

    #[test]
    fn any_bytes_are_a_response_or_an_error(bytes in prop::collection::vec(any::<u8>(), 0..64)) {
        if let Ok(stored) = StoredResponse::from_outcome(&Outcome::new(FORMAT, bytes.clone())) {
            let again = stored.outcome();
            prop_assert_eq!(StoredResponse::from_outcome(&again), Ok(stored));
        }
    }

    #[test]
    fn a_changed_or_missing_byte_never_panics(
        stored in stored(),
        at in any::<prop::sample::Index>(),
        to: u8,
    ) {
        let bytes = stored.outcome().bytes().to_vec();
        let at = at.index(bytes.len());
        let cut = Outcome::new(FORMAT, bytes[..at].to_vec());
        prop_assert_eq!(StoredResponse::from_outcome(&cut), Err(StoredResponseError));
        let mut changed = bytes;
        changed[at] = to;
        let _ = StoredResponse::from_outcome(&Outcome::new(FORMAT, changed));
    }
}

#[test]
fn an_outcome_of_another_integration_is_rejected() {
    let bytes = StoredResponse::NotRetained { status: StatusCode::OK }.outcome().bytes().clone();
    assert_eq!(
        StoredResponse::from_outcome(&Outcome::new("http/2", bytes)),
        Err(StoredResponseError)
    );
}

/// The bytes of a record outlive a version: they must not change.
#[test]
fn the_format_is_that_of_earlier_versions() {
    let mut headers = HeaderMap::new();
    headers.append("a", HeaderValue::from_static("1"));
    headers.append("a", HeaderValue::from_static(""));
    let mut trailers = HeaderMap::new();
    trailers.append("t", HeaderValue::from_static("2"));
    let whole = FullResponse {
        status: StatusCode::CREATED,
        headers,
        body: Bytes::from_static(b"xyz"),
        trailers: Some(trailers),
    };
    let expected = [
        &[0, 0, 201, 0, 0, 0, 2][..],
        &[0, 0, 0, 1, b'a', 0, 0, 0, 1, b'1', 0, 0, 0, 1, b'a', 0, 0, 0, 0],
        &[0, 0, 0, 3, b'x', b'y', b'z', 1, 0, 0, 0, 1, 0, 0, 0, 1, b't', 0, 0, 0, 1, b'2'],
    ]
    .concat();
    assert_eq!(StoredResponse::Whole(whole).outcome().bytes(), &expected);
    let unkept = StoredResponse::NotRetained { status: StatusCode::OK }.outcome();
    assert_eq!(unkept.bytes(), &[1, 0, 200][..]);
}

#[test]
fn a_count_of_four_billion_allocates_nothing() {
    let bytes = [0, 0, 200, 255, 255, 255, 255, 255, 255, 255, 255];
    assert_eq!(
        StoredResponse::from_outcome(&Outcome::new(FORMAT, bytes.to_vec())),
        Err(StoredResponseError)
    );
}

#[test]
fn wire_17_headers_of_a_connection_or_an_attempt_are_not_stored() {
    let response = Response::builder()
        .header("connection", "close, X-Hop")
        .header("x-hop", "1")
        .header("transfer-encoding", "chunked")
        .header("keep-alive", "timeout=5")
        .header("date", "Thu, 01 Jan 1970 00:00:00 GMT")
        .header("set-cookie", "a=1")
        .header("idempotency-replayed", "false")
        .header("idempotency-outcome", "final")
        .header("x-b", "2")
        .header("x-a", "1")
        .header("x-b", "3")
        .header("trailer", "x-t")
        .body(Bytes::from_static(b"body"))
        .unwrap();
    let lines = |whole: &FullResponse| -> Vec<String> {
        let line =
            |(name, value): (_, &HeaderValue)| format!("{name}: {}", value.to_str().unwrap());
        whole.headers.iter().map(line).collect()
    };
    let kept = FullResponse::of(&response, None, Cookies::Drop);
    assert_eq!(lines(&kept), ["x-b: 2", "x-b: 3", "x-a: 1", "trailer: x-t"]);
    let kept = FullResponse::of(&response, None, Cookies::Keep);
    assert_eq!(lines(&kept), ["set-cookie: a=1", "x-b: 2", "x-b: 3", "x-a: 1", "trailer: x-t"]);
}

/// What is held back is counted by its length: no more than that is held.
#[test]
fn an_outcome_takes_no_more_than_its_length() {
    let mut response = Response::new(Bytes::from_static(b"{\"id\":17}"));
    response.headers_mut().insert("content-type", HeaderValue::from_static("application/json"));
    let trailers = HeaderMap::from_iter([(
        HeaderName::from_static("grpc-status"),
        HeaderValue::from_static("0"),
    )]);
    for stored in [
        StoredResponse::Whole(FullResponse::of(&response, None, Cookies::Drop)),
        StoredResponse::Whole(FullResponse::of(&response, Some(&trailers), Cookies::Drop)),
        StoredResponse::NotRetained { status: StatusCode::OK },
    ] {
        let outcome = stored.outcome();
        let length = outcome.bytes().len();
        let bytes = outcome.bytes().clone();
        // Its only owner can have the buffer itself.
        drop(outcome);
        assert_eq!(bytes.try_into_mut().unwrap().capacity(), length);
    }
}

#[test]
fn wire_16_idempotency_trailers_are_not_stored() {
    let response = Response::new(Bytes::new());
    let mut trailers = HeaderMap::new();
    trailers.append("idempotency-outcome", HeaderValue::from_static("final"));
    trailers.append("x-sum", HeaderValue::from_static("1"));
    let kept = FullResponse::of(&response, Some(&trailers), Cookies::Drop).trailers.unwrap();
    assert_eq!((kept.len(), &kept["x-sum"]), (1, &HeaderValue::from_static("1")));
}

#[test]
fn wire_15_a_reconciled_response_is_converted_for_grpc_clients() {
    let headers = |pairs: &[(&'static str, &'static str)]| -> HeaderMap {
        let line =
            |&(name, value)| (HeaderName::from_static(name), HeaderValue::from_static(value));
        pairs.iter().map(line).collect()
    };
    let of = |head: &[(&'static str, &'static str)], trailers: Option<HeaderMap>| {
        let mut response = Response::new(Bytes::new());
        *response.headers_mut() = headers(head);
        let whole = FullResponse::of(&response, trailers.as_ref(), Cookies::Drop).for_grpc();
        (whole.headers, whole.trailers.unwrap())
    };
    let kind = ("content-type", "application/grpc");
    assert_eq!(of(&[], None), (headers(&[kind]), headers(&[("grpc-status", "0")])));
    let encoded = ("grpc-encoding", "gzip");
    let (head, trailers) = of(
        &[("grpc-message", "x"), encoded, ("content-length", "0"), ("grpc-status", "5")],
        Some(headers(&[("x-sum", "1")])),
    );
    assert_eq!(head, headers(&[encoded, kind]));
    assert_eq!(trailers, headers(&[("x-sum", "1"), ("grpc-message", "x"), ("grpc-status", "5")]));
    // What is in the trailers already stays as it is.
    let said = headers(&[("grpc-status", "9")]);
    let (head, trailers) = of(&[("grpc-message", "x")], Some(said.clone()));
    assert_eq!((head, trailers), (headers(&[("grpc-message", "x"), kind]), said));
}
