//! Form data, against another reading of it.
//!
//! 1. Two forms have the same fingerprint exactly if their parts are the same, whatever their
//!    boundaries; of what has no parts, the bytes decide.
//! 2. Any content type and any body has a fingerprint, the same each time.
#![no_main]

use arbitrary::{Result, Unstructured};
use hapax_core::Fingerprint;
use hapax_http::fingerprint::HttpFingerprintScheme;
use http::header::CONTENT_TYPE;
use http::{HeaderMap, HeaderValue, Method, Uri};
use libfuzzer_sys::fuzz_target;

const EDGES: [&str; 6] =
    ["a", "ab", "a-", "--", "*****1763641234567*****", "----WebKitFormBoundary7MA4YWxk"];

fuzz_target!(|input: &[u8]| {
    let mut u = Unstructured::new(input);
    let _ = any_kind(&mut u);
    let _ = forms(&mut u);
});

fn any_kind(u: &mut Unstructured<'_>) -> Result<()> {
    let kind = [b"multipart/form-data;", u.arbitrary::<&[u8]>()?].concat();
    let Ok(kind) = HeaderValue::from_bytes(&kind) else { return Ok(()) };
    let body: &[u8] = u.arbitrary()?;
    assert_eq!(hashed(&kind, body), hashed(&kind, body));
    Ok(())
}

fn forms(u: &mut Unstructured<'_>) -> Result<()> {
    let (one, other) = (*u.choose(&EDGES)?, *u.choose(&EDGES)?);
    let count = u.int_in_range(0..=3)?;
    let parts = (0..count).map(|_| text(u, one)).collect::<Result<Vec<_>>>()?;
    let (one_body, other_body) = (body(u, one, &parts)?, body(u, other, &parts)?);
    let kind = |edge: &str| {
        HeaderValue::try_from(format!("multipart/form-data; boundary=\"{edge}\"")).expect("ASCII")
    };
    let same = hashed(&kind(one), &one_body) == hashed(&kind(other), &other_body);
    let read = |edge, body: Vec<u8>| cut(edge, &body).ok_or(body);
    assert_eq!(same, read(one, one_body) == read(other, other_body));
    Ok(())
}

/// A form of the parts, or nearly; or something else.
fn body(u: &mut Unstructured<'_>, edge: &str, parts: &[Vec<u8>]) -> Result<Vec<u8>> {
    if u.ratio(1, 4)? {
        return text(u, edge);
    }
    let mut body = Vec::new();
    for part in parts {
        body.extend_from_slice(format!("--{edge}\r\n").as_bytes());
        body.extend_from_slice(part);
        body.extend_from_slice(b"\r\n");
    }
    body.extend_from_slice(format!("--{edge}--\r\n").as_bytes());
    if u.ratio(1, 4)? {
        let at = u.choose_index(body.len())?;
        body[at] = u.arbitrary()?;
    }
    Ok(body)
}

/// What forms are made of.
fn text(u: &mut Unstructured<'_>, edge: &str) -> Result<Vec<u8>> {
    let edge = format!("--{edge}");
    let words: [&[u8]; 7] = [b"\r\n", b"\r", b"\n", b"--", b"-", b"x", edge.as_bytes()];
    let mut text = Vec::new();
    for _ in 0..u.int_in_range(0..=12)? {
        text.extend_from_slice(u.choose(&words)?);
    }
    Ok(text)
}

/// The parts by another reading: what is left between delimiters once they are cut out.
fn cut(edge: &str, body: &[u8]) -> Option<Vec<Vec<u8>>> {
    let delimiter = format!("\r\n--{edge}").into_bytes();
    let text = [b"\r\n", body].concat();
    let (mut pieces, mut from, mut at) = (Vec::new(), 0, 0);
    while at < text.len() {
        if text[at..].starts_with(&delimiter) {
            pieces.push(text[from..at].to_vec());
            at += delimiter.len();
            from = at;
        } else {
            at += 1;
        }
    }
    let last = &text[from..];
    let closed = last == b"--" || last == b"--\r\n";
    // A line that begins like the end of the form is the end of it.
    let early = pieces.iter().skip(1).any(|piece| piece.starts_with(b"--"));
    // Before the first delimiter is nothing, or an empty line.
    let begins = pieces.first().is_some_and(|piece| piece.is_empty() || piece == b"\r\n");
    if !begins || !closed || early {
        return None;
    }
    pieces[1..].iter().map(|piece| piece.strip_prefix(b"\r\n").map(<[u8]>::to_vec)).collect()
}

fn hashed(kind: &HeaderValue, body: &[u8]) -> Fingerprint {
    let mut headers = HeaderMap::new();
    headers.insert(CONTENT_TYPE, kind.clone());
    let uri = Uri::from_static("/forms");
    HttpFingerprintScheme::default().fingerprint(&Method::POST, &uri, &headers, body)
}
