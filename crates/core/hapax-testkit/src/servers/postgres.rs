//! PostgreSQL, and PgBouncer in front of it.

use std::fs::{File, Permissions};
use std::net::SocketAddr;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::process::Stdio;

use rustix::process::{Pid, Signal, kill_process};
use tokio::net::TcpStream;
use tokio::process::{Child, Command};
use tokio::time::{Instant, sleep, timeout};

use super::{EVERY, TIMEOUT, free_port, loopback, program, tail};

/// Options of a [`PostgresServer`]. Each method returns the changed options.
#[derive(Clone, Debug, Default)]
pub struct PostgresServerOptions {
    settings: Vec<(String, String)>,
    certificate: Option<(String, String)>,
}

impl PostgresServerOptions {
    /// Returns the server's defaults, except for a small memory and no syncing: it survives a kill,
    /// not a crash of the system.
    #[must_use]
    pub fn new() -> Self {
        let settings = Self::default().set("shared_buffers", "32MB").set("fsync", "off");
        // A killed server leaves nothing in /dev/shm this way.
        settings.set("dynamic_shared_memory_type", "mmap")
    }

    /// Sets a parameter of the server, in addition to or instead of the usual ones.
    #[must_use]
    pub fn set(mut self, parameter: &str, value: impl Into<String>) -> Self {
        self.settings.push((parameter.into(), value.into()));
        self
    }

    /// Enables encryption with this certificate and its key, in PEM.
    #[must_use]
    pub fn encrypted(mut self, chain: String, key: String) -> Self {
        self.certificate = Some((chain, key));
        self.set("ssl", "on")
    }
}

/// A private PostgreSQL server; dropping it kills it and removes its folder. Every user of this
/// machine may connect, as `postgres`, without a password.
#[derive(Debug)]
pub struct PostgresServer {
    options: PostgresServerOptions,
    folder: tempfile::TempDir,
    user: Option<User>,
    port: u16,
    child: Option<Child>,
}

impl PostgresServer {
    /// Starts a server with [`PostgresServerOptions::new`].
    pub async fn start() -> Self {
        Self::start_with(PostgresServerOptions::new()).await
    }

    /// Starts a server with `options`.
    pub async fn start_with(options: PostgresServerOptions) -> Self {
        let mut server = Self::nowhere(options);
        server.make_cluster().await;
        server.start_anywhere().await;
        server
    }

    /// Returns a server without files.
    fn nowhere(options: PostgresServerOptions) -> Self {
        let (folder, user) = (super::folder(), User::other());
        if let Some(user) = &user {
            user.give(folder.path());
        }
        Self { options, folder, user, port: free_port(), child: None }
    }

    async fn start_anywhere(&mut self) {
        // Another process may have taken the port in between.
        for _ in 0..5 {
            if self.try_start().await {
                return;
            }
            self.port = free_port();
        }
        panic!("the server does not start:\n{}", tail(&self.log()));
    }

    /// Starts a standby of `primary` that is named `name` in `synchronous_standby_names`. It is a
    /// copy of `primary` as it is now, and follows it.
    pub async fn standby_of(primary: &Self, name: &str) -> Self {
        let mut server = Self::nowhere(PostgresServerOptions::new());
        let mut command = Command::new(postgres_program("pg_basebackup"));
        command.arg("--pgdata").arg(server.data());
        command.args(["--host=127.0.0.1", "--username=postgres", "--no-password", "--no-sync"]);
        command.args(["--checkpoint=fast", "--wal-method=stream"]);
        command.arg(format!("--port={}", primary.port));
        let copied = server.spawn(command).wait_with_output().await.expect("it can be awaited");
        assert!(copied.status.success(), "pg_basebackup fails:\n{}", tail(&server.log()));
        let from =
            format!("host=127.0.0.1 port={} user=postgres application_name={name}", primary.port);
        server.options = server.options.clone().set("primary_conninfo", from);
        std::fs::write(server.data().join("standby.signal"), "").expect("a file");
        server.start_anywhere().await;
        server
    }

