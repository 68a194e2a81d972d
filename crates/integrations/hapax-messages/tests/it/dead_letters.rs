//! Dead letters: whose they are, and stores that fail, panic or are slow.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::time::Duration;

use hapax_core::store::BoxFuture;
use hapax_core::{Clock as _, HookTiming, Idempotency, Store as _, Timestamp, Verdict};
use hapax_messages::{
    DeadLetter, DeadLetterError, DeadLetterReason, DeadLetterStore, Inbox, InboxBuilder, Message,
    MessageExecution, MessageFailure, MessageId, OrderKeyQuery, OrderKeyState,
};
use hapax_testkit::messages::MemoryDeadLetters;
use tokio::sync::{Notify, Semaphore};
use tokio::time::{sleep, timeout};

use super::world::*;

/// A store of dead letters that does not store that of `m-bad`, and waits in calls.
#[derive(Debug)]
struct SlowLetters {
    inner: Arc<MemoryDeadLetters>,
    waits: AtomicBool,
    called: Notify,
    go_on: Semaphore,
}

impl SlowLetters {
    fn new(world: &World, waits: bool) -> Arc<Self> {
        let (inner, waits) = (Arc::clone(&world.dead_letters), AtomicBool::new(waits));
        Arc::new(Self { inner, waits, called: Notify::new(), go_on: Semaphore::new(0) })
    }

    async fn wait(&self) {
        if self.waits.swap(false, Ordering::SeqCst) {
            self.called.notify_one();
            self.go_on.acquire().await.unwrap().forget();
        }
    }
}

impl DeadLetterStore for SlowLetters {
    fn park<'a>(
        &'a self,
        dead_letter: &'a DeadLetter,
    ) -> BoxFuture<'a, Result<(), DeadLetterError>> {
        Box::pin(async move {
            if dead_letter.message_id.as_ref().is_some_and(|id| id.as_str() == "m-bad") {
                return Err(DeadLetterError::new("too large"));
            }
            self.inner.park(dead_letter).await?;
            self.wait().await;
            Ok(())
        })
    }

    fn remove<'a>(&'a self, id: &'a [u8; 32]) -> BoxFuture<'a, Result<(), DeadLetterError>> {
        self.inner.remove(id)
    }

    fn finds_order_keys(&self) -> bool {
        true
    }

    fn order_key<'a>(
        &'a self,
        query: OrderKeyQuery<'a>,
    ) -> BoxFuture<'a, Result<OrderKeyState, DeadLetterError>> {
        Box::pin(async move {
            self.wait().await;
            self.inner.order_key(query).await
        })
    }
}

pub(super) fn dead_letter(
    world: &World,
    consumer: &str,
    id: &str,
    key: Option<&str>,
) -> DeadLetter {
    let mut message = message(id);
    message.key = key.map(str::to_owned);
    let (id, now) = (MessageId::new(id).unwrap(), world.clock.now());
    DeadLetter::new(consumer, Some(&id), message, DeadLetterReason::Rejected, "no", now)
}

#[tokio::test(start_paused = true)]
async fn the_letter_of_another_consumer_stays_and_its_header_passes_no_key() {
    let world = World::new();
    let process = world.process(|inbox| inbox.reexecute().ordered(), world.counting());
    world.send("m-1");
    world.broker.emptied().await;
    let others = dead_letter(&world, "invoices", "m-1", None);
    world.dead_letters.park(&others).await.unwrap();
    // It is published to the subject from which all consumers receive.
    let redriven = |id: &str, dead_letter: &DeadLetter| {
        message(id).with_header(DeadLetter::REDRIVE_HEADER, dead_letter.id_hex())
    };
    world.broker.send(redriven("m-1", &others));
    world.broker.emptied().await;
    assert_eq!(world.dead_letters().len(), 1);
    world.dead_letters.park(&dead_letter(&world, "orders", "a-1", Some("a"))).await.unwrap();
    world.broker.send(redriven("a-2", &others).with_key("a"));
    world.broker.emptied().await;
    let reasons: Vec<_> =
        world.dead_letters().into_iter().map(|(id, reason, ..)| (id, reason)).collect();
    use DeadLetterReason::{Blocked, Rejected};
    let expected = [("a-1", Rejected), ("a-2", Blocked), ("m-1", Rejected)];
    assert_eq!(reasons, expected.map(|(id, reason)| (id.to_owned(), reason)));
    assert!(process.stop().await);
}

