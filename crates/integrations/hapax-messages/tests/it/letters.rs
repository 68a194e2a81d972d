//! Dead letters: whose they are, and places that fail or are slow.

use std::collections::HashSet;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::time::Duration;

use hapax_core::store::BoxFuture;
use hapax_core::{Clock as _, HookTiming, Verdict};
use hapax_messages::{
    DeadLetter, DeadLetterError, DeadLetterReason, DeadLetters, HandledMessage, InboxBuilder,
    MessageFailure, MessageId,
};
use hapax_testkit::messages::MemoryDeadLetters;
use tokio::sync::{Notify, Semaphore};
use tokio::time::{sleep, timeout};

use super::world::*;

/// A place for dead letters that does not store that of `m-bad`, and waits in calls.
#[derive(Debug)]
struct SlowLetters {
    inner: Arc<MemoryDeadLetters>,
    waits: AtomicBool,
    called: Notify,
    go_on: Semaphore,
}

impl SlowLetters {
    fn new(world: &World, waits: bool) -> Arc<Self> {
        let (inner, waits) = (Arc::clone(&world.letters), AtomicBool::new(waits));
        Arc::new(Self { inner, waits, called: Notify::new(), go_on: Semaphore::new(0) })
    }

    async fn wait(&self) {
        if self.waits.swap(false, Ordering::SeqCst) {
            self.called.notify_one();
            let _ = self.go_on.acquire().await;
        }
    }
}

impl DeadLetters for SlowLetters {
    fn park<'a>(&'a self, letter: &'a DeadLetter) -> BoxFuture<'a, Result<(), DeadLetterError>> {
        Box::pin(async move {
            if letter.message_id.as_ref().is_some_and(|id| id.as_str() == "m-bad") {
                return Err(DeadLetterError::new("too large"));
            }
            self.inner.park(letter).await?;
            self.wait().await;
            Ok(())
        })
    }

    fn remove<'a>(&'a self, id: &'a [u8; 32]) -> BoxFuture<'a, Result<(), DeadLetterError>> {
        self.inner.remove(id)
    }

    fn lists_order_keys(&self) -> bool {
        true
    }

    fn blocked_keys<'a>(
        &'a self,
        consumer: &'a str,
    ) -> BoxFuture<'a, Result<HashSet<String>, DeadLetterError>> {
        Box::pin(async move {
            self.wait().await;
            self.inner.blocked_keys(consumer).await
        })
    }
}

fn letter(world: &World, consumer: &str, id: &str, key: Option<&str>) -> DeadLetter {
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
    let others = letter(&world, "invoices", "m-1", None);
    world.letters.park(&others).await.unwrap();
    // It is published to the subject from which all consumers receive.
    let redriven = |id: &str, letter: &DeadLetter| {
        message(id).with_header(DeadLetter::REDRIVE_HEADER, letter.id_hex())
    };
    world.broker.send(redriven("m-1", &others));
    world.broker.emptied().await;
    assert_eq!(world.letters().len(), 1);
    world.letters.park(&letter(&world, "orders", "a-1", Some("a"))).await.unwrap();
    sleep(LEASE).await;
    world.broker.send(redriven("a-2", &others).with_key("a"));
    world.broker.emptied().await;
    let reasons: Vec<_> =
        world.letters().into_iter().map(|(id, reason, ..)| (id, reason)).collect();
    use DeadLetterReason::{Behind, Rejected};
    let expected = [("a-1", Rejected), ("a-2", Behind), ("m-1", Rejected)];
    assert_eq!(reasons, expected.map(|(id, reason)| (id.to_owned(), reason)));
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
    let position = |offset| hapax_messages::Position {
        topic: "orders".to_owned(),
        partition: 0,
        offset,
        stored_at: world.clock.now(),
    };
    let process = world.process(|inbox| inbox.reexecute().ids(ids()), world.counting());
    let parked = letter(&world, "orders", "orders:0:1:17", None);
    world.letters.park(&parked).await.unwrap();
    // Twice, as after two runs of a redrive.
    for offset in 7..9 {
        let redriven = message("orders:0:1:17")
            .with_position(position(offset))
            .with_header(DeadLetter::REDRIVE_HEADER, parked.id_hex());
        world.broker.send(redriven);
    }
    world.broker.emptied().await;
    assert_eq!(world.effects(), once(["orders:0:1:17".to_owned()]));
    assert!(world.letters().is_empty());
    assert!(process.stop().await);
}

