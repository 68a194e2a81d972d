//! Responses of an endpoint to a message.

use std::fmt;
use std::time::{Duration, UNIX_EPOCH};

use bytes::Bytes;
use hapax_core::Timestamp;
use http::header::RETRY_AFTER;
use http::{HeaderMap, Response, StatusCode};

/// Characters of a body that an error repeats.
const EXCERPT: usize = 200;

/// Statuses of responses by which an endpoint permanently rejects a message.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
#[non_exhaustive]
pub enum RejectedStatuses {
    /// 413, 422 and 431, which are about this message. Others are about the endpoint: with a wrong
    /// URL, secret or certificate, each message of an outbox would become a dead letter. 400 is the
    /// status of common receivers for a wrong signature, and of Hapax for a request without a scope;
    /// 415 that for a content type which all messages share.
    #[default]
    OfMessage,
    /// Each 4xx except 408, 409, 425 and 429, which ask for another attempt.
    ClientErrors,
}

/// Error: the endpoint answered with another status than 2xx. It is the cause of the
/// [`PublishError`](hapax_messages::PublishError).
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct UnexpectedResponse {
    status: StatusCode,
    text: String,
}

impl UnexpectedResponse {
    pub(super) fn new(response: &Response<Bytes>) -> Self {
        Self { status: response.status(), text: describe(response) }
    }

    /// Returns the status.
    #[must_use]
    pub const fn status(&self) -> StatusCode {
        self.status
    }
}

/// The status, and the beginning of the body in one line.
impl fmt::Display for UnexpectedResponse {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.text)
    }
}

impl std::error::Error for UnexpectedResponse {}

/// Class of a response, by its status.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum ResponseClass {
    Accepted,
    /// Published again later.
    Retryable,
    /// Permanently rejected.
    Rejected,
}

impl ResponseClass {
    pub(super) fn of(status: StatusCode, rejected: RejectedStatuses) -> Self {
        match (status.as_u16(), rejected) {
            (200..=299, _) => Self::Accepted,
            (413 | 422 | 431, _) => Self::Rejected,
            (408 | 409 | 425 | 429, _) => Self::Retryable,
            (400..=499, RejectedStatuses::ClientErrors) => Self::Rejected,
            _ => Self::Retryable,
        }
    }
}

/// Returns the time until the next attempt in `Retry-After`: seconds, or a date.
pub(super) fn retry_after(headers: &HeaderMap, now: Timestamp) -> Option<Duration> {
    let text = headers.get(RETRY_AFTER)?.to_str().ok()?.trim();
    if !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit()) {
        // More digits than a number has: the relay limits the time in any case.
        return Some(Duration::from_secs(text.parse().unwrap_or(u64::MAX)));
    }
    let date = httpdate::parse_http_date(text).ok()?.duration_since(UNIX_EPOCH).ok()?;
    Some(Timestamp::default().after(date).since(now))
}

/// Describes a response to operators: its status, and the beginning of its body in one line.
fn describe(response: &Response<Bytes>) -> String {
    let status = response.status();
    let text = String::from_utf8_lossy(response.body());
    let words: Vec<_> = text.split(|it: char| it.is_whitespace() || it.is_control()).collect();
    let words: Vec<_> = words.into_iter().filter(|word| !word.is_empty()).collect();
    let text: String = words.join(" ").chars().take(EXCERPT).collect();
    match text.is_empty() {
        true => format!("expected a 2xx response of the endpoint, found {status}"),
        false => format!("expected a 2xx response of the endpoint, found {status}: {text}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_status_has_one_class() {
        for rejected in [RejectedStatuses::OfMessage, RejectedStatuses::ClientErrors] {
            for status in 200..1000 {
                let expected = match status {
                    200..300 => ResponseClass::Accepted,
                    413 | 422 | 431 => ResponseClass::Rejected,
                    408 | 409 | 425 | 429 => ResponseClass::Retryable,
                    400..500 if rejected == RejectedStatuses::ClientErrors => {
                        ResponseClass::Rejected
                    }
                    _ => ResponseClass::Retryable,
                };
                let found = ResponseClass::of(StatusCode::from_u16(status).unwrap(), rejected);
                assert_eq!(found, expected, "{status} {rejected:?}");
            }
        }
    }

    #[test]
    fn retry_after_has_seconds_or_a_date() {
        let now = Timestamp::from_micros(784_111_777_000_000);
        let of = |text: &'static str| {
            let headers = HeaderMap::from_iter([(RETRY_AFTER, text.parse().unwrap())]);
            retry_after(&headers, now)
        };
        let secs = |secs| Some(Duration::from_secs(secs));
        assert_eq!(of("120"), secs(120));
        assert_eq!(of(" 0 "), secs(0));
        assert_eq!(of("99999999999999999999999"), secs(u64::MAX));
        assert_eq!(of("Sun, 06 Nov 1994 08:51:37 GMT"), secs(120));
        assert_eq!(of("Sunday, 06-Nov-94 08:51:37 GMT"), secs(120));
        // In the past.
        assert_eq!(of("Sun, 06 Nov 1994 08:00:00 GMT"), secs(0));
        for text in ["", "-1", "1.5", "soon", "Sun, 99 Nov 1994 08:00:00 GMT"] {
            assert_eq!(of(text), None, "{text}");
        }
    }

    #[test]
    fn a_description_is_one_short_line() {
        let response = |body: &'static [u8]| {
            let mut response = Response::new(Bytes::from_static(body));
            *response.status_mut() = StatusCode::UNPROCESSABLE_ENTITY;
            describe(&response)
        };
        assert_eq!(
            response(b""),
            "expected a 2xx response of the endpoint, found 422 Unprocessable Entity"
        );
        let text = "expected a 2xx response of the endpoint, found 422 Unprocessable Entity: no such order";
        assert_eq!(
            response(b"no\x1b such\r\n\torder\0\xff").trim_end_matches('\u{fffd}').trim(),
            text
        );
        assert!(response(&[b'x'; 10_000]).len() < 300);
    }
}
