//! The source: a member of a consumer group.

mod context;
mod delays;
mod delivery;
mod events;
mod identity;
mod log;
mod metadata;
mod partition;
mod poll;
mod record;
mod requests;
mod state;
mod window;

use std::collections::BTreeMap;
use std::fmt;
use std::num::NonZeroUsize;
use std::sync::Arc;
use std::thread;
use std::time::Duration;

use hapax_core::Timestamp;
use hapax_core::store::BoxFuture;
use hapax_messages::{Delivery, MessageSource, PositionStore, SourceError, SourceLimits};
use rdkafka::ClientConfig;
use rdkafka::consumer::{BaseConsumer, Consumer as _};
use rdkafka::error::{KafkaError, RDKafkaErrorCode};
use rdkafka::metadata::Metadata;
use tokio::runtime::Handle;

use self::context::Context;
use self::delivery::KafkaDelivery;
use self::partition::PartitionLimits;
use self::poll::Poller;
use self::state::{Delivered, PollSettings, Shared};
use crate::config::{KafkaStartError, Properties, is_topic};

/// Pause before a second request for a topic that a broker does not know.
const ASK_AGAIN: Duration = Duration::from_secs(1);

/// Offset at which a partition begins that has no committed offset.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
#[non_exhaustive]
pub enum KafkaStartAt {
    /// The first record.
    #[default]
    Earliest,
    /// The end of the log at the time of the assignment. Earlier records are not received. A partition that is added
    /// while the process runs begins at its first record; one that was added before its process started begins at its
    /// end, also while others of the group ran. Once the group has committed offsets of all partitions, start with
    /// [`Earliest`](Self::Earliest), which begins with each record of those that are added.
    Latest,
    /// The first record whose timestamp is at or after this time; the end of the log if there is none.
    Time(Timestamp),
}

/// A partition that is not received, and why.
#[derive(Clone, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub struct StoppedPartition {
    /// Name of the topic.
    pub topic: String,
    /// Number of the partition.
    pub partition: i32,
    /// The error: what was expected and found, offsets or timestamps, and the remedy.
    pub cause: String,
}

/// Builder of a [`KafkaSource`].
#[derive(Clone, Debug)]
#[must_use]
pub struct KafkaSourceBuilder {
    properties: Properties,
    topics: Vec<String>,
    group: String,
    limits: PartitionLimits,
    start_at: KafkaStartAt,
    retention: Option<Duration>,
    is_ordered: bool,
    commit_every: Duration,
    drain_for: Option<Duration>,
    idle_check_after: Duration,
    request_timeout: Duration,
    positions: Option<Arc<dyn PositionStore>>,
}

impl KafkaSourceBuilder {
    /// Sets the store that has the positions of partitions: that of the inbox of a
    /// [`BatchConsumer`](hapax_messages::BatchConsumer), which advances them. The offsets of the group are
    /// committed too, so that its lag is visible, and for partitions that the store does not have yet.
    pub fn positions(mut self, store: Arc<dyn PositionStore>) -> Self {
        self.positions = Some(store);
        self
    }

    /// Sets the offset at which a partition begins that has no committed offset. Default
    /// [`KafkaStartAt::Earliest`]. A committed offset is never changed by this.
    pub const fn start_at(mut self, start_at: KafkaStartAt) -> Self {
        self.start_at = start_at;
        self
    }

    /// Sets the retention of the ids of the inbox. If the first record of a partition without a committed offset is older,
    /// it and further ones would become dead letters. Instead, nothing of the partition is delivered or committed, and the
    /// source of a new group ends: each call of [`receive`](MessageSource::receive) returns the error, and so does
    /// [`KafkaSource::until_records_are_too_old`]. In a group that has handled records, the partition is
    /// [stopped](KafkaSource::stopped_partitions), and others go on. Later records are not compared. Default: none, so that
    /// records of any age are received.
    pub const fn retention(mut self, time: Duration) -> Self {
        self.retention = Some(time);
        self
    }

