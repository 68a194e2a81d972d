//! Relays of a real outbox: no message is skipped, and those with one order key stay in order.

use std::collections::{BTreeMap, HashMap};
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use hapax_core::store::BoxFuture;
use hapax_core::{Idempotency, MemoryStore};
use hapax_messages::{
    MessageId, MessageSink, Outbox, OutboxFuture, OutboxLag, OutboxMessage, OutboxPage,
    OutboxPosition, OutboxQuery, OutboxWriters, OutgoingMessage, PublishError, Relay, RelayLimits,
    RelayMonitor,
};
use hapax_postgres_messages::{PgOutbox, put_messages};
use hapax_testkit::servers::PostgresServer;
use tokio::sync::{Notify, oneshot};
use tokio::task::JoinHandle;

use super::{connections, server};

/// A sink in memory that records the messages that it accepted, in their order.
#[derive(Debug, Default)]
pub(super) struct Collected {
    accepted: Mutex<Vec<(String, Option<String>)>>,
    changed: Notify,
    fails: AtomicBool,
    rejects: Mutex<Vec<String>>,
    attempts: AtomicU32,
}

impl Collected {
    /// Returns the ids in the order in which each was accepted first, by order key.
    fn first_by_key(&self) -> HashMap<String, Vec<String>> {
        let mut seen = BTreeMap::new();
        let mut by_key: HashMap<String, Vec<String>> = HashMap::new();
        for (id, key) in self.accepted.lock().unwrap().iter() {
            if seen.insert(id.clone(), ()).is_none() {
                by_key.entry(key.clone().unwrap_or_default()).or_default().push(id.clone());
            }
        }
        by_key
    }

    pub(super) fn distinct(&self) -> usize {
        self.first_by_key().values().map(Vec::len).sum()
    }

    pub(super) async fn reached(&self, distinct: usize) {
        loop {
            let changed = self.changed.notified();
            if self.distinct() >= distinct {
                return;
            }
            changed.await;
        }
    }
}

impl MessageSink for Collected {
    fn publish<'a>(
        &'a self,
        message: &'a OutgoingMessage,
    ) -> BoxFuture<'a, Result<(), PublishError>> {
        Box::pin(async move {
            self.attempts.fetch_add(1, Ordering::SeqCst);
            if self.fails.load(Ordering::SeqCst) {
                return Err(PublishError::NotAcknowledged {
                    source: "the sink is down".into(),
                    retry_after: Some(Duration::from_secs(60 * 60)),
                });
            }
            if self.rejects.lock().unwrap().contains(&message.id.to_string()) {
                return Err(PublishError::rejected("the sink rejects it"));
            }
            let accepted = (message.id.to_string(), message.key.clone());
            self.accepted.lock().unwrap().push(accepted);
            self.changed.notify_waiters();
            Ok(())
        })
    }
}

pub(super) struct Running {
    task: JoinHandle<()>,
    monitor: RelayMonitor,
    stop: oneshot::Sender<()>,
}

impl Running {
    pub(super) async fn stop(self) {
        let _ = self.stop.send(());
        self.task.await.unwrap();
    }
}

pub(super) fn relay(
    server: &PostgresServer,
    leases: &Arc<MemoryStore>,
    sink: &Arc<Collected>,
) -> Running {
    relay_of(Arc::new(PgOutbox::new(&connections(server))), leases, sink)
}

pub(super) fn relay_of(
    outbox: Arc<dyn Outbox>,
    leases: &Arc<MemoryStore>,
    sink: &Arc<Collected>,
) -> Running {
    let engine = Idempotency::builder(Arc::clone(leases)).build().unwrap();
    let limits = RelayLimits {
        lease: Duration::from_secs(2),
        // The sink wants an hour.
        longest_retry_after: Duration::from_millis(200),
        ..RelayLimits::default()
    };
    let relay = Relay::new("orders", outbox, Arc::clone(sink) as _, engine, limits).unwrap();
    let monitor = relay.monitor();
    let (stop, stopped) = oneshot::channel();
    let task = tokio::spawn(relay.run(async {
        let _ = stopped.await;
    }));
    Running { task, monitor, stop }
}

pub(super) fn message(id: &str, key: Option<&str>) -> OutgoingMessage {
    let mut message =
        OutgoingMessage::new("orders", MessageId::new(id).unwrap(), format!("payload of {id}"));
    message.key = key.map(str::to_owned);
    message
}

async fn put(server: &PostgresServer, messages: &[OutgoingMessage]) {
    let mut connection = super::pool(server).get().await.unwrap();
    let transaction = connection.transaction().await.unwrap();
    put_messages(&mut &*transaction, None, messages).await.unwrap();
    transaction.commit().await.unwrap();
}

