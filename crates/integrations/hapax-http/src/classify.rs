//! Classes of responses: the meaning of a response for its key.
//!
//! A response is *final* (stored, and replayed), *retryable* (the key is released) or *unknown*
//! (the operation may have happened). The first of these that applies decides:
//!
//! 1. The handler, by [`ExecutionHandle::outcome`](crate::server::ExecutionHandle::outcome).
//! 2. [`ClassifiedResponse`] in the response's extensions, for a response that no handler returned.
//! 3. The response's headers `Idempotency-Outcome` and `Idempotency-Retention`.
//! 4. The route's function.
//! 5. For gRPC (`application/grpc`), the status in `grpc-status`: [`classify_grpc`]. gRPC-Web has
//!    its status in the body, which is not parsed: the HTTP status decides, by the rules below.
//! 6. The route's [lists](crate::statuses::StatusLists) of HTTP statuses.
//! 7. The route's [`Profile`], by the HTTP status. Lists and profiles do not apply to gRPC
//!    statuses.
//!
//! A 307 or 308 with `Location` ([`is_redirect`]) about which none of 1 to 6 decides is retryable under every
//! profile, and the record keeps the redirect: a duplicate of the request gets it again, status and `Location`,
//! whatever happened since, and the request that follows it executes at the target under the same key. An
//! effect before such a response is not protected, unless the handler calls
//! [`ExecutionHandle::commit`](crate::server::ExecutionHandle::commit): then the profile decides. A key has at
//! most eight redirects, of 16 KiB together; a redirect to the same target, as on another host, is not kept,
//! since a duplicate of the request and the one that follows are the same.

use std::fmt;
use std::str::FromStr;
use std::time::Duration;

use hapax_core::OnUnknown;
pub use hapax_core::OutcomeClass;
use http::StatusCode;
use http::header::{CONTENT_TYPE, HeaderMap, HeaderName, HeaderValue, LOCATION};

use crate::header::{IDEMPOTENCY_OUTCOME, IDEMPOTENCY_RETENTION};

/// A response extension: the class of a response that no handler returned. A proxy adds it to its
/// own responses, such as *unknown* when the upstream broke off.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct ClassifiedResponse(pub OutcomeClass);

/// A table of classes by HTTP status, for responses that are no [redirects](is_redirect).
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
pub enum Profile {
    /// Final: 2xx, 3xx, 4xx. Retryable: 401, 403, 408, 413, 421, 425, 429, which mean that nothing
    /// was done, and under [`OnUnknown::Reexecute`] 503. Unknown: other 5xx, and under
    /// [`OnUnknown::Block`] and [`OnUnknown::Reconcile`] 503: services return it after effects too.
    #[default]
    Standard,
    /// Every status is final, 500 included; 409 and 429 are retryable.
    StripeV1,
    /// 2xx is final, anything else retryable: errors are never stored.
    SuccessOnly,
}

impl Profile {
    /// Returns the class of a handler's response with this status, on a route with this policy.
    #[must_use]
    pub fn classify(self, status: StatusCode, on_unknown: OnUnknown) -> OutcomeClass {
        match (self, status.as_u16()) {
            (Self::Standard, 401 | 403 | 408 | 413 | 421 | 425 | 429)
            | (Self::StripeV1, 409 | 429) => OutcomeClass::Retryable,
            (Self::Standard, 503) => unavailable(on_unknown),
            (Self::Standard, 500..) => OutcomeClass::Unknown,
            (Self::SuccessOnly, _) if !status.is_success() => OutcomeClass::Retryable,
            _ => OutcomeClass::Final,
        }
    }

    const fn as_str(self) -> &'static str {
        match self {
            Self::Standard => "standard",
            Self::StripeV1 => "stripe-v1",
            Self::SuccessOnly => "success-only",
        }
    }
}

/// Returns the class of *unavailable*, 503 or 14. An overloaded service returns it before it does
/// anything, another one after an effect whose confirmation it lost. It is retryable if a second
/// execution is harmless.
const fn unavailable(on_unknown: OnUnknown) -> OutcomeClass {
    match on_unknown {
        OnUnknown::Reexecute => OutcomeClass::Retryable,
        OnUnknown::Reconcile | OnUnknown::Block => OutcomeClass::Unknown,
    }
}

impl fmt::Display for Profile {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

impl FromStr for Profile {
    type Err = UnknownProfile;

