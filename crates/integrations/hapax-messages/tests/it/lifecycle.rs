//! Order, unknown outcomes, shutdown and configuration of consumers.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use hapax_core::{HookTiming, Idempotency, Verdict};
use hapax_messages::{
    Attempts, ConsumerLimits, DeadLetterReason, DeadLetterStore as _, Inbox, InboxBuilder,
    InboxError, MessageExecution, MessageFailure, PublishedDeadLetters,
};
use tokio::sync::Notify;
use tokio::time::{Instant, sleep};

use super::world::*;

#[tokio::test(start_paused = true)]
async fn ordered_messages_wait_for_a_retry_and_others_do_not() {
    let world = World::new();
    let handled = Arc::new(Mutex::new(Vec::new()));
    let handler = {
        let handled = Arc::clone(&handled);
        move |message: MessageExecution| {
            let handled = Arc::clone(&handled);
            async move {
                if message.id().as_str() == "a-1" && message.attempt() < 3 {
                    return Err(MessageFailure::retry_after(LEASE * 2, "not yet"));
                }
                handled.lock().unwrap().push(message.id().to_string());
                Ok(())
            }
        }
    };
    for (id, key) in [("a-1", "a"), ("a-2", "a"), ("b-1", "b"), ("a-3", "a"), ("b-2", "b")] {
        world.broker.send(message(id).with_key(key));
    }
    let process = world.process(|inbox| inbox.reexecute().ordered(), handler);
    world.broker.emptied().await;
    assert_eq!(*handled.lock().unwrap(), ["b-1", "b-2", "a-1", "a-2", "a-3"]);
    assert!(process.stop().await);
}

#[tokio::test(start_paused = true)]
async fn a_dead_letter_parks_the_messages_behind_it_with_its_key() {
    let world = World::new();
    let effects = Arc::clone(&world.effects);
    let handler = move |message: MessageExecution| {
        let result = match message.id().as_str() {
            "a-1" => Err(MessageFailure::reject("never")),
            _ => {
                count(&effects, &message);
                Ok(())
            }
        };
        std::future::ready(result)
    };
    for (id, key) in [("a-1", "a"), ("a-2", "a"), ("b-1", "b")] {
        world.broker.send(message(id).with_key(key));
    }
    let process = world.process(|inbox| inbox.reexecute().ordered(), handler.clone());
    world.broker.emptied().await;
    assert!(process.stop().await);
    // Another process finds the key too.
    let process = world.process(|inbox| inbox.reexecute().ordered(), handler);
    world.broker.send(message("a-3").with_key("a"));
    world.broker.emptied().await;
    let reasons: Vec<_> =
        world.dead_letters().into_iter().map(|(id, reason, ..)| (id, reason)).collect();
    use DeadLetterReason::{Blocked, Rejected};
    let expected = [("a-1", Rejected), ("a-2", Blocked), ("a-3", Blocked)];
    assert_eq!(reasons, expected.map(|(id, reason)| (id.to_owned(), reason)));
    for dead_letter in world.dead_letters.list() {
        world.dead_letters.remove(&dead_letter.id).await.unwrap();
    }
    // At once.
    world.broker.send(message("a-4").with_key("a"));
    world.broker.emptied().await;
    assert_eq!(world.effects(), once(["a-4".to_owned(), "b-1".to_owned()]));
    assert!(process.stop().await);
}

#[tokio::test(start_paused = true)]
async fn a_redriven_message_is_handled_despite_its_blocked_key_and_its_dead_letter_is_removed() {
    let world = World::new();
    let rejects = Arc::new(AtomicBool::new(true));
    let handler = {
        let (rejects, effects) = (Arc::clone(&rejects), Arc::clone(&world.effects));
        move |message: MessageExecution| {
            if rejects.load(Ordering::SeqCst) {
                return std::future::ready(Err(MessageFailure::reject("not yet")));
            }
            count(&effects, &message);
            std::future::ready(Ok(()))
        }
    };
    world.broker.send(message("a-1").with_key("a"));
    let process = world.process(|inbox| inbox.reexecute().ordered(), handler);
    world.broker.emptied().await;
    rejects.store(false, Ordering::SeqCst);
    let dead_letter = world.dead_letters.list()[0].id_hex();
    let redriven =
        || message("a-1").with_key("a").with_header("hapax-redrive", dead_letter.clone());
    // Its record was not released: it stays parked, and so does its dead letter.
    world.broker.send(redriven());
    world.broker.emptied().await;
    assert_eq!((world.effects().len(), world.dead_letters().len()), (0, 1));
    world.release("a-1").await;
    world.broker.send(redriven());
    world.broker.emptied().await;
    assert_eq!((world.effects(), world.dead_letters().len()), (once(["a-1".to_owned()]), 0));
    assert!(process.stop().await);
}

