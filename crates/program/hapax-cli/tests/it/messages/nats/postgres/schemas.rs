//! The schema of the tables, and destinations that are reserved.

use std::process::Output;

use super::*;
use crate::world::hapax;

/// Returns the script of `hapax sql` with flags, without the command of psql at its beginning.
fn sql(flags: &[&str]) -> String {
    let script = blocking(|| ok(&[&["sql"][..], flags].concat()));
    script.strip_prefix("\\set ON_ERROR_STOP on\n").unwrap().to_owned()
}

#[tokio::test(flavor = "multi_thread")]
async fn a_relay_and_a_consumer_use_the_only_set_of_tables_and_ask_which_of_two() {
    let world = World::start().await;
    world.database.create_database("shop").await;
    let run = async |text: &str| world.database.sql("shop", text).await;
    run("CREATE ROLE publisher LOGIN").await;
    let script =
        sql(&["--schema", "Orders", "--relay-role", "publisher", "--service-role", "publisher"]);
    assert!(script.contains("SET LOCAL search_path = \"Orders\", pg_temp;"));
    for _ in 0..2 {
        run(&script).await;
    }
    let url = world.database.url("shop").replace("postgres@", "publisher@");
    let broker = world.broker.url();
    let relay = ["relay", "--from", &url, "--to", &broker, "--admin", "off", "--log-level", "off"];
    // The search path of the role does not matter for the messages, and leads to no second store.
    let (code, line) = blocking(|| refused(&relay));
    assert_eq!(code, 69, "{line}");
    assert!(line.contains("found them in the schema \"Orders\": run ALTER ROLE"), "{line}");
    run("ALTER ROLE publisher SET search_path = \"Orders\"").await;
    let running = blocking(|| RelayProcess::start(&url, &broker, &[]));
    run("SELECT \"Orders\".hapax_outbox_put_text('orders.created', 'x')").await;
    until_in(&world, "SELECT count(*) FROM \"Orders\".hapax_outbox", "0").await;
    assert_eq!(blocking(|| running.end()), Some(0));

    // A second set, as earlier scripts made it.
    let copy = "CREATE SCHEMA publisher; CREATE TABLE publisher.hapax_messages_migrations \
                (version integer PRIMARY KEY, applied timestamptz NOT NULL DEFAULT now())";
    run(copy).await;
    run(&sql(&["--schema", "publisher", "--part", "messages", "--relay-role", "publisher"])).await;
    let consume = [
        "consume",
        "--from",
        &broker,
        "--stream",
        "ORDERS",
        "--consumer",
        "c",
        "--store",
        &url,
        "--to",
        "http://127.0.0.1:1/x",
        "--admin",
        "off",
        "--log-level",
        "off",
    ];
    let list = ["messages", "list", "--database", &url];
    for command in [&relay[..], &consume, &list] {
        let (code, line) = blocking(|| refused(command));
        assert_eq!(code, 64, "{line}");
        assert!(line.contains("in one schema, found them in Orders and publisher"), "{line}");
        assert!(line.contains("--schema"), "{line}");
        let other = [command, &["--schema", "other"]].concat();
        let (code, line) = blocking(|| refused(&other));
        assert!(
            code == 64 && line.contains("--schema: expected a schema with the tables"),
            "{line}"
        );
    }
    let running = blocking(|| RelayProcess::start(&url, &broker, &["--schema", "Orders"]));
    run("SELECT \"Orders\".hapax_outbox_put_text('orders.created', 'y')").await;
    until_in(&world, "SELECT count(*) FROM \"Orders\".hapax_outbox", "0").await;
    assert_eq!(blocking(|| running.end()), Some(0));
}

async fn until_in(world: &World, text: &str, expected: &str) {
    while world.database.sql("shop", text).await != expected {
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn the_earlier_name_prints_the_same_sql_and_the_new_name() {
    let Output { status, stdout, stderr } =
        blocking(|| hapax(&["messages", "migrations", "--service-role", "app"]).output().unwrap());
    assert!(status.success());
    let line = String::from_utf8(stderr).unwrap();
    assert!(line.contains("`hapax messages migrations` is now `hapax sql`"), "{line}");
    let script = blocking(|| ok(&["sql", "--part", "messages", "--service-role", "app"]));
    assert_eq!(String::from_utf8(stdout).unwrap(), script);
    let (code, line) = blocking(|| refused(&["sql", "--schema", "pg_catalog"]));
    assert!(code == 64 && line.contains("expected the name of a schema"), "{line}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_destination_that_commands_the_broker_becomes_a_dead_letter_also_when_it_is_redriven() {
    let world = World::start().await;
    let relay = blocking(|| world.relay());
    let put = |to: &str| format!("SELECT hapax_outbox_put_text('{to}', '')");
    world.sql(&put("orders.created")).await;
    for api in ["PURGE", "DELETE"] {
        world.sql(&put(&format!("$JS.API.STREAM.{api}.ORDERS"))).await;
    }
    world.sql(&put(&format!("orders.{}", "x".repeat(1017)))).await;
    world.until("SELECT count(*) FROM hapax_outbox", "0").await;
    let parked = "SELECT count(*), min(reason) FROM hapax_dead_letters";
    assert_eq!(world.sql(parked).await, "2|unpublishable");
    let messages = async || {
        let mut stream = world.context.get_stream("ORDERS").await.unwrap();
        stream.info().await.unwrap().state.messages
    };
    assert_eq!(messages().await, 2);
    assert_eq!(blocking(|| relay.end()), Some(0));
    // A service may also forge a dead letter of a consumer.
    let forged = "SELECT hapax_dead_letter_put(sha256('x'), 'c', 'm-1', \
                  'nats://ORDERS/$JS.API.STREAM.PURGE.ORDERS', 'rejected', 1, 'no', NULL, '{}', '{}', '', \
                  now(), now())";
    world.sql(forged).await;
    let url = world.database.url("postgres");
    let broker = world.broker.url();
    let redrive = [
        "messages",
        "redrive",
        "--database",
        &url,
        "--consumer",
        "c",
        "--to",
        &broker,
        "--force",
        "--reason",
        "x",
    ];
    let (_, line) = blocking(|| refused(&redrive));
    assert!(line.contains("which NATS reserves for itself"), "{line}");
    assert_eq!(messages().await, 2);
}

#[tokio::test(flavor = "multi_thread")]
async fn an_exchange_of_rabbitmq_itself_is_refused_at_start() {
    let relay = [
        "relay",
        "--from",
        "postgres://127.0.0.1:1/x",
        "--to",
        "amqp://127.0.0.1:1",
        "--exchange",
        "amq.rabbitmq.trace",
        "--log-level",
        "off",
    ];
    let (code, line) = blocking(|| refused(&relay));
    assert!(
        code == 64 && line.contains("--exchange: expected an exchange of the application"),
        "{line}"
    );
}
