//! Reads of the schedule, each of one snapshot.

use std::cmp::Reverse;
use std::collections::{BTreeSet, BinaryHeap};
use std::ops::Bound;
use std::time::Duration;

use hapax_core::schedule::{EntryKey, QueueName, QueueStatus};
use hapax_core::{EntryId, OperationId, StoreError, Timestamp};
use redb::{Database, Range, ReadOnlyTable, StorageError};

use super::format::{
    DamagedEntry, KEY, SealedEntry, entry_key, index_after, index_start, split_index, stored_key,
};
use crate::database::{ENTRIES, QUEUED, guarded};
use crate::error::unchanged;
use crate::pages::{PAGE_BYTES, Stretch, begin, each, past_damage, stretch_of};
use crate::shared::Shared;

/// Names an error that represents entries whose keys cannot be read.
const UNREADABLE: EntryKey = EntryKey {
    operation: OperationId::from_bytes([0xff; 32]),
    id: EntryId::from_bytes([0xff; 16]),
};

/// Entries that are due, still sealed.
#[derive(Debug)]
pub(crate) struct RawDue {
    pub(crate) now: Timestamp,
    pub(crate) found: Vec<(EntryKey, Result<SealedEntry, StoreError>)>,
    pub(crate) next_in: Option<Duration>,
}

type Index = ReadOnlyTable<&'static [u8], &'static [u8; 0]>;
type Entries = ReadOnlyTable<&'static [u8; KEY], &'static [u8]>;

/// Reads entries that are due: of each queue the first ones in the index, merged by time, so that
/// neither other queues nor later entries are read. As a page does, it ends early after a mebibyte.
///
/// An entry that cannot be read is an error in its place. A range of the index that cannot be read
/// is one error, after what can be.
///
/// # Errors
/// [`redb::Error::Corrupted`] if the root of a table is damaged, which leaves nothing of the table to
/// read; any other error of the engine.
pub(crate) fn due(
    shared: &Shared,
    database: &Database,
    queues: &[QueueName],
    limit: u32,
) -> Result<RawDue, redb::Error> {
    let transaction = begin(database)?;
    let (entries, index) = (transaction.open_table(ENTRIES)?, transaction.open_table(QUEUED)?);
    let now = shared.clock.now();
    let queues: BTreeSet<_> = queues.iter().collect();
    let mut queues = queues
        .into_iter()
        .map(|queue| QueueReader::open(&index, queue))
        .collect::<Result<Vec<_>, _>>()?;
    let mut first = BinaryHeap::new();
    for (number, queue) in queues.iter_mut().enumerate() {
        first.extend(queue.next()?.map(|(due, key)| Reverse((due, key, number))));
    }
    let (mut found, mut bytes, mut next) = (Vec::new(), 0, None);
    while let Some(Reverse((due, key, number))) = first.pop() {
        if due > now || found.len() >= limit as usize || bytes >= PAGE_BYTES {
            next = Some(due.since(now));
            break;
        }
        let entry = sealed(&entries, &key, queues[number].name, due)?;
        bytes += entry.as_ref().map_or(0, |entry| entry.sealed.len());
        found.push((key, entry));
        first.extend(queues[number].next()?.map(|(due, key)| Reverse((due, key, number))));
    }
    for text in queues.into_iter().flat_map(|queue| queue.damaged) {
        if found.len() < limit as usize {
            found.push((UNREADABLE, Err(unchanged(StorageError::Corrupted(text)))));
        } else {
            next = Some(Duration::ZERO);
        }
    }
    Ok(RawDue { now, found, next_in: next })
}

/// The part of the index that has one queue.
struct QueueReader<'a> {
    index: &'a Index,
    name: &'a QueueName,
    range: Option<Range<'static, &'static [u8], &'static [u8; 0]>>,
    /// The due time that was read last.
    last: Timestamp,
    /// Errors of the ranges that were left out.
    damaged: Vec<String>,
}

impl<'a> QueueReader<'a> {
    fn open(index: &'a Index, name: &'a QueueName) -> Result<Self, redb::Error> {
        // This reads nothing yet.
        let range = Some(range(index, name, Bound::Included(&index_start(name)))?);
        Ok(Self { index, name, range, last: Timestamp::default(), damaged: Vec::new() })
    }

    /// Returns the next entry of the queue, past what is damaged.
    fn next(&mut self) -> Result<Option<(Timestamp, EntryKey)>, redb::Error> {
        loop {
            let Some(range) = &mut self.range else { return Ok(None) };
            let read = guarded(|| {
                let found = range.next().transpose()?;
                let split = |index: &[u8]| split_index(index).map(|(_, due, key)| (due, key));
                found.map(|(index, _)| split(index.value()).ok_or_else(unknown)).transpose()
            });
            match read {
                Ok(found) => {
                    self.last = found.map_or(self.last, |(due, _)| due);
                    return Ok(found);
                }
                Err(StorageError::Corrupted(text)) => self.go_around(text)?,
                Err(error) => return Err(error.into()),
            }
        }
    }

