//! Rejections: RFC 9457 problem details.
//!
//! Every response that is not a handler's is a problem. Its [`Code`] is for programs, its `detail`
//! for people. Neither ever contains a key, a scope or a body.

use std::time::Duration;

use bytes::Bytes;
use http::header::{CONTENT_TYPE, HeaderValue, LINK, RETRY_AFTER, WWW_AUTHENTICATE};
use http::{Response, StatusCode};
use serde_json::{Map, Value};

/// The reason of a rejection, or the state of a request without a response.
///
/// A request that gets it executed nothing, except under [`Superseded`](Self::Superseded),
/// [`OutcomePending`](Self::OutcomePending) and the last four but
/// [`UpstreamUnreachable`](Self::UpstreamUnreachable); and under
/// [`ResponseNotRetained`](Self::ResponseNotRetained) if its detail says so, because there was no
/// memory to send a response that is too large to store. An earlier request with the same key may
/// have executed.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
#[non_exhaustive]
pub enum Code {
    /// `invalid-key`, 400: `Idempotency-Key` has no valid key.
    InvalidKey,
    /// `missing-key`, 400: the route needs a key.
    MissingKey,
    /// `missing-scope`, 400: a header that names the caller is missing.
    MissingScope,
    /// `unstable-scope`, 400: the credentials change with every request, so that a retry would have
    /// another caller.
    UnstableScope,
    /// `malformed-request`, 400: the body broke off, or a header is not allowed.
    MalformedRequest,
    /// `invalid-token`, 401: the bearer token that names the caller does not verify, or has expired.
    InvalidToken,
    /// `request-timeout`, 408: the request's body arrived too slowly.
    RequestTimeout,
    /// `in-flight`, 409: the first request with this key is still executing.
    InFlight,
    /// `outcome-unknown`, 409: an earlier request may have happened, and is not executed again
    /// without a decision.
    OutcomeUnknown,
    /// `superseded`, 409: another execution took over. The downstream system's fence decides
    /// whether this one had an effect.
    Superseded,
    /// `response-not-retained`, 409: the request happened; its response was not stored.
    ResponseNotRetained,
    /// `body-too-large`, 413: the request's body is over the limit.
    BodyTooLarge,
    /// `key-reused`, 422: the key belongs to another request.
    KeyReused,
    /// `too-many-in-flight`, 429: the keys of this caller in flight are at their limit.
    TooManyInFlight,
    /// `store-unavailable`, 503: idempotency cannot be ensured now.
    StoreUnavailable,
    /// `quarantined`, 503: the store may have lost the record of this key.
    Quarantined,
    /// `auth-unavailable`, 503: the auth service gave no usable answer.
    AuthUnavailable,
    /// `outcome-pending`, 503: the request was executed, and its outcome is not in the store yet,
    /// or the response cannot be sent now. A retry is safe.
    OutcomePending,
    /// `draining`, 503: this server is shutting down.
    Draining,
    /// `overloaded`, 503: too much is in progress.
    Overloaded,
    /// `handler-failed`, 500: the handler panicked; the request may have happened.
    HandlerFailed,
    /// `upstream-unreachable`, 502: nothing was sent; the key is released.
    UpstreamUnreachable,
    /// `upstream-broken`, 502: the response broke off; the request may have happened.
    UpstreamBroken,
    /// `upstream-timeout`, 504: no response in time; the request may have happened.
    UpstreamTimeout,
}

impl Code {
    /// All codes, in the order of their documentation.
    pub const ALL: [Self; 24] = [
        Self::InvalidKey,
        Self::MissingKey,
        Self::MissingScope,
        Self::UnstableScope,
        Self::MalformedRequest,
        Self::InvalidToken,
        Self::RequestTimeout,
        Self::InFlight,
        Self::OutcomeUnknown,
        Self::Superseded,
        Self::ResponseNotRetained,
        Self::BodyTooLarge,
        Self::KeyReused,
        Self::TooManyInFlight,
        Self::StoreUnavailable,
        Self::Quarantined,
        Self::AuthUnavailable,
        Self::OutcomePending,
        Self::Draining,
        Self::Overloaded,
        Self::HandlerFailed,
        Self::UpstreamUnreachable,
        Self::UpstreamBroken,
        Self::UpstreamTimeout,
    ];

