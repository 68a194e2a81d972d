//! State that the polling thread, requests, receivers and deliveries share.

use std::collections::{BTreeMap, BTreeSet};
use std::num::NonZeroUsize;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock, PoisonError};
use std::thread::{self, Thread};
use std::time::Duration;

use hapax_messages::{AcquiredPosition, PositionStore};
use rdkafka::error::{KafkaError, KafkaResult};
use tokio::sync::Notify;
use tokio::time::Instant;

use super::partition::{Commit, Partition, PartitionLimits, Record, Watermarks};

/// Topic and number of a partition.
pub(super) type PartitionKey = (Arc<str>, i32);

/// Pause before first offsets are requested again, after an error.
const RESOLVE_RETRY: Duration = Duration::from_secs(1);

/// State of a source that its parts share.
#[derive(Debug, Default)]
pub(super) struct Shared {
    state: Mutex<State>,
    /// The polling thread, once it runs.
    poller: OnceLock<Thread>,
    /// Signals the polling thread, which waits in a callback, that the last delivery of a partition, or a
    /// commit, has ended.
    pub(super) ended: Condvar,
    /// Notifies those who [wait](Shared::wait).
    changed: Notify,
}

/// An assigned partition is resolved once its first offset is known. It is in one of `unresolved`, `resolving`,
/// `resolved`, `partitions` and `stopped`.
#[derive(Debug, Default)]
pub(super) struct State {
    /// Partitions that are fetched.
    pub(super) partitions: BTreeMap<PartitionKey, Partition>,
    /// Partitions whose first offset is not known.
    unresolved: BTreeSet<PartitionKey>,
    /// Time before which these are not requested, after an error.
    resolve_after: Option<Instant>,
    /// Partitions whose first offset is being requested, each with the number of the request.
    resolving: BTreeMap<PartitionKey, u64>,
    /// Number of the last of these requests.
    last_request: u64,
    /// Partitions whose first offset is known, and that are not fetched yet.
    pub(super) resolved: Vec<Resolved>,
    /// Partitions that are not received, and why.
    pub(super) stopped: BTreeMap<PartitionKey, String>,
    /// Numbers of the partitions that topics had when the source was started.
    pub(super) topics_at_start: BTreeMap<String, i32>,
    /// Topics that did not exist when they were last looked for.
    pub(super) missing_topics: Vec<String>,
    /// Whether the group had handled records when commits were requested.
    pub(super) group_has_handled: bool,
    /// The error of records that are older than the retention, which has ended the source.
    pub(super) too_old: Option<String>,
    /// Number of the last assignment.
    pub(super) assignment_number: u64,
    /// Nothing is delivered while partitions are being revoked.
    pub(super) is_draining: bool,
    /// Whether partitions, possibly none, are assigned, and the first offsets of all are known.
    pub(super) is_assigned: bool,
    /// Whether a commit is in progress.
    pub(super) is_committing: bool,
    /// Result of the last commit, until the polling thread reads it.
    pub(super) commit_result: Option<KafkaResult<()>>,
    /// Whether a pause has ended because records wait that no longer count.
    has_resumed: bool,
    /// Whether a log is unverified, whose watermarks are to be requested.
    has_unverified: bool,
    /// Partitions that were stopped, and that the client still fetches.
    must_assign: bool,
    /// Watermarks that were requested, until the polling thread reads them.
    pub(super) watermarks: Option<CheckedWatermarks>,
    pub(super) is_closing: bool,
    pub(super) is_closed: bool,
    /// The error that has ended the client.
    fatal: Option<String>,
    /// The last partition of which a record was delivered.
    last_delivered: Option<PartitionKey>,
    /// An error that no receiver has returned yet.
    error: Option<String>,
}

/// A partition whose first offset is known.
#[derive(Debug)]
pub(super) struct Resolved {
    pub(super) key: PartitionKey,
    /// The first offset to handle.
    pub(super) first: i64,
    /// The commit that the broker has.
    pub(super) committed: Option<Commit>,
    /// The position that was acquired in the database.
    pub(super) position: Option<AcquiredPosition>,
    pub(super) watermarks: Watermarks,
}

