//! Child processes of the demo: starting, reading and killing them.

use std::fmt;
use std::io;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::Duration;

use tokio::io::{AsyncBufReadExt, BufReader, Lines};
use tokio::process::{Child, ChildStdout, Command};
use tokio::time::{Instant, sleep, timeout};

use super::times;

/// The command line of a process, to start and restart it.
#[derive(Clone, Debug)]
pub(crate) struct Recipe {
    /// The name of the process in errors.
    pub(crate) name: &'static str,
    pub(crate) program: PathBuf,
    pub(crate) arguments: Vec<String>,
    /// The file that gets its standard error.
    pub(crate) log: PathBuf,
}

/// A process that listens. It is killed on drop.
#[derive(Debug)]
pub(crate) struct Process {
    name: &'static str,
    child: Child,
    lines: Lines<BufReader<ChildStdout>>,
}

/// The addresses that a process listens on.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Listens {
    pub(crate) address: SocketAddr,
    /// The operators' address, if there is one.
    pub(crate) admin: Option<SocketAddr>,
}

impl Process {
    /// Starts the process and waits for its first line, which has the addresses that it listens on.
    /// A process that ends before that is restarted until [`times::START`] is over: a port that was
    /// in use just before may stay in use for a moment.
    pub(crate) async fn start(recipe: &Recipe) -> Result<(Self, Listens), StartError> {
        let deadline = Instant::now() + times::START;
        loop {
            let mut process = Self::spawn(recipe).map_err(|source| recipe.failed(source))?;
            let left = deadline.saturating_duration_since(Instant::now());
            match timeout(left, process.line()).await {
                Ok(Ok(Some(line))) => {
                    return match listens(&line) {
                        Some(listens) => Ok((process, listens)),
                        None => Err(recipe.failed(io::Error::other(format!(
                            "expected its addresses, found: {line}"
                        )))),
                    };
                }
                Ok(Ok(None)) if Instant::now() < deadline => {
                    sleep(Duration::from_millis(100)).await;
                }
                Ok(Ok(None)) => {
                    return Err(recipe.failed(io::Error::other("it ended before it listened")));
                }
                Ok(Err(source)) => return Err(recipe.failed(source)),
                Err(_) => return Err(recipe.failed(io::ErrorKind::TimedOut.into())),
            }
        }
    }

    fn spawn(recipe: &Recipe) -> io::Result<Self> {
        let log = std::fs::OpenOptions::new().create(true).append(true).open(&recipe.log)?;
        let mut command = Command::new(&recipe.program);
        // Variables for the user's own gateway do not apply to the demo's.
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
        Ok(Self { name: recipe.name, child, lines: BufReader::new(out).lines() })
    }

    /// Returns the next line of its standard output; `None` once the process has ended. Cancel
    /// safe: a partly read line stays in the buffer.
    pub(crate) async fn line(&mut self) -> io::Result<Option<String>> {
        self.lines.next_line().await
    }

    /// Kills the process with SIGKILL, and returns once it has ended.
    pub(crate) async fn kill(&mut self) -> io::Result<()> {
        self.child.kill().await
    }

    /// Closes its standard input, and waits until the process has finished its requests and exited.
    pub(crate) async fn finish(&mut self) -> io::Result<()> {
        drop(self.child.stdin.take());
        let status = timeout(times::DRAIN, self.child.wait()).await??;
        if status.success() {
            return Ok(());
        }
        Err(io::Error::other(format!("{} ended with {status}", self.name)))
    }
}

impl Recipe {
    fn failed(&self, source: io::Error) -> StartError {
        StartError { name: self.name, source, log: last_lines(&self.log) }
    }
}

/// Parses the first line of a process: its address, then the operators' address if it has one.
fn listens(line: &str) -> Option<Listens> {
    let mut addresses = line
        .split(|c: char| c.is_whitespace() || c == ',')
        .filter_map(|word| word.trim_start_matches("http://").trim_end_matches('/').parse().ok());
    Some(Listens { address: addresses.next()?, admin: addresses.next() })
}

fn last_lines(log: &Path) -> String {
    let text = std::fs::read_to_string(log).unwrap_or_default();
    let lines: Vec<_> = text.lines().collect();
    lines[lines.len().saturating_sub(5)..].join("\n")
}

/// The error of a process that could not be started, with the last lines of its log.
#[derive(Debug)]
pub(crate) struct StartError {
    name: &'static str,
    source: io::Error,
    log: String,
}

impl fmt::Display for StartError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "cannot start {}: {}", self.name, self.source)?;
        if self.log.is_empty() { Ok(()) } else { write!(f, "\n{}", self.log) }
    }
}

impl std::error::Error for StartError {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        Some(&self.source)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_line_has_the_addresses() {
        let both = listens("listening on http://127.0.0.1:8080, admin http://127.0.0.1:9090/");
        let both = both.unwrap();
        assert_eq!(both.address.port(), 8080);
        assert_eq!(both.admin.unwrap().port(), 9090);
        let one = listens("ready 127.0.0.1:4000").unwrap();
        assert_eq!((one.address.port(), one.admin), (4000, None));
        assert_eq!(listens("ready"), None);
    }
}