/// The id of the message was removed since, so that nothing else shows that it was handled.
#[tokio::test(start_paused = true)]
async fn a_redriven_message_that_is_older_than_the_retention_becomes_a_dead_letter() {
    let world = World::new();
    let process = world.process(InboxBuilder::reexecute, world.counting());
    let handled = dead_letter(&world, "orders", "m-1", None);
    let copy = message("m-1").with_header(DeadLetter::REDRIVE_HEADER, handled.id_hex());
    world.broker.send(copy.published_at(Timestamp::from_micros(1)));
    world.broker.emptied().await;
    assert_eq!(world.effects(), once([]));
    let reasons: Vec<_> = world.dead_letters().into_iter().map(|it| it.1).collect();
    assert_eq!(reasons, [DeadLetterReason::TooOld]);
    assert!(process.stop().await);
}

#[tokio::test(start_paused = true)]
async fn a_redriven_message_that_a_position_named_keeps_its_id() {
    let world = World::new();
    let ids = || {
        hapax_messages::IdRules::new([
            hapax_messages::IdRule::Position,
            hapax_messages::IdRule::Header("message-id".to_owned()),
        ])
    };
    let position = |offset| hapax_messages::LogPosition {
        topic: "orders".into(),
        partition: 0,
        offset,
        stored_at: world.clock.now(),
    };
    let process = world.process(|inbox| inbox.reexecute().ids(ids()), world.counting());
    let parked = dead_letter(&world, "orders", "orders:0:1:17", None);
    world.dead_letters.park(&parked).await.unwrap();
    // Twice, as after two runs of a redrive.
    for offset in 7..9 {
        let redriven = message("orders:0:1:17")
            .with_position(position(offset))
            .with_header(DeadLetter::REDRIVE_HEADER, parked.id_hex());
        world.broker.send(redriven);
    }
    world.broker.emptied().await;
    assert_eq!(world.effects(), once(["orders:0:1:17".to_owned()]));
    assert!(world.dead_letters().is_empty());
    assert!(process.stop().await);
}

#[tokio::test(start_paused = true)]
async fn the_letter_of_an_owner_that_was_cut_off_is_removed_if_its_successor_handled_the_message() {
    let world = World::new();
    let dead_letters = SlowLetters::new(&world, true);
    let rejects = |_: MessageExecution| std::future::ready(Err(MessageFailure::reject("never")));
    world.send("m-1");
    let first = {
        let dead_letters = Arc::clone(&dead_letters);
        world.process(|inbox| inbox.reexecute().dead_letters(dead_letters), rejects)
    };
    dead_letters.called.notified().await;
    first.store.set_down(true);
    let second = world.process(InboxBuilder::reexecute, world.counting());
    world.broker.redeliver();
    sleep(HOUR).await;
    assert_eq!((world.effects().len(), world.dead_letters().len()), (1, 1));
    first.store.set_down(false);
    dead_letters.go_on.add_permits(1);
    sleep(HOUR).await;
    world.broker.emptied().await;
    assert!(world.dead_letters().is_empty());
    assert!(first.stop().await && second.stop().await);
}

