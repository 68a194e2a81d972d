//! The batch mode: ids and effects in one transaction.

use std::num::NonZeroU32;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::time::Duration;

use deadpool_postgres::Object;
use hapax_core::store::BoxFuture;
use hapax_core::{Fingerprint, Timestamp};
use hapax_messages::{
    Attempts, BatchConsumer, BatchItem, BatchMonitor, BatchOptions, DeadLetter, DeadLetterReason,
    DeadLetterStore as _, Message, MessageFailure, MessageId,
};
use hapax_postgres_data::Pooled;
use hapax_postgres_messages::{BatchHandler, PgDeadLetterStore, PgInbox};
use hapax_testkit::messages::MemoryBroker;
use hapax_testkit::servers::PostgresServer;
use tokio::sync::{Notify, oneshot};
use tokio::task::JoinHandle;

use super::{connections, server};

pub(super) type Connection = Pooled<Object>;

pub(super) struct Running {
    task: JoinHandle<bool>,
    pub(super) monitor: BatchMonitor,
    stop: oneshot::Sender<()>,
}

impl Running {
    /// Ends it as a crash does.
    pub(super) fn abort(self) {
        self.task.abort();
    }

    pub(super) async fn stop(self) {
        let _ = self.stop.send(());
        assert!(self.task.await.unwrap());
    }
}

/// Number of attempts of a message that fails.
const MAX: NonZeroU32 = NonZeroU32::MIN.saturating_add(4);

pub(super) fn run(
    server: &PostgresServer,
    broker: &MemoryBroker,
    handler: impl BatchHandler<Connection>,
) -> Running {
    run_with(server, broker, MAX, handler)
}

pub(super) fn run_with(
    server: &PostgresServer,
    broker: &MemoryBroker,
    max: NonZeroU32,
    handler: impl BatchHandler<Connection>,
) -> Running {
    let retention = Duration::from_secs(3600);
    let inbox = PgInbox::new("orders", connections(server), retention, handler);
    run_with_attempts(broker, inbox, max)
}

pub(super) fn run_inbox(broker: &MemoryBroker, inbox: PgInbox<Connection>) -> Running {
    run_with_attempts(broker, inbox, MAX)
}

fn run_with_attempts(
    broker: &MemoryBroker,
    inbox: PgInbox<Connection>,
    max: NonZeroU32,
) -> Running {
    let pause = Duration::from_millis(20);
    let attempts =
        Attempts { max, first_pause: pause, longest_pause: pause, ..Attempts::default() };
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
pub(super) async fn write_effects(
    connection: &Connection,
    messages: &[BatchItem],
) -> Result<(), MessageFailure> {
    for item in messages {
        let id = item.id().as_str();
        connection.execute("INSERT INTO effects (message) VALUES ($1)", &[&id]).await?;
    }
    Ok(())
}

pub(super) fn write<'a>(
    connection: &'a mut Connection,
    messages: &'a [BatchItem],
) -> BoxFuture<'a, Result<(), MessageFailure>> {
    Box::pin(write_effects(connection, messages))
}

pub(super) async fn with_effects() -> PostgresServer {
    let server = server().await;
    server.sql("postgres", "CREATE TABLE effects (message text NOT NULL)").await;
    server
}

pub(super) async fn summary(server: &PostgresServer) -> String {
    let text = "SELECT count(*), count(DISTINCT message) FROM effects";
    server.sql("postgres", text).await
}

/// Waits until `holds` is true.
pub(super) async fn until(what: &str, holds: impl AsyncFn() -> bool) {
    let waiting = async {
        while !holds().await {
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    };
    tokio::time::timeout(Duration::from_secs(60), waiting).await.expect(what);
}

fn rejecting<'a>(
    _: &'a mut Connection,
    _: &'a [BatchItem],
) -> BoxFuture<'a, Result<(), MessageFailure>> {
    Box::pin(std::future::ready(Err(MessageFailure::reject("no such customer"))))
}

/// Returns a copy of a message that is redriven from the dead letter `hex`.
fn redriven(id: &str, hex: String) -> Message {
    Message::new("memory://orders", format!("payload of {id}"))
        .with_header("message-id", id.to_owned())
        .with_header("hapax-redrive", hex)
}

/// Ends the connections of a process, as its death does.
async fn end_connections(server: &PostgresServer) {
    let kill = "SELECT count(pg_terminate_backend(pid)) FROM pg_stat_activity \
                WHERE backend_type = 'client backend' AND pid <> pg_backend_pid()";
    server.sql("postgres", kill).await;
}

pub(super) const DEAD_LETTER: &str = "SELECT encode(id, 'hex') FROM hapax_dead_letters";

