//! Connections to the upstream, and proof of what was written to them.

use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::task::{Context, Poll};
use std::time::Duration;

use hyper::client::conn::http1;
use hyper_util::rt::TokioIo;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::task::JoinHandle;
use tokio::time::Instant;

use hapax_http::Body;

/// How much was handed to the kernel, and when last.
#[derive(Debug)]
pub(super) struct Meter {
    written: AtomicU64,
    last_ms: AtomicU64,
    since: Instant,
}

impl Meter {
    fn new() -> Self {
        Self { written: AtomicU64::new(0), last_ms: AtomicU64::new(0), since: Instant::now() }
    }

    /// Bytes the kernel took so far. Exact once the connection has [`ended`](Wire::end): then
    /// nobody can write any more.
    pub(super) fn written(&self) -> u64 {
        self.written.load(Ordering::Acquire)
    }

    /// When it last took any.
    pub(super) fn last(&self) -> Instant {
        self.since + Duration::from_millis(self.last_ms.load(Ordering::Relaxed))
    }

    fn add(&self, count: usize) {
        self.written.fetch_add(count as u64, Ordering::Release);
        let since = u64::try_from(self.since.elapsed().as_millis()).unwrap_or(u64::MAX);
        self.last_ms.store(since, Ordering::Relaxed);
    }
}

/// One connection: what sends on it, and the task that drives it.
#[derive(Debug)]
pub(super) struct Wire {
    pub(super) sender: http1::SendRequest<Body>,
    pub(super) meter: Arc<Meter>,
    driver: JoinHandle<()>,
}

impl Wire {
    /// Speaks HTTP/1.1 on `io`. Nothing is written yet.
    pub(super) async fn open<S>(io: S) -> hyper::Result<Self>
    where
        S: AsyncRead + AsyncWrite + Send + Unpin + 'static,
    {
        let meter = Arc::new(Meter::new());
        let io = TokioIo::new(Metered { io, meter: Arc::clone(&meter) });
        let (sender, connection) =
            http1::Builder::new().max_buf_size(super::MAX_BUFFER).handshake::<_, Body>(io).await?;
        let driver = tokio::spawn(async move {
            if let Err(error) = connection.await {
                tracing::debug!(%error, "an upstream connection ended");
            }
        });
        Ok(Self { sender, meter, driver })
    }

    /// Ends the connection and waits until its driver has stopped. From then on the meter stands.
    pub(super) async fn end(&mut self) {
        self.driver.abort();
        // Aborted, panicked or finished: in each case it runs no more.
        let _ = (&mut self.driver).await;
    }
}

impl Drop for Wire {
    fn drop(&mut self) {
        self.driver.abort();
    }
}

/// Counts what the kernel takes. A failed write takes nothing.
struct Metered<S> {
    io: S,
    meter: Arc<Meter>,
}

impl<S> Metered<S> {
    fn count(&self, written: Poll<io::Result<usize>>) -> Poll<io::Result<usize>> {
        if let Poll::Ready(Ok(count)) = written {
            self.meter.add(count);
        }
        written
    }
}

impl<S: AsyncRead + Unpin> AsyncRead for Metered<S> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        Pin::new(&mut self.io).poll_read(cx, buf)
    }
}

impl<S: AsyncWrite + Unpin> AsyncWrite for Metered<S> {
    fn poll_write(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &[u8],
    ) -> Poll<io::Result<usize>> {
        let written = Pin::new(&mut self.io).poll_write(cx, buf);
        self.count(written)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bufs: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let written = Pin::new(&mut self.io).poll_write_vectored(cx, bufs);
        self.count(written)
    }

    fn is_write_vectored(&self) -> bool {
        self.io.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.io).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.io).poll_shutdown(cx)
    }
}
