//! The thread that polls the client. Nothing else polls it, and neither handlers nor requests delay it.

mod checks;

use std::collections::BTreeMap;
use std::mem;
use std::sync::Arc;
use std::thread::park_timeout;
use std::time::Duration;

use hapax_core::{Clock as _, SystemClock};
use hapax_messages::Message;
use rdkafka::consumer::base_consumer::PartitionQueue;
use rdkafka::consumer::{BaseConsumer, Consumer as _};
use rdkafka::error::{KafkaError, RDKafkaErrorCode};
use rdkafka::message::{BorrowedMessage, Message as _};
use rdkafka::topic_partition_list::TopicPartitionList;
use tokio::runtime::Handle;
use tokio::time::Instant;

use super::context::{Context, RETRY, assign, fetched, is_of_topic};
use super::events::{Event, Events};
use super::is_missing;
use super::partition::{Partition, Watermarks};
use super::record::{Origin, record};
use super::requests::Requests;
use super::state::{PartitionKey, PollSettings, Resolved, Shared};

/// Longest wait before a poll, unless [`Shared::wake_poller`] ends it.
const POLL: Duration = Duration::from_millis(100);

/// Most records of one partition that are read in one poll.
const BATCH: usize = 64;

/// Longest time for which partitions that can be fetched wait for others, whose first offsets are being
/// requested: each change of the assignment drops records that the client has fetched.
const FETCH_TOGETHER: Duration = Duration::from_secs(1);

/// Time of consecutive failed commits after which the source reports an error. Commits also fail during a
/// rebalance.
const COMMIT_ALARM: Duration = Duration::from_secs(10);

/// Interval at which the thread checks whether requests that use the client have ended.
const END: Duration = Duration::from_millis(10);

/// Longest time for which the source waits to join a group, which it then leaves.
const LEAVE: Duration = Duration::from_secs(10);

/// The polling thread.
///
/// Each partition has its own queue in the client. The records of a paused partition stay in it, and properties of
/// the client limit what it fetches ahead. The pause of librdkafka would drop these records, and fetch them again
/// some 0.4 s after the resumption.
pub(super) struct Poller {
    consumer: Arc<BaseConsumer<Context>>,
    /// Queues of the partitions that are or were fetched. Records that are left in one after the assignment has ended
    /// are dropped at the next poll.
    queues: BTreeMap<PartitionKey, PartitionQueue<Context>>,
    requests: Requests,
    shared: Arc<Shared>,
    topic: String,
    commit_at: Instant,
    retry_at: Instant,
    /// Time of the first of the commits that fail.
    commits_fail_since: Option<Instant>,
    /// Number of the assignment of these.
    commits_assignment_number: u64,
    /// Origin of the last record that was received.
    last_origin: Option<Origin>,
    /// Whether a queue may still have records or events. The client calls the callback of a queue only when it was
    /// empty.
    has_more: bool,
    /// Events of the queue of the client.
    events: Events,
    /// Whether partitions must be assigned again, because the client fetches a stopped one, or a paused one without its
    /// own queue.
    must_assign: bool,
    /// Time since which a resolved partition waits for others.
    resolved_since: Option<Instant>,
    /// Time at which watermarks are requested, if logs are unverified.
    check_watermarks_at: Option<Instant>,
    watermarks_checked_at: Option<Instant>,
    /// Whether they are being requested.
    is_checking_watermarks: bool,
    check_broker_at: Instant,
    check_missing_at: Instant,
    check_owner_at: Instant,
    /// Time at which the watermarks of all partitions are requested.
    check_all_at: Instant,
}

/// Marks the source as closed, also after a panic.
struct CloseOnDrop(Arc<Shared>);

impl Drop for CloseOnDrop {
    fn drop(&mut self) {
        let mut state = self.0.lock();
        state.end_assignment();
        state.is_closed = true;
        drop(state);
        self.0.notify_waiting();
    }
}

