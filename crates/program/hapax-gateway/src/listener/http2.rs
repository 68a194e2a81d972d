//! A connection of HTTP/2.
//!
//! 1. It takes no more memory than its places are worth. With its first place it may have four requests
//!    open and one of them under way. For as many as are allowed, it gets further places at its beginning
//!    if at least half of all are free; and each request under way beyond the first takes one. These
//!    are of its peer's share, like the first.
//! 2. A client that takes nothing of an answer for `stall` loses the connection: there is no way to
//!    end an answer that only waits for its client.
//! 3. A client that takes back most of what it asks for loses it too. What was claimed for it goes on
//!    by itself, as it does when a client hangs up.
//! 4. Without a request for `head_timeout` it is told to go (GOAWAY), and so it is when a drain begins;
//!    what is under way ends in peace.

mod activity;

use std::convert::Infallible;
use std::net::IpAddr;
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use bytes::Bytes;
use hapax_http::{Body, BoxError};
use http::{Request, Response};
use http_body::{Frame, SizeHint};
use hyper::body::Incoming;
use hyper::server::conn::http2;
use hyper::service::service_fn;
use hyper_util::rt::{TokioExecutor, TokioIo, TokioTimer};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::time::{sleep, sleep_until};

use super::ListenerContext;
use super::io::Io;
use crate::config::ServerLimits;
use crate::connection_limit::ClientPermit;
use crate::guard::WriteTimeoutIo;
use crate::guard::http2::MAX_LIST;
use crate::handler::ClientConnection;
use crate::proxy::Peer;
use crate::shutdown::ShutdownPhase;
use activity::{Activity, ConnectionState, StreamActivity};

/// Requests that a connection may have open with its own place only.
const LEAN: u32 = 4;

/// What a client may send of one body before it is read, and of all with one place, in bytes; and how
/// much more of all it may with further places.
const WINDOW: u32 = 65_535;
const MORE_WINDOW: u32 = 2 * ServerLimits::PER_CONNECTION as u32;

/// The pieces that answers are given to h2 in, and how much of one may wait there, in bytes.
const PIECE: usize = 16 * 1024;
const SEND_BUFFER: usize = 8 * 1024;

/// What an open request may take: its head until it is under way, the end of its answer afterwards.
const STREAM: usize = PIECE + SEND_BUFFER;
const _: () = assert!(STREAM >= MAX_LIST as usize);

/// Requests that a client may take back before they are looked at (CVE-2023-44487), and resets
/// that it may provoke, before the connection is ended.
const RESETS: usize = 20;
const PROVOKED: usize = 100;

/// How long a client that was told to go may take, with nothing under way.
const LEAVE: Duration = Duration::from_secs(1);

/// The pause before a request looks again for a place of its peer's share.
const AGAIN: Duration = Duration::from_millis(50);

/// Serves requests until the connection ends.
pub(super) async fn serve(
    io: Io,
    read: Vec<u8>,
    peer: Peer,
    context: &Arc<ListenerContext>,
    place: OwnedSemaphorePermit,
) {
    let connection = Arc::new(ClientConnection { heads: None, peer, switch: None });
    let room = ConnectionBudget::new(context, peer.addr.ip(), place);
    let activity = Arc::new(Activity::new());
    let served = ConnectionContext {
        context: Arc::clone(context),
        connection,
        activity: Arc::clone(&activity),
        own: Arc::new(Semaphore::new(1)),
    };
    let service = service_fn(|request| {
        let answer = served.clone().answer(request);
        Box::pin(async move { Ok::<_, Infallible>(answer.await) })
    });
    let io = WriteTimeoutIo::new(io, read, context.limits.stall);
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
    let shutdown = &context.handler.shutdown;
    let mut draining = pin!(shutdown.reached(ShutdownPhase::Draining));
    let mut told = false;
    loop {
        let idle = if told { LEAVE } else { context.limits.head_timeout };
        let look = activity.look_at(idle, context.limits.stall);
        tokio::select! {
            biased;
            ended = connection.as_mut() => {
                if let Err(error) = ended {
                    tracing::debug!(%error, "an HTTP/2 connection failed");
                }
                break;
            }
            () = draining.as_mut(), if !told => {
                told = true;
                activity.begin_to_leave();
                connection.as_mut().graceful_shutdown();
            }
            () = activity.abused() => {
                if let Some(left_out) = context.abuse.due() {
                    let peer = peer.addr;
                    tracing::info!(%peer, left_out, "a client takes back most of what it asks for");
                }
                break;
            }
            () = sleep_until(look) => match activity.state(idle, context.limits.stall) {
                ConnectionState::Alive => {}
                ConnectionState::Idle if !told => {
                    told = true;
                    activity.begin_to_leave();
                    connection.as_mut().graceful_shutdown();
                }
                ConnectionState::Idle => break,
                ConnectionState::Stalled => {
                    tracing::debug!(peer = %peer.addr, "a client takes nothing of its answer");
                    break;
                }
            },
        }
    }
}

