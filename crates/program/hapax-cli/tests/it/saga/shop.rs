//! A service with sagas that mounts the operators' API.

use std::collections::{BTreeMap, BTreeSet};
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use hapax_core::{
    Clock, Idempotency, Inspect, Key, MemoryCapacity, MemoryStore, Scope, Store, SystemClock,
    SystemEntropy, Timestamp,
};
use hapax_file::{FileOptions, FileStore};
use hapax_operators::{AdminToken, Audit, Operators};
use hapax_saga::{
    Saga, SagaHandle, Sagas, StepContext, StepEffect, StepError, StepRetry, UndoError,
};
use serde_json::Value;
use tempfile::TempDir;
use tokio::net::TcpListener;
use tokio::task::JoinHandle;

use crate::world::{ok, refused, run, store};

/// The system's time, which a test sets forward.
#[derive(Debug, Default)]
pub(super) struct ShiftedClock(AtomicU64);

impl ShiftedClock {
    pub(super) fn advance(&self, time: Duration) {
        self.0.fetch_add(time.as_secs(), Ordering::Relaxed);
    }
}

impl Clock for ShiftedClock {
    fn now(&self) -> Timestamp {
        SystemClock.now().after(Duration::from_secs(self.0.load(Ordering::Relaxed)))
    }
}

/// The calls that get no answer, and the keys that were seen.
#[derive(Clone, Debug, Default)]
pub(super) struct Systems(
    Arc<Mutex<BTreeSet<&'static str>>>,
    Arc<Mutex<BTreeMap<&'static str, String>>>,
);

impl Systems {
    pub(super) fn fail(&self, name: &'static str) {
        self.0.lock().unwrap().insert(name);
    }

    pub(super) fn succeed(&self, name: &'static str) {
        self.0.lock().unwrap().remove(name);
    }

    /// Returns the key of the last call.
    pub(super) fn key(&self, name: &str) -> String {
        self.1.lock().unwrap()[name].clone()
    }

    fn call(&self, name: &'static str, key: &Key) -> Result<(), String> {
        self.1.lock().unwrap().insert(name, key.as_str().to_owned());
        match self.0.lock().unwrap().contains(name) {
            true => Err(format!("{name} did not answer")),
            false => Ok(()),
        }
    }
}

async fn reserve(at: StepContext<Systems>, cents: u64) -> Result<u64, StepError<String>> {
    at.call("reserve", at.key()).map_err(StepError::unknown)?;
    Ok(cents)
}

async fn free(at: StepContext<Systems>, _: u64, _: StepEffect<u64>) -> Result<(), UndoError> {
    Ok(at.call("free", at.key())?)
}

async fn charge(at: StepContext<Systems>, cents: u64) -> Result<String, StepError<String>> {
    at.call("charge", at.key()).map_err(StepError::unknown)?;
    Ok(format!("paid {cents}"))
}

async fn notify(at: StepContext<Systems>, _: String) -> Result<(), StepError<String>> {
    at.call("notify", at.key()).map_err(StepError::unknown)
}

type Order = Saga<u64, String, String>;

/// An order: a reservation with an undo, a charge that cannot be repeated, and a notice. With 0 cents
/// it waits for a signal first.
fn order(systems: &Systems) -> Order {
    let mut order = Saga::define("place-order", 2, systems.clone());
    let once = StepRetry::default().tries(1);
    let day = Duration::from_secs(24 * 60 * 60);
    let reserve = order.keyed("reserve", day, reserve).undo_retry(once).undo(free);
    let charge = order.once("charge", charge).no_undo();
    let notify = order.keyed("notify", day, notify).retry(once).no_undo();
    order
        .flow(move |op, cents: u64| async move {
            if cents == 0 {
                op.signal::<()>("go", 30 * day).await;
            }
            let cents = op.run(reserve, cents).await?;
            let paid = op.run(charge, cents).await?;
            op.run(notify, paid.clone()).await?;
            Ok::<_, String>(paid)
        })
        .unwrap()
}

/// The service.
pub(super) struct Shop {
    pub(super) systems: Systems,
    pub(super) clock: Arc<ShiftedClock>,
    pub(super) folder: TempDir,
    /// Options with which `hapax` finds the store.
    at: Vec<String>,
    file: Option<Arc<FileStore>>,
    order: Order,
    schedule: Arc<dyn Store>,
    sagas: Sagas,
    driver: JoinHandle<()>,
}

impl Shop {
    /// Starts the service with a store in memory, which only its API reaches.
    pub(super) async fn in_memory() -> Self {
        let clock = Arc::<ShiftedClock>::default();
        let folder = tempfile::tempdir().unwrap();
        let store =
            MemoryStore::new(Arc::clone(&clock) as Arc<dyn Clock>, MemoryCapacity::default());
        let token = folder.path().join("token");
        let store = Arc::new(store);
        let (shop, admin) = Self::on(store, clock, folder, &token).await;
        let at = ["--admin", &admin.to_string(), "--admin-token-file", token.to_str().unwrap()];
        Self { at: at.map(str::to_owned).into(), ..shop }
    }

