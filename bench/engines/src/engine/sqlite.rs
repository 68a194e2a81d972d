use std::path::Path;

use rusqlite::{Connection, OptionalExtension, TransactionBehavior, params};

use super::{Engine, Failure, Prepared};

pub struct Sqlite(Connection);

impl Sqlite {
    pub fn open(directory: &Path) -> Result<Self, Failure> {
        let connection = Connection::open(directory.join("sqlite"))?;
        connection.pragma_update(None, "journal_mode", "wal")?;
        connection.pragma_update(None, "synchronous", "full")?;
        connection.pragma_update(None, "cache_size", -(64 << 10))?;
        connection.execute_batch(
            "create table if not exists cells (
                 key blob primary key, due integer not null, value blob not null
             ) without rowid;
             create index if not exists cells_due on cells (due);",
        )?;
        Ok(Self(connection))
    }
}

impl Engine for Sqlite {
    fn apply(&mut self, batch: &[Prepared]) -> Result<Vec<bool>, Failure> {
        let transaction = self.0.transaction_with_behavior(TransactionBehavior::Immediate)?;
        let mut written = Vec::with_capacity(batch.len());
        {
            let mut find = transaction.prepare_cached("select value from cells where key = ?1")?;
            let mut insert = transaction.prepare_cached("insert into cells values (?1, ?2, ?3)")?;
            // The index stays as it is: it may be early, as in the store.
            let mut update =
                transaction.prepare_cached("update cells set value = ?2 where key = ?1")?;
            for swap in batch {
                let found: Option<Vec<u8>> =
                    find.query_row(params![swap.key], |row| row.get(0)).optional()?;
                let fits = swap.fits(found.as_deref());
                if fits && found.is_none() {
                    insert.execute(params![swap.key, swap.due as i64, swap.value])?;
                } else if fits {
                    update.execute(params![swap.key, swap.value])?;
                }
                written.push(fits);
            }
        }
        transaction.commit()?;
        Ok(written)
    }

    fn count(&mut self) -> Result<u64, Failure> {
        let count = self.0.query_row("select count(*) from cells", [], |row| row.get::<_, i64>(0));
        Ok(count? as u64)
    }
}
