//! Forward authorisation: a server decides whether a caller may send a request.
//!
//! A replay comes from the store: without this check, a caller with revoked credentials would still
//! get the responses that it got before.
//!
//! 1. The auth request is a `GET` with the request's headers and a description of the request,
//!    without its body. It is sent before the body is read and before anything is claimed.
//! 2. 2xx allows the request. 3xx and 4xx are forwarded to the client as its response.
//! 3. Everything else is a failure: another status, a timeout, and a response that breaks off, is
//!    larger than [`MAX_ANSWER`] or does not name the caller. Then nothing is executed or replayed.

mod request;

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use hapax_http::stored_response::named_by_connection;
use hapax_http::{Body, BoxError};
use hapax_proxy::headers::{drop_where, plain};
use hapax_proxy::{ConnectOptions, Origin, Peer, Upstream, UpstreamError};
use http::header::{HeaderMap, HeaderName, HeaderValue};
use http::request::Parts;
use http::uri::PathAndQuery;
use http::{Request, Response, StatusCode, Uri};
use http_body_util::{BodyExt, Limited};
use tokio::sync::Semaphore;
use tokio::time::{Instant, timeout};

use crate::config::ForwardAuth;
use crate::metrics::{AuthResult, Metrics};
use request::{auth_headers, from_another};

/// Largest body of an auth response, in bytes. A client that is sent one gets no response of the
/// upstream, so it is part of the memory of a connection.
const MAX_ANSWER: usize = 64 * 1024;

/// Auth requests that may be in progress; others wait for a permit, within their timeout.
const CONCURRENT: usize = 256;

/// Connections that are about to be closed still count for a moment.
const PLACES: usize = 2 * CONCURRENT;

/// Client of the auth URL.
#[derive(Debug)]
pub(crate) struct Auth {
    upstream: Upstream,
    path: PathAndQuery,
    timeout: Duration,
    /// Headers without which an auth response does not name the caller.
    scope: Vec<HeaderName>,
    /// Headers that only an auth response may set.
    given: Vec<CopiedHeader>,
    permits: Semaphore,
    metrics: Arc<Metrics>,
}

#[derive(Debug)]
struct CopiedHeader {
    name: HeaderName,
    plain: String,
}

/// Reasons for which a request is rejected.
#[derive(Debug)]
pub(crate) enum AuthRejection {
    /// The auth server denied it; this is the response for the client.
    Denied(Response<Body>),
    /// `Connection` names a header that identifies the caller, or the request cannot be described.
    Malformed(String),
    /// There was no usable auth response.
    Unavailable,
}

/// Reasons for which there is no usable auth response.
#[derive(Debug, thiserror::Error)]
enum AuthFailure {
    #[error("no response was received")]
    Failure(#[from] UpstreamError),
    #[error("no complete response arrived within the timeout")]
    Late,
    #[error("its status was {0}; expected 2xx, 3xx or 4xx")]
    Status(StatusCode),
    #[error("its response broke off, or was larger than {MAX_ANSWER} bytes")]
    Unreadable(#[source] BoxError),
    #[error("its response has no {0}, which names the caller")]
    NoScope(HeaderName),
}

impl Auth {
    /// Creates a client of `path` at `origin` with the settings of `config`, over HTTP/1.1.
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
            given: given
                .map(|name| CopiedHeader { plain: plain(&name).into_owned(), name })
                .collect(),
            permits: Semaphore::new(CONCURRENT),
            metrics,
        }
    }

    /// Returns the auth server.
    pub(crate) const fn upstream(&self) -> &Upstream {
        &self.upstream
    }

    /// Removes the headers that only the auth response may set. It must be called for every request
    /// and for its trailers.
    pub(crate) fn drop_given(&self, headers: &mut HeaderMap) {
        drop_where(headers, |name| {
            let plain = plain(name);
            self.given.iter().any(|given| given.plain == plain)
        });
    }

    /// Returns whether this header comes from the auth response alone: a client's own is dropped.
    pub(crate) fn gives(&self, name: &HeaderName) -> bool {
        self.given.iter().any(|given| given.name == *name)
    }

    /// Sends the auth request; returns the headers to add to the request if it is allowed.
    ///
    /// Dropping the future cancels the auth request, which has no effect.
    pub(crate) async fn authorize(
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
        let Ok(headers) = auth_headers(request, peer, self.upstream.authority()) else {
            return Err(AuthRejection::Malformed("The request's target is no text.".into()));
        };
        let began = Instant::now();
        let answer = timeout(self.timeout, self.answer(headers)).await;
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
                tracing::warn!(
                    error,
                    "the auth URL gave no usable response: requests with a key get 503"
                );
                Err(AuthRejection::Unavailable)
            }
        }
    }

    async fn answer(&self, headers: HeaderMap) -> Result<Response<Bytes>, AuthFailure> {
        // The semaphore is never closed.
        let _turn = self.permits.acquire().await.map_err(|_| UpstreamError::Busy)?;
        let answer = match self.upstream.send(self.request(headers.clone())).await {
            // A reused connection may have been closed meanwhile; repeating an auth request is
            // safe.
            Err(UpstreamError::Broken(_)) => self.upstream.send(self.request(headers)).await,
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

    /// Interprets an auth response: headers to add to the request, or a response for the client.
    fn decide(
        &self,
        answer: Response<Bytes>,
    ) -> Result<Result<HeaderMap, Response<Body>>, AuthFailure> {
        let status = answer.status();
        if status.is_redirection() || status.is_client_error() {
            let mut denied = answer.map(Body::from);
            from_another(&mut denied);
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