    /// Starts the service with a store in a file, whose lock names the address of its API.
    pub(super) async fn in_file() -> Self {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("hapax.db");
        let file = Arc::new(FileStore::open(FileOptions::new(&path)).unwrap());
        let (token, at) = (AdminToken::default_path(Some(&path)), store(folder.path()));
        let (shop, admin) = Self::on(Arc::clone(&file), Arc::default(), folder, &token).await;
        file.set_admin(Some(admin)).unwrap();
        Self { at: vec!["--store".to_owned(), at], file: Some(file), ..shop }
    }

    /// Ends the service: its file is closed, and `hapax` opens it itself.
    pub(super) async fn end(&self) {
        self.stop_driving().await;
        self.file.as_ref().unwrap().close().await;
    }

    async fn on<S: Store + Inspect>(
        store: Arc<S>,
        clock: Arc<ShiftedClock>,
        folder: TempDir,
        token: &Path,
    ) -> (Self, SocketAddr) {
        let systems = Systems::default();
        let order = order(&systems);
        let engine = Idempotency::builder(Arc::clone(&store) as Arc<dyn Store>)
            .namespace("")
            .store_timeout(Duration::from_secs(60))
            .build()
            .unwrap();
        let sagas = Sagas::builder(engine.clone()).register(&order).build().unwrap();
        let running = sagas.clone();
        let driver = tokio::spawn(async move {
            running.run(std::future::pending(), Duration::ZERO).await;
        });
        let token = AdminToken::read_or_make(token, &SystemEntropy).unwrap();
        let audit = Audit::new(folder.path().join("hapax.db.audit.jsonl"), "the shop");
        let schedule = Arc::clone(&store) as Arc<dyn Store>;
        let operators = Operators::builder(engine, store as Arc<dyn Inspect>).build(token, audit);
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let admin = listener.local_addr().unwrap();
        let api = operators.router().into_make_service_with_connect_info::<SocketAddr>();
        tokio::spawn(async move { axum::serve(listener, api).await });
        let at = Vec::new();
        let shop = Self { systems, clock, folder, at, file: None, order, sagas, schedule, driver };
        (shop, admin)
    }

    /// Ends the driver, as if no process had the definition.
    pub(super) async fn stop_driving(&self) {
        self.driver.abort();
        assert!(self.sagas.run(std::future::ready(()), Duration::from_secs(60)).await);
    }

    pub(super) async fn begin(&self, key: &str, cents: u64) -> SagaHandle<String, String> {
        let key: Key = key.parse().unwrap();
        self.sagas.start(&self.order, &Scope::of([("customer", "c")]), &key, &cents).await.unwrap()
    }

    /// Starts a saga as a transaction does. Returns its id.
    pub(super) async fn begin_in_transaction(&self, key: &str, cents: u64) -> String {
        let (key, scope): (Key, _) = (key.parse().unwrap(), Scope::of([("customer", "c")]));
        let entry = self.sagas.entry(&self.order, &scope, &key, &cents).unwrap();
        let id = entry.key.operation.to_string();
        self.schedule.capabilities().schedule.unwrap().insert(entry).await.unwrap();
        id
    }

    /// Starts a saga and waits until it is stuck. Returns its id.
    pub(super) async fn stuck(&self, key: &str) -> (SagaHandle<String, String>, String) {
        let started = self.begin(key, 1999).await;
        let id = started.id().to_string();
        self.until(&id, "stuck", |_| true).await;
        (started, id)
    }

    /// Waits until a saga has this state and satisfies a condition. Returns it as `show` prints it.
    pub(super) async fn until(
        &self,
        id: &str,
        state: &str,
        holds: impl Fn(&Value) -> bool,
    ) -> Value {
        loop {
            let shown = self.json(&["saga", "show", id]).await;
            if shown["state"] == state && holds(&shown) {
                return shown;
            }
        }
    }

    fn arguments(&self, words: &[&str]) -> Vec<String> {
        words.iter().map(|word| (*word).to_owned()).chain(self.at.clone()).collect()
    }

    /// Runs `hapax` with these words on the store. Returns what it prints.
    pub(super) async fn ok(&self, words: &[&str]) -> String {
        aside(self.arguments(words), ok).await
    }

    /// Returns what it prints as JSON.
    pub(super) async fn json(&self, words: &[&str]) -> Value {
        let printed = self.ok(&[words, &["--json"]].concat()).await;
        serde_json::from_str(&printed).unwrap()
    }

    /// Returns its exit code and its line of error.
    pub(super) async fn rejected(&self, words: &[&str]) -> (i32, String) {
        aside(self.arguments(words), refused).await
    }

    /// Returns its exit code and the code of its error.
    pub(super) async fn rejected_code(&self, words: &[&str]) -> (i32, String) {
        let output = aside(self.arguments(&[words, &["--json"]].concat()), run).await;
        let error: Value = serde_json::from_slice(&output.stderr).unwrap();
        (output.status.code().unwrap(), error["code"].as_str().unwrap().to_owned())
    }

    pub(super) fn audit_lines(&self) -> Vec<Value> {
        let path: PathBuf = self.folder.path().join("hapax.db.audit.jsonl");
        let text = std::fs::read_to_string(path).unwrap_or_default();
        text.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
    }
}

/// Runs the program off the threads that serve the API.
async fn aside<T: Send + 'static>(arguments: Vec<String>, run: fn(&[&str]) -> T) -> T {
    let run = move || run(&arguments.iter().map(String::as_str).collect::<Vec<_>>());
    tokio::task::spawn_blocking(run).await.unwrap()
}
