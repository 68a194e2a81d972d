//! The thread that polls the client. Nothing else polls it, and no handler blocks it.

use std::sync::Arc;
use std::time::Duration;

use rdkafka::consumer::{BaseConsumer, Consumer as _};
use rdkafka::error::{KafkaError, RDKafkaErrorCode};
use rdkafka::message::{BorrowedMessage, Message as _};
use rdkafka::topic_partition_list::TopicPartitionList;
use tokio::time::Instant;

use super::KafkaStartAt;
use super::context::{Context, RETRY, assign, key, positions, stored};
use super::mark::Mark;
use super::partition::{Commit, Partition, Recreated};
use super::record::record;
use super::state::{DatabasePositions, PartitionKey, Shared, Taken};

/// Longest time of one poll, after which acknowledgements are committed and partitions resumed.
const POLL: Duration = Duration::from_millis(100);

/// Records that are taken before commits and pauses.
const BATCH: usize = 256;

/// Pause before positions are read again.
const AFTER_ERROR: Duration = Duration::from_secs(1);

/// The polling thread.
pub(super) struct Poller {
    consumer: BaseConsumer<Context>,
    shared: Arc<Shared>,
    topic: String,
    commit_at: Instant,
    retry_at: Instant,
    resolve_at: Instant,
    check_at: Instant,
}

/// Marks the source as closed, also after a panic.
struct CloseOnDrop(Arc<Shared>);

impl Drop for CloseOnDrop {
    fn drop(&mut self) {
        let mut state = self.0.lock();
        state.fence();
        state.is_closed = true;
        drop(state);
        self.0.notify();
    }
}

impl Poller {
    /// Creates the thread's state. `topic` is one of the topics, by which the brokers are checked.
    pub(super) fn new(consumer: BaseConsumer<Context>, topic: String) -> Self {
        let shared = Arc::clone(&consumer.context().shared);
        let now = Instant::now();
        let check_at = now + consumer.context().settings.check_after;
        Self { consumer, shared, topic, commit_at: now, retry_at: now, resolve_at: now, check_at }
    }

    /// Polls until the source is closed, and leaves the group.
    pub(super) fn run(mut self) {
        let _closed = CloseOnDrop(Arc::clone(&self.shared));
        while !self.shared.lock().is_closing {
            self.poll();
            self.resolve();
            self.open_taken();
            self.turn();
            self.commit();
        }
        self.consumer.context().revoked(&self.consumer);
        // Leaves the group.
        drop(self.consumer);
    }

    fn context(&self) -> &Context {
        self.consumer.context()
    }

    fn poll(&mut self) {
        let mut timeout = POLL;
        for _ in 0..BATCH {
            let polled = self.consumer.poll(timeout);
            timeout = Duration::ZERO;
            match polled {
                Some(Ok(message)) => {
                    if !self.accept(&message) {
                        self.assign();
                        break;
                    }
                    self.check_at = Instant::now() + self.context().settings.check_after;
                }
                Some(Err(error)) => {
                    self.failed(&error);
                    break;
                }
                None => break,
            }
        }
        self.shared.notify();
        self.check();
    }

    /// Takes a record. Returns false if its partition is stopped, and has to be fetched no longer.
    fn accept(&self, message: &BorrowedMessage<'_>) -> bool {
        let key = (message.topic().to_owned(), message.partition());
        let mut state = self.shared.lock();
        // A record of an assignment that has ended.
        let Some(partition) = state.partitions.get_mut(&key) else { return true };
        if message.offset() < partition.fetch_from() {
            return true;
        }
        if let Err(Recreated { offset, expected, found }) =
            partition.accept(message.offset(), record(message))
        {
            let remedy = self.context().settings.remedy();
            state.stop(
                key,
                format!(
                    "expected the record {offset} of time {expected} that was handled before, found \
                     one of time {found}: the topic was created again; {remedy}, so that its records are \
                     handled"
                ),
            );
            return false;
        }
        true
    }