    /// Promotes a standby to a primary, and waits until it is one.
    pub async fn promote(&self) {
        let promoted = self.sql("postgres", "SELECT pg_promote(true, 120)").await;
        assert_eq!(promoted, "t", "{}", tail(&self.log()));
    }

    /// Returns the port on which it listens, on 127.0.0.1.
    #[must_use]
    pub const fn port(&self) -> u16 {
        self.port
    }

    /// Returns the address on which it listens.
    #[must_use]
    pub const fn address(&self) -> SocketAddr {
        loopback(self.port)
    }

    /// Returns `postgres://postgres@127.0.0.1:PORT/DATABASE`.
    #[must_use]
    pub fn url(&self, database: &str) -> String {
        format!("postgres://postgres@127.0.0.1:{}/{database}", self.port)
    }

    /// Returns the folder of its data.
    #[must_use]
    pub fn data(&self) -> PathBuf {
        self.folder.path().join("data")
    }

    /// Returns the processor time of its processes so far, ended ones included.
    #[must_use]
    pub fn cpu_time(&self) -> std::time::Duration {
        let Some(id) = self.child.as_ref().and_then(Child::id) else { return Default::default() };
        let running: u64 = children_of(id).into_iter().map(|child| ticks_of(child, 2)).sum();
        // A hundred ticks a second, on every Linux.
        std::time::Duration::from_millis((running + ticks_of(id, 4)) * 10)
    }

    /// Creates an empty database.
    pub async fn create_database(&self, name: &str) {
        self.sql("postgres", &format!("CREATE DATABASE {name}")).await;
    }

    /// Executes SQL and returns the output, columns separated by `|`, without the final line break.
    pub async fn sql(&self, database: &str, text: &str) -> String {
        let answer = self.try_sql(database, text).await;
        answer.unwrap_or_else(|error| panic!("{text}: {error}"))
    }

    /// Does the same as [`sql`](Self::sql), for SQL that may fail.
    ///
    /// # Errors
    /// The message of the server or the client.
    pub async fn try_sql(&self, database: &str, text: &str) -> Result<String, String> {
        psql(self.port, database, text).await
    }

    /// Kills one of its processes (SIGKILL), so that the others end and it recovers automatically.
    pub fn crash(&self) {
        let Some(id) = self.child.as_ref().and_then(Child::id) else { return };
        // The checkpointer does not end on its own, as a backend may. Its process title identifies
        // it.
        let lasts = |child: &u32| {
            let title = std::fs::read(format!("/proc/{child}/cmdline")).unwrap_or_default();
            String::from_utf8_lossy(&title).contains("checkpointer")
        };
        if let Some(child) = children_of(id).into_iter().find(lasts) {
            kill_process(pid(child), Signal::KILL).ok();
        }
    }

    /// Freezes all its processes (SIGSTOP): connections stay open without an answer.
    pub fn pause(&self) {
        self.signal_all(Signal::STOP);
    }

    /// Resumes it (SIGCONT).
    pub fn resume(&self) {
        self.signal_all(Signal::CONT);
    }

    /// Kills all its processes (SIGKILL), and waits until they have ended. Its files stay.
    pub async fn kill(&mut self) {
        self.signal_all(Signal::KILL);
        if let Some(mut child) = self.child.take() {
            child.wait().await.expect("our own child can be awaited");
        }
    }

    /// Stops it in the fast mode (SIGINT): transactions are rolled back, connections closed.
    pub async fn stop(&mut self) {
        if let Some(mut child) = self.child.take() {
            super::signal(&child, Signal::INT);
            child.wait().await.expect("our own child can be awaited");
        }
    }

    /// Starts it again after [`kill`](Self::kill) or [`stop`](Self::stop), on the same port and
    /// files.
    pub async fn restart(&mut self) {
        assert!(self.child.is_none(), "it still runs");
        // Killed processes may need a moment to end.
        for _ in 0..50 {
            if self.try_start().await {
                return;
            }
            sleep(EVERY * 10).await;
        }
        panic!("the server does not start again:\n{}", tail(&self.log()));
    }

