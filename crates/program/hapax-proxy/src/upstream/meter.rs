//! A count of the bytes that were written to a connection.

use std::io::{self, IoSlice};
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::task::{Context, Poll};
use std::time::Duration;

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::time::Instant;

/// Counter of the bytes of requests that were handed on, with the time of the last one.
#[derive(Debug)]
pub(crate) struct Meter {
    written: AtomicU64,
    last_ms: AtomicU64,
    since: Instant,
}

impl Meter {
    fn new() -> Self {
        Self { written: AtomicU64::new(0), last_ms: AtomicU64::new(0), since: Instant::now() }
    }

    /// Returns the bytes of requests that were written so far. The count is exact once the
    /// connection has [`ended`](super::connection::UpstreamConnection::end), because nothing can
    /// write afterwards.
    pub(crate) fn written(&self) -> u64 {
        self.written.load(Ordering::Acquire)
    }

    /// Returns the time of the last written byte of a request. Other frames of a connection, such
    /// as the acknowledgement of a PING, do not show that the other side makes progress.
    pub(crate) fn last(&self) -> Instant {
        self.since + Duration::from_millis(self.last_ms.load(Ordering::Relaxed))
    }

    fn add(&self, count: u64) {
        if count == 0 {
            return;
        }
        self.written.fetch_add(count, Ordering::Release);
        let since = u64::try_from(self.since.elapsed().as_millis()).unwrap_or(u64::MAX);
        self.last_ms.store(since, Ordering::Relaxed);
    }
}

/// A connection that counts written bytes. A failed write has written nothing.
pub(crate) struct Metered<S> {
    io: S,
    meter: Arc<Meter>,
    /// Filter of the frames of requests, for HTTP/2; in HTTP/1 all bytes count.
    frames: Option<Frames>,
}

impl<S> Metered<S> {
    pub(crate) fn new(io: S, http2: bool) -> Self {
        Self { io, meter: Arc::new(Meter::new()), frames: http2.then(Frames::default) }
    }

    pub(crate) fn meter(&self) -> Arc<Meter> {
        Arc::clone(&self.meter)
    }

    fn count(&mut self, written: &Poll<io::Result<usize>>, bufs: &[IoSlice<'_>]) {
        let Poll::Ready(Ok(count)) = written else { return };
        let counted = match &mut self.frames {
            None => *count as u64,
            Some(frames) => {
                let mut left = *count;
                let taken = bufs.iter().map(|buf| {
                    let here = left.min(buf.len());
                    left -= here;
                    frames.take(&buf[..here])
                });
                taken.sum()
            }
        };
        self.meter.add(counted);
    }
}

/// Parser that distinguishes the frames of requests (HEADERS, CONTINUATION and DATA, RFC 9113 6)
/// from other frames, such as acknowledgements.
#[derive(Debug)]
struct Frames {
    /// Remaining bytes of the preface.
    preface: usize,
    head: [u8; 9],
    /// Bytes of the frame's head that were read.
    have: usize,
    /// Remaining bytes of the payload.
    left: usize,
}

impl Default for Frames {
    fn default() -> Self {
        Self { preface: 24, head: [0; 9], have: 0, left: 0 }
    }
}

impl Frames {
    /// Returns how many of these bytes count for requests. The bytes of an incomplete frame head
    /// count as none: they begin with a length, on which a server cannot act. The last byte of the
    /// head is followed by the payload, or completes an empty frame, so a complete head counts as
    /// one.
    fn take(&mut self, mut bytes: &[u8]) -> u64 {
        let skipped = self.preface.min(bytes.len());
        self.preface -= skipped;
        bytes = &bytes[skipped..];
        let mut counted = 0;
        while !bytes.is_empty() {
            if self.left > 0 {
                let here = self.left.min(bytes.len());
                self.left -= here;
                counted += if self.is_requests() { here as u64 } else { 0 };
                bytes = &bytes[here..];
                continue;
            }
            if self.have == self.head.len() {
                self.have = 0;
            }
            self.head[self.have] = bytes[0];
            self.have += 1;
            bytes = &bytes[1..];
            if self.have == self.head.len() {
                let [a, b, c, ..] = self.head.map(usize::from);
                self.left = a << 16 | b << 8 | c;
                counted += u64::from(self.is_requests());
            }
        }
        counted
    }

    const fn is_requests(&self) -> bool {
        matches!(self.head[3], 0x0 | 0x1 | 0x9)
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
        self.count(&written, &[IoSlice::new(buf)]);
        written
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bufs: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let written = Pin::new(&mut self.io).poll_write_vectored(cx, bufs);
        self.count(&written, bufs);
        written
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

#[cfg(test)]
mod tests {
    use super::*;

    fn frame(kind: u8, payload: usize) -> Vec<u8> {
        let length = u32::try_from(payload).unwrap().to_be_bytes();
        let head = [length[1], length[2], length[3], kind, 0, 0, 0, 0, 1];
        [&head[..], &vec![0; payload]].concat()
    }

    #[test]
    fn only_frames_of_requests_are_counted_in_any_segmentation() {
        let preface = vec![b'x'; 24];
        // SETTINGS, HEADERS, PING, DATA, an empty DATA, WINDOW_UPDATE.
        let frames =
            [frame(4, 6), frame(1, 300), frame(6, 8), frame(0, 70_000), frame(0, 0), frame(8, 4)];
        let bytes = [preface, frames.concat()].concat();
        for size in [1, 2, 7, 1000, bytes.len()] {
            let mut counter = Frames::default();
            let counted: u64 = bytes.chunks(size).map(|piece| counter.take(piece)).sum();
            assert_eq!(counted, 301 + 70_001 + 1, "{size}");
        }
        let mut counter = Frames::default();
        let mut idle = vec![b'x'; 24];
        idle.extend(frame(4, 6));
        idle.extend(frame(6, 8));
        idle.extend(&frame(1, 300)[..8]);
        assert_eq!(counter.take(&idle), 0);
        assert_eq!(counter.take(&[1]), 1);
    }
}
