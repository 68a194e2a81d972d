//! Guard between the socket and hyper, which rejects requests that can be read in two ways.
//!
//! hyper resolves some ambiguities silently, and a service behind it cannot notice them: it drops a
//! `Content-Length` beside a `Transfer-Encoding`, merges equal lengths, accepts a coding before
//! `chunked`, and accepts lines that end in a bare line feed. A proxy in front that resolves them
//! differently sees other requests than the gateway, and a key could then protect a request that
//! its sender never sent. So every head is read here first, as bytes.
//!
//! 1. A head is withheld from hyper until it is complete and found unambiguous.
//! 2. In place of an ambiguous head, hyper gets `STAND_IN`, and no byte after it. hyper calls the
//!    service once for each head, in order, so the service finds by counting which request is the
//!    stand-in ([`GuardState::rejection`]), and answers it with the reason. Responses to earlier
//!    requests are not affected.
//! 3. Bytes after a head that requests another protocol are withheld until that request is
//!    answered: if the connection leaves HTTP, they are not checked.
//! 4. A write fails if the peer receives nothing for
//!    [`ListenerConfig::stall`](crate::ListenerConfig::stall).

pub mod head;
pub(crate) mod http2;
pub mod scan;
mod write_timeout;

use std::io;
use std::mem::MaybeUninit;
use std::pin::Pin;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use bytes::{Buf, BytesMut};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};

pub use head::HeadError;
use scan::{ScanResult, Scanner};
use write_timeout::WriteTimeout;
pub(crate) use write_timeout::WriteTimeoutIo;

/// The largest request head, in bytes.
pub const MAX_HEAD: usize = 32 * 1024;

/// The most header fields of a request, in each version of HTTP.
pub const MAX_FIELDS: usize = 256;

const STAND_IN: &[u8] = b"GET / HTTP/1.1\r\nhost: rejected\r\nconnection: close\r\n\r\n";

/// Bytes that are read from the socket at once.
const READ: usize = 16 * 1024;

/// Size of the buffer that an idle connection may keep.
const KEPT: usize = 1024;

/// State of one connection that the guard and the service share.
#[derive(Debug, Default)]
pub struct GuardState {
    served: AtomicU64,
    rejected: OnceLock<(u64, HeadError)>,
    answered: Mutex<AnsweredCount>,
}

#[derive(Debug, Default)]
struct AnsweredCount {
    count: u64,
    /// The task that waits for the next response.
    waker: Option<Waker>,
}

impl GuardState {
    /// Returns the reason to reject the request that hyper hands over now. It must be called once
    /// for each request.
    pub fn rejection(&self) -> Option<HeadError> {
        let this = self.served.fetch_add(1, Ordering::Relaxed);
        self.rejected.get().filter(|(index, _)| *index == this).map(|(_, rejection)| *rejection)
    }

    /// Counts a request that was answered without switching to another protocol. It must be called
    /// once for each request, in order.
    pub fn answered(&self) {
        let mut answered = self.lock();
        answered.count += 1;
        if let Some(waker) = answered.waker.take() {
            waker.wake();
        }
    }

    /// Returns whether the first `count` requests are answered; if not, the task is woken at the
    /// next response.
    fn are_answered(&self, count: u64, cx: &Context<'_>) -> bool {
        let mut answered = self.lock();
        let are = answered.count >= count;
        if !are {
            answered.waker = Some(cx.waker().clone());
        }
        are
    }

    fn lock(&self) -> MutexGuard<'_, AnsweredCount> {
        // No change can panic half way.
        self.answered.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A guarded connection.
#[derive(Debug)]
pub struct Guarded<S> {
    io: S,
    scanner: Scanner,
    heads: Arc<GuardState>,
    passed: u64,
    /// Number of the head that requested another protocol, until it is answered.
    upgrade: Option<u64>,
    /// Bytes that were read; hyper may have the first `cleared` of them.
    inbox: BytesMut,
    /// Most bytes that were in `inbox` since it was allocated.
    inbox_bytes: usize,
    cleared: usize,
    rejected: bool,
    stall: WriteTimeout,
}

impl<S: AsyncRead + AsyncWrite + Unpin> Guarded<S> {
    /// Guards `io`, from which `read` was already read. A write without progress for `stall` fails.
    pub fn new(io: S, read: &[u8], stall: Duration) -> Self {
        Self {
            io,
            scanner: Scanner::default(),
            heads: Arc::default(),
            passed: 0,
            upgrade: None,
            inbox: BytesMut::from(read),
            inbox_bytes: 0,
            cleared: 0,
            rejected: false,
            stall: WriteTimeout::new(stall),
        }
    }

