//! Formats of rejections, by the protocol of the client.
//!
//! 1. A gRPC client gets a trailers-only response: status 200, `grpc-status` and `grpc-message`
//!    among the headers, no body. Its message begins with the word of the [`Code`]; a time after
//!    which to retry is in `grpc-retry-pushback-ms` (gRPC retry design, A6).
//! 2. Any other client gets RFC 9457 problem details.
//! 3. A client that sent an `Idempotency-Fence` is itself a layer or a gateway, which stores the
//!    response for its own clients. `Idempotency-Outcome` states the class of a rejection for it
//!    ([`class`]): it must not store as final that a first request is in flight here.

use bytes::Bytes;
use http::header::CONTENT_TYPE;
use http::{HeaderMap, HeaderValue, Response};
use percent_encoding::{AsciiSet, CONTROLS, utf8_percent_encode};

use crate::classify::{OutcomeClass, is_grpc};
use crate::header::{IDEMPOTENCY_FENCE, IDEMPOTENCY_OUTCOME};
use crate::problem::{Code, DocsUrl, Problem};

/// The format of a request's rejections. By default problem details.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct ErrorFormat {
    /// True for a gRPC status.
    grpc: bool,
    /// True if the client is a layer or a gateway.
    fenced: bool,
}

impl ErrorFormat {
    /// Returns the format for a request with these headers.
    #[must_use]
    pub fn of(request: &HeaderMap) -> Self {
        Self { grpc: is_grpc(request), fenced: request.contains_key(IDEMPOTENCY_FENCE) }
    }

    /// Returns the response for `problem`; with `docs`, problem details refer to them.
    #[must_use]
    pub fn render(self, problem: &Problem, docs: Option<&DocsUrl>) -> Response<Bytes> {
        let mut response = match self.grpc {
            false => problem.response(docs),
            true => trailers_only(problem),
        };
        self.mark(response.headers_mut(), class(problem.code()));
        response
    }

    /// Sets the class of a response that no handler returned, for a client that stores responses.
    pub(crate) fn mark(self, headers: &mut HeaderMap, class: OutcomeClass) {
        if self.fenced {
            headers.insert(IDEMPOTENCY_OUTCOME, HeaderValue::from_static(class.as_str()));
        }
    }
}

/// Returns the class of a rejection for a layer or gateway in front.
///
/// | class | code |
/// | --- | --- |
/// | final: a retry would get the same | `invalid-key`, `missing-key`, `missing-scope`, `unstable-scope`, `response-not-retained` |
/// | unknown: it was executed, or may have been | `outcome-unknown`, `outcome-pending`, `superseded`, `upstream-broken`, `upstream-timeout`, `handler-failed` |
/// | retryable: this attempt executed nothing | all others |
///
/// `key-reused` is retryable: nothing was executed, and if it were stored in front, it would block
/// the request whose key it is. So is `invalid-token`: a retry may have a renewed token.
#[must_use]
pub const fn class(code: Code) -> OutcomeClass {
    match code {
        Code::InvalidKey
        | Code::MissingKey
        | Code::MissingScope
        | Code::UnstableScope
        | Code::ResponseNotRetained => OutcomeClass::Final,
        Code::OutcomeUnknown
        | Code::OutcomePending
        | Code::Superseded
        | Code::UpstreamBroken
        | Code::UpstreamTimeout
        | Code::HandlerFailed => OutcomeClass::Unknown,
        Code::MalformedRequest
        | Code::InvalidToken
        | Code::RequestTimeout
        | Code::InFlight
        | Code::BodyTooLarge
        | Code::KeyReused
        | Code::TooManyInFlight
        | Code::StoreUnavailable
        | Code::Quarantined
        | Code::AuthUnavailable
        | Code::Draining
        | Code::Overloaded
        | Code::UpstreamUnreachable => OutcomeClass::Retryable,
    }
}

/// Returns the gRPC status of a rejection.
///
/// | status | code |
/// | --- | --- |
/// | 3 invalid argument | any that is 400 over HTTP |
/// | 8 resource exhausted | `body-too-large`, `too-many-in-flight` |
/// | 9 failed precondition | `key-reused`, `outcome-unknown`, `response-not-retained` |
/// | 10 aborted | `in-flight`, `superseded` |
/// | 14 unavailable | `request-timeout`, `upstream-unreachable`, any that is 503 over HTTP |
/// | 16 unauthenticated | `invalid-token` |
/// | 4 deadline exceeded, 2 unknown, 13 internal | `upstream-timeout`, `upstream-broken`, `handler-failed` |
#[must_use]
pub const fn grpc_status(code: Code) -> u8 {
    match code {
        Code::InvalidKey
        | Code::MissingKey
        | Code::MissingScope
        | Code::UnstableScope
        | Code::MalformedRequest => 3,
        Code::BodyTooLarge | Code::TooManyInFlight => 8,
        Code::KeyReused | Code::OutcomeUnknown | Code::ResponseNotRetained => 9,
        Code::InFlight | Code::Superseded => 10,
        Code::RequestTimeout
        | Code::StoreUnavailable
        | Code::Quarantined
        | Code::AuthUnavailable
        | Code::OutcomePending
        | Code::Draining
        | Code::Overloaded
        | Code::UpstreamUnreachable => 14,
        Code::UpstreamTimeout => 4,
        Code::UpstreamBroken => 2,
        Code::HandlerFailed => 13,
        Code::InvalidToken => 16,
    }
}

/// Returns whether a gRPC message escapes a byte: all but printable ASCII, and the escape
/// character.
const ESCAPED: &AsciiSet = &CONTROLS.add(b'%');

fn trailers_only(problem: &Problem) -> Response<Bytes> {
    let code = problem.code();
    let message = format!("{}: {}", code.as_str(), problem.detail());
    let message = utf8_percent_encode(&message, ESCAPED).to_string();
    let mut response = Response::new(Bytes::new());
    let headers = response.headers_mut();
    headers.insert(CONTENT_TYPE, HeaderValue::from_static("application/grpc"));
    headers.insert("grpc-status", u16::from(grpc_status(code)).into());
    // The escaped text is printable ASCII, which every header value may contain.
    if let Ok(message) = HeaderValue::try_from(message) {
        headers.insert("grpc-message", message);
    }
    if let Some(seconds) = problem.retry_after_seconds() {
        headers.insert("grpc-retry-pushback-ms", seconds.saturating_mul(1000).into());
    }
    response
}
