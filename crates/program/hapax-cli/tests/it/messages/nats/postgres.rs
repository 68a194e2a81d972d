mod consume;
mod order;
mod schemas;

use std::collections::BTreeMap;
use std::num::NonZeroUsize;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::time::Duration;

use hapax_core::store::BoxFuture;
use hapax_core::{Idempotency, Timestamp};
use hapax_file::{FileOptions, FileStore};
use hapax_messages::{
    Attempts, BatchConsumer, BatchItem, BatchOptions, Consumer, ConsumerLimits, DeadLetter,
    DeadLetterReason, DeadLetterStore as _, Inbox, Message, MessageExecution, MessageFailure,
    MessageId, MessageSink as _, MessageSource, OutgoingMessage,
};
use hapax_nats::{NatsSink, NatsSource};
use hapax_postgres::{PostgresOptions, PostgresStore};
use hapax_postgres_data::Pooled;
use hapax_postgres_messages::{BatchHandler, Connections, PgDeadLetterStore, PgInbox};
use hapax_testkit::servers::{NatsServer, PostgresServer};
use serde_json::Value;
use tokio::sync::oneshot;
use tokio::task::JoinHandle;
use tokio_postgres::Client;

use crate::messages::{RelayProcess, blocking, migrations, until};
use crate::world::{get_with, ok, refused};

type Connection = Pooled<Arc<Client>>;

/// A database with the tables, and a broker with the stream `ORDERS`.
struct World {
    database: PostgresServer,
    broker: NatsServer,
    context: hapax_nats::JetStream,
}

impl World {
    async fn start() -> Self {
        let (database, broker) = (PostgresServer::start().await, NatsServer::start().await);
        database.sql("postgres", &migrations()).await;
        let effects = "CREATE TABLE effects (at bigserial, message text NOT NULL)";
        database.sql("postgres", effects).await;
        let context = hapax_nats::jetstream(&broker.url()).await.unwrap();
        hapax_nats::create_stream(&context, "ORDERS", &["orders.>"]).await.unwrap();
        Self { database, broker, context }
    }

    async fn sql(&self, text: &str) -> String {
        self.database.sql("postgres", text).await
    }

    fn relay(&self) -> RelayProcess {
        RelayProcess::start(&self.database.url("postgres"), &self.broker.url(), &[])
    }

    async fn source(&self, durable: &str) -> NatsSource {
        let builder = NatsSource::builder(self.context.clone(), "ORDERS", durable);
        builder.ack_wait(Duration::from_secs(2)).start().await.unwrap()
    }

