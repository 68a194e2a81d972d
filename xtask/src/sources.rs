//! The project's own Rust files.

use std::fs;
use std::path::{Path, PathBuf};

use crate::sh::{Failure, root};

/// A source file: its path from the root, and its text.
pub(crate) struct Source {
    pub(crate) path: PathBuf,
    pub(crate) text: String,
}

/// Returns every Rust file of the project in order of paths, without build output.
pub(crate) fn all() -> Result<Vec<Source>, Failure> {
    let root = root();
    let mut found = Vec::new();
    let mut folders = vec![root.clone()];
    while let Some(folder) = folders.pop() {
        for path in children(&folder)? {
            let name = path.file_name().unwrap_or_default().to_string_lossy();
            if path.is_dir() {
                // Hidden folders and cargo's target folders contain no sources.
                if !name.starts_with('.') && name != "target" {
                    folders.push(path);
                }
            } else if name.ends_with(".rs") {
                let text = fs::read_to_string(&path).map_err(|error| cannot_read(&path, &error))?;
                let path = path.strip_prefix(&root).unwrap_or(&path).to_path_buf();
                found.push(Source { path, text });
            }
        }
    }
    found.sort_by(|one, two| one.path.cmp(&two.path));
    Ok(found)
}

fn children(folder: &Path) -> Result<Vec<PathBuf>, Failure> {
    let entries = fs::read_dir(folder).map_err(|error| cannot_read(folder, &error))?;
    entries
        .map(|entry| entry.map(|entry| entry.path()).map_err(|error| cannot_read(folder, &error)))
        .collect()
}

fn cannot_read(path: &Path, error: &std::io::Error) -> Failure {
    Failure::new(format!("cannot read {}: {error}", path.display()))
}