#[tokio::test(start_paused = true)]
async fn under_block_a_message_whose_process_died_is_parked_as_unknown() {
    let world = World::new();
    world.send("poison");
    let begun = Arc::new(Notify::new());
    let process = world.process(InboxBuilder::block, poisoned(&world.effects, &begun));
    begun.notified().await;
    process.crash().await;
    let process = world.process(InboxBuilder::block, poisoned(&world.effects, &begun));
    world.broker.emptied().await;
    let dead_letters = world.dead_letters();
    assert_eq!((dead_letters.len(), dead_letters[0].1), (1, DeadLetterReason::Unknown));
    assert_eq!(dead_letters[0].2, 1, "the attempt of the process that died");
    assert!(process.stop().await);
}

#[tokio::test(start_paused = true)]
async fn a_hook_decides_about_a_message_whose_process_died() {
    for (verdict, effects) in [(Verdict::Happened(()), 0), (Verdict::DidNotHappen, 1)] {
        let world = World::new();
        let timing = HookTiming { after: LEASE, timeout: LEASE };
        let options = |inbox: InboxBuilder| {
            let verdict = verdict.clone();
            inbox.reconcile_with(timing, move |call| {
                assert_eq!((call.id.as_str(), call.attempt), ("poison", 1));
                std::future::ready(verdict.clone())
            })
        };
        world.send("poison");
        let begun = Arc::new(Notify::new());
        let process = world.process(options, poisoned(&world.effects, &begun));
        begun.notified().await;
        process.crash().await;
        let process = world.process(options, world.counting());
        world.broker.emptied().await;
        assert_eq!(world.effects().len(), effects, "{verdict:?}");
        assert!(world.dead_letters().is_empty());
        assert!(process.stop().await);
    }
}

#[tokio::test(start_paused = true)]
async fn a_handler_that_panics_is_retried_and_then_parked() {
    let world = World::new();
    world.send("m-1");
    world.send("m-2");
    let effects = Arc::clone(&world.effects);
    let handler = move |message: MessageExecution| {
        let effects = Arc::clone(&effects);
        async move {
            assert_ne!(message.id().as_str(), "m-1", "a bug");
            count(&effects, &message);
            Ok(())
        }
    };
    let options = |inbox: InboxBuilder| inbox.reexecute().attempts(attempts(2, LEASE));
    let process = world.process(options, handler);
    world.broker.emptied().await;
    let dead_letters = world.dead_letters();
    assert_eq!((dead_letters.len(), &*dead_letters[0].0, dead_letters[0].2), (1, "m-1", 2));
    assert!(dead_letters[0].3.contains("panicked"), "{}", dead_letters[0].3);
    assert_eq!(world.effects(), once(["m-2".to_owned()]));
    assert!(process.stop().await);
}

#[tokio::test(start_paused = true)]
async fn a_shutdown_ends_what_is_in_progress_and_leaves_the_rest_to_the_broker() {
    let world = World::new();
    let begun = Arc::new(Notify::new());
    let effects = Arc::clone(&world.effects);
    let handler = {
        let begun = Arc::clone(&begun);
        move |message: MessageExecution| {
            let (effects, begun) = (Arc::clone(&effects), Arc::clone(&begun));
            async move {
                begun.notify_one();
                sleep(Duration::from_secs(10)).await;
                count(&effects, &message);
                Ok(())
            }
        }
    };
    for number in 0..40 {
        world.send(&format!("m-{number}"));
    }
    let process = world.process(InboxBuilder::reexecute, handler);
    begun.notified().await;
    assert!(process.stop().await);
    assert_eq!(world.effects().len(), 8, "one for each handler");
    assert_eq!(world.broker.backlog(), 32);
    let process = world.process(InboxBuilder::reexecute, world.counting());
    world.broker.emptied().await;
    assert_eq!(world.effects(), once((0..40).map(|number| format!("m-{number}"))));
    assert_eq!(process.monitor.stats().suspects, 0);
    assert!(process.stop().await);
}

