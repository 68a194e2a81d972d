//! A relay to an endpoint of webhooks, with a real outbox.

use std::collections::{BTreeMap, HashMap};
use std::net::SocketAddr;
use std::path::Path;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use axum::Router;
use axum::extract::Request;
use axum::http::{HeaderMap, StatusCode};
use axum::middleware::{Next, from_fn};
use axum::response::{IntoResponse, Response};
use hapax_core::{Idempotency, MemoryStore};
use hapax_http::server::{IdempotencyLayer, RoutePolicy};
use hapax_testkit::servers::PostgresServer;
use hapax_webhooks::WebhookLayer;
use tokio::net::{TcpListener, TcpSocket};
use tokio::time::Instant;
use tokio_postgres::NoTls;

use super::{RelayProcess, blocking, migrations, until};
use crate::world::{get_with, ok, refused, run};

/// `whsec_` and the base64 of 24 bytes.
const SECRET: &str = concat!("whsec", "_MDEyMzQ1Njc4OWFiY2RlZjAxMjM0NTY3");

/// A database with the tables, and an endpoint.
struct World {
    database: PostgresServer,
    url: String,
    folder: tempfile::TempDir,
    endpoint: Endpoint,
}

/// An endpoint that answers some first attempts with an error, and records all.
#[derive(Clone, Default)]
struct Endpoint {
    /// Id, order key and time of each request, with the status of its response.
    answered: Arc<Mutex<Vec<Answered>>>,
    /// Responses to the first attempt of an id.
    first: Arc<Mutex<HashMap<String, (StatusCode, &'static str)>>>,
}

#[derive(Clone, Debug)]
struct Answered {
    id: String,
    key: String,
    at: Instant,
    status: StatusCode,
    headers: HeaderMap,
}

impl Endpoint {
    fn answer_first(&self, id: &str, status: StatusCode, retry_after: &'static str) {
        self.first.lock().unwrap().insert(id.to_owned(), (status, retry_after));
    }

    fn answered(&self) -> Vec<Answered> {
        self.answered.lock().unwrap().clone()
    }

    fn accepted(&self) -> Vec<Answered> {
        self.answered().into_iter().filter(|it| it.status.is_success()).collect()
    }

    /// Returns the endpoint without layers.
    fn router(&self) -> Router {
        let this = self.clone();
        Router::new().fallback(move |headers: HeaderMap| async move { this.handle(headers) })
    }

    fn handle(&self, headers: HeaderMap) -> Response {
        let text = |name: &str| headers[name].to_str().unwrap().to_owned();
        let (id, key, at) = (text("message-id"), text("message-order-key"), Instant::now());
        let first = self.first.lock().unwrap().remove(&id);
        let (status, retry_after) = first.unwrap_or((StatusCode::OK, "0"));
        self.answered.lock().unwrap().push(Answered { id, key, at, status, headers });
        (status, [("retry-after", retry_after)], "of the test").into_response()
    }

    async fn start(&self) -> SocketAddr {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        serve(listener, self.router());
        address
    }
}

fn serve(listener: TcpListener, router: Router) {
    tokio::spawn(async move { axum::serve(listener, router).await });
}

impl World {
    async fn start() -> Self {
        let database = PostgresServer::start().await;
        database.sql("postgres", &migrations()).await;
        let url = database.url("postgres");
        let folder = tempfile::tempdir().unwrap();
        Self { database, url, folder, endpoint: Endpoint::default() }
    }

    async fn sql(&self, text: &str) -> String {
        self.database.sql("postgres", text).await
    }

    async fn put(&self, id: &str, key: &str) {
        let headers = r#"headers => '{"content-type": "text/plain"}'"#;
        let put = format!(
            "SELECT hapax_outbox_put('orders.created', 'of {id}', '{key}', '{id}', {headers})"
        );
        self.sql(&put).await;
    }

    async fn until_outbox_is_empty(&self) {
        until(&self.database, "SELECT count(*) FROM hapax_outbox", "0").await;
    }

    fn relay(&self, to: SocketAddr, more: &[&str]) -> RelayProcess {
        let to = format!("http://{to}/hooks");
        blocking(|| RelayProcess::start(&self.url, &to, more))
    }

    /// Starts a relay, and kills it when the endpoint has messages whose rows are not deleted.
    async fn kill_before_deletion(&self, to: SocketAddr, more: &[&str]) {
        let (mut client, connection) = tokio_postgres::connect(&self.url, NoTls).await.unwrap();
        tokio::spawn(connection);
        let transaction = client.transaction().await.unwrap();
        transaction.execute("SELECT FROM hapax_outbox FOR UPDATE", &[]).await.unwrap();
        let relay = self.relay(to, more);
        let deletes = "FROM pg_stat_activity
            WHERE wait_event_type = 'Lock' AND query LIKE '%hapax_outbox_remove%'";
        until(&self.database, &format!("SELECT count(*) {deletes}"), "1").await;
        relay.kill();
        // A backend that waits does not notice that its client is gone.
        self.sql(&format!("SELECT pg_terminate_backend(pid) {deletes}")).await;
        until(&self.database, &format!("SELECT count(*) {deletes}"), "0").await;
        transaction.rollback().await.unwrap();
    }

