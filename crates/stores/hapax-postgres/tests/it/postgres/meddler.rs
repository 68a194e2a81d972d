//! Stands between a client and its server and meddles with what the client says.

use std::net::{Ipv4Addr, SocketAddr};
use std::sync::Arc;

use tokio::io::{AsyncReadExt, AsyncWriteExt, copy};
use tokio::net::tcp::{OwnedReadHalf, OwnedWriteHalf};
use tokio::net::{TcpListener, TcpStream};
use tokio::task::{JoinHandle, JoinSet};

/// Ends its connections when dropped, and not before: a client that leaves is not missed.
pub(crate) struct Meddler {
    port: u16,
    task: JoinHandle<()>,
}

impl Meddler {
    /// `meddle` may change a message, but not its length. Where it returns `false`, the message is
    /// not passed on, nor anything after it on that connection.
    pub(crate) async fn before(
        server: SocketAddr,
        meddle: impl Fn(&mut [u8]) -> bool + Send + Sync + 'static,
    ) -> Self {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await.unwrap();
        let port = listener.local_addr().unwrap().port();
        let meddle = Arc::new(meddle);
        let task = tokio::spawn(async move {
            let mut connections = JoinSet::new();
            loop {
                let (client, _) = listener.accept().await.unwrap();
                let (said, mut told) = client.into_split();
                let server = TcpStream::connect(server).await.unwrap();
                let (mut answers, asked) = server.into_split();
                let meddle = Arc::clone(&meddle);
                connections.spawn(async move { copy(&mut answers, &mut told).await.ok() });
                connections.spawn(async move {
                    // Held on to after the client is gone.
                    let (_said, _asked) = pass(said, asked, &*meddle).await;
                    std::future::pending().await
                });
            }
        });
        Self { port, task }
    }

    pub(crate) const fn port(&self) -> u16 {
        self.port
    }
}

impl Drop for Meddler {
    fn drop(&mut self) {
        self.task.abort();
    }
}

/// Passes messages until the client is gone or one is held back.
async fn pass(
    mut said: OwnedReadHalf,
    mut asked: OwnedWriteHalf,
    meddle: &(impl Fn(&mut [u8]) -> bool + Sync),
) -> (OwnedReadHalf, OwnedWriteHalf) {
    // The first message has no type.
    let mut head = 4;
    while let Ok(mut message) = read(&mut said, head).await
        && meddle(&mut message)
        && asked.write_all(&message).await.is_ok()
    {
        head = 5;
    }
    (said, asked)
}

async fn read(said: &mut OwnedReadHalf, head: usize) -> std::io::Result<Vec<u8>> {
    let mut message = vec![0; head];
    said.read_exact(&mut message).await?;
    let length = u32::from_be_bytes(message[head - 4..].try_into().unwrap()) as usize;
    message.resize(head - 4 + length, 0);
    said.read_exact(&mut message[head..]).await?;
    Ok(message)
}