impl Poller {
    /// Creates the thread's state. `topic` is one of the topics, by which the brokers are checked.
    pub(super) fn new(mut consumer: BaseConsumer<Context>, topic: String, runtime: Handle) -> Self {
        let shared = Arc::clone(&consumer.context().shared);
        consumer.set_nonempty_callback(waker(&shared));
        let consumer = Arc::new(consumer);
        let now = Instant::now();
        let check_at = now + consumer.context().settings.idle_check_after;
        Self {
            requests: Requests::new(&consumer, runtime),
            consumer,
            queues: BTreeMap::new(),
            shared,
            topic,
            commit_at: now,
            retry_at: now,
            commits_fail_since: None,
            commits_assignment_number: 0,
            last_origin: None,
            has_more: true,
            events: Events::default(),
            must_assign: false,
            resolved_since: None,
            check_watermarks_at: None,
            watermarks_checked_at: None,
            is_checking_watermarks: false,
            check_broker_at: check_at,
            check_missing_at: check_at,
            check_owner_at: check_at,
            check_all_at: check_at,
        }
    }

    /// Polls until the source is closed, and leaves the group.
    pub(super) fn run(mut self) {
        let _closed = CloseOnDrop(Arc::clone(&self.shared));
        self.shared.set_poller();
        while !self.shared.lock().is_closing {
            self.poll();
            self.check_watermarks();
            self.resolve_partitions();
            self.commit();
            self.check_broker();
            self.check_missing();
            self.check_owner();
        }
        self.leave();
        // A client that has ended answers no commit.
        self.shared.wait_committed();
        let Self { mut consumer, queues, .. } = self;
        // Each holds a reference to the client.
        drop(queues);
        while let Err(used) = Arc::try_unwrap(consumer) {
            consumer = used;
            consumer.poll(END);
        }
    }

    /// Leaves the group, after its partitions were revoked.
    ///
    /// The client must not be closed while an assignment or a revocation waits for the answer of its callback: it
    /// ends without that answer, and a late one is waited for without end, or fails an assertion. The client
    /// postpones `unsubscribe` while it joins the group, which other members may delay. Once it has no
    /// subscription and its queue is empty, there is no further callback.
    fn leave(&self) {
        self.consumer.unsubscribe();
        let deadline = Instant::now() + LEAVE;
        loop {
            let rebalances = self.consumer.context().rebalances();
            while self.consumer.poll(END).is_some() && Instant::now() < deadline {}
            let is_subscribed = self.consumer.subscription().is_ok_and(|list| list.count() > 0);
            let is_quiet = self.consumer.context().rebalances() == rebalances;
            if is_quiet && (!is_subscribed || Instant::now() >= deadline) {
                break;
            }
        }
        if let Err(error) = assign(&self.consumer, &TopicPartitionList::new()) {
            tracing::debug!(%error, "the partitions of a group were not left");
        }
    }

    fn settings(&self) -> &PollSettings {
        &self.consumer.context().settings
    }

    /// Waits for an event, runs callbacks, and adds records.
    fn poll(&mut self) {
        // The client wakes the thread when an empty queue receives a record or an event. A wake before the wait ends it
        // at once.
        if !mem::take(&mut self.has_more) {
            park_timeout(POLL);
        }
        let mut records = self.read_events();
        let queues = mem::take(&mut self.queues);
        records += queues.iter().map(|(key, queue)| self.read(key, queue)).sum::<usize>();
        self.queues = queues;
        if records > 0 {
            self.check_broker_at = Instant::now() + self.settings().idle_check_after;
            self.events.added();
            // The client reports an error of a partition before it fetches the records that follow.
            self.read_events();
        }
        self.has_more |= self.events.has_more();
        let is_confirmed = self.events.confirm();
        let mut state = self.shared.lock();
        if is_confirmed {
            state.partitions.values_mut().for_each(Partition::confirm);
        }
        let (has_unverified, has_stopped) = (state.take_unverified(), state.take_stopped());
        drop(state);
        if has_unverified {
            self.schedule_check();
        }
        if mem::take(&mut self.must_assign) | has_stopped {
            self.assign();
        }
        if records > 0 || is_confirmed || has_stopped {
            self.shared.notify_waiting();
        }
    }

