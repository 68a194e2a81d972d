//! The broker to which messages are published, by the scheme of its URL.

use std::num::NonZeroUsize;
use std::sync::Arc;
use std::time::Duration;

#[cfg(feature = "kafka")]
use hapax_kafka::KafkaSink;
use hapax_messages::{MessageSink, PublishError};
use hapax_nats::NatsSink;
use hapax_rabbitmq::RabbitSink;

use super::{BrokerArgs, HiddenUrl, PropertyArgs};
#[cfg(feature = "kafka")]
use super::{SERVERS, not_started};
use crate::exit::{CliError, of};
#[cfg(feature = "kafka")]
use crate::keys::TIMEOUT;

/// Connects to the broker of a URL. At RabbitMQ, destinations are queues.
pub(crate) async fn sink(
    url: &HiddenUrl,
    properties: &PropertyArgs,
    broker: &BrokerArgs,
) -> Result<Arc<dyn MessageSink>, CliError> {
    let scheme = scheme(&url.0);
    if scheme.as_deref() != Some("kafka") {
        properties.rejected_without_kafka("--to")?;
    }
    match scheme.as_deref() {
        Some("nats" | "tls") => {
            let context = broker.nats(&url.0, "--to")?.connect().await;
            let context =
                context.map_err(|error| CliError::unavailable(format!("--to: {error}")))?;
            Ok(Arc::new(NatsSink::new(context)))
        }
        Some("amqp" | "amqps") => {
            Ok(Arc::new(rabbit_sink(url, broker, "", NonZeroUsize::MIN).await?))
        }
        Some("kafka") => {
            broker.rejected_with_others("--to")?;
            kafka_sink(url, properties, None).await
        }
        other => Err(CliError::usage(format!(
            "--to: expected nats://HOST, tls://HOST, amqp://HOST, amqps://HOST or kafka://HOST, found {}",
            found_scheme(other)
        ))),
    }
}

/// Returns the scheme of a URL, in lowercase.
pub(crate) fn scheme(url: &str) -> Option<String> {
    let (scheme, _) = url.split_once("://")?;
    let is_valid = |it: char| it.is_ascii_alphanumeric() || matches!(it, '+' | '-' | '.');
    let is_scheme = scheme.starts_with(|it: char| it.is_ascii_alphabetic());
    (is_scheme && scheme.chars().all(is_valid)).then(|| scheme.to_ascii_lowercase())
}

/// Describes in an error the scheme that a URL has, and what to do. The rest of the URL may be secret.
pub(crate) fn found_scheme(scheme: Option<&str>) -> String {
    let found = scheme.map_or_else(|| "none".to_owned(), |scheme| format!("the scheme {scheme}"));
    format!("{found}: correct the URL")
}

/// Creates a producer for the brokers of `kafka://HOST[:PORT],…`, with the time within which they must
/// acknowledge a message.
#[cfg(feature = "kafka")]
pub(crate) async fn kafka_sink(
    url: &HiddenUrl,
    properties: &PropertyArgs,
    timeout: Option<Duration>,
) -> Result<Arc<dyn MessageSink>, CliError> {
    let hosts = url.0.split_once("://").map_or("", |(_, hosts)| hosts);
    let found = match hosts {
        "" => Some("no host: add one"),
        _ if hosts.contains('@') => Some("a user: remove it"),
        _ if hosts.contains(['?', '#']) => Some("a query or fragment: remove it"),
        _ if hosts.contains('/') => {
            Some("a topic: remove it, because the destination of a message is its topic")
        }
        _ => None,
    };
    if let Some(found) = found {
        return Err(CliError::usage(format!(
            "--to: expected kafka://HOST[:PORT],… without a user and a topic; found {found}"
        )));
    }
    let mut own = vec![(SERVERS, hosts.to_owned(), "--to")];
    if let Some(timeout) = timeout {
        // The client gives up first, so that its error says why.
        let timeout = (timeout * 9 / 10).as_millis().max(1).to_string();
        own.push(("message.timeout.ms", timeout, "--publish-timeout"));
    }
    let sink = KafkaSink::new(properties.with(own)?).map_err(not_started("--to"))?;
    let checked = sink.check_brokers(TIMEOUT).await;
    checked.map_err(|error| CliError::unavailable(format!("--to: {error}")))?;
    Ok(Arc::new(sink))
}

/// Rejects a URL of Kafka.
#[cfg(not(feature = "kafka"))]
#[allow(clippy::unused_async, reason = "as with the feature")]
pub(crate) async fn kafka_sink(
    _url: &HiddenUrl,
    _properties: &PropertyArgs,
    _timeout: Option<Duration>,
) -> Result<Arc<dyn MessageSink>, CliError> {
    Err(without_kafka("--to"))
}

/// Returns the error of a `kafka://` URL in a program without the feature.
#[cfg(not(feature = "kafka"))]
pub(crate) fn without_kafka(flag: &str) -> CliError {
    CliError::usage(format!(
        "{flag}: expected a program with the feature kafka for kafka://, found one without it: build it \
         with `cargo build --release -p hapax-cli --features kafka`"
    ))
}

/// Connects to an exchange of RabbitMQ.
pub(crate) async fn rabbit_sink(
    url: &HiddenUrl,
    broker: &BrokerArgs,
    exchange: &str,
    channels: NonZeroUsize,
) -> Result<RabbitSink, CliError> {
    let mut builder = RabbitSink::builder(&url.0).map_err(of("--to"))?;
    if let Some(login) = broker.rabbit(&url.0, "--to")? {
        builder = builder.login(login).map_err(of("--to"))?;
    }
    let sink = builder.exchange(exchange).channels(channels).connect().await;
    sink.map_err(|error| match error {
        PublishError::Rejected(cause) => CliError::usage(format!("--exchange: {cause}")),
        error => CliError::unavailable(format!("--to: {error}")),
    })
}
