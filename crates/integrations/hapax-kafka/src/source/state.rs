//! State that the polling thread, receivers and deliveries share.

use std::collections::{BTreeMap, BTreeSet};
use std::num::NonZeroUsize;
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::sync::Notify;

use super::partition::{Partition, PartitionLimits, Record};

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

/// A record and where it belongs.
#[derive(Debug)]
pub(super) struct Delivered {
    pub(super) key: PartitionKey,
    pub(super) epoch: u64,
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
        self.stopped.clear();
        self.is_draining = false;
        self.is_assigned = false;
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
                let epoch = partition.epoch;
                delivered.push(Delivered { key: key.clone(), epoch, offset, record });
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
}