#[tokio::test]
async fn a_row_whose_headers_cannot_be_read_becomes_a_dead_letter_and_stops_no_other_key() {
    let server = server().await;
    let (leases, sink) = (Arc::new(MemoryStore::default()), Arc::new(Collected::default()));
    // Written into the table, which checks nothing.
    let nested = format!("{}\"x\"{}", "[".repeat(200), "]".repeat(200));
    for (id, headers) in [(1, r#"{"a": 1e400}"#.to_owned()), (2, format!("{{\"a\": {nested}}}"))] {
        let row = format!(
            "INSERT INTO hapax_outbox (shard, id, message_id, destination, order_key, headers, payload)
             VALUES (hapax_outbox_shard('k-{id}'), {id}, 'bad-{id}', 'orders', 'k-{id}', '{headers}', 'x')"
        );
        server.sql("postgres", &row).await;
    }
    server.sql("postgres", "SELECT setval('hapax_outbox_ids', 2)").await;
    put(&server, &[message("behind", Some("k-1")), message("other", Some("k-3"))]).await;
    let relay = relay(&server, &leases, &sink);
    until(|| relay.monitor.stats().parked == 2).await;
    sink.reached(1).await;
    let dead_letters = "SELECT string_agg(message_id || ' ' || reason, ' ' ORDER BY message_id),
        bool_and(error LIKE 'headers: expected an object of texts%') FROM hapax_dead_letters";
    assert_eq!(
        server.sql("postgres", dead_letters).await,
        "bad-1 unpublishable bad-2 unpublishable|t"
    );
    let behind = "SELECT message_id FROM hapax_outbox WHERE order_key = 'k-1'";
    assert_eq!(server.sql("postgres", behind).await, "behind");
    assert_eq!(sink.first_by_key()["k-3"], ["other"]);
    server.sql("postgres", "SELECT hapax_outbox_redrive(id) FROM hapax_dead_letters").await;
    sink.reached(4).await;
    assert_eq!(sink.first_by_key()["k-1"], ["bad-1", "behind"]);
    relay.stop().await;
}

#[tokio::test]
async fn messages_are_published_in_the_order_of_their_keys_and_deleted() {
    let server = server().await;
    let (leases, sink) = (Arc::new(MemoryStore::default()), Arc::new(Collected::default()));
    for batch in 0..20 {
        let messages: Vec<_> = (0..50)
            .map(|number| {
                let key = ["a", "b", "c"][number % 3];
                message(&format!("{batch:02}-{number:02}"), (number % 10 != 0).then_some(key))
            })
            .collect();
        put(&server, &messages).await;
    }
    let running = relay(&server, &leases, &sink);
    sink.reached(1000).await;
    let monitor = running.monitor.clone();
    running.stop().await;
    for (key, ids) in sink.first_by_key() {
        assert!(key.is_empty() || ids.is_sorted(), "{key}: {ids:?}");
    }
    assert_eq!(monitor.stats().published, 1000);
    assert_eq!(server.sql("postgres", "SELECT count(*) FROM hapax_outbox").await, "0");
}

#[tokio::test]
async fn no_message_is_lost_or_reordered_while_the_sink_is_down() {
    let server = server().await;
    let (leases, sink) = (Arc::new(MemoryStore::default()), Arc::new(Collected::default()));
    sink.fails.store(true, Ordering::SeqCst);
    let running = relay(&server, &leases, &sink);
    let messages: Vec<_> =
        (0..20).map(|number| message(&format!("m-{number:02}"), Some("k"))).collect();
    put(&server, &messages).await;
    while sink.attempts.load(Ordering::SeqCst) < 3 {
        tokio::task::yield_now().await;
    }
    assert_eq!(server.sql("postgres", "SELECT count(*) FROM hapax_outbox").await, "20");
    sink.fails.store(false, Ordering::SeqCst);
    sink.reached(20).await;
    running.stop().await;
    assert!(sink.first_by_key()["k"].is_sorted());
}

#[tokio::test]
async fn a_message_that_the_sink_rejects_parks_its_key_until_it_is_redriven() {
    let server = server().await;
    let (leases, sink) = (Arc::new(MemoryStore::default()), Arc::new(Collected::default()));
    sink.rejects.lock().unwrap().push("a-1".to_owned());
    let running = relay(&server, &leases, &sink);
    let messages = [("a-0", "a"), ("a-1", "a"), ("a-2", "a"), ("b-1", "b"), ("b-2", "b")];
    put(&server, &messages.map(|(id, key)| message(id, Some(key)))).await;
    sink.reached(3).await;
    // A later message of the other key passes, and none of the parked key does.
    put(&server, &[message("a-3", Some("a")), message("b-3", Some("b"))]).await;
    sink.reached(4).await;
    let dead_letter = "SELECT message_id, reason, error, origin FROM hapax_dead_letters";
    let expected = "a-1|unpublishable|the sink rejects it|orders";
    assert_eq!(server.sql("postgres", dead_letter).await, expected);
    assert_eq!(sink.first_by_key()["a"], ["a-0"]);
    sink.rejects.lock().unwrap().clear();
    let redrive = "SELECT hapax_outbox_redrive(id) FROM hapax_dead_letters";
    assert_eq!(server.sql("postgres", redrive).await, "t");
    sink.reached(7).await;
    running.stop().await;
    assert_eq!(sink.first_by_key()["a"], ["a-0", "a-1", "a-2", "a-3"]);
}

/// An outbox that counts the steps of the floors.
#[derive(Debug)]
struct Observed {
    right: PgOutbox,
    /// The largest floor of the last poll.
    floor: AtomicU64,
    steps: AtomicU32,
    /// A wrong design: open writers do not keep the floors down.
    ignores_writers: bool,
}

impl Outbox for Observed {
    fn poll<'a>(&'a self, query: OutboxQuery<'a>) -> OutboxFuture<'a, OutboxPage> {
        let floor = query.shards.iter().map(|position| position.id).max().unwrap_or_default();
        self.floor.store(floor, Ordering::SeqCst);
        self.right.poll(query)
    }

    fn remove<'a>(&'a self, positions: &'a [OutboxPosition]) -> OutboxFuture<'a, ()> {
        self.right.remove(positions)
    }

    fn park<'a>(
        &'a self,
        message: &'a OutboxMessage,
        error: &'a str,
        attempts: u32,
    ) -> OutboxFuture<'a, ()> {
        self.right.park(message, error, attempts)
    }

    fn writers(&self) -> OutboxFuture<'_, OutboxWriters> {
        Box::pin(async move {
            let mut writers = self.right.writers().await?;
            if self.ignores_writers {
                writers.open.clear();
            }
            self.steps.fetch_add(1, Ordering::SeqCst);
            Ok(writers)
        })
    }

    fn first_above<'a>(
        &'a self,
        shards: &'a [OutboxPosition],
    ) -> OutboxFuture<'a, Vec<OutboxPosition>> {
        self.right.first_above(shards)
    }

    fn lag(&self) -> OutboxFuture<'_, OutboxLag> {
        self.right.lag()
    }
}

