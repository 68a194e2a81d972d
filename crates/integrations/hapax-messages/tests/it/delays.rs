//! Messages that the broker keeps for a pause, and its limit of deliveries.

use std::num::{NonZeroU32, NonZeroUsize};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use hapax_core::Idempotency;
use hapax_core::store::BoxFuture;
use hapax_messages::{
    Attempts, Consumer, ConsumerError, ConsumerLimits, Delivery, InboxBuilder, MessageExecution,
    MessageFailure, MessageSource, SourceError, SourceLimits,
};

use super::world::*;

const LONG: Duration = Duration::from_secs(60);
const SHORT: Duration = Duration::from_secs(1);

/// Returns the attempts of a message whose handler wants a pause twice, and the deliveries.
async fn retried(pause: Duration, options: fn(InboxBuilder) -> InboxBuilder) -> (Vec<u32>, u64) {
    let world = World::new();
    world.broker.set_delays_from(LONG);
    let attempts: Arc<Mutex<Vec<u32>>> = Arc::default();
    let seen = Arc::clone(&attempts);
    let handler = move |message: MessageExecution| {
        seen.lock().unwrap().push(message.attempt());
        let result = match message.attempt() {
            1 | 2 => Err(MessageFailure::retry_after(pause, "later")),
            _ => Ok(()),
        };
        std::future::ready(result)
    };
    world.broker.send(message("m-1").with_key("a"));
    let process = world.process(options, handler);
    while attempts.lock().unwrap().len() < 3 {
        tokio::time::sleep(SHORT).await;
    }
    world.broker.emptied().await;
    assert!(process.stop().await);
    let attempts = attempts.lock().unwrap().clone();
    (attempts, world.broker.deliveries())
}

#[tokio::test(start_paused = true)]
async fn a_message_with_a_long_pause_goes_to_the_broker_and_its_attempts_are_counted() {
    assert_eq!(retried(LONG, InboxBuilder::reexecute).await, (vec![1, 2, 3], 3));
}

#[tokio::test(start_paused = true)]
async fn a_message_with_a_short_pause_or_an_order_stays_with_the_consumer() {
    assert_eq!(retried(SHORT, InboxBuilder::reexecute).await, (vec![1, 2, 3], 1));
    let ordered = |inbox: InboxBuilder| inbox.reexecute().ordered();
    assert_eq!(retried(LONG, ordered).await, (vec![1, 2, 3], 1));
}

/// A source with limits, without messages.
#[derive(Debug)]
struct Limited(SourceLimits);

impl MessageSource for Limited {
    fn receive(
        &self,
        _: NonZeroUsize,
    ) -> BoxFuture<'_, Result<Vec<Arc<dyn Delivery>>, SourceError>> {
        Box::pin(std::future::pending())
    }

    fn limits(&self) -> SourceLimits {
        self.0
    }
}

#[tokio::test]
async fn a_delivery_limit_below_the_crashes_is_an_error_and_one_near_them_a_warning() {
    let log = Log::default();
    let subscriber = tracing_subscriber::fmt().with_writer(log.clone()).finish();
    let _logs = tracing::subscriber::set_default(subscriber);
    let world = World::new();
    let number = |number: u32| NonZeroU32::new(number).unwrap();
    let consumer = |limit: u32, max: u32| {
        let engine = Idempotency::builder(Arc::clone(&world.memory)).build().unwrap();
        let attempts = Attempts { max: number(max), max_crashes: number(5), ..Attempts::default() };
        let inbox = world.inbox(engine).reexecute().attempts(attempts).build().unwrap();
        let source = Limited(SourceLimits::default().delivery_limit(number(limit)));
        let limits = ConsumerLimits::default();
        Consumer::new(inbox, Arc::new(source), world.counting(), limits).map(drop)
    };
    let error = ConsumerError::DeliveryLimit { crashes: 5, limit: 5 };
    assert_eq!(consumer(5, 60), Err(error));
    assert_eq!((consumer(20, 60), consumer(12, 3)), (Ok(()), Ok(())));
    assert_eq!(log.text(), "");
    assert_eq!((consumer(6, 60), consumer(4, 3)), (Ok(()), Ok(())));
    assert_eq!(log.text().matches("expected a delivery limit of at least 4 times").count(), 2);
}
