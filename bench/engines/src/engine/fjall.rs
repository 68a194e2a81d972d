use std::collections::HashMap;
use std::path::Path;

use fjall::{Database, Keyspace, KeyspaceCreateOptions, PersistMode};

use super::{Engine, Failure, Prepared};

pub struct Fjall {
    database: Database,
    cells: Keyspace,
    due: Keyspace,
}

impl Fjall {
    pub fn open(directory: &Path) -> Result<Self, Failure> {
        let database = Database::builder(directory.join("fjall")).cache_size(64 << 20).open()?;
        let cells = database.keyspace("cells", KeyspaceCreateOptions::default)?;
        let due = database.keyspace("due", KeyspaceCreateOptions::default)?;
        Ok(Self { database, cells, due })
    }
}

impl Engine for Fjall {
    fn apply(&mut self, swaps: &[Prepared]) -> Result<Vec<bool>, Failure> {
        let mut batch = self.database.batch().durability(Some(PersistMode::SyncAll));
        let mut written = Vec::with_capacity(swaps.len());
        // A batch is not read through: what it holds already is remembered here.
        let mut ahead: HashMap<[u8; 32], &[u8]> = HashMap::new();
        for swap in swaps {
            let stored = match ahead.get(&swap.key) {
                Some(value) => Some(value.to_vec()),
                None => self.cells.get(swap.key)?.map(|value| value.to_vec()),
            };
            let fits = swap.fits(stored.as_deref());
            if fits {
                batch.insert(&self.cells, swap.key, swap.value.as_slice());
                ahead.insert(swap.key, &swap.value);
                if stored.is_none() {
                    batch.insert(&self.due, swap.entry(), b"");
                }
            }
            written.push(fits);
        }
        batch.commit()?;
        Ok(written)
    }

    fn count(&mut self) -> Result<u64, Failure> {
        Ok(self.cells.len()? as u64)
    }
}
