//! The consequence of a response: a function of the profile and the response alone.

use std::time::{Duration, UNIX_EPOCH};

use hapax_core::Timestamp;
use hapax_http::classify::{HeaderOverride, OutcomeClass};
use hapax_http::header::IDEMPOTENCY_REPLAYED;
use http::header::{CONTENT_TYPE, RETRY_AFTER};
use http::{HeaderMap, HeaderValue, StatusCode};
use serde::Deserialize;

/// Largest body that is read as a problem or an error.
pub(crate) const MAX_PROBLEM: usize = 64 << 10;

/// Profile of a server.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Profile {
    Hapax,
    Stripe,
    Plain,
    WithoutKeys,
}

/// Consequence of a response.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Follow {
    /// The response is that of the operation.
    Final,
    /// The response is that of this try, which had no effect, and of which the server keeps nothing.
    NothingHappened,
    /// The same request is sent again, not before this time.
    Again(Duration),
    /// The credentials are rejected; this try had no effect.
    Unauthorized,
    /// The bearer token does not verify or has expired; this try had no effect.
    InvalidToken,
    /// The server does not know whether the operation happened.
    Unknown,
    /// The server has another request under the key.
    Reused,
}

/// Returns what follows from a complete response, which was received at `now`.
pub(crate) fn follow(
    profile: Profile,
    status: StatusCode,
    headers: &HeaderMap,
    body: &[u8],
    now: Timestamp,
) -> Follow {
    if profile == Profile::WithoutKeys {
        return Follow::Final;
    }
    let pause = retry_after(headers, now);
    let again = Follow::Again(pause.unwrap_or_default());
    if is_replayed(profile, headers) {
        return Follow::Final;
    }
    match profile {
        Profile::Hapax => {
            if let Some(follow) = of_problem(headers, body, pause, again) {
                return follow;
            }
            if [403, 413, 421].contains(&status.as_u16()) {
                return Follow::NothingHappened;
            }
        }
        Profile::Stripe => {
            match headers.get("stripe-should-retry").map(HeaderValue::as_bytes) {
                Some(b"true") => return again,
                // A 401 is not final: other credentials may be accepted.
                Some(b"false") if status != StatusCode::UNAUTHORIZED => {
                    return stripe_error(status, body).unwrap_or(Follow::Final);
                }
                _ => {}
            }
            if let Some(follow) = stripe_error(status, body) {
                return follow;
            }
            // The key is in use.
            if status == StatusCode::CONFLICT {
                return again;
            }
        }
        Profile::Plain | Profile::WithoutKeys => {}
    }
    match status.as_u16() {
        401 => Follow::Unauthorized,
        408 | 425 | 429 | 500 | 502 | 503 | 504 => again,
        409 if pause.is_some() => again,
        400..=599 if profile != Profile::Stripe && is_unexecuted(status, headers) => {
            Follow::NothingHappened
        }
        _ => Follow::Final,
    }
}

/// Returns whether a response says that this request executed nothing, and that the next one under the key executes.
/// A conflict, and a key of another request, are about an earlier request, which may have executed; and a Hapax server
/// that names a replay reports what its service answered.
fn is_unexecuted(status: StatusCode, headers: &HeaderMap) -> bool {
    ![StatusCode::CONFLICT, StatusCode::UNPROCESSABLE_ENTITY].contains(&status)
        && !headers.contains_key(IDEMPOTENCY_REPLAYED)
        && HeaderOverride::from_headers(headers).class == Some(OutcomeClass::Retryable)
}

/// Returns whether a response is a replay.
pub(crate) fn is_replayed(profile: Profile, headers: &HeaderMap) -> bool {
    let is_true = |name: &str| headers.get(name).is_some_and(|value| value == "true");
    match profile {
        Profile::Hapax => is_true(IDEMPOTENCY_REPLAYED.as_str()),
        Profile::Stripe => is_true("idempotent-replayed"),
        Profile::Plain | Profile::WithoutKeys => false,
    }
}

/// A problem (RFC 9457) with the members that Hapax adds.
#[derive(Deserialize)]
struct Problem {
    #[serde(rename = "type")]
    kind: String,
    code: String,
}

