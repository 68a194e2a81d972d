use std::path::Path;

use redb::{Database, ReadableDatabase, ReadableTable, ReadableTableMetadata, TableDefinition};

use super::{Engine, Failure, Prepared};

const CELLS: TableDefinition<&[u8; 32], &[u8]> = TableDefinition::new("cells");
const DUE: TableDefinition<&[u8; 40], ()> = TableDefinition::new("due");

pub enum Commit {
    OnePhase,
    TwoPhases,
    QuickRepair,
}

pub struct Redb {
    database: Database,
    commit: Commit,
}

impl Redb {
    pub fn open(directory: &Path, commit: Commit) -> Result<Self, Failure> {
        let path = directory.join("redb");
        let database = Database::builder().set_cache_size(64 << 20).create(path)?;
        Ok(Self { database, commit })
    }
}

impl Engine for Redb {
    fn apply(&mut self, batch: &[Prepared]) -> Result<Vec<bool>, Failure> {
        let mut transaction = self.database.begin_write()?;
        transaction.set_two_phase_commit(!matches!(self.commit, Commit::OnePhase));
        transaction.set_quick_repair(matches!(self.commit, Commit::QuickRepair));
        let mut written = Vec::with_capacity(batch.len());
        {
            let mut cells = transaction.open_table(CELLS)?;
            let mut due = transaction.open_table(DUE)?;
            for swap in batch {
                let found = cells.get(&swap.key)?;
                let fits = swap.fits(found.as_ref().map(|found| found.value()));
                let new = found.is_none();
                drop(found);
                if fits {
                    cells.insert(&swap.key, swap.value.as_slice())?;
                    if new {
                        due.insert(&swap.entry(), ())?;
                    }
                }
                written.push(fits);
            }
        }
        transaction.commit()?;
        Ok(written)
    }

    fn count(&mut self) -> Result<u64, Failure> {
        Ok(self.database.begin_read()?.open_table(CELLS)?.len()?)
    }
}
