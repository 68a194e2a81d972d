//! Messages that are not handled for another reason than a failed attempt: rules that find no id, withdrawn attempts, and
//! messages that the source cannot read.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use hapax_messages::{
    DeadLetter, DeadLetterReason, InboxBuilder, Message, MessageExecution, MessageFailure,
};
use hapax_testkit::messages::MemoryBroker;
use tokio::time::{sleep, timeout};

use super::world::*;

fn nameless(number: usize) -> Message {
    Message::new("memory://orders", format!("nameless {number}"))
}

#[tokio::test(start_paused = true)]
async fn the_first_messages_are_held_while_none_has_an_id_and_parked_after_one_that_has() {
    let world = World::new();
    let process = world.process(|inbox| inbox.reexecute().expect_ids(), world.counting());
    for number in 0..9 {
        world.broker.send(nameless(number));
    }
    let missing = timeout(Duration::from_secs(20), process.monitor.until_ids_are_missing()).await;
    assert!(missing.is_err(), "too few messages, and too early");
    assert_eq!(process.monitor.stats().without_id, 9);
    assert!(world.dead_letters().is_empty());
    world.send("m-1");
    world.broker.emptied().await;
    assert_eq!(process.monitor.stats().without_id, 0);
    assert_eq!(world.effects(), once(["m-1".to_owned()]));
    let reasons: Vec<_> = world.dead_letters().into_iter().map(|(_, reason, ..)| reason).collect();
    assert_eq!(reasons, [DeadLetterReason::NoId; 9]);
}

#[tokio::test(start_paused = true)]
async fn ten_messages_without_an_id_show_that_the_rules_are_wrong_and_stay_held() {
    let world = World::new();
    let process = world.process(|inbox| inbox.reexecute().expect_ids(), world.counting());
    for number in 0..10 {
        world.broker.send(nameless(number));
    }
    let within = Duration::from_secs(5);
    let missing = timeout(within, process.monitor.until_ids_are_missing()).await;
    let error = missing.expect("they are missing").to_string();
    assert!(error.contains("expected an id by the header message-id"), "{error}");
    sleep(HOUR).await;
    assert_eq!((process.monitor.stats().without_id, world.broker.backlog()), (10, 10));
    assert!(world.dead_letters().is_empty());
    process.stop().await;
}

#[tokio::test(start_paused = true)]
async fn fewer_than_ten_messages_without_an_id_are_parked_half_a_minute_after_the_first_one() {
    let world = World::new();
    let process = world.process(|inbox| inbox.reexecute().expect_ids(), world.counting());
    for number in 0..9 {
        world.broker.send(nameless(number));
    }
    sleep(Duration::from_secs(29)).await;
    assert_eq!((world.broker.backlog(), world.dead_letters().len()), (9, 0));
    timeout(Duration::from_secs(5), world.broker.emptied()).await.expect("they are parked");
    assert_eq!(world.dead_letters().len(), 9);
    let missing = timeout(HOUR, process.monitor.until_ids_are_missing());
    assert!(missing.await.is_err(), "fewer than ten");
    process.stop().await;
}

#[tokio::test(start_paused = true)]
async fn a_message_with_an_id_behind_ones_without_shows_that_the_rules_are_right() {
    // At the head of an order key, and among ten.
    for (count, key) in [(1, Some("a")), (10, None)] {
        let world = World::new();
        let keyed = |message: Message| match key {
            Some(key) => message.with_key(key),
            None => message,
        };
        for number in 0..count {
            world.broker.send(keyed(nameless(number)));
        }
        world.broker.send(keyed(message("m-1")));
        let options = |inbox: InboxBuilder| inbox.reexecute().expect_ids().ordered();
        let process = world.process(options, world.counting());
        let emptied = timeout(Duration::from_secs(5), world.broker.emptied()).await;
        emptied.expect("none is held");
        let no_id =
            |(_, reason, ..): &(_, DeadLetterReason, _, _)| *reason == DeadLetterReason::NoId;
        assert_eq!(world.dead_letters().iter().filter(|it| no_id(it)).count(), count);
        let missing = timeout(HOUR, process.monitor.until_ids_are_missing());
        assert!(missing.await.is_err(), "one has an id");
        process.stop().await;
    }
}

#[tokio::test(start_paused = true)]
async fn a_held_message_without_an_id_is_dropped_once_its_delivery_has_ended() {
    let world = World::new();
    let process = world.process(|inbox| inbox.reexecute().expect_ids(), world.counting());
    world.broker.send(nameless(0));
    while process.monitor.stats().without_id == 0 {
        sleep(Duration::from_millis(1)).await;
    }
    world.broker.redeliver();
    while process.monitor.stats().without_id < 2 {
        sleep(Duration::from_millis(1)).await;
    }
    // Long before it is parked.
    sleep(Duration::from_secs(5)).await;
    assert_eq!(process.monitor.stats().unacknowledged, 1);
    process.stop().await;
}

