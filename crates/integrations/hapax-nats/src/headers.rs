//! Headers as the stream stores them, for messages that the client library cannot parse.
//!
//! The server stores and delivers what a producer has sent. async-nats 0.51 ends its connection at a header that it
//! cannot parse. [`read`] accepts the lines that its parser accepts, and no others.

use std::str::from_utf8;

use async_nats::{HeaderName, HeaderValue, StatusCode};
use bytes::Bytes;

/// [Native form](hapax_messages::Delivery::native) of each message: its headers are those that it had, so that a redrive
/// neither adds an order key nor rejects a value that a message of a relay cannot have.
pub(crate) const NATIVE: &[u8] = b"nats/1\n";

/// Header with a line of the headers that the client cannot read, percent-encoded.
const UNREADABLE_HEADER: &str = "unreadable-header";

const NOT_UTF8: &str = "a line of the headers that is not UTF-8";

const NO_COLON: &str = "a line of the headers without a colon";

/// Headers of a stored message.
#[derive(Debug, Default)]
pub(crate) struct StoredHeaders {
    /// Those that the client can read, and the other lines as values of `unreadable-header`.
    pub(crate) headers: Vec<(String, Bytes)>,
    /// The first part that the client cannot read.
    pub(crate) unreadable: Option<&'static str>,
}

impl StoredHeaders {
    fn reject(&mut self, found: &'static str, lines: &[&[u8]]) {
        self.unreadable.get_or_insert(found);
        let lines = lines.iter().map(|line| Bytes::from(encoded(line)));
        self.headers.extend(lines.map(|line| (UNREADABLE_HEADER.to_owned(), line)));
    }
}

/// Reads the headers of a message, from the version line on.
pub(crate) fn read(block: &[u8]) -> StoredHeaders {
    let mut lines = block.split_inclusive(|byte| *byte == b'\n').map(without_end).peekable();
    let mut stored = StoredHeaders::default();
    let version = lines.next().unwrap_or_default();
    if let Err(found) = check_version(version) {
        stored.reject(found, &[version]);
    }
    while let Some(line) = lines.next() {
        if line.is_empty() {
            continue;
        }
        let mut parts = vec![line];
        while let Some(part) = lines.next_if(|line| is_continuation(line)) {
            parts.push(part);
        }
        match header(&parts) {
            Ok(header) => stored.headers.push(header),
            Err(found) => stored.reject(found, &parts),
        }
    }
    stored
}

/// Returns a line without its end, which is a line feed and at most one carriage return before it.
fn without_end(line: &[u8]) -> &[u8] {
    let Some(line) = line.strip_suffix(b"\n") else { return line };
    line.strip_suffix(b"\r").unwrap_or(line)
}

/// Returns whether a line continues the value of the one before it.
fn is_continuation(line: &[u8]) -> bool {
    String::from_utf8_lossy(line).starts_with(char::is_whitespace)
}

fn check_version(line: &[u8]) -> Result<(), &'static str> {
    let line = from_utf8(line).map_err(|_| NOT_UTF8)?;
    let rest = line.strip_prefix("NATS/1.0").ok_or("headers that do not begin with NATS/1.0")?;
    let rest = rest.trim();
    let status = rest.split_once(' ').map_or(rest, |(status, _)| status.trim());
    if status.is_empty() || status.parse::<StatusCode>().is_ok() {
        return Ok(());
    }
    Err("a status of the headers that is no number of three digits")
}

/// Returns the header of a line and its continuations.
///
/// As the client does, it looks for the colon in the line alone, and removes white space from the start of the line's
/// value and from the end of the whole one: a carriage return at the start of a continuation stays.
fn header(parts: &[&[u8]]) -> Result<(String, Bytes), &'static str> {
    let parts: Result<Vec<_>, _> = parts.iter().map(|part| from_utf8(part)).collect();
    let parts = parts.map_err(|_| NOT_UTF8)?;
    let (line, continuations) = parts.split_first().ok_or(NO_COLON)?;
    let (name, value) = line.split_once(':').ok_or(NO_COLON)?;
    let name: HeaderName = name.parse().map_err(
        |_| "a name of a header with a space, a control character or one outside of ASCII",
    )?;
    let value = [value.trim_start(), &continuations.concat()].concat();
    let value: HeaderValue =
        value.trim_end().parse().map_err(|_| "a value of a header with a carriage return")?;
    Ok((name.to_string(), Bytes::copy_from_slice(value.as_str().as_bytes())))
}

/// Returns the reason for which the client cannot read the subject of a message.
///
/// In the server's answer U+FFFD replaces a byte that is not UTF-8: a subject that has this character counts as
/// unreadable too. Before the lengths of headers the client takes any white space for the end of a field.
pub(crate) fn unreadable_subject(subject: &str, has_headers: bool) -> Option<&'static str> {
    if subject.contains('\u{fffd}') {
        return Some("a subject that is not UTF-8");
    }
    let is_divided = has_headers && subject.contains(char::is_whitespace);
    is_divided.then_some("a subject with white space")
}

