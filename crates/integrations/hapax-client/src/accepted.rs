//! Accepted operations: a response 202 with `Location`, whose status resource is read until it shows the
//! end.
//!
//! 1. The operation has not ended with the 202. `Location` is read by GET, with the credentials of the
//!    try, if it is at the server of the request: nothing is sent to another one.
//! 2. A read is a try of the operation's step, so that it is bounded by the operation's time and by the
//!    budget of the server. The status resource is saved with the end of the try that
//!    was accepted.
//! 3. Without that, after a crash before, the request is sent again under its key, and the server replays
//!    the 202. So it is where a saga has ended: its status resource shows the response without headers, and
//!    the request gets it whole.

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use hapax_core::Timestamp;
use hapax_saga::log::Blob;
use hapax_saga::{StepContext, StepError, StuckReason};
use http::header::{LOCATION, RANGE};
use http::response::Parts;
use http::uri::PathAndQuery;
use http::{HeaderMap, Method, StatusCode, Uri};
use serde::Deserialize;
use serde::de::IgnoredAny;

use crate::flow::{ClientState, Host, keep_known, stuck};
use crate::known::Known;
use crate::request::{RecordedRequest, server_name};
use crate::server::{MAX_PROBLEM, Profile, retry_after};

/// The longest path and query of a status resource, in bytes.
const MAX_LOCATION: usize = 8 << 10;

/// Bounds of the pause between two reads of a server that does not say when.
const PAUSE: [Duration; 2] = [Duration::from_secs(1), Duration::from_secs(30)];

/// The shortest pause, whatever the server says.
const SHORTEST: Duration = Duration::from_millis(100);

/// Consequence of a read of the status resource.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum StatusRead {
    /// The operation has not ended.
    Unfinished,
    /// The same request gets the response, under its key.
    SendAgain,
    /// The response is one like any other.
    Final,
}

/// Returns how an operation goes on that was accepted before, or is by this response, within the time
/// `left`; `None` if the response is one like any other.
pub(crate) fn follow(
    at: &StepContext<Arc<ClientState>>,
    request: &RecordedRequest,
    host: &Host,
    known: Known,
    (head, body): (&Parts, &[u8]),
    left: Duration,
) -> Option<StepError<()>> {
    let after = pause(&head.headers, at.clock.now(), at.spent()).min(left);
    if known.status.is_none() {
        if head.status != StatusCode::ACCEPTED || !host.server.follows_accepted {
            return None;
        }
        let status = Some(status_resource(&request.uri()?, &head.headers)?);
        keep_known(at, &Known { status, ..known });
        // It has arrived, which no later try may forget.
        return Some(StepError::RetryAfter { after, source: "accepted".into() });
    }
    let source = match follow_status(host.server.profile, head.status, body) {
        StatusRead::Unfinished => "accepted, and not ended",
        StatusRead::SendAgain if at.age() >= Some(host.server.last_age(known.retention)) => {
            let text = "it has ended, as its status resource shows, and the server may have forgotten the key";
            return Some(stuck(at, StuckReason::KeyExpired, text, false));
        }
        StatusRead::SendAgain => {
            keep_known(at, &Known { status: None, ..known });
            "accepted, and ended"
        }
        StatusRead::Final => return None,
    };
    // Reading is no try of the operation, and needs no growing pauses.
    Some(StepError::Postponed { after, source: source.into() })
}

/// Returns path and query of the status resource in `Location`; `None` if it is at another server than
/// the request, or there is none.
fn status_resource(request: &Uri, headers: &HeaderMap) -> Option<String> {
    let mut lines = headers.get_all(LOCATION).iter();
    let (Some(line), None) = (lines.next(), lines.next()) else { return None };
    let text = line.to_str().ok()?.split('#').next().unwrap_or_default();
    let has_scheme = text.find([':', '/', '?']).is_some_and(|at| text[at..].starts_with(':'));
    let target = if has_scheme || text.starts_with("//") {
        let scheme = if has_scheme { "" } else { request.scheme_str()? };
        let colon = if has_scheme { "" } else { ":" };
        let url: Uri = format!("{scheme}{colon}{text}").parse().ok()?;
        (server_name(&url)? == server_name(request)?).then_some(())?;
        url.path_and_query()?.as_str().to_owned()
    } else if text.starts_with('/') {
        text.to_owned()
    } else if text.starts_with('?') {
        format!("{}{text}", request.path())
    } else {
        relative(request.path(), text)?
    };
    let is_valid = target.len() <= MAX_LOCATION && PathAndQuery::try_from(&*target).is_ok();
    is_valid.then_some(target)
}

