//! Rate of a consumer in batch mode, beside the same consumer without ids, in one run.
//!
//! `cargo run --release -p hapax-postgres-messages --example batch_rate -- [MESSAGES] [ROUNDS]`
//! starts a private server. A hundred messages share a transaction, and each has two statements.
#![allow(clippy::expect_used, clippy::print_stdout, clippy::unwrap_used, reason = "a measurement")]

use std::num::NonZeroUsize;
use std::sync::Arc;
use std::time::Duration;

use deadpool_postgres::{Manager, Object, Pool};
use hapax_core::store::BoxFuture;
use hapax_messages::{
    BatchConsumer, BatchConsumerLimits, BatchItem, BatchOptions, Message, MessageFailure,
    MessageSource,
};
use hapax_postgres_data::Pooled;
use hapax_postgres_messages::{Connections, PgInbox, message_migrations};
use hapax_testkit::messages::MemoryBroker;
use hapax_testkit::servers::PostgresServer;
use tokio::sync::oneshot;
use tokio::time::Instant;
use tokio_postgres::types::Type;

type Connection = Pooled<Object>;

const BATCH: NonZeroUsize = NonZeroUsize::new(100).unwrap();
const TRANSACTIONS: NonZeroUsize = NonZeroUsize::new(4).unwrap();

/// Writes two rows for a message.
async fn write(connection: &Connection, id: &str) -> Result<(), tokio_postgres::Error> {
    let insert = "INSERT INTO effects (message) VALUES ($1)";
    // One round trip for each.
    connection.query_typed(insert, &[(&id, Type::TEXT)]).await?;
    connection.query_typed(insert, &[(&id, Type::TEXT)]).await.map(drop)
}

fn handle<'a>(
    connection: &'a mut Connection,
    messages: &'a [BatchItem],
) -> BoxFuture<'a, Result<(), MessageFailure>> {
    Box::pin(async move {
        for item in messages {
            write(connection, item.id().as_str()).await?;
        }
        Ok(())
    })
}

fn broker(messages: u64, round: u64, name: &str) -> MemoryBroker {
    let broker = MemoryBroker::default();
    for number in 0..messages {
        let message = Message::new("memory://rate", vec![b'x'; 200]);
        broker.send(message.with_header("message-id", format!("{name}-{round}-{number}")));
    }
    broker
}

async fn with_ids(pool: &Pool, messages: u64, round: u64) -> Duration {
    let broker = broker(messages, round, "ids");
    let from = pool.clone();
    let connections = Connections::new(move || {
        let pool = from.clone();
        async move { pool.get().await.map(|object| Pooled::new(object, |object| object)) }
    });
    let inbox = PgInbox::new("rate", connections, Duration::from_secs(3600), handle);
    let limits = BatchConsumerLimits {
        batch: BATCH,
        transactions: TRANSACTIONS,
        ..BatchConsumerLimits::default()
    };
    let options = BatchOptions { limits, ..BatchOptions::default() };
    let consumer = BatchConsumer::new(Arc::new(inbox), Arc::new(broker.clone()), options).unwrap();
    let (stop, stopped) = oneshot::channel::<()>();
    let begun = Instant::now();
    let consumer = tokio::spawn(consumer.run(async {
        let _ = stopped.await;
    }));
    broker.emptied().await;
    let took = begun.elapsed();
    let _ = stop.send(());
    assert!(consumer.await.unwrap());
    took
}

async fn without_ids(pool: &Pool, messages: u64, round: u64) -> Duration {
    let broker = broker(messages, round, "plain");
    let begun = Instant::now();
    let workers: Vec<_> = (0..TRANSACTIONS.get())
        .map(|_| {
            let (broker, pool) = (broker.clone(), pool.clone());
            tokio::spawn(async move {
                loop {
                    let batch = broker.receive(BATCH).await.unwrap();
                    let connection =
                        Pooled::new(pool.get().await.unwrap(), |object: &Object| object);
                    connection.batch_execute("BEGIN").await.unwrap();
                    for delivery in &batch {
                        let id = delivery.message().header("message-id").unwrap();
                        write(&connection, std::str::from_utf8(id).unwrap()).await.unwrap();
                    }
                    connection.batch_execute("COMMIT").await.unwrap();
                    for delivery in &batch {
                        delivery.acknowledge().await.unwrap();
                    }
                }
            })
        })
        .collect();
    broker.emptied().await;
    let took = begun.elapsed();
    workers.iter().for_each(tokio::task::JoinHandle::abort);
    took
}

#[tokio::main]
async fn main() {
    let mut arguments = std::env::args().skip(1).map(|text| text.parse().unwrap());
    let (messages, rounds) = (arguments.next().unwrap_or(20_000), arguments.next().unwrap_or(3));
    let server = PostgresServer::start().await;
    server.sql("postgres", &message_migrations(&Default::default())).await;
    server.sql("postgres", "CREATE TABLE effects (message text NOT NULL)").await;
    let manager = Manager::new(server.url("postgres").parse().unwrap(), tokio_postgres::NoTls);
    let pool = Pool::builder(manager).max_size(8).build().unwrap();
    for round in 0..rounds {
        let plain = without_ids(&pool, messages, round).await;
        let ids = with_ids(&pool, messages, round).await;
        let rate = |took: Duration| messages as f64 / took.as_secs_f64();
        println!(
            "{:.0}/s without ids, {:.0}/s with ids: {:.2}",
            rate(plain),
            rate(ids),
            plain.as_secs_f64() / ids.as_secs_f64()
        );
    }
}
