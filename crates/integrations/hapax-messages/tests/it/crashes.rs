//! Crashes and failures of one message, in turn.

use std::num::NonZeroU32;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use hapax_core::{HookTiming, Verdict};
use hapax_messages::{Attempts, DeadLetterReason, InboxBuilder, MessageExecution, MessageFailure};
use tokio::sync::Notify;
use tokio::time::sleep;

use super::world::*;

/// Requests of a handler to the test.
#[derive(Clone, Default)]
struct Requests {
    crash: Arc<Notify>,
    restart: Arc<Notify>,
}

/// Runs one message, in a new process after each crash or restart. Each letter of `executions` is one:
/// `r` fails, `u` has an unknown outcome, `s` too, and its process is shut down, `c` crashes. After
/// these the message is handled. Returns the number of suspects.
async fn run(
    world: &World,
    executions: &'static str,
    options: impl Fn(InboxBuilder) -> InboxBuilder,
) -> u64 {
    world.send("m-1");
    let requests = Requests::default();
    let effects = Arc::clone(&world.effects);
    let handler = {
        let requests = requests.clone();
        move |message: MessageExecution| {
            let (requests, effects) = (requests.clone(), Arc::clone(&effects));
            async move {
                let number = usize::try_from(message.attempt()).unwrap() - 1;
                match executions.as_bytes().get(number) {
                    Some(b'r') => return Err(MessageFailure::retry("down")),
                    Some(b'u') => return Err(MessageFailure::unknown("no answer")),
                    Some(b's') => {
                        requests.restart.notify_one();
                        return Err(MessageFailure::unknown("no answer"));
                    }
                    Some(_) => {
                        requests.crash.notify_one();
                        std::future::pending::<()>().await;
                    }
                    None => count(&effects, &message),
                }
                Ok(())
            }
        }
    };
    let mut suspects = 0;
    loop {
        let process = world.process(&options, handler.clone());
        let monitor = process.monitor.clone();
        let has_ended = tokio::select! {
            () = world.broker.emptied() => process.stop().await,
            () = requests.restart.notified() => !process.stop().await,
            () = requests.crash.notified() => {
                process.crash().await;
                false
            }
        };
        suspects += monitor.stats().suspects;
        if has_ended {
            return suspects;
        }
    }
}

/// Limits the crashes to three, with pauses of a millisecond.
fn three_crashes(inbox: InboxBuilder) -> InboxBuilder {
    let max_crashes = NonZeroU32::new(3).unwrap();
    let attempts = attempts(60, Duration::from_millis(1));
    inbox.reexecute().attempts(Attempts { max_crashes, ..attempts })
}

#[tokio::test(start_paused = true)]
async fn rolling_restarts_in_an_outage_make_no_dead_letter_and_no_suspect() {
    let world = World::new();
    let suspects = run(&world, "uuuuuuuuusssssussus", three_crashes).await;
    assert_eq!((world.effects(), world.dead_letters()), (once(["m-1".to_owned()]), vec![]));
    assert_eq!(suspects, 0);
}

#[tokio::test(start_paused = true)]
async fn crashes_after_failures_are_counted_apart_from_them() {
    for executions in ["rrrrrrrrcc", "uuuuuuuucc", "cc", "ccrcc", "ccuccsccu", "crcrcrcucuc"] {
        let world = World::new();
        let suspects = run(&world, executions, three_crashes).await;
        let handled = (once(["m-1".to_owned()]), vec![]);
        assert_eq!((world.effects(), world.dead_letters()), handled, "{executions}");
        assert!(suspects > 0, "{executions}");
    }
}

#[tokio::test(start_paused = true)]
async fn consecutive_crashes_make_a_dead_letter_whatever_was_before_them() {
    for (executions, attempts) in [("ccc", 3), ("rrrrccc", 7), ("uuuuccc", 7), ("ccsccrccc", 9)] {
        let world = World::new();
        run(&world, executions, three_crashes).await;
        let dead_letters = world.dead_letters();
        assert_eq!(dead_letters.len(), 1, "{executions}");
        let (_, reason, made, error) = &dead_letters[0];
        assert_eq!((*reason, *made), (DeadLetterReason::Attempts, attempts), "{executions}");
        assert!(error.contains("its process ended each time"), "{executions}: {error}");
        assert!(world.effects().is_empty());
    }
}

