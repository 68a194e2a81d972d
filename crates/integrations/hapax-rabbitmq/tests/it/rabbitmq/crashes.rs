//! A message that ends its process, with others in hand.

use std::num::NonZeroU32;
use std::sync::Arc;
use std::time::Duration;

use hapax_core::store::BoxFuture;
use hapax_messages::{DeadLetterReason, MessageExecution, MessageId, MessageSink, OutgoingMessage};
use hapax_rabbitmq::{RabbitSink, RabbitSource};
use hapax_testkit::servers::RabbitMqServer;
use tokio::sync::Notify;

use super::{Process, World, channel, declare, text};

const MESSAGES: usize = 50;

/// The broker drops a message after this number of returns: one more than the crashes of `poison`.
const LIMIT: u32 = 6;

#[tokio::test]
async fn of_fifty_messages_in_hand_only_the_one_that_ends_its_process_is_parked() {
    let server = RabbitMqServer::start().await;
    let limit = i32::try_from(LIMIT).unwrap();
    let arguments = [("x-queue-type", text("quorum")), ("x-delivery-limit", limit.into())];
    declare(&channel(&server.url()).await, "orders", &arguments).await;
    let sink = RabbitSink::builder(&server.url()).unwrap().connect().await.unwrap();
    for number in 0..MESSAGES {
        let id = if number == 7 { "poison".to_owned() } else { format!("m-{number}") };
        let id = MessageId::new(id).unwrap();
        sink.publish(&OutgoingMessage::new("orders", id, "x")).await.unwrap();
    }
    let world = World::default();
    let mut crashes = 0;
    loop {
        let source = RabbitSource::builder(server.url(), "orders");
        let source = source.delivery_limit(NonZeroU32::new(LIMIT)).start().await.unwrap();
        let begun = Arc::new(Notify::new());
        let (of_handler, of_world, is_first) = (Arc::clone(&begun), world.clone(), crashes == 0);
        let process = Process::start(source, &world, move |message: MessageExecution| {
            let (begun, world) = (Arc::clone(&of_handler), of_world.clone());
            let handled: BoxFuture<'static, _> = Box::pin(async move {
                if message.id().as_str() == "poison" {
                    begun.notify_one();
                }
                // In the first process every handler is in progress when it ends.
                if is_first || message.id().as_str() == "poison" {
                    std::future::pending::<()>().await;
                }
                world.effect(&message);
                Ok(())
            });
            handled
        });
        let emptied = async {
            while server.messages("orders").await > 0 {
                tokio::time::sleep(Duration::from_millis(20)).await;
            }
        };
        let is_crash = tokio::select! {
            () = begun.notified() => true,
            () = emptied => false,
        };
        if !is_crash {
            assert!(process.stop().await);
            break;
        }
        if is_first {
            while process.monitor.stats().received < MESSAGES as u64 {
                tokio::time::sleep(Duration::from_millis(20)).await;
            }
        }
        crashes += 1;
        process.crash().await;
    }
    assert_eq!(crashes, 5);
    let effects = world.effects();
    assert_eq!(effects.len(), MESSAGES - 1, "{effects:?}");
    assert!(effects.values().all(|count| *count == 1), "{effects:?}");
    let letters = world.letters.list();
    assert_eq!(letters.len(), 1);
    assert_eq!(letters[0].message_id.as_ref().unwrap().as_str(), "poison");
    assert_eq!(letters[0].reason, DeadLetterReason::Attempts);
}
