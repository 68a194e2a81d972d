//! Storage of the database's bytes: the file, or a substitute in tests.

use std::fmt;
use std::fs::{File, Metadata, OpenOptions};
use std::io::{self, Read, Seek, Write};
use std::ops::Bound;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

use redb::backends::FileBackend;
use redb::{BackendError, StorageBackend};

use crate::error::FileStoreError;
use crate::files::{absolute, with_suffix};

/// Storage of a database. The store opens it again after a write that failed.
pub trait Backing: fmt::Debug + Send + Sync + 'static {
    /// Opens the storage for reading and writing.
    ///
    /// # Errors
    /// Any error of opening.
    fn open(&self) -> io::Result<Disk>;

    /// Returns whether the storage that was opened is still the one that a later process would open. Default: true.
    fn is_in_place(&self) -> bool {
        true
    }

    /// Returns the length, in bytes.
    ///
    /// # Errors
    /// Any error of reading the length.
    fn length(&self) -> io::Result<u64>;

    /// Returns the bytes that may still be written; `None` if that is unknown.
    ///
    /// # Errors
    /// Any error of reading the free space.
    fn available(&self) -> io::Result<Option<u64>>;

    /// Reserves space for writes on a full disk. Does nothing if it is reserved already.
    ///
    /// # Errors
    /// Any error of reserving, such as a full disk.
    fn reserve(&self) -> io::Result<()>;

    /// Releases the reserved space. Returns whether there was any.
    ///
    /// # Errors
    /// Any error of releasing.
    fn release_reserve(&self) -> io::Result<bool>;
}

/// Size of the reserve: many times what a batch of completions writes.
const RESERVE: u64 = 16 << 20;

/// A database in a file.
#[derive(Debug)]
pub(crate) struct FileBacking {
    path: PathBuf,
    make: bool,
    /// The file that was opened first. It is open for as long as this value, so that its number is not used anew, and a
    /// removed file keeps its content.
    opened: OnceLock<File>,
}

/// Device and number of a file, which no other file has while it exists.
type FileId = (u64, u64);

#[cfg(unix)]
fn file_id(of: &Metadata) -> FileId {
    use std::os::unix::fs::MetadataExt;
    (of.dev(), of.ino())
}

/// Returns the same for every file: on this platform files are not distinguished, and one that is open is not moved.
#[cfg(not(unix))]
fn file_id(_: &Metadata) -> FileId {
    (0, 0)
}

impl FileBacking {
    /// Returns the storage of an existing database. A missing or empty file is an error, because
    /// the database was lost: a new one in its place would silently be without all records.
    pub(crate) fn existing(path: &Path) -> Self {
        Self { path: absolute(path), make: false, opened: OnceLock::new() }
    }

    /// Returns the storage of a database that is to be created.
    pub(crate) fn new(path: &Path) -> Self {
        Self { path: absolute(path), make: true, opened: OnceLock::new() }
    }

    pub(crate) fn exists(&self) -> io::Result<bool> {
        self.path.try_exists()
    }
}

impl Backing for FileBacking {
    fn open(&self) -> io::Result<Disk> {
        let mut options = OpenOptions::new();
        options.read(true).write(true).create_new(self.make);
        owner_only(&mut options);
        let file = options.open(&self.path)?;
        let about = file.metadata()?;
        if !self.make && about.len() == 0 {
            return Err(io::Error::new(io::ErrorKind::InvalidData, "the file is empty"));
        }
        let first = match self.opened.get() {
            Some(first) => first,
            // Not a clone, which would keep the lock of the database.
            None => {
                let again = File::open(&self.path)?;
                self.opened.get_or_init(|| again)
            }
        };
        if file_id(&first.metadata()?) != file_id(&about) {
            return Err(io::Error::new(io::ErrorKind::InvalidData, FileStoreError::Moved));
        }
        Ok(Disk::new(FileBackend::new(file).map_err(io::Error::other)?))
    }

