//! The service's future.

use std::error::Error;
use std::fmt;
use std::io;
use std::pin::Pin;
use std::task::{Context, Poll, ready};

use bytes::Bytes;
use hapax_http::{Body, BoxError};
use http::request::Parts;
use http::{HeaderMap, Request, Response};
use pin_project_lite::pin_project;
use tower_service::Service;

use crate::body::{ReadBody, WebhookBody};
use crate::layer::WebhookLayer;
use crate::rejection::{Rejected, WebhookRejection};
use crate::scheme::SignedHead;

pin_project! {
    /// The future of a response. Until the signature is verified, dropping it has no effect; then
    /// the inner service's future determines the effect.
    pub struct WebhookFuture<S, Q, F> {
        #[pin]
        state: State<S, Q, F>,
    }
}

pin_project! {
    #[project = StateProjection]
    enum State<S, Q, F> {
        Reading {
            delivery: Option<Delivery<S>>,
            #[pin]
            body: Q,
            read: ReadBody,
            trailers: Option<HeaderMap>,
        },
        Calling { #[pin] inner: F },
        Rejected { rejected: Option<Rejected> },
    }
}

/// A delivery whose body is being read, with the service that gets it.
struct Delivery<S> {
    layer: WebhookLayer,
    inner: S,
    head: SignedHead,
    parts: Parts,
}

impl<S, Q, F> WebhookFuture<S, Q, F> {
    pub(crate) fn reading(
        layer: WebhookLayer,
        inner: S,
        head: SignedHead,
        parts: Parts,
        body: Q,
    ) -> Self {
        let delivery = Some(Delivery { layer, inner, head, parts });
        let read = ReadBody::default();
        Self { state: State::Reading { delivery, body, read, trailers: None } }
    }

    pub(crate) const fn rejected(rejected: Rejected) -> Self {
        Self { state: State::Rejected { rejected: Some(rejected) } }
    }
}

impl<S, Q, B> Future for WebhookFuture<S, Q, S::Future>
where
    S: Service<Request<Body>, Response = Response<B>>,
    Q: http_body::Body<Data = Bytes>,
    Q::Error: Into<BoxError>,
{
    type Output = Result<Response<WebhookBody<B>>, S::Error>;

    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        let mut state = self.project().state;
        loop {
            let next = match state.as_mut().project() {
                StateProjection::Reading { delivery, body, read, trailers } => {
                    // A future that is polled again after it was ready may stay pending.
                    let Some(waiting) = delivery else { return Poll::Pending };
                    let limit = waiting.layer.body_limit();
                    let whole = ready!(poll_whole(body, cx, read, trailers, limit));
                    let Some(delivery) = delivery.take() else { return Poll::Pending };
                    let read = std::mem::take(read).finish();
                    let layer = delivery.layer.clone();
                    let called = whole.and_then(|()| delivery.call(read, trailers.take()));
                    match called {
                        Ok(inner) => State::Calling { inner },
                        Err(rejected) => {
                            layer.log(&rejected);
                            State::Rejected { rejected: Some(rejected) }
                        }
                    }
                }
                StateProjection::Calling { inner } => {
                    let response = ready!(inner.poll(cx))?;
                    return Poll::Ready(Ok(response.map(WebhookBody::inner)));
                }
                StateProjection::Rejected { rejected } => {
                    let Some(rejected) = rejected.take() else { return Poll::Pending };
                    return Poll::Ready(Ok(rejected.response().map(WebhookBody::rejection)));
                }
            };
            state.set(next);
        }
    }
}

impl<S> Delivery<S> {
    /// Calls the service, if the delivery is valid.
    fn call(mut self, body: Bytes, trailers: Option<HeaderMap>) -> Result<S::Future, Rejected>
    where
        S: Service<Request<Body>>,
    {
        self.layer.check_body(&self.head, &mut self.parts, &body)?;
        let request = Request::from_parts(self.parts, Body::whole(body, trailers));
        Ok(self.inner.call(request))
    }
}

/// Reads the body to its end, at most `limit` bytes and one frame.
fn poll_whole<Q>(
    mut body: Pin<&mut Q>,
    cx: &mut Context<'_>,
    read: &mut ReadBody,
    trailers: &mut Option<HeaderMap>,
    limit: usize,
) -> Poll<Result<(), Rejected>>
where
    Q: http_body::Body<Data = Bytes>,
    Q::Error: Into<BoxError>,
{
    loop {
        let expected = (read.len() as u64).saturating_add(body.size_hint().lower());
        if expected > limit as u64 {
            let detail =
                format!("Expected at most {limit} bytes of body, found more: send a smaller one.");
            return Poll::Ready(Err(Rejected::new(WebhookRejection::BodyTooLarge, detail)));
        }
        match ready!(body.as_mut().poll_frame(cx)) {
            None => return Poll::Ready(Ok(())),
            Some(Ok(frame)) => match frame.into_data() {
                Ok(data) => read.push(data),
                Err(frame) => *trailers = frame.into_trailers().ok().or(trailers.take()),
            },
            Some(Err(error)) => return Poll::Ready(Err(broken(&*error.into()))),
        }
    }
}

fn broken(error: &(dyn Error + Send + Sync + 'static)) -> Rejected {
    if is_timed_out(error) {
        let detail = "Expected the body in time, found a part of it: send the delivery again.";
        return Rejected::new(WebhookRejection::RequestTimeout, detail);
    }
    tracing::debug!(error = error as &(dyn Error + 'static), "a delivery's body broke off");
    let detail = "Expected a whole body, found one that broke off: send the delivery again.";
    Rejected::new(WebhookRejection::MalformedRequest, detail)
}

/// Returns whether a body failed because its sender was too slow: with an [`io::Error`] of the kind
/// [`TimedOut`](io::ErrorKind::TimedOut), or because of one.
fn is_timed_out(error: &(dyn Error + 'static)) -> bool {
    let mut error = Some(error);
    while let Some(cause) = error {
        let io = cause.downcast_ref::<io::Error>();
        if io.is_some_and(|io| io.kind() == io::ErrorKind::TimedOut) {
            return true;
        }
        error = cause.source();
    }
    false
}

impl<S, Q, F> fmt::Debug for WebhookFuture<S, Q, F> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self.state {
            State::Reading { .. } => "WebhookFuture(reading)",
            State::Calling { .. } => "WebhookFuture(calling)",
            State::Rejected { .. } => "WebhookFuture(rejected)",
        })
    }
}
