//! Asking a service what became of an operation.

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use hapax::store::BoxFuture;
use hapax_http::Body;
use hapax_http::header::{
    IDEMPOTENCY_ATTEMPT, IDEMPOTENCY_FENCE, IDEMPOTENCY_OPERATION_ID, operation_id,
};
use hapax_http::server::{Doubt, Reconcile, Reconciled};
use hapax_http::stored::bodiless;
use http::header::{CONTENT_LENGTH, HOST, HeaderMap, HeaderName, HeaderValue};
use http::uri::PathAndQuery;
use http::{Request, Response, StatusCode, Uri};
use http_body_util::{BodyExt, Limited};
use tokio::sync::Semaphore;

use crate::proxy::headers::X_FORWARDED_HOST;
use crate::upstream::{Dialling, Origin, Upstream};

/// Response of the service that is asked: the status that the operation was answered with.
const IDEMPOTENCY_STATUS: HeaderName = HeaderName::from_static("idempotency-status");

/// How many questions may be under way at once.
const CONCURRENT: usize = 256;

/// How many answers are read at once; further ones wait in order, unread, for as long as whoever asked
/// does. Each may have as many bytes as a response that is kept.
const READ_AT_ONCE: usize = 4;

/// Asks by `GET`: 2xx means that it happened and this is the response; 404 that it did not, and
/// never will under the fence that was asked about; anything else that nobody can say yet.
#[derive(Clone, Debug)]
pub(crate) struct Asker {
    upstream: Upstream,
    path: PathAndQuery,
    /// The scope headers and the key header.
    shown: Vec<HeaderName>,
    max_body: usize,
    readers: Arc<Semaphore>,
}

impl Asker {
    /// Asks at `path` of `origin` in HTTP/1.1, with the retry's headers `shown`. An answer has at most
    /// `max_body` bytes and no silence longer than `timeout`.
    pub(crate) fn new(
        (origin, path): (Origin, PathAndQuery),
        shown: Vec<HeaderName>,
        max_body: usize,
        timeout: Duration,
        dialling: &Dialling,
    ) -> Self {
        let upstream = Upstream::new(origin, timeout, CONCURRENT, dialling.http1());
        let readers = Arc::new(Semaphore::new(READ_AT_ONCE));
        Self { upstream, path, shown, max_body, readers }
    }

    /// Where it asks.
    pub(crate) const fn upstream(&self) -> &Upstream {
        &self.upstream
    }

    async fn ask(self, doubt: Doubt) -> Reconciled {
        let mut request = Request::new(Body::empty());
        *request.uri_mut() = Uri::from(self.path.clone());
        let headers = request.headers_mut();
        if let Ok(host) = HeaderValue::from_str(self.upstream.authority().as_str()) {
            headers.insert(HOST, host);
        }
        for name in &self.shown {
            // Its own host is whom it is asked at.
            let shown = if *name == HOST { &X_FORWARDED_HOST } else { name };
            for value in doubt.request.headers.get_all(name) {
                headers.append(shown, value.clone());
            }
        }
        headers.insert(IDEMPOTENCY_FENCE, doubt.fence.get().into());
        headers.insert(IDEMPOTENCY_ATTEMPT, doubt.attempt.into());
        headers.insert(IDEMPOTENCY_OPERATION_ID, operation_id(doubt.id));
        match self.upstream.send(request).await {
            Ok(response) if response.status().is_success() => self.happened(response).await,
            Ok(response) if response.status() == StatusCode::NOT_FOUND => Reconciled::DidNotHappen,
            Ok(response) => {
                let status = response.status().as_u16();
                tracing::info!(status, "the reconcile URL cannot say yet what became of a request");
                Reconciled::CannotSay
            }
            Err(error) => {
                tracing::warn!(%error, "the reconcile URL gave no answer");
                Reconciled::CannotSay
            }
        }
    }

    async fn happened(&self, response: Response<Body>) -> Reconciled {
        let (mut parts, body) = response.into_parts();
        let Some(status) = status(parts.status, &parts.headers) else {
            tracing::warn!("the reconcile URL answered with an invalid Idempotency-Status");
            return Reconciled::CannotSay;
        };
        let Some((body, trailers)) = read(body, self.max_body, &self.readers).await else {
            tracing::warn!("the reconcile URL's answer broke off, or is too large to keep");
            return Reconciled::CannotSay;
        };
        parts.status = status;
        // The named status may be one that has no body. Any other length is checked by the layer.
        let body = if bodiless(status) { Bytes::new() } else { body };
        if bodiless(status) {
            parts.headers.remove(CONTENT_LENGTH);
        }
        Reconciled::Happened(Response::from_parts(parts, body), trailers)
    }
}

impl Reconcile for Asker {
    fn reconcile(&self, doubt: Doubt) -> BoxFuture<'static, Reconciled> {
        Box::pin(self.clone().ask(doubt))
    }
}