#[tokio::test(start_paused = true)]
async fn a_message_whose_process_ends_after_its_letter_was_stored_is_not_blocked_by_that() {
    let world = World::new();
    let dead_letters = SlowLetters::new(&world, true);
    let rejects = |_: MessageExecution| std::future::ready(Err(MessageFailure::reject("never")));
    world.broker.send(message("a-1").with_key("a"));
    let first = {
        let dead_letters = Arc::clone(&dead_letters);
        let options = |inbox: InboxBuilder| inbox.reexecute().ordered().dead_letters(dead_letters);
        world.process(options, rejects)
    };
    // First it looks for dead letters of the key.
    dead_letters.called.notified().await;
    dead_letters.waits.store(true, Ordering::SeqCst);
    dead_letters.go_on.add_permits(1);
    dead_letters.called.notified().await;
    assert_eq!(world.dead_letters().len(), 1);
    first.crash().await;
    let second = world.process(|inbox| inbox.reexecute().ordered(), world.counting());
    world.broker.send(message("a-2").with_key("a"));
    world.broker.emptied().await;
    let parked = world.dead_letters();
    let rejected = ("a-1".to_owned(), DeadLetterReason::Rejected, 1, "never".to_owned());
    assert_eq!((parked.len(), &parked[0]), (2, &rejected));
    assert_eq!(parked[1].1, DeadLetterReason::Blocked);
    assert!(world.effects().is_empty());
    // Its record says parked: it is a duplicate until it is released.
    let redriven = || {
        let hex = world.dead_letters.list()[0].id_hex();
        message("a-1").with_key("a").with_header(DeadLetter::REDRIVE_HEADER, hex)
    };
    world.broker.send(redriven());
    world.broker.emptied().await;
    assert!(world.effects().is_empty());
    world.release("a-1").await;
    world.broker.send(redriven());
    world.broker.emptied().await;
    assert_eq!((world.effects(), world.dead_letters().len()), (once(["a-1".to_owned()]), 1));
    assert!(second.stop().await);
}

#[tokio::test(start_paused = true)]
async fn a_lease_that_lapses_before_the_handler_begins_lets_it_not_begin() {
    let world = World::new();
    let dead_letters = SlowLetters::new(&world, true);
    world.broker.send(message("m-1").with_key("a"));
    let first = {
        let dead_letters = Arc::clone(&dead_letters);
        let options = |inbox: InboxBuilder| inbox.block().ordered().dead_letters(dead_letters);
        world.process(options, world.counting())
    };
    dead_letters.called.notified().await;
    first.store.set_down(true);
    sleep(LEASE * 2).await;
    dead_letters.go_on.add_permits(1);
    sleep(LEASE).await;
    assert!(world.effects().is_empty());
    first.store.set_down(false);
    assert!(first.stop().await);
}

#[tokio::test(start_paused = true)]
async fn a_letter_that_cannot_be_stored_holds_its_message_and_no_other_one() {
    let world = World::new();
    let dead_letters = SlowLetters::new(&world, false);
    let effects = Arc::clone(&world.effects);
    let handler = move |message: MessageExecution| {
        std::future::ready(match message.id().as_str() {
            "m-bad" => Err(MessageFailure::reject("never")),
            _ => {
                count(&effects, &message);
                Ok(())
            }
        })
    };
    world.send("m-bad");
    let process = world.process(|inbox| inbox.reexecute().dead_letters(dead_letters), handler);
    sleep(LEASE).await;
    world.send("m-1");
    sleep(LEASE).await;
    assert_eq!(world.effects(), once(["m-1".to_owned()]));
    assert_eq!(world.broker.backlog(), 1);
    assert!(process.stop().await);
}

#[tokio::test(start_paused = true)]
async fn a_rejected_message_whose_letter_is_not_stored_is_not_handled_again() {
    let world = World::new();
    let runs = Arc::new(AtomicU32::new(0));
    let handler = {
        let runs = Arc::clone(&runs);
        move |_: MessageExecution| {
            runs.fetch_add(1, Ordering::SeqCst);
            std::future::ready(Err(MessageFailure::reject("never")))
        }
    };
    world.dead_letters.fail(true);
    world.send("m-1");
    let process = world.process(InboxBuilder::reexecute, handler);
    sleep(HOUR).await;
    assert_eq!(world.broker.backlog(), 1);
    world.dead_letters.fail(false);
    world.broker.emptied().await;
    assert_eq!(runs.load(Ordering::SeqCst), 1);
    let expected = ("m-1".to_owned(), DeadLetterReason::Rejected, 1, "never".to_owned());
    assert_eq!(world.dead_letters(), [expected]);
    assert!(process.stop().await);
}

