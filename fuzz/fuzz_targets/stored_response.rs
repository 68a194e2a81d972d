//! Responses as outcomes.
//!
//! 1. Any bytes are a stored response or an error; what was read is read back as it is written.
//! 2. Any response survives: status, header lines and their order, body, trailers.
//! 3. What belongs to one connection or one attempt is not kept, and nothing else is dropped.
//! 4. No beginning of the bytes, and nothing longer, is a response.
#![no_main]

use arbitrary::{Result, Unstructured};
use bytes::Bytes;
use hapax_core::Outcome;
use hapax_http::stored_response::{
    Cookies, FORMAT, FullResponse, StoredResponse, hop_by_hop, named_by_connection,
};
use http::{HeaderMap, HeaderName, HeaderValue, Response, StatusCode};
use libfuzzer_sys::fuzz_target;

/// Names that come up often enough to meet each other.
const NAMES: [&str; 10] = [
    "connection",
    "content-type",
    "date",
    "idempotency-outcome",
    "keep-alive",
    "location",
    "set-cookie",
    "transfer-encoding",
    "x-one",
    "x-two",
];

fuzz_target!(|input: &[u8]| {
    if let Ok(stored) = read(Bytes::copy_from_slice(input)) {
        survives(&stored);
    }
    let mut u = Unstructured::new(input);
    if let Ok(stored) = response(&mut u) {
        survives(&stored);
        let bytes = stored.outcome().bytes().clone();
        let cut = u.choose_index(bytes.len()).unwrap_or_default();
        assert!(read(bytes.slice(..cut)).is_err(), "half a response was read");
        assert!(read([&bytes[..], &[cut as u8]].concat().into()).is_err(), "it may grow");
    }
});

fn read(bytes: Bytes) -> std::result::Result<StoredResponse, impl std::fmt::Debug> {
    StoredResponse::from_outcome(&Outcome::new(FORMAT, bytes))
}

fn survives(stored: &StoredResponse) {
    let again = StoredResponse::from_outcome(&stored.outcome()).expect("it was written");
    assert_eq!(again, *stored);
    if let (StoredResponse::Whole(one), StoredResponse::Whole(two)) = (stored, &again) {
        assert_eq!(lines(&one.headers), lines(&two.headers), "the order changed");
        assert_eq!(one.trailers.as_ref().map(lines), two.trailers.as_ref().map(lines));
    }
}

fn lines(map: &HeaderMap) -> Vec<(HeaderName, HeaderValue)> {
    map.iter().map(|(name, value)| (name.clone(), value.clone())).collect()
}

/// What is kept of some response, checked against what it was.
fn response(u: &mut Unstructured<'_>) -> Result<StoredResponse> {
    let status = StatusCode::from_u16(u.int_in_range(100..=999)?).expect("three digits");
    if u.ratio(1, 8)? {
        return Ok(StoredResponse::NotRetained { status });
    }
    let mut response = Response::new(Bytes::from(u.arbitrary::<Vec<u8>>()?));
    *response.status_mut() = status;
    *response.headers_mut() = headers(u)?;
    let trailers = if u.arbitrary()? { Some(headers(u)?) } else { None };
    let cookies = *u.choose(&[Cookies::Drop, Cookies::Keep])?;
    let whole = FullResponse::of(&response, trailers.as_ref(), cookies);

    let named = named_by_connection(response.headers());
    let mut expected = lines(response.headers());
    expected.retain(|(name, _)| {
        let of_the_attempt = name == "date" || name.as_str().starts_with("idempotency-");
        let cookie = name == "set-cookie" && cookies == Cookies::Drop;
        !(of_the_attempt || cookie || hop_by_hop(name) || named.contains(name))
    });
    assert_eq!(lines(&whole.headers), expected);
    assert_eq!((whole.status, &whole.body), (status, response.body()));
    Ok(StoredResponse::Whole(whole))
}

fn headers(u: &mut Unstructured<'_>) -> Result<HeaderMap> {
    let mut map = HeaderMap::new();
    for _ in 0..u.int_in_range(0..=12)? {
        let name = HeaderName::from_static(u.choose(&NAMES)?);
        let value = match u.ratio(1, 3)? {
            true => HeaderValue::from_static(u.choose(&NAMES)?),
            false => HeaderValue::from_bytes(u.arbitrary()?)
                .map_err(|_| arbitrary::Error::IncorrectFormat)?,
        };
        map.append(name, value);
    }
    Ok(map)
}
