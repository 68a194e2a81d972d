//! Reconciliation: requests to a service about the outcome of an operation.

mod background;
mod backoff;
mod hook;
mod probe;
mod unretried;

use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use bytes::Bytes;
use hapax_core::machine::Verdict;
use hapax_core::store::BoxFuture;
use hapax_http::Body;
use hapax_http::header::{
    IDEMPOTENCY_ATTEMPT, IDEMPOTENCY_FENCE, IDEMPOTENCY_OPERATION_ID, IDEMPOTENCY_OUTCOME,
    operation_id,
};
use hapax_http::server::{Reconcile, ReconcileRequest, ReconciledResponse, ScopePart};
use hapax_http::stored_response::bodiless;
use hapax_proxy::headers::X_FORWARDED_HOST;
use hapax_proxy::{ConnectOptions, Origin, ReceivedBody, Upstream, UpstreamError};
use http::header::{
    AUTHORIZATION, CONTENT_LENGTH, COOKIE, HOST, HeaderMap, HeaderName, HeaderValue,
};
use http::uri::PathAndQuery;
use http::{Request, Response, StatusCode, Uri};
use http_body_util::{BodyExt, Limited};
use tokio::sync::Semaphore;
use tokio::time::{Instant, timeout};

use crate::config::ANSWER;
use crate::metrics::{ReconcileResult, RouteCounts};
pub(crate) use background::{BackgroundReconciler, NotRequestedCounts};
pub(crate) use hook::{hook_name, hostname};
pub(crate) use probe::{finding, warn_of};
pub(crate) use unretried::{NotRequested, Prepared, UnretriedReconciler};

/// Value of `Idempotency-Outcome` by which a 404 confirms that the operation did not happen. A 404
/// without it confirms nothing: routers and proxies answer it for unknown paths.
const DID_NOT_HAPPEN: &str = "did-not-happen";

/// Minimum interval of warnings about a reconcile URL without a usable response.
const WARN_EVERY: Duration = Duration::from_secs(60);

/// Response header of the service: the status of the operation's own response.
const IDEMPOTENCY_STATUS: HeaderName = HeaderName::from_static("idempotency-status");

/// Largest number of reconcile requests in progress.
const CONCURRENT: usize = 256;

/// Responses that are read at once, for retries and without one; others wait in order, unread, within the timeout of their
/// requests. Each may be as large as a stored response. Slow responses that no client waits for delay no retry.
const READ_AT_ONCE: usize = 4;
const UNRETRIED_AT_ONCE: usize = 2;

/// Results of a reconcile request.
#[derive(Debug)]
enum ReconcileReply {
    Happened(Response<Bytes>, Option<HeaderMap>),
    /// 404 with the marker: it did not happen, and never will under the requested fence.
    DidNotHappen,
    /// 404 without the marker.
    NotFound,
    /// Another status.
    Other(StatusCode),
    /// A response that cannot be stored.
    Unusable(&'static str),
    Failed(UpstreamError),
    TimedOut,
}

impl ReconcileReply {
    const fn verdict(&self) -> ReconcileResult {
        match self {
            Self::Happened(..) => ReconcileResult::Happened,
            Self::DidNotHappen => ReconcileResult::DidNotHappen,
            Self::NotFound => ReconcileResult::NotFound,
            Self::Other(_) => ReconcileResult::Other,
            Self::Unusable(_) => ReconcileResult::Unusable,
            Self::Failed(_) | Self::TimedOut => ReconcileResult::NoAnswer,
        }
    }

    /// Describes the result, for logs and findings.
    fn describe(&self) -> String {
        match self {
            Self::Happened(response, _) => format!("answered {}", response.status().as_u16()),
            Self::DidNotHappen => {
                format!("answered 404 with `Idempotency-Outcome: {DID_NOT_HAPPEN}`")
            }
            Self::NotFound => {
                format!("answered 404 without `Idempotency-Outcome: {DID_NOT_HAPPEN}`")
            }
            Self::Other(status) => format!("answered {}", status.as_u16()),
            Self::Unusable(why) => (*why).to_owned(),
            Self::Failed(UpstreamError::Unreachable(error)) => {
                format!("could not be reached: {error}")
            }
            Self::Failed(UpstreamError::Broken(error)) => format!("broke off: {error}"),
            Self::Failed(UpstreamError::Busy) => "has too many requests in progress".to_owned(),
            Self::Failed(UpstreamError::Timeout | UpstreamError::Upload(_)) | Self::TimedOut => {
                format!("gave no response within {ANSWER:?}")
            }
        }
    }
}

/// Client of a reconcile URL, which sends `GET` requests for operations of any route.
#[derive(Clone, Debug)]
pub(crate) struct ReconcileClient {
    upstream: Upstream,
    path: PathAndQuery,
    /// The parts of the scope, and the key header. For a claim, `Authorization` is sent.
    shown: Vec<ScopePart>,
    max_body: usize,
    readers: Arc<Semaphore>,
    /// The readers of responses that no retry waits for.
    unretried_readers: Arc<Semaphore>,
    /// Time of the last warning about an unusable response.
    warned: Arc<Mutex<Option<Instant>>>,
}

impl ReconcileClient {
    /// Creates a client of `path` at `origin` over HTTP/1.1, which sends the parts `shown` of the
    /// retry. A response has at most `max_body` bytes and no pause longer than `timeout`.
    pub(crate) fn new(
        (origin, path): (Origin, PathAndQuery),
        shown: Vec<ScopePart>,
        max_body: usize,
        timeout: Duration,
        connect: &ConnectOptions,
    ) -> Self {
        let upstream = Upstream::new(origin, timeout, CONCURRENT, connect.http1());
        let [readers, unretried_readers] =
            [READ_AT_ONCE, UNRETRIED_AT_ONCE].map(|permits| Arc::new(Semaphore::new(permits)));
        let warned = Arc::default();
        Self { upstream, path, shown, max_body, readers, unretried_readers, warned }
    }

