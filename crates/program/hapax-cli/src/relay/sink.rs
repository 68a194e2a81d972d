//! The broker or endpoint of `hapax relay`.

use std::num::NonZeroUsize;
use std::sync::Arc;

use hapax_messages::{MessageSink, RelayLimits};
use hapax_webhooks::WebhookSink;

use super::RelayArgs;
use crate::exit::CliError;
use crate::webhooks::{self, EndpointFiles, SECRET_FILE};

/// Connections to an endpoint of webhooks, unless a flag sets their number.
const CONNECTIONS: NonZeroUsize = NonZeroUsize::MIN.saturating_add(31);

/// Channels of RabbitMQ, each with one message in progress, unless a flag sets their number.
const CHANNELS: NonZeroUsize = NonZeroUsize::MIN.saturating_add(63);

/// Returns the sink of the flags, and the default of messages in flight.
pub(super) async fn open(
    args: &RelayArgs,
) -> Result<(Arc<dyn MessageSink>, NonZeroUsize), CliError> {
    let scheme = crate::messages::scheme(&args.to.0);
    let is_rabbit = matches!(scheme.as_deref(), Some("amqp" | "amqps"));
    if args.exchange.is_some() && !is_rabbit {
        return Err(CliError::usage(
            "--exchange: expected a RabbitMQ server in --to (amqp://HOST), found another sink: remove \
             --exchange",
        ));
    }
    if scheme.as_deref() != Some("kafka") {
        args.properties.rejected_without_kafka("--to")?;
    }
    match scheme.as_deref() {
        Some("http" | "https") => {
            let builder = WebhookSink::builder(&args.to.0).timeout(args.publish_timeout);
            let builder = match args.proxy.of(&args.to.0)? {
                Some(proxy) => builder.proxy(proxy),
                None => builder,
            };
            let files = EndpointFiles {
                secrets: args.signing_secret_file.as_deref(),
                roots: args.to_ca.as_deref(),
            };
            let sink = webhooks::sink(builder, files, "--publish-timeout").await?;
            Ok((Arc::new(sink), CONNECTIONS))
        }
        Some("nats" | "tls" | "amqp" | "amqps" | "kafka") => {
            for (flag, is_set) in [
                (SECRET_FILE, args.signing_secret_file.is_some()),
                ("--to-ca", args.to_ca.is_some()),
                ("--proxy-from-env", args.proxy.proxy_from_env),
            ] {
                if is_set {
                    return Err(CliError::usage(format!(
                        "{flag}: expected an endpoint in --to (https://HOST/PATH), found a broker: \
                         remove {flag}"
                    )));
                }
            }
            if is_rabbit {
                let exchange = args.exchange.as_deref().unwrap_or_default();
                let channels = args.in_flight.unwrap_or(CHANNELS);
                let sink = crate::messages::rabbit_sink(&args.to, exchange, channels).await?;
                return Ok((Arc::new(sink), channels));
            }
            let sink = match scheme.as_deref() {
                Some("kafka") => {
                    let timeout = Some(args.publish_timeout);
                    crate::messages::kafka_sink(&args.to, &args.properties, timeout).await?
                }
                _ => crate::messages::sink(&args.to, &args.properties).await?,
            };
            Ok((sink, RelayLimits::default().in_flight))
        }
        other => Err(CliError::usage(format!(
            "--to: expected nats://HOST, tls://HOST, amqp://HOST, amqps://HOST, kafka://HOST, \
             http://HOST/PATH or https://HOST/PATH, found {}",
            crate::messages::found_scheme(other)
        ))),
    }
}
