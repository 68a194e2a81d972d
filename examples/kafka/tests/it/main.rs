//! Runs the examples as processes, which are killed in the middle of their work.
#![allow(clippy::unwrap_used, reason = "a failure here is a failed test")]

use std::process::{Child, Command, Stdio};
use std::sync::mpsc;
use std::time::Duration;

use hapax_testkit::servers::PostgresServer;
use rdkafka::mocking::MockCluster;
use tokio::time::sleep;

const EVERY: Duration = Duration::from_millis(10);

const TABLES: &str = "
    CREATE TABLE invoices (
        number bigserial PRIMARY KEY, order_id bigint NOT NULL, customer text NOT NULL);
    CREATE FUNCTION slowly() RETURNS trigger LANGUAGE plpgsql AS
        'BEGIN PERFORM pg_sleep(0.005); RETURN NEW; END';
    CREATE TRIGGER slowly BEFORE INSERT ON invoices FOR EACH ROW EXECUTE FUNCTION slowly()";

/// Writes 300 messages of five customers, each in a transaction of its own.
const ORDERS: &str = "
    SELECT count(hapax_outbox_put_text('orders',
        format('{\"order\": %s, \"customer\": \"c-%s\"}', number, number % 5),
        format('c-%s', number % 5), format('order-%s', number)))
    FROM generate_series(1, 300) AS number";

/// A program, which is killed when it is dropped.
struct Program(Child);

impl Program {
    fn start(program: &str, arguments: [&str; 2]) -> Self {
        let mut command = Command::new(program);
        Self(command.args(arguments).stdout(Stdio::null()).spawn().unwrap())
    }
}

impl Drop for Program {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Starts a mock cluster. It belongs to a thread, and ends with the test.
fn cluster() -> String {
    let (ready, bootstrap) = mpsc::channel();
    std::thread::spawn(move || {
        let cluster = MockCluster::new(1).unwrap();
        cluster.create_topic("orders", 3, 1).unwrap();
        ready.send(cluster.bootstrap_servers()).unwrap();
        loop {
            std::thread::park();
        }
    });
    bootstrap.recv().unwrap()
}

#[tokio::test(flavor = "multi_thread")]
async fn each_order_has_one_invoice_though_relay_and_consumer_are_killed() {
    let (database, brokers) = (PostgresServer::start().await, cluster());
    let sql = async |text: &str| database.sql("postgres", text).await;
    sql(&hapax::postgres_messages::message_migrations(&Default::default())).await;
    sql(TABLES).await;
    sql(ORDERS).await;
    let url = database.url("postgres");
    let relay = || Program::start(env!("CARGO_BIN_EXE_outbox"), [&url, &brokers]);
    let consumer = || Program::start(env!("CARGO_BIN_EXE_orders"), [&brokers, &url]);

    let publishing = relay();
    while sql("SELECT count(*) BETWEEN 1 AND 299 FROM hapax_outbox").await != "t" {
        sleep(EVERY).await;
    }
    drop(publishing);
    let (_publishing, handling) = (relay(), consumer());
    while sql("SELECT count(*) > 50 FROM invoices").await != "t" {
        sleep(EVERY).await;
    }
    drop(handling);
    let _handling = consumer();
    while sql("SELECT count(DISTINCT order_id) FROM invoices").await != "300" {
        sleep(EVERY).await;
    }
    while sql("SELECT count(*) FROM hapax_outbox").await != "0" {
        sleep(EVERY).await;
    }
    assert_eq!(sql("SELECT count(*) FROM invoices").await, "300");
    assert_eq!(sql("SELECT count(*) FROM hapax_dead_letters").await, "0");
    let late = "
        SELECT count(*) FROM (
            SELECT order_id < lag(order_id) OVER (PARTITION BY customer ORDER BY number) AS is_late
            FROM invoices) AS ordered
        WHERE is_late";
    assert_eq!(sql(late).await, "0", "invoices of a customer out of order");
}