async fn begin_redrive(server: &PostgresServer) {
    let begin = "SELECT hapax_dead_letter_redrive(id, 'ann', 'fixed') FROM hapax_dead_letters";
    server.sql("postgres", begin).await;
}

pub(super) fn send(broker: &MemoryBroker, id: &str) {
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

/// Enters a message of the broker as a program in SQL does. Returns its state.
async fn enter(server: &PostgresServer, id: &str, payload: &str) -> String {
    let mut fingerprint = Fingerprint::builder("hapax 1 message");
    let fingerprint = fingerprint.field(payload.as_bytes()).finish();
    let hex: String = fingerprint.as_bytes().iter().map(|byte| format!("{byte:02x}")).collect();
    let arguments = format!("'orders', ARRAY['{id}'], ARRAY['\\x{hex}']::bytea[]");
    server.sql("postgres", &format!("SELECT state FROM hapax_inbox({arguments})")).await
}

#[tokio::test]
async fn a_consumer_and_a_program_in_sql_know_the_same_messages() {
    let (server, broker) = (with_effects().await, MemoryBroker::default());
    assert_eq!(enter(&server, "of-sql ü", "payload of of-sql ü").await, "new");
    for id in ["m-1", "ü 漢字", "of-sql ü"] {
        send(&broker, id);
    }
    let running = run(&server, &broker, write);
    broker.emptied().await;
    assert_eq!(running.monitor.stats().duplicates, 1);
    for id in ["m-1", "ü 漢字"] {
        assert_eq!(enter(&server, id, &format!("payload of {id}")).await, "duplicate", "{id}");
        assert_eq!(enter(&server, id, "another").await, "mismatch", "{id}");
    }
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
            write_effects(connection, messages).await?;
            match messages.iter().any(|item| item.id().as_str() == "m-42") {
                true => Err(MessageFailure::retry("the 42nd")),
                false => Ok(()),
            }
        })
    }
    let running = run(&server, &broker, poisoned);
    broker.emptied().await;
    assert_eq!(summary(&server).await, "99|99");
    let dead_letter = "SELECT message_id, reason, attempts, error, origin FROM hapax_dead_letters";
    assert_eq!(
        server.sql("postgres", dead_letter).await,
        "m-42|attempts|5|the 42nd|memory://orders"
    );
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
    let max = Attempts::default().max;
    for _ in 0..5 {
        let running = run_with(&server, &broker, max, stuck(&begun));
        begun.notified().await;
        running.task.abort();
        let _ = running.task.await;
        end_connections(&server).await;
        broker.redeliver();
    }
    let running = run_with(&server, &broker, max, stuck(&begun));
    broker.emptied().await;
    assert_eq!(summary(&server).await, "99|99");
    let dead_letter = "SELECT message_id, reason, attempts FROM hapax_dead_letters";
    assert_eq!(server.sql("postgres", dead_letter).await, "m-42|attempts|5");
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
            write_effects(connection, messages).await
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
    let held = async || running.monitor.stats().held_in_flight > 0 && broker.backlog() == 1;
    until("the message is held, and the other one is not", held).await;
    open.rollback().await.unwrap();
    broker.emptied().await;
    assert_eq!(summary(&server).await, "2|2");
    running.stop().await;
}

#[tokio::test]
async fn a_message_that_an_open_transaction_has_for_long_uses_no_attempt_and_is_not_parked() {
    for commits in [true, false] {
        let (server, broker) = (with_effects().await, MemoryBroker::default());
        let mut other = super::pool(&server).get().await.unwrap();
        let open = other.transaction().await.unwrap();
        let enter = "SELECT state FROM hapax_inbox('orders', ARRAY['m-1'])";
        open.query(enter, &[]).await.unwrap();
        send(&broker, "m-1");
        let running = run_with(&server, &broker, NonZeroU32::new(2).unwrap(), write);
        let held = async || running.monitor.stats().held_in_flight > 5;
        until("the message is held", held).await;
        match commits {
            true => open.commit().await.unwrap(),
            false => open.rollback().await.unwrap(),
        }
        broker.emptied().await;
        assert_eq!(summary(&server).await, if commits { "0|0" } else { "1|1" });
        assert_eq!(server.sql("postgres", "SELECT count(*) FROM hapax_dead_letters").await, "0");
        assert_eq!(running.monitor.stats().duplicates, u64::from(commits));
        running.stop().await;
    }
}