#[tokio::test(start_paused = true)]
async fn a_shutdown_that_takes_too_long_drops_what_is_in_progress() {
    let world = World::new();
    world.send("poison");
    let begun = Arc::new(Notify::new());
    let process = world.process(InboxBuilder::reexecute, poisoned(&world.effects, &begun));
    begun.notified().await;
    let before = Instant::now();
    assert!(!process.stop().await);
    assert_eq!(before.elapsed(), ConsumerLimits::default().drain_timeout);
    assert_eq!(world.broker.backlog(), 1);
}

#[tokio::test(start_paused = true)]
async fn a_message_that_takes_long_or_waits_is_held_at_the_broker() {
    let world = World::new();
    world.broker.set_ack_wait(LEASE);
    let effects = Arc::clone(&world.effects);
    let handler = move |message: MessageExecution| {
        let effects = Arc::clone(&effects);
        async move {
            sleep(LEASE * 5).await;
            count(&effects, &message);
            Ok(())
        }
    };
    // More than there are handlers.
    let ids = || (0..20).map(|number| format!("m-{number}"));
    ids().for_each(|id| world.send(&id));
    let process = world.process(InboxBuilder::reexecute, handler);
    world.broker.emptied().await;
    assert_eq!((world.effects(), world.broker.deliveries()), (once(ids()), 20));
    assert!(process.stop().await);
}

#[tokio::test(start_paused = true)]
async fn a_handler_that_takes_a_transaction_of_an_inbox_without_them_gets_an_error() {
    let world = World::new();
    let handler = |message: MessageExecution| async move {
        let taken = message.transaction::<u8>().await;
        Err(MessageFailure::reject(taken.unwrap_err().to_string()))
    };
    world.send("m-1");
    let process = world.process(InboxBuilder::reexecute, handler);
    world.broker.emptied().await;
    assert!(world.dead_letters()[0].3.contains("found one without"), "{:?}", world.dead_letters());
    assert!(process.stop().await);
}

#[tokio::test(start_paused = true)]
async fn messages_are_received_again_after_an_outage_of_the_broker() {
    let world = World::new();
    world.broker.set_down(true);
    let process = world.process(InboxBuilder::reexecute, world.counting());
    sleep(HOUR).await;
    world.send("m-1");
    world.broker.set_down(false);
    world.broker.emptied().await;
    assert_eq!(world.effects(), once(["m-1".to_owned()]));
    assert!(process.stop().await);
}

#[tokio::test]
async fn a_wrong_configuration_is_an_error() {
    let world = World::new();
    let engine = || Idempotency::builder(Arc::clone(&world.memory)).build().unwrap();
    let error = |inbox: InboxBuilder| inbox.build().unwrap_err();
    let bare = || Inbox::builder("orders", engine());
    assert_eq!(error(bare()), InboxError::NoUnknownRule);
    assert_eq!(error(bare().reexecute()), InboxError::NoDeadLetters);
    let named = Inbox::builder("", engine()).reexecute();
    assert_eq!(error(named), InboxError::Consumer { length: 0 });
    let inbox = || world.inbox(engine()).reexecute();
    assert!(inbox().build().is_ok());
    assert_eq!(error(inbox().ids(hapax_messages::IdRules::new([]))), InboxError::NoIdRules);
    let pauses = Attempts { first_pause: HOUR, longest_pause: LEASE, ..Attempts::default() };
    let expected = InboxError::Pauses { first: HOUR, longest: LEASE };
    assert_eq!(error(inbox().attempts(pauses)), expected);
    let published = PublishedDeadLetters::new(Arc::new(world.broker.clone()), "dead");
    let published = inbox().dead_letters(Arc::new(published));
    assert!(published.clone().build().is_ok());
    assert_eq!(error(published.ordered()), InboxError::OrderKeys);
    assert!(matches!(error(inbox().lease(Duration::ZERO)), InboxError::Policy(_)));
    assert!(matches!(error(inbox().retention(Duration::ZERO)), InboxError::Policy(_)));
}

