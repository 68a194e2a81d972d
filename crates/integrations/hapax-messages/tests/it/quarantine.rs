//! Consumers in a quarantine of their store.

use std::sync::Arc;
use std::time::Duration;

use hapax_core::{Clock, Idempotency, Quarantine};
use hapax_messages::{DeadLetterReason, InboxBuilder, Message};
use tokio::sync::Notify;
use tokio::time::{sleep, timeout};

use super::world::*;

/// Time within which a consumer or a relay goes on after a quarantine.
pub(super) const SOON: Duration = Duration::from_secs(5);

/// Begins a quarantine of an hour.
pub(super) fn begin(world: &World, engine: &Idempotency, route: Option<&str>) {
    let (route, since) = (route.map(str::to_owned), world.clock.now());
    let it = Quarantine { route, since, until: since.after(HOUR) };
    engine.quarantines().replace(vec![it], since);
}

/// Ends all quarantines.
pub(super) fn end(world: &World, engine: &Idempotency) {
    engine.quarantines().replace(Vec::new(), world.clock.now());
}

#[tokio::test(start_paused = true)]
async fn in_a_quarantine_messages_are_held_and_handled_after_it() {
    for is_ended in [false, true] {
        let world = World::new();
        let process = world.process(InboxBuilder::reexecute, world.counting());
        world.send("before");
        world.broker.emptied().await;

        begin(&world, &process.engine, None);
        // New ones, a duplicate, and one that would become a dead letter.
        for id in ["m-1", "m-2", "before"] {
            world.send(id);
        }
        world.broker.send(Message::new("memory://orders", "nameless"));
        sleep(HOUR - SOON).await;
        assert_eq!(world.effects(), once(["before".to_owned()]));
        assert_eq!((world.broker.backlog(), world.broker.acknowledgements()), (4, 1));
        assert_eq!((world.dead_letters.list().len(), process.monitor.stats().parked), (0, 0));

        // By its operator, or by itself.
        if is_ended {
            end(&world, &process.engine);
        } else {
            sleep(SOON).await;
        }
        timeout(SOON, world.broker.emptied()).await.expect("messages are handled again");
        assert_eq!(world.effects(), once(["before", "m-1", "m-2"].map(str::to_owned)));
        let reasons: Vec<_> = world.dead_letters().into_iter().map(|it| it.1).collect();
        assert_eq!(reasons, [DeadLetterReason::NoId]);
        assert!(process.stop().await);
    }
}

#[tokio::test(start_paused = true)]
async fn in_a_quarantine_a_message_whose_process_died_is_not_handled_again() {
    let (world, begun) = (World::new(), Arc::new(Notify::new()));
    let first = world.process(InboxBuilder::reexecute, poisoned(&world.effects, &begun));
    world.send("poison");
    begun.notified().await;
    first.crash().await;
    // Its record is in flight, and its lease lapses.
    let second = world.process(InboxBuilder::reexecute, world.counting());
    begin(&world, &second.engine, None);
    world.broker.redeliver();
    sleep(HOUR / 2).await;
    assert_eq!((world.effects().len(), world.broker.backlog()), (0, 1));
    end(&world, &second.engine);
    timeout(SOON, world.broker.emptied()).await.expect("it is handled again");
    assert_eq!(world.effects(), once(["poison".to_owned()]));
    assert!(second.stop().await);
}

#[tokio::test(start_paused = true)]
async fn while_the_register_of_the_store_is_not_read_messages_are_held() {
    let world = World::new();
    let process = world.process(InboxBuilder::reexecute, world.counting());
    world.send("before");
    world.broker.emptied().await;
    process.engine.quarantines().expire();
    world.send("m-1");
    world.send("before");
    sleep(HOUR).await;
    assert_eq!((world.effects().len(), world.broker.backlog()), (1, 2));
    process.engine.quarantines().set_valid_until(Some(process.engine.quarantines().time() + HOUR));
    timeout(SOON, world.broker.emptied()).await.expect("they are handled");
    assert_eq!(world.effects(), once(["before", "m-1"].map(str::to_owned)));
    assert!(process.stop().await);
}

#[tokio::test(start_paused = true)]
async fn a_quarantine_of_a_route_does_not_pause_a_consumer() {
    let world = World::new();
    let process = world.process(InboxBuilder::reexecute, world.counting());
    begin(&world, &process.engine, Some("/payments"));
    world.send("m-1");
    timeout(SOON, world.broker.emptied()).await.expect("it is handled");
    assert_eq!(world.effects(), once(["m-1".to_owned()]));
    assert!(process.stop().await);
}
