//! Metrics and health of `hapax consume`.

use std::time::Duration;

use hapax_messages::{ConsumerMonitor, ConsumerStats, FullLimit};

use super::service::Service;
use super::source::OpenSource;
use crate::admin::{Metric, Observed};

/// Time after which a failure of the service, or of the broker, is of interest: until then its next
/// attempt may succeed.
const LATE: Duration = Duration::from_secs(60);

/// The limits that can be full of messages that fail, with their labels.
const LIMITS: [(FullLimit, &str); 3] = [
    (FullLimit::Unacknowledged, r#"{limit="max_unacknowledged"}"#),
    (FullLimit::Bytes, r#"{limit="max_unacknowledged_bytes"}"#),
    (FullLimit::Source, r#"{limit="source"}"#),
];

const LIMIT_FULL: &str = "1 while a limit is full of messages that were tried before, so that nothing else which counts for it is received. The log names that of the broker or its source.";

/// A consumer, its source and its service.
#[derive(Clone, Debug)]
pub(super) struct ConsumeMonitor {
    pub(super) consumer: ConsumerMonitor,
    pub(super) service: Service,
    pub(super) source: OpenSource,
}

impl Observed for ConsumeMonitor {
    fn metrics(&self) -> Vec<Metric> {
        let stats = self.consumer.stats();
        let failing = self.service.failing_for().unwrap_or_default();
        let of_nats = self.source.nats_stats();
        let counters = [
            (
                "consume_received_total",
                "Messages that were received. One that was returned to the broker counts each time.",
                stats.received,
            ),
            ("consume_handled_total", "Messages that the service accepted.", stats.handled),
            (
                "consume_duplicates_total",
                "Messages that were handled before, and were only acknowledged.",
                stats.duplicates,
            ),
            ("consume_parked_total", "Messages that became dead letters.", stats.parked),
            (
                "consume_held_in_flight_total",
                "Times that a message was held because a duplicate was in flight.",
                stats.held_in_flight,
            ),
            (
                "consume_held_for_retry_total",
                "Times that the service did not accept a message, which is posted again.",
                stats.held_for_retry,
            ),
            (
                "consume_held_by_store_total",
                "Times that a message was held because the store or the dead letters were unavailable.",
                stats.held_by_store,
            ),
            (
                "consume_delayed_total",
                "Times that a message which waits for its next attempt was returned to the broker, or to the Kafka source.",
                stats.delayed,
            ),
            (
                "consume_suspects_total",
                "Messages in progress in a process that died, each of which is handled alone.",
                stats.suspects,
            ),
            (
                "consume_source_failures_total",
                "Times that the broker returned an error.",
                stats.source_failures,
            ),
            (
                "consume_connection_ends_total",
                "Times that the connection to a NATS server ended.",
                of_nats.connection_ends,
            ),
            (
                "consume_unreadable_total",
                "Messages of NATS that its client cannot read, and that become dead letters.",
                of_nats.unreadable,
            ),
        ];
        let gauges = [
            (
                "consume_unacknowledged",
                "Messages that the consumer has received and not acknowledged. A Kafka source may have read more.",
                stats.unacknowledged as f64,
            ),
            (
                "consume_unacknowledged_bytes",
                "Bytes of these messages.",
                stats.unacknowledged_bytes as f64,
            ),
            (
                "consume_waiting",
                "Unacknowledged messages of this process that wait for their next attempts.",
                stats.waiting as f64,
            ),
            (
                "consume_stopped_partitions",
                "Partitions of Kafka that are assigned and not received, for a reason that the log has.",
                self.source.stopped_partitions() as f64,
            ),
            (
                "consume_store_down",
                "1 while the store is unavailable, and nothing is received.",
                f64::from(u8::from(stats.store_is_down)),
            ),
            (
                "consume_service_failing_seconds",
                "Time since the first failed attempt after the last accepted message; 0 without one.",
                failing.as_secs_f64(),
            ),
        ];
        let counters = counters
            .into_iter()
            .map(|(name, help, value)| Metric::counter(name, help, value as f64));
        let gauges = gauges.into_iter().map(|(name, help, value)| Metric::gauge(name, help, value));
        let limits = LIMITS.map(|(limit, labels)| {
            let is_full = f64::from(u8::from(stats.full_limit == Some(limit)));
            Metric::gauge("consume_limit_full", LIMIT_FULL, is_full).labelled(labels)
        });
        counters.chain(gauges).chain(limits).collect()
    }

    fn unready(&self) -> Option<String> {
        let (failing, deployment_error) =
            (self.service.failing_for(), self.service.deployment_error());
        if self.source.nats_stats().ends_often {
            return Some(
                "the connection to the broker ends again and again; the log has the cause
"
                .to_owned(),
            );
        }
        let of_source = (self.source.stopped_partitions(), &*self.source.missing_topics());
        unready(&self.consumer.stats(), failing, deployment_error.as_deref(), of_source)
    }
}

/// Returns the reason for which a consumer is not ready.
fn unready(
    stats: &ConsumerStats,
    failing_for: Option<Duration>,
    deployment_error: Option<&str>,
    (stopped_partitions, missing_topics): (usize, &[String]),
) -> Option<String> {
    if stats.store_is_down {
        return Some("the store is unavailable\n".to_owned());
    }
    if stopped_partitions > 0 {
        return Some(format!("stopped partitions: {stopped_partitions}; the log has the cause\n"));
    }
    if !missing_topics.is_empty() {
        return Some(format!("topics that do not exist: {}\n", missing_topics.join(", ")));
    }
    // Each further error comes within this time.
    if let Some(age) = stats.source_failure_age.filter(|age| *age < LATE) {
        return Some(format!("the broker returned an error {} s ago\n", age.as_secs()));
    }
    if let Some(deployment_error) = deployment_error {
        return Some(format!("{deployment_error}\n"));
    }
    if stats.without_id > 0 {
        return Some(format!(
            "messages without an id by --id: {}, and none with one yet\n",
            stats.without_id
        ));
    }
    // For a moment it is full in ordinary operation, too.
    if let (Some(limit), Some(age)) = (stats.full_limit, stats.full_limit_age)
        && age >= LATE
    {
        let limit = match limit {
            FullLimit::Unacknowledged => "--max-unacknowledged",
            FullLimit::Bytes => "--max-unacknowledged-bytes",
            _ => "a limit of the broker or its source, which the log names,",
        };
        let seconds = age.as_secs();
        return Some(format!(
            "{limit} is full of messages that were tried before for {seconds} s\n"
        ));
    }
    let failing = failing_for.filter(|time| *time >= LATE)?;
    Some(format!("the service has accepted no message for {} s\n", failing.as_secs()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_consumer_without_store_broker_or_service_is_not_ready() {
        let of = |stats: &ConsumerStats, failing| {
            unready(stats, failing, None, (0, &[])).unwrap_or_default()
        };
        let mut stats = ConsumerStats::default();
        assert_eq!(of(&stats, None), "");
        assert_eq!(of(&stats, Some(LATE / 2)), "");
        assert_eq!(of(&stats, Some(LATE)), "the service has accepted no message for 60 s\n");
        stats.source_failure_age = Some(LATE);
        assert_eq!(of(&stats, None), "");
        stats.source_failure_age = Some(LATE / 2);
        assert_eq!(of(&stats, None), "the broker returned an error 30 s ago\n");
        let stopped = "stopped partitions: 2; the log has the cause\n";
        assert_eq!(unready(&stats, None, None, (2, &[])).unwrap(), stopped);
        let missing = unready(&stats, None, None, (0, &["a".to_owned(), "b".to_owned()]));
        assert_eq!(missing.unwrap(), "topics that do not exist: a, b\n");
        stats.source_failure_age = None;
        stats.without_id = 3;
        assert_eq!(of(&stats, None), "messages without an id by --id: 3, and none with one yet\n");
        assert_eq!(unready(&stats, None, Some("404"), (0, &[])).unwrap(), "404\n");
        stats.without_id = 0;
        stats.full_limit = Some(FullLimit::Unacknowledged);
        for age in [None, Some(LATE / 2)] {
            stats.full_limit_age = age;
            assert_eq!(of(&stats, None), "", "a later attempt of one message may be in progress");
        }
        stats.full_limit_age = Some(LATE);
        let full = "--max-unacknowledged is full of messages that were tried before for 60 s\n";
        assert_eq!(of(&stats, None), full);
        stats.store_is_down = true;
        assert_eq!(of(&stats, None), "the store is unavailable\n");
    }
}
