//! The source of `hapax consume`, by the scheme of its URL: the one place that knows brokers.

#[cfg(feature = "kafka")]
mod kafka;
mod naming;
mod rabbitmq;

use std::sync::Arc;
use std::time::Duration;

use hapax_messages::MessageSource;
use hapax_nats::{NatsConnector, NatsOrderKey, NatsSource, NatsSourceStats};

#[cfg(feature = "kafka")]
use self::kafka::KafkaPlan;
pub(super) use self::naming::naming;
use self::rabbitmq::RabbitPlan;
use super::args::{LimitArgs, SourceArgs};
use crate::exit::CliError;
use crate::messages::PROPERTIES;

/// The schemes of this program, for errors.
const SCHEMES: &str = "nats://HOST, tls://HOST, amqp://HOST, amqps://HOST or kafka://HOST/TOPIC";

/// A broker and its settings, checked without a connection.
#[derive(Debug)]
pub(super) enum SourcePlan {
    Nats(NatsPlan),
    Rabbit(RabbitPlan),
    #[cfg(feature = "kafka")]
    Kafka(KafkaPlan),
}

/// A broker from which messages are received.
#[derive(Clone, Debug)]
pub(super) enum OpenSource {
    /// One that ends when it is dropped.
    Plain(Arc<dyn MessageSource>),
    Nats(Arc<NatsSource>),
    #[cfg(feature = "kafka")]
    Kafka(Arc<hapax_kafka::KafkaSource>),
}

impl OpenSource {
    /// Returns the source of a consumer.
    pub(super) fn receiver(&self) -> Arc<dyn MessageSource> {
        match self {
            Self::Plain(source) => Arc::clone(source),
            Self::Nats(source) => Arc::clone(source) as Arc<dyn MessageSource>,
            #[cfg(feature = "kafka")]
            Self::Kafka(source) => Arc::clone(source) as Arc<dyn MessageSource>,
        }
    }

    /// Returns the number of partitions that are assigned and not received.
    pub(super) fn stopped_partitions(&self) -> usize {
        match self {
            Self::Plain(_) | Self::Nats(_) => 0,
            #[cfg(feature = "kafka")]
            Self::Kafka(source) => source.stopped_partitions().len(),
        }
    }

    /// Returns the counters of a NATS source; zeros for another one.
    pub(super) fn nats_stats(&self) -> NatsSourceStats {
        match self {
            Self::Nats(source) => source.stats(),
            _ => NatsSourceStats::default(),
        }
    }

    /// Returns the topics that do not exist.
    pub(super) fn missing_topics(&self) -> Vec<String> {
        match self {
            Self::Nats(_) | Self::Plain(_) => Vec::new(),
            #[cfg(feature = "kafka")]
            Self::Kafka(source) => source.missing_topics(),
        }
    }

    /// Waits until the source has ended because a new group begins with records that are too old. Returns the error.
    pub(super) async fn until_records_are_too_old(&self) -> CliError {
        match self {
            Self::Nats(_) | Self::Plain(_) => std::future::pending().await,
            #[cfg(feature = "kafka")]
            Self::Kafka(source) => CliError::usage(format!(
                "--start-at: {}: add --start-at TIME or latest, or a longer --retention. Nothing of the partition was \
                 committed",
                source.until_records_are_too_old().await
            )),
        }
    }

    /// Ends the source after its consumer.
    pub(super) async fn close(self) {
        match self {
            Self::Plain(_) | Self::Nats(_) => {}
            // It commits, and leaves the group.
            #[cfg(feature = "kafka")]
            Self::Kafka(source) => source.close().await,
        }
    }
}

/// Settings of a durable consumer of a stream.
#[derive(Debug)]
pub(super) struct NatsPlan {
    connector: NatsConnector,
    stream: String,
    durable: String,
    subjects: Vec<String>,
    order_key: NatsOrderKey,
    ack_wait: Duration,
}

