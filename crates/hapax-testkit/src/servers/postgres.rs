use std::ffi::OsStr;
use std::io;
use std::net::SocketAddr;
use std::os::unix::fs::{MetadataExt, chown};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::Command;

use super::process::{Process, run, user};
use super::{ServerError, Signal};

const PROGRAM: &str = "postgres";
const INITDB: &str = "initdb";
/// Where Debian keeps its versions.
const VERSIONS: &str = "/usr/lib/postgresql";

/// A PostgreSQL with a cluster of its own. It refuses to run as root: where the test does, it is
/// run as the user `postgres`, or `nobody`.
#[derive(Debug)]
pub struct PostgresServer {
    process: Process,
    binaries: PathBuf,
    settings: Vec<String>,
}

impl PostgresServer {
    /// Starts one, with `settings` as in its configuration: `["max_connections=50"]`.
    ///
    /// # Errors
    /// [`ServerError`].
    pub async fn start(settings: &[&str]) -> Result<Self, ServerError> {
        let process = Process::prepare(PROGRAM)?;
        let binaries = binaries().ok_or(ServerError::Missing { program: PROGRAM })?;
        let settings = settings.iter().map(|&setting| setting.to_owned()).collect();
        let mut server = Self { process, binaries, settings };
        if let Some((user, group)) = unprivileged() {
            chown(server.process.folder.path(), Some(user), Some(group))?;
        }
        let mut initdb = server.command(INITDB);
        initdb
            .args(["--username=hapax", "--auth=trust", "--encoding=UTF8", "--no-locale"])
            .args(["--no-sync", "--no-instructions", "-D"])
            .arg(server.data());
        run(INITDB, initdb).await?;
        server.restart().await?;
        Ok(server)
    }

    /// Starts it again, after [`PostgresServer::end`], with what it kept.
    ///
    /// # Errors
    /// [`ServerError`].
    pub async fn restart(&mut self) -> Result<(), ServerError> {
        let mut command = self.command(PROGRAM);
        command.arg("-D").arg(self.data());
        let port = format!("port={}", self.process.address.port());
        let own = ["listen_addresses=127.0.0.1", "unix_socket_directories=", "shared_buffers=16MB"];
        for setting in own.into_iter().chain([&*port]) {
            command.args(["-c", setting]);
        }
        for setting in &self.settings {
            command.args(["-c", setting]);
        }
        self.process.start(&mut command)?;
        let ready = self.binaries.join("pg_isready");
        self.process
            .ready(async |address| {
                let mut ask = tokio::process::Command::new(&ready);
                ask.args(["-q", "-h", "127.0.0.1", "-p", &address.port().to_string()]);
                ask.status().await.is_ok_and(|status| status.success())
            })
            .await
    }

    /// Where it listens; any password for the user `hapax`, database `postgres`.
    #[must_use]
    pub const fn address(&self) -> SocketAddr {
        self.process.address
    }

    /// Sends a signal to its first process.
    ///
    /// # Errors
    /// When there is no such process any more.
    pub fn signal(&mut self, signal: Signal) -> io::Result<()> {
        self.process.signal(signal)
    }

    /// Ends it by a signal and waits until its first process has ended.
    ///
    /// # Errors
    /// When there is no such process any more.
    pub fn end(&mut self, signal: Signal) -> io::Result<()> {
        self.process.end(signal)
    }

    fn data(&self) -> PathBuf {
        self.process.folder.path().join("data")
    }

    fn command(&self, program: impl AsRef<Path>) -> Command {
        let mut command = Command::new(self.binaries.join(program));
        if let Some((user, group)) = unprivileged() {
            // The standard library gives up root's other groups as well.
            command.uid(user).gid(group);
        }
        command.current_dir(self.process.folder.path());
        command
    }
}

/// The folder of the latest version's programs.
fn binaries() -> Option<PathBuf> {
    let version = |path: &PathBuf| {
        path.file_name().and_then(OsStr::to_str).and_then(|name| name.parse::<u32>().ok())
    };
    let installed = std::fs::read_dir(VERSIONS).ok()?.flatten().map(|entry| entry.path());
    let latest = installed.filter(|path| path.join("bin").join(INITDB).exists());
    Some(latest.max_by_key(version)?.join("bin"))
}

/// Whom to run as instead of root.
fn unprivileged() -> Option<(u32, u32)> {
    let root = std::fs::metadata("/proc/self").is_ok_and(|process| process.uid() == 0);
    if root { user("postgres").or_else(|| user("nobody")) } else { None }
}
