//! The sink.

use std::time::Duration;

use hapax_messages::{MessageId, MessageSink, MessageSource, OutgoingMessage, PublishError};
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