    /// Runs callbacks, and reads the queue of the client. Returns the number of records in it.
    fn read_events(&mut self) -> usize {
        let mut events = mem::take(&mut self.events);
        let records = events.read(|| self.next_event());
        self.events = events;
        records
    }

    /// Reads an event of the client, or runs a callback.
    fn next_event(&mut self) -> Event {
        let consumer = Arc::clone(&self.consumer);
        let calls = consumer.context().callbacks();
        match consumer.poll(Duration::ZERO) {
            Some(Ok(message)) => {
                // The client has created its state of the partition again, without an own queue. Once the
                // partition is paused, all are assigned again.
                let pauses = self.accept(&message);
                self.must_assign |= pauses;
                Event::Record { pauses }
            }
            Some(Err(error)) => {
                self.failed(&error, None);
                Event::Other
            }
            // A poll that runs a callback ends, although the queue may have more events.
            None if consumer.context().callbacks() != calls => Event::Other,
            None => Event::None,
        }
    }

    /// Reads up to [`BATCH`] records of a partition, until it is paused. Returns their number.
    fn read(&mut self, key: &PartitionKey, queue: &PartitionQueue<Context>) -> usize {
        let mut is_paused = self.shared.lock().is_paused(key);
        let mut records = 0;
        for _ in 0..BATCH {
            if is_paused {
                return records;
            }
            match queue.poll(Duration::ZERO) {
                Some(Ok(message)) => {
                    is_paused = self.accept(&message);
                    records += 1;
                }
                Some(Err(error)) => self.failed(&error, Some(key)),
                None => return records,
            }
        }
        self.has_more = true;
        records
    }

    /// Adds a record. Returns whether that leaves its partition paused; false if the record is ignored or the partition
    /// is stopped.
    fn accept(&mut self, message: &BorrowedMessage<'_>) -> bool {
        let remedy = self.settings().remedy();
        // Many records of one partition follow each other.
        let last = self.last_origin.take().filter(|last| last.is_of(message));
        let origin = self.last_origin.insert(last.unwrap_or_else(|| Origin::of(message)));
        // Before the lock is taken: deliveries and acknowledgements wait for it.
        let record = Box::new(record(message, origin));
        let mut state = self.shared.lock();
        // A record of an assignment that has ended.
        let Some(partition) = state.partitions.get_mut(&origin.key) else { return false };
        if message.offset() < partition.fetch_from() {
            return false;
        }
        let retention = self.consumer.context().settings.retention;
        if let Some(retention) = retention.filter(|_| partition.awaits_age())
            && record.message.age(SystemClock.now()) > retention
        {
            let (key, records) = (&origin.key, partition.offsets_from(message.offset()));
            let found = too_old(message.offset(), &record.message, retention, records);
            // In both cases the partition is removed: the client has returned the record, which must not count as passed.
            if state.is_in_use(key) {
                let cause = format!("{found}: {remedy}, or set a longer retention");
                state.stop(key.clone(), cause);
                self.must_assign = true;
                return false;
            }
            state.partitions.remove(key);
            drop(state);
            self.shared.end_too_old(format!(
                "the partition {} of {}: {found}: begin at a later time or at the end of the log, or set a longer \
                 retention",
                key.1, key.0
            ));
            return false;
        }
        if let Err(recreated) = partition.accept(message.offset(), record) {
            let cause = format!("{recreated}; {remedy}, so that its records are handled");
            state.stop(origin.key.clone(), cause);
            self.must_assign = true;
            return false;
        }
        partition.is_paused()
    }

