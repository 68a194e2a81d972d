//! `hapax consume` with a real broker, stores in a file and in PostgreSQL, and a service that checks ids.

mod failing;
mod faults;
mod python;
mod redrives;
mod settings;
mod unreadable;

use std::collections::BTreeSet;

use rustix::process::Signal;

use super::*;
use crate::messages::consume::ConsumeProcess;
use crate::messages::service::{Moment, Reply, SECRET, Service};

/// Times after an answer at which a process is killed: before its record, its acknowledgement, or
/// after it.
const AFTER_ANSWERS: [Duration; 3] =
    [Duration::ZERO, Duration::from_micros(700), Duration::from_millis(3)];

/// A broker and a database, and a service.
struct Consume {
    world: World,
    sink: NatsSink,
    service: Service,
    /// Flags of each process.
    flags: Vec<String>,
    folder: tempfile::TempDir,
}

impl Consume {
    /// Starts a world without a process. The service is at `to`.
    async fn start(to: std::net::SocketAddr) -> Self {
        let world = World::start().await;
        let folder = tempfile::tempdir().unwrap();
        let secret = folder.path().join("signing");
        std::fs::write(&secret, format!("{SECRET}\n")).unwrap();
        let (broker, database) = (world.broker.url(), world.database.url("postgres"));
        let (to, secret) = (format!("http://{to}/orders"), secret.display().to_string());
        let flags = [
            ["--from", &broker],
            ["--stream", "ORDERS"],
            ["--consumer", "invoices"],
            ["--to", &to],
            ["--database", &database],
            ["--signing-secret-file", &secret],
            ["--lease", "1s"],
            ["--max-unacknowledged", "32"],
        ];
        let flags = flags.concat().into_iter().map(str::to_owned).collect();
        let sink = NatsSink::new(world.context.clone());
        Self { world, sink, service: Service::default(), flags, folder }
    }

    fn with(mut self, more: &[&str]) -> Self {
        self.flags.extend(more.iter().map(|word| (*word).to_owned()));
        self
    }

    fn process(&self) -> ConsumeProcess {
        let flags: Vec<_> = self.flags.iter().map(String::as_str).collect();
        blocking(|| ConsumeProcess::start(&flags))
    }

    /// Publishes a message, with an id of the broker if it is published again.
    async fn publish(&self, id: &str, key: Option<&str>, again: Option<&str>) {
        let payload = format!("{{\"order\": \"{id}\"}}");
        let mut message =
            OutgoingMessage::new("orders.created", MessageId::new(id).unwrap(), payload);
        message.key = key.map(str::to_owned);
        message.broker_id = again.map(str::to_owned);
        self.sink.publish(&message).await.unwrap();
    }

