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
    /// An answer on its way. Dropping it never leaves a claim without work, nor stops work.
    pub struct ResponseFuture<F, E> {
        #[pin]
        kind: Kind<F, E>,
    }
}

pin_project! {
    #[project = KindProjection]
    enum Kind<F, E> {
        Passing { #[pin] inner: F },
        Guarded { guard: BoxFuture<'static, Result<Response<Body>, E>> },
        Rejected { response: Option<Response<Body>> },
    }
}

impl<F, E> ResponseFuture<F, E> {
    pub(super) const fn passing(inner: F) -> Self {
        Self { kind: Kind::Passing { inner } }
    }

    pub(super) fn guarded(guard: BoxFuture<'static, Result<Response<Body>, E>>) -> Self {
        Self { kind: Kind::Guarded { guard } }
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
            KindProjection::Guarded { guard } => guard.as_mut().poll(cx),
            // Polled again after it was ready, it stays pending, as futures may.
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
            Kind::Guarded { .. } => "ResponseFuture(guarded)",
            Kind::Rejected { .. } => "ResponseFuture(refused)",
        })
    }
}
