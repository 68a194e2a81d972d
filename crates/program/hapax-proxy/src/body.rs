//! Bodies with a minimum rate, with a guard, and with a function for frames.

use std::fmt;
use std::pin::Pin;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use bytes::Bytes;
use http::HeaderMap;
use http_body::{Frame, SizeHint};
use hyper::body::Incoming;
use tokio::time::{Instant, Sleep, sleep};

use crate::BodyError;
use crate::upstream::UploadError;

/// A client's body that fails if the client sends nothing for too long, or, if it is buffered, is
/// slower than 8 KiB a second overall, or if it ends early: h2 takes `RST_STREAM` with `NO_ERROR`
/// for a regular end.
pub struct PacedBody<F> {
    body: Incoming,
    idle_timeout: Duration,
    paced: bool,
    http2: bool,
    clean: F,
    received: usize,
    /// Total time for which it waited for the client.
    waited: Duration,
    /// Start and timeout of the current wait for the client. Time in which the body is not read
    /// does not count.
    waiting: Option<(Instant, Pin<Box<Sleep>>)>,
}

/// Minimum rate of a buffered body, in bytes a second. The body's memory is reserved while it is
/// read, and a client that sends a byte now and then would hold it for ever.
const PACE: usize = 8 * 1024;

impl<F: FnMut(&mut HeaderMap)> PacedBody<F> {
    /// Creates a body that fails after `idle_timeout` without a byte, and with `paced` also below
    /// the minimum rate. `http2` is true if it is received over HTTP/2. `clean` removes trailers
    /// that must not be passed on.
    pub const fn new(
        body: Incoming,
        idle_timeout: Duration,
        paced: bool,
        http2: bool,
        clean: F,
    ) -> Self {
        let waited = Duration::ZERO;
        Self { body, idle_timeout, paced, http2, clean, received: 0, waited, waiting: None }
    }

    /// Returns the time that the client may send nothing now.
    fn idle(&self) -> Duration {
        if !self.paced {
            return self.idle_timeout;
        }
        let due = Duration::from_secs_f64(self.received as f64 / PACE as f64);
        self.idle_timeout.min((self.idle_timeout + due).saturating_sub(self.waited))
    }
}

impl<F> fmt::Debug for PacedBody<F> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("PacedBody").field("received", &self.received).finish_non_exhaustive()
    }
}

impl<F: FnMut(&mut HeaderMap) + Unpin> http_body::Body for PacedBody<F> {
    type Data = Bytes;
    type Error = BodyError;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, BodyError>>> {
        let this = &mut *self;
        if let Poll::Ready(mut frame) = Pin::new(&mut this.body).poll_frame(cx) {
            if let Some((since, _)) = this.waiting.take() {
                this.waited += since.elapsed();
            }
            if let Some(Ok(frame)) = &mut frame {
                this.received += frame.data_ref().map_or(0, Bytes::len);
                if let Some(trailers) = frame.trailers_mut() {
                    (this.clean)(trailers);
                }
            }
            if frame.is_none() && this.http2 && !this.body.is_end_stream() {
                return Poll::Ready(Some(Err(UploadError::Broken.into())));
            }
            return Poll::Ready(frame.map(|frame| frame.map_err(Into::into)));
        }
        let idle_timeout = this.idle();
        let begin = || (Instant::now(), Box::pin(sleep(idle_timeout)));
        let (_, timer) = this.waiting.get_or_insert_with(begin);
        if timer.as_mut().poll(cx).is_ready() {
            return Poll::Ready(Some(Err(UploadError::Slow.into_error())));
        }
        Poll::Pending
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}

/// A body that keeps a guard until the body is handed over or dropped.
#[derive(Debug)]
pub struct GuardedBody<B, G> {
    body: B,
    _guard: G,
}

impl<B, G> GuardedBody<B, G> {
    /// Creates a body that keeps `guard`.
    pub const fn new(body: B, guard: G) -> Self {
        Self { body, _guard: guard }
    }
}

impl<B, G> http_body::Body for GuardedBody<B, G>
where
    B: http_body::Body<Data = Bytes> + Unpin,
    G: Unpin,
{
    type Data = Bytes;
    type Error = B::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, B::Error>>> {
        Pin::new(&mut self.body).poll_frame(cx)
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}

/// A body that calls a function for each frame, and with `None` at the end. The function also gets
/// whether no further frame follows.
#[derive(Debug)]
pub struct InspectedBody<B, F> {
    body: B,
    inspect: F,
}

impl<B, F> InspectedBody<B, F> {
    /// Creates a body that calls `inspect`.
    pub const fn new(body: B, inspect: F) -> Self {
        Self { body, inspect }
    }
}

impl<B, F> http_body::Body for InspectedBody<B, F>
where
    B: http_body::Body<Data = Bytes> + Unpin,
    F: FnMut(Option<&mut Result<Frame<Bytes>, B::Error>>, bool) + Unpin,
{
    type Data = Bytes;
    type Error = B::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, B::Error>>> {
        let mut frame = ready!(Pin::new(&mut self.body).poll_frame(cx));
        let is_end = self.body.is_end_stream();
        (self.inspect)(frame.as_mut(), is_end);
        Poll::Ready(frame)
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}
