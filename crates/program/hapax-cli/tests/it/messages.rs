//! `hapax messages`, `hapax relay` and `hapax consume`, with real servers.

pub(crate) mod consume;
#[cfg(feature = "kafka")]
mod kafka;
mod kills;
mod nats;
mod postgres;
mod rabbitmq;
mod service;

use std::io::{BufRead, BufReader};
use std::net::SocketAddr;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use hapax_testkit::servers::PostgresServer;
use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;

use crate::world::{hapax, ok};

/// A running `hapax relay`.
pub(crate) struct RelayProcess {
    child: Child,
    admin: SocketAddr,
}

impl RelayProcess {
    /// Starts a relay, and waits until it is ready.
    pub(crate) fn start(from: &str, to: &str, more: &[&str]) -> Self {
        let arguments = ["relay", "--from", from, "--to", to, "--admin", "127.0.0.1:0"];
        let lease = ["--lease", "2s", "--log-format", "json"];
        let command = hapax(&[&arguments[..], &lease, more].concat());
        let (child, admin) = ready(command);
        Self { child, admin }
    }

    fn kill(mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }

    pub(crate) fn end(mut self) -> Option<i32> {
        kill_process(Pid::from_child(&self.child), Signal::TERM).unwrap();
        self.child.wait().unwrap().code()
    }
}

/// Starts a process that logs JSON, and waits until it is ready. Returns its operators' address too.
fn ready(mut command: Command) -> (Child, SocketAddr) {
    let mut child = command.stderr(Stdio::piped()).spawn().unwrap();
    let mut log = BufReader::new(child.stderr.take().unwrap()).lines();
    let ready = log.by_ref().map(Result::unwrap).find(|line| line.contains("\"ready\""));
    let ready: Value = serde_json::from_str(&ready.expect("it says that it is ready")).unwrap();
    std::thread::spawn(move || log.for_each(drop));
    (child, ready["admin"].as_str().unwrap().parse().unwrap())
}

/// Returns the script of `hapax sql --part messages` without the command of psql at its beginning.
pub(crate) fn migrations() -> String {
    let script = blocking(|| ok(&["sql", "--part", "messages"]));
    script.strip_prefix("\\set ON_ERROR_STOP on\n").expect("psql ends at an error").to_owned()
}

pub(crate) fn blocking<T>(run: impl FnOnce() -> T) -> T {
    tokio::task::block_in_place(run)
}

/// Waits until the answer of the database to `text` is `expected`.
pub(crate) async fn until(database: &PostgresServer, text: &str, expected: &str) {
    while database.sql("postgres", text).await != expected {
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}
