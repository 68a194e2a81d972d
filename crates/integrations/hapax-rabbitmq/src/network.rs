//! The connection to the server's port, and between it and the client library the repair of frames.

use std::io;
use std::net::Ipv4Addr;
use std::sync::Mutex;
use std::time::Duration;

use async_compat::CompatExt as _;
use futures_util::io::{AsyncReadExt as _, AsyncWriteExt as _};
use lapin::runtime::default_runtime;
use lapin::tcp::AMQPUriTcpExt as _;
use lapin::uri::AMQPUri;
use lapin::{AsyncTcpStream, Connection, ConnectionProperties};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpListener, TcpStream};
use tokio::task::AbortHandle;
use tokio::time::timeout;

use crate::frames::Frames;

/// Time in which the server must accept bytes. A server that has blocked the connection says so, and the
/// client then sends none.
const SEND_TIMEOUT: Duration = Duration::from_secs(60);

/// Time for the client library to end its side, after the server has ended its own.
const END_TIMEOUT: Duration = Duration::from_secs(10);

/// Bytes that are read at a time.
const CHUNK: usize = 16 << 10;

/// Opens a connection. A future that is dropped ends it, at any point.
///
/// The client library (lapin 4.12) has a thread for each connection, which outlives an attempt that is given
/// up, for as long as the server neither answers nor closes. Here its thread reads from a local socket, which
/// ends with the attempt.
pub(crate) async fn connect(
    uri: AMQPUri,
    properties: ConnectionProperties,
) -> Result<Connection, lapin::Error> {
    let runtime = default_runtime()?;
    let server = uri.connect_async(&runtime).await?;
    let (ours, clients) = pair().await?;
    let forwarding = tokio::spawn(forward(server, ours));
    let attempt = Attempt(Some(forwarding.abort_handle()));
    let stream = Mutex::new(Some(AsyncTcpStream::Plain(clients.compat())));
    let connect = async move |_, _| {
        let stream = stream.lock().ok().and_then(|mut stream| stream.take());
        // The library tries again if the connection ends before the handshake.
        stream.ok_or_else(|| io::Error::from(io::ErrorKind::ConnectionAborted).into())
    };
    let connection = Connection::connector(uri, runtime, connect, properties).await?;
    attempt.has_succeeded();
    Ok(connection)
}

/// An attempt to connect: if it is dropped, forwarding ends.
struct Attempt(Option<AbortHandle>);

impl Attempt {
    fn has_succeeded(mut self) {
        self.0 = None;
    }
}

impl Drop for Attempt {
    fn drop(&mut self) {
        if let Some(forwarding) = &self.0 {
            forwarding.abort();
        }
    }
}

/// Returns two connected sockets of this process. The library accepts no streams but TCP.
async fn pair() -> io::Result<(TcpStream, TcpStream)> {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await?;
    let connected = TcpStream::connect(listener.local_addr()?).await?;
    let own_address = connected.local_addr()?;
    loop {
        let (accepted, address) = listener.accept().await?;
        // Another process may have connected to the port before.
        if address == own_address {
            accepted.set_nodelay(true)?;
            connected.set_nodelay(true)?;
            return Ok((accepted, connected));
        }
    }
}

/// Forwards bytes between the server and the client library until one of them ends.
async fn forward<S>(server: S, client: TcpStream)
where
    S: futures_util::io::AsyncRead + futures_util::io::AsyncWrite + Send,
{
    let (mut from_server, mut to_server) = server.split();
    let (mut from_client, mut to_client) = client.into_split();
    let up = async {
        let mut chunk = vec![0; CHUNK];
        loop {
            let count = from_client.read(&mut chunk).await?;
            if count == 0 {
                return timeout(END_TIMEOUT, to_server.close()).await?;
            }
            let send = async {
                to_server.write_all(&chunk[..count]).await?;
                to_server.flush().await
            };
            timeout(SEND_TIMEOUT, send).await??;
        }
    };
    let down = async {
        let mut frames = Frames::default();
        let (mut chunk, mut repaired) = (vec![0; CHUNK], Vec::new());
        loop {
            let count = from_server.read(&mut chunk).await?;
            if count == 0 {
                return Ok(());
            }
            frames.repair(&chunk[..count], &mut repaired)?;
            to_client.write_all(&repaired).await?;
            repaired.clear();
        }
    };
    tokio::pin!(up);
    let ended: io::Result<()> = tokio::select! {
        ended = &mut up => ended,
        ended = down => {
            // The library reads what has arrived, and then the end.
            let _ = to_client.shutdown().await;
            let _ = timeout(END_TIMEOUT, up).await;
            ended
        }
    };
    match ended {
        Err(error) if error.kind() == io::ErrorKind::InvalidData => {
            tracing::error!(%error, "the connection to the RabbitMQ server is closed");
        }
        // Reported by the library.
        Ok(()) | Err(_) => {}
    }
}