#[tokio::test]
async fn attempts_in_which_the_server_was_down_do_not_count() {
    let (server, broker) = (with_effects().await, MemoryBroker::default());
    let begun = Arc::new(Notify::new());
    send(&broker, "m-42");
    let running = run_with(&server, &broker, NonZeroU32::new(2).unwrap(), stuck(&begun));
    begun.notified().await;
    running.task.abort();
    let _ = running.task.await;
    end_connections(&server).await;
    broker.redeliver();
    // It is a suspect now, whose second attempt is its last one.
    let running = run_with(&server, &broker, NonZeroU32::new(2).unwrap(), Flaky::new(&begun));
    for _ in 0..2 {
        begun.notified().await;
        end_connections(&server).await;
    }
    begun.notified().await;
    broker.emptied().await;
    assert_eq!(summary(&server).await, "1|1");
    assert_eq!(server.sql("postgres", DEAD_LETTER).await, "");
    running.stop().await;
}

#[tokio::test]
async fn the_letter_of_a_redriven_message_that_is_parked_again_stays_when_it_is_delivered_again() {
    let (server, broker) = (with_effects().await, MemoryBroker::default());
    send(&broker, "m-1");
    let running = run(&server, &broker, rejecting);
    broker.emptied().await;
    begin_redrive(&server).await;
    broker.lose_acknowledgements(true);
    broker.send(redriven("m-1", server.sql("postgres", DEAD_LETTER).await));
    until("it is parked again, and a duplicate then", async || {
        let stats = running.monitor.stats();
        stats.parked == 2 && stats.duplicates > 0
    })
    .await;
    broker.lose_acknowledgements(false);
    broker.emptied().await;
    assert_eq!(server.sql("postgres", "SELECT count(*) FROM hapax_dead_letters").await, "1");
    running.stop().await;
    // Handled at last, it leaves no dead letter.
    begin_redrive(&server).await;
    let running = run(&server, &broker, write);
    broker.send(redriven("m-1", server.sql("postgres", DEAD_LETTER).await));
    broker.emptied().await;
    assert_eq!(summary(&server).await, "1|1");
    assert_eq!(server.sql("postgres", DEAD_LETTER).await, "");
    running.stop().await;
}

#[tokio::test]
async fn a_redriven_message_whose_original_is_handled_first_leaves_no_dead_letter() {
    let (server, broker) = (with_effects().await, MemoryBroker::default());
    send(&broker, "m-1");
    broker.lose_acknowledgements(true);
    let running = run(&server, &broker, rejecting);
    until("it is parked", async || running.monitor.stats().parked == 1).await;
    // The process ends before the acknowledgement.
    running.task.abort();
    let _ = running.task.await;
    broker.lose_acknowledgements(false);
    begin_redrive(&server).await;
    let copy = redriven("m-1", server.sql("postgres", DEAD_LETTER).await);
    broker.redeliver();
    let running = run(&server, &broker, write);
    broker.emptied().await;
    assert_eq!(summary(&server).await, "1|1");
    assert_ne!(server.sql("postgres", DEAD_LETTER).await, "", "the original names no dead letter");
    broker.send(copy);
    broker.emptied().await;
    assert_eq!(running.monitor.stats().duplicates, 1);
    assert_eq!(summary(&server).await, "1|1");
    assert_eq!(server.sql("postgres", DEAD_LETTER).await, "");
    running.stop().await;
}

#[tokio::test]
async fn the_redrive_of_a_letter_forgets_no_message_that_was_handled() {
    let (server, broker) = (with_effects().await, MemoryBroker::default());
    let running = run(&server, &broker, write);
    send(&broker, "m-1");
    broker.emptied().await;
    // A dead letter of the message, as a consumer of another mode leaves it that ends before its
    // removal.
    let id = MessageId::new("m-1").unwrap();
    let message = redriven("m-1", String::new());
    let (reason, at) = (DeadLetterReason::Rejected, Timestamp::from_micros(1));
    let dead_letter = DeadLetter::new("orders", Some(&id), message, reason, "no", at);
    let dead_letters = PgDeadLetterStore::new(&connections(&server));
    dead_letters.park(&dead_letter).await.unwrap();
    begin_redrive(&server).await;
    broker.send(redriven("m-1", dead_letter.id_hex()));
    broker.emptied().await;
    assert_eq!(summary(&server).await, "1|1");
    assert_eq!(server.sql("postgres", DEAD_LETTER).await, "");
    // The dead letter of another message under its id.
    broker.send(Message::new("memory://orders", "other").with_header("message-id", "m-1"));
    broker.emptied().await;
    let begin = "SELECT hapax_dead_letter_redrive(id, 'ann', 'fixed') FROM hapax_dead_letters";
    let error = server.try_sql("postgres", begin).await.unwrap_err();
    assert!(error.contains("found a mismatch"), "{error}");
    send(&broker, "m-1");
    broker.emptied().await;
    assert_eq!(summary(&server).await, "1|1");
    running.stop().await;
}

