//! The service.

use std::error::Error;
use std::task::{Context, Poll};

use bytes::Bytes;
use http::{Request, Response};
use http_body::Body;
use http_body_util::{BodyExt, Limited};
use tower_service::Service;

use crate::adapter::Operation;
use crate::adapter::tower::{OperationBody, OperationFuture};
use crate::client::Client;
use crate::error::{RequestError, SendError};
use crate::request::MAX_REQUEST;
use crate::response::ClientResponse;

/// A service behind an [`OperationLayer`](crate::OperationLayer). It is ready once the inner service is, since
/// the next request may be one for it.
#[derive(Clone, Debug)]
pub struct OperationService<S> {
    client: Client,
    inner: S,
}

/// Errors of an [`OperationService`].
#[derive(Debug, thiserror::Error)]
pub enum OperationServiceError<E> {
    /// The end of an operation without a response, or the rejection of a request by a strict client.
    #[error(transparent)]
    Operation(SendError),
    /// The error of the inner service, which got no operation.
    #[error(transparent)]
    Inner(E),
}

impl<S> OperationService<S> {
    pub(crate) const fn new(client: Client, inner: S) -> Self {
        Self { client, inner }
    }
}

impl<S, Q, B> Service<Request<Q>> for OperationService<S>
where
    S: Service<Request<Q>, Response = Response<B>> + Clone,
    Q: Body<Data: Send, Error: Into<Box<dyn Error + Send + Sync>>> + Send + 'static,
    B: Body<Data = Bytes>,
{
    type Response = Response<OperationBody<B>>;
    type Error = OperationServiceError<S::Error>;
    type Future = OperationFuture<S::Future>;

    fn poll_ready(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), Self::Error>> {
        self.inner.poll_ready(cx).map_err(OperationServiceError::Inner)
    }

    fn call(&mut self, request: Request<Q>) -> Self::Future {
        let operation = request.extensions().get::<Operation>().cloned();
        if operation.is_none() && !self.client.is_strict() {
            // The service that is ready is called, here and at once.
            return OperationFuture::inner(self.inner.call(request));
        }
        // It is not called: what it has reserved for this call becomes free.
        self.inner = self.inner.clone();
        operation.map_or_else(
            || OperationFuture::rejected(RequestError::NoName),
            |operation| {
                let sent = send(self.client.clone(), operation, request);
                OperationFuture::sending(Box::pin(sent))
            },
        )
    }
}

async fn send<Q>(
    client: Client,
    operation: Operation,
    request: Request<Q>,
) -> Result<ClientResponse, SendError>
where
    Q: Body<Error: Into<Box<dyn Error + Send + Sync>>>,
{
    let (parts, body) = request.into_parts();
    let body = read(body).await?;
    let target = (parts.method, parts.uri.to_string());
    operation.send(&client, target, &parts.headers, body, None).await
}

/// Reads a body of a known length.
async fn read<Q>(body: Q) -> Result<Bytes, RequestError>
where
    Q: Body<Error: Into<Box<dyn Error + Send + Sync>>>,
{
    let found = body.size_hint().exact().ok_or(RequestError::Stream)?;
    if found > MAX_REQUEST as u64 {
        let found = usize::try_from(found).unwrap_or(usize::MAX);
        return Err(RequestError::Body { limit: MAX_REQUEST, found });
    }
    let read = Limited::new(body, MAX_REQUEST).collect().await;
    let read = read.map_err(RequestError::BrokenBody)?;
    if read.trailers().is_some() {
        return Err(RequestError::Stream);
    }
    let bytes = read.to_bytes();
    if bytes.len() as u64 != found {
        let text = format!("expected {found} bytes, found {}", bytes.len());
        return Err(RequestError::BrokenBody(text.into()));
    }
    Ok(bytes)
}
