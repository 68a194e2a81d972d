//! State that the polling thread, receivers and deliveries share.

use std::collections::{BTreeMap, BTreeSet};
use std::error::Error as _;
use std::num::NonZeroUsize;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use hapax_messages::{PositionError, PositionStore, TakenPosition};
use tokio::runtime::Handle;
use tokio::sync::Notify;

use super::partition::{Commit, Partition, PartitionLimits, Record};

/// Topic and number of a partition.
pub(super) type PartitionKey = (String, i32);

/// State of a source that its parts share.
#[derive(Debug, Default)]
pub(super) struct Shared {
    state: Mutex<State>,
    /// Signals a thread that drains: a delivery has ended.
    delivery_ended: Condvar,
    /// Wakes receivers and those who wait for an assignment or the end.
    changed: Notify,
}

#[derive(Debug, Default)]
pub(super) struct State {
    pub(super) partitions: BTreeMap<PartitionKey, Partition>,
    /// Assigned partitions whose position was not read yet.
    pub(super) unresolved: BTreeSet<PartitionKey>,
    /// Assigned partitions whose position is being taken in the database, each with the number of the
    /// call.
    taking: BTreeMap<PartitionKey, u64>,
    /// Number of the last of these calls.
    takes: u64,
    /// Assigned partitions whose position was taken in the database, and that are not fetched yet.
    pub(super) taken: Vec<Taken>,
    /// Assigned partitions that are not received, and why.
    pub(super) stopped: BTreeMap<PartitionKey, String>,
    /// Number of the last assignment.
    pub(super) epoch: u64,
    /// Nothing is delivered while partitions are being revoked.
    pub(super) is_draining: bool,
    /// Whether partitions, possibly none, are assigned.
    pub(super) is_assigned: bool,
    pub(super) is_closing: bool,
    pub(super) is_closed: bool,
    /// The last partition of which a record was delivered.
    turn: Option<PartitionKey>,
    /// An error that no receiver has returned yet.
    error: Option<String>,
}

/// A partition whose position was taken in the database.
#[derive(Debug)]
pub(super) struct Taken {
    pub(super) key: PartitionKey,
    /// The commit that the broker has.
    pub(super) stored: Option<Commit>,
    pub(super) position: TakenPosition,
}

/// A record and where it belongs.
#[derive(Debug)]
pub(super) struct Delivered {
    pub(super) key: PartitionKey,
    pub(super) epoch: u64,
    pub(super) fence: Option<u64>,
    pub(super) offset: i64,
    pub(super) record: Record,
}

impl Shared {
    pub(super) fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Wakes everyone who waits for a change of the state.
    pub(super) fn notify(&self) {
        self.changed.notify_waiters();
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

    /// Notes an error, which the next receiver returns.
    pub(super) fn fail(&self, error: String) {
        tracing::warn!(%error, "a Kafka source failed");
        self.lock().error = Some(error);
        self.notify();
    }

    /// Waits until no delivery is left, or for the time. Returns whether none is left.
    pub(super) fn wait_drained(&self, time: Duration) -> bool {
        let state = self.lock();
        let waited = self.delivery_ended.wait_timeout_while(state, time, |state| {
            state.partitions.values().any(|partition| partition.delivered() > 0)
        });
        let (_state, result) = waited.unwrap_or_else(PoisonError::into_inner);
        !result.timed_out()
    }

    /// Marks a record as finished. Returns false if its assignment has ended.
    pub(super) fn finish(&self, key: &PartitionKey, epoch: u64, offset: i64, bytes: usize) -> bool {
        let found = match self.lock().owned(key, epoch) {
            Some(partition) => {
                partition.finish(offset, bytes);
                true
            }
            None => false,
        };
        self.delivery_ended.notify_all();
        found
    }

    /// Returns a record, which is delivered again if its assignment has not ended.
    pub(super) fn restore(&self, key: &PartitionKey, epoch: u64, offset: i64, record: Record) {
        if let Some(partition) = self.lock().owned(key, epoch) {
            partition.restore(offset, record);
        }
        self.delivery_ended.notify_all();
        self.notify();
    }

    /// Returns whether a handler may begin with a delivery: it is of the current assignment, and its
    /// partition is not being revoked.
    pub(super) fn may_begin(&self, key: &PartitionKey, epoch: u64) -> bool {
        let mut state = self.lock();
        !state.is_draining && state.owned(key, epoch).is_some()
    }

    /// Ends the deliveries of a partition, whose position is taken again.
    pub(super) fn take_again(&self, key: &PartitionKey, epoch: u64) {
        let mut state = self.lock();
        if state.owned(key, epoch).is_some() {
            state.partitions.remove(key);
            // Deliveries of before are not those of the partition that is created next.
            state.epoch += 1;
            state.unresolved.insert(key.clone());
            state.is_assigned = false;
        }
        drop(state);
        self.delivery_ended.notify_all();
        self.notify();
    }

    /// Notes the result of the call with this number.
    pub(super) fn took(
        &self,
        number: u64,
        key: PartitionKey,
        stored: Option<Commit>,
        taken: Result<TakenPosition, PositionError>,
    ) {
        let mut state = self.lock();
        // The assignment has ended meanwhile. If the partition has another owner, this call has fenced it:
        // it takes the position again.
        if state.taking.get(&key) != Some(&number) {
            return;
        }
        state.taking.remove(&key);
        match taken {
            Ok(position) => state.taken.push(Taken { key, stored, position }),
            Err(error) => {
                let cause = error.source().map_or(String::new(), |cause| format!(": {cause}"));
                let text = format!("{error}{cause}: it is taken again");
                state.unresolved.insert(key);
                drop(state);
                self.fail(text);
            }
        }
    }

    /// Returns whether a delivery is of the current assignment.
    pub(super) fn is_owned(&self, key: &PartitionKey, epoch: u64) -> bool {
        self.lock().owned(key, epoch).is_some()
    }
}

impl State {
    fn owned(&mut self, key: &PartitionKey, epoch: u64) -> Option<&mut Partition> {
        self.partitions.get_mut(key).filter(|partition| partition.epoch == epoch)
    }