#[tokio::test]
async fn a_message_for_which_commit_is_rejected_is_parked_and_no_other_one() {
    let (server, broker) = (with_effects().await, MemoryBroker::default());
    let constraint = "ALTER TABLE effects ADD UNIQUE (message) DEFERRABLE INITIALLY DEFERRED;
        INSERT INTO effects VALUES ('m-42')";
    server.sql("postgres", constraint).await;
    for number in 0..100 {
        send(&broker, &format!("m-{number}"));
    }
    let running = run(&server, &broker, write);
    let emptied = tokio::time::timeout(Duration::from_secs(60), broker.emptied()).await;
    emptied.expect("the batch is halved");
    assert_eq!(summary(&server).await, "100|100");
    let dead_letter = "SELECT message_id, reason, attempts, error FROM hapax_dead_letters";
    let dead_letter = server.sql("postgres", dead_letter).await;
    assert!(
        dead_letter.starts_with("m-42|attempts|5|") && dead_letter.contains("unique"),
        "{dead_letter}"
    );
    running.stop().await;
}

#[tokio::test]
async fn one_attempt_is_not_enough() {
    let (server, broker) = (server().await, MemoryBroker::default());
    let inbox = PgInbox::new("orders", connections(&server), Duration::from_secs(3600), write);
    let attempts = Attempts { max: NonZeroU32::MIN, ..Attempts::default() };
    let options = BatchOptions { attempts, ..BatchOptions::default() };
    let error = BatchConsumer::new(Arc::new(inbox), Arc::new(broker), options).unwrap_err();
    assert!(error.to_string().contains("at least 2 attempts"), "{error}");
}

fn stuck(begun: &Arc<Notify>) -> Poison {
    Poison { begun: Arc::clone(begun) }
}

/// Waits for the end of its connection in the first two runs.
struct Flaky {
    begun: Arc<Notify>,
    runs: AtomicU32,
}

impl Flaky {
    fn new(begun: &Arc<Notify>) -> Self {
        Self { begun: Arc::clone(begun), runs: AtomicU32::new(0) }
    }
}

impl BatchHandler<Connection> for Flaky {
    fn handle<'a>(
        &'a self,
        connection: &'a mut Connection,
        messages: &'a [BatchItem],
    ) -> BoxFuture<'a, Result<(), MessageFailure>> {
        Box::pin(async move {
            self.begun.notify_one();
            if self.runs.fetch_add(1, Ordering::SeqCst) < 2 {
                // The handler ignores the error: its transaction is lost.
                let _ = connection.execute("SELECT pg_sleep(60)", &[]).await;
                return Ok(());
            }
            write_effects(connection, messages).await
        })
    }
}

#[tokio::test]
async fn messages_without_id_with_a_mismatch_or_too_old_are_parked() {
    let (server, broker) = (with_effects().await, MemoryBroker::default());
    let running = run(&server, &broker, write);
    broker.send(Message::new("memory://orders", "no id"));
    send(&broker, "m-1");
    broker.emptied().await;
    broker.send(Message::new("memory://orders", "other").with_header("message-id", "m-1"));
    let old = Message::new("memory://orders", "old").with_header("message-id", "old");
    broker.send(old.published_at(Timestamp::from_micros(1)));
    send(&broker, "m-2");
    broker.emptied().await;
    assert_eq!(summary(&server).await, "2|2");
    let dead_letters = "SELECT message_id, reason FROM hapax_dead_letters ORDER BY reason";
    assert_eq!(server.sql("postgres", dead_letters).await, "m-1|mismatch\n|no-id\nold|too-old");
    running.stop().await;
}

#[tokio::test]
async fn messages_with_zero_bytes_are_parked_and_others_are_handled() {
    let (server, broker) = (with_effects().await, MemoryBroker::default());
    let running = run(&server, &broker, write);
    broker.send(Message::new("memory://\0", "id").with_header("message-id", "m\0"));
    let old = Message::new("memory://orders", "old").with_header("message-id", "old");
    let old = old.with_header("x\0", "1").published_at(Timestamp::from_micros(1));
    broker.send(old);
    send(&broker, "m-1");
    broker.emptied().await;
    assert_eq!(summary(&server).await, "1|1");
    let dead_letters = "SELECT message_id, reason FROM hapax_dead_letters ORDER BY reason";
    assert_eq!(server.sql("postgres", dead_letters).await, "|no-id\nold|too-old");
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
    until("messages are held", async || running.monitor.stats().held_by_store > 0).await;
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
            write_effects(connection, messages).await?;
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
    until("the handler runs", async || RUNS.load(Ordering::SeqCst) >= 3).await;
    FAILS.store(false, Ordering::SeqCst);
    broker.emptied().await;
    assert_eq!(summary(&server).await, "1|1");
    running.stop().await;
}
