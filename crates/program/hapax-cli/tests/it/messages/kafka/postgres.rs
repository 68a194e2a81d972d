//! `hapax relay`, `hapax consume` and `hapax messages redrive` with Kafka.

use std::time::Duration;

use hapax_testkit::servers::{KafkaMock, PostgresServer};

use crate::messages::consume::ConsumeProcess;
use crate::messages::kills::{Flags, lose_no_message_and_keep_the_order_of_keys};
use crate::messages::{blocking, migrations, until};
use crate::world::{get_with, refused, run};

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
async fn the_properties_of_a_file_are_those_of_the_client() {
    let (database, cluster) = (PostgresServer::start().await, KafkaMock::start("orders", 1));
    database.sql("postgres", &migrations()).await;
    let (url, broker) = (database.url("postgres"), format!("kafka://{}", cluster.bootstrap()));
    let (from, folder) = (format!("{broker}/orders"), tempfile::tempdir().unwrap());
    let file = folder.path().join("properties").display().to_string();
    let consume = |from, level| {
        let place = [["--from", from], ["--store", &url], ["--consumer", "invoices"]];
        let flags = [["--to", "http://127.0.0.1:1/orders"], ["--kafka-properties", &file]];
        let off = [["--admin", "off"], ["--log-level", level]];
        [&["consume"][..], &place.concat(), &flags.concat(), &off.concat()].concat()
    };
    let place = [["--from", &*url], ["--to", &*broker], ["--kafka-properties", &*file]].concat();
    let relay = [&["relay", "--admin", "off", "--log-level", "off"][..], &place].concat();
    // The cluster has no TLS.
    let tls = match cfg!(feature = "kafka-tls") {
        true => (
            "security.protocol=ssl",
            69,
            "expected a Kafka cluster",
            "expected an answer of the Kafka",
        ),
        false => ("security.protocol=ssl", 64, "OpenSSL not available", "OpenSSL not available"),
    };
    for (text, code, of_consume, of_relay) in [
        tls,
        (
            "hapax=hidden",
            64,
            "the property hapax: expected one of librdkafka",
            "the property hapax",
        ),
        ("acks=1", 64, "", "the property acks: expected all"),
        ("session.timeout.ms=6000", 64, "which --lease sets", ""),
        ("bootstrap.servers=hidden", 64, "which --from sets", "which --to sets"),
        ("hidden", 64, "line 1: expected NAME=VALUE", "line 1: expected NAME=VALUE"),
    ] {
        std::fs::write(&file, text).unwrap();
        for (command, expected) in [(&consume(&from, "off"), of_consume), (&relay, of_relay)] {
            if expected.is_empty() {
                continue;
            }
            let (found, line) = blocking(|| refused(command));
            assert!(found == code && line.contains(expected), "{text} {found} {line}");
            assert!(!line.contains("hidden"), "{line}");
        }
    }
    // No broker: the log has the cause, before the error.
    std::fs::write(&file, "client.id=invoices").unwrap();
    let output = blocking(|| run(&consume("kafka://127.0.0.1:1/orders", "error")));
    let log = String::from_utf8(output.stderr).unwrap();
    let (cause, error) = log.split_once("hapax: --from: expected a Kafka cluster").unwrap();
    assert!(cause.contains("librdkafka") && cause.contains("127.0.0.1:1 failed"), "{log}");
    assert!(error.contains("the log of librdkafka"), "{log}");
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
