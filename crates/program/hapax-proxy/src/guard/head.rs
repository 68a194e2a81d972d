//! Framing of a request by its head, and rejection of ambiguous heads.

use std::net::Ipv6Addr;

/// Framing of a request's body.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Framing {
    /// There is no body.
    Empty,
    /// The body ends after so many bytes, at least one.
    Length(u64),
    /// The body ends with its last chunk.
    Chunked,
}

/// Reasons to reject a request head.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
#[allow(missing_docs, reason = "each variant has its text")]
pub enum HeadError {
    #[error("a line of the request head ends without a carriage return")]
    BareLineFeed,
    #[error("a header field is folded over several lines")]
    Folded,
    #[error("there is white space between a header field's name and its colon")]
    SpaceBeforeColon,
    #[error("the name of a header field is invalid")]
    FieldName,
    #[error("a header field's value has control characters")]
    FieldValue,
    #[error("the request line is not a method, a target and HTTP/1.0 or HTTP/1.1")]
    RequestLine,
    #[error("the request target is neither a path nor an http URL")]
    Target,
    #[error("the method CONNECT is not served")]
    Connect,
    #[error("there is more than one Content-Length")]
    TwoLengths,
    #[error("the Content-Length is not a number up to 2^63 - 1")]
    Length,
    #[error("there are both a Content-Length and a Transfer-Encoding")]
    LengthWithCoding,
    #[error("a Transfer-Encoding has no meaning in HTTP/1.0")]
    CodingInHttp10,
    #[error("expected no Transfer-Encoding but a single `chunked`, found another")]
    Coding,
    #[error("expected exactly one Host, found none or several")]
    Host,
    #[error("expected a host with an optional port in Host, found something else")]
    HostValue,
    #[error("the request has more than {} header fields", super::MAX_FIELDS)]
    TooMany,
    #[error("a header field's value begins or ends with white space")]
    FieldSpace,
    #[error("the request head is larger than {} bytes", super::MAX_HEAD)]
    TooLarge,
}

/// Parses a head that ends with its empty line, each line ended by CR LF.
///
/// The grammar is a subset of hyper's, so that for every head that passes, both agree on where the
/// body ends. Ambiguities that hyper resolves silently (equal lengths, a length beside a coding,
/// several codings of which the last is chunked) are rejected.
///
/// # Errors
/// [`HeadError`] if the head can be read in two ways.
pub fn framing(head: &[u8]) -> Result<Framing, HeadError> {
    let mut lines = head.split(|byte| *byte == b'\n').map(|line| match line {
        [line @ .., b'\r'] => line,
        line => line,
    });
    let minor = request_line(lines.next().unwrap_or_default())?;
    let mut length = None;
    let mut coding = false;
    let mut hosts = 0;
    for (index, line) in lines.take_while(|line| !line.is_empty()).enumerate() {
        if index == super::MAX_FIELDS {
            return Err(HeadError::TooMany);
        }
        let (name, value) = field(line)?;
        if name.eq_ignore_ascii_case(b"content-length") {
            if length.replace(number(value).ok_or(HeadError::Length)?).is_some() {
                return Err(HeadError::TwoLengths);
            }
        } else if name.eq_ignore_ascii_case(b"transfer-encoding") {
            if minor == 0 {
                return Err(HeadError::CodingInHttp10);
            }
            if coding || !value.eq_ignore_ascii_case(b"chunked") {
                return Err(HeadError::Coding);
            }
            coding = true;
        } else if name.eq_ignore_ascii_case(b"host") {
            if !is_host(value) {
                return Err(HeadError::HostValue);
            }
            hosts += 1;
        }
    }
    if hosts > 1 || (hosts == 0 && minor == 1) {
        return Err(HeadError::Host);
    }
    match (length, coding) {
        (Some(_), true) => Err(HeadError::LengthWithCoding),
        (None, true) => Ok(Framing::Chunked),
        (None | Some(0), false) => Ok(Framing::Empty),
        (Some(length), false) => Ok(Framing::Length(length)),
    }
}

/// Returns whether an accepted head requests another protocol, which may begin directly after it.
pub(super) fn asks_to_switch(head: &[u8]) -> bool {
    head.split(|byte| *byte == b'\n').any(|line| {
        let name = line.iter().position(|byte| *byte == b':').map(|colon| &line[..colon]);
        name.is_some_and(|name| name.eq_ignore_ascii_case(b"upgrade"))
    })
}

