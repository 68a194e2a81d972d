//! Properties of the Kafka clients, and the errors of starting them.

use std::collections::BTreeMap;
use std::time::Duration;

use rdkafka::ClientConfig;
use rdkafka::config::RDKafkaLogLevel;
use rdkafka::error::KafkaError;

/// Errors of starting a source or a sink.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum KafkaStartError {
    /// A property has a value that is not accepted.
    #[error(
        "the property {name}: expected {expected}, found {found:?}: {reason}; set an expected value, or remove it"
    )]
    Property {
        /// Name of the property.
        name: &'static str,
        /// Values that are possible.
        expected: &'static str,
        /// The value that was set.
        found: String,
        /// Consequence of the other value.
        reason: &'static str,
    },
    /// There is no topic, or a name is invalid.
    #[error(
        "expected topics with names of 1 to 249 letters, digits, dots, underscores and hyphens, found \
         {found}: name the topics"
    )]
    TopicName {
        /// The value that was found.
        found: String,
    },
    /// The group has no name.
    #[error("expected the name of a group, found an empty one: name the group")]
    Group,
    /// A limit or time is outside of its range.
    #[error("{name}: expected {expected}, found {found}: set another value")]
    Limit {
        /// Name of the setting.
        name: &'static str,
        /// Values that are possible.
        expected: String,
        /// The value that was set.
        found: String,
    },
    /// A topic does not exist, or cannot be read.
    #[error("expected the topic {topic}, found an error: {error}: create it, and check its access")]
    Topic {
        /// Name of the topic.
        topic: String,
        /// The error of the broker.
        error: String,
    },
    /// The client does not know a property, or rejects its value.
    #[error(
        "the property {name}: expected one of librdkafka with a valid value, found an error: {error}: correct or \
         remove it"
    )]
    UnknownProperty {
        /// Name of the property.
        name: String,
        /// The error of the client.
        error: String,
    },
    /// A property has two names, and both are set to other values.
    #[error(
        "the property {name}: expected one of its two names, or one value, found two: the client would use either; remove \
         {other}"
    )]
    TwoNames {
        /// The name.
        name: &'static str,
        /// The other name.
        other: String,
    },
    /// The client rejects its properties together.
    #[error(
        "expected properties with which a client can be created, found an error: {error}: correct them"
    )]
    Properties {
        /// The error of the client.
        error: String,
    },
    /// No broker answers, or a file that a property names cannot be read.
    #[error(
        "expected a Kafka cluster, found an error: {0}: check the brokers and the properties; the log of \
         librdkafka has the cause"
    )]
    Client(#[source] KafkaError),
    /// The thread that polls was not started.
    #[error("expected a thread that polls, found an error: {0}: check the limits of the process")]
    Thread(#[source] std::io::Error),
}

impl From<KafkaError> for KafkaStartError {
    fn from(error: KafkaError) -> Self {
        match error {
            KafkaError::ClientConfig(_, error, name, _) => Self::UnknownProperty { name, error },
            KafkaError::ClientCreation(error) if !may_pass(&error) => Self::Properties { error },
            error => Self::Client(error),
        }
    }
}

/// Returns whether another start may create the client: it may find the file of a certificate, or have a thread. The
/// text of librdkafka has no cause in all cases.
fn may_pass(error: &str) -> bool {
    ["No such file or directory", ".location", "Failed to create thread"]
        .iter()
        .any(|text| error.contains(text))
}

/// Properties that a caller has set.
#[derive(Clone, Debug, Default)]
pub(crate) struct Properties {
    /// By the names that this crate uses.
    values: BTreeMap<String, String>,
    /// A property that was set by both of its names, to other values.
    repeated: Option<(&'static str, String)>,
}

/// Other names of properties, and those that this crate uses. The client takes the value that is set last, and its
/// configuration has no order.
const OTHER_NAMES: [(&str, &str); 11] = [
    ("compression.codec", "compression.type"),
    ("delivery.timeout.ms", "message.timeout.ms"),
    ("fetch.message.max.bytes", "max.partition.fetch.bytes"),
    ("max.in.flight.requests.per.connection", "max.in.flight"),
    ("message.send.max.retries", "retries"),
    ("metadata.broker.list", "bootstrap.servers"),
    ("queue.buffering.max.ms", "linger.ms"),
    ("request.required.acks", "acks"),
    ("sasl.mechanisms", "sasl.mechanism"),
    ("sasl.oauthbearer.client.credentials.client.id", "sasl.oauthbearer.client.id"),
    ("sasl.oauthbearer.client.credentials.client.secret", "sasl.oauthbearer.client.secret"),
];

/// A property whose value the crate decides.
struct Fixed {
    name: &'static str,
    value: &'static str,
    reason: &'static str,
}

const CONSUMER: [Fixed; 5] = [
    Fixed {
        name: "enable.auto.commit",
        value: "false",
        reason: "the client would commit records that are not handled",
    },
    Fixed {
        name: "enable.auto.offset.store",
        value: "false",
        reason: "the client would commit records that are not handled",
    },
    Fixed {
        name: "auto.offset.reset",
        value: "error",
        reason: "a group would skip or repeat records; set start_at for a new group",
    },
    Fixed {
        name: "isolation.level",
        value: "read_committed",
        reason: "records of aborted transactions would be handled",
    },
    Fixed {
        name: "group.protocol",
        value: "classic",
        reason: "the other protocol has no eager assignment",
    },
];

const PRODUCER: [Fixed; 3] = [
    Fixed {
        name: "enable.idempotence",
        value: "true",
        reason: "a retry of the client would repeat and reorder messages",
    },
    Fixed {
        name: "acks",
        value: "all",
        reason: "a message that is confirmed would be lost with its broker",
    },
    Fixed {
        name: "allow.auto.create.topics",
        value: "false",
        reason: "a mistyped destination would create a topic, and its messages would be lost there",
    },
];

impl Properties {
    pub(crate) fn new<K: Into<String>, V: Into<String>>(
        properties: impl IntoIterator<Item = (K, V)>,
    ) -> Self {
        let mut this = Self::default();
        for (name, value) in properties {
            let (name, value) = (name.into(), value.into());
            let other = OTHER_NAMES.iter().find(|(other, own)| name == *other || name == *own);
            let own = other.map_or_else(|| name.clone(), |(_, own)| (*own).to_owned());
            let before = this.values.insert(own.clone(), value);
            if before.is_some_and(|before| this.values.get(&own) != Some(&before))
                && let Some((other, own)) = other
            {
                this.repeated = Some((*own, (*other).to_owned()));
            }
        }
        this
    }

    /// Returns the configuration of a consumer of `group`.
    pub(crate) fn consumer(&self, group: &str) -> Result<ClientConfig, KafkaStartError> {
        if group.is_empty() {
            return Err(KafkaStartError::Group);
        }
        if let Some(found) = self.values.get("group.id").filter(|found| *found != group) {
            return Err(KafkaStartError::Property {
                name: "group.id",
                expected: "the group of the source",
                found: found.clone(),
                reason: "the source has another group",
            });
        }
        let strategy =
            self.values.get("partition.assignment.strategy").map_or("range", String::as_str);
        if !strategy.split(',').all(|it| matches!(it.trim(), "range" | "roundrobin")) {
            return Err(KafkaStartError::Property {
                name: "partition.assignment.strategy",
                expected: "range or roundrobin",
                found: strategy.to_owned(),
                reason: "a commit during a cooperative rebalance may lose the assignment",
            });
        }
        let mut config = self.with(&CONSUMER)?;
        config.set("group.id", group).set("partition.assignment.strategy", strategy);
        // The polling thread waits for answers to commits, for this time if there are none.
        self.unless_set(&mut config, "socket.timeout.ms", "10000");
        // Limits of the client's queue of each partition, beside the records that the source has.
        self.unless_set(&mut config, "queued.min.messages", "10000");
        self.unless_set(&mut config, "queued.max.messages.kbytes", "1024");
        // Time after which the client fetches again once a queue was full. The default of a second is longer than a
        // consumer needs for the records that it has.
        self.unless_set(&mut config, "fetch.queue.backoff.ms", "10");
        // Time within which a partition or a topic is found that was added.
        self.unless_set(&mut config, "topic.metadata.refresh.interval.ms", "30000");
        // The source reads from the log whether a topic may be another one.
        let debug =
            self.values.get("debug").map_or("topic".to_owned(), |own| format!("{own},topic"));
        config.set("debug", debug).set_log_level(RDKafkaLogLevel::Debug);
        Ok(config)
    }

    /// Returns the configuration of a producer.
    pub(crate) fn producer(&self) -> Result<ClientConfig, KafkaStartError> {
        let mut config = self.with(&PRODUCER)?;
        // The partition of a key is that of clients in Java.
        self.unless_set(&mut config, "partitioner", "murmur2_random");
        // Shorter than a relay waits for a confirmation.
        self.unless_set(&mut config, "message.timeout.ms", "9000");
        Ok(config)
    }

    /// Returns the longest time of a drain, within which the process has to poll again.
    pub(crate) fn longest_drain(&self) -> Result<Duration, KafkaStartError> {
        let interval = self.milliseconds("max.poll.interval.ms", 300_000)?;
        // The last commit may wait for a coordinator.
        let session = self.milliseconds("session.timeout.ms", 45_000)?;
        Ok((interval / 2).min(interval.saturating_sub(session)))
    }

    fn milliseconds(&self, name: &'static str, default: u64) -> Result<Duration, KafkaStartError> {
        let Some(text) = self.values.get(name) else { return Ok(Duration::from_millis(default)) };
        text.parse().map(Duration::from_millis).map_err(|_| KafkaStartError::Property {
            name,
            expected: "a number of milliseconds",
            found: text.clone(),
            reason: "a time is needed",
        })
    }

    fn with(&self, fixed: &[Fixed]) -> Result<ClientConfig, KafkaStartError> {
        if let Some((name, other)) = self.repeated.clone() {
            return Err(KafkaStartError::TwoNames { name, other });
        }
        for Fixed { name, value, reason } in fixed {
            if let Some(found) = self.values.get(*name).filter(|found| !is_same(found, value)) {
                return Err(KafkaStartError::Property {
                    name,
                    expected: value,
                    found: found.clone(),
                    reason,
                });
            }
        }
        let mut config = ClientConfig::new();
        for (name, value) in &self.values {
            config.set(name, value);
        }
        for Fixed { name, value, .. } in fixed {
            config.set(*name, *value);
        }
        Ok(config)
    }

    fn unless_set(&self, config: &mut ClientConfig, name: &str, value: &str) {
        if !self.values.contains_key(name) {
            config.set(name, value);
        }
    }
}

/// Returns whether two values of a property mean the same.
fn is_same(found: &str, value: &str) -> bool {
    let found = found.trim().to_ascii_lowercase();
    found == value
        || match value {
            "false" => found == "0" || found == "f",
            "true" => found == "1" || found == "t",
            "all" => found == "-1",
            _ => false,
        }
}

/// Returns whether a topic may have this name.
pub(crate) fn is_topic(name: &str) -> bool {
    let is_valid = |byte: u8| byte.is_ascii_alphanumeric() || b"._-".contains(&byte);
    (1..=249).contains(&name.len()) && name.bytes().all(is_valid) && name != "." && name != ".."
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn properties_that_would_lose_or_repeat_messages_are_rejected() {
        for (name, value) in [
            ("enable.auto.commit", "true"),
            ("enable.auto.offset.store", "true"),
            ("auto.offset.reset", "earliest"),
            ("partition.assignment.strategy", "cooperative-sticky"),
            ("partition.assignment.strategy", "range,cooperative-sticky"),
            ("group.protocol", "consumer"),
            ("isolation.level", "read_uncommitted"),
            ("group.id", "other"),
        ] {
            let error = Properties::new([(name, value)]).consumer("invoices").unwrap_err();
            assert!(error.to_string().contains(name), "{error}");
        }
        for (name, value) in
            [("enable.idempotence", "false"), ("acks", "1"), ("allow.auto.create.topics", "true")]
        {
            let error = Properties::new([(name, value)]).producer().unwrap_err();
            assert!(error.to_string().contains(name), "{error}");
        }
        // By the other name of a property, too, which alone is accepted.
        for (properties, is_rejected) in [
            (&[("request.required.acks", "1")][..], true),
            (&[("message.timeout.ms", "1"), ("delivery.timeout.ms", "2")], true),
            (&[("message.timeout.ms", "1"), ("delivery.timeout.ms", "1")], false),
            (&[("delivery.timeout.ms", "1")], false),
        ] {
            let config = Properties::new(properties.iter().copied()).producer();
            assert_eq!(config.is_err(), is_rejected, "{properties:?}: {config:?}");
            if let Ok(config) = config {
                assert_eq!(config.get("message.timeout.ms"), Some("1"));
            }
        }
        let same =
            [("enable.auto.commit", "false"), ("partition.assignment.strategy", "roundrobin")];
        let config = Properties::new(same).consumer("invoices").unwrap();
        assert_eq!(config.get("partition.assignment.strategy"), Some("roundrobin"));
        assert_eq!(config.get("auto.offset.reset"), Some("error"));
        let refresh: u64 =
            config.get("topic.metadata.refresh.interval.ms").unwrap().parse().unwrap();
        assert!(refresh < 60_000, "new partitions are found within a minute");
        assert!(Properties::default().consumer("").is_err());
    }

    #[test]
    fn names_of_topics_are_checked() {
        assert!(is_topic("orders.created_v1-2"));
        for name in ["", ".", "..", "a b", "ä", "^orders.*", &"x".repeat(250)] {
            assert!(!is_topic(name), "{name}");
        }
    }
}