    fn file(&self, name: &str, text: &str) -> String {
        let path = self.folder.path().join(name);
        std::fs::write(&path, text).unwrap();
        path.to_str().unwrap().to_owned()
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_relay_that_is_killed_delivers_signed_messages_in_order_and_each_is_executed_once() {
    let world = World::start().await;
    let secret = world.file("secret", &format!("{SECRET}\n"));
    let layer = WebhookLayer::standard("relay").secret(SECRET).build().unwrap();
    let engine = Idempotency::builder(Arc::new(MemoryStore::default())).build().unwrap();
    let policy = RoutePolicy::new(hapax_webhooks::scope(), layer.route_options()).unwrap();
    let idempotency = IdempotencyLayer::new(engine, policy);
    let receiver = world.endpoint.router().layer(idempotency).layer(layer);
    // In front of the layers.
    let acknowledged = Arc::new(Mutex::new(Vec::new()));
    let receiver = {
        let acknowledged = Arc::clone(&acknowledged);
        receiver.layer(from_fn(move |request: Request, next: Next| {
            let acknowledged = Arc::clone(&acknowledged);
            async move {
                let id = request.headers()["message-id"].to_str().unwrap().to_owned();
                let response = next.run(request).await;
                if response.status().is_success() {
                    acknowledged.lock().unwrap().push(id);
                }
                response
            }
        }))
    };
    for number in (1..=600).step_by(7) {
        let id = format!("m-{number}");
        world.endpoint.answer_first(&id, StatusCode::TOO_MANY_REQUESTS, "0");
    }
    // It rejects connections until it listens.
    let socket = TcpSocket::new_v4().unwrap();
    socket.bind("127.0.0.1:0".parse().unwrap()).unwrap();
    let address = socket.local_addr().unwrap();
    let relay = world.relay(address, &["--signing-secret-file", &secret]);
    let put = |round: u32| {
        let (from, to) = (round * 200 + 1, round * 200 + 200);
        format!(
            "SELECT hapax_outbox_put('orders.created', convert_to(n::text, 'UTF8'), \
             'key-' || n % 5, 'm-' || n) FROM generate_series({from}, {to}) n"
        )
    };
    world.sql(&put(0)).await;
    let failed = |text: &str| !text.contains("hapax_relay_failures_total 0\n");
    while !failed(&blocking(|| get_with(relay.admin, "/metrics", "")).body) {
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    serve(socket.listen(1024).unwrap(), receiver);
    let some = "SELECT count(*) < 200 FROM hapax_outbox";
    until(&world.database, some, "t").await;
    relay.kill();
    for round in 1..3 {
        world.sql(&put(round)).await;
        world.kill_before_deletion(address, &["--signing-secret-file", &secret]).await;
    }
    let relay = world.relay(address, &["--signing-secret-file", &secret]);
    world.until_outbox_is_empty().await;
    assert_eq!(blocking(|| relay.end()), Some(0));
    let mut by_key: BTreeMap<String, Vec<u32>> = BTreeMap::new();
    for answered in world.endpoint.accepted() {
        let number = answered.id[2..].parse().unwrap();
        by_key.entry(answered.key).or_default().push(number);
    }
    // In order, and none twice: the layer drops what a relay sends again.
    assert!(by_key.values().all(|numbers| numbers.is_sorted_by(|a, b| a < b)), "{by_key:?}");
    assert_eq!(by_key.values().map(Vec::len).sum::<usize>(), 600);
    let acknowledged = acknowledged.lock().unwrap().len();
    assert!(acknowledged > 600, "no message arrived twice");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_message_whose_row_was_not_deleted_arrives_again_under_its_id() {
    let world = World::start().await;
    let address = world.endpoint.start().await;
    world.put("m-1", "k").await;
    world.kill_before_deletion(address, &[]).await;
    assert_eq!(world.endpoint.accepted().len(), 1);
    assert_eq!(world.sql("SELECT message_id FROM hapax_outbox").await, "m-1");
    let relay = world.relay(address, &[]);
    world.until_outbox_is_empty().await;
    assert_eq!(blocking(|| relay.end()), Some(0));
    let accepted = world.endpoint.accepted();
    assert_eq!(accepted.len(), 2);
    for answered in accepted {
        assert_eq!(answered.headers["webhook-id"], "m-1");
        assert_eq!(answered.headers["content-type"], "text/plain");
        assert_eq!(answered.headers["idempotency-key"], "\"m-1\"");
        assert!(!answered.headers.contains_key("webhook-signature"));
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_rejected_message_is_a_dead_letter_and_a_busy_endpoint_gets_its_pause() {
    let world = World::start().await;
    let endpoint = &world.endpoint;
    endpoint.answer_first("m-1", StatusCode::UNPROCESSABLE_ENTITY, "0");
    endpoint.answer_first("m-3", StatusCode::SERVICE_UNAVAILABLE, "2");
    let relay = world.relay(endpoint.start().await, &[]);
    for (id, key) in [("m-1", "a"), ("m-2", "a"), ("m-3", "b"), ("m-4", "b")] {
        world.put(id, key).await;
    }
    // m-2 waits behind the dead letter.
    until(&world.database, "SELECT string_agg(message_id, ' ') FROM hapax_outbox", "m-2").await;
    let ids = || endpoint.accepted().into_iter().map(|it| it.id).collect::<Vec<_>>();
    assert_eq!(ids(), ["m-3", "m-4"]);
    let of_3: Vec<_> = endpoint.answered().into_iter().filter(|it| it.id == "m-3").collect();
    assert_eq!(of_3.len(), 2);
    assert!(of_3[1].at - of_3[0].at >= Duration::from_secs(2), "{of_3:?}");
    let listed = blocking(|| ok(&["messages", "list", "--database", &world.url]));
    assert!(listed.contains("found 422") && listed.contains("m-1"), "{listed}");
    let dead_letter = world.sql("SELECT encode(id, 'hex') FROM hapax_dead_letters").await;
    let reason = ["--reason", "fixed", "--database", &world.url];
    blocking(|| ok(&[&["messages", "redrive", &*dead_letter][..], &reason].concat()));
    world.until_outbox_is_empty().await;
    assert_eq!(ids(), ["m-3", "m-4", "m-1", "m-2"]);
    assert_eq!(blocking(|| relay.end()), Some(0));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_dead_letter_of_the_outbox_whose_position_another_message_has_fails_alone() {
    let world = World::start().await;
    for (id, key) in [("m-1", "a"), ("m-2", "b")] {
        world.put(id, key).await;
        let park = "SELECT hapax_outbox_park(sha256(message_id::bytea), shard, id, 'of the test', 1) FROM hapax_outbox";
        world.sql(park).await;
    }
    // As after an upgrade by logical replication, which copies no sequence.
    world.sql("SELECT setval('hapax_outbox_ids', 1, false)").await;
    world.put("m-3", "a").await;
    let redrive = ["messages", "redrive", "--consumer", "hapax-outbox", "--reason", "fixed"];
    let output = blocking(|| run(&[&redrive[..], &["--database", &world.url]].concat()));
    let [said, error] = [output.stdout, output.stderr].map(|it| String::from_utf8(it).unwrap());
    let expected = "expected no other message at the position of the dead letter";
    assert!(error.contains(expected) && error.contains("Set the sequence"), "{error}");
    assert_eq!(output.status.code(), Some(1), "{error}");
    assert!(said.contains(" not redriven: ") && said.contains("1 moved back"), "{said}");
    assert_eq!(world.sql("SELECT message_id FROM hapax_dead_letters").await, "m-1");
}

#[test]
fn a_relay_with_a_wrong_endpoint_ends_with_one_line() {
    let folder = tempfile::tempdir().unwrap();
    let file = |name: &str, text: &str| {
        let path = folder.path().join(name);
        std::fs::write(&path, text).unwrap();
        path.to_str().unwrap().to_owned()
    };
    let (empty, short) = (file("empty", "\n"), file("short", "whsec_c2VjcmV0\n"));
    let missing = Path::join(folder.path(), "missing").to_str().unwrap().to_owned();
    let (secret, ca) = ("--signing-secret-file", "--to-ca");
    for (to, more, expected) in [
        ("https://u:hidden@a.example/", &[][..], "--to: expected a URL without user name"),
        ("https://a.example/#hidden", &[], "--to: expected a URL without a fragment"),
        ("https://hidden:0/", &[], "--to: expected http://HOST/PATH or https://HOST/PATH"),
        ("mqtt://hidden", &[], "--to: expected nats://HOST"),
        ("http://hidden", &[ca, &empty], "--to-ca: expected https://"),
        ("https://hidden", &[ca, &missing], "--to-ca: root certificates: "),
        ("http://hidden", &[secret, &missing], "--signing-secret-file: "),
        ("http://hidden", &[secret, &empty], "expected a secret, found an empty file"),
        ("http://hidden", &[secret, &short], "expected at least 24 bytes, found 6"),
        (
            "nats://hidden",
            &[secret, &short],
            "--signing-secret-file: expected an endpoint in --to ",
        ),
        ("http://hidden", &["--in-flight", "0"], "--in-flight"),
    ] {
        let from = "postgres://127.0.0.1:1/none";
        let start = ["relay", "--from", from, "--to", to, "--log-level", "off"];
        let (code, line) = refused(&[&start[..], more].concat());
        // A later start may find the file.
        let expected_code = if more.contains(&&*missing) { 69 } else { 64 };
        assert!(code == expected_code && line.contains(expected), "{to} {more:?}: {code} {line}");
        assert!(!line.contains("hidden"), "{line}");
    }
}
