//! The store of the simulation: three records and a clock that can be wrong.

use hapax_core::store::{Snapshot, Stamp, Stamped, StoredRecord, Swap, Swapped};
use hapax_core::{FencingToken, RecordState, Timestamp};

use super::bug::Bug;

/// Time at which every schedule begins.
const EPOCH: u64 = 1_790_000_000_000_000;

#[derive(Debug, Default)]
pub(super) struct ModelStore {
    pub(super) records: Vec<Option<StoredRecord>>,
    /// Error of its clock, in microseconds.
    pub(super) offset: i64,
}

impl ModelStore {
    pub(super) fn reset(&mut self, keys: usize) {
        self.records.clear();
        self.records.resize(keys, None);
        self.offset = 0;
    }

    /// Returns the time of its clock at `now`.
    pub(super) const fn clock(&self, now: u64) -> u64 {
        (EPOCH + now).saturating_add_signed(self.offset)
    }

    pub(super) fn load(&self, key: usize, now: u64) -> Snapshot {
        Snapshot { now: Timestamp::from_micros(self.clock(now)), stored: self.records[key].clone() }
    }

    /// Returns the result of a swap, and whether it must be written.
    pub(super) fn judge(&self, key: usize, now: u64, swap: &Swap) -> (Swapped, bool) {
        let clock = Timestamp::from_micros(self.clock(now));
        let found = self.records[key].as_ref();
        if let Some(stored) = found
            && stored.write_id == swap.write_id
        {
            return (Swapped::Stored(stamped(clock, stored)), false);
        }
        if found.map(|stored| stored.write_id) != swap.expected {
            return (Swapped::Conflict(self.load(key, now)), false);
        }
        (Swapped::Stored(stamped(clock, &written(clock, found, swap))), true)
    }

    /// Writes over any record; returns the fence.
    pub(super) fn write(&mut self, key: usize, now: u64, swap: &Swap) -> u64 {
        let clock = Timestamp::from_micros(self.clock(now));
        let stored = written(clock, self.records[key].as_ref(), swap);
        let fence = stored.fence.get();
        self.records[key] = Some(stored);
        fence
    }

    /// Removes records that are due; returns their keys.
    pub(super) fn reap(&mut self, now: u64, bug: Option<Bug>) -> Vec<usize> {
        let clock = Timestamp::from_micros(self.clock(now));
        let due = |stored: &StoredRecord| match (bug, &stored.record.state) {
            (Some(Bug::ReapsReleasedAtOnce), RecordState::Released) => true,
            (
                Some(Bug::ReapsUndecidedRecords),
                RecordState::InFlight | RecordState::Unknown { .. },
            ) => stored.lease_until.after(stored.record.terms.retention) <= clock,
            _ => stored
                .keep_until
                .is_some_and(|until| until.after(stored.record.terms.lease) <= clock),
        };
        let mut removed = Vec::new();
        for (key, stored) in self.records.iter_mut().enumerate() {
            if stored.as_ref().is_some_and(due) {
                *stored = None;
                removed.push(key);
            }
        }
        removed
    }
}

fn written(clock: Timestamp, found: Option<&StoredRecord>, swap: &Swap) -> StoredRecord {
    let last = found.map(|stored| stored.fence);
    StoredRecord {
        write_id: swap.write_id,
        fence: match (swap.draft.stamp, last) {
            (Stamp::Keep, Some(last)) => last,
            _ => FencingToken::next(last, clock),
        },
        lease_until: clock.after(swap.draft.lease),
        keep_until: swap.draft.keep.map(|keep| clock.after(keep)),
        record: swap.draft.record.clone(),
    }
}

const fn stamped(now: Timestamp, stored: &StoredRecord) -> Stamped {
    Stamped { now, fence: stored.fence, lease_until: stored.lease_until }
}
