//! A checksum for every block of the file, verified on every read.
//!
//! The engine has checksums of its own, but reads do not compare them: with one flipped bit in a
//! page of its tree, an existing key looks absent. This layer lies between the engine and the disk,
//! so the engine reads nothing unverified.
//!
//! 1. The file has two copies of the header, 4 KiB each, and then the engine's other blocks, each
//!    followed by 16 bytes of BLAKE3 over its number and its contents. A block and its checksum are
//!    one write.
//! 2. In each copy, the engine's header and its checksum share the first sector of 512 bytes, which
//!    a disk writes atomically: see [`database`](crate::database). Everything depends on the
//!    header, so a damaged copy is replaced by the other at the next write.
//! 3. A power failure may tear a block that was being written. The engine refers to no block before
//!    it is synced, so it never reads a torn one. An unused block may stay torn: damage is found
//!    only by reads through the engine, not by a walk over all blocks.
//! 4. A block that was never written reads as zeros, checksum included.
//! 5. A block that does not match is never passed to the engine. Nor is it reported as a failed
//!    read, after which the engine would reject everything until it is reopened. Instead the read
//!    unwinds to [`guarded`](crate::database::guarded), and only the operation that needed the
//!    block fails.

use std::collections::BTreeSet;
use std::io;
use std::ops::Bound;
use std::panic::resume_unwind;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use redb::{BackendError, StorageBackend};

use crate::backing::Disk;

/// Size of a block in bytes: the engine's smallest page.
const BLOCK: usize = 4096;
const SUM: usize = 16;
const STRIDE: usize = BLOCK + SUM;
/// Size that a disk writes atomically, in bytes.
const SECTOR: usize = 512;
/// Part of the first block that the engine may use, in bytes.
const HEADER: usize = SECTOR - MARK.len() - SUM;
/// The bytes of the file at which the copies of the header begin.
const COPIES: [u64; 2] = [0, BLOCK as u64];
/// The length of both copies.
const HEADERS: u64 = 2 * BLOCK as u64;
/// Lies between header and checksum, and distinguishes this format from the engine's own.
const MARK: &[u8; 16] = b"hapax blocks 2\0\0";
/// The first bytes of a file of the engine: see `docs/design.md` of redb.
const ENGINE: &[u8] = b"redb\x1a\x0a\xa9\x0d\x0a";
const EARLIER: &str = "expected file format 2, found one of an earlier release of Hapax: let its keys \
    expire under that version, then start with a new file";
/// Limit of damaged blocks that are counted and logged one by one.
const MOST_PLACES: usize = 10_000;

/// A block whose contents do not match its checksum.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
#[error("the block at byte {place} of the file does not match its checksum")]
pub(crate) struct Damage {
    /// The offset in the file, in bytes.
    pub(crate) place: u64,
}

/// The damaged blocks that were read since the store was opened.
#[derive(Clone, Debug, Default)]
pub(crate) struct Damages(Arc<Mutex<BTreeSet<u64>>>);

impl Damages {
    pub(crate) fn count(&self) -> usize {
        self.lock().len()
    }

    /// Notes a block, and logs it the first time.
    fn note(&self, damage: Damage) {
        let mut places = self.lock();
        if places.len() < MOST_PLACES && places.insert(damage.place) {
            tracing::error!(
                "{damage}: requests that need it are rejected; stop the process and write what is \
                 whole to a new file with `hapax doctor --salvage OLD NEW`"
            );
        }
    }

