//! The direct mode: ids and effects in one transaction.

use std::io;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use deadpool_postgres::Object;
use hapax_core::store::BoxFuture;
use hapax_messages::{
    Attempts, BatchConsumer, BatchItem, BatchMonitor, BatchOptions, Message, MessageFailure,
};
use hapax_postgres_data::Pooled;
use hapax_postgres_messages::{BatchHandler, PgInbox};
use hapax_testkit::messages::MemoryBroker;
use hapax_testkit::servers::PostgresServer;
use tokio::sync::{Notify, oneshot};
use tokio::task::JoinHandle;

use super::{connections, server};

type Connection = Pooled<Object>;

struct Running {
    task: JoinHandle<bool>,
    monitor: BatchMonitor,
    stop: oneshot::Sender<()>,
}

impl Running {
    async fn stop(self) {
        let _ = self.stop.send(());
        assert!(self.task.await.unwrap());
    }
}

fn run(
    server: &PostgresServer,
    broker: &MemoryBroker,
    handler: impl BatchHandler<Connection>,
) -> Running {
    let retention = Duration::from_secs(3600);
    let inbox = PgInbox::new("orders", connections(server), retention, handler);
    let pause = Duration::from_millis(20);
    let attempts = Attempts { first_pause: pause, longest_pause: pause, ..Attempts::default() };
    let options = BatchOptions { attempts, ..BatchOptions::default() };
    let source = Arc::new(broker.clone());
    let consumer = BatchConsumer::new(Arc::new(inbox), source, options).unwrap();
    let monitor = consumer.monitor();
    let (stop, stopped) = oneshot::channel();
    let task = tokio::spawn(consumer.run(async {
        let _ = stopped.await;
    }));
    Running { task, monitor, stop }
}

/// Writes an effect for each message.
async fn effects(connection: &Connection, messages: &[BatchItem]) -> Result<(), MessageFailure> {
    for item in messages {
        let id = item.id().as_str();
        connection.execute("INSERT INTO effects (message) VALUES ($1)", &[&id]).await?;
    }
    Ok(())
}

fn write<'a>(
    connection: &'a mut Connection,
    messages: &'a [BatchItem],
) -> BoxFuture<'a, Result<(), MessageFailure>> {
    Box::pin(effects(connection, messages))
}

async fn with_effects() -> PostgresServer {
    let server = server().await;
    server.sql("postgres", "CREATE TABLE effects (message text NOT NULL)").await;
    server
}

async fn summary(server: &PostgresServer) -> String {
    let text = "SELECT count(*), count(DISTINCT message) FROM effects";
    server.sql("postgres", text).await
}

fn send(broker: &MemoryBroker, id: &str) {
    let message = Message::new("memory://orders", format!("payload of {id}"));
    broker.send(message.with_header("message-id", id.to_owned()));
}

#[tokio::test]
async fn each_message_has_one_effect_and_every_duplicate_is_acknowledged() {
    let (server, broker) = (with_effects().await, MemoryBroker::default());
    for number in 0..3_000 {
        send(&broker, &format!("m-{}", number % 2_000));
    }
    let running = run(&server, &broker, write);
    broker.emptied().await;
    assert_eq!(summary(&server).await, "2000|2000");
    let stats = running.monitor.stats();
    assert_eq!((stats.handled, stats.duplicates, stats.parked), (2_000, 1_000, 0));
    assert_eq!(server.sql("postgres", "SELECT count(*) FROM hapax_attempts").await, "0");
    running.stop().await;
}