    fn is_in_place(&self) -> bool {
        let Some(opened) = self.opened.get() else { return true };
        let ids = [opened.metadata(), self.path.metadata()].map(|it| it.ok().as_ref().map(file_id));
        ids[0].is_some() && ids[0] == ids[1]
    }

    fn length(&self) -> io::Result<u64> {
        Ok(self.opened.get().map_or_else(|| self.path.metadata(), File::metadata)?.len())
    }

    #[cfg(unix)]
    fn available(&self) -> io::Result<Option<u64>> {
        let stat = rustix::fs::statvfs(directory(&self.path))?;
        Ok(Some(stat.f_bavail.saturating_mul(stat.f_frsize)))
    }

    #[cfg(not(unix))]
    fn available(&self) -> io::Result<Option<u64>> {
        Ok(None)
    }

    fn reserve(&self) -> io::Result<()> {
        let path = with_suffix(&self.path, ".reserve");
        let mut options = OpenOptions::new();
        options.read(true).write(true).create(true).truncate(false);
        owner_only(&mut options);
        let file = open_own(&options, &path)?;
        if !is_reserve(&file)? {
            return Err(foreign("a file of zeros, or none"));
        }
        if file.metadata()?.len() >= RESERVE {
            return Ok(());
        }
        let made = fill(&file);
        if made.is_err() {
            // A part of the reserve would be taken for all of it, or take space from the database.
            let _ = std::fs::remove_file(&path);
        }
        made
    }

    fn release_reserve(&self) -> io::Result<bool> {
        let path = with_suffix(&self.path, ".reserve");
        match open_own(OpenOptions::new().read(true), &path).and_then(|file| is_reserve(&file)) {
            Ok(true) => {}
            Ok(false) => return Err(foreign("a file of zeros, or none")),
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(false),
            Err(error) => return Err(error),
        }
        match std::fs::remove_file(path) {
            Ok(()) => Ok(true),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(false),
            Err(error) => Err(error),
        }
    }
}

/// Byte of a reserve that was written, not allocated.
const FILLER: u8 = 0x5a;

/// Returns whether a file begins as a reserve does, or is empty.
fn is_reserve(mut file: &File) -> io::Result<bool> {
    let mut start = Vec::new();
    file.take(4096).read_to_end(&mut start)?;
    file.rewind()?;
    Ok(start.iter().all(|byte| matches!(*byte, 0 | FILLER)))
}

/// Returns the error of a file of that name which is not one of the store.
pub(crate) fn foreign(expected: &str) -> io::Error {
    let text = format!(
        "expected {expected}, found a file with other content: move it away, or name another store"
    );
    io::Error::new(io::ErrorKind::InvalidData, text)
}

/// Opens a file next to the database that only the store writes. A symbolic link is rejected: a user that can write
/// the folder could have the store write into any file of its user. A named pipe is rejected without waiting for its
/// other end.
pub(crate) fn open_own(options: &OpenOptions, path: &Path) -> io::Result<File> {
    let mut options = options.clone();
    #[cfg(unix)]
    {
        use rustix::fs::OFlags;
        use std::os::unix::fs::OpenOptionsExt;
        options.custom_flags((OFlags::NOFOLLOW | OFlags::NONBLOCK).bits().cast_signed());
    }
    let file = options.open(path).map_err(|error| {
        if !path.is_symlink() {
            return error;
        }
        let text = "expected a file, found a symbolic link: remove it, or name another store";
        io::Error::new(error.kind(), text)
    })?;
    if !file.metadata()?.is_file() {
        return Err(foreign("a regular file"));
    }
    Ok(file)
}

