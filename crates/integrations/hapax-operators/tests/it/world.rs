//! A service with sagas and the operators' API, on a store in memory whose clock follows tokio's.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use axum::Router;
use axum::body::{Body, to_bytes};
use hapax_core::schedule::NewEntry;
use hapax_core::{
    Clock, Idempotency, Inspect, Key, MemoryCapacity, MemoryStore, Scope, Secret, Store, Timestamp,
};
use hapax_operators::{AdminToken, Audit, Operators};
use hapax_saga::{
    Saga, SagaError, SagaHandle, Sagas, StepContext, StepEffect, StepError, StepRetry, UndoError,
};
use http::Request;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use tempfile::TempDir;
use tokio::task::JoinHandle;
use tokio::time::Instant;
use tower::ServiceExt as _;

use crate::faults::Failing;

const TOKEN: &str = "sixteen-letters!";

/// Wall-clock time that follows tokio's.
#[derive(Debug)]
pub(crate) struct TestClock(Instant);

impl TestClock {
    pub(crate) fn new() -> Self {
        Self(Instant::now())
    }
}

impl Clock for TestClock {
    fn now(&self) -> Timestamp {
        Timestamp::from_micros(1_790_000_000_000_000).after(self.0.elapsed())
    }
}

/// The systems that steps call: each call succeeds but for those that fail.
#[derive(Clone, Debug, Default)]
pub(crate) struct Systems(Arc<Mutex<BTreeMap<&'static str, bool>>>);

impl Systems {
    pub(crate) fn fail(&self, name: &'static str) {
        self.0.lock().unwrap().insert(name, true);
    }

    pub(crate) fn succeed(&self, name: &'static str) {
        self.0.lock().unwrap().insert(name, false);
    }

    fn call(&self, name: &str) -> Result<(), String> {
        match self.0.lock().unwrap().get(name) {
            Some(true) => Err(format!("{name} did not answer")),
            _ => Ok(()),
        }
    }
}

/// A result of a step with a field that may be missing.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub(crate) struct Paid {
    pub(crate) id: String,
    pub(crate) note: Option<String>,
    pub(crate) cents: u64,
}

async fn reserve(at: StepContext<Systems>, cents: u64) -> Result<u64, StepError<String>> {
    at.call("reserve").map_err(StepError::unknown)?;
    Ok(cents)
}

async fn free(at: StepContext<Systems>, _: u64, _: StepEffect<u64>) -> Result<(), UndoError> {
    Ok(at.call("free")?)
}

async fn charge(at: StepContext<Systems>, cents: u64) -> Result<Paid, StepError<String>> {
    at.call("charge").map_err(StepError::unknown)?;
    Ok(Paid { id: "bank".to_owned(), note: None, cents })
}

async fn notify(at: StepContext<Systems>, _: String) -> Result<(), StepError<String>> {
    at.call("notify").map_err(StepError::unknown)?;
    Ok(())
}

pub(crate) type Order = Saga<u64, Paid, String>;

/// An order: a reservation with an undo, a charge that nothing can repeat, and a notice. Its sagas
/// with 0 cents wait for the signal `go`.
pub(crate) fn order(systems: &Systems) -> Order {
    let mut order = Saga::define("place-order", 2, systems.clone());
    let once = StepRetry::default().tries(1);
    let day = Duration::from_secs(24 * 60 * 60);
    let reserve = order.keyed("reserve", day, reserve).undo_retry(once).undo(free);
    let charge = order.once("charge", charge).no_undo();
    let notify = order.keyed("notify", day, notify).retry(once).no_undo();
    order
        .flow(move |op, cents: u64| async move {
            if cents == 0 {
                op.signal::<()>("go", 300 * Duration::from_secs(24 * 60 * 60)).await;
            }
            let cents = op.run(reserve, cents).await?;
            let paid = op.run(charge, cents).await?;
            op.run(notify, paid.id.clone()).await?;
            Ok::<_, String>(paid)
        })
        .unwrap()
}

/// The service.
pub(crate) struct Service {
    pub(crate) systems: Systems,
    pub(crate) audit: PathBuf,
    api: Router,
    order: Order,
    sagas: Sagas,
    store: Arc<dyn Store>,
    running: JoinHandle<()>,
    _folder: TempDir,
}

impl Service {
    pub(crate) fn start() -> Self {
        Self::on(memory())
    }

    /// Starts it on a store with a secret.
    pub(crate) fn with_secret() -> Self {
        let store = MemoryStore::new(Arc::new(TestClock::new()), MemoryCapacity::default());
        Self::on(Arc::new(store.secret(Secret::new([7; 32]))))
    }

    /// Starts it on a store that fails when it is told to.
    pub(crate) fn failing() -> (Self, Arc<Failing>) {
        let store = Arc::new(Failing::new(memory()));
        (Self::on(Arc::clone(&store)), store)
    }

