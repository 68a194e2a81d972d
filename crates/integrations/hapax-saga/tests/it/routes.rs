//! Sagas over HTTP: a real listener, and requests as bytes.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use axum::Json;
use axum::http::StatusCode;
use axum::response::IntoResponse;
use hapax_core::store::Store;
use hapax_core::{Idempotency, MemoryStore};
use hapax_saga::routes::{SagaOutcome, SagaRoutes, SagaRoutesBuilder, SagaRoutesError};
use hapax_saga::{Saga, Sagas, StepContext, StepEffect, StepError, UndoError};
use hapax_testkit::faults::FaultyStore;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;
use tokio::time::timeout;

use crate::quarantine;

/// Longer than any step of a test.
const LONG: Duration = Duration::from_secs(60);

#[derive(Debug, Serialize, Deserialize)]
struct Order {
    cents: u64,
    #[serde(default)]
    pauses: bool,
}

/// The system that the steps call: charges and refunds wait until the gate is open.
#[derive(Clone)]
struct Bank {
    gate: watch::Sender<bool>,
    charges: watch::Sender<u64>,
    refunds: watch::Sender<u64>,
}

impl Bank {
    fn new(is_open: bool) -> Self {
        Self {
            gate: watch::Sender::new(is_open),
            charges: watch::Sender::new(0),
            refunds: watch::Sender::new(0),
        }
    }
}

async fn charge(at: StepContext<Bank>, cents: u64) -> Result<String, StepError<String>> {
    at.charges.send_modify(|count| *count += 1);
    let _ = at.gate.subscribe().wait_for(|is_open| *is_open).await;
    match cents {
        13 => Err(StepError::Rejected("declined".into())),
        99 => Err(StepError::unknown("connection reset")),
        _ => Ok(format!("ch_{cents}")),
    }
}

async fn refund(at: StepContext<Bank>, _: u64, _: StepEffect<String>) -> Result<(), UndoError> {
    at.refunds.send_modify(|count| *count += 1);
    let _ = at.gate.subscribe().wait_for(|is_open| *is_open).await;
    Ok(())
}

fn order(bank: &Bank) -> Saga<Order, Value, String> {
    let mut order = Saga::define("order", 1, bank.clone());
    let charge = order.once("charge", charge).undo(refund);
    order
        .flow(move |op, order: Order| async move {
            let id = op.run(charge, order.cents).await?;
            if order.pauses {
                op.signal::<()>("shipped", Duration::from_secs(3600)).await;
            }
            Ok::<_, String>(json!({ "id": id }))
        })
        .unwrap()
}

/// A service with a listener.
struct Service {
    address: SocketAddr,
    bank: Bank,
    engine: Idempotency,
}

type Builder = SagaRoutesBuilder<Order, Value, String>;

impl Service {
    async fn start(is_open: bool, configure: impl FnOnce(Builder) -> Builder) -> Self {
        let store = Arc::new(MemoryStore::default());
        Self::start_on(store, Bank::new(is_open), configure).await
    }

    /// Starts another process on a store.
    async fn start_on(
        store: Arc<impl Store>,
        bank: Bank,
        configure: impl FnOnce(Builder) -> Builder,
    ) -> Self {
        let order = order(&bank);
        let engine = Idempotency::builder(store).build().unwrap();
        let sagas = Sagas::builder(engine.clone()).register(&order).build().unwrap();
        let running = sagas.clone();
        tokio::spawn(async move { running.run(std::future::pending(), Duration::ZERO).await });
        let answer = |end: SagaOutcome<Value, String>| match end {
            SagaOutcome::Done(output) => {
                (StatusCode::CREATED, [("x-service", "shop")], Json(output)).into_response()
            }
            SagaOutcome::Undone(error) => (StatusCode::PAYMENT_REQUIRED, error).into_response(),
            SagaOutcome::Cancelled { .. } => StatusCode::GONE.into_response(),
        };
        let builder = SagaRoutes::builder(sagas, order, "/orders", answer).default_wait(LONG);
        let app = configure(builder).build().unwrap().router::<()>();
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        tokio::spawn(async move { axum::serve(listener, app).await });
        Self { address, bank, engine }
    }

    async fn send(&self, request: &str) -> Answer {
        let exchange = async {
            let mut stream = TcpStream::connect(self.address).await.unwrap();
            stream.write_all(request.as_bytes()).await.unwrap();
            let mut bytes = Vec::new();
            stream.read_to_end(&mut bytes).await.unwrap();
            Answer::parse(&String::from_utf8(bytes).unwrap())
        };
        timeout(LONG, exchange).await.expect("an answer in time")
    }

