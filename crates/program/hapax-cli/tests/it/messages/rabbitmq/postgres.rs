//! `hapax relay` and `hapax consume` with RabbitMQ.

use std::collections::BTreeMap;
use std::time::Duration;

use hapax_testkit::servers::{PostgresServer, RabbitMqServer};
use lapin::options::{ExchangeDeclareOptions, QueueBindOptions, QueueDeclareOptions};
use lapin::types::{AMQPValue, FieldTable};
use lapin::{Connection, ConnectionProperties, ExchangeKind};

use crate::messages::consume::ConsumeProcess;
use crate::messages::service::{Moment, Reply, SECRET, Service};
use crate::messages::{RelayProcess, blocking, migrations, until};
use crate::world::{ok, refused};

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
    /// Messages of each of three keys in a round.
    const ROUND: u32 = 4;
    let (database, broker) = (PostgresServer::start().await, RabbitMqServer::start().await);
    database.sql("postgres", &migrations()).await;
    create_queue(&broker).await;
    let (socket, to) = Service::bind();
    let folder = tempfile::tempdir().unwrap();
    let secret = folder.path().join("signing");
    std::fs::write(&secret, format!("{SECRET}\n")).unwrap();
    let (url, from) = (database.url("postgres"), format!("amqp://{}", broker.address()));
    let (to, secret) = (format!("http://{to}/orders"), secret.display().to_string());
    let flags = [
        ["--from", &*from],
        ["--queue", "invoices"],
        ["--delivery-limit", "none"],
        ["--order-by", "header:message-order-key"],
        ["--consumer", "invoices"],
        ["--to", &*to],
        ["--store", &*url],
        ["--signing-secret-file", &*secret],
        ["--lease", "1s"],
        ["--timeout", "1s"],
        ["--longest-pause", "200ms"],
    ]
    .concat();
    let service = Service::default();
    service.serve(socket);
    let outbox = "SELECT count(*) FROM hapax_outbox";
    let moments =
        [Moment::Arrived, Moment::Accepted, Moment::Answered(Duration::ZERO), Moment::Failed];
    let mut next = 1;
    for moment in moments {
        let relay = blocking(|| RelayProcess::start(&url, &from, &["--exchange", "events"]));
        let process = blocking(|| ConsumeProcess::start(&flags));
        service.kill(process.id(), moment, 1);
        for number in next..next + ROUND {
            for key in ["a", "b", "c"] {
                let id = format!("{key}-{number:03}");
                match (key, number % 4) {
                    ("a", 1) => service.reply(&id, &[Reply::Status(409, "0")]),
                    ("b", 0) => service.reply(&id, &[Reply::Status(503, "0")]),
                    ("c", _) if number == 6 => service.reply(&id, &[Reply::Rejected(404)]),
                    _ => {}
                }
                let put = format!(
                    "SELECT hapax_outbox_put_text('orders.created', '{{}}', '{key}', '{id}')"
                );
                database.sql("postgres", &put).await;
            }
        }
        next += ROUND;
        // Before the relay, which may not have published the message of the moment yet.
        assert_eq!(blocking(|| process.wait()), None, "killed {moment:?}");
        // It may have published messages that are still in the outbox.
        relay.kill();
    }
    let relay = blocking(|| RelayProcess::start(&url, &from, &["--exchange", "events"]));
    let process = blocking(|| ConsumeProcess::start(&flags));
    let settled = async || {
        until(&database, outbox, "0").await;
        while broker.messages("invoices").await > 0 {
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    };
    settled().await;
    let parked = "SELECT string_agg(message_id || ' ' || reason, ', ' ORDER BY number)
        FROM hapax_dead_letters";
    let later = (7..next).map(|number| format!(", c-{number:03} blocked"));
    let expected = format!("c-006 rejected{}", later.collect::<String>());
    assert_eq!(database.sql("postgres", parked).await, expected);

    // To the queue of the consumer, whatever the routing key was.
    service.reply("c-006", &[]);
    let redrive = ["messages", "redrive", "--consumer", "invoices", "--reason", "fixed"];
    let at = ["--database", &url, "--store", &url, "--to", &from];
    blocking(|| ok(&[&redrive[..], &at].concat()));
    settled().await;
    until(&database, "SELECT count(*) FROM hapax_dead_letters", "0").await;
    let mut by_key: BTreeMap<String, Vec<String>> = BTreeMap::new();
    for (key, id) in service.effects() {
        by_key.entry(key).or_default().push(id);
    }
    for key in ["a", "b", "c"] {
        let expected: Vec<_> = (1..next).map(|number| format!("{key}-{number:03}")).collect();
        assert_eq!(by_key[key], expected);
    }
    assert_eq!(service.kills(), 4);
    let destination = &service.received_of("a-001")[0].headers["message-destination"];
    assert_eq!(destination, "orders.created");

    // Unroutable: a dead letter of the outbox.
    let put = "SELECT hapax_outbox_put_text('carts.created', '{}', NULL, 'm-1')";
    database.sql("postgres", put).await;
    until(&database, outbox, "0").await;
    let error = database.sql("postgres", "SELECT error FROM hapax_dead_letters").await;
    assert!(error.contains("expected a queue for the routing key \"carts.created\""), "{error}");
    assert_eq!(blocking(|| relay.end()), Some(0));
    blocking(|| process.end());

    let arguments = ["consume", "--admin", "off", "--log-level", "off"];
    let (changed, value) = ("--queue", "none");
    let words = flags.chunks(2).map(|pair| match pair[0] == changed {
        true => [pair[0], value],
        false => [pair[0], pair[1]],
    });
    let words = [&arguments[..], &words.flatten().collect::<Vec<_>>()].concat();
    let (code, line) = blocking(|| refused(&words));
    assert!(code == 69 && line.contains("with the queue none, found an error"), "{code} {line}");
}