/// The watermarks of partitions that are fetched, each with the number of its assignment.
#[derive(Debug, Default)]
pub(super) struct CheckedWatermarks {
    pub(super) checked: Vec<(PartitionKey, u64, Watermarks)>,
    /// Partitions whose leaders have not answered, and the errors.
    pub(super) unanswered: Vec<(PartitionKey, u64, KafkaError)>,
}

/// A record and where it belongs.
#[derive(Debug)]
pub(super) struct Delivered {
    pub(super) key: PartitionKey,
    pub(super) assignment_number: u64,
    pub(super) fence: Option<u64>,
    pub(super) offset: i64,
    pub(super) record: Box<Record>,
}

impl Shared {
    pub(super) fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Notifies receivers, and those who wait for an assignment or the end.
    pub(super) fn notify_waiting(&self) {
        self.changed.notify_waiters();
    }

    /// Sets the current thread as the polling thread.
    pub(super) fn set_poller(&self) {
        self.poller.get_or_init(thread::current);
    }

    /// Wakes the polling thread, or ends its next wait at once. Called after each event of a queue, result of a
    /// request, record that a commit can open, end of a pause, and the end of the source.
    pub(super) fn wake_poller(&self) {
        if let Some(poller) = self.poller.get() {
            poller.unpark();
        }
    }

    /// Ends the source. The polling thread then leaves the group.
    pub(super) fn close(&self) {
        self.lock().is_closing = true;
        self.notify_waiting();
        self.wake_poller();
    }

    /// Waits until `read` returns a value.
    pub(super) async fn wait<T>(&self, mut read: impl FnMut(&mut State) -> Option<T>) -> T {
        loop {
            let mut changed = std::pin::pin!(self.changed.notified());
            // Before the state is read, so that no change in between is missed.
            changed.as_mut().enable();
            if let Some(value) = read(&mut self.lock()) {
                return value;
            }
            changed.await;
        }
    }

    /// Stores an error, which the next receiver returns. Requests fail while the source is being closed, which
    /// is no error.
    pub(super) fn fail(&self, error: String) {
        let mut state = self.lock();
        if state.is_closing {
            tracing::debug!(%error, "a request of a Kafka source that is being closed failed");
            return;
        }
        tracing::warn!(%error, "a Kafka source failed");
        state.error = Some(error);
        drop(state);
        self.notify_waiting();
    }

    /// Ends the source because of an error after which the client receives nothing more.
    pub(super) fn end(&self, error: String) {
        tracing::error!(%error, "a Kafka source has ended");
        let mut state = self.lock();
        state.fatal.get_or_insert(error);
        drop(state);
        self.close();
    }

    /// Ends the source because of records that are older than the retention.
    pub(super) fn end_too_old(&self, error: String) {
        let mut state = self.lock();
        if state.too_old.is_some() {
            return;
        }
        state.too_old = Some(error.clone());
        drop(state);
        self.end(error);
    }

    /// Waits until no delivery is left, or for the time. Returns whether none is left.
    pub(super) fn wait_drained(&self, time: Duration) -> bool {
        let state = self.lock();
        let waited = self.ended.wait_timeout_while(state, time, |state| {
            state.partitions.values().any(|partition| partition.delivered() > 0)
        });
        let (_state, result) = waited.unwrap_or_else(PoisonError::into_inner);
        !result.timed_out()
    }

    /// Waits until no commit is in progress.
    pub(super) fn wait_committed(&self) {
        let waited = self.ended.wait_while(self.lock(), |state| state.is_committing);
        drop(waited.unwrap_or_else(PoisonError::into_inner));
    }

    /// Ends the commit that is in progress.
    pub(super) fn end_commit(&self, result: Option<KafkaResult<()>>) {
        let mut state = self.lock();
        state.is_committing = false;
        state.commit_result = result;
        drop(state);
        self.ended.notify_all();
        self.notify_waiting();
        self.wake_poller();
    }

