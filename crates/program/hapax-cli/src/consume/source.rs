//! The source of `hapax consume`, by the scheme of its URL: the one place that knows brokers.

#[cfg(feature = "kafka")]
mod kafka;
mod rabbitmq;

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use hapax_core::Fingerprint;
use hapax_messages::{IdRule, MessageSource};
use hapax_nats::{NatsOrderKey, NatsSource};
use hapax_operators::ConsumerNaming;

#[cfg(feature = "kafka")]
use self::kafka::KafkaPlan;
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
    #[cfg(feature = "kafka")]
    Kafka(Arc<hapax_kafka::KafkaSource>),
}

impl OpenSource {
    /// Returns the source of a consumer.
    pub(super) fn receiver(&self) -> Arc<dyn MessageSource> {
        match self {
            Self::Plain(source) => Arc::clone(source),
            #[cfg(feature = "kafka")]
            Self::Kafka(source) => Arc::clone(source) as Arc<dyn MessageSource>,
        }
    }

    /// Returns the number of partitions that are assigned and not received.
    pub(super) fn stopped_partitions(&self) -> usize {
        match self {
            Self::Plain(_) => 0,
            #[cfg(feature = "kafka")]
            Self::Kafka(source) => source.stopped_partitions().len(),
        }
    }

    /// Returns the topics that do not exist.
    pub(super) fn missing_topics(&self) -> Vec<String> {
        match self {
            Self::Plain(_) => Vec::new(),
            #[cfg(feature = "kafka")]
            Self::Kafka(source) => source.missing_topics(),
        }
    }

    /// Waits until the source has ended because a new group begins with records that are too old. Returns the error.
    pub(super) async fn until_records_are_too_old(&self) -> CliError {
        match self {
            Self::Plain(_) => std::future::pending().await,
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
            Self::Plain(_) => {}
            // It commits, and leaves the group.
            #[cfg(feature = "kafka")]
            Self::Kafka(source) => source.close().await,
        }
    }
}

/// Settings of a durable consumer of a stream.
#[derive(Debug)]
pub(super) struct NatsPlan {
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
                NatsPlan::new(args, consumer, limits.lease).map(Self::Nats)
            }
            Some("amqp" | "amqps") => {
                reject_others(args, RABBIT)?;
                RabbitPlan::new(args, limits).map(Self::Rabbit)
            }
            #[cfg(feature = "kafka")]
            Some("kafka") => {
                reject_others(args, KAFKA)?;
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
            Self::Nats(plan) => Ok(OpenSource::Plain(Arc::new(plan.open(url).await?))),
            Self::Rabbit(plan) => Ok(OpenSource::Plain(Arc::new(plan.open(url).await?))),
            #[cfg(feature = "kafka")]
            Self::Kafka(plan) => Ok(OpenSource::Kafka(Arc::new(plan.open().await?))),
        }
    }
}

/// Returns what the register of the store has of this consumer, for each stream, queue or topic.
pub(super) fn naming(
    url: &str,
    args: &SourceArgs,
    consumer: &str,
    ids: &[IdRule],
) -> Vec<ConsumerNaming> {
    let sources = match (&args.stream, &args.queue) {
        (Some(stream), _) => vec![format!("nats://{stream}")],
        (None, Some(queue)) => vec![format!("amqp://{}/{queue}", place(url))],
        (None, None) => place(url).split(',').map(|topic| format!("kafka://{topic}")).collect(),
    };
    let usual = [IdRule::Header("message-id".to_owned()), IdRule::CloudEvents];
    let ids = if ids.is_empty() { &usual[..] } else { ids };
    let ids = ids.iter().map(id_text).collect::<Vec<_>>().join(", ");
    // The case of a header's name is ignored.
    let order_by = args.order_by.as_deref().unwrap_or("none").to_ascii_lowercase();
    let naming = |source: String| ConsumerNaming {
        consumer: consumer.to_owned(),
        source,
        broker: broker_digest(url),
        mode: "claim".to_owned(),
        ids: ids.clone(),
        order_by: order_by.clone(),
        later: BTreeMap::new(),
    };
    sources.into_iter().map(naming).collect()
}

/// Returns the path of a URL: of RabbitMQ the virtual host, of Kafka the topics.
fn place(url: &str) -> &str {
    let rest = url.split_once("://").map_or("", |(_, rest)| rest);
    let place = rest.split_once('/').map_or("", |(_, place)| place);
    place.split(['?', '#']).next().unwrap_or_default()
}

/// Returns a digest of the addresses of a broker, without users and passwords.
fn broker_digest(url: &str) -> String {
    let rest = url.split_once("://").map_or(url, |(_, rest)| rest);
    let authority = rest.split(['/', '?', '#']).next().unwrap_or_default().to_ascii_lowercase();
    let host = |part: &str| part.rsplit('@').next().unwrap_or_default().to_owned();
    let mut hosts: Vec<_> = authority.split(',').map(host).collect();
    hosts.sort_unstable();
    let mut digest = Fingerprint::builder("hapax 1 broker");
    for host in &hosts {
        digest.field(host.as_bytes());
    }
    let digest = digest.finish();
    digest.as_bytes()[..8].iter().map(|byte| format!("{byte:02x}")).collect()
}

/// Returns a rule for ids as `--id` has it.
fn id_text(rule: &IdRule) -> String {
    match rule {
        IdRule::Header(name) => format!("header:{}", name.to_ascii_lowercase()),
        IdRule::CloudEvents => "cloudevents".to_owned(),
        IdRule::JsonPointers(pointers) => {
            format!("json:{}", pointers.iter().collect::<Vec<_>>().join(","))
        }
        IdRule::Position => "position".to_owned(),
        IdRule::PayloadHash => "payload-hash".to_owned(),
        other => other.to_string(),
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
    fn new(args: &SourceArgs, consumer: &str, lease: Duration) -> Result<Self, CliError> {
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
            stream: stream.clone(),
            durable: consumer.to_owned(),
            subjects: args.subjects.clone(),
            order_key,
            ack_wait: lease,
        })
    }

    async fn open(self, url: &str) -> Result<NatsSource, CliError> {
        let context = hapax_nats::jetstream(url).await;
        let context = context.map_err(|error| {
            CliError::unavailable(format!(
                "--from: expected a NATS server, found an error: {error}"
            ))
        })?;
        let source = NatsSource::builder(context, self.stream, self.durable)
            .filter_subjects(self.subjects)
            .ack_wait(self.ack_wait)
            .order_key(self.order_key);
        source.start().await.map_err(|error| CliError::unavailable(format!("--from: {error}")))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_digest_of_a_broker_has_its_addresses_and_no_password() {
        let digest = broker_digest("kafka://one:9092,two:9092/orders");
        for same in ["kafka://two:9092,ONE:9092/mails", "kafka://u:hidden@one:9092,two:9092"] {
            assert_eq!(broker_digest(same), digest, "{same}");
        }
        for other in ["kafka://one:9092/orders", "kafka://one:9093,two:9092/orders"] {
            assert_ne!(broker_digest(other), digest, "{other}");
        }
        assert_eq!(digest.len(), 16);
    }
}
