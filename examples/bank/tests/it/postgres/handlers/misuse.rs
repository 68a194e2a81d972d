//! Handlers that misuse their transactions, or do not state whether to commit.

use hapax_core::store::{BoxFuture, Swap, Swapped};
use hapax_core::transaction::{Transactions, TxError};
use tokio::sync::{Semaphore, oneshot};

use super::*;

/// Builds a response with a gRPC status in its head, as tonic and other libraries do.
fn response(kind: &str, status: &str) -> Response<Body> {
    Response::builder()
        .header("content-type", kind)
        .header("grpc-status", status)
        .body(Body::empty())
        .unwrap()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_refusal_in_grpc_is_rolled_back() {
    let world = World::new().await;
    for (status, lines) in [("9", "0"), ("0", "1")] {
        let app = world.app(post(move |tx: Db| async move {
            tx.execute(LINE, &[]).await.unwrap();
            response("application/grpc+proto", status)
        }));
        ask(&app, status).await.is_first(200);
        ask(&app, status).await.is_replay(200);
        assert_eq!(world.lines().await, lines, "{status}");
    }
    world.at_rest().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_does_not_tell_whether_it_refuses_is_rolled_back_unless_the_handler_does() {
    let world = World::new().await;
    let app = |said: fn(&ExecutionHandle)| {
        world.app(post(
            move |Extension(execution): Extension<ExecutionHandle>, tx: Db| async move {
                tx.execute(LINE, &[]).await.unwrap();
                said(&execution);
                response("Application/gRPC-Web", "0")
            },
        ))
    };
    for _ in 0..2 {
        ask(&app(|_| ()), "silent").await.is_problem(500, "handler-failed");
    }
    assert_eq!(world.lines().await, "0");
    ask(&app(ExecutionHandle::commit), "silent").await.is_first(200);
    assert_eq!(world.lines().await, "1");
    ask(&app(ExecutionHandle::roll_back), "refusal").await.is_first(200);
    ask(&app(ExecutionHandle::commit), "refusal").await.is_replay(200);
    assert_eq!(world.lines().await, "1");

    // Without a transaction there is no decision to make.
    let none = world.app(post(|| async { response("application/grpc-web", "0") }));
    ask(&none, "none").await.is_first(200);
    ask(&none, "none").await.is_replay(200);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_handler_that_ends_its_transaction_is_not_done_twice() {
    let world = World::new().await;
    let mut lines = 0;
    for text in ["COMMIT", "COMMIT; BEGIN", "COMMIT AND CHAIN"] {
        for status in [201, 402, 429] {
            let app = world.app(post(move |tx: Db| async move {
                tx.execute(LINE, &[]).await.unwrap();
                tx.batch_execute(text).await.unwrap();
                StatusCode::from_u16(status).unwrap()
            }));
            let key = format!("{text} {status}").replace([' ', ';'], "-");
            ask(&app, &key).await.is_problem(500, "handler-failed");
            ask(&app, &key).await.is_problem(409, "outcome-unknown");
            lines += 1;
            assert_eq!(world.lines().await, lines.to_string(), "{key}");
        }
    }
    world.at_rest().await;
}

/// A failure whose writes were not rolled back leaves the outcome unknown.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_failure_without_a_transaction_is_like_any_other() {
    let world = World::new().await;
    let mut plain = world.options.clone();
    plain.transactions = None;
    for (lines, options) in [("1", world.options.clone()), ("2", plain)] {
        let policy = RoutePolicy::new(scope(), options).unwrap();
        let pool = world.pool.clone();
        let handler = post(move || {
            let pool = pool.clone();
            async move {
                pool.get().await?.execute(LINE, &[]).await?;
                Err::<StatusCode, HandlerError>(std::io::Error::other("later on").into())
            }
        });
        let layer = IdempotencyLayer::new(world.engine.clone(), policy);
        let app: Router = Router::new().route("/", handler).layer(layer);
        ask(&app, lines).await.is_problem(500, "handler-failed");
        ask(&app, lines).await.is_problem(409, "outcome-unknown");
        assert_eq!(world.lines().await, lines);
    }
}

/// A database in which a transaction begins only with a permit.
#[derive(Debug)]
struct Slow(PgTransactions, Arc<Semaphore>);

impl Transactions for Slow {
    type Tx = PgTx;

    fn connect(&self) -> BoxFuture<'_, Result<PgTx, TxError>> {
        self.0.connect()
    }

    fn begin<'a>(&'a self, tx: &'a mut PgTx) -> BoxFuture<'a, Result<(), TxError>> {
        Box::pin(async move {
            self.1.acquire().await.unwrap().forget();
            self.0.begin(tx).await
        })
    }

    fn swap_in<'a>(
        &'a self,
        tx: &'a mut PgTx,
        swap: Swap,
    ) -> BoxFuture<'a, Result<Swapped, TxError>> {
        self.0.swap_in(tx, swap)
    }

    fn commit(&self, tx: PgTx) -> BoxFuture<'_, Result<(), TxError>> {
        self.0.commit(tx)
    }

    fn rollback(&self, tx: PgTx) -> BoxFuture<'_, Result<(), TxError>> {
        self.0.rollback(tx)
    }

    fn is_conflict(&self, error: &(dyn std::error::Error + 'static)) -> bool {
        self.0.is_conflict(error)
    }
}

/// A task takes a transaction that has not begun when its handler responds, and gets an error.
/// Otherwise its writes would be rolled back without notice.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_transaction_that_begins_after_the_response_is_given_to_nobody() {
    let mut world = World::new().await;
    let store = PostgresStore::connect(world.server.url("postgres").parse().unwrap()).await;
    let permits = Arc::new(Semaphore::new(0));
    let slow = Slow(transactions(Arc::new(store.unwrap()), &world.pool), Arc::clone(&permits));
    world.options.transactions = Some(TransactionBackend::new(Arc::new(slow)).any());
    let (told, heard) = oneshot::channel();
    let told = Arc::new(Mutex::new(Some(told)));
    let app = world.app(post(move |Extension(handle): Extension<TxHandle>| {
        let told = told.lock().unwrap().take().unwrap();
        async move {
            tokio::spawn(async move {
                told.send(handle.take::<PgTx>().await.map(drop)).ok();
            });
            StatusCode::CREATED
        }
    }));
    let first = ask(&app, "k").await;
    permits.add_permits(1);
    let taken = timeout(LIMIT, heard).await.unwrap().unwrap();
    assert!(taken.is_err(), "{first:?}");
    first.is_first(201);
    world.at_rest().await;
}
