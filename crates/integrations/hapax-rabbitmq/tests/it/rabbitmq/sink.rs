//! The sink.

use std::num::NonZeroUsize;
use std::time::Duration;

use hapax_messages::{MessageId, MessageSink, MessageSource, OutgoingMessage, PublishError};
use hapax_rabbitmq::{RabbitSink, RabbitSource};
use hapax_testkit::servers::RabbitMqServer;
use lapin::ExchangeKind;
use lapin::options::{
    ExchangeDeclareOptions, QueueBindOptions, QueueDeclareOptions, QueuePurgeOptions,
};
use lapin::types::FieldTable;

use super::{channel, clear_alarm, declare, has_blocked, set_alarm, text};

fn message(destination: &str, id: &str) -> OutgoingMessage {
    OutgoingMessage::new(destination, MessageId::new(id).unwrap(), "x")
}

async fn sink(server: &RabbitMqServer, exchange: &str) -> RabbitSink {
    let builder = RabbitSink::builder(&server.url()).unwrap();
    builder.exchange(exchange).unroutable_for(Duration::ZERO).connect().await.unwrap()
}

fn expect_rejection(published: &Result<(), PublishError>, text: &str) {
    let Err(PublishError::Rejected(error)) = published else {
        panic!("expected Rejected, found {published:?}");
    };
    assert!(error.to_string().contains(text), "{error}");
}

fn expect_retry(published: &Result<(), PublishError>) {
    let is_retry = matches!(published, Err(PublishError::NotAcknowledged { .. }));
    assert!(is_retry, "expected NotAcknowledged, found {published:?}");
}

#[tokio::test]
async fn a_message_for_no_queue_is_rejected_and_those_beside_it_are_confirmed() {
    let server = RabbitMqServer::start().await;
    declare(&channel(&server.url()).await, "orders", &[]).await;
    let sink = sink(&server, "").await;
    // All at once: a returned message belongs to its own publication.
    let publishing = (0..40).map(|number| {
        let sink = sink.clone();
        tokio::spawn(async move {
            let (destination, is_routed) = match number % 4 {
                0 => ("nowhere", false),
                _ => ("orders", true),
            };
            let published = sink.publish(&message(destination, &format!("m-{number}"))).await;
            (is_routed, published)
        })
    });
    let publishing: Vec<_> = publishing.collect();
    for task in publishing {
        let (is_routed, published) = task.await.unwrap();
        if is_routed {
            published.unwrap();
        } else {
            expect_rejection(&published, "expected a queue for the routing key \"nowhere\"");
        }
    }
    assert_eq!(server.messages("orders").await, 30);
    let long = "k".repeat(256);
    expect_rejection(&sink.publish(&message(&long, "m-1")).await, "at most 255 bytes, found 256");
    // The headers of a message are one frame, of which the server says how large it may be. It adds some at delivery.
    let with_header = |bytes: usize| {
        let mut large = message("orders", "large");
        large.headers.push(("large".to_owned(), vec![b'x'; bytes].into()));
        large
    };
    let frame_max = 131_072;
    let error = sink.publish(&with_header(frame_max)).await.unwrap_err().to_string();
    let (_, found) = error.split_once("found ").unwrap();
    let found: usize = found.split(':').next().unwrap().parse().unwrap();
    let largest = frame_max - 128 - (found - frame_max);
    let rejected = sink.publish(&with_header(largest + 1)).await;
    expect_rejection(&rejected, "expected headers of at most 130944 bytes");
    sink.publish(&with_header(largest)).await.unwrap();
    sink.publish(&message("orders", "last")).await.unwrap();
    assert_eq!(server.messages("orders").await, 32);
}

#[tokio::test]
async fn a_destination_or_exchange_of_the_server_itself_is_rejected() {
    let server = RabbitMqServer::start().await;
    let channel = channel(&server.url()).await;
    let options = QueueDeclareOptions { exclusive: true, ..QueueDeclareOptions::default() };
    // The queue of another connection, which the server names.
    let own = channel.queue_declare("".into(), options, FieldTable::default()).await.unwrap();
    let own = own.name().as_str().to_owned();
    assert!(own.starts_with("amq.gen"), "{own}");
    let queues = sink(&server, "").await;
    for destination in [own.as_str(), "amq.rabbitmq.reply-to.g1h2AA5y"] {
        let published = queues.publish(&message(destination, "m-1")).await;
        expect_rejection(&published, "reserves names that begin with amq.");
    }
    let published = queues.publish(&message(&"x".repeat(256), "m-2")).await;
    expect_rejection(&published, "at most 255 bytes");
    for exchange in ["amq.rabbitmq.trace", "amq.rabbitmq.log"] {
        let builder = RabbitSink::builder(&server.url()).unwrap().exchange(exchange);
        let refused = builder.connect().await.unwrap_err();
        assert!(matches!(&refused, PublishError::Rejected(_)), "{refused}");
    }
    // At a topic exchange the destination is only a routing key.
    let topics = sink(&server, "amq.topic").await;
    let bound = channel.queue_bind(
        own.as_str().into(),
        "amq.topic".into(),
        "#".into(),
        QueueBindOptions::default(),
        FieldTable::default(),
    );
    bound.await.unwrap();
    topics.publish(&message("amq.orders", "m-3")).await.unwrap();
}