    /// Acknowledges a record. Returns false if its assignment has ended.
    pub(super) fn acknowledge(
        &self,
        key: &PartitionKey,
        assignment_number: u64,
        offset: i64,
        bytes: usize,
    ) -> bool {
        let mut state = self.lock();
        let Some(partition) = state.owned(key, assignment_number) else { return false };
        let was_paused = partition.is_paused();
        let has_unblocked = partition.acknowledge(offset, bytes);
        let was_last = partition.delivered() == 0;
        let is_resumed = was_paused && !partition.is_paused();
        drop(state);
        if has_unblocked {
            self.notify_waiting();
        }
        // Each is a system call: only the last delivery and the end of a pause cause one.
        if was_last {
            self.ended.notify_all();
        }
        if is_resumed {
            self.wake_poller();
        }
        true
    }

    /// Returns whether a handler may begin with a delivery: it is of the current assignment, and its
    /// partition is not being revoked.
    pub(super) fn may_begin(&self, key: &PartitionKey, assignment_number: u64) -> bool {
        let mut state = self.lock();
        !state.is_draining && state.owned(key, assignment_number).is_some()
    }

    /// Returns whether a delivery is of the current assignment.
    pub(super) fn is_owned(&self, key: &PartitionKey, assignment_number: u64) -> bool {
        self.lock().owned(key, assignment_number).is_some()
    }

    /// Ends the deliveries of a partition, and requests its first offset again.
    pub(super) fn resolve_again(&self, key: &PartitionKey, assignment_number: u64) {
        let mut state = self.lock();
        if state.owned(key, assignment_number).is_some() {
            state.partitions.remove(key);
            // Deliveries of before are not those of the partition that is created next.
            state.assignment_number += 1;
            state.unresolved.insert(key.clone());
            state.is_assigned = false;
        }
        drop(state);
        self.ended.notify_all();
        self.notify_waiting();
        self.wake_poller();
    }

    /// Returns whether the first offset of a partition is still wanted by the request with this number.
    pub(super) fn is_wanted(&self, number: u64, key: &PartitionKey) -> bool {
        let state = self.lock();
        !state.is_closing && state.resolving.get(key) == Some(&number)
    }

    /// Stores the result of a request with this number. Returns false if its assignment has ended. The request
    /// may have acquired the position after the new owner did; the new owner then acquires it again.
    pub(super) fn resolved(
        &self,
        number: u64,
        key: PartitionKey,
        resolved: Option<Resolved>,
    ) -> bool {
        let mut state = self.lock();
        if state.resolving.get(&key) != Some(&number) {
            return false;
        }
        state.resolving.remove(&key);
        match resolved {
            Some(resolved) => state.resolved.push(resolved),
            None => {
                state.unresolved.insert(key);
                state.resolve_after = Some(Instant::now() + RESOLVE_RETRY);
            }
        }
        drop(state);
        self.wake_poller();
        true
    }
}

impl State {
    /// Returns a partition, if it is of this assignment.
    pub(super) fn owned(
        &mut self,
        key: &PartitionKey,
        assignment_number: u64,
    ) -> Option<&mut Partition> {
        self.partitions
            .get_mut(key)
            .filter(|partition| partition.assignment_number == assignment_number)
    }

    /// Begins an assignment.
    pub(super) fn begin_assignment(&mut self, assigned: BTreeSet<PartitionKey>) {
        self.end_assignment();
        self.assignment_number += 1;
        self.is_assigned = assigned.is_empty();
        self.unresolved = assigned;
    }

    /// Ends all assignments: later acknowledgements are errors.
    pub(super) fn end_assignment(&mut self) {
        self.partitions.clear();
        self.unresolved.clear();
        self.resolve_after = None;
        self.resolving.clear();
        self.resolved.clear();
        self.stopped.clear();
        self.is_draining = false;
        self.is_assigned = false;
    }

    /// Returns whether the first offset of every assigned partition is known.
    pub(super) fn is_resolved(&self) -> bool {
        self.unresolved.is_empty() && self.resolving.is_empty() && self.resolved.is_empty()
    }

    /// Returns whether a partition was added after the source was started.
    pub(super) fn is_added(&self, (topic, number): &PartitionKey) -> bool {
        self.topics_at_start.get(&**topic).is_none_or(|count| number >= count)
    }

    /// Returns the partitions that existed when the source was started.
    pub(super) fn partitions_at_start(&self) -> impl Iterator<Item = PartitionKey> {
        self.topics_at_start.iter().flat_map(|(topic, count)| {
            let topic: Arc<str> = topic.as_str().into();
            (0..*count).map(move |number| (Arc::clone(&topic), number))
        })
    }

