//! Services as new users have them: Express, FastAPI, and axum with the layer.

use std::io::Write as _;
use std::net::{Ipv4Addr, SocketAddr};
use std::path::{Path, PathBuf};
use std::process::Command;

use axum::extract::State;
use axum::http::{HeaderMap, StatusCode, header::AUTHORIZATION};
use axum::routing::post;
use axum::{Json, Router};
use hapax_core::Idempotency;
use hapax_file::{FileOptions, FileStore};
use hapax_http::server::{IdempotencyLayer, MissingScope, RouteOptions, RoutePolicy, ScopeSource};
use hapax_testkit::servers::free_port;
use serde_json::{Value, json};

use super::{Killed, Process};
use crate::world::installed;

/// A service and the ledger of its charges.
#[derive(Clone)]
pub(super) struct Service {
    pub(super) address: SocketAddr,
    ledger: PathBuf,
}

impl Service {
    fn new(folder: &Path) -> Self {
        let address = SocketAddr::from((Ipv4Addr::LOCALHOST, free_port()));
        let ledger = folder.join("ledger");
        std::fs::write(&ledger, "").unwrap();
        Self { address, ledger }
    }

    /// Starts `tests/services/express.js`.
    pub(super) fn express(folder: &Path) -> (Self, Process) {
        let mut node = Command::new("node");
        // Node looks for packages beside the script and in this folder.
        node.env("NODE_PATH", installed("npm").join("node_modules"));
        Self::start(node.arg(script("express.js")), folder)
    }

    /// Starts `tests/services/payments_fastapi.py`.
    pub(super) fn fastapi(folder: &Path) -> (Self, Process) {
        let mut python = Command::new(installed("pypi").join("bin/python"));
        Self::start(python.arg("-I").arg(script("payments_fastapi.py")), folder)
    }

    fn start(command: &mut Command, folder: &Path) -> (Self, Process) {
        let service = Self::new(folder);
        let process = command.arg(service.address.port().to_string()).arg(&service.ledger);
        let process = Process::start(process).serving(service.address);
        (service, process)
    }

    /// The amounts charged so far.
    fn charged(&self) -> Vec<u32> {
        let ledger = std::fs::read_to_string(&self.ledger).unwrap();
        // The last line may be half written.
        let whole = ledger.split_inclusive('\n').filter(|line| line.ends_with('\n'));
        whole.map(|line| line.trim().rsplit(' ').next().unwrap().parse().unwrap()).collect()
    }

    /// Returns once a charge of this amount was made.
    pub(super) fn wait_for_charge(&self, amount: u32) {
        while !self.charged().contains(&amount) {
            std::thread::yield_now();
        }
    }

    /// Asserts that exactly these amounts were charged, each once.
    #[track_caller]
    pub(super) fn was_charged_once_each(&self, amounts: &[u32]) {
        let mut charged = self.charged();
        charged.sort_unstable();
        assert_eq!(charged, amounts);
    }

    /// Lets the charges that were sent with `hold` be answered.
    pub(super) fn release(&self) {
        std::fs::write(released(&self.ledger), "").unwrap();
    }

    pub(super) fn hold_again(&self) {
        std::fs::remove_file(released(&self.ledger)).unwrap();
    }

    /// The requests that the Express service has seen, as `METHOD PATH`.
    pub(super) fn seen(&self) -> Vec<String> {
        let seen = std::fs::read_to_string(format!("{}.seen", self.ledger.display()));
        seen.unwrap_or_default().lines().map(str::to_owned).collect()
    }
}

fn released(ledger: &Path) -> PathBuf {
    PathBuf::from(format!("{}.release", ledger.display()))
}

pub(super) fn script(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/services").join(name)
}

/// Tells the process of an axum service its port, and where its ledger and its records are.
const PORT: &str = "HAPAX_TEST_AXUM_PORT";
const FOLDER: &str = "HAPAX_TEST_AXUM_FOLDER";

/// A process with the axum service, which keeps its records in a file of its own.
pub(super) struct Axum {
    /// The test of this program that calls [`serve_axum`].
    part: &'static str,
    service: Service,
    _process: Process,
}

impl Axum {
    /// Starts the test `part` of this program in a process.
    pub(super) fn start(part: &'static str, folder: &Path) -> Self {
        let service = Service::new(folder);
        let process = Self::run(part, &service);
        Self { part, service, _process: process }
    }

    fn run(part: &str, service: &Service) -> Process {
        let mut program = Command::new(std::env::current_exe().unwrap());
        program.args([part, "--exact", "--nocapture"]);
        program.env(PORT, service.address.port().to_string());
        program.env(FOLDER, service.ledger.parent().unwrap());
        Process::start(&mut program).serving(service.address)
    }

    pub(super) fn service(&self) -> Service {
        self.service.clone()
    }
}

impl Killed for Axum {
    fn address(&self) -> SocketAddr {
        self.service.address
    }

    fn kill(self) -> impl FnOnce() -> Self {
        let Self { part, service, _process: process } = self;
        drop(process);
        move || Self { part, _process: Self::run(part, &service), service }
    }
}

/// Serves payments with axum, with the layer as README.md shows it, if this process was started
/// for it by [`Axum::start`]; otherwise returns at once.
pub(super) async fn serve_axum() {
    let (Ok(port), Ok(folder)) = (std::env::var(PORT), std::env::var(FOLDER)) else {
        return;
    };
    let folder = PathBuf::from(folder);
    let store = FileStore::open(FileOptions::new(folder.join("payments.db"))).unwrap();
    let engine = Idempotency::builder(store).build().unwrap();
    let caller = ScopeSource::headers([AUTHORIZATION], MissingScope::Reject);
    let policy = RoutePolicy::new(caller, RouteOptions::default()).unwrap();
    let app = Router::new()
        .route("/payments", post(charge))
        .with_state(folder.join("ledger"))
        .layer(IdempotencyLayer::new(engine, policy));
    let address = (Ipv4Addr::LOCALHOST, port.parse().unwrap());
    let listener = tokio::net::TcpListener::bind(address).await.unwrap();
    axum::serve(listener, app).await.unwrap();
}

async fn charge(
    State(ledger): State<PathBuf>,
    headers: HeaderMap,
    Json(payment): Json<Value>,
) -> (StatusCode, Json<Value>) {
    let caller = headers[AUTHORIZATION].to_str().unwrap();
    let line = format!("{caller} {}\n", payment["amount"]);
    let mut lines = std::fs::File::options().append(true).open(&ledger).unwrap();
    lines.write_all(line.as_bytes()).unwrap();
    while payment["hold"] == true && !released(&ledger).exists() {
        tokio::task::yield_now().await;
    }
    (StatusCode::CREATED, Json(json!({ "caller": caller, "amount": payment["amount"] })))
}
