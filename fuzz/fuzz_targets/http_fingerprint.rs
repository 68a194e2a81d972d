//! Whether two requests are the same request, against a plain statement of what counts.
//!
//! 1. Two fingerprints are equal exactly if what counts of the requests is equal.
//! 2. Form data in other boundaries is the same form data; with another part it is not.
//! 3. A scheme is found again by its name, and by no other spelling of it.
#![no_main]

use std::collections::BTreeMap;

use arbitrary::{Arbitrary, Result, Unstructured};
use hapax_core::{FingerprintScheme, JsonPointers};
use hapax_http::fingerprint::{BodyForm, HttpFingerprintScheme, JsonParts};
use http::header::CONTENT_TYPE;
use http::{HeaderMap, HeaderName, HeaderValue, Method, Uri};
use libfuzzer_sys::fuzz_target;

const HEADERS: [&str; 3] = ["accept", "x-tenant", "x-user"];
const KINDS: [&str; 4] =
    ["application/json", "application/problem+json; charset=utf-8", "text/plain", ""];
const BODIES: [&str; 6] =
    ["", "{\"a\":1,\"b\":2}", "{ \"b\":2, \"a\":1 }", "{\"a\":1.0}", "[1]", "{\"a\":1,\"a\":1}"];

fuzz_target!(|input: &[u8]| {
    if let Some(scheme) =
        std::str::from_utf8(input).ok().and_then(|text| FingerprintScheme::new(text).ok())
    {
        let found = HttpFingerprintScheme::named(&scheme);
        assert!(found.is_none_or(|found| *found.name() == scheme), "another spelling");
    }
    let mut u = Unstructured::new(input);
    let _ = named(&mut u);
    let _ = requests(&mut u);
    let _ = forms(&mut u);
});

fn named(u: &mut Unstructured<'_>) -> Result<()> {
    let texts: Vec<&str> = u.arbitrary()?;
    let Ok(pointers) = JsonPointers::new(texts) else { return Ok(()) };
    let parts = match u.arbitrary()? {
        true => JsonParts::Only(pointers),
        false => JsonParts::Except(pointers),
    };
    let headers = HEADERS[u.int_in_range(0..=3)?..].iter();
    let headers = headers.map(|name| HeaderName::from_static(name));
    let scheme = HttpFingerprintScheme::new(BodyForm::Canonical, headers).expect("short names");
    if let Ok(scheme) = scheme.json(parts) {
        assert_eq!(HttpFingerprintScheme::named(scheme.name()), Some(scheme));
    }
    Ok(())
}

#[derive(Clone, Debug)]
struct Asked {
    method: Method,
    path: String,
    query: Option<String>,
    headers: HeaderMap,
    body: Vec<u8>,
}

fn requests(u: &mut Unstructured<'_>) -> Result<()> {
    let body = *u.choose(&[BodyForm::Canonical, BodyForm::Raw, BodyForm::Ignored])?;
    let names = &HEADERS[..u.int_in_range(0..=2)?];
    let scheme =
        HttpFingerprintScheme::new(body, names.iter().map(|name| HeaderName::from_static(name)))
            .expect("short names");
    assert_eq!(HttpFingerprintScheme::named(scheme.name()).as_ref(), Some(&scheme));

    let one = asked(u)?;
    // Mostly nearly the same request, or equality would never be seen.
    let mut other = one.clone();
    let next = asked(u)?;
    match u.int_in_range(0..=6)? {
        0 => other.method = next.method,
        1 => other.path = next.path,
        2 => other.query = next.query,
        3 => other.headers = next.headers,
        4 => other.body = next.body,
        5 => other = next,
        _ => {}
    }
    let same = counts(&one, body, names) == counts(&other, body, names);
    assert_eq!(hashed(&scheme, &one) == hashed(&scheme, &other), same, "{one:?} {other:?}");
    Ok(())
}