#[tokio::test(start_paused = true)]
async fn the_letter_of_an_owner_that_was_cut_off_is_removed_if_its_successor_handled_the_message() {
    let world = World::new();
    let letters = SlowLetters::new(&world, true);
    let rejects = |_: HandledMessage| std::future::ready(Err(MessageFailure::reject("never")));
    world.send("m-1");
    let first = {
        let letters = Arc::clone(&letters);
        world.process(|inbox| inbox.reexecute().dead_letters(letters), rejects)
    };
    letters.called.notified().await;
    first.store.set_down(true);
    let second = world.process(InboxBuilder::reexecute, world.counting());
    world.broker.redeliver();
    sleep(HOUR).await;
    assert_eq!((world.effects().len(), world.letters().len()), (1, 1));
    first.store.set_down(false);
    letters.go_on.add_permits(1);
    sleep(HOUR).await;
    world.broker.emptied().await;
    assert!(world.letters().is_empty());
    assert!(first.stop().await && second.stop().await);
}

#[tokio::test(start_paused = true)]
async fn a_lease_that_lapses_before_the_handler_begins_lets_it_not_begin() {
    let world = World::new();
    let letters = SlowLetters::new(&world, true);
    world.broker.send(message("m-1").with_key("a"));
    let first = {
        let letters = Arc::clone(&letters);
        let options = |inbox: InboxBuilder| inbox.block().ordered().dead_letters(letters);
        world.process(options, world.counting())
    };
    letters.called.notified().await;
    first.store.set_down(true);
    sleep(LEASE * 2).await;
    letters.go_on.add_permits(1);
    sleep(LEASE).await;
    assert!(world.effects().is_empty());
    first.store.set_down(false);
    assert!(first.stop().await);
}

#[tokio::test(start_paused = true)]
async fn a_letter_that_cannot_be_stored_holds_its_message_and_no_other_one() {
    let world = World::new();
    let letters = SlowLetters::new(&world, false);
    let effects = Arc::clone(&world.effects);
    let handler = move |message: HandledMessage| {
        std::future::ready(match message.id().as_str() {
            "m-bad" => Err(MessageFailure::reject("never")),
            _ => {
                count(&effects, &message);
                Ok(())
            }
        })
    };
    world.send("m-bad");
    let process = world.process(|inbox| inbox.reexecute().dead_letters(letters), handler);
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
        move |_: HandledMessage| {
            runs.fetch_add(1, Ordering::SeqCst);
            std::future::ready(Err(MessageFailure::reject("never")))
        }
    };
    world.letters.fail(true);
    world.send("m-1");
    let process = world.process(InboxBuilder::reexecute, handler);
    sleep(HOUR).await;
    assert_eq!(world.broker.backlog(), 1);
    world.letters.fail(false);
    world.broker.emptied().await;
    assert_eq!(runs.load(Ordering::SeqCst), 1);
    let expected = ("m-1".to_owned(), DeadLetterReason::Rejected, 1, "never".to_owned());
    assert_eq!(world.letters(), [expected]);
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
    let letters = world.letters();
    assert_eq!((letters.len(), letters[0].1), (1, DeadLetterReason::Unknown));
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
        move |message: HandledMessage| {
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
async fn an_idle_consumer_has_no_message_in_hand() {
    let world = World::new();
    let process = world.process(InboxBuilder::reexecute, world.counting());
    world.send("m-1");
    world.broker.emptied().await;
    sleep(Duration::from_secs(1)).await;
    assert_eq!(process.monitor.stats().in_hand, 0);
    assert!(process.stop().await);
}
