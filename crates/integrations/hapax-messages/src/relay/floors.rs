//! Floors: the ids below which no message is left, so that polls need not read there.
//!
//! Deleted rows stay in an index until the oldest snapshot of the database ends, and a poll from
//! the first id would read all of them. A floor must not hide a message that appears later:
//!
//! 1. The last allocated id, and the open transactions that may have allocated one, are read
//!    (*candidate*).
//! 2. Once none of these transactions is open, every message up to that id is visible or never will
//!    be.
//! 3. Then the first message above the old floor is read. The new floor is below it, and at most
//!    the candidate.
//!
//! So, when a message is visible, no earlier message of its order key is below the floor: the
//! earlier one was committed before the later one allocated its id, and step 3 read it. Messages
//! that are restored with old ids, moved back from the dead letters, or written after a failover
//! that lost ids, are the exception: a sweep each minute, the epoch of the outbox, and every error
//! of the outbox, set the floors to 0.

use std::collections::{BTreeMap, HashSet};
use std::time::Duration;

use tokio::time::Instant;

use crate::outbox::{OutboxPosition, OutboxWriters};

/// Time between two sweeps.
const SWEEP: Duration = Duration::from_secs(60);

/// Time between two steps of the floors.
const STEP: Duration = Duration::from_millis(500);

/// The floors of the shards of a relay.
#[derive(Debug)]
pub(super) struct Floors {
    floors: BTreeMap<u16, u64>,
    epoch: u64,
    candidate: Option<OutboxWriters>,
    stepped_at: Instant,
    swept_at: Instant,
}

impl Floors {
    pub(super) fn new() -> Self {
        let now = Instant::now();
        Self { floors: BTreeMap::new(), epoch: 0, candidate: None, stepped_at: now, swept_at: now }
    }

    /// Returns the floors of `shards`; 0 for a new shard. Removes the floors of other shards.
    pub(super) fn of(&mut self, shards: &HashSet<u16>) -> Vec<OutboxPosition> {
        self.floors.retain(|shard, _| shards.contains(shard));
        for shard in shards {
            self.floors.entry(*shard).or_insert(0);
        }
        if self.swept_at.elapsed() >= SWEEP {
            self.reset();
        }
        self.floors.iter().map(|(shard, id)| OutboxPosition { shard: *shard, id: *id }).collect()
    }

    /// Takes the epoch of a page. Returns false if the page is to be read again.
    pub(super) fn take_epoch(&mut self, epoch: u64) -> bool {
        let is_same = self.epoch == epoch;
        if !is_same {
            self.epoch = epoch;
            self.reset();
        }
        is_same
    }

    pub(super) fn is_due(&self) -> bool {
        self.stepped_at.elapsed() >= STEP
    }

    /// Takes the present writers. Returns the id up to which every message is visible, if it is
    /// above a floor.
    pub(super) fn take_writers(&mut self, writers: OutboxWriters) -> Option<u64> {
        self.stepped_at = Instant::now();
        let Some(candidate) = &self.candidate else {
            self.candidate = Some(writers);
            return None;
        };
        let is_open = |name: &String| writers.open.contains(name);
        // A prepared transaction may have been open under another name.
        let prepared = writers.open.iter().any(|name| name == OutboxWriters::PREPARED);
        if prepared || candidate.open.iter().any(is_open) {
            return None;
        }
        let complete = candidate.last_id;
        self.candidate = Some(writers);
        self.floors.values().any(|floor| *floor < complete).then_some(complete)
    }

    /// Raises each floor to `complete`, or to just below the first message of its shard.
    pub(super) fn raise(&mut self, complete: u64, first: &[OutboxPosition]) {
        for (shard, floor) in &mut self.floors {
            let of_shard = first.iter().find(|position| position.shard == *shard);
            let below = of_shard.map_or(u64::MAX, |position| position.id.saturating_sub(1));
            *floor = (*floor).max(complete.min(below));
        }
    }

    /// Sets the floors to 0, and begins anew: after an error the outbox may be on a server that
    /// lacks the last transactions of the one before, and allocates their ids again.
    pub(super) fn begin_anew(&mut self) {
        self.candidate = None;
        self.reset();
    }

    fn reset(&mut self) {
        self.swept_at = Instant::now();
        self.floors.values_mut().for_each(|floor| *floor = 0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn writers(last_id: u64, open: &[&str]) -> OutboxWriters {
        OutboxWriters { last_id, open: open.iter().map(ToString::to_string).collect() }
    }

    fn floors() -> Floors {
        let mut floors = Floors::new();
        floors.of(&HashSet::from([0, 1]));
        floors
    }

    #[tokio::test(start_paused = true)]
    async fn floors_rise_only_after_all_writers_of_the_candidate_have_ended() {
        let mut floors = floors();
        assert_eq!(floors.take_writers(writers(10, &["a", "b"])), None);
        assert_eq!(floors.take_writers(writers(20, &["b"])), None, "b is open");
        assert_eq!(floors.take_writers(writers(25, &["prepared"])), None, "b may be prepared");
        assert_eq!(floors.take_writers(writers(30, &["c"])), Some(10));
        floors.raise(10, &[OutboxPosition { shard: 1, id: 7 }]);
        let found = floors.of(&HashSet::from([0, 1]));
        assert_eq!(found.iter().map(|position| position.id).collect::<Vec<_>>(), [10, 6]);
    }

    #[tokio::test(start_paused = true)]
    async fn after_an_error_neither_floors_nor_the_candidate_are_known() {
        let mut floors = floors();
        assert_eq!(floors.take_writers(writers(10, &["a"])), None);
        floors.raise(5, &[]);
        floors.begin_anew();
        assert!(floors.of(&HashSet::from([0, 1])).iter().all(|position| position.id == 0));
        assert_eq!(floors.take_writers(writers(8, &[])), None, "10 is of another server");
        assert_eq!(floors.take_writers(writers(9, &[])), Some(8));
    }

    #[tokio::test(start_paused = true)]
    async fn a_sweep_another_epoch_and_a_new_shard_begin_at_zero() {
        let mut floors = floors();
        floors.raise(10, &[]);
        let found = floors.of(&HashSet::from([1, 2]));
        assert_eq!(found.iter().map(|position| position.id).collect::<Vec<_>>(), [10, 0]);
        assert!(!floors.take_epoch(1) && floors.take_epoch(1));
        assert!(floors.of(&HashSet::from([1])).iter().all(|position| position.id == 0));
        floors.raise(10, &[]);
        tokio::time::sleep(SWEEP).await;
        assert!(floors.of(&HashSet::from([1])).iter().all(|position| position.id == 0));
    }
}
