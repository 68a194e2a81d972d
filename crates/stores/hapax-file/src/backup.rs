//! Copies of a database with its schedule: the intact records of a damaged one, a consistent copy of one in use, and
//! a database restored from a backup.

use std::fs::File;
use std::io;
use std::path::{Path, PathBuf};

use hapax_core::machine::{Event, Owner, OwnerAction, Step, step};
use hapax_core::store::{Snapshot, StoredRecord};
use hapax_core::{KeyRing, OperationId, RecordState, Sealer, SystemEntropy, Timestamp, WriteId};
use redb::{Database, ReadTransaction, ReadableDatabase, ReadableTable};

use crate::backing::{FileBacking, sync_directory};
use crate::batch::entry;
use crate::blocks::Damages;
use crate::database::{self, CELLS, CHECK, DUE, ENTRIES, NAMES, NUMBERS, QUEUED, guarded};
use crate::error::{FileStoreError, OpenError, check_place};
use crate::files::with_suffix;
use crate::options::SecretSource;
use crate::record::{Columns, NEVER};
use crate::salvage::{ClosedFile, SalvageReport};
use crate::schedule::format::{EntryColumns, KEY, entry_key};
use crate::secret_file;
use crate::shared::Shared;
use crate::store::check;

/// Limit of records and entries in one transaction.
const BATCH: usize = 4096;
/// Bytes of records and entries from which on a transaction takes no further ones.
const BATCH_BYTES: usize = 16 << 20;
/// Memory for pages while a copy is written.
const CACHE: usize = 32 << 20;

/// Metadata of a database: format, secret check, identity, fence floor, mark of the clock.
#[derive(Clone, Debug, Default)]
pub(crate) struct DatabaseMeta {
    pub(crate) numbers: Vec<(String, u64)>,
    pub(crate) names: Vec<(String, Vec<u8>)>,
}

impl DatabaseMeta {
    fn read(transaction: &ReadTransaction) -> Result<Self, redb::Error> {
        let mut marks = Self::default();
        for found in transaction.open_table(NUMBERS)?.iter()? {
            let (name, value) = found?;
            marks.numbers.push((name.value().to_owned(), value.value()));
        }
        for found in transaction.open_table(NAMES)?.iter()? {
            let (name, value) = found?;
            marks.names.push((name.value().to_owned(), value.value().to_vec()));
        }
        Ok(marks)
    }

    /// Returns the metadata with the number `name` raised to `at_least`.
    pub(crate) fn raised(mut self, name: &str, at_least: u64) -> Self {
        match self.numbers.iter_mut().find(|(found, _)| found == name) {
            Some((_, value)) => *value = at_least.max(*value),
            None => self.numbers.push((name.to_owned(), at_least)),
        }
        self
    }
}

/// A database that is being written. It gets its name once it is complete.
pub(crate) struct DatabaseCopy<'a> {
    path: &'a Path,
    // Before the file, so that it is closed when the file is removed.
    database: Database,
    waiting: Vec<([u8; 32], Vec<u8>)>,
    waiting_entries: Vec<([u8; KEY], Vec<u8>)>,
    waiting_bytes: usize,
    unfinished: Unfinished,
}

/// The file of a copy until it has its name. Dropping it removes the file: a copy that ran out of
/// disk space leaves that space to the store.
struct Unfinished(PathBuf);

impl Drop for Unfinished {
    fn drop(&mut self) {
        // The file no longer exists under this name if the copy was finished. If the removal fails,
        // the next copy removes the file.
        let _ = std::fs::remove_file(&self.0);
    }
}

