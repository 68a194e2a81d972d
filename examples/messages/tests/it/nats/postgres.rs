//! Each example has its own servers, and fakes of the services that it calls.

mod pypi;

use std::collections::{BTreeMap, BTreeSet};
use std::process::{Child, Command, Stdio};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use axum::Router;
use axum::extract::Path;
use axum::http::{HeaderMap, StatusCode};
use axum::routing::post;
use hapax::messages::{MessageId, MessageSink as _, OutgoingMessage};
use hapax_nats::{JetStream, NatsSink};
use hapax_testkit::servers::{NatsServer, PostgresServer, free_port};
use http_body_util::Full;
use hyper::Request;
use hyper::body::Bytes;
use hyper_util::client::legacy::Client;
use hyper_util::rt::TokioExecutor;
use rustix::process::{Pid, Signal, kill_process};
use tokio::sync::Semaphore;
use tokio::time::sleep;

const TABLES: &str = "
    CREATE TABLE orders (id bigserial PRIMARY KEY, customer text NOT NULL, item text NOT NULL);
    CREATE TABLE invoices (order_id bigint NOT NULL, customer text NOT NULL)";

const EVERY: Duration = Duration::from_millis(10);

struct World {
    database: PostgresServer,
    broker: NatsServer,
    context: JetStream,
}

impl World {
    async fn start() -> Self {
        let (database, broker) = (PostgresServer::start().await, NatsServer::start().await);
        database
            .sql("postgres", &hapax::postgres_messages::message_migrations(&Default::default()))
            .await;
        database.sql("postgres", TABLES).await;
        let context = hapax_nats::jetstream(&broker.url()).await.unwrap();
        hapax_nats::create_stream(&context, "ORDERS", &["orders.>"]).await.unwrap();
        Self { database, broker, context }
    }

    /// Publishes messages `m-1` to `m-NUMBER`, each twice.
    async fn publish_twice(&self, number: u32) {
        let sink = NatsSink::new(self.context.clone());
        for round in 1..=2 {
            for number in 1..=number {
                let id = MessageId::new(format!("m-{number}")).unwrap();
                let mut message = OutgoingMessage::new("orders.new", id, number.to_string());
                message.broker_id = Some(format!("{round}-{number}"));
                sink.publish(&message).await.unwrap();
            }
        }
    }

    /// Starts a consumer of this world, which calls the service at `api`.
    fn consumer(&self, program: &str, api: &str) -> Process {
        let database = self.database.url("postgres");
        Process::start(Command::new(program).args([&self.broker.url(), &database, api]))
    }

    async fn until(&self, text: &str, expected: &str) {
        while self.database.sql("postgres", text).await != expected {
            sleep(EVERY).await;
        }
    }
}

/// A process, which is killed when it is dropped.
struct Process(Child);

impl Process {
    fn start(command: &mut Command) -> Self {
        Self(command.stdout(Stdio::null()).spawn().unwrap())
    }

    fn kill(mut self) {
        self.0.kill().unwrap();
        self.0.wait().unwrap();
    }