    /// Returns the code as it is sent.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        self.words().0
    }

    /// Returns one line for people, the same for every occurrence.
    #[must_use]
    pub const fn title(self) -> &'static str {
        self.words().1
    }

    /// Returns the status of the response.
    #[must_use]
    pub const fn status(self) -> StatusCode {
        match self {
            Self::InvalidKey
            | Self::MissingKey
            | Self::MissingScope
            | Self::UnstableScope
            | Self::MalformedRequest => StatusCode::BAD_REQUEST,
            Self::InvalidToken => StatusCode::UNAUTHORIZED,
            Self::RequestTimeout => StatusCode::REQUEST_TIMEOUT,
            Self::InFlight
            | Self::OutcomeUnknown
            | Self::Superseded
            | Self::ResponseNotRetained => StatusCode::CONFLICT,
            Self::BodyTooLarge => StatusCode::PAYLOAD_TOO_LARGE,
            Self::KeyReused => StatusCode::UNPROCESSABLE_ENTITY,
            Self::TooManyInFlight => StatusCode::TOO_MANY_REQUESTS,
            Self::StoreUnavailable
            | Self::Quarantined
            | Self::AuthUnavailable
            | Self::OutcomePending
            | Self::Draining
            | Self::Overloaded => StatusCode::SERVICE_UNAVAILABLE,
            Self::HandlerFailed => StatusCode::INTERNAL_SERVER_ERROR,
            Self::UpstreamUnreachable | Self::UpstreamBroken => StatusCode::BAD_GATEWAY,
            Self::UpstreamTimeout => StatusCode::GATEWAY_TIMEOUT,
        }
    }

    /// Returns the member `type` of the member `error`, in the terms of payment APIs.
    #[must_use]
    pub const fn error_type(self) -> &'static str {
        match self.status() {
            _ if matches!(self, Self::KeyReused) => "idempotency_error",
            StatusCode::BAD_REQUEST | StatusCode::PAYLOAD_TOO_LARGE => "invalid_request_error",
            _ => "api_error",
        }
    }

    const fn words(self) -> (&'static str, &'static str) {
        match self {
            Self::InvalidKey => ("invalid-key", "The idempotency key is not valid"),
            Self::MissingKey => ("missing-key", "An idempotency key is required"),
            Self::MissingScope => ("missing-scope", "The caller cannot be told"),
            Self::UnstableScope => ("unstable-scope", "The caller's credentials change by request"),
            Self::MalformedRequest => ("malformed-request", "The request is malformed"),
            Self::InvalidToken => ("invalid-token", "The bearer token is not valid"),
            Self::RequestTimeout => ("request-timeout", "The request came too slowly"),
            Self::InFlight => ("in-flight", "A request with this key is still running"),
            Self::OutcomeUnknown => {
                ("outcome-unknown", "Whether this request took effect is not known")
            }
            Self::Superseded => ("superseded", "Another execution took over"),
            Self::ResponseNotRetained => {
                ("response-not-retained", "The request took effect, its response was not kept")
            }
            Self::BodyTooLarge => ("body-too-large", "The request body is too large"),
            Self::KeyReused => ("key-reused", "The key was used for another request"),
            Self::TooManyInFlight => {
                ("too-many-in-flight", "Too many keys of this caller are in flight")
            }
            Self::StoreUnavailable => ("store-unavailable", "Idempotency cannot be ensured now"),
            Self::Quarantined => ("quarantined", "The record of this key may be lost"),
            Self::AuthUnavailable => {
                ("auth-unavailable", "Whether this is allowed cannot be told now")
            }
            Self::OutcomePending => ("outcome-pending", "The outcome cannot be given yet"),
            Self::Draining => ("draining", "The server is shutting down"),
            Self::Overloaded => ("overloaded", "Too much is in progress"),
            Self::HandlerFailed => ("handler-failed", "The handler failed"),
            Self::UpstreamUnreachable => {
                ("upstream-unreachable", "The upstream could not be reached")
            }
            Self::UpstreamBroken => ("upstream-broken", "The upstream broke off its answer"),
            Self::UpstreamTimeout => ("upstream-timeout", "The upstream did not answer in time"),
        }
    }
}

/// A rejection that is being built.
///
/// ```
/// use hapax_http::problem::{Code, Problem};
/// let response = Problem::new(Code::MissingKey, "POST /orders needs one").response(None);
/// assert_eq!(response.status(), 400);
/// assert_eq!(response.headers()["content-type"], "application/problem+json");
/// let body = std::str::from_utf8(response.body())?;
/// assert!(body.contains(r#""type":"urn:hapax:problem:missing-key""#));
/// # Ok::<(), std::str::Utf8Error>(())
/// ```
#[derive(Clone, Debug)]
#[must_use]
pub struct Problem {
    code: Code,
    detail: String,
    retry_after: Option<u64>,
    original_status: Option<StatusCode>,
}

impl Problem {
    /// Creates a rejection for this reason, with a sentence about this occurrence.
    pub fn new(code: Code, detail: impl Into<String>) -> Self {
        Self { code, detail: detail.into(), retry_after: None, original_status: None }
    }

