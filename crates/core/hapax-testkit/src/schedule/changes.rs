//! Rules of insertions, postponements and removals.

use std::slice::from_ref;
use std::time::Duration;

use hapax_core::Timestamp;
use hapax_core::schedule::{EntryKey, NewEntry, Schedule, ScheduleEntry};
use hapax_core::store::Draft;

use super::ScheduleBench;
use super::bench::{SOON, queue_named};
use crate::suite::StoreFixture;
use crate::suite::bench::LONG;

/// An insertion under the key of an entry changes nothing: neither its queue, nor its due time, nor
/// its note. A postponement is not undone by it.
pub async fn an_entry_inserted_again_stays_as_it_is<F: StoreFixture>(fixture: &F)
where
    F::Store: Schedule,
{
    let bench = ScheduleBench::open(fixture).await;
    let entry = bench.entry("a", LONG);
    bench.insert(&entry).await;
    let first = bench.found(entry.key).await;
    let other = NewEntry { key: entry.key, ..bench.entry("b", Duration::ZERO) };
    bench.pass(Duration::from_millis(1)).await;
    for again in [&entry, &other, &entry] {
        bench.insert(again).await;
        assert_eq!(bench.all().await, from_ref(&first));
    }
    assert_eq!(bench.due(&["a", "b"], 10).await.entries, []);
    let queues = bench.queues().await;
    assert!(matches!(&queues[..], [one] if one.queue == entry.queue), "{queues:?}");

    let postponed = bench.postponed(entry.key, Some(first.due), 2 * LONG).await;
    for again in [&entry, &other] {
        bench.insert(again).await;
        assert_eq!(bench.all().await, from_ref(&postponed));
    }
}

/// Entries with one operation id, or with one entry id, are separate.
pub async fn entries_of_one_operation_are_separate<F: StoreFixture>(fixture: &F)
where
    F::Store: Schedule,
{
    let bench = ScheduleBench::open(fixture).await;
    let (first, other) = (bench.entry_key(), bench.entry_key());
    let keys = [
        first,
        EntryKey { operation: first.operation, id: other.id },
        EntryKey { operation: other.operation, id: first.id },
        EntryKey { operation: first.operation, id: bench.entry_id() },
    ];
    for (number, key) in (0_u32..).zip(keys) {
        let queue = if number % 2 == 0 { "a" } else { "b" };
        bench.insert(&NewEntry { key, ..bench.entry(queue, LONG * number) }).await;
    }
    let before = bench.all().await;
    assert_eq!(before.len(), keys.len(), "{before:?}");
    bench.pass(Duration::from_millis(1)).await;
    bench.postponed(keys[1], None, Duration::ZERO).await;
    bench.remove(keys[3]).await;
    let after = bench.all().await;
    let others = |all: &[ScheduleEntry]| -> Vec<_> {
        let is_other = |entry: &&ScheduleEntry| ![keys[1], keys[3]].contains(&entry.key);
        all.iter().filter(is_other).cloned().collect()
    };
    assert_eq!(after.len(), keys.len() - 1, "{after:?}");
    assert_eq!(others(&after), others(&before));
    let due = bench.due(&["a", "b"], 10).await;
    assert_eq!(due.keys(), [keys[0], keys[1]], "{due:?}");
}

/// With an expected due time, an entry is postponed if it is due at that time; otherwise nothing
/// changes.
pub async fn a_postponement_expects_the_due_time<F: StoreFixture>(fixture: &F)
where
    F::Store: Schedule,
{
    let bench = ScheduleBench::open(fixture).await;
    let first = bench.scheduled("a", LONG).await;
    let micros = first.due.as_micros();
    let others = [
        Timestamp::from_micros(micros - 1),
        Timestamp::from_micros(micros + 1),
        Timestamp::default(),
        Timestamp::MAX,
    ];
    for expected in others {
        for due_in in [Duration::ZERO, LONG] {
            let called = bench.postpone(first.key, Some(expected), due_in).await;
            assert!(!called.result, "postponed from {expected:?}, due at {:?}", first.due);
        }
    }
    assert_eq!(bench.all().await, from_ref(&first));

    let second = bench.postponed(first.key, Some(first.due), 2 * LONG).await;
    assert!(!bench.postpone(first.key, Some(first.due), Duration::ZERO).await.result);
    assert_eq!(bench.all().await, from_ref(&second));
    bench.postponed(first.key, Some(second.due), Duration::ZERO).await;
}

/// Without an expected due time, an entry is postponed whenever it is due, any number of times.
pub async fn a_postponement_without_expectation_is_applied<F: StoreFixture>(fixture: &F)
where
    F::Store: Schedule,
{
    let bench = ScheduleBench::open(fixture).await;
    let entry = bench.scheduled("a", LONG).await;
    for due_in in [Duration::ZERO, 2 * LONG, LONG, LONG, SOON] {
        let called = bench.postpone(entry.key, None, due_in).await;
        assert!(called.result, "not postponed by {due_in:?}");
        bench.postponed(entry.key, None, due_in).await;
    }
}

