//! The state of one partition: which records were delivered, and which offset may be committed. It
//! performs no I/O.
//!
//! 1. Each record before the offset to commit is acknowledged.
//! 2. A record is delivered only if the broker has confirmed a commit whose metadata contains its
//!    offset ([`CommitMetadata::Open`]). So the next owner knows which records may have been started.
//! 3. A delivery belongs to an assignment. After the assignment has ended, the delivery changes nothing.
//! 4. A record is delivered only after the client has reported every error of the partition before it ([`Partition::confirm`]).
//!    After an error by which the topic may be another one ([`Partition::unverify`]), nothing is delivered or committed until
//!    the record before the next one was fetched again, and is the same.
//! 5. A record that was delayed is not delivered before its pause ends, and of an ordered source no later record of its
//!    order key before it is acknowledged. Those that were delivered already are returned, and wait too; then they are
//!    delivered one after the other. The partition takes a
//!    record in the step that ends its delivery: at each instant it is ready, waits, or is delivered.

mod limits;
mod waiting;

use std::collections::{BTreeMap, VecDeque};
use std::ops::Range;

use hapax_messages::{AcquiredPosition, Message};
use tokio::time::Instant;

pub(super) use self::limits::PartitionLimits;
use self::waiting::Waiting;
use super::identity::{RecordIdentity, Recreated, TopicCheck};
use super::metadata::CommitMetadata;
use super::record::NativeParts;
use super::window::Window;

/// Offsets of the first record and of the end of a log.
pub(super) type Watermarks = (i64, i64);

/// A record that was received and not delivered, or delivered and returned.
#[derive(Clone, Debug, Default)]
pub(super) struct Record {
    pub(super) message: Message,
    pub(super) native: NativeParts,
    pub(super) bytes: usize,
    pub(super) identity: RecordIdentity,
    /// Offset after that of the record before it.
    pub(super) from: i64,
    pub(super) is_redelivery: bool,
    pub(super) was_delayed: bool,
}

/// A record from the offset to commit on.
#[derive(Debug)]
struct Tracked {
    offset: i64,
    identity: RecordIdentity,
    is_acknowledged: bool,
}

/// An offset with its metadata, as it is committed.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Commit {
    pub(super) offset: i64,
    pub(super) metadata: CommitMetadata,
}

impl Commit {
    /// Returns whether it shows that records were handled, or may have been begun. That of a partition of which no record
    /// was delivered does not.
    pub(super) fn shows_handling(self) -> bool {
        self.metadata != CommitMetadata::Clean { handled: None }
    }
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
    /// The last record before the offset to commit.
    handled: Option<TopicCheck>,
    received: Received,
    /// As `received`, of the records that may be delivered.
    confirmed: Received,
    /// Whether the age of the first record decides whether anything is committed.
    awaits_age: bool,
    verification: Verification,
    /// The watermarks that are known.
    watermarks: Watermarks,
    /// Records from the offset to commit on, by offset.
    tracked: VecDeque<Tracked>,
    ready: BTreeMap<i64, Box<Record>>,
    waiting: Waiting,
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
    /// The record that is fetched again before the next one.
    topic_check: Option<TopicCheck>,
}

/// How far a log was received.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct Received {
    /// The next offset to receive.
    next: i64,
    /// Offset after the last record: further ones before `next` are those of control records.
    record_end: i64,
    /// The last record, if it is known.
    last: Option<TopicCheck>,
}

/// Whether the log is known to be the one whose records were received.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Verification {
    Verified,
    /// The topic may be another one.
    Unverified,
    /// As before, and the watermarks are being requested.
    Requested,
    /// As before, and the record before the next one is being fetched.
    Fetched,
}

impl Partition {
    /// Creates the state of a partition whose next record is at `first`. `committed` is the commit that
    /// the broker has, if any, and `watermarks` are the offsets of the log's first record and of its end.
    pub(super) fn new(
        limits: PartitionLimits,
        assignment_number: u64,
        first: i64,
        committed: Option<Commit>,
        watermarks: Watermarks,
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
        // Not one that is to be handled again, because an operator has set an earlier position.
        let handled = committed.and_then(|stored| stored.metadata.handled());
        let last = handled.filter(|it| it.offset < first);
        let received = Received { next: first, record_end: first, last };
        Self {
            limits,
            assignment_number,
            fence: None,
            offset_to_commit: first,
            handled: last,
            received,
            confirmed: received,
            awaits_age: false,
            verification: Verification::Verified,
            watermarks,
            tracked: VecDeque::new(),
            ready: BTreeMap::new(),
            waiting: Waiting::default(),
            unacknowledged: 0,
            bytes: 0,
            delivered: 0,
            delivered_end: first,
            suspects,
            committed,
            window: Window::new(limits.records, first),
            is_paused: false,
            topic_check: last.filter(|check| check.offset >= watermarks.0),
        }
    }

