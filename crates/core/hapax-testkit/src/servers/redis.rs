//! Redis, or Valkey if that is installed instead.

use std::fs::File;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::process::Stdio;

use rustix::process::Signal;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::process::{Child, Command};
use tokio::time::{Instant, sleep, timeout};

use super::{EVERY, TIMEOUT, clock, free_port, loopback, program, signal, tail};

/// Options of a [`RedisServer`]. Each method returns the changed options.
#[derive(Clone, Debug, Default)]
pub struct RedisServerOptions {
    config: Vec<(String, String)>,
    sentinel: bool,
    own_clock: bool,
}

impl RedisServerOptions {
    /// Returns options with an append-only file and no snapshots. As with [`PostgresServer`](super::PostgresServer) nothing
    /// is synced: a write survives the end of the process, and no test waits for the disk.
    #[must_use]
    pub fn new() -> Self {
        Self::default().set("appendonly", "yes").set("appendfsync", "no").set("save", "")
    }

    /// Sets a directive of the configuration file, in addition to or instead of the usual ones.
    #[must_use]
    pub fn set(mut self, directive: &str, value: impl Into<String>) -> Self {
        self.config.push((directive.into(), value.into()));
        self
    }

    /// Adds a clock that [`RedisServer::set_clock`] can set.
    #[must_use]
    pub fn own_clock(mut self) -> Self {
        self.own_clock = true;
        self
    }

    /// Returns options of a sentinel instead of a server; [`set`](Self::set) configures what it
    /// monitors.
    #[must_use]
    pub fn sentinel() -> Self {
        Self { sentinel: true, ..Self::default() }
    }
}

/// A private Redis server; dropping it kills it and removes its folder.
#[derive(Debug)]
pub struct RedisServer {
    options: RedisServerOptions,
    folder: tempfile::TempDir,
    port: u16,
    child: Option<Child>,
}

impl RedisServer {
    /// Starts a server with [`RedisServerOptions::new`].
    pub async fn start() -> Self {
        Self::start_with(RedisServerOptions::new()).await
    }

    /// Starts a server with `options`.
    pub async fn start_with(options: RedisServerOptions) -> Self {
        let folder = tempfile::tempdir().expect("a temporary folder");
        let mut server = Self { options, folder, port: free_port(), child: None };
        // Another process may have taken the port in between.
        for _ in 0..5 {
            if server.try_start().await {
                return server;
            }
            server.port = free_port();
        }
        panic!("the server does not start:\n{}", tail(&server.log()));
    }

    /// Returns the port on which it listens, on 127.0.0.1.
    #[must_use]
    pub const fn port(&self) -> u16 {
        self.port
    }

    /// Returns the address on which it listens.
    #[must_use]
    pub const fn address(&self) -> SocketAddr {
        loopback(self.port)
    }

    /// Returns `redis://127.0.0.1:PORT`.
    #[must_use]
    pub fn url(&self) -> String {
        format!("redis://127.0.0.1:{}", self.port)
    }

    /// Returns the folder of its files.
    #[must_use]
    pub fn folder(&self) -> &Path {
        self.folder.path()
    }

    /// Freezes it (SIGSTOP): connections stay open without an answer.
    pub fn pause(&self) {
        signal(self.child(), Signal::STOP);
    }

    /// Resumes it (SIGCONT).
    pub fn resume(&self) {
        signal(self.child(), Signal::CONT);
    }

    /// Sets its clock to `seconds` after the real one; before it, if negative. Needs
    /// [`RedisServerOptions::own_clock`].
    pub fn set_clock(&self, seconds: i64) {
        assert!(self.options.own_clock, "it goes by the real clock");
        clock::set(&self.clock(), seconds);
    }

    /// Kills it (SIGKILL) and waits until it has ended. Its files stay.
    pub async fn kill(&mut self) {
        if let Some(mut child) = self.child.take() {
            child.kill().await.expect("our own child can be killed");
        }
    }

    /// Stops it as an operator does (SIGTERM); it saves what its configuration requires.
    pub async fn stop(&mut self) {
        if let Some(mut child) = self.child.take() {
            signal(&child, Signal::TERM);
            child.wait().await.expect("our own child can be awaited");
        }
    }