#[tokio::test]
async fn a_queue_that_is_missing_for_a_short_time_is_a_temporary_error() {
    let server = RabbitMqServer::start().await;
    let builder = RabbitSink::builder(&server.url()).unwrap();
    let sink = builder.unroutable_for(Duration::from_secs(3600)).connect().await.unwrap();
    for _ in 0..2 {
        expect_retry(&sink.publish(&message("orders", "m-1")).await);
    }
    declare(&channel(&server.url()).await, "orders", &[]).await;
    sink.publish(&message("orders", "m-1")).await.unwrap();
    assert_eq!(server.messages("orders").await, 1);
}

#[tokio::test]
async fn a_full_queue_that_rejects_is_a_temporary_error() {
    let server = RabbitMqServer::start().await;
    let channel = channel(&server.url()).await;
    let arguments = [("x-max-length", 2.into()), ("x-overflow", text("reject-publish"))];
    declare(&channel, "full", &arguments).await;
    let sink = sink(&server, "").await;
    let mut accepted = 0;
    // The limit is not exact.
    let full = loop {
        let published = sink.publish(&message("full", &format!("m-{accepted}"))).await;
        match published {
            Ok(()) if accepted < 100 => accepted += 1,
            published => break published,
        }
    };
    expect_retry(&full);
    assert_eq!(server.messages("full").await, accepted);
    channel.queue_purge("full".into(), QueuePurgeOptions::default()).await.unwrap();
    sink.publish(&message("full", "m-last")).await.unwrap();
    assert_eq!(server.messages("full").await, 1);
}

#[tokio::test]
async fn an_exchange_routes_by_the_destination_and_a_missing_one_is_a_temporary_error() {
    let server = RabbitMqServer::start().await;
    let channel = channel(&server.url()).await;
    let sink = sink(&server, "events").await;
    let mut created = message("orders.created", "m-1");
    expect_retry(&sink.publish(&created).await);
    let options = ExchangeDeclareOptions { durable: true, ..ExchangeDeclareOptions::default() };
    let table = FieldTable::default;
    channel.exchange_declare("events".into(), ExchangeKind::Topic, options, table()).await.unwrap();
    declare(&channel, "invoices", &[]).await;
    declare(&channel, "others", &[]).await;
    let bind = QueueBindOptions::default();
    channel
        .queue_bind("invoices".into(), "events".into(), "orders.*".into(), bind, table())
        .await
        .unwrap();
    // A command to the broker, and a header that the broker sets.
    for name in ["CC", "x-death"] {
        created.headers.push((name.to_owned(), "others".into()));
    }
    sink.publish(&created).await.unwrap();
    expect_rejection(&sink.publish(&message("carts.created", "m-2")).await, "expected a queue");
    assert_eq!(server.messages("others").await, 0);
    let source = RabbitSource::builder(server.url(), "invoices").start().await.unwrap();
    let received = source.receive(10.try_into().unwrap()).await.unwrap();
    let message = received[0].message();
    assert_eq!((received.len(), &*message.origin), (1, "amqp://invoices/orders.created"));
    assert!(message.header("CC").is_none() && message.published_at.is_some());
}

#[tokio::test]
async fn a_server_that_is_short_of_memory_is_a_temporary_error() {
    let server = RabbitMqServer::start().await;
    declare(&channel(&server.url()).await, "orders", &[]).await;
    let sink = sink(&server, "").await;
    set_alarm(&server).await;
    let (first, second) = (message("orders", "m-1"), message("orders", "m-2"));
    // The alarm reaches connections after it is set.
    loop {
        tokio::select! {
            published = sink.publish(&first) => if published.is_err() { break },
            () = has_blocked(&server) => break,
        }
    }
    // The first publication goes on; the client may not know yet that it is blocked.
    let error = loop {
        let publishing = sink.publish(&second);
        if let Ok(published) = tokio::time::timeout(Duration::from_secs(1), publishing).await {
            break published.unwrap_err().to_string();
        }
    };
    assert!(error.contains("short of memory"), "{error}");
    clear_alarm(&server).await;
    while sink.publish(&second).await.is_err() {
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

#[tokio::test]
async fn a_sink_with_more_channels_than_the_server_accepts_is_not_connected() {
    let server = RabbitMqServer::start().await;
    let url = format!("{}/%2f?channel_max=8", server.url());
    let sink = |channels: usize| {
        let channels = NonZeroUsize::new(channels).unwrap();
        RabbitSink::builder(&url).unwrap().channels(channels).connect()
    };
    sink(8).await.unwrap();
    let rejected = sink(9).await.map(|_| ());
    expect_rejection(&rejected, "expected at most 8 channels, found 9");
}