    /// Handles an error, of a partition or of the client.
    fn failed(&mut self, error: &KafkaError, key: Option<&PartitionKey>) {
        if let Some((code, reason)) = self.consumer.client().fatal_error() {
            let error = format!(
                "expected a Kafka client without a fatal error, found {code}: {reason}: start the source again"
            );
            return self.shared.end(error);
        }
        if matches!(error, KafkaError::PartitionEOF(_)) {
            return;
        }
        let topic = key.map(|(topic, _)| &**topic);
        let number = key.map(|(_, number)| *number);
        match error.rdkafka_error_code() {
            Some(RDKafkaErrorCode::AutoOffsetReset | RDKafkaErrorCode::OffsetOutOfRange) => {
                self.shared.lock().unverify(topic, number);
            }
            // The client connects again; the check of the brokers reports what lasts.
            Some(
                RDKafkaErrorCode::BrokerTransportFailure
                | RDKafkaErrorCode::OperationTimedOut
                // The loss of the assignment follows.
                | RDKafkaErrorCode::PollExceeded,
            ) => tracing::debug!(%error, "a Kafka client reports an error"),
            // The client goes on after a batch whose checksum is wrong.
            Some(RDKafkaErrorCode::BadMessage) => match key {
                Some(key) => self.stop_corrupt(key),
                // Of a partition without an own queue. All are fetched again from their next records, each into its
                // own queue, where the error has its partition.
                None => self.shared.lock().unverify(None, None),
            },
            code => {
                if code.is_some_and(is_of_topic) {
                    self.shared.lock().unverify(topic, number);
                }
                // The warning at the start and `missing_topics` name them.
                if key.is_none() && code.is_some_and(is_missing) && self.lacks_topics() {
                    return tracing::debug!(%error, "a topic does not exist yet");
                }
                self.shared.fail(format!("expected records, found an error: {error}"));
            }
        }
    }

    /// Stops a partition of which the client has left out records, whose offsets must not count as passed.
    fn stop_corrupt(&mut self, key: &PartitionKey) {
        let remedy = self.settings().remedy();
        let mut state = self.shared.lock();
        let Some(partition) = state.partitions.get(key) else { return };
        let cause = format!(
            "expected records with the checksums of their batches from the offset {} on, found others: restore the log, or \
             {remedy} to the one after the batch",
            partition.next()
        );
        state.stop(key.clone(), cause);
        self.must_assign = true;
    }

    /// Requests the first offsets of assigned partitions, and fetches those whose first offset is known.
    fn resolve_partitions(&mut self) {
        // Without the lock, which a task that the runtime drops at once takes.
        let beginning = self.shared.lock().begin_resolving();
        if let Some((number, keys)) = beginning {
            self.requests.resolve_partitions(number, keys);
        }
        let resolved = {
            let mut state = self.shared.lock();
            if state.resolved.is_empty() {
                self.resolved_since = None;
                return;
            }
            let now = Instant::now();
            let since = *self.resolved_since.get_or_insert(now);
            if state.is_resolving() && now < since + FETCH_TOGETHER {
                return;
            }
            self.resolved_since = None;
            std::mem::take(&mut state.resolved)
        };
        let settings = self.settings();
        {
            let mut state = self.shared.lock();
            for Resolved { key, first, committed, position, watermarks } in resolved {
                if let Some(cause) = outside(first, watermarks, settings.remedy()) {
                    state.stop(key, cause);
                    continue;
                }
                let assignment_number = state.assignment_number;
                let partition = Partition::new(
                    settings.limits,
                    assignment_number,
                    first,
                    committed,
                    watermarks,
                );
                let partition = match settings.retention {
                    Some(_) => partition.await_age(),
                    None => partition,
                };
                let partition = match position {
                    Some(position) => partition.with_position(position),
                    None => partition,
                };
                state.partitions.insert(key, partition);
            }
        }
        self.assign();
    }

    /// Fetches all partitions from their next records, each into a queue of its own. Drops the records that the
    /// client has.
    fn assign(&mut self) {
        if self.consumer.assignment_lost() {
            // Another assignment would hide the loss, whose callback follows.
            self.shared.lock().end_assignment();
            return;
        }
        let (keys, list) = {
            let state = self.shared.lock();
            let keys: Vec<_> = state.partitions.keys().cloned().collect();
            (keys, fetched(state.partitions.iter()))
        };
        if let Some((topic, number)) = keys.into_iter().find(|key| !self.split_queue(key)) {
            return self.shared.end(format!(
                "expected a queue of the partition {number} of {topic}, found none: start the source again"
            ));
        }
        // A queue that received a record before its callback was set does not call it.
        self.has_more = true;
        let assigned = list.and_then(|list| assign(&self.consumer, &list));
        if let Err(error) = assigned {
            // Records of the earlier assignment must not pass for those that are fetched again.
            self.shared.lock().unverify(None, None);
            return self.shared.fail(format!("expected an assignment, found an error: {error}"));
        }
        let mut state = self.shared.lock();
        state.is_assigned = state.is_resolved();
        drop(state);
        self.shared.notify_waiting();
    }

