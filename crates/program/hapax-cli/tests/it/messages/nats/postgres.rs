use std::collections::BTreeMap;
use std::num::NonZeroUsize;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::time::Duration;

use hapax_core::store::BoxFuture;
use hapax_core::{Idempotency, Timestamp};
use hapax_messages::{
    Attempts, BatchConsumer, BatchItem, BatchOptions, Consumer, ConsumerLimits, DeadLetter,
    DeadLetterReason, DeadLetters as _, HandledMessage, Inbox, Message, MessageFailure, MessageId,
    MessageSink as _, MessageSource, OutgoingMessage,
};
use hapax_nats::{NatsSink, NatsSource};
use hapax_postgres::{PostgresOptions, PostgresStore};
use hapax_postgres_data::Pooled;
use hapax_postgres_messages::{BatchHandler, Connections, PgDeadLetters, PgInbox};
use hapax_testkit::servers::{NatsServer, PostgresServer};
use serde_json::Value;
use tokio::sync::oneshot;
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
    let letters = listed["letters"].as_array().unwrap();
    let of = |id: &str| {
        let letter = letters.iter().find(|letter| letter["message_id"] == id).unwrap();
        letter["id"].as_str().unwrap().to_owned()
    };
    assert_eq!((letters.len(), &letters[0]["reason"]), (3, &Value::from("rejected")));
    assert!(run(&["list"]).contains("no such customer"));
    assert_eq!(run(&["list", "--parked-as", "conflict"]), "no dead letters\n");
    let shown = run(&["show", &of("m-1")[..8]]);
    assert!(shown.contains("nats://ORDERS/orders.created") && shown.contains("of m-1"), "{shown}");
    let (code, said) = blocking(|| refused(&["messages", "show", "00000000", at[0], at[1]]));
    assert_eq!((code, &*said), (1, "hapax: there is no dead letter 00000000"));

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

    // An outbox letter returns to the outbox, and a dropped one is gone.
    relay.kill();
    let park = "SELECT hapax_outbox_put('orders.created', 'x', NULL, 'm-4');
                SELECT hapax_outbox_park(sha256('letter'), shard, id, 'too large', 1) FROM hapax_outbox";
    world.sql(park).await;
    let letter = world.sql("SELECT encode(id, 'hex') FROM hapax_dead_letters").await;
    let said = run(&["redrive", &letter, "--reason", "fixed"]);
    assert!(said.contains("returned to the outbox"), "{said}");
    assert_eq!(world.sql("SELECT message_id FROM hapax_outbox").await, "m-4");
    let park =
        "SELECT hapax_outbox_park(sha256('letter'), shard, id, 'too large', 1) FROM hapax_outbox";
    world.sql(park).await;
    run(&["drop", &letter, "--reason", "a test"]);
    assert_eq!(run(&["list"]), "no dead letters\n");
    let decisions =
        "SELECT string_agg(DISTINCT action, ' ' ORDER BY action) FROM hapax_dead_letter_decisions";
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
    let engine = Idempotency::builder(store).build().unwrap();
    let letters = Arc::new(PgDeadLetters::new(&connections(url.clone())));
    let place = Arc::clone(&letters);
    let inbox = Inbox::builder("invoices", engine.clone()).reexecute().dead_letters(place).build();
    let source = Arc::new(world.source("invoices").await);
    let handled = Arc::new(AtomicU32::new(0));
    let handler = {
        let handled = Arc::clone(&handled);
        move |_: HandledMessage| {
            handled.fetch_add(1, Ordering::SeqCst);
            std::future::ready(Ok::<_, MessageFailure>(()))
        }
    };
    let consumer = Consumer::new(inbox.unwrap(), source, handler, ConsumerLimits::default());
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
    let letter = world.sql("SELECT encode(id, 'hex') FROM hapax_dead_letters").await;
    let broker = world.broker.url();
    let more = ["--reason", "a test", "--to", &broker, "--store", &url, "--database", &url];
    let (code, said) =
        blocking(|| refused(&[&["messages", "redrive", &*letter][..], &more].concat()));
    assert!(code == 1 && said.contains("publish it under another id"), "{said}");
    world.sql("DELETE FROM hapax_dead_letters").await;
    // As if the consumer had ended after its record, and before it removed the letter.
    let id = MessageId::new("m-1").unwrap();
    let message = Message::new("nats://ORDERS/orders.created", "one");
    let (reason, at) = (DeadLetterReason::Rejected, Timestamp::from_micros(1));
    let letter = DeadLetter::new("invoices", Some(&id), message, reason, "no", at);
    letters.park(&letter).await.unwrap();
    blocking(|| ok(&[&["messages", "redrive", &*letter.id_hex()][..], &more].concat()));
    world.until("SELECT count(*) FROM hapax_dead_letters", "0").await;
    assert_eq!((handled.load(Ordering::SeqCst), monitor.stats().handled), (1, 1));
    let _ = stop.send(());
    assert!(consumer.await.unwrap());
    engine.drain().await;
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
    assert!(line.contains("hapax messages migrations"), "{line}");
    let (code, line) = said(&full, "nats://127.0.0.1:1");
    assert!(code == 69 && line.contains("--to"), "{line}");
    let (code, line) = said(&full, "kafka://127.0.0.1");
    assert!(code == 64 && line.contains("--to: expected nats://HOST"), "{line}");
}