/// Parses a request line; returns the minor version.
fn request_line(line: &[u8]) -> Result<u8, HeadError> {
    let mut parts = line.split(|byte| *byte == b' ');
    let (Some(method), Some(target), Some(version), None) =
        (parts.next(), parts.next(), parts.next(), parts.next())
    else {
        return Err(HeadError::RequestLine);
    };
    // hyper would silently drop a fragment, which no target has (RFC 9112 3.2).
    let foreign = |byte: &u8| byte.is_ascii_control() || *byte == b'#';
    if !is_token(method) || target.is_empty() || target.iter().any(foreign) {
        return Err(HeadError::RequestLine);
    }
    if method == b"CONNECT" {
        return Err(HeadError::Connect);
    }
    let minor = match version {
        b"HTTP/1.1" => 1,
        b"HTTP/1.0" => 0,
        _ => return Err(HeadError::RequestLine),
    };
    // The forms of RFC 9112 3.2, without the authority form, which is for CONNECT.
    let known = match target {
        b"*" => method == b"OPTIONS",
        [b'/', ..] => true,
        _ => begins_with(target, b"http://") || begins_with(target, b"https://"),
    };
    if known { Ok(minor) } else { Err(HeadError::Target) }
}

fn begins_with(target: &[u8], scheme: &[u8]) -> bool {
    target.len() > scheme.len() && target[..scheme.len()].eq_ignore_ascii_case(scheme)
}

/// Returns whether a value is a host (RFC 3986 3.2.2), with or without a port, or empty, which RFC
/// 9112 3.2 allows. How a server behind maps it to URLs and routes is not checked.
pub(super) fn is_host(value: &[u8]) -> bool {
    let (host, port) = match value {
        [b'[', rest @ ..] => {
            let Some(end) = rest.iter().position(|byte| *byte == b']') else { return false };
            let (address, port) = (&rest[..end], &rest[end + 1..]);
            let address = std::str::from_utf8(address);
            if !address.is_ok_and(|address| address.parse::<Ipv6Addr>().is_ok()) {
                return false;
            }
            (&b""[..], port)
        }
        _ => {
            let colon = value.iter().position(|byte| *byte == b':').unwrap_or(value.len());
            value.split_at(colon)
        }
    };
    let port = match port {
        [] => true,
        [b':', port @ ..] => port.iter().all(u8::is_ascii_digit),
        _ => false,
    };
    let mut rest = host;
    while let [byte, tail @ ..] = rest {
        rest = match (byte, tail) {
            (b'%', [a, b, tail @ ..]) if a.is_ascii_hexdigit() && b.is_ascii_hexdigit() => tail,
            (byte, tail) if byte.is_ascii_alphanumeric() || b"-._~!$&'()*+,;=".contains(byte) => {
                tail
            }
            _ => return false,
        };
    }
    port
}

fn field(line: &[u8]) -> Result<(&[u8], &[u8]), HeadError> {
    if line.first().is_some_and(|byte| is_space(*byte)) {
        return Err(HeadError::Folded);
    }
    let colon = line.iter().position(|byte| *byte == b':').ok_or(HeadError::FieldName)?;
    let (name, value) = (&line[..colon], &line[colon + 1..]);
    if name.last().is_some_and(|byte| is_space(*byte)) {
        return Err(HeadError::SpaceBeforeColon);
    }
    if !is_token(name) {
        return Err(HeadError::FieldName);
    }
    if value.iter().any(|byte| byte.is_ascii_control() && *byte != b'\t') {
        return Err(HeadError::FieldValue);
    }
    Ok((name, trim(value)))
}

/// Returns whether these bytes are a token (RFC 9110 5.6.2).
fn is_token(bytes: &[u8]) -> bool {
    !bytes.is_empty()
        && bytes
            .iter()
            .all(|byte| byte.is_ascii_alphanumeric() || b"!#$%&'*+-.^_`|~".contains(byte))
}

/// Largest length of a body: other implementations use a signed number of 64 bits.
const MAX_LENGTH: u64 = i64::MAX as u64;

/// Parses a length of digits only: no sign, no list, no white space within.
pub(super) fn number(value: &[u8]) -> Option<u64> {
    if value.is_empty() || !value.iter().all(u8::is_ascii_digit) {
        return None;
    }
    std::str::from_utf8(value).ok()?.parse().ok().filter(|length| *length <= MAX_LENGTH)
}

fn trim(mut value: &[u8]) -> &[u8] {
    while let [first, rest @ ..] = value
        && is_space(*first)
    {
        value = rest;
    }
    while let [rest @ .., last] = value
        && is_space(*last)
    {
        value = rest;
    }
    value
}

