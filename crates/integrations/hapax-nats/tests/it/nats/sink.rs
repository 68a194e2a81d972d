//! The sink.

use std::sync::Arc;
use std::time::Duration;

use hapax_core::Timestamp;
use hapax_messages::{
    DeadLetter, DeadLetterReason, DeadLetters as _, Message, MessageId, MessageSink, MessageSource,
    OutgoingMessage, PublishError, PublishedDeadLetters,
};
use hapax_nats::{NatsSink, NatsSource};
use hapax_testkit::servers::NatsServer;

use super::context;

fn message(id: &str, payload: &'static [u8]) -> OutgoingMessage {
    OutgoingMessage::new("orders.created", MessageId::new(id).unwrap(), payload)
}

#[tokio::test]
async fn a_message_arrives_byte_for_byte_with_its_headers() {
    let server = NatsServer::start().await;
    let context = context(&server).await;
    let sink = NatsSink::new(context.clone());
    let mut sent = message("m-1", &[0, 255, 13, 10, 0]);
    sent.headers.push(("trace".to_owned(), "ä b: c".into()));
    sent.headers.push(("Message-ID".to_owned(), "of another".into()));
    sink.publish(&sent).await.unwrap();
    let source = NatsSource::builder(context, "ORDERS", "test").start().await.unwrap();
    let received = source.receive(10.try_into().unwrap()).await.unwrap();
    let message = received[0].message();
    assert_eq!((received.len(), &message.payload[..]), (1, &[0, 255, 13, 10, 0][..]));
    assert_eq!(message.header("message-id").unwrap(), "m-1");
    assert_eq!(message.header("trace").unwrap(), "ä b: c");
    assert_eq!(message.origin, "nats://ORDERS/orders.created");
    assert_eq!(message.position.as_ref().unwrap().offset, 1);
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
    assert!(error.to_string().contains("has another payload"), "{error}");
    // Published again on purpose.
    let mut again = message("m-1", b"one");
    again.broker_id = Some("m-1 again".to_owned());
    sink.publish(&again).await.unwrap();
    let mut stream = context.get_stream("ORDERS").await.unwrap();
    assert_eq!(stream.info().await.unwrap().state.messages, 2);
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
        // With the headers of the message the letter is too large for the server.
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
async fn messages_that_nats_cannot_carry_are_rejected() {
    let server = NatsServer::start().await;
    let sink = NatsSink::new(context(&server).await);
    let with = |change: &dyn Fn(&mut OutgoingMessage)| {
        let mut message = message("m-1", b"x");
        change(&mut message);
        message
    };
    let large = vec![0; 2 << 20];
    for (what, message) in [
        ("wildcard", with(&|it| it.destination = "orders.*".to_owned())),
        ("space", with(&|it| it.destination = "orders. x".to_owned())),
        ("empty", with(&|it| it.destination = String::new())),
        ("header name", with(&|it| it.headers.push(("a b".to_owned(), "x".into())))),
        ("header value", with(&|it| it.headers.push(("a".to_owned(), "x\r\ny".into())))),
        ("binary header", with(&|it| it.headers.push(("a".to_owned(), vec![0xff].into())))),
        ("id of two lines", with(&|it| it.id = MessageId::new("a\nb").unwrap())),
        ("too large", with(&|it| it.payload = large.clone().into())),
    ] {
        let result = sink.publish(&message).await;
        assert!(matches!(result, Err(PublishError::Rejected(_))), "{what}: {result:?}");
    }
}

#[tokio::test]
async fn a_message_without_a_stream_or_a_server_is_not_acknowledged() {
    let mut server = NatsServer::start().await;
    let sink = NatsSink::new(context(&server).await);
    let mut elsewhere = message("m-1", b"x");
    elsewhere.destination = "invoices.created".to_owned();
    let result = sink.publish(&elsewhere).await;
    assert!(matches!(result, Err(PublishError::NotAcknowledged { .. })), "{result:?}");
    server.kill().await;
    let another = message("m-2", b"x");
    let result = tokio::time::timeout(Duration::from_secs(60), sink.publish(&another));
    let result = result.await.expect("it ends");
    assert!(matches!(result, Err(PublishError::NotAcknowledged { .. })), "{result:?}");
    server.restart().await;
    while sink.publish(&another).await.is_err() {}
}