#[tokio::test(start_paused = true)]
async fn a_message_without_an_id_that_was_redriven_under_a_new_one_is_handled_once() {
    let world = World::new();
    let process = world.process(InboxBuilder::reexecute, world.counting());
    let nameless = Message::new("memory://orders", "nameless");
    world.broker.send(nameless.clone());
    world.broker.emptied().await;
    let parked = world.dead_letters.list().remove(0);
    assert_eq!(parked.reason, DeadLetterReason::NoId);
    let id = DeadLetter::redriven_id("orders", &parked.id, &nameless.payload);
    let redriven = nameless
        .with_header("message-id", id.to_string())
        .with_header(DeadLetter::REDRIVE_HEADER, parked.id_hex());
    // It is the dead letter of the consumer and the payload only.
    assert_eq!(DeadLetter::id_of("orders", Some(&id), &redriven), parked.id);
    assert_ne!(DeadLetter::id_of("invoices", Some(&id), &redriven), parked.id);
    let mut other = redriven.clone();
    other.payload = "other".into();
    assert_ne!(DeadLetter::id_of("orders", Some(&id), &other), parked.id);
    for _ in 0..2 {
        world.broker.send(redriven.clone());
        world.broker.emptied().await;
    }
    assert_eq!(world.effects(), once([id.to_string()]));
    assert!(world.dead_letters().is_empty());
    process.stop().await;
}

#[tokio::test(start_paused = true)]
async fn a_withdrawn_attempt_does_not_count_and_its_message_is_never_parked() {
    let world = World::new();
    let calls = Arc::new(AtomicU32::new(0));
    let handler = {
        let (calls, effects) = (Arc::clone(&calls), Arc::clone(&world.effects));
        move |message: MessageExecution| {
            let call = calls.fetch_add(1, Ordering::SeqCst);
            assert_eq!(message.attempt(), 1);
            if call == 20 {
                count(&effects, &message);
            }
            std::future::ready(match call {
                20 => Ok(()),
                _ => Err(MessageFailure::withdraw_after(Duration::from_secs(1), "a wrong path")),
            })
        }
    };
    let pauses = attempts(3, Duration::from_secs(1));
    let process = world.process(|inbox| inbox.reexecute().attempts(pauses), handler);
    world.send("m-1");
    world.broker.emptied().await;
    assert_eq!(world.effects(), once(["m-1".to_owned()]));
    assert_eq!(calls.load(Ordering::SeqCst), 21);
    assert!(world.dead_letters().is_empty());
    process.stop().await;
}

/// A message that the broker cannot read.
fn unreadable(message: Message) -> Message {
    message.with_header(MemoryBroker::UNREADABLE, "a test")
}

#[tokio::test(start_paused = true)]
async fn a_message_that_the_source_cannot_read_is_parked_once_and_not_handled() {
    let world = World::new();
    let process = world.process(|inbox| inbox.reexecute().expect_ids(), world.counting());
    // It has no id that shows that the rules are right, and is not held as one without an id.
    world.broker.send(unreadable(nameless(1)));
    for _ in 0..2 {
        world.broker.send(unreadable(message("odd")));
        let emptied = timeout(Duration::from_secs(5), world.broker.emptied()).await;
        emptied.expect("none is held");
    }
    assert_eq!(process.monitor.stats().without_id, 0);
    let expected = |id: &str| (id.to_owned(), DeadLetterReason::Unreadable, 0, "a test".to_owned());
    assert_eq!(world.dead_letters(), [expected(""), expected("odd")]);
    // One that was handled before is a duplicate.
    world.send("m-1");
    world.broker.emptied().await;
    world.broker.send(unreadable(message("m-1")));
    world.broker.emptied().await;
    assert_eq!(world.effects(), once(["m-1".to_owned()]));
    assert_eq!((world.dead_letters().len(), process.monitor.stats().parked), (2, 2));
    process.stop().await;
}

#[tokio::test(start_paused = true)]
async fn a_message_that_the_source_cannot_read_parks_those_behind_it_with_its_order_key() {
    let world = World::new();
    world.broker.send(unreadable(message("odd")).with_key("a"));
    for (id, key) in [("a-2", "a"), ("b-1", "b")] {
        world.broker.send(message(id).with_key(key));
    }
    let process = world.process(|inbox| inbox.reexecute().ordered(), world.counting());
    world.broker.emptied().await;
    assert_eq!(world.effects(), once(["b-1".to_owned()]));
    let reasons = world.dead_letters().into_iter().map(|(id, reason, ..)| (id, reason));
    let expected = [("a-2", DeadLetterReason::Blocked), ("odd", DeadLetterReason::Unreadable)];
    assert!(reasons.eq(expected.map(|(id, reason)| (id.to_owned(), reason))));
    process.stop().await;
}
