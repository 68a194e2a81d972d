//! `hapax relay`, `hapax consume` and `hapax messages redrive` with Kafka.

use std::time::Duration;

use hapax_testkit::servers::{KafkaMock, PostgresServer};

use crate::messages::consume::ConsumeProcess;
use crate::messages::kills::{Flags, lose_no_message_and_keep_the_order_of_keys};
use crate::messages::{blocking, migrations, until};
use crate::world::{get_with, refused};

#[tokio::test(flavor = "multi_thread")]
async fn a_relay_and_a_consumer_that_are_killed_lose_no_message_and_keep_the_order_of_keys() {
    let (database, cluster) = (PostgresServer::start().await, KafkaMock::start("orders", 3));
    database.sql("postgres", &migrations()).await;
    let (url, broker) = (database.url("postgres"), format!("kafka://{}", cluster.bootstrap()));
    let from = format!("{broker}/orders");
    // The lease is the session timeout: the shortest that brokers accept.
    let consume = [["--from", &*from], ["--order-by", "key"], ["--lease", "6s"]].concat();
    let flags = Flags { broker: &broker, relay: &[], consume: &consume, destination: "orders" };
    let survivors = lose_no_message_and_keep_the_order_of_keys(&database, flags).await;

    // An invalid name of a topic: a dead letter of the outbox.
    database.sql("postgres", "SELECT hapax_outbox_put_text('a topic', '{}', NULL, 'm-1')").await;
    until(&database, "SELECT count(*) FROM hapax_outbox", "0").await;
    let error = database.sql("postgres", "SELECT error FROM hapax_dead_letters").await;
    assert!(error.contains("expected a topic of 1 to 249"), "{error}");
    assert_eq!(blocking(|| survivors.relay.end()), Some(0));
    blocking(|| survivors.consumer.end());

    for (to, expected, text) in [
        (&*from, 64, "without a user and a topic"),
        ("kafka://127.0.0.1:1", 69, "expected an answer of the Kafka brokers"),
    ] {
        let relay = ["relay", "--admin", "off", "--log-level", "off", "--from", &url, "--to", to];
        let (code, line) = blocking(|| refused(&relay));
        assert!(code == expected && line.contains(text), "{code} {line}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_consumer_with_a_stopped_partition_is_not_ready() {
    let (database, cluster) = (PostgresServer::start().await, KafkaMock::start("orders", 1));
    database.sql("postgres", &migrations()).await;
    // Past the end of the log.
    blocking(|| cluster.commit("invoices", "orders", 0, 5));
    let (url, from) = (database.url("postgres"), format!("kafka://{}/orders", cluster.bootstrap()));
    let flags = [
        ["--from", &*from],
        ["--consumer", "invoices"],
        ["--to", "http://127.0.0.1:1/orders"],
        ["--store", &*url],
    ];
    let consumer = blocking(|| ConsumeProcess::start(&flags.concat()));
    while blocking(|| consumer.metric("stopped_partitions")) == 0 {
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    let answer = blocking(|| get_with(consumer.admin, "/readyz", ""));
    let expected = "stopped partitions: 1; the log has the cause\n";
    assert_eq!((answer.status, &*answer.body), (503, expected));
    blocking(|| consumer.end());
}
