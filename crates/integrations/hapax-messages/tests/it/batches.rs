//! The sizes of batches in batch mode.

use std::num::NonZeroUsize;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use hapax_core::Timestamp;
use hapax_core::store::BoxFuture;
use hapax_messages::{
    BatchAttempt, BatchConsumer, BatchConsumerLimits, BatchError, BatchInbox, BatchItem,
    BatchOptions, DeadLetter, DeadLetterReason, EntryState, Message, MessageFailure, MessageId,
    MessageSource, PositionStep,
};
use hapax_testkit::messages::MemoryBroker;
use tokio::sync::Semaphore;
use tokio::time::{Instant, sleep, timeout};

use super::world::{HOUR, message};

/// Time that a transaction takes.
const TRANSACTION: Duration = Duration::from_millis(100);

/// An inbox that notes the size of each batch, and fails for a message whose id begins with `stuck`.
#[derive(Debug, Default)]
pub(super) struct Sizes {
    pub(super) sizes: Mutex<Vec<usize>>,
    /// A permit for each message that may be handled, if they wait.
    pub(super) gate: Option<Arc<Semaphore>>,
    /// Times of the purges, of which the first three find more ids than they remove.
    pub(super) purges: Mutex<Vec<Instant>>,
}

impl BatchInbox for Sizes {
    fn consumer(&self) -> &str {
        "orders"
    }

    fn retention(&self) -> Duration {
        HOUR
    }

    fn bytes_per_id(&self) -> u64 {
        1
    }

    fn advances_positions(&self) -> bool {
        false
    }

    fn apply(
        &self,
        batch: Vec<BatchItem>,
        _: bool,
    ) -> BoxFuture<'_, Result<Vec<EntryState>, BatchError>> {
        Box::pin(async move {
            sleep(TRANSACTION).await;
            if let Some(gate) = &self.gate {
                let permits = u32::try_from(batch.len()).unwrap();
                gate.acquire_many(permits).await.unwrap().forget();
            }
            if batch.iter().any(|item| item.id().as_str().starts_with("stuck")) {
                return Err(BatchError::Handler(MessageFailure::retry_after(HOUR, "stuck")));
            }
            self.sizes.lock().unwrap().push(batch.len());
            Ok(vec![EntryState::New; batch.len()])
        })
    }

    fn count_attempt<'a>(
        &'a self,
        _: &'a MessageId,
    ) -> BoxFuture<'a, Result<BatchAttempt, BatchError>> {
        Box::pin(async { Ok(BatchAttempt { number: 2, crashes: 0 }) })
    }

    fn note_failure<'a>(
        &'a self,
        _: &'a MessageId,
        _: &'a str,
    ) -> BoxFuture<'a, Result<u32, BatchError>> {
        Box::pin(async { Ok(1) })
    }

    fn park<'a>(
        &'a self,
        _: &'a DeadLetter,
        _: bool,
        _: Option<&'a PositionStep>,
    ) -> BoxFuture<'a, Result<EntryState, BatchError>> {
        Box::pin(async { Ok(EntryState::New) })
    }

    fn check(&self) -> BoxFuture<'_, Result<(), BatchError>> {
        Box::pin(std::future::ready(Ok(())))
    }

    fn purge(&self, limit: u32) -> BoxFuture<'_, Result<u64, BatchError>> {
        let mut purges = self.purges.lock().unwrap();
        let full = purges.len() < 3;
        purges.push(Instant::now());
        Box::pin(async move { Ok(if full { limit.into() } else { 17 }) })
    }
}

/// An inbox whose handler fails once, and whose database is away after that. It lists its calls.
#[derive(Debug, Default)]
struct Away {
    calls: Mutex<Vec<&'static str>>,
    /// Whether the database is away in the first transaction and the first check, and the handler does not fail.
    is_away_first: bool,
}