    /// Sends the POST of a customer with further header lines.
    async fn post(&self, customer: &str, lines: &str, body: &str) -> Answer {
        self.send(&post(customer, lines, body)).await
    }

    async fn get(&self, customer: &str, path: &str) -> Answer {
        self.send(&bare("GET", customer, path)).await
    }

    /// Polls the status resource until the saga is in this state.
    async fn poll(&self, customer: &str, path: &str, state: &str) -> Value {
        self.poll_until(customer, path, |shown| shown["state"] == state).await
    }

    /// Polls the status resource until it has what is expected.
    async fn poll_until(
        &self,
        customer: &str,
        path: &str,
        is_expected: impl Fn(&Value) -> bool,
    ) -> Value {
        let polling = async {
            loop {
                let answer = self.get(customer, path).await;
                assert_eq!(answer.status, 200, "{answer:?}");
                let shown = answer.json();
                assert_eq!(
                    answer.header("retry-after").is_some(),
                    shown.get("answer").is_none(),
                    "{answer:?}"
                );
                if is_expected(&shown) {
                    return shown;
                }
            }
        };
        timeout(LONG, polling).await.expect("the state in time")
    }
}

fn post(customer: &str, lines: &str, body: &str) -> String {
    format!(
        "POST /orders HTTP/1.1\r\nhost: shop\r\nconnection: close\r\nauthorization: Bearer {customer}\r\n\
         {lines}content-length: {}\r\n\r\n{body}",
        body.len()
    )
}

fn bare(method: &str, customer: &str, path: &str) -> String {
    format!(
        "{method} {path} HTTP/1.1\r\nhost: shop\r\nconnection: close\r\nauthorization: Bearer {customer}\r\n\r\n"
    )
}

#[derive(Debug)]
struct Answer {
    status: u16,
    headers: Vec<(String, String)>,
    body: String,
}

impl Answer {
    fn parse(text: &str) -> Self {
        let (head, body) = text.split_once("\r\n\r\n").expect("a whole head");
        let mut lines = head.lines();
        let status = lines.next().unwrap().split(' ').nth(1).unwrap().parse().unwrap();
        let headers = lines.map(|line| line.split_once(": ").unwrap());
        let headers = headers.map(|(name, value)| (name.to_owned(), value.to_owned())).collect();
        Self { status, headers, body: body.to_owned() }
    }

    fn header(&self, name: &str) -> Option<&str> {
        let mut found = self.headers.iter().filter(|(field, _)| field == name);
        found.next().map(|(_, value)| value.as_str())
    }

    fn json(&self) -> Value {
        serde_json::from_str(&self.body).unwrap_or_else(|_| panic!("no JSON: {self:?}"))
    }

    fn is_problem(&self, status: u16, code: &str) {
        assert_eq!(self.status, status, "{self:?}");
        assert_eq!(self.header("content-type"), Some("application/problem+json"));
        let problem = self.json();
        assert_eq!(problem["code"], code);
        assert_eq!(problem["type"], format!("urn:hapax:problem:{code}"));
        assert_eq!(problem["status"], status);
        assert_eq!(problem["error"]["code"], code);
        assert_eq!(problem["error"]["message"], problem["detail"]);
        assert!(problem["title"].is_string());
    }
}

const K: &str = "idempotency-key: \"k-1\"\r\n";
const ASYNC: &str = "idempotency-key: k-1\r\nprefer: respond-async\r\n";