fn asked(u: &mut Unstructured<'_>) -> Result<Asked> {
    let mut headers = HeaderMap::new();
    for _ in 0..u.int_in_range(0..=3)? {
        let value = HeaderValue::from_static(u.choose(&["", "a", "b", "a,b"])?);
        headers.append(HeaderName::from_static(u.choose(&HEADERS)?), value);
    }
    headers.insert(CONTENT_TYPE, HeaderValue::from_static(u.choose(&KINDS)?));
    let body = match u.arbitrary()? {
        true => u.choose(&BODIES)?.as_bytes().to_vec(),
        false => u.arbitrary()?,
    };
    Ok(Asked {
        method: u.choose(&[Method::POST, Method::PATCH])?.clone(),
        path: format!("/{}", text(u, "ab/%2")?),
        query: if u.arbitrary()? { Some(text(u, "abc=&%2")?) } else { None },
        headers,
        body,
    })
}

fn text(u: &mut Unstructured<'_>, alphabet: &str) -> Result<String> {
    let alphabet: Vec<char> = alphabet.chars().collect();
    (0..u.int_in_range(0..=10)?).map(|_| u.choose(&alphabet).copied()).collect()
}

/// The values of each name of the query, in their order.
type Query = BTreeMap<String, Vec<String>>;

/// All that counts of a request.
#[derive(PartialEq)]
struct Counts {
    target: (Method, String, Option<Query>),
    headers: Vec<Vec<HeaderValue>>,
    body: Option<(bool, Vec<u8>)>,
}

fn counts(asked: &Asked, form: BodyForm, names: &[&str]) -> Counts {
    let query = asked.query.as_deref().map(|query| {
        let mut pairs = Query::new();
        for pair in query.split('&') {
            let name = pair.split('=').next().unwrap_or_default();
            pairs.entry(name.to_owned()).or_default().push(pair.to_owned());
        }
        pairs
    });
    let kind = asked.headers[CONTENT_TYPE].to_str().expect("one of ours");
    let canonical = match form == BodyForm::Canonical && kind.contains("json") {
        true => hapax_core::canonicalize(&asked.body).ok(),
        false => None,
    };
    let body = match (form, canonical) {
        (BodyForm::Ignored, _) => None,
        (_, Some(canonical)) => Some((true, canonical)),
        (_, None) => Some((false, asked.body.clone())),
    };
    let values = |name: &&str| asked.headers.get_all(*name).iter().cloned().collect();
    Counts {
        target: (asked.method.clone(), asked.path.clone(), query),
        headers: names.iter().map(values).collect(),
        body,
    }
}

fn hashed(scheme: &HttpFingerprintScheme, asked: &Asked) -> hapax_core::Fingerprint {
    let target = match &asked.query {
        Some(query) => format!("{}?{query}", asked.path),
        None => asked.path.clone(),
    };
    let uri: Uri = target.parse().expect("made of what a target may hold");
    scheme.fingerprint(&asked.method, &uri, &asked.headers, &asked.body)
}

fn forms(u: &mut Unstructured<'_>) -> Result<()> {
    let parts = Vec::<Vec<u8>>::arbitrary(u)?;
    let mut other = parts.clone();
    if let (Some(at), Some(bit)) = (u.choose_index(parts.len()).ok(), u.arbitrary()?) {
        let bit: u8 = bit;
        other[at].push(bit);
    }
    // Longer than anything the parts hold by accident.
    let (one_edge, other_edge) = ("one-boundary-0123456789", "other+boundary");
    let held = |parts: &[Vec<u8>], edge: &str| {
        parts.iter().any(|part| part.windows(edge.len()).any(|window| window == edge.as_bytes()))
    };
    if held(&parts, one_edge) || held(&other, other_edge) {
        return Ok(());
    }
    let same = form(&parts, one_edge) == form(&other, other_edge);
    assert_eq!(same, parts == other, "{parts:?} {other:?}");
    Ok(())
}

fn form(parts: &[Vec<u8>], edge: &str) -> hapax_core::Fingerprint {
    let mut body = Vec::new();
    for part in parts {
        body.extend_from_slice(format!("--{edge}\r\n").as_bytes());
        body.extend_from_slice(part);
        body.extend_from_slice(b"\r\n");
    }
    body.extend_from_slice(format!("--{edge}--\r\n").as_bytes());
    let kind = format!("multipart/form-data; charset=utf-8; boundary=\"{edge}\"");
    let mut headers = HeaderMap::new();
    headers.insert(CONTENT_TYPE, kind.parse().expect("ASCII"));
    let uri = Uri::from_static("/forms");
    HttpFingerprintScheme::default().fingerprint(&Method::POST, &uri, &headers, &body)
}
