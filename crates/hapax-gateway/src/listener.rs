//! Connections of clients.

use std::convert::Infallible;
use std::io;
use std::net::SocketAddr;
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::time::Duration;

use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper_util::rt::{TokioIo, TokioTimer};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::Semaphore;
use tokio::task::JoinSet;
use tokio::time::{sleep, timeout};

use crate::config::Limits;
use crate::front::Front;
use crate::guard::{Guarded, MAX_HEAD};
use crate::proxy::Peer;
use crate::work::Phase;

/// What hyper buffers of a connection; a head must fit.
const MAX_BUFFER: usize = MAX_HEAD + 16 * 1024;

/// How long a client may go on sending after its last answer, and how much.
const LINGER: Duration = Duration::from_secs(2);
const LINGER_BYTES: usize = 64 << 20;

/// Serves connections until the drain begins, then those that are there until they end. Dropping
/// the future ends them all.
pub(crate) async fn serve(listener: TcpListener, front: Arc<Front>, limits: Limits) {
    let work = front.work.clone();
    let places = Arc::new(Semaphore::new(limits.connections));
    let mut connections = JoinSet::new();
    let mut draining = pin!(work.reached(Phase::Draining));
    loop {
        // Further connections wait in the kernel's queue. The semaphore is never closed.
        let accepted = tokio::select! {
            biased;
            () = &mut draining => break,
            Some(_) = connections.join_next() => continue,
            accepted = async {
                let place = Arc::clone(&places).acquire_owned().await;
                listener.accept().await.map(|accepted| (accepted, place))
            } => accepted,
        };
        match accepted {
            Ok(((stream, peer), place)) => {
                let front = Arc::clone(&front);
                connections.spawn(async move {
                    connection(stream, peer, front, limits).await;
                    drop(place);
                });
            }
            Err(error) => {
                tracing::warn!(%error, "a connection could not be accepted");
                // Out of descriptors, most likely: it does not pass by trying at once.
                sleep(Duration::from_millis(50)).await;
            }
        }
    }
    drop(listener);
    while connections.join_next().await.is_some() {}
}

async fn connection(stream: TcpStream, peer: SocketAddr, front: Arc<Front>, limits: Limits) {
    if let Err(error) = stream.set_nodelay(true) {
        tracing::debug!(%error, "a connection was gone at once");
        return;
    }
    let guarded = Guarded::new(stream, limits.stall);
    let (heads, work) = (guarded.heads(), front.work.clone());
    let service = service_fn(|request| {
        let answer = Arc::clone(&front).answer(Arc::clone(&heads), Peer(peer), request);
        Box::pin(async move { Ok::<_, Infallible>(answer.await) })
    });
    let mut connection = http1::Builder::new()
        .timer(TokioTimer::new())
        .header_read_timeout(limits.head_timeout)
        .max_buf_size(MAX_BUFFER)
        .serve_connection(TokioIo::new(guarded), service);
    let ended = {
        let mut closing = pin!(work.reached(Phase::Closing));
        let mut told = false;
        std::future::poll_fn(|cx| {
            if !told && closing.as_mut().poll(cx).is_ready() {
                told = true;
                Pin::new(&mut connection).graceful_shutdown();
            }
            connection.poll_without_shutdown(cx)
        })
        .await
    };
    if let Err(error) = ended {
        tracing::debug!(%error, "a connection failed");
    }
    let (stream, sending) = connection.into_parts().io.into_inner().into_inner();
    // Where nothing more comes, closing is closing.
    if sending && let Err(error) = linger(stream).await {
        tracing::debug!(%error, "a connection ended abruptly");
    }
}

/// Closes in stages (RFC 9112 9.6): to close while the client still sends would reset the
/// connection, and the client might never read its answer.
async fn linger(mut stream: TcpStream) -> io::Result<()> {
    stream.shutdown().await?;
    let rest = async {
        let mut buffer = [0; 4096];
        let mut left = LINGER_BYTES;
        loop {
            let count = stream.read(&mut buffer).await?;
            left = left.saturating_sub(count);
            if count == 0 || left == 0 {
                return Ok(());
            }
        }
    };
    // Too long: it is reset after all.
    timeout(LINGER, rest).await.unwrap_or(Ok(()))
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
