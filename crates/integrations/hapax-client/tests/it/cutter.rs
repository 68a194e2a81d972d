//! A proxy that cuts its connections at a byte, and keeps the bytes that it passed on.

use std::net::SocketAddr;
use std::sync::{Arc, Mutex};

use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;

/// The byte at which a connection is cut.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Cut {
    /// After this number of bytes of the client.
    Sent(usize),
    /// After this number of bytes of the server; with zero, when its first byte arrives.
    Received(usize),
}

/// Bytes that were passed on in a connection.
#[derive(Clone, Default, Debug)]
pub(crate) struct Passed {
    pub(crate) sent: Vec<u8>,
    pub(crate) received: Vec<u8>,
    /// True if the proxy cut the connection.
    pub(crate) is_cut: bool,
}

/// The proxy.
#[derive(Clone)]
pub(crate) struct Cutter {
    address: SocketAddr,
    connections: Arc<Mutex<Vec<Passed>>>,
    /// True while nothing of the server is passed on.
    held: watch::Sender<bool>,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Side {
    Client,
    Server,
}

impl Cutter {
    /// Starts a proxy that cuts its first connection, and `always` the others too.
    pub(crate) async fn start(upstream: SocketAddr, cut: Option<Cut>, always: bool) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let cutter = Self { address, connections: Arc::default(), held: watch::Sender::new(false) };
        let serving = cutter.clone();
        tokio::spawn(async move {
            while let Ok((client, _)) = listener.accept().await {
                let at = {
                    let mut connections = serving.connections.lock().unwrap();
                    connections.push(Passed::default());
                    connections.len() - 1
                };
                let cut = cut.filter(|_| at == 0 || always);
                let cutter = serving.clone();
                tokio::spawn(async move { cutter.pass(at, client, upstream, cut).await });
            }
        });
        cutter
    }

    pub(crate) fn origin(&self) -> String {
        format!("http://{}", self.address)
    }

    pub(crate) fn connections(&self) -> Vec<Passed> {
        self.connections.lock().unwrap().clone()
    }

    /// Holds what the server answers, or passes it on again.
    pub(crate) fn hold(&self, held: bool) {
        self.held.send_replace(held);
    }

    async fn pass(&self, at: usize, client: TcpStream, upstream: SocketAddr, cut: Option<Cut>) {
        let Ok(server) = TcpStream::connect(upstream).await else { return };
        client.set_nodelay(true).unwrap();
        server.set_nodelay(true).unwrap();
        let (from_client, to_client) = client.into_split();
        let (from_server, to_server) = server.into_split();
        let limit = |side| match (side, cut) {
            (Side::Client, Some(Cut::Sent(limit))) => Some(limit),
            (Side::Server, Some(Cut::Received(limit))) => Some(limit),
            _ => None,
        };
        // Both connections end with the first side that ends.
        tokio::select! {
            () = self.copy(at, Side::Client, limit(Side::Client), from_client, to_server) => {}
            () = self.copy(at, Side::Server, limit(Side::Server), from_server, to_client) => {}
        }
    }

    async fn copy(
        &self,
        at: usize,
        side: Side,
        limit: Option<usize>,
        mut from: impl AsyncRead + Unpin,
        mut to: impl AsyncWrite + Unpin,
    ) {
        let (mut buffer, mut passed) = ([0; 4096], 0);
        if limit == Some(0) && side == Side::Server && from.read_u8().await.is_err() {
            return;
        }
        while limit != Some(passed) {
            let most = limit.map_or(buffer.len(), |limit| buffer.len().min(limit - passed));
            let read = from.read(&mut buffer[..most]).await.unwrap_or(0);
            if side == Side::Server {
                // The sender is `self`.
                let _ = self.held.subscribe().wait_for(|held| !held).await;
            }
            if read == 0 {
                return;
            }
            {
                let connection = &mut self.connections.lock().unwrap()[at];
                match side {
                    Side::Client => connection.sent.extend_from_slice(&buffer[..read]),
                    Side::Server => connection.received.extend_from_slice(&buffer[..read]),
                }
            }
            if to.write_all(&buffer[..read]).await.is_err() {
                return;
            }
            passed += read;
        }
        self.connections.lock().unwrap()[at].is_cut = true;
    }
}
