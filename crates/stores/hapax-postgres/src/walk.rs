//! The walk over undecided records, or over all.
//!
//! It reads the blocks of the table, not the records in the order of their keys, each of which is in
//! another block. The last blocks are first: while the table grows they have the newest records. In a
//! walk over undecided records the server leaves out all others, which are nearly all.
//!
//! A record that is written during the walk may move to a block that was read already. A rewrite of
//! the whole table, as by `VACUUM FULL`, moves all records, and ends the walk with an error.

use std::error::Error;
use std::num::NonZeroU32;
use std::sync::Arc;
use std::time::Duration;

use hapax_core::store::{Cursor, ScanStep, Visitor};
use hapax_core::{Sealer, StoreError, Timestamp};
use tokio_postgres::Row;

use crate::error::PostgresStoreError;
use crate::maintenance::{Job, Maintenance, MaintenanceError};
use crate::record::ResultRow;
use crate::sql::PAGE_BYTES;

/// Records with an outcome of some hundred bytes in a block, half of which is left empty for
/// updates.
const RECORDS_OF_A_BLOCK: u32 = 4;

/// Records that a walk visits.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Visited {
    Undecided,
    /// All of which the last execution began at most so long ago; without a time all.
    All(Option<Duration>),
}

/// Reads as many blocks as `limit` records may take. A position is the file of the table and the
/// number of blocks that are left.
pub(crate) async fn step(
    upkeep: &Arc<Maintenance>,
    sealer: &Sealer,
    from: Cursor,
    limit: NonZeroU32,
    visited: Visited,
    visit: Visitor<'_>,
) -> Result<ScanStep, StoreError> {
    let (file, left) = match from.as_bytes().as_chunks().0 {
        [file, left] => (i64::from_be_bytes(*file), i64::from_be_bytes(*left)),
        _ => {
            // Of no blocks: which file it is, and how many blocks it has.
            let Blocks { file, blocks, .. } = read(upkeep, 0, 0, visited).await?;
            (file, blocks)
        }
    };
    let count = i64::from(limit.get().div_ceil(RECORDS_OF_A_BLOCK));
    let found = read(upkeep, left, count, visited).await?;
    if file != found.file {
        return Err(StoreError::unavailable(PostgresStoreError::Rewritten));
    }
    let (mut keys, mut bytes) = (Vec::new(), 0);
    for (row, length) in found.rows {
        if matches!(&row.found, Ok(Some(found)) if found.sealed.is_some()) {
            open(row, sealer, visit)?;
            continue;
        }
        let Some(key) = row.key else { continue };
        bytes += length;
        keys.push(key.as_bytes().to_vec());
        if bytes >= PAGE_BYTES as usize {
            load(upkeep, sealer, std::mem::take(&mut keys), visit).await?;
            bytes = 0;
        }
    }
    if !keys.is_empty() {
        load(upkeep, sealer, keys, visit).await?;
    }
    let left = left.saturating_sub(count);
    let place = || Cursor::new([file.to_be_bytes(), left.to_be_bytes()].concat());
    Ok(ScanStep { now: found.now, next: (left > 0).then(place) })
}

/// Loads large records on the maintenance connection, so that requests do not wait for it, and visits
/// them.
async fn load(
    upkeep: &Arc<Maintenance>,
    sealer: &Sealer,
    keys: Vec<Vec<u8>>,
    visit: Visitor<'_>,
) -> Result<(), StoreError> {
    let rows = upkeep.run(Job::Load { keys }).await.map_err(MaintenanceError::into_read_error)?;
    for row in &rows {
        open(ResultRow::read(row).map_err(StoreError::corrupt)?, sealer, visit)?;
    }
    Ok(())
}

fn open(row: ResultRow, sealer: &Sealer, visit: Visitor<'_>) -> Result<(), StoreError> {
    let ResultRow { now, key, found, .. } = row;
    let key = key.ok_or_else(unreadable)?;
    let stored = match found {
        Ok(Some(found)) => found.open(&key, sealer),
        // Removed since it was found.
        Ok(None) => return Ok(()),
        Err(damaged) => Err(StoreError::corrupt(damaged)),
    };
    visit(&key, &stored, now);
    Ok(())
}

/// The records of some blocks of the table.
struct Blocks {
    now: Timestamp,
    /// The file of the table.
    file: i64,
    /// Number of blocks of the whole table.
    blocks: i64,
    /// The records, each with its length in bytes. Large ones are without the record itself.
    rows: Vec<(ResultRow, usize)>,
}

/// Reads the last `count` of the first `end` blocks.
async fn read(
    upkeep: &Arc<Maintenance>,
    end: i64,
    count: i64,
    visited: Visited,
) -> Result<Blocks, StoreError> {
    let job = Job::Blocks { first: end.saturating_sub(count).max(0), end, visited };
    let rows = upkeep.run(job).await.map_err(MaintenanceError::into_read_error)?;
    Blocks::read(&rows).map_err(|_| unreadable())
}

impl Blocks {
    fn read(rows: &[Row]) -> Result<Self, Box<dyn Error + Send + Sync>> {
        let first = rows.first().ok_or("no row")?;
        let (file, blocks) = (first.try_get(9)?, first.try_get(10)?);
        let now = ResultRow::read(first)?.now;
        let mut found = Vec::new();
        for row in rows {
            if let Some(length) = row.try_get::<_, Option<i32>>(11)? {
                found.push((ResultRow::read(row)?, usize::try_from(length)?));
            }
        }
        Ok(Self { now, file, blocks, rows: found })
    }
}

fn unreadable() -> StoreError {
    StoreError::unavailable(PostgresStoreError::UnexpectedAnswer)
}