/// Returns what follows from a rejection of Hapax; `None` for another response, or a rejection of which
/// the status is enough.
fn of_problem(
    headers: &HeaderMap,
    body: &[u8],
    pause: Option<Duration>,
    again: Follow,
) -> Option<Follow> {
    // A response of the service, whatever it looks like, has this header; a rejection has not.
    let kind = headers.get(CONTENT_TYPE).and_then(|it| it.to_str().ok()).unwrap_or_default();
    let is_problem = kind.trim_start().to_ascii_lowercase().starts_with("application/problem+json");
    if headers.contains_key(IDEMPOTENCY_REPLAYED) || !is_problem || body.len() > MAX_PROBLEM {
        return None;
    }
    let Problem { kind, code } = serde_json::from_slice(body).ok()?;
    let is_ours = kind.strip_prefix("urn:hapax:problem:") == Some(&code)
        || kind.rsplit_once('#').is_some_and(|(_, fragment)| fragment == code);
    match code.as_str() {
        _ if !is_ours => None,
        "in-flight" | "superseded" | "outcome-pending" => Some(again),
        "outcome-unknown" if pause.is_none() => Some(Follow::Unknown),
        "outcome-unknown" => Some(again),
        "response-not-retained" => Some(Follow::Final),
        "key-reused" => Some(Follow::Reused),
        "invalid-token" => Some(Follow::InvalidToken),
        // Rejected before anything was executed, and not stored.
        "invalid-key" | "missing-key" | "missing-scope" | "unstable-scope"
        | "malformed-request" => Some(Follow::NothingHappened),
        _ => None,
    }
}

/// Returns what follows from the type and code of an error of Stripe.
fn stripe_error(status: StatusCode, body: &[u8]) -> Option<Follow> {
    #[derive(Deserialize)]
    struct Body {
        error: Error,
    }
    #[derive(Deserialize)]
    struct Error {
        #[serde(rename = "type", default)]
        kind: String,
        #[serde(default)]
        code: String,
    }
    if body.len() > MAX_PROBLEM || !status.is_client_error() {
        return None;
    }
    let Body { error } = serde_json::from_slice(body).ok()?;
    let in_use = status == StatusCode::CONFLICT || error.code == "idempotency_key_in_use";
    (error.kind == "idempotency_error" && !in_use).then_some(Follow::Reused)
}

/// Returns the time in `Retry-After`: seconds, or a date; zero for one in the past.
pub(crate) fn retry_after(headers: &HeaderMap, now: Timestamp) -> Option<Duration> {
    let text = headers.get(RETRY_AFTER)?.to_str().ok()?.trim();
    if !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit()) {
        // More digits than a number has: the deadline of the operation limits the time in any case.
        return Some(Duration::from_secs(text.parse().unwrap_or(u64::MAX)));
    }
    let date = httpdate::parse_http_date(text).ok()?.duration_since(UNIX_EPOCH).ok()?;
    Some(Timestamp::default().after(date).since(now))
}

#[cfg(test)]
mod tests {
    use super::*;

    const NOW: u64 = 784_111_777_000_000;