#[tokio::test]
async fn a_message_that_fails_is_found_in_its_batch_and_parked_alone() {
    let (server, broker) = (with_effects().await, MemoryBroker::default());
    for number in 0..100 {
        send(&broker, &format!("m-{number}"));
    }
    fn poisoned<'a>(
        connection: &'a mut Connection,
        messages: &'a [BatchItem],
    ) -> BoxFuture<'a, Result<(), MessageFailure>> {
        Box::pin(async move {
            effects(connection, messages).await?;
            match messages.iter().any(|item| item.id().as_str() == "m-42") {
                true => Err(MessageFailure::retry("the 42nd")),
                false => Ok(()),
            }
        })
    }
    let running = run(&server, &broker, poisoned);
    broker.emptied().await;
    assert_eq!(summary(&server).await, "99|99");
    let letter = "SELECT message_id, reason, attempts, error, origin FROM hapax_dead_letters";
    assert_eq!(server.sql("postgres", letter).await, "m-42|attempts|5|the 42nd|memory://orders");
    // Its duplicate is acknowledged.
    send(&broker, "m-42");
    broker.emptied().await;
    assert_eq!(running.monitor.stats().duplicates, 1);
    assert_eq!(server.sql("postgres", "SELECT count(*) FROM hapax_attempts").await, "0");
    running.stop().await;
}

#[tokio::test]
async fn a_message_that_kills_its_process_is_parked_and_the_rest_of_its_batch_is_not() {
    let (server, broker) = (with_effects().await, MemoryBroker::default());
    for number in 0..100 {
        send(&broker, &format!("m-{number}"));
    }
    let begun = Arc::new(Notify::new());
    let handler = |begun: &Arc<Notify>| {
        let begun = Arc::clone(begun);
        Poison { begun }
    };
    for _ in 0..5 {
        let running = run(&server, &broker, handler(&begun));
        begun.notified().await;
        running.task.abort();
        let _ = running.task.await;
        // Its connections end with a process.
        let kill = "SELECT count(pg_terminate_backend(pid)) FROM pg_stat_activity \
                    WHERE backend_type = 'client backend' AND pid <> pg_backend_pid()";
        server.sql("postgres", kill).await;
        broker.redeliver();
    }
    let running = run(&server, &broker, handler(&begun));
    broker.emptied().await;
    assert_eq!(summary(&server).await, "99|99");
    let letter = "SELECT message_id, reason, attempts FROM hapax_dead_letters";
    assert_eq!(server.sql("postgres", letter).await, "m-42|attempts|5");
    running.stop().await;
}

struct Poison {
    begun: Arc<Notify>,
}

impl BatchHandler<Connection> for Poison {
    fn handle<'a>(
        &'a self,
        connection: &'a mut Connection,
        messages: &'a [BatchItem],
    ) -> BoxFuture<'a, Result<(), MessageFailure>> {
        Box::pin(async move {
            if messages.iter().any(|item| item.id().as_str() == "m-42") {
                self.begun.notify_one();
                std::future::pending::<()>().await;
            }
            effects(connection, messages).await
        })
    }
}