    fn on<S: Store + Inspect>(store: Arc<S>) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let audit = folder.path().join("audit.jsonl");
        let systems = Systems::default();
        let order = order(&systems);
        let engine = Idempotency::builder(Arc::clone(&store) as Arc<dyn Store>).build().unwrap();
        let sagas = Sagas::builder(engine.clone()).register(&order).build().unwrap();
        let driver = sagas.clone();
        let running = tokio::spawn(async move {
            driver.run(std::future::pending(), Duration::ZERO).await;
        });
        let token = AdminToken::new(TOKEN).unwrap();
        let opened = Arc::clone(&store) as Arc<dyn Store>;
        let api = Operators::builder(engine, store as Arc<dyn Inspect>)
            .build(token, Audit::new(&audit, "a service"))
            .router();
        Self { systems, audit, api, order, sagas, store: opened, running, _folder: folder }
    }

    /// Ends the driver of sagas, as if no process had the definition.
    pub(crate) async fn stop_driving(&mut self) {
        self.running.abort();
        assert!(self.sagas.run(std::future::ready(()), Duration::from_secs(60)).await);
    }

    pub(crate) async fn begin(&self, key: &str, cents: u64) -> SagaHandle<Paid, String> {
        let key: Key = key.parse().unwrap();
        self.sagas.start(&self.order, &Scope::of([("customer", "c")]), &key, &cents).await.unwrap()
    }

    /// Returns the entry of a saga that is started in a transaction.
    pub(crate) fn entry(&self, key: &str, cents: u64) -> NewEntry {
        let (key, scope): (Key, _) = (key.parse().unwrap(), Scope::of([("customer", "c")]));
        self.sagas.entry(&self.order, &scope, &key, &cents).unwrap()
    }

    /// Starts a saga and waits until it is stuck. Returns it as the API shows it.
    pub(crate) async fn stuck(&self, key: &str) -> (SagaHandle<Paid, String>, Value) {
        let started = self.begin(key, 1999).await;
        let shown = self.until(&started, "stuck").await;
        (started, shown)
    }

    /// Waits until a saga has this state.
    pub(crate) async fn until(&self, started: &SagaHandle<Paid, String>, state: &str) -> Value {
        loop {
            let (status, shown) = self.get(&format!("/api/sagas/{}", started.id())).await;
            if status == 200 && shown["state"] == state {
                return shown;
            }
            tokio::time::sleep(Duration::from_millis(100)).await;
        }
    }

    /// Decides about a saga as it was shown.
    pub(crate) async fn decide(&self, shown: &Value, how: &str, more: Value) -> (u16, Value) {
        let path = format!("/api/sagas/{}/{how}", shown["id"].as_str().unwrap());
        let mut body = json!({ "write_id": shown["write_id"], "reason": "seen", "who": "ann" });
        for (name, value) in more.as_object().unwrap() {
            body[name] = value.clone();
        }
        self.send("POST", &path, TOKEN, body.to_string()).await
    }

    pub(crate) async fn get(&self, path: &str) -> (u16, Value) {
        self.send("GET", path, TOKEN, String::new()).await
    }

    pub(crate) fn store(&self) -> Arc<dyn Store> {
        Arc::clone(&self.store)
    }

    pub(crate) async fn post(&self, path: &str, body: &Value) -> (u16, Value) {
        self.send("POST", path, TOKEN, body.to_string()).await
    }

    /// Inserts the entry of a saga that is started in a transaction.
    pub(crate) async fn insert(&self, entry: NewEntry) {
        self.store.capabilities().schedule.unwrap().insert(entry).await.unwrap();
    }

    pub(crate) async fn send(
        &self,
        method: &str,
        path: &str,
        token: &str,
        body: String,
    ) -> (u16, Value) {
        let request = Request::builder()
            .method(method)
            .uri(path)
            .header("authorization", format!("Bearer {token}"))
            .header("content-type", "application/json")
            .body(Body::from(body))
            .unwrap();
        let (status, body) = self.answer(request).await;
        (status, serde_json::from_str(&body).unwrap())
    }

    /// Returns a text that the API answers.
    pub(crate) async fn text(&self, path: &str) -> (u16, String) {
        let request = Request::get(path).header("authorization", format!("Bearer {TOKEN}"));
        self.answer(request.body(Body::empty()).unwrap()).await
    }

    async fn answer(&self, request: Request<Body>) -> (u16, String) {
        let response = self.api.clone().oneshot(request).await.unwrap();
        let status = response.status().as_u16();
        let body = to_bytes(response.into_body(), 1 << 20).await.unwrap();
        (status, String::from_utf8(body.to_vec()).unwrap())
    }

    pub(crate) fn audit_lines(&self) -> Vec<Value> {
        let text = std::fs::read_to_string(&self.audit).unwrap_or_default();
        text.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
    }
}

pub(crate) fn memory() -> Arc<MemoryStore> {
    let clock = Arc::new(TestClock::new());
    Arc::new(MemoryStore::new(clock, MemoryCapacity::default()))
}

/// The outcome of a saga that was undone.
pub(crate) fn is_cancelled(outcome: &Result<Paid, SagaError<String>>) -> bool {
    matches!(outcome, Err(SagaError::Cancelled { .. }))
}
