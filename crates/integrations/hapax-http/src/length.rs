//! The check of a body's length against the declared one.
//!
//! Some transports do not distinguish a body that broke off from a complete one: HTTP/2 ends the
//! body of a stream that was reset without an error, and a handler may forward a partial body of
//! another service. A declared length distinguishes them. It is therefore never corrected.

use http::header::{CONTENT_LENGTH, HeaderMap};
use http::{Method, StatusCode};
use http_body::SizeHint;

/// The declared lengths of a message: `Content-Length`, and the size hint of its body.
#[derive(Clone, Copy, Default, Debug)]
pub(crate) struct DeclaredLength([Option<u64>; 2]);

/// The length of a message differs from the declared one, or two declared lengths differ.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
#[error("the length of the body differs from the declared one")]
pub(crate) struct LengthMismatch;

impl DeclaredLength {
    /// Creates the length of a message with these headers; the hint is taken before anything is
    /// read.
    ///
    /// # Errors
    /// [`LengthMismatch`] if `Content-Length` is invalid (RFC 9110, 8.6), or has several values.
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

    /// Checks the part of a body that was read so far.
    ///
    /// # Errors
    /// [`LengthMismatch`] if `read` bytes are more than declared.
    pub(crate) fn check_so_far(self, read: usize) -> Result<(), LengthMismatch> {
        let more = self.0.iter().flatten().any(|length| read as u64 > *length);
        if more { Err(LengthMismatch) } else { Ok(()) }
    }

    /// Checks a body that ended.
    ///
    /// # Errors
    /// [`LengthMismatch`] if `read` bytes are not the declared length.
    pub(crate) fn check_end(self, read: usize) -> Result<(), LengthMismatch> {
        let other = self.0.iter().flatten().any(|length| read as u64 != *length);
        if other { Err(LengthMismatch) } else { Ok(()) }
    }
}

/// Returns whether `Content-Length` in a response with this status is the length of its body. A
/// response to HEAD, and a 304, have the length of another response (RFC 9110, 8.6), and a 204 has
/// none.
pub(crate) fn describes_body(request: &Method, status: StatusCode) -> bool {
    *request != Method::HEAD
        && ![StatusCode::NO_CONTENT, StatusCode::NOT_MODIFIED].contains(&status)
}

/// Returns whether a message with this status and these trailers must have no `Content-Length`: a
/// 204 has none (RFC 9110, 8.6), and after a length HTTP/1.1 sends no trailers.
pub(crate) fn excludes_length(status: StatusCode, trailers: Option<&HeaderMap>) -> bool {
    status == StatusCode::NO_CONTENT || trailers.is_some_and(|trailers| !trailers.is_empty())
}

#[cfg(test)]
mod tests {
    use http::HeaderValue;

    use super::*;

    fn declared(
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
    fn a_body_has_the_declared_length() {
        for (lines, hint) in [(&["4"][..], None), (&["4", "4"], None), (&["4, 4"], Some(4))] {
            let declared = declared(lines, hint).unwrap();
            assert_eq!(declared.check_so_far(4), Ok(()));
            assert_eq!(declared.check_so_far(5), Err(LengthMismatch));
            assert_eq!(declared.check_so_far(3), Ok(()));
            assert_eq!(declared.check_end(3), Err(LengthMismatch));
            assert_eq!(declared.check_end(4), Ok(()));
        }
        assert_eq!(declared(&[], None).unwrap().check_end(7), Ok(()));
        assert_eq!(declared(&["4"], Some(5)).unwrap().check_end(4), Err(LengthMismatch));
    }

    #[test]
    fn an_invalid_length_is_an_error() {
        for lines in [&[""][..], &["+4"], &["-1"], &["4;"], &["4", "5"], &["99999999999999999999"]]
        {
            assert!(declared(lines, None).is_err(), "{lines:?}");
        }
    }
}
