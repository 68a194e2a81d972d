//! The keys that a file of decisions releases, in a file beside it.
//!
//! A released record is removed soon. A run that follows an interrupted one would find no record, as it would in
//! another store. So the file gets the id and the fence of a record before it is released.

use std::collections::HashSet;
use std::fs::File;
use std::io::{self, Read, Write};
use std::path::Path;

use hapax_core::OperationId;
use hapax_operators::open_log;
use serde::{Deserialize, Serialize};

use super::DecisionFile;
use crate::exit::CliError;

/// The largest file, in bytes: that of some hundred thousand keys.
const MAX_FILE: u64 = 64 << 20;

/// The keys whose release was begun.
#[derive(Debug)]
pub(super) struct Released {
    /// `None` if nothing is to be written.
    file: Option<File>,
    begun: HashSet<(String, u64)>,
}

#[derive(Serialize, Deserialize)]
struct Line {
    id: String,
    fence: u64,
}

impl Released {
    /// Opens the file beside `decisions`. Creates it if they release keys and this is no dry run.
    pub(super) fn open(decisions: &DecisionFile, dry_run: bool) -> Result<Self, CliError> {
        let mut path = decisions.path.clone().into_os_string();
        path.push(".released");
        let path = Path::new(&path);
        let writes = !dry_run && decisions.lines.iter().any(super::releases);
        if !writes && !path.exists() {
            return Ok(Self { file: None, begun: HashSet::new() });
        }
        let failed = |error: io::Error| {
            CliError::usage(format!(
                "expected to read and write {}, found: {error}; nothing was decided: move the file of decisions \
                 into a folder of yours",
                path.display()
            ))
        };
        let mut file = if writes { open_log(path) } else { File::open(path) }.map_err(failed)?;
        let begun = read(&mut file, path).map_err(failed)?;
        Ok(Self { file: writes.then_some(file), begun })
    }

    /// Returns whether an earlier run began to release the key.
    pub(super) fn has(&self, id: &OperationId, fence: u64) -> bool {
        self.begun.contains(&(id.to_string(), fence))
    }

    /// Adds a key, whose record was undecided a moment ago. It is on the disk when this returns.
    pub(super) fn add(&mut self, id: &OperationId, fence: u64) -> io::Result<()> {
        let line = Line { id: id.to_string(), fence };
        let Some(file) = &mut self.file else { return Ok(()) };
        if !self.begun.insert((line.id.clone(), fence)) {
            return Ok(());
        }
        // Before it, because an interrupted run may have left a part of a line.
        let text = format!("\n{}", serde_json::to_string(&line)?);
        file.write_all(text.as_bytes())?;
        file.sync_data()
    }
}

fn read(file: &mut File, path: &Path) -> io::Result<HashSet<(String, u64)>> {
    let mut bytes = Vec::new();
    // From its beginning, of which `open_log` read a byte.
    File::open(path)?.take(MAX_FILE + 1).read_to_end(&mut bytes)?;
    if bytes.len() as u64 > MAX_FILE || !file.metadata()?.is_file() {
        return Err(io::Error::other("no file of at most 64 MiB"));
    }
    let lines = bytes.split(|byte| *byte == b'\n');
    let lines = lines.filter_map(|line| serde_json::from_slice::<Line>(line).ok());
    Ok(lines.map(|line| (line.id, line.fence)).collect())
}
