//! Names of the files.

use std::path::{Path, PathBuf};

/// Appends a suffix: `hapax.db` and `.lock` give `hapax.db.lock`.
pub(crate) fn with_suffix(path: &Path, suffix: &str) -> PathBuf {
    let mut name = path.as_os_str().to_owned();
    name.push(suffix);
    name.into()
}
