//! An email sender: the mail service has no idempotency keys, but a lookup of mails by message id.
//!
//! ```text
//! email_sender nats://127.0.0.1:4222 postgres://app@127.0.0.1/app http://mails
//! ```

use std::sync::Arc;
use std::time::Duration;

use hapax::messages::{
    Consumer, ConsumerLimits, Inbox, MessageExecution, MessageFailure, MessageReconcileCall,
};
use hapax::postgres_messages::{Connections, PgDeadLetterStore};
use hapax::prelude::*;
use hapax::{HookTiming, Verdict};
use hapax_messages_examples::{AnyError, Api, argument, shutdown};
use hapax_nats::{NatsConnector, NatsSource};

#[tokio::main]
async fn main() -> Result<(), AnyError> {
    tracing_subscriber::fmt().with_writer(std::io::stderr).init();
    let broker = argument(1, "a broker")?;
    let pool = sqlx::PgPool::connect(&argument(2, "a database")?).await?;
    let api = Api::new(argument(3, "the URL of the mail service")?);

    // All replicas share the records of ids.
    let store = PostgresStore::from_pool(pool.clone()).await?;
    let engine = Idempotency::builder(Arc::new(store)).namespace("emails").build()?;
    let dead_letters = PgDeadLetterStore::new(&Connections::new(move || {
        let pool = pool.clone();
        async move { pool.acquire().await }
    }));
    // A request of the dead process may still arrive, so the hook is called after two seconds.
    let timing = HookTiming { after: Duration::from_secs(2), timeout: Duration::from_secs(10) };
    let asked = api.clone();
    let inbox = Inbox::builder("emails", engine.clone())
        .reconcile_with(timing, move |call| was_sent(asked.clone(), call))
        .lease(Duration::from_secs(5))
        .dead_letters(Arc::new(dead_letters))
        .build()?;
    let connector = NatsConnector::new(&broker);
    let source = NatsSource::builder(connector.connect().await?, "ORDERS", "emails");
    let source = source.connector(connector).ack_wait(Duration::from_secs(5)).start().await?;
    let source = Arc::new(source);

    let send = move |execution: MessageExecution| send(api.clone(), execution);
    Consumer::new(inbox, source, send, ConsumerLimits::default())?.run(shutdown()).await;
    engine.drain().await;
    Ok(())
}

/// Sends the mail, whose Message-ID is the id of the message.
async fn send(api: Api, execution: MessageExecution) -> Result<(), MessageFailure> {
    let path = format!("/mails/{}", execution.id().as_str());
    match api.post(&path, "", execution.message().payload.clone()).await {
        Ok(200..300) => Ok(()),
        Ok(status @ 400..500) => Err(MessageFailure::reject(format!("status {status}"))),
        // The mail may have been sent: the hook decides.
        Ok(status) => Err(MessageFailure::unknown(format!("status {status}"))),
        Err(error) => Err(MessageFailure::unknown(error)),
    }
}

/// Looks up whether a mail was sent, after its sender died or received no response.
async fn was_sent(api: Api, call: MessageReconcileCall) -> Verdict<()> {
    match api.get(&format!("/mails/{}", call.id.as_str())).await {
        Ok(200) => Verdict::Happened(()),
        Ok(404) => Verdict::DidNotHappen,
        _ => Verdict::CannotSay,
    }
}