    /// Returns the URL without its query, which may be secret.
    pub(crate) fn url(&self) -> String {
        let scheme = if self.upstream.origin().secure { "https" } else { "http" };
        format!("{scheme}://{}{}", self.upstream.authority(), self.path.path())
    }

    /// Returns whether a warning is due, and notes it.
    fn may_warn(&self) -> bool {
        let mut warned = self.warned.lock().unwrap_or_else(PoisonError::into_inner);
        let due = warned.is_none_or(|at| at.elapsed() >= WARN_EVERY);
        if due {
            *warned = Some(Instant::now());
        }
        due
    }

    /// Returns the server of the URL.
    pub(crate) const fn upstream(&self) -> &Upstream {
        &self.upstream
    }

    /// Creates a request without fields of an operation.
    fn request(&self) -> Request<Body> {
        let mut request = Request::new(Body::empty());
        *request.uri_mut() = Uri::from(self.path.clone());
        if let Ok(host) = HeaderValue::from_str(self.upstream.authority().as_str()) {
            request.headers_mut().insert(HOST, host);
        }
        request
    }

    /// Requests the outcome of an operation. Without a retry `authorization` replaces that of one.
    async fn fetch(
        &self,
        undecided: &ReconcileRequest,
        authorization: Option<&HeaderValue>,
    ) -> ReconcileReply {
        let without_retry = unretried::is_without_retry(undecided);
        let readers = if without_retry { &self.unretried_readers } else { &self.readers };
        let mut request = self.request();
        let headers = request.headers_mut();
        let (mut cookies, mut sent) = (Vec::new(), Vec::new());
        for part in &self.shown {
            if let ScopePart::Cookie(_) = part {
                cookies.extend(part.cookie(&undecided.request.headers));
                continue;
            }
            // Of a claim, the token that the service verifies itself.
            let name = part.header();
            if sent.contains(&name) {
                // Two claims are of one token.
                continue;
            }
            sent.push(name);
            // The request's `Host` is that of the reconcile URL.
            let shown = if *name == HOST { &X_FORWARDED_HOST } else { name };
            for value in undecided.request.headers.get_all(name) {
                headers.append(shown, value.clone());
            }
        }
        // With all cookies these are sent already.
        if let Ok(value) = HeaderValue::from_bytes(&cookies.join(&b"; "[..]))
            && !cookies.is_empty()
        {
            headers.entry(COOKIE).or_insert(value);
        }
        if let Some(value) = authorization.filter(|_| without_retry) {
            headers.insert(AUTHORIZATION, value.clone());
        }
        headers.insert(IDEMPOTENCY_FENCE, undecided.fence.get().into());
        headers.insert(IDEMPOTENCY_ATTEMPT, undecided.attempt.into());
        headers.insert(IDEMPOTENCY_OPERATION_ID, operation_id(undecided.id));
        self.send(request, readers).await
    }

    /// Sends a request, and reads the response within [`ANSWER`].
    async fn send(&self, request: Request<Body>, readers: &Semaphore) -> ReconcileReply {
        let answer = async {
            match self.upstream.send(request).await {
                Ok(response) if response.status().is_success() => {
                    self.happened(response, readers).await
                }
                Ok(response) if response.status() == StatusCode::NOT_FOUND => {
                    match is_marked(response.headers()) {
                        true => ReconcileReply::DidNotHappen,
                        false => ReconcileReply::NotFound,
                    }
                }
                Ok(response) => ReconcileReply::Other(response.status()),
                Err(error) => ReconcileReply::Failed(error),
            }
        };
        timeout(ANSWER, answer).await.unwrap_or(ReconcileReply::TimedOut)
    }