    /// Commits nothing of a partition without a commit until it has received a record, whose age the caller checks.
    pub(super) fn await_age(mut self) -> Self {
        self.awaits_age = self.committed.is_none() && self.received.next < self.watermarks.1;
        self
    }

    /// Returns whether a process of the group has handled records of the partition, or may have begun with some.
    pub(super) fn has_handled(&self) -> bool {
        self.handled.is_some() || self.committed.is_some_and(Commit::shows_handling)
    }

    /// Returns whether the broker has a commit of the partition.
    pub(super) const fn has_commit(&self) -> bool {
        self.committed.is_some()
    }

    /// Returns whether the age of the next record is to be checked.
    pub(super) const fn awaits_age(&self) -> bool {
        self.awaits_age
    }

    /// Returns the number of offsets from this one to the known end of the log.
    pub(super) const fn offsets_from(&self, offset: i64) -> i64 {
        self.watermarks.1.saturating_sub(offset)
    }

    /// Sets the fencing token and the identity of the record before the position, which are those of a position in a
    /// database. It has no checksum; the commit has one, if it is of the same position.
    pub(super) fn with_position(mut self, position: AcquiredPosition) -> Self {
        self.fence = Some(position.fence);
        if position.is_new {
            return self;
        }
        // The next position is always that after a record.
        let offset = self.received.next.saturating_sub(1);
        let committed = self.committed.and_then(|it| it.metadata.handled());
        let committed = committed.filter(|it| it.offset == offset);
        self.handled = position.handled_timestamp_ms.map(|timestamp_ms| {
            let same = committed.filter(|it| it.expected.timestamp_ms == timestamp_ms);
            let expected = RecordIdentity { timestamp_ms, checksum: None };
            same.unwrap_or(TopicCheck { offset, expected })
        });
        self.received.last = self.handled;
        self.confirmed = self.received;
        self.topic_check = self.received.last.filter(|check| check.offset >= self.watermarks.0);
        self
    }

    /// Returns the offset from which the partition has to be fetched.
    pub(super) fn fetch_from(&self) -> i64 {
        self.topic_check.map_or(self.received.next, |check| check.offset)
    }

    /// Returns the next offset to receive.
    pub(super) const fn next(&self) -> i64 {
        self.received.next
    }

    /// Adds a record that was fetched. Ignores one that was added before, and one of an unverified log.
    ///
    /// # Errors
    /// [`Recreated`] if the record before the next one is not the one that was received.
    pub(super) fn accept(&mut self, offset: i64, mut record: Box<Record>) -> Result<(), Recreated> {
        if matches!(self.verification, Verification::Unverified | Verification::Requested) {
            return Ok(());
        }
        if let Some(check) = self.topic_check.take() {
            check.check(offset, record.identity)?;
        }
        self.verification = Verification::Verified;
        if offset < self.received.next {
            return Ok(());
        }
        self.awaits_age = false;
        record.is_redelivery |= self.suspects.contains(&offset);
        record.from = self.received.record_end;
        if self.tracked.is_empty() {
            // The offsets between are those of no records.
            self.offset_to_commit = offset;
        }
        let (next, last) =
            (offset.saturating_add(1), TopicCheck { offset, expected: record.identity });
        self.received = Received { next, record_end: next, last: Some(last) };
        let identity = record.identity;
        self.tracked.push_back(Tracked { offset, identity, is_acknowledged: false });
        self.unacknowledged += 1;
        self.bytes = self.bytes.saturating_add(record.bytes);
        self.ready.insert(offset, record);
        self.update_paused();
        Ok(())
    }

    /// Notes that the client has reported every error before the records that were added. They may be delivered.
    pub(super) fn confirm(&mut self) {
        if self.verification == Verification::Verified {
            self.confirmed = self.received;
        }
    }

