//! Connections of clients.

mod http1;
mod http2;
mod io;

use std::io as std_io;
use std::net::SocketAddr;
use std::pin::pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::task::JoinSet;
use tokio::time::{sleep, timeout};

use crate::config::{Limits, Network};
use crate::front::Front;
use crate::proxy::Peer;
use crate::tls::ServerTls;
use crate::work::Phase;
use io::{Io, Opening};

/// What holds for all connections.
#[derive(Debug)]
pub(crate) struct Door {
    pub(crate) front: Arc<Front>,
    pub(crate) limits: Limits,
    pub(crate) tls: Option<Arc<ServerTls>>,
    /// Requests that an HTTP/2 connection may have open.
    pub(crate) streams: u32,
    pub(crate) trusted: Vec<Network>,
    /// One for each connection, and for each request of HTTP/2 beyond a connection's first.
    pub(crate) places: Arc<Semaphore>,
}

/// Serves connections until the drain begins, then those that are there until they end. Dropping
/// the future ends them all.
pub(crate) async fn serve(listener: TcpListener, door: Arc<Door>) {
    let work = door.front.work.clone();
    let mut connections = JoinSet::new();
    let mut draining = pin!(work.reached(Phase::Draining));
    loop {
        // Further connections wait in the kernel's queue. The semaphore is never closed.
        let accepted = tokio::select! {
            biased;
            () = &mut draining => break,
            Some(_) = connections.join_next() => continue,
            accepted = async {
                let place = Arc::clone(&door.places).acquire_owned().await;
                listener.accept().await.map(|accepted| (accepted, place))
            } => accepted,
        };
        match accepted {
            Ok(((stream, peer), Ok(place))) => {
                connections.spawn(connection(stream, peer, Arc::clone(&door), place));
            }
            Ok((_, Err(_closed))) => break,
            Err(error) => {
                tracing::warn!(%error, "a connection could not be accepted");
                // Out of descriptors, most likely: it does not pass by trying at once.
                sleep(Duration::from_millis(50)).await;
            }
        }
    }
    // Who is in the kernel's queue already hears that this one is shutting down, rather than nothing.
    while let Ok(place) = Arc::clone(&door.places).try_acquire_owned()
        && let Some(Ok((stream, peer))) = at_once(|cx| listener.poll_accept(cx)).await
    {
        connections.spawn(connection(stream, peer, Arc::clone(&door), place));
    }
    drop(listener);
    while connections.join_next().await.is_some() {}
}

/// What there is without waiting.
async fn at_once<T>(mut poll: impl FnMut(&mut Context<'_>) -> Poll<T>) -> Option<T> {
    std::future::poll_fn(|cx| match poll(cx) {
        Poll::Ready(there) => Poll::Ready(Some(there)),
        Poll::Pending => Poll::Ready(None),
    })
    .await
}

async fn connection(
    stream: TcpStream,
    addr: SocketAddr,
    door: Arc<Door>,
    place: OwnedSemaphorePermit,
) {
    if let Err(error) = speak(stream, addr, &door, place).await {
        tracing::debug!(%error, "a connection ended early");
    }
}

/// Finds out what is spoken, and speaks it.
async fn speak(
    stream: TcpStream,
    addr: SocketAddr,
    door: &Arc<Door>,
    place: OwnedSemaphorePermit,
) -> std_io::Result<()> {
    stream.set_nodelay(true)?;
    let opening = timeout(door.limits.head_timeout, open(stream, door)).await;
    let Opening { io, read, http2 } = opening.unwrap_or(Err(std_io::ErrorKind::TimedOut.into()))?;
    let believed = door.trusted.iter().any(|network| network.contains(addr.ip()));
    let peer = Peer { addr, secure: door.tls.is_some(), believed, http2 };
    if http2 {
        http2::serve(io, read, peer, door, place).await;
        return Ok(());
    }
    let served = http1::serve(io, &read, peer, door).await;
    drop(place);
    served
}

/// The first bytes tell HTTP/2 from HTTP/1, or the handshake of TLS does: there, who wants HTTP/2 has
/// to say so in it (RFC 9113 3.2).
async fn open(stream: TcpStream, door: &Door) -> std_io::Result<Opening> {
    match &door.tls {
        None => io::tell(Io::Plain(stream)).await,
        Some(tls) => {
            let io = io::secure(stream, tls.now()).await?;
            let http2 = io.chose_http2();
            Ok(Opening { io, read: Vec::new(), http2 })
        }
    }
}

/// Waits until `idle` says so, looking every 20 ms; whether it did before `limit`.
pub(crate) async fn settled(limit: Duration, idle: impl Fn() -> bool) -> bool {
    let wait = async {
        while !idle() {
            sleep(Duration::from_millis(20)).await;
        }
    };
    timeout(limit, wait).await.is_ok()
}
