//! Copying the intact records of a damaged database, and its schedule, to a new one.
//!
//! The engine does not open a file in which it finds damage during recovery. So this module reads
//! the trees itself, block by block, each verified by its checksum. The format is redb's file
//! format 3: see `docs/design.md` of that crate.
//!
//! 1. Branches lead to leaves. Everything below a damaged page is lost; all else is read.
//! 2. The expected number of records is in the page that has the table's root. A damaged root, or
//!    damage to both copies of the header, loses everything and is reported as such.
//! 3. A record or an entry whose own columns are damaged is lost as well.
//! 4. Indexes are written anew from the records and entries, so damage in an index loses nothing.
//! 5. The old file is only read.

use std::fs::File;
use std::io;
use std::path::Path;

use hapax_core::OperationId;
use redb::StorageError;
use redb::backends::FileBackend;

use crate::backing::{Backing, Disk};
use crate::backup::{DatabaseCopy, DatabaseMeta};
use crate::blocks::{Blocks, Damages, FetchError};
use crate::database::FLOOR;
use crate::error::{OpenError, check_file};
use crate::files::with_suffix;
use crate::lock_file::LockFile;
use crate::record::Columns;
use crate::schedule::format::{EntryColumns, KEY, entry_key};

const PAGE: u64 = 4096;
const LEAF: u8 = 1;
const BRANCH: u8 = 2;
/// Limit of levels of a tree: far more than any tree has. It ends a cycle caused by damage.
const MOST_LEVELS: u32 = 64;

/// Counts of a database that was read completely, and perhaps salvaged.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct SalvageReport {
    /// Intact records: these are written to the new file.
    pub read: u64,
    /// Records that the old file should have.
    pub expected: u64,
    /// Intact entries of the schedule: these are written to the new file.
    pub entries: u64,
    /// Entries of the schedule that the old file should have.
    pub expected_entries: u64,
    /// Damaged blocks that were read.
    pub damaged: u64,
}

impl SalvageReport {
    /// Returns the number of lost records.
    #[must_use]
    pub const fn lost(&self) -> u64 {
        self.expected.saturating_sub(self.read)
    }

    /// Returns the number of lost entries of the schedule.
    #[must_use]
    pub const fn lost_entries(&self) -> u64 {
        self.expected_entries.saturating_sub(self.entries)
    }
}

/// Writes the intact records of the database at `old` to a new one at `new`, with the metadata of
/// the old one: its identity and the check of its secret. The secret itself is not copied.
///
/// A lost record is absent from the new file: its key looks unused. The operation of a lost entry is
/// not resumed.
///
/// # Errors
/// [`OpenError`]: another process has the old file open, `new` exists, or the old file's metadata
/// is unreadable, without which there is no new file.
pub fn salvage(old: &Path, new: &Path) -> Result<SalvageReport, OpenError> {
    let old = ClosedFile::open(old)?;
    let mut copy = DatabaseCopy::begin(new)?;
    let mut floor = 0;
    let salvaged = old.records(&mut |key, columns, stored| {
        floor = columns.fence.get().max(floor);
        copy.add(key, stored)
    })?;
    let salvaged = old.entries(salvaged, &mut |key, stored| copy.add_entry(key, stored))?;
    copy.finish(&old.marks.raised(FLOOR, floor))?;
    Ok(salvaged)
}

/// Reads all of the database at `path`, which no process has open, and changes nothing.
///
/// # Errors
/// The errors of [`salvage`].
pub fn examine(path: &Path) -> Result<SalvageReport, OpenError> {
    ClosedFile::open(path)?.examine()
}

/// Reads all of a database that is not open yet, and fails if any record or block is damaged.
pub(crate) fn verify(backing: &dyn Backing, path: &Path) -> Result<(), OpenError> {
    let disk = backing.open().map_err(|error| OpenError::io(path, error))?;
    if disk.is_empty().map_err(|error| OpenError::io(path, error))? {
        return Ok(());
    }
    let found = ClosedFile::on(disk, None, path)?.examine()?;
    match found.lost() + found.lost_entries() + found.damaged {
        0 => Ok(()),
        _ => Err(corrupted(format!(
            "{} of {} records and {} of {} entries of the schedule can be read, and {} blocks are \
             damaged",
            found.read, found.expected, found.entries, found.expected_entries, found.damaged
        ))),
    }
}

/// A file that no process has open, with its metadata.
pub(crate) struct ClosedFile {
    tree: Tree,
    cells: Table,
    tables: Tables,
    pub(crate) marks: DatabaseMeta,
    damages: Damages,
    _lock: Option<LockFile>,
}

impl ClosedFile {
    pub(crate) fn open(path: &Path) -> Result<Self, OpenError> {
        check_file(path)?;
        let failed = |error| OpenError::io(path, error);
        if path.metadata().map_err(failed)?.len() == 0 {
            return Err(failed(io::Error::new(io::ErrorKind::InvalidData, "the file is empty")));
        }
        let lock = LockFile::take(with_suffix(path, ".lock"), None)?;
        let file = File::open(path).map_err(failed)?;
        let disk = Disk::new(FileBackend::new(file).map_err(OpenError::database)?);
        Self::on(disk, Some(lock), path)
    }

