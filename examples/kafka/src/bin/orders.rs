//! A consumer in positions mode: the invoices of a batch, the position of its partition and the ids of its
//! messages commit together. The invoices of a customer are in the order of the orders.
//!
//! ```text
//! orders 127.0.0.1:9092 postgres://app@127.0.0.1/app
//! ```
//!
//! The database has the tables of `hapax sql --service-role app`, and
//! `CREATE TABLE invoices (order_id bigint, customer text)`, into which `app` may insert.

use std::sync::Arc;
use std::time::Duration;

use hapax::BoxFuture;
use hapax::messages::{BatchConsumer, BatchItem, BatchOptions, MessageFailure};
use hapax::postgres_messages::{Connections, PgInbox};
use hapax_kafka::KafkaSource;
use hapax_kafka_examples::{AnyError, argument, shutdown};
use sqlx::Postgres;
use sqlx::pool::PoolConnection;

const MONTH: Duration = Duration::from_secs(30 * 24 * 60 * 60);

#[derive(serde::Deserialize)]
struct Created {
    order: i64,
    customer: String,
}

#[tokio::main]
async fn main() -> Result<(), AnyError> {
    tracing_subscriber::fmt().with_writer(std::io::stderr).init();
    let properties = [
        ("bootstrap.servers", argument(1, "the brokers")?),
        ("session.timeout.ms", "6000".to_owned()), // a crash blocks its partitions for so long
    ];
    let pool = sqlx::PgPool::connect(&argument(2, "a database")?).await?;
    let connections = Connections::new(move || {
        let pool = pool.clone();
        async move { pool.acquire().await }
    })
    .discard_with(|connection| drop(connection.detach()));
    // With ids, since a relay may publish a message as two records.
    let inbox = PgInbox::new("invoices", connections, MONTH, invoice).advance_positions();
    let inbox = Arc::new(inbox);
    let source = KafkaSource::builder(properties, ["orders"], "invoices")
        .order_by_key()
        .positions(Arc::clone(&inbox) as _)
        .start()
        .await?;
    let source = Arc::new(source);
    let consumer = BatchConsumer::new(inbox, Arc::clone(&source) as _, BatchOptions::default())?;
    consumer.run(shutdown()).await;
    source.close().await;
    Ok(())
}

/// Writes an invoice for each order. The messages are new, and in order.
fn invoice<'a>(
    connection: &'a mut PoolConnection<Postgres>,
    items: &'a [BatchItem],
) -> BoxFuture<'a, Result<(), MessageFailure>> {
    Box::pin(async move {
        for item in items {
            let created: Created =
                serde_json::from_slice(&item.message().payload).map_err(MessageFailure::reject)?;
            sqlx::query("INSERT INTO invoices (order_id, customer) VALUES ($1, $2)")
                .bind(created.order)
                .bind(&created.customer)
                .execute(&mut **connection)
                .await?;
        }
        Ok(())
    })
}
