//! The secrets beside the database.

use std::fs::{File, OpenOptions};
use std::io::{self, Write};
use std::path::Path;

use hapax_core::{Entropy, KeyRing, KeyRingError, Secret};

use crate::backing::{owner_only, sync_directory};
use crate::error::OpenError;
use crate::files::with_suffix;

/// The longest content that is read: a ring and some comments.
const MAX_LEN: u64 = 16 * 1024;

/// Reads the secrets at `path`. Makes one if there is none, but never for a database that exists:
/// its records are named and sealed under the secret that is missing.
pub(crate) fn read_or_make(
    path: &Path,
    database_exists: bool,
    entropy: &dyn Entropy,
) -> Result<KeyRing, OpenError> {
    match read(path) {
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

/// Writes it whole under another name, then renames: after a crash there is a secret or none,
/// never half of one. It is durable, name and all, before this returns, and so before anything
/// is sealed under it. The caller holds the lock, so nobody else makes one meanwhile.
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
