//! One measurement: starts the server of a case, checks what it does, loads it.

use std::cell::Cell;
use std::net::TcpStream;
use std::path::{Path, PathBuf};
use std::process::Command;

use hapax_bench_cost::Any;
use hapax_bench_cost::sample::Sample;
use hapax_bench_cost::wire::{self, Request};
use hapax_testkit::servers::{
    PostgresServer, PostgresServerOptions, RedisServer, RedisServerOptions,
};
use tempfile::TempDir;

use crate::cases::{Backing, Case, Server, Traffic};
use crate::machine::Pinning;
use crate::start::{self, Process};

/// Keys that each connection repeats in a case of replays.
const REPLAYED_KEYS: u32 = 16;

/// Sessions of the case `axum-idempotent`. Its store walks all responses of a session with each
/// write, so that a single session would get slower with each request.
const SESSIONS: usize = 4096;

/// All that measurements have in common.
pub(crate) struct Bench {
    hapax: PathBuf,
    pinning: Pinning,
    seconds: f64,
    connections: usize,
    folder: TempDir,
    upstream: Process,
    /// Number of measurements so far.
    count: Cell<usize>,
}

/// Records of one measurement, and the server that has them.
pub(crate) enum Records {
    None,
    Memory,
    File(PathBuf),
    Redis(RedisServer),
    Postgres(PostgresServer),
}

impl Records {
    pub(crate) async fn start(backing: Option<Backing>, folder: &Path) -> Self {
        match backing {
            None => Self::None,
            Some(Backing::Memory) => Self::Memory,
            Some(Backing::File) => Self::File(folder.join("hapax.db")),
            Some(Backing::Redis) => {
                // A rewrite of the append-only file would fall into some measurements.
                let options = RedisServerOptions::new().set("auto-aof-rewrite-percentage", "0");
                Self::Redis(RedisServer::start_with(options).await)
            }
            Some(Backing::Postgres) => {
                // Synced, as servers are; other tests run without.
                let options = PostgresServerOptions::new().set("fsync", "on");
                let options = options.set("shared_buffers", "128MB");
                Self::Postgres(PostgresServer::start_with(options).await)
            }
        }
    }

    /// Returns the words by which programs of this benchmark open them.
    pub(crate) fn words(&self) -> Vec<String> {
        match self {
            Self::None => vec![],
            Self::Memory => vec!["memory".into()],
            Self::File(path) => vec!["file".into(), path.display().to_string()],
            Self::Redis(server) => vec!["redis".into(), server.url()],
            Self::Postgres(server) => vec!["postgres".into(), server.url("postgres")],
        }
    }

    /// Returns the URL by which a gateway opens them.
    fn url(&self) -> String {
        match self {
            Self::None | Self::Memory => "memory:".into(),
            Self::File(path) => format!("file:{}", path.display()),
            Self::Redis(server) => server.url(),
            Self::Postgres(server) => server.url("postgres"),
        }
    }
}

impl Bench {
    /// Starts the upstream.
    pub(crate) async fn start(
        hapax: PathBuf,
        pinning: Pinning,
        seconds: f64,
        connections: usize,
    ) -> Result<Self, Any> {
        let folder = tempfile::Builder::new().prefix("hapax-cost-").tempdir()?;
        let address = start::free_address();
        let mut command = Command::new(beside("cost-upstream")?);
        command.arg(address.to_string());
        let upstream = Process::start(command, address, &folder.path().join("upstream.log"))?;
        let count = Cell::new(0);
        Ok(Self { hapax, pinning, seconds, connections, folder, upstream, count })
    }

    /// Measures a case once.
    pub(crate) async fn measure(&self, case: &Case) -> Result<Sample, Any> {
        self.measure_at(case, if case.alone { 1 } else { self.connections }).await
    }

    /// Measures a case once, with so many connections or callers.
    pub(crate) async fn measure_at(&self, case: &Case, connections: usize) -> Result<Sample, Any> {
        self.count.set(self.count.get() + 1);
        let folder = self.folder.path().join(self.count.get().to_string());
        std::fs::create_dir(&folder)?;
        let records = Records::start(case.server.backing(), &folder).await;
        let sample = match case.server {
            Server::Swaps(_) => self.swap(&records, connections),
            _ => self.load(case, &records, &folder, connections),
        };
        drop(records);
        std::fs::remove_dir_all(&folder)?;
        sample
    }

    fn swap(&self, records: &Records, callers: usize) -> Result<Sample, Any> {
        let mut command = self.pinning.server(beside("cost-swaps")?);
        command.args(records.words()).args(self.pinning.words());
        command.args(["--callers", &callers.to_string()]);
        sample_of(command.args(["--seconds", &self.seconds.to_string()]))
    }

