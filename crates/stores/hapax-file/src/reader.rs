//! The threads that read. Reads see durable data only: the engine shows a commit to readers once it
//! is on disk.

use std::ops::Bound;

use futures_channel::oneshot;
use hapax_core::{OperationId, StoreError, Timestamp};
use redb::{Database, ReadTransaction, ReadableDatabase, StorageError};

use crate::database::{CELLS, guarded};
use crate::error::{FileStoreError, unchanged};
use crate::record::{Columns, SealedRead, SealedRecord};
use crate::shared::{Shared, name};

/// Sealed bytes after which a page ends early. A record is in memory twice while it is opened.
const PAGE_BYTES: usize = 1 << 20;

/// A read that waits for the disk.
#[derive(Debug)]
pub(crate) enum ReadJob {
    /// Loads a record, if it has at most `room` sealed bytes.
    Load {
        key: OperationId,
        room: usize,
        reply: Reply<RawSnapshot>,
    },
    Page {
        after: Option<OperationId>,
        limit: u32,
        reply: Reply<RawPage>,
    },
}

type Reply<T> = oneshot::Sender<Result<T, StoreError>>;
type Found = Result<SealedRecord, StoreError>;

#[derive(Debug)]
pub(crate) struct RawSnapshot {
    pub(crate) now: Timestamp,
    pub(crate) stored: Option<Result<SealedRead, StoreError>>,
}

#[derive(Debug)]
pub(crate) struct RawPage {
    pub(crate) now: Timestamp,
    pub(crate) records: Vec<(OperationId, Found)>,
    pub(crate) more: bool,
}

/// Serves reads until the store is closed.
pub(crate) fn run(shared: &Shared) {
    while let Some(job) = shared.reads.take() {
        let database = shared.database();
        // A reply to a caller that is gone is dropped.
        match job {
            ReadJob::Load { key, room, reply } => {
                reply.send(with(&database, |database| load(shared, database, &key, room))).ok();
            }
            ReadJob::Page { after, limit, reply } => {
                reply.send(with(&database, |database| page(shared, database, after, limit))).ok();
            }
        }
    }
}

fn with<T>(
    database: &Option<Database>,
    read: impl FnOnce(&Database) -> Result<T, redb::Error>,
) -> Result<T, StoreError> {
    match database {
        Some(database) => guarded(|| read(database)).map_err(failed),
        None => Err(StoreError::unavailable(FileStoreError::Reopening)),
    }
}

fn failed(error: redb::Error) -> StoreError {
    match error {
        redb::Error::Corrupted(text) => unchanged(StorageError::Corrupted(text)),
        other => StoreError::unavailable(FileStoreError::Engine(other)),
    }
}

fn load(
    shared: &Shared,
    database: &Database,
    key: &OperationId,
    room: usize,
) -> Result<RawSnapshot, redb::Error> {
    let records = begin(database)?.open_table(CELLS)?;
    let found = records.get(name(key))?;
    let stored = found.map(|found| {
        let (columns, sealed) = Columns::read(key, found.value()).map_err(StoreError::corrupt)?;
        Ok(SealedRead::copy(columns, sealed, room))
    });
    Ok(RawSnapshot { now: shared.clock.now(), stored })
}

fn page(
    shared: &Shared,
    database: &Database,
    after: Option<OperationId>,
    limit: u32,
) -> Result<RawPage, redb::Error> {
    let from = after.as_ref().map_or(Bound::Unbounded, |key| Bound::Excluded(*name(key)));
    let (mut records, mut bytes) = (Vec::new(), 0);
    let now = shared.clock.now();
    let more = each(database, from, |key, stored| {
        if records.len() >= limit as usize || bytes >= PAGE_BYTES {
            return false;
        }
        let key = OperationId::from_bytes(*key);
        bytes += stored.len();
        let found = Columns::read(&key, stored).map_err(StoreError::corrupt);
        let whole =
            |(columns, sealed): (_, &[u8])| SealedRecord { columns, sealed: sealed.to_vec() };
        records.push((key, found.map(whole)));
        true
    });
    match more {
        Ok(more) => Ok(RawPage { now, records, more }),
        // The records read so far are the page; the next one begins with the damage.
        Err(redb::Error::Corrupted(_)) if !records.is_empty() => {
            Ok(RawPage { now, records, more: true })
        }
        // One error represents all records that cannot be read.
        Err(redb::Error::Corrupted(text)) => {
            let last = past_damage(database, from)?;
            let error = unchanged(StorageError::Corrupted(text));
            let key = OperationId::from_bytes(last.unwrap_or([0xff; 32]));
            Ok(RawPage { now, records: vec![(key, Err(error))], more: last.is_some() })
        }
        Err(error) => Err(error),
    }
}