impl<'a> DatabaseCopy<'a> {
    /// Begins a new database at `path`.
    pub(crate) fn begin(path: &'a Path) -> Result<Self, OpenError> {
        check_place(path)?;
        if path.try_exists().map_err(|error| OpenError::io(path, error))? {
            let exists = io::Error::new(
                io::ErrorKind::AlreadyExists,
                "there is a file already: name one that does not exist",
            );
            return Err(OpenError::io(path, exists));
        }
        let unfinished = with_suffix(path, ".new");
        match std::fs::remove_file(&unfinished) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => {
                return Err(OpenError::io(&unfinished, error));
            }
            _ => {}
        }
        let unfinished = Unfinished(unfinished);
        let backing = FileBacking::new(&unfinished.0);
        let database =
            database::open(&backing, CACHE, &Damages::default()).map_err(OpenError::database)?;
        let (waiting, waiting_entries) = (Vec::new(), Vec::new());
        Ok(Self { path, database, waiting, waiting_entries, waiting_bytes: 0, unfinished })
    }

    /// Adds a record in its stored form.
    pub(crate) fn add(&mut self, key: &[u8; 32], stored: &[u8]) -> Result<(), OpenError> {
        self.waiting.push((*key, stored.to_vec()));
        self.added(stored.len())
    }

    /// Adds an entry of the schedule in its stored form.
    pub(crate) fn add_entry(&mut self, key: &[u8; KEY], stored: &[u8]) -> Result<(), OpenError> {
        self.waiting_entries.push((*key, stored.to_vec()));
        self.added(stored.len())
    }

    fn added(&mut self, bytes: usize) -> Result<(), OpenError> {
        self.waiting_bytes += bytes;
        let waiting = self.waiting.len() + self.waiting_entries.len();
        if waiting < BATCH && self.waiting_bytes < BATCH_BYTES {
            return Ok(());
        }
        self.write(|_| Ok(())).map_err(OpenError::database)
    }

    fn write(
        &mut self,
        more: impl FnOnce(&redb::WriteTransaction) -> Result<(), redb::Error>,
    ) -> Result<(), redb::Error> {
        let transaction = database::begin(&self.database, false)?;
        self.waiting_bytes = 0;
        {
            let mut cells = transaction.open_table(CELLS)?;
            let mut due = transaction.open_table(DUE)?;
            for (key, stored) in self.waiting.drain(..) {
                cells.insert(&key, stored.as_slice())?;
                let name = OperationId::from_bytes(key);
                // A damaged record stays out of the index, as in the original.
                if let Ok((columns, _)) = Columns::read(&name, &stored)
                    && columns.indexed != NEVER
                {
                    due.insert(&entry(columns.indexed, &name), ())?;
                }
            }
            let mut entries = transaction.open_table(ENTRIES)?;
            let mut queued = transaction.open_table(QUEUED)?;
            for (key, stored) in self.waiting_entries.drain(..) {
                entries.insert(&key, stored.as_slice())?;
                let name = entry_key(&key);
                // The index is written anew, also if it was damaged.
                if let Ok((columns, _)) = EntryColumns::read(&name, &stored) {
                    queued.insert(columns.index(&name).as_slice(), &[])?;
                }
            }
        }
        more(&transaction)?;
        transaction.commit()?;
        Ok(())
    }

    /// Writes the metadata, syncs the copy, and renames it.
    pub(crate) fn finish(mut self, marks: &DatabaseMeta) -> Result<(), OpenError> {
        self.write(|transaction| {
            let mut numbers = transaction.open_table(NUMBERS)?;
            for (name, value) in &marks.numbers {
                numbers.insert(name.as_str(), value)?;
            }
            let mut names = transaction.open_table(NAMES)?;
            for (name, value) in &marks.names {
                names.insert(name.as_str(), value.as_slice())?;
            }
            Ok(())
        })
        .map_err(OpenError::database)?;
        let Self { path, database, unfinished, .. } = self;
        database::close(Some(database));
        File::open(&unfinished.0)
            .and_then(|file| file.sync_all())
            .map_err(|error| OpenError::io(&unfinished.0, error))?;
        std::fs::rename(&unfinished.0, path).map_err(|error| OpenError::io(path, error))?;
        sync_directory(path).map_err(|error| OpenError::io(path, error))
    }
}

/// Writes a consistent snapshot to a new file, while the store continues. Returns the number of its
/// records.
pub(crate) fn backup_open(shared: &Shared, to: &Path) -> Result<u64, OpenError> {
    let transaction = match &*shared.database() {
        Some(database) => guarded(|| Ok::<_, redb::Error>(database.begin_read()?)),
        None => {
            let reopening = io::Error::other(FileStoreError::Reopening);
            return Err(OpenError::io(to, reopening));
        }
    };
    // The snapshot lasts as long as the transaction; its pages are not reused meanwhile.
    let transaction = transaction.map_err(OpenError::database)?;
    let marks = guarded(|| DatabaseMeta::read(&transaction)).map_err(OpenError::database)?;
    let mut copy = DatabaseCopy::begin(to)?;
    let mut records = 0;
    let copied = guarded(|| {
        for found in transaction.open_table(CELLS)?.iter()? {
            let (key, stored) = found?;
            records += 1;
            if let Err(error) = copy.add(key.value(), stored.value()) {
                return Ok(Err(error));
            }
        }
        for found in transaction.open_table(ENTRIES)?.iter()? {
            let (key, stored) = found?;
            if let Err(error) = copy.add_entry(key.value(), stored.value()) {
                return Ok(Err(error));
            }
        }
        Ok::<_, redb::Error>(Ok(()))
    });
    copied.map_err(OpenError::database)??;
    copy.finish(&marks).map(|()| records)
}

