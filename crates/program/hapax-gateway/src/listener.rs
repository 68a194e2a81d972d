//! Listener for clients' connections.

mod http1;
mod http2;
mod io;

use std::io as std_io;
use std::net::SocketAddr;
use std::pin::pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use hapax_http::log_throttle::LogThrottle;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{Notify, OwnedSemaphorePermit};
use tokio::task::JoinSet;
use tokio::time::{sleep, timeout};

use crate::config::{IpNetwork, ServerLimits};
use crate::connection_limit::{
    ClientLimits, ClientNetwork, ClientPermit, ConnectionLimit, SheddableEntry,
};
use crate::handler::RequestHandler;
use crate::proxy::Peer;
use crate::shutdown::ShutdownPhase;
use crate::tls::ServerTls;
use io::{DetectedConnection, Io};

/// Time without a byte after which a connection may be closed in favour of another one. The first
/// bytes of a client directly follow its connection, or one lost packet.
pub(crate) const SILENT: Duration = Duration::from_secs(1);

/// Settings and state that all connections share.
#[derive(Debug)]
pub(crate) struct ListenerContext {
    pub(crate) handler: Arc<RequestHandler>,
    pub(crate) limits: ServerLimits,
    pub(crate) tls: Option<Arc<ServerTls>>,
    /// Requests that an HTTP/2 connection may have open.
    pub(crate) streams: u32,
    pub(crate) trusted: Vec<IpNetwork>,
    /// One permit for each connection, and one for each HTTP/2 request beyond a connection's first.
    pub(crate) permits: ConnectionLimit,
    pub(crate) clients: ClientLimits,
    /// Log lines about clients that reset most of their requests.
    pub(crate) abuse: LogThrottle,
}

/// A connection that was accepted.
struct AcceptedConnection {
    stream: TcpStream,
    peer: SocketAddr,
    /// The entry as sheddable, until the first byte arrives.
    silent: SheddableEntry,
    shed: Arc<Notify>,
    counted: ClientPermit,
}

impl ListenerContext {
    /// Counts a connection for its peer; returns `None` if the peer has too many.
    fn admit(&self, stream: TcpStream, peer: SocketAddr) -> Option<AcceptedConnection> {
        let sheddable = self.permits.sheddable();
        let counted = self.clients.admit(peer.ip(), &self.permits)?;
        let shed = Arc::default();
        // From here on, so that the connection can be shed before its task runs.
        let silent = sheddable.enter(ClientNetwork::of(peer.ip()), Arc::clone(&shed));
        Some(AcceptedConnection { stream, peer, silent, shed, counted })
    }
}

/// Accepts and serves connections until the drain begins, then serves the open ones until they end.
/// Dropping the future ends them all.
pub(crate) async fn serve(listener: TcpListener, context: Arc<ListenerContext>) {
    let shutdown = context.handler.shutdown.clone();
    let mut connections = JoinSet::new();
    let mut draining = pin!(shutdown.reached(ShutdownPhase::Draining));
    // The accepted connection that waits for a permit; further ones wait in the kernel's queue.
    let mut next: Option<AcceptedConnection> = None;
    let failures = LogThrottle::default();
    loop {
        // Cancel-safe: an accepted connection is already in `next`, and a permit that was not
        // handed over is free again.
        tokio::select! {
            biased;
            () = &mut draining => break,
            Some(_) = connections.join_next() => {}
            Some(permit) = context.permits.take(), if next.is_some() => {
                if let Some(arrival) = next.take() {
                    connections.spawn(connection(arrival, Arc::clone(&context), permit));
                }
            }
            accepted = listener.accept(), if next.is_none() => match accepted {
                Ok((stream, peer)) => next = context.admit(stream, peer),
                Err(error) => {
                    if let Some(left_out) = failures.due() {
                        tracing::warn!(%error, left_out, "a connection could not be accepted");
                    }
                    // Most likely the process has no free descriptors: an immediate retry would
                    // fail too.
                    sleep(Duration::from_millis(50)).await;
                }
            },
        }
    }
    // Connections in the kernel's queue get the response `draining` instead of none.
    while let Some(permit) = context.permits.try_take(1) {
        if next.is_none() {
            let Some(Ok((stream, peer))) = at_once(|cx| listener.poll_accept(cx)).await else {
                break;
            };
            next = context.admit(stream, peer);
        }
        if let Some(arrival) = next.take() {
            connections.spawn(connection(arrival, Arc::clone(&context), permit));
        }
    }
    drop(listener);
    while connections.join_next().await.is_some() {}
}

