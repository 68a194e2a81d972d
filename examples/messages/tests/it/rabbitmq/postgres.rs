//! The worker of a RabbitMQ queue.

use std::process::{Child, Command, Stdio};
use std::time::Duration;

use hapax::messages::{MessageId, MessageSink as _, OutgoingMessage};
use hapax_rabbitmq::RabbitSink;
use hapax_testkit::servers::{PostgresServer, RabbitMqServer};
use rustix::process::{Pid, Signal, kill_process};
use tokio::time::sleep;

const EVERY: Duration = Duration::from_millis(10);

/// A worker, which is killed when it is dropped.
struct Worker(Child);

impl Worker {
    fn start(broker: &str, database: &str) -> Self {
        let mut command = Command::new(env!("CARGO_BIN_EXE_stock_worker"));
        command.args([broker, "stock", database]).stdout(Stdio::null());
        Self(command.spawn().unwrap())
    }
}

impl Drop for Worker {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_stock_worker_that_was_killed_reserves_for_each_order_once() {
    let (database, server) = (PostgresServer::start().await, RabbitMqServer::start().await);
    let sql = async |text: &str| database.sql("postgres", text).await;
    sql(&hapax::postgres_messages::message_migrations(&Default::default())).await;
    sql("CREATE TABLE stock (item text PRIMARY KEY, pieces int NOT NULL);
         INSERT INTO stock VALUES ('book', 1000);
         CREATE FUNCTION slowly() RETURNS trigger LANGUAGE plpgsql AS
             'BEGIN PERFORM pg_sleep(0.05); RETURN NEW; END';
         CREATE TRIGGER slowly BEFORE UPDATE ON stock FOR EACH ROW EXECUTE FUNCTION slowly()")
    .await;
    server.declare_queue("stock").await;
    let sink = RabbitSink::builder(&server.url()).unwrap().connect().await.unwrap();
    for number in 0..60 {
        // Each is published twice.
        let id = MessageId::new(format!("m-{}", number % 30)).unwrap();
        let order = r#"{"item": "book", "pieces": 10}"#;
        sink.publish(&OutgoingMessage::new("stock", id, order)).await.unwrap();
    }
    let url = database.url("postgres");
    let worker = Worker::start(&server.url(), &url);
    while sql("SELECT pieces < 900 FROM stock").await != "t" {
        sleep(EVERY).await;
    }
    drop(worker);
    let worker = Worker::start(&server.url(), &url);
    while server.messages("stock").await > 0 {
        sleep(EVERY).await;
    }
    assert_eq!(sql("SELECT pieces FROM stock").await, "700");
    assert_eq!(sql("SELECT count(*) FROM hapax_dead_letters").await, "0");
    kill_process(Pid::from_child(&worker.0), Signal::TERM).unwrap();
}