#[tokio::test(start_paused = true)]
async fn a_hook_that_cannot_say_is_called_again_after_pauses_and_then_the_message_is_parked() {
    let world = World::new();
    let calls = Arc::new(AtomicU32::new(0));
    let options = |calls: &Arc<AtomicU32>| {
        let calls = Arc::clone(calls);
        let timing = HookTiming { after: LEASE, timeout: LEASE };
        move |inbox: InboxBuilder| {
            inbox.attempts(attempts(3, LEASE)).reconcile_with(timing, move |_| {
                calls.fetch_add(1, Ordering::SeqCst);
                std::future::ready(Verdict::CannotSay)
            })
        }
    };
    world.send("poison");
    let begun = Arc::new(Notify::new());
    let process = world.process(options(&calls), poisoned(&world.effects, &begun));
    begun.notified().await;
    process.crash().await;
    let process = world.process(options(&calls), poisoned(&world.effects, &begun));
    let emptied = timeout(24 * HOUR, world.broker.emptied()).await;
    emptied.expect("it is parked at last");
    assert_eq!(calls.load(Ordering::SeqCst), 3);
    let dead_letters = world.dead_letters();
    assert_eq!((dead_letters.len(), dead_letters[0].1), (1, DeadLetterReason::Unknown));
    assert!(world.effects().is_empty());
    assert!(process.stop().await);
}

#[tokio::test(start_paused = true)]
async fn a_message_whose_outcome_is_unknown_waits_for_no_other_handler() {
    let world = World::new();
    let (begun, go_on) = (Arc::new(Notify::new()), Arc::new(Semaphore::new(0)));
    let effects = Arc::clone(&world.effects);
    let handler = {
        let (begun, go_on) = (Arc::clone(&begun), Arc::clone(&go_on));
        move |message: MessageExecution| {
            let (begun, go_on) = (Arc::clone(&begun), Arc::clone(&go_on));
            let effects = Arc::clone(&effects);
            async move {
                match (message.id().as_str(), message.attempt()) {
                    ("slow", _) => {
                        begun.notify_one();
                        let _ = go_on.acquire().await;
                    }
                    ("panics", 1) => panic!("a bug"),
                    (_, 1) => return Err(MessageFailure::unknown("no reply")),
                    _ => {}
                }
                count(&effects, &message);
                Ok(())
            }
        }
    };
    world.send("slow");
    let options = |inbox: InboxBuilder| inbox.reexecute().attempts(attempts(3, LEASE));
    let process = world.process(options, handler);
    begun.notified().await;
    world.send("m-1");
    world.send("panics");
    sleep(HOUR).await;
    assert_eq!(world.effects(), once(["m-1".to_owned(), "panics".to_owned()]));
    assert_eq!(process.monitor.stats().suspects, 0);
    go_on.add_permits(1);
    world.broker.emptied().await;
    assert!(process.stop().await);
}

#[tokio::test(start_paused = true)]
async fn an_idle_consumer_has_no_unacknowledged_message() {
    let world = World::new();
    let process = world.process(InboxBuilder::reexecute, world.counting());
    world.send("m-1");
    world.broker.emptied().await;
    sleep(Duration::from_secs(1)).await;
    assert_eq!(process.monitor.stats().unacknowledged, 0);
    assert!(process.stop().await);
}

/// A store of dead letters that panics while its flag is set.
#[derive(Debug)]
struct PanickingLetters {
    inner: Arc<MemoryDeadLetters>,
    panics: AtomicBool,
    count: AtomicU32,
}

impl PanickingLetters {
    fn check(&self) {
        if self.panics.load(Ordering::SeqCst) {
            self.count.fetch_add(1, Ordering::SeqCst);
            panic!("the test makes dead letters panic");
        }
    }
}

