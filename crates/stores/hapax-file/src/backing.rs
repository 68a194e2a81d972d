//! Where the bytes of the database are: the file, or what stands for it in tests.

use std::fmt;
use std::fs::{File, OpenOptions};
use std::io::{self, Write};
use std::ops::Bound;
use std::path::{Path, PathBuf};

use redb::backends::FileBackend;
use redb::{BackendError, StorageBackend};

use crate::files::with_suffix;

/// Somewhere to keep a database. The store opens it again after a write that failed.
pub trait Backing: fmt::Debug + Send + Sync + 'static {
    /// Opens it for reading and writing.
    ///
    /// # Errors
    /// Whatever keeps it from opening.
    fn open(&self) -> io::Result<Disk>;

    /// Its length, in bytes.
    ///
    /// # Errors
    /// Whatever keeps it from being known.
    fn length(&self) -> io::Result<u64>;

    /// Bytes that may still be written; `None` where nobody knows.
    ///
    /// # Errors
    /// Whatever keeps it from being known.
    fn available(&self) -> io::Result<Option<u64>>;

    /// Sets room aside for writes on a full disk. Does nothing where that is done.
    ///
    /// # Errors
    /// Whatever keeps it from being set aside, such as a full disk.
    fn reserve(&self) -> io::Result<()>;

    /// Gives back the room that was set aside. Returns whether there was any.
    ///
    /// # Errors
    /// Whatever keeps it from being given back.
    fn release_reserve(&self) -> io::Result<bool>;
}

/// What is set aside: many times what a batch of completions writes.
const RESERVE: u64 = 16 << 20;

/// A file.
#[derive(Debug)]
pub(crate) struct FileBacking {
    path: PathBuf,
    make: bool,
}

impl FileBacking {
    /// One that holds a database. A file that is gone or empty was lost, and is an error: a new
    /// one in its place would have forgotten everything without a word.
    pub(crate) fn existing(path: &Path) -> Self {
        Self { path: path.to_owned(), make: false }
    }

    /// One that is to be made.
    pub(crate) fn new(path: &Path) -> Self {
        Self { path: path.to_owned(), make: true }
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
        if !self.make && file.metadata()?.len() == 0 {
            return Err(io::Error::new(io::ErrorKind::InvalidData, "the file is empty"));
        }
        Ok(Disk::new(FileBackend::new(file).map_err(io::Error::other)?))
    }

    fn length(&self) -> io::Result<u64> {
        Ok(self.path.metadata()?.len())
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
        if path.metadata().is_ok_and(|found| found.len() >= RESERVE) {
            return Ok(());
        }
        let mut options = OpenOptions::new();
        options.write(true).create(true).truncate(true);
        owner_only(&mut options);
        let made = options.open(&path).and_then(|file| fill(&file));
        if made.is_err() {
            // A part of it would be taken for all of it, or be in the way of the database itself.
            let _ = std::fs::remove_file(&path);
        }
        made
    }

    fn release_reserve(&self) -> io::Result<bool> {
        match std::fs::remove_file(with_suffix(&self.path, ".reserve")) {
            Ok(()) => Ok(true),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(false),
            Err(error) => Err(error),
        }
    }
}

/// Has the disk keep room for all of the reserve: a length alone would be a hole.
fn fill(mut file: &File) -> io::Result<()> {
    #[cfg(any(target_os = "linux", target_os = "android"))]
    match rustix::fs::fallocate(file, rustix::fs::FallocateFlags::empty(), 0, RESERVE) {
        // This file system cannot.
        Err(rustix::io::Errno::OPNOTSUPP | rustix::io::Errno::NOSYS) => {}
        done => return Ok(done?),
    }
    // What reads as zeros might be compressed or left out.
    let piece = vec![0x5a; 1 << 20];
    for _ in 0..RESERVE >> 20 {
        file.write_all(&piece)?;
    }
    file.sync_all()
}

/// The directory that names `path`.
pub(crate) fn directory(path: &Path) -> &Path {
    match path.parent() {
        Some(parent) if !parent.as_os_str().is_empty() => parent,
        _ => Path::new("."),
    }
}

/// Makes the names in the directory of `path` durable: a file that was synced but whose name was
/// not can be gone after a power failure.
pub(crate) fn sync_directory(path: &Path) -> io::Result<()> {
    if cfg!(unix) { File::open(directory(path))?.sync_all() } else { Ok(()) }
}

/// Nobody but the owner may read what is created.
pub(crate) fn owner_only(options: &mut OpenOptions) {
    #[cfg(unix)]
    std::os::unix::fs::OpenOptionsExt::mode(options, 0o600);
    #[cfg(not(unix))]
    let _ = options;
}

/// An open backing, of whatever kind.
#[derive(Debug)]
pub struct Disk(Box<dyn StorageBackend>);

impl Disk {
    /// One that reads and writes `backend`.
    pub fn new(backend: impl StorageBackend) -> Self {
        Self(Box::new(backend))
    }

    pub(crate) fn is_empty(&self) -> io::Result<bool> {
        Ok(self.len()? == 0)
    }
}

type Lock = Result<bool, BackendError>;

// Everything is handed on, the locks too: without them two processes could open one file.
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
