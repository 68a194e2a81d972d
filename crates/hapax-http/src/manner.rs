//! How refusals are written for whoever gets them.
//!
//! 1. A client that asked in gRPC gets a trailers-only answer: status 200, `grpc-status` and
//!    `grpc-message` among the headers, no body. Its message begins with the [`Code`]'s word; where
//!    there is a time to come again, `grpc-retry-pushback-ms` says it (gRPC retry design, A6).
//! 2. Anybody else gets RFC 9457 problem details, and a script of a web page may read them where
//!    the route's [`Cors`] says so.

use bytes::Bytes;
use http::header::{
    ACCESS_CONTROL_ALLOW_CREDENTIALS, ACCESS_CONTROL_ALLOW_ORIGIN, ACCESS_CONTROL_EXPOSE_HEADERS,
    CONTENT_TYPE, ORIGIN, VARY,
};
use http::{HeaderMap, HeaderName, HeaderValue, Response};
use percent_encoding::{AsciiSet, CONTROLS, utf8_percent_encode};

use crate::classify::is_grpc;
use crate::problem::{Code, DocsUrl, Problem};

/// How one request's refusals are to be written; made of its headers, before they are given away.
#[derive(Clone, Debug, Default)]
pub struct Manner {
    grpc: bool,
    cors: Vec<(HeaderName, HeaderValue)>,
}

impl Manner {
    /// For a request with these headers, under what its route says of other origins.
    #[must_use]
    pub fn of(request: &HeaderMap, cors: Option<&Cors>) -> Self {
        let cors = cors.map(|cors| cors.granted(request.get(ORIGIN))).unwrap_or_default();
        Self { grpc: is_grpc(request), cors }
    }

    /// The answer that says `problem`; with `docs`, problem details lead there.
    #[must_use]
    pub fn refuse(&self, problem: &Problem, docs: Option<&DocsUrl>) -> Response<Bytes> {
        if self.grpc {
            return trailers_only(problem);
        }
        let mut response = problem.response(docs);
        for (name, value) in &self.cors {
            response.headers_mut().append(name, value.clone());
        }
        response
    }
}

/// The gRPC status of a refusal.
///
/// | status | code |
/// | --- | --- |
/// | 3 invalid argument | whatever is 400 over HTTP |
/// | 8 resource exhausted | `body-too-large`, `too-many-in-flight` |
/// | 9 failed precondition | `key-reused`, `outcome-unknown`, `response-not-retained` |
/// | 10 aborted | `in-flight`, `superseded` |
/// | 14 unavailable | `store-unavailable`, whatever else is 503, `upstream-unreachable` |
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
        Code::StoreUnavailable
        | Code::AuthUnavailable
        | Code::OutcomePending
        | Code::Draining
        | Code::Overloaded
        | Code::UpstreamUnreachable => 14,
        Code::UpstreamTimeout => 4,
        Code::UpstreamBroken => 2,
        Code::HandlerFailed => 13,
    }
}

/// What a gRPC message escapes: all but printable ASCII, and the sign it escapes with.
const ESCAPED: &AsciiSet = &CONTROLS.add(b'%');

fn trailers_only(problem: &Problem) -> Response<Bytes> {
    let code = problem.code();
    let message = format!("{}: {}", code.as_str(), problem.detail());
    let message = utf8_percent_encode(&message, ESCAPED).to_string();
    let mut response = Response::new(Bytes::new());
    let headers = response.headers_mut();
    headers.insert(CONTENT_TYPE, HeaderValue::from_static("application/grpc"));
    headers.insert("grpc-status", u16::from(grpc_status(code)).into());
    // Escaped, it is printable ASCII, which every header value may hold.
    if let Ok(message) = HeaderValue::try_from(message) {
        headers.insert("grpc-message", message);
    }
    if let Some(seconds) = problem.retry_after_seconds() {
        headers.insert("grpc-retry-pushback-ms", seconds.saturating_mul(1000).into());
    }
    response
}

/// Which web pages' scripts may read refusals of a route (Fetch, CORS protocol). What a handler
/// answers is its own matter, and so are preflights, which are never protected.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Cors {
    /// `None` for any.
    origins: Option<Vec<HeaderValue>>,
    credentials: bool,
}

impl Cors {
    /// Those of any origin; requests with credentials, which no wildcard covers, excepted.
    #[must_use]
    pub const fn any() -> Self {
        Self { origins: None, credentials: false }
    }

    /// Those of these origins, such as `https://shop.example`; with `credentials` also where the
    /// request was made with cookies or the like.
    ///
    /// # Errors
    /// [`BadOrigin`] names the first that is none.
    pub fn origins<I>(origins: I, credentials: bool) -> Result<Self, BadOrigin>
    where
        I: IntoIterator,
        I::Item: AsRef<str>,
    {
        let origin = |text: I::Item| origin(text.as_ref()).ok_or(BadOrigin(text.as_ref().into()));
        let origins = origins.into_iter().map(origin).collect::<Result<_, _>>()?;
        Ok(Self { origins: Some(origins), credentials })
    }

    fn granted(&self, asking: Option<&HeaderValue>) -> Vec<(HeaderName, HeaderValue)> {
        let mut granted = Vec::new();
        let origin = match &self.origins {
            None => Some(HeaderValue::from_static("*")),
            Some(origins) => {
                granted.push((VARY, HeaderValue::from_static("origin")));
                asking.filter(|asking| origins.contains(asking)).cloned()
            }
        };
        let Some(origin) = origin else { return granted };
        granted.push((ACCESS_CONTROL_ALLOW_ORIGIN, origin));
        if self.credentials {
            granted.push((ACCESS_CONTROL_ALLOW_CREDENTIALS, HeaderValue::from_static("true")));
        }
        let exposed = HeaderValue::from_static("link, retry-after");
        granted.push((ACCESS_CONTROL_EXPOSE_HEADERS, exposed));
        granted
    }
}

/// `SCHEME://HOST` or `SCHEME://HOST:PORT`, in the small letters that browsers send.
fn origin(text: &str) -> Option<HeaderValue> {
    let (scheme, host) = text.split_once("://")?;
    let uri: http::Uri = text.parse().ok()?;
    let whole = uri.scheme_str() == Some(scheme) && uri.authority()?.as_str() == host;
    let plain = !host.contains('@') && !text.bytes().any(|byte| byte.is_ascii_uppercase());
    HeaderValue::from_str(text).ok().filter(|_| whole && plain)
}

/// Not an origin.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[error("{0:?} is no origin: write it as `https://shop.example`, in small letters")]
pub struct BadOrigin(String);
