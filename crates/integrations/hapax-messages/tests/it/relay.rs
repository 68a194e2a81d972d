//! The relay, with an outbox and a sink in memory.

mod outbox;

use std::collections::BTreeSet;
use std::num::NonZeroUsize;
use std::sync::Arc;
use std::time::Duration;

use hapax_core::Idempotency;
use hapax_messages::{Relay, RelayLimits, RelayMonitor};
use hapax_testkit::faults::FaultyStore;
use tokio::sync::oneshot;
use tokio::task::JoinHandle;
use tokio::time::{Instant, sleep, timeout};

use self::outbox::{Behavior, Fault, MemoryOutbox, MemorySink};
use super::quarantine;
use super::world::{HOUR, Log, World};

struct Running {
    outbox: Arc<MemoryOutbox>,
    sink: Arc<MemorySink>,
    world: World,
}

struct Process {
    task: JoinHandle<()>,
    monitor: RelayMonitor,
    stop: oneshot::Sender<()>,
}

impl Running {
    fn new() -> Self {
        Self { outbox: Arc::default(), sink: Arc::default(), world: World::new() }
    }

    fn relay(&self, limits: RelayLimits) -> Process {
        let engine = Idempotency::builder(Arc::clone(&self.world.memory)).build().unwrap();
        self.relay_with(engine, limits)
    }

    fn relay_with(&self, engine: Idempotency, limits: RelayLimits) -> Process {
        let (outbox, sink) = (Arc::clone(&self.outbox), Arc::clone(&self.sink));
        let relay = Relay::new("orders", outbox, sink, engine, limits).unwrap();
        let monitor = relay.monitor();
        let (stop, stopped) = oneshot::channel();
        let running = relay.run(async {
            let _ = stopped.await;
        });
        Process { task: tokio::spawn(bounded(running)), monitor, stop }
    }

    async fn emptied(&self) {
        let emptied = async {
            while !self.outbox.left().is_empty() {
                sleep(Duration::from_millis(10)).await;
            }
        };
        let left = || format!("messages are left: {:?}", self.outbox.left());
        timeout(HOUR, emptied).await.unwrap_or_else(|_| panic!("{}", left()));
    }
}

impl Process {
    async fn stop(self) {
        let _ = self.stop.send(());
        self.task.await.unwrap();
    }
}

/// Panics if the relay turns without end: paused time would not pass.
async fn bounded(running: impl Future<Output = ()>) {
    let mut running = std::pin::pin!(running);
    let (mut polls, mut since) = (0, Instant::now());
    std::future::poll_fn(|context| {
        if since.elapsed() > Duration::from_secs(1) {
            (polls, since) = (0, Instant::now());
        }
        polls += 1;
        assert!(polls < 5_000, "the relay turns without a pause");
        running.as_mut().poll(context)
    })
    .await;
}

fn count(number: usize) -> NonZeroUsize {
    NonZeroUsize::new(number).unwrap()
}

fn ids(prefix: &str, count: usize) -> Vec<String> {
    (0..count).map(|number| format!("{prefix}-{number:03}")).collect()
}

#[tokio::test(start_paused = true)]
async fn while_the_sink_is_down_and_memory_is_full_the_lag_grows() {
    let running = Running::new();
    for id in ids("m", 10) {
        running.sink.set(&id, Behavior::Fail);
        running.outbox.put(&id, None);
    }
    let limits = RelayLimits { max_buffered: count(4), ..RelayLimits::default() };
    let process = running.relay(limits);
    sleep(Duration::from_secs(45)).await;
    let lag = process.monitor.stats().lag;
    assert!(lag.oldest >= Duration::from_secs(30), "{lag:?}");
    assert_eq!(lag.messages, 10);
    running.sink.clear();
    running.emptied().await;
    process.stop().await;
}

#[tokio::test(start_paused = true)]
async fn without_a_shard_the_lag_is_read_and_the_cause_is_logged() {
    let running = Running::new();
    let log = Log::default();
    let subscriber = tracing_subscriber::fmt().with_ansi(false).with_writer(log.clone()).finish();
    let _logging = tracing::subscriber::set_default(subscriber);
    let store = Arc::new(FaultyStore::new(Arc::clone(&running.world.memory), 1));
    store.set_down(true);
    let engine = Idempotency::builder(Arc::clone(&store)).build().unwrap();
    let process = running.relay_with(engine, RelayLimits::default());
    running.outbox.put("m", None);
    sleep(Duration::from_secs(45)).await;
    let stats = process.monitor.stats();
    assert_eq!(stats.shards, 0);
    assert!(stats.lag.oldest >= Duration::from_secs(30), "{stats:?}");
    let lines = log.text().lines().filter(|line| line.contains("cannot be claimed")).count();
    assert_eq!(lines, 1, "{}", log.text());
    store.set_down(false);
    running.emptied().await;
    process.stop().await;
}

