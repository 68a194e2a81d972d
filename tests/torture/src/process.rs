//! Child processes that listen: start, wait until ready, kill, end.

use std::fmt;
use std::io;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::process::{ExitStatus, Stdio};
use std::time::Duration;

use tokio::io::{AsyncBufReadExt, BufReader, Lines};
use tokio::net::TcpStream;
use tokio::process::{Child, ChildStdout, Command};
use tokio::time::timeout;

/// Time within which a process must listen.
const START: Duration = Duration::from_secs(20);

/// Time within which a process must end after SIGTERM.
const END: Duration = Duration::from_secs(20);

/// Program and arguments of a process, which can be started several times.
#[derive(Clone, Debug)]
pub(crate) struct Recipe {
    /// Name of the process in errors.
    pub(crate) name: &'static str,
    pub(crate) program: PathBuf,
    pub(crate) arguments: Vec<String>,
    /// File to which its standard error is appended.
    pub(crate) log: PathBuf,
}

/// A process that runs. It is killed when it is dropped.
#[derive(Debug)]
pub(crate) struct Process {
    recipe: Recipe,
    child: Child,
    lines: Lines<BufReader<ChildStdout>>,
}

/// Addresses that a process prints.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Listens {
    pub(crate) address: SocketAddr,
    /// The operators' address, if there is one.
    pub(crate) admin: Option<SocketAddr>,
}

impl Process {
    /// Starts a process.
    pub(crate) fn spawn(recipe: &Recipe) -> Result<Self, ProcessError> {
        Self::try_spawn(recipe).map_err(|source| recipe.failed("cannot be started", source))
    }

    fn try_spawn(recipe: &Recipe) -> io::Result<Self> {
        let log = std::fs::OpenOptions::new().create(true).append(true).open(&recipe.log)?;
        let mut command = Command::new(&recipe.program);
        // The user's own configuration of a gateway does not apply to this one.
        for (name, _) in std::env::vars_os() {
            if name.to_string_lossy().starts_with("HAPAX_") {
                command.env_remove(name);
            }
        }
        let mut child = command
            .args(&recipe.arguments)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(log)
            .kill_on_drop(true)
            .spawn()?;
        let out = child.stdout.take().ok_or_else(|| io::Error::other("no standard output"))?;
        Ok(Self { recipe: recipe.clone(), child, lines: BufReader::new(out).lines() })
    }

    /// Waits for the first line, which has the addresses. Dropping the future loses nothing.
    pub(crate) async fn ready(&mut self) -> Result<Listens, ProcessError> {
        let listens = self.first_line().await?;
        listens.ok_or_else(|| self.recipe.failed("did not start", io::Error::other("it ended")))
    }

    /// Waits for the first line; `None` if the process ends without one.
    async fn first_line(&mut self) -> Result<Option<Listens>, ProcessError> {
        let failed = |source| self.recipe.failed("did not start", source);
        match timeout(START, self.lines.next_line()).await {
            Ok(Ok(Some(line))) => match listens(&line) {
                Some(listens) => Ok(Some(listens)),
                None => Err(failed(io::Error::other(format!("its first line is: {line}")))),
            },
            Ok(Ok(None)) => Ok(None),
            Ok(Err(source)) => Err(failed(source)),
            Err(_) => Err(failed(io::ErrorKind::TimedOut.into())),
        }
    }

    /// Waits until the process accepts connections on `port`.
    pub(crate) async fn listens_on(&mut self, port: u16) -> Result<(), ProcessError> {
        let failed = |source| self.recipe.failed("did not listen", source);
        let deadline = tokio::time::Instant::now() + START;
        while TcpStream::connect(("127.0.0.1", port)).await.is_err() {
            if let Some(status) = self.child.try_wait().map_err(failed)? {
                return Err(self.ended(status));
            }
            if tokio::time::Instant::now() > deadline {
                return Err(failed(io::ErrorKind::TimedOut.into()));
            }
            tokio::time::sleep(Duration::from_millis(2)).await;
        }
        Ok(())
    }

