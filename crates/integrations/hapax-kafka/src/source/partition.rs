//! The state of one partition: which records were delivered, and which offset may be committed. It
//! performs no I/O.
//!
//! 1. Each record before the offset to commit is acknowledged.
//! 2. A record is delivered only if the broker has confirmed a commit whose metadata contains its
//!    offset ([`CommitMetadata::Open`]). So the next owner knows which records may have been started.
//! 3. A delivery belongs to an assignment. After the assignment has ended, the delivery changes nothing.

use std::collections::{BTreeMap, VecDeque};
use std::ops::Range;

use hapax_messages::{AcquiredPosition, Message};

use super::metadata::CommitMetadata;
use super::window::Window;

/// Limits of a partition.
#[derive(Clone, Copy, Debug)]
pub(super) struct PartitionLimits {
    /// Unacknowledged records at which the partition pauses, and most records that a commit opens.
    pub(super) records: usize,
    /// Bytes of unacknowledged records at which it pauses.
    pub(super) bytes: usize,
    /// Records from the first unacknowledged one on, acknowledged or not, at which it pauses.
    pub(super) uncommitted: usize,
}

/// A record that was received and not delivered, or delivered and returned.
#[derive(Debug, Default)]
pub(super) struct Record {
    pub(super) message: Message,
    pub(super) bytes: usize,
    /// In milliseconds; -1 if the record has none.
    pub(super) timestamp_ms: i64,
    /// Offset after that of the record before it.
    pub(super) from: i64,
    pub(super) is_redelivery: bool,
}

/// A record from the offset to commit on.
#[derive(Debug)]
struct Tracked {
    offset: i64,
    timestamp_ms: i64,
    is_acknowledged: bool,
}

/// An offset with its metadata, as it is committed.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Commit {
    pub(super) offset: i64,
    pub(super) metadata: CommitMetadata,
}

/// A partition that is assigned to this process.
#[derive(Debug)]
pub(super) struct Partition {
    limits: PartitionLimits,
    /// Number of the assignment.
    pub(super) assignment_number: u64,
    /// Fencing token of this process, if the position is in a database.
    pub(super) fence: Option<u64>,
    offset_to_commit: i64,
    /// Timestamp of the record before the offset to commit, in milliseconds.
    handled_timestamp_ms: Option<i64>,
    /// The next offset to receive.
    next: i64,
    /// Records from the offset to commit on, by offset.
    tracked: VecDeque<Tracked>,
    ready: BTreeMap<i64, Box<Record>>,
    unacknowledged: usize,
    /// Bytes of the unacknowledged records.
    bytes: usize,
    delivered: usize,
    /// Offset after the last record that was ever delivered.
    delivered_end: i64,
    /// Offsets of the records that an earlier owner may have started.
    suspects: Range<i64>,
    /// The commit that the broker has confirmed.
    committed: Option<Commit>,
    window: Window,
    is_paused: bool,
    /// The record before the first one to handle, by which a topic that was created again is detected.
    topic_check: Option<TopicCheck>,
}

/// Offset and timestamp of a record that was handled.
#[derive(Clone, Copy, Debug)]
struct TopicCheck {
    offset: i64,
    timestamp_ms: i64,
}

/// Error: at the offset of a record that was handled there is another one.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Recreated {
    pub(super) offset: i64,
    pub(super) expected: i64,
    pub(super) found: i64,
}

