//! `hapax relay` and `hapax consume` that are killed, with any broker.

use std::collections::BTreeMap;
use std::time::Duration;

use hapax_testkit::servers::PostgresServer;

use super::consume::ConsumeProcess;
use super::service::{Moment, Reply, SECRET, Service};
use super::{RelayProcess, blocking, until};
use crate::world::ok;

/// Messages of each of three keys in a round.
const ROUND: u32 = 4;

const DEAD_LETTERS: &str = "SELECT count(*) FROM hapax_dead_letters";

/// A broker, and the flags of both programs for it.
pub(super) struct Flags<'a> {
    /// `--to` of the relay and of a redrive.
    pub(super) broker: &'a str,
    pub(super) relay: &'a [&'a str],
    pub(super) consume: &'a [&'a str],
    /// Destination of the messages.
    pub(super) destination: &'a str,
}

/// Both programs, after the kills.
pub(super) struct Survivors {
    pub(super) relay: RelayProcess,
    pub(super) consumer: ConsumeProcess,
    /// All flags of the consumer.
    pub(super) flags: Vec<String>,
    _folder: tempfile::TempDir,
}

/// Kills both programs at each moment of a request, redrives the messages of a key that became dead letters, and
/// checks that each message has one effect, in the order of its key.
pub(super) async fn lose_no_message_and_keep_the_order_of_keys(
    database: &PostgresServer,
    flags: Flags<'_>,
) -> Survivors {
    let (socket, to) = Service::bind();
    let folder = tempfile::tempdir().unwrap();
    let secret = folder.path().join("signing");
    std::fs::write(&secret, format!("{SECRET}\n")).unwrap();
    let (url, to) = (database.url("postgres"), format!("http://{to}/orders"));
    let secret = secret.display().to_string();
    let common = [
        ["--consumer", "invoices"],
        ["--to", &*to],
        ["--store", &*url],
        ["--signing-secret-file", &*secret],
        ["--timeout", "1s"],
        ["--longest-pause", "200ms"],
    ];
    let consume = [flags.consume, &common.concat()].concat();
    let start_relay = || blocking(|| RelayProcess::start(&url, flags.broker, flags.relay));
    let start_consumer = || blocking(|| ConsumeProcess::start(&consume));
    let service = Service::default();
    service.serve(socket);
    let moments =
        [Moment::Arrived, Moment::Accepted, Moment::Answered(Duration::ZERO), Moment::Failed];
    let mut next = 1;
    for moment in moments {
        let (relay, consumer) = (start_relay(), start_consumer());
        service.kill(consumer.id(), moment, 1);
        for number in next..next + ROUND {
            for key in ["a", "b", "c"] {
                let id = format!("{key}-{number:03}");
                match (key, number % 4) {
                    ("a", 1) => service.reply(&id, &[Reply::Status(409, "0")]),
                    ("b", 0) => service.reply(&id, &[Reply::Status(503, "0")]),
                    ("c", _) if number == 6 => service.reply(&id, &[Reply::Rejected(422)]),
                    _ => {}
                }
                let destination = flags.destination;
                let put = format!(
                    "SELECT hapax_outbox_put_text('{destination}', '{{}}', '{key}', '{id}')"
                );
                database.sql("postgres", &put).await;
            }
        }
        next += ROUND;
        // Before the relay, which may not have published the message of the moment yet.
        assert_eq!(blocking(|| consumer.wait()), None, "killed {moment:?}");
        // It may have published messages that are still in the outbox.
        relay.kill();
    }
    let (relay, consumer) = (start_relay(), start_consumer());
    // Of the key c, the message 6 and all later ones.
    until(database, DEAD_LETTERS, &(next - 6).to_string()).await;
    let list = "SELECT string_agg(message_id || ' ' || reason, ', ' ORDER BY number)
        FROM hapax_dead_letters";
    let later = (7..next).map(|number| format!(", c-{number:03} blocked"));
    let expected = format!("c-006 rejected{}", later.collect::<String>());
    assert_eq!(database.sql("postgres", list).await, expected);

    service.reply("c-006", &[]);
    // A consumer may have been killed while it handled one of those that were parked behind it.
    let redrive = ["messages", "redrive", "--consumer", "invoices", "--force", "--reason", "fixed"];
    let at = ["--database", &url, "--store", &url, "--to", flags.broker];
    blocking(|| ok(&[&redrive[..], &at].concat()));
    until(database, DEAD_LETTERS, "0").await;
    let total = usize::try_from(3 * (next - 1)).unwrap();
    while service.effects().len() < total {
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    until(database, "SELECT count(*) FROM hapax_outbox", "0").await;
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
    assert_eq!(destination, flags.destination);
    let flags = consume.iter().map(|flag| (*flag).to_owned()).collect();
    Survivors { relay, consumer, flags, _folder: folder }
}