#[tokio::test(start_paused = true)]
async fn with_a_hook_crashes_are_counted_apart_too() {
    let timing = HookTiming { after: Duration::ZERO, timeout: LEASE };
    let options = |inbox| {
        three_crashes(inbox).reconcile_with(timing, |_| std::future::ready(Verdict::DidNotHappen))
    };
    let world = World::new();
    run(&world, "uuuuuuuusccucc", options).await;
    assert_eq!((world.effects(), world.dead_letters()), (once(["m-1".to_owned()]), vec![]));
    let world = World::new();
    run(&world, "uuuuuuuusccuccc", options).await;
    assert_eq!((world.effects().len(), world.dead_letters()[0].2), (0, 15));
}

#[tokio::test(start_paused = true)]
async fn a_checkpoint_of_the_handler_survives_crashes_and_unknown_outcomes() {
    let world = World::new();
    world.send("m-1");
    let requests = Requests::default();
    let effects = Arc::clone(&world.effects);
    let handler = {
        let requests = requests.clone();
        move |message: MessageExecution| {
            let (requests, effects) = (requests.clone(), Arc::clone(&effects));
            async move {
                let found = message.lease().checkpoint().cloned();
                assert_eq!(found.as_deref(), (message.attempt() > 2).then_some(&b"charged"[..]));
                match message.attempt() {
                    1 => {}
                    2 => message.lease().save("charged".into()).await.unwrap(),
                    3 => std::future::pending().await,
                    _ => {
                        count(&effects, &message);
                        return Ok(());
                    }
                }
                requests.restart.notify_one();
                Err(MessageFailure::unknown("no answer"))
            }
        }
    };
    let options =
        |inbox: InboxBuilder| inbox.reexecute().attempts(attempts(60, Duration::from_millis(1)));
    for _ in 0..2 {
        let process = world.process(options, handler.clone());
        requests.restart.notified().await;
        assert!(process.stop().await);
    }
    let process = world.process(options, handler.clone());
    sleep(LEASE).await;
    process.crash().await;
    let process = world.process(options, handler);
    world.broker.emptied().await;
    assert_eq!((world.effects(), world.dead_letters()), (once(["m-1".to_owned()]), vec![]));
    assert!(process.stop().await);
}

#[tokio::test(start_paused = true)]
async fn a_takeover_that_is_withdrawn_again_and_again_is_a_suspect_once() {
    let world = World::new();
    world.broker.set_delays_from(Duration::ZERO);
    world.send("m-1");
    let (begun, calls) = (Arc::<Notify>::default(), Arc::<Mutex<u32>>::default());
    let effects = Arc::clone(&world.effects);
    let handler = {
        let (begun, calls) = (Arc::clone(&begun), Arc::clone(&calls));
        move |message: MessageExecution| {
            let call = {
                let mut calls = calls.lock().unwrap();
                *calls += 1;
                *calls
            };
            let (begun, effects) = (Arc::clone(&begun), Arc::clone(&effects));
            async move {
                match call {
                    1 => {
                        begun.notify_one();
                        std::future::pending().await
                    }
                    // A service that is not deployed yet.
                    2..=4 => Err(MessageFailure::withdraw_after(Duration::from_secs(5), "404")),
                    _ => {
                        count(&effects, &message);
                        Ok(())
                    }
                }
            }
        }
    };
    let process = world.process(InboxBuilder::reexecute, handler.clone());
    begun.notified().await;
    process.crash().await;
    let process = world.process(InboxBuilder::reexecute, handler);
    world.broker.emptied().await;
    let stats = process.monitor.stats();
    assert!(process.stop().await);
    assert_eq!((world.effects(), world.dead_letters()), (once(["m-1".to_owned()]), vec![]));
    assert_eq!((stats.suspects, *calls.lock().unwrap()), (1, 5), "{stats:?}");
}
