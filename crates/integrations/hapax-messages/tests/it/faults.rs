//! Faults that are not a message's own: rules that find no id, and withdrawn attempts.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use hapax_messages::{
    DeadLetter, DeadLetterReason, InboxBuilder, Message, MessageExecution, MessageFailure,
};
use tokio::time::timeout;

use super::world::*;

#[tokio::test(start_paused = true)]
async fn the_first_messages_are_held_while_none_has_an_id_and_parked_after_one_that_has() {
    let world = World::new();
    let process = world.process(|inbox| inbox.reexecute().expect_ids(), world.counting());
    for number in 0..9 {
        world.broker.send(Message::new("memory://orders", format!("nameless {number}")));
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
async fn ten_messages_without_an_id_or_some_for_half_a_minute_show_that_the_rules_are_wrong() {
    for (messages, within) in [(10, Duration::from_secs(5)), (1, Duration::from_secs(35))] {
        let world = World::new();
        let process = world.process(|inbox| inbox.reexecute().expect_ids(), world.counting());
        for number in 0..messages {
            world.broker.send(Message::new("memory://orders", format!("nameless {number}")));
        }
        let missing = timeout(within, process.monitor.until_ids_are_missing()).await;
        let error = missing.expect("they are missing").to_string();
        assert!(error.contains("expected an id by the header message-id"), "{error}");
        assert!(world.dead_letters().is_empty());
        process.stop().await;
    }
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