impl SourcePlan {
    /// Checks the settings of the broker at `url`. The lease is the time after which the messages of a
    /// process that died are delivered again, and the timeout that of a request.
    pub(super) fn new(
        url: &str,
        args: &SourceArgs,
        consumer: &str,
        limits: &LimitArgs,
    ) -> Result<Self, CliError> {
        let scheme = crate::messages::scheme(url);
        match scheme.as_deref() {
            Some("nats" | "tls") => {
                reject_others(args, NATS)?;
                NatsPlan::new(url, args, consumer, limits.lease).map(Self::Nats)
            }
            Some("amqp" | "amqps") => {
                reject_others(args, RABBIT)?;
                RabbitPlan::new(url, args, limits).map(Self::Rabbit)
            }
            #[cfg(feature = "kafka")]
            Some("kafka") => {
                reject_others(args, KAFKA)?;
                args.broker.rejected_with_others("--from")?;
                KafkaPlan::new(url, args, consumer, limits).map(Self::Kafka)
            }
            #[cfg(not(feature = "kafka"))]
            Some("kafka") => Err(crate::messages::without_kafka("--from")),
            other => Err(CliError::usage(format!(
                "--from: expected {SCHEMES}, found {}",
                crate::messages::found_scheme(other)
            ))),
        }
    }

    /// Connects to the broker at `url`.
    pub(super) async fn open(self, url: &str) -> Result<OpenSource, CliError> {
        match self {
            Self::Nats(plan) => Ok(OpenSource::Nats(Arc::new(plan.open().await?))),
            Self::Rabbit(plan) => Ok(OpenSource::Plain(Arc::new(plan.open(url).await?))),
            #[cfg(feature = "kafka")]
            Self::Kafka(plan) => Ok(OpenSource::Kafka(Arc::new(plan.open().await?))),
        }
    }
}

const NATS: &str = "a NATS server";
const RABBIT: &str = "a RabbitMQ server";
const KAFKA: &str = "Kafka brokers";

/// Rejects flags of other brokers than `own`.
fn reject_others(args: &SourceArgs, own: &str) -> Result<(), CliError> {
    let flags = [
        (NATS, "--stream", args.stream.is_some()),
        (NATS, "--subject", !args.subjects.is_empty()),
        (RABBIT, "--queue", args.queue.is_some()),
        (RABBIT, "--delivery-limit", args.delivery_limit.is_some()),
        (RABBIT, "--consumer-timeout", args.consumer_timeout.is_some()),
        (KAFKA, "--start-at", args.start_at.is_some()),
        (KAFKA, PROPERTIES, args.properties.file.is_some()),
    ];
    match flags.iter().find(|(broker, _, is_set)| *is_set && *broker != own) {
        None => Ok(()),
        Some((broker, flag, _)) => Err(CliError::usage(format!(
            "{flag}: expected {broker} in --from, found another broker: remove {flag}"
        ))),
    }
}

impl NatsPlan {
    fn new(
        url: &str,
        args: &SourceArgs,
        consumer: &str,
        lease: Duration,
    ) -> Result<Self, CliError> {
        let Some(stream) = &args.stream else {
            return Err(CliError::usage(
                "--stream: expected the stream of a NATS server, found none: add --stream NAME",
            ));
        };
        for (flag, name) in [("--stream", stream.as_str()), ("--consumer", consumer)] {
            let is_valid = |it: char| it.is_ascii_alphanumeric() || it == '-' || it == '_';
            if name.is_empty() || !name.chars().all(is_valid) {
                return Err(CliError::usage(format!(
                    "{flag}: expected a name of letters, digits, - and _, found another one"
                )));
            }
        }
        let order_key = match args.order_by.as_deref() {
            None => NatsOrderKey::None,
            Some("subject") => NatsOrderKey::Subject,
            Some(text) => match text.split_once(':') {
                Some(("header", name)) if !name.is_empty() => NatsOrderKey::Header(name.to_owned()),
                _ => {
                    return Err(CliError::usage(
                        "--order-by: expected subject or header:NAME, found another key",
                    ));
                }
            },
        };
        if lease < Duration::from_secs(1) {
            return Err(CliError::usage(format!(
                "--lease: expected at least 1s for a NATS server, found {lease:?}"
            )));
        }
        Ok(Self {
            connector: args.broker.nats(url, "--from")?,
            stream: stream.clone(),
            durable: consumer.to_owned(),
            subjects: args.subjects.clone(),
            order_key,
            ack_wait: lease,
        })
    }

    async fn open(self) -> Result<NatsSource, CliError> {
        let context = self.connector.connect().await.map_err(|error| {
            CliError::unavailable(format!(
                "--from: expected a NATS server, found an error: {error}"
            ))
        })?;
        let source = NatsSource::builder(context, self.stream, self.durable)
            .connector(self.connector)
            .filter_subjects(self.subjects)
            .ack_wait(self.ack_wait)
            .order_key(self.order_key);
        source.start().await.map_err(|error| CliError::unavailable(format!("--from: {error}")))
    }
}
