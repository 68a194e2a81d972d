//! The sink.

use std::collections::BTreeMap;
use std::sync::Arc;

use async_nats::HeaderMap;
use async_nats::jetstream::Context;
use bytes::Bytes;
use hapax_core::Timestamp;
use hapax_messages::{
    DeadLetter, DeadLetterReason, DeadLetterStore as _, Delivery, Message, MessageId, MessageSink,
    MessageSource, OutgoingMessage, PublishError, PublishedDeadLetters,
};
use hapax_nats::{NatsOrderKey, NatsSink, NatsSource};
use hapax_testkit::servers::NatsServer;

use super::context;

fn message(id: &str, payload: &'static [u8]) -> OutgoingMessage {
    OutgoingMessage::new("orders.created", MessageId::new(id).unwrap(), payload)
}

#[tokio::test]
async fn a_message_has_its_place_in_the_stream() {
    let server = NatsServer::start().await;
    let context = context(&server).await;
    let sink = NatsSink::new(context.clone());
    sink.publish(&message("m-1", b"x")).await.unwrap();
    let source = NatsSource::builder(context, "ORDERS", "test").start().await.unwrap();
    let received = source.receive(10.try_into().unwrap()).await.unwrap();
    let message = received[0].message();
    assert_eq!(&*message.origin, "nats://ORDERS/orders.created");
    assert_eq!(message.position.as_ref().unwrap().offset, 1);
    assert!(message.published_at.is_some());
}

#[tokio::test]
async fn a_redriven_message_without_an_order_key_keeps_its_header() {
    let server = NatsServer::start().await;
    let context = context(&server).await;
    let mut message = message("m-1", b"x");
    message.headers.push(("message-order-key".to_owned(), "c-1".into()));
    NatsSink::new(context.clone()).publish(&message).await.unwrap();
    let order_key = NatsOrderKey::Header("message-order-key".to_owned());
    let builder = NatsSource::builder(context, "ORDERS", "test").order_key(order_key);
    let source = builder.start().await.unwrap();
    let received = source.receive(10.try_into().unwrap()).await.unwrap();
    assert_eq!(received[0].message().key.as_deref(), Some("c-1"));
}

/// Returns the headers of a message but those that a redrive adds, in the order of their names.
fn own_headers(message: &Message) -> Vec<(String, Bytes)> {
    let is_added = |name: &str| name == "message-id" || name.starts_with("Nats-");
    let own = message.headers.iter().filter(|(name, _)| !is_added(name));
    let mut own: Vec<_> = own.cloned().collect();
    own.sort_by(|one, other| one.0.cmp(&other.0));
    own
}

/// Publishes two messages, whose headers are all that the client reads and a producer may send.
async fn publish_headers(server: &NatsServer, context: &Context) {
    let long = "x".repeat(30_000);
    let values = ["a\0b", "\0", "", "a\tb", "\u{1}\u{7f}", "grüße 東京 😀", "a: b", "%00", &long];
    let mut headers = HeaderMap::new();
    for (number, value) in values.into_iter().enumerate() {
        headers.append(format!("h{number}").as_str(), value);
        headers.append("many", value);
    }
    for name in ["", "!#$%&'*+-.^_`|~", "(){}[]<>@,;/?=\"\\", "Message-Order-Key"] {
        headers.append(name, "1");
    }
    let sent = context.publish_with_headers("orders.created", headers, "x".into()).await.unwrap();
    sent.await.unwrap();
    // What this client does not send: a value over two lines.
    let folded = b"NATS/1.0\r\nfolded: a\r\n b\r\n: nameless\r\n\r\n";
    server.publish_raw(b"orders.created", folded, b"y").await;
}

/// Receives and acknowledges two messages, of those with an id or of those without one, however often each is delivered.
async fn receive_two(source: &NatsSource, has_id: bool) -> BTreeMap<Bytes, Arc<dyn Delivery>> {
    let mut received = BTreeMap::new();
    while received.len() < 2 {
        for delivery in source.receive(2.try_into().unwrap()).await.unwrap() {
            delivery.acknowledge().await.unwrap();
            let message = delivery.message();
            if message.header("message-id").is_some() == has_id {
                received.insert(message.payload.clone(), delivery);
            }
        }
    }
    received
}

