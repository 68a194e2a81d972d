//! Responses, and the reuse of their connections.

use std::fmt;
use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::task::{Context, Poll};
use std::time::Duration;

use bytes::Bytes;
use http::header::{HeaderMap, HeaderValue, TRANSFER_ENCODING};
use http::{Response, StatusCode, Version};
use http_body::{Body as _, Frame, SizeHint};
use hyper::body::Incoming;
use hyper::upgrade::Upgraded;
use tokio::sync::{OwnedSemaphorePermit, watch};
use tokio::time::{Instant, Sleep, sleep, sleep_until};

use super::connection::UpstreamConnection;
use super::{ENDING, Inner, MAX_FIELDS, Upstream, UpstreamError, cut};
use crate::BodyError;
use crate::tunnel::Switch;

/// Time that a connection may make no progress after its response is complete or dropped, as with a
/// server that answered early and neither reads the rest of the request nor closes.
const SETTLE: Duration = Duration::from_secs(1);

/// Properties of a request that decide how its response is read.
#[derive(Clone, Copy, Debug)]
pub(super) struct RequestTraits {
    /// Whether the request wants to switch protocols.
    pub(super) switch: bool,
    /// Whether its method is `HEAD`.
    pub(super) head: bool,
    /// Whether its response is stored or decides about other requests.
    pub(super) counts: bool,
}

/// Returns the response, and reuses the connection after the response is completely read.
pub(super) async fn receive(
    Upstream { inner, timeout }: &Upstream,
    mut connection: UpstreamConnection,
    mut response: Response<Incoming>,
    permit: OwnedSemaphorePermit,
    request: RequestTraits,
) -> Result<Response<ReceivedBody>, UpstreamError> {
    if response.status() == StatusCode::SWITCHING_PROTOCOLS {
        if !request.switch {
            return Err(UpstreamError::Broken("the upstream switched protocols unasked".into()));
        }
        // The connection is open until its driver has released it.
        let io = hyper::upgrade::on(&mut response).await;
        let io = io.map_err(|error| UpstreamError::Broken(error.into()))?;
        let tunnel = Tunnel { io, idle_timeout: *timeout, _permit: permit };
        response.extensions_mut().insert(Switch::to(tunnel));
        return Ok(response.map(|body| ReceivedBody::new(body, inner, *timeout)));
    }
    let (parts, body) = response.into_parts();
    let bodiless = [StatusCode::NO_CONTENT, StatusCode::NOT_MODIFIED].contains(&parts.status);
    let is_bare = request.head || bodiless;
    if let Some(why) = unreadable(&parts.headers, is_bare) {
        // The permit is released when the connection holds no resources any more.
        connection.end().await;
        return Err(UpstreamError::Broken(why.into()));
    }
    let http2 = parts.version == Version::HTTP_2;
    let length = body.size_hint().exact().filter(|_| !is_bare);
    let by_closing =
        !http2 && !is_bare && length.is_none() && !parts.headers.contains_key(TRANSFER_ENCODING);
    if by_closing && request.counts && !inner.warned.swap(true, Ordering::Relaxed) {
        tracing::warn!(
            upstream = %inner.origin.authority,
            "responses end with their connections: a truncated one looks complete"
        );
    }
    connection.had_head |= request.head && !http2;
    let (over, is_over) = watch::channel(());
    let keep = !(request.counts && inner.connect.fresh);
    tokio::spawn(settle(Arc::clone(inner), connection, permit, is_over, keep));
    let body = ReceivedBody::new(body, inner, *timeout);
    let body = ReceivedBody { http2, left: length, over: Some(over), ..body };
    Ok(Response::from_parts(parts, body))
}

/// Returns the reason for which a response cannot be forwarded unchanged.
///
/// Of several transfer codings hyper removes only `chunked`; the rest would be delivered and stored
/// encoded, without its name (RFC 9112 6.1).
fn unreadable(headers: &HeaderMap, is_bare: bool) -> Option<&'static str> {
    if headers.len() > MAX_FIELDS {
        return Some("the response has too many header fields");
    }
    let mut codings = headers.get_all(TRANSFER_ENCODING).iter().map(HeaderValue::as_bytes);
    let is_clear = match (codings.next(), codings.next()) {
        (None, _) => true,
        // Older servers send `identity` for no coding (RFC 2616 3.6).
        (Some(coding), None) => {
            let is = |name: &[u8]| coding.trim_ascii().eq_ignore_ascii_case(name);
            is(b"chunked") || is(b"identity")
        }
        _ => false,
    };
    (!is_bare && !is_clear).then_some("the response's transfer coding is not chunked alone")
}

