//! Timeout of writes to peers that receive nothing.

use std::future::Future;
use std::io;
use std::pin::Pin;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::time::{Instant, Sleep, sleep};

/// Timer of writes without progress.
#[derive(Debug)]
pub(crate) struct WriteTimeout {
    most: Duration,
    stalled: Option<Pin<Box<Sleep>>>,
}

impl WriteTimeout {
    pub(crate) const fn new(most: Duration) -> Self {
        Self { most, stalled: None }
    }

    /// Returns the result of a write, or an error once writes had no progress for too long.
    pub(crate) fn check(
        &mut self,
        cx: &mut Context<'_>,
        written: Poll<io::Result<usize>>,
    ) -> Poll<io::Result<usize>> {
        if written.is_ready() {
            self.stalled = None;
            return written;
        }
        let most = self.most;
        let timer = self.stalled.get_or_insert_with(|| Box::pin(sleep(most)));
        ready!(timer.as_mut().poll(cx));
        timer.as_mut().reset(Instant::now() + most);
        Poll::Ready(Err(io::ErrorKind::TimedOut.into()))
    }
}

/// A connection whose writes fail if its peer receives nothing for too long, and from which some
/// bytes were already read.
#[derive(Debug)]
pub(crate) struct WriteTimeoutIo<S> {
    io: S,
    read: Vec<u8>,
    stall: WriteTimeout,
}

impl<S> WriteTimeoutIo<S> {
    pub(crate) const fn new(io: S, read: Vec<u8>, most: Duration) -> Self {
        Self { io, read, stall: WriteTimeout::new(most) }
    }
}

impl<S: AsyncRead + Unpin> AsyncRead for WriteTimeoutIo<S> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        if self.read.is_empty() {
            return Pin::new(&mut self.io).poll_read(cx, buf);
        }
        let count = self.read.len().min(buf.remaining());
        buf.put_slice(&self.read[..count]);
        self.read.drain(..count);
        Poll::Ready(Ok(()))
    }
}

impl<S: AsyncWrite + Unpin> AsyncWrite for WriteTimeoutIo<S> {
    fn poll_write(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &[u8],
    ) -> Poll<io::Result<usize>> {
        let written = Pin::new(&mut self.io).poll_write(cx, buf);
        self.stall.check(cx, written)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bufs: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let written = Pin::new(&mut self.io).poll_write_vectored(cx, bufs);
        self.stall.check(cx, written)
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
