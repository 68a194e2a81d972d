//! `hapax relay` and `hapax consume` with RabbitMQ.

use std::time::Duration;

use hapax_testkit::servers::{PostgresServer, RabbitMqServer};
use lapin::options::{ExchangeDeclareOptions, QueueBindOptions, QueueDeclareOptions};
use lapin::types::{AMQPValue, FieldTable};
use lapin::{Connection, ConnectionProperties, ExchangeKind};

use crate::messages::kills::{Flags, lose_no_message_and_keep_the_order_of_keys};
use crate::messages::{blocking, migrations, until};
use crate::world::refused;

/// Creates the exchange `events`, and a quorum queue `invoices` of `orders.*` with one active consumer.
async fn create_queue(server: &RabbitMqServer) {
    let connection = Connection::connect(&server.url(), ConnectionProperties::default()).await;
    let connection = connection.unwrap();
    let channel = connection.create_channel().await.unwrap();
    let durable = ExchangeDeclareOptions { durable: true, ..ExchangeDeclareOptions::default() };
    let none = FieldTable::default;
    channel.exchange_declare("events".into(), ExchangeKind::Topic, durable, none()).await.unwrap();
    let mut arguments = FieldTable::default();
    arguments.insert("x-queue-type".into(), AMQPValue::LongString("quorum".into()));
    arguments.insert("x-single-active-consumer".into(), true.into());
    let durable = QueueDeclareOptions { durable: true, ..QueueDeclareOptions::default() };
    channel.queue_declare("invoices".into(), durable, arguments).await.unwrap();
    let bind = QueueBindOptions::default();
    channel
        .queue_bind("invoices".into(), "events".into(), "orders.*".into(), bind, none())
        .await
        .unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_relay_and_a_consumer_that_are_killed_lose_no_message_and_keep_the_order_of_keys() {
    let (database, broker) = (PostgresServer::start().await, RabbitMqServer::start().await);
    database.sql("postgres", &migrations()).await;
    create_queue(&broker).await;
    let from = format!("amqp://{}", broker.address());
    let consume = [
        ["--from", &*from],
        ["--queue", "invoices"],
        ["--delivery-limit", "none"],
        ["--order-by", "header:message-order-key"],
        ["--lease", "1s"],
    ]
    .concat();
    let relay = ["--exchange", "events"];
    let destination = "orders.created";
    let flags = Flags { broker: &from, relay: &relay, consume: &consume, destination };
    // A redrive publishes to the queue of the consumer, whatever the routing key was.
    let survivors = lose_no_message_and_keep_the_order_of_keys(&database, flags).await;
    while broker.messages("invoices").await > 0 {
        tokio::time::sleep(Duration::from_millis(20)).await;
    }

    // Unroutable: a dead letter of the outbox.
    let put = "SELECT hapax_outbox_put_text('carts.created', '{}', NULL, 'm-1')";
    database.sql("postgres", put).await;
    until(&database, "SELECT count(*) FROM hapax_outbox", "0").await;
    let error = database.sql("postgres", "SELECT error FROM hapax_dead_letters").await;
    assert!(error.contains("expected a queue for the routing key \"carts.created\""), "{error}");
    assert_eq!(blocking(|| survivors.relay.end()), Some(0));
    blocking(|| survivors.consumer.end());

    let arguments = ["consume", "--admin", "off", "--log-level", "off"];
    let flags = survivors.flags.chunks(2).map(|pair| match &*pair[0] {
        "--queue" => ["--queue", "none"],
        flag => [flag, &*pair[1]],
    });
    let words = [&arguments[..], &flags.flatten().collect::<Vec<_>>()].concat();
    let (code, line) = blocking(|| refused(&words));
    assert!(code == 69 && line.contains("with the queue none, found an error"), "{code} {line}");
}
