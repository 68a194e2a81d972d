//! Handlers that do all kinds of things with their transactions.

mod failures;
mod misuse;
mod outside;

use std::pin::Pin;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex};
use std::task::{Context, Poll};
use std::time::Duration;

use axum::body::Body;
use axum::http::{Request, Response, StatusCode};
use axum::response::IntoResponse;
use axum::routing::{MethodRouter, post};
use axum::{Extension, Router};
use bytes::Bytes;
use deadpool_postgres::{Manager, Pool};
use hapax_core::{Idempotency, InFlight, OnUnknown};
use hapax_http::axum::{HandlerError, InTransaction};
use hapax_http::server::transaction::{TransactionBackend, Tx, TxHandle, TxOptions};
use hapax_http::server::{
    ExecutionHandle, IdempotencyLayer, KeyRule, MissingScope, RouteError, RouteOptions,
    RoutePolicy, ScopeSource, StoreOutage,
};
use hapax_postgres::{PgTransactions, PgTx, PostgresStore};
use hapax_testkit::servers::PostgresServer;
use http_body::Frame;
use http_body_util::BodyExt;
use tokio::sync::Barrier;
use tokio::task::JoinSet;
use tokio::time::timeout;
use tokio_postgres::{Config, NoTls};
use tower::ServiceExt;

const LIMIT: Duration = Duration::from_secs(60);

/// Statement that a handler executes.
const LINE: &str = "INSERT INTO work VALUES (1)";

type Db = InTransaction<PgTx>;

struct World {
    server: PostgresServer,
    engine: Idempotency,
    pool: Pool,
    options: RouteOptions,
}

impl World {
    async fn new() -> Self {
        let server = PostgresServer::start().await;
        let port = server.port();
        Self::by(server, port).await
    }

    /// Starts a world whose transactions connect by `port`.
    async fn by(server: PostgresServer, port: u16) -> Self {
        server.sql("postgres", "CREATE TABLE work (of bigint)").await;
        let store = PostgresStore::connect(server.url("postgres").parse().unwrap()).await.unwrap();
        let store = Arc::new(store);
        let engine =
            Idempotency::builder(Arc::clone(&store) as Arc<_>).namespace("bank").build().unwrap();
        let mut config = Config::new();
        config.host("127.0.0.1").port(port).user("postgres").dbname("postgres");
        let pool = Pool::builder(Manager::new(config, NoTls)).max_size(2).build().unwrap();
        let transactions = transactions(store, &pool);
        let mut options = RouteOptions {
            key: KeyRule::Required,
            transactions: Some(TransactionBackend::new(Arc::new(transactions))),
            ..RouteOptions::default()
        };
        options.policy.terms.on_unknown = OnUnknown::Block;
        Self { server, engine, pool, options }
    }

    fn layer(&self) -> IdempotencyLayer {
        let policy = RoutePolicy::new(scope(), self.options.clone()).unwrap();
        IdempotencyLayer::new(self.engine.clone(), policy)
    }

    fn app(&self, handler: MethodRouter) -> Router {
        Router::new().route("/", handler).layer(self.layer())
    }

    async fn lines(&self) -> String {
        self.server.sql("postgres", "SELECT count(*) FROM work").await
    }

    /// Asserts that every connection is in the pool or closed, and in no transaction.
    async fn at_rest(&self) {
        for _ in 0..2 {
            let client = timeout(LIMIT, self.pool.get()).await.unwrap().unwrap();
            let at_rest = "SELECT pg_current_xact_id_if_assigned() IS NULL";
            assert!(client.query_one(at_rest, &[]).await.unwrap().get::<_, bool>(0));
        }
    }
}

fn transactions(store: Arc<PostgresStore>, pool: &Pool) -> PgTransactions {
    let pool = pool.clone();
    let get = move || {
        let pool = pool.clone();
        async move { pool.get().await }
    };
    PgTransactions::new(store, get, |connection| connection)
}

fn scope() -> ScopeSource {
    ScopeSource::headers([http::header::AUTHORIZATION], MissingScope::Reject)
}

#[derive(PartialEq, Eq, Debug)]
struct Answer {
    status: u16,
    replayed: Option<bool>,
    text: String,
}

impl Answer {
    /// Asserts that the response is a handler's own, not a replay.
    fn is_first(&self, status: u16) {
        assert_eq!((self.status, self.replayed), (status, Some(false)), "{self:?}");
    }

    fn is_replay(&self, status: u16) {
        assert_eq!((self.status, self.replayed), (status, Some(true)), "{self:?}");
    }

    fn is_problem(&self, status: u16, code: &str) {
        let code = format!("\"code\":\"{code}\"");
        assert!(self.status == status && self.text.contains(&code), "{self:?}");
    }
}