    /// Advances to an offset before which the client has returned each record. Those in between are control records, or of
    /// aborted transactions. The client must have reported every error before that offset. Ignored while a record is
    /// unacknowledged, or the log is unverified.
    pub(super) fn pass(&mut self, offset: i64) {
        if matches!(self.verification, Verification::Unverified | Verification::Requested) {
            return;
        }
        // The log lacks the record that was to be fetched again.
        self.topic_check = self.topic_check.filter(|check| check.offset >= offset);
        if self.topic_check.is_some() || !self.tracked.is_empty() {
            return;
        }
        self.verification = Verification::Verified;
        if offset > self.received.next {
            self.received.next = offset;
            self.confirmed = self.received;
            self.offset_to_commit = offset;
            // Records that were there at the assignment may follow.
            self.awaits_age &= offset < self.watermarks.1;
        }
    }

    /// Stops deliveries and commits, because the topic may have been created again, and drops the records that were not
    /// confirmed.
    pub(super) fn unverify(&mut self) {
        self.verification = Verification::Unverified;
        self.topic_check = None;
        self.received = self.confirmed;
        let next = self.received.next;
        while let Some(tracked) = self.tracked.back().filter(|it| it.offset >= next) {
            self.unacknowledged = self.unacknowledged.saturating_sub(1);
            let record = self.ready.remove(&tracked.offset);
            self.bytes = self.bytes.saturating_sub(record.map_or(0, |record| record.bytes));
            self.tracked.pop_back();
        }
        self.offset_to_commit = self.offset_to_commit.min(next);
        self.update_paused();
    }

    /// Returns whether the log is verified.
    pub(super) fn is_verified(&self) -> bool {
        self.verification == Verification::Verified
    }

    /// Returns whether the watermarks of an unverified log have to be requested, and notes that they are.
    pub(super) fn begin_check(&mut self) -> bool {
        if self.verification == Verification::Unverified {
            self.verification = Verification::Requested;
        }
        self.verification == Verification::Requested
    }

    /// Notes the watermarks, and fetches the record before the next one again if the log is unverified. Returns whether the
    /// log is to be verified, because its start or end is before the one that was known.
    ///
    /// # Errors
    /// The offset that is outside of an unverified log.
    pub(super) fn end_check(&mut self, watermarks: Watermarks) -> Result<bool, i64> {
        let known = std::mem::replace(&mut self.watermarks, watermarks);
        match self.verification {
            Verification::Verified => return Ok(watermarks.0 < known.0 || watermarks.1 < known.1),
            // Since these were requested, it became unverified again, or is fetched.
            Verification::Unverified | Verification::Fetched => return Ok(false),
            Verification::Requested => {}
        }
        if !(watermarks.0..=watermarks.1).contains(&self.received.next) {
            return Err(self.received.next);
        }
        self.topic_check = self.received.last.filter(|check| check.offset >= watermarks.0);
        self.verification = match self.topic_check {
            Some(_) => Verification::Fetched,
            // Nothing is known of the log, or retention has deleted it.
            None => Verification::Verified,
        };
        Ok(false)
    }

    /// Delivers the first record that is ready, if the broker has confirmed that it may be.
    pub(super) fn deliver(&mut self) -> Option<(i64, Box<Record>)> {
        if self.verification != Verification::Verified {
            return None;
        }
        let end = self.open_end()?.min(self.confirmed.next);
        loop {
            let entry = self.ready.first_entry().filter(|entry| *entry.key() < end)?;
            let (offset, record) = entry.remove_entry();
            let Some(record) = self.waiting.keep_behind(offset, record) else {
                self.update_paused();
                continue;
            };
            self.delivered += 1;
            self.delivered_end = self.delivered_end.max(offset.saturating_add(1));
            return Some((offset, record));
        }
    }

    /// Returns a delivered record, which is delivered again. In an ordered source it blocks its order key: followers that
    /// were delivered with it must not be handled before it.
    pub(super) fn restore(&mut self, offset: i64, mut record: Box<Record>, is_ordered: bool) {
        if let (true, Some(key)) = (is_ordered, &record.message.key) {
            self.waiting.block(key, offset);
        }
        self.delivered = self.delivered.saturating_sub(1);
        record.is_redelivery = true;
        self.ready.insert(offset, record);
    }

    /// Takes back a delivered record until [`end_delay`](Self::end_delay), and blocks its order key.
    pub(super) fn delay(
        &mut self,
        offset: i64,
        until: Instant,
        mut record: Box<Record>,
        order_key: Option<&str>,
    ) {
        if let Some(key) = order_key {
            self.waiting.block(key, offset);
        }
        self.delivered = self.delivered.saturating_sub(1);
        (record.is_redelivery, record.was_delayed) = (true, true);
        self.waiting.delay(offset, until, record);
        self.update_paused();
    }

