//! Callbacks of the client, which run on the polling thread, and its assignments and commits.

use std::collections::BTreeSet;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread::park_timeout;
use std::time::Duration;

use rdkafka::client::ClientContext;
use rdkafka::config::RDKafkaLogLevel;
use rdkafka::consumer::{BaseConsumer, CommitMode, Consumer as _, ConsumerContext};
use rdkafka::error::{KafkaError, KafkaResult, RDKafkaErrorCode};
use rdkafka::statistics::Statistics;
use rdkafka::topic_partition_list::{Offset, TopicPartitionList, TopicPartitionListElem};
use rdkafka::types::RDKafkaRespErr;
use tokio::time::Instant;

use super::log::LogLine;
use super::metadata::CommitMetadata;
use super::partition::{Commit, Partition};
use super::state::{PartitionKey, PollSettings, Shared};

/// Pause before a commit is sent again.
pub(super) const RETRY: Duration = Duration::from_millis(100);

/// Time for which the last commit of an assignment is sent again, if the group is rebalancing.
const LAST_COMMIT: Duration = Duration::from_millis(500);

/// The context of the client.
#[derive(Debug)]
pub(super) struct Context {
    pub(super) shared: Arc<Shared>,
    pub(super) settings: PollSettings,
    rebalances: AtomicU64,
    callbacks: AtomicU64,
}

impl ClientContext for Context {
    /// Logs as the default implementation does, counts the callback, and reads lines about the identity of a topic.
    fn log(&self, level: RDKafkaLogLevel, facility: &str, message: &str) {
        self.callbacks.fetch_add(1, Ordering::Relaxed);
        match LogLine::parse(facility, message) {
            None => {}
            Some(LogLine::Unverified { topic, number }) => {
                self.shared.lock().unverify(Some(topic), number)
            }
            Some(LogLine::Recreated { topic, before, now }) => {
                let cause = format!(
                    "expected the topic with the id {before}, whose records were received, found the id {now}: the topic \
                     was created again; {}, so that its records are handled",
                    self.settings.remedy()
                );
                self.shared.lock().recreated(topic, &cause);
            }
        }
        match level {
            RDKafkaLogLevel::Emerg
            | RDKafkaLogLevel::Alert
            | RDKafkaLogLevel::Critical
            | RDKafkaLogLevel::Error => tracing::error!(target: "librdkafka", facility, message),
            RDKafkaLogLevel::Warning => tracing::warn!(target: "librdkafka", facility, message),
            RDKafkaLogLevel::Notice | RDKafkaLogLevel::Info => {
                tracing::info!(target: "librdkafka", facility, message);
            }
            RDKafkaLogLevel::Debug => tracing::debug!(target: "librdkafka", facility, message),
        }
    }

    /// Logs as the default implementation does, and counts the callback.
    fn stats(&self, statistics: Statistics) {
        self.callbacks.fetch_add(1, Ordering::Relaxed);
        tracing::info!(target: "librdkafka", ?statistics);
    }

    fn error(&self, error: KafkaError, reason: &str) {
        // The poll returns it too.
        tracing::debug!(%error, reason, "the Kafka client reports an error");
    }
}

impl ConsumerContext for Context {
    fn rebalance(
        &self,
        consumer: &BaseConsumer<Self>,
        error: RDKafkaRespErr,
        partitions: &mut TopicPartitionList,
    ) {
        self.rebalances.fetch_add(1, Ordering::Relaxed);
        self.callbacks.fetch_add(1, Ordering::Relaxed);
        match error {
            RDKafkaRespErr::RD_KAFKA_RESP_ERR__ASSIGN_PARTITIONS => {
                self.assigned(consumer, partitions);
            }
            _ => self.revoked(consumer),
        }
    }
}

impl Context {
    pub(super) fn new(shared: Arc<Shared>, settings: PollSettings) -> Self {
        Self { shared, settings, rebalances: AtomicU64::new(0), callbacks: AtomicU64::new(0) }
    }

