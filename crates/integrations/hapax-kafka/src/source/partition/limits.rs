//! The limits of a partition, and its pause.

use super::{Partition, Verification};

/// Limits of a partition.
#[derive(Clone, Copy, Debug)]
pub(in super::super) struct PartitionLimits {
    /// Unacknowledged records at which the partition pauses, and most records that a commit opens.
    pub(in super::super) records: usize,
    /// Bytes of unacknowledged records at which it pauses.
    pub(in super::super) bytes: usize,
    /// Records from the first unacknowledged one on, acknowledged or not, at which it pauses.
    pub(in super::super) uncommitted: usize,
    /// Waiting records at which it pauses. They do not count for the first two limits, and have as many bytes as the
    /// others.
    pub(in super::super) waiting: usize,
}

/// A limit of a partition.
struct Limit {
    name: &'static str,
    value: usize,
    is_of_waiting: bool,
}

impl Partition {
    /// Returns whether no further records are read: from the time at which the partition reaches a limit until it is
    /// below seven eighths of each. So the polling thread is not woken after each acknowledgement, and messages that a
    /// consumer holds for their next attempts stop the other keys of the partition only if they nearly reach a limit.
    /// The record by which the log is verified is read at a limit too: it is not added, and without it nothing is delivered.
    pub(in super::super) fn is_paused(&self) -> bool {
        self.is_paused && self.verification != Verification::Fetched
    }

    pub(super) fn update_paused(&mut self) {
        self.is_paused = self.reached(self.is_paused).next().is_some();
    }

    /// Returns the name and the value of the limit by which no further records are read, if it is one of those that wait, or
    /// if records wait and no other one is in the partition.
    pub(in super::super) fn full_limit(&self) -> Option<(&'static str, usize)> {
        let has_others = self.delivered > 0 || !self.ready.is_empty();
        let waits = self.waiting.records() > 0;
        let mut reached = self.reached(self.is_paused);
        let full = reached.find(|limit| limit.is_of_waiting || (waits && !has_others))?;
        Some((full.name, full.value))
    }

    /// Returns the limits that are reached.
    fn reached(&self, was_paused: bool) -> impl Iterator<Item = Limit> + use<> {
        let PartitionLimits { records, bytes, uncommitted, waiting } = self.limits;
        let of_waiting = (self.waiting.records(), self.waiting.bytes());
        let (unacknowledged, of_others) = (
            self.unacknowledged.saturating_sub(of_waiting.0),
            self.bytes.saturating_sub(of_waiting.1),
        );
        let limit = |name, value, is_of_waiting| Limit { name, value, is_of_waiting };
        let bound = move |value: usize| if was_paused { value - value / 8 } else { value };
        [
            (unacknowledged, limit("max_unacknowledged", records, false)),
            (of_others, limit("max_unacknowledged_bytes", bytes, false)),
            (of_waiting.0, limit("max_waiting", waiting, true)),
            (of_waiting.1, limit("max_unacknowledged_bytes", bytes, true)),
            (self.tracked.len(), limit("max_uncommitted", uncommitted, false)),
        ]
        .into_iter()
        .filter(move |(found, limit)| *found >= bound(limit.value))
        .map(|(_, limit)| limit)
    }
}
