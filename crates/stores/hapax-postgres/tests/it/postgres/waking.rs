//! Copies that wait in one process hear what happens in another.

use std::io::Write;
use std::sync::{Arc, LazyLock, Mutex};
use std::time::Duration;

use hapax_core::transaction::{ExecutionEnd, ExecutionResult, TransactResult, TransactionBackend};
use hapax_core::{Claim, Idempotency, InFlight, Notify, OnUnknown, OperationId, Outcome, Policy};
use hapax_postgres::{PostgresOptions, PostgresStore};
use hapax_testkit::faults::Polling;
use hapax_testkit::servers::{PgBouncer, PostgresServer};
use tokio::sync::mpsc;
use tokio::time::{Instant, timeout};
use tokio_postgres::{AsyncMessage, NoTls};

use super::faults::TERMINATE;
use super::meddler::Meddler;
use super::support::{at, by, claim, claim_key, complete, expect_stored, key, own, policy};

const SOON: Duration = Duration::from_secs(60);

/// The key that the tests write.
static ONE: LazyLock<OperationId> = LazyLock::new(|| key(1));

async fn listening(server: &PostgresServer) -> Arc<PostgresStore> {
    Arc::new(PostgresStore::connect(at(server).listen(true)).await.unwrap())
}

/// Waits until `store` knows that somebody waits for `keys` keys elsewhere.
async fn hears_of(store: &PostgresStore, keys: usize) {
    let hears = async {
        while store.stats().awaited != keys {
            tokio::task::yield_now().await;
        }
    };
    timeout(SOON, hears).await.expect("it hears who waits");
}

#[tokio::test]
async fn a_write_by_another_process_is_notified() {
    let server = PostgresServer::start().await;
    let (here, there) = (listening(&server).await, listening(&server).await);
    let mut written = here.written(&ONE);
    // Until it is said again: it may have been said before the other listened.
    hears_of(&there, 1).await;
    // The first news is that there is a connection, if it came to be only now.
    if timeout(Duration::from_millis(1), &mut written).await.is_ok() {
        written = here.written(&ONE);
    }
    let claimed = claim(1);
    expect_stored(&*there, &claimed).await;
    // In flight as before, as far as those who wait are concerned.
    assert!(timeout(Duration::from_millis(300), &mut written).await.is_err());
    expect_stored(&*there, &complete(&claimed, 2, b"yes")).await;
    timeout(SOON, written).await.expect("news");
}

/// What commits with a caller's writes is no write of the store's.
#[tokio::test]
async fn a_commit_by_another_process_is_notified() {
    let server = PostgresServer::start().await;
    let (here, there) = (listening(&server).await, listening(&server).await);
    let engine = Idempotency::builder(Arc::clone(&there) as Arc<_>).namespace("").build().unwrap();
    let lease = own(&engine, 1, &policy(OnUnknown::Block)).await;
    let key = engine.operation_id(&hapax_core::Scope::shared(), &super::support::named(1));
    let mut written = here.written(&key);
    hears_of(&there, 1).await;
    if timeout(Duration::from_millis(1), &mut written).await.is_ok() {
        written = here.written(&key);
    }
    let backend = TransactionBackend::new(Arc::new(super::transact::at(&there, &server)));
    let done = ExecutionEnd::Complete { outcome: Outcome::new("text", "yes"), retention: None };
    let ran = lease.transact(&backend, move |_, _| std::future::ready((done.clone(), ()))).await;
    assert!(matches!(ran, TransactResult::Ended(ExecutionResult::Recorded(_), ())), "{ran:?}");
    timeout(SOON, written).await.expect("news");
}

#[tokio::test]
async fn notifications_continue_after_a_lost_connection() {
    let server = PostgresServer::start().await;
    let (here, there) = (listening(&server).await, listening(&server).await);
    let written = here.written(&ONE);
    hears_of(&there, 1).await;
    server.sql("postgres", TERMINATE).await;
    // What was missed in between cannot be told from nothing: it is news as well.
    timeout(SOON, written).await.expect("news of the new connection");
}