    fn on(disk: Disk, lock: Option<LockFile>, path: &Path) -> Result<Self, OpenError> {
        let failed = |error| OpenError::io(path, error);
        let unreadable = |error: FetchError| match error {
            FetchError::Io(error) => failed(error),
            FetchError::Damage(damage) => corrupted(damage.to_string()),
        };
        let damages = Damages::default();
        let tree = Blocks::open(disk, damages.clone()).and_then(Tree::open).map_err(unreadable)?;
        let mut tables = Tables::default();
        tree.walk(tree.root, [None, None], MOST_LEVELS, &mut |name, definition| {
            tables.note(name, definition);
            Ok(())
        })?;
        let (marks, cells) = tree.marks(&tables)?;
        Ok(Self { tree, cells, tables, marks, damages, _lock: lock })
    }

    fn examine(&self) -> Result<SalvageReport, OpenError> {
        for (index, key) in [(self.tables.due, Some(40)), (self.tables.queued, None)] {
            let root = index.and_then(|index| index.root);
            self.tree.walk(root, [key, Some(0)], MOST_LEVELS, &mut |_, _| Ok(()))?;
        }
        let read = self.records(&mut |_, _, _| Ok(()))?;
        self.entries(read, &mut |_, _| Ok(()))
    }

    /// Passes every intact record to `take`, in its stored form.
    pub(crate) fn records(&self, take: TakeRecord<'_>) -> Result<SalvageReport, OpenError> {
        let mut read = 0;
        self.tree.walk(self.cells.root, [Some(32), None], MOST_LEVELS, &mut |key, stored| {
            let Ok(key) = <&[u8; 32]>::try_from(key) else { return Ok(()) };
            if let Ok((columns, _)) = Columns::read(&OperationId::from_bytes(*key), stored) {
                read += 1;
                take(key, columns, stored)?;
            }
            Ok(())
        })?;
        let damaged = self.damages.count() as u64;
        let expected = self.cells.length;
        Ok(SalvageReport { read, expected, damaged, ..SalvageReport::default() })
    }

    /// Passes every intact entry of the schedule to `take`, in its stored form, and adds them to the
    /// report.
    pub(crate) fn entries(
        &self,
        report: SalvageReport,
        take: TakeEntry<'_>,
    ) -> Result<SalvageReport, OpenError> {
        // A file of an earlier release has no such table.
        let Some(Table { root, length }) = self.tables.entries else { return Ok(report) };
        let mut entries = 0;
        self.tree.walk(root, [Some(KEY), None], MOST_LEVELS, &mut |key, stored| {
            let Ok(key) = <&[u8; KEY]>::try_from(key) else { return Ok(()) };
            if EntryColumns::read(&entry_key(key), stored).is_ok() {
                entries += 1;
                take(key, stored)?;
            }
            Ok(())
        })?;
        let damaged = self.damages.count() as u64;
        Ok(SalvageReport { entries, expected_entries: length, damaged, ..report })
    }
}

fn corrupted(what: String) -> OpenError {
    OpenError::database(StorageError::Corrupted(what))
}

/// The root of a table, and the number of its entries.
#[derive(Clone, Copy, Debug)]
struct Table {
    root: Option<u64>,
    length: u64,
}

#[derive(Debug, Default)]
struct Tables {
    cells: Option<Table>,
    due: Option<Table>,
    entries: Option<Table>,
    queued: Option<Table>,
    numbers: Option<Table>,
    names: Option<Table>,
}

impl Tables {
    /// Parses the definition of a table: its kind, its length, and the header of its tree.
    fn note(&mut self, name: &[u8], definition: &[u8]) {
        let slot = match name {
            b"cells" => &mut self.cells,
            b"due" => &mut self.due,
            b"entries" => &mut self.entries,
            b"queued" => &mut self.queued,
            b"numbers" => &mut self.numbers,
            b"names" => &mut self.names,
            _ => return,
        };
        let length = definition.get(1..9).and_then(number);
        let root = definition.get(10..18).and_then(number);
        if let (Some(length), Some(root), Some(there)) = (length, root, definition.get(9)) {
            *slot = Some(Table { root: (*there != 0).then_some(root), length });
        }
    }
}

fn number(bytes: &[u8]) -> Option<u64> {
    bytes.try_into().ok().map(u64::from_le_bytes)
}

fn small(bytes: Option<&[u8]>) -> Option<usize> {
    let bytes: [u8; 4] = bytes?.try_into().ok()?;
    Some(u32::from_le_bytes(bytes) as usize)
}

type TakeRecord<'a> = &'a mut dyn FnMut(&[u8; 32], Columns, &[u8]) -> Result<(), OpenError>;
type TakeEntry<'a> = &'a mut dyn FnMut(&[u8; KEY], &[u8]) -> Result<(), OpenError>;
type Take<'a> = &'a mut dyn FnMut(&[u8], &[u8]) -> Result<(), OpenError>;