    /// Sets when to retry, in whole seconds, rounded up, at least 1: as the header `Retry-After`,
    /// and for [`Code::InFlight`] as the member `retry_after` too.
    pub fn retry_after(mut self, after: Duration) -> Self {
        let seconds = after.as_secs() + u64::from(after.subsec_nanos() > 0);
        self.retry_after = Some(seconds.max(1));
        self
    }

    /// Sets the status of the operation's response, as the member `original_status`.
    pub fn original_status(mut self, status: StatusCode) -> Self {
        self.original_status = Some(status);
        self
    }

    /// Returns the code.
    #[must_use]
    pub const fn code(&self) -> Code {
        self.code
    }

    /// Returns the sentence about this occurrence.
    #[must_use]
    pub fn detail(&self) -> &str {
        &self.detail
    }

    /// Returns the seconds after which to retry, if they are set.
    #[must_use]
    pub const fn retry_after_seconds(&self) -> Option<u64> {
        self.retry_after
    }

    /// Returns the response as problem details; [`crate::error_format`] has the other format. With
    /// `docs`, its `type` and a `Link` refer to the documentation.
    #[must_use]
    pub fn response(&self, docs: Option<&DocsUrl>) -> Response<Bytes> {
        let code = self.code;
        let name = match docs {
            Some(DocsUrl { url, .. }) => format!("{url}#{}", code.as_str()),
            None => format!("urn:hapax:problem:{}", code.as_str()),
        };
        let mut members = Map::new();
        members.insert("type".into(), name.into());
        members.insert("title".into(), code.title().into());
        members.insert("status".into(), code.status().as_u16().into());
        members.insert("detail".into(), self.detail.as_str().into());
        members.insert("code".into(), code.as_str().into());
        // SDKs that look for `body.error` take a body without it as a success, whatever the status.
        let mut error = Map::new();
        error.insert("type".into(), code.error_type().into());
        error.insert("code".into(), code.as_str().into());
        error.insert("message".into(), self.detail.as_str().into());
        members.insert("error".into(), error.into());
        if let (Code::InFlight, Some(seconds)) = (code, self.retry_after) {
            members.insert("retry_after".into(), seconds.into());
        }
        if let Some(status) = self.original_status {
            members.insert("original_status".into(), status.as_u16().into());
        }
        let mut response = Response::new(Bytes::from(Value::Object(members).to_string()));
        *response.status_mut() = code.status();
        let headers = response.headers_mut();
        headers.insert(CONTENT_TYPE, HeaderValue::from_static("application/problem+json"));
        if let Some(seconds) = self.retry_after {
            headers.insert(RETRY_AFTER, seconds.into());
        }
        if let Some(docs) = docs {
            headers.insert(LINK, docs.link.clone());
        }
        if code == Code::InvalidToken {
            // RFC 6750, 3.1.
            let challenge = HeaderValue::from_static("Bearer error=\"invalid_token\"");
            headers.insert(WWW_AUTHENTICATE, challenge);
        }
        response
    }
}

/// Returns an error's text as a sentence: errors begin in lower case and end without a full stop.
#[must_use]
pub fn sentence(clause: &str) -> String {
    let mut letters = clause.chars();
    let first = letters.next().map(|first| first.to_ascii_uppercase());
    first.into_iter().chain(letters).chain(['.']).collect()
}

/// The place where an API documents its rejections.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct DocsUrl {
    url: String,
    link: HeaderValue,
}

impl DocsUrl {
    /// Returns the documentation URL. It has no fragment: `#CODE` is appended.
    ///
    /// # Errors
    /// [`DocsUrlError`] if it is not an absolute URI that fits between `<` and `>`.
    pub fn new(url: impl Into<String>) -> Result<Self, DocsUrlError> {
        let url = url.into();
        let absolute = url.parse::<http::Uri>().is_ok_and(|uri| uri.scheme().is_some());
        if !absolute || url.contains(['#', '<', '>', '"']) {
            return Err(DocsUrlError);
        }
        let link = HeaderValue::try_from(format!("<{url}>; rel=\"describedby\""));
        Ok(Self { link: link.map_err(|_| DocsUrlError)?, url })
    }

    /// Returns the URL as it was passed.
    #[must_use]
    pub fn as_str(&self) -> &str {
        &self.url
    }
}

/// The URL cannot be that of documentation.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
#[error("the documentation URL must be absolute, without a fragment")]
pub struct DocsUrlError;

/// Returns when a duplicate of a request in flight should retry: after the rest of the lease, but
/// at most after the time that the first request has taken so far. The interval doubles while the
/// first request executes, and ends with its lease.
#[must_use]
pub fn retry_after(elapsed: Duration, remaining: Duration) -> Duration {
    elapsed.min(remaining).max(Duration::from_secs(1))
}
