//! Records that are returned by their deliveries, in the shared state.

use tokio::time::Instant;

use super::partition::{Partition, Record};
use super::state::{PartitionKey, Shared};

impl Shared {
    /// Puts back a record whose delivery was dropped, and blocks its order key. It is delivered again unless its
    /// assignment has ended.
    pub(super) fn restore(
        &self,
        key: &PartitionKey,
        assignment_number: u64,
        offset: i64,
        record: Box<Record>,
        is_ordered: bool,
    ) {
        if let Some(partition) = self.lock().owned(key, assignment_number) {
            partition.restore(offset, record, is_ordered);
        }
        self.ended.notify_all();
        self.notify_waiting();
    }

    /// Takes back a record until its pause ends, and blocks its order key. Returns false if its assignment has ended.
    pub(super) fn delay(
        &self,
        key: &PartitionKey,
        assignment_number: u64,
        offset: i64,
        until: Instant,
        record: Box<Record>,
        order_key: Option<&str>,
    ) -> bool {
        let delayed = self.change(key, assignment_number, |partition| {
            partition.delay(offset, until, record, order_key);
        });
        self.ended.notify_all();
        delayed.is_some()
    }

    /// Blocks the order key of a record. Returns false if its assignment has ended.
    pub(super) fn keep_followers(
        &self,
        key: &PartitionKey,
        assignment_number: u64,
        offset: i64,
        order_key: &str,
    ) -> bool {
        let kept = self.change(key, assignment_number, |partition| {
            partition.keep_followers(offset, order_key);
        });
        kept.is_some()
    }

    /// Takes back a record whose order key an earlier one blocks. Returns whether it does.
    pub(super) fn keep_behind(
        &self,
        key: &PartitionKey,
        assignment_number: u64,
        offset: i64,
        record: &Record,
    ) -> bool {
        let follows = self
            .change(key, assignment_number, |partition| partition.return_behind(offset, record));
        let is_kept = follows == Some(true);
        if is_kept {
            self.ended.notify_all();
        }
        is_kept
    }

    /// Ends the pause of a record, which is delivered again unless its assignment has ended.
    pub(super) fn end_delay(
        &self,
        key: &PartitionKey,
        assignment_number: u64,
        offset: i64,
        until: Instant,
    ) {
        self.change(key, assignment_number, |partition| partition.end_delay(offset, until));
        self.notify_waiting();
    }

    /// Changes a partition, if it is of this assignment, and wakes the polling thread if that ends a pause.
    fn change<T>(
        &self,
        key: &PartitionKey,
        assignment_number: u64,
        change: impl FnOnce(&mut Partition) -> T,
    ) -> Option<T> {
        let mut state = self.lock();
        let partition = state.owned(key, assignment_number)?;
        let was_paused = partition.is_paused();
        let changed = change(partition);
        let is_resumed = was_paused && !partition.is_paused();
        drop(state);
        if is_resumed {
            self.wake_poller();
        }
        Some(changed)
    }
}