    /// Ends all assignments: later acknowledgements are errors.
    pub(super) fn fence(&mut self) {
        self.partitions.clear();
        self.unresolved.clear();
        self.taking.clear();
        self.taken.clear();
        self.stopped.clear();
        self.is_draining = false;
        self.is_assigned = false;
    }

    /// Returns whether the position of every assigned partition is known.
    pub(super) fn is_resolved(&self) -> bool {
        self.unresolved.is_empty() && self.taking.is_empty() && self.taken.is_empty()
    }

    /// Notes that the position of a partition is being taken. Returns the number of the call.
    pub(super) fn begin_take(&mut self, key: PartitionKey) -> u64 {
        self.takes += 1;
        self.unresolved.remove(&key);
        self.taking.insert(key, self.takes);
        self.takes
    }

    /// Stops a partition, and says why.
    pub(super) fn stop(&mut self, key: PartitionKey, cause: String) {
        let error = format!("the partition {} of {} is stopped: {cause}", key.1, key.0);
        tracing::error!(%error, "a partition is not received");
        self.partitions.remove(&key);
        self.unresolved.remove(&key);
        self.stopped.insert(key, cause);
        self.error = Some(error);
    }

    /// Returns an error that was not returned yet.
    pub(super) fn take_error(&mut self) -> Option<String> {
        self.error.take()
    }

    /// Delivers up to `max` records, one of each partition in turn.
    pub(super) fn deliver(&mut self, max: NonZeroUsize) -> Vec<Delivered> {
        let mut delivered = Vec::new();
        if self.is_draining || self.is_closing {
            return delivered;
        }
        let mut keys: Vec<_> = self.partitions.keys().cloned().collect();
        let begin = keys.partition_point(|key| Some(key) <= self.turn.as_ref());
        keys.rotate_left(begin);
        while delivered.len() < max.get() && !keys.is_empty() {
            keys.retain(|key| {
                if delivered.len() == max.get() {
                    return true;
                }
                let Some(partition) = self.partitions.get_mut(key) else { return false };
                let Some((offset, record)) = partition.deliver() else { return false };
                let (epoch, fence) = (partition.epoch, partition.fence);
                delivered.push(Delivered { key: key.clone(), epoch, fence, offset, record });
                true
            });
        }
        if let Some(last) = delivered.last() {
            self.turn = Some(last.key.clone());
        }
        delivered
    }

    /// Creates the state of a partition.
    pub(super) fn insert(&mut self, key: PartitionKey, partition: Partition) {
        self.unresolved.remove(&key);
        self.partitions.insert(key, partition);
    }
}

/// Settings of the polling thread.
#[derive(Clone, Debug)]
pub(super) struct PollSettings {
    pub(super) limits: PartitionLimits,
    pub(super) start_at: super::KafkaStartAt,
    pub(super) commit_every: Duration,
    pub(super) drain_for: Duration,
    pub(super) check_after: Duration,
    pub(super) request_timeout: Duration,
    pub(super) positions: Option<DatabasePositions>,
}

/// Positions in a database.
#[derive(Clone, Debug)]
pub(super) struct DatabasePositions {
    pub(super) store: Arc<dyn PositionStore>,
    /// Runs the calls of the store: none blocks the polling thread.
    pub(super) runtime: Handle,
}

impl PollSettings {
    /// Returns what an operator does about a partition that is stopped.
    pub(super) const fn remedy(&self) -> &'static str {
        match self.positions {
            Some(_) => "set the position by hapax_position_set",
            None => "reset the position of the group",
        }
    }
}
