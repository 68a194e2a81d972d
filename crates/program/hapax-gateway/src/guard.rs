//! A guard between the socket and hyper that refuses requests which could be read in two ways.
//!
//! hyper resolves some ambiguities silently, and a service behind it cannot see that they were
//! there: of a `Content-Length` beside a `Transfer-Encoding` the length is dropped, equal lengths
//! become one, a coding before `chunked` passes, lines may end in a bare line feed. A proxy in
//! front that decided otherwise sees other requests than we do, and a key could then guard what
//! its sender never sent. So every head is read here first, as bytes.
//!
//! 1. A head is withheld from hyper until it is complete and found unambiguous.
//! 2. In the place of one that is not, hyper gets [`STAND_IN`], and no byte after it. hyper asks
//!    the service once for each head, in order; so the service knows by counting which request is
//!    the stand-in ([`GuardState::refusal`]), and answers it with the reason. Answers to requests before
//!    it are not disturbed.
//! 3. What comes behind a head that asks for another protocol is withheld until that is answered: if the
//!    connection leaves HTTP, it is not ours to judge.
//! 4. A connection whose peer takes nothing for [`Limits::stall`](crate::ServerLimits::stall) while there is
//!    something to write fails.

mod head;
pub(crate) mod http2;
mod scan;
mod write_timeout;

use std::io;
use std::pin::{Pin, pin};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::task::{Context, Poll, Waker, ready};
use std::time::Duration;

use bytes::{Buf, BytesMut};
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, ReadBuf};

pub(crate) use head::HeadError;
use scan::{ScanResult, Scanner};
pub(crate) use write_timeout::{WriteTimeout, WriteTimeoutIo};

/// The largest request head, in bytes.
pub(crate) const MAX_HEAD: usize = 32 * 1024;

/// The most header fields of a request, in each version of HTTP.
pub(crate) const MAX_FIELDS: usize = 256;

const STAND_IN: &[u8] = b"GET / HTTP/1.1\r\nhost: refused\r\nconnection: close\r\n\r\n";

/// How much is read from the socket at once.
const READ: usize = 16 * 1024;

/// What the guard tells the service of one connection.
#[derive(Debug, Default)]
pub(crate) struct GuardState {
    served: AtomicU64,
    rejected: OnceLock<(u64, HeadError)>,
    answered: Mutex<AnsweredCount>,
}

#[derive(Debug, Default)]
struct AnsweredCount {
    count: u64,
    /// Who waits for the next one.
    waker: Option<Waker>,
}

impl GuardState {
    /// Why the request that hyper hands over now must be refused. To be called once for each.
    pub(crate) fn refusal(&self) -> Option<HeadError> {
        let this = self.served.fetch_add(1, Ordering::Relaxed);
        self.rejected.get().filter(|(index, _)| *index == this).map(|(_, refusal)| *refusal)
    }

    /// Notes that a request has its answer, and is no switch to another protocol. To be called once for
    /// each, in order.
    pub(crate) fn answered(&self) {
        let mut answered = self.lock();
        answered.count += 1;
        if let Some(waker) = answered.waker.take() {
            waker.wake();
        }
    }

    /// Whether the first `count` have their answers; if not, the task hears of the next one.
    fn are_answered(&self, count: u64, cx: &Context<'_>) -> bool {
        let mut answered = self.lock();
        let are = answered.count >= count;
        if !are {
            answered.waker = Some(cx.waker().clone());
        }
        are
    }

    fn lock(&self) -> MutexGuard<'_, AnsweredCount> {
        // Nothing here panics half way through a change.
        self.answered.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A connection under guard.
#[derive(Debug)]
pub(crate) struct Guarded<S> {
    io: S,
    scanner: Scanner,
    heads: Arc<GuardState>,
    passed: u64,
    /// How many heads passed when one asked for another protocol, until it is answered.
    asked: Option<u64>,
    /// What was read; hyper may have the first `cleared` bytes.
    inbox: BytesMut,
    cleared: usize,
    rejected: bool,
    stall: WriteTimeout,
}

impl<S: AsyncRead + AsyncWrite + Unpin> Guarded<S> {
    /// Guards `io`, of which `read` was read already; a write that gets nowhere for `stall` fails.
    pub(crate) fn new(io: S, read: &[u8], stall: Duration) -> Self {
        Self {
            io,
            scanner: Scanner::new(),
            heads: Arc::default(),
            passed: 0,
            asked: None,
            inbox: BytesMut::from(read),
            cleared: 0,
            rejected: false,
            stall: WriteTimeout::new(stall),
        }
    }

    pub(crate) fn heads(&self) -> Arc<GuardState> {
        Arc::clone(&self.heads)
    }

    /// The connection itself; what was read of it and withheld, unless it was refused; and whether its
    /// peer may still be sending: it was not between two requests.
    pub(crate) fn into_parts(self) -> (S, Option<BytesMut>, bool) {
        let between = self.scanner.is_between() && self.inbox.is_empty() && !self.rejected;
        (self.io, (!self.rejected).then_some(self.inbox), !between)
    }

    /// Judges what was read; whether hyper may have any of it.
    fn judge(&mut self) -> io::Result<bool> {
        if self.inbox.is_empty() || self.rejected {
            return Ok(false);
        }
        match self.scanner.judge(&self.inbox) {
            ScanResult::Pass(count) => self.cleared = count,
            ScanResult::Head(count) => {
                self.passed += 1;
                self.cleared = count;
                // Of one with a body the rest must come, and it is no switch.
                if self.scanner.is_between() && head::asks_to_switch(&self.inbox[..count]) {
                    self.asked = Some(self.passed);
                }
            }
            ScanResult::More => return Ok(false),
            ScanResult::Reject(refusal) => {
                // Set before hyper sees the stand-in, so before the service asks.
                let _ = self.heads.rejected.set((self.passed, refusal));
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
            if let Some(count) = this.asked.filter(|_| withheld) {
                if !this.heads.are_answered(count, cx) {
                    return Poll::Pending;
                }
                this.asked = None;
            }
            if this.cleared > 0 || this.judge()? {
                break;
            }
            if this.rejected {
                // hyper closes after it has answered the stand-in, and waits for nothing here.
                return Poll::Pending;
            }
            this.inbox.reserve(READ);
            // Dropped while pending, a read has taken nothing.
            let read = pin!(this.io.read_buf(&mut this.inbox)).poll(cx);
            if read.is_pending() && this.inbox.is_empty() {
                // Who waits for a client needs no buffer, and there are many.
                this.inbox = BytesMut::new();
            }
            if ready!(read)? == 0 {
                // Half a head is no request; for half a body hyper knows what to do.
                return Poll::Ready(Ok(()));
            }
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