#[tokio::test(start_paused = true)]
async fn while_the_outbox_is_down_the_age_of_the_lag_grows() {
    let running = Running::new();
    let process = running.relay(RelayLimits::default());
    sleep(Duration::from_secs(25)).await;
    let age = process.monitor.stats().lag_age;
    assert!(age <= Duration::from_secs(11), "{age:?}");
    for fault in [Fault::Fails, Fault::Hangs] {
        running.outbox.fault(Some(fault));
        sleep(Duration::from_secs(90)).await;
        let age = process.monitor.stats().lag_age;
        assert!(age >= Duration::from_secs(80), "{fault:?}: {age:?}");
        running.outbox.fault(None);
        sleep(Duration::from_secs(25)).await;
        let age = process.monitor.stats().lag_age;
        assert!(age <= Duration::from_secs(11), "{fault:?}: {age:?}");
    }
    process.stop().await;
}

#[tokio::test(start_paused = true)]
async fn a_message_that_is_due_while_all_sends_are_taken_waits_for_one() {
    let running = Running::new();
    running.sink.set("fails", Behavior::Fail);
    running.sink.set("hangs", Behavior::Hang);
    running.outbox.put("fails", None);
    running.outbox.put("hangs", None);
    let process = running.relay(RelayLimits { in_flight: count(1), ..RelayLimits::default() });
    sleep(Duration::from_secs(60)).await;
    assert!(running.sink.sent("fails") > 1 && running.sink.sent("hangs") > 1);
    running.sink.clear();
    running.emptied().await;
    process.stop().await;
}

#[tokio::test(start_paused = true)]
async fn a_panic_of_the_sink_fails_its_message_and_no_other() {
    let running = Running::new();
    let slow = Behavior::Accept { after: Duration::from_secs(2) };
    for id in ids("m", 10) {
        running.sink.set(&id, slow);
        running.outbox.put(&id, None);
    }
    running.sink.set("m-004", Behavior::Panic);
    let process = running.relay(RelayLimits::default());
    sleep(Duration::from_secs(30)).await;
    for id in ids("m", 10).iter().filter(|id| *id != "m-004") {
        assert_eq!(running.sink.sent(id), 1, "{id}");
    }
    assert_eq!(running.outbox.left(), BTreeSet::from(["m-004".to_owned()]));
    let stats = process.monitor.stats();
    assert!(stats.failures > 1 && stats.failures == u64::from(running.sink.sent("m-004")));
    running.sink.clear();
    running.emptied().await;
    process.stop().await;
}

#[tokio::test(start_paused = true)]
async fn a_message_that_hangs_at_shutdown_leaves_the_published_ones_deleted() {
    let running = Running::new();
    for id in ids("m", 10) {
        running.sink.set(&id, Behavior::Accept { after: Duration::from_secs(2) });
        running.outbox.put(&id, None);
    }
    running.sink.set("m-004", Behavior::Hang);
    let process = running.relay(RelayLimits::default());
    while running.sink.sent("m-009") == 0 {
        sleep(Duration::from_millis(10)).await;
    }
    running.outbox.fault(Some(Fault::Slow(Duration::from_secs(3))));
    process.stop().await;
    assert_eq!(running.outbox.left(), BTreeSet::from(["m-004".to_owned()]));
}

#[tokio::test(start_paused = true)]
async fn after_an_outbox_that_hangs_messages_are_published() {
    let running = Running::new();
    let process = running.relay(RelayLimits::default());
    running.outbox.put("m-1", Some("k"));
    running.emptied().await;
    running.outbox.fault(Some(Fault::Hangs));
    sleep(Duration::from_secs(60)).await;
    running.outbox.fault(None);
    running.outbox.put("m-2", Some("k"));
    running.emptied().await;
    process.stop().await;
}

#[tokio::test(start_paused = true)]
async fn after_an_error_of_the_outbox_smaller_ids_are_found() {
    let running = Running::new();
    let process = running.relay(RelayLimits::default());
    running.outbox.draw(1_000);
    sleep(Duration::from_secs(5)).await;
    assert_eq!(running.outbox.least_floor(), 1_000);
    // A standby without the last transactions takes over.
    running.outbox.fault(Some(Fault::Fails));
    sleep(Duration::from_secs(3)).await;
    running.outbox.draw(500);
    running.outbox.fault(None);
    let since = Instant::now();
    running.outbox.put("m-1", Some("k"));
    running.emptied().await;
    assert!(since.elapsed() < Duration::from_secs(5), "{:?}", since.elapsed());
    // The last id of the former server is no floor here.
    sleep(Duration::from_secs(5)).await;
    assert_eq!(running.outbox.least_floor(), 501);
    process.stop().await;
}

#[tokio::test(start_paused = true)]
async fn buffered_messages_stay_within_their_number() {
    let running = Running::new();
    for id in ids("a", 300) {
        running.sink.set(&id, Behavior::Fail);
        running.outbox.put(&id, Some("a"));
    }
    for id in ids("m", 1_000) {
        running.sink.set(&id, Behavior::Fail);
        running.outbox.put(&id, None);
    }
    let limits =
        RelayLimits { max_buffered: count(200), in_flight: count(100), ..RelayLimits::default() };
    let process = running.relay(limits);
    sleep(Duration::from_secs(30)).await;
    assert_eq!(running.outbox.max_buffered().0, 200);
    running.sink.clear();
    running.emptied().await;
    assert!(running.outbox.max_buffered().0 <= 200);
    let accepted = running.sink.accepted();
    assert_eq!(accepted.len(), 1_300, "each once");
    assert!(accepted.iter().filter(|id| id.starts_with('a')).is_sorted());
    process.stop().await;
}