impl Partition {
    /// Creates the state of a partition whose next record is at `first`. `committed` is the commit that
    /// the broker has, if any, and `watermarks` are the offsets of the log's first record and of its end.
    pub(super) fn new(
        limits: PartitionLimits,
        assignment_number: u64,
        first: i64,
        committed: Option<Commit>,
        watermarks: (i64, i64),
    ) -> Self {
        let suspects = committed.map_or(first..first, |stored| match stored.metadata {
            // An operator may have set an earlier position: the records before the commit were acknowledged.
            CommitMetadata::Open { end, .. } => stored.offset..end,
            CommitMetadata::Clean { .. } => first..first,
            // As many as an owner without metadata may have had.
            CommitMetadata::Unknown => first..first.saturating_add(to_offsets(limits.records)),
        });
        // No process has started a record that is not in the log yet.
        let suspects = suspects.start..suspects.end.min(watermarks.1);
        let timestamp_ms = committed.and_then(|stored| stored.metadata.timestamp_ms());
        let topic_check = timestamp_ms
            .map(|timestamp_ms| TopicCheck { offset: first.saturating_sub(1), timestamp_ms });
        Self {
            limits,
            assignment_number,
            fence: None,
            offset_to_commit: first,
            handled_timestamp_ms: timestamp_ms,
            next: first,
            tracked: VecDeque::new(),
            ready: BTreeMap::new(),
            unacknowledged: 0,
            bytes: 0,
            delivered: 0,
            delivered_end: first,
            suspects,
            committed,
            window: Window::new(limits.records, first),
            is_paused: false,
            topic_check: topic_check.filter(|check| check.offset >= watermarks.0),
        }
    }

    /// Sets the fencing token and the timestamp of the record before the position, which are those of a
    /// position in a database. `first` is the offset of the log's first record.
    pub(super) fn with_position(mut self, position: AcquiredPosition, first: i64) -> Self {
        self.fence = Some(position.fence);
        if !position.is_new {
            self.handled_timestamp_ms = position.handled_timestamp_ms;
            let offset = self.offset_to_commit.saturating_sub(1);
            let check = position
                .handled_timestamp_ms
                .map(|timestamp_ms| TopicCheck { offset, timestamp_ms });
            self.topic_check = check.filter(|check| check.offset >= first);
        }
        self
    }

    /// Returns the offset from which the partition has to be fetched.
    pub(super) fn fetch_from(&self) -> i64 {
        self.topic_check.map_or(self.next, |check| check.offset)
    }

    /// Returns the next offset to receive.
    pub(super) const fn next(&self) -> i64 {
        self.next
    }

    /// Adds a record that was fetched. Ignores one that was added before.
    ///
    /// # Errors
    /// [`Recreated`] if the record before the first one to handle is not the one that was handled.
    pub(super) fn accept(&mut self, offset: i64, mut record: Box<Record>) -> Result<(), Recreated> {
        // A log without that record, which may have been compacted, shows nothing.
        if let Some(TopicCheck { offset: at, timestamp_ms }) = self.topic_check.take()
            && at == offset
            && timestamp_ms != record.timestamp_ms
        {
            return Err(Recreated { offset, expected: timestamp_ms, found: record.timestamp_ms });
        }
        if offset < self.next {
            return Ok(());
        }
        record.is_redelivery |= self.suspects.contains(&offset);
        record.from = self.next;
        if self.tracked.is_empty() {
            // The offsets between are those of no records.
            self.offset_to_commit = offset;
        }
        self.next = offset.saturating_add(1);
        let timestamp_ms = record.timestamp_ms;
        self.tracked.push_back(Tracked { offset, timestamp_ms, is_acknowledged: false });
        self.unacknowledged += 1;
        self.bytes = self.bytes.saturating_add(record.bytes);
        self.ready.insert(offset, record);
        self.update_paused();
        Ok(())
    }

    /// Delivers the first record that is ready, if the broker has confirmed that it may be.
    pub(super) fn deliver(&mut self) -> Option<(i64, Box<Record>)> {
        let end = self.open_end()?;
        let entry = self.ready.first_entry().filter(|entry| *entry.key() < end)?;
        let (offset, record) = entry.remove_entry();
        self.delivered += 1;
        self.delivered_end = self.delivered_end.max(offset.saturating_add(1));
        Some((offset, record))
    }