    /// Starts it again after [`kill`](Self::kill) or [`stop`](Self::stop), on the same port and
    /// files.
    pub async fn restart(&mut self) {
        assert!(self.child.is_none(), "it still runs");
        // An outgoing connection of another process may have its port for a moment.
        for _ in 0..50 {
            if self.try_start().await {
                return;
            }
            sleep(EVERY * 10).await;
        }
        panic!("the server does not start again:\n{}", tail(&self.log()));
    }

    /// Sends a command, its words separated by spaces, over a separate connection. Returns the
    /// reply unparsed, without the final line break; errors begin with `-`.
    pub async fn command(&self, words: &str) -> String {
        let words: Vec<_> = words.split(' ').collect();
        self.command_of(&words).await
    }

    /// Does the same as [`command`](Self::command), with words that may contain spaces.
    pub async fn command_of(&self, words: &[&str]) -> String {
        let answer = timeout(TIMEOUT, ask(self.port, words)).await;
        answer.expect("a reply in time").expect("a connection to the server")
    }

    async fn try_start(&mut self) -> bool {
        let config = self.write_config();
        let log = File::options().create(true).append(true).open(self.log()).expect("a log file");
        let mut command = Command::new(program(&["redis-server", "valkey-server"]));
        command.arg(config);
        if self.options.sentinel {
            command.arg("--sentinel");
        }
        if self.options.own_clock {
            self.set_clock(0);
            command.envs(clock::environment(self.folder(), &self.clock()));
        }
        let child = command
            .current_dir(self.folder.path())
            .stdin(Stdio::null())
            .stdout(log.try_clone().expect("a second handle of the log file"))
            .stderr(log)
            .kill_on_drop(true)
            .spawn()
            .expect("the server can be run");
        let child = self.child.insert(child);
        let deadline = Instant::now() + TIMEOUT;
        while Instant::now() < deadline {
            if child.try_wait().expect("the child is ours to wait for").is_some() {
                self.child = None;
                return false;
            }
            // While it loads its files, it answers with an error. Another server on this port would
            // answer with another process id.
            let pid = format!("process_id:{}\r", child.id().unwrap_or_default());
            let answer = timeout(TIMEOUT, ask(self.port, &["INFO", "server"])).await;
            match answer {
                Ok(Ok(answer)) if answer.contains(&pid) => return true,
                // It requires a password first.
                Ok(Ok(answer)) if answer.starts_with("-NOAUTH") => return true,
                _ => sleep(EVERY).await,
            }
        }
        false
    }

    fn write_config(&self) -> PathBuf {
        let file = self.folder.path().join("redis.conf");
        // Written once: a sentinel stores what it discovers in it.
        if !file.exists() || !self.options.sentinel {
            let folder = self.folder.path().display();
            let mut text = format!(
                "bind 127.0.0.1\nport {}\ndir {folder}\ndaemonize no\nloglevel notice\n",
                self.port
            );
            for (directive, value) in &self.options.config {
                let value = if value.is_empty() { "\"\"" } else { value };
                text.push_str(&format!("{directive} {value}\n"));
            }
            std::fs::write(&file, text).expect("a configuration file");
        }
        file
    }

    fn clock(&self) -> PathBuf {
        self.folder.path().join("clock")
    }

    fn log(&self) -> PathBuf {
        self.folder.path().join("server.log")
    }

    fn child(&self) -> &Child {
        self.child.as_ref().expect("it runs")
    }
}

impl Drop for RedisServer {
    fn drop(&mut self) {
        // Ends a frozen process too: SIGKILL needs no cooperation.
        if let Some(child) = &mut self.child {
            child.start_kill().ok();
        }
    }
}

/// Sends one command and returns its reply, unparsed. Supports replies of one line or one bulk
/// string.
async fn ask(port: u16, words: &[&str]) -> std::io::Result<String> {
    let mut stream = TcpStream::connect(("127.0.0.1", port)).await?;
    let mut request = format!("*{}\r\n", words.len()).into_bytes();
    for word in words {
        request.extend_from_slice(format!("${}\r\n{word}\r\n", word.len()).as_bytes());
    }
    stream.write_all(&request).await?;
    // The server answers what it read, reads the end, and closes: the reply is all that can be
    // read.
    stream.shutdown().await?;
    let mut answer = Vec::new();
    stream.read_to_end(&mut answer).await?;
    Ok(String::from_utf8_lossy(&answer).trim_end().to_owned())
}