#[tokio::test]
async fn each_header_that_the_client_reads_is_redriven_as_it_was() {
    for order_key in [NatsOrderKey::None, NatsOrderKey::Subject] {
        let server = NatsServer::start().await;
        let context = context(&server).await;
        publish_headers(&server, &context).await;
        let is_ordered = order_key != NatsOrderKey::None;
        let builder = NatsSource::builder(context.clone(), "ORDERS", "test").order_key(order_key);
        let source = builder.start().await.unwrap();
        let first = receive_two(&source, false).await;
        let sink = NatsSink::new(context);
        for (number, delivery) in first.values().enumerate() {
            let received = delivery.message();
            let id = MessageId::new(format!("m-{number}")).unwrap();
            let mut redriven = OutgoingMessage::new("orders.created", id, received.payload.clone());
            redriven.key.clone_from(&received.key);
            assert_eq!(redriven.key.is_some(), is_ordered);
            redriven.native = delivery.native();
            redriven.headers.clone_from(&received.headers);
            sink.publish(&redriven).await.unwrap();
        }
        for (payload, again) in receive_two(&source, true).await {
            assert_eq!(own_headers(again.message()), own_headers(first[&payload].message()));
        }
    }
}

#[tokio::test]
async fn another_payload_under_a_known_id_is_rejected() {
    let server = NatsServer::start().await;
    let context = context(&server).await;
    let sink = NatsSink::new(context.clone());
    sink.publish(&message("m-1", b"one")).await.unwrap();
    sink.publish(&message("m-1", b"one")).await.unwrap();
    let error = sink.publish(&message("m-1", b"two")).await.unwrap_err();
    assert!(matches!(&error, PublishError::Rejected(_)), "{error}");
    assert!(error.to_string().contains("found another one in the stream"), "{error}");
    // Published again on purpose.
    let mut again = message("m-1", b"one");
    again.broker_id = Some("m-1 again".to_owned());
    sink.publish(&again).await.unwrap();
    let mut stream = context.get_stream("ORDERS").await.unwrap();
    assert_eq!(stream.info().await.unwrap().state.messages, 2);
}

#[tokio::test]
async fn a_stored_message_that_the_client_cannot_read_is_compared_too() {
    let server = NatsServer::start().await;
    let sink = NatsSink::new(context(&server).await);
    let headers = b"NATS/1.0\r\nNats-Msg-Id: m-1 orders.created\r\nname: M\xfcller\r\n\r\n";
    server.publish_raw(b"orders.created", headers, b"one").await;
    sink.publish(&message("m-1", b"one")).await.unwrap();
    let error = sink.publish(&message("m-1", b"two")).await.unwrap_err();
    assert!(matches!(&error, PublishError::Rejected(_)), "{error}");
}

#[tokio::test]
async fn one_id_to_two_subjects_of_a_stream_is_two_messages() {
    let server = NatsServer::start().await;
    let context = context(&server).await;
    let sink = NatsSink::new(context.clone());
    for subject in ["orders.a", "orders.b", "orders.a"] {
        let mut message = message("m-1", b"x");
        message.destination = subject.to_owned();
        sink.publish(&message).await.unwrap();
    }
    let mut stream = context.get_stream("ORDERS").await.unwrap();
    assert_eq!(stream.info().await.unwrap().state.messages, 2);
}