async fn until(mut is_so: impl FnMut() -> bool) {
    while !is_so() {
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
}

/// Commits a message after the floors have taken several steps. Returns whether it is published
/// before the next sweep.
async fn late_message_arrives(ignores_writers: bool) -> bool {
    let server = server().await;
    let (leases, sink) = (Arc::new(MemoryStore::default()), Arc::new(Collected::default()));
    let outbox = Arc::new(Observed {
        right: PgOutbox::new(&connections(&server)),
        floor: AtomicU64::default(),
        steps: AtomicU32::default(),
        ignores_writers,
    });
    let running = relay_of(Arc::clone(&outbox) as _, &leases, &sink);
    put(&server, &[message("early", Some("k"))]).await;
    sink.reached(1).await;
    until(|| outbox.floor.load(Ordering::SeqCst) > 0).await;
    let pool = super::pool(&server);
    let mut late = pool.get().await.unwrap();
    let late = late.transaction().await.unwrap();
    put_messages(&mut &*late, None, &[message("late", Some("k"))]).await.unwrap();
    let steps = outbox.steps.load(Ordering::SeqCst);
    for number in 0..5 {
        put(&server, &[message(&format!("m-{number}"), None)]).await;
        sink.reached(number + 2).await;
        until(|| outbox.steps.load(Ordering::SeqCst) > steps + number as u32).await;
    }
    late.commit().await.unwrap();
    let arrived = tokio::time::timeout(Duration::from_secs(20), sink.reached(7)).await.is_ok();
    running.stop().await;
    arrived
}

#[tokio::test]
async fn a_message_that_commits_after_the_floors_rose_is_published_too() {
    assert!(late_message_arrives(false).await);
}

#[tokio::test]
async fn finds_floors_that_rise_above_the_ids_of_open_writers() {
    assert!(!late_message_arrives(true).await, "the message is hidden until the next sweep");
}

#[tokio::test]
async fn the_shards_of_a_relay_that_ends_pass_to_another_one() {
    let server = server().await;
    let (leases, sink) = (Arc::new(MemoryStore::default()), Arc::new(Collected::default()));
    let first = relay(&server, &leases, &sink);
    put(&server, &[message("m-1", Some("k"))]).await;
    sink.reached(1).await;
    let second = relay(&server, &leases, &sink);
    first.task.abort();
    put(&server, &[message("m-2", Some("k"))]).await;
    sink.reached(2).await;
    assert!(second.monitor.stats().shards > 0);
    let third = relay(&server, &leases, &sink);
    second.stop().await;
    put(&server, &[message("m-3", Some("k"))]).await;
    sink.reached(3).await;
    third.stop().await;
    assert_eq!(sink.first_by_key()["k"], ["m-1", "m-2", "m-3"]);
}