const fn is_space(byte: u8) -> bool {
    matches!(byte, b' ' | b'\t')
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(fields: &str) -> Result<Framing, HeadError> {
        framing(format!("POST /a HTTP/1.1\r\nhost: a\r\n{fields}\r\n").as_bytes())
    }

    #[test]
    fn an_unambiguous_framing_is_accepted() {
        assert_eq!(of(""), Ok(Framing::Empty));
        assert_eq!(of("content-length: 0\r\n"), Ok(Framing::Empty));
        assert_eq!(of("Content-Length:\t17 \r\n"), Ok(Framing::Length(17)));
        assert_eq!(of("Transfer-Encoding: Chunked\r\n"), Ok(Framing::Chunked));
    }

    #[test]
    fn an_ambiguous_framing_is_rejected() {
        assert_eq!(of("content-length: 1\r\ncontent-length: 1\r\n"), Err(HeadError::TwoLengths));
        assert_eq!(of("content-length: 1, 1\r\n"), Err(HeadError::Length));
        assert_eq!(of("content-length: +1\r\n"), Err(HeadError::Length));
        for huge in ["9223372036854775808", "18446744073709551615", "18446744073709551616"] {
            assert_eq!(of(&format!("content-length: {huge}\r\n")), Err(HeadError::Length));
        }
        let largest = of("content-length: 9223372036854775807\r\n");
        assert_eq!(largest, Ok(Framing::Length(i64::MAX as u64)));
        let both = "content-length: 1\r\ntransfer-encoding: chunked\r\n";
        assert_eq!(of(both), Err(HeadError::LengthWithCoding));
        let both = "transfer-encoding: chunked\r\ncontent-length: 1\r\n";
        assert_eq!(of(both), Err(HeadError::LengthWithCoding));
        assert_eq!(of("transfer-encoding: gzip, chunked\r\n"), Err(HeadError::Coding));
        let twice = "transfer-encoding: chunked\r\ntransfer-encoding: chunked\r\n";
        assert_eq!(of(twice), Err(HeadError::Coding));
        let old = b"POST / HTTP/1.0\r\ntransfer-encoding: chunked\r\n\r\n";
        assert_eq!(framing(old), Err(HeadError::CodingInHttp10));
    }

    #[test]
    fn invalid_header_fields_are_rejected() {
        assert_eq!(of("a: b\r\n c\r\n"), Err(HeadError::Folded));
        assert_eq!(of("a : b\r\n"), Err(HeadError::SpaceBeforeColon));
        assert_eq!(of("no colon\r\n"), Err(HeadError::FieldName));
        assert_eq!(of(": b\r\n"), Err(HeadError::FieldName));
        assert_eq!(of("a: b\rc\r\n"), Err(HeadError::FieldValue));
        assert_eq!(of("a: \0\r\n"), Err(HeadError::FieldValue));
        assert_eq!(of("host: b\r\n"), Err(HeadError::Host));
        assert_eq!(framing(b"GET / HTTP/1.1\r\n\r\n"), Err(HeadError::Host));
        assert_eq!(framing(b"GET / HTTP/1.0\r\n\r\n"), Ok(Framing::Empty));
    }

    #[test]
    fn only_a_valid_host_is_accepted() {
        for host in ["", "a", "a.example:80", "a:", "[::1]:1", "[::1]", "%41", "x_y", "127.0.0.1"] {
            let head = format!("GET / HTTP/1.1\r\nhost: {host}\r\n\r\n");
            assert_eq!(framing(head.as_bytes()), Ok(Framing::Empty), "{host}");
        }
        for host in
            ["a b", "a/b", "u@a", "a:b", "a:1:2", "[::1", "[x]", "[::1]x", "%4", "a\"", "é", "a?b"]
        {
            let head = format!("GET / HTTP/1.1\r\nhost: {host}\r\n\r\n");
            assert_eq!(framing(head.as_bytes()), Err(HeadError::HostValue), "{host}");
        }
    }

    #[test]
    fn only_a_path_or_an_http_url_is_accepted_as_target() {
        let of = |method: &str, target: &str| {
            framing(format!("{method} {target} HTTP/1.1\r\nhost: a\r\n\r\n").as_bytes())
        };
        for target in ["/", "//", "/a:b", "http://a", "HTTPS://a/b"] {
            assert_eq!(of("GET", target), Ok(Framing::Empty), "{target}");
        }
        assert_eq!(of("OPTIONS", "*"), Ok(Framing::Empty));
        for target in ["*", "a", "a:1", "ftp://a/", "http:/a", "http://", "?a", "*a"] {
            assert_eq!(of("GET", target), Err(HeadError::Target), "{target}");
        }
    }

    #[test]
    fn invalid_request_lines_are_rejected() {
        for line in [
            "GET  / HTTP/1.1",
            "GET /",
            "GET / HTTP/2.0",
            "G@T / HTTP/1.1",
            "GET /\t HTTP/1.1",
            "GET /#a HTTP/1.1",
        ] {
            let head = format!("{line}\r\nhost: a\r\n\r\n");
            assert_eq!(framing(head.as_bytes()), Err(HeadError::RequestLine), "{line}");
        }
        let connect = b"CONNECT a:1 HTTP/1.1\r\nhost: a:1\r\n\r\n";
        assert_eq!(framing(connect), Err(HeadError::Connect));
    }
}
