//! NATS with JetStream.

use std::net::SocketAddr;
use std::path::PathBuf;

use rustix::process::{Pid, Signal, kill_process};
use tokio::io::{AsyncBufReadExt as _, AsyncWriteExt as _, BufReader};
use tokio::net::TcpStream;
use tokio::process::{Child, Command};
use tokio::time::{Instant, sleep};

use super::{EVERY, TIMEOUT, free_port, loopback, program, tail};

/// A private NATS server with streams in files; dropping it kills it and removes its folder.
#[derive(Debug)]
pub struct NatsServer {
    folder: tempfile::TempDir,
    port: u16,
    child: Option<Child>,
    config: String,
}

impl NatsServer {
    /// Starts a server.
    pub async fn start() -> Self {
        Self::with("").await
    }

    /// Starts a server with more lines of its configuration, such as users.
    pub async fn with(config: &str) -> Self {
        let (folder, config) = (super::folder(), config.to_owned());
        let mut server = Self { folder, port: free_port(), child: None, config };
        // Another process may have taken the port in between.
        for _ in 0..5 {
            if server.try_start().await {
                return server;
            }
            server.port = free_port();
        }
        panic!("the server does not start:\n{}", tail(&server.log()));
    }

    /// Returns `nats://127.0.0.1:PORT`.
    #[must_use]
    pub fn url(&self) -> String {
        format!("nats://127.0.0.1:{}", self.port)
    }

    /// Returns the address on which it listens.
    #[must_use]
    pub const fn address(&self) -> SocketAddr {
        loopback(self.port)
    }

    /// Publishes a message whose subject and headers are these bytes, which no client library would send. The headers
    /// begin with the version line.
    pub async fn publish_raw(&self, subject: &[u8], headers: &[u8], payload: &[u8]) {
        let stream = TcpStream::connect(self.address()).await.expect("the server listens");
        let mut stream = BufReader::new(stream);
        let total = headers.len() + payload.len();
        let lengths = format!(" {} {total}\r\n", headers.len());
        let connect: &[u8] = b"CONNECT {\"verbose\":false,\"headers\":true}\r\nHPUB ";
        let parts = [connect, subject, lengths.as_bytes(), headers, payload, b"\r\nPING\r\n"];
        stream.write_all(&parts.concat()).await.expect("the server reads");
        let mut line = String::new();
        while !line.starts_with("PONG") {
            assert!(!line.starts_with("-ERR"), "{line}");
            line.clear();
            stream.read_line(&mut line).await.expect("the server answers");
        }
    }

    /// Freezes it (SIGSTOP): connections stay open without an answer.
    pub fn pause(&self) {
        self.signal(Signal::STOP);
    }

    /// Resumes it (SIGCONT).
    pub fn resume(&self) {
        self.signal(Signal::CONT);
    }

    /// Kills it (SIGKILL), and waits until it has ended. Its files stay.
    pub async fn kill(&mut self) {
        self.signal(Signal::KILL);
        if let Some(mut child) = self.child.take() {
            child.wait().await.expect("our own child can be awaited");
        }
    }

    /// Starts it again after [`kill`](Self::kill), on the same port and files.
    pub async fn restart(&mut self) {
        assert!(self.child.is_none(), "it still runs");
        for _ in 0..50 {
            if self.try_start().await {
                return;
            }
            sleep(EVERY * 10).await;
        }
        panic!("the server does not start again:\n{}", tail(&self.log()));
    }

    async fn try_start(&mut self) -> bool {
        let config = self.folder.path().join("server.conf");
        std::fs::write(&config, &self.config).expect("a file");
        let log = std::fs::File::create(self.log()).expect("a file");
        let mut command = Command::new(program(&["nats-server"]));
        command.arg("--jetstream").arg("--store_dir").arg(self.folder.path());
        command.args(["--addr", "127.0.0.1", "--port", &self.port.to_string()]);
        command.arg("--config").arg(config);
        command.stderr(log).kill_on_drop(true).process_group(0);
        let child = command.spawn().expect("nats-server can be started");
        let path = self.log();
        let child = self.child.insert(child);
        let deadline = Instant::now() + TIMEOUT;
        while Instant::now() < deadline {
            if child.try_wait().expect("the child is ours to wait for").is_some() {
                self.child = None;
                return false;
            }
            // Not a connection: another server on this port would accept it.
            let log = std::fs::read_to_string(&path).unwrap_or_default();
            if log.contains("Server is ready") {
                return true;
            }
            sleep(EVERY).await;
        }
        false
    }

    fn log(&self) -> PathBuf {
        self.folder.path().join("server.log")
    }

    fn signal(&self, signal: Signal) {
        let id = self.child.as_ref().and_then(Child::id);
        let pid = id.and_then(|id| Pid::from_raw(i32::try_from(id).ok()?));
        if let Some(pid) = pid {
            kill_process(pid, signal).expect("our own child takes signals");
        }
    }
}
