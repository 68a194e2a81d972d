//! Records that are delayed, in the shared state.

use tokio::time::Instant;

use super::partition::Record;
use super::state::{PartitionKey, Shared};

impl Shared {
    /// Blocks the order key of a record that is delayed.
    pub(super) fn block(
        &self,
        key: &PartitionKey,
        assignment_number: u64,
        order_key: &str,
        offset: i64,
    ) {
        if let Some(partition) = self.lock().owned(key, assignment_number) {
            partition.block(order_key, offset);
        }
    }

    /// Returns whether an earlier record with this order key was delayed, and is not acknowledged.
    pub(super) fn follows_delayed(
        &self,
        key: &PartitionKey,
        assignment_number: u64,
        order_key: Option<&String>,
        offset: i64,
    ) -> bool {
        self.lock()
            .owned(key, assignment_number)
            .is_some_and(|partition| partition.follows_delayed(order_key, offset))
    }

    /// Takes back a record until its pause ends.
    pub(super) fn delay(
        &self,
        key: &PartitionKey,
        assignment_number: u64,
        offset: i64,
        until: Instant,
        record: Box<Record>,
    ) {
        let mut state = self.lock();
        let is_resumed = state.owned(key, assignment_number).is_some_and(|partition| {
            let was_paused = partition.is_paused();
            partition.delay(offset, until, record);
            was_paused && !partition.is_paused()
        });
        drop(state);
        self.ended.notify_all();
        if is_resumed {
            self.wake_poller();
        }
    }

    /// Ends the pause of a record, which is delivered again unless its assignment has ended.
    pub(super) fn end_delay(
        &self,
        key: &PartitionKey,
        assignment_number: u64,
        offset: i64,
        until: Instant,
    ) {
        if let Some(partition) = self.lock().owned(key, assignment_number) {
            partition.end_delay(offset, until);
        }
        self.notify_waiting();
    }
}
