//! Bodies: that of a delivery while it is read, and that of a response.

use std::fmt;
use std::mem;
use std::pin::Pin;
use std::task::{Context, Poll};

use bytes::{Bytes, BytesMut};
use http_body::{Frame, SizeHint};
use pin_project_lite::pin_project;

pin_project! {
    /// The body of a response: that of the inner service, or a rejection.
    pub struct WebhookBody<B> {
        #[pin]
        kind: Kind<B>,
    }
}

pin_project! {
    #[project = KindProjection]
    enum Kind<B> {
        Inner { #[pin] body: B },
        Rejection { problem: Bytes },
    }
}

impl<B> WebhookBody<B> {
    pub(crate) const fn inner(body: B) -> Self {
        Self { kind: Kind::Inner { body } }
    }

    pub(crate) const fn rejection(problem: Bytes) -> Self {
        Self { kind: Kind::Rejection { problem } }
    }
}

impl<B: http_body::Body<Data = Bytes>> http_body::Body for WebhookBody<B> {
    type Data = Bytes;
    type Error = B::Error;

    fn poll_frame(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, B::Error>>> {
        match self.project().kind.project() {
            KindProjection::Inner { body } => body.poll_frame(cx),
            KindProjection::Rejection { problem } => {
                let problem = mem::take(problem);
                Poll::Ready((!problem.is_empty()).then_some(Ok(Frame::data(problem))))
            }
        }
    }

    fn is_end_stream(&self) -> bool {
        match &self.kind {
            Kind::Inner { body } => body.is_end_stream(),
            Kind::Rejection { problem } => problem.is_empty(),
        }
    }

    fn size_hint(&self) -> SizeHint {
        match &self.kind {
            Kind::Inner { body } => body.size_hint(),
            Kind::Rejection { problem } => SizeHint::with_exact(problem.len() as u64),
        }
    }
}

impl<B> fmt::Debug for WebhookBody<B> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self.kind {
            Kind::Inner { .. } => "WebhookBody(inner)",
            Kind::Rejection { .. } => "WebhookBody(rejection)",
        })
    }
}

/// The part of a body that was read. Most bodies are one frame, which is not copied.
#[derive(Default)]
pub(crate) struct ReadBody {
    first: Bytes,
    more: BytesMut,
}

impl ReadBody {
    pub(crate) fn len(&self) -> usize {
        self.first.len() + self.more.len()
    }

    pub(crate) fn push(&mut self, data: Bytes) {
        if self.len() == 0 {
            self.first = data;
            return;
        }
        if !self.first.is_empty() {
            self.more.extend_from_slice(&mem::take(&mut self.first));
        }
        self.more.extend_from_slice(&data);
    }

    pub(crate) fn finish(self) -> Bytes {
        if self.more.is_empty() { self.first } else { self.more.freeze() }
    }
}