#[tokio::test]
async fn respond_async_gets_202_and_the_status_resource_has_the_answer_at_the_end() {
    let service = Service::start(false, |it| it).await;
    let first = service.post("anna", ASYNC, r#"{"cents":1}"#).await;
    assert_eq!(first.status, 202);
    assert_eq!(first.header("location"), Some("/orders/k-1"));
    assert_eq!(first.header("retry-after"), Some("1"));
    assert_eq!(first.header("preference-applied"), Some("respond-async"));
    assert_eq!(first.json(), json!({ "state": "running" }));
    let mut charges = service.bank.charges.subscribe();
    charges.wait_for(|count| *count == 1).await.unwrap();
    let running = service.poll("anna", "/orders/k-1", "running").await;
    assert_eq!(running, json!({ "state": "running", "step": "charge", "nth": 0, "tries": 1 }));
    service.bank.gate.send_replace(true);
    let done = service.poll("anna", "/orders/k-1", "done").await;
    let expected =
        json!({ "state": "done", "answer": { "status": 201, "body": { "id": "ch_1" } } });
    assert_eq!(done, expected);
}

#[tokio::test]
async fn the_same_post_gets_202_while_the_saga_runs_and_then_the_same_answer_each_time() {
    let service = Service::start(false, |it| it).await;
    for _ in 0..2 {
        let answer = service.post("anna", ASYNC, r#"{"cents":1}"#).await;
        assert_eq!(answer.status, 202);
        assert_eq!(answer.header("location"), Some("/orders/k-1"));
    }
    service.bank.gate.send_replace(true);
    let first = service.post("anna", K, r#"{"cents":1}"#).await;
    let again = service.post("anna", ASYNC, r#"{ "cents": 1 }"#).await;
    for answer in [&first, &again] {
        assert_eq!(answer.status, 201);
        assert_eq!(answer.body, r#"{"id":"ch_1"}"#);
        assert_eq!(answer.header("x-service"), Some("shop"));
        assert_eq!(answer.header("idempotency-replayed"), Some("true"));
    }
    assert_eq!(*service.bank.charges.borrow(), 1);
}

#[tokio::test]
async fn a_post_without_preference_waits_for_the_answer() {
    let service = Service::start(true, |it| it).await;
    let done = service.post("anna", K, r#"{"cents":1}"#).await;
    assert_eq!((done.status, done.header("idempotency-replayed")), (201, Some("false")));
    let lines = "idempotency-key: k-2\r\n";
    let undone = service.post("anna", lines, r#"{"cents":13}"#).await;
    assert_eq!((undone.status, &*undone.body), (402, "declined"));
    let shown = service.poll("anna", "/orders/k-2", "undone").await;
    assert_eq!(shown["answer"], json!({ "status": 402, "body": "declined" }));
}

#[tokio::test]
async fn a_wait_ends_with_202_at_the_time_of_the_client_or_of_the_service() {
    let service = Service::start(false, |it| it.max_wait(Duration::from_millis(20))).await;
    for prefer in ["", "prefer: wait=0\r\n", "prefer: wait=3600\r\n", "prefer: nonsense=;,=\r\n"] {
        let answer = service.post("anna", &format!("{K}{prefer}"), r#"{"cents":1}"#).await;
        assert_eq!(answer.status, 202, "{prefer}");
    }
    let service = Service::start(true, |it| it).await;
    let lines = format!("{K}prefer: respond-async, wait=60\r\n");
    let answer = service.post("anna", &lines, r#"{"cents":1}"#).await;
    assert_eq!(answer.status, 201, "it waits although it may be asynchronous");
}

#[tokio::test]
async fn rejections_are_problems_and_start_nothing() {
    let service = Service::start(true, |it| it.max_body(64)).await;
    let body = r#"{"cents":1}"#;
    service.post("anna", "", body).await.is_problem(400, "missing-key");
    service.post("anna", "idempotency-key: \r\n", body).await.is_problem(400, "invalid-key");
    service.post("anna", "idempotency-key: a, b\r\n", body).await.is_problem(400, "invalid-key");
    service.post("anna", &format!("{K}{K}"), body).await.is_problem(400, "invalid-key");
    let underscore = format!("{K}idempotency_key: k-2\r\n");
    service.post("anna", &underscore, body).await.is_problem(400, "malformed-request");
    let hop = format!("{K}connection: idempotency-key\r\n");
    service.post("anna", &hop, body).await.is_problem(400, "malformed-request");
    for wrong in ["", "{", r#"{"cents":"secret"}"#] {
        let answer = service.post("anna", K, wrong).await;
        answer.is_problem(400, "malformed-request");
        assert!(!answer.body.contains("secret"));
    }
    let large = format!(r#"{{"cents":1,"note":"{}"}}"#, "x".repeat(64));
    service.post("anna", K, &large).await.is_problem(413, "body-too-large");
    let nameless = post("anna", K, body).replace("authorization: Bearer anna\r\n", "");
    service.send(&nameless).await.is_problem(400, "missing-scope");
    let signed = post("anna", K, body).replace("Bearer anna", "DPoP anna");
    service.send(&signed).await.is_problem(400, "unstable-scope");
    let nameless = bare("GET", "anna", "/orders/k-1").replace("authorization: Bearer anna\r\n", "");
    service.send(&nameless).await.is_problem(400, "missing-scope");
    service.get("anna", "/orders/k-1").await.is_problem(404, "not-found");
    assert_eq!(*service.bank.charges.borrow(), 0);
    // The key is still free.
    assert_eq!(service.post("anna", K, body).await.status, 201);
    service.post("anna", K, r#"{"cents":2}"#).await.is_problem(422, "key-reused");
    let problem = service.post("anna", K, r#"{"cents":2}"#).await.json();
    assert_eq!(problem["error"]["type"], "idempotency_error");
    assert_eq!(*service.bank.charges.borrow(), 1);
}

#[tokio::test]
async fn the_resource_of_another_scope_is_404_and_its_key_is_another_saga() {
    let service = Service::start(true, Builder::allow_cancel).await;
    let first = service.post("anna-secret", ASYNC, r#"{"cents":1}"#).await;
    let everything = format!("{first:?}");
    assert!(!everything.contains("anna-secret"), "{everything}");
    service.poll("anna-secret", "/orders/k-1", "done").await;
    service.get("ben", "/orders/k-1").await.is_problem(404, "not-found");
    let delete = bare("DELETE", "ben", "/orders/k-1");
    service.send(&delete).await.is_problem(404, "not-found");
    let other = service.post("ben", K, r#"{"cents":2}"#).await;
    assert_eq!(other.body, r#"{"id":"ch_2"}"#);
    let mine = service.post("anna-secret", K, r#"{"cents":1}"#).await;
    assert_eq!(mine.body, r#"{"id":"ch_1"}"#);
}

#[tokio::test]
async fn parked_and_stuck_sagas_show_their_step_and_reason() {
    let service = Service::start(true, |it| it).await;
    service.post("anna", ASYNC, r#"{"cents":1,"pauses":true}"#).await;
    let parked = service.poll("anna", "/orders/k-1", "parked").await;
    assert_eq!(parked["step"], "signal/shipped");
    let rest = parked["parked_for"].as_u64().unwrap();
    assert!((3500..=3600).contains(&rest), "{parked}");
    let lines = "idempotency-key: k-2\r\nprefer: respond-async\r\n";
    service.post("anna", lines, r#"{"cents":99}"#).await;
    let stuck = service.poll("anna", "/orders/k-2", "stuck").await;
    assert_eq!((&stuck["step"], &stuck["reason"]), (&json!("charge"), &json!("unknown")));
    assert!(!stuck.to_string().contains("reset"), "errors of other systems are for operators");
}

#[tokio::test]
async fn delete_cancels_and_what_happened_is_undone() {
    let service = Service::start(true, Builder::allow_cancel).await;
    service.post("anna", ASYNC, r#"{"cents":1,"pauses":true}"#).await;
    service.poll("anna", "/orders/k-1", "parked").await;
    service.bank.gate.send_replace(false);
    let delete = bare("DELETE", "anna", "/orders/k-1");
    let accepted = service.send(&delete).await;
    assert_eq!(accepted.status, 202, "{accepted:?}");
    let compensates = |shown: &Value| shown["compensating"] == true;
    let shown = service.poll_until("anna", "/orders/k-1", compensates).await;
    assert_eq!((&shown["state"], &shown["step"]), (&json!("running"), &json!("charge")));
    service.bank.gate.send_replace(true);
    let shown = service.poll("anna", "/orders/k-1", "cancelled").await;
    assert_eq!(shown, json!({ "state": "cancelled", "answer": { "status": 410 } }));
    assert_eq!(*service.bank.refunds.borrow(), 1);
    let again = service.send(&delete).await;
    assert_eq!((again.status, again.json()), (200, shown));
    let body = r#"{"cents":1,"pauses":true}"#;
    assert_eq!(service.post("anna", K, body).await.status, 410);
}

#[tokio::test]
async fn delete_is_405_unless_it_is_allowed() {
    let service = Service::start(true, |it| it).await;
    service.post("anna", K, r#"{"cents":1}"#).await;
    let answer = service.send(&bare("DELETE", "anna", "/orders/k-1")).await;
    assert_eq!(answer.status, 405);
}

#[tokio::test]
async fn the_location_of_any_key_is_its_resource() {
    let service = Service::start(true, |it| it).await;
    for key in ["..", ".", "a/b", "a b", "100%25?#", r#"say \"k\""#] {
        let lines = format!("idempotency-key: \"{key}\"\r\nprefer: respond-async\r\n");
        let started = service.post("anna", &lines, r#"{"cents":1}"#).await;
        let location = started.header("location").unwrap().to_owned();
        let done = service.poll("anna", &location, "done").await;
        assert_eq!(done["answer"]["status"], 201, "{location}");
    }
    assert_eq!(*service.bank.charges.borrow(), 6);
}

#[tokio::test]
async fn a_gateway_in_front_passes_retries_on_until_there_is_an_answer() {
    let service = Service::start(false, |it| it).await;
    let fenced = format!("{ASYNC}idempotency-fence: 7\r\n");
    let pending = service.post("anna", &fenced, r#"{"cents":13}"#).await;
    assert_eq!(pending.header("idempotency-outcome"), Some("retryable"));
    service.bank.gate.send_replace(true);
    let fenced = format!("{K}idempotency-fence: 8\r\n");
    let answer = service.post("anna", &fenced, r#"{"cents":13}"#).await;
    assert_eq!((answer.status, answer.header("idempotency-outcome")), (402, Some("final")));
    let reused = service.post("anna", &fenced, r#"{"cents":14}"#).await;
    assert_eq!(reused.header("idempotency-outcome"), Some("retryable"));
}

#[tokio::test]
async fn a_client_that_disconnects_does_not_stop_its_saga() {
    let service = Service::start(false, |it| it).await;
    let mut stream = TcpStream::connect(service.address).await.unwrap();
    stream.write_all(post("anna", K, r#"{"cents":1}"#).as_bytes()).await.unwrap();
    let mut charges = service.bank.charges.subscribe();
    charges.wait_for(|count| *count == 1).await.unwrap();
    drop(stream);
    service.bank.gate.send_replace(true);
    service.poll("anna", "/orders/k-1", "done").await;
    assert_eq!(*service.bank.charges.borrow(), 1);
}

#[tokio::test]
async fn a_post_to_another_process_gets_the_same_answer() {
    let store = Arc::new(MemoryStore::default());
    let bank = Bank::new(false);
    let first = Service::start_on(Arc::clone(&store), bank.clone(), |it| it).await;
    let second = Service::start_on(store, bank, |it| it).await;
    first.post("anna", ASYNC, r#"{"cents":1}"#).await;
    assert_eq!(second.post("anna", ASYNC, r#"{"cents":1}"#).await.status, 202);
    second.bank.gate.send_replace(true);
    let answer = second.post("anna", K, r#"{"cents":1}"#).await;
    assert_eq!((answer.status, &*answer.body), (201, r#"{"id":"ch_1"}"#));
    assert_eq!(*first.bank.charges.borrow(), 1);
}

#[tokio::test]
async fn a_store_that_is_unavailable_is_503_and_the_same_request_succeeds_later() {
    let store = Arc::new(FaultyStore::new(Arc::new(MemoryStore::default()), 1));
    let service = Service::start_on(Arc::clone(&store), Bank::new(true), |it| it).await;
    store.set_down(true);
    let rejected = service.post("anna", K, r#"{"cents":1}"#).await;
    rejected.is_problem(503, "store-unavailable");
    assert_eq!(rejected.header("retry-after"), Some("1"));
    service.get("anna", "/orders/k-1").await.is_problem(503, "store-unavailable");
    assert_eq!(*service.bank.charges.borrow(), 0);
    store.set_down(false);
    assert_eq!(service.post("anna", K, r#"{"cents":1}"#).await.status, 201);
    store.set_down(true);
    service.get("anna", "/orders/k-1").await.is_problem(503, "store-unavailable");
    service.post("anna", K, r#"{"cents":1}"#).await.is_problem(503, "store-unavailable");
    store.set_down(false);
    assert_eq!(service.post("anna", K, r#"{"cents":1}"#).await.body, r#"{"id":"ch_1"}"#);
    assert_eq!(*service.bank.charges.borrow(), 1);
}

#[tokio::test]
async fn a_saga_whose_store_fails_after_its_start_gets_202() {
    let store = Arc::new(FaultyStore::new(Arc::new(MemoryStore::default()), 1));
    let bank = Bank::new(false);
    let service = Service::start_on(Arc::clone(&store), bank.clone(), |it| it).await;
    let (address, mut charges) = (service.address, bank.charges.subscribe());
    let engine = service.engine.clone();
    let waiting = tokio::spawn(async move {
        let service = Service { address, bank, engine };
        service.post("anna", K, r#"{"cents":1}"#).await
    });
    charges.wait_for(|count| *count == 1).await.unwrap();
    store.set_down(true);
    let answer = waiting.await.unwrap();
    assert_eq!((answer.status, answer.header("location")), (202, Some("/orders/k-1")));
    store.set_down(false);
    service.bank.gate.send_replace(true);
    service.poll("anna", "/orders/k-1", "done").await;
    assert_eq!(*charges.borrow(), 1);
}

/// The input of a later version, which has a further field.
#[derive(Serialize, Deserialize)]
struct LaterOrder {
    cents: u64,
    #[serde(default)]
    coupon: Option<String>,
}

#[tokio::test]
async fn a_request_of_before_the_input_got_a_field_finds_its_saga() {
    let (store, bank) = (Arc::new(MemoryStore::default()), Bank::new(true));
    let service = Service::start_on(Arc::clone(&store), bank.clone(), |it| it).await;
    assert_eq!(service.post("anna", K, r#"{"cents":1}"#).await.status, 201);
    let mut later = Saga::define("order", 2, bank.clone());
    let charge = later.once("charge", charge).undo(refund);
    let later = later
        .flow(move |op, order: LaterOrder| async move {
            op.run(charge, order.cents).await.map(|id| json!({ "id": id }))
        })
        .unwrap();
    let engine = Idempotency::builder(store).build().unwrap();
    let sagas = Sagas::builder(engine.clone()).register(&later).build().unwrap();
    let answer = |end: SagaOutcome<Value, String>| match end {
        SagaOutcome::Done(output) => (StatusCode::CREATED, Json(output)).into_response(),
        _ => StatusCode::GONE.into_response(),
    };
    let app = SagaRoutes::builder(sagas, later, "/orders", answer).build().unwrap().router::<()>();
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let upgraded = Service { address: listener.local_addr().unwrap(), bank, engine };
    tokio::spawn(async move { axum::serve(listener, app).await });
    let again = upgraded.post("anna", K, r#"{ "cents": 1 }"#).await;
    assert_eq!((again.status, again.header("idempotency-replayed")), (201, Some("true")));
    let other = upgraded.post("anna", K, r#"{"cents":1,"coupon":"ten"}"#).await;
    other.is_problem(422, "key-reused");
    assert_eq!(*upgraded.bank.charges.borrow(), 1);
}

#[tokio::test]
async fn routes_of_an_unregistered_saga_or_with_an_odd_path_are_rejected() {
    let bank = Bank::new(true);
    let engine = Idempotency::builder(MemoryStore::default()).build().unwrap();
    let order = order(&bank);
    let sagas = Sagas::builder(engine).register(&order).build().unwrap();
    let answer = |_: SagaOutcome<Value, String>| StatusCode::OK;
    for path in ["orders", "/orders/", "/{id}", "/a b"] {
        let built = SagaRoutes::builder(sagas.clone(), order.clone(), path, answer).build();
        assert!(matches!(built, Err(SagaRoutesError::Path { .. })), "{path}");
    }
    let twin = self::order(&bank);
    let built = SagaRoutes::builder(sagas, twin, "/orders", answer).build();
    assert!(matches!(built, Err(SagaRoutesError::NotRegistered { name: "order" })));
}

#[tokio::test]
async fn in_a_quarantine_a_start_and_a_cancellation_get_503_quarantined() {
    let service = Service::start(true, Builder::allow_cancel).await;
    let paused = service.post("anna", ASYNC, r#"{"cents":1,"pauses":true}"#).await;
    assert_eq!(paused.status, 202);
    quarantine::begin(&service.engine, None).await;
    let new = "idempotency-key: k-2\r\n";
    let rejected = service.post("anna", new, r#"{"cents":2}"#).await;
    rejected.is_problem(503, "quarantined");
    assert_eq!(rejected.header("retry-after"), Some("60"));
    // The status of a saga that has a record is served.
    assert_eq!(service.get("anna", "/orders/k-1").await.status, 200);
    let cancelled = service.send(&bare("DELETE", "anna", "/orders/k-1")).await;
    cancelled.is_problem(503, "quarantined");
    assert_eq!(cancelled.header("retry-after"), Some("60"));
    quarantine::end(&service.engine).await;
    assert_eq!(service.post("anna", new, r#"{"cents":2}"#).await.status, 201);
    assert_eq!(service.send(&bare("DELETE", "anna", "/orders/k-1")).await.status, 202);
}