#[tokio::test]
async fn letters_are_published_each_time_that_a_message_is_parked_and_whatever_it_carries() {
    let server = NatsServer::start().await;
    let context = context(&server).await;
    let sink = Arc::new(NatsSink::new(context.clone()));
    let letters = PublishedDeadLetters::new(sink, "orders.dead");
    let parked = |size: usize, at: u64| {
        // With the headers of the message the dead letter is too large for the server.
        let message = Message::new("nats://ORDERS/orders.created", vec![0; size])
            .with_header("trace", "t".repeat(1000))
            .with_header("Nats-Expected-Last-Sequence", "17");
        let id = MessageId::new("a\n100%").unwrap();
        let (reason, at) = (DeadLetterReason::Rejected, Timestamp::from_micros(at));
        DeadLetter::new("invoices", Some(&id), message, reason, "no\nsuch customer", at)
    };
    letters.park(&parked(10, 1)).await.unwrap();
    // The same parking again, as after a lost reply, and then another one of the same message.
    letters.park(&parked(10, 1)).await.unwrap();
    letters.park(&parked(10, 2)).await.unwrap();
    letters.park(&parked((1 << 20) - 1000, 3)).await.unwrap();
    let source = NatsSource::builder(context, "ORDERS", "test").start().await.unwrap();
    let received = source.receive(10.try_into().unwrap()).await.unwrap();
    let headers = |number: usize, name: &str| received[number].message().header(name).cloned();
    assert_eq!(received.len(), 3);
    assert_eq!(headers(0, "dead-letter-message-id").unwrap(), "a%0A100%25");
    assert_eq!(headers(0, "dead-letter-error").unwrap(), "no%0Asuch customer");
    assert!(headers(0, "trace").is_some() && headers(2, "trace").is_none());
}

#[tokio::test]
async fn a_message_for_no_single_subject_is_rejected() {
    let server = NatsServer::start().await;
    let sink = NatsSink::new(context(&server).await);
    for subject in ["orders.*", "orders.>", "orders. x", "orders..x", "orders.\n", ""] {
        let mut message = message("m-1", b"x");
        message.destination = subject.to_owned();
        let result = sink.publish(&message).await;
        assert!(matches!(result, Err(PublishError::Rejected(_))), "{subject:?}: {result:?}");
    }
}

#[tokio::test]
async fn a_destination_that_commands_the_server_or_is_too_long_is_rejected() {
    let server = NatsServer::start().await;
    let context = context(&server).await;
    let sink = NatsSink::new(context.clone());
    sink.publish(&message("m-1", b"x")).await.unwrap();
    let long = format!("orders.{}", "x".repeat(1018));
    for subject in [
        "$JS.API.STREAM.PURGE.ORDERS",
        "$JS.API.STREAM.DELETE.ORDERS",
        "$SYS.REQ.SERVER.PING",
        "$KV.accounts.17",
        "$",
        "_INBOX.client.1",
        "_R_.x.y.z",
        "_GR_.x.y.z",
        &long,
    ] {
        let mut message = message("m-2", b"");
        message.destination = subject.to_owned();
        let result = sink.publish(&message).await;
        assert!(matches!(result, Err(PublishError::Rejected(_))), "{subject:?}: {result:?}");
    }
    let mut stream = context.get_stream("ORDERS").await.unwrap();
    assert_eq!(stream.info().await.unwrap().state.messages, 1, "nothing was purged");
    // The longest one, and tokens that only look like reserved ones.
    for (number, subject) in [&long[..1024], "orders.$JS", "orders._INBOX"].iter().enumerate() {
        let mut message = OutgoingMessage::new(
            *subject,
            MessageId::new(format!("m-{}", number + 3)).unwrap(),
            &b"x"[..],
        );
        message.headers.clear();
        sink.publish(&message).await.unwrap();
    }
}

#[tokio::test]
async fn a_message_without_a_stream_is_not_acknowledged() {
    let server = NatsServer::start().await;
    let sink = NatsSink::new(context(&server).await);
    let mut message = message("m-1", b"x");
    message.destination = "invoices.created".to_owned();
    let result = sink.publish(&message).await;
    assert!(matches!(result, Err(PublishError::NotAcknowledged { .. })), "{result:?}");
}

#[tokio::test]
async fn headers_that_are_too_large_for_a_stream_are_rejected() {
    let server = NatsServer::start().await;
    let sink = NatsSink::new(context(&server).await);
    let mut message = message("m-1", b"x");
    message.headers.push(("large".to_owned(), vec![b'x'; 65_536].into()));
    let result = sink.publish(&message).await;
    assert!(matches!(result, Err(PublishError::Rejected(_))), "{result:?}");
}
