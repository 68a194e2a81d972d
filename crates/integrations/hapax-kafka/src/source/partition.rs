//! The state of one partition: which records were delivered, and which offset may be committed. It
//! performs no I/O.
//!
//! 1. `base` is the position to commit. Each record before it is finished.
//! 2. A record is delivered only if the broker has confirmed a commit whose metadata contains its
//!    offset ([`Mark::Open`]). So the next owner knows which records may have been started.
//! 3. A delivery belongs to an assignment. After the assignment has ended, it changes nothing.

use std::collections::{BTreeMap, VecDeque};

use hapax_messages::{Message, TakenPosition};

use super::mark::Mark;

/// Limits of a partition.
#[derive(Clone, Copy, Debug)]
pub(super) struct PartitionLimits {
    /// Unfinished records at which the partition pauses, and number of records that a commit opens.
    pub(super) records: usize,
    /// Bytes of unfinished records at which it pauses.
    pub(super) bytes: usize,
    /// Records behind the first unfinished one, finished or not, at which it pauses.
    pub(super) ahead: usize,
}

/// A record that was received and not delivered, or delivered and returned.
#[derive(Debug)]
pub(super) struct Record {
    pub(super) message: Message,
    pub(super) bytes: usize,
    pub(super) millis: i64,
    /// Offset after that of the record before it.
    pub(super) from: i64,
    pub(super) is_redelivery: bool,
}

/// A record that was not finished before its predecessor was.
#[derive(Debug)]
struct Tracked {
    offset: i64,
    millis: i64,
    is_finished: bool,
}

/// A position with its metadata, as it is committed.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Commit {
    pub(super) offset: i64,
    pub(super) mark: Mark,
}

/// A partition that is assigned to this process.
#[derive(Debug)]
pub(super) struct Partition {
    limits: PartitionLimits,
    /// Number of the assignment.
    pub(super) epoch: u64,
    /// Fencing token of this process, if the position is in a database.
    pub(super) fence: Option<u64>,
    base: i64,
    /// Time of the record before `base`, in milliseconds.
    base_millis: Option<i64>,
    /// The next offset to receive.
    next: i64,
    /// Records from `base` on, by offset.
    tracked: VecDeque<Tracked>,
    ready: BTreeMap<i64, Record>,
    unfinished: usize,
    bytes: usize,
    delivered: usize,
    /// Offset after the last record that was ever delivered.
    delivered_end: i64,
    /// Records before this offset may have been started by an earlier owner.
    suspects_end: i64,
    /// The position that the broker has confirmed.
    committed: Option<Commit>,
    is_paused: bool,
    /// The record before the position, which shows whether the topic is still the same one.
    probe: Option<Probe>,
}

/// Offset and time of a record that was committed.
#[derive(Clone, Copy, Debug)]
struct Probe {
    offset: i64,
    millis: i64,
}

/// The record before the position is another one than the record that was handled.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Recreated {
    pub(super) offset: i64,
    pub(super) expected: i64,
    pub(super) found: i64,
}

impl Partition {
    /// Creates the state of a partition whose next record is at `base`. `stored` is the commit that
    /// the broker has, if any, and `log` are the offsets of the log's first record and of its end.
    pub(super) fn new(
        limits: PartitionLimits,
        epoch: u64,
        base: i64,
        stored: Option<Commit>,
        log: (i64, i64),
    ) -> Self {
        let suspects_end = stored.map_or(base, |stored| match stored.mark {
            Mark::Open { end, .. } => end,
            Mark::Clean { .. } => base,
            // As many as an owner without a mark may have had.
            Mark::Unknown => base.saturating_add(offsets(limits.records)),
        });
        // No process has started a record that is not in the log yet.
        let suspects_end = suspects_end.min(log.1);
        let millis = stored.and_then(|stored| stored.mark.millis());
        let probe = millis.map(|millis| Probe { offset: base.saturating_sub(1), millis });
        Self {
            limits,
            epoch,
            fence: None,
            base,
            base_millis: millis,
            next: base,
            tracked: VecDeque::new(),
            ready: BTreeMap::new(),
            unfinished: 0,
            bytes: 0,
            delivered: 0,
            delivered_end: base,
            suspects_end,
            committed: stored,
            is_paused: false,
            probe: probe.filter(|probe| probe.offset >= log.0),
        }
    }

    /// Sets the fencing token and the time of the record before the position, which are those of a
    /// position in a database. `first` is the offset of the log's first record.
    pub(super) fn taken(mut self, taken: TakenPosition, first: i64) -> Self {
        self.fence = Some(taken.fence);
        if !taken.is_new {
            self.base_millis = taken.handled_millis;
            let offset = self.base.saturating_sub(1);
            let probe = taken.handled_millis.map(|millis| Probe { offset, millis });
            self.probe = probe.filter(|probe| probe.offset >= first);
        }
        self
    }