    /// Begins an assignment. The polling thread requests the first offsets, and then fetches the partitions.
    fn assigned(&self, consumer: &BaseConsumer<Self>, partitions: &TopicPartitionList) {
        let assigned: BTreeSet<_> = partitions.elements().iter().map(key).collect();
        tracing::info!(partitions = assigned.len(), "a Kafka group has assigned partitions");
        let mut state = self.shared.lock();
        if !state.is_closing {
            state.begin_assignment(assigned);
        }
        let is_closing = state.is_closing;
        drop(state);
        self.shared.notify_waiting();
        // Answers the assignment, so that the client continues. A client that is being closed may end before it
        // has answered further requests.
        let answered = match is_closing {
            true => consumer.unassign(),
            false => assign(consumer, &TopicPartitionList::new()),
        };
        if let Err(error) = answered {
            self.shared.fail(format!("expected an assignment, found an error: {error}"));
        }
    }

    /// Returns the number of assignments and revocations so far.
    pub(super) fn rebalances(&self) -> u64 {
        self.rebalances.load(Ordering::Relaxed)
    }

    /// Returns the number of callbacks so far. Each of them ends a poll.
    pub(super) fn callbacks(&self) -> u64 {
        self.callbacks.load(Ordering::Relaxed)
    }

    /// Ends the assignment. Partitions that are lost may have another owner: their deliveries are
    /// fenced at once. Of revoked ones, deliveries in progress end first, and acknowledged records are
    /// committed: until this function returns, no other process gets them.
    fn revoked(&self, consumer: &BaseConsumer<Self>) {
        tracing::info!("a Kafka group revokes the partitions");
        self.shared.lock().is_draining = true;
        let is_drained = self.drain(consumer);
        if !is_drained {
            self.shared.lock().end_assignment();
        }
        // The client sends a commit under the generation in which it can: this one must not follow those of
        // the next owner.
        self.shared.wait_committed();
        if is_drained {
            self.commit_last(consumer);
        }
        self.shared.lock().end_assignment();
        self.shared.notify_waiting();
        // The client waits by itself until all have stopped, before it takes part in the group again.
        if let Err(error) = consumer.unassign() {
            self.shared.fail(format!("expected a revocation, found an error: {error}"));
        }
    }

    /// Waits until deliveries in progress have ended, or for the time of a drain. Returns false if the
    /// partitions are lost.
    fn drain(&self, consumer: &BaseConsumer<Self>) -> bool {
        let deadline = Instant::now() + self.settings.drain_for;
        while !consumer.assignment_lost() {
            let left = deadline.saturating_duration_since(Instant::now());
            if self.shared.wait_drained(left.min(RETRY)) || left.is_zero() {
                return !consumer.assignment_lost();
            }
        }
        false
    }

    fn commit_last(&self, consumer: &BaseConsumer<Self>) {
        let deadline = Instant::now() + LAST_COMMIT;
        loop {
            let commits: Vec<_> = {
                let state = self.shared.lock();
                let last = state
                    .partitions
                    .iter()
                    .map(|(key, it)| (key, it.assignment_number, it.last_commit()));
                last.filter_map(|(key, assignment_number, commit)| {
                    Some((key.clone(), assignment_number, commit?))
                })
                .collect()
            };
            let Err(error) = self.commit(consumer, &commits) else { return };
            if !is_temporary(&error) || Instant::now() >= deadline {
                tracing::debug!(%error, "the last commit of an assignment failed: records may be delivered again");
                return;
            }
            // An event that wakes the thread shortens the pause, at the cost of one more commit.
            park_timeout(RETRY);
        }
    }

