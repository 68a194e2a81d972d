//! The source.

use std::num::NonZeroUsize;
use std::sync::Arc;
use std::time::Duration;

use hapax_core::store::BoxFuture;
use hapax_messages::{Delivery, MessageExecution, MessageSource};
use hapax_rabbitmq::{RabbitOrderKey, RabbitSource, RabbitStartError};
use hapax_testkit::servers::RabbitMqServer;
use lapin::options::{BasicPublishOptions, QueueDeleteOptions};
use lapin::types::{AMQPValue, FieldTable};
use lapin::{BasicProperties, Channel};
use tokio::sync::Notify;

use super::{Process, World, channel, declare, text};

const MANY: NonZeroUsize = NonZeroUsize::new(100).unwrap();

async fn send(channel: &Channel, queue: &str, properties: BasicProperties) {
    let options = BasicPublishOptions::default();
    let sent = channel.basic_publish("".into(), queue.into(), options, b"x", properties).await;
    sent.unwrap();
}

fn named(id: &str) -> BasicProperties {
    BasicProperties::default().with_message_id(id.into())
}

async fn receive_one(source: &RabbitSource) -> Arc<dyn Delivery> {
    let mut received = source.receive(MANY).await.unwrap();
    assert_eq!(received.len(), 1);
    received.remove(0)
}

#[tokio::test]
async fn a_source_that_cannot_work_is_not_started() {
    let server = RabbitMqServer::start().await;
    declare(&channel(&server.url()).await, "orders", &[]).await;
    let source = |queue: &str| RabbitSource::builder(server.url(), queue);
    source("orders").start().await.unwrap();
    let error = source("none").start().await.unwrap_err();
    assert!(matches!(error, RabbitStartError::Server { .. }), "{error}");
    assert!(error.to_string().contains("NOT_FOUND"), "{error}");
    let wrong = server.url().replace("guest@", "secret@");
    let builder = RabbitSource::builder(wrong, "orders");
    let shown = format!("{builder:?}");
    let error = builder.start().await.unwrap_err();
    assert!(matches!(error, RabbitStartError::Server { .. }), "{error}");
    assert!(!format!("{shown} {error} {error:?}").contains("secret"), "{shown} {error:?}");
    let error = RabbitSource::builder("nats://x", "orders").start().await.unwrap_err();
    assert!(matches!(error, RabbitStartError::Url(_)), "{error}");
    for name in [String::new(), "q".repeat(221)] {
        let error = source(&name).start().await.unwrap_err();
        assert!(matches!(error, RabbitStartError::QueueName { .. }), "{error}");
    }
    let hour = Duration::from_secs(3600);
    let error = source("orders").longest_handler(hour).start().await.unwrap_err();
    assert!(matches!(error, RabbitStartError::ConsumerTimeout { .. }), "{error}");
    let long = source("orders").longest_handler(hour).consumer_timeout(None);
    let limits = long.delivery_limit(None).start().await.unwrap().limits();
    assert_eq!((limits.delivery_limit, limits.has_order_keys), (None, false));
}

#[tokio::test]
async fn properties_and_headers_of_any_producer_are_headers() {
    let server = RabbitMqServer::start().await;
    let channel = channel(&server.url()).await;
    let mut headers = FieldTable::default();
    for (name, value) in [
        ("customer", AMQPValue::LongString("c-1".into())),
        ("count", AMQPValue::LongInt(17)),
        ("is-new", AMQPValue::Boolean(true)),
        ("nested", AMQPValue::FieldTable(FieldTable::default())),
        ("cloudEvents:id", AMQPValue::LongString("e-1".into())),
    ] {
        headers.insert(name.into(), value);
    }
    let properties = named("m-1")
        .with_headers(headers)
        .with_content_type("application/json".into())
        .with_correlation_id("r-1".into())
        .with_timestamp(1_790_000_000);
    for (queue, order_key, expected) in [
        ("none", RabbitOrderKey::None, None),
        ("routing-key", RabbitOrderKey::RoutingKey, Some("routing-key")),
        ("header", RabbitOrderKey::Header("Customer".to_owned()), Some("c-1")),
        ("missing", RabbitOrderKey::Header("cart".to_owned()), None),
    ] {
        declare(&channel, queue, &[]).await;
        send(&channel, queue, properties.clone()).await;
        let builder = RabbitSource::builder(server.url(), queue).order_key(order_key);
        let source = builder.start().await.unwrap();
        let received = receive_one(&source).await;
        let message = received.message();
        assert_eq!(message.key.as_deref(), expected, "{queue}");
        assert_eq!(message.published_at.unwrap().as_micros(), 1_790_000_000_000_000);
        for (name, value) in [
            ("message-id", "m-1"),
            ("content-type", "application/json"),
            ("correlation-id", "r-1"),
            ("count", "17"),
            ("is-new", "true"),
            ("cloudEvents:id", "e-1"),
        ] {
            assert_eq!(message.header(name).unwrap(), value, "{name}");
        }
        assert!(message.header("nested").is_none());
    }
}