    /// Returns the offset from which the partition has to be fetched.
    pub(super) fn fetch_from(&self) -> i64 {
        self.probe.map_or(self.next, |probe| probe.offset)
    }

    /// Returns the next offset to receive.
    pub(super) const fn next(&self) -> i64 {
        self.next
    }

    /// Takes a record that was fetched. Ignores one that it has.
    ///
    /// # Errors
    /// [`Recreated`] if the record before the position is not the one that was handled.
    pub(super) fn accept(&mut self, offset: i64, mut record: Record) -> Result<(), Recreated> {
        // A log without that record, which may have been compacted, shows nothing.
        if let Some(Probe { offset: at, millis }) = self.probe.take()
            && at == offset
            && millis != record.millis
        {
            return Err(Recreated { offset, expected: millis, found: record.millis });
        }
        if offset < self.next {
            return Ok(());
        }
        record.is_redelivery |= offset < self.suspects_end;
        record.from = self.next;
        if self.tracked.is_empty() {
            // The offsets between are those of no records.
            self.base = offset;
        }
        self.next = offset.saturating_add(1);
        self.tracked.push_back(Tracked { offset, millis: record.millis, is_finished: false });
        self.unfinished += 1;
        self.bytes = self.bytes.saturating_add(record.bytes);
        self.ready.insert(offset, record);
        Ok(())
    }

    /// Delivers the first record that is ready, if the broker has confirmed that it may be.
    pub(super) fn deliver(&mut self) -> Option<(i64, Record)> {
        let end = match self.committed?.mark {
            Mark::Open { end, .. } => end,
            Mark::Clean { .. } | Mark::Unknown => return None,
        };
        let entry = self.ready.first_entry().filter(|entry| *entry.key() < end)?;
        let (offset, record) = entry.remove_entry();
        self.delivered += 1;
        self.delivered_end = self.delivered_end.max(offset.saturating_add(1));
        Some((offset, record))
    }

    /// Returns a delivered record, which is delivered again.
    pub(super) fn restore(&mut self, offset: i64, mut record: Record) {
        self.delivered = self.delivered.saturating_sub(1);
        record.is_redelivery = true;
        self.ready.insert(offset, record);
    }

    /// Marks a delivered record of this size as finished.
    pub(super) fn finish(&mut self, offset: i64, bytes: usize) {
        let at = self.tracked.partition_point(|it| it.offset < offset);
        let Some(tracked) = self.tracked.get_mut(at).filter(|it| it.offset == offset) else {
            return;
        };
        if std::mem::replace(&mut tracked.is_finished, true) {
            return;
        }
        self.delivered = self.delivered.saturating_sub(1);
        self.unfinished = self.unfinished.saturating_sub(1);
        self.bytes = self.bytes.saturating_sub(bytes);
        while let Some(first) = self.tracked.front().filter(|it| it.is_finished) {
            self.base = first.offset.saturating_add(1);
            self.base_millis = Some(first.millis);
            self.tracked.pop_front();
        }
    }

    /// Returns the number of records that are delivered and neither finished nor returned.
    pub(super) const fn delivered(&self) -> usize {
        self.delivered
    }

    /// Returns whether a record waits for a commit that opens it.
    pub(super) fn is_blocked(&self) -> bool {
        let Some((first, _)) = self.ready.first_key_value() else { return false };
        match self.committed.map(|it| it.mark) {
            Some(Mark::Open { end, .. }) => *first >= end,
            _ => true,
        }
    }

    /// Returns what has to be committed, if the broker has something else.
    pub(super) fn commit(&self) -> Option<Commit> {
        let wanted = self.wanted();
        (self.committed != Some(wanted)).then_some(wanted)
    }

    fn wanted(&self) -> Commit {
        let millis = self.base_millis;
        let confirmed = self.committed.map(|it| it.mark);
        let mark = match (self.ready.first_key_value(), confirmed) {
            (Some((first, _)), confirmed) => {
                let room = offsets(self.limits.records);
                let end = match confirmed {
                    Some(Mark::Open { end, .. }) if first.saturating_add(room / 2) < end => end,
                    _ => first.saturating_add(room).max(self.delivered_end),
                };
                Mark::Open { end, millis }
            }
            (None, Some(Mark::Open { end, .. })) => Mark::Open { end, millis },
            // Nothing was delivered since the assignment.
            (None, Some(Mark::Clean { .. }) | None) => Mark::Clean { millis },
            (None, Some(Mark::Unknown)) => Mark::Open { end: self.suspects_end, millis },
        };
        Commit { offset: self.base, mark }
    }

