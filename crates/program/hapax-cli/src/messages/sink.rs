//! The broker to which messages are published, by the scheme of its URL.

use std::num::NonZeroUsize;
use std::sync::Arc;

use hapax_messages::MessageSink;
use hapax_nats::NatsSink;
use hapax_rabbitmq::RabbitSink;

use super::HiddenUrl;
use crate::exit::{CliError, of};

/// Connects to the broker of a URL. At RabbitMQ, destinations are queues.
pub(crate) async fn sink(url: &HiddenUrl) -> Result<Arc<dyn MessageSink>, CliError> {
    let scheme = url.0.split_once("://").map(|(scheme, _)| scheme.to_ascii_lowercase());
    match scheme.as_deref() {
        Some("nats" | "tls") => {
            let sink = NatsSink::connect(&url.0).await;
            let sink = sink.map_err(|error| CliError::unavailable(format!("--to: {error}")))?;
            Ok(Arc::new(sink))
        }
        Some("amqp" | "amqps") => Ok(Arc::new(rabbit_sink(url, "", NonZeroUsize::MIN).await?)),
        _ => Err(CliError::usage(
            "--to: expected nats://HOST, tls://HOST, amqp://HOST or amqps://HOST, found another URL",
        )),
    }
}

/// Connects to an exchange of RabbitMQ.
pub(crate) async fn rabbit_sink(
    url: &HiddenUrl,
    exchange: &str,
    channels: NonZeroUsize,
) -> Result<RabbitSink, CliError> {
    let builder = RabbitSink::builder(&url.0).map_err(of("--to"))?;
    let sink = builder.exchange(exchange).channels(channels).connect().await;
    sink.map_err(|error| CliError::unavailable(format!("--to: {error}")))
}