    fn failed(&mut self, error: &KafkaError) {
        match error.rdkafka_error_code() {
            Some(RDKafkaErrorCode::AutoOffsetReset | RDKafkaErrorCode::OffsetOutOfRange) => {
                self.check_positions();
            }
            // The client connects again; the check of the brokers shows what lasts.
            Some(
                RDKafkaErrorCode::BrokerTransportFailure
                | RDKafkaErrorCode::OperationTimedOut
                | RDKafkaErrorCode::PartitionEOF
                // The loss of the assignment follows.
                | RDKafkaErrorCode::PollExceeded,
            ) => tracing::debug!(%error, "a Kafka client reports an error"),
            _ => self.shared.fail(format!("expected records, found an error: {error}")),
        }
    }

    /// Checks that a broker answers, if no record came for a time: the client reports no broker that
    /// accepts connections and does not answer.
    fn check(&mut self) {
        let now = Instant::now();
        if now < self.check_at {
            return;
        }
        self.check_at = now + self.context().settings.check_after;
        let timeout = self.context().settings.request_timeout;
        if let Err(error) = self.consumer.fetch_metadata(Some(&self.topic), timeout) {
            self.shared.fail(format!(
                "expected an answer of the Kafka brokers within {timeout:?}, found an error: {error}: \
                 check that they run and can be reached"
            ));
        }
    }

    /// Reads the positions of partitions that were assigned, and fetches these.
    fn resolve(&mut self) {
        let unresolved: Vec<PartitionKey> = {
            let state = self.shared.lock();
            if state.unresolved.is_empty() || Instant::now() < self.resolve_at {
                return;
            }
            state.unresolved.iter().cloned().collect()
        };
        self.resolve_at = Instant::now() + AFTER_ERROR;
        let mut list = TopicPartitionList::new();
        for (topic, number) in &unresolved {
            list.add_partition(topic, *number);
        }
        let timeout = self.context().settings.request_timeout;
        let list = match self.consumer.committed_offsets(list, timeout) {
            Ok(list) => list,
            Err(error) => {
                let error = format!("expected the positions of the group, found an error: {error}");
                return self.shared.fail(error);
            }
        };
        for element in list.elements() {
            let read = element.error().map(|()| stored(&element));
            if let Err(error) = read.and_then(|stored| self.open(key(&element), stored)) {
                let (topic, number) = key(&element);
                self.shared.fail(format!(
                    "expected the position of partition {number} of {topic}, found an error: {error}"
                ));
            }
        }
        self.assign();
    }

    /// Returns the offsets of the first record and of the end of a log.
    fn log(&self, (topic, number): &PartitionKey) -> Result<(i64, i64), KafkaError> {
        let timeout = self.context().settings.request_timeout;
        self.consumer.fetch_watermarks(topic, *number, timeout)
    }

    /// Creates the state of a partition from its position and its log, or begins to take its position
    /// in the database.
    fn open(&self, key: PartitionKey, stored: Option<Commit>) -> Result<(), KafkaError> {
        let settings = &self.context().settings;
        let log = self.log(&key)?;
        let base = match (stored, settings.start_at) {
            (Some(stored), _) => stored.offset,
            (None, KafkaStartAt::Earliest) => log.0,
            (None, KafkaStartAt::Latest) => log.1,
        };
        if let Some(positions) = &settings.positions {
            self.take(positions, key, stored, base);
            return Ok(());
        }
        let mut state = self.shared.lock();
        if let Some(cause) = outside(base, log, settings.remedy()) {
            state.stop(key, cause);
        } else {
            let partition = Partition::new(settings.limits, state.epoch, base, stored, log);
            state.insert(key, partition);
        }
        Ok(())
    }

    /// Begins to take the position of a partition, which waits for a transaction of its previous owner.
    fn take(
        &self,
        positions: &DatabasePositions,
        key: PartitionKey,
        stored: Option<Commit>,
        first: i64,
    ) {
        let number = self.shared.lock().begin_take(key.clone());
        let (shared, store) = (Arc::clone(&self.shared), Arc::clone(&positions.store));
        positions.runtime.spawn(async move {
            // A broker counts from 0.
            let partition = hapax_messages::Partition {
                topic: key.0.clone(),
                number: u32::try_from(key.1).unwrap_or(0),
            };
            let taken = store.take(&partition, u64::try_from(first).unwrap_or(0)).await;
            shared.took(number, key, stored, taken);
        });
    }

