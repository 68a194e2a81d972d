//! Child processes: started, watched, killed.

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

/// How to start a process, and start it again.
#[derive(Clone, Debug)]
pub(crate) struct Recipe {
    /// What it is called where things go wrong.
    pub(crate) name: &'static str,
    pub(crate) program: PathBuf,
    pub(crate) arguments: Vec<String>,
    /// Where its standard error goes.
    pub(crate) log: PathBuf,
}

/// A process that listens. Killed when it is dropped.
#[derive(Debug)]
pub(crate) struct Process {
    name: &'static str,
    child: Child,
    lines: Lines<BufReader<ChildStdout>>,
}

/// Where a process says it listens.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Listens {
    pub(crate) address: SocketAddr,
    /// The operators' address, if there is one.
    pub(crate) admin: Option<SocketAddr>,
}

impl Process {
    /// Starts the process and waits until its first line says where it listens. One that ends
    /// before is started again until [`times::START`] is over: a port that was just in use may
    /// stay so for a moment.
    pub(crate) async fn start(recipe: &Recipe) -> Result<(Self, Listens), StartError> {
        let deadline = Instant::now() + times::START;
        loop {
            let mut process = Self::spawn(recipe).map_err(|source| recipe.failed(source))?;
            let left = deadline.saturating_duration_since(Instant::now());
            match timeout(left, process.line()).await {
                Ok(Ok(Some(line))) => {
                    return match listens(&line) {
                        Some(listens) => Ok((process, listens)),
                        None => Err(recipe.failed(io::Error::other(format!("it said: {line}")))),
                    };
                }
                Ok(Ok(None)) if Instant::now() < deadline => {
                    sleep(Duration::from_millis(100)).await;
                }
                Ok(Ok(None)) => return Err(recipe.failed(io::Error::other("it ended at once"))),
                Ok(Err(source)) => return Err(recipe.failed(source)),
                Err(_) => return Err(recipe.failed(io::ErrorKind::TimedOut.into())),
            }
        }
    }

    fn spawn(recipe: &Recipe) -> io::Result<Self> {
        let log = std::fs::OpenOptions::new().create(true).append(true).open(&recipe.log)?;
        let mut command = Command::new(&recipe.program);
        // What somebody has configured for a gateway of their own is not meant for this one.
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

    /// The next line that it prints; `None` once it has ended. Safe to drop: what was read of an
    /// unfinished line stays.
    pub(crate) async fn line(&mut self) -> io::Result<Option<String>> {
        self.lines.next_line().await
    }

    /// SIGKILL: it gets no chance to finish or say anything. Returns once it is gone.
    pub(crate) async fn kill(&mut self) -> io::Result<()> {
        self.child.kill().await
    }

    /// Ends its standard input, and waits until it has finished and ended by itself.
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

/// Finds the addresses in the first line that a process prints: its own, then perhaps the
/// operators'.
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

/// A process could not be started.
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
    fn first_lines() {
        let both = listens("listening on http://127.0.0.1:8080, admin http://127.0.0.1:9090/");
        let both = both.unwrap();
        assert_eq!(both.address.port(), 8080);
        assert_eq!(both.admin.unwrap().port(), 9090);
        let one = listens("ready 127.0.0.1:4000").unwrap();
        assert_eq!((one.address.port(), one.admin), (4000, None));
        assert_eq!(listens("ready"), None);
    }
}
