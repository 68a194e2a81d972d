//! Kafka as the source of `hapax consume`.

use std::time::Duration;

use hapax_kafka::{KafkaSource, KafkaSourceBuilder, KafkaStartAt};

use super::super::args::{LimitArgs, SourceArgs, StartAtArg};
use crate::exit::CliError;
use crate::messages::{SERVERS, not_started};

/// Sessions that brokers accept by default (`group.min.session.timeout.ms` and `…max…`).
const SESSION: std::ops::RangeInclusive<Duration> =
    Duration::from_secs(6)..=Duration::from_secs(30 * 60);

/// A member of a consumer group.
#[derive(Debug)]
pub(in crate::consume) struct KafkaPlan(KafkaSourceBuilder);

impl KafkaPlan {
    /// Checks the settings. The consumer's name is that of the group, and its lease the time of a
    /// session.
    pub(super) fn new(
        url: &str,
        args: &SourceArgs,
        consumer: &str,
        limits: &LimitArgs,
    ) -> Result<Self, CliError> {
        let lease = limits.lease;
        let place = url.split_once("://").map_or("", |(_, place)| place);
        let (hosts, topics) = place.split_once('/').unwrap_or((place, ""));
        let found = match (hosts, topics) {
            _ if place.contains('@') => Some("a user: remove it"),
            _ if place.contains(['?', '#']) => Some("a query or fragment: remove it"),
            ("", _) => Some("no host: add one"),
            (_, "") => Some("no topic: add /TOPIC"),
            _ => None,
        };
        if let Some(found) = found {
            return Err(CliError::usage(format!(
                "--from: expected kafka://HOST[:PORT],…/TOPIC,… without a user; found {found}"
            )));
        }
        if !SESSION.contains(&lease) {
            return Err(CliError::usage(format!(
                "--lease: expected {:?} to {:?} for Kafka, where it is the session timeout, found \
                 {lease:?}",
                SESSION.start(),
                SESSION.end()
            )));
        }
        let poll = Duration::from_secs(300).max(lease);
        let properties = args.properties.with([
            (SERVERS, hosts.to_owned(), "--from"),
            ("group.id", consumer.to_owned(), "--consumer"),
            ("session.timeout.ms", lease.as_millis().to_string(), "--lease"),
            ("heartbeat.interval.ms", (lease / 10).as_millis().to_string(), "--lease"),
            ("max.poll.interval.ms", poll.as_millis().to_string(), "--lease"),
        ])?;
        // A paused partition is resumed below seven eighths of its limits. With twice those of the consumer that is the
        // case while the consumer can receive, although it holds messages of the partition for their next attempts.
        let start_at = match args.start_at {
            None | Some(StartAtArg::Earliest) => KafkaStartAt::Earliest,
            Some(StartAtArg::Latest) => KafkaStartAt::Latest,
            Some(StartAtArg::Time(at)) => KafkaStartAt::Time(at),
        };
        let builder = KafkaSource::builder(properties, topics.split(','), consumer)
            .start_at(start_at)
            .retention(limits.retention)
            .max_unacknowledged(limits.max_unacknowledged.get().saturating_mul(2))
            .max_unacknowledged_bytes(limits.max_unacknowledged_bytes.get().saturating_mul(2));
        match args.order_by.as_deref() {
            None => Ok(Self(builder)),
            Some("key") => Ok(Self(builder.order_by_key())),
            Some(_) => {
                Err(CliError::usage("--order-by: expected key for Kafka, found another order key"))
            }
        }
    }

    /// Joins the group.
    pub(super) async fn open(self) -> Result<KafkaSource, CliError> {
        let started = self.0.start().await;
        started.map_err(not_started("--from"))
    }
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::super::SourcePlan;
    use super::*;
    use crate::messages::{BrokerArgs, PropertyArgs};

    /// The default limits.
    #[derive(Parser)]
    struct Limits {
        #[command(flatten)]
        limits: LimitArgs,
    }

    fn plan(
        url: &str,
        order_by: Option<&str>,
        stream: Option<&str>,
    ) -> Result<SourcePlan, CliError> {
        let args = SourceArgs {
            from: None,
            from_file: None,
            stream: stream.map(str::to_owned),
            subjects: Vec::new(),
            order_by: order_by.map(str::to_owned),
            queue: None,
            delivery_limit: None,
            consumer_timeout: None,
            broker: BrokerArgs::default(),
            start_at: None,
            properties: PropertyArgs { file: None },
        };
        let Limits { limits } = Limits::parse_from(["hapax"]);
        SourcePlan::new(url, &args, "invoices", &limits)
    }

    #[test]
    fn a_url_has_hosts_and_topics_and_flags_are_those_of_kafka() {
        assert!(plan("kafka://one:9092,two:9092/orders,payments", Some("key"), None).is_ok());
        for url in ["kafka://", "kafka://one", "kafka://one/", "kafka:///orders", "kafka://u@one/x"]
        {
            assert!(plan(url, None, None).is_err(), "{url}");
        }
        assert!(plan("kafka://one/orders", Some("subject"), None).is_err());
        assert!(plan("kafka://one/orders", None, Some("ORDERS")).is_err());
    }
}