impl Away {
    fn call(&self, name: &'static str) -> usize {
        let mut calls = self.calls.lock().unwrap();
        calls.push(name);
        calls.iter().filter(|call| **call == name).count()
    }
}

impl BatchInbox for Away {
    fn consumer(&self) -> &str {
        "orders"
    }

    fn retention(&self) -> Duration {
        HOUR
    }

    fn bytes_per_id(&self) -> u64 {
        1
    }

    fn advances_positions(&self) -> bool {
        false
    }

    fn apply(
        &self,
        batch: Vec<BatchItem>,
        _: bool,
    ) -> BoxFuture<'_, Result<Vec<EntryState>, BatchError>> {
        let call = self.call("apply");
        if self.is_away_first {
            let applied = match call {
                1 => Err(BatchError::Unavailable("away".into())),
                _ => Ok(vec![EntryState::New; batch.len()]),
            };
            return Box::pin(std::future::ready(applied));
        }
        let applied = match call {
            1 | 2 => Err(BatchError::Handler(MessageFailure::retry("no"))),
            _ => Ok(vec![EntryState::New; batch.len()]),
        };
        Box::pin(std::future::ready(applied))
    }

    fn count_attempt<'a>(
        &'a self,
        _: &'a MessageId,
    ) -> BoxFuture<'a, Result<BatchAttempt, BatchError>> {
        let number = u32::try_from(self.call("attempt")).unwrap() + 1;
        Box::pin(std::future::ready(Ok(BatchAttempt { number, crashes: 0 })))
    }

    fn note_failure<'a>(
        &'a self,
        _: &'a MessageId,
        error: &'a str,
    ) -> BoxFuture<'a, Result<u32, BatchError>> {
        assert_eq!(error, "no");
        let noted = match self.call("note") {
            number @ (1 | 3) => Err(BatchError::Unavailable(format!("away {number}").into())),
            _ => Ok(1),
        };
        Box::pin(std::future::ready(noted))
    }

    fn park<'a>(
        &'a self,
        dead_letter: &'a DeadLetter,
        _: bool,
        _: Option<&'a PositionStep>,
    ) -> BoxFuture<'a, Result<EntryState, BatchError>> {
        panic!("parked: {dead_letter:?}")
    }

    fn check(&self) -> BoxFuture<'_, Result<(), BatchError>> {
        let is_away = self.is_away_first && self.call("check") == 1;
        let checked = match is_away {
            true => Err(BatchError::Unavailable("away".into())),
            false => Ok(()),
        };
        Box::pin(std::future::ready(checked))
    }

    fn purge(&self, _: u32) -> BoxFuture<'_, Result<u64, BatchError>> {
        Box::pin(std::future::ready(Ok(0)))
    }
}

#[tokio::test(start_paused = true)]
async fn messages_are_received_after_an_outage_in_which_every_delivery_ended() {
    let broker = MemoryBroker::default();
    let inbox = Arc::new(Away { is_away_first: true, ..Away::default() });
    (0..3).for_each(|number| broker.send(message(&format!("m-{number}"))));
    let source = Arc::new(broker.clone());
    let consumer = BatchConsumer::new(inbox.clone(), source, BatchOptions::default()).unwrap();
    let monitor = consumer.monitor();
    let running = tokio::spawn(consumer.run(std::future::pending()));
    while !monitor.stats().store_is_down {
        sleep(Duration::from_millis(1)).await;
    }
    broker.redeliver();
    timeout(HOUR, broker.emptied()).await.expect("messages are received again");
    running.abort();
    let calls = inbox.calls.lock().unwrap();
    assert_eq!(calls[..3], ["apply", "check", "check"]);
}