/// Percent-encodes a line, which is the value of a header then.
fn encoded(line: &[u8]) -> String {
    let mut text = String::with_capacity(line.len());
    let last = line.len().saturating_sub(1);
    for (at, byte) in line.iter().enumerate() {
        let is_inner_space = *byte == b' ' && at != 0 && at != last;
        if is_inner_space || byte.is_ascii_graphic() && *byte != b'%' {
            text.push(char::from(*byte));
        } else {
            text.push_str(&format!("%{byte:02X}"));
        }
    }
    text
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// Reads headers as async-nats 0.51 does, in `Connection::try_read_op`. `None` where that ends the connection, or
    /// panics.
    fn read_as_the_client(block: &[u8]) -> Option<Vec<(String, String)>> {
        let mut lines = from_utf8(block).ok()?.lines().peekable();
        let status = lines.next()?.strip_prefix("NATS/1.0").map(str::trim)?;
        let status = status.split_once(' ').map_or(status, |(status, _)| status.trim());
        if !status.is_empty() {
            status.parse::<StatusCode>().ok()?;
        }
        let mut headers = Vec::new();
        while let Some(line) = lines.next() {
            if line.is_empty() {
                continue;
            }
            let (name, value) = line.split_once(':')?;
            let name = name.parse::<HeaderName>().ok()?;
            let mut value = value.trim_start().to_owned();
            while let Some(part) = lines.next_if(|line| line.starts_with(char::is_whitespace)) {
                value.push_str(part);
            }
            value.truncate(value.trim_end().len());
            let value = value.parse::<HeaderValue>().ok()?;
            headers.push((name.to_string(), value.as_str().to_owned()));
        }
        Some(headers)
    }

    /// Returns blocks of headers, most of which the client can read in part.
    fn blocks() -> impl Strategy<Value = Vec<u8>> {
        let part = prop_oneof![
            4 => Just(&b"\r\n"[..]),
            2 => Just(&b"name:"[..]),
            2 => Just(&b"\r\nname: a"[..]),
            1 => prop::sample::select(vec![
                &b"\r"[..], b"\n", b":", b" ", b"\t", b"a", b"\xfc", b"\xc2\xa0", b"\xe2\x80\xa8", b"\xc3\xbc", b"\0",
                b"503", b"NATS/1.0",
            ]),
        ];
        let version = prop_oneof![9 => Just(&b"NATS/1.0"[..]), 1 => Just(&b""[..])];
        let parts = prop::collection::vec(part, 0..12);
        (version, parts).prop_map(|(version, parts)| [version, &parts.concat()].concat())
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(4096))]

        #[test]
        fn headers_are_readable_where_the_client_reads_them(block in blocks()) {
            let stored = read(&block);
            match read_as_the_client(&block) {
                None => prop_assert!(stored.unreadable.is_some()),
                Some(expected) => {
                    prop_assert_eq!(stored.unreadable, None);
                    let found = stored.headers.into_iter();
                    let found: Vec<_> = found
                        .map(|(name, value)| (name, String::from_utf8(value.to_vec()).unwrap()))
                        .collect();
                    prop_assert_eq!(found, expected);
                }
            }
        }
    }

    #[test]
    fn a_continuation_keeps_its_carriage_return_and_has_no_colon_for_its_line() {
        for wrong in [&b"name:\r\n\rb\r\n\r\n"[..], b"name\r\n :b\r\n\r\n"] {
            let block = [b"NATS/1.0\r\n", wrong].concat();
            assert!(read(&block).unreadable.is_some(), "{}", encoded(wrong));
        }
        let folded = read(b"NATS/1.0\r\nname:\r\n b\r\n\r\n");
        assert_eq!(folded.headers, [("name".to_owned(), Bytes::from(" b"))]);
    }

    #[test]
    fn lines_that_the_client_cannot_read_are_kept_percent_encoded_beside_the_others() {
        let block =
            b"NATS/1.0\r\nmessage-id:  m-1 \r\nname: M\xfcller 100%\r\n rest\r\nnocolon \r\n\
                      lone: a\rb\r\nmy header: 1\r\nlast: 2\r\n more\r\n\r\n";
        let stored = read(block);
        let found: Vec<_> = stored
            .headers
            .iter()
            .map(|(name, value)| (name.as_str(), from_utf8(value).unwrap()))
            .collect();
        let expected = [
            ("message-id", "m-1"),
            (UNREADABLE_HEADER, "name: M%FCller 100%25"),
            (UNREADABLE_HEADER, "%20rest"),
            (UNREADABLE_HEADER, "nocolon%20"),
            (UNREADABLE_HEADER, "lone: a%0Db"),
            (UNREADABLE_HEADER, "my header: 1"),
            ("last", "2 more"),
        ];
        assert_eq!(found, expected);
        assert_eq!(stored.unreadable, Some(NOT_UTF8));
    }

    #[test]
    fn a_version_line_may_have_a_status_of_three_digits() {
        for right in ["NATS/1.0\r\n\r\n", "NATS/1.0 503 No Responders\r\n\r\n", "NATS/1.0"] {
            assert_eq!(read(right.as_bytes()).unreadable, None, "{right}");
        }
        for wrong in ["", "NATS/2.0\r\n\r\n", "NATS/1.0 5033\r\n\r\n", "NATS/1.0 abc\r\n\r\n"] {
            assert!(read(wrong.as_bytes()).unreadable.is_some(), "{wrong}");
        }
    }
}