impl DeadLetterStore for PanickingLetters {
    fn park<'a>(
        &'a self,
        dead_letter: &'a DeadLetter,
    ) -> BoxFuture<'a, Result<(), DeadLetterError>> {
        // Before there is a future.
        self.check();
        self.inner.park(dead_letter)
    }

    fn remove<'a>(&'a self, id: &'a [u8; 32]) -> BoxFuture<'a, Result<(), DeadLetterError>> {
        Box::pin(async move {
            self.check();
            self.inner.remove(id).await
        })
    }

    fn finds_order_keys(&self) -> bool {
        true
    }

    fn order_key<'a>(
        &'a self,
        query: OrderKeyQuery<'a>,
    ) -> BoxFuture<'a, Result<OrderKeyState, DeadLetterError>> {
        Box::pin(async move {
            self.check();
            self.inner.order_key(query).await
        })
    }
}

#[tokio::test(start_paused = true)]
async fn a_store_of_dead_letters_that_panics_holds_its_messages_and_stops_no_consumer() {
    let world = World::new();
    let (inner, panics) = (Arc::clone(&world.dead_letters), AtomicBool::new(false));
    let dead_letters = Arc::new(PanickingLetters { inner, panics, count: AtomicU32::new(0) });
    let of_inbox = Arc::clone(&dead_letters);
    let process =
        world.process(|inbox| inbox.reexecute().dead_letters(of_inbox).ordered(), world.counting());
    world.send("m-1");
    world.broker.emptied().await;
    // A dead letter whose message is handled: it is removed.
    let handled = dead_letter(&world, "orders", "m-1", None);
    world.dead_letters.park(&handled).await.unwrap();
    dead_letters.panics.store(true, Ordering::SeqCst);
    let without_id = Message::new("memory://orders", "no id");
    let mismatch = Message::new("memory://orders", "other").with_header("message-id", "m-1");
    let redriven = message("m-1").with_header(DeadLetter::REDRIVE_HEADER, handled.id_hex());
    for held in [without_id, mismatch, redriven, message("k-1").with_key("k")] {
        world.broker.send(held);
    }
    world.send("m-2");
    sleep(LEASE).await;
    assert!(dead_letters.count.load(Ordering::SeqCst) >= 4);
    assert_eq!(world.effects(), once(["m-1", "m-2"].map(str::to_owned)));
    let stats = process.monitor.stats();
    // Each is held by its first delivery.
    assert_eq!((stats.unacknowledged, stats.received, world.broker.backlog()), (4, 6, 4));
    dead_letters.panics.store(false, Ordering::SeqCst);
    world.broker.emptied().await;
    assert_eq!(world.effects(), once(["k-1", "m-1", "m-2"].map(str::to_owned)));
    let reasons: Vec<_> = world.dead_letters().into_iter().map(|(_, reason, ..)| reason).collect();
    assert_eq!(reasons, [DeadLetterReason::NoId, DeadLetterReason::Mismatch]);
    assert!(process.stop().await);
}

#[tokio::test(start_paused = true)]
async fn a_message_whose_attempts_failed_may_execute_for_the_settle_time_and_one_that_was_rejected_may_not()
 {
    let world = World::new();
    let options = |inbox: InboxBuilder| {
        inbox.reexecute().attempts(attempts(1, Duration::from_secs(1))).settle(2 * LEASE)
    };
    let handler = |message: MessageExecution| {
        std::future::ready(Err(match message.id().as_str() {
            "late" => MessageFailure::retry("no response in time"),
            _ => MessageFailure::reject("422"),
        }))
    };
    let process = world.process(options, handler);
    for id in ["late", "rejected"] {
        world.send(id);
    }
    sleep(Duration::from_secs(10)).await;
    assert_eq!(world.dead_letters().len(), 2);
    let engine = Idempotency::builder(Arc::clone(&world.memory)).build().unwrap();
    for (id, may) in [("late", true), ("rejected", false)] {
        let key = MessageId::new(id).unwrap().to_key();
        let id = engine.operation_id(&Inbox::scope("orders"), &key);
        let stored = world.memory.load(&id).await.unwrap().stored.unwrap();
        let until = stored.lease_until.after(2 * LEASE + Duration::from_secs(30));
        assert_eq!(Inbox::may_execute_until(&stored), may.then_some(until));
        assert!(stored.lease_until < world.clock.now());
    }
    assert!(process.stop().await);
}