    async fn make_cluster(&self) {
        let template = template(self.user.as_ref()).await;
        let mut command = Command::new("cp");
        command.args(["--archive", "--reflink=auto"]).arg(template).arg(self.data());
        let copied = self.spawn(command).wait_with_output().await.expect("cp can be awaited");
        assert!(copied.status.success(), "cp fails:\n{}", tail(&self.log()));
        if let Some((chain, key)) = &self.options.certificate {
            for (name, pem) in [("server.crt", chain), ("server.key", key)] {
                let file = self.data().join(name);
                std::fs::write(&file, pem).expect("a file");
                std::fs::set_permissions(&file, Permissions::from_mode(0o600)).expect("it is ours");
                if let Some(user) = &self.user {
                    user.give(&file);
                }
            }
        }
    }

    async fn try_start(&mut self) -> bool {
        let settings = [
            ("port", self.port.to_string()),
            ("listen_addresses", "127.0.0.1".into()),
            ("unix_socket_directories", String::new()),
        ];
        let settings = settings.into_iter().map(|(name, value)| (name.to_owned(), value));
        let mut command = Command::new(postgres_program("postgres"));
        command.arg("-D").arg(self.data());
        for (name, value) in settings.chain(self.options.settings.iter().cloned()) {
            command.arg("-c").arg(format!("{name}={value}"));
        }
        let child = self.spawn(command);
        let port = self.port;
        let child = self.child.insert(child);
        let deadline = Instant::now() + TIMEOUT;
        while Instant::now() < deadline {
            if child.try_wait().expect("the child is ours to wait for").is_some() {
                self.child = None;
                return false;
            }
            // A program is started only once something listens there.
            if TcpStream::connect(loopback(port)).await.is_err() {
                sleep(EVERY).await;
                continue;
            }
            // Another server on this port would have other files.
            match psql(port, "postgres", "SHOW data_directory").await {
                Ok(folder) if Path::new(&folder) == self.folder.path().join("data") => return true,
                _ => sleep(EVERY).await,
            }
        }
        false
    }

    fn spawn(&self, command: Command) -> Child {
        spawn(command, self.folder.path(), &self.log(), self.user.as_ref())
    }

    fn log(&self) -> PathBuf {
        self.folder.path().join("server.log")
    }

    /// Removes the System V segment by which a server finds another one on its files. A killed server
    /// leaves it, and a system has 4,096.
    fn remove_shared_memory(&self) {
        let lock_file = std::fs::read_to_string(self.data().join("postmaster.pid"));
        // Line 7: the key and the id of the segment. A stopped server has no such file.
        let segment = lock_file
            .ok()
            .and_then(|text| text.lines().nth(6)?.split_whitespace().nth(1)?.parse::<u32>().ok());
        if let Some(segment) = segment {
            // It ends once the last process has.
            let removed = std::process::Command::new("ipcrm")
                .args(["--shmem-id", &segment.to_string()])
                .stderr(Stdio::null())
                .status();
            assert!(removed.is_ok() || std::thread::panicking(), "ipcrm of util-linux is missing");
        }
    }

    /// Sends `signal` to all processes of the server. Each of them leads its own process group.
    fn signal_all(&self, signal: Signal) {
        let Some(id) = self.child.as_ref().and_then(Child::id) else { return };
        // A frozen server forks no more. Processes of an ended server are no longer its children,
        // so that they would not be found.
        if signal != Signal::CONT {
            kill_process(pid(id), Signal::STOP).expect("our own child takes signals");
        }
        for child in children_of(id) {
            // It may have ended already.
            kill_process(pid(child), signal).ok();
        }
        kill_process(pid(id), signal).expect("our own child takes signals");
    }
}

impl Drop for PostgresServer {
    fn drop(&mut self) {
        // Ends frozen processes too: SIGKILL needs no cooperation.
        if self.child.is_some() {
            self.signal_all(Signal::KILL);
        }
        self.remove_shared_memory();
    }
}