/// Allocates the reserve on disk: setting only the length would leave a hole.
fn fill(mut file: &File) -> io::Result<()> {
    #[cfg(any(target_os = "linux", target_os = "android"))]
    match rustix::fs::fallocate(file, rustix::fs::FallocateFlags::empty(), 0, RESERVE) {
        // Not supported by this file system.
        Err(rustix::io::Errno::OPNOTSUPP | rustix::io::Errno::NOSYS) => {}
        done => return Ok(done?),
    }
    // Zeros might be compressed or left out.
    let piece = vec![FILLER; 1 << 20];
    for _ in 0..RESERVE >> 20 {
        file.write_all(&piece)?;
    }
    file.sync_all()
}

/// Returns the directory that contains `path`.
pub(crate) fn directory(path: &Path) -> &Path {
    match path.parent() {
        Some(parent) if !parent.as_os_str().is_empty() => parent,
        _ => Path::new("."),
    }
}

/// Makes the directory entries next to `path` durable: a synced file whose entry was not synced can
/// be missing after a power failure.
pub(crate) fn sync_directory(path: &Path) -> io::Result<()> {
    if cfg!(unix) { File::open(directory(path))?.sync_all() } else { Ok(()) }
}

/// Restricts new files to their owner.
pub(crate) fn owner_only(options: &mut OpenOptions) {
    #[cfg(unix)]
    std::os::unix::fs::OpenOptionsExt::mode(options, 0o600);
    #[cfg(not(unix))]
    let _ = options;
}

/// An open storage of any kind.
#[derive(Debug)]
pub struct Disk(Box<dyn StorageBackend>);

impl Disk {
    /// Creates a disk that reads and writes `backend`.
    pub fn new(backend: impl StorageBackend) -> Self {
        Self(Box::new(backend))
    }

    pub(crate) fn is_empty(&self) -> io::Result<bool> {
        Ok(self.len()? == 0)
    }
}

type Lock = Result<bool, BackendError>;

// Every call is passed on, also locks: without them two processes could open one file.
impl StorageBackend for Disk {
    fn len(&self) -> io::Result<u64> {
        self.0.len()
    }

    fn read(&self, offset: u64, out: &mut [u8]) -> io::Result<()> {
        self.0.read(offset, out)
    }

    fn set_len(&self, len: u64) -> io::Result<()> {
        self.0.set_len(len)
    }

    fn sync_data(&self) -> io::Result<()> {
        self.0.sync_data()
    }

    fn write(&self, offset: u64, data: &[u8]) -> io::Result<()> {
        self.0.write(offset, data)
    }

    fn close(&self) -> io::Result<()> {
        self.0.close()
    }

    fn try_lock_range(&self, start: Bound<u64>, end: Bound<u64>) -> Lock {
        self.0.try_lock_range(start, end)
    }

    fn try_lock_shared_range(&self, start: Bound<u64>, end: Bound<u64>) -> Lock {
        self.0.try_lock_shared_range(start, end)
    }

    fn lock_range(&self, start: Bound<u64>, end: Bound<u64>) -> Result<(), BackendError> {
        self.0.lock_range(start, end)
    }

    fn lock_shared_range(&self, start: Bound<u64>, end: Bound<u64>) -> Result<(), BackendError> {
        self.0.lock_shared_range(start, end)
    }

    fn unlock_range(&self, start: Bound<u64>, end: Bound<u64>) -> Result<(), BackendError> {
        self.0.unlock_range(start, end)
    }

    fn query_lock_range(&self, start: Bound<u64>, end: Bound<u64>) -> Lock {
        self.0.query_lock_range(start, end)
    }
}

#[cfg(all(test, unix))]
mod tests {
    use super::*;

    #[test]
    fn a_named_pipe_in_place_of_the_reserve_is_rejected_without_waiting() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("hapax.db");
        let pipe = with_suffix(&path, ".reserve");
        assert!(std::process::Command::new("mkfifo").arg(&pipe).status().unwrap().success());
        let backing = FileBacking::new(&path);
        for error in [backing.reserve().unwrap_err(), backing.release_reserve().unwrap_err()] {
            assert!(error.to_string().contains("expected a regular file"), "{error}");
        }
        assert!(pipe.exists());
    }
}