    /// Commits, and waits until the broker has answered. The client has no other way to learn the
    /// answer: it calls nothing after a commit for which no caller waits.
    ///
    /// A request has one topic, because the client returns no error if only a part of a request
    /// failed, such as a topic that was deleted. After an error of a topic, the others are committed all the same;
    /// after another error each of them might wait for the time of a session.
    pub(super) fn commit(
        &self,
        consumer: &BaseConsumer<Self>,
        commits: &[(PartitionKey, u64, Commit)],
    ) -> KafkaResult<()> {
        let mut result = Ok(());
        for commits in commits.chunk_by(|(one, ..), (next, ..)| one.0 == next.0) {
            let mut list = TopicPartitionList::with_capacity(commits.len());
            for ((topic, number), _, commit) in commits {
                let mut element = list.add_partition(topic, *number);
                element.set_offset(Offset::Offset(commit.offset))?;
                element.set_metadata(commit.metadata.text(commit.offset));
            }
            if let Err(error) = consumer.commit(&list, CommitMode::Sync) {
                if !error.rdkafka_error_code().is_some_and(is_of_topic) {
                    return Err(error);
                }
                result = result.and(Err(error));
                continue;
            }
            let mut state = self.shared.lock();
            for (key, assignment_number, commit) in commits {
                if let Some(partition) = state.owned(key, *assignment_number) {
                    partition.note_committed(*commit);
                }
            }
        }
        self.shared.notify_waiting();
        result
    }
}

/// Replaces the assignment, and waits until the client has stopped what it fetched before. The client
/// ends the process by a failed assertion if its assignment changes again earlier (librdkafka issue 5573).
///
/// Its main thread executes calls in the order of one queue: it answers the first call of `assignment` after it has
/// sent the stops of all partitions, and the second one after each has stopped. A client that is being closed would not
/// answer.
pub(super) fn assign(
    consumer: &BaseConsumer<Context>,
    list: &TopicPartitionList,
) -> KafkaResult<()> {
    consumer.assign(list)?;
    consumer.assignment()?;
    consumer.assignment()?;
    Ok(())
}

/// Returns whether an error concerns a topic, and not the group.
pub(super) fn is_of_topic(code: RDKafkaErrorCode) -> bool {
    matches!(
        code,
        RDKafkaErrorCode::TopicAuthorizationFailed
            | RDKafkaErrorCode::UnknownTopicOrPartition
            | RDKafkaErrorCode::UnknownTopic
            | RDKafkaErrorCode::UnknownPartition
            | RDKafkaErrorCode::InvalidTopic
            | RDKafkaErrorCode::OffsetMetadataTooLarge
    )
}

/// Returns whether the same member may send a commit again.
fn is_temporary(error: &KafkaError) -> bool {
    matches!(
        error.rdkafka_error_code(),
        Some(
            RDKafkaErrorCode::RebalanceInProgress
                | RDKafkaErrorCode::CoordinatorLoadInProgress
                | RDKafkaErrorCode::CoordinatorNotAvailable
                | RDKafkaErrorCode::NotCoordinator
                | RDKafkaErrorCode::RequestTimedOut
        )
    )
}

pub(super) fn key(element: &TopicPartitionListElem<'_>) -> PartitionKey {
    (element.topic().into(), element.partition())
}

/// Returns the commit that the broker has of a partition, if any.
pub(super) fn stored(element: &TopicPartitionListElem<'_>) -> Option<Commit> {
    let Offset::Offset(offset) = element.offset() else { return None };
    // The client panics if another program has stored bytes that are not UTF-8.
    let parse = || CommitMetadata::parse(element.metadata(), offset);
    let metadata = catch_unwind(AssertUnwindSafe(parse));
    Some(Commit { offset, metadata: metadata.unwrap_or(CommitMetadata::Unknown) })
}

/// Returns the list of the partitions that are fetched, with the offsets from which they are.
pub(super) fn fetched<'a>(
    partitions: impl Iterator<Item = (&'a PartitionKey, &'a Partition)>,
) -> KafkaResult<TopicPartitionList> {
    let mut list = TopicPartitionList::new();
    for ((topic, number), partition) in partitions {
        list.add_partition_offset(topic, *number, Offset::Offset(partition.fetch_from()))?;
    }
    Ok(list)
}