/// A postponement of an entry that does not exist, or was removed, does nothing.
pub async fn a_postponement_of_an_absent_entry_does_nothing<F: StoreFixture>(fixture: &F)
where
    F::Store: Schedule,
{
    let bench = ScheduleBench::open(fixture).await;
    let removed = bench.scheduled("a", LONG).await;
    let other = bench.scheduled("a", LONG).await;
    bench.remove(removed.key).await;
    let absent = EntryKey { operation: other.key.operation, id: bench.entry_id() };
    for key in [absent, removed.key] {
        for expected in [None, Some(removed.due), Some(other.due)] {
            let called = bench.postpone(key, expected, Duration::ZERO).await;
            assert!(!called.result, "postponed, though absent: {key:?}");
        }
    }
    assert_eq!(bench.all().await, [other]);
    assert_eq!(bench.due(&["a"], 10).await.entries, []);
}

/// A postponed entry is due at its new time, earlier or later, and not at the former one. Its queue
/// and its note stay.
pub async fn a_postponed_entry_is_due_at_its_new_time<F: StoreFixture>(fixture: &F)
where
    F::Store: Schedule,
{
    let bench = ScheduleBench::open(fixture).await;
    let first = bench.scheduled("a", LONG).await;
    let earlier = bench.postponed(first.key, Some(first.due), Duration::ZERO).await;
    assert_eq!(bench.due(&["a"], 10).await.entries, from_ref(&earlier));
    let later = bench.postponed(first.key, Some(earlier.due), LONG).await;
    let reply = bench.due(&["a"], 10).await;
    assert_eq!(reply.entries, []);
    reply.expect_next(later.due);
    let soon = bench.postponed(first.key, Some(later.due), SOON).await;
    bench.pass(SOON).await;
    let reply = bench.due(&["a"], 10).await;
    assert_eq!((&reply.entries[..], reply.next_in), (from_ref(&soon), None));
    for entry in [earlier, later, soon] {
        assert_eq!(ScheduleEntry { due: first.due, ..entry }, first);
    }
}

/// A removal removes the entry with its key and no other, any number of times.
pub async fn a_removal_removes_its_own_entry_only<F: StoreFixture>(fixture: &F)
where
    F::Store: Schedule,
{
    let bench = ScheduleBench::open(fixture).await;
    let operation = bench.key();
    let mut entries = Vec::new();
    for due_in in [Duration::ZERO, Duration::ZERO, LONG, LONG] {
        let key = EntryKey { operation, id: bench.entry_id() };
        bench.insert(&NewEntry { key, ..bench.entry("a", due_in) }).await;
        entries.push(key);
    }
    // A record with the same operation id is not part of the schedule.
    let record = bench.swap(operation, None, bench.draft());
    bench.stored(&record).await;
    for removed in [0, 2] {
        for _ in 0..3 {
            bench.remove(entries[removed]).await;
        }
    }
    let mut left: Vec<_> = bench.all().await.iter().map(|entry| entry.key).collect();
    left.sort_by_key(|key| entries.iter().position(|entry| entry == key));
    assert_eq!(left, [entries[1], entries[3]]);
    let reply = bench.due(&["a"], 10).await;
    assert_eq!(reply.keys(), [entries[1]], "{reply:?}");
    let found = bench.found(entries[3]).await;
    reply.expect_next(found.due);
    assert_eq!(found.queue, queue_named("a"));
    assert_eq!(bench.record(&operation).await.write_id, record.write_id);
}

/// Reaping removes records, and no entry: neither that of a record that it removed, nor one that
/// never had a record.
pub async fn reaping_removes_no_entry<F: StoreFixture>(fixture: &F)
where
    F::Store: Schedule,
{
    let bench = ScheduleBench::open(fixture).await;
    let mut draft = Draft { keep: Some(SOON), ..bench.draft() };
    draft.record.terms.lease = Duration::ZERO;
    let (operation, _) = bench.put_unseen(draft).await;
    for (key, due_in) in [
        (EntryKey { operation, id: bench.entry_id() }, Duration::ZERO),
        (EntryKey { operation, id: bench.entry_id() }, LONG),
        (bench.entry_key(), Duration::ZERO),
    ] {
        bench.insert(&NewEntry { key, ..bench.entry("a", due_in) }).await;
    }
    let before = bench.all().await;
    bench.pass(SOON).await;
    assert!(bench.reaps_away(&operation).await, "the record is due, and still there");
    assert_eq!(bench.all().await, before);
    assert_eq!(bench.due(&["a"], 10).await.entries.len(), 2);
}
