//! Tests of the state of a partition.

use std::time::Duration;

use super::*;

const LIMITS: PartitionLimits =
    PartitionLimits { records: 4, bytes: 1000, uncommitted: 6, waiting: 3 };
const TIME: i64 = 1_790_000_000_000;

fn identity(offset: i64) -> RecordIdentity {
    RecordIdentity { timestamp_ms: TIME + offset, checksum: Some(7) }
}

fn handled(offset: i64) -> TopicCheck {
    TopicCheck { offset, expected: identity(offset) }
}

fn record(offset: i64) -> Box<Record> {
    Box::new(Record { bytes: 10, identity: identity(offset), ..Record::default() })
}

fn open(offset: i64, end: i64) -> Commit {
    let handled = (offset > 0).then(|| handled(offset - 1));
    Commit { offset, metadata: CommitMetadata::Open { end, handled } }
}

/// Sends the commit that is wanted.
fn commit(partition: &mut Partition) -> Option<Commit> {
    let commit = partition.commit()?;
    partition.note_committed(commit);
    Some(commit)
}

fn deliver(partition: &mut Partition) -> Vec<(i64, bool)> {
    partition.confirm();
    let records = std::iter::from_fn(|| partition.deliver());
    records.map(|(offset, record)| (offset, record.is_redelivery)).collect()
}

fn deliver_one(partition: &mut Partition) -> Option<(i64, Box<Record>)> {
    partition.confirm();
    partition.deliver()
}

#[test]
fn nothing_is_delivered_before_a_commit_that_opens_it_is_confirmed() {
    let mut partition = Partition::new(LIMITS, 1, 0, None, (0, 0));
    let clean = Commit { offset: 0, metadata: CommitMetadata::Clean { handled: None } };
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
    deliver_one(&mut partition).unwrap();
    assert!(!partition.opens_records());
    deliver_one(&mut partition).unwrap();
    assert!(partition.opens_records() && !partition.waits_for_commit());
    assert_eq!(commit(&mut partition), Some(open(0, 6)));
    assert!(!partition.opens_records());
}