    /// Returns the last commit of an assignment: clean if no delivered record is unfinished, and no
    /// suspect is left.
    pub(super) fn last_commit(&self) -> Option<Commit> {
        let millis = self.base_millis;
        let mark =
            match self.delivered == 0 && self.suspects_end <= self.base.max(self.delivered_end) {
                true => Mark::Clean { millis },
                false => Mark::Open { end: self.delivered_end.max(self.suspects_end), millis },
            };
        let last = Commit { offset: self.base, mark };
        (self.committed != Some(last)).then_some(last)
    }

    /// Notes that the broker has confirmed a commit.
    pub(super) const fn committed(&mut self, commit: Commit) {
        self.committed = Some(commit);
    }

    /// Returns whether to pause (`Some(true)`) or to resume the partition, and notes it.
    pub(super) fn turn(&mut self) -> Option<bool> {
        let PartitionLimits { records, bytes, ahead } = self.limits;
        let is_over = |part: usize| {
            self.unfinished >= (records / part).max(1)
                || self.bytes >= (bytes / part).max(1)
                || self.tracked.len() >= (ahead / part).max(1)
        };
        let turned = match self.is_paused {
            false => is_over(1).then_some(true),
            true => (!is_over(2)).then_some(false),
        };
        if let Some(is_paused) = turned {
            self.is_paused = is_paused;
        }
        turned
    }

    /// Notes that the client fetches the partition again.
    pub(super) const fn resumed(&mut self) {
        self.is_paused = false;
    }
}