    /// Returns a delivered record, which is delivered again.
    pub(super) fn restore(&mut self, offset: i64, mut record: Box<Record>) {
        self.delivered = self.delivered.saturating_sub(1);
        record.is_redelivery = true;
        self.ready.insert(offset, record);
    }

    /// Acknowledges a delivered record of this size.
    pub(super) fn acknowledge(&mut self, offset: i64, bytes: usize) {
        let at = self.tracked.partition_point(|it| it.offset < offset);
        let Some(tracked) = self.tracked.get_mut(at).filter(|it| it.offset == offset) else {
            return;
        };
        if std::mem::replace(&mut tracked.is_acknowledged, true) {
            return;
        }
        self.delivered = self.delivered.saturating_sub(1);
        self.unacknowledged = self.unacknowledged.saturating_sub(1);
        self.bytes = self.bytes.saturating_sub(bytes);
        while let Some(first) = self.tracked.front().filter(|it| it.is_acknowledged) {
            self.offset_to_commit = first.offset.saturating_add(1);
            self.handled_timestamp_ms = Some(first.timestamp_ms);
            self.tracked.pop_front();
        }
        self.update_paused();
    }

    /// Returns whether every record that was received is acknowledged.
    pub(super) const fn is_idle(&self) -> bool {
        self.unacknowledged == 0
    }

    /// Returns the number of records that are delivered and neither acknowledged nor returned.
    pub(super) const fn delivered(&self) -> usize {
        self.delivered
    }

    /// Returns whether a record waits for a commit that opens it.
    pub(super) fn waits_for_commit(&self) -> bool {
        let first = self.ready.first_key_value().map(|(first, _)| *first);
        first.is_some_and(|first| self.open_end().is_none_or(|end| first >= end))
    }

    /// Returns whether the next commit opens records, which it does if at most half of a window is open and not
    /// delivered. The other half is delivered while the commit is in progress.
    pub(super) fn opens_records(&self) -> bool {
        self.next_open_end().is_some()
    }

    /// Returns the offset after the records that the confirmed commit opens; `None` if it opens none, or only records
    /// after the offset to commit, because an operator has set an earlier position.
    fn open_end(&self) -> Option<i64> {
        let committed = self.committed.filter(|it| it.offset <= self.offset_to_commit)?;
        match committed.metadata {
            CommitMetadata::Open { end, .. } => Some(end),
            CommitMetadata::Clean { .. } | CommitMetadata::Unknown => None,
        }
    }

    /// Returns the offset after the records that the next commit opens; `None` if it opens none.
    fn next_open_end(&self) -> Option<i64> {
        let (first, _) = self.ready.first_key_value()?;
        let window = self.window.records();
        match self.open_end() {
            Some(end) if first.saturating_add(window / 2) < end => None,
            // Suspects that are left stay suspects for the next owner.
            _ => Some(first.saturating_add(window).max(self.delivered_end).max(self.suspects.end)),
        }
    }

    /// Returns the commit to send; `None` if the broker has it.
    pub(super) fn commit(&self) -> Option<Commit> {
        let wanted = self.wanted();
        (self.committed != Some(wanted)).then_some(wanted)
    }

    fn wanted(&self) -> Commit {
        let timestamp_ms = self.handled_timestamp_ms;
        let confirmed = self.committed.map(|it| it.metadata);
        let metadata = match (self.next_open_end(), confirmed) {
            (Some(end), _) | (None, Some(CommitMetadata::Open { end, .. })) => {
                CommitMetadata::Open { end, timestamp_ms }
            }
            // Nothing was delivered since the assignment.
            (None, Some(CommitMetadata::Clean { .. }) | None) => {
                CommitMetadata::Clean { timestamp_ms }
            }
            (None, Some(CommitMetadata::Unknown)) => {
                CommitMetadata::Open { end: self.suspects.end, timestamp_ms }
            }
        };
        Commit { offset: self.offset_to_commit, metadata }
    }

