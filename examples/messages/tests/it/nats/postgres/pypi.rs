use std::path::Path;
use std::process::Command;
use std::sync::Arc;

use hapax::messages::{MessageId, MessageSink as _, OutgoingMessage, Relay, RelayLimits};
use hapax::postgres_messages::{Connections, PgOutbox};
use hapax::{Idempotency, MemoryStore};
use hapax_nats::NatsSink;

use super::{Process, World};

fn python() -> Command {
    // The target folder has what `cargo xtask setup` installed.
    let tests = Path::new(env!("CARGO_BIN_EXE_invoices"));
    let target = tests.ancestors().find(|folder| folder.join("pypi").is_dir());
    let target = target.expect("`cargo xtask setup` has installed clients from PyPI");
    let mut python = Command::new(target.join("pypi/bin/python"));
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("python/orders.py");
    python.arg("-I").arg(script);
    python
}

#[tokio::test(flavor = "multi_thread")]
async fn a_python_consumer_that_is_killed_writes_one_invoice_for_each_order() {
    let world = World::start().await;
    let database = world.database.url("postgres");
    let placed = (0..20).map(|number| {
        let customer = format!("c-{}", number % 3);
        python().args(["place", &database, &customer, "book"]).status().unwrap()
    });
    assert!(tokio::task::block_in_place(|| placed.into_iter().all(|status| status.success())));

    let orders = sqlx::PgPool::connect(&database).await.unwrap();
    let pool = orders.clone();
    let outbox = PgOutbox::new(&Connections::new(move || {
        let pool = pool.clone();
        async move { pool.acquire().await }
    }));
    let engine = Idempotency::builder(Arc::new(MemoryStore::default())).build().unwrap();
    let sink = Arc::new(NatsSink::new(world.context.clone()));
    let relay = Relay::new("python", Arc::new(outbox), sink, engine, RelayLimits::default());
    let relaying = tokio::spawn(relay.unwrap().run(std::future::pending()));

    let consume = || Process::start(python().args(["consume", &database, &world.broker.url()]));
    let consumer = consume();
    world.until("SELECT count(*) > 0 FROM invoices", "t").await;
    consumer.kill();
    // The same messages again, as after the end of the broker's window, and an id with other
    // content.
    world.until("SELECT count(*) FROM hapax_outbox", "0").await;
    let sink = NatsSink::new(world.context.clone());
    let orders: Vec<(i64, String)> =
        sqlx::query_as("SELECT id, customer FROM orders").fetch_all(&orders).await.unwrap();
    let repeated = orders.iter().map(|(order, customer)| {
        (*order, format!(r#"{{"order": {order}, "customer": "{customer}"}}"#))
    });
    for (number, (order, payload)) in repeated.chain([(1, "other".to_owned())]).enumerate() {
        let id = MessageId::new(format!("order-{order}")).unwrap();
        let mut message = OutgoingMessage::new("orders.created", id, payload);
        message.broker_id = Some(format!("again-{number}"));
        sink.publish(&message).await.unwrap();
    }
    // Without headers, and one that is rejected before another comes under its id.
    world.context.publish("orders.created", "no headers".into()).await.unwrap().await.unwrap();
    for (number, payload) in ["rejected", "another"].into_iter().enumerate() {
        let id = MessageId::new("order-x").unwrap();
        let mut message = OutgoingMessage::new("orders.created", id, payload);
        message.broker_id = Some(format!("x-{number}"));
        sink.publish(&message).await.unwrap();
    }
    let consumer = consume();
    world.until("SELECT count(*) FROM invoices", "20").await;
    let dead_letters = "SELECT string_agg(reason || ' ' || convert_from(payload, 'UTF8'), ', '
        ORDER BY reason, payload) FROM hapax_dead_letters WHERE origin = 'nats://ORDERS/orders.created'";
    let four = "mismatch another, mismatch other, no-id no headers, rejected rejected";
    world.until(dead_letters, four).await;
    // A redriven message leaves no dead letter.
    let begun =
        "SELECT encode(id, 'hex') FROM (SELECT id, hapax_dead_letter_redrive(id, 'ann', 'fixed')
        FROM hapax_dead_letters WHERE reason = 'rejected') d";
    let dead_letter = world.database.sql("postgres", begun).await;
    let id = MessageId::new("order-x").unwrap();
    let mut copy = OutgoingMessage::new("orders.created", id, r#"{"order": 21, "customer": "c"}"#);
    copy.headers.push(("hapax-redrive".to_owned(), dead_letter.into()));
    copy.broker_id = Some("redrive".to_owned());
    sink.publish(&copy).await.unwrap();
    world.until("SELECT count(*) FROM hapax_dead_letters", "3").await;
    consumer.end();
    relaying.abort();
    let counts = "SELECT count(*), count(DISTINCT order_id) FROM invoices";
    assert_eq!(world.database.sql("postgres", counts).await, "21|21");
}
