//! A queue consumer: each payment of a stream is charged once, by a service with idempotency keys.
//!
//! ```text
//! queue_consumer nats://127.0.0.1:4222 /var/lib/payments postgres://app@127.0.0.1/app http://charges
//! ```

use std::sync::Arc;
use std::time::Duration;

use hapax::messages::{Consumer, ConsumerLimits, HandledMessage, Inbox, MessageFailure};
use hapax::postgres_messages::{Connections, PgDeadLetters};
use hapax::prelude::*;
use hapax_messages_examples::{AnyError, Api, argument, shutdown};
use hapax_nats::NatsSource;

#[tokio::main]
async fn main() -> Result<(), AnyError> {
    tracing_subscriber::fmt().with_writer(std::io::stderr).init();
    let (broker, folder) = (argument(1, "a broker")?, argument(2, "a folder")?);
    let pool = sqlx::PgPool::connect(&argument(3, "a database for dead letters")?).await?;
    let api = Api::new(argument(4, "the URL of the service")?);

    let store = FileStore::open(FileOptions::new(format!("{folder}/inbox")))?;
    let engine = Idempotency::builder(Arc::new(store)).build()?;
    let letters = PgDeadLetters::new(&Connections::new(move || {
        let pool = pool.clone();
        async move { pool.acquire().await }
    }));
    let inbox = Inbox::builder("payments", engine.clone())
        .reexecute() // the service honors the key, which is the same in every attempt
        .lease(Duration::from_secs(5)) // for so long a crash blocks its messages
        .dead_letters(Arc::new(letters))
        .build()?;
    let source = NatsSource::builder(hapax_nats::jetstream(&broker).await?, "ORDERS", "payments");
    let source = Arc::new(source.ack_wait(Duration::from_secs(5)).start().await?);

    let charge = move |message: HandledMessage| charge(api.clone(), message);
    Consumer::new(inbox, source, charge, ConsumerLimits::default()).run(shutdown()).await;
    engine.drain().await;
    Ok(())
}

async fn charge(api: Api, message: HandledMessage) -> Result<(), MessageFailure> {
    let key = message.lease().downstream();
    let payment = message.message().payload.clone();
    match api.post("/charges", key.as_str(), payment).await {
        Ok(200..300) => Ok(()),
        Ok(status @ (400 | 422)) => Err(MessageFailure::reject(format!("status {status}"))),
        Ok(status) => Err(MessageFailure::retry(format!("status {status}"))),
        Err(error) => Err(MessageFailure::retry(error)),
    }
}