#[tokio::test(start_paused = true)]
async fn a_failure_that_was_not_noted_in_an_outage_is_noted_before_the_next_attempt() {
    let (inbox, broker) = (Arc::new(Away::default()), MemoryBroker::default());
    broker.send(message("m-1"));
    let source = Arc::new(broker.clone());
    let consumer = BatchConsumer::new(inbox.clone(), source, BatchOptions::default()).unwrap();
    let running = tokio::spawn(consumer.run(std::future::pending()));
    broker.emptied().await;
    running.abort();
    let in_a_batch = ["apply", "note", "note"];
    let alone = ["attempt", "apply", "note", "note", "attempt", "apply"];
    assert_eq!(*inbox.calls.lock().unwrap(), [&in_a_batch[..], &alone].concat());
}

/// Runs a consumer with batches of ten in two transactions until at most `left` messages are left.
/// Returns the sizes of the batches.
async fn sizes(broker: &MemoryBroker, max_unacknowledged: usize, left: usize) -> Vec<usize> {
    let (inbox, size) = (Arc::new(Sizes::default()), |size| NonZeroUsize::new(size).unwrap());
    let limits = BatchConsumerLimits {
        batch: size(10),
        transactions: size(2),
        max_unacknowledged: size(max_unacknowledged),
        ..BatchConsumerLimits::default()
    };
    let options = BatchOptions { limits, ..BatchOptions::default() };
    let consumer = BatchConsumer::new(inbox.clone(), Arc::new(broker.clone()), options).unwrap();
    let running = tokio::spawn(consumer.run(std::future::pending()));
    while broker.backlog() > left {
        sleep(Duration::from_millis(1)).await;
    }
    running.abort();
    inbox.sizes.lock().unwrap().clone()
}

#[tokio::test(start_paused = true)]
async fn batches_are_full_while_there_are_messages() {
    for max_unacknowledged in [20, 30, 45] {
        let broker = MemoryBroker::default();
        (0..1_000).for_each(|number| broker.send(message(&format!("m-{number}"))));
        let sizes = sizes(&broker, max_unacknowledged, 0).await;
        assert_eq!(sizes, vec![10; 100], "{max_unacknowledged} unacknowledged messages");
    }
}

#[tokio::test(start_paused = true)]
async fn messages_that_wait_for_a_retry_do_not_stop_others() {
    let broker = MemoryBroker::default();
    broker.send(message("stuck"));
    (0..100).for_each(|number| broker.send(message(&format!("m-{number}"))));
    let begun = Instant::now();
    let sizes = sizes(&broker, 10, 1).await;
    // Far before the next attempt of the one that waits.
    assert!(begun.elapsed() < TRANSACTION * 100, "{:?}", begun.elapsed());
    assert_eq!(sizes.iter().sum::<usize>(), 100);
}

#[tokio::test(start_paused = true)]
async fn ids_are_purged_at_start_then_until_none_is_left_and_each_minute() {
    let inbox = Arc::new(Sizes::default());
    let source = Arc::new(MemoryBroker::default());
    let consumer = BatchConsumer::new(inbox.clone(), source, BatchOptions::default()).unwrap();
    let start = Instant::now();
    consumer.run(sleep(Duration::from_secs(130))).await;
    let purges = inbox.purges.lock().unwrap();
    let times: Vec<_> = purges.iter().map(|at| at.duration_since(start).as_secs()).collect();
    assert_eq!(times, [0, 1, 2, 3, 63, 123]);
}

#[tokio::test(start_paused = true)]
async fn in_batch_mode_too_the_first_messages_are_held_while_none_has_an_id() {
    for without_id in [10, 3] {
        let (inbox, broker) = (Arc::new(Sizes::default()), MemoryBroker::default());
        for number in 0..without_id {
            broker.send(Message::new("memory://orders", format!("nameless {number}")));
        }
        let options = BatchOptions { expect_ids: true, ..BatchOptions::default() };
        let consumer = BatchConsumer::new(inbox, Arc::new(broker.clone()), options).unwrap();
        let monitor = consumer.monitor();
        let running = tokio::spawn(consumer.run(std::future::pending()));
        let missing = timeout(Duration::from_secs(5), monitor.until_ids_are_missing()).await;
        assert_eq!(missing.is_ok(), without_id == 10, "{without_id} messages");
        assert_eq!((monitor.stats().without_id, monitor.stats().parked), (without_id, 0));
        if without_id == 3 {
            sleep(Duration::from_secs(30)).await;
            assert_eq!((monitor.stats().without_id, monitor.stats().parked), (3, 3));
        }
        broker.send(message("m-1"));
        broker.emptied().await;
        assert_eq!((monitor.stats().without_id, monitor.stats().parked), (0, without_id));
        running.abort();
    }
}