    /// Blocks the order key of a delivered record, until it is acknowledged.
    pub(super) fn keep_followers(&mut self, offset: i64, order_key: &str) {
        self.waiting.block(order_key, offset);
    }

    /// Takes back a delivered record, if an earlier one blocks its order key. Returns whether there is one.
    pub(super) fn return_behind(&mut self, offset: i64, record: &Record) -> bool {
        if !self.waiting.follows(record.message.key.as_deref(), offset) {
            return false;
        }
        let record = Record { is_redelivery: true, ..record.clone() };
        let is_kept = self.waiting.keep_behind(offset, Box::new(record)).is_none();
        if is_kept {
            self.delivered = self.delivered.saturating_sub(1);
            self.update_paused();
        }
        is_kept
    }

    /// Ends the pause of a record, which is delivered again. Does nothing if it was not taken back.
    pub(super) fn end_delay(&mut self, offset: i64, until: Instant) {
        if let Some(record) = self.waiting.end_delay(offset, until) {
            self.ready.insert(offset, record);
            self.update_paused();
        }
    }

    /// Acknowledges a delivered record of this size. Returns whether one waited for it, which may be delivered.
    pub(super) fn acknowledge(&mut self, offset: i64, bytes: usize) -> bool {
        let at = self.tracked.partition_point(|it| it.offset < offset);
        let Some(tracked) = self.tracked.get_mut(at).filter(|it| it.offset == offset) else {
            return false;
        };
        if std::mem::replace(&mut tracked.is_acknowledged, true) {
            return false;
        }
        self.delivered = self.delivered.saturating_sub(1);
        self.unacknowledged = self.unacknowledged.saturating_sub(1);
        self.bytes = self.bytes.saturating_sub(bytes);
        let unblocked = self.waiting.unblock(offset);
        let has_unblocked = unblocked.is_some();
        self.ready.extend(unblocked);
        while let Some(first) = self.tracked.front().filter(|it| it.is_acknowledged) {
            self.offset_to_commit = first.offset.saturating_add(1);
            self.handled = Some(TopicCheck { offset: first.offset, expected: first.identity });
            self.tracked.pop_front();
        }
        self.update_paused();
        has_unblocked
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
        self.verification == Verification::Verified && self.next_open_end().is_some()
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

    /// Returns the commit to send; `None` if the broker has it, the log is unverified, or the age of the first record is not
    /// known.
    pub(super) fn commit(&self) -> Option<Commit> {
        let wanted = self.wanted();
        (self.may_commit() && self.committed != Some(wanted)).then_some(wanted)
    }

    fn may_commit(&self) -> bool {
        self.verification == Verification::Verified && !self.awaits_age
    }

    fn wanted(&self) -> Commit {
        let handled = self.handled;
        let confirmed = self.committed.map(|it| it.metadata);
        let metadata = match (self.next_open_end(), confirmed) {
            (Some(end), _) | (None, Some(CommitMetadata::Open { end, .. })) => {
                CommitMetadata::Open { end, handled }
            }
            // Nothing was delivered since the assignment.
            (None, Some(CommitMetadata::Clean { .. }) | None) => CommitMetadata::Clean { handled },
            (None, Some(CommitMetadata::Unknown)) => {
                CommitMetadata::Open { end: self.suspects.end, handled }
            }
        };
        Commit { offset: self.offset_to_commit, metadata }
    }

    /// Returns the last commit of an assignment: clean if no delivered record is unacknowledged, and no
    /// suspect is left. `None` if the broker has it, or the log is unverified.
    pub(super) fn last_commit(&self) -> Option<Commit> {
        let handled = self.handled;
        let handled_end = self.offset_to_commit.max(self.delivered_end);
        let has_suspects = self.suspects.end > handled_end && !self.suspects.is_empty();
        let metadata = match self.delivered == 0 && !has_suspects {
            true => CommitMetadata::Clean { handled },
            false => {
                let end = self.delivered_end.max(self.suspects.end);
                CommitMetadata::Open { end, handled }
            }
        };
        let last = Commit { offset: self.offset_to_commit, metadata };
        (self.may_commit() && self.committed != Some(last)).then_some(last)
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
}

/// Converts a number of records to one of offsets.
pub(super) fn to_offsets(count: usize) -> i64 {
    i64::try_from(count).unwrap_or(i64::MAX)
}

#[cfg(test)]
mod tests;
