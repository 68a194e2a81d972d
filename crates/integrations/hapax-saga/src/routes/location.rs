//! The name of a key in a path.

use axum::http::HeaderValue;
use hapax_core::Key;
use hapax_http::header::{Grammar, decode, encode};
use percent_encoding::{AsciiSet, NON_ALPHANUMERIC, utf8_percent_encode};

/// Characters that are escaped: all but the unreserved ones of RFC 3986.
const ESCAPED: &AsciiSet = &NON_ALPHANUMERIC.remove(b'-').remove(b'.').remove(b'_').remove(b'~');

/// Returns the segment of a path for a key: the key itself if it consists of unreserved characters,
/// else the quoted form of the header. A bare `.` or `..` would be removed by clients.
pub(super) fn segment(key: &Key) -> String {
    let text = key.as_str();
    let is_plain = |byte: u8| byte.is_ascii_alphanumeric() || b"-._~".contains(&byte);
    if text.bytes().all(is_plain) && !matches!(text, "." | "..") {
        return text.to_owned();
    }
    let quoted = encode(key);
    // A key is ASCII.
    utf8_percent_encode(quoted.to_str().unwrap_or_default(), ESCAPED).to_string()
}

/// Returns the key of a segment whose escapes were decoded.
pub(super) fn key(segment: &str) -> Option<Key> {
    match segment.starts_with('"') {
        true => decode(segment.as_bytes(), Grammar::Strict).ok(),
        false => Key::new(segment).ok(),
    }
}

/// Returns the value of `Location`.
pub(super) fn header(path: &str, key: &Key) -> Option<HeaderValue> {
    HeaderValue::try_from(format!("{path}/{}", segment(key))).ok()
}

#[cfg(test)]
mod tests {
    use percent_encoding::percent_decode_str;

    use super::*;

    #[test]
    fn every_key_has_a_segment_without_delimiters_that_names_it() {
        let all: String = (' '..='~').collect();
        for text in ["k-1", ".", "..", "a/b", "a b", "\"", "\"k\"", "%2F", "a?b#c", &all] {
            let expected = Key::new(text).unwrap();
            let segment = segment(&expected);
            assert!(!segment.contains(['/', '?', '#', ' ', '"']), "{segment}");
            assert!(!matches!(&*segment, "." | ".."));
            let decoded = percent_decode_str(&segment).decode_utf8().unwrap();
            assert_eq!(key(&decoded).unwrap(), expected);
        }
    }
}
