//! Handlers that write in a transaction, of a database in memory.

use std::sync::{Arc, Mutex};

use hapax_core::store::{BoxFuture, Stamped, Store, Swap, Swapped};
use hapax_core::transaction::{TransactionBackend, Transactions, TxError, TxHandle};
use hapax_http::server::{ExecutionHandle, KeyRule, RouteOptions};

use super::world::{Answer, Log, Moody, Runs, World, pay, respond, send};

/// A database that has the records too. It keeps the writes of transactions that committed.
#[derive(Debug)]
struct Database {
    store: Arc<Moody>,
    lines: Mutex<Vec<&'static str>>,
}

#[derive(Debug, Default)]
struct Writes {
    lines: Vec<&'static str>,
    swap: Option<Swap>,
}

impl Transactions for Database {
    type Tx = Writes;

    fn connect(&self) -> BoxFuture<'_, Result<Writes, TxError>> {
        Box::pin(async { Ok(Writes::default()) })
    }

    fn begin<'a>(&'a self, _: &'a mut Writes) -> BoxFuture<'a, Result<(), TxError>> {
        Box::pin(async { Ok(()) })
    }

    fn swap_in<'a>(
        &'a self,
        tx: &'a mut Writes,
        swap: Swap,
    ) -> BoxFuture<'a, Result<Swapped, TxError>> {
        Box::pin(async move {
            let seen = self.store.load(&swap.id).await.unwrap();
            let stored = seen.stored.unwrap();
            assert_eq!(Some(stored.write_id), swap.expected);
            tx.swap = Some(swap);
            let (now, fence) = (seen.now, stored.fence);
            Ok(Swapped::Stored(Stamped { now, fence, lease_until: now }))
        })
    }

    fn commit(&self, tx: Writes) -> BoxFuture<'_, Result<(), TxError>> {
        Box::pin(async move {
            let swapped = self.store.swap(tx.swap.unwrap()).await.unwrap();
            assert!(matches!(swapped, Swapped::Stored(_)), "{swapped:?}");
            self.lines.lock().unwrap().extend(tx.lines);
            Ok(())
        })
    }

    fn rollback(&self, _: Writes) -> BoxFuture<'_, Result<(), TxError>> {
        Box::pin(async { Ok(()) })
    }

    fn is_conflict(&self, _: &(dyn std::error::Error + 'static)) -> bool {
        false
    }
}

/// Returns the responses to a request and its duplicate, the lines that committed and the log, for a handler that
/// writes in its transaction and answers with this status and `Location`.
async fn twice(
    status: u16,
    location: Option<&'static str>,
    decide: fn(&ExecutionHandle),
) -> ([Answer; 2], usize, String) {
    let log = Log::default();
    let subscriber = tracing_subscriber::fmt().with_writer(log.clone()).finish();
    let _guard = tracing::subscriber::set_default(subscriber);
    let world = World::new();
    let database = Arc::new(Database { store: Arc::clone(&world.store), lines: Mutex::default() });
    let options = RouteOptions {
        key: KeyRule::Required,
        transactions: Some(TransactionBackend::new(Arc::clone(&database)).any()),
        ..RouteOptions::default()
    };
    let runs = Runs::default();
    let app = world.app(options, move |request| {
        runs.next();
        async move {
            let handle: &TxHandle = request.extensions().get().unwrap();
            handle.take::<Writes>().await.unwrap().lines.push("a line");
            decide(request.extensions().get().unwrap());
            let mut response = respond(status, "see there");
            if let Some(location) = location {
                response.headers_mut().insert("location", location.parse().unwrap());
            }
            response
        }
    });
    let answers = [send(&app, pay("k", "{}")).await, send(&app, pay("k", "{}")).await];
    let lines = database.lines.lock().unwrap().len();
    let text = log.text();
    (answers, lines, text)
}

const WARNING: &str = "a redirect rolls back the transaction of its handler";

#[tokio::test(start_paused = true)]
async fn a_redirect_rolls_back_its_transaction_with_a_warning() {
    for status in [307, 308] {
        let ([_, again], lines, log) = twice(status, Some("/there"), |_| {}).await;
        assert_eq!((again.status.as_u16(), again.replayed()), (status, Some("true")));
        assert_eq!(lines, 0);
        assert!(log.contains(WARNING), "{log}");
    }
}

#[tokio::test(start_paused = true)]
async fn a_handler_that_commits_with_a_redirect_has_a_final_outcome() {
    for status in [307, 308] {
        let commit = ExecutionHandle::commit;
        let ([_, again], lines, log) = twice(status, Some("/there"), commit).await;
        assert_eq!((again.status.as_u16(), again.replayed()), (status, Some("true")));
        assert_eq!((lines, again.body.as_ref()), (1, b"see there".as_ref()));
        assert!(!log.contains(WARNING), "{log}");
    }
}

#[tokio::test(start_paused = true)]
async fn a_307_without_a_location_commits_like_any_3xx() {
    for (status, location) in [(307, None), (303, Some("/there"))] {
        let ([_, again], lines, log) = twice(status, location, |_| {}).await;
        assert_eq!((again.status.as_u16(), again.replayed(), lines), (status, Some("true"), 1));
        assert!(!log.contains(WARNING), "{log}");
    }
}
