//! Delay queues.

use std::num::NonZeroUsize;
use std::sync::Arc;
use std::time::Duration;

use hapax_messages::{Delivery, MessageId, MessageSink, MessageSource, OutgoingMessage};
use hapax_rabbitmq::{RabbitSink, RabbitSource};
use hapax_testkit::servers::RabbitMqServer;
use lapin::BasicProperties;
use lapin::options::BasicPublishOptions;
use lapin::types::{AMQPValue, FieldTable};

use super::{channel, clear_alarm, declare, has_blocked, set_alarm};

const PAUSE: Duration = Duration::from_secs(1);

/// Returns a source of `orders`, and its messages.
async fn receive(server: &RabbitMqServer, count: usize) -> (RabbitSource, Vec<Arc<dyn Delivery>>) {
    declare(&channel(&server.url()).await, "orders", &[]).await;
    let sink = RabbitSink::builder(&server.url()).unwrap().connect().await.unwrap();
    for number in 0..count {
        let id = MessageId::new(format!("m-{number}")).unwrap();
        sink.publish(&OutgoingMessage::new("orders", id, "x")).await.unwrap();
    }
    let source = RabbitSource::builder(server.url(), "orders").delay_from(Some(PAUSE));
    let source = source.start().await.unwrap();
    let mut received = Vec::new();
    while let Some(max) = NonZeroUsize::new(count - received.len()) {
        received.extend(source.receive(max).await.unwrap());
    }
    (source, received)
}

/// Delays a message, after errors of a server that is slow.
async fn delay(delivery: &dyn Delivery, pause: Duration) {
    loop {
        match delivery.delay(pause).await {
            Ok(is_delayed) => return assert!(is_delayed),
            Err(_) => tokio::time::sleep(Duration::from_millis(20)).await,
        }
    }
}

/// Delays a message in vain, until the error has this text: those before may be of a server that is slow.
async fn until_error(delivery: &dyn Delivery, text: &str) {
    while !delivery.delay(PAUSE).await.unwrap_err().to_string().contains(text) {
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

#[tokio::test]
async fn a_server_that_blocks_publications_takes_acknowledgements() {
    let server = RabbitMqServer::start().await;
    let (source, mut received) = receive(&server, 2).await;
    set_alarm(&server).await;
    let acknowledged = async {
        has_blocked(&server).await;
        received[1].acknowledge().await.unwrap();
        while server.messages("orders").await != 1 {
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    };
    tokio::select! {
        () = delay(&*received[0], PAUSE) => panic!("it was delayed"),
        () = acknowledged => {}
    }
    until_error(&*received[0], "it has blocked the connection").await;
    clear_alarm(&server).await;
    delay(&*received[0], PAUSE).await;
    received.clear();
    let received = source.receive(NonZeroUsize::MIN).await.unwrap();
    assert_eq!(received[0].message().header("message-id").unwrap(), "m-0");
}

#[tokio::test]
async fn a_message_in_a_new_delay_queue_survives_a_kill_of_the_server() {
    let mut server = RabbitMqServer::start().await;
    let (source, received) = receive(&server, 1).await;
    assert!(!received[0].was_delayed());
    // Long enough for the server to end before.
    delay(&*received[0], PAUSE * 4).await;
    // It writes nothing more.
    server.pause();
    server.kill().await;
    server.restart().await;
    let delayed = async {
        loop {
            match source.receive(NonZeroUsize::MIN).await {
                Ok(received) if received[0].was_delayed() => return received,
                // A classic queue writes acknowledgements with a delay too.
                Ok(received) => received[0].acknowledge().await.unwrap(),
                Err(_) => tokio::time::sleep(Duration::from_millis(20)).await,
            }
        }
    };
    let delayed = tokio::time::timeout(Duration::from_secs(60), delayed).await.unwrap();
    assert_eq!(delayed[0].message().header("message-id").unwrap(), "m-0");
}

#[tokio::test]
async fn a_message_comes_from_a_delay_queue_only_if_the_server_says_so() {
    let server = RabbitMqServer::start().await;
    let (source, received) = receive(&server, 0).await;
    drop(received);
    let mut headers = FieldTable::default();
    // Of a producer, or of a message that was copied from another queue.
    headers.insert("hapax-routing-key".into(), AMQPValue::LongString("elsewhere".into()));
    let properties = BasicProperties::default().with_message_id("m-0".into()).with_headers(headers);
    let options = BasicPublishOptions::default();
    let channel = channel(&server.url()).await;
    let sent = channel.basic_publish("".into(), "orders".into(), options, b"x", properties).await;
    sent.unwrap();
    let received = source.receive(NonZeroUsize::MIN).await.unwrap();
    assert!(!received[0].was_delayed() && !received[0].is_redelivery());
    delay(&*received[0], PAUSE).await;
    drop(received);
    let received = source.receive(NonZeroUsize::MIN).await.unwrap();
    assert!(received[0].was_delayed() && received[0].is_redelivery());
}

#[tokio::test]
async fn a_message_stays_if_another_queue_has_the_name_of_its_delay_queue() {
    let server = RabbitMqServer::start().await;
    declare(&channel(&server.url()).await, "orders.delay-1s", &[]).await;
    let (_source, received) = receive(&server, 1).await;
    until_error(&*received[0], "PRECONDITION").await;
    assert_eq!(server.messages("orders").await, 1);
    assert!(!received[0].has_ended());
    received[0].acknowledge().await.unwrap();
    while server.messages("orders").await != 0 {
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}
