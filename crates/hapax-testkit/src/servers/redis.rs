use std::io;
use std::net::SocketAddr;
use std::process::Command;

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

use super::process::Process;
use super::{ServerError, Signal};

const PROGRAM: &str = "redis-server";

/// A Redis that keeps what it acknowledged: append-only file, synced at every write.
#[derive(Debug)]
pub struct RedisServer {
    process: Process,
    settings: Vec<String>,
}

impl RedisServer {
    /// Starts one, with `settings` as on its command line: `["--maxmemory", "1mb"]`.
    ///
    /// # Errors
    /// [`ServerError`].
    pub async fn start(settings: &[&str]) -> Result<Self, ServerError> {
        let process = Process::prepare(PROGRAM)?;
        let settings = settings.iter().map(|&setting| setting.to_owned()).collect();
        let mut server = Self { process, settings };
        server.restart().await?;
        Ok(server)
    }

    /// Starts it again, after [`RedisServer::end`], with what it kept.
    ///
    /// # Errors
    /// [`ServerError`].
    pub async fn restart(&mut self) -> Result<(), ServerError> {
        let mut command = Command::new(PROGRAM);
        let folder = self.process.folder.path();
        command
            .args(["--bind", "127.0.0.1", "--daemonize", "no", "--save", ""])
            .args(["--appendonly", "yes", "--appendfsync", "always"])
            .args(["--port", &self.process.address.port().to_string()])
            .arg("--dir")
            .arg(folder)
            .args(&self.settings);
        self.process.start(&mut command)?;
        self.process.ready(async |address| ping(address).await.is_ok()).await
    }

    /// Where it listens.
    #[must_use]
    pub const fn address(&self) -> SocketAddr {
        self.process.address
    }

    /// Sends it a signal.
    ///
    /// # Errors
    /// When there is no such process any more.
    pub fn signal(&mut self, signal: Signal) -> io::Result<()> {
        self.process.signal(signal)
    }

    /// Ends it by a signal and waits until it has ended.
    ///
    /// # Errors
    /// When there is no such process any more.
    pub fn end(&mut self, signal: Signal) -> io::Result<()> {
        self.process.end(signal)
    }
}

/// Whether it answers, and not that it is still loading.
async fn ping(address: SocketAddr) -> io::Result<()> {
    let mut stream = TcpStream::connect(address).await?;
    stream.write_all(b"PING\r\n").await?;
    let mut reply = [0; 5];
    stream.read_exact(&mut reply).await?;
    if reply == *b"+PONG" { Ok(()) } else { Err(io::Error::other("not ready")) }
}
