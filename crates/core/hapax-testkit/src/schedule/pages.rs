//! Rules of paging through the entries, and of counting them.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use hapax_core::schedule::{EntryKey, NewEntry, QueueStatus, Schedule};
use hapax_core::{EntryId, Namespace, NamespacedSchedule, OperationId, Store};
use tokio::task::yield_now;

use super::ScheduleBench;
use super::bench::{SOON, insert, queue_named};
use crate::suite::StoreFixture;
use crate::suite::bench::LONG;

/// Pages of any size, one after the other, have every entry once, in ascending order of key, due or
/// not.
pub async fn pages_have_every_entry_once_in_order<F: StoreFixture>(fixture: &F)
where
    F::Store: Schedule,
{
    let bench = ScheduleBench::open(fixture).await;
    let mut all = Vec::new();
    for number in 0..60 {
        let queue = ["a", "b", "c"][number % 3];
        let due_in = if number % 2 == 0 { Duration::ZERO } else { LONG };
        // Some operations have two entries.
        let operation = match number % 5 {
            0 => all.last().map_or_else(|| bench.key(), |last: &NewEntry| last.key.operation),
            _ => bench.key(),
        };
        let key = EntryKey { operation, id: bench.entry_id() };
        all.push(NewEntry { key, ..bench.entry(queue, due_in) });
    }
    bench.insert_all(&all).await;
    let expected: BTreeSet<_> = all.iter().map(|entry| entry.key).collect();
    let first = bench.all().await;
    assert!(first.iter().map(|entry| entry.key).eq(expected), "other entries: {first:?}");
    for limit in [1, 7, 59, 60, 61] {
        assert_eq!(bench.all_by(limit).await, first, "in pages of {limit}");
    }
}

/// However many entries other namespaces have, a page of a namespace passes over at most as many as it may have,
/// and the next one begins behind them.
pub async fn a_page_of_a_namespace_reads_no_more_entries_than_its_limit<F: StoreFixture>(
    fixture: &F,
) where
    F::Store: Schedule,
{
    const OTHERS: u8 = 60;
    let bench = ScheduleBench::open(fixture).await;
    let at = |number: u8| EntryKey {
        operation: OperationId::from_bytes([number; 32]),
        id: EntryId::from_bytes([number; 16]),
    };
    let own = [at(20), at(41), at(42)];
    let all = (0..OTHERS).map(|number| {
        let queue = if own.contains(&at(number)) { "@own/a" } else { "@other/a" };
        NewEntry { key: at(number), ..bench.entry(queue, LONG) }
    });
    bench.insert_all(&all.collect::<Vec<_>>()).await;
    let (namespace, store) = (Namespace::new("own"), Arc::clone(&bench.store) as Arc<dyn Store>);
    let schedule = NamespacedSchedule::new(store, namespace.unwrap()).unwrap();
    for limit in [1, 7, 200] {
        let (mut found, mut read, mut after) = (Vec::new(), 0, None);
        loop {
            let page = bench.page_of(&schedule, after, limit).await;
            let of_page = page.entries.len() as u64 + page.others.map_or(0, |it| u64::from(it.1));
            assert!(of_page <= u64::from(limit), "{of_page} in a page of {limit}");
            read += of_page;
            found.extend(page.entries.iter().map(|(key, _)| *key));
            after = page.next();
            if after.is_none() {
                break;
            }
        }
        assert_eq!((&found[..], read), (&own[..], u64::from(OTHERS)), "in pages of {limit}");
    }
}

/// `after` can be an absent key, and is not on the page.
pub async fn a_page_of_entries_begins_after_a_key<F: StoreFixture>(fixture: &F)
where
    F::Store: Schedule,
{
    let bench = ScheduleBench::open(fixture).await;
    let at = |operation: u8, id: u8| EntryKey {
        operation: OperationId::from_bytes([operation; 32]),
        id: EntryId::from_bytes([id; 16]),
    };
    let keys = [at(0, 0), at(0, 255), at(3, 9), at(3, 10), at(128, 128), at(255, 255)];
    for key in keys {
        bench.insert(&NewEntry { key, ..bench.entry("a", LONG) }).await;
    }
    for (after, rest) in [
        (at(0, 0), 1),
        (at(0, 7), 1),
        (at(0, 255), 2),
        (at(3, 9), 3),
        (at(127, 255), 4),
        (at(255, 254), 5),
        (at(255, 255), 6),
    ] {
        let (found, more) = bench.page(Some(after), 10).await;
        let found: Vec<_> = found.iter().map(|entry| entry.key).collect();
        assert_eq!((&found[..], more), (&keys[rest..], false), "after {after:?}");
    }
}

/// Entries that are inserted between two pages do not move those that are there.
pub async fn pages_are_in_order_while_entries_are_inserted<F: StoreFixture>(fixture: &F)
where
    F::Store: Schedule,
{
    let bench = ScheduleBench::open(fixture).await;
    let before: Vec<_> = (0..60).map(|_| bench.entry("a", LONG)).collect();
    bench.insert_all(&before).await;
    let during: Vec<_> = (0..60).map(|_| bench.entry("a", LONG)).collect();
    let inserting = {
        let (store, during) = (Arc::clone(&bench.store), during.clone());
        tokio::spawn(async move {
            for entry in &during {
                insert(&*store, entry).await;
                yield_now().await;
            }
        })
    };
    let known: BTreeSet<_> = before.iter().chain(&during).map(|entry| entry.key).collect();
    loop {
        // The other task may be on this thread.
        yield_now().await;
        let is_last = inserting.is_finished();
        let found: BTreeSet<_> = bench.all_by(7).await.iter().map(|entry| entry.key).collect();
        let missing = before.iter().filter(|entry| !found.contains(&entry.key)).count();
        assert_eq!(missing, 0, "{missing} entries are not on any page");
        assert!(found.is_subset(&known), "entries that nobody inserted");
        if is_last {
            assert_eq!(found, known);
            break;
        }
    }
    inserting.await.expect("inserting ends");
}

/// Queues with entries are returned in order of name, with the number of entries, and the time for
/// which the first one has been due.
pub async fn queues_are_counted<F: StoreFixture>(fixture: &F)
where
    F::Store: Schedule,
{
    let bench = ScheduleBench::open(fixture).await;
    let later = bench.scheduled("later", LONG).await;
    let first = bench.scheduled("due", Duration::ZERO).await;
    let gone = bench.scheduled("gone", Duration::ZERO).await;
    bench.pass(SOON).await;
    let second = bench.scheduled("due", Duration::ZERO).await;
    bench.scheduled("due", LONG).await;
    bench.remove(gone.key).await;
    for first in [first, second] {
        let before = bench.now().await;
        let queues = bench.queues().await;
        let possible = before.since(first.due)..=bench.now().await.since(first.due);
        let [due, last] = &queues[..] else { panic!("expected two queues, found {queues:?}") };
        assert_eq!((due.queue.as_str(), due.entries), ("due", 3));
        assert!(possible.contains(&due.overdue), "{:?} is not in {possible:?}", due.overdue);
        let expected =
            QueueStatus { queue: queue_named("later"), entries: 1, overdue: Duration::ZERO };
        assert_eq!(*last, expected);
        bench.postponed(first.key, None, LONG).await;
    }
    bench.remove(later.key).await;
    let queues = bench.queues().await;
    assert!(matches!(&queues[..], [one] if one.overdue.is_zero()), "{queues:?}");
}
