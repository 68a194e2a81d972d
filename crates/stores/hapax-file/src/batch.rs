//! Swaps, removals and changes of the schedule within one transaction.
//!
//! Several swaps of one key may share a transaction: they are applied in the order of the queue,
//! and each sees the writes of those before it. So the answers are those of swaps in sequence. All
//! of them become durable in one step, and none is answered before that, so no crash can expose a
//! state between two of them. Moving the later swap to the next commit would give the same answers
//! one commit later.

use std::time::Duration;

use futures_channel::oneshot;
use hapax_core::store::{Stamp, Stamped};
use hapax_core::{FencingToken, OperationId, StoreError, Timestamp, WriteId};
use redb::{ReadableTable, StorageError, Table, WriteTransaction};

use crate::batch_context::{BatchContext, DiskFull};
use crate::clock::ClockMark;
use crate::database::{CELLS, DUE, FLOOR, MACHINE, MARK, NUMBERS};
use crate::error::FileStoreError;
use crate::record::{Columns, Damaged, Epoch, NEVER, SMALL, SealedRead};
use crate::schedule::batch::{EntryJob, EntryTables};

/// A swap that waits for the disk.
#[derive(Debug)]
pub(crate) struct SwapJob {
    pub(crate) key: OperationId,
    pub(crate) expected: Option<WriteId>,
    pub(crate) write_id: WriteId,
    pub(crate) stamp: Stamp,
    pub(crate) lease: Duration,
    pub(crate) keep: Option<Duration>,
    /// Time after the end of the retention for which the record stays.
    pub(crate) grace: Duration,
    pub(crate) sealed: Vec<u8>,
    pub(crate) reply: oneshot::Sender<Result<RawSwapped, StoreError>>,
}

/// The result of a swap, with the record still sealed.
#[derive(Debug)]
pub(crate) enum RawSwapped {
    Stored(Stamped),
    Conflict { now: Timestamp, stored: Option<SealedRead> },
}

/// The result of removing expired records.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Removal {
    pub(crate) removed: u32,
    /// Whether there may be more.
    pub(crate) more: bool,
}

/// The tables of one transaction.
pub(crate) struct Batch<'t> {
    transaction: &'t WriteTransaction,
    cells: Table<'t, &'static [u8; 32], &'static [u8]>,
    due: Table<'t, &'static [u8; 40], ()>,
    numbers: Table<'t, &'static str, u64>,
    /// Opened by the first change, so that other transactions do not open them.
    entries: Option<EntryTables<'t>>,
    floor: u64,
    wrote: bool,
    in_index: bool,
}

impl<'t> Batch<'t> {
    pub(crate) fn open(
        transaction: &'t WriteTransaction,
        floor: u64,
    ) -> Result<Self, redb::TableError> {
        Ok(Self {
            transaction,
            cells: transaction.open_table(CELLS)?,
            due: transaction.open_table(DUE)?,
            numbers: transaction.open_table(NUMBERS)?,
            entries: None,
            floor,
            wrote: false,
            in_index: false,
        })
    }

    /// Returns whether there is anything to commit.
    pub(crate) fn wrote(&self) -> bool {
        self.wrote || self.entries.as_ref().is_some_and(EntryTables::wrote)
    }

    /// Returns the bytes of entries of the schedule that were read or written.
    pub(crate) fn entry_bytes(&self) -> usize {
        self.entries.as_ref().map_or(0, EntryTables::bytes)
    }

    /// Returns whether the last error was caused by the index of expiry, not by a record.
    pub(crate) const fn in_index(&self) -> bool {
        self.in_index
    }

    /// Returns the lower bound of new fences once this is committed.
    pub(crate) const fn floor(&self) -> u64 {
        self.floor
    }

    /// Applies a swap. The inner error concerns this key alone.
    pub(crate) fn apply(
        &mut self,
        job: &SwapJob,
        now: Timestamp,
        terms: BatchContext,
    ) -> Result<Result<RawSwapped, StoreError>, StorageError> {
        let found = match self.read(&job.key)? {
            Some(Err(damaged)) => return Ok(Err(StoreError::corrupt(damaged))),
            Some(Ok(columns)) => Some(columns),
            None => None,
        };
        if let Some(columns) = found
            && columns.write_id == job.write_id
        {
            return Ok(Ok(RawSwapped::Stored(columns.stamped(now, terms.epoch))));
        }
        if found.map(|columns| columns.write_id) != job.expected {
            let stored = self.raw(&job.key)?;
            return Ok(Ok(RawSwapped::Conflict { now, stored }));
        }
        if terms.no_writes {
            return Ok(Err(StoreError::unavailable(FileStoreError::ReserveUsed)));
        }
        // A completion may use the last bytes; a new key may not.
        if let (None, Some(DiskFull { free, needed })) = (found, terms.full) {
            return Ok(Err(StoreError::unavailable(FileStoreError::DiskFull { free, needed })));
        }
        let mut columns = self.columns(job, found, now, terms.epoch);
        let before = found.map_or(NEVER, |columns| columns.indexed);
        if terms.no_index {
            columns.indexed = before;
        }
        self.write(&job.key, before, &columns, &job.sealed)?;
        Ok(Ok(RawSwapped::Stored(columns.stamped(now, terms.epoch))))
    }

    /// Applies a change of the schedule. The inner error concerns this entry alone.
    pub(crate) fn apply_entry(
        &mut self,
        job: &EntryJob,
        now: Timestamp,
        terms: BatchContext,
    ) -> Result<Result<bool, StoreError>, StorageError> {
        let entries = match &mut self.entries {
            Some(entries) => entries,
            none => none.insert(EntryTables::open(self.transaction)?),
        };
        entries.apply(job, now, terms)
    }