/// Writes a copy of the database at `from`, which no process has open, to a new file at `to`,
/// without its secret. Returns the number of its records.
/// [`FileStore::backup`](crate::FileStore::backup) does the same for a database in use.
///
/// # Errors
/// [`OpenError`]: a process has the database open, there is a file at `to`, or a block is damaged.
pub fn backup_closed(from: &Path, to: &Path) -> Result<u64, OpenError> {
    let old = ClosedFile::open(from)?;
    let mut copy = DatabaseCopy::begin(to)?;
    let read = old.records(&mut |key, _, stored| copy.add(key, stored))?;
    let read = old.entries(read, &mut |key, stored| copy.add_entry(key, stored))?;
    whole(read)?;
    copy.finish(&old.marks)?;
    Ok(read.read)
}

fn whole(read: SalvageReport) -> Result<(), OpenError> {
    if read.lost() + read.lost_entries() + read.damaged == 0 {
        return Ok(());
    }
    let lost = format!(
        "{} of {} records and {} of {} entries of the schedule cannot be read",
        read.lost(),
        read.expected,
        read.lost_entries(),
        read.expected_entries
    );
    Err(OpenError::database(redb::StorageError::Corrupted(lost)))
}

/// Counts of a backup that was restored.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct RestoreReport {
    /// Records in total.
    pub records: u64,
    /// Records that were in flight and are unknown now.
    pub unknown: u64,
}

/// Creates a database at `to` from the backup at `from`, which is only read. Records written after
/// the backup are lost: those keys look unused. Operations that were in flight may have happened
/// since, so their records become unknown, and the policy of each record applies. The schedule is
/// restored as it was.
///
/// # Errors
/// [`OpenError`]: there is a file at `to`, the backup is damaged, or the secret is not its own.
pub fn restore(from: &Path, to: &Path, secret: &SecretSource) -> Result<RestoreReport, OpenError> {
    let old = ClosedFile::open(from)?;
    let ring = match secret {
        SecretSource::File(file) => Some(secret_file::read_or_make(file, true, &SystemEntropy)?),
        given => given.ring(),
    };
    let naming = ring.as_ref().and_then(KeyRing::naming);
    let found = old.marks.names.iter().find(|(name, _)| name == CHECK);
    if found.is_none_or(|(_, found)| *found != check(naming)) {
        return Err(OpenError::OtherSecret);
    }
    let sealer = ring.as_ref().map_or_else(Sealer::checksum, KeyRing::sealer);
    let mut copy = DatabaseCopy::begin(to)?;
    let mut unknown = 0;
    let read =
        old.records(&mut |key, columns, stored| match abandoned(key, columns, stored, &sealer)? {
            Some(abandoned) => {
                unknown += 1;
                copy.add(key, &abandoned)
            }
            None => copy.add(key, stored),
        })?;
    let read = old.entries(read, &mut |key, stored| copy.add_entry(key, stored))?;
    whole(read)?;
    copy.finish(&old.marks)?;
    Ok(RestoreReport { records: read.read, unknown })
}

/// Returns a record that was in flight as if its owner had abandoned it; `None` for any other
/// record.
fn abandoned(
    key: &[u8; 32],
    mut columns: Columns,
    stored: &[u8],
    sealer: &Sealer,
) -> Result<Option<Vec<u8>>, OpenError> {
    let name = OperationId::from_bytes(*key);
    let unreadable = |what: String| {
        OpenError::database(redb::StorageError::Corrupted(format!("{name:?}: {what}")))
    };
    let (_, sealed) =
        Columns::read(&name, stored).map_err(|error| unreadable(error.to_string()))?;
    let record = sealer
        .open(&name, columns.write_id, sealed)
        .map_err(|error| unreadable(error.to_string()))?;
    if record.state != RecordState::InFlight {
        return Ok(None);
    }
    let holder = Owner { lease_id: record.lease_id, generation: record.generation };
    let Columns { write_id, fence, lease_until, .. } = columns;
    let stored = StoredRecord { write_id, fence, lease_until, keep_until: None, record };
    let seen = Snapshot { now: Timestamp::default(), stored: Some(stored) };
    let Step::Write(draft) =
        step(&seen, &Event::Owner(holder, OwnerAction::Abandon { seen: None }))
    else {
        return Ok(None);
    };
    let random = |error: hapax_core::EntropyError| unreadable(error.to_string());
    columns.write_id = WriteId::fresh(&SystemEntropy).map_err(random)?;
    let sealed = sealer
        .seal(&name, columns.write_id, &draft.record, &SystemEntropy)
        .map_err(|error| unreadable(error.to_string()))?;
    Ok(Some(columns.write(&name, &sealed)))
}
