//! A relay: publishes the outbox of a database to Kafka. The destination of a message is its topic.
//!
//! ```text
//! outbox postgres://app@127.0.0.1/app 127.0.0.1:9092
//! ```

use std::sync::Arc;
use std::time::Duration;

use hapax::messages::{Relay, RelayLimits};
use hapax::postgres_messages::{Connections, PgOutbox};
use hapax::prelude::*;
use hapax_kafka::KafkaSink;
use hapax_kafka_examples::{AnyError, argument, shutdown};

/// Lease: time for which a relay that crashed blocks its shards of the outbox.
const LEASE: Duration = Duration::from_secs(5);

#[tokio::main]
async fn main() -> Result<(), AnyError> {
    tracing_subscriber::fmt().with_writer(std::io::stderr).init();
    let pool = sqlx::PgPool::connect(&argument(1, "a database")?).await?;
    let sink = KafkaSink::new([("bootstrap.servers", argument(2, "the brokers")?)])?;
    let store = Arc::new(PostgresStore::from_pool(pool.clone()).await?);
    let engine = Idempotency::builder(store).namespace("orders").build()?;
    let outbox = PgOutbox::new(&Connections::new(move || {
        let pool = pool.clone();
        async move { pool.acquire().await }
    }));
    let limits = RelayLimits { lease: LEASE, ..RelayLimits::default() };
    let relay = Relay::new("orders", Arc::new(outbox), Arc::new(sink), engine.clone(), limits)?;
    relay.run(shutdown()).await;
    engine.drain().await;
    Ok(())
}