/// A body of at most `max` bytes and its trailers, read when it is its turn; `None` if there is no such
/// body.
///
/// Dropped, it gives up its turn.
async fn read(body: Body, max: usize, readers: &Semaphore) -> Option<(Bytes, Option<HeaderMap>)> {
    // The semaphore is never closed.
    let _turn = readers.acquire().await.ok()?;
    let length = http_body::Body::size_hint(&body).exact().and_then(|it| usize::try_from(it).ok());
    let mut body = Limited::new(body, max);
    // Piece by piece into one buffer: what is read is there once.
    let mut bytes = Vec::with_capacity(length.unwrap_or_default().min(max));
    let mut trailers = None;
    while let Some(frame) = body.frame().await {
        match frame.ok()?.into_data() {
            Ok(data) => bytes.extend_from_slice(&data),
            Err(frame) => trailers = frame.into_trailers().ok().or(trailers),
        }
    }
    Some((bytes.into_boxed_slice().into(), trailers))
}

/// The status of the operation: the answer's own, unless it names another. `None`: it names none
/// that a response can have, and guessing would make up an outcome.
fn status(own: StatusCode, headers: &HeaderMap) -> Option<StatusCode> {
    let mut named = headers.get_all(IDEMPOTENCY_STATUS).iter();
    let Some(first) = named.next() else { return Some(own) };
    let status = StatusCode::from_bytes(first.as_bytes()).ok()?;
    let final_status = (200..=599).contains(&status.as_u16());
    (final_status && named.next().is_none()).then_some(status)
}

#[cfg(test)]
mod tests {
    use std::pin::{Pin, pin};
    use std::task::{Context, Poll, Waker};

    use http_body::Frame;
    use tokio::sync::mpsc;

    use super::*;

    /// What is sent to it, until nobody sends any more.
    struct Sent(mpsc::UnboundedReceiver<Bytes>);

    impl http_body::Body for Sent {
        type Data = Bytes;
        type Error = hapax_http::BoxError;

        fn poll_frame(
            mut self: Pin<&mut Self>,
            cx: &mut Context<'_>,
        ) -> Poll<Option<Result<Frame<Bytes>, Self::Error>>> {
            self.0.poll_recv(cx).map(|piece| piece.map(|piece| Ok(Frame::data(piece))))
        }
    }

    #[test]
    fn few_answers_are_read_at_once() {
        let readers = Semaphore::new(READ_AT_ONCE);
        let mut cx = Context::from_waker(Waker::noop());
        let begin = || {
            let (send, sent) = mpsc::unbounded_channel();
            (send, Box::pin(read(Body::new(Sent(sent)), 8, &readers)))
        };
        let mut open: Vec<_> = (0..READ_AT_ONCE).map(|_| begin()).collect();
        for (_, reading) in &mut open {
            assert!(reading.as_mut().poll(&mut cx).is_pending());
        }
        // Whole, but not read.
        let (send, mut waiting) = begin();
        send.send(Bytes::from_static(b"whole")).unwrap();
        drop(send);
        assert!(waiting.as_mut().poll(&mut cx).is_pending());
        // One that is given up, like one that ends, lets the next one read.
        drop(open.pop());
        let Poll::Ready(Some((body, _))) = waiting.as_mut().poll(&mut cx) else { panic!() };
        assert_eq!(body, "whole");
        drop(waiting);
        let (send, reading) = &mut open[0];
        for piece in ["12345", "6789"] {
            send.send(Bytes::from_static(piece.as_bytes())).unwrap();
        }
        assert_eq!(reading.as_mut().poll(&mut cx), Poll::Ready(None));
        assert!(pin!(readers.acquire_many(2)).poll(&mut cx).is_ready());
    }

    #[tokio::test]
    async fn an_answer_is_read_whole_and_kept_once() {
        let readers = Semaphore::new(1);
        let (send, sent) = mpsc::unbounded_channel();
        for piece in ["a", "", "bc"] {
            send.send(Bytes::from_static(piece.as_bytes())).unwrap();
        }
        drop(send);
        assert_eq!(read(Body::new(Sent(sent)), 3, &readers).await.unwrap().0, "abc");
        let mut trailers = HeaderMap::new();
        trailers.insert("grpc-status", HeaderValue::from_static("5"));
        let said = Body::whole(Bytes::from_static(b"abc"), Some(trailers.clone()));
        let read_of = read(said, 3, &readers).await.unwrap();
        assert_eq!((&*read_of.0, read_of.1), (&b"abc"[..], Some(trailers)));
        assert_eq!(read(Body::from(Bytes::from_static(b"abcd")), 3, &readers).await, None);
    }

    #[test]
    fn a_named_status_wins_and_a_bad_one_says_nothing() {
        let of = |values: &[&'static str]| {
            let mut headers = HeaderMap::new();
            for value in values {
                headers.append(IDEMPOTENCY_STATUS, HeaderValue::from_static(value));
            }
            status(StatusCode::OK, &headers).map(|status| status.as_u16())
        };
        assert_eq!(of(&[]), Some(200));
        assert_eq!(of(&["201"]), Some(201));
        assert_eq!(of(&["422"]), Some(422));
        for bad in [&["101"][..], &["999"], &["2"], &["201", "201"], &[""]] {
            assert_eq!(of(bad), None, "{bad:?}");
        }
    }
}
