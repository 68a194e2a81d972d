//! Messages that are redriven from a dead letter.

use std::num::NonZeroUsize;
use std::time::Duration;

use hapax_core::{Clock as _, SystemClock, Timestamp};
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
async fn a_redriven_message_has_its_properties_and_the_types_of_its_headers_after_a_pause_too() {
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
    // Of another dead letter, and of another message.
    let mut with_others = headers();
    for name in ["Hapax-Redrive", "Message-Id", "Hapax-Redriven-At"] {
        with_others.insert(name.into(), text("other"));
    }
    // Of one publication: it would expire in the queue, and its user is another one.
    let sent = kept
        .clone()
        .with_headers(with_others)
        .with_expiration("3600000".into())
        .with_user_id("guest".into());
    let options = BasicPublishOptions::default();
    let key = "orders.created";
    channel.basic_publish("amq.topic".into(), key.into(), options, b"x", sent).await.unwrap();

    let pause = Duration::from_secs(1);
    let source = RabbitSource::builder(server.url(), "orders").delay_from(Some(pause));
    let source = source.order_key(RabbitOrderKey::RoutingKey).start().await.unwrap();
    let received = source.receive(NonZeroUsize::MIN).await.unwrap().remove(0);
    let mut first = received.message().clone();
    first.headers.retain(|(_, value)| value != "other");
    let id = MessageId::new("m-1").unwrap();
    let mut redriven = OutgoingMessage::new("orders", id, first.payload.clone());
    redriven.key.clone_from(&first.key);
    redriven.headers.clone_from(&first.headers);
    redriven.headers.push((DeadLetter::REDRIVE_HEADER.to_owned(), "d".into()));
    redriven.native = received.native();
    received.acknowledge().await.unwrap();
    let begun = SystemClock.now();
    let sink = RabbitSink::builder(&server.url()).unwrap().connect().await.unwrap();
    sink.publish(&redriven).await.unwrap();

    // Its routing key was another one.
    let received = source.receive(NonZeroUsize::MIN).await.unwrap().remove(0);
    let mut second = received.message().clone();
    second.headers.retain(|(name, _)| name != DeadLetter::REDRIVE_HEADER);
    // So that it is not older than the retention, whenever it was published first.
    let published_at = std::mem::replace(&mut second.published_at, first.published_at);
    let second_before = Timestamp::from_micros(begun.as_micros() - 1_000_000);
    assert!(published_at > Some(second_before), "{published_at:?}");
    assert_eq!((&second, second.key.as_deref()), (&first, Some(key)));
    while received.delay(pause).await.is_err() {}
    let delayed = source.receive(NonZeroUsize::MIN).await.unwrap().remove(0);
    assert!(delayed.was_delayed());
    assert_eq!((delayed.message(), delayed.native()), (received.message(), received.native()));
    drop((received, delayed, source));
    let found = loop {
        let options = BasicGetOptions::default();
        if let Some(found) = channel.basic_get("orders".into(), options).await.unwrap() {
            break found.delivery.properties;
        }
    };
    let mut of_message = FieldTable::default();
    for (name, value) in found.headers().iter().flatten() {
        // Others are those of the server.
        if !name.as_str().starts_with("x-") {
            of_message.insert(name.clone(), value.clone());
        }
    }
    let found = found.with_headers(of_message);
    let now = published_at.unwrap().as_micros() / 1_000_000;
    let mut expected = headers();
    expected.insert("hapax-redriven-at".into(), AMQPValue::Timestamp(now));
    expected.insert(DeadLetter::REDRIVE_HEADER.into(), text("d"));
    expected.insert("hapax-routing-key".into(), text(key));
    assert_eq!(found, kept.with_headers(expected).with_delivery_mode(2));
}