    fn end(mut self) {
        kill_process(Pid::from_child(&self.0), Signal::TERM).unwrap();
        assert!(self.0.wait().unwrap().success());
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Requests that a service received, and a permit for each response.
struct Received {
    by_message: Mutex<BTreeMap<String, Vec<String>>>,
    answers: Semaphore,
}

impl Received {
    fn new(answers: usize) -> Arc<Self> {
        Arc::new(Self { by_message: Mutex::default(), answers: Semaphore::new(answers) })
    }

    async fn note(&self, message: String, key: String) -> StatusCode {
        self.by_message.lock().unwrap().entry(message).or_default().push(key);
        self.answers.acquire().await.unwrap().forget();
        StatusCode::OK
    }

    async fn has(&self, messages: usize) {
        self.until(|received| received.len() >= messages).await;
    }

    async fn until(&self, reached: impl Fn(&BTreeMap<String, Vec<String>>) -> bool) {
        while !reached(&self.by_message.lock().unwrap()) {
            sleep(EVERY).await;
        }
    }
}

async fn serve(router: Router) -> String {
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url = format!("http://{}", listener.local_addr().unwrap());
    tokio::spawn(async { axum::serve(listener, router).await });
    url
}

#[tokio::test(flavor = "multi_thread")]
async fn a_queue_consumer_that_was_killed_repeats_charges_under_the_same_keys() {
    let world = World::start().await;
    // After five answers the service answers no more, though it has charged.
    let received = Received::new(5);
    let charges = Arc::clone(&received);
    let charge = move |headers: HeaderMap, body: String| async move {
        charges.note(body, headers["idempotency-key"].to_str().unwrap().to_owned()).await
    };
    let api = serve(Router::new().route("/charges", post(charge))).await;
    world.publish_twice(30).await;
    let consumer = world.consumer(env!("CARGO_BIN_EXE_queue_consumer"), &api);
    received.has(15).await;
    consumer.kill();
    received.answers.add_permits(1000);
    // Two replicas, which share the records.
    let replicas = [(), ()].map(|()| world.consumer(env!("CARGO_BIN_EXE_queue_consumer"), &api));
    let repeated =
        |received: &BTreeMap<_, Vec<_>>| received.values().filter(|of| of.len() > 1).count();
    // Of 15 charges, five were answered before the kill.
    received.until(|received| received.len() == 30 && repeated(received) >= 10).await;
    replicas.into_iter().for_each(Process::end);
    let received = received.by_message.lock().unwrap();
    let keys = |keys: &Vec<String>| keys.iter().collect::<BTreeSet<_>>().len();
    assert!(received.values().all(|of_one| keys(of_one) == 1), "{received:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn an_email_sender_sends_each_mail_once() {
    let world = World::start().await;
    let received = Received::new(5);
    let (sent, asked) = (Arc::clone(&received), Arc::clone(&received));
    let send = move |Path(id): Path<String>| async move { sent.note(id, String::new()).await };
    let ask = move |Path(id): Path<String>| async move {
        match asked.by_message.lock().unwrap().contains_key(&id) {
            true => StatusCode::OK,
            false => StatusCode::NOT_FOUND,
        }
    };
    let api = serve(Router::new().route("/mails/{id}", post(send).get(ask))).await;
    world.publish_twice(30).await;
    let sender = world.consumer(env!("CARGO_BIN_EXE_email_sender"), &api);
    received.has(15).await;
    sender.kill();
    received.answers.add_permits(1000);
    let replicas = [(), ()].map(|()| world.consumer(env!("CARGO_BIN_EXE_email_sender"), &api));
    received.has(30).await;
    replicas.into_iter().for_each(Process::end);
    {
        let received = received.by_message.lock().unwrap();
        assert!(received.values().all(|times| times.len() == 1), "{received:?}");
    }
    assert_eq!(
        world.database.sql("postgres", "SELECT count(*) FROM hapax_dead_letters").await,
        "0"
    );
}

/// Orders until the answer is 201. Returns the number of the order.
async fn order(port: u16, key: u32) -> String {
    let client = Client::builder(TokioExecutor::new()).build_http();
    loop {
        let request = Request::post(format!("http://127.0.0.1:{port}/orders"))
            .header("authorization", "Bearer me")
            .header("content-type", "application/json")
            .header("idempotency-key", format!("\"order-{key}\""))
            .body(Full::<Bytes>::from(format!(r#"{{"customer": "c-{}", "item": "x"}}"#, key % 3)))
            .unwrap();
        if let Ok(response) = client.request(request).await
            && response.status() == StatusCode::CREATED
        {
            use http_body_util::BodyExt as _;
            let body = response.into_body().collect().await;
            if let Ok(body) = body {
                return String::from_utf8(body.to_bytes().to_vec()).unwrap();
            }
        }
        sleep(EVERY).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn each_order_gets_one_invoice_although_service_and_consumer_are_killed() {
    let world = World::start().await;
    let (database, broker, port) =
        (world.database.url("postgres"), world.broker.url(), free_port());
    let service = || {
        let address = format!("127.0.0.1:{port}");
        let mut command = Command::new(env!("CARGO_BIN_EXE_order_service"));
        Process::start(command.args([&database, &broker, &address]))
    };
    let invoices = || {
        let mut command = Command::new(env!("CARGO_BIN_EXE_invoices"));
        Process::start(command.args([&broker, &database]))
    };
    let (mut running, mut consumer) = (service(), invoices());
    let ordering = tokio::spawn(async move {
        let mut numbers = BTreeSet::new();
        for key in 0..60 {
            numbers.insert(order(port, key).await);
        }
        numbers
    });
    for least in [20, 40] {
        world.until(&format!("SELECT count(*) >= {least} FROM orders"), "t").await;
        running.kill();
        consumer.kill();
        (running, consumer) = (service(), invoices());
    }
    assert_eq!(ordering.await.unwrap().len(), 60);
    world.until("SELECT count(*) FROM invoices", "60").await;
    world.until("SELECT count(*) FROM hapax_outbox", "0").await;
    running.end();
    consumer.end();
    let counts = "SELECT (SELECT count(*) FROM orders), count(*), count(DISTINCT order_id)
        FROM invoices";
    assert_eq!(world.database.sql("postgres", counts).await, "60|60|60");
}
