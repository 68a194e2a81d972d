//! Socket whose receive buffer can be checked while other tasks read and write.

use std::io::{self, IoSlice};
use std::mem::MaybeUninit;
use std::pin::Pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::task::{Context, Poll};

use socket2::SockRef;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::TcpStream;

/// A TCP connection. Its lock is held for one call at a time, never across an await.
#[derive(Debug)]
pub(super) struct Socket(Arc<Mutex<TcpStream>>);

/// Probe of a [`Socket`] of another task. It does not keep the socket open.
#[derive(Debug)]
pub(super) struct SocketProbe(Weak<Mutex<TcpStream>>);

impl Socket {
    pub(super) fn new(stream: TcpStream) -> Self {
        Self(Arc::new(Mutex::new(stream)))
    }

    pub(super) fn probe(&self) -> SocketProbe {
        SocketProbe(Arc::downgrade(&self.0))
    }

    fn lock(&self) -> MutexGuard<'_, TcpStream> {
        lock(&self.0)
    }
}

fn lock(stream: &Mutex<TcpStream>) -> MutexGuard<'_, TcpStream> {
    // A panic in the runtime leaves the socket as it was.
    stream.lock().unwrap_or_else(PoisonError::into_inner)
}

impl SocketProbe {
    /// Returns whether the socket is open, with no unread bytes and no end of the stream. It asks
    /// the kernel, because the runtime's state may be outdated.
    pub(super) fn is_quiet(&self) -> bool {
        let Some(stream) = self.0.upgrade() else { return false };
        let peeked = SockRef::from(&*lock(&stream)).peek(&mut [MaybeUninit::uninit()]);
        peeked.is_err_and(|error| error.kind() == io::ErrorKind::WouldBlock)
    }
}

impl AsyncRead for Socket {
    fn poll_read(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        Pin::new(&mut *self.lock()).poll_read(cx, buf)
    }
}

impl AsyncWrite for Socket {
    fn poll_write(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &[u8],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut *self.lock()).poll_write(cx, buf)
    }

    fn poll_write_vectored(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bufs: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut *self.lock()).poll_write_vectored(cx, bufs)
    }

    fn is_write_vectored(&self) -> bool {
        true
    }

    fn poll_flush(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut *self.lock()).poll_flush(cx)
    }

    fn poll_shutdown(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut *self.lock()).poll_shutdown(cx)
    }
}
