//! Removal of the ids of batch mode.

use std::io;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use hapax_messages::BatchInbox as _;
use hapax_postgres_messages::PgInbox;
use hapax_testkit::messages::MemoryBroker;

use super::batch::*;
use super::connections;

#[tokio::test]
async fn ids_whose_retention_has_ended_are_removed_while_the_consumer_runs() {
    let (server, broker) = (with_effects().await, MemoryBroker::default());
    let ids = "(SELECT array_agg(n::text) FROM generate_series(1, 250) n)";
    let insert = format!("SELECT count(*) FROM hapax_inbox('orders', {ids})");
    let count = async || server.sql("postgres", "SELECT count(*) FROM hapax_inbox").await;
    server.sql("postgres", &insert).await;
    let expire = "UPDATE hapax_inbox SET expires_at = clock_timestamp() - interval '1 s'";
    server.sql("postgres", expire).await;
    let retention = Duration::from_secs(3600);
    let inbox = || PgInbox::new("orders", connections(&server), retention, write);
    // Operators may purge the table themselves.
    assert_eq!(inbox().purge_expired(false).purge(10).await.unwrap(), 0);
    assert_eq!(count().await, "250");
    assert_eq!(inbox().purge(10).await.unwrap(), 10);
    let running = run_inbox(&broker, inbox());
    until("the ids are removed", async || count().await == "0").await;
    running.stop().await;
}

/// The log of this process.
#[derive(Clone, Default)]
struct Log(Arc<Mutex<Vec<u8>>>);

impl io::Write for Log {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0.lock().unwrap().write(bytes)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

#[tokio::test]
async fn a_consumer_logs_at_start_the_bytes_of_its_retention() {
    let log = Log::default();
    let writer = log.clone();
    // For all threads: the interest of a thread without a subscriber would hide lines of this one.
    tracing_subscriber::fmt().with_ansi(false).with_writer(move || writer.clone()).init();
    let (server, broker) = (with_effects().await, MemoryBroker::default());
    send(&broker, "m-1");
    let running = run(&server, &broker, write);
    broker.emptied().await;
    running.stop().await;
    let text = String::from_utf8(log.0.lock().unwrap().clone()).unwrap();
    let line = "retention 1 hour: at 1 id/s the ids take about 432 KB in the store (120 bytes per id) \
                consumer=\"orders\"";
    assert!(text.contains(line), "{text}");
}
