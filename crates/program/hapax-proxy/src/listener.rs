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

use http::{HeaderName, Response};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{Notify, OwnedSemaphorePermit};
use tokio::task::JoinSet;
use tokio::time::{sleep, timeout};

use crate::body::GuardedBody;
use crate::connection_limit::{
    ClientLimits, ClientNetwork, ClientPermit, ConnectionLimit, SheddableEntry,
};
use crate::handler::{ClientRequest, Peer, ProxyHandler};
use crate::log_throttle::LogThrottle;
use crate::network::IpNetwork;
use crate::shutdown::{ActiveRequest, Shutdown, ShutdownPhase};
use crate::tls::ServerTls;
use io::{DetectedConnection, Io};

/// Time without a byte after which a connection may be closed in favour of another one. The first
/// bytes of a client directly follow its connection, or one lost packet.
const SILENT: Duration = Duration::from_secs(1);

/// Memory of one connection: heads of requests and responses, buffers (those of TLS included) on
/// either side, and bodies of up to 16 KiB. An HTTP/2 connection counts as more if it may have more
/// than four requests open, and each request in progress on it beyond the first counts as another
/// connection.
pub const PER_CONNECTION: usize = 192 << 10;

/// Settings of a listener.
#[derive(Clone, Debug)]
pub struct ListenerConfig {
    /// Largest number of connections; each HTTP/2 request beyond its connection's first counts too.
    pub connections: usize,
    /// Largest number for one peer, except those in `trusted`.
    pub connections_per_peer: usize,
    /// Timeout of a request's head, of an idle connection, and of an HTTP/2 request that waits for a
    /// permit.
    pub head_timeout: Duration,
    /// Time for which a client may receive nothing of a response.
    pub stall: Duration,
    /// Requests that an HTTP/2 connection may have open, at least 1.
    pub streams: u32,
    /// Trusted proxies: their `X-Forwarded-*` headers are used, and they have no limit of their own.
    pub trusted: Vec<IpNetwork>,
    /// Certificate of the listener; `None` without TLS.
    pub tls: Option<Arc<ServerTls>>,
    /// Headers whose values are trimmed in HTTP/2; white space around another value is a reason to
    /// reject the request.
    pub trimmed: Vec<HeaderName>,
}

impl Default for ListenerConfig {
    fn default() -> Self {
        Self {
            connections: 1024,
            connections_per_peer: 768,
            head_timeout: Duration::from_secs(30),
            stall: Duration::from_secs(30),
            streams: 100,
            trusted: IpNetwork::loopback(),
            tls: None,
            trimmed: Vec::new(),
        }
    }
}

/// Settings and state that all connections share.
struct ListenerContext<H> {
    handler: Arc<H>,
    config: ListenerConfig,
    shutdown: Shutdown,
    /// One permit for each connection, and one for each HTTP/2 request beyond a connection's first.
    permits: ConnectionLimit,
    clients: ClientLimits,
    /// Log lines about clients that reset most of their requests.
    abuse: LogThrottle,
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

impl<H: ProxyHandler> ListenerContext<H> {
    fn new(handler: Arc<H>, config: ListenerConfig, shutdown: Shutdown) -> Self {
        let permits = ConnectionLimit::new(config.connections, "clients", SILENT);
        let clients = ClientLimits::new(config.connections_per_peer, config.trusted.clone());
        Self { handler, config, shutdown, permits, clients, abuse: LogThrottle::default() }
    }

    /// Answers a request, which is active until its response is completely handed over. During the
    /// drain, the response is the last of its connection.
    async fn answer(
        self: Arc<Self>,
        request: ClientRequest,
    ) -> Response<GuardedBody<H::Body, ActiveRequest>> {
        let active = self.shutdown.begin_request();
        let peer = request.peer;
        let mut response = Arc::clone(&self.handler).answer(request).await;
        if self.shutdown.phase() >= ShutdownPhase::Draining {
            peer.close(&mut response);
        }
        response.map(|body| GuardedBody::new(body, active))
    }

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

/// Accepts connections and answers their requests by `handler` until the drain begins, then serves
/// the open ones until they end. Dropping the future ends them all.
pub async fn serve<H: ProxyHandler>(
    listener: TcpListener,
    handler: Arc<H>,
    config: ListenerConfig,
    shutdown: Shutdown,
) {
    let context = Arc::new(ListenerContext::new(handler, config, shutdown.clone()));
    let mut connections = JoinSet::new();
    let mut draining = pin!(shutdown.reached(ShutdownPhase::Draining));
    // The accepted connection that waits for a permit; further ones wait in the kernel's queue.
    let mut next: Option<AcceptedConnection> = None;
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
            (stream, peer) = context.permits.accept(&listener), if next.is_none() => {
                next = context.admit(stream, peer);
            }
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

async fn connection<H: ProxyHandler>(
    arrival: AcceptedConnection,
    context: Arc<ListenerContext<H>>,
    permit: OwnedSemaphorePermit,
) {
    let AcceptedConnection { stream, peer, silent, shed, counted } = arrival;
    if let Err(error) = speak(stream, peer, &context, permit, (silent, shed)).await {
        tracing::debug!(%error, "a connection ended early");
    }
    drop(counted);
}

/// Detects the protocol of a connection and serves it.
async fn speak<H: ProxyHandler>(
    stream: TcpStream,
    addr: SocketAddr,
    context: &Arc<ListenerContext<H>>,
    permit: OwnedSemaphorePermit,
    (silent, shed): (SheddableEntry, Arc<Notify>),
) -> std_io::Result<()> {
    stream.set_nodelay(true)?;
    let opening = async {
        first_byte(&stream, &shed).await?;
        drop(silent);
        open(stream, &context.config).await
    };
    let opening = timeout(context.config.head_timeout, opening).await;
    let DetectedConnection { io, read, http2 } =
        opening.unwrap_or(Err(std_io::ErrorKind::TimedOut.into()))?;
    let trusted = context.config.trusted.iter().any(|network| network.contains(addr.ip()));
    let peer = Peer { addr, secure: context.config.tls.is_some(), trusted, http2 };
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
async fn open(stream: TcpStream, config: &ListenerConfig) -> std_io::Result<DetectedConnection> {
    match &config.tls {
        None => io::detect(Io::Plain(stream)).await,
        Some(tls) => {
            let io = io::secure(stream, tls.now()).await?;
            let http2 = io.chose_http2();
            Ok(DetectedConnection { io, read: Vec::new(), http2 })
        }
    }
}

/// Polls `idle` every 20 ms until it returns true or `limit` has passed; returns whether it did.
pub async fn settled(limit: Duration, idle: impl Fn() -> bool) -> bool {
    let wait = async {
        while !idle() {
            sleep(Duration::from_millis(20)).await;
        }
    };
    timeout(limit, wait).await.is_ok()
}
