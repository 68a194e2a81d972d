//! The claim mode: duplicates, failures, crashes and outages.

use std::num::NonZeroU32;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::time::Duration;

use hapax_core::{Clock, Timestamp};
use hapax_messages::{
    Attempts, DeadLetterReason, InboxBuilder, Message, MessageExecution, MessageFailure, OnTooOld,
};
use tokio::sync::{Notify, Semaphore};
use tokio::time::{Instant, sleep};

use super::world::*;

#[tokio::test(start_paused = true)]
async fn each_message_is_handled_once_and_every_duplicate_acknowledged() {
    let world = World::new();
    for number in 0..300 {
        world.send(&format!("m-{}", number % 200));
    }
    let process = world.process(InboxBuilder::reexecute, world.counting());
    world.broker.emptied().await;
    assert_eq!(world.effects(), once((0..200).map(|number| format!("m-{number}"))));
    let stats = process.monitor.stats();
    assert_eq!((stats.received, stats.handled, stats.duplicates), (300, 200, 100));
    let monitor = process.monitor.clone();
    assert!(process.stop().await);
    assert_eq!((stats.parked, monitor.stats().unacknowledged), (0, 0));
    assert!(world.dead_letters().is_empty());
}

#[tokio::test(start_paused = true)]
async fn a_message_whose_acknowledgement_was_lost_is_not_handled_again() {
    let world = World::new();
    world.send("m-1");
    world.broker.lose_acknowledgements(true);
    let process = world.process(InboxBuilder::reexecute, world.counting());
    sleep(LEASE * 3).await;
    assert!(world.broker.deliveries() > 1);
    world.broker.lose_acknowledgements(false);
    world.broker.emptied().await;
    assert_eq!(world.effects(), once(["m-1".to_owned()]));
    assert!(process.stop().await);
}

#[tokio::test(start_paused = true)]
async fn a_duplicate_of_a_message_that_then_fails_is_handled_once() {
    let world = World::new();
    let (effects, tries) = (Arc::clone(&world.effects), Arc::new(AtomicU32::new(0)));
    let handler = {
        let tries = Arc::clone(&tries);
        move |message: MessageExecution| {
            let (effects, tries) = (Arc::clone(&effects), Arc::clone(&tries));
            async move {
                let attempt = tries.fetch_add(1, Ordering::SeqCst) + 1;
                assert_eq!(message.attempt(), attempt);
                sleep(LEASE * 2).await;
                if attempt == 1 {
                    return Err(MessageFailure::retry("the first attempt fails"));
                }
                count(&effects, &message);
                Ok(())
            }
        }
    };
    let first = world.process(InboxBuilder::reexecute, handler.clone());
    let second = world.process(InboxBuilder::reexecute, handler);
    world.send("m-1");
    sleep(LEASE).await;
    world.send("m-1");
    world.broker.emptied().await;
    assert_eq!(world.effects(), once(["m-1".to_owned()]));
    assert_eq!(tries.load(Ordering::SeqCst), 2);
    assert!(first.stop().await && second.stop().await);
}

#[tokio::test(start_paused = true)]
async fn of_two_hundred_duplicates_in_three_processes_one_is_handled() {
    let world = World::new();
    let effects = Arc::clone(&world.effects);
    let handler = move |message: MessageExecution| {
        let effects = Arc::clone(&effects);
        async move {
            sleep(LEASE * 3).await;
            count(&effects, &message);
            Ok(())
        }
    };
    let processes: Vec<_> =
        (0..3).map(|_| world.process(InboxBuilder::reexecute, handler.clone())).collect();
    for _ in 0..200 {
        world.send("m-1");
    }
    world.broker.emptied().await;
    assert_eq!(world.effects(), once(["m-1".to_owned()]));
    let all = processes.iter().map(|process| process.monitor.stats());
    assert_eq!(all.clone().map(|stats| stats.duplicates).sum::<u64>(), 199);
    assert!(all.map(|stats| stats.held_in_flight).sum::<u64>() > 199);
    assert!(world.broker.holds() > 0, "held messages are held at the broker too");
    for process in processes {
        assert!(process.stop().await);
    }
}

#[tokio::test(start_paused = true)]
async fn a_message_that_kills_its_process_is_parked_and_no_other_one() {
    let world = World::new();
    let innocent = || (0..49).map(|number| format!("m-{number}"));
    for (number, id) in innocent().enumerate() {
        if number == 5 {
            world.send("poison");
        }
        world.send(&id);
    }
    let options = |inbox: InboxBuilder| {
        let max_crashes = NonZeroU32::new(3).unwrap();
        inbox.reexecute().attempts(Attempts { max_crashes, ..attempts(60, 10 * LEASE) })
    };
    let begun = Arc::new(Notify::new());
    for _ in 0..3 {
        let process = world.process(options, poisoned(&world.effects, &begun));
        begun.notified().await;
        process.crash().await;
    }
    let process = world.process(options, poisoned(&world.effects, &begun));
    world.broker.emptied().await;
    // The first crash took down what was in progress with it; after that the suspect was alone.
    assert_eq!(world.effects(), once(innocent()));
    let expected =
        "expected an attempt to end, found that its process ended each time: the message \
                    may crash the handler"
            .to_owned();
    assert_eq!(
        world.dead_letters(),
        [("poison".to_owned(), DeadLetterReason::Attempts, 3, expected)]
    );
    assert_eq!(&*world.dead_letters.list()[0].message.origin, "memory://orders");
    assert!(process.monitor.stats().suspects > 0);
    assert!(process.stop().await);
}

