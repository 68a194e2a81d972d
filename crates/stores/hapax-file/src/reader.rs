//! The threads that read. Reads see durable data only: the engine shows a commit to readers once it
//! is on disk.

use futures_channel::oneshot;
use hapax_core::schedule::{EntryKey, QueueName, QueueStatus};
use hapax_core::{OperationId, StoreError, Timestamp};
use redb::{Database, StorageError};

use crate::database::{CELLS, ENTRIES, guarded};
use crate::error::{FileStoreError, unchanged};
use crate::pages::{RawPage, begin, page};
use crate::record::{Columns, SealedRead, SealedRecord};
use crate::schedule::format::{KEY, SealedEntry, stored_key};
use crate::schedule::reader::{self as schedule, RawDue};
use crate::shared::{Shared, name};

/// A read that waits for the disk.
#[derive(Debug)]
pub(crate) enum ReadJob {
    /// Loads a record, if it has at most `room` sealed bytes.
    Load { key: OperationId, room: usize, reply: Reply<RawSnapshot> },
    /// Reads a page of records.
    Page { after: Option<OperationId>, limit: u32, reply: Reply<RawPage<32, SealedRecord>> },
    /// Reads entries of the schedule that are due.
    Due { queues: Vec<QueueName>, limit: u32, reply: Reply<RawDue> },
    /// Reads a page of entries of the schedule.
    Entries { after: Option<EntryKey>, limit: u32, reply: Reply<RawPage<KEY, SealedEntry>> },
    /// Counts the entries of each queue.
    Queues { reply: Reply<Vec<QueueStatus>> },
}

type Reply<T> = oneshot::Sender<Result<T, StoreError>>;

#[derive(Debug)]
pub(crate) struct RawSnapshot {
    pub(crate) now: Timestamp,
    pub(crate) stored: Option<Result<SealedRead, StoreError>>,
}

/// Serves reads until the store is closed.
pub(crate) fn run(shared: &Shared) {
    while let Some(job) = shared.reads.take() {
        let database = shared.database();
        let now = || shared.clock.now();
        // A reply to a caller that is gone is dropped.
        match job {
            ReadJob::Load { key, room, reply } => {
                reply.send(with(&database, |database| load(shared, database, &key, room))).ok();
            }
            ReadJob::Page { after, limit, reply } => {
                let after = after.map(|key| *name(&key));
                let read = |database: &_| page(database, CELLS, after, limit, now(), record);
                reply.send(with(&database, read)).ok();
            }
            ReadJob::Due { queues, limit, reply } => {
                let read = |database: &_| schedule::due(shared, database, &queues, limit);
                reply.send(with(&database, read)).ok();
            }
            ReadJob::Entries { after, limit, reply } => {
                let after = after.as_ref().map(stored_key);
                let read =
                    |database: &_| page(database, ENTRIES, after, limit, now(), schedule::entry);
                reply.send(with(&database, read)).ok();
            }
            ReadJob::Queues { reply } => {
                let read = |database: &_| schedule::queues(shared, database);
                reply.send(with(&database, read)).ok();
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

fn record(key: &[u8; 32], stored: &[u8]) -> Result<SealedRecord, StoreError> {
    let key = OperationId::from_bytes(*key);
    let (columns, sealed) = Columns::read(&key, stored).map_err(StoreError::corrupt)?;
    Ok(SealedRecord { columns, sealed: sealed.to_vec() })
}
