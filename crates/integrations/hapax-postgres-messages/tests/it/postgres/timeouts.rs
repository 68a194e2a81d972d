//! A database that does not answer, in batch mode and for dead letters, and handlers that do not end.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::time::Duration;

use deadpool_postgres::Object;
use hapax_core::store::BoxFuture;
use hapax_core::{Idempotency, MemoryStore};
use hapax_messages::{
    BatchItem, Consumer, ConsumerLimits, DeadLetterStore as _, Inbox, MessageExecution,
    MessageFailure,
};
use hapax_postgres_messages::{BatchHandler, Connections, PgDeadLetterStore, PgInbox};
use hapax_testkit::faults::{FaultProxy, FaultProxyRates};
use hapax_testkit::messages::MemoryBroker;
use tokio::sync::{Notify, Semaphore, oneshot};

use super::batch::{
    Connection, Running, run_inbox, send, summary, until, with_effects, write, write_effects,
};

const RETENTION: Duration = Duration::from_secs(3600);

fn inbox(
    connections: Connections<Connection>,
    handler: impl BatchHandler<Connection>,
) -> PgInbox<Connection> {
    PgInbox::new("orders", connections, RETENTION, handler)
        .statement_timeout(Duration::from_millis(300))
        .transaction_timeout(Duration::from_secs(1))
}

fn send_all(broker: &MemoryBroker, count: u32) {
    (0..count).for_each(|number| send(broker, &format!("m-{number}")));
}

async fn held_by_database(running: &Running) {
    let held = async || running.monitor.stats().held_by_store > 0;
    until("the batch is held", held).await;
}

/// Writes effects; the first call waits for a signal of the test.
struct Waiting {
    waits: AtomicBool,
    begun: Arc<Notify>,
    go_on: Arc<Semaphore>,
}

impl BatchHandler<Connection> for Waiting {
    fn handle<'a>(
        &'a self,
        connection: &'a mut Connection,
        messages: &'a [BatchItem],
    ) -> BoxFuture<'a, Result<(), MessageFailure>> {
        Box::pin(async move {
            if self.waits.swap(false, Ordering::SeqCst) {
                self.begun.notify_one();
                let _ = self.go_on.acquire().await;
            }
            write_effects(connection, messages).await
        })
    }
}

#[tokio::test]
async fn a_batch_on_a_server_that_froze_in_the_handler_is_held_and_applied_once_later() {
    let (server, broker) = (with_effects().await, MemoryBroker::default());
    send_all(&broker, 10);
    let (begun, go_on) = (Arc::new(Notify::new()), Arc::new(Semaphore::new(0)));
    let waits = AtomicBool::new(true);
    let handler = Waiting { waits, begun: Arc::clone(&begun), go_on: Arc::clone(&go_on) };
    let running = run_inbox(&broker, inbox(super::connections(&server), handler));
    begun.notified().await;
    server.pause();
    go_on.add_permits(1);
    held_by_database(&running).await;
    let stats = running.monitor.stats();
    assert_eq!((broker.acknowledgements(), stats.held_for_retry, stats.parked), (0, 0, 0));
    server.resume();
    broker.emptied().await;
    assert_eq!(summary(&server).await, "10|10");
    assert_eq!(server.sql("postgres", "SELECT count(*) FROM hapax_attempts").await, "0");
    running.stop().await;
}

#[tokio::test]
async fn a_commit_without_an_answer_is_not_acknowledged_and_its_connection_is_given_up() {
    for discards in [true, false] {
        let (server, broker) = (with_effects().await, MemoryBroker::default());
        let proxy = FaultProxy::before(server.address(), 1).await.unwrap();
        // Not the BEGIN, which has the word COMMITTED.
        proxy.only(b"COMMIT\0");
        proxy.set(FaultProxyRates { silence: 1000, ..FaultProxyRates::default() });
        let pool = super::pool_through(&proxy, &server);
        let mut connections = super::connections_of(pool.clone());
        let discarded = Arc::new(AtomicU32::new(0));
        if discards {
            let discarded = Arc::clone(&discarded);
            connections = connections.discard_with(move |pooled| {
                discarded.fetch_add(1, Ordering::SeqCst);
                drop(Object::take(pooled.into_inner()));
            });
        }
        send_all(&broker, 10);
        let running = run_inbox(&broker, inbox(connections, write));
        held_by_database(&running).await;
        assert!(proxy.counts().silences > 0, "the fault occurred");
        assert_eq!(broker.acknowledgements(), 0);
        proxy.set(FaultProxyRates::default());
        broker.emptied().await;
        assert_eq!(summary(&server).await, "10|10");
        let (discarded, silences) = (discarded.load(Ordering::SeqCst), proxy.counts().silences);
        let unanswered = u32::try_from(silences).unwrap();
        assert_eq!(discarded, if discards { unanswered } else { 0 });
        // A connection without an answer is kept until the server ends it for its idle transaction.
        until("the others are in the pool", async || pool.status().size == pool.status().available)
            .await;
        running.stop().await;
    }
}

