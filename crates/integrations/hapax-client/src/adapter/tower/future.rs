//! The service's future.

use std::fmt;
use std::pin::Pin;
use std::task::{Context, Poll, ready};

use http::Response;
use pin_project_lite::pin_project;

use crate::adapter::tower::{OperationBody, OperationServiceError};
use crate::error::{RequestError, SendError};
use crate::response::ClientResponse;

type Sending = Pin<Box<dyn Future<Output = Result<ClientResponse, SendError>> + Send>>;

pin_project! {
    /// The future of a response. Once the journal has an operation, dropping this does not stop it.
    pub struct OperationFuture<F> {
        #[pin]
        state: State<F>,
    }
}

pin_project! {
    #[project = StateProjection]
    enum State<F> {
        Inner { #[pin] inner: F },
        Sending { sending: Sending },
        Rejected { error: Option<RequestError> },
    }
}

impl<F> OperationFuture<F> {
    pub(crate) const fn inner(inner: F) -> Self {
        Self { state: State::Inner { inner } }
    }

    pub(crate) const fn sending(sending: Sending) -> Self {
        Self { state: State::Sending { sending } }
    }

    pub(crate) const fn rejected(error: RequestError) -> Self {
        Self { state: State::Rejected { error: Some(error) } }
    }
}

impl<F, B, E> Future for OperationFuture<F>
where
    F: Future<Output = Result<Response<B>, E>>,
{
    type Output = Result<Response<OperationBody<B>>, OperationServiceError<E>>;

    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        let end = match self.project().state.project() {
            StateProjection::Inner { inner } => {
                let response = ready!(inner.poll(cx)).map_err(OperationServiceError::Inner)?;
                return Poll::Ready(Ok(response.map(OperationBody::inner)));
            }
            StateProjection::Sending { sending } => ready!(sending.as_mut().poll(cx)),
            StateProjection::Rejected { error } => match error.take() {
                Some(error) => Err(error.into()),
                // A future that is polled again after it was ready may stay pending.
                None => return Poll::Pending,
            },
        };
        Poll::Ready(end.map(response).map_err(OperationServiceError::Operation))
    }
}

fn response<B>(answer: ClientResponse) -> Response<OperationBody<B>> {
    let mut response = Response::new(OperationBody::response(answer.body));
    *response.status_mut() = answer.status;
    *response.headers_mut() = answer.headers;
    response
}

impl<F> fmt::Debug for OperationFuture<F> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self.state {
            State::Inner { .. } => "OperationFuture(inner)",
            State::Sending { .. } => "OperationFuture(sending)",
            State::Rejected { .. } => "OperationFuture(rejected)",
        })
    }
}