#[tokio::test]
async fn with_a_single_active_consumer_the_next_one_receives_in_order_what_the_lost_one_had() {
    let server = RabbitMqServer::start().await;
    let channel = channel(&server.url()).await;
    for kind in ["classic", "quorum"] {
        let single = ("x-single-active-consumer", true.into());
        declare(&channel, kind, &[("x-queue-type", text(kind)), single]).await;
        let start = || {
            let builder = RabbitSource::builder(server.url(), kind);
            builder.order_key(RabbitOrderKey::RoutingKey).start()
        };
        let (first, second) = (start().await.unwrap(), start().await.unwrap());
        let ids: Vec<_> = (0..20).map(|number| format!("m-{number}")).collect();
        for id in &ids {
            send(&channel, kind, named(id)).await;
        }
        let mut had = Vec::new();
        while had.len() < 10 {
            had.extend(first.receive(NonZeroUsize::new(10 - had.len()).unwrap()).await.unwrap());
        }
        had[0].acknowledge().await.unwrap();
        drop((had, first));
        let mut received = Vec::new();
        while received.len() < 19 {
            for delivery in second.receive(MANY).await.unwrap() {
                received.push(delivery.message().header("message-id").unwrap().clone());
                delivery.acknowledge().await.unwrap();
            }
        }
        assert_eq!(received, ids[1..], "{kind}");
    }
}

#[tokio::test]
async fn a_queue_that_is_created_again_is_found() {
    let server = RabbitMqServer::start().await;
    let channel = channel(&server.url()).await;
    declare(&channel, "orders", &[]).await;
    let source = RabbitSource::builder(server.url(), "orders").start().await.unwrap();
    send(&channel, "orders", named("m-1")).await;
    let stale = receive_one(&source).await;
    channel.queue_delete("orders".into(), QueueDeleteOptions::default()).await.unwrap();
    let error = source.receive(MANY).await.unwrap_err();
    assert!(error.to_string().contains("the server has cancelled it"), "{error}");
    assert!(source.receive(MANY).await.unwrap_err().to_string().contains("NOT_FOUND"));
    assert!(stale.has_ended() && stale.hold().await.is_err());
    assert!(stale.acknowledge().await.is_err());
    declare(&channel, "orders", &[]).await;
    send(&channel, "orders", named("m-2")).await;
    let received = receive_one(&source).await;
    assert_eq!(received.message().header("message-id").unwrap(), "m-2");
    received.acknowledge().await.unwrap();
}

#[tokio::test]
async fn a_message_of_a_handler_over_the_consumer_timeout_has_one_effect() {
    let server = RabbitMqServer::start().await;
    server.eval("application:set_env(rabbit, channel_tick_interval, 200).").await;
    server.eval("application:set_env(rabbit, consumer_timeout, 1000).").await;
    let channel = channel(&server.url()).await;
    declare(&channel, "orders", &[]).await;
    for id in ["slow", "fast"] {
        send(&channel, "orders", named(id)).await;
    }
    let world = World::default();
    let (begun, goes_on) = (Arc::new(Notify::new()), Arc::new(Notify::new()));
    let source = RabbitSource::builder(server.url(), "orders").start().await.unwrap();
    let process = {
        let (begun, goes_on, world) = (Arc::clone(&begun), Arc::clone(&goes_on), world.clone());
        Process::start(source, &world.clone(), move |message: MessageExecution| {
            let (begun, goes_on, world) = (Arc::clone(&begun), Arc::clone(&goes_on), world.clone());
            let handled: BoxFuture<'static, _> = Box::pin(async move {
                if message.id().as_str() == "slow" {
                    begun.notify_one();
                    goes_on.notified().await;
                }
                world.effect(&message);
                Ok(())
            });
            handled
        })
    };
    begun.notified().await;
    // The server closes the channel, and delivers the message again.
    while process.monitor.stats().received < 3 {
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    goes_on.notify_one();
    while server.messages("orders").await > 0 {
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    assert!(process.monitor.stats().duplicates >= 1);
    assert!(process.stop().await);
    assert_eq!(world.effects(), [("fast".to_owned(), 1), ("slow".to_owned(), 1)].into());
    assert_eq!(world.letters.list().len(), 0);
}