/// Returns a reference relative to a path (RFC 3986, 5.2.4); `None` if it is empty.
fn relative(base: &str, text: &str) -> Option<String> {
    let (path, query) = text.find('?').map_or((text, ""), |at| text.split_at(at));
    (!path.is_empty()).then_some(())?;
    let folder = base.rsplit_once('/').map_or("", |(folder, _)| folder);
    let mut segments = Vec::new();
    for segment in format!("{folder}/{path}").split('/').skip(1) {
        match segment {
            "." => {}
            ".." => drop(segments.pop()),
            segment => segments.push(segment.to_owned()),
        }
    }
    Some(format!("/{}{query}", segments.join("/")))
}

/// Returns the request that reads the status resource. It has the headers of the operation's request, by
/// which a server may know whose it is, but those about its body and its conditions.
pub(crate) fn status_request(request: &RecordedRequest, target: &str) -> RecordedRequest {
    let is_of_body = |name: &str| name.starts_with("content-") || name.starts_with("if-");
    let headers = request.headers.iter();
    let headers = headers.filter(|(name, _)| !is_of_body(name) && **name != RANGE);
    RecordedRequest {
        name: request.name.clone(),
        method: Method::GET.as_str().to_owned(),
        url: target.to_owned(),
        headers: headers.cloned().collect(),
        body: Blob(Bytes::new()),
    }
}

/// Returns the pause before the next read, `spent` after the first try.
fn pause(headers: &HeaderMap, now: Timestamp, spent: Duration) -> Duration {
    let stated = retry_after(headers, now);
    stated.unwrap_or(spent.clamp(PAUSE[0], PAUSE[1])).max(SHORTEST)
}

/// Returns what follows from a read of the status resource.
fn follow_status(profile: Profile, status: StatusCode, body: &[u8]) -> StatusRead {
    if status == StatusCode::ACCEPTED {
        return StatusRead::Unfinished;
    }
    if profile != Profile::Hapax || body.len() > MAX_PROBLEM {
        return StatusRead::Final;
    }
    match status {
        StatusCode::OK => of_saga(body).unwrap_or(StatusRead::Final),
        StatusCode::NOT_FOUND if is_gone(body) => StatusRead::SendAgain,
        _ => StatusRead::Final,
    }
}

/// Returns what follows from the status resource of a saga; `None` for another document.
fn of_saga(body: &[u8]) -> Option<StatusRead> {
    #[derive(Deserialize)]
    struct SagaStatus<'a> {
        state: &'a str,
        answer: Option<IgnoredAny>,
    }
    let SagaStatus { state, answer } = serde_json::from_slice(body).ok()?;
    match (state, answer) {
        ("running" | "parked" | "stuck", None) => Some(StatusRead::Unfinished),
        ("done" | "undone" | "cancelled", Some(_)) => Some(StatusRead::SendAgain),
        _ => None,
    }
}

