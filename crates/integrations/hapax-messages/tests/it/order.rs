//! Order by key, and dead letters that block keys.

use std::num::NonZeroUsize;
use std::sync::{Arc, Mutex};

use hapax_core::Idempotency;
use hapax_core::store::BoxFuture;
use hapax_messages::{
    Consumer, ConsumerError, ConsumerLimits, DeadLetter, DeadLetterReason, DeadLetterStore as _,
    Delivery, Message, MessageExecution, MessageSource, SourceError, SourceLimits,
};
use tokio::sync::watch;
use tokio::time::{Duration, sleep};

use super::dead_letters::dead_letter;
use super::world::*;

#[tokio::test(start_paused = true)]
async fn a_message_behind_a_dead_letter_that_another_process_has_just_stored_is_parked() {
    let world = World::new();
    let process = world.process(|inbox| inbox.reexecute().ordered(), world.counting());
    world.broker.send(message("a-1").with_key("a"));
    world.broker.emptied().await;
    let of_another = dead_letter(&world, "orders", "a-2", Some("a"));
    world.dead_letters.park(&of_another).await.unwrap();
    world.broker.send(message("a-3").with_key("a"));
    world.broker.emptied().await;
    assert_eq!(world.effects(), once(["a-1".to_owned()]));
    let parked: Vec<_> =
        world.dead_letters().into_iter().map(|(id, reason, ..)| (id, reason)).collect();
    use DeadLetterReason::{Blocked, Rejected};
    let expected = [("a-2", Rejected), ("a-3", Blocked)];
    assert_eq!(parked, expected.map(|(id, reason)| (id.to_owned(), reason)));
    assert!(process.stop().await);
}

#[tokio::test(start_paused = true)]
async fn of_the_redriven_messages_of_a_key_only_that_of_the_oldest_dead_letter_is_handled() {
    let world = World::new();
    let handled = Arc::new(Mutex::new(Vec::new()));
    let handler = {
        let handled = Arc::clone(&handled);
        move |message: MessageExecution| {
            handled.lock().unwrap().push(message.id().to_string());
            std::future::ready(Ok(()))
        }
    };
    let process = world.process(|inbox| inbox.reexecute().ordered(), handler);
    let dead_letters = ["a-1", "a-2"].map(|id| dead_letter(&world, "orders", id, Some("a")));
    for stored in &dead_letters {
        world.dead_letters.park(stored).await.unwrap();
    }
    let redriven = |number: usize, id: &str| {
        let hex = dead_letters[number].id_hex();
        message(id).with_key("a").with_header(DeadLetter::REDRIVE_HEADER, hex)
    };
    world.broker.send(redriven(1, "a-2"));
    world.broker.emptied().await;
    assert_eq!((handled.lock().unwrap().len(), world.dead_letters().len()), (0, 2));
    world.broker.send(redriven(0, "a-1"));
    world.broker.emptied().await;
    assert_eq!(
        (&**handled.lock().unwrap(), world.dead_letters().len()),
        (&["a-1".to_owned()][..], 1)
    );
    world.release("a-2").await;
    world.broker.send(redriven(1, "a-2"));
    world.broker.send(message("a-3").with_key("a"));
    world.broker.emptied().await;
    assert_eq!(*handled.lock().unwrap(), ["a-1", "a-2", "a-3"]);
    assert!(world.dead_letters().is_empty());
    assert!(process.stop().await);
}

/// A source whose messages have order keys, or do not.
#[derive(Debug)]
struct Keys(bool);

impl MessageSource for Keys {
    fn receive(
        &self,
        _: NonZeroUsize,
    ) -> BoxFuture<'_, Result<Vec<Arc<dyn Delivery>>, SourceError>> {
        Box::pin(std::future::pending())
    }

    fn limits(&self) -> SourceLimits {
        let limits = SourceLimits::default();
        if self.0 { limits.with_order_keys() } else { limits }
    }
}

