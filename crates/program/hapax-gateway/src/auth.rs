//! Forward authorisation: whether a caller may have an answer is asked before one is given.
//!
//! A replay comes from the store; without this, whoever shows credentials that were revoked still
//! gets the answers that they once got.
//!
//! 1. Asked is by `GET`, with the request's headers and what the request is, never its body; before
//!    the body is read and before anything is claimed.
//! 2. 2xx lets the request go on. 3xx and 4xx are answers to the client, and given to it.
//! 3. Everything else is no answer: another status, silence, an answer that breaks off, is larger than
//!    [`MAX_ANSWER`] or does not say who the caller is. Then nothing is executed and nothing replayed.

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use hapax_http::stored_response::named_by_connection;
use hapax_http::{Body, BoxError};
use http::header::{HeaderMap, HeaderName, HeaderValue};
use http::request::Parts;
use http::uri::PathAndQuery;
use http::{Request, Response, StatusCode, Uri};
use http_body_util::{BodyExt, Limited};
use tokio::sync::Semaphore;
use tokio::time::{Instant, timeout};

use crate::config::ForwardAuth;
use crate::metrics::{AuthResult, Metrics};
use crate::proxy::{Peer, headers};
use crate::upstream::{ConnectOptions, Origin, Upstream, UpstreamError};

/// The largest body of an answer, in bytes. While a client is given one it gets nothing from the
/// upstream, so that this is within what a connection may take.
const MAX_ANSWER: usize = 64 * 1024;

/// How many questions may be under way; others wait for their turn, as part of their time.
const CONCURRENT: usize = 256;

/// Connections that are about to be closed count for a moment longer.
const PLACES: usize = 2 * CONCURRENT;

/// Asks.
#[derive(Debug)]
pub(crate) struct Auth {
    upstream: Upstream,
    path: PathAndQuery,
    timeout: Duration,
    /// Without these an answer does not say who the caller is.
    scope: Vec<HeaderName>,
    /// What an answer may set in a request; nobody else can.
    given: Vec<CopiedHeader>,
    permits: Semaphore,
    metrics: Arc<Metrics>,
}

#[derive(Debug)]
struct CopiedHeader {
    name: HeaderName,
    plain: String,
}

/// Why a request does not go on.
#[derive(Debug)]
pub(crate) enum AuthRejection {
    /// This is its answer.
    Denied(Response<Body>),
    /// `Connection` would have a header removed that says who the caller is, or the request cannot
    /// be described.
    Malformed(String),
    /// Nobody said whether it may.
    Unavailable,
}

