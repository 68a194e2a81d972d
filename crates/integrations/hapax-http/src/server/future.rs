//! The service's future.

use std::fmt;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};

use bytes::Bytes;
use hapax_core::{DetachOnDrop, OperationId, OperationPanicked};
use http::Response;
use pin_project_lite::pin_project;

use super::execute::handler_failed;
use super::layer::IdempotencyLayer;
use super::policy::RoutePolicy;
use super::protect::add_names;
use super::response_info::ResponseSource;
use crate::body::{Body, BoxError};
use crate::error_format::ErrorFormat;

pin_project! {
    /// The future of a response. Dropping it neither stops an execution nor leaves a lease without
    /// one.
    pub struct ResponseFuture<F, E>
    where
        E: Send,
        E: 'static,
    {
        #[pin]
        kind: Kind<F, E>,
    }
}

pin_project! {
    #[project = KindProjection]
    enum Kind<F, E>
    where
        E: Send,
        E: 'static,
    {
        Passing { #[pin] inner: F },
        Protected {
            #[pin]
            future: DetachOnDrop<Result<Response<Body>, E>>,
            panicked: PanicResponse,
        },
        Rejected { response: Option<Response<Body>> },
    }
}

/// The context of the response after a panic outside of the handler, which is one with a lease.
pub(super) struct PanicResponse {
    pub(super) layer: Arc<IdempotencyLayer>,
    pub(super) policy: Arc<RoutePolicy>,
    pub(super) error_format: ErrorFormat,
    pub(super) operation: OperationId,
}

impl PanicResponse {
    fn respond(&self) -> Response<Body> {
        let mut response = self.layer.reject(&self.policy, self.error_format, &handler_failed());
        let has_secret = self.layer.names_by_secret();
        add_names(&mut response, self.operation, ResponseSource::Rejection, has_secret);
        response
    }
}

impl<F, E: Send + 'static> ResponseFuture<F, E> {
    pub(super) const fn passing(inner: F) -> Self {
        Self { kind: Kind::Passing { inner } }
    }

    pub(super) const fn protected(
        future: DetachOnDrop<Result<Response<Body>, E>>,
        panicked: PanicResponse,
    ) -> Self {
        Self { kind: Kind::Protected { future, panicked } }
    }

    pub(super) const fn rejected(response: Response<Body>) -> Self {
        Self { kind: Kind::Rejected { response: Some(response) } }
    }
}

impl<F, E, B> Future for ResponseFuture<F, E>
where
    E: Send + 'static,
    F: Future<Output = Result<Response<B>, E>>,
    B: http_body::Body<Data = Bytes> + Send + 'static,
    B::Error: Into<BoxError>,
{
    type Output = Result<Response<Body>, E>;

    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        match self.project().kind.project() {
            KindProjection::Passing { inner } => {
                let response = ready!(inner.poll(cx))?;
                Poll::Ready(Ok(response.map(Body::new)))
            }
            KindProjection::Protected { future, panicked } => {
                let response = ready!(future.poll(cx));
                Poll::Ready(response.unwrap_or_else(|OperationPanicked| Ok(panicked.respond())))
            }
            // As futures may, it stays pending if it is polled again after it was ready.
            KindProjection::Rejected { response } => match response.take() {
                Some(response) => Poll::Ready(Ok(response)),
                None => Poll::Pending,
            },
        }
    }
}

impl<F, E: Send + 'static> fmt::Debug for ResponseFuture<F, E> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self.kind {
            Kind::Passing { .. } => "ResponseFuture(passing)",
            Kind::Protected { .. } => "ResponseFuture(protected)",
            Kind::Rejected { .. } => "ResponseFuture(rejected)",
        })
    }
}
