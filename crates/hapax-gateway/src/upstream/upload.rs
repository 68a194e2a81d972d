//! Whose fault it is that a request was not sent whole.

use std::error::Error;
use std::fmt;
use std::pin::Pin;
use std::sync::{Arc, OnceLock};
use std::task::{Context, Poll};

use bytes::Bytes;
use hapax_http::{Body, BoxError};
use http::Request;
use http_body::{Frame, SizeHint};

/// Why whoever a request is from did not send the rest of its body.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Fault {
    /// It sends too slowly.
    Slow,
    /// It broke off, or sent what is no body.
    Broken,
}

impl fmt::Display for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Slow => "the client sends too slowly",
            Self::Broken => "the client broke off",
        })
    }
}

impl Error for Fault {}

/// What became of an upload: of its errors a connection in HTTP/2 says nothing, and one in HTTP/1 no
/// more than that there was one.
#[derive(Clone, Debug, Default)]
pub(super) struct Upload(Arc<OnceLock<Fault>>);

impl Upload {
    /// Watches a request's body.
    pub(super) fn watch(request: Request<Body>) -> (Request<Body>, Self) {
        let upload = Self::default();
        let watched = upload.clone();
        // Nothing can happen to what is not sent.
        let request = request.map(|body| match http_body::Body::is_end_stream(&body) {
            true => body,
            false => Body::new(Watched { body, upload: watched }),
        });
        (request, upload)
    }

    /// Why it ended early, if it did.
    pub(super) fn fault(&self) -> Option<Fault> {
        self.0.get().copied()
    }
}

struct Watched {
    body: Body,
    upload: Upload,
}

impl http_body::Body for Watched {
    type Data = Bytes;
    type Error = BoxError;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, BoxError>>> {
        let polled = Pin::new(&mut self.body).poll_frame(cx);
        if let Poll::Ready(Some(Err(error))) = &polled {
            let fault = error.downcast_ref().copied().unwrap_or(Fault::Broken);
            let _ = self.upload.0.set(fault);
        }
        polled
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}