    fn headers(list: &[(&'static str, &str)]) -> HeaderMap {
        list.iter().map(|(name, value)| (name.parse().unwrap(), value.parse().unwrap())).collect()
    }

    fn of(profile: Profile, status: u16, list: &[(&'static str, &str)], body: &str) -> Follow {
        let status = StatusCode::from_u16(status).unwrap();
        follow(profile, status, &headers(list), body.as_bytes(), Timestamp::from_micros(NOW))
    }

    fn problem(code: &str) -> String {
        format!(r#"{{"type":"urn:hapax:problem:{code}","title":"t","status":409,"code":"{code}"}}"#)
    }

    const AGAIN: Follow = Follow::Again(Duration::ZERO);

    #[test]
    fn every_status_has_one_consequence_in_each_profile() {
        use Profile::{Hapax, Plain, Stripe, WithoutKeys};
        for status in 200..1000 {
            let retried = [408, 425, 429, 500, 502, 503, 504].contains(&status);
            let plain = match status {
                401 => Follow::Unauthorized,
                _ if retried => AGAIN,
                _ => Follow::Final,
            };
            let hapax =
                if [403, 413, 421].contains(&status) { Follow::NothingHappened } else { plain };
            let stripe = if status == 409 { AGAIN } else { plain };
            assert_eq!(of(Plain, status, &[], ""), plain, "{status}");
            assert_eq!(of(Hapax, status, &[], ""), hapax, "{status}");
            assert_eq!(of(Stripe, status, &[], ""), stripe, "{status}");
            assert_eq!(of(WithoutKeys, status, &[], ""), Follow::Final, "{status}");
            // A replay is the response, whatever it is.
            let replayed = [("idempotency-replayed", "true")];
            assert_eq!(of(Hapax, status, &replayed, ""), Follow::Final, "{status}");
            let replayed = [("idempotent-replayed", "true"), ("stripe-should-retry", "true")];
            assert_eq!(of(Stripe, status, &replayed, ""), Follow::Final, "{status}");
            // The other profile's header says nothing.
            assert_eq!(of(Plain, status, &[("idempotency-replayed", "true")], ""), plain);
            // Stripe's server decides.
            let retry = [("stripe-should-retry", "true")];
            assert_eq!(of(Stripe, status, &retry, ""), AGAIN, "{status}");
            let retry = [("stripe-should-retry", "false")];
            let expected = if status == 401 { Follow::Unauthorized } else { Follow::Final };
            assert_eq!(of(Stripe, status, &retry, ""), expected, "{status}");
        }
    }

    #[test]
    fn the_codes_of_hapax_decide_in_its_profile_only() {
        let json = ("content-type", "application/problem+json; charset=utf-8");
        let wait = ("retry-after", "7");
        let seven = Follow::Again(Duration::from_secs(7));
        for (code, status, bare, later) in [
            ("in-flight", 409, AGAIN, seven),
            ("superseded", 409, AGAIN, seven),
            ("outcome-pending", 503, AGAIN, seven),
            ("outcome-unknown", 409, Follow::Unknown, seven),
            ("response-not-retained", 409, Follow::Final, Follow::Final),
            ("key-reused", 422, Follow::Reused, Follow::Reused),
            ("invalid-token", 401, Follow::InvalidToken, Follow::InvalidToken),
            ("store-unavailable", 503, AGAIN, seven),
            ("draining", 503, AGAIN, seven),
            ("too-many-in-flight", 429, AGAIN, seven),
            ("body-too-large", 413, Follow::NothingHappened, Follow::NothingHappened),
            ("upstream-broken", 502, AGAIN, seven),
            ("handler-failed", 500, AGAIN, seven),
            ("invalid-key", 400, Follow::NothingHappened, Follow::NothingHappened),
            ("missing-key", 400, Follow::NothingHappened, Follow::NothingHappened),
            ("missing-scope", 400, Follow::NothingHappened, Follow::NothingHappened),
            ("unstable-scope", 400, Follow::NothingHappened, Follow::NothingHappened),
            ("malformed-request", 400, Follow::NothingHappened, Follow::NothingHappened),
            // Of the routes of a saga, after an earlier request too, which has removed it.
            ("not-found", 404, Follow::Final, Follow::Final),
        ] {
            let body = problem(code);
            assert_eq!(of(Profile::Hapax, status, &[json], &body), bare, "{code}");
            assert_eq!(of(Profile::Hapax, status, &[json, wait], &body), later, "{code}");
            let docs = body.replace("urn:hapax:problem:", "https://docs.example/problems#");
            assert_eq!(of(Profile::Hapax, status, &[json], &docs), bare, "{code}");
            // The same bytes from the service, or as another type, are its response.
            if [400, 404, 409, 422].contains(&status) {
                let service = [json, ("idempotency-replayed", "false")];
                assert_eq!(of(Profile::Hapax, status, &service, &body), Follow::Final, "{code}");
                let text = ("content-type", "application/json");
                assert_eq!(of(Profile::Hapax, status, &[text], &body), Follow::Final, "{code}");
                let other = body.replace("urn:hapax", "urn:other");
                assert_eq!(of(Profile::Hapax, status, &[json], &other), Follow::Final, "{code}");
                assert_eq!(of(Profile::Plain, status, &[json], &body), Follow::Final, "{code}");
            }
        }
    }

    #[test]
    fn a_failure_that_says_that_nothing_was_executed_leaves_the_name_free() {
        use Profile::{Hapax, Plain, Stripe, WithoutKeys};
        let said = |word| [("idempotency-outcome", word)];
        for status in [400, 402, 404, 405, 410, 415, 501] {
            for profile in [Hapax, Plain] {
                assert_eq!(of(profile, status, &said("retryable"), ""), Follow::NothingHappened);
                for word in ["final", "unknown", "did-not-happen", ""] {
                    assert_eq!(of(profile, status, &said(word), ""), Follow::Final, "{word}");
                }
                let twice = [said("retryable"), said("retryable")].concat();
                assert_eq!(of(profile, status, &twice, ""), Follow::Final, "two lines");
            }
            assert_eq!(of(WithoutKeys, status, &said("retryable"), ""), Follow::Final);
        }
        assert_eq!(of(Stripe, 404, &said("retryable"), ""), Follow::Final);
        for profile in [Hapax, Plain] {
            for replayed in ["true", "false"] {
                let answer = [said("retryable"), [("idempotency-replayed", replayed)]].concat();
                assert_eq!(of(profile, 404, &answer, ""), Follow::Final, "{replayed}");
            }
            for status in [409, 422] {
                assert_eq!(of(profile, status, &said("retryable"), ""), Follow::Final, "{status}");
            }
        }
        // Those that are tried again anyway, other credentials, and what happened.
        assert_eq!(of(Hapax, 503, &said("retryable"), ""), AGAIN);
        assert_eq!(of(Hapax, 401, &said("retryable"), ""), Follow::Unauthorized);
        assert_eq!(of(Hapax, 201, &said("retryable"), ""), Follow::Final);
    }

    #[test]
    fn a_conflict_without_a_code_is_a_response_unless_it_says_when_to_retry() {
        for profile in [Profile::Hapax, Profile::Plain] {
            assert_eq!(of(profile, 409, &[], ""), Follow::Final);
            let later = of(profile, 409, &[("retry-after", "3")], "");
            assert_eq!(later, Follow::Again(Duration::from_secs(3)));
        }
        // Of a service behind Hapax, which may have released the key. If it has not, the next try is
        // answered with the replay.
        let service = |replayed| [("idempotency-replayed", replayed), ("retry-after", "3")];
        let later = of(Profile::Hapax, 409, &service("false"), "");
        assert_eq!(later, Follow::Again(Duration::from_secs(3)));
        assert_eq!(of(Profile::Hapax, 409, &service("true"), ""), Follow::Final);
    }

    #[test]
    fn an_error_of_stripe_about_the_key_is_an_alarm_unless_the_key_is_in_use() {
        let reused = r#"{"error":{"type":"idempotency_error","message":"other parameters"}}"#;
        let in_use = r#"{"error":{"type":"idempotency_error","code":"idempotency_key_in_use"}}"#;
        let locked = r#"{"error":{"type":"invalid_request_error","code":"lock_timeout"}}"#;
        let stop = [("stripe-should-retry", "false")];
        assert_eq!(of(Profile::Stripe, 400, &[], reused), Follow::Reused);
        assert_eq!(of(Profile::Stripe, 400, &stop, reused), Follow::Reused);
        assert_eq!(of(Profile::Stripe, 409, &[], in_use), AGAIN);
        assert_eq!(of(Profile::Stripe, 429, &[], locked), AGAIN);
        assert_eq!(of(Profile::Stripe, 402, &[], locked), Follow::Final);
    }

    #[test]
    fn retry_after_has_seconds_or_a_date() {
        let of = |text: &str| {
            retry_after(&headers(&[("retry-after", text)]), Timestamp::from_micros(NOW))
        };
        let secs = |secs| Some(Duration::from_secs(secs));
        assert_eq!(of("120"), secs(120));
        assert_eq!(of("99999999999999999999999"), secs(u64::MAX));
        assert_eq!(of("Sun, 06 Nov 1994 08:51:37 GMT"), secs(120));
        // In the past.
        assert_eq!(of("Sun, 06 Nov 1994 08:00:00 GMT"), secs(0));
        for text in ["", "-1", "1.5", "soon"] {
            assert_eq!(of(text), None, "{text}");
        }
    }
}
