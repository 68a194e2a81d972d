//! `hapax relay`, `hapax consume` and `hapax messages redrive` with Kafka.

use std::collections::BTreeMap;
use std::time::Duration;

use hapax_testkit::servers::{KafkaMock, PostgresServer};

use crate::messages::consume::ConsumeProcess;
use crate::messages::service::{Moment, Reply, SECRET, Service};
use crate::messages::{RelayProcess, blocking, migrations, until};
use crate::world::{ok, refused};

#[tokio::test(flavor = "multi_thread")]
async fn a_relay_and_a_consumer_that_are_killed_lose_no_message_and_keep_the_order_of_keys() {
    /// Messages of each of three keys in a round.
    const ROUND: u32 = 4;
    let (database, cluster) = (PostgresServer::start().await, KafkaMock::start("orders", 3));
    database.sql("postgres", &migrations()).await;
    let (socket, to) = Service::bind();
    let folder = tempfile::tempdir().unwrap();
    let secret = folder.path().join("signing");
    std::fs::write(&secret, format!("{SECRET}\n")).unwrap();
    let (url, brokers) = (database.url("postgres"), format!("kafka://{}", cluster.bootstrap()));
    let (from, to) = (format!("{brokers}/orders"), format!("http://{to}/orders"));
    let secret = secret.display().to_string();
    let flags = [
        ["--from", &*from],
        ["--order-by", "key"],
        ["--consumer", "invoices"],
        ["--to", &*to],
        ["--store", &*url],
        ["--signing-secret-file", &*secret],
        // The session timeout, and the shortest that brokers accept.
        ["--lease", "6s"],
        ["--timeout", "1s"],
        ["--longest-pause", "200ms"],
    ]
    .concat();
    let service = Service::default();
    service.serve(socket);
    let moments =
        [Moment::Arrived, Moment::Accepted, Moment::Answered(Duration::ZERO), Moment::Failed];
    let mut next = 1;
    for moment in moments {
        let relay = blocking(|| RelayProcess::start(&url, &brokers, &[]));
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
                let put =
                    format!("SELECT hapax_outbox_put_text('orders', '{{}}', '{key}', '{id}')");
                database.sql("postgres", &put).await;
            }
        }
        next += ROUND;
        // Before the relay, which may not have published the message of the moment yet.
        assert_eq!(blocking(|| process.wait()), None, "killed {moment:?}");
        // It may have published messages that are still in the outbox.
        relay.kill();
    }
    let relay = blocking(|| RelayProcess::start(&url, &brokers, &[]));
    let process = blocking(|| ConsumeProcess::start(&flags));
    // Of the key c, the message 6 and all later ones.
    let parked = next - 6;
    until(&database, "SELECT count(*) FROM hapax_dead_letters", &parked.to_string()).await;
    let list = "SELECT string_agg(message_id || ' ' || reason, ', ' ORDER BY number)
        FROM hapax_dead_letters";
    let later = (7..next).map(|number| format!(", c-{number:03} blocked"));
    let expected = format!("c-006 rejected{}", later.collect::<String>());
    assert_eq!(database.sql("postgres", list).await, expected);

    service.reply("c-006", &[]);
    let redrive = ["messages", "redrive", "--consumer", "invoices", "--reason", "fixed"];
    let at = ["--database", &url, "--store", &url, "--to", &brokers];
    blocking(|| ok(&[&redrive[..], &at].concat()));
    until(&database, "SELECT count(*) FROM hapax_dead_letters", "0").await;
    let total = usize::try_from(3 * (next - 1)).unwrap();
    while service.effects().len() < total {
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    until(&database, "SELECT count(*) FROM hapax_outbox", "0").await;
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
    assert_eq!(destination, "orders");

    // An invalid name of a topic: a dead letter of the outbox.
    database.sql("postgres", "SELECT hapax_outbox_put_text('a topic', '{}', NULL, 'm-1')").await;
    until(&database, "SELECT count(*) FROM hapax_outbox", "0").await;
    let error = database.sql("postgres", "SELECT error FROM hapax_dead_letters").await;
    assert!(error.contains("expected a topic of 1 to 249"), "{error}");
    assert_eq!(blocking(|| relay.end()), Some(0));
    blocking(|| process.end());

    for (to, expected, text) in [
        (&*from, 64, "without a user and a topic"),
        ("kafka://127.0.0.1:1", 69, "expected an answer of the Kafka brokers"),
    ] {
        let relay = ["relay", "--admin", "off", "--log-level", "off", "--from", &url, "--to", to];
        let (code, line) = blocking(|| refused(&relay));
        assert!(code == expected && line.contains(text), "{code} {line}");
    }
}