async fn ask(app: &Router, key: &str) -> Answer {
    let request = Request::post("/")
        .header("authorization", "Bearer me")
        .header("idempotency-key", key)
        .body(Body::empty())
        .unwrap();
    let response = timeout(LIMIT, app.clone().oneshot(request)).await.unwrap().unwrap();
    let (head, body) = response.into_parts();
    let header = head.headers.get("idempotency-replayed");
    let replayed = header.map(|value| value == "true");
    let body: Bytes = body.collect().await.unwrap().to_bytes();
    let text = String::from_utf8_lossy(&body).into_owned();
    Answer { status: head.status.as_u16(), replayed, text }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_is_written_commits_with_what_is_final_and_good() {
    let world = World::new().await;
    // Expected status of a duplicate, and whether it is a replay.
    let next = |status: u16| match status {
        201 | 303 | 402 => (status, true),
        429 => (429, false),
        _ => (409, false),
    };
    let mut lines = 0;
    for status in [201_u16, 303, 402, 429, 500] {
        let app = world.app(post(move |tx: Db| async move {
            tx.execute(LINE, &[]).await.unwrap();
            StatusCode::from_u16(status).unwrap()
        }));
        let key = format!("k-{status}");
        ask(&app, &key).await.is_first(status);
        lines += u32::from(status < 400);
        assert_eq!(world.lines().await, lines.to_string(), "{status}");
        let again = ask(&app, &key).await;
        let (expected, replayed) = next(status);
        assert_eq!((again.status, again.replayed == Some(true)), (expected, replayed), "{again:?}");
        assert_eq!(world.lines().await, lines.to_string(), "{status}");
    }
    world.at_rest().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_handler_may_say_that_a_refusal_commits() {
    let world = World::new().await;
    let app =
        world.app(post(|Extension(execution): Extension<ExecutionHandle>, tx: Db| async move {
            tx.execute(LINE, &[]).await.unwrap();
            execution.commit();
            StatusCode::PAYMENT_REQUIRED
        }));
    ask(&app, "k").await.is_first(402);
    ask(&app, "k").await.is_replay(402);
    assert_eq!(world.lines().await, "1");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_transaction_may_be_dropped_early_taken_again_or_left_alone() {
    let world = World::new().await;
    let early = world.app(post(|tx: Db| async move {
        tx.execute(LINE, &[]).await.unwrap();
        drop(tx);
        tokio::task::yield_now().await;
        StatusCode::CREATED
    }));
    ask(&early, "early").await.is_first(201);
    assert_eq!(world.lines().await, "1");

    let again = world.app(post(|Extension(handle): Extension<TxHandle>| async move {
        for _ in 0..2 {
            let tx: Tx<PgTx> = handle.take().await.unwrap();
            tx.execute(LINE, &[]).await.unwrap();
        }
        // A request for another type of transaction is an error.
        assert!(handle.take::<String>().await.is_err());
        StatusCode::CREATED
    }));
    ask(&again, "again").await.is_first(201);
    assert_eq!(world.lines().await, "3");

    let pool = world.pool.clone();
    let alone = world.app(post(|| async move {
        assert_eq!(pool.status().available, pool.status().size);
        StatusCode::CREATED
    }));
    ask(&alone, "alone").await.is_first(201);
    ask(&alone, "alone").await.is_replay(201);

    // A second transaction at the same time is an error: nothing is executed, and the record is
    // released.
    let both = world.app(post(|one: Db, _two: Db| async move {
        one.execute(LINE, &[]).await.unwrap();
        StatusCode::CREATED
    }));
    for _ in 0..2 {
        ask(&both, "both").await.is_problem(500, "handler-failed");
    }
    assert_eq!(world.lines().await, "3");
    world.at_rest().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_transaction_that_outlives_its_response_is_not_committed() {
    let world = World::new().await;
    let kept = Arc::new(Mutex::new(None));
    let keep = Arc::clone(&kept);
    let app = world.app(post(move |tx: Db| {
        let keep = Arc::clone(&keep);
        async move {
            tx.execute(LINE, &[]).await.unwrap();
            *keep.lock().unwrap() = Some(tx);
            StatusCode::CREATED
        }
    }));
    ask(&app, "k").await.is_problem(500, "handler-failed");
    ask(&app, "k").await.is_problem(409, "outcome-unknown");
    drop(kept.lock().unwrap().take());
    world.at_rest().await;
    assert_eq!(world.lines().await, "0");

    // A body that is read before the response is sent does not keep it open.
    let app = world.app(post(|tx: Db| async move {
        tx.execute(LINE, &[]).await.unwrap();
        let body = Held(Some(Bytes::from("written")), tx);
        Response::builder().status(201).body(Body::new(body)).unwrap()
    }));
    ask(&app, "body").await.is_first(201);
    assert_eq!(world.lines().await, "1");
}

/// A body that has a transaction until it is dropped.
struct Held(Option<Bytes>, #[expect(dead_code, reason = "it is held")] Db);

impl http_body::Body for Held {
    type Data = Bytes;
    type Error = std::convert::Infallible;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        _: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Self::Error>>> {
        Poll::Ready(self.0.take().map(|bytes| Ok(Frame::data(bytes))))
    }
}