    fn lock(&self) -> MutexGuard<'_, BTreeSet<u64>> {
        // The set is consistent even after a panic.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A disk with a checksum for every block.
#[derive(Debug)]
pub(crate) struct Blocks {
    disk: Disk,
    damages: Damages,
    /// The sector of the header. Zeros until the engine has written its header.
    header: Mutex<[u8; SECTOR]>,
}

/// Reasons for which a read failed.
#[derive(Debug, thiserror::Error)]
pub(crate) enum FetchError {
    #[error(transparent)]
    Io(#[from] io::Error),
    #[error(transparent)]
    Damage(#[from] Damage),
}

impl From<FetchError> for io::Error {
    fn from(error: FetchError) -> Self {
        match error {
            FetchError::Io(error) => error,
            FetchError::Damage(damage) => Self::new(io::ErrorKind::InvalidData, damage),
        }
    }
}

impl Blocks {
    /// Reads the header of a file that has one.
    ///
    /// # Errors
    /// A file of another format, or one of which both copies of the header are damaged.
    pub(crate) fn open(disk: Disk, damages: Damages) -> Result<Self, FetchError> {
        let header = Mutex::new(read_header(&disk, &damages)?);
        Ok(Self { disk, damages, header })
    }

    fn write_header(&self, sealed: &[u8; SECTOR]) -> io::Result<()> {
        COPIES.into_iter().try_for_each(|place| self.disk.write(place, sealed))
    }

    /// Reads the engine's bytes at `offset`.
    ///
    /// # Errors
    /// [`FetchError::Damage`] names the first block that is damaged; `out` is then undefined.
    pub(crate) fn fetch(&self, offset: u64, out: &mut [u8]) -> Result<(), FetchError> {
        if offset < BLOCK as u64 {
            let from = offset as usize;
            let header = *self.header();
            let found = header[..HEADER].get(from..from + out.len()).ok_or_else(beyond)?;
            out.copy_from_slice(found);
            return Ok(());
        }
        let (first, skip) = (offset / BLOCK as u64, (offset % BLOCK as u64) as usize);
        let blocks = (skip + out.len()).div_ceil(BLOCK);
        let mut stored = vec![0; blocks * STRIDE];
        self.disk.read(place(first), &mut stored)?;
        let mut rest = out;
        let mut skip = skip;
        for (number, stored) in (first..).zip(stored.chunks_exact(STRIDE)) {
            let (block, sum) = stored.split_at(BLOCK);
            if *sum != checksum(number, block) && stored.iter().any(|byte| *byte != 0) {
                let damage = Damage { place: place(number) };
                self.damages.note(damage);
                return Err(damage.into());
            }
            let block = &block[skip..];
            let (now, later) = rest.split_at_mut(block.len().min(rest.len()));
            now.copy_from_slice(&block[..now.len()]);
            (rest, skip) = (later, 0);
        }
        Ok(())
    }

    fn header(&self) -> MutexGuard<'_, [u8; SECTOR]> {
        // Bytes are copied completely under this lock.
        self.header.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Reads the first copy of the header, or the second if the first is damaged or unreadable.
///
/// The second may be older after a crash between the two writes. No answer depends on the
/// difference: the engine writes and syncs its header anew before it answers anything.
fn read_header(disk: &Disk, damages: &Damages) -> Result<[u8; SECTOR], FetchError> {
    let length = disk.len()?;
    if length == 0 {
        return Ok([0; SECTOR]);
    }
    if length < HEADERS {
        let found = format!("the file has {length} bytes, too few for a database");
        return Err(io::Error::new(io::ErrorKind::InvalidData, found).into());
    }
    let copies = COPIES.map(|place| {
        let mut copy = [0; SECTOR];
        disk.read(place, &mut copy).map(|()| copy)
    });
    let is_whole = |copy: &io::Result<[u8; SECTOR]>| {
        copy.as_ref().is_ok_and(|copy| *copy == seal_header(copy))
    };
    let whole = copies.each_ref().map(is_whole);
    if whole.contains(&false) && whole.contains(&true) {
        tracing::warn!(
            place = COPIES[usize::from(whole[0])],
            "one of the two copies of the file's header is damaged; the other is used"
        );
    }
    let [first, second] = copies;
    match whole {
        [true, _] => Ok(first?),
        [false, true] => Ok(second?),
        [false, false] => {
            let (first, second) = (first?, second?);
            if first.starts_with(ENGINE) && ![first, second].iter().any(has_mark) {
                return Err(io::Error::new(io::ErrorKind::InvalidData, EARLIER).into());
            }
            let damage = Damage { place: 0 };
            damages.note(damage);
            Err(damage.into())
        }
    }
}

/// Returns the offset of a block in the file.
const fn place(number: u64) -> u64 {
    match number {
        0 => 0,
        _ => HEADERS + (number - 1) * STRIDE as u64,
    }
}

/// Returns the length of the engine's file for a length of this one.
const fn logical(length: u64) -> u64 {
    match length.checked_sub(HEADERS) {
        Some(rest) => (1 + rest / STRIDE as u64) * BLOCK as u64,
        None => length,
    }
}

fn checksum(number: u64, block: &[u8]) -> [u8; SUM] {
    const NUMBER: usize = size_of::<u64>();
    // Copied together: of one input, several chunks are hashed at a time, which takes a third of the
    // time of a block whose chunks begin elsewhere.
    let mut input = [0; NUMBER + BLOCK];
    let input = &mut input[..NUMBER + block.len()];
    input[..NUMBER].copy_from_slice(&number.to_be_bytes());
    input[NUMBER..].copy_from_slice(block);
    let mut sum = [0; SUM];
    sum.copy_from_slice(&blake3::hash(input).as_bytes()[..SUM]);
    sum
}

fn has_mark(sector: &[u8; SECTOR]) -> bool {
    sector[HEADER..SECTOR - SUM] == MARK[..]
}

/// Returns the sector with its mark and its checksum.
fn seal_header(sector: &[u8; SECTOR]) -> [u8; SECTOR] {
    let mut sealed = *sector;
    sealed[HEADER..SECTOR - SUM].copy_from_slice(MARK);
    let sum = checksum(0, &sealed[..SECTOR - SUM]);
    sealed[SECTOR - SUM..].copy_from_slice(&sum);
    sealed
}

fn beyond() -> io::Error {
    io::Error::new(io::ErrorKind::InvalidInput, "the engine accessed bytes beyond its blocks")
}

type Lock = Result<bool, BackendError>;

impl StorageBackend for Blocks {
    fn len(&self) -> io::Result<u64> {
        self.disk.len().map(logical)
    }

    fn read(&self, offset: u64, out: &mut [u8]) -> io::Result<()> {
        match self.fetch(offset, out) {
            Ok(()) => Ok(()),
            // A second unwinding would end the process. So the operation that is being undone fails
            // instead, and the engine is reopened.
            Err(FetchError::Damage(damage)) if !std::thread::panicking() => {
                resume_unwind(Box::new(damage))
            }
            Err(error) => Err(error.into()),
        }
    }

    fn set_len(&self, len: u64) -> io::Result<()> {
        self.disk.set_len(place(len.div_ceil(BLOCK as u64)))
    }

    fn sync_data(&self) -> io::Result<()> {
        self.disk.sync_data()
    }

    fn write(&self, offset: u64, data: &[u8]) -> io::Result<()> {
        if offset < BLOCK as u64 {
            let mut header = self.header();
            let mut sector = *header;
            let from = offset as usize;
            let fields = sector[..HEADER].get_mut(from..from + data.len()).ok_or_else(beyond)?;
            fields.copy_from_slice(data);
            let sealed = seal_header(&sector);
            self.write_header(&sealed)?;
            *header = sealed;
            return Ok(());
        }
        if !offset.is_multiple_of(BLOCK as u64) || !data.len().is_multiple_of(BLOCK) {
            return Err(beyond());
        }
        let first = offset / BLOCK as u64;
        let mut stored = Vec::with_capacity(data.len() / BLOCK * STRIDE);
        for (number, block) in (first..).zip(data.chunks_exact(BLOCK)) {
            stored.extend_from_slice(block);
            stored.extend_from_slice(&checksum(number, block));
        }
        self.disk.write(place(first), &stored)
    }

    fn close(&self) -> io::Result<()> {
        self.disk.close()
    }

    /// Reads the header again once the file is locked: until then another process may have written
    /// it, and the engine would overwrite it with the older one.
    fn try_lock_range(&self, start: Bound<u64>, end: Bound<u64>) -> Lock {
        let locked = self.disk.try_lock_range(start, end)?;
        if locked {
            *self.header() = read_header(&self.disk, &self.damages).map_err(io::Error::from)?;
        }
        Ok(locked)
    }

    fn try_lock_shared_range(&self, start: Bound<u64>, end: Bound<u64>) -> Lock {
        self.disk.try_lock_shared_range(start, end)
    }

    fn lock_range(&self, start: Bound<u64>, end: Bound<u64>) -> Result<(), BackendError> {
        self.disk.lock_range(start, end)
    }

    fn lock_shared_range(&self, start: Bound<u64>, end: Bound<u64>) -> Result<(), BackendError> {
        self.disk.lock_shared_range(start, end)
    }

    fn unlock_range(&self, start: Bound<u64>, end: Bound<u64>) -> Result<(), BackendError> {
        self.disk.unlock_range(start, end)
    }

    fn query_lock_range(&self, start: Bound<u64>, end: Bound<u64>) -> Lock {
        self.disk.query_lock_range(start, end)
    }
}
