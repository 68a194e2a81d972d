//! A queue consumer: each payment of a stream is charged once, by a service with idempotency keys.
//!
//! ```text
//! queue_consumer nats://127.0.0.1:4222 postgres://app@127.0.0.1/app http://charges
//! ```

use std::sync::Arc;
use std::time::Duration;

use hapax::messages::{Consumer, ConsumerLimits, Inbox, MessageExecution, MessageFailure};
use hapax::postgres_messages::{Connections, PgDeadLetterStore};
use hapax::prelude::*;
use hapax_messages_examples::{AnyError, Api, argument, shutdown};
use hapax_nats::{NatsConnector, NatsSource};

#[tokio::main]
async fn main() -> Result<(), AnyError> {
    tracing_subscriber::fmt().with_writer(std::io::stderr).init();
    let broker = argument(1, "a broker")?;
    let pool = sqlx::PgPool::connect(&argument(2, "a database")?).await?;
    let api = Api::new(argument(3, "the URL of the service")?);

    // All replicas share the records of ids.
    let store = PostgresStore::from_pool(pool.clone()).await?;
    let engine = Idempotency::builder(Arc::new(store)).namespace("queue").build()?;
    let dead_letters = PgDeadLetterStore::new(&Connections::new(move || {
        let pool = pool.clone();
        async move { pool.acquire().await }
    }));
    let inbox = Inbox::builder("payments", engine.clone())
        .reexecute() // the service has one effect for a key, which is the same in every attempt
        .lease(Duration::from_secs(5)) // the time for which a crash blocks its messages
        .dead_letters(Arc::new(dead_letters))
        .build()?;
    let connector = NatsConnector::new(&broker);
    let source = NatsSource::builder(connector.connect().await?, "ORDERS", "payments");
    let source = source.connector(connector).ack_wait(Duration::from_secs(5)).start().await?;
    let source = Arc::new(source);

    let charge = move |execution: MessageExecution| charge(api.clone(), execution);
    Consumer::new(inbox, source, charge, ConsumerLimits::default())?.run(shutdown()).await;
    engine.drain().await;
    Ok(())
}

async fn charge(api: Api, execution: MessageExecution) -> Result<(), MessageFailure> {
    let key = execution.lease().downstream();
    let payment = execution.message().payload.clone();
    match api.post("/charges", key.as_str(), payment).await {
        Ok(200..300) => Ok(()),
        Ok(status @ (400 | 422)) => Err(MessageFailure::reject(format!("status {status}"))),
        Ok(status) => Err(MessageFailure::retry(format!("status {status}"))),
        Err(error) => Err(MessageFailure::retry(error)),
    }
}
