//! Connections of HTTP/2.
//!
//! 1. The memory of a connection is limited by its permits. With its first permit it may have four
//!    requests open and one of them in progress. It takes more permits at its beginning, for the
//!    configured number of open requests, if at least half of all permits are free. Each request
//!    in progress beyond the first takes one more. All of them count for the limit of its peer.
//! 2. A client that receives nothing of a response for `stall` loses the connection: a response
//!    that only waits for its client cannot be ended alone.
//! 3. A client that resets most of its requests loses the connection as well. Executions that were
//!    claimed for it continue, as they do when a client disconnects.
//! 4. A connection without a request for `head_timeout` gets a GOAWAY, as every connection does
//!    when a drain begins; requests in progress finish.

mod activity;

use std::convert::Infallible;
use std::net::IpAddr;
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use bytes::Bytes;
use http::{Request, Response};
use http_body::{Frame, SizeHint};
use http_body_util::Either;
use hyper::body::Incoming;
use hyper::server::conn::http2;
use hyper::service::service_fn;
use hyper_util::rt::{TokioExecutor, TokioIo, TokioTimer};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::time::{sleep, sleep_until};

use super::io::Io;
use super::{ListenerContext, PER_CONNECTION};
use crate::body::GuardedBody;
use crate::connection_limit::ClientPermit;
use crate::guard::http2::MAX_LIST;
use crate::guard::{WriteTimeoutIo, http2 as form};
use crate::handler::{ClientRequest, Peer, ProxyHandler};
use crate::shutdown::{ActiveRequest, ShutdownPhase};
use activity::{Activity, ConnectionState, StreamActivity};

/// Requests that a connection may have open with its first permit only.
const STREAMS_WITH_ONE_PERMIT: u32 = 4;

/// Bytes of one body that a client may send before they are read, the same for all bodies with one
/// permit, and the additional bytes for all bodies with further permits.
const WINDOW: u32 = 65_535;
const MORE_WINDOW: u32 = 2 * PER_CONNECTION as u32;

/// Size of the pieces that h2 gets of a response, and of its buffer for each response, in bytes.
const PIECE: usize = 16 * 1024;
const SEND_BUFFER: usize = 8 * 1024;

/// Memory of an open request: its head until it is in progress, the end of its response afterwards.
const STREAM: usize = PIECE + SEND_BUFFER;
const _: () = assert!(STREAM >= MAX_LIST as usize);

/// Requests that a client may reset before they are handled (CVE-2023-44487), and resets that it
/// may provoke, before the connection is closed.
const RESETS: usize = 20;
const PROVOKED: usize = 100;

/// Time that a client may take to close after a GOAWAY, with no request in progress.
const LEAVE: Duration = Duration::from_secs(1);

/// Pause before a request tries again to get a permit within its peer's limit.
const AGAIN: Duration = Duration::from_millis(50);

/// Serves requests until the connection ends.
pub(super) async fn serve<H: ProxyHandler>(
    io: Io,
    read: Vec<u8>,
    peer: Peer,
    context: &Arc<ListenerContext<H>>,
    permit: OwnedSemaphorePermit,
) {
    let room = ConnectionBudget::new(context, peer.addr.ip(), permit);
    let activity = Arc::new(Activity::new());
    let served = Arc::new(ConnectionContext {
        context: Arc::clone(context),
        peer,
        activity: Arc::clone(&activity),
        own: Arc::new(Semaphore::new(1)),
    });
    let service = service_fn(|request| {
        let answer = Arc::clone(&served).answer(request);
        Box::pin(async move { Ok::<_, Infallible>(answer.await) })
    });
    let io = WriteTimeoutIo::new(io, read, context.config.stall);
    let mut connection = pin!(
        http2::Builder::new(TokioExecutor::new())
            .timer(TokioTimer::new())
            .max_concurrent_streams(room.streams)
            .initial_stream_window_size(WINDOW)
            .initial_connection_window_size(room.window)
            .max_header_list_size(MAX_LIST)
            .header_table_size(4096)
            .max_frame_size(PIECE as u32)
            .max_send_buf_size(SEND_BUFFER)
            .max_pending_accept_reset_streams(RESETS)
            .max_local_error_reset_streams(PROVOKED)
            .serve_connection(TokioIo::new(io), service)
    );
    let shutdown = &context.shutdown;
    let mut draining = pin!(shutdown.reached(ShutdownPhase::Draining));
    let mut has_goaway = false;
    loop {
        let idle = if has_goaway { LEAVE } else { context.config.head_timeout };
        let look = activity.look_at(idle, context.config.stall);
        tokio::select! {
            biased;
            ended = connection.as_mut() => {
                if let Err(error) = ended {
                    tracing::debug!(%error, "an HTTP/2 connection failed");
                }
                break;
            }
            () = draining.as_mut(), if !has_goaway => {
                has_goaway = true;
                activity.restart_idle_time();
                connection.as_mut().graceful_shutdown();
            }
            () = activity.abused() => {
                if let Some(left_out) = context.abuse.due() {
                    let peer = peer.addr;
                    tracing::info!(%peer, left_out, "a client resets most of its requests");
                }
                break;
            }
            () = sleep_until(look) => match activity.state(idle, context.config.stall) {
                ConnectionState::Alive => {}
                ConnectionState::Idle if !has_goaway => {
                    has_goaway = true;
                    activity.restart_idle_time();
                    connection.as_mut().graceful_shutdown();
                }
                ConnectionState::Idle => break,
                ConnectionState::Stalled => {
                    tracing::debug!(peer = %peer.addr, "a client receives nothing of its response");
                    break;
                }
            },
        }
    }
}