/// Returns the result of `poll` if it is ready now.
async fn at_once<T>(mut poll: impl FnMut(&mut Context<'_>) -> Poll<T>) -> Option<T> {
    std::future::poll_fn(|cx| match poll(cx) {
        Poll::Ready(there) => Poll::Ready(Some(there)),
        Poll::Pending => Poll::Ready(None),
    })
    .await
}

async fn connection(
    arrival: AcceptedConnection,
    context: Arc<ListenerContext>,
    permit: OwnedSemaphorePermit,
) {
    let AcceptedConnection { stream, peer, silent, shed, counted } = arrival;
    if let Err(error) = speak(stream, peer, &context, permit, (silent, shed)).await {
        tracing::debug!(%error, "a connection ended early");
    }
    drop(counted);
}

/// Detects the protocol of a connection and serves it.
async fn speak(
    stream: TcpStream,
    addr: SocketAddr,
    context: &Arc<ListenerContext>,
    permit: OwnedSemaphorePermit,
    (silent, shed): (SheddableEntry, Arc<Notify>),
) -> std_io::Result<()> {
    stream.set_nodelay(true)?;
    let opening = async {
        first_byte(&stream, &shed).await?;
        drop(silent);
        open(stream, context).await
    };
    let opening = timeout(context.limits.head_timeout, opening).await;
    let DetectedConnection { io, read, http2 } =
        opening.unwrap_or(Err(std_io::ErrorKind::TimedOut.into()))?;
    let trusted = context.trusted.iter().any(|network| network.contains(addr.ip()));
    let peer = Peer { addr, secure: context.tls.is_some(), trusted, http2 };
    if http2 {
        http2::serve(io, read, peer, context, permit).await;
        return Ok(());
    }
    let served = http1::serve(io, &read, peer, context).await;
    drop(permit);
    served
}

/// Waits until there is something to read, or fails if the connection is shed.
async fn first_byte(stream: &TcpStream, shed: &Notify) -> std_io::Result<()> {
    let mut byte = [0];
    tokio::select! {
        // A byte that has arrived takes precedence.
        biased;
        peeked = stream.peek(&mut byte) => peeked.map(drop),
        () = shed.notified() => Err(std_io::ErrorKind::ConnectionAborted.into()),
    }
}

/// Detects HTTP/2 or HTTP/1: without TLS from the first bytes, with TLS from the handshake, in
/// which a client must negotiate HTTP/2 (RFC 9113 3.2).
async fn open(stream: TcpStream, context: &ListenerContext) -> std_io::Result<DetectedConnection> {
    match &context.tls {
        None => io::detect(Io::Plain(stream)).await,
        Some(tls) => {
            let io = io::secure(stream, tls.now()).await?;
            let http2 = io.chose_http2();
            Ok(DetectedConnection { io, read: Vec::new(), http2 })
        }
    }
}

/// Polls `idle` every 20 ms until it returns true or `limit` has passed; returns whether it did.
pub(crate) async fn settled(limit: Duration, idle: impl Fn() -> bool) -> bool {
    let wait = async {
        while !idle() {
            sleep(Duration::from_millis(20)).await;
        }
    };
    timeout(limit, wait).await.is_ok()
}