/// PgBouncer in transaction mode, in front of a server: it assigns connections to the server by
/// transaction. Dropping it kills it.
#[derive(Debug)]
pub struct PgBouncer {
    port: u16,
    child: Child,
    _folder: tempfile::TempDir,
}

impl PgBouncer {
    /// Starts a PgBouncer with at most `connections` connections to `server`.
    pub async fn start(server: &PostgresServer, connections: u32) -> Self {
        let folder = tempfile::tempdir().expect("a temporary folder");
        let user = User::other();
        if let Some(user) = &user {
            user.give(folder.path());
        }
        let log = folder.path().join("pgbouncer.log");
        for _ in 0..5 {
            let port = free_port();
            let config = folder.path().join("pgbouncer.ini");
            let text = format!(
                "[databases]\n* = host=127.0.0.1 port={} user=postgres\n[pgbouncer]\n\
                 listen_addr = 127.0.0.1\nlisten_port = {port}\nunix_socket_dir =\n\
                 auth_type = any\npool_mode = transaction\ndefault_pool_size = {connections}\n\
                 max_client_conn = 200\n",
                server.port()
            );
            std::fs::write(&config, text).expect("a configuration file");
            let mut command = Command::new(program(&["pgbouncer"]));
            command.arg(config);
            let mut child = spawn(command, folder.path(), &log, user.as_ref());
            let deadline = Instant::now() + TIMEOUT;
            while Instant::now() < deadline
                && child.try_wait().expect("the child is ours to wait for").is_none()
            {
                if psql(port, "postgres", "SELECT 1").await.is_ok_and(|answer| answer == "1") {
                    return Self { port, child, _folder: folder };
                }
                sleep(EVERY).await;
            }
        }
        panic!("PgBouncer does not start:\n{}", tail(&log));
    }

    /// Returns the address on which it listens.
    #[must_use]
    pub const fn address(&self) -> SocketAddr {
        loopback(self.port)
    }

    /// Returns `postgres://postgres@127.0.0.1:PORT/DATABASE`.
    #[must_use]
    pub fn url(&self, database: &str) -> String {
        format!("postgres://postgres@127.0.0.1:{}/{database}", self.port)
    }
}

impl Drop for PgBouncer {
    fn drop(&mut self) {
        self.child.start_kill().ok();
    }
}

/// Returns a cluster as `initdb` creates it, to be copied: one on this machine for each user and
/// version.
async fn template(user: Option<&User>) -> PathBuf {
    let initdb = postgres_program("initdb");
    let id = user.map_or_else(|| rustix::process::geteuid().as_raw(), |user| user.id);
    let made = std::fs::metadata(&initdb).expect("initdb is installed").mtime();
    let template = std::env::temp_dir().join(format!("hapax-cluster-{id}-{made}"));
    if !template.exists() {
        let folder = tempfile::tempdir().expect("a temporary folder");
        if let Some(user) = user {
            user.give(folder.path());
        }
        let (data, log) = (folder.path().join("data"), folder.path().join("log"));
        let mut command = Command::new(initdb);
        let arguments = ["--username=postgres", "--auth=trust", "--encoding=UTF8", "--locale=C"];
        command.arg("--pgdata").arg(&data).args(arguments);
        let made = spawn(command, folder.path(), &log, user).wait_with_output().await;
        let made = made.expect("initdb can be awaited");
        assert!(made.status.success(), "initdb fails:\n{}", tail(&log));
        // If processes create it at once, the first one counts: a folder with files is not
        // replaced.
        std::fs::rename(&data, &template).ok();
    }
    let owner = std::fs::metadata(&template).expect("it was made").uid();
    assert_eq!(owner, id, "{} is another user's: remove it", template.display());
    template
}

/// User of the server's processes: the server does not run as root.
#[derive(Debug)]
struct User {
    id: u32,
    group: u32,
}