    /// Returns whether the group is not new for a partition, which was added, or others of which were handled.
    pub(super) fn is_in_use(&self, key: &PartitionKey) -> bool {
        self.is_added(key)
            || self.group_has_handled
            || self.partitions.values().any(Partition::has_handled)
    }

    /// Returns whether a partition is paused; false if it is not fetched.
    pub(super) fn is_paused(&self, key: &PartitionKey) -> bool {
        self.partitions.get(key).is_some_and(Partition::is_paused)
    }

    /// Returns whether the polling thread is needed after deliveries: to end a pause, or for a commit that opens records.
    pub(super) fn take_needs_poller(&mut self) -> bool {
        std::mem::take(&mut self.has_resumed) | self.opens_records()
    }

    /// Returns whether the polling thread can send a commit that opens records.
    pub(super) fn opens_records(&self) -> bool {
        !self.is_committing && self.partitions.values().any(Partition::opens_records)
    }

    /// Returns whether first offsets are being requested.
    pub(super) fn is_resolving(&self) -> bool {
        !self.resolving.is_empty()
    }

    /// Begins a request for the first offsets of partitions. Returns its number and these; `None` if there is
    /// nothing to request now.
    pub(super) fn begin_resolving(&mut self) -> Option<(u64, Vec<PartitionKey>)> {
        let is_early = self.resolve_after.is_some_and(|after| Instant::now() < after);
        if self.unresolved.is_empty() || is_early {
            return None;
        }
        self.resolve_after = None;
        self.last_request += 1;
        let keys: Vec<_> = std::mem::take(&mut self.unresolved).into_iter().collect();
        self.resolving.extend(keys.iter().map(|key| (key.clone(), self.last_request)));
        Some((self.last_request, keys))
    }

    /// Marks the log of a partition as unverified, or those of all partitions of a topic, or of all.
    pub(super) fn unverify(&mut self, topic: Option<&str>, number: Option<i32>) {
        for (key, partition) in &mut self.partitions {
            let is_of = topic.is_none_or(|topic| *key.0 == *topic);
            if is_of && number.is_none_or(|number| key.1 == number) {
                tracing::debug!(
                    topic = &*key.0,
                    partition = key.1,
                    "the identity of a log is checked"
                );
                partition.unverify();
                self.has_unverified = true;
            }
        }
    }

    /// Stops the partitions of a topic that was created again. Those of which no record was received begin again.
    pub(super) fn recreated(&mut self, topic: &str, cause: &str) {
        self.unverify(Some(topic), None);
        let received = self.partitions.iter().filter(|(key, it)| *key.0 == *topic && it.next() > 0);
        let keys: Vec<_> = received.map(|(key, _)| key.clone()).collect();
        for key in keys {
            self.stop(key, cause.to_owned());
            self.must_assign = true;
        }
    }

    /// Returns whether a log became unverified since the last call.
    pub(super) fn take_unverified(&mut self) -> bool {
        std::mem::take(&mut self.has_unverified)
    }

    /// Returns whether partitions were stopped since the last call, which the client still fetches.
    pub(super) fn take_stopped(&mut self) -> bool {
        std::mem::take(&mut self.must_assign)
    }

    /// Stops a partition, with the cause.
    pub(super) fn stop(&mut self, key: PartitionKey, cause: String) {
        let error = format!("the partition {} of {} is stopped: {cause}", key.1, key.0);
        tracing::error!(%error, "a partition is not received");
        self.partitions.remove(&key);
        self.stopped.insert(key, cause);
        self.error = Some(error);
    }

    /// Returns an error that was not returned yet, or that the source is closed.
    pub(super) fn take_error(&mut self) -> Option<String> {
        if let Some(error) = self.error.take() {
            return Some(error);
        }
        match &self.fatal {
            Some(fatal) => Some(fatal.clone()),
            None => self
                .is_closed
                .then(|| "expected an open source, found one that was closed".to_owned()),
        }
    }

