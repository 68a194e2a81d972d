//! Checks of HTTP/2 requests that h2 accepts and HTTP/1.1 would not.
//!
//! Framing is unambiguous in HTTP/2, but a request becomes ambiguous when it is rewritten as
//! HTTP/1.1, or when two of its fields name two hosts. h2 rejects connection-specific fields, bad
//! pseudo-fields and a body whose length differs from the declared one; `http` allows no names or
//! values that break lines. This module checks the rest. Accepted requests have the form of
//! HTTP/1.1 requests.

use std::borrow::Cow;

use http::Method;
use http::header::{CONTENT_LENGTH, COOKIE, HOST, HeaderMap, HeaderName, HeaderValue};
use http::request::Parts;
use http::uri::{PathAndQuery, Scheme, Uri};

use super::MAX_FIELDS;
use super::head::{HeadError, is_host, number};

/// Largest field list of a request, in bytes as HTTP/2 counts them (RFC 9113 6.5.2).
pub(crate) const MAX_LIST: u32 = 16 * 1024;

/// Converts a request from h2 to the form of HTTP/1.1, or returns the reason to reject it. Values
/// of the headers in `trimmed` are trimmed.
pub(crate) fn settle(parts: &mut Parts, trimmed: &[HeaderName]) -> Result<(), HeadError> {
    if parts.method == Method::CONNECT {
        return Err(HeadError::Connect);
    }
    one_length(&parts.headers)?;
    no_space_around(&mut parts.headers, trimmed)?;
    let target = std::mem::take(&mut parts.uri).into_parts();
    let http = |scheme: &Scheme| *scheme == Scheme::HTTP || *scheme == Scheme::HTTPS;
    // Without an authority, h2 drops the scheme, and the host is in a field.
    if !target.scheme.as_ref().map_or(target.authority.is_none(), http) {
        return Err(HeadError::Target);
    }
    let path = target.path_and_query.unwrap_or_else(|| PathAndQuery::from_static("/"));
    let known = match path.as_str() {
        "*" => parts.method == Method::OPTIONS,
        path => path.starts_with('/'),
    };
    if !known {
        return Err(HeadError::Target);
    }
    parts.uri = Uri::from(path);
    let authority = target.authority.as_ref().map(|authority| authority.as_str().as_bytes());
    settle_host(&mut parts.headers, authority)?;
    join_cookies(&mut parts.headers)?;
    if parts.headers.len() > MAX_FIELDS { Err(HeadError::TooMany) } else { Ok(()) }
}

fn one_length(headers: &HeaderMap) -> Result<(), HeadError> {
    let mut lengths = headers.get_all(CONTENT_LENGTH).iter();
    match (lengths.next(), lengths.next()) {
        (Some(_), Some(_)) => Err(HeadError::TwoLengths),
        (Some(length), None) if number(length.as_bytes()).is_none() => Err(HeadError::Length),
        _ => Ok(()),
    }
}

/// HTTP/1 trims values, and HTTP/2 forbids the white space (RFC 9113 8.2.1). With it, the scope
/// computed here could differ from the caller that the upstream reads. Values of `allowed` mean the
/// same with and without.
fn no_space_around(headers: &mut HeaderMap, allowed: &[HeaderName]) -> Result<(), HeadError> {
    for (name, value) in headers.iter_mut() {
        let trimmed = value.as_bytes().trim_ascii();
        if trimmed.len() == value.len() {
            continue;
        }
        if !allowed.contains(name) {
            return Err(HeadError::FieldSpace);
        }
        *value = HeaderValue::from_bytes(trimmed).map_err(|_| HeadError::FieldValue)?;
    }
    Ok(())
}

