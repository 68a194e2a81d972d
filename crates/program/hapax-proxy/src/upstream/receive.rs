//! Responses, and the reuse of their connections.

use std::collections::HashMap;
use std::fmt;
use std::future::Future;
use std::mem;
use std::pin::Pin;
use std::sync::atomic::Ordering;
use std::sync::{Arc, MutexGuard, PoisonError};
use std::task::{Context, Poll};
use std::time::Duration;

use bytes::Bytes;
use http::header::{HeaderMap, HeaderValue, TRANSFER_ENCODING};
use http::{Response, StatusCode, Version};
use http_body::{Body as _, Frame, SizeHint};
use hyper::body::Incoming;
use hyper::upgrade::Upgraded;
use tokio::runtime::Handle;
use tokio::sync::OwnedSemaphorePermit;
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
        // The connection has left HTTP: nothing returns to the pool.
        let used = Return { inner: Arc::clone(inner), number: 0 };
        return Ok(response.map(|body| ReceivedBody::new(body, used, *timeout)));
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
    let keep = !(request.counts && inner.connect.fresh);
    let used = Return::enter(inner, UsedConnection { connection, permit, keep });
    let body = ReceivedBody { http2, left: length, ..ReceivedBody::new(body, used, *timeout) };
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

/// Connections whose responses are being read.
#[derive(Debug, Default)]
pub(super) struct UsedConnections {
    last: u64,
    by_number: HashMap<u64, UsedConnection>,
}

#[derive(Debug)]
struct UsedConnection {
    connection: UpstreamConnection,
    permit: OwnedSemaphorePermit,
    /// Whether it may be reused.
    keep: bool,
}

impl UsedConnection {
    /// Puts the connection into the pool, if it may be reused, once the response is completely read
    /// and the request completely written; ends it if that takes too long after the body was read or
    /// dropped. The permit is released when neither the connection nor the rest of the request holds
    /// resources.
    async fn settle(mut self, inner: Arc<Inner>) {
        let meter = Arc::clone(&self.connection.meter);
        let over = Instant::now();
        let stuck = async {
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
            // Once requests are cut off, no connection is reused.
            biased;
            () = cut(inner.cut.subscribe()) => false,
            ready = self.connection.reusable() => ready,
            () = stuck => false,
        };
        if ready && self.keep {
            inner.pool.put(self.connection);
        } else {
            // The driver drops the rest of the request before the permit is released.
            self.connection.end().await;
        }
        drop(self.permit);
    }
}

impl Inner {
    /// Ends the connections whose responses are being read, also those that wait for a slow client.
    pub(super) fn end_used(self: &Arc<Self>) {
        let used = mem::take(&mut self.lock_used().by_number);
        used.into_values().for_each(|used| self.settle(used));
    }

    fn settle(self: &Arc<Self>, used: UsedConnection) {
        // Without a runtime nothing can wait: the connection ends with its fields.
        if let Ok(runtime) = Handle::try_current() {
            runtime.spawn(used.settle(Arc::clone(self)));
        }
    }

    fn lock_used(&self) -> MutexGuard<'_, UsedConnections> {
        // No change can panic half way.
        self.used.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Returns a connection to its pool: when the body of its response ends, fails or is dropped.
struct Return {
    inner: Arc<Inner>,
    number: u64,
}

impl Return {
    fn enter(inner: &Arc<Inner>, used: UsedConnection) -> Self {
        let mut all = inner.lock_used();
        all.last += 1;
        let this = Self { inner: Arc::clone(inner), number: all.last };
        all.by_number.insert(this.number, used);
        drop(all);
        // The cut takes what it finds; it may have looked before.
        if *inner.cut.borrow() {
            inner.end_used();
        }
        this
    }

    fn now(&self) {
        let used = self.inner.lock_used().by_number.remove(&self.number);
        let Some(mut used) = used else { return };
        if used.keep && used.connection.is_reusable() && !*self.inner.cut.borrow() {
            self.inner.pool.put(used.connection);
        } else {
            self.inner.settle(used);
        }
    }
}

impl Drop for Return {
    fn drop(&mut self) {
        self.now();
    }
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
    waiting: Option<Wait>,
    used: Return,
}

/// Timeout and end of the upstream, while a body waits for bytes.
struct Wait {
    timer: Pin<Box<Sleep>>,
    cut: Pin<Box<dyn Future<Output = ()> + Send>>,
}

impl ReceivedBody {
    fn new(body: Incoming, used: Return, idle_timeout: Duration) -> Self {
        Self { body, http2: false, left: None, idle_timeout, waiting: None, used }
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
                this.used.now();
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
        let (idle_timeout, upstream) = (this.idle_timeout, &this.used.inner);
        let waiting = this.waiting.get_or_insert_with(|| Wait {
            timer: Box::pin(sleep(idle_timeout)),
            cut: Box::pin(cut(upstream.cut.subscribe())),
        });
        if waiting.cut.as_mut().poll(cx).is_ready() {
            let error = UpstreamError::Broken(ENDING.into());
            return Poll::Ready(Some(Err(error.into())));
        }
        if waiting.timer.as_mut().poll(cx).is_ready() {
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