fn offsets(count: usize) -> i64 {
    i64::try_from(count).unwrap_or(i64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    const LIMITS: PartitionLimits = PartitionLimits { records: 4, bytes: 1000, ahead: 6 };
    const TIME: i64 = 1_790_000_000_000;

    fn record(offset: i64) -> Record {
        let message = Message::new("kafka://orders", "x");
        Record { message, bytes: 10, millis: TIME + offset, from: 0, is_redelivery: false }
    }

    fn open(offset: i64, end: i64) -> Commit {
        let millis = (offset > 0).then_some(TIME + offset - 1);
        Commit { offset, mark: Mark::Open { end, millis } }
    }

    /// Sends the commit that is wanted.
    fn commit(partition: &mut Partition) -> Option<Commit> {
        let commit = partition.commit()?;
        partition.committed(commit);
        Some(commit)
    }

    fn deliver(partition: &mut Partition) -> Vec<(i64, bool)> {
        let records = std::iter::from_fn(|| partition.deliver());
        records.map(|(offset, record)| (offset, record.is_redelivery)).collect()
    }

    #[test]
    fn nothing_is_delivered_before_a_commit_that_opens_it_is_confirmed() {
        let mut partition = Partition::new(LIMITS, 1, 0, None, (0, 0));
        let clean = Commit { offset: 0, mark: Mark::Clean { millis: None } };
        assert_eq!(commit(&mut partition), Some(clean));
        for offset in 0..6 {
            partition.accept(offset, record(offset)).unwrap();
        }
        assert!(partition.is_blocked() && deliver(&mut partition).is_empty());
        assert_eq!(partition.commit(), Some(open(0, 4)));
        assert!(deliver(&mut partition).is_empty(), "it is not confirmed");
        assert_eq!(commit(&mut partition), Some(open(0, 4)));
        assert_eq!(deliver(&mut partition), [(0, false), (1, false), (2, false), (3, false)]);
        assert!(partition.is_blocked());
        assert_eq!(commit(&mut partition), Some(open(0, 8)));
        assert_eq!(deliver(&mut partition), [(4, false), (5, false)]);
        assert_eq!(partition.commit(), None);
    }

    #[test]
    fn the_position_does_not_pass_an_unfinished_record() {
        let mut partition = Partition::new(LIMITS, 1, 0, Some(open(0, 8)), (0, 0));
        // The offset 3 is that of no record.
        for offset in [0, 1, 2, 4] {
            partition.accept(offset, record(offset)).unwrap();
        }
        assert_eq!(deliver(&mut partition).len(), 4);
        for offset in [2, 1, 2, 4] {
            partition.finish(offset, 10);
            assert_eq!(partition.commit(), None);
        }
        assert_eq!(partition.last_commit(), Some(open(0, 5)));
        partition.finish(0, 10);
        assert_eq!(commit(&mut partition), Some(open(5, 8)));
        let clean = Mark::Clean { millis: Some(TIME + 4) };
        assert_eq!(partition.last_commit(), Some(Commit { offset: 5, mark: clean }));
        assert_eq!((partition.delivered(), partition.bytes, partition.tracked.len()), (0, 0, 0));
    }

    #[test]
    fn records_that_an_earlier_owner_may_have_started_are_suspects() {
        let unknown = Commit { offset: 2, mark: Mark::Unknown };
        let clean = Commit { offset: 2, mark: Mark::Clean { millis: None } };
        for (stored, end, suspects) in [
            (Some(open(2, 4)), 9, 2),
            (Some(open(2, 90)), 4, 2),
            (Some(unknown), 9, 4),
            (Some(clean), 9, 0),
            (None, 9, 0),
        ] {
            let mut partition = Partition::new(LIMITS, 1, 2, stored, (0, end));
            for offset in 2..9 {
                partition.accept(offset, record(offset)).unwrap();
            }
            let mut delivered = Vec::new();
            while let Some(commit) = commit(&mut partition) {
                assert!(commit.offset == 2 && matches!(commit.mark, Mark::Open { .. }));
                delivered.extend(deliver(&mut partition));
            }
            delivered.extend(deliver(&mut partition));
            let found = delivered.iter().filter(|(_, is_suspect)| *is_suspect).count();
            assert_eq!((delivered.len(), found), (7, suspects), "{stored:?} of {end}");
        }
    }

    #[test]
    fn suspects_that_are_left_stay_suspects_for_the_next_owner() {
        let mut partition = Partition::new(LIMITS, 1, 0, Some(open(0, 6)), (0, 9));
        partition.accept(0, record(0)).unwrap();
        assert_eq!(deliver(&mut partition), [(0, true)]);
        partition.finish(0, 10);
        assert_eq!(partition.last_commit(), Some(open(1, 6)));
    }

    #[test]
    fn a_returned_record_is_delivered_again_before_later_ones() {
        let mut partition = Partition::new(LIMITS, 1, 0, Some(open(0, 8)), (0, 0));
        for offset in 0..3 {
            partition.accept(offset, record(offset)).unwrap();
        }
        let (offset, first) = partition.deliver().unwrap();
        partition.restore(offset, first);
        assert_eq!(partition.delivered(), 0);
        assert_eq!(deliver(&mut partition), [(0, true), (1, false), (2, false)]);
    }

    #[test]
    fn a_partition_pauses_at_each_limit_and_resumes_at_half_of_it() {
        let limits = PartitionLimits { records: 4, bytes: 1000, ahead: 100 };
        let mut partition = Partition::new(limits, 1, 0, Some(open(0, 100)), (0, 0));
        for offset in 0..3 {
            partition.accept(offset, record(offset)).unwrap();
        }
        assert_eq!(partition.turn(), None);
        partition.accept(3, record(3)).unwrap();
        assert_eq!((partition.turn(), partition.turn()), (Some(true), None));
        deliver(&mut partition);
        for (offset, turned) in [(1, None), (2, None), (3, Some(false))] {
            partition.finish(offset, 10);
            assert_eq!(partition.turn(), turned, "{offset}");
        }
        partition.accept(4, Record { bytes: 990, ..record(4) }).unwrap();
        assert_eq!(partition.turn(), Some(true), "bytes");
        let mut partition = Partition::new(LIMITS, 1, 0, Some(open(0, 100)), (0, 0));
        for offset in 0..6 {
            partition.accept(offset, record(offset)).unwrap();
            deliver(&mut partition);
            if offset > 0 {
                partition.finish(offset, 10);
            }
        }
        assert_eq!(partition.turn(), Some(true), "ahead of the first unfinished one");
        partition.finish(0, 10);
        assert_eq!(partition.turn(), Some(false));
    }

    #[test]
    fn another_record_before_the_position_is_found() {
        let stored = Some(open(3, 3));
        let mut same = Partition::new(LIMITS, 1, 3, stored, (0, 5));
        assert_eq!((same.fetch_from(), same.next()), (2, 3));
        assert_eq!(same.accept(2, record(2)), Ok(()));
        assert_eq!((same.fetch_from(), same.tracked.len()), (3, 0));
        let mut other = Partition::new(LIMITS, 1, 3, stored, (0, 5));
        let found = other.accept(2, record(7)).unwrap_err();
        assert_eq!((found.offset, found.expected, found.found), (2, TIME + 2, TIME + 7));
        // It was deleted or compacted.
        assert_eq!(Partition::new(LIMITS, 1, 3, stored, (3, 5)).fetch_from(), 3);
        let mut compacted = Partition::new(LIMITS, 1, 3, stored, (0, 5));
        assert_eq!(compacted.accept(4, record(4)), Ok(()));
    }
}
