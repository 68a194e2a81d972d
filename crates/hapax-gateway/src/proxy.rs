//! The service behind the layer: one upstream.

mod headers;

use std::convert::Infallible;
use std::future::Future;
use std::net::SocketAddr;
use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::Duration;

use hapax_http::Body;
use hapax_http::classify::{Class, Classified};
use hapax_http::header::{IDEMPOTENCY_ATTEMPT, IDEMPOTENCY_FENCE};
use hapax_http::problem::{Code, DocsUrl, Problem};
use hapax_http::server::Execution;
use http::uri::PathAndQuery;
use http::{Request, Response, Uri, Version};
use tower_service::Service;

use crate::memory::{Gathered, Memory, need};
use crate::upstream::{Failure, Upstream};

/// A request extension: who sent it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Peer(pub(crate) SocketAddr);

/// Forwards requests to an upstream. It never fails: what has no answer gets a problem, marked with
/// what it means for the key.
#[derive(Clone, Debug)]
pub(crate) struct Proxy {
    pub(crate) upstream: Upstream,
    /// For responses that the layer keeps.
    pub(crate) memory: Memory,
    pub(crate) max_response_body: usize,
    pub(crate) docs: Option<DocsUrl>,
}

impl Proxy {
    async fn forward(self, request: Request<Body>) -> Response<Body> {
        let (mut parts, body) = request.into_parts();
        let peer = parts.extensions.get::<Peer>().map_or_else(unknown_peer, |peer| peer.0);
        headers::drop_own(&mut parts.headers, true);
        headers::to_upstream(&mut parts.headers, peer, self.upstream.authority());
        let execution = parts.extensions.get::<Execution>();
        if let Some(execution) = execution {
            parts.headers.insert(IDEMPOTENCY_FENCE, execution.fence().get().into());
            parts.headers.insert(IDEMPOTENCY_ATTEMPT, execution.attempt().into());
        }
        let protected = execution.is_some();

        let mut forwarded = Request::new(body);
        *forwarded.method_mut() = parts.method;
        *forwarded.uri_mut() = origin_form(parts.uri);
        *forwarded.headers_mut() = parts.headers;
        match self.upstream.send(forwarded).await {
            Ok(response) if protected => match self.keepable(response).await {
                Ok(response) => response,
                Err(failure) => self.problem(&failure),
            },
            Ok(mut response) => {
                headers::to_client(response.headers_mut());
                headers::drop_own(response.headers_mut(), false);
                *response.version_mut() = Version::HTTP_11;
                response
            }
            Err(failure) => self.problem(&failure),
        }
    }

    /// A response that the layer will read whole, with its share of memory. Its fields of Hapax's own
    /// are for the layer to read and remove.
    async fn keepable(&self, response: Response<Body>) -> Result<Response<Body>, Failure> {
        let (mut parts, body) = response.into_parts();
        headers::to_client(&mut parts.headers);
        // Whatever the upstream speaks, the client is answered in what it speaks.
        parts.version = Version::HTTP_11;
        let hint = http_body::Body::size_hint(&body);
        // What the layer streams is not held in memory.
        let streams = hint.lower() > self.max_response_body as u64
            || headers::is_event_stream(&parts.headers);
        if streams || http_body::Body::is_end_stream(&body) {
            return Ok(Response::from_parts(parts, body));
        }
        let share = self.memory.share(need(&hint, self.max_response_body));
        let share = self.upstream.unless_cut(share).await?;
        Ok(Response::from_parts(
            parts,
            Body::new(Gathered::new(body, self.max_response_body, share)),
        ))
    }

    fn problem(&self, failure: &Failure) -> Response<Body> {
        let source = std::error::Error::source(failure).map(tracing::field::display);
        tracing::warn!(error = %failure, source, "a request got no answer");
        let (code, class) = match failure {
            Failure::Busy => (Code::Overloaded, Class::Retryable),
            Failure::Unreachable(_) => (Code::UpstreamUnreachable, Class::Retryable),
            Failure::Broken(_) => (Code::UpstreamBroken, Class::Unknown),
            Failure::Timeout => (Code::UpstreamTimeout, Class::Unknown),
        };
        let mut problem = Problem::new(code, failure.to_string());
        if class == Class::Retryable {
            problem = problem.retry_after(Duration::from_secs(1));
        }
        let mut response = problem.response(self.docs.as_ref()).map(Body::from);
        response.extensions_mut().insert(Classified(class));
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

/// The target without scheme and authority, byte for byte (RFC 9112 3.2.1).
fn origin_form(uri: Uri) -> Uri {
    uri.into_parts().path_and_query.unwrap_or_else(|| PathAndQuery::from_static("/")).into()
}

/// A request that did not come through the listener.
fn unknown_peer() -> SocketAddr {
    (std::net::Ipv4Addr::UNSPECIFIED, 0).into()
}
