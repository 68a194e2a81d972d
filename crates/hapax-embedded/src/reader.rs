//! The threads that read. They see what is durable: the engine shows a commit to readers only
//! once it is on disk.

use std::ops::Bound;

use futures_channel::oneshot;
use hapax::{StoreError, StoreKey, Timestamp};
use redb::{Database, ReadTransaction, ReadableDatabase, StorageError};

use crate::cell::{Columns, RawCell, Seen};
use crate::database::{CELLS, guarded};
use crate::error::{EmbeddedError, unchanged};
use crate::shared::{Shared, name};

/// Sealed bytes after which a page ends early. There are two of a record while it is opened.
const PAGE_BYTES: usize = 1 << 20;

/// A read that waits for the disk.
#[derive(Debug)]
pub(crate) enum ReadJob {
    /// A cell, if it has no more sealed bytes than there is `room` for.
    Load {
        key: StoreKey,
        room: usize,
        reply: Reply<RawSnapshot>,
    },
    Page {
        after: Option<StoreKey>,
        limit: u32,
        reply: Reply<RawPage>,
    },
}

type Reply<T> = oneshot::Sender<Result<T, StoreError>>;
type Found = Result<RawCell, StoreError>;

#[derive(Debug)]
pub(crate) struct RawSnapshot {
    pub(crate) now: Timestamp,
    pub(crate) cell: Option<Result<Seen, StoreError>>,
}

#[derive(Debug)]
pub(crate) struct RawPage {
    pub(crate) now: Timestamp,
    pub(crate) cells: Vec<(StoreKey, Found)>,
    pub(crate) more: bool,
}

/// Serves reads until the store is closed.
pub(crate) fn run(shared: &Shared) {
    while let Some(job) = shared.reads.take() {
        let database = shared.database();
        // A caller that went away needs no answer.
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
        None => Err(StoreError::unavailable(EmbeddedError::Reopening)),
    }
}

fn failed(error: redb::Error) -> StoreError {
    match error {
        redb::Error::Corrupted(text) => unchanged(StorageError::Corrupted(text)),
        other => StoreError::unavailable(EmbeddedError::Engine(other)),
    }
}

fn load(
    shared: &Shared,
    database: &Database,
    key: &StoreKey,
    room: usize,
) -> Result<RawSnapshot, redb::Error> {
    let cells = begin(database)?.open_table(CELLS)?;
    let found = cells.get(name(key))?;
    let cell = found.map(|found| {
        let (columns, sealed) = Columns::read(key, found.value()).map_err(StoreError::corrupt)?;
        Ok(Seen::copy(columns, sealed, room))
    });
    Ok(RawSnapshot { now: shared.clock.now(), cell })
}

fn page(
    shared: &Shared,
    database: &Database,
    after: Option<StoreKey>,
    limit: u32,
) -> Result<RawPage, redb::Error> {
    let table = begin(database)?.open_table(CELLS)?;
    let from = after.as_ref().map_or(Bound::Unbounded, |key| Bound::Excluded(name(key)));
    let (mut cells, mut bytes) = (Vec::new(), 0);
    let now = shared.clock.now();
    for found in table.range::<&[u8; 32]>((from, Bound::Unbounded))? {
        if cells.len() >= limit as usize || bytes >= PAGE_BYTES {
            return Ok(RawPage { now, cells, more: true });
        }
        let (key, stored) = found?;
        let key = StoreKey::from_bytes(*key.value());
        bytes += stored.value().len();
        let found = Columns::read(&key, stored.value()).map_err(StoreError::corrupt);
        let whole = |(columns, sealed): (_, &[u8])| RawCell { columns, sealed: sealed.to_vec() };
        cells.push((key, found.map(whole)));
    }
    Ok(RawPage { now, cells, more: false })
}

fn begin(database: &Database) -> Result<ReadTransaction, redb::Error> {
    Ok(database.begin_read()?)
}