#[tokio::test]
async fn a_duplicate_of_an_open_transaction_is_held_and_handled_if_that_fails() {
    let (server, broker) = (with_effects().await, MemoryBroker::default());
    let mut other = super::pool(&server).get().await.unwrap();
    let open = other.transaction().await.unwrap();
    let enter = "SELECT state FROM hapax_inbox('orders', ARRAY['m-1'])";
    open.query(enter, &[]).await.unwrap();
    send(&broker, "m-1");
    send(&broker, "m-2");
    let running = run(&server, &broker, write);
    // The other message is not held.
    while running.monitor.stats().held_in_flight == 0 || broker.backlog() > 1 {
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    open.rollback().await.unwrap();
    broker.emptied().await;
    assert_eq!(summary(&server).await, "2|2");
    running.stop().await;
}

#[tokio::test]
async fn messages_without_id_in_conflict_or_too_old_are_parked() {
    let (server, broker) = (with_effects().await, MemoryBroker::default());
    let running = run(&server, &broker, write);
    broker.send(Message::new("memory://orders", "no id"));
    send(&broker, "m-1");
    broker.emptied().await;
    broker.send(Message::new("memory://orders", "other").with_header("message-id", "m-1"));
    let old = Message::new("memory://orders", "old").with_header("message-id", "old");
    broker.send(old.published_at(hapax_core::Timestamp::from_micros(1)));
    send(&broker, "m-2");
    broker.emptied().await;
    assert_eq!(summary(&server).await, "2|2");
    let letters = "SELECT message_id, reason FROM hapax_dead_letters ORDER BY reason";
    assert_eq!(server.sql("postgres", letters).await, "m-1|conflict\n|no-id\nold|too-old");
    running.stop().await;
}

#[tokio::test]
async fn zero_bytes_which_the_server_does_not_store_stop_no_consumer() {
    let (server, broker) = (with_effects().await, MemoryBroker::default());
    let running = run(&server, &broker, write);
    broker.send(Message::new("memory://\0", "id").with_header("message-id", "m\0"));
    let old = Message::new("memory://orders", "old").with_header("message-id", "old");
    let old = old.with_header("x\0", "1").published_at(hapax_core::Timestamp::from_micros(1));
    broker.send(old);
    send(&broker, "m-1");
    broker.emptied().await;
    assert_eq!(summary(&server).await, "1|1");
    let letters = "SELECT message_id, reason FROM hapax_dead_letters ORDER BY reason";
    assert_eq!(server.sql("postgres", letters).await, "|no-id\nold|too-old");
    running.stop().await;
    assert_eq!(MessageFailure::reject("a\0b").text(), "a\u{fffd}b");
}

#[tokio::test]
async fn while_the_server_is_down_messages_are_held() {
    let (mut server, broker) = (with_effects().await, MemoryBroker::default());
    let running = run(&server, &broker, write);
    send(&broker, "m-0");
    broker.emptied().await;
    server.kill().await;
    for number in 1..500 {
        send(&broker, &format!("m-{number}"));
    }
    while running.monitor.stats().held_by_store == 0 {
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    server.restart().await;
    broker.emptied().await;
    assert_eq!(summary(&server).await, "500|500");
    assert_eq!(running.monitor.stats().parked, 0);
    running.stop().await;
}

#[tokio::test]
async fn a_handler_that_ignores_an_error_or_ends_the_transaction_loses_nothing() {
    static RUNS: AtomicU32 = AtomicU32::new(0);
    static FAILS: AtomicBool = AtomicBool::new(true);
    let (server, broker) = (with_effects().await, MemoryBroker::default());
    fn misbehaving<'a>(
        connection: &'a mut Connection,
        messages: &'a [BatchItem],
    ) -> BoxFuture<'a, Result<(), MessageFailure>> {
        Box::pin(async move {
            effects(connection, messages).await?;
            if FAILS.load(Ordering::SeqCst) {
                let wrong = if RUNS.fetch_add(1, Ordering::SeqCst).is_multiple_of(2) {
                    "SELECT 1 / 0"
                } else {
                    "ROLLBACK"
                };
                let _ = connection.batch_execute(wrong).await;
            }
            Ok(())
        })
    }
    send(&broker, "m-1");
    let running = run(&server, &broker, misbehaving);
    while RUNS.load(Ordering::SeqCst) < 3 {
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    FAILS.store(false, Ordering::SeqCst);
    broker.emptied().await;
    assert_eq!(summary(&server).await, "1|1");
    running.stop().await;
}

/// The log of this process.
#[derive(Clone, Default)]
struct Log(Arc<Mutex<Vec<u8>>>);

impl io::Write for Log {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0.lock().unwrap().write(bytes)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

#[tokio::test]
async fn a_consumer_logs_at_start_what_its_retention_takes() {
    let log = Log::default();
    let writer = log.clone();
    // For all threads: the interest of a thread without a subscriber would hide lines of this one.
    tracing_subscriber::fmt().with_ansi(false).with_writer(move || writer.clone()).init();
    let (server, broker) = (with_effects().await, MemoryBroker::default());
    send(&broker, "m-1");
    let running = run(&server, &broker, write);
    broker.emptied().await;
    running.stop().await;
    let text = String::from_utf8(log.0.lock().unwrap().clone()).unwrap();
    let line = "retention 1 hour: for each id/s this takes about 432 KB in the store (120 bytes per id) \
                consumer=\"orders\"";
    assert!(text.contains(line), "{text}");
}
