//! A consumer with an inbox in its database: ids and invoices of a batch commit together.
//!
//! ```text
//! invoices nats://127.0.0.1:4222 postgres://app@127.0.0.1/app
//! ```

use std::sync::Arc;
use std::time::Duration;

use hapax::BoxFuture;
use hapax::messages::{BatchConsumer, BatchItem, BatchOptions, MessageFailure};
use hapax::postgres_messages::{Connections, PgInbox};
use hapax_messages_examples::{AnyError, argument, shutdown};
use hapax_nats::{NatsConnector, NatsSource};
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
    let connector = NatsConnector::new(argument(1, "a broker")?);
    let pool = sqlx::PgPool::connect(&argument(2, "a database")?).await?;
    let connections = Connections::new(move || {
        let pool = pool.clone();
        async move { pool.acquire().await }
    })
    .discard_with(|connection| drop(connection.detach()));
    let inbox = PgInbox::new("invoices", connections, MONTH, invoice);
    let source = NatsSource::builder(connector.connect().await?, "ORDERS", "invoices");
    let source = source.connector(connector).ack_wait(Duration::from_secs(5)).start().await?;
    let source = Arc::new(source);
    let consumer = BatchConsumer::new(Arc::new(inbox), source, BatchOptions::default())?;
    consumer.run(shutdown()).await;
    Ok(())
}

/// Writes an invoice for each order. The messages are new: duplicates do not get here.
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