    /// Returns the last commit of an assignment: clean if no delivered record is unacknowledged, and no
    /// suspect is left.
    pub(super) fn last_commit(&self) -> Option<Commit> {
        let timestamp_ms = self.handled_timestamp_ms;
        let handled_end = self.offset_to_commit.max(self.delivered_end);
        let has_suspects = self.suspects.end > handled_end && !self.suspects.is_empty();
        let metadata = match self.delivered == 0 && !has_suspects {
            true => CommitMetadata::Clean { timestamp_ms },
            false => {
                let end = self.delivered_end.max(self.suspects.end);
                CommitMetadata::Open { end, timestamp_ms }
            }
        };
        let last = Commit { offset: self.offset_to_commit, metadata };
        (self.committed != Some(last)).then_some(last)
    }

    /// Notes that the broker has confirmed a commit.
    pub(super) fn note_committed(&mut self, commit: Commit) {
        // At the first commit nothing is open, however many records are delivered.
        if self.open_end().is_some() && self.waits_for_commit() {
            self.window.double();
        }
        self.committed = Some(commit);
    }

    /// Ends an interval of the [`Window`].
    pub(super) fn end_interval(&mut self) {
        self.window.end_interval(self.delivered_end, self.delivered);
    }

    /// Returns whether no further records are read: from the time at which the partition reaches a limit until it is
    /// below seven eighths of each. So the polling thread is not woken after each acknowledgement, and messages that a
    /// consumer holds for their next attempts stop the other keys of the partition only if they nearly reach a limit.
    pub(super) const fn is_paused(&self) -> bool {
        self.is_paused
    }

    fn update_paused(&mut self) {
        let PartitionLimits { records, bytes, uncommitted } = self.limits;
        let bound = |limit: usize| if self.is_paused { limit - limit / 8 } else { limit };
        self.is_paused = self.unacknowledged >= bound(records)
            || self.bytes >= bound(bytes)
            || self.tracked.len() >= bound(uncommitted);
    }
}