/// A connection that has left HTTP. Dropping it releases its permit.
#[derive(Debug)]
pub(crate) struct Tunnel {
    pub(crate) io: Upgraded,
    /// Timeout without a byte in either direction.
    pub(crate) idle_timeout: Duration,
    pub(crate) _permit: OwnedSemaphorePermit,
}

/// Puts the connection into the pool, with `keep`, once the response is completely read and the
/// request completely written; ends it if that takes too long. The permit is released when neither
/// the connection nor the rest of the request holds resources.
async fn settle(
    inner: Arc<Inner>,
    mut connection: UpstreamConnection,
    permit: OwnedSemaphorePermit,
    is_over: watch::Receiver<()>,
    keep: bool,
) {
    let meter = Arc::clone(&connection.meter);
    let over = |mut is_over: watch::Receiver<()>| async move {
        // The sender is dropped when the body is read, fails or is dropped.
        while is_over.changed().await.is_ok() {}
    };
    let stuck = async {
        over(is_over.clone()).await;
        let over = Instant::now();
        loop {
            // The timeout begins anew while the server still reads the request.
            let deadline = over.max(meter.last()) + SETTLE;
            if deadline <= Instant::now() {
                break;
            }
            sleep_until(deadline).await;
        }
    };
    let ready = tokio::select! {
        ready = connection.reusable(over(is_over.clone())) => ready,
        () = stuck => false,
        () = cut(inner.cut.subscribe()) => false,
    };
    if ready && keep {
        inner.pool.put(connection);
    } else {
        // The driver drops the rest of the request before the permit is released.
        connection.end().await;
    }
    drop(permit);
}

/// The body of a response. It fails if the upstream sends nothing for too long, if it is cut off,
/// or if it ends early. The last check is for `RST_STREAM` with `NO_ERROR`, which h2 takes for a
/// regular end.
pub struct ReceivedBody {
    body: Incoming,
    http2: bool,
    /// Remaining bytes of the declared length.
    left: Option<u64>,
    idle_timeout: Duration,
    /// Set while it waits for the upstream; the time of a slow client does not count.
    waiting: Option<Pin<Box<Sleep>>>,
    cut: Pin<Box<dyn Future<Output = ()> + Send>>,
    /// Dropped when the body ends or is dropped.
    over: Option<watch::Sender<()>>,
}

impl ReceivedBody {
    fn new(body: Incoming, upstream: &Inner, idle_timeout: Duration) -> Self {
        let cut = Box::pin(cut(upstream.cut.subscribe()));
        Self { body, http2: false, left: None, idle_timeout, waiting: None, cut, over: None }
    }

    /// Returns whether a body that ended should have continued.
    fn is_cut_short(&self) -> bool {
        (self.http2 && !self.body.is_end_stream()) || self.left.is_some_and(|left| left > 0)
    }
}

impl fmt::Debug for ReceivedBody {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ReceivedBody").field("left", &self.left).finish_non_exhaustive()
    }
}

impl http_body::Body for ReceivedBody {
    type Data = Bytes;
    type Error = BodyError;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, BodyError>>> {
        let this = &mut *self;
        if let Poll::Ready(frame) = Pin::new(&mut this.body).poll_frame(cx) {
            this.waiting = None;
            if !matches!(frame, Some(Ok(_))) || this.body.is_end_stream() {
                this.over = None;
            }
            return Poll::Ready(match frame {
                Some(Ok(frame)) => {
                    let came = frame.data_ref().map_or(0, |data| data.len() as u64);
                    this.left = this.left.map(|left| left.saturating_sub(came));
                    Some(Ok(frame))
                }
                Some(Err(error)) => Some(Err(UpstreamError::Broken(error.into()).into())),
                None if this.is_cut_short() => {
                    let error = UpstreamError::Broken("the response ended early".into());
                    Some(Err(error.into()))
                }
                None => None,
            });
        }
        if this.cut.as_mut().poll(cx).is_ready() {
            let error = UpstreamError::Broken(ENDING.into());
            return Poll::Ready(Some(Err(error.into())));
        }
        let idle_timeout = this.idle_timeout;
        let timer = this.waiting.get_or_insert_with(|| Box::pin(sleep(idle_timeout)));
        if timer.as_mut().poll(cx).is_ready() {
            return Poll::Ready(Some(Err(UpstreamError::Timeout.into())));
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