/// Permits and limits of a connection, until it ends.
struct ConnectionBudget {
    streams: u32,
    window: u32,
    _permit: OwnedSemaphorePermit,
    _more: Option<(OwnedSemaphorePermit, ClientPermit)>,
}

impl ConnectionBudget {
    fn new<H>(context: &ListenerContext<H>, ip: IpAddr, permit: OwnedSemaphorePermit) -> Self {
        let more = context.config.streams.saturating_sub(STREAMS_WITH_ONE_PERMIT) as usize;
        let needed = (more * STREAM + MORE_WINDOW as usize).div_ceil(PER_CONNECTION);
        let half_free = context.permits.free() >= context.permits.all() / 2;
        let permits = u32::try_from(needed).ok().filter(|_| half_free && more > 0);
        let more = permits.and_then(|permits| {
            let counted = context.clients.more(ip, needed)?;
            Some((context.permits.try_take(permits)?, counted))
        });
        let (streams, window) = match &more {
            Some(_) => (context.config.streams, WINDOW + MORE_WINDOW),
            None => (context.config.streams.min(STREAMS_WITH_ONE_PERMIT), WINDOW),
        };
        Self { streams, window, _permit: permit, _more: more }
    }
}

/// State that the requests of one connection share.
struct ConnectionContext<H> {
    context: Arc<ListenerContext<H>>,
    peer: Peer,
    activity: Arc<Activity>,
    /// The permit for the request that needs no further one.
    own: Arc<Semaphore>,
}

/// Body of a response; without a permit for the request, a short one.
type StreamBody<B> = Either<PacedResponse<GuardedBody<B, ActiveRequest>>, B>;

impl<H: ProxyHandler> ConnectionContext<H> {
    /// Answers a request. If the future is dropped before it resolves, the client has reset the
    /// request.
    async fn answer(self: Arc<Self>, request: Request<Incoming>) -> Response<StreamBody<H::Body>> {
        let busy = self.activity.begin();
        let response = match self.permit().await {
            Some(permit) => {
                let response = Arc::clone(&self.context).answer(self.settle(request)).await;
                let pace = self.activity.watch();
                return busy.answered(response.map(|body| {
                    let rest = Bytes::new();
                    Either::Left(PacedResponse {
                        body,
                        rest,
                        pace,
                        _busy: busy.clone(),
                        _permit: permit,
                    })
                }));
            }
            None => {
                let handler = Arc::clone(&self.context.handler);
                Box::pin(handler.overloaded(self.peer, request)).await
            }
        };
        busy.answered(response.map(Either::Right))
    }

    /// Converts a request to the form of HTTP/1.1, or adds the reason to reject it.
    fn settle(&self, request: Request<Incoming>) -> ClientRequest {
        let (mut parts, body) = request.into_parts();
        let rejection = form::settle(&mut parts, &self.context.config.trimmed).err();
        let request = Request::from_parts(parts, body);
        ClientRequest { request, rejection, peer: self.peer, switch: None }
    }

    /// Waits for the connection's own permit or for another one; returns `None` after the timeout.
    async fn permit(&self) -> Option<StreamPermit> {
        let own = Arc::clone(&self.own);
        // The semaphore is never closed.
        tokio::select! {
            biased;
            permit = own.acquire_owned() => Some(StreamPermit { _permit: permit.ok()?, _counted: None }),
            permit = self.another() => permit,
            () = sleep(self.context.config.head_timeout) => None,
        }
    }

    /// Waits for a permit within the peer's limit. If the future is dropped, no permit was taken.
    async fn another(&self) -> Option<StreamPermit> {
        let ip = self.peer.addr.ip();
        let counted = loop {
            match self.context.clients.more(ip, 1) {
                Some(counted) => break counted,
                None => sleep(AGAIN).await,
            }
        };
        Some(StreamPermit { _permit: self.context.permits.take().await?, _counted: Some(counted) })
    }
}

/// The permit of a request, until its response was sent.
struct StreamPermit {
    _permit: OwnedSemaphorePermit,
    _counted: Option<ClientPermit>,
}

/// A response in pieces: h2 requests the next piece only when it has sent the one before, which
/// shows whether the client receives it.
struct PacedResponse<B> {
    body: B,
    rest: Bytes,
    pace: activity::ResponsePace,
    _busy: StreamActivity,
    _permit: StreamPermit,
}

impl<B: http_body::Body<Data = Bytes> + Unpin> http_body::Body for PacedResponse<B> {
    type Data = Bytes;
    type Error = B::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, B::Error>>> {
        let this = &mut *self;
        if this.rest.is_empty() {
            match Pin::new(&mut this.body).poll_frame(cx) {
                Poll::Ready(Some(Ok(frame))) => match frame.into_data() {
                    Ok(data) => this.rest = data,
                    Err(frame) => {
                        this.pace.wait_for_client();
                        return Poll::Ready(Some(Ok(frame)));
                    }
                },
                Poll::Pending => {
                    this.pace.is_ours();
                    return Poll::Pending;
                }
                ended => return ended,
            }
        }
        this.pace.wait_for_client();
        let piece = this.rest.split_to(this.rest.len().min(PIECE));
        Poll::Ready(Some(Ok(Frame::data(piece))))
    }

    fn is_end_stream(&self) -> bool {
        self.rest.is_empty() && self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        let (rest, here) = (self.body.size_hint(), self.rest.len() as u64);
        let mut hint = SizeHint::new();
        // Upper first: the lower bound must never exceed the upper one.
        if let Some(upper) = rest.upper().and_then(|upper| upper.checked_add(here)) {
            hint.set_upper(upper);
        }
        hint.set_lower(rest.lower().saturating_add(here));
        hint
    }
}
