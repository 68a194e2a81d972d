//! Whether a body is as long as its message says.
//!
//! A body that ends early and one that ends look alike where a transport does not tell them apart:
//! HTTP/2 ends a stream that was reset without an error, and a handler may forward what it got of
//! another service. A length that was announced does tell them apart, so that it is never mended.

use http::header::{CONTENT_LENGTH, HeaderMap};
use http::{Method, StatusCode};
use http_body::SizeHint;

/// The lengths that a message announces: in `Content-Length`, and by its body.
#[derive(Clone, Copy, Default, Debug)]
pub(crate) struct DeclaredLength([Option<u64>; 2]);

/// A message contradicts itself about its length.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
#[error("the body is not as long as its message says")]
pub(crate) struct LengthMismatch;

impl DeclaredLength {
    /// Of a message with these headers, the hint taken before anything is read.
    ///
    /// # Errors
    /// [`LengthMismatch`] if there is a `Content-Length` that is none (RFC 9110, 8.6), or several.
    pub(crate) fn new(headers: &HeaderMap, hint: &SizeHint) -> Result<Self, LengthMismatch> {
        let mut length = None;
        let lines = headers.get_all(CONTENT_LENGTH).iter();
        for text in lines.flat_map(|line| line.as_bytes().split(|byte| *byte == b',')) {
            let text = text.trim_ascii();
            let digits = text.iter().all(u8::is_ascii_digit);
            let number = std::str::from_utf8(text).ok().and_then(|text| text.parse().ok());
            let number = number.filter(|_| digits).ok_or(LengthMismatch)?;
            if length.is_some_and(|length| length != number) {
                return Err(LengthMismatch);
            }
            length = Some(number);
        }
        Ok(Self([length, hint.exact()]))
    }

    /// # Errors
    /// [`LengthMismatch`] if `read` bytes are more than were announced.
    pub(crate) fn check_so_far(self, read: usize) -> Result<(), LengthMismatch> {
        let more = self.0.iter().flatten().any(|length| read as u64 > *length);
        if more { Err(LengthMismatch) } else { Ok(()) }
    }

    /// # Errors
    /// [`LengthMismatch`] if a body that ended with `read` bytes is not what was announced.
    pub(crate) fn check_end(self, read: usize) -> Result<(), LengthMismatch> {
        let other = self.0.iter().flatten().any(|length| read as u64 != *length);
        if other { Err(LengthMismatch) } else { Ok(()) }
    }
}

/// Whether a length in this status's answer to such a request is that of its body. Answers to HEAD
/// and 304 say what another answer would have (RFC 9110, 8.6), and 204 has no length.
pub(crate) fn describes_body(request: &Method, status: StatusCode) -> bool {
    *request != Method::HEAD
        && ![StatusCode::NO_CONTENT, StatusCode::NOT_MODIFIED].contains(&status)
}

/// Whether `Content-Length` cannot stand in a message of this status with these trailers: a 204
/// has none (RFC 9110, 8.6), and after a length HTTP/1.1 sends no trailers.
pub(crate) fn excludes_length(status: StatusCode, trailers: Option<&HeaderMap>) -> bool {
    status == StatusCode::NO_CONTENT || trailers.is_some_and(|trailers| !trailers.is_empty())
}

#[cfg(test)]
mod tests {
    use http::HeaderValue;

    use super::*;

    fn announced(
        lines: &[&'static str],
        hint: Option<u64>,
    ) -> Result<DeclaredLength, LengthMismatch> {
        let mut headers = HeaderMap::new();
        for line in lines {
            headers.append(CONTENT_LENGTH, HeaderValue::from_static(line));
        }
        let hint = hint.map_or_else(SizeHint::new, SizeHint::with_exact);
        DeclaredLength::new(&headers, &hint)
    }

    #[test]
    fn what_is_announced_must_be_there() {
        for (lines, hint) in [(&["4"][..], None), (&["4", "4"], None), (&["4, 4"], Some(4))] {
            let announced = announced(lines, hint).unwrap();
            assert_eq!(announced.check_so_far(4), Ok(()));
            assert_eq!(announced.check_so_far(5), Err(LengthMismatch));
            assert_eq!(announced.check_so_far(3), Ok(()));
            assert_eq!(announced.check_end(3), Err(LengthMismatch));
            assert_eq!(announced.check_end(4), Ok(()));
        }
        assert_eq!(announced(&[], None).unwrap().check_end(7), Ok(()));
        assert_eq!(announced(&["4"], Some(5)).unwrap().check_end(4), Err(LengthMismatch));
    }

    #[test]
    fn what_is_no_length_contradicts_every_body() {
        for lines in [&[""][..], &["+4"], &["-1"], &["4;"], &["4", "5"], &["99999999999999999999"]]
        {
            assert!(announced(lines, None).is_err(), "{lines:?}");
        }
    }
}
