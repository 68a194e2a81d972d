//! Messages that are redriven from a dead letter.

use std::num::NonZeroUsize;

use hapax_messages::{DeadLetter, MessageId, MessageSink, MessageSource, OutgoingMessage};
use hapax_rabbitmq::{RabbitOrderKey, RabbitSink, RabbitSource};
use hapax_testkit::servers::RabbitMqServer;
use lapin::BasicProperties;
use lapin::options::{BasicGetOptions, BasicPublishOptions, QueueBindOptions};
use lapin::types::{AMQPValue, DecimalValue, FieldArray, FieldTable};

use super::{channel, declare, text};

/// Returns headers of each type that a server forwards.
fn headers() -> FieldTable {
    let mut nested = FieldTable::default();
    nested.insert("void".into(), AMQPValue::Void);
    let array = FieldArray::from(vec![AMQPValue::LongInt(1), text("two")]);
    let mut table = FieldTable::default();
    for (name, value) in [
        ("bool", AMQPValue::Boolean(false)),
        ("int", AMQPValue::LongInt(-7)),
        ("long", AMQPValue::LongLongInt(1 << 40)),
        ("double", AMQPValue::Double(0.5)),
        ("decimal", AMQPValue::DecimalValue(DecimalValue { scale: 2, value: 1299 })),
        ("time", AMQPValue::Timestamp(1_790_000_000)),
        ("text", text("t")),
        ("table", AMQPValue::FieldTable(nested)),
        ("array", AMQPValue::FieldArray(array)),
    ] {
        table.insert(name.into(), value);
    }
    table
}

#[tokio::test]
async fn a_redriven_message_has_its_properties_and_the_types_of_its_headers() {
    let server = RabbitMqServer::start().await;
    let channel = channel(&server.url()).await;
    declare(&channel, "orders", &[]).await;
    let (options, none) = (QueueBindOptions::default(), FieldTable::default());
    let bound = channel.queue_bind("orders".into(), "amq.topic".into(), "#".into(), options, none);
    bound.await.unwrap();
    let kept = BasicProperties::default()
        .with_headers(headers())
        .with_content_type("application/x-order".into())
        .with_content_encoding("gzip".into())
        .with_priority(3)
        .with_correlation_id("c-1".into())
        .with_reply_to("replies".into())
        .with_message_id("m-1".into())
        .with_timestamp(1_700_000_000)
        .with_type("order".into())
        .with_app_id("shop".into());
    // Of one publication: it would expire in the queue, and its user is another one.
    let sent = kept.clone().with_expiration("3600000".into()).with_user_id("guest".into());
    let options = BasicPublishOptions::default();
    let key = "orders.created";
    channel.basic_publish("amq.topic".into(), key.into(), options, b"x", sent).await.unwrap();

    let source =
        RabbitSource::builder(server.url(), "orders").order_key(RabbitOrderKey::RoutingKey);
    let source = source.start().await.unwrap();
    let received = source.receive(NonZeroUsize::MIN).await.unwrap().remove(0);
    let first = received.message().clone();
    let id = MessageId::new("m-1").unwrap();
    let mut redriven = OutgoingMessage::new("orders", id, first.payload.clone());
    redriven.key.clone_from(&first.key);
    redriven.headers.clone_from(&first.headers);
    redriven.headers.push((DeadLetter::REDRIVE_HEADER.to_owned(), "d".into()));
    redriven.native = received.native();
    received.acknowledge().await.unwrap();
    let sink = RabbitSink::builder(&server.url()).unwrap().connect().await.unwrap();
    sink.publish(&redriven).await.unwrap();

    // Its routing key was another one.
    let received = source.receive(NonZeroUsize::MIN).await.unwrap().remove(0);
    let mut second = received.message().clone();
    second.headers.retain(|(name, _)| name != DeadLetter::REDRIVE_HEADER);
    assert_eq!((&second, second.key.as_deref()), (&first, Some(key)));
    drop((received, source));
    let found = loop {
        let options = BasicGetOptions::default();
        if let Some(found) = channel.basic_get("orders".into(), options).await.unwrap() {
            break found.delivery.properties;
        }
    };
    let mut expected = headers();
    expected.insert(DeadLetter::REDRIVE_HEADER.into(), text("d"));
    expected.insert("hapax-routing-key".into(), text(key));
    assert_eq!(found, kept.with_headers(expected).with_delivery_mode(2));
}
