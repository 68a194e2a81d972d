//! Messages that are redriven from a dead letter.

use std::num::NonZeroUsize;
use std::time::Duration;

use hapax_core::{Clock as _, SystemClock, Timestamp};
use hapax_messages::{
    DeadLetter, Delivery, MessageId, MessageSink, MessageSource, OutgoingMessage,
};
use hapax_rabbitmq::{RabbitOrderKey, RabbitSink, RabbitSource};
use hapax_testkit::servers::RabbitMqServer;
use lapin::BasicProperties;
use lapin::options::{BasicGetOptions, BasicPublishOptions, QueueBindOptions};
use lapin::protocol::basic::parse_properties;
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
    assert_eq!(delayed.message(), received.message());
    // The server sorts the headers.
    let properties = |delivery: &dyn Delivery| {
        let native = delivery.native().unwrap();
        parse_properties(native.strip_prefix(b"amqp/1\n").unwrap()).unwrap().1
    };
    assert_eq!(properties(&*delayed), properties(&*received));
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

fn long(of: &[u8]) -> [u8; 4] {
    u32::try_from(of.len()).unwrap().to_be_bytes()
}

/// Returns the native form of a message with these headers, and with properties that are not UTF-8.
fn native(headers: &[Vec<u8>]) -> Vec<u8> {
    let headers = headers.concat();
    let flags = 0xb000_u16 | 0x0480 | 0x002c;
    [
        b"amqp/1\n",
        &flags.to_be_bytes()[..],
        b"\x02t\xff",
        &long(&headers),
        &headers,
        b"\x02\x02c\xfe\x03m-1\x02k\xfd\x01a\x02u\xfc",
    ]
    .concat()
}

/// Returns headers that the client library changes, or cannot parse.
fn strange_headers() -> Vec<Vec<u8>> {
    let mut deep = b"V".to_vec();
    for _ in 0..10_000 {
        deep = [b"A", &long(&deep)[..], &deep].concat();
    }
    let [signed, also] = [b'L', b'l'].map(|kind| [b"\x01", &[kind, kind][..], &[0xff; 8]].concat());
    let table = b"\x05tableF\0\0\0\x08\x01zt\x02\x01at\x01".to_vec();
    let not_utf8 = b"\x02n\xffS\0\0\0\x01\xff".to_vec();
    // In no order of their names.
    vec![signed, also, not_utf8, table, [b"\x04deep", &deep[..]].concat()]
}

/// Returns headers as the server encodes them when it adds its own, which it does as a message leaves a delay queue.
fn encoded_again(mut headers: Vec<Vec<u8>>) -> Vec<Vec<u8>> {
    headers.sort_by(|one, other| one[1..].cmp(&other[1..]));
    for header in &mut headers {
        match header[1] {
            b'L' => header[2] = b'l',
            b't' => header[14] = 1,
            _ => {}
        }
    }
    headers
}

#[tokio::test]
async fn a_redriven_message_has_each_byte_of_its_properties_and_headers() {
    let server = RabbitMqServer::start().await;
    declare(&channel(&server.url()).await, "orders", &[]).await;
    let pause = Duration::from_secs(1);
    let source = RabbitSource::builder(server.url(), "orders").delay_from(Some(pause));
    let source = source.start().await.unwrap();
    let sink = RabbitSink::builder(&server.url()).unwrap().connect().await.unwrap();
    let mut message = OutgoingMessage::new("orders", MessageId::new("m-1").unwrap(), "x");
    message.native = Some(native(&strange_headers()).into());
    let routing_key = b"\x11hapax-routing-keyS\0\0\0\x06orders".to_vec();
    // Published first, and redriven.
    for is_last in [false, true] {
        sink.publish(&message).await.unwrap();
        let received = source.receive(NonZeroUsize::MIN).await.unwrap().remove(0);
        let time = received.message().published_at.unwrap().as_micros() / 1_000_000;
        let redriven_at = [b"\x11hapax-redriven-atT", &time.to_be_bytes()[..]].concat();
        let with = |mut headers: Vec<Vec<u8>>| {
            headers.push(redriven_at.clone());
            headers
        };
        let headers = [with(strange_headers()), vec![routing_key.clone()]].concat();
        assert!(received.native().unwrap() == native(&headers), "it has other bytes");
        assert_eq!(received.message().header("L").unwrap(), "-1");
        assert_eq!(received.message().header("content-type").unwrap(), "t?");
        if is_last {
            while received.delay(pause).await.is_err() {}
            let delayed = source.receive(NonZeroUsize::MIN).await.unwrap().remove(0);
            assert!(delayed.was_delayed());
            assert_eq!(delayed.message(), received.message());
            let again = encoded_again(with(strange_headers()));
            let headers = [again, vec![routing_key.clone()]].concat();
            assert!(delayed.native().unwrap() == native(&headers), "it has others after a pause");
        } else {
            received.acknowledge().await.unwrap();
            message.native = received.native();
        }
    }
}
