//! Processes of a run: started, killed, and started again.

use std::path::{Path, PathBuf};
use std::process::{ExitStatus, Stdio};
use std::sync::atomic::{AtomicU16, Ordering};

use tokio::process::{Child, Command};
use tokio::time::Instant;

use crate::{CallsError, failed};

/// A process that can be started several times.
#[derive(Debug)]
pub(crate) struct Process {
    program: PathBuf,
    arguments: Vec<String>,
    log: PathBuf,
    child: Option<Child>,
    /// The time before which it is not started again.
    rests_until: Option<Instant>,
}

impl Process {
    /// Starts a process, whose standard error is appended to `log`.
    pub(crate) fn start(
        program: &Path,
        arguments: Vec<String>,
        log: PathBuf,
    ) -> Result<Self, CallsError> {
        let program = program.to_owned();
        let mut process = Self { program, arguments, log, child: None, rests_until: None };
        process.spawn()?;
        Ok(process)
    }

    fn spawn(&mut self) -> Result<(), CallsError> {
        let log = std::fs::OpenOptions::new().create(true).append(true).open(&self.log);
        let mut command = Command::new(&self.program);
        // The user's own configuration of a gateway does not apply to this one.
        for (name, _) in std::env::vars_os() {
            if name.to_string_lossy().starts_with("HAPAX_") {
                command.env_remove(name);
            }
        }
        command
            .args(&self.arguments)
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(log.map_err(failed("opening a log"))?)
            .kill_on_drop(true);
        self.child = Some(command.spawn().map_err(failed("starting a process"))?);
        Ok(())
    }

    /// Returns whether the process runs.
    pub(crate) fn runs(&self) -> bool {
        self.child.is_some()
    }

    /// Kills the process (SIGKILL), and starts it again at `until` at the earliest. Returns false if it
    /// did not run.
    pub(crate) async fn kill(&mut self, until: Instant) -> Result<bool, CallsError> {
        if self.ended()?.is_some() {
            return Ok(false);
        }
        let Some(mut child) = self.child.take() else { return Ok(false) };
        child.kill().await.map_err(failed("killing a process"))?;
        self.rests_until = Some(until);
        Ok(true)
    }

    /// Returns the status of a process that has ended by itself, once.
    pub(crate) fn ended(&mut self) -> Result<Option<ExitStatus>, CallsError> {
        let Some(child) = &mut self.child else { return Ok(None) };
        let ended = child.try_wait().map_err(failed("observing a process"))?;
        if ended.is_some() {
            self.child = None;
        }
        Ok(ended)
    }

    /// Starts the process again, if it does not run and its time has come.
    pub(crate) fn restart(&mut self) -> Result<(), CallsError> {
        if self.child.is_none() && self.rests_until.is_none_or(|until| until <= Instant::now()) {
            self.rests_until = None;
            self.spawn()?;
        }
        Ok(())
    }

    /// Returns the last lines of the log.
    pub(crate) fn log(&self) -> String {
        let log = std::fs::read_to_string(&self.log).unwrap_or_default();
        let lines: Vec<_> = log.lines().collect();
        lines[lines.len().saturating_sub(10)..].join("\n")
    }
}

/// Returns a free port below those that the system gives to clients: no other process is given the port
/// of one that is down, and no client connects to itself.
pub(crate) fn free_port() -> Result<u16, CallsError> {
    static NEXT: AtomicU16 = AtomicU16::new(0);
    let begin = (std::process::id() % 10_000) as u16;
    for _ in 0..1_000 {
        let next = NEXT.fetch_add(1, Ordering::Relaxed);
        let port = 20_000 + begin.wrapping_mul(7).wrapping_add(next) % 10_000;
        if std::net::TcpListener::bind(("127.0.0.1", port)).is_ok() {
            return Ok(port);
        }
    }
    Err(failed("looking for a port")("expected a free port from 20000 to 29999, found none"))
}