    /// Splits the queue of a partition from that of the consumer, before the partition is fetched. Returns false if the
    /// client returns no queue.
    fn split_queue(&mut self, key: &PartitionKey) -> bool {
        // Drops the last handle first: its drop removes the callback of the queue, which the next one may share.
        self.queues.remove(key);
        let Some(mut queue) = self.consumer.split_partition_queue(&key.0, key.1) else {
            return false;
        };
        queue.set_nonempty_callback(waker(&self.shared));
        self.queues.insert(key.clone(), queue);
        true
    }

    /// Commits acknowledged records, and opens further ones.
    fn commit(&mut self) {
        let now = Instant::now();
        let mut state = self.shared.lock();
        let result = state.commit_result.take();
        if state.is_committing {
            return;
        }
        if self.commits_assignment_number != state.assignment_number {
            (self.commits_assignment_number, self.commits_fail_since) =
                (state.assignment_number, None);
        }
        match result {
            Some(Ok(())) => self.commits_fail_since = None,
            Some(Err(error)) => {
                tracing::debug!(%error, "a commit failed: it is sent again");
                self.retry_at = now + RETRY;
                let since = *self.commits_fail_since.get_or_insert(now);
                if now >= since + COMMIT_ALARM {
                    self.commits_fail_since = Some(now);
                    drop(state);
                    return self.shared.fail(format!(
                        "expected commits of the group's offsets, found errors for {COMMIT_ALARM:?}, the \
                         last one: {error}: check the brokers, the topics, and the permissions of the user; \
                         they are sent again"
                    ));
                }
            }
            None => {}
        }
        if now < self.retry_at {
            return;
        }
        let is_due = now >= self.commit_at;
        if is_due && state.partitions.values().any(Partition::is_idle) {
            drop(state);
            self.pass_control_records();
            state = self.shared.lock();
        }
        // The first commit of a partition without one is sent at once: after a crash, the end of the log would be another.
        let is_wanted = |it: &Partition| is_due || it.opens_records() || !it.has_commit();
        let wanted = state.partitions.iter().filter(|(_, it)| is_wanted(it));
        let wanted =
            wanted.filter_map(|(key, it)| Some((key.clone(), it.assignment_number, it.commit()?)));
        let commits: Vec<_> = wanted.collect();
        if is_due {
            state.partitions.values_mut().for_each(Partition::end_interval);
            self.commit_at = now + self.settings().commit_every;
        }
        drop(state);
        if !commits.is_empty() {
            self.requests.commit(commits);
        }
    }
}

/// Returns a callback for a queue, which wakes the polling thread.
fn waker(shared: &Arc<Shared>) -> impl Fn() + Send + Sync + use<> {
    let shared = Arc::clone(shared);
    move || shared.wake_poller()
}

/// Returns what was found of a record that is older than the retention of ids, in a partition without a committed offset,
/// with the number of the offsets from it on.
fn too_old(offset: i64, message: &Message, retention: Duration, records: i64) -> String {
    let at = message.published_at.unwrap_or_default();
    format!(
        "expected records within the retention of ids ({} s) for a group without a committed offset, found the record \
         {offset} of {at}, one of up to {records}, of which each older one would become a dead letter",
        retention.as_secs()
    )
}

/// Returns why an offset cannot be fetched, if it is outside of the log.
fn outside(offset: i64, (low, high): Watermarks, remedy: &str) -> Option<String> {
    let cause = if offset > high {
        "the topic was created again, or has lost records"
    } else if offset < low {
        "records were deleted before they were handled"
    } else {
        return None;
    };
    Some(format!(
        "expected an offset from {low} to {high}, found {offset}: {cause}; {remedy} to continue"
    ))
}