/// The trees of a file.
struct Tree {
    blocks: Blocks,
    /// Size of a region in bytes, with its header; then the size of the header alone.
    region: u64,
    region_header: u64,
    /// Root of the table that names the others.
    root: Option<u64>,
}

impl Tree {
    /// Reads the slot that the header selects: commits have two phases, so it is the valid one.
    fn open(blocks: Blocks) -> Result<Self, FetchError> {
        let mut header = [0; 320];
        blocks.fetch(0, &mut header)?;
        let word = |at: usize| u64::from(u32::from_le_bytes([0, 1, 2, 3].map(|i| header[at + i])));
        let (header_pages, data_pages) = (word(16), word(20));
        let slot = if header[9] & 1 == 0 { 64 } else { 192 };
        let root = number(&header[slot + 8..slot + 16]).filter(|_| header[slot + 1] != 0);
        Ok(Self {
            blocks,
            region: (header_pages + data_pages) * PAGE,
            region_header: header_pages * PAGE,
            root,
        })
    }

    fn page(&self, number: u64) -> Result<Vec<u8>, FetchError> {
        let order = (number >> 59).min(20);
        let index = number & (0x000f_ffff >> order);
        let region = (number >> 20) & 0x000f_ffff;
        let size = PAGE << order;
        let offset = PAGE + region * self.region + self.region_header + index * size;
        let mut page = vec![0; size as usize];
        self.blocks.fetch(offset, &mut page)?;
        Ok(page)
    }

    /// Reads all metadata of the database, and finds the table of records.
    fn marks(&self, tables: &Tables) -> Result<(DatabaseMeta, Table), OpenError> {
        let lost = || corrupted("the file's metadata is damaged: no record can be read".to_owned());
        let (Some(numbers), Some(names), Some(cells)) =
            (tables.numbers, tables.names, tables.cells)
        else {
            return Err(lost());
        };
        let mut marks = DatabaseMeta::default();
        self.walk(numbers.root, [None, Some(8)], MOST_LEVELS, &mut |name, value| {
            if let (Ok(name), Some(value)) = (std::str::from_utf8(name), number(value)) {
                marks.numbers.push((name.to_owned(), value));
            }
            Ok(())
        })?;
        self.walk(names.root, [None, None], MOST_LEVELS, &mut |name, value| {
            if let Ok(name) = std::str::from_utf8(name) {
                marks.names.push((name.to_owned(), value.to_vec()));
            }
            Ok(())
        })?;
        let read = [marks.numbers.len() as u64, marks.names.len() as u64];
        if read != [numbers.length, names.length] {
            return Err(lost());
        }
        Ok((marks, cells))
    }

    /// Passes every entry below a page to `take`, except those below damaged pages. `sizes` are the
    /// sizes of keys and values, where they are fixed.
    fn walk(
        &self,
        root: Option<u64>,
        sizes: [Option<usize>; 2],
        levels: u32,
        take: Take<'_>,
    ) -> Result<(), OpenError> {
        let (Some(root), Some(levels)) = (root, levels.checked_sub(1)) else { return Ok(()) };
        // Noted as damage, or beyond the file: lost in either case.
        let Ok(page) = self.page(root) else { return Ok(()) };
        let count = usize::from(u16::from_le_bytes([page[2], page[3]]));
        match page[0] {
            LEAF => {
                for entry in 0..count {
                    if let Some((key, value)) = in_leaf(&page, count, entry, sizes) {
                        take(key, value)?;
                    }
                }
            }
            BRANCH => {
                for child in 0..=count {
                    let at = 8 + 16 * (count + 1) + 8 * child;
                    let child = page.get(at..at + 8).and_then(number);
                    self.walk(child, sizes, levels, take)?;
                }
            }
            _ => {}
        }
        Ok(())
    }
}

/// Parses an entry of a leaf: ends of keys, ends of values, keys, values. Fixed sizes have no ends.
fn in_leaf(
    page: &[u8],
    count: usize,
    entry: usize,
    [key_size, value_size]: [Option<usize>; 2],
) -> Option<(&[u8], &[u8])> {
    let ends = |size: Option<usize>| if size.is_none() { 4 * count } else { 0 };
    let (key_ends, value_ends) = (4, 4 + ends(key_size));
    let keys = value_ends + ends(value_size);
    let end = |size: Option<usize>, table: usize, base: usize, entry: usize| match size {
        Some(size) => Some(base + size * (entry + 1)),
        None => small(page.get(table + 4 * entry..table + 4 * entry + 4)),
    };
    let key_end = |entry| end(key_size, key_ends, keys, entry);
    let values = key_end(count.checked_sub(1)?)?;
    let value_end = |entry| end(value_size, value_ends, values, entry);
    let before = entry.checked_sub(1);
    let key_start = before.map_or(Some(keys), key_end)?;
    let value_start = before.map_or(Some(values), value_end)?;
    let key = page.get(key_start..key_end(entry)?)?;
    Some((key, page.get(value_start..value_end(entry)?)?))
}