    /// Kills the process (SIGKILL), and waits until it has ended.
    ///
    /// # Errors
    /// If the process had ended before.
    pub(crate) async fn kill(&mut self) -> Result<(), ProcessError> {
        if let Some(status) = self.child.try_wait().map_err(|error| self.failed(error))? {
            return Err(self.ended(status));
        }
        self.child.kill().await.map_err(|error| self.failed(error))
    }

    /// Ends the process as an operator does (SIGTERM): it must finish and succeed.
    pub(crate) async fn terminate(mut self) -> Result<(), ProcessError> {
        let Some(id) = self.child.id().map(|id| id.to_string()) else {
            return Err(self.failed(io::Error::other("it has ended already")));
        };
        let sent = Command::new("kill").args(["-TERM", &id]).status().await;
        sent.map_err(|error| self.failed(error))?;
        self.end().await
    }

    async fn end(&mut self) -> Result<(), ProcessError> {
        match timeout(END, self.child.wait()).await {
            Ok(Ok(status)) if status.success() => Ok(()),
            Ok(Ok(status)) => Err(self.ended(status)),
            Ok(Err(source)) => Err(self.failed(source)),
            Err(_) => Err(self.failed(io::ErrorKind::TimedOut.into())),
        }
    }

    fn ended(&self, status: ExitStatus) -> ProcessError {
        self.recipe.failed("ended", io::Error::other(status.to_string()))
    }

    fn failed(&self, source: io::Error) -> ProcessError {
        self.recipe.failed("did not end", source)
    }
}

#[cfg(feature = "demo")]
impl Process {
    /// Starts a process and waits until it listens. One that ends is started again until [`START`]
    /// is over: a port that was in use may stay so for a moment.
    pub(crate) async fn start(recipe: &Recipe) -> Result<(Self, Listens), ProcessError> {
        let deadline = tokio::time::Instant::now() + START;
        loop {
            let mut process = Self::spawn(recipe)?;
            match process.first_line().await? {
                Some(listens) => return Ok((process, listens)),
                None if tokio::time::Instant::now() >= deadline => {
                    let source = io::Error::other("it ended each time");
                    return Err(recipe.failed("did not start", source));
                }
                None => tokio::time::sleep(Duration::from_millis(100)).await,
            }
        }
    }

    /// Returns the next line of its standard output; `None` once it has ended. Dropping the future
    /// loses nothing.
    pub(crate) async fn line(&mut self) -> io::Result<Option<String>> {
        self.lines.next_line().await
    }

    /// Closes its standard input, and waits until it has finished and ended.
    pub(crate) async fn finish(&mut self) -> Result<(), ProcessError> {
        drop(self.child.stdin.take());
        self.end().await
    }
}

impl Recipe {
    fn failed(&self, what: &'static str, source: io::Error) -> ProcessError {
        let log = std::fs::read_to_string(&self.log).unwrap_or_default();
        let lines: Vec<_> = log.lines().collect();
        let log = lines[lines.len().saturating_sub(5)..].join("\n");
        ProcessError { name: self.name, what, source, log }
    }
}

/// Returns the addresses in the first line that a process prints: its own, then perhaps the
/// operators'.
fn listens(line: &str) -> Option<Listens> {
    let mut addresses = line
        .split(|c: char| c.is_whitespace() || c == ',')
        .filter_map(|word| word.trim_start_matches("http://").trim_end_matches('/').parse().ok());
    Some(Listens { address: addresses.next()?, admin: addresses.next() })
}

/// Error of a process, with the last lines of its log.
#[derive(Debug)]
pub struct ProcessError {
    name: &'static str,
    what: &'static str,
    source: io::Error,
    log: String,
}

impl fmt::Display for ProcessError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {}: {}", self.name, self.what, self.source)?;
        if self.log.is_empty() { Ok(()) } else { write!(f, "\n{}", self.log) }
    }
}

impl std::error::Error for ProcessError {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        Some(&self.source)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_are_read_from_the_first_line() {
        let both = listens("listening on http://127.0.0.1:8080, admin http://127.0.0.1:9090/");
        let both = both.unwrap();
        assert_eq!(both.address.port(), 8080);
        assert_eq!(both.admin.unwrap().port(), 9090);
        let one = listens("ready 127.0.0.1:4000").unwrap();
        assert_eq!((one.address.port(), one.admin), (4000, None));
        assert_eq!(listens("ready"), None);
    }
}