#[test]
fn a_commit_opens_more_records_the_faster_they_are_delivered() {
    let limits = PartitionLimits {
        records: 1_000,
        bytes: usize::MAX,
        uncommitted: 100_000,
        waiting: 10_000,
    };
    let mut partition = Partition::new(limits, 1, 0, None, (0, 0));
    for offset in 0..10_000 {
        partition.accept(offset, record(offset)).unwrap();
    }
    let ends = |partition: &mut Partition, commits: usize| -> Vec<i64> {
        let mut ends = Vec::new();
        for _ in 0..commits {
            let commit = commit(partition).unwrap();
            let CommitMetadata::Open { end, .. } = commit.metadata else { panic!("{commit:?}") };
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
    let clean = CommitMetadata::Clean { handled: Some(handled(4)) };
    assert_eq!(partition.last_commit(), Some(Commit { offset: 5, metadata: clean }));
    assert_eq!((partition.delivered(), partition.bytes, partition.tracked.len()), (0, 0, 0));
}

#[test]
fn records_that_an_earlier_owner_may_have_started_are_suspects() {
    let unknown = Commit { offset: 2, metadata: CommitMetadata::Unknown };
    let clean = Commit { offset: 2, metadata: CommitMetadata::Clean { handled: None } };
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
            assert!(commit.offset == 2 && matches!(commit.metadata, CommitMetadata::Open { .. }));
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
    let limits = PartitionLimits {
        records: 1_000,
        bytes: usize::MAX,
        uncommitted: 100_000,
        waiting: 10_000,
    };
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
    let (offset, first) = deliver_one(&mut partition).unwrap();
    partition.restore(offset, first, false);
    assert_eq!(partition.delivered(), 0);
    assert_eq!(deliver(&mut partition), [(0, true), (1, false), (2, false)]);
}

#[test]
fn a_partition_pauses_at_each_limit_and_resumes_below_seven_eighths_of_it() {
    let limits = PartitionLimits { records: 16, bytes: 1000, uncommitted: 100, waiting: 100 };
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
    let expected = Recreated { offset: 2, expected: identity(2), found: identity(7) };
    assert_eq!(found, expected);
    // It was deleted or compacted.
    assert_eq!(Partition::new(LIMITS, 1, 3, stored, (3, 5)).fetch_from(), 3);
    let mut compacted = Partition::new(LIMITS, 1, 3, stored, (0, 5));
    assert_eq!(compacted.accept(4, record(4)), Ok(()));
}

#[test]
fn an_unverified_log_is_neither_delivered_nor_committed_until_the_last_record_is_found_again() {
    let mut partition = Partition::new(LIMITS, 1, 0, Some(open(0, 8)), (0, 3));
    for offset in 0..3 {
        partition.accept(offset, record(offset)).unwrap();
    }
    let (first, _) = deliver_one(&mut partition).unwrap();
    // It was added after the error that the client has not reported yet.
    partition.accept(3, record(3)).unwrap();
    partition.unverify();
    partition.acknowledge(first, 10);
    assert_eq!((partition.next(), partition.unacknowledged, partition.bytes), (3, 2, 20));
    assert!(partition.begin_check() && !partition.opens_records());
    // Records that the client had fetched before.
    partition.accept(4, record(4)).unwrap();
    assert_eq!(partition.end_check((0, 9)), Ok(false));
    assert_eq!(partition.fetch_from(), 2);
    assert!(deliver(&mut partition).is_empty() && partition.commit().is_none());
    assert_eq!(partition.last_commit(), None);
    // The same log.
    partition.accept(2, record(2)).unwrap();
    partition.accept(3, record(3)).unwrap();
    assert_eq!(deliver(&mut partition), [(1, true), (2, true), (3, false)]);
    assert!(partition.commit().is_some());

    // Another log.
    partition.unverify();
    assert!(partition.begin_check());
    assert_eq!(partition.end_check((0, 9)), Ok(false));
    let error = partition.accept(3, record(7)).unwrap_err();
    assert_eq!((error.offset, error.expected, error.found), (3, identity(3), identity(7)));
}

#[test]
fn a_log_that_becomes_unverified_at_a_limit_is_read_until_its_last_record_is_found_again() {
    let mut partition = Partition::new(LIMITS, 1, 0, Some(open(0, 8)), (0, 9));
    for offset in 0..4 {
        partition.accept(offset, record(offset)).unwrap();
    }
    deliver_one(&mut partition).unwrap();
    partition.unverify();
    assert!(partition.begin_check() && partition.is_paused());
    assert_eq!(partition.end_check((0, 9)), Ok(false));
    assert!(!partition.is_paused(), "the record 3 is read");
    partition.accept(3, record(3)).unwrap();
    assert!(partition.is_paused() && partition.unacknowledged == 4);
    assert_eq!(deliver(&mut partition), [(1, true), (2, true), (3, true)]);
}

#[test]
fn a_log_whose_start_or_end_goes_back_is_unverified_and_one_that_is_too_short_is_an_error() {
    let partition = || Partition::new(LIMITS, 1, 7, Some(open(7, 8)), (5, 9));
    for (watermarks, goes_back) in
        [((5, 9), false), ((6, 12), false), ((4, 9), true), ((5, 8), true), ((0, 50), true)]
    {
        assert_eq!(partition().end_check(watermarks), Ok(goes_back), "{watermarks:?}");
    }
    for (watermarks, expected) in [((0, 6), Err(7)), ((8, 9), Err(7)), ((0, 7), Ok(false))] {
        let mut partition = partition();
        partition.unverify();
        assert_eq!(partition.end_check(watermarks), Ok(false), "they were requested before");
        assert!(partition.begin_check());
        assert_eq!(partition.end_check(watermarks), expected, "{watermarks:?}");
    }
    // Retention has deleted the record before the next one: nothing shows another log.
    let mut partition = partition();
    partition.unverify();
    assert!(partition.begin_check());
    assert_eq!(partition.end_check((7, 9)), Ok(false));
    assert!(partition.is_verified());
}

#[test]
fn control_records_are_passed_once_every_record_before_them_is_acknowledged() {
    let mut partition = Partition::new(LIMITS, 1, 0, Some(open(0, 8)), (0, 3));
    partition.accept(0, record(0)).unwrap();
    partition.pass(3);
    assert_eq!(partition.next(), 1, "a record is unacknowledged");
    deliver_one(&mut partition).unwrap();
    partition.acknowledge(0, 10);
    partition.pass(3);
    let passed =
        Commit { offset: 3, metadata: CommitMetadata::Open { end: 8, handled: Some(handled(0)) } };
    assert_eq!((partition.next(), partition.commit()), (3, Some(passed)));
    // The next owner compares the record that was handled.
    let metadata = CommitMetadata::parse(&passed.metadata.text(3), 3);
    let next_owner = || Partition::new(LIMITS, 2, 3, Some(Commit { offset: 3, metadata }), (0, 3));
    assert_eq!((next_owner().fetch_from(), next_owner().next()), (0, 3));
    assert_eq!(next_owner().accept(0, record(0)), Ok(()));
    let other = Box::new(Record { identity: identity(7), ..*record(0) });
    assert_eq!(next_owner().accept(0, other).unwrap_err().offset, 0);
    // Retention may delete the records before, but no further ones.
    partition.unverify();
    partition.pass(4);
    assert!(partition.begin_check());
    assert_eq!(partition.end_check((3, 3)), Ok(false));
    assert!(partition.is_verified() && partition.next() == 3);
    // The position in a database is that of records.
    partition.accept(5, record(5)).unwrap();
    let (_, delivered) = deliver_one(&mut partition).unwrap();
    assert_eq!(delivered.from, 1);
    // An unconfirmed record is fetched again from where the control records end.
    partition.acknowledge(5, 10);
    partition.pass(7);
    partition.accept(7, record(7)).unwrap();
    partition.unverify();
    assert_eq!(partition.next(), 7);
}

#[test]
fn a_log_that_lacks_the_record_before_the_committed_offset_is_passed_too() {
    // The record 2 was handled, and 3 and 4 are control records.
    let clean = CommitMetadata::Clean { handled: Some(handled(2)) };
    let stored = Some(Commit { offset: 5, metadata: clean });
    let mut partition = Partition::new(LIMITS, 1, 5, stored, (0, 7));
    assert_eq!(partition.fetch_from(), 2);
    partition.pass(2);
    assert_eq!((partition.next(), partition.fetch_from()), (5, 2), "it is not fetched yet");
    partition.pass(7);
    assert_eq!((partition.next(), partition.fetch_from()), (7, 7));
    assert_eq!(partition.commit(), Some(Commit { offset: 7, metadata: clean }));
}

#[test]
fn nothing_is_committed_of_a_new_partition_before_the_age_of_its_first_record_is_known() {
    let new = |watermarks| Partition::new(LIMITS, 1, 0, None, watermarks).await_age();
    let mut partition = new((0, 3));
    assert_eq!((partition.commit(), partition.last_commit()), (None, None));
    assert_eq!(partition.offsets_from(1), 2);
    partition.accept(0, record(0)).unwrap();
    assert!(!partition.awaits_age() && partition.commit().is_some());
    // Without records, with control records only, and with a commit.
    assert!(new((0, 0)).commit().is_some());
    let mut passed = new((0, 3));
    passed.pass(1);
    assert!(passed.awaits_age() && passed.commit().is_none(), "a record may follow");
    passed.pass(3);
    assert!(passed.commit().is_some());
    let committed = Partition::new(LIMITS, 1, 0, Some(open(0, 8)), (0, 3)).await_age();
    assert!(!committed.awaits_age());
}

#[test]
fn a_record_that_was_given_back_and_later_ones_of_its_key_wait_and_take_no_place() {
    let of = |offset: i64, key: &str| {
        let message = Message::new("kafka://orders", "x").with_key(key);
        Box::new(Record { message, bytes: 10, identity: identity(offset), ..Record::default() })
    };
    let limits = PartitionLimits { records: 3, bytes: 1000, uncommitted: 100, waiting: 4 };
    let mut partition = Partition::new(limits, 1, 0, None, (0, 0));
    for (offset, key) in ["a", "a", "b"].into_iter().enumerate() {
        partition.accept(offset as i64, of(offset as i64, key)).unwrap();
    }
    assert!(partition.is_paused());
    partition.confirm();
    commit(&mut partition);
    let first = partition.deliver().unwrap();
    let follower = partition.deliver().unwrap();
    assert!(!partition.return_behind(1, &follower.1));
    // The first is delayed while the second one is with the consumer.
    let until = Instant::now();
    partition.delay(0, until, first.1, Some("a"));
    assert!(!partition.return_behind(0, &follower.1), "it is the first");
    assert!(partition.return_behind(1, &follower.1));
    assert_eq!(partition.delivered(), 0);
    assert_eq!(deliver(&mut partition), [(2, false)]);
    assert!(!partition.is_paused() && partition.full_limit().is_none());
    // Until the limit of those that wait.
    for offset in 3..5 {
        assert!(!partition.is_paused());
        partition.accept(offset, of(offset, "a")).unwrap();
        partition.confirm();
        commit(&mut partition);
        assert_eq!(deliver(&mut partition), []);
    }
    assert!(partition.is_paused());
    assert_eq!(partition.full_limit(), Some(("max_waiting", 4)), "although 2 is in progress");
    partition.acknowledge(2, 10);
    assert_eq!(partition.full_limit(), Some(("max_waiting", 4)));
    // After its pause the first one comes again, alone until it is acknowledged.
    partition.end_delay(0, until + Duration::from_secs(1));
    assert_eq!(deliver(&mut partition), [], "its pause has not ended");
    partition.end_delay(0, until);
    assert_eq!(deliver(&mut partition), [(0, true)]);
    for next in [(1, true), (3, false), (4, false)] {
        let first = partition.tracked.iter().find(|it| !it.is_acknowledged).unwrap().offset;
        assert!(partition.acknowledge(first, 10));
        assert_eq!(deliver(&mut partition), [next]);
    }
    assert_eq!((partition.full_limit(), partition.waiting.records()), (None, 0));
    assert!(!partition.acknowledge(4, 10));
    assert!(!partition.waiting.follows(Some("a"), 9), "none is left");
}

#[test]
fn a_limit_of_waiting_records_is_full_although_a_limit_of_others_is_reached_too() {
    let limits = PartitionLimits { records: 1, bytes: 1000, uncommitted: 100, waiting: 1 };
    let mut partition = Partition::new(limits, 1, 0, Some(open(0, 100)), (0, 0));
    for offset in 0..2 {
        partition.accept(offset, record(offset)).unwrap();
    }
    let first = deliver_one(&mut partition).unwrap();
    assert_eq!(partition.full_limit(), None);
    partition.delay(0, Instant::now(), first.1, None);
    deliver_one(&mut partition).unwrap();
    assert_eq!(partition.full_limit(), Some(("max_waiting", 1)));
}

#[test]
fn a_record_that_returns_late_is_not_passed_by_one_that_was_delivered_before() {
    let of = |offset: i64| {
        let message = Message::new("kafka://orders", "x").with_key("a");
        Box::new(Record { message, bytes: 10, identity: identity(offset), ..Record::default() })
    };
    let mut partition = Partition::new(LIMITS, 1, 0, Some(open(0, 100)), (0, 0));
    for offset in 0..4 {
        partition.accept(offset, of(offset)).unwrap();
    }
    partition.confirm();
    let records: Vec<_> = std::iter::from_fn(|| partition.deliver()).collect();
    // The first one stays with the consumer.
    partition.keep_followers(0, "a");
    assert!(!partition.return_behind(0, &records[0].1));
    assert!(partition.return_behind(1, &records[1].1));
    assert!(partition.acknowledge(0, 10));
    // Delivered before, its turn comes now: the record 1 is before it.
    assert!(partition.return_behind(2, &records[2].1));
    assert_eq!(deliver(&mut partition), [(1, true)]);
    assert!(partition.acknowledge(1, 10));
    assert_eq!(deliver(&mut partition), [(2, true)]);
    assert!(!partition.acknowledge(2, 10));
    assert!(!partition.return_behind(3, &records[3].1), "none is before it");
}
