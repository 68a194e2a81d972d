//! The secrets next to the database.

use std::fs::{File, OpenOptions};
use std::io::{self, Write};
use std::path::Path;

use hapax_core::{Entropy, KeyRing, KeyRingError, Secret};

use crate::backing::{owner_only, sync_directory};
use crate::error::OpenError;
use crate::files::{absolute, with_suffix};

/// Limit of the file's length: a ring and some comments.
const MAX_LEN: u64 = 16 * 1024;

/// Reads the secrets at `path`. Creates one if the file does not exist, but never for an existing
/// database: its records are named and sealed under the missing secret.
pub(crate) fn read_or_make(
    path: &Path,
    database_exists: bool,
    entropy: &dyn Entropy,
) -> Result<KeyRing, OpenError> {
    match read(path) {
        Ok(Ok(ring)) if ring.naming().is_none() => Err(OpenError::Unnamed { path: path.into() }),
        Ok(ring) => {
            ring.map_err(|source| OpenError::SecretUnreadable { path: path.into(), source })
        }
        Err(error) if error.kind() == io::ErrorKind::NotFound && database_exists => {
            Err(OpenError::SecretMissing { path: path.into() })
        }
        Err(error) if error.kind() == io::ErrorKind::NotFound => {
            let mut bytes = [0; 32];
            entropy
                .fill(&mut bytes)
                .map_err(|error| OpenError::io(path, io::Error::other(error)))?;
            let secret = Secret::new(bytes);
            make(path, &secret).map_err(|error| OpenError::io(path, error))?;
            tracing::warn!(
                path = %absolute(path).display(),
                "a new secret was created: under it every key and name is new; keep it with the store"
            );
            Ok(KeyRing::new(secret))
        }
        Err(error) => Err(OpenError::io(path, error)),
    }
}

fn read(path: &Path) -> io::Result<Result<KeyRing, KeyRingError>> {
    let text = io::read_to_string(io::Read::take(File::open(path)?, MAX_LEN + 1))?;
    if text.len() as u64 > MAX_LEN {
        let error = format!("it is longer than {MAX_LEN} bytes");
        return Err(io::Error::new(io::ErrorKind::InvalidData, error));
    }
    Ok(KeyRing::parse(&text))
}

/// Writes the secret under another name, then renames the file: after a crash there is a complete
/// secret or none. File and directory entry are synced before this returns, and so before anything
/// is sealed under the secret. The caller has the lock, so no other process creates one meanwhile.
fn make(path: &Path, secret: &Secret) -> io::Result<()> {
    let unfinished = with_suffix(path, ".new");
    match std::fs::remove_file(&unfinished) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
        _ => {}
    }
    let mut options = OpenOptions::new();
    options.write(true).create_new(true);
    owner_only(&mut options);
    let mut file = options.open(&unfinished)?;
    file.write_all(secret.to_hex().as_bytes())?;
    file.write_all(b"\n")?;
    file.sync_all()?;
    std::fs::rename(&unfinished, path)?;
    sync_directory(path)
}
