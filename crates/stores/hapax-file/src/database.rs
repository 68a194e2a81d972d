//! The tables, and opening them.
//!
//! # Why an acknowledged swap survives
//! Every commit has two phases. First all pages of the transaction are written, with the second
//! header slot, and synced. Then the byte that selects the slot is flipped, and synced. Only then
//! are requests answered, and only then do reads see the commit (the engine publishes the new root
//! in memory after the second sync).
//!
//! - Power fails before the flip is on disk: the old slot is selected, all its pages are untouched
//!   (pages are never changed in place), and no request was answered.
//! - It fails after: the new slot is selected, and its pages were synced before the flip was
//!   written.
//! - Header and slots share one sector, which a disk writes atomically, with the checksum of both.
//!   It is written twice, in two places, before each sync ([`blocks`](crate::blocks)).
//!
//! One phase would suffice with checksums over everything: one sync, and after a crash the engine
//! decides by checksum which slot is intact. Two phases cost one more sync and have three
//! advantages. No crash during a recovery can roll back acknowledged writes. Acknowledged writes
//! never depend on a checksum that is not cryptographic, over values that strangers choose. And a
//! sync that *failed* is survivable: the kernel may have dropped the pages that it could not write
//! and may report the next sync as a success, but the pages of phase one are referenced only if
//! their sync succeeded, and the header of phase two is written and synced anew when the database
//! is reopened, before anything else is.

use std::any::Any;
use std::panic::{AssertUnwindSafe, catch_unwind};

use hapax_core::Timestamp;
use redb::{
    Database, DatabaseError, Durability, ReadableDatabase, ReadableTable, StorageError,
    TableDefinition, WriteTransaction,
};

use crate::backing::Backing;
use crate::blocks::{Blocks, Damage, Damages, FetchError};
use crate::clock::ClockMark;
use crate::error::OpenError;
use crate::schedule::format::KEY;

/// Sealed records with their columns, by operation id.
pub(crate) const CELLS: TableDefinition<'_, &[u8; 32], &[u8]> = TableDefinition::new("cells");
/// The index of expiry, in the order of time: microseconds, big-endian, then the operation id.
pub(crate) const DUE: TableDefinition<'_, &[u8; 40], ()> = TableDefinition::new("due");
/// Entries of the schedule: columns and sealed notes, by operation id and entry id.
pub(crate) const ENTRIES: TableDefinition<'_, &[u8; KEY], &[u8]> = TableDefinition::new("entries");
/// The index of the schedule, in the order of queue and time:
/// [`EntryColumns::index`](crate::schedule::format::EntryColumns::index).
pub(crate) const QUEUED: TableDefinition<'_, &[u8], &[u8; 0]> = TableDefinition::new("queued");
/// [`FORMAT`], [`EPOCH`], [`FLOOR`], [`MADE`], [`MARK`] and [`MACHINE`].
pub(crate) const NUMBERS: TableDefinition<'_, &str, u64> = TableDefinition::new("numbers");
/// [`CHECK`].
pub(crate) const NAMES: TableDefinition<'_, &str, &[u8]> = TableDefinition::new("names");

pub(crate) const FORMAT: &str = "format";
pub(crate) const KNOWN_FORMAT: u64 = 2;
/// Number of times that the database was opened.
const EPOCH: &str = "epoch";
/// The largest fence of any record that was reaped: a key used anew gets a larger one, even if the
/// clock was set back meanwhile.
pub(crate) const FLOOR: &str = "fence floor";
/// Time at which the database was created, in microseconds since 1970.
const MADE: &str = "made";
/// A time that no written time exceeds, in microseconds since 1970: see
/// [`DatabaseClock`](crate::clock::DatabaseClock). Files of earlier releases have none.
pub(crate) const MARK: &str = "clock mark";
/// Time of the machine at which that was written, in microseconds since 1970.
pub(crate) const MACHINE: &str = "clock machine";
/// Identifies the secret under which the database was written.
pub(crate) const CHECK: &str = "secret check";

/// Numbers of the database after opening it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct OpenedDatabase {
    pub(crate) epoch: u64,
    pub(crate) floor: u64,
    pub(crate) made: u64,
    pub(crate) mark: ClockMark,
}

