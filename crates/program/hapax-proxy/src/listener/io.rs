//! Connections of clients, with or without TLS.

use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use rustls::ServerConfig;
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, ReadBuf};
use tokio::net::TcpStream;
use tokio_rustls::TlsAcceptor;
use tokio_rustls::server::TlsStream;

/// First bytes of an HTTP/2 connection (RFC 9113 3.4). No HTTP/1 request begins with them, since
/// their version is invalid there.
const PREFACE: &[u8; 24] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";

/// Bytes that TLS may buffer to be written.
const TLS_BUFFER: usize = 16 * 1024;

/// A client's connection.
#[derive(Debug)]
pub(super) enum Io {
    Plain(TcpStream),
    Tls(Box<TlsStream<TcpStream>>),
}

/// A connection whose protocol was detected.
#[derive(Debug)]
pub(super) struct DetectedConnection {
    pub(super) io: Io,
    /// Bytes that were read for the detection.
    pub(super) read: Vec<u8>,
    pub(super) http2: bool,
}

/// Reads until the bytes are the HTTP/2 preface, or cannot be it.
pub(super) async fn detect(mut io: Io) -> io::Result<DetectedConnection> {
    let mut first = [0; PREFACE.len()];
    let mut have = 0;
    while have < first.len() {
        let count = io.read(&mut first[have..]).await?;
        have += count;
        if count == 0 || first[..have] != PREFACE[..have] {
            return Ok(DetectedConnection { io, read: first[..have].to_vec(), http2: false });
        }
    }
    Ok(DetectedConnection { io, read: first.to_vec(), http2: true })
}

/// Performs the TLS handshake with `config`.
pub(super) async fn secure(stream: TcpStream, config: Arc<ServerConfig>) -> io::Result<Io> {
    let limit = |tls: &mut rustls::ServerConnection| tls.set_buffer_limit(Some(TLS_BUFFER));
    let stream = TlsAcceptor::from(config).accept_with(stream, limit).await?;
    Ok(Io::Tls(Box::new(stream)))
}

impl Io {
    /// Returns whether HTTP/2 was negotiated in the handshake.
    pub(super) fn chose_http2(&self) -> bool {
        match self {
            Self::Plain(_) => false,
            Self::Tls(stream) => stream.get_ref().1.alpn_protocol() == Some(b"h2"),
        }
    }

    /// Resets the connection, so that its client sees a failure.
    pub(super) fn reset(self) -> io::Result<()> {
        match self {
            Self::Plain(stream) => stream.set_zero_linger(),
            Self::Tls(stream) => stream.get_ref().0.set_zero_linger(),
        }
    }
}

impl AsyncRead for Io {
    fn poll_read(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        match self.get_mut() {
            Self::Plain(stream) => Pin::new(stream).poll_read(cx, buf),
            Self::Tls(stream) => Pin::new(stream).poll_read(cx, buf),
        }
    }
}

impl AsyncWrite for Io {
    fn poll_write(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &[u8],
    ) -> Poll<io::Result<usize>> {
        match self.get_mut() {
            Self::Plain(stream) => Pin::new(stream).poll_write(cx, buf),
            Self::Tls(stream) => Pin::new(stream).poll_write(cx, buf),
        }
    }

    fn poll_write_vectored(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bufs: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        match self.get_mut() {
            Self::Plain(stream) => Pin::new(stream).poll_write_vectored(cx, bufs),
            Self::Tls(stream) => Pin::new(stream).poll_write_vectored(cx, bufs),
        }
    }

    fn is_write_vectored(&self) -> bool {
        match self {
            Self::Plain(stream) => stream.is_write_vectored(),
            Self::Tls(stream) => stream.is_write_vectored(),
        }
    }

    fn poll_flush(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        match self.get_mut() {
            Self::Plain(stream) => Pin::new(stream).poll_flush(cx),
            Self::Tls(stream) => Pin::new(stream).poll_flush(cx),
        }
    }

    fn poll_shutdown(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        match self.get_mut() {
            Self::Plain(stream) => Pin::new(stream).poll_shutdown(cx),
            Self::Tls(stream) => Pin::new(stream).poll_shutdown(cx),
        }
    }
}