#[tokio::test]
async fn an_ordered_inbox_with_a_source_without_order_keys_is_an_error_and_the_reverse_a_warning() {
    let log = Log::default();
    let subscriber = tracing_subscriber::fmt().with_writer(log.clone()).finish();
    let _logs = tracing::subscriber::set_default(subscriber);
    let world = World::new();
    let consumer = |is_ordered: bool, has_keys: bool| {
        let engine = Idempotency::builder(Arc::clone(&world.memory)).build().unwrap();
        let inbox = world.inbox(engine).reexecute();
        let inbox = if is_ordered { inbox.ordered() } else { inbox }.build().unwrap();
        let (source, limits) = (Arc::new(Keys(has_keys)), ConsumerLimits::default());
        Consumer::new(inbox, source, world.counting(), limits).map(drop)
    };
    assert_eq!(consumer(true, false), Err(ConsumerError::OrderKeys));
    assert_eq!((consumer(true, true), consumer(false, false)), (Ok(()), Ok(())));
    assert_eq!(log.text(), "");
    assert_eq!(consumer(false, true), Ok(()));
    assert!(log.text().contains("the source has order keys and the inbox is not ordered"));
}

/// A source whose messages are acknowledged once a gate is open.
#[derive(Debug)]
struct Gated {
    messages: Mutex<Vec<Message>>,
    gate: watch::Receiver<bool>,
}

#[derive(Debug)]
struct GatedDelivery {
    message: Message,
    gate: watch::Receiver<bool>,
}

impl MessageSource for Gated {
    fn receive(
        &self,
        _: NonZeroUsize,
    ) -> BoxFuture<'_, Result<Vec<Arc<dyn Delivery>>, SourceError>> {
        Box::pin(async move {
            let messages = std::mem::take(&mut *self.messages.lock().unwrap());
            if messages.is_empty() {
                std::future::pending().await
            }
            let delivery = |message| -> Arc<dyn Delivery> {
                Arc::new(GatedDelivery { message, gate: self.gate.clone() })
            };
            Ok(messages.into_iter().map(delivery).collect())
        })
    }

    fn limits(&self) -> SourceLimits {
        SourceLimits::default().with_order_keys()
    }
}

impl Delivery for GatedDelivery {
    fn message(&self) -> &Message {
        &self.message
    }

    fn is_redelivery(&self) -> bool {
        false
    }

    fn acknowledge(&self) -> BoxFuture<'_, Result<(), SourceError>> {
        let mut gate = self.gate.clone();
        Box::pin(
            async move { gate.wait_for(|open| *open).await.map(drop).map_err(SourceError::new) },
        )
    }

    fn hold(&self) -> BoxFuture<'_, Result<(), SourceError>> {
        Box::pin(std::future::ready(Ok(())))
    }
}

#[tokio::test(start_paused = true)]
async fn during_an_acknowledgement_another_message_is_handled_but_none_with_the_same_key() {
    let world = World::new();
    let handled: Arc<Mutex<Vec<String>>> = Arc::default();
    let handler = {
        let handled = Arc::clone(&handled);
        move |message: MessageExecution| {
            handled.lock().unwrap().push(message.id().to_string());
            std::future::ready(Ok(()))
        }
    };
    let (open, gate) = watch::channel(false);
    let messages = [("a-1", "a"), ("a-2", "a"), ("b-1", "b")];
    let messages = Mutex::new(messages.map(|(id, key)| message(id).with_key(key)).into());
    let engine = Idempotency::builder(Arc::clone(&world.memory)).build().unwrap();
    let inbox = world.inbox(engine).reexecute().ordered().build().unwrap();
    let limits = ConsumerLimits { handlers: NonZeroUsize::MIN, ..ConsumerLimits::default() };
    let consumer = Consumer::new(inbox, Arc::new(Gated { messages, gate }), handler, limits);
    let running = tokio::spawn(consumer.unwrap().run(std::future::pending()));
    // The clock is paused: it advances once nothing else can happen.
    sleep(Duration::from_secs(60)).await;
    assert_eq!(*handled.lock().unwrap(), ["a-1", "b-1"]);
    open.send_replace(true);
    sleep(Duration::from_secs(60)).await;
    assert_eq!(*handled.lock().unwrap(), ["a-1", "b-1", "a-2"]);
    running.abort();
}