/// What a connection has, until it ends.
struct ConnectionBudget {
    streams: u32,
    window: u32,
    _place: OwnedSemaphorePermit,
    _more: Option<(OwnedSemaphorePermit, ClientPermit)>,
}

impl ConnectionBudget {
    fn new(context: &ListenerContext, ip: IpAddr, place: OwnedSemaphorePermit) -> Self {
        let more = context.streams.saturating_sub(LEAN) as usize;
        let needed = (more * STREAM + MORE_WINDOW as usize).div_ceil(ServerLimits::PER_CONNECTION);
        let half_free = context.permits.free() >= context.permits.all() / 2;
        let permits = u32::try_from(needed).ok().filter(|_| half_free && more > 0);
        let more = permits.and_then(|permits| {
            let counted = context.clients.more(ip, needed)?;
            Some((context.permits.try_take(permits)?, counted))
        });
        let (streams, window) = match &more {
            Some(_) => (context.streams, WINDOW + MORE_WINDOW),
            None => (context.streams.min(LEAN), WINDOW),
        };
        Self { streams, window, _place: place, _more: more }
    }
}

/// What requests of one connection share.
#[derive(Clone)]
struct ConnectionContext {
    context: Arc<ListenerContext>,
    connection: Arc<ClientConnection>,
    activity: Arc<Activity>,
    /// The place of the request that may be under way without taking one.
    own: Arc<Semaphore>,
}

impl ConnectionContext {
    /// Dropped before it resolves, the client took its request back.
    async fn answer(self, request: Request<Incoming>) -> Response<Body> {
        let busy = self.activity.begin();
        let response = match self.place().await {
            Some(place) => {
                let response =
                    Arc::clone(&self.context.handler).answer(self.connection, request).await;
                let pace = self.activity.watch();
                return busy.answered(response.map(|body| {
                    let rest = Bytes::new();
                    Body::new(PacedResponse {
                        body,
                        rest,
                        pace,
                        _busy: busy.clone(),
                        _place: place,
                    })
                }));
            }
            None => Box::pin(self.context.handler.overloaded(&self.connection, request)).await,
        };
        busy.answered(response)
    }

    /// Waits for the connection's own place or for any; `None` if neither is there in time.
    async fn place(&self) -> Option<StreamPermit> {
        let own = Arc::clone(&self.own);
        // The semaphore is never closed.
        tokio::select! {
            biased;
            place = own.acquire_owned() => Some(StreamPermit { _place: place.ok()?, _counted: None }),
            place = self.another() => place,
            () = sleep(self.context.limits.head_timeout) => None,
        }
    }

    /// Waits for a place of the peer's share. Dropped, it has taken none.
    async fn another(&self) -> Option<StreamPermit> {
        let ip = self.connection.peer.addr.ip();
        let counted = loop {
            match self.context.clients.more(ip, 1) {
                Some(counted) => break counted,
                None => sleep(AGAIN).await,
            }
        };
        Some(StreamPermit { _place: self.context.permits.take().await?, _counted: Some(counted) })
    }
}

/// The place of a request, until its answer was sent.
struct StreamPermit {
    _place: OwnedSemaphorePermit,
    _counted: Option<ClientPermit>,
}

/// An answer in pieces, so that h2 asks for the next one only when it has sent the one before: then
/// it shows whether the client takes it.
struct PacedResponse {
    body: Body,
    rest: Bytes,
    pace: activity::ResponsePace,
    _busy: StreamActivity,
    _place: StreamPermit,
}

impl http_body::Body for PacedResponse {
    type Data = Bytes;
    type Error = BoxError;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, BoxError>>> {
        let this = &mut *self;
        if this.rest.is_empty() {
            match Pin::new(&mut this.body).poll_frame(cx) {
                Poll::Ready(Some(Ok(frame))) => match frame.into_data() {
                    Ok(data) => this.rest = data,
                    Err(frame) => {
                        this.pace.is_the_clients();
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
        this.pace.is_the_clients();
        let piece = this.rest.split_to(this.rest.len().min(PIECE));
        Poll::Ready(Some(Ok(Frame::data(piece))))
    }

    fn is_end_stream(&self) -> bool {
        self.rest.is_empty() && self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        let (rest, here) = (self.body.size_hint(), self.rest.len() as u64);
        let mut hint = SizeHint::new();
        // Upper first: a hint's lower bound must never pass its upper one.
        if let Some(upper) = rest.upper().and_then(|upper| upper.checked_add(here)) {
            hint.set_upper(upper);
        }
        hint.set_lower(rest.lower().saturating_add(here));
        hint
    }
}
