//! Changes of the schedule within one transaction, which is that of the swaps beside them.

use std::borrow::Cow;
use std::time::Duration;

use futures_channel::oneshot;
use hapax_core::schedule::{EntryKey, QueueName};
use hapax_core::{StoreError, Timestamp};
use redb::{ReadableTable, StorageError, Table, TableError, WriteTransaction};

use super::format::{EntryColumns, KEY, stored_key};
use crate::batch_context::{BatchContext, DiskFull};
use crate::database::{ENTRIES, QUEUED};
use crate::error::FileStoreError;

/// A change of an entry that waits for the disk.
#[derive(Debug)]
pub(crate) struct EntryJob {
    pub(crate) key: EntryKey,
    pub(crate) change: EntryChange,
    /// Receives the result of [`Schedule`](hapax_core::schedule::Schedule)'s method: for `postpone`, whether
    /// the entry existed and was due as expected.
    pub(crate) reply: oneshot::Sender<Result<bool, StoreError>>,
}

#[derive(Debug)]
pub(crate) enum EntryChange {
    Insert { queue: QueueName, due_in: Duration, sealed: Vec<u8> },
    Postpone { expected: Option<Timestamp>, due_in: Duration },
    Remove,
}

/// An entry with its sealed note, or the error for a damaged one.
type Found = Result<(EntryColumns, Vec<u8>), StoreError>;

/// The tables of the schedule in one transaction.
pub(crate) struct EntryTables<'t> {
    entries: Table<'t, &'static [u8; KEY], &'static [u8]>,
    queued: Table<'t, &'static [u8], &'static [u8; 0]>,
    /// Bytes of entries that were read or written.
    bytes: usize,
    wrote: bool,
}

impl<'t> EntryTables<'t> {
    pub(crate) fn open(transaction: &'t WriteTransaction) -> Result<Self, StorageError> {
        let failed = |error| match error {
            TableError::Storage(error) => error,
            // A table of another type, which this file does not have.
            other => StorageError::Corrupted(other.to_string()),
        };
        let entries = transaction.open_table(ENTRIES).map_err(failed)?;
        let queued = transaction.open_table(QUEUED).map_err(failed)?;
        Ok(Self { entries, queued, bytes: 0, wrote: false })
    }

    /// Returns whether there is anything to commit.
    pub(crate) const fn wrote(&self) -> bool {
        self.wrote
    }

    pub(crate) const fn bytes(&self) -> usize {
        self.bytes
    }

    /// Applies a change. The inner error concerns this entry alone.
    pub(crate) fn apply(
        &mut self,
        job: &EntryJob,
        now: Timestamp,
        terms: BatchContext,
    ) -> Result<Result<bool, StoreError>, StorageError> {
        let key = &job.key;
        let found = match self.read(key)? {
            Some(Err(damaged)) => return Ok(Err(damaged)),
            Some(Ok(found)) => Some(found),
            None => None,
        };
        let is_new = found.is_none();
        let (before, after, sealed) = match (&job.change, found) {
            (EntryChange::Insert { .. }, Some(_)) => return Ok(Ok(true)),
            (EntryChange::Insert { queue, due_in, sealed }, None) => {
                let columns = EntryColumns { queue: queue.clone(), due: now.after(*due_in) };
                (None, Some(columns), Cow::Borrowed(sealed.as_slice()))
            }
            (EntryChange::Postpone { .. } | EntryChange::Remove, None) => return Ok(Ok(false)),
            (EntryChange::Postpone { expected, due_in }, Some((before, sealed))) => {
                if expected.is_some_and(|expected| expected != before.due) {
                    return Ok(Ok(false));
                }
                let columns = EntryColumns { due: now.after(*due_in), ..before.clone() };
                (Some(before), Some(columns), Cow::Owned(sealed))
            }
            (EntryChange::Remove, Some((before, _))) => (Some(before), None, Cow::default()),
        };
        if terms.no_writes {
            return Ok(Err(StoreError::unavailable(FileStoreError::ReserveUsed)));
        }
        // The last bytes are for operations in progress, not for a new one.
        if let (true, Some(DiskFull { free, needed })) = (is_new, terms.full) {
            return Ok(Err(StoreError::unavailable(FileStoreError::DiskFull { free, needed })));
        }
        self.write(key, before, after, &sealed)?;
        Ok(Ok(true))
    }

    /// Moves an entry in the index, and writes or removes it.
    fn write(
        &mut self,
        key: &EntryKey,
        before: Option<EntryColumns>,
        after: Option<EntryColumns>,
        sealed: &[u8],
    ) -> Result<(), StorageError> {
        self.wrote = true;
        let place = |columns: &EntryColumns| columns.index(key);
        let (from, to) = (before.as_ref().map(place), after.as_ref().map(place));
        if from != to {
            if let Some(from) = from {
                self.queued.remove(from.as_slice())?;
            }
            if let Some(to) = to {
                self.queued.insert(to.as_slice(), &[])?;
            }
        }
        match after {
            Some(columns) => {
                let stored = columns.write(key, sealed);
                self.bytes += stored.len();
                self.entries.insert(&stored_key(key), stored.as_slice())?;
            }
            None => drop(self.entries.remove(&stored_key(key))?),
        }
        Ok(())
    }

    fn read(&mut self, key: &EntryKey) -> Result<Option<Found>, StorageError> {
        let found = self.entries.get(&stored_key(key))?;
        let read = found.map(|found| {
            self.bytes += found.value().len();
            let (columns, sealed) =
                EntryColumns::read(key, found.value()).map_err(StoreError::corrupt)?;
            Ok((columns, sealed.to_vec()))
        });
        Ok(read)
    }
}
