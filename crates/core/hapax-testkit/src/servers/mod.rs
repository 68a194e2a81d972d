//! Real servers for tests. They are private, on free ports of the loopback interface, in separate
//! folders, and end with the value that owns them.
//!
//! A server that cannot be started fails the test. Tests that need one are in a module of its name
//! (`redis`, `postgres`), so that `cargo xtask test --skip redis` can leave them out, and report
//! it.

#![allow(
    clippy::expect_used,
    clippy::missing_panics_doc,
    clippy::panic,
    clippy::unwrap_used,
    reason = "a server that does not start fails the test"
)]

mod clock;
#[cfg(feature = "kafka")]
mod kafka;
mod nats;
mod postgres;
mod rabbitmq;
mod redis;
mod redis_cluster;

use std::hash::{BuildHasher as _, RandomState};
use std::net::{IpAddr, Ipv4Addr, SocketAddr, TcpListener};
use std::path::{Path, PathBuf};
use std::time::Duration;

use tokio::process::Child;

#[cfg(feature = "kafka")]
pub use kafka::{KafkaMock, MockBrokers};
pub use nats::NatsServer;
pub use postgres::{PgBouncer, PostgresServer, PostgresServerOptions};
pub use rabbitmq::{RabbitMqServer, RabbitMqServerOptions};
pub use redis::{RedisServer, RedisServerOptions};
pub use redis_cluster::RedisCluster;

/// Time within which a server must be ready.
const TIMEOUT: Duration = Duration::from_secs(60);

/// Interval of checks whether it is ready.
const EVERY: Duration = Duration::from_millis(10);

/// Returns a port from 10000 to 19999 on which nothing listens now.
///
/// Linux assigns ports from 32768 on to outgoing connections, and the torture tests use 20000 to 29999. Another
/// test server may take the port before it is used: start the server again with another port then.
///
/// # Panics
///
/// If no port is free.
#[must_use]
pub fn free_port() -> u16 {
    const FIRST: u64 = 10_000;
    const PORTS: u64 = 10_000;
    (0..1_000)
        .map(|_| FIRST + RandomState::new().hash_one(()) % PORTS)
        .filter_map(|port| u16::try_from(port).ok())
        .find(|port| TcpListener::bind((Ipv4Addr::LOCALHOST, *port)).is_ok())
        .expect("a free port")
}

/// Memory that must be free for the files of some servers at one time.
const ROOM: u64 = 1 << 30;

/// Returns a new folder for a server's files: in memory if there is enough, since no test outlives
/// the system. `TMPDIR` overrides the location.
fn folder() -> tempfile::TempDir {
    let memory = Path::new("/dev/shm");
    let made = match std::env::var_os("TMPDIR").is_none() && has_room(memory) {
        true => tempfile::tempdir_in(memory),
        false => tempfile::tempdir(),
    };
    made.expect("a temporary folder")
}

/// Returns whether `folder` is in memory and has [`ROOM`].
fn has_room(folder: &Path) -> bool {
    /// `TMPFS_MAGIC` of `linux/magic.h`.
    const TMPFS: i128 = 0x0102_1994;
    let Ok(system) = rustix::fs::statfs(folder) else { return false };
    i128::from(system.f_type) == TMPFS
        && u64::try_from(system.f_bsize).is_ok_and(|size| system.f_bavail * size >= ROOM)
}

const fn loopback(port: u16) -> SocketAddr {
    SocketAddr::new(IpAddr::V4(Ipv4Addr::LOCALHOST), port)
}

/// Returns the first of `programs` that is installed. The paths of some users lack the folders of
/// servers.
fn program(programs: &[&str]) -> PathBuf {
    let path = std::env::var_os("PATH").unwrap_or_default();
    let more = ["/usr/sbin", "/usr/local/sbin"].map(PathBuf::from);
    let folders: Vec<_> = std::env::split_paths(&path).chain(more).collect();
    programs
        .iter()
        .find_map(|name| folders.iter().map(|folder| folder.join(name)).find(|file| file.is_file()))
        .unwrap_or_else(|| {
            panic!(
                "none of {programs:?} is installed: `cargo xtask setup` installs what tests need, \
                 `cargo xtask test --skip` leaves servers out"
            )
        })
}

/// Sends `signal` to a child that runs.
pub(crate) fn signal(child: &Child, signal: rustix::process::Signal) {
    let id = child.id().and_then(|id| i32::try_from(id).ok()).expect("it was not awaited yet");
    let id = rustix::process::Pid::from_raw(id).expect("no process has the number zero");
    rustix::process::kill_process(id, signal).expect("our own child takes signals");
}

/// Returns the end of a server's log, for the message of a failed start.
fn tail(log: &Path) -> String {
    let text = std::fs::read_to_string(log).unwrap_or_default();
    let lines: Vec<_> = text.lines().collect();
    lines[lines.len().saturating_sub(12)..].join("\n")
}
