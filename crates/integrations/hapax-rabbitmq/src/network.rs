//! The connection to the server's port, with the repair of frames between it and the client library.

use std::io;
use std::net::SocketAddr;
use std::pin::Pin;
use std::sync::Mutex;
use std::task::{Context, Poll, ready};
use std::time::{Duration, Instant};

use async_rs::traits::Reactor;
use async_rs::util::RuntimeParts;
use async_rs::{Runtime, Tokio};
use futures_util::io::{AsyncRead, AsyncWrite};
use futures_util::{FutureExt as _, Stream};
use lapin::runtime::default_runtime;
use lapin::tcp::{AMQPUriTcpExt as _, RustlsConnector};
use lapin::uri::AMQPUri;
use lapin::{AsyncTcpStream, Connection, ConnectionProperties};
use tokio::sync::oneshot;

use crate::frames::{FrameRepair, FrameRestore};

/// Bytes that are read at a time.
const CHUNK: usize = 64 << 10;

/// A stream of bytes to the server, with or without TLS.
type ServerStream = AsyncTcpStream<<Tokio as Reactor>::TcpStream>;

/// Opens a connection. A future that is dropped ends it, at any point.
///
/// The client library (lapin 4.12) has a thread for each connection, which outlives an attempt that is given
/// up, for as long as the server neither answers nor closes. [`RepairedStream`] ends that thread.
pub(crate) async fn connect(
    uri: AMQPUri,
    tls: Option<&RustlsConnector>,
    properties: ConnectionProperties,
) -> Result<Connection, lapin::Error> {
    let runtime = default_runtime()?;
    let server = match tls {
        None => uri.connect_async(&runtime).await?,
        Some(tls) => {
            let host = &uri.authority.host;
            let addresses = runtime.to_socket_addrs((host.clone(), uri.authority.port));
            let plain = AsyncTcpStream::connect(&runtime, addresses).await?;
            plain.into_rustls(tls, host).await?
        }
    };
    // The sender is dropped with this future.
    let (connected, attempt) = oneshot::channel();
    let stream = RepairedStream {
        server,
        frames: FrameRepair::new(uri.query.frame_max),
        chunk: vec![0; CHUNK],
        repaired: Vec::new(),
        read: 0,
        failure: None,
        restore: FrameRestore::new(),
        restored: Vec::new(),
        written: 0,
        taken: 0,
        attempt: Some(attempt),
    };
    let stream = Mutex::new(Some(AsyncTcpStream::Plain(stream)));
    let connect = async move |_, _| {
        let stream = stream.lock().ok().and_then(|mut stream| stream.take());
        // The library connects again if the connection ends before the handshake.
        stream.ok_or_else(|| io::Error::from(io::ErrorKind::ConnectionAborted).into())
    };
    let tokio = Tokio::current();
    let runtime = Runtime::new(RuntimeParts::new(tokio.clone(), RepairingReactor(tokio)));
    let connection = Connection::connector(uri, runtime, connect, properties).await?;
    let _ = connected.send(());
    Ok(connection)
}

/// Bytes of a connection, of which those from the server are repaired ([`FrameRepair`]), and those to it restored
/// ([`FrameRestore`]).
struct RepairedStream {
    server: ServerStream,
    frames: FrameRepair,
    /// Buffer for bytes from the server.
    chunk: Vec<u8>,
    /// Repaired bytes, of which the first `read` have been read.
    repaired: Vec<u8>,
    read: usize,
    /// Error that follows the repaired bytes.
    failure: Option<io::Error>,
    restore: FrameRestore,
    /// Restored bytes, of which the first `written` are written to the server's socket.
    restored: Vec<u8>,
    written: usize,
    /// Bytes of the library of which `restored` is made, and which are not counted as written.
    taken: usize,
    /// Result of the attempt to connect: an error if it was given up. `None` once it has succeeded.
    attempt: Option<oneshot::Receiver<()>>,
}

impl RepairedStream {
    fn is_cancelled(&mut self, cx: &mut Context<'_>) -> bool {
        let Some(attempt) = &mut self.attempt else { return false };
        match attempt.poll_unpin(cx) {
            Poll::Pending => false,
            Poll::Ready(Ok(())) => {
                self.attempt = None;
                false
            }
            Poll::Ready(Err(_)) => {
                self.attempt = None;
                true
            }
        }
    }
}

impl AsyncRead for RepairedStream {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buffer: &mut [u8],
    ) -> Poll<io::Result<usize>> {
        if self.is_cancelled(cx) {
            return Poll::Ready(Err(io::Error::new(
                io::ErrorKind::ConnectionAborted,
                "the attempt to connect was given up",
            )));
        }
        let this = &mut *self;
        while this.read == this.repaired.len() {
            if let Some(failure) = this.failure.take() {
                return Poll::Ready(Err(failure));
            }
            let count = ready!(Pin::new(&mut this.server).poll_read(cx, &mut this.chunk))?;
            if count == 0 {
                return Poll::Ready(Ok(0));
            }
            this.repaired.clear();
            this.read = 0;
            this.failure = this.frames.repair(&this.chunk[..count], &mut this.repaired).err();
        }
        let unread = &this.repaired[this.read..];
        let count = unread.len().min(buffer.len());
        buffer[..count].copy_from_slice(&unread[..count]);
        this.read += count;
        Poll::Ready(Ok(count))
    }
}

/// Writes to the server. Bytes that the library counts as written are in the server's socket, apart from the begin of a
/// content header whose rest the library writes next. Bytes whose write is pending are the first ones of the next call: the library has a queue
/// of them, from which it removes those that are counted.
impl AsyncWrite for RepairedStream {
    fn poll_write(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        let this = &mut *self;
        if this.taken == 0 {
            this.restore.restore(bytes, &mut this.restored)?;
            this.taken = bytes.len();
        }
        while this.written < this.restored.len() {
            let unwritten = &this.restored[this.written..];
            match ready!(Pin::new(&mut this.server).poll_write(cx, unwritten))? {
                0 => return Poll::Ready(Err(io::ErrorKind::WriteZero.into())),
                count => this.written += count,
            }
        }
        this.restored.clear();
        this.written = 0;
        Poll::Ready(Ok(std::mem::take(&mut this.taken)))
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.server).poll_flush(cx)
    }

    fn poll_close(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.server).poll_close(cx)
    }
}

/// The reactor of a connection whose streams are [`RepairedStream`]s. It opens none itself: [`connect`] gives
/// the library an open one.
#[derive(Clone, Debug)]
struct RepairingReactor(Tokio);

impl Reactor for RepairingReactor {
    type TcpStream = RepairedStream;
    type Sleep = <Tokio as Reactor>::Sleep;

    fn register<H: io::Read + io::Write + Send + 'static>(
        &self,
        _socket: H,
    ) -> io::Result<impl AsyncRead + AsyncWrite + Send + Unpin + 'static> {
        Err::<RepairedStream, _>(io::ErrorKind::Unsupported.into())
    }

    fn sleep(&self, duration: Duration) -> Self::Sleep {
        self.0.sleep(duration)
    }

    fn interval(&self, period: Duration) -> impl Stream<Item = Instant> + Send + 'static {
        self.0.interval(period)
    }

    fn tcp_connect_addr(
        &self,
        _address: SocketAddr,
    ) -> impl Future<Output = io::Result<Self::TcpStream>> + Send + 'static {
        std::future::ready(Err(io::ErrorKind::Unsupported.into()))
    }
}
