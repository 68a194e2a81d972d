//! The service.

use std::mem;
use std::task::{Context, Poll};

use bytes::Bytes;
use hapax_http::{Body, BoxError};
use http::{Request, Response};
use tower_service::Service;

use crate::body::WebhookBody;
use crate::future::WebhookFuture;
use crate::layer::WebhookLayer;

/// A service behind a [`WebhookLayer`].
#[derive(Clone, Debug)]
pub struct WebhookService<S> {
    layer: WebhookLayer,
    inner: S,
}

impl<S> WebhookService<S> {
    pub(crate) const fn new(layer: WebhookLayer, inner: S) -> Self {
        Self { layer, inner }
    }
}

impl<S, Q, B> Service<Request<Q>> for WebhookService<S>
where
    S: Service<Request<Body>, Response = Response<B>> + Clone,
    Q: http_body::Body<Data = Bytes>,
    Q::Error: Into<BoxError>,
    B: http_body::Body<Data = Bytes>,
{
    type Response = Response<WebhookBody<B>>;
    type Error = S::Error;
    type Future = WebhookFuture<S, Q, S::Future>;

    fn poll_ready(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), S::Error>> {
        self.inner.poll_ready(cx)
    }

    fn call(&mut self, request: Request<Q>) -> Self::Future {
        // The service that is ready is called; a clone of it need not be ready.
        let clone = self.inner.clone();
        let inner = mem::replace(&mut self.inner, clone);
        let (parts, body) = request.into_parts();
        match self.layer.check_head(&parts) {
            Ok(head) => WebhookFuture::reading(self.layer.clone(), inner, head, parts, body),
            Err(rejected) => {
                self.layer.log(&rejected);
                WebhookFuture::rejected(rejected)
            }
        }
    }
}
