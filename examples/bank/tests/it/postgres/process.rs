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

/// How long it may take to listen.
const START: Duration = Duration::from_secs(60);

/// How to start it, each time.
#[derive(Debug)]
pub(crate) struct Plan {
    pub(crate) port: u16,
    pub(crate) store: String,
    pub(crate) pool: String,
    /// Once in how many steps it kills itself; 0 for never.
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

    /// At which steps it killed itself, and how often.
    pub(crate) fn deaths(&self) -> BTreeMap<String, u64> {
        let mut deaths = BTreeMap::new();
        let log = std::fs::read_to_string(&self.log).unwrap_or_default();
        for step in log.lines().filter_map(|line| line.strip_prefix("died ")) {
            *deaths.entry(step.to_owned()).or_default() += 1;
        }
        deaths
    }
}

/// A bank that runs, or has died by itself.
#[derive(Debug)]
pub(crate) struct Bank {
    child: Child,
    port: u16,
}

impl Bank {
    /// Waits until it listens. Whether it does: it may have died first.
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

    /// Kills it (SIGKILL) after a while, unless it dies by itself before. Whether we did.
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

/// A port below those that the system gives to clients: while the bank is dead, no client connects
/// to itself.
fn port() -> u16 {
    let from = 20_000 + std::process::id() as u16 % 10_000;
    let free = |port: &u16| std::net::TcpListener::bind(("127.0.0.1", *port)).is_ok();
    (from..from + 100).find(free).expect("a free port")
}
