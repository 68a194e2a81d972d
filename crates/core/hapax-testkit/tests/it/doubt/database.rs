//! A database, as far as it is relied upon: a row that a transaction has written is locked until that
//! ends, and a COMMIT that is on its way may arrive for as long as its connection lives.

use std::collections::HashMap;

use hapax_core::store::{Snapshot, Stamp, Stamped, StoredRecord, Swap, Swapped};
use hapax_core::{FencingToken, LeaseId, RecordState, Timestamp};

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Fate {
    Open,
    /// Its swap is written, and the row locked.
    Written,
    Committed,
    RolledBack,
}

pub(super) struct Tx {
    pub(super) fate: Fate,
    /// COMMIT is on its way.
    pub(super) sent: bool,
    /// Whoever had its connection is dead.
    pub(super) orphaned: bool,
    /// Writes a checkpoint; the execution continues.
    pub(super) checkpoints: bool,
    pub(super) written: Option<Swap>,
}

pub(super) struct Database {
    pub(super) locks: bool,
    pub(super) now: u64,
    pub(super) stored: Option<StoredRecord>,
    pub(super) transactions: Vec<Tx>,
    /// Number of transactions with an outcome that took effect, by generation.
    pub(super) effects: HashMap<LeaseId, u32>,
    /// An operator, or time, took away what would tell.
    pub(super) forgotten: bool,
}

impl Database {
    pub(super) fn snapshot(&self) -> Snapshot {
        Snapshot { now: Timestamp::from_micros(self.now), stored: self.stored.clone() }
    }

    pub(super) fn holds_lock(&self, tx: usize) -> bool {
        self.locks && self.transactions[tx].fate == Fate::Written
    }

    pub(super) fn is_locked(&self) -> bool {
        (0..self.transactions.len()).any(|tx| self.holds_lock(tx))
    }

    pub(super) fn write(&mut self, swap: &Swap) -> Stamped {
        let now = Timestamp::from_micros(self.now);
        let last = self.stored.as_ref().map(|stored| stored.fence);
        let generation = swap.draft.record.generation;
        self.forgotten |=
            self.stored.as_ref().is_some_and(|stored| stored.record.generation != generation);
        let fence = match (swap.draft.stamp, last) {
            (Stamp::Keep, Some(last)) => last,
            _ => FencingToken::next(last, now),
        };
        let lease_until = now.after(swap.draft.lease);
        self.stored = Some(StoredRecord {
            write_id: swap.write_id,
            fence,
            lease_until,
            keep_until: swap.draft.keep.map(|keep| now.after(keep)),
            record: swap.draft.record.clone(),
        });
        Stamped { now, fence, lease_until }
    }

    /// By a connection of the store's. `None`: the row is locked.
    pub(super) fn swap(&mut self, swap: &Swap) -> Option<Swapped> {
        if let Some(stored) = &self.stored
            && stored.write_id == swap.write_id
        {
            let StoredRecord { fence, lease_until, .. } = *stored;
            let now = Timestamp::from_micros(self.now);
            return Some(Swapped::Stored(Stamped { now, fence, lease_until }));
        }
        if self.stored.as_ref().map(|stored| stored.write_id) != swap.expected {
            return Some(Swapped::Conflict(self.snapshot()));
        }
        if self.is_locked() {
            return None;
        }
        Some(Swapped::Stored(self.write(swap)))
    }

    pub(super) fn begin(&mut self) -> usize {
        self.transactions.push(Tx {
            fate: Fate::Open,
            sent: false,
            orphaned: false,
            checkpoints: false,
            written: None,
        });
        self.transactions.len() - 1
    }

    /// In a transaction. `None`: it waits for another's lock.
    pub(super) fn swap_in(&mut self, tx: usize, swap: &Swap) -> Option<Swapped> {
        if self.is_locked() {
            return None;
        }
        if self.stored.as_ref().map(|stored| stored.write_id) != swap.expected {
            self.transactions[tx].fate = Fate::RolledBack;
            return Some(Swapped::Conflict(self.snapshot()));
        }
        self.transactions[tx].fate = Fate::Written;
        self.transactions[tx].checkpoints = swap.draft.record.state == RecordState::InFlight;
        self.transactions[tx].written = Some(swap.clone());
        let fence = self.stored.as_ref().unwrap().fence;
        let now = Timestamp::from_micros(self.now);
        Some(Swapped::Stored(Stamped { now, fence, lease_until: now.after(swap.draft.lease) }))
    }

    pub(super) fn commit(&mut self, tx: usize) {
        if self.transactions[tx].fate != Fate::Written {
            return;
        }
        self.transactions[tx].fate = Fate::Committed;
        let swap = self.transactions[tx].written.take().unwrap();
        if !self.transactions[tx].checkpoints {
            *self.effects.entry(swap.draft.record.generation).or_default() += 1;
        }
        self.write(&swap);
    }

    /// Its connection dies.
    pub(super) fn roll_back(&mut self, tx: usize) {
        if matches!(self.transactions[tx].fate, Fate::Open | Fate::Written) {
            self.transactions[tx].fate = Fate::RolledBack;
        }
    }
}