#[tokio::test(start_paused = true)]
async fn buffered_payloads_stay_within_their_bytes_and_one_key_does_not_take_them_all() {
    const SIZE: usize = 10_000;
    let running = Running::new();
    for id in ids("a", 100) {
        running.sink.set(&id, Behavior::Fail);
        running.outbox.put_large(&id, Some("a"), SIZE);
    }
    // Larger than all of the bytes.
    running.outbox.put_large("large", None, 50 * SIZE);
    let limits = RelayLimits { max_buffered_bytes: 20 * SIZE, ..RelayLimits::default() };
    let process = running.relay(limits);
    let others = async {
        for id in ids("b", 100) {
            running.outbox.put_large(&id, Some("b"), SIZE);
        }
        while running.sink.accepted().len() < 101 {
            sleep(Duration::from_millis(10)).await;
        }
    };
    timeout(HOUR, others).await.unwrap();
    running.sink.clear();
    running.emptied().await;
    let (_, bytes) = running.outbox.max_buffered();
    assert!(bytes <= 20 * SIZE + 50 * SIZE, "{bytes}");
    process.stop().await;
}

#[tokio::test(start_paused = true)]
async fn while_nothing_is_acknowledged_the_buffered_bytes_are_bounded() {
    const SIZE: usize = 10_000;
    let running = Running::new();
    for id in ids("m", 100) {
        running.sink.set(&id, Behavior::Hang);
        running.outbox.put_large(&id, None, SIZE);
    }
    let process =
        running.relay(RelayLimits { max_buffered_bytes: 20 * SIZE, ..RelayLimits::default() });
    sleep(Duration::from_secs(30)).await;
    let (number, bytes) = running.outbox.max_buffered();
    assert!((19..=21).contains(&number), "{number}");
    assert!(bytes <= 21 * SIZE, "{bytes}");
    running.sink.clear();
    running.emptied().await;
    process.stop().await;
}

#[tokio::test(start_paused = true)]
async fn a_rejected_message_is_parked_and_others_are_published() {
    let running = Running::new();
    running.sink.set("m-1", Behavior::Reject);
    running.outbox.put("m-1", None);
    running.outbox.put("m-2", None);
    let process = running.relay(RelayLimits::default());
    running.emptied().await;
    assert_eq!(running.outbox.parked(), ["m-1"]);
    assert_eq!(running.sink.accepted(), ["m-2"]);
    process.stop().await;
}

#[tokio::test(start_paused = true)]
async fn in_a_quarantine_nothing_is_published_and_everything_after_it() {
    let running = Running::new();
    let engine = Idempotency::builder(Arc::clone(&running.world.memory)).build().unwrap();
    let process = running.relay_with(engine.clone(), RelayLimits::default());
    running.outbox.put("before", None);
    running.emptied().await;

    quarantine::begin(&running.world, &engine, None);
    for id in ids("m", 100) {
        running.outbox.put(&id, None);
        running.outbox.put(&format!("{id}-k"), Some("k"));
    }
    sleep(HOUR - quarantine::SOON).await;
    let stats = process.monitor.stats();
    assert_eq!((running.sink.accepted().len(), stats.shards, stats.failures), (1, 0, 0));

    // It ends by itself.
    sleep(quarantine::SOON).await;
    timeout(quarantine::SOON * 2, running.emptied()).await.expect("messages are published again");
    let accepted = running.sink.accepted();
    assert_eq!(accepted.len(), 201, "each once");
    let keyed: Vec<_> = accepted.into_iter().filter(|id| id.ends_with("-k")).collect();
    assert_eq!(keyed, ids("m", 100).iter().map(|id| format!("{id}-k")).collect::<Vec<_>>());
    process.stop().await;
}

#[tokio::test(start_paused = true)]
async fn messages_of_a_poll_during_which_a_quarantine_begins_wait_for_its_end() {
    for moment in 0..10 {
        let running = Running::new();
        let engine = Idempotency::builder(Arc::clone(&running.world.memory)).build().unwrap();
        let process = running.relay_with(engine.clone(), RelayLimits::default());
        running.outbox.put("before", Some("k"));
        running.emptied().await;
        running.outbox.fault(Some(Fault::Slow(Duration::from_secs(2))));
        sleep(Duration::from_millis(5_000 + moment * 400)).await;
        quarantine::begin(&running.world, &engine, None);
        running.outbox.put("m", Some("k"));
        sleep(HOUR / 2).await;
        assert_eq!(running.sink.sent("m"), 0);
        running.outbox.fault(None);
        quarantine::end(&running.world, &engine);
        timeout(quarantine::SOON * 2, running.emptied()).await.expect("it is published");
        assert_eq!(running.sink.accepted(), ["before", "m"]);
        process.stop().await;
    }
}
