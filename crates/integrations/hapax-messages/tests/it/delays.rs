//! Messages that the broker keeps for a pause, and its limit of deliveries.

use std::num::{NonZeroU32, NonZeroUsize};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use hapax_core::Idempotency;
use hapax_core::store::BoxFuture;
use hapax_messages::{
    Attempts, Consumer, ConsumerError, ConsumerLimits, DeadLetterReason, Delivery, FullLimit,
    InboxBuilder, MessageExecution, MessageFailure, MessageSource, SourceError, SourceLimits,
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

#[tokio::test(start_paused = true)]
async fn a_message_whose_end_the_record_does_not_have_stays_and_is_parked_with_its_error() {
    let world = World::new();
    world.broker.set_delays_from(Duration::ZERO);
    world.send("m-1");
    let fails = |_: MessageExecution| std::future::ready(Err(MessageFailure::unknown("boom")));
    let process = world.process(InboxBuilder::block, fails);
    world.broker.emptied().await;
    let (parked, deliveries) = (world.dead_letters(), world.broker.deliveries());
    assert!(process.stop().await);
    let expected = ("m-1".to_owned(), DeadLetterReason::Unknown, 1, "boom".to_owned());
    assert_eq!((parked, deliveries), (vec![expected], 1));
}

#[tokio::test(start_paused = true)]
async fn messages_that_were_tried_before_leave_a_quarter_of_the_handlers_to_others() {
    let world = World::new();
    world.broker.set_delays_from(Duration::ZERO);
    let (effects, hanging) = (Arc::clone(&world.effects), Arc::<Mutex<u32>>::default());
    let of_test = Arc::clone(&hanging);
    let handler = move |message: MessageExecution| {
        let (effects, hanging) = (Arc::clone(&effects), Arc::clone(&of_test));
        async move {
            match (message.id().as_str().starts_with("failing"), message.attempt()) {
                (false, _) => {
                    count(&effects, &message);
                    Ok(())
                }
                (true, 1) => Err(MessageFailure::retry_after(SHORT, "once")),
                (true, _) => {
                    *hanging.lock().unwrap() += 1;
                    std::future::pending().await
                }
            }
        }
    };
    for number in 0..200 {
        world.send(&format!("failing-{number}"));
    }
    let process = world.process(InboxBuilder::reexecute, handler);
    while *hanging.lock().unwrap() < 6 {
        tokio::time::sleep(SHORT).await;
    }
    let ids = || (0..20).map(|number| format!("m-{number}"));
    for id in ids() {
        world.send(&id);
    }
    let handled = async {
        while world.effects() != once(ids()) {
            tokio::time::sleep(SHORT).await;
        }
    };
    tokio::time::timeout(HOUR, handled).await.unwrap();
    assert_eq!(*hanging.lock().unwrap(), 6, "of 8 handlers");
    let stats = process.monitor.stats();
    assert_eq!((stats.waiting, stats.full_limit), (0, None));
    process.crash().await;
}

#[tokio::test(start_paused = true)]
async fn messages_of_a_process_that_died_are_not_delayed_although_they_wait_for_handlers() {
    let world = World::new();
    world.broker.set_delays_from(LONG);
    let ids = || (0..64).map(|number| format!("m-{number}"));
    ids().for_each(|id| world.send(&id));
    let slow = || {
        let effects = Arc::clone(&world.effects);
        move |message: MessageExecution| {
            let effects = Arc::clone(&effects);
            async move {
                tokio::time::sleep(SHORT).await;
                count(&effects, &message);
                Ok(())
            }
        }
    };
    let process = world.process(InboxBuilder::reexecute, slow());
    while process.monitor.stats().received < 64 {
        tokio::task::yield_now().await;
    }
    process.crash().await;
    assert_eq!(world.effects(), once([]));
    let process = world.process(InboxBuilder::reexecute, slow());
    world.broker.emptied().await;
    let stats = process.monitor.stats();
    assert!(process.stop().await);
    assert_eq!((stats.delayed, world.effects()), (0, once(ids())), "{stats:?}");
}

#[tokio::test(start_paused = true)]
async fn a_limit_that_is_full_of_messages_that_wait_is_logged_with_its_name() {
    let log = Log::default();
    let subscriber = tracing_subscriber::fmt().with_writer(log.clone()).finish();
    let _logs = tracing::subscriber::set_default(subscriber);
    let world = World::new();
    for number in 0..65 {
        world.send(&format!("m-{number}"));
    }
    let fails = |message: MessageExecution| {
        let result = match message.attempt() {
            1 => Err(MessageFailure::retry_after(LONG * 2, "once")),
            _ => Ok(()),
        };
        std::future::ready(result)
    };
    let process = world.process(InboxBuilder::reexecute, fails);
    tokio::time::sleep(LONG).await;
    let stats = process.monitor.stats();
    assert_eq!((stats.waiting, stats.full_limit), (64, Some(FullLimit::Unacknowledged)));
    assert_eq!(log.text().matches("limit=\"max_unacknowledged of the consumer\"").count(), 1);
    world.broker.emptied().await;
    assert_eq!(process.monitor.stats().full_limit, None);
    assert!(process.stop().await);
}

#[tokio::test(start_paused = true)]
async fn messages_that_find_no_room_come_again_ever_later() {
    const MESSAGES: u64 = 1_000;
    let world = World::new();
    world.broker.set_delays_from(Duration::ZERO);
    for number in 0..MESSAGES {
        world.send(&format!("m-{number}"));
    }
    // The service does not answer any more.
    let handler = |message: MessageExecution| async move {
        match message.attempt() {
            1 => Err(MessageFailure::retry_after(SHORT, "once")),
            _ => std::future::pending().await,
        }
    };
    let process = world.process(InboxBuilder::reexecute, handler);
    tokio::time::sleep(LONG * 10).await;
    let deliveries = world.broker.deliveries();
    process.crash().await;
    // 120,000 with pauses of 5 s.
    assert!((2 * MESSAGES..20 * MESSAGES).contains(&deliveries), "{deliveries}");
}

#[tokio::test(start_paused = true)]
async fn a_limit_of_one_message_is_full_for_as_long_as_its_later_attempts_last() {
    let world = World::new();
    world.broker.send(message("m-1").with_key("a"));
    let handler = |message: MessageExecution| async move {
        match message.attempt() {
            1 => Err(MessageFailure::retry_after(SHORT, "once")),
            _ => {
                tokio::time::sleep(LONG * 2).await;
                Ok(())
            }
        }
    };
    let engine = Idempotency::builder(Arc::clone(&world.memory)).build().unwrap();
    let inbox = world.inbox(engine).reexecute().ordered().build().unwrap();
    let limits =
        ConsumerLimits { max_unacknowledged: NonZeroUsize::MIN, ..ConsumerLimits::default() };
    let consumer = Consumer::new(inbox, Arc::new(world.broker.clone()), handler, limits).unwrap();
    let monitor = consumer.monitor();
    let running = tokio::spawn(consumer.run(std::future::pending()));
    let full = || (monitor.stats().full_limit, monitor.stats().full_limit_age);
    assert_eq!(full(), (None, None));
    tokio::time::sleep(SHORT * 5).await;
    assert_eq!(full(), (Some(FullLimit::Unacknowledged), None), "no check has found it yet");
    tokio::time::sleep(LONG).await;
    let (limit, age) = full();
    assert_eq!(limit, Some(FullLimit::Unacknowledged));
    assert!((LONG - SHORT * 10..LONG).contains(&age.unwrap()), "{age:?}");
    world.broker.emptied().await;
    running.abort();
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
