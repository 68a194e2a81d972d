//! A worker of a RabbitMQ queue: the reservation of an order commits with the record of its message.
//!
//! ```text
//! stock_worker amqp://127.0.0.1 stock postgres://app@127.0.0.1/app
//! ```

use std::sync::Arc;
use std::time::Duration;

use hapax::messages::{Consumer, ConsumerLimits, Inbox, MessageExecution, MessageFailure};
use hapax::postgres_messages::{Connections, PgDeadLetterStore};
use hapax::prelude::*;
use hapax::transaction::TransactionBackend;
use hapax_messages_examples::{AnyError, argument, shutdown};
use hapax_rabbitmq::RabbitSource;
use sqlx::{Postgres, Transaction};

#[derive(serde::Deserialize)]
struct Order {
    item: String,
    pieces: i32,
}

#[tokio::main]
async fn main() -> Result<(), AnyError> {
    tracing_subscriber::fmt().with_writer(std::io::stderr).init();
    let source = RabbitSource::builder(argument(1, "a broker")?, argument(2, "a queue")?)
        .delivery_limit(None) // of a classic queue; a quorum queue has the limit 20 or another one
        .start()
        .await?;
    let pool = sqlx::PgPool::connect(&argument(3, "a database")?).await?;

    let store = Arc::new(PostgresStore::from_pool(pool.clone()).await?);
    let transactions = SqlxTransactions::new(Arc::clone(&store), pool.clone());
    let engine = Idempotency::builder(store).namespace("stock").build()?;
    let dead_letters = PgDeadLetterStore::new(&Connections::new(move || {
        let pool = pool.clone();
        async move { pool.acquire().await }
    }));
    let inbox = Inbox::builder("stock", engine.clone())
        .reexecute() // what did not commit was rolled back
        .transactions(TransactionBackend::new(Arc::new(transactions)).any())
        .lease(Duration::from_secs(5)) // the time for which a crash blocks its messages
        .dead_letters(Arc::new(dead_letters))
        .build()?;
    let limits = ConsumerLimits::default();
    Consumer::new(inbox, Arc::new(source), reserve, limits)?.run(shutdown()).await;
    engine.drain().await;
    Ok(())
}

/// Takes the pieces of an order from the stock.
async fn reserve(execution: MessageExecution) -> Result<(), MessageFailure> {
    let payload = &execution.message().payload;
    let order: Order = serde_json::from_slice(payload).map_err(MessageFailure::reject)?;
    let mut tx = execution.transaction::<Transaction<'static, Postgres>>().await?;
    let take = "UPDATE stock SET pieces = pieces - $2 WHERE item = $1 AND pieces >= $2";
    let taken = sqlx::query(take).bind(&order.item).bind(order.pieces).execute(&mut **tx).await?;
    match taken.rows_affected() {
        0 => Err(MessageFailure::retry_after(Duration::from_secs(60), "not enough in stock")),
        _ => Ok(()),
    }
}