#[tokio::test(start_paused = true)]
async fn an_outage_of_an_hour_makes_no_dead_letters_with_the_defaults() {
    let world = World::new();
    let ids = || (0..200).map(|number| format!("m-{number}"));
    ids().for_each(|id| world.send(&id));
    let begun = Instant::now();
    let handler = {
        let effects = Arc::clone(&world.effects);
        move |execution: MessageExecution| {
            let is_down = begun.elapsed() < HOUR;
            if !is_down {
                count(&effects, &execution);
            }
            std::future::ready(if is_down { Err(MessageFailure::retry("down")) } else { Ok(()) })
        }
    };
    let process = world.process(InboxBuilder::reexecute, handler);
    world.broker.emptied().await;
    // The last pause is at most five minutes.
    assert!(begun.elapsed() < HOUR + HOUR / 6, "{:?}", begun.elapsed());
    assert_eq!(world.effects(), once(ids()));
    assert_eq!(world.dead_letters(), []);
    assert!(process.stop().await);
}

#[tokio::test(start_paused = true)]
async fn attempts_are_counted_over_an_outage_that_is_longer_than_all_pauses() {
    let world = World::new();
    let tries = Arc::new(AtomicU32::new(0));
    let handler = |tries: &Arc<AtomicU32>| {
        let tries = Arc::clone(tries);
        move |execution: MessageExecution| {
            assert_eq!(execution.attempt(), tries.fetch_add(1, Ordering::SeqCst) + 1);
            std::future::ready(Err(MessageFailure::retry("no")))
        }
    };
    let options = |inbox: InboxBuilder| {
        let attempts = attempts(4, Duration::from_millis(1));
        inbox.reexecute().attempts(attempts).retention(100 * HOUR)
    };
    world.send("m-1");
    for ended in 1..4 {
        // A pause of a millisecond, unless the store is down.
        let process = world.process(options, handler(&tries));
        while tries.load(Ordering::SeqCst) < ended {
            tokio::task::yield_now().await;
        }
        process.store.set_down(true);
        assert_eq!(tries.load(Ordering::SeqCst), ended);
        process.crash().await;
        sleep(10 * HOUR).await;
    }
    let process = world.process(options, handler(&tries));
    world.broker.emptied().await;
    assert_eq!(tries.load(Ordering::SeqCst), 4);
    let expected = ("m-1".to_owned(), DeadLetterReason::Attempts, 4, "no".to_owned());
    assert_eq!(world.dead_letters(), [expected]);
    assert!(process.stop().await);
}

#[tokio::test(start_paused = true)]
async fn attempts_are_counted_over_pauses_that_are_longer_than_the_lease() {
    let world = World::new();
    let handler = |message: MessageExecution| {
        let error = format!("attempt {}", message.attempt());
        std::future::ready(Err(MessageFailure::retry_after(100 * LEASE, error)))
    };
    world.send("m-1");
    let options = |inbox: InboxBuilder| inbox.reexecute().attempts(attempts(3, HOUR));
    let process = world.process(options, handler);
    world.broker.emptied().await;
    let expected = ("m-1".to_owned(), DeadLetterReason::Attempts, 3, "attempt 3".to_owned());
    assert_eq!(world.dead_letters(), [expected]);
    let dead_letter = &world.dead_letters.list()[0];
    assert!(dead_letter.last_at.since(dead_letter.first_at) >= 200 * LEASE.min(HOUR / 120));
    assert!(process.stop().await);
}

#[tokio::test(start_paused = true)]
async fn a_rejected_message_is_parked_at_once_and_its_duplicates_acknowledged() {
    let world = World::new();
    let handler =
        |_: MessageExecution| std::future::ready(Err(MessageFailure::reject("no such customer")));
    world.send("m-1");
    world.send("m-1");
    let process = world.process(InboxBuilder::reexecute, handler);
    world.broker.emptied().await;
    let expected = ("m-1".to_owned(), DeadLetterReason::Rejected, 1, "no such customer".to_owned());
    assert_eq!(world.dead_letters(), [expected]);
    assert_eq!(process.monitor.stats().duplicates, 1);
    assert!(process.stop().await);
}

