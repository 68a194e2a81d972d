//! The lock beside the database: one process at a time, and whom to ask instead.

use std::fs::{File, OpenOptions, TryLockError};
use std::io::{self, Read, Seek, SeekFrom, Write};
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use serde_json::{Value, json};

use crate::backing::owner_only;
use crate::error::OpenError;

/// Who has a database open.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct LockOwner {
    /// Its process id, if it said so.
    pub pid: Option<u32>,
    /// Where it can be asked about its records, if it said so.
    pub admin: Option<SocketAddr>,
}

/// A lock that is held. The operating system lets it go when the process ends, however it ends.
#[derive(Debug)]
pub(crate) struct LockFile {
    path: PathBuf,
    /// `None` once released.
    file: Mutex<Option<File>>,
}

impl LockFile {
    /// Takes the lock and says who has it.
    pub(crate) fn take(path: PathBuf, admin: Option<SocketAddr>) -> Result<Self, OpenError> {
        let failed = |error| OpenError::io(&path, error);
        let mut options = OpenOptions::new();
        options.read(true).write(true).create(true).truncate(false);
        owner_only(&mut options);
        let file = options.open(&path).map_err(failed)?;
        if !exclusive(&file).map_err(failed)? {
            let LockOwner { pid, admin } = said(&file).map_err(failed)?;
            return Err(OpenError::InUse { path, pid, admin });
        }
        say(&file, admin).map_err(failed)?;
        Ok(Self { path, file: Mutex::new(Some(file)) })
    }

    /// Says anew where its holder can be asked.
    pub(crate) fn set_admin(&self, admin: Option<SocketAddr>) -> io::Result<()> {
        match &*self.lock() {
            Some(file) => say(file, admin),
            None => Err(io::Error::other(format!("{} was released", self.path.display()))),
        }
    }

    /// Lets it go. The file stays: to remove it would let two processes lock two files of one
    /// name.
    pub(crate) fn release(&self) {
        *self.lock() = None;
    }

    fn lock(&self) -> MutexGuard<'_, Option<File>> {
        self.file.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// For how long those who only look may be in the way: so many tries, with a pause after each.
const TRIES: u32 = 200;
const PAUSE: Duration = Duration::from_millis(5);

/// Locks for a holder; `false` if there is one. Whoever asks [`holder`] has a shared lock for a
/// moment, which is no reason to refuse: a second shared lock tells such a one from a holder.
fn exclusive(file: &File) -> io::Result<bool> {
    for _ in 0..TRIES {
        match file.try_lock() {
            Ok(()) => return Ok(true),
            Err(TryLockError::WouldBlock) => {}
            Err(TryLockError::Error(error)) => return Err(error),
        }
        match file.try_lock_shared() {
            Ok(()) => file.unlock()?,
            Err(TryLockError::WouldBlock) => return Ok(false),
            Err(TryLockError::Error(error)) => return Err(error),
        }
        // It may end early, which costs a try.
        std::thread::park_timeout(PAUSE);
    }
    Ok(false)
}

/// Who holds the lock at `path`; `None` if nobody does.
pub(crate) fn lock_owner(path: &Path) -> io::Result<Option<LockOwner>> {
    let file = match File::open(path) {
        Ok(file) => file,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        Err(error) => return Err(error),
    };
    // Shared, so that two who look do not take each other for a holder.
    match file.try_lock_shared() {
        Ok(()) => Ok(None),
        Err(TryLockError::WouldBlock) => said(&file).map(Some),
        Err(TryLockError::Error(error)) => Err(error),
    }
}

/// The line first, then the length: whoever reads meanwhile finds a whole first line.
fn say(mut file: &File, admin: Option<SocketAddr>) -> io::Result<()> {
    let line = json!({ "pid": std::process::id(), "admin": admin.map(|admin| admin.to_string()) });
    let line = format!("{line}\n");
    file.seek(SeekFrom::Start(0))?;
    file.write_all(line.as_bytes())?;
    file.set_len(line.len() as u64)
}

/// What the holder says, as far as it can be read.
fn said(mut file: &File) -> io::Result<LockOwner> {
    let mut text = Vec::new();
    file.seek(SeekFrom::Start(0))?;
    file.take(4096).read_to_end(&mut text)?;
    let line = text.split(|byte| *byte == b'\n').next().unwrap_or_default();
    let said: Value = serde_json::from_slice(line).unwrap_or_default();
    Ok(LockOwner {
        pid: said["pid"].as_u64().and_then(|pid| pid.try_into().ok()),
        admin: said["admin"].as_str().and_then(|admin| admin.parse().ok()),
    })
}
