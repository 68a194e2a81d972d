//! The bytes of unacknowledged messages.

use std::num::NonZeroUsize;
use std::sync::Arc;
use std::time::Duration;

use hapax_core::Idempotency;
use hapax_messages::{
    BatchConsumer, BatchConsumerLimits, BatchOptions, Consumer, ConsumerLimits, ConsumerStats,
    Message, MessageExecution,
};
use tokio::sync::Semaphore;
use tokio::time::sleep;

use super::batches::Sizes;
use super::world::*;

const LIMIT: usize = 100_000;

fn sized(id: &str, bytes: usize) -> Message {
    Message::new("memory://orders", vec![0; bytes]).with_header("message-id", id.to_owned())
}

fn bytes(count: usize) -> NonZeroUsize {
    NonZeroUsize::new(count).unwrap()
}

/// Sends messages of several sizes, and checks the bytes in memory while no handler ends and as they
/// end, one after the other.
async fn check(world: &World, gate: &Semaphore, stats: impl Fn() -> ConsumerStats) {
    (0..200).for_each(|number| world.broker.send(sized(&format!("m-{number}"), 5_000)));
    sleep(LEASE / 2).await;
    let held = stats();
    // Or one message more.
    let most = LIMIT as u64 + 6_000;
    assert!((LIMIT as u64..=most).contains(&held.unacknowledged_bytes), "{held:?}");
    assert_eq!((held.handled, held.received), (0, held.unacknowledged), "{held:?}");
    // Larger than the limit.
    world.broker.send(sized("m-large", 3 * LIMIT));
    world.broker.send(sized("m-last", 5_000));
    let (mut largest, mut is_received) = (0, false);
    while stats().handled < 202 {
        gate.add_permits(1);
        sleep(Duration::from_millis(10)).await;
        let now = stats();
        match now.unacknowledged_bytes > 2 * LIMIT as u64 {
            true => is_received = true,
            false => largest = largest.max(now.unacknowledged_bytes),
        }
    }
    assert!(largest <= most, "{largest}");
    assert!(is_received, "the large message");
    world.broker.emptied().await;
    sleep(Duration::from_secs(1)).await;
    assert_eq!((stats().unacknowledged, stats().unacknowledged_bytes), (0, 0));
}

#[tokio::test(start_paused = true)]
async fn a_consumer_receives_nothing_over_its_bytes_and_a_larger_message_nevertheless() {
    let world = World::new();
    let gate = Arc::new(Semaphore::new(0));
    let of_handler = Arc::clone(&gate);
    let handler = move |_: MessageExecution| {
        let gate = Arc::clone(&of_handler);
        async move {
            gate.acquire().await.unwrap().forget();
            Ok(())
        }
    };
    let engine = Idempotency::builder(Arc::clone(&world.memory)).build().unwrap();
    let inbox = world.inbox(engine).reexecute().build().unwrap();
    let limits =
        ConsumerLimits { max_unacknowledged_bytes: bytes(LIMIT), ..ConsumerLimits::default() };
    let consumer = Consumer::new(inbox, Arc::new(world.broker.clone()), handler, limits).unwrap();
    let monitor = consumer.monitor();
    let running = tokio::spawn(consumer.run(std::future::pending()));
    check(&world, &gate, || monitor.stats()).await;
    running.abort();
}

#[tokio::test(start_paused = true)]
async fn a_consumer_in_batch_mode_receives_nothing_over_its_bytes_and_a_larger_message_nevertheless()
 {
    let world = World::new();
    let gate = Arc::new(Semaphore::new(0));
    let inbox = Sizes { gate: Some(Arc::clone(&gate)), ..Sizes::default() };
    let limits = BatchConsumerLimits {
        max_unacknowledged_bytes: bytes(LIMIT),
        batch: bytes(5),
        ..BatchConsumerLimits::default()
    };
    let options = BatchOptions { limits, ..BatchOptions::default() };
    let source = Arc::new(world.broker.clone());
    let consumer = BatchConsumer::new(Arc::new(inbox), source, options).unwrap();
    let monitor = consumer.monitor();
    let running = tokio::spawn(consumer.run(std::future::pending()));
    check(&world, &gate, || monitor.stats()).await;
    running.abort();
}
