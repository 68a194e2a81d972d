//! The body type of this crate.

use std::error::Error;
use std::fmt;
use std::pin::Pin;
use std::task::{Context, Poll, ready};

use bytes::Bytes;
use http::{HeaderMap, HeaderName};
use http_body::{Frame, SizeHint};
use http_body_util::BodyExt;
use http_body_util::combinators::UnsyncBoxBody;
use pin_project_lite::pin_project;

use crate::header::retain;

/// Any error of a body.
pub type BoxError = Box<dyn Error + Send + Sync>;

/// A body of any type.
pub(crate) type Erased = UnsyncBoxBody<Bytes, BoxError>;

pub(crate) fn erase<B>(body: B) -> Erased
where
    B: http_body::Body<Data = Bytes> + Send + 'static,
    B::Error: Into<BoxError>,
{
    body.map_err(Into::into).boxed_unsync()
}

pin_project! {
    /// A body without the trailers for which `drop` returns true.
    pub(crate) struct WithoutTrailers<B> {
        #[pin]
        pub(crate) body: B,
        pub(crate) drop: fn(&HeaderName) -> bool,
    }
}

impl<B: http_body::Body> http_body::Body for WithoutTrailers<B> {
    type Data = B::Data;
    type Error = B::Error;

    fn poll_frame(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<B::Data>, B::Error>>> {
        let this = self.project();
        let frame = match ready!(this.body.poll_frame(cx)) {
            Some(Ok(frame)) => frame,
            ended => return Poll::Ready(ended),
        };
        let mut trailers = match frame.into_trailers() {
            Ok(trailers) => trailers,
            Err(data) => return Poll::Ready(Some(Ok(data))),
        };
        retain(&mut trailers, |name| !(this.drop)(name));
        // Trailers are the last frame: without any, the body ends.
        Poll::Ready((!trailers.is_empty()).then_some(Ok(Frame::trailers(trailers))))
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}

/// A body, in memory or streamed.
///
/// Handlers behind the layer receive requests with it, and the layer returns responses with it.
pub struct Body {
    /// The bytes that come first.
    read: Option<Bytes>,
    /// The body that comes after them.
    rest: Rest,
}

enum Rest {
    Nothing,
    Trailers(HeaderMap),
    Stream(Erased),
}

impl Body {
    /// Returns a body without content.
    #[must_use]
    pub const fn empty() -> Self {
        Self { read: None, rest: Rest::Nothing }
    }

    /// Returns a body that streams `body`.
    pub fn new<B>(body: B) -> Self
    where
        B: http_body::Body<Data = Bytes> + Send + 'static,
        B::Error: Into<BoxError>,
    {
        Self::resumed(Bytes::new(), erase(body))
    }

    /// Returns a body in memory, with its trailers.
    #[must_use]
    pub fn whole(bytes: Bytes, trailers: Option<HeaderMap>) -> Self {
        Self { read: some(bytes), rest: trailers.map_or(Rest::Nothing, Rest::Trailers) }
    }

    /// The bytes that were read of a body, and the rest of the body.
    pub(crate) fn resumed(read: Bytes, body: Erased) -> Self {
        Self { read: some(read), rest: Rest::Stream(body) }
    }
}

impl http_body::Body for Body {
    type Data = Bytes;
    type Error = BoxError;

    fn poll_frame(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, BoxError>>> {
        let this = self.get_mut();
        if let Some(chunk) = this.read.take() {
            return Poll::Ready(Some(Ok(Frame::data(chunk))));
        }
        match &mut this.rest {
            Rest::Nothing => Poll::Ready(None),
            Rest::Trailers(trailers) => {
                let trailers = std::mem::take(trailers);
                this.rest = Rest::Nothing;
                Poll::Ready(Some(Ok(Frame::trailers(trailers))))
            }
            Rest::Stream(body) => Pin::new(body).poll_frame(cx),
        }
    }

    fn is_end_stream(&self) -> bool {
        self.read.is_none()
            && match &self.rest {
                Rest::Nothing => true,
                Rest::Trailers(_) => false,
                Rest::Stream(body) => body.is_end_stream(),
            }
    }

    fn size_hint(&self) -> SizeHint {
        let read = self.read.as_ref().map_or(0, Bytes::len) as u64;
        let rest = match &self.rest {
            Rest::Nothing => SizeHint::with_exact(0),
            // The length is not declared, so that HTTP/1.1 sends the body in chunks: after a length
            // there are no trailers.
            Rest::Trailers(_) => SizeHint::new(),
            Rest::Stream(body) => body.size_hint(),
        };
        let mut hint = SizeHint::new();
        // The upper bound is set first: the lower bound of a hint must never exceed it.
        if let Some(upper) = rest.upper().and_then(|upper| upper.checked_add(read)) {
            hint.set_upper(upper);
        }
        hint.set_lower(rest.lower().saturating_add(read));
        hint
    }
}

impl Default for Body {
    fn default() -> Self {
        Self::empty()
    }
}

impl From<Bytes> for Body {
    fn from(bytes: Bytes) -> Self {
        Self::whole(bytes, None)
    }
}

impl fmt::Debug for Body {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let kind = match self.rest {
            Rest::Nothing | Rest::Trailers(_) => "in memory",
            Rest::Stream(_) => "streamed",
        };
        write!(f, "Body({kind})")
    }
}

fn some(bytes: Bytes) -> Option<Bytes> {
    (!bytes.is_empty()).then_some(bytes)
}