    /// States that the keys of records are order keys, for an ordered inbox. Each message has its
    /// record's key in any case.
    pub const fn order_by_key(mut self) -> Self {
        self.is_ordered = true;
        self
    }

    /// Sets the number of unacknowledged records at which a partition pauses: further ones stay in the client until
    /// less than seven eighths of each limit are left. Those that [wait](Self::max_waiting) do not count. After a crash,
    /// at most as many records as this and [`max_uncommitted`](Self::max_uncommitted) together are suspects.
    /// Default 10,000; at least 1.
    pub const fn max_unacknowledged(mut self, records: usize) -> Self {
        self.limits.records = records;
        self
    }

    /// Sets the bytes of unacknowledged records at which a partition pauses. Default 64 MiB; at least 1. Those that
    /// [wait](Self::max_waiting) have as many: a process needs up to twice as much memory for each of its partitions,
    /// beside that of the [client](crate#properties).
    pub const fn max_unacknowledged_bytes(mut self, bytes: usize) -> Self {
        self.limits.bytes = bytes;
        self
    }

    /// Sets the number of records that wait at which a partition pauses: those that the consumer has delayed until
    /// their next attempts, and with [`order_by_key`](Self::order_by_key) later ones of their keys. The partition's other
    /// records are delivered meanwhile. Default 10,000; at least 1.
    pub const fn max_waiting(mut self, records: usize) -> Self {
        self.limits.waiting = records;
        self
    }

    /// Sets the number of records from the first unacknowledged one on, acknowledged or not, at which a
    /// partition pauses. They are received again after a crash; those that were acknowledged are duplicates
    /// then. Default 100,000; at least 1.
    pub const fn max_uncommitted(mut self, records: usize) -> Self {
        self.limits.uncommitted = records;
        self
    }

    /// Sets the time between two commits of acknowledged records. One may be sent up to 100 ms later. Further commits
    /// are sent before records are delivered, so that the group's next member knows of them. Default 1 s; 1 ms to
    /// 1 min.
    pub const fn commit_every(mut self, time: Duration) -> Self {
        self.commit_every = time;
        self
    }

    /// Sets the time that deliveries in progress have to end before their partitions are assigned to another
    /// process. The group waits meanwhile. Default 30 s, or the limit if it is shorter. Limit: the smaller of
    /// `max.poll.interval.ms / 2` and `max.poll.interval.ms - session.timeout.ms`, since the last commit may take
    /// the time of a session.
    pub const fn drain_for(mut self, time: Duration) -> Self {
        self.drain_for = Some(time);
        self
    }

    /// Sets the time without records after which the source checks that a broker answers; also the interval at
    /// which it checks whether it owns the positions of partitions without unacknowledged records. Default 10 s;
    /// 100 ms to 24 h.
    pub const fn idle_check_after(mut self, time: Duration) -> Self {
        self.idle_check_after = time;
        self
    }

    /// Sets the timeout of requests for offsets and of the check of brokers. Default 5 s; 100 ms
    /// to 1 min.
    pub const fn request_timeout(mut self, time: Duration) -> Self {
        self.request_timeout = time;
        self
    }

    /// Connects to the cluster, looks for the topics, and joins the group. A topic that does not exist yet is received once
    /// it does ([`KafkaSource::missing_topics`]).
    ///
    /// # Errors
    /// [`KafkaStartError`].
    pub async fn start(self) -> Result<KafkaSource, KafkaStartError> {
        let config = self.properties.consumer(&self.group)?;
        let settings = self.settings()?;
        let (topics, group) = (self.topics, self.group);
        let mut limits = SourceLimits::default();
        if self.is_ordered {
            limits = limits.with_order_keys();
        }
        limits = match self.positions {
            Some(_) => limits.with_positions(),
            None => limits.delays_from(Duration::ZERO).delays_in_order(),
        };
        let runtime = Handle::current();
        // If this future is dropped, the source is too once it has joined, and leaves the group.
        let started = tokio::task::spawn_blocking(move || {
            let shared = join(&config, topics, settings, runtime.clone())?;
            Ok(KafkaSource { shared, runtime, limits, group })
        });
        // After an error the runtime ends.
        started.await.unwrap_or(Err(KafkaStartError::Client(KafkaError::Canceled)))
    }