    /// Waits until the broker has no message that is not acknowledged.
    async fn until_empty(&self) {
        let stream = self.world.context.get_stream("ORDERS").await.unwrap();
        loop {
            let info = stream.consumer_info("invoices").await.unwrap();
            if info.num_pending == 0 && info.num_ack_pending == 0 {
                return;
            }
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    }

    /// Waits until a condition of the service holds.
    async fn until(&self, holds: impl Fn(&Service) -> bool) {
        while !holds(&self.service) {
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    }

    async fn dead_letters(&self) -> String {
        let listed = "SELECT string_agg(message_id || ' ' || reason, ', ' ORDER BY number)
            FROM hapax_dead_letters";
        self.world.sql(listed).await
    }
}

/// Returns all moments in turn.
fn moments() -> impl Iterator<Item = Moment> {
    let answered = AFTER_ANSWERS.map(Moment::Answered);
    [Moment::Arrived, Moment::Accepted, Moment::Failed].into_iter().chain(answered)
}

#[tokio::test(flavor = "multi_thread")]
async fn a_consumer_that_is_killed_at_any_moment_loses_no_message_of_a_failing_service() {
    /// Messages of a round, at whose end the process is killed.
    const ROUND: u32 = 20;
    let (socket, address) = Service::bind();
    let consume = Consume::start(address).await;
    let file = format!("file:{}", consume.folder.path().join("inbox.db").display());
    let consume = consume.with(&["--store", &file, "--timeout", "1s", "--longest-pause", "500ms"]);
    let service = &consume.service;

    // The service is down.
    consume.publish("m-0", None, None).await;
    let process = consume.process();
    while blocking(|| process.metric("held_for_retry_total")) == 0 {
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    service.serve(socket);
    consume.until(|service| service.effects().len() == 1).await;
    let mut running = Some(process);

    let mut next = 1;
    let mut rejected = BTreeSet::new();
    for (round, moment) in moments().enumerate() {
        let process = running.take().unwrap_or_else(|| consume.process());
        service.kill(process.id(), moment, 2 + u32::try_from(round).unwrap() % 4);
        for number in next..next + ROUND {
            let id = format!("m-{number}");
            match number % 10 {
                1 => service.reply(&id, &[Reply::Status(409, "0")]),
                3 => service.reply(&id, &[Reply::Status(500, "0"), Reply::Status(503, "1")]),
                5 => service.reply(&id, &[Reply::Status(429, "0"), Reply::Status(425, "0")]),
                7 => service.reply(&id, &[Reply::Late]),
                9 if number % 20 == 9 => service.reply(&id, &[Reply::Silent]),
                _ => {}
            }
            if number % 40 == 18 {
                service.reply(&id, &[Reply::Rejected(422)]);
                rejected.insert(id.clone());
            }
            consume.publish(&id, None, None).await;
            // Its producer sends it twice.
            if number % 4 == 0 {
                consume.publish(&id, None, Some(&format!("{id} again"))).await;
            }
        }
        next += ROUND;
        assert_eq!(blocking(|| process.wait()), None, "round {round}: killed {moment:?}");
    }
    // At its start.
    let process = consume.process();
    process.signal(Signal::KILL);
    blocking(|| process.wait());

    let process = consume.process();
    consume.until_empty().await;
    let effects: Vec<_> = service.effects().into_iter().map(|(_, id)| id).collect();
    let distinct: BTreeSet<_> = effects.iter().cloned().collect();
    let expected = (0..next).map(|number| format!("m-{number}"));
    let expected: BTreeSet<_> = expected.filter(|id| !rejected.contains(id)).collect();
    assert_eq!(distinct, expected);
    assert_eq!(effects.len(), distinct.len(), "an id has two effects");
    let parked = "SELECT string_agg(message_id, ' ' ORDER BY message_id COLLATE \"C\")
        FROM hapax_dead_letters WHERE reason = 'rejected' AND error LIKE '%422 %: no such order'";
    let listed = rejected.iter().map(String::as_str).collect::<Vec<_>>().join(" ");
    assert_eq!(consume.world.sql(parked).await, listed);
    assert_eq!(consume.dead_letters().await.matches(',').count() + 1, rejected.len());
    // Every fault happened.
    assert_eq!(service.kills(), 6);
    let given = service.given();
    assert_eq!(given.len(), 8, "{given:?}");
    // A message is posted once more for each fault, or if it was in progress in a process that died.
    let faults: u32 = given.values().sum();
    let most = effects.len() + (faults + 7 * 16) as usize;
    let received = service.received().len();
    assert!(received > effects.len() && received <= most, "{received} of at most {most}");
    assert_eq!(blocking(|| get_with(process.admin, "/readyz", "")).status, 200);
    blocking(|| process.end());
}

#[tokio::test(flavor = "multi_thread")]
async fn messages_of_an_order_key_are_posted_in_order_by_consumers_that_are_killed() {
    /// Messages of each of three keys in a round.
    const ROUND: u32 = 2;
    let (socket, address) = Service::bind();
    let consume = Consume::start(address).await;
    let url = consume.world.database.url("postgres");
    let order = ["--store", &url, "--order-by", "header:message-order-key"];
    let consume = consume.with(&order).with(&["--timeout", "1s", "--longest-pause", "200ms"]);
    let service = &consume.service;
    service.serve(socket);
    let mut next = 1;
    for (round, moment) in moments().enumerate() {
        let process = consume.process();
        service.kill(process.id(), moment, 1);
        for number in next..next + ROUND {
            for key in ["a", "b", "c"] {
                let id = format!("{key}-{number:03}");
                match (key, number % 3) {
                    ("a", 1) => service.reply(&id, &[Reply::Status(409, "0")]),
                    ("b", 2) => service.reply(&id, &[Reply::Late, Reply::Status(500, "0")]),
                    ("b", 0) => service.reply(&id, &[Reply::Status(503, "0")]),
                    ("c", _) if number == 5 => service.reply(&id, &[Reply::Rejected(422)]),
                    _ => {}
                }
                consume.publish(&id, Some(key), None).await;
            }
        }
        next += ROUND;
        assert_eq!(blocking(|| process.wait()), None, "round {round}: killed {moment:?}");
    }
    let process = consume.process();
    consume.until_empty().await;
    // Behind the dead letter of its key.
    let behind = (6..next).map(|number| format!(", c-{number:03} blocked"));
    let parked = format!("c-005 rejected{}", behind.collect::<String>());
    assert_eq!(consume.dead_letters().await, parked);
    let shown = blocking(|| ok(&["messages", "list", "--database", &url]));
    assert!(shown.contains("found 422 Unprocessable Entity: no such order"), "{shown}");

    service.reply("c-005", &[]);
    let broker = consume.world.broker.url();
    // A consumer may have been killed while it handled one of those that were parked behind it.
    let redrive = ["messages", "redrive", "--consumer", "invoices", "--force", "--reason", "fixed"];
    let at = ["--database", &url, "--store", &url, "--to", &broker];
    blocking(|| ok(&[&redrive[..], &at].concat()));
    consume.until_empty().await;
    assert_eq!(consume.dead_letters().await, "");
    let mut by_key: BTreeMap<String, Vec<String>> = BTreeMap::new();
    for (key, id) in service.effects() {
        by_key.entry(key).or_default().push(id);
    }
    for key in ["a", "b", "c"] {
        let expected: Vec<_> = (1..next).map(|number| format!("{key}-{number:03}")).collect();
        assert_eq!(by_key[key], expected);
    }
    assert_eq!(service.kills(), 6);
    assert_eq!(service.given().len(), 5, "{:?}", service.given());
    blocking(|| process.end());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_consumer_obeys_retry_after_and_limits_and_ends_after_its_requests() {
    let (socket, address) = Service::bind();
    let consume = Consume::start(address).await;
    let url = consume.world.database.url("postgres");
    let more = ["--store", &url, "--max-body", "1KiB", "--attempts", "3", "--longest-pause", "1s"];
    let consume = consume.with(&more);
    let service = &consume.service;
    service.serve(socket);
    let process = consume.process();

    // No sooner than the service wants, and no later than the limit.
    service.reply("m-1", &[Reply::Status(429, "1"), Reply::Status(503, "3600")]);
    consume.publish("m-1", None, None).await;
    consume.until(|service| service.effects().len() == 1).await;
    let at: Vec<_> = service.received_of("m-1").into_iter().map(|it| it.at).collect();
    assert_eq!(at.len(), 3);
    assert!(at.windows(2).all(|pair| pair[1] - pair[0] >= Duration::from_secs(1)), "{at:?}");

    // Dead letters: after its attempts, and without a request.
    service.reply("m-2", &[Reply::Status(500, "0"); 3]);
    consume.publish("m-2", None, None).await;
    let large =
        OutgoingMessage::new("orders.created", MessageId::new("m-3").unwrap(), vec![0; 1025]);
    consume.sink.publish(&large).await.unwrap();
    let context = &consume.world.context;
    context.publish("orders.created", "no id".into()).await.unwrap().await.unwrap();
    let errors =
        "SELECT string_agg(reason || ' ' || attempts || ' ' || split_part(error, ': ', 1), '; '
        ORDER BY reason) FROM hapax_dead_letters";
    consume.world.until("SELECT count(*) FROM hapax_dead_letters", "3").await;
    assert_eq!(
        consume.world.sql(errors).await,
        "attempts 3 expected a 2xx response of the endpoint, found 500 Internal Server Error; \
         no-id 0 expected an id by the header message-id, the CloudEvents attributes, found none; \
         rejected 1 expected a payload of at most 1024 bytes, found 1025"
    );
    assert!(service.received_of("m-3").is_empty());

    // The request that is in progress ends, and its message is acknowledged.
    service.reply("m-4", &[Reply::Held]);
    consume.publish("m-4", None, None).await;
    consume.until(|service| service.received_of("m-4").len() == 1).await;
    let of_admin = |path: &str| blocking(|| get_with(process.admin, path, ""));
    assert_eq!((of_admin("/healthz").status, of_admin("/none").status), (200, 404));
    for (name, value) in [("handled_total", 1), ("parked_total", 3), ("unacknowledged", 1)] {
        while blocking(|| process.metric(name)) != value {
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    }
    process.signal(Signal::TERM);
    service.answer_held();
    assert_eq!(blocking(|| process.wait()), Some(0));
    consume.until_empty().await;
    let received = service.received_of("m-4");
    assert_eq!((received.len(), service.effects().len()), (1, 2));
    let header = |name: &str| received[0].headers[name].to_str().unwrap();
    assert_eq!(header("webhook-id"), "m-4");
    assert_eq!(header("idempotency-key"), "\"m-4\"");
    assert_eq!(header("message-destination"), "orders.created");
    assert_eq!(header("content-type"), "application/json");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_consumer_that_lacks_tables_privileges_or_a_stream_ends_with_one_line() {
    let (_socket, address) = Service::bind();
    let consume = Consume::start(address).await;
    let world = &consume.world;
    world.database.create_database("empty").await;
    world.sql("CREATE ROLE app LOGIN; GRANT SELECT ON hapax_dead_letters TO app").await;
    let url = world.database.url("postgres");
    let (empty, app) = (world.database.url("empty"), url.replace("postgres@", "app@"));
    for (changed, expected) in [
        (["--database", &empty], "expected the tables of messages, found none"),
        (
            ["--database", &app],
            "found one without INSERT on \"public\".hapax_dead_letters, UPDATE on",
        ),
        (["--stream", "NONE"], "--from: expected the stream NONE and its consumer"),
        (["--from", "nats://127.0.0.1:1"], "--from: expected a NATS server, found an error"),
        (["--store", "postgres://127.0.0.1:1/none"], "--store: postgres://127.0.0.1:1/none"),
    ] {
        let mut words = vec!["consume", "--admin", "off", "--log-level", "off"];
        let flags = consume.flags.chunks(2).map(|pair| [pair[0].as_str(), pair[1].as_str()]);
        let flags = flags.chain([["--store", url.as_str()]]);
        words.extend(flags.filter(|[flag, _]| *flag != changed[0]).flatten());
        words.extend(changed);
        let (code, line) = blocking(|| refused(&words));
        assert!(code == 69 && line.contains(expected), "{changed:?}: {code} {line}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_message_is_not_redriven_while_the_service_may_work_on_it_unless_that_is_forced() {
    let (socket, address) = Service::bind();
    let consume = Consume::start(address).await;
    let url = consume.world.database.url("postgres");
    let consume = consume.with(&["--store", &url, "--attempts", "2", "--timeout", "1s"]);
    let service = &consume.service;
    service.serve(socket);
    let process = consume.process();
    // The service does not respond in time, and works on.
    service.reply("m-1", &[Reply::Silent, Reply::Silent]);
    service.reply("m-2", &[Reply::Rejected(422)]);
    for id in ["m-1", "m-2"] {
        consume.publish(id, None, None).await;
    }
    consume.until_empty().await;
    let dead_letters = consume.dead_letters().await;
    assert!(dead_letters.contains("m-1 attempts"), "{dead_letters}");
    service.reply("m-2", &[]);
    let broker = consume.world.broker.url();
    let at = ["--database", &url, "--store", &url, "--to", &broker, "--reason", "fixed"];
    let redrive = |more: &[&str]| {
        [&["messages", "redrive", "--consumer", "invoices"], &at[..], more].concat().join(" ")
    };
    // A response ended the other one.
    let rejected = redrive(&["--parked-as", "rejected"]);
    blocking(|| ok(&rejected.split(' ').collect::<Vec<_>>()));
    consume.until_empty().await;
    assert_eq!(consume.dead_letters().await, "m-1 attempts");
    let early = redrive(&[]);
    let (code, line) = blocking(|| refused(&early.split(' ').collect::<Vec<_>>()));
    assert!(code == 1 && line.contains("may still execute until 20"), "{code} {line}");
    assert!(line.ends_with("run the command again then, or with --force"), "{line}");
    let forced = redrive(&["--force"]);
    let said = blocking(|| ok(&forced.split(' ').collect::<Vec<_>>()));
    assert!(said.ends_with("1 published, records released: 1\n"), "{said}");
    blocking(|| process.end());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_message_whose_attempts_were_exhausted_has_new_ones_once_it_is_redriven_within_its_lease()
{
    let (socket, address) = Service::bind();
    let mut consume = Consume::start(address).await;
    let lease = consume.flags.iter().position(|flag| flag == "--lease").unwrap();
    consume.flags[lease + 1] = "30m".to_owned();
    let url = consume.world.database.url("postgres");
    let consume = consume.with(&["--store", &url, "--attempts", "2", "--longest-pause", "200ms"]);
    let service = &consume.service;
    service.serve(socket);
    let process = consume.process();
    let failures = [Reply::Status(500, "0"); 3];
    service.reply("m-1", &failures);
    consume.publish("m-1", None, None).await;
    consume.until_empty().await;
    assert_eq!(consume.dead_letters().await, "m-1 attempts");
    assert_eq!(service.received().len(), 2);
    let broker = consume.world.broker.url();
    let at = ["--database", &url, "--store", &url, "--to", &broker, "--reason", "fixed"];
    let redrive = [&["messages", "redrive", "--consumer", "invoices", "--force"], &at[..]].concat();
    blocking(|| ok(&redrive));
    // It fails once more, and is accepted.
    consume.until_empty().await;
    assert_eq!(consume.dead_letters().await, "");
    assert_eq!((service.received().len(), service.effects().len()), (4, 1));
    blocking(|| process.end());
}
