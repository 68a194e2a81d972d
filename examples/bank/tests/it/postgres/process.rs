//! The bank as a process.

use std::collections::BTreeMap;
use std::fs::File;
use std::path::PathBuf;
use std::process::Stdio;
use std::time::Duration;

use hapax_testkit::servers::PostgresServer;
use tokio::net::TcpStream;
use tokio::process::{Child, Command};
use tokio::time::{Instant, sleep};

/// Time within which the bank must listen.
const START: Duration = Duration::from_secs(60);

/// Settings of each process of the bank.
#[derive(Debug)]
pub(crate) struct Plan {
    pub(crate) port: u16,
    pub(crate) store: String,
    pub(crate) pool: String,
    /// Average number of steps after which it kills itself; 0 for never.
    pub(crate) die: u64,
    pub(crate) bug: Option<&'static str>,
    pub(crate) log: PathBuf,
}

impl Plan {
    pub(crate) fn new(server: &PostgresServer, log: PathBuf) -> Self {
        let url = server.url("postgres");
        Self { port: port(), store: url.clone(), pool: url, die: 0, bug: None, log }
    }

    pub(crate) fn start(&self, seed: u64) -> Bank {
        let log = File::options().create(true).append(true).open(&self.log).unwrap();
        let mut command = Command::new(env!("CARGO_BIN_EXE_hapax-bank"));
        command
            .env("BANK_LISTEN", format!("127.0.0.1:{}", self.port))
            .env("BANK_STORE", &self.store)
            .env("BANK_POOL", &self.pool)
            .env("BANK_DIE", self.die.to_string())
            .env("BANK_SEED", seed.to_string())
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(log)
            .kill_on_drop(true);
        if let Some(bug) = self.bug {
            command.env("BANK_BUG", bug);
        }
        Bank { child: command.spawn().unwrap(), port: self.port }
    }

    /// Returns the steps at which it killed itself, and how often at each.
    pub(crate) fn deaths(&self) -> BTreeMap<String, u64> {
        let mut deaths = BTreeMap::new();
        let log = std::fs::read_to_string(&self.log).unwrap_or_default();
        for step in log.lines().filter_map(|line| line.strip_prefix("died ")) {
            *deaths.entry(step.to_owned()).or_default() += 1;
        }
        deaths
    }
}

/// A process of the bank, running or ended.
#[derive(Debug)]
pub(crate) struct Bank {
    child: Child,
    port: u16,
}

impl Bank {
    /// Waits until the bank listens. Returns false if it killed itself first.
    pub(crate) async fn ready(&mut self) -> bool {
        let deadline = Instant::now() + START;
        while TcpStream::connect(("127.0.0.1", self.port)).await.is_err() {
            if self.child.try_wait().unwrap().is_some() {
                return false;
            }
            assert!(Instant::now() < deadline, "the bank does not listen");
            sleep(Duration::from_millis(2)).await;
        }
        true
    }

    /// Kills the bank (SIGKILL) after `after`. Returns false if it killed itself before.
    pub(crate) async fn kill_after(&mut self, after: Duration) -> bool {
        let by_itself = tokio::time::timeout(after, self.child.wait()).await;
        if let Ok(status) = by_itself {
            let status = status.unwrap();
            let signal = std::os::unix::process::ExitStatusExt::signal(&status);
            assert_eq!(signal, Some(9), "the bank ended with {status}");
            return false;
        }
        self.child.kill().await.unwrap();
        true
    }
}

/// Returns a free port below those that the system gives to clients, so that no client connects to
/// itself while the bank is down.
fn port() -> u16 {
    let from = 20_000 + std::process::id() as u16 % 10_000;
    let free = |port: &u16| std::net::TcpListener::bind(("127.0.0.1", *port)).is_ok();
    (from..from + 100).find(free).expect("a free port")
}