    /// Waits until the answer to `text` is `expected`.
    async fn until(&self, text: &str, expected: &str) {
        until(&self.database, text, expected).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_relay_that_is_killed_again_and_again_publishes_every_message_in_order() {
    let world = World::start().await;
    let put = "SELECT hapax_outbox_put('orders.created', convert_to(n::text, 'UTF8'), 'key-' || n % 5, \
               'm-' || n) FROM generate_series({}, {}) n";
    let put = |from: u32, to: u32| {
        put.replacen("{}", &from.to_string(), 1).replacen("{}", &to.to_string(), 1)
    };
    for round in 0..3 {
        let relay = blocking(|| world.relay());
        world.sql(&put(round * 200 + 1, round * 200 + 200)).await;
        // Killed after some, and before all.
        world.until("SELECT count(*) < 200 FROM hapax_outbox", "t").await;
        relay.kill();
    }
    let relay = blocking(|| world.relay());
    world.until("SELECT count(*) FROM hapax_outbox", "0").await;
    let metrics = blocking(|| get_with(relay.admin, "/metrics", "")).body;
    assert!(metrics.contains("hapax_relay_shards 32"), "{metrics}");
    assert_eq!(blocking(|| get_with(relay.admin, "/readyz", "")).status, 200);
    assert_eq!(blocking(|| relay.end()), Some(0));
    let source = world.source("check").await;
    let mut by_key: BTreeMap<u32, Vec<u32>> = BTreeMap::new();
    while by_key.values().map(Vec::len).sum::<usize>() < 600 {
        for delivery in source.receive(NonZeroUsize::new(100).unwrap()).await.unwrap() {
            let id = delivery.message().header("message-id").unwrap();
            let number: u32 = std::str::from_utf8(id).unwrap()[2..].parse().unwrap();
            let of_key = by_key.entry(number % 5).or_default();
            // A relay that was killed may have published a message twice.
            if !of_key.contains(&number) {
                of_key.push(number);
            }
            delivery.acknowledge().await.unwrap();
        }
    }
    assert!(by_key.values().all(|numbers| numbers.is_sorted()), "{by_key:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn relays_of_two_outboxes_with_their_leases_in_one_store_publish_both() {
    let world = World::start().await;
    for name in ["leases", "second"] {
        world.database.create_database(name).await;
    }
    world.database.sql("second", &migrations()).await;
    let (store, broker) = (world.database.url("leases"), world.broker.url());
    let relay = |name: &str| {
        let from = world.database.url(name);
        blocking(|| RelayProcess::start(&from, &broker, &["--store", &store]))
    };
    let relays = [relay("postgres"), relay("second")];
    for name in ["postgres", "second"] {
        let put = format!("SELECT hapax_outbox_put_text('orders.created', '{name}')");
        world.database.sql(name, &put).await;
        while world.database.sql(name, "SELECT count(*) FROM hapax_outbox").await != "0" {
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    }
    for relay in relays {
        assert_eq!(blocking(|| relay.end()), Some(0));
    }
}

/// Writes an effect, unless it is to reject every message.
struct Effects(Arc<AtomicBool>);

impl BatchHandler<Connection> for Effects {
    fn handle<'a>(
        &'a self,
        connection: &'a mut Connection,
        messages: &'a [BatchItem],
    ) -> BoxFuture<'a, Result<(), MessageFailure>> {
        Box::pin(async move {
            if self.0.load(Ordering::SeqCst) {
                return Err(MessageFailure::reject("no such customer"));
            }
            for item in messages {
                let id = item.id().as_str();
                connection.execute("INSERT INTO effects (message) VALUES ($1)", &[&id]).await?;
            }
            Ok(())
        })
    }
}

/// Returns connections of their own for transactions.
fn connections(url: String) -> Connections<Connection> {
    Connections::new(move || {
        let url = url.clone();
        async move {
            let (client, connection) = tokio_postgres::connect(&url, tokio_postgres::NoTls).await?;
            tokio::spawn(connection);
            Ok::<_, tokio_postgres::Error>(Pooled::new(Arc::new(client), |client| client))
        }
    })
}

#[tokio::test(flavor = "multi_thread")]
async fn dead_letters_are_listed_shown_redriven_and_dropped() {
    let world = World::start().await;
    let url = world.database.url("postgres");
    let rejects = Arc::new(AtomicBool::new(true));
    let inbox = PgInbox::new(
        "invoices",
        connections(url.clone()),
        Duration::from_secs(3600),
        Effects(Arc::clone(&rejects)),
    );
    let source = Arc::new(world.source("invoices").await);
    let options = BatchOptions { attempts: Attempts::default(), ..BatchOptions::default() };
    let consumer = BatchConsumer::new(Arc::new(inbox), source, options).unwrap();
    let (stop, stopped) = oneshot::channel::<()>();
    let consumer = tokio::spawn(consumer.run(async {
        let _ = stopped.await;
    }));
    let relay = blocking(|| world.relay());
    for id in ["m-1", "m-2", "m-3"] {
        world
            .sql(&format!("SELECT hapax_outbox_put('orders.created', 'of {id}', NULL, '{id}')"))
            .await;
    }
    world.until("SELECT count(*) FROM hapax_dead_letters", "3").await;
    let at = ["--database", &*url];
    let run = |words: &[&str]| blocking(|| ok(&[&["messages"], words, &at].concat()));
    let listed: Value = serde_json::from_str(&run(&["list", "--json"])).unwrap();
    let dead_letters = listed["dead_letters"].as_array().unwrap();
    let of = |id: &str| {
        let dead_letter =
            dead_letters.iter().find(|dead_letter| dead_letter["message_id"] == id).unwrap();
        dead_letter["id"].as_str().unwrap().to_owned()
    };
    assert_eq!((dead_letters.len(), &dead_letters[0]["reason"]), (3, &Value::from("rejected")));
    assert!(run(&["list"]).contains("no such customer"));
    assert_eq!(run(&["list", "--parked-as", "mismatch"]), "no dead letters\n");
    let shown = run(&["show", &of("m-1")[..8]]);
    assert!(shown.contains("nats://ORDERS/orders.created") && shown.contains("of m-1"), "{shown}");
    let (code, said) = blocking(|| refused(&["messages", "show", "00000000", at[0], at[1]]));
    assert_eq!(
        (code, &*said),
        (
            1,
            "hapax: expected a dead letter 00000000, found none: list those that exist with `hapax messages list`"
        )
    );

    // Still rejected: it is parked again, once.
    let broker = world.broker.url();
    let redrive = ["redrive", "--to", &broker, "--reason", "a test"];
    world.sql("UPDATE hapax_dead_letters SET last_at = 'epoch' WHERE message_id = 'm-1'").await;
    run(&[&redrive[..], &[&of("m-1")]].concat());
    world.until("SELECT count(*) FROM hapax_dead_letters WHERE last_at > 'epoch'", "3").await;
    assert_eq!(world.sql("SELECT count(*) FROM hapax_dead_letters").await, "3");
    rejects.store(false, Ordering::SeqCst);
    run(&[&redrive[..], &["--consumer", "invoices"]].concat());
    world.until("SELECT count(*) FROM hapax_dead_letters", "0").await;
    let effects = "SELECT string_agg(message, ' ' ORDER BY message) FROM effects";
    assert_eq!(world.sql(effects).await, "m-1 m-2 m-3");

    // An outbox dead letter returns to the outbox, and a dropped one is gone.
    relay.kill();
    let park = "SELECT hapax_outbox_put('orders.created', 'x', NULL, 'm-4');
                SELECT hapax_outbox_park(sha256('dead_letter'), shard, id, 'too large', 1) FROM hapax_outbox";
    world.sql(park).await;
    let dead_letter = world.sql("SELECT encode(id, 'hex') FROM hapax_dead_letters").await;
    let said = run(&["redrive", &dead_letter, "--reason", "fixed"]);
    assert!(said.contains("moved back to the outbox"), "{said}");
    assert_eq!(world.sql("SELECT message_id FROM hapax_outbox").await, "m-4");
    let park = "SELECT hapax_outbox_park(sha256('dead_letter'), shard, id, 'too large', 1) FROM hapax_outbox";
    world.sql(park).await;
    run(&["drop", &dead_letter, "--reason", "a test"]);
    assert_eq!(run(&["list"]), "no dead letters\n");
    let decisions = "SELECT string_agg(DISTINCT decision, ' ' ORDER BY decision) FROM hapax_dead_letter_decisions";
    assert_eq!(world.sql(decisions).await, "drop redrive");
    let _ = stop.send(());
    assert!(consumer.await.unwrap());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_redrive_handles_no_message_again_that_was_handled() {
    let world = World::start().await;
    let url = world.database.url("postgres");
    let options = url.parse::<PostgresOptions>().unwrap();
    let store = Arc::new(PostgresStore::connect(options).await.unwrap());
    let engine = Idempotency::builder(store).namespace("").build().unwrap();
    let dead_letters = Arc::new(PgDeadLetterStore::new(&connections(url.clone())));
    let place = Arc::clone(&dead_letters);
    let inbox = Inbox::builder("invoices", engine.clone()).reexecute().dead_letters(place).build();
    let source = Arc::new(world.source("invoices").await);
    let handled = Arc::new(AtomicU32::new(0));
    let handler = {
        let handled = Arc::clone(&handled);
        move |_: MessageExecution| {
            handled.fetch_add(1, Ordering::SeqCst);
            std::future::ready(Ok::<_, MessageFailure>(()))
        }
    };
    let consumer =
        Consumer::new(inbox.unwrap(), source, handler, ConsumerLimits::default()).unwrap();
    let monitor = consumer.monitor();
    let (stop, stopped) = oneshot::channel::<()>();
    let consumer = tokio::spawn(consumer.run(async {
        let _ = stopped.await;
    }));
    let sink = NatsSink::new(world.context.clone());
    let publish = async |payload: &'static str| {
        let mut sent =
            OutgoingMessage::new("orders.created", MessageId::new("m-1").unwrap(), payload);
        sent.broker_id = Some(payload.to_owned());
        sink.publish(&sent).await.unwrap();
    };
    publish("one").await;
    let one = async {
        while monitor.stats().handled == 0 {
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    };
    tokio::time::timeout(Duration::from_secs(60), one).await.unwrap();
    // The same id, another payload.
    publish("two").await;
    world.until("SELECT count(*) FROM hapax_dead_letters", "1").await;
    let dead_letter = world.sql("SELECT encode(id, 'hex') FROM hapax_dead_letters").await;
    let broker = world.broker.url();
    let more = ["--reason", "a test", "--to", &broker, "--store", &url, "--database", &url];
    let (code, said) =
        blocking(|| refused(&[&["messages", "redrive", &*dead_letter][..], &more].concat()));
    assert!(code == 1 && said.contains("publish it under another id"), "{said}");
    world.sql("DELETE FROM hapax_dead_letters").await;
    // As if the consumer had ended after its record, and before it removed the dead letter.
    let id = MessageId::new("m-1").unwrap();
    let message = Message::new("nats://ORDERS/orders.created", "one");
    let (reason, at) = (DeadLetterReason::Rejected, Timestamp::from_micros(1));
    let dead_letter = DeadLetter::new("invoices", Some(&id), message, reason, "no", at);
    dead_letters.park(&dead_letter).await.unwrap();
    blocking(|| ok(&[&["messages", "redrive", &*dead_letter.id_hex()][..], &more].concat()));
    world.until("SELECT count(*) FROM hapax_dead_letters", "0").await;
    assert_eq!((handled.load(Ordering::SeqCst), monitor.stats().handled), (1, 1));
    let _ = stop.send(());
    assert!(consumer.await.unwrap());
    engine.drain().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_redrive_says_what_it_did_not_do_for_a_consumer_with_a_file() {
    let world = World::start().await;
    let url = world.database.url("postgres");
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("inbox.db");
    let rejects = Arc::new(AtomicBool::new(true));
    let (stop, consumer) = consumer_with_a_file(&world, &path, &rejects).await;
    let put = "SELECT hapax_outbox_put_text('orders.created', 'one', NULL, 'm-1')";
    world.sql(put).await;
    let relay = blocking(|| world.relay());
    world.until("SELECT count(*) FROM hapax_dead_letters", "1").await;
    relay.kill();
    rejects.store(false, Ordering::SeqCst);

    let broker = world.broker.url();
    let redrive = ["messages", "redrive", "--consumer", "invoices", "--reason", "a test"];
    let redrive = [&redrive[..], &["--to", &broker, "--database", &url]].concat();
    let (code, said) = blocking(|| refused(&redrive));
    let expected = "--store: expected the store of the consumer invoices, since its inbox is not in --database";
    assert!(code == 64 && said.contains(expected), "{code} {said}");
    assert_eq!(world.sql("SELECT sum(redrives) FROM hapax_dead_letters").await, "0");
    let said = blocking(|| ok(&[&redrive[..], &["--force"]].concat()));
    assert!(said.contains("1 published, records released: none"), "{said}");
    assert!(said.contains("run the command again with the --store"), "{said}");
    let store = format!("file:{}", path.display());
    let with_store = [&redrive[..], &["--store", &store]].concat();
    let (code, said) = blocking(|| refused(&with_store));
    assert!(code == 69 && said.contains("stop the consumer, run the command again"), "{said}");
    stop.send(()).unwrap();
    assert_eq!(consumer.await.unwrap(), (0, 1), "handled, parked");
    assert_eq!(world.sql("SELECT count(*) FROM hapax_dead_letters").await, "1");

    let said = blocking(|| ok(&with_store));
    assert!(said.contains("1 published, records released: 1"), "{said}");
    let (stop, consumer) = consumer_with_a_file(&world, &path, &rejects).await;
    world.until("SELECT count(*) FROM hapax_dead_letters", "0").await;
    stop.send(()).unwrap();
    assert_eq!(consumer.await.unwrap(), (1, 0), "handled, parked");
}

/// Runs a consumer in claim mode, whose records are in a file. Its task returns the numbers of
/// messages that it handled and parked.
async fn consumer_with_a_file(
    world: &World,
    path: &Path,
    rejects: &Arc<AtomicBool>,
) -> (oneshot::Sender<()>, JoinHandle<(u64, u64)>) {
    let store = Arc::new(FileStore::open(FileOptions::new(path)).unwrap());
    let engine = Idempotency::builder(Arc::clone(&store)).namespace("").build().unwrap();
    let dead_letters =
        Arc::new(PgDeadLetterStore::new(&connections(world.database.url("postgres"))));
    let inbox = Inbox::builder("invoices", engine.clone()).reexecute().dead_letters(dead_letters);
    let rejects = Arc::clone(rejects);
    let handler = move |_: MessageExecution| {
        std::future::ready(match rejects.load(Ordering::SeqCst) {
            true => Err(MessageFailure::reject("no such customer")),
            false => Ok(()),
        })
    };
    let source = Arc::new(world.source("invoices").await);
    let limits = ConsumerLimits::default();
    let consumer = Consumer::new(inbox.build().unwrap(), source, handler, limits).unwrap();
    let monitor = consumer.monitor();
    let (stop, stopped) = oneshot::channel::<()>();
    let consumer = tokio::spawn(async move {
        let stopped = async {
            let _ = stopped.await;
        };
        assert!(consumer.run(stopped).await);
        engine.drain().await;
        store.close().await;
        let stats = monitor.stats();
        (stats.handled, stats.parked)
    });
    (stop, consumer)
}

#[tokio::test(flavor = "multi_thread")]
async fn a_relay_names_the_privileges_that_its_role_lacks_and_the_script_grants_them() {
    let world = World::start().await;
    world.sql("CREATE ROLE \"re-lay\" LOGIN; REVOKE CREATE ON SCHEMA public FROM public").await;
    let url = world.database.url("postgres").replace("postgres@", "re-lay@");
    let broker = world.broker.url();
    let relay = ["relay", "--from", &url, "--to", &broker, "--admin", "off", "--log-level", "off"];
    let (code, line) = blocking(|| refused(&relay));
    assert_eq!(code, 69);
    let missing = "DELETE on \"public\".hapax_outbox, SELECT on \"public\".hapax_outbox_ids";
    assert!(line.contains(missing), "{line}");
    assert!(line.contains("`hapax sql --relay-role NAME`"), "{line}");
    let of_relay = "GRANT SELECT, DELETE ON hapax_outbox TO \"re-lay\";
        GRANT SELECT ON hapax_outbox_ids, hapax_outbox_epoch TO \"re-lay\";
        GRANT SELECT, INSERT ON hapax_dead_letters TO \"re-lay\"";
    world.sql(of_relay).await;
    // What remains is the store of its leases.
    let (code, line) = blocking(|| refused(&relay));
    assert!(
        code == 69 && line.contains("--relay-role NAME` there, or name another --store"),
        "{line}"
    );
    let script = blocking(|| ok(&["sql", "--relay-role", "re-lay"]));
    for _ in 0..2 {
        world.sql(script.strip_prefix("\\set ON_ERROR_STOP on\n").unwrap()).await;
    }
    let relay = blocking(|| RelayProcess::start(&url, &broker, &[]));
    let json = r#"{"path": "C:\\temp", "name": "say \"hi\""}"#;
    let put = format!("SELECT hapax_outbox_put_text('orders.created', '{json}', 'key')");
    world.sql(&put).await;
    world.until("SELECT count(*) FROM hapax_outbox", "0").await;
    let source = world.source("check").await;
    let received = source.receive(NonZeroUsize::MIN).await.unwrap();
    assert_eq!(received[0].message().payload, json);
    assert_eq!(blocking(|| relay.end()), Some(0));
}

#[tokio::test(flavor = "multi_thread")]
async fn each_role_has_the_privileges_of_its_program_and_no_others() {
    let world = World::start().await;
    world.sql("CREATE ROLE shop; CREATE ROLE ann; CREATE ROLE publisher").await;
    let roles = ["--service-role", "shop", "--operator-role", "ann", "--relay-role", "publisher"];
    let script = blocking(|| ok(&[&["sql"][..], &roles].concat()));
    world.sql(script.strip_prefix("\\set ON_ERROR_STOP on\n").unwrap()).await;
    let run = async |role: &str, text: &str| {
        world.database.try_sql("postgres", &format!("SET ROLE {role}; {text}")).await
    };
    let put = |reason: &str| {
        format!(
            "SELECT hapax_dead_letter_put(sha256('{reason}'), 'orders', '{reason}', 'nats://ORDERS/a', \
             '{reason}', 1, 'no', 'k', '{{}}', '{{}}', 'x', now(), now())"
        )
    };
    for text in [
        "SELECT state FROM hapax_inbox('orders', ARRAY['a', 'rejected'])",
        "SELECT hapax_inbox_attempt('orders', 'b'); SELECT hapax_inbox_failed('orders', 'b', 'no')",
        "SELECT hapax_inbox_park('orders', 'rejected')",
        &put("rejected"),
        &put("rejected"),
        &put("dropped"),
        "SELECT hapax_dead_letter_remove(sha256('dropped')); SELECT hapax_inbox_release('orders', 'b')",
        "SELECT hapax_inbox_purge()",
        "SELECT hapax_outbox_put_text('orders', 'x', 'k')",
        "SELECT hapax_sequence('orders', 'cart', 1, 'm', NULL, 'x', 10, '1 h', 'accept');
         SELECT hapax_sequence_next('orders', 'cart', '1 h', 'accept'); SELECT * FROM hapax_sequence_gaps",
    ] {
        run("shop", text).await.unwrap();
    }
    run("publisher", "SELECT hapax_outbox_park(sha256('o'), shard, id, 'no', 1) FROM hapax_outbox")
        .await
        .unwrap();
    for text in [
        "SELECT hapax_dead_letter_redrive(sha256('rejected'), 'ann', 'fixed')",
        "SELECT hapax_dead_letter_drop(sha256('dropped'), 'ann', 'a test')",
        "SELECT hapax_outbox_redrive(sha256('o'))",
    ] {
        run("ann", text).await.unwrap();
    }
    assert_eq!(world.sql("SELECT count(*) FROM hapax_dead_letter_decisions").await, "2");
    for (role, text) in [
        ("shop", "DELETE FROM hapax_dead_letter_decisions"),
        ("shop", "SELECT payload FROM hapax_outbox"),
        ("shop", "DELETE FROM hapax_outbox"),
        ("shop", "SELECT * FROM hapax_cells"),
        ("shop", "SELECT * FROM hapax_secrets"),
        ("shop", "UPDATE hapax_outbox_epoch SET epoch = 1"),
        ("publisher", "DELETE FROM hapax_inbox"),
        ("publisher", "DELETE FROM hapax_dead_letters"),
        ("ann", "DELETE FROM hapax_dead_letter_decisions"),
        ("ann", "UPDATE hapax_dead_letter_decisions SET at = now()"),
        ("ann", "SELECT * FROM hapax_cells"),
    ] {
        let failed = run(role, text).await.unwrap_err();
        assert!(failed.contains("permission denied"), "{role}: {text}: {failed}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_relay_without_tables_or_broker_ends_with_one_line() {
    let world = World::start().await;
    world.database.create_database("empty").await;
    let (empty, full) = (world.database.url("empty"), world.database.url("postgres"));
    let broker = world.broker.url();
    let said = |from: &str, to: &str| {
        blocking(|| {
            refused(&["relay", "--from", from, "--to", to, "--admin", "off", "--log-level", "off"])
        })
    };
    let (code, line) = said(&empty, &broker);
    assert_eq!(code, 69);
    assert!(line.contains("hapax sql"), "{line}");
    let (code, line) = said(&full, "nats://127.0.0.1:1");
    assert!(code == 69 && line.contains("--to"), "{line}");
    let (code, line) = said(&full, "mqtt://127.0.0.1");
    assert!(code == 64 && line.contains("--to: expected nats://HOST"), "{line}");
}