    async fn happened(
        &self,
        response: Response<ReceivedBody>,
        readers: &Semaphore,
    ) -> ReconcileReply {
        let (mut parts, body) = response.into_parts();
        let Some(status) = status(parts.status, &parts.headers) else {
            return ReconcileReply::Unusable("answered with an invalid `Idempotency-Status`");
        };
        let Some((body, trailers)) = read(body, self.max_body, readers).await else {
            return ReconcileReply::Unusable(
                "broke off its response, or its body is too large to store",
            );
        };
        parts.status = status;
        // The status may not allow a body. The layer checks any other length.
        let body = if bodiless(status) { Bytes::new() } else { body };
        if bodiless(status) {
            parts.headers.remove(CONTENT_LENGTH);
        }
        ReconcileReply::Happened(Response::from_parts(parts, body), trailers)
    }
}

/// A [`ReconcileClient`] of one route, which counts the results.
#[derive(Clone, Debug)]
pub(crate) struct RouteReconciler {
    pub(crate) reconciler: ReconcileClient,
    /// The route's name.
    pub(crate) route: Arc<str>,
    pub(crate) counts: Arc<RouteCounts>,
    /// `Authorization` of requests without a retry.
    pub(crate) authorization: Option<HeaderValue>,
}

impl Reconcile for RouteReconciler {
    fn reconcile(
        &self,
        undecided: ReconcileRequest,
    ) -> BoxFuture<'static, Verdict<ReconciledResponse>> {
        let Self { reconciler, route, counts, authorization } = self.clone();
        Box::pin(async move {
            if unretried::is_without_retry(&undecided) {
                counts.reconciles_without_retry();
            }
            let reply = reconciler.fetch(&undecided, authorization.as_ref()).await;
            counts.reconciled(reply.verdict());
            match reply {
                ReconcileReply::Happened(response, trailers) => {
                    Verdict::Happened(ReconciledResponse { response, trailers })
                }
                ReconcileReply::DidNotHappen => Verdict::DidNotHappen,
                reply => {
                    if reconciler.may_warn() {
                        let (url, answer) = (reconciler.url(), reply.describe());
                        tracing::warn!(
                            route = &*route,
                            url,
                            answer,
                            "the reconcile URL gave no usable answer, so retries get 409 outcome-unknown: \
                             answer 2xx with the response, or 404 with `Idempotency-Outcome: \
                             did-not-happen`"
                        );
                    }
                    Verdict::CannotSay
                }
            }
        })
    }
}

/// Returns whether a 404 confirms that the operation did not happen.
fn is_marked(headers: &HeaderMap) -> bool {
    let mut values = headers.get_all(IDEMPOTENCY_OUTCOME).iter();
    let marked = values.next().is_some_and(|value| value == DID_NOT_HAPPEN);
    marked && values.next().is_none()
}

/// Reads a body of at most `max` bytes and its trailers once a permit is free; returns `None` if it
/// fails or is larger.
///
/// Dropping the future releases the permit.
async fn read<B: http_body::Body<Data = Bytes> + Unpin>(
    body: B,
    max: usize,
    readers: &Semaphore,
) -> Option<(Bytes, Option<HeaderMap>)>
where
    B::Error: Into<hapax_http::BoxError>,
{
    // The semaphore is never closed.
    let _turn = readers.acquire().await.ok()?;
    let length = http_body::Body::size_hint(&body).exact().and_then(|it| usize::try_from(it).ok());
    let mut body = Limited::new(body, max);
    // Piece by piece into one buffer, so that the bytes exist once.
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

/// Returns the status of the operation: the response's own, unless a header names another one.
/// Returns `None` if that is not the status of a final response; guessing it would invent an
/// outcome.
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

    /// A body of the pieces that are sent, until the sender is dropped.
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
    fn at_most_four_reconcile_responses_are_read_at_once() {
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
        // Complete, but not read.
        let (send, mut waiting) = begin();
        send.send(Bytes::from_static(b"whole")).unwrap();
        drop(send);
        assert!(waiting.as_mut().poll(&mut cx).is_pending());
        // A read that is dropped or ends releases its permit for the next one.
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
    async fn a_reconcile_response_is_read_completely_without_a_second_copy() {
        let readers = Semaphore::new(1);
        let (send, sent) = mpsc::unbounded_channel();
        for piece in ["a", "", "bc"] {
            send.send(Bytes::from_static(piece.as_bytes())).unwrap();
        }
        drop(send);
        assert_eq!(read(Body::new(Sent(sent)), 3, &readers).await.unwrap().0, "abc");
        let mut trailers = HeaderMap::new();
        trailers.insert("grpc-status", HeaderValue::from_static("5"));
        let reply = Body::whole(Bytes::from_static(b"abc"), Some(trailers.clone()));
        let read_of = read(reply, 3, &readers).await.unwrap();
        assert_eq!((&*read_of.0, read_of.1), (&b"abc"[..], Some(trailers)));
        assert_eq!(read(Body::from(Bytes::from_static(b"abcd")), 3, &readers).await, None);
    }

    #[test]
    fn a_named_status_takes_precedence_and_an_invalid_one_is_no_verdict() {
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