/// Converts a number of records to one of offsets.
pub(super) fn to_offsets(count: usize) -> i64 {
    i64::try_from(count).unwrap_or(i64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    const LIMITS: PartitionLimits = PartitionLimits { records: 4, bytes: 1000, uncommitted: 6 };
    const TIME: i64 = 1_790_000_000_000;

    fn record(offset: i64) -> Box<Record> {
        let (message, timestamp_ms) = (Message::new("kafka://orders", "x"), TIME + offset);
        Box::new(Record { message, bytes: 10, timestamp_ms, from: 0, is_redelivery: false })
    }

    fn open(offset: i64, end: i64) -> Commit {
        let timestamp_ms = (offset > 0).then_some(TIME + offset - 1);
        Commit { offset, metadata: CommitMetadata::Open { end, timestamp_ms } }
    }

    /// Sends the commit that is wanted.
    fn commit(partition: &mut Partition) -> Option<Commit> {
        let commit = partition.commit()?;
        partition.note_committed(commit);
        Some(commit)
    }

    fn deliver(partition: &mut Partition) -> Vec<(i64, bool)> {
        let records = std::iter::from_fn(|| partition.deliver());
        records.map(|(offset, record)| (offset, record.is_redelivery)).collect()
    }

    #[test]
    fn nothing_is_delivered_before_a_commit_that_opens_it_is_confirmed() {
        let mut partition = Partition::new(LIMITS, 1, 0, None, (0, 0));
        let clean = Commit { offset: 0, metadata: CommitMetadata::Clean { timestamp_ms: None } };
        assert_eq!(commit(&mut partition), Some(clean));
        for offset in 0..6 {
            partition.accept(offset, record(offset)).unwrap();
        }
        assert!(partition.waits_for_commit() && deliver(&mut partition).is_empty());
        assert_eq!(partition.commit(), Some(open(0, 4)));
        assert!(deliver(&mut partition).is_empty(), "it is not confirmed");
        assert_eq!(commit(&mut partition), Some(open(0, 4)));
        assert_eq!(deliver(&mut partition), [(0, false), (1, false), (2, false), (3, false)]);
        assert!(partition.waits_for_commit());
        assert_eq!(commit(&mut partition), Some(open(0, 8)));
        assert_eq!(deliver(&mut partition), [(4, false), (5, false)]);
        assert_eq!(partition.commit(), None);
    }

    #[test]
    fn a_commit_opens_records_once_half_of_the_open_ones_are_delivered() {
        let mut partition = Partition::new(LIMITS, 1, 0, None, (0, 0));
        assert!(!partition.opens_records());
        for offset in 0..6 {
            partition.accept(offset, record(offset)).unwrap();
        }
        assert!(partition.opens_records());
        assert_eq!(commit(&mut partition), Some(open(0, 4)));
        partition.deliver().unwrap();
        assert!(!partition.opens_records());
        partition.deliver().unwrap();
        assert!(partition.opens_records() && !partition.waits_for_commit());
        assert_eq!(commit(&mut partition), Some(open(0, 6)));
        assert!(!partition.opens_records());
    }

    #[test]
    fn a_commit_opens_more_records_the_faster_they_are_delivered() {
        let limits = PartitionLimits { records: 1_000, bytes: usize::MAX, uncommitted: 100_000 };
        let mut partition = Partition::new(limits, 1, 0, None, (0, 0));
        for offset in 0..10_000 {
            partition.accept(offset, record(offset)).unwrap();
        }
        let ends = |partition: &mut Partition, commits: usize| -> Vec<i64> {
            let mut ends = Vec::new();
            for _ in 0..commits {
                let commit = commit(partition).unwrap();
                let CommitMetadata::Open { end, .. } = commit.metadata else {
                    panic!("{commit:?}")
                };
                ends.push(end);
                for (offset, _) in deliver(partition) {
                    partition.acknowledge(offset, 10);
                }
            }
            ends
        };
        assert_eq!(ends(&mut partition, 6), [100, 200, 400, 800, 1600, 2600]);
        // In the first interval 2,600 are delivered, and none in the next two.
        (0..3).for_each(|_| partition.end_interval());
        assert_eq!(ends(&mut partition, 1), [2850]);
    }

    #[test]
    fn the_committed_offset_does_not_pass_an_unacknowledged_record() {
        let mut partition = Partition::new(LIMITS, 1, 0, Some(open(0, 8)), (0, 0));
        // The offset 3 is that of no record.
        for offset in [0, 1, 2, 4] {
            partition.accept(offset, record(offset)).unwrap();
        }
        assert_eq!(deliver(&mut partition).len(), 4);
        for offset in [2, 1, 2, 4] {
            partition.acknowledge(offset, 10);
            assert_eq!(partition.commit(), None);
        }
        assert_eq!(partition.last_commit(), Some(open(0, 5)));
        partition.acknowledge(0, 10);
        assert_eq!(commit(&mut partition), Some(open(5, 8)));
        let clean = CommitMetadata::Clean { timestamp_ms: Some(TIME + 4) };
        assert_eq!(partition.last_commit(), Some(Commit { offset: 5, metadata: clean }));
        assert_eq!((partition.delivered(), partition.bytes, partition.tracked.len()), (0, 0, 0));
    }

    #[test]
    fn records_that_an_earlier_owner_may_have_started_are_suspects() {
        let unknown = Commit { offset: 2, metadata: CommitMetadata::Unknown };
        let clean = Commit { offset: 2, metadata: CommitMetadata::Clean { timestamp_ms: None } };
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
                assert!(
                    commit.offset == 2 && matches!(commit.metadata, CommitMetadata::Open { .. })
                );
                delivered.extend(deliver(&mut partition));
            }
            delivered.extend(deliver(&mut partition));
            let found = delivered.iter().filter(|(_, is_suspect)| *is_suspect).count();
            assert_eq!((delivered.len(), found), (7, suspects), "{stored:?} of {end}");
        }
    }

    #[test]
    fn records_before_the_commit_are_no_suspects_after_a_rewind() {
        let mut partition = Partition::new(LIMITS, 1, 0, Some(open(4, 6)), (0, 9));
        for offset in 0..8 {
            partition.accept(offset, record(offset)).unwrap();
        }
        // The broker's commit does not contain them.
        assert_eq!(deliver(&mut partition), []);
        let mut delivered = Vec::new();
        while let Some(commit) = commit(&mut partition) {
            partition.note_committed(commit);
            delivered.extend(deliver(&mut partition));
        }
        let suspects: Vec<_> = delivered.iter().filter(|it| it.1).map(|it| it.0).collect();
        assert_eq!((delivered.len(), suspects), (8, vec![4, 5]));
    }

    #[test]
    fn each_commit_contains_the_suspects_of_unknown_metadata() {
        let limits = PartitionLimits { records: 1_000, bytes: usize::MAX, uncommitted: 100_000 };
        let unknown = Commit { offset: 0, metadata: CommitMetadata::Unknown };
        let mut partition = Partition::new(limits, 1, 0, Some(unknown), (0, 800));
        partition.accept(0, record(0)).unwrap();
        assert_eq!(commit(&mut partition), Some(open(0, 800)));
        assert_eq!(deliver(&mut partition), [(0, true)]);
        partition.acknowledge(0, 10);
        assert_eq!(commit(&mut partition), Some(open(1, 800)));
    }

    #[test]
    fn suspects_that_are_left_stay_suspects_for_the_next_owner() {
        let mut partition = Partition::new(LIMITS, 1, 0, Some(open(0, 6)), (0, 9));
        partition.accept(0, record(0)).unwrap();
        assert_eq!(deliver(&mut partition), [(0, true)]);
        partition.acknowledge(0, 10);
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
    fn a_partition_pauses_at_each_limit_and_resumes_below_seven_eighths_of_it() {
        let limits = PartitionLimits { records: 16, bytes: 1000, uncommitted: 100 };
        let mut partition = Partition::new(limits, 1, 0, Some(open(0, 100)), (0, 0));
        for offset in 0..15 {
            partition.accept(offset, record(offset)).unwrap();
        }
        assert!(!partition.is_paused());
        partition.accept(15, record(15)).unwrap();
        assert!(partition.is_paused());
        deliver(&mut partition);
        for (offset, is_paused) in [(1, true), (2, true), (3, false)] {
            partition.acknowledge(offset, 10);
            assert_eq!(partition.is_paused(), is_paused, "{offset}");
        }
        // 130 bytes are unacknowledged.
        for (offset, bytes, is_paused) in [(16, 869, false), (17, 1, true)] {
            partition.accept(offset, Box::new(Record { bytes, ..*record(offset) })).unwrap();
            assert_eq!(partition.is_paused(), is_paused, "{offset}");
        }
        deliver(&mut partition);
        partition.acknowledge(17, 1);
        assert!(partition.is_paused(), "999 bytes");
        partition.acknowledge(16, 869);
        assert!(!partition.is_paused(), "130 bytes");
        let mut partition = Partition::new(LIMITS, 1, 0, Some(open(0, 100)), (0, 0));
        for offset in 0..6 {
            partition.accept(offset, record(offset)).unwrap();
            deliver(&mut partition);
            if offset > 0 {
                partition.acknowledge(offset, 10);
            }
        }
        assert!(partition.is_paused(), "ahead of the first unacknowledged one");
        partition.acknowledge(0, 10);
        assert!(!partition.is_paused());
    }

    #[test]
    fn another_record_before_the_first_one_to_handle_is_detected() {
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