    fn settings(&self) -> Result<PollSettings, KafkaStartError> {
        if let Some(found) = self.topics.iter().find(|topic| !is_topic(topic)) {
            return Err(KafkaStartError::TopicName { found: format!("{found:?}") });
        }
        if self.topics.is_empty() {
            return Err(KafkaStartError::TopicName { found: "none".to_owned() });
        }
        let PartitionLimits { records, bytes, uncommitted, waiting } = self.limits;
        for (name, found) in [
            ("max_unacknowledged", records),
            ("max_unacknowledged_bytes", bytes),
            ("max_uncommitted", uncommitted),
            ("max_waiting", waiting),
        ] {
            if found == 0 {
                let (expected, found) = ("at least 1".to_owned(), "0".to_owned());
                return Err(KafkaStartError::Limit { name, expected, found });
            }
        }
        let (short, long) = (Duration::from_millis(1), Duration::from_secs(60));
        let least = Duration::from_millis(100);
        let longest_drain = self.properties.longest_drain()?;
        let drain_for = self.drain_for.unwrap_or(Duration::from_secs(30).min(longest_drain));
        let longest = Duration::from_secs(24 * 60 * 60);
        for (name, found, from, to) in [
            ("commit_every", self.commit_every, short, long),
            ("drain_for", drain_for, Duration::ZERO, longest_drain),
            ("idle_check_after", self.idle_check_after, least, longest),
            ("request_timeout", self.request_timeout, least, long),
        ] {
            if found < from || found > to {
                return Err(KafkaStartError::Limit {
                    name,
                    expected: format!("{from:?} to {to:?}"),
                    found: format!("{found:?}"),
                });
            }
        }
        Ok(PollSettings {
            limits: self.limits,
            start_at: self.start_at,
            retention: self.retention,
            commit_every: self.commit_every,
            drain_for,
            idle_check_after: self.idle_check_after,
            request_timeout: self.request_timeout,
            positions: self.positions.clone(),
        })
    }
}

/// Creates the client, and starts its thread.
fn join(
    config: &ClientConfig,
    topics: Vec<String>,
    settings: PollSettings,
    runtime: Handle,
) -> Result<Arc<Shared>, KafkaStartError> {
    let shared = Arc::new(Shared::default());
    let timeout = settings.request_timeout;
    // A topic that counts as missing begins at its first record, and not at its end.
    let is_asked_again = settings.start_at == KafkaStartAt::Latest;
    let context = Context::new(Arc::clone(&shared), settings);
    let consumer: BaseConsumer<Context> = config.create_with_context(context)?;
    let found = find_topics(&consumer, &topics, timeout, is_asked_again)?;
    let names: Vec<&str> = topics.iter().map(String::as_str).collect();
    consumer.subscribe(&names)?;
    // At least one was found.
    let topic = found.keys().next().cloned().unwrap_or_default();
    let missing: Vec<_> = topics.into_iter().filter(|topic| !found.contains_key(topic)).collect();
    if !missing.is_empty() {
        tracing::warn!(
            topics = missing.join(", "),
            "expected all topics, found that some do not exist: create them, or correct their names; the others are \
             received meanwhile"
        );
    }
    {
        let mut state = shared.lock();
        (state.topics_at_start, state.missing_topics) = (found, missing);
    }
    let poller = Poller::new(consumer, topic, runtime);
    let thread = thread::Builder::new().name("hapax-kafka".to_owned());
    thread.spawn(move || poller.run()).map_err(KafkaStartError::Thread)?;
    Ok(shared)
}

