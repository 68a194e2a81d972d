//! The engines: each applies a batch of swaps in one durable transaction.

mod fjall;
mod redb;
mod sqlite;

use std::error::Error;
use std::path::Path;

pub type Failure = Box<dyn Error + Send + Sync>;

/// A swap, ready to be written. A value begins with its tag.
pub struct Prepared {
    pub key: [u8; 32],
    pub expected: Option<[u8; 16]>,
    pub due: u64,
    pub value: Vec<u8>,
}

impl Prepared {
    /// Whether it may be written over `found`.
    fn fits(&self, found: Option<&[u8]>) -> bool {
        found.and_then(|found| found.first_chunk()) == self.expected.as_ref()
    }

    /// Its place in the order of what is due.
    fn entry(&self) -> [u8; 40] {
        let mut entry = [0; 40];
        entry[..8].copy_from_slice(&self.due.to_be_bytes());
        entry[8..].copy_from_slice(&self.key);
        entry
    }
}

pub trait Engine: Send + 'static {
    /// Applies all, durably, and says which were written.
    fn apply(&mut self, batch: &[Prepared]) -> Result<Vec<bool>, Failure>;

    /// How many cells there are, for the check after a kill.
    fn count(&mut self) -> Result<u64, Failure>;
}

pub const NAMES: [&str; 5] = ["redb", "redb-quick", "redb-1-phase", "sqlite", "fjall"];

pub fn open(name: &str, directory: &Path) -> Result<Box<dyn Engine>, Failure> {
    std::fs::create_dir_all(directory)?;
    Ok(match name {
        "redb" => Box::new(redb::Redb::open(directory, redb::Commit::TwoPhases)?),
        "redb-quick" => Box::new(redb::Redb::open(directory, redb::Commit::QuickRepair)?),
        "redb-1-phase" => Box::new(redb::Redb::open(directory, redb::Commit::OnePhase)?),
        "sqlite" => Box::new(sqlite::Sqlite::open(directory)?),
        "fjall" => Box::new(fjall::Fjall::open(directory)?),
        other => return Err(format!("no engine `{other}`: {NAMES:?} or `hapax`").into()),
    })
}