    /// Fetches the partitions whose positions were taken in the database.
    fn open_taken(&self) {
        let taken = std::mem::take(&mut self.shared.lock().taken);
        if taken.is_empty() {
            return;
        }
        let settings = &self.context().settings;
        for Taken { key, stored, position } in taken {
            // Read after the position, which another owner may have advanced until it was taken.
            let log = match self.log(&key) {
                Ok(log) => log,
                Err(error) => {
                    let (topic, number) = &key;
                    let text = format!(
                        "expected the log of partition {number} of {topic}, found an error: {error}"
                    );
                    self.shared.lock().unresolved.insert(key);
                    self.shared.fail(text);
                    continue;
                }
            };
            let base = i64::try_from(position.next).unwrap_or(i64::MAX);
            // Records behind a position without a commit may have been delivered before.
            let stored = match position.is_new {
                true => stored,
                false => stored.or(Some(Commit { offset: base, mark: Mark::Unknown })),
            };
            let mut state = self.shared.lock();
            if let Some(cause) = outside(base, log, settings.remedy()) {
                state.stop(key, cause);
            } else {
                let partition = Partition::new(settings.limits, state.epoch, base, stored, log);
                state.insert(key, partition.taken(position, log.0));
            }
        }
        self.assign();
    }

    /// Stops the partitions whose next record is not in their log, and fetches the others again: the
    /// client has dropped positions.
    fn check_positions(&mut self) {
        let next: Vec<_> = {
            let state = self.shared.lock();
            state
                .partitions
                .iter()
                .map(|(key, partition)| (key.clone(), partition.next()))
                .collect()
        };
        let timeout = self.context().settings.request_timeout;
        for (key, next) in next {
            match self.consumer.fetch_watermarks(&key.0, key.1, timeout) {
                Ok(log) => {
                    let remedy = self.context().settings.remedy();
                    if let Some(cause) = outside(next, log, remedy) {
                        self.shared.lock().stop(key, cause);
                    }
                }
                Err(error) => self.shared.fail(format!(
                    "expected the first and last offsets of partition {} of {}, found an error: {error}",
                    key.1, key.0
                )),
            }
        }
        self.assign();
    }

    /// Fetches all partitions from their positions.
    fn assign(&self) {
        let mut state = self.shared.lock();
        for partition in state.partitions.values_mut() {
            partition.resumed();
        }
        let assigned = positions(state.partitions.iter());
        if let Err(error) = assigned.and_then(|list| assign(&self.consumer, &list)) {
            drop(state);
            return self.shared.fail(format!("expected an assignment, found an error: {error}"));
        }
        state.is_assigned = state.is_resolved();
    }

    /// Pauses partitions that have too many records, and resumes those that have not.
    fn turn(&self) {
        let mut state = self.shared.lock();
        for ((topic, number), partition) in &mut state.partitions {
            let Some(pauses) = partition.turn() else { continue };
            let mut list = TopicPartitionList::new();
            list.add_partition(topic, *number);
            let turned = match pauses {
                true => self.consumer.pause(&list),
                false => self.consumer.resume(&list),
            };
            if let Err(error) = turned {
                tracing::debug!(%error, topic, number, "a partition was not paused or resumed");
            }
        }
    }

    /// Commits what is finished, and opens records that wait for it.
    fn commit(&mut self) {
        let now = Instant::now();
        if now < self.retry_at {
            return;
        }
        let is_due = now >= self.commit_at;
        if is_due {
            self.commit_at = now + self.context().settings.commit_every;
        }
        let commits: Vec<_> = {
            let state = self.shared.lock();
            let wanted = state.partitions.iter().filter(|(_, it)| is_due || it.is_blocked());
            wanted.filter_map(|(key, it)| Some((key.clone(), it.commit()?))).collect()
        };
        if let Err(error) = self.context().commit(&self.consumer, &commits) {
            // For instance while the group is rebalancing.
            tracing::debug!(%error, "a commit failed: it is sent again");
            self.retry_at = Instant::now() + RETRY;
        }
    }
}

/// Returns why a position cannot be fetched, if it is outside of the log.
fn outside(position: i64, (low, high): (i64, i64), remedy: &str) -> Option<String> {
    let cause = if position > high {
        "the topic was created again, or has lost records"
    } else if position < low {
        "records were deleted before they were handled"
    } else {
        return None;
    };
    Some(format!(
        "expected a position from {low} to {high}, found {position}: {cause}; {remedy} to continue"
    ))
}