/// Opens the database, and recovers it after a crash. A panic of the engine over damage is returned
/// as an error.
pub(crate) fn open(
    backing: &dyn Backing,
    cache_bytes: usize,
    damages: &Damages,
) -> Result<Database, DatabaseError> {
    let blocks = Blocks::open(backing.open()?, damages.clone()).map_err(|error| match error {
        FetchError::Damage(damage) => StorageError::Corrupted(damage.to_string()),
        FetchError::Io(error) => error.into(),
    })?;
    guarded(|| Database::builder().set_cache_size(cache_bytes).create_with_backend(blocks))
}

/// Closes the database. Damage in the last writes is only logged: the file is recovered at the next
/// opening.
pub(crate) fn close(database: Option<Database>) {
    let closed = guarded(|| {
        drop(database);
        Ok::<_, StorageError>(())
    });
    if let Err(error) = closed {
        tracing::warn!(%error, "the database was not closed cleanly");
    }
}

/// Calls the database engine (redb) so that damage is returned as an error. Reads of damaged blocks
/// unwind to here, and so do panics of the engine over inconsistent data.
pub(crate) fn guarded<T, E: From<StorageError>>(
    run: impl FnOnce() -> Result<T, E>,
) -> Result<T, E> {
    catch_unwind(AssertUnwindSafe(run)).unwrap_or_else(|panic| Err(corrupted(&*panic).into()))
}

fn corrupted(panic: &(dyn Any + Send)) -> StorageError {
    StorageError::Corrupted(match panic.downcast_ref::<Damage>() {
        Some(damage) => damage.to_string(),
        None => "the engine panicked on the data that it read".to_owned(),
    })
}

/// Begins a transaction whose commit is durable when it returns.
pub(crate) fn begin(
    database: &Database,
    quick_recovery: bool,
) -> Result<WriteTransaction, redb::Error> {
    let mut transaction = database.begin_write()?;
    transaction.set_durability(Durability::Immediate)?;
    transaction.set_two_phase_commit(true);
    transaction.set_quick_repair(quick_recovery);
    Ok(transaction)
}

/// Begins an epoch: every lease of an earlier one has lapsed. A database without a time of its creation
/// gets `now`.
pub(crate) fn adopt(
    database: &Database,
    check: &[u8],
    now: Timestamp,
) -> Result<OpenedDatabase, OpenError> {
    let adopting = || {
        let transaction = begin(database, false).map_err(OpenError::database)?;
        let adopted = claim_epoch(&transaction, check, now)?;
        transaction.commit().map_err(OpenError::database)?;
        Ok(adopted)
    };
    catch_unwind(AssertUnwindSafe(adopting))
        .unwrap_or_else(|panic| Err(OpenError::database(corrupted(&*panic))))
}

fn claim_epoch(
    transaction: &WriteTransaction,
    check: &[u8],
    now: Timestamp,
) -> Result<OpenedDatabase, OpenError> {
    // Created now, so that readers find them. A file of an earlier release gets the later ones.
    transaction.open_table(CELLS).map_err(OpenError::database)?;
    transaction.open_table(DUE).map_err(OpenError::database)?;
    transaction.open_table(ENTRIES).map_err(OpenError::database)?;
    transaction.open_table(QUEUED).map_err(OpenError::database)?;
    let mut names = transaction.open_table(NAMES).map_err(OpenError::database)?;
    let mut numbers = transaction.open_table(NUMBERS).map_err(OpenError::database)?;
    let number = |table: &redb::Table<'_, &str, u64>, name| {
        table.get(name).map(|found| found.map(|found| found.value())).map_err(OpenError::database)
    };
    match number(&numbers, FORMAT)? {
        None => {
            numbers.insert(FORMAT, KNOWN_FORMAT).map_err(OpenError::database)?;
            names.insert(CHECK, check).map_err(OpenError::database)?;
        }
        Some(KNOWN_FORMAT) => {
            let found = names.get(CHECK).map_err(OpenError::database)?;
            if found.is_none_or(|found| found.value() != check) {
                return Err(OpenError::OtherSecret);
            }
        }
        Some(found) => return Err(OpenError::Format { found, known: KNOWN_FORMAT }),
    }
    let epoch = number(&numbers, EPOCH)?.unwrap_or(0).saturating_add(1);
    numbers.insert(EPOCH, epoch).map_err(OpenError::database)?;
    let floor = number(&numbers, FLOOR)?.unwrap_or(0);
    let made = number(&numbers, MADE)?;
    if made.is_none() {
        numbers.insert(MADE, now.as_micros()).map_err(OpenError::database)?;
    }
    let made = made.unwrap_or(now.as_micros());
    let time =
        |name| Ok::<_, OpenError>(Timestamp::from_micros(number(&numbers, name)?.unwrap_or(0)));
    let mark = ClockMark { time: time(MARK)?, machine: time(MACHINE)? };
    Ok(OpenedDatabase { epoch, floor, made, mark })
}

