use std::fs::File;
use std::io;
use std::net::{Ipv4Addr, SocketAddr, TcpListener};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use tempfile::TempDir;
use tokio::time::{Instant, sleep};

use super::ServerError;

/// The longest that a server may take to answer.
const PATIENCE: Duration = Duration::from_secs(60);

/// A signal to a server.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Signal {
    /// It dies on the spot.
    Kill,
    /// It stands still.
    Stop,
    /// It goes on.
    Continue,
    /// It stops at once, in order.
    Quit,
}

impl Signal {
    const fn name(self) -> &'static str {
        match self {
            Self::Kill => "-KILL",
            Self::Stop => "-STOP",
            Self::Continue => "-CONT",
            Self::Quit => "-QUIT",
        }
    }
}

/// A server's process and its folder.
#[derive(Debug)]
pub(super) struct Process {
    pub(super) folder: TempDir,
    pub(super) address: SocketAddr,
    program: &'static str,
    child: Option<Child>,
}

impl Process {
    /// A folder and a port that are free now.
    pub(super) fn prepare(program: &'static str) -> io::Result<Self> {
        let folder = tempfile::Builder::new().prefix("hapax-test-").tempdir()?;
        // Given back, so that the server can have it. Should another take it in between, the
        // server says so and the test fails.
        let address = TcpListener::bind((Ipv4Addr::LOCALHOST, 0))?.local_addr()?;
        Ok(Self { folder, address, program, child: None })
    }

    /// Starts `command`, its output in a log.
    pub(super) fn start(&mut self, command: &mut Command) -> Result<(), ServerError> {
        let log = File::options().create(true).append(true).open(self.log_path())?;
        command.stdin(Stdio::null()).stdout(log.try_clone()?).stderr(log);
        let child = command.spawn().map_err(|error| missing(self.program, error))?;
        self.child = Some(child);
        Ok(())
    }

    /// Waits until `answers` is true.
    pub(super) async fn ready(
        &mut self,
        mut answers: impl AsyncFnMut(SocketAddr) -> bool,
    ) -> Result<(), ServerError> {
        let deadline = Instant::now() + PATIENCE;
        while !answers(self.address).await {
            let ended =
                self.child.as_mut().is_none_or(|child| !matches!(child.try_wait(), Ok(None)));
            if ended {
                return Err(ServerError::Failed { program: self.program, output: self.log() });
            }
            if Instant::now() > deadline {
                return Err(ServerError::Silent { program: self.program, log: self.log() });
            }
            sleep(Duration::from_millis(10)).await;
        }
        Ok(())
    }

    pub(super) fn signal(&mut self, signal: Signal) -> io::Result<()> {
        let Some(child) = &mut self.child else { return Ok(()) };
        let id = child.id().to_string();
        let sent = Command::new("kill").arg(signal.name()).arg(id).status()?;
        if sent.success() { Ok(()) } else { Err(io::Error::other("the server is gone already")) }
    }

    /// Ends it by `signal` and waits until it has ended.
    pub(super) fn end(&mut self, signal: Signal) -> io::Result<()> {
        // A process that stands still would take its end to heart only later.
        let sent = self.signal(Signal::Continue).and_then(|()| self.signal(signal));
        if let Some(mut child) = self.child.take() {
            child.wait()?;
        }
        sent
    }

    fn log_path(&self) -> std::path::PathBuf {
        self.folder.path().join("log")
    }

    fn log(&self) -> String {
        let log = std::fs::read_to_string(self.log_path()).unwrap_or_default();
        let from = log.len().saturating_sub(2_000);
        log[log.ceil_char_boundary(from)..].to_owned()
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        if self.child.is_some() && self.end(Signal::Quit).is_err() {
            // It has ended by itself, or cannot be reached: there is nobody to tell.
        }
    }
}

pub(super) fn missing(program: &'static str, error: io::Error) -> ServerError {
    match error.kind() {
        io::ErrorKind::NotFound => ServerError::Missing { program },
        _ => ServerError::Io(error),
    }
}

/// Runs a program to its end.
pub(super) async fn run(program: &'static str, command: Command) -> Result<(), ServerError> {
    let output = tokio::process::Command::from(command)
        .stdin(Stdio::null())
        .output()
        .await
        .map_err(|error| missing(program, error))?;
    if output.status.success() {
        return Ok(());
    }
    let output = String::from_utf8_lossy(&output.stderr).into_owned();
    Err(ServerError::Failed { program, output })
}

/// An unprivileged user, by name, from the machine's list.
pub(super) fn user(name: &str) -> Option<(u32, u32)> {
    let users = std::fs::read_to_string(Path::new("/etc/passwd")).ok()?;
    let mut fields = users.lines().find(|line| line.split(':').next() == Some(name))?.split(':');
    let user = fields.nth(2)?.parse().ok()?;
    let group = fields.next()?.parse().ok()?;
    Some((user, group))
}