#[tokio::test]
async fn without_waiters_no_notification_is_sent() {
    let server = PostgresServer::start().await;
    let (said, mut heard) = mpsc::unbounded_channel();
    let (spy, mut connection) =
        tokio_postgres::connect(&server.url("postgres"), NoTls).await.unwrap();
    tokio::spawn(async move {
        let next = |context: &mut std::task::Context<'_>| connection.poll_message(context);
        let mut next = next;
        while let Some(Ok(message)) = std::future::poll_fn(&mut next).await {
            if let AsyncMessage::Notification(notification) = message {
                said.send(notification.channel().to_owned()).ok();
            }
        }
    });
    spy.batch_execute("LISTEN hapax_awaited; LISTEN hapax_written").await.unwrap();
    let (here, there) = (listening(&server).await, listening(&server).await);
    for of in 0..20 {
        let claimed = claim(of);
        expect_stored(&*there, &claimed).await;
        expect_stored(&*there, &complete(&claimed, of + 100, b"yes")).await;
    }
    assert!(heard.is_empty(), "{:?}", heard.recv().await);
    // Shows that the spy hears.
    let _written = here.written(&ONE);
    assert_eq!(timeout(SOON, heard.recv()).await.unwrap().unwrap(), "hapax_awaited");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_notified_waiter_is_answered_before_its_next_poll() {
    const ROUNDS: u64 = 15;
    let server = PostgresServer::start().await;
    let writer = listening(&server).await;
    let here = Idempotency::builder(Arc::clone(&writer)).namespace("").build().unwrap();
    // This process gets no notifications and polls four times a second.
    let polling =
        Idempotency::builder(Polling(listening(&server).await)).namespace("").build().unwrap();
    let there = Idempotency::builder(listening(&server).await).namespace("").build().unwrap();
    let patient = Policy { in_flight: InFlight::Wait(SOON), ..policy(OnUnknown::Block) };
    let (mut waited, mut polled) = (Duration::ZERO, Duration::ZERO);
    for of in 0..ROUNDS {
        let lease = own(&here, of, &patient).await;
        let [copy, other] = [&there, &polling].map(|process| {
            let process = process.clone();
            tokio::spawn(async move { (claim_key(&process, of, &patient).await, Instant::now()) })
        });
        // Those of the rounds before are remembered for a while.
        hears_of(&writer, of as usize + 1).await;
        while polling.stats().waiting == 0 {
            tokio::task::yield_now().await;
        }
        let completed = Instant::now();
        lease.complete(Outcome::new("test/1", "yes"), None).await.unwrap();
        for (copy, sum) in [(copy, &mut waited), (other, &mut polled)] {
            let (told, at) = copy.await.unwrap();
            assert!(matches!(told, Claim::Replay(_)), "{told:?}");
            *sum += at - completed;
        }
    }
    // A busy machine delays both alike; polling costs an eighth of a second on average.
    assert!(waited < polled, "{waited:?} with notifications, {polled:?} by polling");
}

/// What is logged, as text.
#[derive(Clone, Default)]
struct Log(Arc<Mutex<Vec<u8>>>);

impl Log {
    fn text(&self) -> String {
        String::from_utf8(self.0.lock().unwrap().clone()).unwrap()
    }
}

impl Write for Log {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        self.0.lock().unwrap().write(bytes)
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

/// Connects by `options`, and waits until it is told that there is a pooler, in one line.
async fn recognises(options: PostgresOptions) -> PostgresStore {
    let log = Log::default();
    let subscriber = tracing_subscriber::fmt().with_ansi(false).with_writer({
        let log = log.clone();
        move || log.clone()
    });
    // On one thread, which is the one whose log is taken.
    let _taken = tracing::subscriber::set_default(subscriber.finish());
    let store = PostgresStore::connect(options.listen(true)).await.unwrap();
    let told = async {
        while !log.text().contains("pooler") {
            tokio::task::yield_now().await;
        }
    };
    timeout(SOON, told).await.expect("it finds out");
    expect_stored(&store, &claim(1)).await;
    let told = log.text();
    assert_eq!(told.lines().filter(|line| line.contains("pooler")).count(), 1, "{told}");
    store
}

#[tokio::test]
async fn a_pooler_is_detected_and_its_sessions_are_not_changed() {
    let server = PostgresServer::start().await;
    let pooler = PgBouncer::start(&server, 1).await;
    let _store = recognises(pooler.url("postgres").parse().unwrap()).await;
    let (client, connection) =
        tokio_postgres::connect(&pooler.url("postgres"), NoTls).await.unwrap();
    let _driver = tokio::spawn(connection);
    let channels = client.query_typed("SELECT pg_listening_channels()", &[]).await.unwrap();
    assert!(channels.is_empty(), "others listen to what is ours: {channels:?}");
}

#[tokio::test]
async fn a_pooler_that_drops_options_is_recognised_too() {
    const OWN: &[u8] = b"hapax.session=own";
    let server = PostgresServer::start().await;
    let meddler = Meddler::before(server.address(), |message| {
        // As if the setting had not been there.
        if let Some(at) = message.windows(OWN.len()).position(|part| part == OWN) {
            message[at..at + 5].copy_from_slice(b"other");
        }
        true
    })
    .await;
    let _store = recognises(by(meddler.port())).await;
    let listening = "SELECT count(*) FROM pg_stat_activity WHERE query LIKE 'LISTEN%'";
    assert_eq!(server.sql("postgres", listening).await, "0");
}