/// Returns the lower bound of the fences of new keys.
pub(crate) fn floor(database: &Database) -> Result<u64, redb::Error> {
    let numbers = database.begin_read()?.open_table(NUMBERS)?;
    Ok(numbers.get(FLOOR)?.map_or(0, |found| found.value()))
}

#[cfg(test)]
mod tests {
    use std::num::NonZeroU32;
    use std::path::Path;
    use std::time::Duration;

    use hapax_core::schedule::{EntryKey, NewEntry, QueueName, Schedule};
    use hapax_core::{EntryId, Store};
    use hapax_testkit::steps::{claim, complete, expect_stored, key, load};
    use redb::TableHandle;

    use super::*;
    use crate::backing::FileBacking;
    use crate::{FileOptions, FileStore, SecretSource};

    fn options(path: &Path) -> FileOptions {
        FileOptions::new(path).secret(SecretSource::None)
    }

    /// Removes what files of earlier releases do not have, and returns the names of the tables.
    fn without_schedule(path: &Path) -> Vec<String> {
        let backing = FileBacking::existing(path);
        let database = open(&backing, 1 << 20, &Damages::default()).unwrap();
        let transaction = begin(&database, false).unwrap();
        assert!(transaction.delete_table(ENTRIES).unwrap());
        assert!(transaction.delete_table(QUEUED).unwrap());
        for name in [MARK, MACHINE] {
            assert!(transaction.open_table(NUMBERS).unwrap().remove(name).unwrap().is_some());
        }
        let tables = transaction.list_tables().unwrap();
        let tables = tables.map(|table| table.name().to_owned()).collect();
        transaction.commit().unwrap();
        close(Some(database));
        tables
    }

    #[tokio::test]
    async fn a_file_of_an_earlier_version_keeps_its_records_and_gets_a_schedule() {
        let directory = tempfile::tempdir().unwrap();
        let (path, copy) = (directory.path().join("hapax.db"), directory.path().join("copy.db"));
        let store = FileStore::open(options(&path)).unwrap();
        let claimed = claim(1);
        expect_stored(&store, &claimed).await;
        expect_stored(&store, &complete(&claimed, 2, b"answer")).await;
        let before = load(&store, 1).await.unwrap();
        let identity = store.identity();
        store.close().await;
        assert_eq!(without_schedule(&path), ["cells", "due", "names", "numbers"]);

        // Its own tools read it without opening it.
        let report = crate::examine(&path).unwrap();
        assert_eq!((report.read, report.expected_entries, report.lost_entries()), (1, 0, 0));
        assert_eq!(crate::backup_closed(&path, &copy).unwrap(), 1);
        for path in [&path, &copy] {
            let store = FileStore::open(options(path).verify(true)).unwrap();
            assert_eq!(store.identity(), identity);
            assert_eq!(load(&store, 1).await.unwrap().record, before.record);
            assert_eq!(store.queues().await.unwrap(), []);
            let entry = NewEntry {
                key: EntryKey { operation: key(1), id: EntryId::from_bytes([1; 16]) },
                queue: QueueName::new("transfer/1").unwrap(),
                due_in: Duration::ZERO,
                note: "note".into(),
            };
            store.insert(entry.clone()).await.unwrap();
            store.close().await;
            let store = FileStore::open(options(path).verify(true)).unwrap();
            let due = store.due(&[entry.queue], NonZeroU32::MIN).await.unwrap().entries;
            assert!(matches!(&due[..], [(key, Ok(_))] if *key == entry.key), "{due:?}");
            assert!(store.capabilities().schedule.is_some());
            store.close().await;
        }
    }
}
