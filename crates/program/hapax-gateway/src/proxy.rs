//! Forwarding to the upstream, the service behind the layer.

pub(crate) mod headers;
pub(crate) mod spoofing;
pub(crate) mod tunnel;

use std::convert::Infallible;
use std::future::Future;
use std::net::SocketAddr;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use hapax_http::Body;
use hapax_http::classify::{ClassifiedResponse, OutcomeClass};
use hapax_http::error_format::ErrorFormat;
use hapax_http::header::{
    IDEMPOTENCY_ATTEMPT, IDEMPOTENCY_FENCE, IDEMPOTENCY_OPERATION_ID, IDEMPOTENCY_OUTCOME,
    operation_id,
};
use hapax_http::problem::{Code, DocsUrl, Problem};
use hapax_http::server::ExecutionHandle;
use http::header::CONTENT_LENGTH;
use http::uri::PathAndQuery;
use http::{HeaderValue, Request, Response, Uri, Version};
use http_body::Body as _;
use tower_service::Service;

use crate::metrics::RouteCounts;
use crate::upstream::{UploadError, Upstream, UpstreamError};

/// A request extension: the peer that sent the request, and its connection.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Peer {
    pub(crate) addr: SocketAddr,
    /// True if the connection uses TLS.
    pub(crate) secure: bool,
    /// True if the peer is a trusted proxy: its `Forwarded` and `X-Forwarded-*` headers are used.
    pub(crate) trusted: bool,
    /// True if the connection uses HTTP/2.
    pub(crate) http2: bool,
}

/// A request extension: a layer reads the `Idempotency-*` headers of the response, and removes
/// them.
#[derive(Clone, Copy, Debug)]
pub(crate) struct KeepOutcomeHeaders;

/// Forwards requests to an upstream. It never fails: a request without a response gets a problem
/// that is marked with its outcome class.
#[derive(Clone, Debug)]
pub(crate) struct Proxy {
    pub(crate) upstream: Upstream,
    pub(crate) docs: Option<DocsUrl>,
    pub(crate) counts: Arc<RouteCounts>,
}

impl Proxy {
    async fn forward(self, request: Request<Body>) -> Response<Body> {
        let (mut parts, body) = request.into_parts();
        let error_format = ErrorFormat::of(&parts.headers);
        let peer = parts.extensions.get::<Peer>().copied().unwrap_or_else(unknown_peer);
        let switching = tunnel::wanted(&parts, body.is_end_stream());
        let length_said = parts.headers.contains_key(CONTENT_LENGTH);
        headers::drop_own(&mut parts.headers, true);
        headers::to_upstream(&mut parts.headers, peer, self.upstream.authority());
        if body.is_end_stream() {
            headers::say_empty(&mut parts.headers, &parts.method, length_said);
        }
        if let Some((_, protocol)) = &switching {
            tunnel::add_upgrade(&mut parts.headers, protocol);
        }
        let execution = parts.extensions.get::<ExecutionHandle>();
        if let Some(execution) = execution {
            parts.headers.insert(IDEMPOTENCY_FENCE, execution.fence().get().into());
            parts.headers.insert(IDEMPOTENCY_ATTEMPT, execution.attempt().into());
            parts.headers.insert(IDEMPOTENCY_OPERATION_ID, operation_id(execution.id()));
        }
        let id = execution.map(ExecutionHandle::id);
        let protected = id.is_some();
        let is_heard = parts.extensions.get::<KeepOutcomeHeaders>().is_some();
        let (method, uri) = (parts.method.clone(), parts.uri.clone());

        let mut forwarded = Request::new(body);
        *forwarded.method_mut() = parts.method;
        *forwarded.uri_mut() = origin_form(parts.uri);
        *forwarded.headers_mut() = parts.headers;
        let answered = if protected || is_heard {
            self.upstream.send(forwarded).await
        } else {
            self.upstream.pass(forwarded).await
        };
        match answered {
            Ok(mut response) => {
                let switched = switching.and_then(|(switch, _)| switch.follow(&mut response));
                headers::to_client(response.headers_mut());
                if let Some(protocol) = switched {
                    tunnel::add_upgrade(response.headers_mut(), &protocol);
                }
                if !protected && !is_heard {
                    // A layer that protects or observes reads these headers, then removes them.
                    headers::drop_own(response.headers_mut(), false);
                }
                // The client gets its own version of HTTP, regardless of the upstream's.
                *response.version_mut() = Version::HTTP_11;
                response
            }
            Err(failure @ UpstreamError::Upload(fault)) => {
                tracing::debug!(%method, path = uri.path(), %fault, "a request did not come whole");
                self.problem(error_format, &failure)
            }
            Err(failure) => {
                let source = std::error::Error::source(&failure).map(tracing::field::display);
                // Without the query, and with the operation id instead of the key: both may contain
                // secrets.
                tracing::warn!(
                    %method,
                    path = uri.path(),
                    id = id.map(tracing::field::display),
                    error = %failure,
                    source,
                    "a request got no answer"
                );
                self.problem(error_format, &failure)
            }
        }
    }

    fn problem(&self, error_format: ErrorFormat, failure: &UpstreamError) -> Response<Body> {
        let (code, class) = match failure {
            UpstreamError::Busy => (Code::Overloaded, OutcomeClass::Retryable),
            UpstreamError::Unreachable(_) => (Code::UpstreamUnreachable, OutcomeClass::Retryable),
            UpstreamError::Broken(_) => (Code::UpstreamBroken, OutcomeClass::Unknown),
            UpstreamError::Timeout => (Code::UpstreamTimeout, OutcomeClass::Unknown),
            UpstreamError::Upload(UploadError::Slow) => {
                (Code::RequestTimeout, OutcomeClass::Unknown)
            }
            UpstreamError::Upload(UploadError::Broken) => {
                (Code::MalformedRequest, OutcomeClass::Unknown)
            }
        };
        self.counts.rejected(code);
        let mut problem = Problem::new(code, failure.to_string());
        if class == OutcomeClass::Retryable {
            problem = problem.retry_after(Duration::from_secs(1));
        }
        let mut response = error_format.render(&problem, self.docs.as_ref()).map(Body::from);
        // The problem's code alone may imply another class.
        if let Some(outcome) = response.headers_mut().get_mut(IDEMPOTENCY_OUTCOME) {
            *outcome = HeaderValue::from_static(class.as_str());
        }
        response.extensions_mut().insert(ClassifiedResponse(class));
        response
    }
}

impl Service<Request<Body>> for Proxy {
    type Response = Response<Body>;
    type Error = Infallible;
    type Future = Pin<Box<dyn Future<Output = Result<Response<Body>, Infallible>> + Send>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, request: Request<Body>) -> Self::Future {
        let forwarding = self.clone().forward(request);
        Box::pin(async move { Ok(forwarding.await) })
    }
}

/// Returns the target without scheme and authority, byte for byte (RFC 9112 3.2.1).
fn origin_form(uri: Uri) -> Uri {
    uri.into_parts().path_and_query.unwrap_or_else(|| PathAndQuery::from_static("/")).into()
}

/// Returns the peer of a request that did not come through the listener.
fn unknown_peer() -> Peer {
    let addr = (std::net::Ipv4Addr::UNSPECIFIED, 0).into();
    Peer { addr, secure: false, trusted: false, http2: false }
}