    fn load(
        &self,
        case: &Case,
        records: &Records,
        folder: &Path,
        connections: usize,
    ) -> Result<Sample, Any> {
        let server = self.serve(case, records, folder)?;
        let sessions = match case.server {
            Server::AxumIdempotent => sessions(&server)?,
            _ => Vec::new(),
        };
        let path = if case.traffic == Traffic::Open { wire::OPEN_PATH } else { wire::PATH };
        let session = sessions.first().map_or("", String::as_str);
        let protects = match case.server {
            Server::Axum | Server::Proxy | Server::Nginx => false,
            _ => case.traffic != Traffic::Open,
        };
        verify(&server, Request::new(path, session), protects)?;
        let mut command = Command::new(beside("cost-load")?);
        command.arg(server.address.to_string()).args(["--pid", &server.id().to_string()]);
        command.args(self.pinning.words());
        command.args(["--path", path, "--seconds", &self.seconds.to_string()]);
        command.args(["--connections", &connections.to_string()]);
        if case.traffic == Traffic::Replays {
            command.args(["--replay", &REPLAYED_KEYS.to_string()]);
        }
        if !sessions.is_empty() {
            let file = folder.join("sessions");
            std::fs::write(&file, sessions.join("\n"))?;
            command.arg("--sessions").arg(file);
        }
        sample_of(&mut command)
    }

    /// Starts the server of a case.
    fn serve(&self, case: &Case, records: &Records, folder: &Path) -> Result<Process, Any> {
        let (address, upstream) = (start::free_address(), self.upstream.address);
        let ours = |name: &str, words: Vec<String>| -> Result<Command, Any> {
            let mut command = self.pinning.server(beside("cost-server")?);
            command.args([name, &address.to_string()]).args(words);
            Ok(command)
        };
        let command = match case.server {
            Server::Axum => ours("axum", vec![])?,
            Server::Layer(_) => ours("layer", records.words())?,
            Server::Idempotent(_) => ours("idempotent", records.words())?,
            Server::AxumIdempotent => ours("axum-idempotent", vec![])?,
            Server::Proxy => ours("proxy", vec![upstream.to_string()])?,
            Server::Nginx => {
                start::configure_nginx(folder, address, upstream)?;
                let mut command = self.pinning.server("nginx");
                command.arg("-p").arg(folder).arg("-c").arg(folder.join("nginx.conf"));
                command
            }
            Server::Gateway(_) => {
                let config = folder.join("hapax.toml");
                start::configure_gateway(&config, address, upstream, &records.url())?;
                let mut command = self.pinning.server(&self.hapax);
                command.current_dir(folder).args(["gateway", "--config"]).arg(config);
                command
            }
            Server::Swaps(_) => return Err("a store without HTTP serves nothing".into()),
        };
        Process::start(command, address, &folder.join("server.log"))
    }
}

/// Returns the path of a program that is built with this one.
pub(crate) fn beside(name: &str) -> Result<PathBuf, Any> {
    Ok(std::env::current_exe()?.with_file_name(name))
}

/// Runs a program that writes a sample.
pub(crate) fn sample_of(command: &mut Command) -> Result<Sample, Any> {
    let output = command.output()?;
    if !output.status.success() {
        return Err(String::from_utf8_lossy(&output.stderr).trim_end().into());
    }
    Ok(serde_json::from_slice(&output.stdout)?)
}

/// Sends a request twice, and checks that it is answered from a record if, and only if, the server
/// protects: a server that does something else would be measured for nothing.
fn verify(server: &Process, mut request: Request, protects: bool) -> Result<(), Any> {
    let mut stream = TcpStream::connect(server.address)?;
    request.set_key(u64::MAX, 0);
    for repeated in [false, true] {
        let (head, body) = wire::exchange(&mut stream, request.bytes())?;
        if !wire::is_ok(head.as_bytes()) || body != wire::ANSWER {
            return Err(format!("expected the answer of the service, got:\n{head}{body}").into());
        }
        if wire::is_replay(head.as_bytes()) != (protects && repeated) {
            let expected = if repeated && protects { "a replay" } else { "no replay" };
            return Err(format!("expected {expected}, got:\n{head}").into());
        }
    }
    Ok(())
}

/// Makes sessions, and returns their cookies, which have the same length.
fn sessions(server: &Process) -> Result<Vec<String>, Any> {
    let mut stream = TcpStream::connect(server.address)?;
    let login = Request::new("/login", "");
    let cookies = (0..SESSIONS).map(|_| {
        let (head, _) = wire::exchange(&mut stream, login.bytes())?;
        let value = head.lines().find_map(|line| line.strip_prefix("set-cookie: "));
        let cookie = value.and_then(|value| value.split(';').next());
        Ok(cookie.ok_or("expected a cookie of a session")?.to_owned())
    });
    let cookies: Vec<String> = cookies.collect::<Result<_, Any>>()?;
    match cookies.windows(2).all(|pair| pair[0].len() == pair[1].len()) {
        true => Ok(cookies),
        false => Err("expected cookies of the same length".into()),
    }
}
