//! Forwarding to the upstream, the service behind the layer.

pub(crate) mod spoofing;

use std::convert::Infallible;
use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use hapax_core::{Clock, SystemClock};
use hapax_http::Body;
use hapax_http::classify::{ClassifiedResponse, OutcomeClass};
use hapax_http::error_format::ErrorFormat;
use hapax_http::header::{
    IDEMPOTENCY_ATTEMPT, IDEMPOTENCY_DEADLINE, IDEMPOTENCY_FENCE, IDEMPOTENCY_OPERATION_ID,
    IDEMPOTENCY_OUTCOME, date, operation_id,
};
use hapax_http::problem::{Code, DocsUrl, Problem};
use hapax_http::server::ExecutionHandle;
use hapax_proxy::{ForwardedRequest, Peer, UploadError, Upstream, UpstreamError};
use http::{HeaderValue, Request, Response};
use tower_service::Service;

use crate::context::RequestContext;
use crate::metrics::RouteCounts;
use crate::own_headers::remove_reserved;

/// Forwards requests to an upstream. It never fails: a request without a response gets a problem
/// that is marked with its outcome class.
#[derive(Clone, Debug)]
pub(crate) struct Proxy {
    pub(crate) upstream: Upstream,
    pub(crate) docs: Option<DocsUrl>,
    pub(crate) counts: Arc<RouteCounts>,
}

impl Proxy {
    /// Forwards a request. If it is observed, the caller reads the `Idempotency-*` headers of the
    /// response, and removes them.
    pub(crate) async fn forward(
        &self,
        request: Request<Body>,
        is_observed: bool,
    ) -> Response<Body> {
        let (mut parts, body) = request.into_parts();
        let extensions = std::mem::take(&mut parts.extensions);
        let error_format = ErrorFormat::of(&parts.headers);
        let context = extensions.get::<RequestContext>();
        let peer = context.map_or_else(Peer::unknown, |context| context.peer);
        remove_reserved(&mut parts.headers, true);
        let (method, uri) = (parts.method.clone(), parts.uri.clone());
        let execution = extensions.get::<ExecutionHandle>();
        let id = execution.map(ExecutionHandle::id);
        let protected = id.is_some();
        // Protected requests stay in HTTP.
        let switch = context.and_then(|context| context.switch.as_ref()).filter(|_| !protected);
        let request = Request::from_parts(parts, body);
        let mut forwarded = ForwardedRequest::new(request, peer, switch, &self.upstream);
        if let Some(execution) = execution {
            let headers = forwarded.headers_mut();
            headers.insert(IDEMPOTENCY_FENCE, execution.fence().get().into());
            headers.insert(IDEMPOTENCY_ATTEMPT, execution.attempt().into());
            headers.insert(IDEMPOTENCY_OPERATION_ID, operation_id(execution.id()));
            forwarded = forwarded.before_send(|headers, waits| {
                headers.insert(IDEMPOTENCY_DEADLINE, date(SystemClock.now().after(waits)));
            });
        }
        // The layer of a protected request reads the headers too.
        let keeps_headers = protected || is_observed;
        let answered = if keeps_headers {
            forwarded.send(&self.upstream).await
        } else {
            forwarded.pass(&self.upstream).await
        };
        match answered {
            Ok(response) => {
                let mut response = response.map(Body::new);
                if !keeps_headers {
                    remove_reserved(response.headers_mut(), false);
                }
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
        let proxy = self.clone();
        Box::pin(async move { Ok(proxy.forward(request, false).await) })
    }
}