/// Why there is no answer that counts.
#[derive(Debug, thiserror::Error)]
enum AuthFailure {
    #[error("there was no answer")]
    Failure(#[from] UpstreamError),
    #[error("there was no whole answer in time")]
    Late,
    #[error("its status was {0}")]
    Status(StatusCode),
    #[error("its answer broke off, or was larger than {MAX_ANSWER} bytes")]
    Unreadable(#[source] BoxError),
    #[error("its answer has no {0}, so that it does not say who the caller is")]
    NoScope(HeaderName),
}

impl Auth {
    /// Asks at `path` of `origin`, as `told`, in HTTP/1.1.
    pub(crate) fn new(
        (origin, path): (Origin, PathAndQuery),
        config: &ForwardAuth,
        connect: &ConnectOptions,
        metrics: Arc<Metrics>,
    ) -> Self {
        let given = config.given().into_iter();
        Self {
            upstream: Upstream::new(origin, config.timeout, PLACES, connect.http1()),
            path,
            timeout: config.timeout,
            scope: config.scope.clone(),
            given: given.map(|name| CopiedHeader { plain: headers::plain(&name), name }).collect(),
            permits: Semaphore::new(CONCURRENT),
            metrics,
        }
    }

    /// Where it asks.
    pub(crate) const fn upstream(&self) -> &Upstream {
        &self.upstream
    }

    /// Removes what a client may not say: it would be taken for the answer's. To be done to every
    /// request, and to its trailers.
    pub(crate) fn drop_given(&self, headers: &mut HeaderMap) {
        headers::drop_where(headers, |name| {
            let plain = headers::plain(name);
            self.given.iter().any(|given| given.plain == plain)
        });
    }

    /// Returns whether this header comes from the answer alone: a client's own is dropped.
    pub(crate) fn gives(&self, name: &HeaderName) -> bool {
        self.given.iter().any(|given| given.name == *name)
    }

    /// Whether this request may go on, and with which headers in addition.
    ///
    /// Dropping the future ends the question; nothing follows from it.
    pub(crate) async fn ask(
        &self,
        request: &Parts,
        peer: Peer,
    ) -> Result<HeaderMap, AuthRejection> {
        let named = named_by_connection(&request.headers);
        if let Some(given) = self.given.iter().find(|given| named.contains(&given.name)) {
            return Err(AuthRejection::Malformed(format!(
                "Connection must not name {}.",
                given.name
            )));
        }
        let question = headers::question(request, peer, self.upstream.authority());
        let Ok(question) = question else {
            return Err(AuthRejection::Malformed("The request's target is no text.".into()));
        };
        let began = Instant::now();
        let answer = timeout(self.timeout, self.answer(question)).await;
        let answer =
            answer.unwrap_or(Err(AuthFailure::Late)).and_then(|answer| self.decide(answer));
        let outcome = match &answer {
            Ok(Ok(_)) => AuthResult::Allowed,
            Ok(Err(_)) => AuthResult::Denied,
            Err(_) => AuthResult::Unavailable,
        };
        self.metrics.authorised(outcome, began.elapsed());
        match answer {
            Ok(Ok(given)) => Ok(given),
            Ok(Err(denied)) => Err(AuthRejection::Denied(denied)),
            Err(error) => {
                let error = &error as &dyn std::error::Error;
                tracing::warn!(error, "the auth URL did not say whether a request is allowed");
                Err(AuthRejection::Unavailable)
            }
        }
    }

    async fn answer(&self, question: HeaderMap) -> Result<Response<Bytes>, AuthFailure> {
        // Never closed; if it were, nobody could be asked.
        let _turn = self.permits.acquire().await.map_err(|_| UpstreamError::Busy)?;
        let answer = match self.upstream.send(self.request(question.clone())).await {
            // A kept connection may have been closed meanwhile, and asking twice changes nothing.
            Err(UpstreamError::Broken(_)) => self.upstream.send(self.request(question)).await,
            answer => answer,
        };
        let (head, body) = answer?.into_parts();
        let body =
            Limited::new(body, MAX_ANSWER).collect().await.map_err(AuthFailure::Unreadable)?;
        Ok(Response::from_parts(head, body.to_bytes()))
    }

    fn request(&self, headers: HeaderMap) -> Request<Body> {
        let mut request = Request::new(Body::empty());
        *request.uri_mut() = Uri::from(self.path.clone());
        *request.headers_mut() = headers;
        request
    }

    /// What an answer means: what it gives to the request, or what the client gets.
    fn decide(
        &self,
        answer: Response<Bytes>,
    ) -> Result<Result<HeaderMap, Response<Body>>, AuthFailure> {
        let status = answer.status();
        if status.is_redirection() || status.is_client_error() {
            let mut denied = answer.map(Body::from);
            headers::from_another(&mut denied);
            return Ok(Err(denied));
        }
        if !status.is_success() {
            return Err(AuthFailure::Status(status));
        }
        let said = answer.headers();
        let says = |value: &HeaderValue| !value.as_bytes().trim_ascii().is_empty();
        if let Some(name) = self.scope.iter().find(|name| !said.get_all(*name).iter().any(says)) {
            return Err(AuthFailure::NoScope(name.clone()));
        }
        let mut given = HeaderMap::new();
        for CopiedHeader { name, .. } in &self.given {
            for value in said.get_all(name) {
                given.append(name.clone(), value.clone());
            }
        }
        Ok(Ok(given))
    }
}