/// Returns the numbers of partitions of the topics that exist. With `is_asked_again`, a topic is missing if two answers
/// state that: a broker may answer so of a topic that it does not know yet.
///
/// # Errors
/// [`KafkaStartError::Topic`] if none exists, or one must not be read.
fn find_topics(
    consumer: &BaseConsumer<Context>,
    topics: &[String],
    timeout: Duration,
    is_asked_again: bool,
) -> Result<BTreeMap<String, i32>, KafkaStartError> {
    let mut found = BTreeMap::new();
    let mut first_missing = None;
    for topic in topics {
        let find = || {
            let metadata = consumer.fetch_metadata(Some(topic), timeout);
            let metadata = metadata.inspect_err(|_| run_callbacks(consumer))?;
            Ok::<_, KafkaError>(partitions(&metadata, topic))
        };
        let mut partitions = find()?;
        if is_asked_again && matches!(partitions, Err(error) if error.is_none_or(is_missing)) {
            thread::park_timeout(ASK_AGAIN);
            partitions = find()?;
        }
        let error = match partitions {
            Ok(count) => {
                found.insert(topic.clone(), count);
                continue;
            }
            Err(error) => error,
        };
        let is_missing = error.is_none_or(is_missing);
        let text = error.map_or_else(|| "it has no partitions".to_owned(), |it| it.to_string());
        let error = KafkaStartError::Topic { topic: topic.clone(), error: text };
        if !is_missing {
            return Err(error);
        }
        first_missing.get_or_insert(error);
    }
    match (found.is_empty(), first_missing) {
        (true, Some(error)) => Err(error),
        _ => Ok(found),
    }
}

/// Returns the number of partitions of a topic, or the error of the broker, if it has answered one.
fn partitions(metadata: &Metadata, topic: &str) -> Result<i32, Option<RDKafkaErrorCode>> {
    let Some(topic) = metadata.topics().iter().find(|it| it.name() == topic) else {
        return Err(None);
    };
    match (topic.error(), topic.partitions().len()) {
        (Some(error), _) => Err(Some(error.into())),
        (None, 0) => Err(None),
        (None, count) => Ok(i32::try_from(count).unwrap_or(i32::MAX)),
    }
}

/// Returns whether an error states that a topic does not exist.
const fn is_missing(code: RDKafkaErrorCode) -> bool {
    matches!(code, RDKafkaErrorCode::UnknownTopicOrPartition | RDKafkaErrorCode::UnknownTopic)
}

/// Runs the callbacks of a client that is not polled, which log what it has reported: the cause of an error.
fn run_callbacks(consumer: &BaseConsumer<Context>) {
    // Bounded, since with the property `debug` the client may log faster than this reads.
    for _ in 0..1_000 {
        let before = consumer.context().callbacks();
        let reported = consumer.poll(Duration::ZERO);
        if reported.is_none() && consumer.context().callbacks() == before {
            return;
        }
    }
}

/// A member of a consumer group. The crate's first page states its guarantees.
///
/// Call [`KafkaSource::close`] after the consumer has ended: a source that is only dropped leaves its
/// group in the background, and the process may end before.
pub struct KafkaSource {
    shared: Arc<Shared>,
    runtime: Handle,
    limits: SourceLimits,
    group: String,
}

impl fmt::Debug for KafkaSource {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("KafkaSource").field("group", &self.group).finish_non_exhaustive()
    }
}

impl KafkaSource {
    /// Returns a builder of a source: a member of `group`, which receives `topics`. `properties` are
    /// those of librdkafka, at least `bootstrap.servers`.
    pub fn builder<K: Into<String>, V: Into<String>>(
        properties: impl IntoIterator<Item = (K, V)>,
        topics: impl IntoIterator<Item = impl Into<String>>,
        group: impl Into<String>,
    ) -> KafkaSourceBuilder {
        KafkaSourceBuilder {
            properties: Properties::new(properties),
            topics: topics.into_iter().map(Into::into).collect(),
            group: group.into(),
            limits: PartitionLimits {
                records: 10_000,
                bytes: 64 * 1024 * 1024,
                uncommitted: 100_000,
                waiting: 10_000,
            },
            start_at: KafkaStartAt::Earliest,
            retention: None,
            is_ordered: false,
            commit_every: Duration::from_secs(1),
            drain_for: None,
            idle_check_after: Duration::from_secs(10),
            request_timeout: Duration::from_secs(5),
            positions: None,
        }
    }