/// Writes effects, but does not end for `m-stuck`, and for `m-asleep` waits for a statement.
fn endless<'a>(
    connection: &'a mut Connection,
    messages: &'a [BatchItem],
) -> BoxFuture<'a, Result<(), MessageFailure>> {
    Box::pin(async move {
        let has = |id: &str| messages.iter().any(|item| item.id().as_str() == id);
        if has("m-stuck") {
            std::future::pending::<()>().await;
        }
        if has("m-asleep") {
            connection.execute("SELECT pg_sleep(3600)", &[]).await?;
        }
        write_effects(connection, messages).await
    })
}

#[tokio::test]
async fn a_message_whose_handler_does_not_end_is_parked_and_others_are_handled() {
    for id in ["m-stuck", "m-asleep"] {
        let (server, broker) = (with_effects().await, MemoryBroker::default());
        send_all(&broker, 3);
        send(&broker, id);
        let inbox = inbox(super::connections(&server), endless)
            .transaction_timeout(Duration::from_millis(300));
        let running = run_inbox(&broker, inbox);
        broker.emptied().await;
        assert_eq!(summary(&server).await, "3|3");
        let dead_letter = "SELECT message_id, reason, attempts FROM hapax_dead_letters";
        assert_eq!(server.sql("postgres", dead_letter).await, format!("{id}|attempts|5"));
        if id == "m-stuck" {
            let error = server.sql("postgres", "SELECT error FROM hapax_dead_letters").await;
            assert!(error.starts_with("expected the handler to end within 300ms"), "{error}");
        }
        // Each of the five attempts would count. On a slow machine another transaction may reach the limit too.
        let held = running.monitor.stats().held_by_store;
        assert!(held < 5, "{held}");
        running.stop().await;
    }
}

#[tokio::test]
async fn a_longer_timeout_of_the_role_is_shortened_and_a_shorter_one_stays() {
    let server = with_effects().await;
    for (of_role, expected) in [("0", "60s"), ("2min", "60s"), ("5s", "5s"), ("7ms", "7ms")] {
        let text = format!(
            "BEGIN; SET LOCAL statement_timeout = '{of_role}'; \
             SELECT hapax_limit_timeout('statement_timeout', 60000) IS NULL; \
             SELECT current_setting('statement_timeout'); COMMIT"
        );
        let found = server.sql("postgres", &text).await;
        let found = found.replace("1min", "60s");
        assert!(found.lines().any(|line| line == expected), "{of_role}: {found}");
    }
}

/// Rejects `m-bad`.
async fn reject_bad(message: MessageExecution) -> Result<(), MessageFailure> {
    match message.id().as_str() {
        "m-bad" => Err(MessageFailure::reject("no such customer")),
        _ => Ok(()),
    }
}

#[tokio::test]
async fn a_dead_letter_on_a_frozen_server_fails_in_time_and_its_message_is_parked_later() {
    let (server, broker) = (super::server().await, MemoryBroker::default());
    let limit = Duration::from_millis(300);
    let dead_letters =
        PgDeadLetterStore::new(&super::connections(&server)).statement_timeout(limit);
    let engine = Idempotency::builder(MemoryStore::default()).build().unwrap();
    let inbox = Inbox::builder("orders", engine).reexecute();
    let inbox = inbox.dead_letters(Arc::new(dead_letters.clone())).build().unwrap();
    let source = Arc::new(broker.clone());
    let consumer = Consumer::new(inbox, source, reject_bad, ConsumerLimits::default()).unwrap();
    let monitor = consumer.monitor();
    let (stop, stopped) = oneshot::channel::<()>();
    let task = tokio::spawn(consumer.run(async {
        let _ = stopped.await;
    }));
    // The pool has a connection, on which the first statement gets no answer; the next calls get none.
    dead_letters.remove(&[1; 32]).await.unwrap();
    server.pause();
    for _ in 0..2 {
        let call = dead_letters.remove(&[1; 32]);
        let ended = tokio::time::timeout(Duration::from_secs(60), call).await;
        let error = ended.expect("a call that ends").unwrap_err().to_string();
        assert!(error.contains("within 300ms, found none"), "{error}");
    }
    send(&broker, "m-bad");
    until("the message is held", async || monitor.stats().held_by_store > 0).await;
    assert_eq!((broker.acknowledgements(), monitor.stats().parked), (0, 0));
    // Others are handled meanwhile.
    send(&broker, "m-good");
    until("the other message is acknowledged", async || broker.acknowledgements() == 1).await;
    server.resume();
    broker.emptied().await;
    let found = "SELECT message_id, reason FROM hapax_dead_letters";
    assert_eq!(server.sql("postgres", found).await, "m-bad|rejected");
    assert_eq!(monitor.stats().parked, 1);
    stop.send(()).unwrap();
    assert!(task.await.unwrap());
}