    fn from_str(name: &str) -> Result<Self, UnknownProfile> {
        [Self::Standard, Self::StripeV1, Self::SuccessOnly]
            .into_iter()
            .find(|profile| profile.as_str() == name)
            .ok_or(UnknownProfile)
    }
}

/// There is no profile of this name.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
#[error("expected the profile `standard`, `stripe-v1` or `success-only`")]
pub struct UnknownProfile;

/// Returns whether a response sends its request elsewhere, with its method and body: a 307 or 308 with
/// `Location`. Without one it says nothing about where, and is classified like any other 3xx.
#[must_use]
pub fn is_redirect(status: StatusCode, headers: &HeaderMap) -> bool {
    matches!(status, StatusCode::TEMPORARY_REDIRECT | StatusCode::PERMANENT_REDIRECT)
        && headers.contains_key(LOCATION)
}

/// The overrides in the headers of a response.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct HeaderOverride {
    /// Its class.
    pub class: Option<OutcomeClass>,
    /// Its retention, if it is final.
    pub retention: Option<Duration>,
    /// Number of the headers that were ignored because their values are invalid.
    pub invalid: u32,
}

impl HeaderOverride {
    /// Reads `Idempotency-Outcome` and `Idempotency-Retention`.
    ///
    /// A retention is 1 to 9,999,999,999 seconds. Zero would expire the record at once.
    #[must_use]
    pub fn from_headers(headers: &HeaderMap) -> Self {
        let mut found = Self::default();
        found.class = found.read(headers, &IDEMPOTENCY_OUTCOME, OutcomeClass::named);
        found.retention = found.read(headers, &IDEMPOTENCY_RETENTION, |digits| {
            let plain = digits.len() <= 10 && digits.bytes().all(|byte| byte.is_ascii_digit());
            let seconds = digits.parse().ok().filter(|seconds| plain && *seconds > 0)?;
            Some(Duration::from_secs(seconds))
        });
        found
    }

    fn read<T>(
        &mut self,
        headers: &HeaderMap,
        name: &HeaderName,
        parse: impl Fn(&str) -> Option<T>,
    ) -> Option<T> {
        let mut lines = headers.get_all(name).iter();
        let line = lines.next()?;
        let one = lines.next().is_none().then_some(line);
        let value = one.and_then(|line| parse(line.to_str().ok()?));
        self.invalid += u32::from(value.is_none());
        value
    }
}

/// Returns whether messages with these headers are gRPC.
#[must_use]
pub fn is_grpc(headers: &HeaderMap) -> bool {
    after_kind(headers, b"application/grpc")
        .is_some_and(|rest| matches!(rest, [] | [b'+' | b';', ..]))
}

/// Returns whether these headers are of gRPC-Web, which has its status in the body.
pub(crate) fn is_grpc_web(headers: &HeaderMap) -> bool {
    after_kind(headers, b"application/grpc-web").is_some()
}

/// Returns the rest of a content type after this kind, in either case.
fn after_kind<'a>(headers: &'a HeaderMap, kind: &[u8]) -> Option<&'a [u8]> {
    let value = headers.get(CONTENT_TYPE)?.as_bytes();
    let (start, rest) = value.split_at_checked(kind.len())?;
    start.eq_ignore_ascii_case(kind).then_some(rest)
}

/// Returns whether a gRPC response that was read to its end has the status *ok* (0).
pub(crate) fn is_grpc_ok(headers: &HeaderMap, trailers: Option<&HeaderMap>) -> bool {
    grpc_status(headers, trailers) == Some(b"0")
}

fn grpc_status<'a>(headers: &'a HeaderMap, trailers: Option<&'a HeaderMap>) -> Option<&'a [u8]> {
    let status = trailers.and_then(|map| map.get("grpc-status")).or(headers.get("grpc-status"));
    status.map(HeaderValue::as_bytes)
}

/// Returns the class of a unary gRPC response on a route with this policy.
///
/// | status | class |
/// | --- | --- |
/// | 8 *resource exhausted* | retryable: nothing was done |
/// | 14 *unavailable* | retryable under [`OnUnknown::Reexecute`], otherwise unknown, like 503 |
/// | 2, 4, 13, 15; no status; one outside of 0 to 16 | unknown |
/// | any other of 0 to 16 | final |
///
/// *Cancelled* (1), *permission denied* (7) and *unauthenticated* (16) are final too: a service
/// that did nothing then sets `Idempotency-Outcome`.
///
/// A response that is not read to its end, because it is too large to store or a stream, has no
/// status when its class is needed. Its head decides, by the profile.
#[must_use]
pub fn classify_grpc(
    headers: &HeaderMap,
    trailers: Option<&HeaderMap>,
    on_unknown: OnUnknown,
) -> OutcomeClass {
    match grpc_status(headers, trailers) {
        Some(b"8") => OutcomeClass::Retryable,
        Some(b"14") => unavailable(on_unknown),
        Some(b"0" | b"1" | b"3" | b"5" | b"6" | b"7" | b"9" | b"10" | b"11" | b"12" | b"16") => {
            OutcomeClass::Final
        }
        // The meaning of any other value is unknown.
        _ => OutcomeClass::Unknown,
    }
}