    /// Waits until the group has assigned partitions to this process, possibly none, and their first offsets are
    /// known; or until the source is closed.
    pub async fn wait_assigned(&self) {
        let is_assigned =
            |state: &mut state::State| (state.is_assigned || state.is_closed).then_some(());
        self.shared.wait(is_assigned).await;
    }

    /// Returns the number of partitions that are assigned to this process and received.
    #[must_use]
    pub fn partition_count(&self) -> usize {
        self.shared.lock().partitions.len()
    }

    /// Returns the partitions that are assigned to this process and not received, because their
    /// offsets are outside of their logs, their topics were created again, the checksum of a batch is wrong (`check.crcs`),
    /// or their first records are older than the [retention](KafkaSourceBuilder::retention). An operator has to set the
    /// committed offset of the group, or the position in the database; it is read when partitions are
    /// assigned the next time.
    #[must_use]
    pub fn stopped_partitions(&self) -> Vec<StoppedPartition> {
        let state = self.shared.lock();
        let stopped = state.stopped.iter().map(|((topic, partition), cause)| StoppedPartition {
            topic: topic.to_string(),
            partition: *partition,
            cause: cause.clone(),
        });
        stopped.collect()
    }

    /// Returns the topics that did not exist when they were last looked for, within about
    /// [`idle_check_after`](KafkaSourceBuilder::idle_check_after).
    #[must_use]
    pub fn missing_topics(&self) -> Vec<String> {
        self.shared.lock().missing_topics.clone()
    }

    /// Waits until the source has ended because of records that are older than the
    /// [retention](KafkaSourceBuilder::retention). Returns the error.
    pub async fn until_records_are_too_old(&self) -> String {
        self.shared.wait(|state| state.too_old.clone()).await
    }

    /// Ends deliveries, commits, and leaves the group. Deliveries in progress have the time of a
    /// drain to end; those that are left are fenced. Returns once the process has left; dropping the future
    /// does not stop that.
    pub async fn close(&self) {
        self.shared.close();
        self.shared.wait(|state| state.is_closed.then_some(())).await;
    }
}

impl Drop for KafkaSource {
    fn drop(&mut self) {
        self.shared.close();
    }
}

impl MessageSource for KafkaSource {
    fn receive(
        &self,
        max: NonZeroUsize,
    ) -> BoxFuture<'_, Result<Vec<Arc<dyn Delivery>>, SourceError>> {
        let is_ordered = self.limits.has_order_keys;
        Box::pin(async move {
            // Records are delivered by the poll in which the future ends: a dropped one loses none.
            let received = self.shared.wait(|state| {
                let delivered = state.deliver(max);
                // Also without any: records that wait behind others are passed.
                if state.take_needs_poller() {
                    self.shared.wake_poller();
                }
                if !delivered.is_empty() {
                    return Some(Ok(delivered));
                }
                state.take_error().map(|error| Err(SourceError::new(error)))
            });
            let delivery = |it: Delivered| -> Arc<dyn Delivery> {
                let (shared, runtime) = (Arc::clone(&self.shared), self.runtime.clone());
                Arc::new(KafkaDelivery::new(shared, runtime, it, is_ordered))
            };
            Ok(received.await?.into_iter().map(delivery).collect())
        })
    }

    fn limits(&self) -> SourceLimits {
        self.limits
    }

    fn full_limit(&self) -> Option<String> {
        let state = self.shared.lock();
        state.partitions.iter().find_map(|((topic, number), partition)| {
            let (name, limit) = partition.full_limit()?;
            Some(format!("{name} of the partition {number} of {topic}, {limit}"))
        })
    }
}
