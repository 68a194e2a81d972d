//! Gateway processes: start, wait until ready, kill.

use std::fs::File;
use std::io;
use std::path::{Path, PathBuf};
use std::process::{ExitStatus, Stdio};
use std::time::Duration;

use tokio::net::TcpStream;
use tokio::process::{Child, Command};
use tokio::time::{Instant, sleep, timeout};

use crate::dice::Dice;
use crate::{OnUnknownPolicy, TortureError};

/// Time within which a gateway must open its file and listen, and within which it must end after
/// SIGTERM.
const START: Duration = Duration::from_secs(20);

/// Lease of gateways that share a store: longer than the pauses of a busy machine, and short enough
/// for many to lapse in one run.
const LEASE: &str = "2s";

/// Settings of a gateway process; the same for each incarnation except for the upstream's port.
#[derive(Clone, Debug)]
pub(crate) struct Plan {
    pub(crate) program: PathBuf,
    pub(crate) store: String,
    pub(crate) policy: OnUnknownPolicy,
    pub(crate) port: u16,
    /// True if several gateways use the store: a lease then outlives its gateway's process.
    pub(crate) shared: bool,
    /// File for standard error; each incarnation overwrites it.
    pub(crate) log: PathBuf,
}

/// A gateway process that runs.
pub(crate) struct Gateway {
    child: Child,
    plan: Plan,
}

impl Plan {
    pub(crate) fn start(&self, upstream: u16) -> io::Result<Gateway> {
        let mut command = Command::new(&self.program);
        command
            .arg("gateway")
            .args(["--listen", &format!("127.0.0.1:{}", self.port), "--admin", "off"])
            .args(["--upstream", &format!("http://127.0.0.1:{upstream}")])
            .args(["--store", &self.store])
            .args(["--on-unknown", &self.policy.to_string()])
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(File::create(&self.log)?)
            .kill_on_drop(true);
        if self.shared {
            command.args(["--lease", LEASE]);
        }
        match self.policy {
            OnUnknownPolicy::Reexecute => {
                command.args(["--in-flight", "wait", "--wait-for", "2s"]);
            }
            OnUnknownPolicy::Block => {}
            OnUnknownPolicy::Reconcile => {
                // The gateway calls the hook one upstream timeout after the lease lapses.
                let url = format!("http://127.0.0.1:{upstream}/outcome");
                command.args(["--reconcile-url", &url, "--upstream-timeout", "150ms"]);
            }
        }
        Ok(Gateway { child: command.spawn()?, plan: self.clone() })
    }
}

impl Gateway {
    /// Waits until the gateway listens. It opens its file before it listens.
    pub(crate) async fn ready(&mut self) -> Result<(), TortureError> {
        let deadline = Instant::now() + START;
        while TcpStream::connect(("127.0.0.1", self.plan.port)).await.is_err() {
            if let Some(status) = self.child.try_wait()? {
                return Err(self.failure(&format!("ended unexpectedly with {status}")));
            }
            if Instant::now() > deadline {
                return Err(self.failure(&format!("was not ready after {START:?}")));
            }
            sleep(Duration::from_millis(2)).await;
        }
        Ok(())
    }

    /// Sends SIGKILL, and waits until the process has ended.
    pub(crate) async fn kill(&mut self) -> Result<(), TortureError> {
        if let Some(status) = self.child.try_wait()? {
            return Err(self.failure(&format!("ended unexpectedly with {status}")));
        }
        Ok(self.child.kill().await?)
    }

    /// Sends SIGTERM; the gateway must finish its requests under way and exit with success.
    pub(crate) async fn terminate(mut self) -> Result<(), TortureError> {
        let Some(id) = self.child.id() else {
            return Err(self.failure("ended unexpectedly"));
        };
        Command::new("kill").args(["-TERM", &id.to_string()]).status().await?;
        let ended = timeout(START, self.child.wait()).await;
        match ended {
            Ok(Ok(status)) if ExitStatus::success(&status) => Ok(()),
            Ok(Ok(status)) => Err(self.failure(&format!("ended after SIGTERM with {status}"))),
            Ok(Err(error)) => Err(error.into()),
            Err(_) => Err(self.failure(&format!("had not ended {START:?} after SIGTERM"))),
        }
    }

    fn failure(&self, what: &str) -> TortureError {
        let log = std::fs::read_to_string(&self.plan.log).unwrap_or_default();
        let last: Vec<&str> = log.lines().rev().take(5).collect();
        let last: String = last.into_iter().rev().map(|line| format!("\n    {line}")).collect();
        TortureError(format!("{}: the gateway {what}{last}", self.plan.policy))
    }
}

/// Returns free ports below those that the system gives to clients. So no other process is given
/// the port of a gateway that is down, and no client connects to itself.
pub(crate) fn free_ports(count: u64, dice: &mut Dice) -> Result<Vec<u16>, TortureError> {
    let mut ports = Vec::new();
    for _ in 0..100 {
        let port = 20_000 + (dice.below(10_000) as u16);
        let free = std::net::TcpListener::bind(("127.0.0.1", port)).is_ok();
        if free && !ports.contains(&port) {
            ports.push(port);
        }
        if ports.len() as u64 == count {
            return Ok(ports);
        }
    }
    Err(TortureError("no free ports between 20000 and 30000".into()))
}

/// Returns `file:` and the path of a new file in `folder`.
pub(crate) fn store_in(folder: &Path) -> String {
    format!("file:{}", folder.join("hapax.db").display())
}