#[tokio::test(start_paused = true)]
async fn in_batch_mode_too_a_message_that_the_source_cannot_read_is_parked() {
    let (inbox, broker) = (Arc::new(Sizes::default()), MemoryBroker::default());
    for id in ["m-1", "odd"] {
        let message = message(id);
        broker.send(match id {
            "odd" => message.with_header(MemoryBroker::UNREADABLE, "a test"),
            _ => message,
        });
    }
    let source = Arc::new(broker.clone());
    let consumer = BatchConsumer::new(inbox.clone(), source, BatchOptions::default()).unwrap();
    let monitor = consumer.monitor();
    let running = tokio::spawn(consumer.run(std::future::pending()));
    broker.emptied().await;
    assert_eq!((monitor.stats().handled, monitor.stats().parked), (1, 1));
    running.abort();
}

#[tokio::test(start_paused = true)]
async fn in_batch_mode_too_a_redriven_message_that_is_older_than_the_retention_is_parked() {
    let (inbox, broker) = (Arc::new(Sizes::default()), MemoryBroker::default());
    let (id, now) = (MessageId::new("m-1").unwrap(), Timestamp::from_micros(2));
    let reason = DeadLetterReason::Rejected;
    let handled = DeadLetter::new("orders", Some(&id), message("m-1"), reason, "no", now);
    let copy = message("m-1").with_header(DeadLetter::REDRIVE_HEADER, handled.id_hex());
    broker.send(copy.published_at(Timestamp::from_micros(1)));
    let source = Arc::new(broker.clone());
    let consumer = BatchConsumer::new(inbox.clone(), source, BatchOptions::default()).unwrap();
    let monitor = consumer.monitor();
    let running = tokio::spawn(consumer.run(std::future::pending()));
    broker.emptied().await;
    running.abort();
    assert_eq!((monitor.stats().parked, inbox.sizes.lock().unwrap().len()), (1, 0));
}

#[tokio::test(start_paused = true)]
async fn more_messages_that_fail_than_a_consumer_may_have_keep_no_other_from_being_handled() {
    let broker = MemoryBroker::default();
    broker.set_delays_from(Duration::ZERO);
    (0..40).for_each(|number| broker.send(message(&format!("stuck-{number}"))));
    (0..20).for_each(|number| broker.send(message(&format!("m-{number}"))));
    let handled = timeout(HOUR / 2, sizes(&broker, 16, 40)).await.expect("the others are handled");
    assert_eq!(handled.iter().sum::<usize>(), 20);
}

#[tokio::test(start_paused = true)]
async fn a_batch_goes_between_messages_that_are_handled_alone() {
    let broker = MemoryBroker::default();
    (0..40).for_each(|number| broker.send(message(&format!("again-{number}"))));
    let received = broker.receive(NonZeroUsize::new(40).unwrap()).await.unwrap();
    assert_eq!(received.len(), 40);
    drop(received);
    let sending = async {
        sleep(TRANSACTION * 3).await;
        (0..10).for_each(|number| broker.send(message(&format!("m-{number}"))));
        std::future::pending().await
    };
    let sizes = tokio::select! {
        sizes = sizes(&broker, 100, 0) => sizes,
        () = sending => Vec::new(),
    };
    let at = sizes.iter().position(|size| *size == 10);
    assert!(at.is_some_and(|at| at < 10), "{sizes:?}");
}
