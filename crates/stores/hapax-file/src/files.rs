//! Names of the files.

use std::path::{Path, PathBuf};

/// Returns the absolute path, for messages that are read elsewhere than where the process runs.
pub(crate) fn absolute(path: &Path) -> PathBuf {
    std::path::absolute(path).unwrap_or_else(|_| path.to_owned())
}

/// Appends a suffix: `hapax.db` and `.lock` give `hapax.db.lock`.
pub(crate) fn with_suffix(path: &Path, suffix: &str) -> PathBuf {
    let mut name = path.as_os_str().to_owned();
    name.push(suffix);
    name.into()
}