impl User {
    /// Returns another user if this process runs as root: `postgres`, which its package creates, or
    /// `nobody`.
    fn other() -> Option<Self> {
        if !rustix::process::geteuid().is_root() {
            return None;
        }
        let users = std::fs::read_to_string("/etc/passwd").expect("a list of users");
        let find = |name: &str| {
            let line = users.lines().find(|line| line.split(':').next() == Some(name))?;
            let mut numbers = line.split(':').skip(2).map_while(|word| word.parse().ok());
            Some(Self { id: numbers.next()?, group: numbers.next()? })
        };
        Some(find("postgres").or_else(|| find("nobody")).expect("a user who is not root"))
    }

    fn give(&self, path: &Path) {
        std::os::unix::fs::chown(path, Some(self.id), Some(self.group)).expect("root may");
    }
}

fn spawn(mut command: Command, folder: &Path, log: &Path, user: Option<&User>) -> Child {
    let log = File::options().create(true).append(true).open(log).expect("a log file");
    if let Some(user) = user {
        command.uid(user.id).gid(user.group);
    }
    command
        .current_dir(folder)
        .env("TZ", "UTC")
        .stdin(Stdio::null())
        .stdout(log.try_clone().expect("a second handle of the log file"))
        .stderr(log)
        .kill_on_drop(true)
        .spawn()
        .expect("the server can be run")
}

/// Returns a program of the server. Debian has them outside the path, in a folder for each version;
/// the newest counts.
fn postgres_program(name: &str) -> PathBuf {
    let versions = Path::new("/usr/lib/postgresql").read_dir().into_iter().flatten().flatten();
    let number = |path: &PathBuf| path.file_name()?.to_str()?.parse::<u32>().ok();
    let mut found: Vec<PathBuf> = versions.map(|version| version.path()).collect();
    found.retain(|version| version.join("bin").join(name).is_file());
    found
        .iter()
        .max_by_key(|version| number(version))
        .map_or_else(|| program(&[name]), |version| version.join("bin").join(name))
}

async fn psql(port: u16, database: &str, text: &str) -> Result<String, String> {
    // Avoids Debian's wrapper, which takes longer than the query.
    let mut command = Command::new(postgres_program("psql"));
    let url = format!("postgres://postgres@127.0.0.1:{port}/{database}?connect_timeout=5");
    let arguments = ["--no-psqlrc", "--tuples-only", "--no-align", "--quiet", "--set"];
    command.args(arguments).args(["ON_ERROR_STOP=1", "--command", text]).arg(url);
    let done = timeout(TIMEOUT, command.stdin(Stdio::null()).kill_on_drop(true).output()).await;
    let done =
        done.map_err(|_| "no output in time".to_owned())?.map_err(|error| error.to_string())?;
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).trim_end().to_owned();
    if done.status.success() { Ok(text(&done.stdout)) } else { Err(text(&done.stderr)) }
}

fn children_of(parent: u32) -> Vec<u32> {
    let processes = Path::new("/proc").read_dir().into_iter().flatten().flatten();
    let ids = processes.filter_map(|process| process.file_name().to_str()?.parse().ok());
    ids.filter(|id| parent_of(*id) == Some(parent)).collect()
}

fn parent_of(id: u32) -> Option<u32> {
    status(id)?.get(1)?.parse().ok()
}

/// Returns the sum of the first `fields` of: user time, system time, those of ended children.
fn ticks_of(id: u32, fields: usize) -> u64 {
    let status = status(id).unwrap_or_default();
    status.iter().skip(11).take(fields).map_while(|ticks| ticks.parse::<u64>().ok()).sum()
}

/// Returns the system's status of a process, from its state on: the name before it is in brackets
/// and may contain anything.
fn status(id: u32) -> Option<Vec<String>> {
    let text = std::fs::read_to_string(format!("/proc/{id}/stat")).ok()?;
    Some(text.rsplit_once(") ")?.1.split(' ').map(String::from).collect())
}

fn pid(id: u32) -> Pid {
    let id = i32::try_from(id).ok().and_then(Pid::from_raw);
    id.expect("a process's number is positive")
}