/// Returns whether the routes of a saga say that the caller has none under this key.
fn is_gone(body: &[u8]) -> bool {
    #[derive(Deserialize)]
    struct Gone<'a> {
        r#type: &'a str,
    }
    serde_json::from_slice(body)
        .is_ok_and(|Gone { r#type }| r#type == "urn:hapax:problem:not-found")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn located(location: &str) -> Option<String> {
        let request = "https://api.example.com/v1/payments?a=b".parse().unwrap();
        let headers = HeaderMap::from_iter([(LOCATION, location.parse().unwrap())]);
        status_resource(&request, &headers)
    }

    #[test]
    fn a_status_resource_is_at_the_server_of_the_request() {
        for (location, target) in [
            ("/status/1", "/status/1"),
            ("/status/1?wait=5#end", "/status/1?wait=5"),
            ("https://api.example.com/status/1", "/status/1"),
            ("HTTPS://API.example.com:443/status/1", "/status/1"),
            ("//api.example.com/status/1", "/status/1"),
            ("https://api.example.com", "/"),
            ("payments/1", "/v1/payments/1"),
            ("./1?a:b", "/v1/1?a:b"),
            ("../status/1", "/status/1"),
            ("../../../1", "/1"),
            ("?id=1", "/v1/payments?id=1"),
        ] {
            assert_eq!(located(location).as_deref(), Some(target), "{location}");
        }
    }

    #[test]
    fn a_status_resource_of_another_server_is_none() {
        for location in [
            "https://evil.example.com/status/1",
            "https://api.example.com.evil.example/1",
            "https://api.example.com@evil.example/1",
            "https://user@api.example.com/1",
            "http://api.example.com/status/1",
            "https://api.example.com:8443/status/1",
            "//evil.example/status/1",
            "mailto:a@api.example.com",
            "",
            "#end",
            "/a b",
        ] {
            assert_eq!(located(location), None, "{location}");
        }
        assert_eq!(located(&format!("/{}", "a".repeat(MAX_LOCATION))), None);
        let request = "https://api.example.com/".parse().unwrap();
        assert_eq!(status_resource(&request, &HeaderMap::new()), None);
        let two = [(LOCATION, "/a".parse().unwrap()), (LOCATION, "/b".parse().unwrap())];
        let mut headers = HeaderMap::new();
        two.into_iter().for_each(|(name, value)| {
            headers.append(name, value);
        });
        assert_eq!(status_resource(&request, &headers), None, "two of them");
    }

    #[test]
    fn a_status_resource_of_a_saga_shows_its_end() {
        let of = |profile, status, body: &str| {
            follow_status(profile, StatusCode::from_u16(status).unwrap(), body.as_bytes())
        };
        use StatusRead::{Final, SendAgain, Unfinished};
        let gone = r#"{"type":"urn:hapax:problem:not-found","status":404}"#;
        for (status, body, expected) in [
            (202, "", Unfinished),
            (200, r#"{"state":"running"}"#, Unfinished),
            (200, r#"{"state":"parked","step":"sleep/a","parked_for":7}"#, Unfinished),
            (200, r#"{"state":"stuck","reason":"exhausted"}"#, Unfinished),
            (200, r#"{"state":"done","answer":{"status":201}}"#, SendAgain),
            (200, r#"{"state":"undone","answer":{"status":409,"body":"no"}}"#, SendAgain),
            (200, r#"{"state":"cancelled","answer":{"status":410}}"#, SendAgain),
            (404, gone, SendAgain),
            (404, "{}", Final),
            (200, r#"{"state":"done"}"#, Final),
            (200, r#"{"state":"paid","answer":1}"#, Final),
            (201, r#"{"state":"running"}"#, Final),
            (303, "", Final),
            (200, "paid", Final),
        ] {
            assert_eq!(of(Profile::Hapax, status, body), expected, "{status} {body}");
            let plain = if status == 202 { Unfinished } else { Final };
            assert_eq!(of(Profile::Plain, status, body), plain, "{status} {body}");
        }
    }

    #[test]
    fn reads_come_as_the_server_says_or_less_often_with_time() {
        let at = |list: &[(&'static str, &str)], spent| {
            let list = list.iter().map(|(name, it)| (name.parse().unwrap(), it.parse().unwrap()));
            let now = Timestamp::from_micros(0);
            pause(&HeaderMap::from_iter(list), now, Duration::from_millis(spent)).as_millis()
        };
        assert_eq!([0, 5_000, 90_000].map(|spent| at(&[], spent)), [1_000, 5_000, 30_000]);
        assert_eq!(at(&[("retry-after", "7")], 0), 7_000);
        assert_eq!(at(&[("retry-after", "0")], 0), 100);
    }
}
