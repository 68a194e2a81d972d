//! The store of the simulated installation: three cells and a clock that can be wrong.

use hapax::store::{Cell, Snapshot, Stamp, Stamped, Swap, Swapped};
use hapax::{FencingToken, State, Timestamp};

use super::bug::Bug;

/// When every schedule begins.
const EPOCH: u64 = 1_790_000_000_000_000;

#[derive(Debug, Default)]
pub(super) struct ModelStore {
    pub(super) cells: Vec<Option<Cell>>,
    /// How far its clock is off, in microseconds.
    pub(super) offset: i64,
}

impl ModelStore {
    pub(super) fn reset(&mut self, keys: usize) {
        self.cells.clear();
        self.cells.resize(keys, None);
        self.offset = 0;
    }

    /// What its clock shows when the time is `now`.
    pub(super) const fn clock(&self, now: u64) -> u64 {
        (EPOCH + now).saturating_add_signed(self.offset)
    }

    pub(super) fn load(&self, key: usize, now: u64) -> Snapshot {
        Snapshot { now: Timestamp::from_micros(self.clock(now)), cell: self.cells[key].clone() }
    }

    /// What a swap comes to, and whether it is to be written.
    pub(super) fn judge(&self, key: usize, now: u64, swap: &Swap) -> (Swapped, bool) {
        let clock = Timestamp::from_micros(self.clock(now));
        let found = self.cells[key].as_ref();
        if let Some(cell) = found
            && cell.tag == swap.tag
        {
            return (Swapped::Stored(stamped(clock, cell)), false);
        }
        if found.map(|cell| cell.tag) != swap.expected {
            return (Swapped::Conflict(self.load(key, now)), false);
        }
        (Swapped::Stored(stamped(clock, &written(clock, found, swap))), true)
    }

    /// Writes, whatever is there.
    pub(super) fn write(&mut self, key: usize, now: u64, swap: &Swap) -> u64 {
        let clock = Timestamp::from_micros(self.clock(now));
        let cell = written(clock, self.cells[key].as_ref(), swap);
        let fence = cell.fence.get();
        self.cells[key] = Some(cell);
        fence
    }

    /// Removes what is due, and answers which.
    pub(super) fn reap(&mut self, now: u64, bug: Option<Bug>) -> Vec<usize> {
        let clock = Timestamp::from_micros(self.clock(now));
        let due = |cell: &Cell| match (bug, &cell.record.state) {
            (Some(Bug::ReapsReleasedAtOnce), State::Released) => true,
            (Some(Bug::ReapsByTheLease), State::InFlight | State::Unknown { .. }) => {
                cell.lease_until.after(cell.record.terms.retention) <= clock
            }
            _ => cell.keep_until.is_some_and(|until| until.after(cell.record.terms.lease) <= clock),
        };
        let mut removed = Vec::new();
        for (key, cell) in self.cells.iter_mut().enumerate() {
            if cell.as_ref().is_some_and(due) {
                *cell = None;
                removed.push(key);
            }
        }
        removed
    }
}

fn written(clock: Timestamp, found: Option<&Cell>, swap: &Swap) -> Cell {
    let last = found.map(|cell| cell.fence);
    Cell {
        tag: swap.tag,
        fence: match (swap.draft.stamp, last) {
            (Stamp::Keep, Some(last)) => last,
            _ => FencingToken::next(last, clock),
        },
        lease_until: clock.after(swap.draft.lease),
        keep_until: swap.draft.keep.map(|keep| clock.after(keep)),
        record: swap.draft.record.clone(),
    }
}

const fn stamped(now: Timestamp, cell: &Cell) -> Stamped {
    Stamped { now, fence: cell.fence, lease_until: cell.lease_until }
}