    /// Returns the state that the service reads for this connection.
    pub fn heads(&self) -> Arc<GuardState> {
        Arc::clone(&self.heads)
    }

    /// Returns the connection; its bytes that were read and withheld, unless it was rejected; and
    /// whether its peer may still be sending, that is, the connection was not between two requests.
    pub fn into_parts(self) -> (S, Option<BytesMut>, bool) {
        let between = self.scanner.is_between() && self.inbox.is_empty() && !self.rejected;
        (self.io, (!self.rejected).then_some(self.inbox), !between)
    }

    /// Checks the bytes that were read; returns whether hyper may have any of them.
    fn judge(&mut self) -> io::Result<bool> {
        if self.inbox.is_empty() || self.rejected {
            return Ok(false);
        }
        match self.scanner.judge(&self.inbox) {
            ScanResult::Pass(count) => self.cleared = count,
            ScanResult::Head(count) => {
                self.passed += 1;
                self.cleared = count;
                // A request with a body is no switch: the rest of its body must follow.
                if self.scanner.is_between() && head::asks_to_switch(&self.inbox[..count]) {
                    self.upgrade = Some(self.passed);
                }
            }
            ScanResult::More => return Ok(false),
            ScanResult::Reject(rejection) => {
                // Set before hyper gets the stand-in, so before the service reads it.
                let _ = self.heads.rejected.set((self.passed, rejection));
                self.rejected = true;
                self.inbox = BytesMut::from(STAND_IN);
                self.cleared = STAND_IN.len();
            }
            ScanResult::BrokenChunk => {
                return Err(io::Error::new(io::ErrorKind::InvalidData, "broken chunked coding"));
            }
        }
        Ok(true)
    }
}

impl<S: AsyncRead + AsyncWrite + Unpin> AsyncRead for Guarded<S> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let this = &mut *self;
        loop {
            let withheld = this.cleared == 0 && !this.inbox.is_empty();
            if let Some(count) = this.upgrade.filter(|_| withheld) {
                if !this.heads.are_answered(count, cx) {
                    return Poll::Pending;
                }
                this.upgrade = None;
            }
            if this.cleared > 0 || this.judge()? {
                break;
            }
            if this.rejected {
                // hyper closes after it has answered the stand-in, and reads no more.
                return Poll::Pending;
            }
            // On the stack: a connection that waits for its client needs no buffer, and there are
            // many of them.
            let mut room = [MaybeUninit::uninit(); READ];
            let mut read = ReadBuf::uninit(&mut room);
            match Pin::new(&mut this.io).poll_read(cx, &mut read) {
                Poll::Ready(result) => result?,
                Poll::Pending => {
                    if this.inbox.is_empty() && this.inbox_bytes > KEPT {
                        // Without the memory of a large request.
                        (this.inbox, this.inbox_bytes) = (BytesMut::new(), 0);
                    }
                    return Poll::Pending;
                }
            }
            if read.filled().is_empty() {
                // Half a head is no request; hyper handles half a body.
                return Poll::Ready(Ok(()));
            }
            this.inbox.extend_from_slice(read.filled());
            this.inbox_bytes = this.inbox_bytes.max(this.inbox.len());
        }
        let count = this.cleared.min(buf.remaining());
        buf.put_slice(&this.inbox[..count]);
        this.inbox.advance(count);
        this.cleared -= count;
        Poll::Ready(Ok(()))
    }
}

impl<S: AsyncRead + AsyncWrite + Unpin> AsyncWrite for Guarded<S> {
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
