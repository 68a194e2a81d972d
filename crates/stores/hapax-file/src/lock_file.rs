//! The lock file next to the database, which admits one process at a time and identifies it.

use std::fs::{File, OpenOptions, TryLockError};
use std::io::{self, Read, Seek, SeekFrom, Write};
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use serde_json::{Value, json};

use crate::backing::{foreign, open_own, owner_only};
use crate::error::OpenError;

/// The process that has a database open.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct LockOwner {
    /// Its process id, if the lock file has it.
    pub pid: Option<u32>,
    /// Its operators' address, if the lock file has it.
    pub admin: Option<SocketAddr>,
}

/// A lock that this process has. The operating system releases it when the process ends, in any
/// way.
#[derive(Debug)]
pub(crate) struct LockFile {
    path: PathBuf,
    /// `None` once released.
    file: Mutex<Option<File>>,
}

impl LockFile {
    /// Takes the lock and writes the owner into the file.
    pub(crate) fn take(path: PathBuf, admin: Option<SocketAddr>) -> Result<Self, OpenError> {
        let failed = |error| OpenError::io(&path, error);
        let mut options = OpenOptions::new();
        options.read(true).write(true).create(true).truncate(false);
        owner_only(&mut options);
        let file = open_own(&options, &path).map_err(failed)?;
        if !is_lock_file(&file).map_err(failed)? {
            return Err(failed(foreign("a lock file of a store")));
        }
        if !exclusive(&file).map_err(failed)? {
            let LockOwner { pid, admin } = said(&file).map_err(failed)?;
            return Err(OpenError::InUse { path, pid, admin });
        }
        say(&file, admin).map_err(failed)?;
        Ok(Self { path, file: Mutex::new(Some(file)) })
    }

    /// Replaces the operators' address in the file.
    pub(crate) fn set_admin(&self, admin: Option<SocketAddr>) -> io::Result<()> {
        match &*self.lock() {
            Some(file) => say(file, admin),
            None => Err(io::Error::other(format!("{} was released", self.path.display()))),
        }
    }

    /// Releases the lock. The file stays: removing it would let two processes lock two files of one
    /// name.
    pub(crate) fn release(&self) {
        *self.lock() = None;
    }

    fn lock(&self) -> MutexGuard<'_, Option<File>> {
        self.file.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Number of attempts while processes that only check the lock are in the way, with a pause after
/// each.
const TRIES: u32 = 200;
const PAUSE: Duration = Duration::from_millis(5);

/// Takes the exclusive lock; `false` if another process has it. A process in [`lock_owner`] has a
/// shared lock for a moment, which is no reason to fail: a second shared lock distinguishes it from
/// an owner.
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
        // The pause may end early, which costs one attempt.
        std::thread::park_timeout(PAUSE);
    }
    Ok(false)
}

/// Returns the owner of the lock at `path`; `None` if there is none.
pub(crate) fn lock_owner(path: &Path) -> io::Result<Option<LockOwner>> {
    let file = match File::open(path) {
        Ok(file) => file,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        Err(error) => return Err(error),
    };
    // Shared, so that two processes that check do not take each other for an owner.
    match file.try_lock_shared() {
        Ok(()) => Ok(None),
        Err(TryLockError::WouldBlock) => said(&file).map(Some),
        Err(TryLockError::Error(error)) => Err(error),
    }
}

/// The longest content of a lock file, in bytes.
const MAX_CONTENT: u64 = 4096;

/// Returns whether the file may be a lock file: it is short, and begins with a JSON object, or with a zero after a power
/// failure.
fn is_lock_file(file: &File) -> io::Result<bool> {
    let mut first = Vec::new();
    file.take(1).read_to_end(&mut first)?;
    let is_short = file.metadata()?.len() <= MAX_CONTENT;
    Ok(is_short && matches!(first[..], [] | [0] | [b'{']))
}

/// Writes the line first, then the length, so that a concurrent reader finds a complete first line.
fn say(mut file: &File, admin: Option<SocketAddr>) -> io::Result<()> {
    let line = json!({ "pid": std::process::id(), "admin": admin.map(|admin| admin.to_string()) });
    let line = format!("{line}\n");
    file.seek(SeekFrom::Start(0))?;
    file.write_all(line.as_bytes())?;
    file.set_len(line.len() as u64)
}

/// Returns the owner in the file, where it can be parsed.
fn said(mut file: &File) -> io::Result<LockOwner> {
    let mut text = Vec::new();
    file.seek(SeekFrom::Start(0))?;
    file.take(MAX_CONTENT).read_to_end(&mut text)?;
    let line = text.split(|byte| *byte == b'\n').next().unwrap_or_default();
    let said: Value = serde_json::from_slice(line).unwrap_or_default();
    Ok(LockOwner {
        pid: said["pid"].as_u64().and_then(|pid| pid.try_into().ok()),
        admin: said["admin"].as_str().and_then(|admin| admin.parse().ok()),
    })
}