/// Reads the host from whichever field names it (RFC 9113 8.3.1); if both do, they must agree.
fn settle_host(headers: &mut HeaderMap, authority: Option<&[u8]>) -> Result<(), HeadError> {
    let mut named = headers.get_all(HOST).iter();
    let host = match (authority, named.next(), named.next()) {
        (_, _, Some(_)) | (None, None, None) => return Err(HeadError::Host),
        (Some(host), Some(field), None) if !host.eq_ignore_ascii_case(field.as_bytes()) => {
            return Err(HeadError::Host);
        }
        (Some(host), _, None) => Cow::Borrowed(host),
        (None, Some(field), None) => Cow::Owned(field.as_bytes().to_vec()),
    };
    if !is_host(&host) {
        return Err(HeadError::HostValue);
    }
    let host = HeaderValue::from_bytes(&host).map_err(|_| HeadError::HostValue)?;
    headers.insert(HOST, host);
    Ok(())
}

/// Joins cookies that are split over several fields (RFC 9113 8.2.3), which HTTP/1.1 servers would
/// not.
fn join_cookies(headers: &mut HeaderMap) -> Result<(), HeadError> {
    let crumbs: Vec<&[u8]> = headers.get_all(COOKIE).iter().map(HeaderValue::as_bytes).collect();
    if crumbs.len() > 1 {
        let whole = HeaderValue::from_bytes(&crumbs.join(&b"; "[..]));
        headers.insert(COOKIE, whole.map_err(|_| HeadError::FieldValue)?);
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(uri: &str, fields: &[(&'static str, &'static str)]) -> Result<Parts, HeadError> {
        let mut parts = http::Request::builder().uri(uri).body(()).unwrap().into_parts().0;
        for (name, value) in fields {
            parts.headers.append(*name, HeaderValue::from_static(value));
        }
        settle(&mut parts, &[HeaderName::from_static("x-trimmed")]).map(|()| parts)
    }

    #[test]
    fn an_accepted_http2_request_has_the_form_of_http1() {
        let cookies = [("cookie", "a=1"), ("x", "y"), ("cookie", "b=2; c=3")];
        let parts = of("https://shop.example:81/a%20b?c", &cookies).unwrap();
        assert_eq!(parts.uri, "/a%20b?c");
        assert_eq!(parts.headers[HOST], "shop.example:81");
        let cookies: Vec<_> = parts.headers.get_all(COOKIE).iter().collect();
        assert_eq!(cookies, ["a=1; b=2; c=3"]);
        assert_eq!(of("http://a", &[("host", "A")]).unwrap().headers[HOST], "a");
    }

    #[test]
    fn an_http2_request_with_two_lengths_or_hosts_is_rejected() {
        let two = [("content-length", "1"), ("content-length", "1")];
        assert_eq!(of("http://a/", &two).unwrap_err(), HeadError::TwoLengths);
        assert_eq!(of("http://a/", &[("content-length", "+1")]).unwrap_err(), HeadError::Length);
        assert_eq!(of("http://a/", &[("host", "b")]).unwrap_err(), HeadError::Host);
        let hosts = [("host", "a"), ("host", "a")];
        assert_eq!(of("http://a/", &hosts).unwrap_err(), HeadError::Host);
        assert_eq!(of("http://u@a/", &[]).unwrap_err(), HeadError::HostValue);
        assert_eq!(of("ftp://a/", &[]).unwrap_err(), HeadError::Target);
        assert_eq!(of("/", &[]).unwrap_err(), HeadError::Host);
        assert_eq!(of("/", &[("host", "b")]).unwrap().headers[HOST], "b");
        for value in [" a", "a ", "a\t", "\t"] {
            assert_eq!(of("http://a/", &[("x", value)]).unwrap_err(), HeadError::FieldSpace);
            let parts = of("http://a/", &[("x-trimmed", value)]).unwrap();
            assert_eq!(parts.headers["x-trimmed"], value.trim());
        }
        let many = [("x", "y"); MAX_FIELDS];
        assert_eq!(of("http://a/", &many).unwrap_err(), HeadError::TooMany);
        assert!(of("http://a/", &many[1..]).is_ok());
    }
}
