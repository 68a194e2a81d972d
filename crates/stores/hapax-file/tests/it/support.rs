//! Steps of the tests.

use std::num::NonZeroU32;
use std::time::Duration;

use bytes::Bytes;
use hapax_core::schedule::{EntryKey, NewEntry, QueueName, Schedule, ScheduleEntry};
use hapax_core::store::{Snapshot, Stamped, StoredRecord, Swap, Swapped};
use hapax_core::{EntryId, Store, StoreError};

pub(crate) use hapax_testkit::steps::{LEASE, RETENTION, claim, complete, key, load, write_id};

/// Swaps once: no network is between the test and a file.
pub(crate) async fn expect_stored(store: &dyn Store, swap: &Swap) -> Stamped {
    match store.swap(swap.clone()).await.unwrap() {
        Swapped::Stored(stamped) => stamped,
        Swapped::Conflict(seen) => panic!("a conflict: {seen:?}"),
    }
}

pub(crate) async fn seen(store: &dyn Store, of: u64) -> (Snapshot, StoredRecord) {
    let seen = store.load(&key(of)).await.unwrap();
    let stored = seen.stored.clone().unwrap();
    (seen, stored)
}

/// The queue of [`entry`].
pub(crate) fn queue() -> QueueName {
    QueueName::new("transfer/1").unwrap()
}

/// An entry with a note that names it.
pub(crate) fn entry(of: u64, due_in: Duration) -> NewEntry {
    let key = EntryKey { operation: key(of), id: EntryId::from_bytes(*write_id(of).as_bytes()) };
    let mut note = format!("note {of} ").into_bytes();
    note.resize(60 + of as usize % 7 * 50, b'x');
    NewEntry { key, queue: queue(), due_in, note: Bytes::from(note) }
}

/// All entries that can be read, and how many errors stand for the others: one for the whole call if
/// the root of a table is damaged.
pub(crate) async fn entries(store: &dyn Schedule) -> (Vec<ScheduleEntry>, usize) {
    let (mut found, mut damaged, mut after) = (Vec::new(), 0, None);
    loop {
        let page = match store.entries(after, NonZeroU32::new(100).unwrap()).await {
            Ok(page) => page,
            Err(StoreError::Corrupt(_)) => return (found, damaged + 1),
            Err(error) => panic!("{error}"),
        };
        after = page.entries.last().map(|(key, _)| *key);
        for (_, entry) in page.entries {
            match entry {
                Ok(entry) => found.push(entry),
                Err(StoreError::Corrupt(_)) => damaged += 1,
                Err(error) => panic!("{error}"),
            }
        }
        if !page.more {
            return (found, damaged);
        }
    }
}

/// All due entries that can be read, and how many errors stand for the others, as in [`entries`].
pub(crate) async fn due(store: &dyn Schedule) -> (Vec<ScheduleEntry>, usize) {
    let found = match store.due(&[queue()], NonZeroU32::MAX).await {
        Ok(found) => found,
        Err(StoreError::Corrupt(_)) => return (Vec::new(), 1),
        Err(error) => panic!("{error}"),
    };
    let (mut whole, mut damaged) = (Vec::new(), 0);
    for (_, entry) in found.entries {
        match entry {
            Ok(entry) => whole.push(entry),
            Err(StoreError::Corrupt(_)) => damaged += 1,
            Err(error) => panic!("{error}"),
        }
    }
    (whole, damaged)
}