#[tokio::test(start_paused = true)]
async fn messages_that_cannot_be_identified_are_parked_and_nothing_else_stops() {
    let world = World::new();
    let now = world.clock.now();
    world.broker.send(Message::new("memory://orders", "no id"));
    world.broker.send(Message::new("memory://orders", "empty id").with_header("message-id", ""));
    world.send("m-1");
    let other = Message::new("memory://orders", "another payload").with_header("message-id", "m-1");
    world.broker.send(other);
    let old = Timestamp::from_micros(now.as_micros() - 31 * 24 * HOUR.as_micros() as u64);
    world.broker.send(message("old").published_at(old));
    world.broker.send(message("old").published_at(old));
    world.send("m-2");
    let process = world.process(InboxBuilder::reexecute, world.counting());
    world.broker.emptied().await;
    assert_eq!(world.effects(), once(["m-1".to_owned(), "m-2".to_owned()]));
    let reasons: Vec<_> =
        world.dead_letters().into_iter().map(|(id, reason, ..)| (id, reason)).collect();
    use DeadLetterReason::{Mismatch, NoId, TooOld as Old};
    let expected = [("", NoId), ("", NoId), ("m-1", Mismatch), ("old", Old)];
    assert_eq!(reasons, expected.map(|(id, reason)| (id.to_owned(), reason)));
    assert!(process.stop().await);
}

#[tokio::test(start_paused = true)]
async fn a_message_older_than_the_retention_is_handled_if_the_inbox_is_so_configured() {
    let world = World::new();
    world.broker.send(message("old").published_at(Timestamp::from_micros(1)));
    let process =
        world.process(|inbox| inbox.reexecute().on_too_old(OnTooOld::Handle), world.counting());
    world.broker.emptied().await;
    assert_eq!(world.effects(), once(["old".to_owned()]));
    assert!(process.stop().await);
}

#[tokio::test(start_paused = true)]
async fn while_the_store_is_down_messages_are_held_and_none_is_parked() {
    let world = World::new();
    let process = world.process(InboxBuilder::reexecute, world.counting());
    world.send("m-0");
    world.broker.emptied().await;
    process.store.set_down(true);
    world.send("m-1");
    sleep(HOUR).await;
    for number in 2..200 {
        world.send(&format!("m-{number}"));
    }
    sleep(HOUR).await;
    assert_eq!(process.monitor.stats().unacknowledged, 1, "nothing is received");
    assert_eq!((world.broker.backlog(), world.effects().len()), (199, 1));
    process.store.set_down(false);
    world.broker.emptied().await;
    assert_eq!(world.effects(), once((0..200).map(|number| format!("m-{number}"))));
    assert!(world.dead_letters().is_empty());
    assert!(process.monitor.stats().held_by_store > 0);
    assert!(process.stop().await);
}

#[tokio::test(start_paused = true)]
async fn a_message_whose_dead_letter_is_not_stored_is_held_and_not_handled_again() {
    let world = World::new();
    let runs = Arc::new(AtomicU32::new(0));
    let handler = {
        let runs = Arc::clone(&runs);
        move |_: MessageExecution| {
            runs.fetch_add(1, Ordering::SeqCst);
            std::future::ready(Err(MessageFailure::retry("always")))
        }
    };
    world.dead_letters.fail(true);
    world.send("m-1");
    let options = |inbox: InboxBuilder| inbox.reexecute().attempts(attempts(2, LEASE));
    let process = world.process(options, handler);
    sleep(HOUR).await;
    assert_eq!((world.broker.backlog(), runs.load(Ordering::SeqCst)), (1, 2));
    world.dead_letters.fail(false);
    world.broker.emptied().await;
    assert_eq!(runs.load(Ordering::SeqCst), 2);
    let expected = ("m-1".to_owned(), DeadLetterReason::Attempts, 2, "always".to_owned());
    assert_eq!(world.dead_letters(), [expected]);
    assert!(process.stop().await);
}

#[tokio::test(start_paused = true)]
async fn an_owner_that_was_cut_off_does_not_replace_the_outcome_of_its_successor() {
    let world = World::new();
    let (begun, go_on) = (Arc::new(Notify::new()), Arc::new(Semaphore::new(0)));
    let is_first = Arc::new(AtomicBool::new(true));
    let effects = Arc::clone(&world.effects);
    let handler = {
        let (begun, go_on) = (Arc::clone(&begun), Arc::clone(&go_on));
        move |message: MessageExecution| {
            let (begun, go_on) = (Arc::clone(&begun), Arc::clone(&go_on));
            let (effects, is_first) =
                (Arc::clone(&effects), is_first.swap(false, Ordering::SeqCst));
            async move {
                if !is_first {
                    count(&effects, &message);
                    return Ok(());
                }
                begun.notify_one();
                let _ = go_on.acquire().await;
                assert!(message.lease().remaining().is_zero());
                Err(MessageFailure::reject("of the first owner"))
            }
        }
    };
    world.send("m-1");
    let first = world.process(InboxBuilder::reexecute, handler.clone());
    begun.notified().await;
    first.store.set_down(true);
    world.send("m-1");
    let second = world.process(InboxBuilder::reexecute, handler);
    // The first process has the second message too, and holds it.
    sleep(HOUR).await;
    world.broker.redeliver();
    sleep(HOUR).await;
    assert_eq!(world.effects(), once(["m-1".to_owned()]));
    first.store.set_down(false);
    go_on.add_permits(1);
    sleep(HOUR).await;
    world.broker.redeliver();
    world.broker.emptied().await;
    assert_eq!(world.effects(), once(["m-1".to_owned()]));
    assert!(world.dead_letters().is_empty());
    assert!(first.stop().await && second.stop().await);
}