/// Reads entries until `take` returns `false`. Returns whether `take` ended it.
fn each(
    database: &Database,
    from: Bound<[u8; 32]>,
    mut take: impl FnMut(&[u8; 32], &[u8]) -> bool,
) -> Result<bool, redb::Error> {
    guarded(|| {
        let table = begin(database)?.open_table(CELLS)?;
        let range = table.range::<&[u8; 32]>((from.as_ref(), Bound::Unbounded))?;
        for found in range {
            let (key, stored) = found?;
            if !take(key.value(), stored.value()) {
                return Ok(true);
            }
        }
        Ok(false)
    })
}

/// A stretch of records that the background check has read. `last` is its last key; `None` at the
/// end.
#[derive(Debug)]
pub(crate) enum Stretch {
    Read { last: Option<[u8; 32]>, records: u64 },
    Damaged { last: Option<[u8; 32]> },
}

/// Reads at most 256 KiB of records.
pub(crate) fn stretch(database: &Database, from: Bound<[u8; 32]>) -> Result<Stretch, redb::Error> {
    const BYTES: usize = 256 * 1024;
    let (mut last, mut bytes, mut records) = (None, 0, 0);
    let more = each(database, from, |key, stored| {
        if bytes >= BYTES {
            return false;
        }
        (last, bytes, records) = (Some(*key), bytes + 100 + stored.len(), records + 1);
        true
    });
    match more {
        Ok(true) => Ok(Stretch::Read { last, records }),
        Ok(false) => Ok(Stretch::Read { last: None, records }),
        Err(redb::Error::Corrupted(_)) if last.is_some() => Ok(Stretch::Read { last, records }),
        Err(redb::Error::Corrupted(_)) => {
            Ok(Stretch::Damaged { last: past_damage(database, from)? })
        }
        Err(error) => Err(error),
    }
}

/// Returns the last key of the unreadable range that begins at `from`; `None` if nothing after it
/// can be read.
fn past_damage(
    database: &Database,
    from: Bound<[u8; 32]>,
) -> Result<Option<[u8; 32]>, redb::Error> {
    let at = |prefix: u64| {
        let mut key = [0xff; 32];
        key[..8].copy_from_slice(&prefix.to_be_bytes());
        key
    };
    let start = match from {
        Bound::Included(key) | Bound::Excluded(key) => {
            key.first_chunk().map_or(0, |prefix| u64::from_be_bytes(*prefix))
        }
        Bound::Unbounded => 0,
    };
    let readable = |prefix: u64| match each(database, Bound::Excluded(at(prefix)), |_, _| false) {
        Ok(_) => Ok(true),
        Err(redb::Error::Corrupted(_)) => Ok(false),
        Err(error) => Err(error),
    };
    // In growing steps forward, and then back to the first key that is readable.
    let (mut damaged, mut gap) = (start, 1_u64);
    let mut whole = loop {
        let Some(next) = start.checked_add(gap) else { return Ok(None) };
        if readable(next)? {
            break next;
        }
        let Some(further) = gap.checked_mul(2) else { return Ok(None) };
        (damaged, gap) = (next, further);
    };
    while whole - damaged > 1 {
        let middle = damaged + (whole - damaged) / 2;
        if readable(middle)? { whole = middle } else { damaged = middle }
    }
    Ok(Some(at(whole)))
}

fn begin(database: &Database) -> Result<ReadTransaction, redb::Error> {
    Ok(database.begin_read()?)
}