    /// Notes damage, and continues at the next due time from which the queue can be read.
    fn go_around(&mut self, text: String) -> Result<(), redb::Error> {
        self.damaged.push(text);
        self.range = None;
        let (index, name) = (self.index, self.name);
        let at = |due| index_after(name, Timestamp::from_micros(due));
        let whole = past_damage(self.last.as_micros(), |due| {
            let mut range = range(index, name, Bound::Excluded(&at(due)))?;
            Ok(guarded(|| range.next().transpose().map(|found| found.is_some()))?)
        })?;
        if let Some(due) = whole {
            self.last = Timestamp::from_micros(due);
            self.range = Some(range(index, name, Bound::Excluded(&at(due)))?);
        }
        Ok(())
    }
}

/// Returns the keys of a queue after `from`.
fn range(
    index: &Index,
    queue: &QueueName,
    from: Bound<&[u8]>,
) -> Result<Range<'static, &'static [u8], &'static [u8; 0]>, StorageError> {
    let end = index_after(queue, Timestamp::MAX);
    index.range::<&[u8]>((from, Bound::Included(end.as_slice())))
}

fn unknown() -> StorageError {
    StorageError::Corrupted("expected keys of queue, time and entry in the schedule's index, found another one: salvage the file".to_owned())
}

/// Reads an entry that is in the index. The inner error concerns this entry alone.
fn sealed(
    entries: &Entries,
    key: &EntryKey,
    queue: &QueueName,
    due: Timestamp,
) -> Result<Result<SealedEntry, StoreError>, redb::Error> {
    let read = guarded(|| {
        let found = entries.get(&stored_key(key))?;
        Ok::<_, StorageError>(found.map(|found| SealedEntry::copy(key, found.value())))
    });
    match read {
        Ok(Some(Ok(entry))) if entry.columns.queue == *queue && entry.columns.due == due => {
            Ok(Ok(entry))
        }
        // Both tables are written in one transaction.
        Ok(_) => Ok(Err(StoreError::corrupt(DamagedEntry))),
        Err(error @ StorageError::Corrupted(_)) => Ok(Err(unchanged(error))),
        Err(error) => Err(error.into()),
    }
}

/// Reads an entry of a page.
pub(crate) fn entry(key: &[u8; KEY], stored: &[u8]) -> Result<SealedEntry, StoreError> {
    SealedEntry::copy(&entry_key(key), stored).map_err(StoreError::corrupt)
}

/// Counts the entries of each queue in the index, all of which it reads.
pub(crate) fn queues(
    shared: &Shared,
    database: &Database,
) -> Result<Vec<QueueStatus>, redb::Error> {
    let now = shared.clock.now();
    let mut queues = Vec::<QueueStatus>::new();
    let stopped = each(database, QUEUED, Bound::Unbounded, |index, _| {
        let Some((name, due, _)) = split_index(index) else { return false };
        match queues.last_mut() {
            Some(last) if last.queue.as_str().as_bytes() == name => last.entries += 1,
            _ => {
                let name = std::str::from_utf8(name).ok();
                let Some(queue) = name.and_then(|name| QueueName::new(name).ok()) else {
                    return false;
                };
                queues.push(QueueStatus { queue, entries: 1, overdue: now.since(due) });
            }
        }
        true
    })?;
    if stopped { Err(unknown().into()) } else { Ok(queues) }
}

/// Reads a stretch of the index after the key `from`. Returns the last key; `None` at the end.
pub(crate) fn index_stretch(
    database: &Database,
    from: Option<&[u8]>,
) -> Result<Stretch<Option<Vec<u8>>>, redb::Error> {
    let bound = from.map_or(Bound::Unbounded, Bound::Excluded);
    stretch_of(
        |take| each(database, QUEUED, bound, |index, _| take(index.to_vec(), 0)),
        || past_index(database, from),
    )
}

/// Returns the last key of the unreadable range of the index after `from`: within the queue, or else
/// by the beginning of the names.
fn past_index(database: &Database, from: Option<&[u8]>) -> Result<Option<Vec<u8>>, redb::Error> {
    let readable = |at: &[u8]| each(database, QUEUED, Bound::Excluded(at), |_, _| false);
    if let Some((name, due, _)) = from.and_then(split_index)
        && let Some(queue) = std::str::from_utf8(name).ok().and_then(|n| QueueName::new(n).ok())
    {
        let at = |due| index_after(&queue, Timestamp::from_micros(due));
        if let Some(due) = past_damage(due.as_micros(), |due| readable(&at(due)))? {
            return Ok(Some(at(due)));
        }
    }
    let mut prefix = [0; 8];
    for (to, from) in prefix.iter_mut().zip(from.unwrap_or_default()) {
        *to = *from;
    }
    let at = |prefix: u64| [&prefix.to_be_bytes()[..], &[0xff; 1]].concat();
    Ok(past_damage(u64::from_be_bytes(prefix), |prefix| readable(&at(prefix)))?.map(at))
}