    /// Removes expired records, reading at most `limit` entries of the index.
    pub(crate) fn remove_due(
        &mut self,
        now: Timestamp,
        limit: u32,
    ) -> Result<Removal, StorageError> {
        let mut removed = 0;
        for _ in 0..limit {
            self.in_index = true;
            let Some((at, key)) = self.first_due()?.filter(|(at, _)| *at <= now) else {
                return Ok(Removal { removed, more: false });
            };
            self.wrote = true;
            self.due.remove(&entry(at, &key))?;
            self.in_index = false;
            let Some((mut columns, sealed)) = self.whole(&key)? else { continue };
            if columns.due <= now {
                self.cells.remove(key.as_bytes())?;
                self.raise_floor(columns.fence)?;
                removed += 1;
            } else {
                // Written again since it was indexed, with a later expiry.
                columns.indexed = columns.due;
                self.index(columns.indexed, &key)?;
                self.put(&key, &columns, &sealed)?;
            }
        }
        Ok(Removal { removed, more: true })
    }

    /// Writes the mark of the clock.
    pub(crate) fn write_mark(&mut self, mark: ClockMark) -> Result<(), StorageError> {
        self.numbers.insert(MARK, mark.time.as_micros())?;
        self.numbers.insert(MACHINE, mark.machine.as_micros())?;
        Ok(())
    }

    fn columns(
        &self,
        job: &SwapJob,
        found: Option<Columns>,
        now: Timestamp,
        epoch: Epoch,
    ) -> Columns {
        let last = found.map(|columns| columns.fence);
        let fence = match (job.stamp, last) {
            (Stamp::Keep, Some(last)) => last,
            (Stamp::NextFence, Some(last)) => FencingToken::next(Some(last), now),
            // The record may have been reaped under a clock that was ahead of the present one.
            (_, None) => {
                let floor = (self.floor > 0).then_some(FencingToken::new(self.floor));
                FencingToken::next(floor, now)
            }
        };
        let keep_until = job.keep.map(|keep| now.after(keep));
        let due = keep_until.map_or(NEVER, |until| until.after(job.grace));
        // An entry of the index may be too early: the removal that reads it moves it. So a
        // completion, whose retention is longer than its claim's, does not write the index.
        let indexed = found.map_or(NEVER, |columns| columns.indexed);
        Columns {
            write_id: job.write_id,
            fence,
            lease_until: now.after(job.lease),
            keep_until,
            epoch: epoch.number,
            due,
            indexed: indexed.min(due),
        }
    }

    fn write(
        &mut self,
        key: &OperationId,
        before: Timestamp,
        columns: &Columns,
        sealed: &[u8],
    ) -> Result<(), StorageError> {
        if before != columns.indexed {
            self.in_index = true;
            if before != NEVER {
                self.due.remove(&entry(before, key))?;
            }
            self.in_index = false;
            self.index(columns.indexed, key)?;
        }
        self.put(key, columns, sealed)
    }

    fn put(
        &mut self,
        key: &OperationId,
        columns: &Columns,
        sealed: &[u8],
    ) -> Result<(), StorageError> {
        self.wrote = true;
        self.cells.insert(key.as_bytes(), columns.write(key, sealed).as_slice())?;
        Ok(())
    }

    fn index(&mut self, at: Timestamp, key: &OperationId) -> Result<(), StorageError> {
        if at != NEVER {
            self.in_index = true;
            self.due.insert(&entry(at, key), ())?;
            self.in_index = false;
        }
        Ok(())
    }

    fn first_due(&self) -> Result<Option<(Timestamp, OperationId)>, StorageError> {
        let first = self.due.first()?;
        Ok(first.map(|(entry, _)| split(entry.value())))
    }

    fn raise_floor(&mut self, fence: FencingToken) -> Result<(), StorageError> {
        if fence.get() > self.floor {
            self.floor = fence.get();
            self.numbers.insert(FLOOR, self.floor)?;
        }
        Ok(())
    }

    fn read(&self, key: &OperationId) -> Result<Option<Result<Columns, Damaged>>, StorageError> {
        let found = self.cells.get(key.as_bytes())?;
        Ok(found.map(|found| Columns::read(key, found.value()).map(|(columns, _)| columns)))
    }

    fn raw(&self, key: &OperationId) -> Result<Option<SealedRead>, StorageError> {
        let found = self.cells.get(key.as_bytes())?;
        Ok(found.and_then(|found| {
            let (columns, sealed) = Columns::read(key, found.value()).ok()?;
            Some(SealedRead::copy(columns, sealed, SMALL))
        }))
    }

    /// Returns a record that exists and is readable. A damaged one stays where it is, out of the
    /// index, for an operator to find.
    fn whole(&self, key: &OperationId) -> Result<Option<(Columns, Vec<u8>)>, StorageError> {
        let found = self.cells.get(key.as_bytes())?;
        Ok(found.and_then(|found| {
            let (columns, sealed) = Columns::read(key, found.value()).ok()?;
            Some((columns, sealed.to_vec()))
        }))
    }
}

pub(crate) fn entry(at: Timestamp, key: &OperationId) -> [u8; 40] {
    let mut bytes = [0; 40];
    bytes[..8].copy_from_slice(&at.as_micros().to_be_bytes());
    bytes[8..].copy_from_slice(key.as_bytes());
    bytes
}

fn split(entry: &[u8; 40]) -> (Timestamp, OperationId) {
    let (mut at, mut key) = ([0; 8], [0; 32]);
    at.copy_from_slice(&entry[..8]);
    key.copy_from_slice(&entry[8..]);
    (Timestamp::from_micros(u64::from_be_bytes(at)), OperationId::from_bytes(key))
}
