//! The service's future.

use std::fmt;
use std::pin::Pin;
use std::task::{Context, Poll, ready};

use bytes::Bytes;
use hapax_core::store::BoxFuture;
use http::Response;
use pin_project_lite::pin_project;

use crate::body::{Body, BoxError};

pin_project! {
    /// The future of a response. Dropping it neither stops an execution nor leaves a lease without
    /// one.
    pub struct ResponseFuture<F, E> {
        #[pin]
        kind: Kind<F, E>,
    }
}

pin_project! {
    #[project = KindProjection]
    enum Kind<F, E> {
        Passing { #[pin] inner: F },
        Protected { future: BoxFuture<'static, Result<Response<Body>, E>> },
        Rejected { response: Option<Response<Body>> },
    }
}

impl<F, E> ResponseFuture<F, E> {
    pub(super) const fn passing(inner: F) -> Self {
        Self { kind: Kind::Passing { inner } }
    }

    pub(super) fn protected(future: BoxFuture<'static, Result<Response<Body>, E>>) -> Self {
        Self { kind: Kind::Protected { future } }
    }

    pub(super) const fn rejected(response: Response<Body>) -> Self {
        Self { kind: Kind::Rejected { response: Some(response) } }
    }
}

impl<F, E, B> Future for ResponseFuture<F, E>
where
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
            KindProjection::Protected { future } => future.as_mut().poll(cx),
            // As futures may, it stays pending if it is polled again after it was ready.
            KindProjection::Rejected { response } => match response.take() {
                Some(response) => Poll::Ready(Ok(response)),
                None => Poll::Pending,
            },
        }
    }
}

impl<F, E> fmt::Debug for ResponseFuture<F, E> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self.kind {
            Kind::Passing { .. } => "ResponseFuture(passing)",
            Kind::Protected { .. } => "ResponseFuture(protected)",
            Kind::Rejected { .. } => "ResponseFuture(rejected)",
        })
    }
}
