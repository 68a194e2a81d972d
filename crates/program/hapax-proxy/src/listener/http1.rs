//! Connections of HTTP/1.

use std::convert::Infallible;
use std::future::Future;
use std::io;
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use http::{Request, StatusCode, Version};
use hyper::body::Incoming;
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper_util::rt::{TokioIo, TokioTimer};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::time::timeout;

use super::ListenerContext;
use super::io::Io;
use crate::guard::{Guarded, MAX_FIELDS, MAX_HEAD};
use crate::handler::{ClientRequest, Peer, ProxyHandler};
use crate::shutdown::ShutdownPhase;
use crate::tunnel::{self, Switch};

/// Bytes of a connection that hyper buffers; a head must fit.
const MAX_BUFFER: usize = MAX_HEAD + 16 * 1024;

/// Time for which a client may continue to send after its last response, and the bytes that it may
/// send.
const LINGER: Duration = Duration::from_secs(2);
const LINGER_BYTES: usize = 64 << 20;

/// Serves requests until the connection ends or switches to another protocol, and then forwards
/// that protocol. `read` contains bytes that were already read.
pub(super) async fn serve<H: ProxyHandler>(
    io: Io,
    read: &[u8],
    peer: Peer,
    context: &Arc<ListenerContext<H>>,
) -> io::Result<()> {
    let guarded = Guarded::new(io, read, context.config.stall);
    let switch = Switch::default();
    let heads = guarded.heads();
    let shutdown = &context.shutdown;
    let is_old = AtomicBool::new(false);
    let service = service_fn(|request: Request<Incoming>| {
        is_old.store(request.version() == Version::HTTP_10, Ordering::Relaxed);
        let heads = Arc::clone(&heads);
        let (rejection, switch) = (heads.rejection(), Some(switch.clone()));
        let request = ClientRequest { request, rejection, peer, switch };
        let answer = Arc::clone(context).answer(request);
        Box::pin(async move {
            let response = answer.await;
            if response.status() != StatusCode::SWITCHING_PROTOCOLS {
                heads.answered();
            }
            Ok::<_, Infallible>(response)
        })
    });
    let mut connection = http1::Builder::new()
        .timer(TokioTimer::new())
        .header_read_timeout(context.config.head_timeout)
        .max_buf_size(MAX_BUFFER)
        .max_headers(MAX_FIELDS)
        .serve_connection(TokioIo::new(guarded), service);
    let ended = {
        let mut closing = pin!(shutdown.reached(ShutdownPhase::Closing));
        let mut is_closing = false;
        std::future::poll_fn(|cx| {
            if !is_closing && closing.as_mut().poll(cx).is_ready() {
                is_closing = true;
                Pin::new(&mut connection).graceful_shutdown();
            }
            connection.poll_without_shutdown(cx)
        })
        .await
    };
    if let Err(error) = &ended {
        tracing::debug!(%error, "a connection failed");
    }
    let parts = connection.into_parts();
    let (io, withheld, sending) = parts.io.into_inner().into_parts();
    if let Some(tunnel) = switch.take() {
        // The withheld bytes follow the request that switched the protocol, and are not checked.
        let (Ok(()), Some(withheld)) = (ended, withheld) else { return Ok(()) };
        let read = [&parts.read_buf[..], &withheld[..]].concat();
        return tokio::select! {
            passed = tunnel::run(io, &read, tunnel) => passed,
            () = shutdown.reached(ShutdownPhase::Closing) => Ok(()),
        };
    }
    if is_old.into_inner() && ended.is_err_and(|error| error.is_user()) {
        // For HTTP/1.0 a response ends with its connection: without a reset, a truncated response
        // would look complete.
        return io.reset();
    }
    // No more bytes can arrive, so the connection can simply be closed.
    if sending { linger(io).await } else { Ok(()) }
}

/// Closes in stages (RFC 9112 9.6): closing while the client still sends would reset the
/// connection, and the client might never read its response.
async fn linger(mut io: Io) -> io::Result<()> {
    io.shutdown().await?;
    let rest = async {
        let mut buffer = [0; 4096];
        let mut left = LINGER_BYTES;
        loop {
            let count = io.read(&mut buffer).await?;
            left = left.saturating_sub(count);
            if count == 0 || left == 0 {
                return Ok(());
            }
        }
    };
    // After the timeout the connection is reset.
    timeout(LINGER, rest).await.unwrap_or(Ok(()))
}