    /// Delivers up to `max` records, one of each partition in turn.
    pub(super) fn deliver(&mut self, max: NonZeroUsize) -> Vec<Delivered> {
        let mut delivered = Vec::new();
        if self.is_draining || self.is_closing {
            return delivered;
        }
        let mut keys: Vec<_> = self.partitions.keys().cloned().collect();
        let begin = keys.partition_point(|key| Some(key) <= self.last_delivered.as_ref());
        keys.rotate_left(begin);
        while delivered.len() < max.get() && !keys.is_empty() {
            keys.retain(|key| {
                if delivered.len() == max.get() {
                    return true;
                }
                let Some(partition) = self.partitions.get_mut(key) else { return false };
                let was_paused = partition.is_paused();
                let next = partition.deliver();
                self.has_resumed |= was_paused && !partition.is_paused();
                let Some((offset, record)) = next else { return false };
                let (assignment_number, fence) = (partition.assignment_number, partition.fence);
                delivered.push(Delivered {
                    key: key.clone(),
                    assignment_number,
                    fence,
                    offset,
                    record,
                });
                true
            });
        }
        if let Some(last) = delivered.last() {
            self.last_delivered = Some(last.key.clone());
        }
        delivered
    }
}

/// Settings of the polling thread.
#[derive(Clone, Debug)]
pub(super) struct PollSettings {
    pub(super) limits: PartitionLimits,
    pub(super) start_at: super::KafkaStartAt,
    pub(super) retention: Option<Duration>,
    pub(super) commit_every: Duration,
    pub(super) drain_for: Duration,
    pub(super) idle_check_after: Duration,
    pub(super) request_timeout: Duration,
    /// The store of positions, in positions mode.
    pub(super) positions: Option<Arc<dyn PositionStore>>,
}

impl PollSettings {
    /// Returns what an operator does about a partition that is stopped.
    pub(super) const fn remedy(&self) -> &'static str {
        match self.positions {
            Some(_) => "set the position by hapax_position_set",
            None => "reset the committed offset of the group",
        }
    }
}

#[cfg(test)]
mod tests {
    use std::thread::park_timeout;

    use hapax_messages::Message;

    use super::super::metadata::CommitMetadata;
    use super::*;

    /// Returns a state and the key of its partition, which is paused, is of assignment 1, and has one delivered record.
    /// The current thread is the polling thread.
    fn paused_partition() -> (Shared, PartitionKey) {
        let (shared, key) = (Shared::default(), (Arc::from("orders"), 0));
        shared.set_poller();
        let open = CommitMetadata::Open { end: 1, handled: None };
        let committed = Some(Commit { offset: 0, metadata: open });
        let limits = PartitionLimits {
            records: 1,
            bytes: usize::MAX,
            uncommitted: usize::MAX,
            waiting: usize::MAX,
        };
        let mut partition = Partition::new(limits, 1, 0, committed, (0, 0));
        let message = Message::new("kafka://orders", "x");
        partition.accept(0, Box::new(Record { message, bytes: 1, ..Record::default() })).unwrap();
        partition.confirm();
        partition.deliver().unwrap();
        let mut state = shared.lock();
        state.partitions.insert(key.clone(), partition);
        assert!(state.is_paused(&key));
        drop(state);
        (shared, key)
    }

    #[test]
    fn changes_of_the_shared_state_wake_the_polling_thread() {
        type Change = fn(&Shared, PartitionKey);
        let changes: [(&str, Change); 6] = [
            ("an acknowledgement that ends a pause", |shared, key| {
                assert!(shared.acknowledge(&key, 1, 0, 1));
            }),
            ("the end of a commit", |shared, _| shared.end_commit(Some(Ok(())))),
            ("a request of a first offset that failed", |shared, key| {
                let mut state = shared.lock();
                state.begin_assignment(BTreeSet::from([key.clone()]));
                let (number, _) = state.begin_resolving().unwrap();
                drop(state);
                assert!(shared.resolved(number, key, None));
            }),
            ("a position with another owner", |shared, key| shared.resolve_again(&key, 1)),
            ("the end of the source", |shared, _| shared.close()),
            ("an error that ends the source", |shared, _| shared.end("x".to_owned())),
        ];
        for (name, change) in changes {
            let (shared, key) = paused_partition();
            change(&shared, key);
            let (begun, limit) = (Instant::now(), Duration::from_secs(60));
            park_timeout(limit);
            assert!(begun.elapsed() < limit, "{name} does not wake the thread");
        }
    }
}