#[tokio::test(start_paused = true)]
async fn the_bytes_of_the_retention_are_logged_at_start_and_by_the_rate_of_the_first_minute() {
    let log = Log::default();
    // For all threads: the interest of a thread without a subscriber would hide lines of this one.
    tracing_subscriber::fmt().with_ansi(false).with_writer(log.clone()).init();
    let lines = || {
        let text = log.text();
        let ours = text.lines().filter(|line| line.contains("retention 30 days"));
        ours.map(|line| line.split_once("retention 30").unwrap().1.to_owned()).collect::<Vec<_>>()
    };
    let world = World::new();
    let process = world.process(InboxBuilder::reexecute, world.counting());
    let minute = Duration::from_secs(60);
    // The first minute has no messages.
    sleep(minute + Duration::from_secs(1)).await;
    for number in 0..180 {
        world.send(&format!("m-{}", number % 120));
    }
    world.broker.emptied().await;
    assert_eq!(lines().len(), 1);
    sleep(minute).await;
    world.send("m-of-the-day");
    sleep(24 * 60 * minute).await;
    let start = " days: at 1 id/s the ids take about 1.8 GB in the store (700 bytes per id)";
    let first = " days: at 2.0 ids/s of this process the ids take about 3.6 GB in the store (700 bytes \
                 per id)";
    let day = " days: at under 0.001 ids/s of this process the ids take about 21 KB in the store (700 bytes \
               per id)";
    let found: Vec<_> = lines()
        .into_iter()
        .map(|line| line.split(" consumer=").next().unwrap().to_owned())
        .collect();
    assert_eq!(found, [start, first, day]);
    assert!(process.stop().await);
}

#[tokio::test(start_paused = true)]
async fn a_message_that_waits_for_its_next_attempt_is_dropped_when_its_delivery_ends() {
    let world = World::new();
    let handler = |_: MessageExecution| {
        std::future::ready(Err(MessageFailure::retry_after(Duration::from_secs(600), "no")))
    };
    let process = world.process(InboxBuilder::reexecute, handler);
    world.send("m-1");
    let unacknowledged = async |expected: u64| {
        while process.monitor.stats().unacknowledged != expected {
            sleep(Duration::from_millis(1)).await;
        }
    };
    unacknowledged(1).await;
    sleep(Duration::from_secs(1)).await;
    let begun = Instant::now();
    world.broker.redeliver();
    unacknowledged(2).await;
    unacknowledged(1).await;
    // Long before the next attempt.
    assert!(begun.elapsed() < Duration::from_secs(1), "{:?}", begun.elapsed());
    assert!(process.stop().await);
}

#[tokio::test(start_paused = true)]
async fn a_message_whose_delivery_has_ended_is_not_started() {
    let world = World::new();
    let (begun, end) = (Arc::new(Notify::new()), Arc::new(Notify::new()));
    let (has_begun, ends) = (Arc::clone(&begun), Arc::clone(&end));
    let handler = move |message: MessageExecution| {
        let (begun, end) = (Arc::clone(&has_begun), Arc::clone(&ends));
        async move {
            if message.id().as_str() == "a-1" {
                begun.notify_one();
                end.notified().await;
            }
            Ok(())
        }
    };
    for id in ["a-1", "a-2", "a-3"] {
        world.broker.send(message(id).with_key("a"));
    }
    let process = world.process(|inbox| inbox.reexecute().ordered(), handler);
    begun.notified().await;
    world.broker.redeliver();
    while process.monitor.stats().received < 6 {
        sleep(Duration::from_millis(1)).await;
    }
    end.notify_one();
    world.broker.emptied().await;
    let stats = process.monitor.stats();
    // The others that wait for it are dropped, and handled as they are delivered again.
    assert_eq!((stats.handled, stats.duplicates), (3, 1));
    assert!(process.stop().await);
}
